"""The queues of a run: when what a host has handed over starts, how it ends, and whom it lacks
meanwhile.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from distsim.operations.registry import OPERATIONS
from distsim.semantics.form.instructions import PartKind
from distsim.semantics.ordered.machine_tables import OP_LOCK, LaunchTask, is_member
from distsim.semantics.ordered.match_rules import MatchRules
from distsim.semantics.ordered.state import (
    CLOSED,
    DUE,
    HUNG,
    QUEUED,
    RUNNING,
    RunState,
    TransitionListener,
)

_SEND, _RECEIVE, _COLLECTIVE, _WORK = (int(kind) for kind in PartKind)

#: Ranks that somebody waits for, by the collective and, where it is jammed, what the waiting ones
#: called it with.
MissingRanks = dict[tuple[int, Hashable], tuple[int, ...]]


class QueueRules(MatchRules):
    """The part of the rules that is about launches."""

    # --- the process's one lock (mpi) ---
    def worker_queue(self, state: RunState, rank: int) -> list[int]:
        """A process has one queue with workers where it has a lock."""
        return state.queues.get(rank * self.most_queues, [])

    def worker_has_lock(self, state: RunState, rank: int) -> bool:
        """A collective of the rank is in its blocking call."""
        queue = self.worker_queue(state, rank) if self.lock else []
        return bool(queue) and state.phase[queue[0]] != QUEUED

    def _host_has_lock(self, state: RunState, rank: int) -> bool:
        """The rank's host is in the wait for a message."""
        return (
            self.lock and state.pc[rank] > 0 and self.steps[rank][state.pc[rank] - 1][0] == OP_LOCK
        )

    # --- queues ---
    def post(self, state: RunState, rank: int, task: LaunchTask, out: TransitionListener) -> None:
        base = self.base[rank]
        row = base + task.row
        state.open[rank] += 1
        if task.plain:
            state.phase[row] = RUNNING
            if not out.quiet:
                out.started(row)
            kind = self.kind[row]
            if kind == _WORK:
                state.phase[row] = DUE
                out.due(row)
            elif state.closed:
                self.arrive(state, row, out)
            elif kind == _SEND:
                self._send(state, row, out)
            elif kind == _RECEIVE:
                self._receive(state, row, out)
            else:
                self._join(state, row, out)
            return
        state.phase[row] = QUEUED
        if task.unit:
            for part in task.parts:
                state.phase[base + part] = QUEUED
        if task.queue >= 0:
            state.queues.setdefault(rank * self.most_queues + task.queue, []).append(row)
        self.try_start(state, rank, task, out)

    def try_start(
        self, state: RunState, rank: int, task: LaunchTask, out: TransitionListener
    ) -> None:
        base, phase = self.base[rank], state.phase
        row = base + task.row
        if phase[row] != QUEUED:
            return
        for before in task.after:
            if phase[base + before]:
                return
        end = state.ends[rank]
        if end is not None and end.gone:
            return
        if task.queue >= 0:
            queue = state.queues[rank * self.most_queues + task.queue]
            if (len(queue) > task.width and row not in queue[: task.width]) or (
                self.lock and self._host_has_lock(state, rank)
            ):
                return
        if task.unit:
            phase[row] = RUNNING
            out.started(row)
        for part in task.parts:
            phase[base + part] = RUNNING
            if not out.quiet:
                out.started(base + part)
        for part in task.parts:
            self.arrive(state, base + part, out)

    def end_row(self, state: RunState, row: int, out: TransitionListener) -> None:
        """A row that is due is done."""
        phase = state.phase
        phase[row] = CLOSED
        if self.kind[row] == _SEND:
            state.mates.pop(row, None)
        out.done(row)
        task = self.task(row)
        if task.unit:
            base = self.base[self.rank_of[row]]
            for part in task.parts:
                if phase[base + part]:
                    return
            row = base + task.row
            phase[row] = CLOSED
            out.done(row)
        self.released(state, row, out)

    def released(self, state: RunState, row: int, out: TransitionListener) -> None:
        """A launch has ended: what waited behind it may start."""
        task, rank = self.task(row), self.rank_of[row]
        if self.base[rank] + task.row != row:
            return
        state.open[rank] -= 1
        if task.queue >= 0:
            key = rank * self.most_queues + task.queue
            queue = state.queues[key]
            queue.remove(row)
            if not queue:
                del state.queues[key]
            elif len(queue) >= task.width:  # those before it have started
                self.try_start(state, rank, self.task(queue[task.width - 1]), out)
        for follower in task.followers:
            self.try_start(state, rank, follower, out)

    def cancel(self, state: RunState, row: int, out: TransitionListener) -> None:
        """A row will never finish. Whoever is in the middle of a transfer with it is stuck."""
        phase, state.phase[row] = state.phase[row], CLOSED
        out.cancelled(row)
        if self.part_of[row] is not None and phase == DUE:
            if (
                self.profile.support is not None
            ):  # under a reading nothing takes time: what has met is done
                self._cut(state, row)
        elif self.part_of[row] is not None and phase == RUNNING:
            if self.kind[row] == _COLLECTIVE:
                self._take_back(state, row)
            elif self.kind[row] <= _RECEIVE:
                self.withdraw(state, row, out)
        state.hung_on.pop(row, None)
        self.released(state, row, out)

    def _take_back(self, state: RunState, row: int) -> None:
        """A rank that had come to a collective dies."""
        instance = self.instance[row]
        there = state.there.get(instance)
        if there is None or there.pop(self.rank_of[row], None) is None:
            return
        self.forget(state, row)
        if not there:
            del state.there[instance]

    def _cut(self, state: RunState, row: int) -> None:
        others = (
            [state.mates[row]]
            if row in state.mates
            else [s for s, receive in state.mates.items() if receive == row]
        )
        if self.kind[row] == _COLLECTIVE:
            others = self.linked.rows_of[self.instance[row]].tolist()
            if (
                OPERATIONS[self.part(row).call.op].gives == "root"
            ):  # what the root gives has left it
                others = [
                    r
                    for r in others
                    if self.members[self.instance[r]][self.root(r)] != self.rank_of[r]
                ]
        for other in others:
            if state.phase[other] == DUE:
                state.phase[other] = HUNG
                state.hung_on[other] = (self.rank_of[row],)

    # --- whom a row lacks ---
    def lacking(
        self, state: RunState, row: int, known: MissingRanks
    ) -> tuple[tuple[int, ...], bool]:
        """Whom a running row waits for: (global ranks, whether any one of them is enough). Who
        waits for the same shares one tuple; ``known``: those that were found in this state."""
        if row in state.hung_on:
            return self._stuck_with(state, row, known), False
        kind = self.kind[row]
        if kind == _RECEIVE and self.peer[row] < 0:
            return tuple(
                r for r in self.program.groups[self.group[row]].ranks if r != self.rank_of[row]
            ), True
        if kind != _COLLECTIVE:
            return (self.peer[row],), False
        there, needs = state.there.get(self.instance[row], {}), self.wants.of(row)
        if needs is not None:
            return tuple(r for r in needs if r not in there), False
        key = self.instance[row], None
        if key not in known:
            known[key] = tuple(r for r in self.members[self.instance[row]] if r not in there)
        return known[key], False

    def _stuck_with(self, state: RunState, row: int, known: MissingRanks) -> tuple[int, ...]:
        """With whom a row is jammed: of those who came to its collective the ones whose calls
        differ from its own, if any do.
        """
        rank, instance = self.rank_of[row], self.instance[row]
        if state.hung_on[row]:
            return tuple(r for r in state.hung_on[row] if r != rank)
        key = instance, self.kind_of(row)
        if key not in known:
            came = self._came(state, row)
            known[key] = tuple(
                sorted(r for r, other in came.items() if self.kind_of(other) != key[1])
            )
        return known[key] or tuple(sorted(r for r in self._came(state, row) if r != rank))

    def _came(self, state: RunState, row: int) -> Mapping[int, int]:
        """Who has come to a jammed row's collective, by rank: where nothing is kept of it any more,
        all.
        """
        there = state.there.get(self.instance[row])
        return (
            there
            if there is not None
            else {self.rank_of[r]: r for r in self.linked.rows_of[self.instance[row]].tolist()}
        )

    def broken(self, state: RunState, row: int) -> bool:
        """G13: the back end sees that a transfer of this row is with a dead rank. G10: or on a
        group that either side has closed.

        Who waits in the store to make a group sees nobody's death, nor does a receive from any
        source: it needs nobody in particular."""
        part = self.part_of[row]
        if not (self.detects_peer_death and state.lost_ranks) or (
            part is not None and part.gathering is not None
        ):
            return False
        phase = state.phase[row]
        if phase in (CLOSED, DUE):
            return False
        if part is not None and (self.rank_of[row], self.group[row]) in state.closed:
            return True
        if phase == QUEUED:
            task = self.task(row)
            ahead = (
                state.queues[self.rank_of[row] * self.most_queues + task.queue]
                if task.queue >= 0
                else []
            )
            return any(self.broken(state, other) for other in ahead if state.phase[other] != QUEUED)
        if self.kind[row] == _RECEIVE and self.peer[row] < 0 and row not in state.hung_on:
            return False
        group = self.group[row]
        return any(
            ((end := state.ends[r]) is not None and end.gone) or (r, group) in state.closed
            for r in state.lost_ranks
            if self._lacks(state, row, r)
        )

    def _lacks(self, state: RunState, row: int, rank: int) -> bool:
        """Whether a running row waits for this rank, of all that it waits for (`lacking`)."""
        if row in state.hung_on:
            stuck = state.hung_on[row]
            return rank != self.rank_of[row] and (
                is_member(stuck, rank) if stuck else rank in self._came(state, row)
            )
        if self.kind[row] != _COLLECTIVE:
            return self.peer[row] == rank
        return rank not in state.there.get(self.instance[row], {}) and is_member(
            self.needs(row), rank
        )
