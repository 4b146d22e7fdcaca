"""The meaning of names on each rank: values of expressions, groups behind names, tensor sizes.

Key idea: an expression is evaluated once for all ranks, over vectors with one entry per rank.

The table describes the whole world and does not change while entries are lowered, except for the
groups that new_group steps make. Names that change along the program (loop indices, handles) belong
to `distsim.program.rank_class`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from itertools import pairwise
from typing import NamedTuple, NoReturn, Protocol, cast

import numpy as np

from distsim.common.errors import ScenarioErrors
from distsim.common.expressions import Expression, ExpressionError
from distsim.common.units import show_bytes
from distsim.operations.core.field_types import PerRank
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.resolved_call import DTYPE_BYTES
from distsim.program.code import (
    BoolVector,
    FieldValue,
    IntVector,
    NameBindings,
    RankValues,
    Vec,
    at_row,
    collapse_uniform,
)
from distsim.program.program_tables import ProgramTables
from distsim.program.step_traits import StepTraits, contains_init, traits_of
from distsim.scenario.format.models.entries import ScenarioStep
from distsim.scenario.model import Scenario

#: Limit for one tensor; sums of such sizes still fit 64 bits.
MAX_TENSOR_BYTES = 2**60

#: ``count`` of `SymbolTable.made_group` for a group that only its members create.
LOCAL_CREATION = -1


class HasPath(Protocol):
    """Anything that knows its position in the file's data."""

    @property
    def path(self) -> tuple[str | int, ...]:
        """The position in the file's data."""


class HasSelector(Protocol):
    """Anything with a selector: an entry, a fault."""

    @property
    def ranks(self) -> tuple[int, ...] | Expression | None:
        """The selector of the ranks."""


class _GroupSettings(NamedTuple):
    """What a declaration sets for all groups that it creates."""

    backend: str | None = None
    timeout_ns: int | None = None


