"""How the process of a rank ends: its requests are dropped, and its connections close.

Key idea: a killed process closes everything at once. A process that exits by itself runs its
destructors, in this order (observed with torch 2.13, G16): the handles of messages; then the
process groups one after the other, in the order of their creation and the world last. The
destructor of a group waits for the group's open collectives, so groups that come later stay
connected for as long. A driver calls `ExitRules.continue_exit` to let an exit proceed.
"""

from __future__ import annotations

from distsim.program.model import Program
from distsim.semantics.form.instructions import ExitRank, PartKind
from distsim.semantics.ordered.queue_rules import QueueRules
from distsim.semantics.ordered.state import CLOSED, QUEUED, RUNNING, RunState, TransitionListener

_RECEIVE, _COLLECTIVE = int(PartKind.RECEIVE), int(PartKind.COLLECTIVE)
_WORLD_GROUP = 0


class ExitRules(QueueRules):
    """The half of the rules about ends of processes."""

    #: Whether processes outlive their programs, as if every rank stayed connected.
    processes_stay = False

    # --- the end of a rank's program ---
    def end_program(
        self, state: RunState, rank: int, end: ExitRank, out: TransitionListener
    ) -> None:
        """A rank ends, and its process with it.

        If the backend lets a process that exits by itself wait for its collectives, the driver
        lets the exit proceed (`continue_exit`). That takes time, in which open messages still
        arrive.
        """
        if state.ends[rank] is not None:
            return
        state.ends[rank] = end
        if not end.gone or (self.processes_stay and end.status == "ended"):
            state.ends[rank] = end._replace(gone=False)
            self.leave_rendezvous(state, rank)
            out.ended(rank, False)
            return
        exits_by_itself = end.status in ("ended", "raised")
        if exits_by_itself and self.profile.joins_collectives_at_exit:
            state.ends[rank] = end._replace(gone=False)
            state.exiting[rank] = None
            if self.open_collectives(state, rank):
                state.joining[rank] = None
            self.leave_rendezvous(state, rank)
            out.ended(rank, False)
            self.cancel_broken_collectives(state, out)
            return
        self.close_process(state, rank, out)

    def leave_rendezvous(self, state: RunState, rank: int) -> None:
        """The rank no longer counts as arrived anywhere."""
        for arrived in state.at_rendezvous.values():
            arrived.pop(rank, None)

    # --- an exit that takes time ---
    def can_continue_exit(self, state: RunState, rank: int) -> bool:
        """Whether `continue_exit` changes anything."""
        if not self.open_collectives(state, rank):
            return True
        return bool(self._droppable_messages(state, rank) or self._closable_groups(state, rank))

    def continue_exit(self, state: RunState, rank: int, out: TransitionListener) -> None:
        """Let an exit proceed until it waits for a collective, or until the process has ended."""
        if not self.open_collectives(state, rank):
            self.close_process(state, rank, out)
            return
        for row in self._droppable_messages(state, rank):
            self.drop_message(state, row, out)
        groups = self._closable_groups(state, rank)
        for group in groups:
            self._close_group(state, rank, group, out)
        if groups:
            state.lost_ranks[rank] = None
            out.groups_closed(rank)
            self.cancel_broken_collectives(state, out)

    def drop_message(self, state: RunState, row: int, out: TransitionListener) -> None:
        """Cancel an unmatched message whose handle is dropped (G4).

        Gloo has already sent its notice, which keeps its place in the queue. A partner that matches
        it does so in vain (`MessageRules.pair`), but a sender is released
        (`p2p.work_dropped_irecv`).
        """
        state.phase[row] = CLOSED
        state.dropped.setdefault(self.rank_of[row], []).append(row)
        out.cancelled(row)
        self.released(state, row, out)

    def _droppable_messages(self, state: RunState, rank: int) -> list[int]:
        """The unmatched messages that are cancelled when their handles are dropped."""
        if self.profile.dropped != "cancels":
            return []
        return [row for row in self.open_messages(state, rank) if state.phase[row] == RUNNING]

    def _closable_groups(self, state: RunState, rank: int) -> list[int]:
        """The open groups whose destructors run before the first one that waits."""
        if not self.detects_peer_death:
            return []
        waiting = {self.group[row] for row in self.open_collectives(state, rank)}
        found: list[int] = []
        for group in _in_closing_order(self.program, rank):
            if group in waiting:
                break
            if (rank, group) not in state.closed_groups:
                found.append(group)
        return found

    def _close_group(self, state: RunState, rank: int, group: int, out: TransitionListener) -> None:
        state.closed_groups[rank, group] = True
        for row in range(self.base[rank], self.base[rank + 1]):
            if state.phase[row] and self.group[row] == group:
                self.cancel(state, row, out)
        for row in state.dropped.get(rank, ()):
            if self.group[row] == group:
                self.withdraw(state, row, out)

    # --- the end of a process ---
    def close_process(self, state: RunState, rank: int, out: TransitionListener) -> None:
        """The process of a rank that has ended closes its sockets, and its open requests are lost.

        The ranks that need them find out through `broken`.
        """
        end = state.ends[rank]
        assert end is not None
        state.ends[rank] = end._replace(gone=True)
        state.exiting.pop(rank, None)
        state.joining.pop(rank, None)
        self.leave_rendezvous(state, rank)
        out.ended(rank, True)
        if self.detects_peer_death:
            state.lost_ranks[rank] = None
        for row in range(self.base[rank], self.base[rank + 1]):
            if state.phase[row]:
                self.cancel(state, row, out)
        for row in state.dropped.pop(rank, ()):
            self.withdraw(state, row, out)
        if state.joining:
            self.cancel_broken_collectives(state, out)

    def open_collectives(self, state: RunState, rank: int) -> list[int]:
        """The open rows of a rank's collectives."""
        rows = range(self.base[rank], self.base[rank + 1])
        return [row for row in rows if state.phase[row] and self.kind[row] == _COLLECTIVE]

    def open_messages(self, state: RunState, rank: int) -> list[int]:
        """The open rows of a rank's messages."""
        rows = range(self.base[rank], self.base[rank + 1])
        return [row for row in rows if state.phase[row] and 0 <= self.kind[row] <= _RECEIVE]

    def has_open_requests(self, state: RunState, rank: int) -> bool:
        """Whether any request of a rank is open."""
        return any(state.phase[self.base[rank] : self.base[rank + 1]])

    def cancel_broken_collectives(self, state: RunState, out: TransitionListener) -> None:
        """A collective that an exit waits for, and that can no longer complete, ends with an error,
        which no code sees.
        """
        for rank in tuple(state.joining):
            for row in self.open_collectives(state, rank):
                if state.phase[row] > QUEUED and self.broken(state, row):
                    self.cancel(state, row, out)
            if not self.open_collectives(state, rank):
                state.joining.pop(rank, None)


def _in_closing_order(program: Program, rank: int) -> list[int]:
    """The groups of a rank in the order in which its process destroys them."""
    own = [group.id for group in program.groups if rank in group.ranks]
    return sorted(own, key=lambda group: (group == _WORLD_GROUP, group))
