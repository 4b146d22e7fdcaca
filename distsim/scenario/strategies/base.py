"""The interface of strategies: fields in the scenario file that expand into plain operations.

A strategy is a Pydantic model of its fields (``Strategy``). It checks whether its layout is
possible (``refuse``) and returns plain entries (``expand``). The entries are data of the form that
a scenario file has, so a strategy can do nothing that a user could not write by hand.

A strategy is expanded once for all ranks: it knows the mesh, but no rank. Differences between ranks
are expressed with selectors (``ranks:``) and expressions, as a person would write them. Validation
of fields is in `distsim.scenario.strategies.field_types`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict

from distsim.backends import BACKEND_PROFILES
from distsim.common.message_text import did_you_mean, name_list

#: Plain data of an entry, or of a declaration, as a YAML file has it.
Entry = dict[str, object]
#: The cost of a compute step: its field `time`, or `flops` and `bytes`.
ComputeCost = Mapping[str, str | float]
#: The same, or entries that replace the compute step.
CostOrEntries = ComputeCost | Sequence[Entry]
#: A group's name, an axis of the mesh, or several axes.
GroupRef = str | tuple[str, ...]
#: The ranks of an entry: a condition, or a list of ranks; None: all.
RankSelector = str | list[int] | None
#: Why a layout is impossible: the path from the strategy's fields to the cause, and a sentence.
Refusal = tuple[tuple[str | int, ...], str]
#: The shapes of parameters, in the order of `module.parameters()`.
ParameterShapes = tuple[tuple[int, ...], ...]

#: The cost of a compute step that only marks reads and writes of tensors.
ZERO_COST: ComputeCost = {"time": "0 ns"}


class ExpansionContext(NamedTuple):
    """What an expansion may know of the scenario: sizes only.

    ``taken`` are names that the strategy must not use for its own tensors and handles.
    """

    world_size: int
    ranks_per_node: int
    mesh: Mapping[str, int]
    backend: str
    iterations: int
    tensors: Mapping[str, object]
    taken: frozenset[str]
    #: The named groups of the file, as declared there.
    groups: Mapping[str, object] = {}
    #: The folder of the scenario's file: files that a strategy names are searched there.
    folder: str = ""
    #: The context for validating fields: names that are the same on every rank, as numbers and as
    #: quantities (see `distsim.scenario.strategies.field_quantities`).
    known: Mapping[str, object] = {}

    @property
    def has_streams(self) -> bool:
        """Whether collectives of the scenario's backend run on CUDA streams, as with NCCL.

        A backend that does not exist has none; the reader of `backend:` reports it.
        """
        profile = BACKEND_PROFILES.get(self.backend)
        return profile is not None and profile.device

    def size_of(self, group: GroupRef | None) -> int:
        """The number of ranks in a group.

        None and `world` mean all ranks; else the group is an axis, several axes, or a named group
        of the file.
        """
        if group is None or group == "world":
            return self.world_size
        if not isinstance(group, str):
            return prod(self.mesh[axis] for axis in group)
        if group in self.mesh:
            return self.mesh[group]
        axes, ranks = self._declared_group(group)
        if axes:
            return prod(self.mesh.get(axis, 1) for axis in axes)
        return len(ranks)

    def _declared_group(self, group: str) -> tuple[Sequence[str], Sequence[int]]:
        """The axes or the ranks of a named group of the file; both are empty if it has neither."""
        declared = self.groups.get(group)
        axes: object = None
        ranks: object = declared
        if isinstance(declared, Mapping):
            axes = declared.get("axes")
            ranks = declared.get("ranks")
        return (
            axes if isinstance(axes, list | tuple) else (),
            ranks if isinstance(ranks, list | tuple) else (),
        )

    # --- checks of names ---
    def unknown_axis(self, axis: str, remedy: str = "") -> str | None:
        """A sentence if the mesh has no such axis; ``remedy`` follows if no name is similar."""
        if axis in self.mesh:
            return None
        advice = did_you_mean(axis, self.mesh) or remedy
        return f"unknown axis {axis}; the mesh has {name_list(self.mesh)}{advice}"

    def unknown_tensor(self, name: str) -> str | None:
        """A sentence if the file declares no such tensor."""
        if name in self.tensors:
            return None
        advice = did_you_mean(name, self.tensors)
        return f"unknown tensor {name}; the scenario declares {name_list(self.tensors)}{advice}"

    def unknown_group(self, group: GroupRef | None, field: str = "") -> str | None:
        """A sentence if the size of a group is not known, else None.

        ``field`` is the field of the strategy in which another group could be named.
        """
        if group is None or group == "world":
            return None
        if isinstance(group, str):
            if any(self._declared_group(group)):
                return None
            if group in self.groups and group not in self.mesh:
                return (
                    f"the group {group} has different members on each rank; a strategy needs "
                    "one or more mesh axes, or a group with fixed ranks or axes"
                )
            group = (group,)
        for axis in group:
            remedy = ""
            if field and self.mesh:
                remedy = f": set `{field}` to one of these, or add {axis} to the mesh"
            unknown = self.unknown_axis(axis, remedy)
            if unknown is not None:
                return unknown
        return None

    def refuse_groups(self, **groups: GroupRef | None) -> list[Refusal]:
        """A refusal for each field whose group has no known size."""
        unknown = {field: self.unknown_group(group) for field, group in groups.items()}
        return [((field,), sentence) for field, sentence in unknown.items() if sentence is not None]

    # --- texts for entries ---
    def first_rank_selector(self, group: GroupRef | None) -> str:
        """A selector of group rank 0; if axes make several groups, of rank 0 in each of them."""
        axes: Sequence[str] = (group,) if isinstance(group, str) else group or ()
        if isinstance(group, str) and group not in self.mesh and group in self.groups:
            axes, ranks = self._declared_group(group)
            if not axes:
                return f"rank == {min(ranks)}"
        if axes in ((), ("world",)):
            return "rank == 0"
        return " and ".join(f"{axis} == 0" for axis in axes)

    def unused_prefix(self, word: str) -> str:
        """``word``, or ``word2``, …: the first prefix that no taken name has."""
        for number in range(1, len(self.taken) + 3):
            prefix = word if number == 1 else f"{word}{number}"
            if not self._is_taken(prefix):
                return prefix
        return word

    def _is_taken(self, prefix: str) -> bool:
        return any(name == prefix or name.startswith(f"{prefix}_") for name in self.taken)


class Expansion(NamedTuple):
    """Plain data: the entries that replace the strategy, and the declarations that they need."""

    steps: list[Entry]
    tensors: Mapping[str, object] = {}
    groups: Mapping[str, object] = {}
    vars: Mapping[str, object] = {}
    #: Peak memory of ranks, in the form of `memory:` of a scenario.
    memory: Mapping[str, object] = {}


class Strategy(BaseModel):
    """Fields of a strategy's entry. Subclasses say what they do in `about`, and expand."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, populate_by_name=True)

    name: ClassVar[str]
    about: ClassVar[str]
    #: The field that a lone scalar or list stands for, or None.
    first_field: ClassVar[str | None] = None
    #: How a real run of the expansion differs from PyTorch's own class; empty if it does not.
    real_run_note: ClassVar[str] = ""

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        """Why this layout is impossible: (path of the field, sentence) for each problem.

        Called before anything is expanded; an empty list means that the strategy can expand.
        """
        return []

    def with_errors_between_ranks(
        self, ranks: Sequence[int], all_ranks: Mapping[int, Strategy], steps: list[Entry]
    ) -> list[Entry]:
        """The expanded ``steps`` of some ranks, with the errors that PyTorch raises on them.

        Called where each rank of the world has one entry of this strategy, whose fields differ
        between ranks; ``all_ranks`` holds them.
        """
        return steps

    def expand(self, context: ExpansionContext) -> Expansion:
        """The plain operations that PyTorch would issue."""
        raise AssertionError(f"{self.name} does not expand")


