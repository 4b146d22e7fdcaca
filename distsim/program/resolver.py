"""What the names in a step stand for, for one class of ranks: numbers, groups, peers, buffers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, cast

import numpy as np

from distsim.common.expressions import Expression
from distsim.operations.core.field_types import (
    InlineTensor,
    NameReference,
    PerRank,
    SplitExpressions,
)
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.resolved_call import RankGroup
from distsim.program.call_builder import CallDraft, InvalidCall
from distsim.program.code import (
    BoolVector,
    BufferVector,
    CallFields,
    FieldValue,
    RankValues,
    Vec,
    collapse_uniform,
)
from distsim.program.memo_keys import GroupName, vector_key
from distsim.program.symbol_table import HasPath, SymbolTable
from distsim.scenario.format.models.entries import ScenarioStep

if TYPE_CHECKING:
    from distsim.program.lower import RankClassWalker


LoopIndices = dict[str, int]

#: What torch counts in 32 bits: ranks, tags and channels. An integer beyond is refused (torch
#: raises).
_INT32_FIELDS = ("src", "dst", "group_src", "group_dst", "assume_src", "tag", "channel", "ranks")
_INT32_LIMIT = 2**31
#: Names that stand for something else in each group.
_GROUP_NAMES = ("group_rank", "group_size")


class ResolveContext:
    """Where a step stands in the walk: loop indices, and the guard that shuts ranks out (None:
    nobody).
    """

    def __init__(
        self, step: ScenarioStep, indices: LoopIndices, guard: BoolVector | None, group: Vec
    ) -> None:
        self.step, self.indices, self.guard, self.group = step, indices, guard, group


class NameResolver:
    """Resolves the names of steps for one walker."""

    def __init__(self, walker: RankClassWalker) -> None:
        self.walker = walker
        self._buffers: dict[Hashable, BufferVector] = {}
        self._group_named: dict[Hashable, dict[str, Vec]] = {}
        self._auto: dict[str, tuple[Vec, ...]] = {}
        self._known: dict[object, Vec] = {}  # groups by handle
        self._in_group: dict[Hashable, Vec] = {}  # global ranks of group ranks that are there
        self._counted: dict[
            Hashable, tuple[NameReference, Vec]
        ] = {}  # by a name's id and the loop indices: the name, and its number
        self._bound: dict[str, int] = {}  # groups made by new_group steps on the way
        self._gone: set[GroupName] = set()  # groups destroyed on the way

    def _split(self, labels: RankValues | Sequence[int]) -> NoReturn:
        from distsim.program.lower import RankClassSplit

        raise RankClassSplit(np.asarray(labels).astype(np.int64))

    # --- values ---
    def _value(self, here: ResolveContext, value: FieldValue) -> RankValues:
        if isinstance(value, (int, float)):
            return value
        more = None
        names = value.names if isinstance(value, Expression) else self.walker.names_in((here.step,))
        if not names.isdisjoint(_GROUP_NAMES):
            more = self._group_names(here.group)
        return self.walker.evaluate(value, here.indices, here.guard, here.step, more)

    def _integer(self, here: ResolveContext, value: FieldValue, what: str) -> Vec:
        if (
            isinstance(value, Expression)
            and type(value.constant) is int
            and -_INT32_LIMIT <= value.constant < _INT32_LIMIT
        ):
            return value.constant
        found = self._value(here, value)
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        kind = getattr(found, "dtype", None)
        if isinstance(found, bool) or (not isinstance(found, int) and kind != np.int64):
            self.walker.names.problem(
                here.step, f"{what}: expected an integer, found {np.ravel(found)[0]}"
            )
        low, high = (found, found) if isinstance(found, int) else (np.min(found), np.max(found))
        if what in _INT32_FIELDS and not (low >= -_INT32_LIMIT and high < _INT32_LIMIT):
            far = int(np.ravel(found)[np.argmax(np.abs(np.ravel(found)))])
            self.walker.names.problem(
                here.step, f"{what}: expected an integer of 32 bits, as torch takes it, found {far}"
            )
        return cast("Vec", found)

    def _number(self, here: ResolveContext, ref: NameReference) -> Vec:
        """What stands behind a name's @, 0 where nothing does; looked up when it comes again in the
        same rounds of its loops.
        """
        index = ref.index
        if index is None:
            return 0
        if here.guard is not None or not index.names.isdisjoint(_GROUP_NAMES):
            return self._integer(here, index, str(ref))
        key = (id(ref), *[here.indices.get(name) for name in index.names])
        known = self._counted.get(key)
        if known is None:
            known = self._counted[key] = (ref, self._integer(here, index, str(ref)))
        return known[1]

    def _group_names(self, group: Vec) -> dict[str, Vec]:
        groups, ranks = self.walker.names.shelf.groups, self.walker.builder.ranks
        key = vector_key(group)
        if key not in self._group_named:
            self._group_named[key] = _group_names(groups, group, ranks)
        return self._group_named[key]

    # --- groups ---
    def _group(self, handle: GroupName) -> Vec:
        """The groups of the class's ranks that a step names."""
        if isinstance(handle, str) and handle in self._bound:
            return self._bound[handle]
        if isinstance(handle, str) and not self.walker.names.knows(handle):
            return -1
        if handle not in self._known:
            group = self.walker.names.group(handle)
            self._known[handle] = (
                collapse_uniform(group[self.walker.ranks])
                if isinstance(group, np.ndarray)
                else group
            )
        return self._known[handle]

    def _reject_missing_group(self, here: ResolveContext, draft: CallDraft) -> bool:
        """A group that a new_group step makes, used before (or without) that step on this rank. One
        that is used after its end is told.
        """
        if self._gone and (name := here.step.op.group) in self._gone:  # type: ignore[attr-defined]
            reason = f"{draft.row.op} on group {name}, which this rank has destroyed\ndestroy it after its last call"
            draft.invalid.append(InvalidCall(True, "DS108", reason))
        if not (isinstance(draft.group, int) and draft.group < 0):
            return False
        draft.group = 0
        name = here.step.op.group  # type: ignore[attr-defined]
        reason = f"{draft.row.op} on group {name}, which this rank has not made\ncall new_group first, on all ranks of the world"
        draft.invalid.append(InvalidCall(True, "DS104", reason))
        return True

    def _global(self, here: ResolveContext, group_rank: Vec, draft: CallDraft, what: str) -> Vec:
        """Global ranks of group ranks; one outside the group is an invalid call."""
        key = (
            vector_key(group_rank),
            id(draft.group) if isinstance(draft.group, np.ndarray) else draft.group,
        )
        if key in self._in_group:
            return self._in_group[key]
        shelf, count = self.walker.names.shelf, len(self.walker.ranks)
        wanted = np.broadcast_to(np.asarray(group_rank), count)
        ids = np.broadcast_to(np.asarray(draft.group), count)
        found, good = shelf.global_ranks(
            draft.group if isinstance(draft.group, np.ndarray) else ids, wanted
        )
        bad = ~good if here.guard is None else ~good & here.guard
        code = "DS101" if draft.row.kind in ("p2p", "remote") else "DS103"
        for g, w in sorted(set(zip(ids[bad].tolist(), wanted[bad].tolist(), strict=True))):
            size, name = shelf.groups[g].size, shelf.groups[g].name
            reason = (
                f"{draft.row.op} with {what} {w}, but group {name} has group ranks 0 to {size - 1}"
            )
            draft.invalid.append(InvalidCall(bad & (ids == g) & (wanted == w), code, reason))
        ranks: Vec = collapse_uniform(np.where(good, found, self.walker.ranks))
        if good.all():
            self._in_group[key] = ranks
        return ranks

    # --- buffers ---
    def _buffer(self, here: ResolveContext, ref: NameReference | InlineTensor) -> BufferVector:
        names = self.walker.names
        if isinstance(ref, InlineTensor):
            sizes = tuple(self._integer(here, n, "shape") for n in ref.shape)
            names.check_bytes(here.step, "the tensor", sizes, ref.dtype)
            return BufferVector("", 0, sizes, ref.dtype)
        index = self._number(here, ref)
        key = (ref.name, vector_key(index), self._auto.get(ref.name) is None)
        if key not in self._buffers:
            tensor = names.scenario.tensors[ref.name]
            shape: tuple[Vec, ...] | None = self._auto.get(ref.name) or self._declared(ref.name)
            if shape is None:
                names.problem(
                    here.step,
                    f"tensor {ref.name} has shape: auto, but no call before this one has written it",
                )
            self._check_index(here, ref, index)
            self._buffers[key] = BufferVector(ref.name, index, shape, tensor.dtype)
        return self._buffers[key]

    def _declared(self, name: str) -> tuple[Vec, ...] | None:
        shape, ranks = self.walker.names.shapes[name], self.walker.ranks
        return (
            None
            if shape is None
            else tuple(
                collapse_uniform(n[ranks]) if isinstance(n, np.ndarray) else n for n in shape
            )
        )

    def _check_index(self, here: ResolveContext, ref: NameReference, index: Vec) -> None:
        copies = self.walker.names.copies[ref.name]
        copies = copies[self.walker.ranks] if isinstance(copies, np.ndarray) else copies
        if isinstance(index, int) and isinstance(copies, int) and 0 <= index < copies:
            return
        bad = np.broadcast_to(
            np.asarray((index < 0) | (index >= np.asarray(copies))), len(self.walker.ranks)
        )
        if here.guard is not None:
            bad = bad & here.guard
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            which, most = (
                int(np.broadcast_to(np.asarray(v), len(bad))[row]) for v in (index, copies)
            )
            rank, most = self.walker.builder.ranks[row], most - 1
            self.walker.names.problem(
                here.step,
                f"{ref}: rank {rank} names copy {which} of tensor {ref.name}, which has copies 0 to {most}",
            )

    def _buffers_of(
        self,
        here: ResolveContext,
        value: NameReference | InlineTensor | Sequence[NameReference | InlineTensor] | None,
    ) -> tuple[BufferVector, ...]:
        refs = (
            ()
            if value is None
            else (value,)
            if isinstance(value, NameReference | InlineTensor)
            else value
        )
        return tuple(self._buffer(here, ref) for ref in refs)


