"""Checks of a call draft: is the caller in the group, do its peer and its root exist there?

Each check appends to ``draft.invalid``. They run in a fixed order, and later checks skip the rows
that an earlier one has found invalid, so that a rank gets the first reason only. Whether buffers
fit the operation is checked in `distsim.program.assemble`, on resolved calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from distsim.common.arrays import sorted_unique
from distsim.operations.core.resolved_call import RankGroup
from distsim.program.call_builder import CallDraft, InvalidCall
from distsim.program.code import ANY_SOURCE, BoolVector, IntVector
from distsim.program.program_tables import ProgramTables

_MAX_RANKS_SHOWN = 8


class CallChecker:
    """Checks the calls of one class of ranks (design §3, "Two kinds of fault")."""

    def __init__(self, tables: ProgramTables, ranks: IntVector) -> None:
        self.tables = tables
        self.ranks = ranks

    def check_partners(self, draft: CallDraft) -> None:
        """Group membership of the caller, its peer and its root."""
        if any(np.all(rows) for rows, _, _ in draft.invalid):
            return  # no row is left to check
        self._check_member(draft)
        self._check_peer(draft)
        self._check_root(draft)

    # --- masks over rows ---
    def guarded_rows(self, draft: CallDraft) -> BoolVector:
        """The rows that make the call."""
        return np.ones(len(self.ranks), dtype=np.bool_) if draft.guard is None else draft.guard

    def invalid_rows(self, draft: CallDraft, ignored_code: str = "") -> BoolVector:
        """The rows that make the call and for which it is invalid."""
        mask = np.zeros(len(self.ranks), dtype=np.bool_)
        for rows, code, _ in draft.invalid:
            if code != ignored_code:
                mask |= rows
        return mask & self.guarded_rows(draft)

    # --- checks ---
    def _check_member(self, draft: CallDraft) -> None:
        outside = self.guarded_rows(draft) & ~self.tables.is_member(draft.group, self.ranks)
        for group in self._groups_at(draft, outside):
            reason = (
                f"{draft.row.op} on group {group.name}, but the caller is not a member; the "
                f"ranks of the group are {_ranks_text(group.ranks)}\n"
                "make the call only on ranks of the group, or use a group that contains the caller"
            )
            rows = outside & np.asarray(draft.group == group.id)
            draft.invalid.append(InvalidCall(rows, "DS104", reason))

    def _check_peer(self, draft: CallDraft) -> None:
        if draft.peer is None:
            return
        side = peer_preposition(draft)
        world = self.tables.world_size
        peer = np.broadcast_to(np.asarray(draft.peer), len(self.ranks))
        rows = self.guarded_rows(draft) & ~self.invalid_rows(draft)

        def no_such_rank(value: int) -> str:
            return (
                f"{draft.row.op} {side} rank {value}, but the world has ranks 0 to "
                f"{world - 1}\n"
                "use `% world_size` for a ring; in a chain, skip the call on the last rank"
            )

        def own_rank(value: int) -> str:
            return (
                f"rank {value}: {draft.row.op} {side} itself\n"
                "check `dst` or `src`, or copy the tensor: a rank cannot message itself"
            )

        missing = rows & ((peer < ANY_SOURCE) | (peer >= world))
        self._add_per_value(draft, peer, missing, "DS101", no_such_rank)
        self._add_per_value(draft, peer, rows & (peer == self.ranks), "DS102", own_rank)
        rows &= (peer >= 0) & (peer < world) & (peer != self.ranks)
        outside = rows & ~self.tables.is_member(draft.group, peer)
        subject = f"{draft.row.op} {side} rank"
        remedy = "use group ranks with group_src and group_dst; src and dst are global ranks"
        self._reject_non_members(draft, peer, outside, "DS101", subject, remedy)

    def _check_root(self, draft: CallDraft) -> None:
        side = draft.row.root_field
        if side is None:
            return
        root = np.broadcast_to(np.asarray(draft.fields["root"]), len(self.ranks))
        rows = self.guarded_rows(draft) & ~self.invalid_rows(draft)
        outside = rows & ~self.tables.is_member(draft.group, root)
        subject = f"{draft.row.op} has {side}"
        remedy = f"use group_{side} for a group rank; {side} is a global rank"
        self._reject_non_members(draft, root, outside, "DS103", subject, remedy)

    # --- reasons, one for each group and value ---
    def _groups_at(self, draft: CallDraft, rows: BoolVector) -> list[RankGroup]:
        """The distinct groups of the call on these rows."""
        if not rows.any():
            return []
        ids = np.broadcast_to(np.asarray(draft.group), len(rows))[rows]
        return [self.tables.groups[group] for group in sorted_unique(ids).tolist()]

    def _reject_non_members(
        self,
        draft: CallDraft,
        named_ranks: IntVector,
        rows: BoolVector,
        code: str,
        subject: str,
        remedy: str,
    ) -> None:
        """These rows name a rank (``named_ranks``) that is not in the group."""
        for group in self._groups_at(draft, rows):

            def reason(rank: int, group: RankGroup = group) -> str:
                return (
                    f"{subject} {rank}, which is not in group {group.name}; "
                    f"its ranks are {_ranks_text(group.ranks)}\n{remedy}"
                )

            rows_of_group = rows & np.asarray(draft.group == group.id)
            self._add_per_value(draft, named_ranks, rows_of_group, code, reason)

    def _add_per_value(
        self,
        draft: CallDraft,
        values: IntVector,
        rows: BoolVector,
        code: str,
        reason: Callable[[int], str],
    ) -> None:
        for value in sorted_unique(values[rows]).tolist():
            draft.invalid.append(InvalidCall(rows & (values == value), code, reason(value)))


def peer_preposition(draft: CallDraft) -> str:
    """Whether data of a call goes "to" its peer, or comes "from" it."""
    return "to" if draft.row.direction == "send" or draft.row.gives == "all" else "from"


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_RANKS_SHOWN]))
    if len(ranks) > _MAX_RANKS_SHOWN:
        return f"{shown}, … ({len(ranks)} in all)"
    return shown
