"""The queues of a run: when a posted launch starts, how it ends, and which ranks it still needs.

Key idea: a launch starts when everything in ``after`` has ended and, if its queue has workers, one
of them is free. MPI adds one lock per process, which the host's wait and the worker's collective
compete for.

How parts match after they have started is in `arrival_rules`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from distsim.operations.registry import OPERATIONS
from distsim.semantics.form.instructions import PartKind
from distsim.semantics.ordered.arrival_rules import ArrivalRules
from distsim.semantics.ordered.machine_tables import OP_LOCK, LaunchTask, is_member
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

#: A cache for one state: ranks that are missing, by instance and, for hung rows, by their kind of
#: call. Rows that wait for the same ranks share one tuple.
MissingRanks = dict[tuple[int, Hashable], tuple[int, ...]]


class QueueRules(ArrivalRules):
    """The half of the rules about launches."""

    # --- the process's lock (mpi) ---
    def worker_queue(self, state: RunState, rank: int) -> list[int]:
        """The rank's only queue with workers; a backend with a lock has one per process."""
        return state.queues.get(rank * self.queues_per_rank, [])

    def worker_has_lock(self, state: RunState, rank: int) -> bool:
        """Whether a collective of the rank is inside its blocking call."""
        queue = self.worker_queue(state, rank) if self.lock else []
        return bool(queue) and state.phase[queue[0]] != QUEUED

    def _host_has_lock(self, state: RunState, rank: int) -> bool:
        """Whether the rank's host is inside the wait for a message."""
        if not self.lock or state.pc[rank] == 0:
            return False
        previous_op = self.steps[rank][state.pc[rank] - 1][0]
        return previous_op == OP_LOCK

    # --- posting and starting ---
    def post(self, state: RunState, rank: int, task: LaunchTask, out: TransitionListener) -> None:
        """Post a launch; it starts at once or waits in its queue."""
        base = self.base[rank]
        row = base + task.row
        state.open_launches[rank] += 1
        if task.plain:
            # The same as `try_start` and `arrive`, without their calls: most launches pass here.
            state.phase[row] = RUNNING
            if not out.quiet:
                out.started(row)
            kind = self.kind[row]
            if kind == _WORK:
                state.phase[row] = DUE
                out.due(row)
            elif state.lost_ranks:
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
            state.queues.setdefault(rank * self.queues_per_rank + task.queue, []).append(row)
        self.try_start(state, rank, task, out)

    def try_start(
        self, state: RunState, rank: int, task: LaunchTask, out: TransitionListener
    ) -> None:
        """Start a queued launch if nothing is ahead of it."""
        base, phase = self.base[rank], state.phase
        row = base + task.row
        if phase[row] != QUEUED:
            return
        for predecessor in task.after:
            if phase[base + predecessor]:
                return
        end = state.ends[rank]
        if end is not None and end.gone:
            return
        if task.queue >= 0:
            queue = state.queues[rank * self.queues_per_rank + task.queue]
            if len(queue) > task.width and row not in queue[: task.width]:
                return  # all workers are busy with launches ahead of it
            if self.lock and self._host_has_lock(state, rank):
                return
        if task.unit:
            phase[row] = RUNNING
            out.started(row)
        # All parts start before the first one arrives: an arrival may already end the batch.
        for part in task.parts:
            phase[base + part] = RUNNING
            if not out.quiet:
                out.started(base + part)
        for part in task.parts:
            self.arrive(state, base + part, out)

    # --- ending ---
    def end_row(self, state: RunState, row: int, out: TransitionListener) -> None:
        """A row that is due finishes; with the last part of a batch, the batch ends."""
        phase = state.phase
        phase[row] = CLOSED
        if self.kind[row] == _SEND:
            state.receive_of.pop(row, None)
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
        """If ``row`` is a launch's own row, the launch has ended: start what waited behind it."""
        task, rank = self.task(row), self.rank_of[row]
        if self.base[rank] + task.row != row:
            return
        state.open_launches[rank] -= 1
        if task.queue >= 0:
            key = rank * self.queues_per_rank + task.queue
            queue = state.queues[key]
            queue.remove(row)
            if not queue:
                del state.queues[key]
            elif len(queue) >= task.width:
                # The launches before this one have started: only the last worker became free.
                self.try_start(state, rank, self.task(queue[task.width - 1]), out)
        for follower in task.followers:
            self.try_start(state, rank, follower, out)

    def cancel(self, state: RunState, row: int, out: TransitionListener) -> None:
        """A row will never finish. Rows in the middle of a transfer with it hang."""
        phase, state.phase[row] = state.phase[row], CLOSED
        out.cancelled(row)
        is_part = self.part_of[row] is not None
        # In a reading of the contract (no ``support``) transfers take no time, so what has matched
        # is complete.
        if is_part and phase == DUE and self.profile.support is not None:
            self._interrupt(state, row)
        elif is_part and phase == RUNNING and self.kind[row] == _COLLECTIVE:
            self._leave_collective(state, row)
        elif is_part and phase == RUNNING and self.kind[row] <= _RECEIVE:
            self.withdraw(state, row, out)
        state.hung_on.pop(row, None)
        self.released(state, row, out)

    def _leave_collective(self, state: RunState, row: int) -> None:
        """A rank that had arrived at a collective dies, and no longer counts as arrived."""
        instance = self.instance[row]
        arrived = state.arrived.get(instance)
        if arrived is None or arrived.pop(self.rank_of[row], None) is None:
            return
        self.forget(state, row)
        if not arrived:
            del state.arrived[instance]

    def _interrupt(self, state: RunState, row: int) -> None:
        """A rank dies during a transfer: the other rows of the transfer hang."""
        for other in self._partners_in_transfer(state, row):
            if state.phase[other] == DUE:
                state.phase[other] = HUNG
                state.hung_on[other] = (self.rank_of[row],)

    def _partners_in_transfer(self, state: RunState, row: int) -> list[int]:
        if self.kind[row] != _COLLECTIVE:
            if row in state.receive_of:
                return [state.receive_of[row]]
            return [send for send, receive in state.receive_of.items() if receive == row]
        rows: list[int] = self.linked.rows_of[self.instance[row]].tolist()
        if OPERATIONS[self.part(row).call.op].gives != "root":
            return rows
        # If the dying rank is the root, the data that it gives have already left it.
        return [other for other in rows if self._root_rank(other) != self.rank_of[other]]

    def _root_rank(self, row: int) -> int:
        return self.members[self.instance[row]][self.root(row)]

    # --- which ranks a row needs ---
    def lacking(
        self, state: RunState, row: int, known: MissingRanks
    ) -> tuple[tuple[int, ...], bool]:
        """(global ranks that a running row waits for, whether any one of them is enough).

        ``known`` caches results of this state.
        """
        if row in state.hung_on:
            return self._hung_with(state, row, known), False
        rank, kind = self.rank_of[row], self.kind[row]
        if kind == _RECEIVE and self.peer[row] < 0:
            members = self.program.groups[self.group[row]].ranks
            return tuple(member for member in members if member != rank), True
        if kind != _COLLECTIVE:
            return (self.peer[row],), False
        instance = self.instance[row]
        arrived = state.arrived.get(instance, {})
        needs = self.collective_needs.of(row)
        if needs is not None:
            return tuple(member for member in needs if member not in arrived), False
        key = instance, None
        if key not in known:
            known[key] = tuple(m for m in self.members[instance] if m not in arrived)
        return known[key], False

    def _hung_with(self, state: RunState, row: int, known: MissingRanks) -> tuple[int, ...]:
        """The ranks that a row is hung with.

        Of those that called its collective: the ranks whose calls differ from its own, or else all.
        """
        rank, instance = self.rank_of[row], self.instance[row]
        if state.hung_on[row]:
            return tuple(member for member in state.hung_on[row] if member != rank)
        kind = self.call_kind(row)
        key = instance, kind
        if key not in known:
            arrived = self._arrived_at_hung(state, row)
            differing = (member for member in arrived if self.call_kind(arrived[member]) != kind)
            known[key] = tuple(sorted(differing))
        if known[key]:
            return known[key]
        arrived = self._arrived_at_hung(state, row)
        return tuple(sorted(member for member in arrived if member != rank))

    def _arrived_at_hung(self, state: RunState, row: int) -> Mapping[int, int]:
        """Rank -> row of those that arrived at a hung row's collective.

        A complete collective is no longer in the state; then all members have arrived.
        """
        arrived = state.arrived.get(self.instance[row])
        if arrived is not None:
            return arrived
        rows = self.linked.rows_of[self.instance[row]].tolist()
        return {self.rank_of[other]: other for other in rows}

    # --- failures of other ranks ---
    def broken(self, state: RunState, row: int) -> bool:
        """Whether the backend notices that a transfer of this row cannot happen.

        G13: a peer that it exchanges data with is dead. G10: its group is closed on either side. A
        rank that waits in the store to create a group notices no death, and neither does an
        any-source receive: it needs no particular rank.
        """
        if not self.detects_peer_death or not state.lost_ranks:
            return False
        part = self.part_of[row]
        if part is not None and part.keyed is not None:
            return False
        phase = state.phase[row]
        if phase in (CLOSED, DUE):
            return False
        if part is not None and (self.rank_of[row], self.group[row]) in state.closed_groups:
            return True
        if phase == QUEUED:
            return self._is_behind_broken(state, row)
        if self.kind[row] == _RECEIVE and self.peer[row] < 0 and row not in state.hung_on:
            return False
        return any(self._notices_loss(state, row, rank) for rank in self.lost_peers(state, row))

    def _notices_loss(self, state: RunState, row: int, rank: int) -> bool:
        """Whether a running row waits for data on a connection with ``rank``.

        Only some members of a collective have a connection (in a ring, say). The others wait until
        the processes end that they have a connection with.
        """
        if not self._lacks(state, row, rank):
            return False
        if self.kind[row] != _COLLECTIVE:
            return True
        contact = self.contact(row, rank)
        if contact is None or row in state.hung_on:
            return contact is not None
        return self.have_arrived(state, row, contact.waits_after)

    def _is_behind_broken(self, state: RunState, row: int) -> bool:
        """Whether a started launch in the queue of a queued row is broken."""
        task = self.task(row)
        if task.queue < 0:
            return False
        queue = state.queues[self.rank_of[row] * self.queues_per_rank + task.queue]
        started = [other for other in queue if state.phase[other] != QUEUED]
        return any(self.broken(state, other) for other in started)

    def _lacks(self, state: RunState, row: int, rank: int) -> bool:
        """Whether ``rank`` is among the ranks that `lacking` returns for a running row."""
        if row in state.hung_on:
            if rank == self.rank_of[row]:
                return False
            hung_on = state.hung_on[row]
            return (
                is_member(hung_on, rank) if hung_on else rank in self._arrived_at_hung(state, row)
            )
        if self.kind[row] != _COLLECTIVE:
            return self.peer[row] == rank
        has_arrived = rank in state.arrived.get(self.instance[row], {})
        return not has_arrived and is_member(self.needs(row), rank)
