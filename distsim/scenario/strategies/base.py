"""What a training strategy is: fields of the file, and the plain entries that they expand into.

A strategy knows the mesh, not a rank: what differs by rank it says with selectors and expressions,
as a person would in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict

from distsim.common.field_parsing import describe_fields
from distsim.common.message_text import did_you_mean, name_list
from distsim.scenario.strategies.field_help import FIELD_HELP

#: Plain data of an entry, or of a declaration, as a YAML file has it.
Entry = dict[str, object]
#: What a compute step costs: its field `time`, or `flops` and `bytes`.
ComputeCost = Mapping[str, str | float]
#: The same, or the entries that stand in its place.
CostOrEntries = ComputeCost | Sequence[Entry]
#: A group's name, an axis of the mesh, or several axes.
GroupRef = str | tuple[str, ...]
#: Which ranks an entry is for: a condition, or their numbers; None: all.
RankSelector = str | list[int] | None
#: Why a layout can't be: the path from the strategy's fields to the culprit, and a sentence.
Refusal = tuple[tuple[str | int, ...], str]


class ExpansionContext(NamedTuple):
    """What an expansion may know of the scenario: sizes only. ``taken``: names that it must not use
    for its own tensors and handles.
    """

    world_size: int
    ranks_per_node: int
    mesh: Mapping[str, int]
    backend: str
    iterations: int
    tensors: Mapping[str, object]
    taken: frozenset[str]
    #: Named groups of the file, as it has them.
    groups: Mapping[str, object] = {}
    #: Where the scenario's file lies: files that a strategy names are looked for beside it.
    folder: str = ""
    #: What fields validate with: names that are the same on every rank, as numbers and as
    #: quantities (`amounts`).
    known: Mapping[str, object] = {}

    def size_of(self, group: GroupRef | None) -> int:
        """Ranks in a group: None and `world` are all, else an axis, several axes, or a named group
        of the file.
        """
        if group is None or group == "world":
            return self.world_size
        if not isinstance(group, str):
            return prod(self.mesh[axis] for axis in group)
        if group in self.mesh:
            return self.mesh[group]
        axes, ranks = self._named(group)
        return prod(self.mesh.get(axis, 1) for axis in axes) if axes else len(ranks)

    def _named(self, group: str) -> tuple[Sequence[str], Sequence[int]]:
        """The axes, or the ranks, of a named group of the file; both empty where it has neither."""
        named = self.groups.get(group)
        axes, ranks = (
            (named.get("axes"), named.get("ranks")) if isinstance(named, Mapping) else (None, named)
        )
        return axes if isinstance(axes, list | tuple) else (), ranks if isinstance(
            ranks, list | tuple
        ) else ()

    def unknown_axis(self, axis: str, remedy: str = "") -> str | None:
        """A sentence where the mesh has no such axis."""
        if axis in self.mesh:
            return None
        return f"unknown axis {axis}; the mesh has {name_list(self.mesh)}{did_you_mean(axis, self.mesh) or remedy}"

    def unknown_tensor(self, name: str) -> str | None:
        """A sentence where the file declares no such tensor."""
        if name in self.tensors:
            return None
        return f"unknown tensor {name}; declared are {name_list(self.tensors)}{did_you_mean(name, self.tensors)}"

    def unknown_group(self, group: GroupRef | None, field: str = "") -> str | None:
        """A sentence where a group is not one whose size is known; None where all is well.
        ``field``: where another could be named.
        """
        if group is None or group == "world":
            return None
        for axis in (group,) if isinstance(group, str) else group:
            if isinstance(group, str) and any(self._named(group)):
                continue
            if isinstance(group, str) and axis in self.groups and axis not in self.mesh:
                return f"the group {axis} is another for each rank; a strategy needs an axis, several, or a group of named ranks or axes"
            remedy = (
                f": name one of these with `{field}`, or add {axis} to the mesh"
                if field and self.mesh
                else ""
            )
            unknown = self.unknown_axis(axis, remedy)
            if unknown is not None:
                return unknown
        return None

    def refused(self, **groups: GroupRef | None) -> list[Refusal]:
        """A refusal for each field whose group is not one whose size is known."""
        unknown = {field: self.unknown_group(group) for field, group in groups.items()}
        return [((field,), sentence) for field, sentence in unknown.items() if sentence is not None]

    def first_of(self, group: GroupRef | None) -> str:
        """A selector of group rank 0 (in every group, where axes make several)."""
        axes: Sequence[str] = (group,) if isinstance(group, str) else group or ()
        if isinstance(group, str) and group not in self.mesh and group in self.groups:
            axes, ranks = self._named(group)
            if not axes:
                return f"rank == {min(ranks)}"
        return (
            "rank == 0"
            if axes in ((), ("world",))
            else " and ".join(f"{axis} == 0" for axis in axes)
        )

    def prefix(self, word: str) -> str:
        """``word``, or ``word2`` …: no name that is taken starts with it and an underscore."""
        for number in range(1, len(self.taken) + 3):
            found = word if number == 1 else f"{word}{number}"
            if not any(name == found or name.startswith(f"{found}_") for name in self.taken):
                return found
        return word


class Expansion(NamedTuple):
    """Plain data: the entries that stand in the strategy's place, and what they need declared."""

    steps: list[Entry]
    tensors: Mapping[str, object] = {}
    groups: Mapping[str, object] = {}
    vars: Mapping[str, object] = {}
    #: Peak memory of ranks, as `memory:` of a scenario states it.
    memory: Mapping[str, object] = {}