class ModelLayer(NamedTuple):
    """One layer of a model, given by sizes and times.

    ``params`` are the shapes of the trainable parameters, in the order of `module.parameters()`,
    ``frozen`` those of the others. An empty ``dtype`` means the model's dtype.
    """

    name: str
    params: ParameterShapes
    forward: CostOrEntries
    backward: CostOrEntries
    frozen: ParameterShapes = ()
    dtype: str = ""

    @property
    def numel(self) -> int:
        """The elements of all trainable parameters."""
        return sum(prod(shape) for shape in self.params)


# --- entries ---
def block(steps: Iterable[Entry], ranks: RankSelector = None) -> Entry:
    """A block of entries, restricted to ``ranks`` if given."""
    return {"steps": list(steps)} if ranks is None else {"ranks": ranks, "steps": list(steps)}


def blocks_by_rank(rows: Sequence[list[Entry]], axis: str) -> list[Entry]:
    """Entries of each rank of an axis, as blocks; ranks with equal entries share one block."""
    ranks_by_entries: list[tuple[list[Entry], list[int]]] = []
    for rank, row in enumerate(rows):
        # A list is searched, because entries are not hashable.
        ranks = next((ranks for entries, ranks in ranks_by_entries if entries == row), None)
        if ranks is None:
            ranks_by_entries.append((row, [rank]))
        else:
            ranks.append(rank)

    blocks: list[Entry] = []
    for entries, ranks in ranks_by_entries:
        if entries:
            selector = _axis_selector(ranks, axis) if len(ranks) < len(rows) else None
            blocks.append(block(entries, selector))
    return blocks


