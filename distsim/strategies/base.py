"""What a training strategy is: fields of the file, and the plain entries that they expand into.

A strategy knows the mesh, not a rank: what differs by rank it says with selectors and expressions, as a person would in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict

from distsim.names import listing, near

#: Plain data of an entry, as a YAML file has it.
Entry = dict[str, Any]
#: Why a layout can't be: the path from the strategy's fields to the culprit, and a sentence.
Refusal = tuple[tuple[str | int, ...], str]


class Context(NamedTuple):
    """What an expansion may know of the scenario: sizes only. ``taken``: names that it must not use for its own tensors and handles."""

    world_size: int
    ranks_per_node: int
    mesh: Mapping[str, int]
    backend: str
    iterations: int
    tensors: Mapping[str, Any]
    taken: frozenset[str]
    #: Named groups of the file, as it has them.
    groups: Mapping[str, Any] = {}
    #: Where the scenario's file lies: files that a strategy names are looked for beside it.
    folder: str = ""

    def size_of(self, group: str | tuple[str, ...] | None) -> int:
        """Ranks in a group: None and `world` are all, else an axis, several axes, or a named group of the file."""
        if group is None or group == "world":
            return self.world_size
        if not isinstance(group, str):
            return prod(self.mesh[axis] for axis in group)
        if group in self.mesh:
            return self.mesh[group]
        named = self.groups[group]
        if isinstance(named, Mapping):
            return prod(self.mesh.get(axis, 1) for axis in named["axes"]) if "axes" in named else len(named["ranks"])
        return len(named)

    def unknown_group(self, group: str | tuple[str, ...] | None, field: str = "") -> str | None:
        """A sentence where a group is not one whose size is known; None where all is well. ``field``: where another could be named."""
        if group is None or group == "world":
            return None
        for axis in (group,) if isinstance(group, str) else group:
            if axis in self.mesh or (isinstance(group, str) and self._sized(axis)):
                continue
            if isinstance(group, str) and axis in self.groups:
                return f"the group {axis} is another for each rank; a strategy needs an axis, several, or a group of named ranks or axes"
            remedy = f": name one of these with `{field}`, or add {axis} to the mesh" if field and self.mesh else ""
            return f"unknown axis {axis}; the mesh has {listing(self.mesh)}{near(axis, self.mesh) or remedy}"
        return None

    def first_of(self, group: str | tuple[str, ...] | None) -> str:
        """A selector of group rank 0 (in every group, where axes make several)."""
        named = self.groups.get(group) if isinstance(group, str) and group not in self.mesh else None
        axes: Any = (group,) if isinstance(group, str) else group or ()
        if named is not None:
            axes = named.get("axes") if isinstance(named, Mapping) else None
        if named is not None and not axes:
            return f"rank == {min(named['ranks'] if isinstance(named, Mapping) else named)}"
        return "rank == 0" if axes in ((), ("world",)) else " and ".join(f"{axis} == 0" for axis in axes)

    def _sized(self, name: str) -> bool:
        named = self.groups.get(name)
        return isinstance(named, list | tuple) or (isinstance(named, Mapping) and ("ranks" in named or "axes" in named))

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
    tensors: Mapping[str, Any] = {}
    groups: Mapping[str, Any] = {}
    vars: Mapping[str, Any] = {}
    #: Peak memory of ranks, as `memory:` of a scenario states it.
    memory: Mapping[str, Any] = {}


class Strategy(BaseModel):
    """Fields of a strategy's entry. Subclasses say what they do in `about`, and expand."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, populate_by_name=True)

    name: ClassVar[str]
    about: ClassVar[str]
    #: The field that a lone scalar or list stands for, or None.
    first_field: ClassVar[str | None] = None
    #: What a real run does otherwise than PyTorch's own class; empty where it is the same.
    for_real: ClassVar[str] = ""

    def refuse(self, context: Context) -> list[Refusal]:
        """Why this layout can't be: (path of the field, sentence), before anything is expanded. Empty where nothing is wrong."""
        return []

    def expand(self, context: Context) -> Expansion:
        """The plain operations that PyTorch would issue."""
        raise AssertionError(f"{self.name} does not expand")


class Layer(NamedTuple):
    """One layer of a model, given by sizes and times.

    ``params`` are the shapes of its parameters in the order of `module.parameters()`; ``forward`` and ``backward`` are the price fields of
    a compute step (``{"time": "3 ms"}``, or ``flops`` and ``bytes``), or entries that stand in its place.
    """

    name: str
    params: tuple[tuple[int, ...], ...]
    forward: Mapping[str, Any] | list[Any]
    backward: Mapping[str, Any] | list[Any]

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(prod(shape) for shape in self.params)


def block(steps: Iterable[Entry], ranks: Any = None) -> Entry:
    """A block of entries, for some ranks where ``ranks`` is given."""
    return {"steps": list(steps)} if ranks is None else {"ranks": ranks, "steps": list(steps)}


def compute(name: str, price: Mapping[str, Any] | list[Any], ranks: Any = None, **fields: Any) -> Entry:
    """A compute step; fields that hold nothing are left out. Entries in place of a price are what is done instead."""
    if isinstance(price, list):
        return block(price, ranks)
    step: Entry = {"compute": {"name": name, **price, **{key: value for key, value in fields.items() if value}}}
    return step if ranks is None else {**step, "ranks": ranks}


def step(row: str, /, ranks: Any = None, **fields: Any) -> Entry:
    """A step of one operation; `group: None` and the like are left out; ``as_`` and ``async_`` stand for Python's reserved words."""
    given = {key.rstrip("_"): value for key, value in fields.items() if value is not None}
    return {row: given} if ranks is None else {row: given, "ranks": ranks}
