"""How collectives complete in a run, and what happens when their calls mismatch.

Key idea: rows of one instance are collected in order of arrival. A row becomes due when the ranks
that it needs have arrived: for most operations all members, for some (a root's broadcast under
Gloo, say) only a few. Calls are compared only in instances that `may_mismatch`, which is known
before the run, so programs without mismatches pay nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from distsim.backends.profile import MismatchOutcome
from distsim.operations.registry import OPERATIONS
from distsim.semantics.form.instructions import INVALID_SIGNATURE
from distsim.semantics.form.mismatches import find_mismatch
from distsim.semantics.ordered.machine_tables import group_rank_in
from distsim.semantics.ordered.message_rules import MessageRules
from distsim.semantics.ordered.state import (
    DUE,
    HUNG,
    RUNNING,
    CallKind,
    RunState,
    TransitionListener,
)


class CollectiveRules(MessageRules):
    """Rules for collectives that have left their queues."""

    def _join(self, state: RunState, row: int, out: TransitionListener) -> None:
        """A row arrives at its collective; rows whose needs are now met become due."""
        instance, phase = self.instance[row], state.phase
        arrived = state.arrived.get(instance)
        if arrived is None:
            arrived = state.arrived[instance] = {}
        arrived[self.rank_of[row]] = row
        complete = len(arrived) == len(self.members[instance])
        suspect = instance in self.may_mismatch
        # Most arrivals change nothing but the list above, so they leave here.
        if not (complete or state.hung_on or row in self.may_finish_early or suspect):
            return
        if complete:
            out.met(tuple(arrived.values()), instance)
        mismatch = None
        if suspect:
            mismatch = self._judge_arrival(state, row, arrived, complete, out)
        first = next(iter(arrived.values()))
        already_hung = phase[first] == HUNG and row not in self.per_rank_needs
        if already_hung and not complete:
            self._hang_rows(state, (row,))
        elif already_hung or (mismatch is not None and mismatch.hangs):
            self._hang_rows(state, arrived.values())
        for ready in self._ready(state, row, arrived, complete):
            waits_in_vain_for: tuple[int, ...] = ()
            if ready in self.per_rank_needs:
                waits_in_vain_for = self.collective_needs.in_vain(ready)
            if not waits_in_vain_for and state.silenced:
                waits_in_vain_for = self._silent_peers(state, ready)
            if waits_in_vain_for:
                phase[ready], state.hung_on[ready] = HUNG, waits_in_vain_for
                continue
            phase[ready] = DUE
            out.due(ready)
        if complete:
            del state.arrived[instance]
            state.arrived_by_kind.pop(instance, None)

    def _ready(
        self, state: RunState, row: int, arrived: dict[int, int], complete: bool
    ) -> list[int]:
        """Running rows of a collective whose needs are met, in order of arrival."""
        phase = state.phase
        if complete:
            return [other for other in arrived.values() if phase[other] == RUNNING]
        # Only rows that need the rank which has just arrived can have become ready.
        waiting = self.collective_needs.awaiting(self.rank_of[row], self.instance[row])
        ready = [
            other for other in waiting if other != row and self._is_ready(state, other, arrived)
        ]
        if len(ready) > 1:
            unordered = frozenset(ready)
            ready = [other for other in arrived.values() if other in unordered]
        if phase[row] == RUNNING and self._has_all(row, arrived):
            ready.append(row)
        return ready

    def _is_ready(self, state: RunState, row: int, arrived: dict[int, int]) -> bool:
        if arrived.get(self.rank_of[row]) != row or state.phase[row] != RUNNING:
            return False
        return self._has_all(row, arrived)

    def _has_all(self, row: int, arrived: dict[int, int]) -> bool:
        """Whether the ranks that a row needs, if it does not need all members, have arrived."""
        needs = self.collective_needs.of(row)
        if needs is None or len(needs) > len(arrived):
            return False
        return all(rank in arrived for rank in needs)

    def have_arrived(self, state: RunState, row: int, positions: frozenset[int]) -> bool:
        """Whether these members (group ranks) have arrived at the collective of a row."""
        if not positions:
            return True
        instance = self.instance[row]
        arrived, members = state.arrived.get(instance, {}), self.members[instance]
        return all(members[position] in arrived for position in positions)

    def lost_peers(self, state: RunState, row: int) -> Iterator[int]:
        """The ranks whose connections in the group of a row are closed."""
        group = self.group[row]
        for rank in state.lost_ranks:
            end = state.ends[rank]
            if (end is not None and end.gone) or (rank, group) in state.closed_groups:
                yield rank

    def _silent_peers(self, state: RunState, row: int) -> tuple[int, ...]:
        """The silenced ranks that keep a row from finishing its collective (G4).

        Empty where none of the collective's data pass between two silenced ranks. In a pairwise
        operation (all_to_all) a row depends on its own pairs only.
        """
        rank, members = self.rank_of[row], self.members[self.instance[row]]
        op = self.part(row).call.op
        pairwise = OPERATIONS[op].pairwise
        involved = {rank, *self.needs(row)}
        for group, *pair in state.silenced:
            if group != self.group[row] or not involved.issuperset(pair):
                continue
            if pairwise and rank not in pair:
                continue
            sender, receiver = (group_rank_in(members, one) for one in pair)
            if self.profile.has_traffic(op, len(members), self.root(row), sender, receiver):
                return tuple(one for one in pair if one != rank)
        return ()

    def _hang_rows(self, state: RunState, rows: Iterable[int]) -> None:
        """These rows hang, together with every row that arrives at their collective later."""
        for row in rows:
            if state.phase[row] in (RUNNING, HUNG):
                state.phase[row] = HUNG
                state.hung_on[row] = ()

    # --- mismatches ---
    def call_kind(self, row: int) -> CallKind:
        """What `differing_fields`, and most of what profiles decide, depends on."""
        return self.part(row).call.op, self.signature[row], self.nbytes[row]

    def _judge_arrival(
        self,
        state: RunState,
        row: int,
        arrived: dict[int, int],
        complete: bool,
        out: TransitionListener,
    ) -> MismatchOutcome | None:
        """Compare a call with those that arrived before it, and apply what follows."""
        instance, kind = self.instance[row], self.call_kind(row)
        by_kind = state.arrived_by_kind.setdefault(instance, {})
        kind_is_known = kind in by_kind
        by_kind.setdefault(kind, {})[row] = None
        if any(OPERATIONS[op].pairwise for op, _, _ in by_kind):
            if not self._pairwise_calls_may_differ(row, arrived, complete):
                return None
            return self._judge(tuple(arrived.values()), instance, out)
        all_invalid = complete and self.signature[row] == INVALID_SIGNATURE
        if len(by_kind) == 1 and not all_invalid:
            return None
        if self.profile.neighbours is None or complete:
            return self._judge(tuple(arrived.values()), instance, out)
        # Whether ranks die is decided between neighbours (of a ring, say). Everything else depends
        # on which kinds of calls there are, so one row of each kind is enough.
        members = self.members[instance]
        neighbours = {arrived.get(members[i], row) for i in self.profile.neighbours(self.call(row))}
        one_of_each_kind = {next(iter(rows)) for rows in by_kind.values()}
        found = find_mismatch(self, tuple({row} | neighbours | one_of_each_kind), instance)
        if found is None:
            return None
        mismatch = found[1]
        # If nothing crashes, the first call of this kind has already been reported as a mismatch.
        if mismatch.crash or mismatch.raises or not kind_is_known:
            self._apply_mismatch(tuple(arrived.values()), found, instance, out)
        return mismatch

    def forget(self, state: RunState, row: int) -> None:
        """A row that had arrived at a collective is withdrawn, because its rank died."""
        instance = self.instance[row]
        by_kind = state.arrived_by_kind.get(instance)
        if by_kind is None:
            return
        kind = self.call_kind(row)
        del by_kind[kind][row]
        if not by_kind[kind]:
            del by_kind[kind]
        if not by_kind:
            del state.arrived_by_kind[instance]

    def _pairwise_calls_may_differ(self, row: int, arrived: dict[int, int], complete: bool) -> bool:
        """A quick test whether `find_mismatch` may find anything among pairwise calls.

        It compares the new row with the first one, and its parts with those of every other rank.
        """
        first = next(iter(arrived.values()))
        if complete and self._some_may_differ(list(arrived.values())):
            return True
        signatures = (self.signature[first], self.signature[row])
        differ = signatures[0] != signatures[1]
        op, first_op = self.part(row).call.op, self.part(first).call.op
        if op != first_op or not OPERATIONS[op].pairwise or INVALID_SIGNATURE in signatures:
            return differ
        if differ and self.call(first).inputs[0].dtype != self.call(row).inputs[0].dtype:
            return True
        return self._has_uneven_part(row, arrived)

    def _has_uneven_part(self, row: int, arrived: dict[int, int]) -> bool:
        """Whether some rank sends this row's rank another size than it expects, or vice versa."""
        members = self.members[self.instance[row]]
        sent, expected = self.splits(row)
        me = group_rank_in(members, self.rank_of[row])
        op = self.part(row).call.op
        for rank, other in arrived.items():
            if self.part(other).call.op != op or self.signature[other] == INVALID_SIGNATURE:
                continue
            peer = group_rank_in(members, rank)
            peer_sent, peer_expected = self.splits(other)
            if sent[peer] != peer_expected[me] or peer_sent[me] != expected[peer]:
                return True
        return False

    def _some_may_differ(self, rows: list[int]) -> bool:
        signatures = {self.signature[row] for row in rows}
        if len(signatures) > 1 or INVALID_SIGNATURE in signatures:
            return True
        return self._parts_may_be_uneven(rows)

    def _parts_may_be_uneven(self, rows: list[int]) -> bool:
        """Whether these are calls of a pairwise operation whose parts may differ in size."""
        first = rows[0]
        op = OPERATIONS[self.part(first).call.op]
        if not op.pairwise:
            return False
        if any(self.signature[other] != self.signature[first] for other in rows):
            return True
        return "numel" not in op.agreement(self.call(first))