def _group_names(groups: list[RankGroup], group: Vec, ranks: tuple[int, ...]) -> dict[str, Vec]:
    """group_rank and group_size of some ranks."""
    ids = np.broadcast_to(np.asarray(group), len(ranks)).tolist()
    index = {g: {r: i for i, r in enumerate(groups[g].ranks)} for g in set(ids)}
    return {
        "group_rank": collapse_uniform(
            np.array([index[g].get(r, -1) for g, r in zip(ids, ranks, strict=True)], dtype=np.int64)
        ),
        "group_size": collapse_uniform(np.array([groups[g].size for g in ids], dtype=np.int64)),
    }


# --- what the file leaves out ---
def auto_shape(row: type[Operation], fields: CallFields, n: Vec) -> tuple[Vec, ...] | None:
    """Shape of the one output (`shape: auto`), from the input's shape and the group's size ``n``;
    None where it can't be told.
    """
    inputs: Sequence[BufferVector] = fields.get("inputs") or ()
    if len(inputs) != 1:
        return None
    shape: tuple[Vec, ...] = inputs[0].shape
    one_in, one_out = row.input_parts == "one", row.output_parts == "one"
    if not one_in and not one_out:
        splits = fields.get("output_splits")
        return shape if splits is None else (_total(splits), *shape[1:])
    if one_in and not one_out:
        return ((shape[0] * n if shape else n), *shape[1:]) if row.flat else (n, *shape)
    if not one_in:
        return (
            (np.asarray(shape[0]) // n if isinstance(n, np.ndarray) else shape[0] // n, *shape[1:])
            if row.flat
            else shape[1:]
        )
    return shape


def _total(splits: Sequence[Vec]) -> Vec:
    total: Vec = 0
    for split in splits:
        total = total + split
    return total


def transposed_splits(
    names: SymbolTable,
    ranks: Sequence[int],
    groups: Sequence[int],
    value: SplitExpressions,
    indices: Mapping[str, int],
    place: HasPath,
) -> list[list[int] | None]:
    """Output splits that the file leaves out: the transpose of the input splits (design §3, rule
    8).

    For each of ``ranks``, in the group of ``groups``: what each group rank's ``value`` (its input
    splits) gives to it.

    None for a rank where some group rank has no list, or one of another length than the group's
    size: that is a fault of its own.
    """
    matrices = {g: _split_matrix(names, g, value, indices, place) for g in sorted(set(groups))}
    found: list[list[int] | None] = []
    for rank, group in zip(ranks, groups, strict=True):
        matrix, members = matrices[group], names.shelf.groups[group].ranks
        found.append(
            None
            if matrix is None or rank not in members
            else [row[members.index(rank)] for row in matrix]
        )
    return found


def _split_matrix(
    names: SymbolTable,
    group: int,
    value: SplitExpressions,
    indices: Mapping[str, int],
    place: HasPath,
) -> list[list[int]] | None:
    """Row i: how many rows of its input group rank i sends to each group rank."""
    members = names.shelf.groups[group].ranks
    rows = []
    for number, member in enumerate(members):
        items = value.get(member) if isinstance(value, PerRank) else value
        if items is None or len(items) != len(members):
            return None
        env = {
            name: v[member].item() if isinstance(v, np.ndarray) else v
            for name, v in names.world.items()
        }
        env |= {**indices, "group_rank": number, "group_size": len(members)}
        rows.append(
            [
                int(names.evaluate(item, env, place, names.ranks[member : member + 1]))
                for item in items
            ]
        )
    return rows