class Strategy(BaseModel):
    """Fields of a strategy's entry. Subclasses say what they do in `about`, and expand."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, populate_by_name=True)

    name: ClassVar[str]
    about: ClassVar[str]
    #: The field that a lone scalar or list stands for, or None.
    first_field: ClassVar[str | None] = None
    #: What a real run does otherwise than PyTorch's own class; empty where it is the same.
    for_real: ClassVar[str] = ""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        """The fields get their descriptions."""
        if "name" in cls.__dict__:
            describe_fields(cls, FIELD_HELP, cls.name)

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        """Why this layout can't be: (path of the field, sentence), before anything is expanded.
        Empty where nothing is wrong.
        """
        return []

    def compared(
        self, ranks: Sequence[int], all_ranks: Mapping[int, Strategy], steps: list[Entry]
    ) -> list[Entry]:
        """The entry's ``steps`` on its ``ranks``, where every rank of the world has one entry of
        this strategy, as in ``all_ranks``.
        """
        return steps

    def expand(self, context: ExpansionContext) -> Expansion:
        """The plain operations that PyTorch would issue."""
        raise AssertionError(f"{self.name} does not expand")


class ModelLayer(NamedTuple):
    """One layer of a model, given by sizes and times.

    ``params`` are the shapes of the parameters that learn, in the order of `module.parameters()`,
    ``frozen`` those of the others; ``dtype`` theirs, or empty: the model's.
    """

    name: str
    params: tuple[tuple[int, ...], ...]
    forward: CostOrEntries
    backward: CostOrEntries
    frozen: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(prod(shape) for shape in self.params)


def block(steps: Iterable[Entry], ranks: RankSelector = None) -> Entry:
    """A block of entries, for some ranks where ``ranks`` is given."""
    return {"steps": list(steps)} if ranks is None else {"ranks": ranks, "steps": list(steps)}


def blocks_by_rank(rows: Sequence[list[Entry]], axis: str) -> list[Entry]:
    """Entries of each rank of an axis; ranks that have the same share one block."""
    same: list[tuple[list[Entry], list[int]]] = []
    for rank, row in enumerate(rows):
        known = next((ranks for entries, ranks in same if entries == row), None)
        if known is None:
            same.append((row, [rank]))
        else:
            known.append(rank)
    return [
        block(entries, _axis_selector(ranks, axis) if len(ranks) < len(rows) else None)
        for entries, ranks in same
        if entries
    ]


def _axis_selector(ranks: Sequence[int], axis: str) -> str:
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} <= {axis} <= {ranks[-1]}"
    return " or ".join(f"{axis} == {rank}" for rank in ranks)


def compute(
    name: str, cost: CostOrEntries, ranks: RankSelector = None, /, **fields: object
) -> Entry:
    """A compute step; fields that hold nothing are left out. Entries in place of a price are what
    is done instead.
    """
    if not isinstance(cost, Mapping):
        return block(cost, ranks)
    entry: Entry = {
        "compute": {"name": name, **cost, **{key: value for key, value in fields.items() if value}}
    }
    return entry if ranks is None else {**entry, "ranks": ranks}


def step(row: str, ranks: RankSelector = None, /, **fields: object) -> Entry:
    """A step of one operation; `group: None` and the like are left out; ``as_`` and ``async_``
    stand for Python's reserved words.
    """
    given = {
        key.rstrip("_"): list(value) if isinstance(value, tuple) else value
        for key, value in fields.items()
        if value is not None
    }
    return {row: given} if ranks is None else {row: given, "ranks": ranks}


def wait(handle: str) -> Entry:
    """A wait for one handle, or for `all`."""
    return {"wait": handle}


def waits_for_copies(handle: str, numbers: Iterable[int]) -> list[Entry]:
    """A wait for each copy of a handle."""
    return [wait(f"{handle}@{k}") for k in numbers]


class EntryWriter:
    """Writes a strategy's entries: names of tensors and handles begin with ``p``; the tensors are
    collected.
    """

    def __init__(self, prefix: str, dtype: str, group: GroupRef | None = None) -> None:
        self.p, self.dtype, self.group = prefix, dtype, group
        self.tensors: dict[str, Entry] = {}

    def tensor(
        self,
        word: str,
        shape: int | Sequence[object],
        dtype: str | None = None,
        value: object = None,
    ) -> str:
        """Declare a tensor of so many elements, or of a shape; returns its name."""
        name = f"{self.p}_{word}"
        self.tensors[name] = tensor_declaration(shape, dtype or self.dtype, value)
        return name

    def call(self, row: str, ranks: RankSelector = None, /, **fields: object) -> Entry:
        """A step on the writer's group."""
        return step(row, ranks, **fields, group=self.group)


def tensor_declaration(shape: int | Sequence[object], dtype: str, value: object = None) -> Entry:
    """A tensor's declaration, or an inline tensor."""
    shape = [shape] if isinstance(shape, int) else list(shape)
    return {"shape": shape, "dtype": dtype} | ({} if value is None else {"value": value})