class SymbolTable:
    """The names of a scenario's world. Vectors are over all ranks of the world."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.file = scenario.file
        self.world_size = scenario.world.size
        self.ranks = np.arange(self.world_size, dtype=np.int64)
        self.has_init = contains_init(scenario.program)

        # Caches. Those that go by id() hold the object too, or one that the scenario keeps alive.
        self.used: dict[int, frozenset[str]] = {}  # id of an entry -> names in its expressions
        self._traits: dict[int, StepTraits] = {}  # by id of a step
        #: By operation and place, for steps without a selector.
        self._shared_traits: dict[tuple[int, int, int], StepTraits] = {}
        self._key_numbers: dict[Hashable, int] = {}
        #: By id of an expression and its loop indices.
        self._indexed: dict[tuple[int, ...], tuple[Expression, RankValues]] = {}

        self.tables = ProgramTables(self.world_size, scenario.backend)
        self.world: dict[str, RankValues] = self._ranks_and_axes()
        for name, expression in scenario.vars.items():
            self.world[name] = self.evaluate(expression, self.world, ("vars", name))
        self._groups: dict[str | tuple[str, ...], Vec] = {"world": 0}
        self._made_groups: dict[tuple[int, tuple[int, ...], str], int] = {}
        self._declare_groups()
        self.copies: dict[str, Vec] = {}
        self.shapes: dict[str, tuple[Vec, ...] | None] = {}
        self._declare_tensors()

    def _ranks_and_axes(self) -> dict[str, RankValues]:
        local_size = self.scenario.world.ranks_per_node
        found: dict[str, RankValues] = {
            "rank": self.ranks,
            "world_size": self.world_size,
            "node": self.ranks // local_size,
            "local_rank": self.ranks % local_size,
        }
        # As init_device_mesh numbers ranks: the last axis varies fastest.
        stride = self.world_size
        for axis, size in self.scenario.mesh.items():
            stride //= size
            found[axis] = self.ranks // stride % size
            found[f"{axis}_size"] = size
        return found

    # --- tensors ---
    def _declare_tensors(self) -> None:
        for name, tensor in self.scenario.tensors.items():
            copies = self.evaluate(tensor.copies, self.world, ("tensors", name, "copies"))
            self.copies[name] = cast("Vec", copies)
            if tensor.shape is None or isinstance(tensor.shape, str):  # ``auto``
                self.shapes[name] = None
            else:
                place = ("tensors", name, "shape")
                sizes = [self.evaluate(size, self.world, place) for size in tensor.shape]
                self.shapes[name] = tuple(cast("list[Vec]", sizes))
            self._check_sizes(name)
            self._check_value(name)

    def _check_sizes(self, name: str) -> None:
        shape = self.shapes[name] or ()
        for size in (*shape, self.copies[name]):
            if not _is_integral(size) or np.min(size) < 0:
                self.problem(
                    ("tensors", name),
                    f"tensor {name}: a size must be an integer of at least 0, "
                    f"found {_first_value(size)}",
                )
        dtype = self.scenario.tensors[name].dtype
        self.check_bytes(("tensors", name), f"tensor {name}", shape, dtype)

    def check_bytes(
        self, place: HasPath | tuple[str, ...], what: str, shape: tuple[Vec, ...], dtype: str
    ) -> None:
        """Refuse a tensor whose size in bytes does not fit 64 bits."""
        # In floating point, because the product itself must not overflow.
        nbytes = np.asarray(float(DTYPE_BYTES[dtype]))
        for size in shape:
            nbytes = nbytes * size
        if np.max(nbytes, initial=0.0) > MAX_TENSOR_BYTES:
            most = show_bytes(MAX_TENSOR_BYTES)
            self.problem(
                place,
                (
                    f"{what} has {float(np.max(nbytes)):.3g} bytes; the limit is {most} (2**60 "
                    "bytes): make it smaller"
                ),
            )

    def _check_value(self, name: str) -> None:
        """A list of numbers must have one for each element of the tensor."""
        tensor, shape = self.scenario.tensors[name], self.shapes[name]
        if tensor.dtype != "bool" and contains_bool(tensor.value):
            self.problem(
                ("tensors", name, "value"),
                f"tensor {name} is {tensor.dtype}; expected numbers as its value, "
                "found true or false",
            )
        if not isinstance(tensor.value, tuple) or shape is None:
            return
        elements = np.ones(self.world_size, dtype=np.int64)
        for size in shape:
            elements = elements * size
        listed = _element_count(tensor.value)
        wrong_ranks = np.flatnonzero(elements != listed)
        if not len(wrong_ranks):
            return
        rank = wrong_ranks[0]
        where = "" if len(wrong_ranks) == self.world_size else f" on rank {rank}"
        self.problem(
            ("tensors", name, "value"),
            f"tensor {name} has {elements[rank]} elements{where}, but its value has {listed}",
        )

    # --- groups ---
    def _declare_groups(self) -> None:
        """The mesh's axes are groups, then the declared ones, in file order (design §3, rule 4)."""
        for axis in self.scenario.mesh:
            self.group(axis)
        for name, group in self.scenario.groups.items():
            settings = _GroupSettings(group.backend, group.timeout_ns)
            if group.ranks is not None:
                self._groups[name] = self.tables.group(name, group.ranks, *settings)
            elif group.axes is not None:
                self._groups[name] = self._axis_groups(tuple(group.axes), name, settings)
            elif group.by is not None:
                value = self.evaluate(group.by, self.world, ("groups", name))
                by_rank = np.broadcast_to(np.asarray(value), self.world_size)
                name_of = partial("{0}[{1}]".format, name)
                self._groups[name] = self._partition(by_rank, name_of, settings)

    def group(self, name: str | tuple[str, ...] | None) -> Vec:
        """The group id of each rank of the world for a group's name, an axis or several axes."""
        if name is None:
            return 0
        if name not in self._groups:
            axes = (name,) if isinstance(name, str) else name
            self._groups[name] = self._axis_groups(axes, "-".join(axes), _GroupSettings())
        return self._groups[name]

    def knows(self, name: str) -> bool:
        """Whether an axis or a group of this name exists from the start.

        Any other group is made by a new_group step.
        """
        return name == "world" or name in self.scenario.mesh or name in self.scenario.groups

    def made_group(
        self, count: int, name: str, ranks: tuple[int, ...], step: Operation, timeout_ns: int | None
    ) -> int:
        """The group of a rank's ``count``-th new_group call.

        Ranks that pass the same members at the same count share the group. A call that only the
        members make has no count (`LOCAL_CREATION`): such groups are distinguished by name as well.
        """
        key = (count, ranks, name if count == LOCAL_CREATION else "")
        if key not in self._made_groups:
            backend = getattr(step, "backend", None)
            self._made_groups[key] = self.tables.group(name, ranks, backend, timeout_ns)
        return self._made_groups[key]

    def _axis_groups(self, axes: tuple[str, ...], name: str, settings: _GroupSettings) -> Vec:
        """Groups of ranks that differ only in these axes.

        They are named by their coordinates on the other axes: ``stage[replica=1]``.
        """
        other_axes = [axis for axis in self.scenario.mesh if axis not in axes]
        key: IntVector = np.zeros(self.world_size, dtype=np.int64)
        for axis in other_axes:
            key = key * self.scenario.mesh[axis] + cast("IntVector", self.world[axis])

        def name_of(_: int, first_rank: int) -> str:
            coordinates = [f"{axis}={at_row(self.world[axis], first_rank)}" for axis in other_axes]
            return f"{name}[{','.join(coordinates)}]" if coordinates else name

        return self._partition(key, name_of, settings)

    def _partition(
        self, key: IntVector, name_of: Callable[[int, int], str], settings: _GroupSettings
    ) -> Vec:
        """Make one group for each value of ``key``; ranks with equal values share a group.

        ``name_of``: a group's name, from its value of the key and its first rank.
        """
        values, part_of_rank = np.unique(key, return_inverse=True)
        part_of_rank = np.asarray(part_of_rank).reshape(-1)  # its shape depends on numpy's version
        order = np.argsort(part_of_rank, kind="stable")
        starts = (np.flatnonzero(np.diff(part_of_rank[order])) + 1).tolist()
        parts = [order[start:end] for start, end in pairwise([0, *starts, len(order)])]
        ids = [
            self.tables.group(name_of(value, int(part[0])), part.tolist(), *settings)
            for value, part in zip(values.tolist(), parts, strict=True)
        ]
        group_of_rank: IntVector = np.array(ids, dtype=np.int64)[part_of_rank]
        self.tables.partition(group_of_rank)
        return ids[0] if len(ids) == 1 else group_of_rank

    # --- steps ---
    def traits(self, step: ScenarioStep) -> StepTraits:
        """The traits of a step, with a number as their key."""
        traits = self._traits.get(id(step))
        if traits is None:
            traits = self._traits[id(step)] = self._shared_or_new_traits(step)
        return traits

    def _shared_or_new_traits(self, step: ScenarioStep) -> StepTraits:
        """Steps of one operation and place share their traits (loops of strategies repeat them)."""
        if step.ranks is not None:
            return self._with_key_number(traits_of(step))
        place = (id(step.op), step.line, step.column)
        traits = self._shared_traits.get(place)
        if traits is None:
            found = traits_of(step)
            traits = self._with_key_number(found)
            if found.key != id(step):  # else the step is equal only to itself
                self._shared_traits[place] = traits
        return traits

    def _with_key_number(self, traits: StepTraits) -> StepTraits:
        """Numbers are faster to hash, again and again, than the values of a step."""
        number = self._key_numbers.setdefault(traits.key, len(self._key_numbers))
        return traits._replace(key=number)

    # --- expressions ---
    def indexed(
        self, value: Expression, indices: Mapping[str, int], place: HasPath | tuple[str, ...]
    ) -> RankValues:
        """The value of an expression that uses only loop indices: one number for all ranks.

        Repeated requests are answered from a cache.
        """
        key = (id(value), *[indices[name] for name in value.names])
        if key not in self._indexed:
            self._indexed[key] = (value, self.evaluate(value, indices, place))
        return self._indexed[key][1]

    def evaluate(
        self,
        value: FieldValue,
        bindings: NameBindings,
        place: HasPath | tuple[str, ...],
        ranks: IntVector | None = None,
    ) -> RankValues:
        """An Expression, a PerRank of them or a plain number, for ``ranks`` (None: all).

        The vectors of ``bindings`` are over the same ranks.
        """
        if isinstance(value, PerRank):
            return self._per_rank(value, bindings, place, self.ranks if ranks is None else ranks)
        if not isinstance(value, Expression):
            return value
        if value.constant is not None:
            return value.constant
        try:
            return cast("RankValues", collapse_uniform(value.evaluate(bindings)))
        except ExpressionError as error:
            self.problem(place, f"{value.text}: {error}")

    def _per_rank(
        self,
        value: PerRank[object],
        bindings: NameBindings,
        place: HasPath | tuple[str, ...],
        ranks: IntVector,
    ) -> RankValues:
        entries = dict(value.entries)
        found = []
        for row, rank in enumerate(ranks.tolist()):
            item = entries.get(rank, value.default)
            if item is None:
                self.problem(
                    place, f"rank {rank} has no entry in a per-rank mapping, and there is no `else`"
                )
            if isinstance(item, (Expression, PerRank)):
                own_bindings = bindings_at(bindings, row)
                item = self.evaluate(item, own_bindings, place, ranks[row : row + 1])
            found.append(item)
        # np.array would turn true into 1 among numbers, and hide a mistake.
        if len({isinstance(item, bool) for item in found}) > 1:
            self.problem(
                place,
                (
                    "a per-rank mapping contains both numbers and true or false; use one kind for "
                    "all ranks"
                ),
            )
        return cast("RankValues", collapse_uniform(np.array(found)))

    # --- selectors ---
    def selected(
        self,
        entry: HasSelector,
        ranks: IntVector,
        indices: Mapping[str, int],
        lenient: bool = False,
    ) -> BoolVector:
        """Which of ``ranks`` an entry's selector admits, as a mask.

        ``lenient``: a selector that cannot be evaluated admits all of them.
        """
        selector = entry.ranks
        if selector is None:
            return np.ones(len(ranks), dtype=np.bool_)
        if not isinstance(selector, Expression):
            return np.isin(ranks, selector)
        used = {name: self.world[name] for name in selector.names if name in self.world}
        bindings = bindings_for_rows(used, ranks)
        bindings.update(indices)
        try:
            mask = selector.evaluate(bindings)
        except ExpressionError as error:
            if lenient:
                return np.ones(len(ranks), dtype=np.bool_)
            self.problem(entry, f"ranks: {selector.text}: {error}")
        is_bool = isinstance(mask, (bool, np.bool_)) or getattr(mask, "dtype", None) == np.bool_
        if not is_bool:
            self.problem(
                entry,
                (
                    f"ranks: {selector.text} is {_first_value(mask)}, not true or false; write "
                    "ranks as an integer or a list"
                ),
            )
        return np.broadcast_to(np.asarray(mask, dtype=np.bool_), len(ranks))

    def problem(self, place: HasPath | HasSelector | tuple[str, ...], message: str) -> NoReturn:
        """Raise a file error at an entry, or at the value with the path ``place``."""
        path = place if isinstance(place, tuple) else getattr(place, "path", ("faults",))
        raise ScenarioErrors((self.scenario.problem(path, message),))


def bindings_at(bindings: NameBindings, row: int) -> dict[str, RankValues]:
    """The values of names on one row of their vectors."""
    return {name: at_row(value, row) for name, value in bindings.items()}


def bindings_for_rows(
    bindings: NameBindings, rows: IntVector | BoolVector
) -> dict[str, RankValues]:
    """The values of names on some rows (indices or a mask) of their vectors."""
    return {
        name: cast("RankValues", value[rows]) if isinstance(value, np.ndarray) else value
        for name, value in bindings.items()
    }


def _element_count(value: object) -> int:
    """The number of numbers in a nested list."""
    return sum(_element_count(item) for item in value) if isinstance(value, tuple) else 1


def contains_bool(value: object) -> bool:
    """Whether one of the numbers is written as true or false."""
    if isinstance(value, tuple):
        return any(map(contains_bool, value))
    if isinstance(value, PerRank):
        items = [item for _, item in value.entries]
        return any(map(contains_bool, [*items, value.default]))
    return isinstance(value, Expression) and isinstance(value.constant, bool)


def _is_integral(value: RankValues) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool)
    return getattr(value, "dtype", None) == np.int64


def _first_value(value: RankValues) -> object:
    return value.flat[0].item() if isinstance(value, np.ndarray) else value
