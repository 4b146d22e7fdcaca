"""Lowering of init_process_group, new_group and destroy_process_group.

These steps change which groups exist for the steps after them, so their calls are never shared
between positions of a program.
"""

from __future__ import annotations

import numpy as np

from distsim.operations.core.field_types import PerRank
from distsim.program.call_builder import CallDraft, InvalidCall
from distsim.program.communication_lowering import CommunicationLowering
from distsim.program.rank_class import RankClassState
from distsim.program.resolver import ResolveContext
from distsim.program.symbol_table import LOCAL_CREATION

#: Fields of init_process_group that take an expression: name in the call, name in the file.
_INIT_INTEGER_FIELDS = (
    ("rank_argument", "rank"),
    ("world_size_argument", "world_size"),
    ("device_id", "device_id"),
)


class GroupLowering(CommunicationLowering):
    """Fills drafts of group steps, and keeps track of the process groups of the class."""

    def __init__(self, state: RankClassState) -> None:
        super().__init__(state)
        #: Whether the default process group exists. A file without init_process_group implies one
        #: at its start.
        self._is_initialized = not state.names.has_init
        #: Where the default group was destroyed: ` (line 7)`; empty before that.
        self._destroyed_at = ""
        self._new_group_count = 0  # calls on which all ranks of the world take part

    def _group_step(self, context: ResolveContext, draft: CallDraft) -> None:
        draft.group = 0
        self._torch_arguments(context, draft)
        op = draft.row.op
        if op == "init_process_group":
            self._init(context, draft)
        elif op == "destroy_process_group":
            self._destroy(context, draft)
        elif self._is_initialized:
            self._new_group(context, draft)

    def _init(self, context: ResolveContext, draft: CallDraft) -> None:
        self._init_arguments(context, draft)
        if self._is_initialized:
            reason = (
                "init_process_group is called a second time\n"
                "remove the second call: torch raises "
                '"trying to initialize the default process group twice"'
            )
            draft.invalid.append(InvalidCall(True, "DS109", reason))
        self._is_initialized = True
        self._destroyed_at = ""
        self._destroyed_groups.clear()
        self._refused_groups.clear()

    def _init_arguments(self, context: ResolveContext, draft: CallDraft) -> None:
        """Texts and timeouts, which may differ by rank, and numbers, which may be expressions."""
        for name, source in (
            ("init_method", "init_method"),
            ("store", "store"),
            ("timeout_ns", "timeout"),
        ):
            given = getattr(context.op, source)
            if isinstance(given, PerRank):
                values = [given.get(rank) for rank in self.state.builder.ranks]
                if len(set(values)) > 1:
                    self._split([values.index(value) for value in values])
                draft.fields[name] = values[0]
            elif name == "store" and given is not None:
                # `_torch_arguments` has set the others.
                draft.fields[name] = given
        for name, source in _INIT_INTEGER_FIELDS:
            given = getattr(context.op, source)
            if given is not None:
                draft.fields[name] = self._integer(context, given, source)

    def _destroy(self, context: ResolveContext, draft: CallDraft) -> None:
        if not self._is_initialized:
            reason = "destroy_process_group is called without a process group"
            draft.invalid.append(InvalidCall(True, "DS108", reason))
        group = context.op.group
        if group in (None, "world"):
            self._is_initialized = False
            line = context.step.line
            self._destroyed_at = f" (line {line})" if line else ""
            return
        # Only this group ends; the others stay.
        draft.group = self._group(group)
        if not self._reject_missing_group(context, draft):
            self._destroyed_groups.add(group)

    def _new_group(self, context: ResolveContext, draft: CallDraft) -> None:
        op = context.op
        members = self._new_group_members(context)
        only_members = bool(op.use_local_synchronization or op.store)
        draft.fields.update(
            name=op.name, ranks=tuple(members), local_sync=only_members, store=op.store
        )
        if not self._are_valid_members(members):
            last_rank = self.state.names.world_size - 1
            reason = (
                f"new_group with ranks {members}; each rank must be from 0 to {last_rank} and "
                "listed once"
            )
            draft.invalid.append(InvalidCall(True, "DS111", reason))
            self._refused_groups.add(op.name)
            return
        if only_members:
            count = LOCAL_CREATION
        else:
            count = self._new_group_count
            self._new_group_count += 1
        group = self.state.names.made_group(
            count, op.name, tuple(sorted(members)), op, draft.fields.get("timeout_ns")
        )
        self._made_groups[op.name] = group
        self._destroyed_groups.discard(op.name)
        self._refused_groups.discard(op.name)
        if only_members:
            draft.group = group

    def _new_group_members(self, context: ResolveContext) -> list[int]:
        """The ranks that a new_group call lists; a class whose ranks list others is split."""
        if context.op.ranks is None:
            return list(range(self.state.names.world_size))
        members: list[int] = []
        for member in self._splits(context, context.op.ranks, "ranks"):
            if isinstance(member, np.ndarray):
                self._split(member)
            members.append(member)
        return members

    def _are_valid_members(self, members: list[int]) -> bool:
        world_size = self.state.names.world_size
        if not members or len(set(members)) != len(members):
            return False
        return all(0 <= member < world_size for member in members)
