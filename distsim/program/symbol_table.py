"""What names mean on each rank: the values of expressions, the groups behind handles, the sizes of
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from itertools import pairwise
from typing import NoReturn, Protocol, cast

import numpy as np

from distsim.common.errors import ScenarioErrors
from distsim.common.expressions import Expression, ExpressionError
from distsim.common.units import show_bytes
from distsim.operations.core.field_types import PerRank
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.resolved_call import DTYPE_BYTES
from distsim.program.assemble import ProgramTables
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
from distsim.program.memo_keys import StepTraits, contains_init, traits_of
from distsim.scenario.format.models.entries import ScenarioStep
from distsim.scenario.model import Scenario

#: Of one tensor; sums of them still fit 64 bits.
MAX_TENSOR_BYTES = 2**60


class HasPath(Protocol):
    """Anything that knows where it stands in the file's data."""

    @property
    def path(self) -> tuple[str | int, ...]: ...


class HasSelector(Protocol):
    """Anything with a selector: an entry, a fault."""

    @property
    def ranks(self) -> tuple[int, ...] | Expression | None: ...


class SymbolTable:
    """The world's names. Vectors are over all ranks of the world."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.file = scenario, scenario.file
        self.world_size = scenario.world.size
        self.ranks = np.arange(self.world_size, dtype=np.int64)
        self.used: dict[int, frozenset[str]] = {}  # id of an entry -> names in its expressions
        self._traits: dict[int, StepTraits] = {}  # id of a step -> what it is
        self._like: dict[
            tuple[int, int, int] | None, StepTraits
        ] = {}  # by operation and place, of steps that select no ranks
        self._keys: dict[Hashable, int] = {}
        self.has_init = contains_init(scenario.program)
        self._indexed: dict[
            tuple[int, ...], tuple[Expression, RankValues]
        ] = {}  # by id and indices
        self.shelf = ProgramTables(self.world_size, scenario.backend)
        self.world: dict[str, RankValues] = self._ranks_and_axes()
        for name, expression in scenario.vars.items():
            self.world[name] = self.evaluate(expression, self.world, ("vars", name))
        self._handles: dict[str | tuple[str, ...], Vec] = {"world": 0}
        self._made: dict[tuple[int, tuple[int, ...], str], int] = {}
        self._declare_groups()
        self.copies: dict[str, Vec] = {}
        self.shapes: dict[str, tuple[Vec, ...] | None] = {}
        for name, tensor in scenario.tensors.items():
            self.copies[name] = cast(
                "Vec", self.evaluate(tensor.copies, self.world, ("tensors", name, "copies"))
            )
            auto = tensor.shape is None or isinstance(tensor.shape, str)
            self.shapes[name] = (
                None
                if auto
                else tuple(
                    cast("Vec", self.evaluate(n, self.world, ("tensors", name, "shape")))
                    for n in tensor.shape
                )
            )
            self._check_sizes(name)
            self._check_value(name)

    def _ranks_and_axes(self) -> dict[str, RankValues]:
        local = self.scenario.world.ranks_per_node
        found: dict[str, RankValues] = {
            "rank": self.ranks,
            "world_size": self.world_size,
            "node": self.ranks // local,
            "local_rank": self.ranks % local,
        }
        below = self.world_size
        for axis, size in self.scenario.mesh.items():
            below //= size
            found[axis] = self.ranks // below % size
            found[f"{axis}_size"] = size
        return found

    def _check_sizes(self, name: str) -> None:
        for size in (*(self.shapes[name] or ()), self.copies[name]):
            if not _is_integral(size) or np.min(size) < 0:
                self.problem(
                    ("tensors", name),
                    f"tensor {name}: a size must be an integer of at least 0, found {_first_value(size)}",
                )

        self.check_bytes(
            ("tensors", name),
            f"tensor {name}",
            self.shapes[name] or (),
            self.scenario.tensors[name].dtype,
        )

    def check_bytes(
        self, place: HasPath | tuple[str, ...], what: str, shape: tuple[Vec, ...], dtype: str
    ) -> None:
        """Sizes are counted in 64 bits; nothing near that is meant."""
        nbytes = np.asarray(float(DTYPE_BYTES[dtype]))
        for size in shape:
            nbytes = nbytes * size
        if np.max(nbytes, initial=0.0) > MAX_TENSOR_BYTES:
            most = show_bytes(MAX_TENSOR_BYTES)
            self.problem(
                place,
                f"{what} has {float(np.max(nbytes)):.3g} bytes; at most {most} (2**60 bytes) are simulated: make it smaller",
            )

    def _check_value(self, name: str) -> None:
        """A list of numbers gives each element of the tensor one."""
        value, shape = self.scenario.tensors[name].value, self.shapes[name]
        dtype = self.scenario.tensors[name].dtype
        if dtype != "bool" and contains_bool(value):
            self.problem(
                ("tensors", name, "value"),
                f"tensor {name} is {dtype}; expected numbers as its value, found true or false",
            )
        if not isinstance(value, tuple) or shape is None:
            return
        elements = np.ones(self.world_size, dtype=np.int64)
        for size in shape:
            elements = elements * size
        wrong = np.flatnonzero(elements != _element_count(value))
        if len(wrong):
            where = "" if len(wrong) == self.world_size else f" on rank {wrong[0]}"
            message = f"tensor {name} has {elements[wrong[0]]} elements{where}, but its value lists {_element_count(value)}"
            self.problem(("tensors", name, "value"), message)

    # --- groups ---
    def _declare_groups(self) -> None:
        """The mesh's axes are groups, then the declared ones, in file order (design §3, rule 4)."""
        for axis in self.scenario.mesh:
            self.group(axis)
        for name, group in self.scenario.groups.items():
            more = (group.backend, group.timeout_ns)
            if group.ranks is not None:
                self._check_group(name, group.ranks)
                self._handles[name] = self.shelf.group(name, group.ranks, *more)
            elif group.axes is not None:
                self._handles[name] = self._axis_groups(tuple(group.axes), name, *more)
            elif group.by is not None:
                value = np.broadcast_to(
                    np.asarray(self.evaluate(group.by, self.world, ("groups", name))),
                    self.world_size,
                )
                self._handles[name] = self._partition(
                    value, partial("{0}[{1}]".format, name), *more
                )

    def _check_group(self, name: str, ranks: tuple[int, ...]) -> None:
        bad = [r for r in ranks if not 0 <= r < self.world_size]
        if bad:
            self.problem(
                ("groups", name),
                f"group {name} names rank {bad[0]}, but the world has ranks 0 to {self.world_size - 1}",
            )
        if len(set(ranks)) != len(ranks):
            self.problem(("groups", name), f"group {name} names a rank twice: {list(ranks)}")

    def group(self, handle: str | tuple[str, ...] | None) -> Vec:
        """The group ids behind a handle, over the world's ranks."""
        if handle is None:
            return 0
        if handle not in self._handles:
            axes = (handle,) if isinstance(handle, str) else handle
            self._handles[handle] = self._axis_groups(axes, "-".join(axes), None, None)
        return self._handles[handle]

    def knows(self, handle: str) -> bool:
        """Is this an axis or a group that exists from the start? (Else a new_group step makes
        it.)
        """
        return handle == "world" or handle in self.scenario.mesh or handle in self.scenario.groups

    def made_group(
        self, count: int, name: str, ranks: tuple[int, ...], step: Operation, timeout_ns: int | None
    ) -> int:
        """The group of a rank's ``count``-th new_group call; ranks that name the same members at
        the same count share it. Calls of the members alone have no count (-1): their groups go by
        name as well."""
        key = (count, ranks, name if count < 0 else "")
        if key not in self._made:
            self._made[key] = self.shelf.group(
                name, ranks, getattr(step, "backend", None), timeout_ns
            )
        return self._made[key]

    def _axis_groups(
        self, axes: tuple[str, ...], name: str, backend: str | None, timeout_ns: int | None
    ) -> Vec:
        """Ranks that differ only in the axes; named by the coordinates of the others:
        ``stage[replica=1]``.
        """
        others = [axis for axis in self.scenario.mesh if axis not in axes]
        key: IntVector = np.zeros(self.world_size, dtype=np.int64)
        for axis in others:
            key = key * self.scenario.mesh[axis] + cast("IntVector", self.world[axis])

        def title(_: int, first: int) -> str:
            where = ",".join([f"{axis}={at_row(self.world[axis], first)}" for axis in others])
            return f"{name}[{where}]" if where else name

        return self._partition(key, title, backend, timeout_ns)

    def _partition(
        self,
        key: IntVector,
        title: Callable[[int, int], str],
        backend: str | None,
        timeout_ns: int | None,
    ) -> Vec:
        """``title``: a part's name, by its value of the key and its first rank."""
        values, which = np.unique(key, return_inverse=True)
        which = np.asarray(which).reshape(-1)
        order = np.argsort(which, kind="stable")
        bounds = [0, *(np.flatnonzero(np.diff(which[order])) + 1).tolist(), len(order)]
        parts = [order[start:end] for start, end in pairwise(bounds)]
        ids = [
            self.shelf.group(title(v, int(part[0])), part.tolist(), backend, timeout_ns)
            for v, part in zip(values.tolist(), parts, strict=True)
        ]
        every: IntVector = np.array(ids, dtype=np.int64)[which]
        self.shelf.partition(every)
        return ids[0] if len(ids) == 1 else every

    def traits(self, step: ScenarioStep) -> StepTraits:
        """What a step is wherever it stands; its key is a number."""
        found = self._traits.get(id(step))
        if found is None:
            alike = None if step.ranks is not None else (id(step.op), step.line, step.column)
            found = self._like.get(alike)
            if found is None:
                found = traits_of(step)
                own = found.key == id(step)
                found = found._replace(key=self._keys.setdefault(found.key, len(self._keys)))
                if alike is not None and not own:
                    self._like[alike] = found
            self._traits[id(step)] = found
        return found

    # --- expressions ---
    def indexed(
        self, value: Expression, indices: Mapping[str, int], place: HasPath | tuple[str, ...]
    ) -> RankValues:
        """The value of an expression of loop indices alone: one number for all ranks, looked up
        when it comes again.
        """
        key = (id(value), *[indices[name] for name in value.names])
        if key not in self._indexed:
            self._indexed[key] = (value, self.evaluate(value, indices, place))
        return self._indexed[key][1]

    def evaluate(
        self,
        value: FieldValue,
        env: NameBindings,
        place: HasPath | tuple[str, ...],
        ranks: IntVector | None = None,
    ) -> RankValues:
        """An Expression, a PerRank of them or a plain number, for the ranks that the vectors of
        ``env`` are over.
        """
        if isinstance(value, PerRank):
            return self._per_rank(value, env, place, self.ranks if ranks is None else ranks)
        if not isinstance(value, Expression):
            return value
        if value.constant is not None:
            return value.constant
        try:
            return cast("RankValues", collapse_uniform(value.evaluate(env)))
        except ExpressionError as error:
            self.problem(place, f"{value.text}: {error}")

    def _per_rank(
        self,
        value: PerRank[object],
        env: NameBindings,
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
                single = {
                    k: v[row].item() if isinstance(v, np.ndarray) else v for k, v in env.items()
                }
                item = self.evaluate(item, single, place, ranks[row : row + 1])
            found.append(item)
        if len({isinstance(item, bool) for item in found}) > 1:
            self.problem(
                place,
                "true or false beside numbers in a per-rank mapping; expected one kind for all ranks",
            )
        return cast("RankValues", collapse_uniform(np.array(found)))

    def selected(
        self, entry: HasSelector, here: IntVector, indices: Mapping[str, int], lenient: bool = False
    ) -> BoolVector:
        """Which of some ranks an entry's selector admits."""
        selector = entry.ranks
        if not isinstance(selector, Expression):
            return (
                np.ones(len(here), dtype=np.bool_) if selector is None else np.isin(here, selector)
            )
        used = {name: self.world[name] for name in selector.names if name in self.world}
        env = {name: v[here] if isinstance(v, np.ndarray) else v for name, v in used.items()}
        env.update(indices)
        try:
            mask = selector.evaluate(env)
        except ExpressionError as error:
            if lenient:
                return np.ones(len(here), dtype=np.bool_)
            self.problem(entry, f"ranks: {selector.text}: {error}")
        if not (isinstance(mask, (bool, np.bool_)) or getattr(mask, "dtype", None) == np.bool_):
            self.problem(
                entry,
                f"ranks: {selector.text} is {_first_value(mask)}, not true or false; a rank is named by an integer or a list",
            )
        return np.broadcast_to(np.asarray(mask, dtype=np.bool_), len(here))

    def problem(self, place: HasPath | HasSelector | tuple[str, ...], message: str) -> NoReturn:
        """Raise a file error at an entry, or at the value that a path names."""
        raise ScenarioErrors(
            (
                self.scenario.problem(
                    place if isinstance(place, tuple) else getattr(place, "path", ("faults",)),
                    message,
                ),
            )
        )


def _element_count(value: object) -> int:
    """The numbers in a nested list."""
    return sum(_element_count(item) for item in value) if isinstance(value, tuple) else 1


def contains_bool(value: object) -> bool:
    """Is one of the numbers written as true or false?"""
    if isinstance(value, tuple):
        return any(map(contains_bool, value))
    if isinstance(value, PerRank):
        return any(contains_bool(item) for _, item in value.entries) or contains_bool(value.default)
    return isinstance(value, Expression) and isinstance(value.constant, bool)


def _is_integral(value: RankValues) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or getattr(
        value, "dtype", None
    ) == np.int64


def _first_value(value: RankValues) -> object:
    return value.flat[0].item() if isinstance(value, np.ndarray) else value