def _axis_selector(ranks: Sequence[int], axis: str) -> str:
    is_range = len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1
    if is_range:
        return f"{ranks[0]} <= {axis} <= {ranks[-1]}"
    return " or ".join(f"{axis} == {rank}" for rank in ranks)


def compute(
    name: str, cost: CostOrEntries, ranks: RankSelector = None, /, **fields: object
) -> Entry:
    """A compute step; empty fields are omitted.

    Entries instead of a cost replace the compute step as a block.
    """
    if not isinstance(cost, Mapping):
        return block(cost, ranks)
    given = {key: value for key, value in fields.items() if value}
    entry: Entry = {"compute": {"name": name, **cost, **given}}
    return entry if ranks is None else {**entry, "ranks": ranks}


def step(operation: str, ranks: RankSelector = None, /, **fields: object) -> Entry:
    """A step of one operation; fields that are None are omitted, such as `group: None`.

    ``as_`` and ``async_`` stand for Python's reserved words.
    """
    given = {
        key.rstrip("_"): list(value) if isinstance(value, tuple) else value
        for key, value in fields.items()
        if value is not None
    }
    return {operation: given} if ranks is None else {operation: given, "ranks": ranks}


def wait(handle: str) -> Entry:
    """A wait for one handle, or for `all`."""
    return {"wait": handle}


def waits_for_copies(handle: str, numbers: Iterable[int]) -> list[Entry]:
    """A wait for each of the given copies of a handle."""
    return [wait(f"{handle}@{k}") for k in numbers]


class EntryWriter:
    """Writes the entries of a strategy and collects the declarations of its tensors.

    All names of tensors and handles begin with ``prefix``, so that they collide with no name of the
    file and of other strategies.
    """

    def __init__(self, prefix: str, dtype: str, group: GroupRef | None = None) -> None:
        self.prefix = prefix
        self.dtype = dtype
        self.group = group
        self.tensors: dict[str, Entry] = {}

    def tensor(
        self,
        word: str,
        shape: int | Sequence[object],
        dtype: str | None = None,
        value: object = None,
    ) -> str:
        """Declare a tensor of a number of elements, or of a shape; return its name."""
        name = f"{self.prefix}_{word}"
        self.tensors[name] = tensor_declaration(shape, dtype or self.dtype, value)
        return name

    def call(self, operation: str, ranks: RankSelector = None, /, **fields: object) -> Entry:
        """A step on the writer's group."""
        return step(operation, ranks, **fields, group=self.group)


def tensor_declaration(shape: int | Sequence[object], dtype: str, value: object = None) -> Entry:
    """A tensor's declaration, or an inline tensor."""
    shape = [shape] if isinstance(shape, int) else list(shape)
    declaration: Entry = {"shape": shape, "dtype": dtype}
    if value is not None:
        declaration["value"] = value
    return declaration
