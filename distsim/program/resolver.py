"""The meaning of the names in a step, for one class of ranks: numbers, groups, ranks and buffers.

Key idea: every result is a `Vec` over the ranks of the class. Results that occur again (a buffer in
a loop, the group ranks of an axis) are kept, because lowering asks for them once for each call.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from distsim.common.expressions import Expression
from distsim.operations.core.field_types import InlineTensor, NameReference
from distsim.operations.core.resolved_call import RankGroup
from distsim.program.call_builder import CallDraft, InvalidCall
from distsim.program.code import (
    BoolVector,
    BufferVector,
    FieldValue,
    RankValues,
    Vec,
    collapse_uniform,
)
from distsim.program.memo_keys import vector_key
from distsim.program.rank_class import LoopIndices, RankClassSplit, RankClassState
from distsim.program.step_traits import GroupName
from distsim.scenario.format.models.entries import GROUP_NAMES, ScenarioStep

#: Fields that torch keeps in 32 bits (ranks, tags, channels): it raises for larger integers.
_INT32_FIELDS = ("src", "dst", "group_src", "group_dst", "assume_src", "tag", "channel", "ranks")
_INT32_LIMIT = 2**31

#: Group id of a group that no new_group step has made yet.
_MISSING_GROUP = -1


class ResolveContext:
    """A step in one round of its loops.

    ``guard``: the ranks of the class that make it (None: all). ``group``: its group ids. A plain
    class, because one is made for each call, and a record takes longer.
    """

    def __init__(
        self, step: ScenarioStep, indices: LoopIndices, guard: BoolVector | None, group: Vec
    ) -> None:
        self.step = step
        self.indices = indices
        self.guard = guard
        self.group = group
        self.op: Any = step.op  # its fields depend on its kind


class NameResolver:
    """Resolves the names of steps for one class of ranks."""

    def __init__(self, state: RankClassState) -> None:
        self.state = state
        self._buffers: dict[Hashable, BufferVector] = {}
        self._group_bindings: dict[Hashable, dict[str, Vec]] = {}  # by group ids
        #: Shapes of tensors with ``shape: auto``, once a call has written them.
        self._auto_shapes: dict[str, tuple[Vec, ...]] = {}
        self._group_ids: dict[object, Vec] = {}  # by name
        self._global_ranks: dict[Hashable, Vec] = {}  # by group ranks and group
        #: By id of a reference and the loop indices: the reference, and the number after its @.
        self._reference_indices: dict[Hashable, tuple[NameReference, Vec]] = {}
        self._made_groups: dict[str, int] = {}  # made by earlier new_group steps
        self._destroyed_groups: set[GroupName] = set()  # destroyed by earlier steps
        self._refused_groups: set[GroupName] = set()  # whose new_group has raised (DS111)

    def _split(self, labels: RankValues | Sequence[int]) -> NoReturn:
        """End the walk of this class: ranks with different labels make different calls."""
        raise RankClassSplit(np.asarray(labels).astype(np.int64))

    # --- values ---
    def _value(self, context: ResolveContext, value: FieldValue) -> RankValues:
        if isinstance(value, (int, float)):
            return value
        if isinstance(value, Expression):
            names = value.names
        else:
            names = self.state.names_in((context.step,))
        group_names = None
        if not names.isdisjoint(GROUP_NAMES):
            group_names = self._bindings_of_group(context.group)
        return self.state.evaluate(value, context.indices, context.guard, context.step, group_names)

    def _integer(self, context: ResolveContext, value: FieldValue, field: str) -> Vec:
        if isinstance(value, Expression) and _is_int32_constant(value):
            return cast("int", value.constant)
        found = self._value(context, value)
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        dtype = getattr(found, "dtype", None)
        if isinstance(found, bool) or (not isinstance(found, int) and dtype != np.int64):
            self.state.names.problem(
                context.step, f"{field}: expected an integer, found {np.ravel(found)[0]}"
            )
        if field in _INT32_FIELDS:
            self._check_int32(context, found, field)
        return cast("Vec", found)

    def _check_int32(self, context: ResolveContext, found: RankValues, field: str) -> None:
        low, high = (found, found) if isinstance(found, int) else (np.min(found), np.max(found))
        if low >= -_INT32_LIMIT and high < _INT32_LIMIT:
            return
        values = np.ravel(found)
        farthest = int(values[np.argmax(np.abs(values))])
        self.state.names.problem(
            context.step,
            f"{field}: expected a 32-bit integer, as in torch, found {farthest}",
        )

    def _index_of(self, context: ResolveContext, reference: NameReference) -> Vec:
        """The number after a reference's @, 0 without one.

        Kept for each combination of the loop indices that it uses.
        """
        index = reference.index
        if index is None:
            return 0
        if context.guard is not None or not index.names.isdisjoint(GROUP_NAMES):
            return self._integer(context, index, str(reference))
        key = (id(reference), *[context.indices.get(name) for name in index.names])
        known = self._reference_indices.get(key)
        if known is None:
            number = self._integer(context, index, str(reference))
            known = self._reference_indices[key] = (reference, number)
        return known[1]

    # --- groups ---
    def _bindings_of_group(self, group: Vec) -> dict[str, Vec]:
        """The values of group_rank and group_size in a step of these groups."""
        key = vector_key(group)
        if key not in self._group_bindings:
            groups = self.state.names.tables.groups
            self._group_bindings[key] = _group_bindings(groups, group, self.state.builder.ranks)
        return self._group_bindings[key]

    def _group(self, name: GroupName) -> Vec:
        """The group ids of the class's ranks for a name in a step."""
        names = self.state.names
        if isinstance(name, str):
            if name in self._made_groups:
                return self._made_groups[name]
            if not names.knows(name):
                return _MISSING_GROUP
        if name not in self._group_ids:
            group = names.group(name)
            if isinstance(group, np.ndarray):
                group = collapse_uniform(group[self.state.ranks])
            self._group_ids[name] = group
        return self._group_ids[name]

    def _reject_missing_group(self, context: ResolveContext, draft: CallDraft) -> bool:
        """Mark a call invalid whose group this rank has destroyed, or not made yet.

        Returns whether the group is missing; the draft then names the world in its place.
        """
        op = draft.row.op
        if self._destroyed_groups and context.op.group in self._destroyed_groups:
            reason = (
                f"{op} on group {context.op.group}, which this rank has destroyed\n"
                "destroy the group after its last call"
            )
            draft.invalid.append(InvalidCall(True, "DS108", reason))
        if not (isinstance(draft.group, int) and draft.group < 0):
            return False
        draft.group = 0
        if context.op.group in self._refused_groups:
            # The rank never reaches this call: its new_group raised, which is the finding.
            return True
        reason = (
            f"{op} on group {context.op.group}, which this rank has not created\n"
            "call new_group first on all ranks of the world"
        )
        draft.invalid.append(InvalidCall(True, "DS104", reason))
        return True

    def _global(
        self, context: ResolveContext, group_rank: Vec, draft: CallDraft, field: str
    ) -> Vec:
        """Global ranks of group ranks; a rank outside the group makes the call invalid."""
        # By id(): `_group` keeps its vectors, so equal groups are the same object.
        key = (vector_key(group_rank), group_identity(draft.group))
        if key in self._global_ranks:
            return self._global_ranks[key]
        tables, count = self.state.names.tables, len(self.state.ranks)
        wanted = np.broadcast_to(np.asarray(group_rank), count)
        group_ids = np.broadcast_to(np.asarray(draft.group), count)
        found, exists = tables.global_ranks(group_ids, wanted)
        missing = ~exists if context.guard is None else ~exists & context.guard
        code = "DS101" if draft.row.kind in ("p2p", "remote") else "DS103"
        pairs = set(zip(group_ids[missing].tolist(), wanted[missing].tolist(), strict=True))
        for group_id, rank in sorted(pairs):
            group = tables.groups[group_id]
            reason = (
                f"{draft.row.op} with {field} {rank}, but group {group.name} has "
                f"group ranks 0 to {group.size - 1}"
            )
            rows = missing & (group_ids == group_id) & (wanted == rank)
            draft.invalid.append(InvalidCall(rows, code, reason))
        # In place of a rank that does not exist, any valid one: the call raises anyway.
        ranks: Vec = collapse_uniform(np.where(exists, found, self.state.ranks))
        if exists.all():
            self._global_ranks[key] = ranks
        return ranks

    # --- buffers ---
    def _buffer(
        self, context: ResolveContext, reference: NameReference | InlineTensor
    ) -> BufferVector:
        names = self.state.names
        if isinstance(reference, InlineTensor):
            sizes = tuple(self._integer(context, size, "shape") for size in reference.shape)
            names.check_bytes(context.step, "the tensor", sizes, reference.dtype)
            return BufferVector("", 0, sizes, reference.dtype)
        index = self._index_of(context, reference)
        auto_shape = self._auto_shapes.get(reference.name)
        key = (reference.name, vector_key(index), auto_shape is None)
        if key not in self._buffers:
            shape = auto_shape or self._declared_shape(reference.name)
            if shape is None:
                names.problem(
                    context.step,
                    f"tensor {reference.name} has shape: auto, but no earlier call has written it",
                )
            self._check_copy_index(context, reference, index)
            dtype = names.scenario.tensors[reference.name].dtype
            self._buffers[key] = BufferVector(reference.name, index, shape, dtype)
        return self._buffers[key]

    def _declared_shape(self, name: str) -> tuple[Vec, ...] | None:
        shape = self.state.names.shapes[name]
        if shape is None:
            return None
        ranks = self.state.ranks
        return tuple(
            collapse_uniform(size[ranks]) if isinstance(size, np.ndarray) else size
            for size in shape
        )

    def _check_copy_index(
        self, context: ResolveContext, reference: NameReference, index: Vec
    ) -> None:
        copies = self.state.names.copies[reference.name]
        if isinstance(copies, np.ndarray):
            copies = copies[self.state.ranks]
        if isinstance(index, int) and isinstance(copies, int) and 0 <= index < copies:
            return
        count = len(self.state.ranks)
        indices = np.broadcast_to(np.asarray(index), count)
        limits = np.broadcast_to(np.asarray(copies), count)
        wrong = (indices < 0) | (indices >= limits)
        if context.guard is not None:
            wrong = wrong & context.guard
        if not wrong.any():
            return
        row = int(np.flatnonzero(wrong)[0])
        self.state.names.problem(
            context.step,
            (
                f"{reference}: rank {self.state.builder.ranks[row]} uses copy "
                f"{int(indices[row])} of tensor {reference.name}, which has copies 0 to "
                f"{int(limits[row]) - 1}"
            ),
        )

    def _buffers_of(
        self,
        context: ResolveContext,
        value: NameReference | InlineTensor | Sequence[NameReference | InlineTensor] | None,
    ) -> tuple[BufferVector, ...]:
        if value is None:
            return ()
        if isinstance(value, NameReference | InlineTensor):
            return (self._buffer(context, value),)
        return tuple(self._buffer(context, reference) for reference in value)


def group_identity(group: Vec) -> int:
    """Equal for equal groups of one resolver, which keeps its vectors of group ids."""
    return id(group) if isinstance(group, np.ndarray) else group


def _is_int32_constant(value: Expression) -> bool:
    constant = value.constant
    return type(constant) is int and -_INT32_LIMIT <= constant < _INT32_LIMIT


def _group_bindings(groups: list[RankGroup], group: Vec, ranks: tuple[int, ...]) -> dict[str, Vec]:
    """group_rank and group_size of some ranks, each in its own group."""
    ids = np.broadcast_to(np.asarray(group), len(ranks)).tolist()
    group_rank_of = {
        group_id: {rank: index for index, rank in enumerate(groups[group_id].ranks)}
        for group_id in set(ids)
    }
    group_ranks = [group_rank_of[g].get(rank, -1) for g, rank in zip(ids, ranks, strict=True)]
    sizes = [groups[group_id].size for group_id in ids]
    return {
        "group_rank": collapse_uniform(np.array(group_ranks, dtype=np.int64)),
        "group_size": collapse_uniform(np.array(sizes, dtype=np.int64)),
    }
