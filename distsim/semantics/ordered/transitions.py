"""The rules: what may happen in a state, and what it brings about. No clock; a driver chooses.

    rules = Rules(program, PROFILES["gloo"])
    state = rules.initial()
    while choices := rules.enabled(state):
        state = rules.apply(state, choices[0])
    standstill(rules, state).stuck          # distsim.semantics.ordered.blocked_state

Drivers choose: the time-ordered engine by time, `TransitionRules.settle` in any order, an explorer
every choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from distsim.backends.message_matching import MessageMatcher
from distsim.backends.profile import BackendProfile
from distsim.program.model import Program
from distsim.semantics.form.instructions import (
    AwaitRendezvous,
    DropRequest,
    ExitRank,
    Instruction,
    PartKind,
    WaitForRows,
)
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.ordered.machine_tables import (
    OP_BLOCK,
    OP_DROP,
    OP_EXIT,
    OP_LOCK,
    OP_POST,
    OP_RENDEZVOUS,
    OP_SYNC,
    OP_WAIT,
)
from distsim.semantics.ordered.queue_rules import QueueRules
from distsim.semantics.ordered.state import (
    CHOICE_FINISH,
    CHOICE_STEP,
    CHOICE_TAKE,
    CLOSED,
    DUE,
    RUNNING,
    HostReleased,
    RankEnded,
    RowDone,
    RowDue,
    RunState,
    SchedulerChoice,
    TransitionEvent,
    TransitionListener,
    TransitionRecorder,
)

#: What a gloo rank is told that waits for a transfer with a dead one, or on a group that the other
#: has closed (2.4, G10).
PEER_CLOSED_MESSAGE = (
    "Connection closed by peer. This is typically caused by a remote worker crashing"
)
#: What a gloo rank is told on a group on which it has itself timed out (G10).
OWN_TIMEOUT_MESSAGE = "Application timeout caused pair closure"
_SEND, _RECEIVE, _COLLECTIVE = int(PartKind.SEND), int(PartKind.RECEIVE), int(PartKind.COLLECTIVE)


class TransitionRules(QueueRules):
    """What may happen to a `RunState` of a program under a profile. The tables are static; only
    states change.
    """

    def __init__(
        self, program: Program | LinkedProgram, profile: BackendProfile | None = None
    ) -> None:
        super().__init__(program, profile)
        self.ranks_to_crash = []

    # --- states ---
    def initial(self) -> RunState:
        """Nobody has begun. Absent ranks never will, nor those for whom others stand."""
        n, of = self.program.world_size, self.program.representative_of
        absent = {fault.rank for fault in self.program.faults if fault.kind == "absent"}
        gone = absent if of is None else absent | (set(range(n)) - set(self.program.present))
        ends: list[ExitRank | None] = [
            ExitRank(0, "absent") if rank in gone else None for rank in range(n)
        ]
        return RunState(
            [0] * n,
            ends,
            [0] * n,
            bytearray(self.linked.rows),
            {},
            {},
            {},
            {},
            {},
            {},
            {},
            {},
            {},
            MessageMatcher(self.profile.specific_first),
            dict.fromkeys(sorted(absent)),
            {},
            {},
        )

    def instruction(self, state: RunState, rank: int) -> Instruction:
        """Where a rank's host stands; its rows count from the rank's first."""
        return self.steps[rank][state.pc[rank]][1]

    def position(self, state: RunState, rank: int) -> int:
        """The call that a rank's host is in, or its end."""
        end = state.ends[rank]
        return end.position if end is not None else self.instruction(state, rank).position

    def enabled(self, state: RunState) -> list[SchedulerChoice]:
        """All that may happen next, in a fixed order: hosts by rank, then rows that are due, then
        any-source receives.
        """
        choices = [
            SchedulerChoice(CHOICE_STEP, rank)
            for rank in range(len(state.pc))
            if self.can_step(state, rank)
        ]
        choices += [SchedulerChoice(CHOICE_FINISH, row) for row in self.due_rows(state)]
        return choices + [SchedulerChoice(CHOICE_TAKE, *take) for take in state.matcher.takes()]

    def due_rows(self, state: RunState) -> list[int]:
        found, row = [], state.phase.find(DUE)
        while row >= 0:
            found.append(row)
            row = state.phase.find(DUE, row + 1)
        return found

    def can_step(self, state: RunState, rank: int) -> bool:
        if state.ends[rank] is not None:
            return False
        op, instruction, task, _, rows = self.steps[rank][state.pc[rank]]
        if op == OP_POST:
            return not (
                self.lock and task is not None and task.locks and self.worker_has_lock(state, rank)
            )
        if op == OP_WAIT:
            return self.open_row(state, rank, rows) < 0 or (
                bool(state.lost_ranks) and self._is_broken(state, rank, instruction)
            )
        if op == OP_SYNC:
            return state.open[rank] == 0
        if op == OP_RENDEZVOUS:
            return not self._is_there(state, rank, instruction)
        if op == OP_LOCK:
            return not self.worker_has_lock(state, rank)
        return op != OP_BLOCK

    def open_row(self, state: RunState, rank: int, rows: tuple[int, ...]) -> int:
        """The first of some rows that is open, -1 if none is."""
        phase, base = state.phase, self.base[rank]
        for row in rows:
            if phase[base + row]:
                return base + row
        return -1

    def _is_broken(self, state: RunState, rank: int, wait: Instruction) -> bool:
        """Requests are waited for one by one, so a death is seen by the wait whose turn it is
        (run).
        """
        assert isinstance(wait, WaitForRows)
        row = self.open_row(state, rank, wait.rows)
        return row >= 0 and self.broken(state, row)

    # --- making a choice ---
    def apply(self, state: RunState, choice: SchedulerChoice) -> RunState:
        """The state after a choice; the given one stays as it was."""
        after = state.copy()
        self.advance(after, choice)
        return after

    def advance(self, state: RunState, choice: SchedulerChoice) -> list[TransitionEvent]:
        """Make a choice in place; what it brought about."""
        out = TransitionRecorder()
        self.make(state, choice, out)
        return out.events

    def make(self, state: RunState, choice: SchedulerChoice, out: TransitionListener) -> None:
        """Make a choice in place, and tell a listener what it brings about."""
        if choice.kind == CHOICE_STEP:
            self.step(state, choice.a, out)
        elif choice.kind == CHOICE_FINISH:
            self.finish(state, choice.a, out)
        else:
            self.take(state, choice.b, out)

    def take(self, state: RunState, send: int, out: TransitionListener) -> None:
        """The oldest any-source receive of its box takes a message."""
        box = self.box[send]
        self.pair(state, *state.matcher.take(box, self.rank_of[send]), out)
        self.settle_box(state, box, out)
        self.abort(state, out)

    def settle(
        self, state: RunState, hold: Callable[[RunState, int], bool] | None = None
    ) -> list[TransitionEvent]:
        """Run, in place, all that has no alternative: then `enabled` offers takes only, or nothing.
        What happened, in order.

        ``hold`` says of a rank whose next step has an alternative; then that is offered too.
        """
        out = TransitionRecorder()
        todo = deque(rank for rank, end in enumerate(state.ends) if end is None)
        due, seen = self.due_rows(state), 0
        while todo or due:
            if due:
                row = due.pop()
                if state.phase[row] == DUE:
                    self.finish(state, row, out)
            elif self.can_step(state, todo[0]) and not (hold is not None and hold(state, todo[0])):
                self.step(state, todo[0], out)
            else:
                todo.popleft()
                continue
            for event in out.events[seen:]:
                if type(event) is RowDue:
                    due.append(event.row)
                elif type(event) is RowDone:
                    todo.append(self.rank_of[event.row])
                elif type(event) is HostReleased:
                    todo.append(event.rank)
                elif type(event) is RankEnded and event.gone:
                    todo.extend(range(len(state.pc)))
            seen = len(out.events)
        return out.events

    def finish(self, state: RunState, row: int, out: TransitionListener) -> None:
        """A row that is due is done."""
        task = self.task_of[row]
        if task is not None and task.plain:
            state.phase[row] = CLOSED
            if self.kind[row] == _SEND:
                state.mates.pop(row, None)
            out.done(row)
            rank = self.rank_of[row]
            state.open[rank] -= 1
            for follower in task.followers:
                self.try_start(state, rank, follower, out)
        else:
            self.end_row(state, row, out)
        if self.ranks_to_crash:
            self.abort(state, out)

    def kill(self, state: RunState, rank: int, leave: ExitRank, out: TransitionListener) -> None:
        """End a rank from outside, at its present instruction: a fault at a time."""
        self._leave(state, rank, leave, out)
        self.abort(state, out)

    def close(self, state: RunState, rank: int, group: int) -> None:
        """G10: a timeout closes a group's connections in the rank's process. Who waits there finds
        out (`broken`).
        """
        state.closed[rank, group] = True
        state.lost_ranks[rank] = None

    # --- the host ---
    def step(self, state: RunState, rank: int, out: TransitionListener) -> None:
        """The next instruction of a rank that can take it."""
        op, instruction, task, _, rows = self.steps[rank][state.pc[rank]]
        if op == OP_POST:
            assert task is not None
            state.pc[rank] += 1
            self.post(state, rank, task, out)
        elif op == OP_WAIT and state.lost_ranks and self.open_row(state, rank, rows) >= 0:
            self._raise(state, rank, instruction, out)
        elif op == OP_RENDEZVOUS:
            self._meet(state, rank, instruction, out)
        elif op == OP_EXIT:
            assert isinstance(instruction, ExitRank)
            self._leave(state, rank, instruction, out)
        else:
            state.pc[rank] += 1
            if op == OP_DROP:
                self._drop(state, rank, instruction, out)
            elif self.lock and op == OP_WAIT:
                self.start_waiting_collective(state, rank, out)
        if self.ranks_to_crash:
            self.abort(state, out)

    def _raise(
        self, state: RunState, rank: int, wait: Instruction, out: TransitionListener
    ) -> None:
        """What the rank waits for is with a dead one, or on a group that is closed."""
        assert isinstance(wait, WaitForRows)
        base = self.base[rank]
        own = any(
            (rank, self.group[base + row]) in state.closed
            for row in wait.rows
            if self.part_of[base + row] is not None
        )
        self._leave(
            state,
            rank,
            ExitRank(wait.position, "raised", OWN_TIMEOUT_MESSAGE if own else PEER_CLOSED_MESSAGE),
            out,
        )

    def start_waiting_collective(self, state: RunState, rank: int, out: TransitionListener) -> None:
        """The host gave the lock back: the collective that waited for it starts."""
        for row in self.worker_queue(state, rank)[:1]:
            self.try_start(state, rank, self.task(row), out)

    def _meet_of(self, rank: int, meet: Instruction) -> list[tuple[int, tuple[int, ...]]]:
        assert isinstance(meet, AwaitRendezvous)
        return self.meetings(rank, meet)

    def _is_there(self, state: RunState, rank: int, meet: Instruction) -> bool:
        """The rank has come to a meeting, and not everybody else has."""
        return any(
            rank in state.meets.get(instance, ()) for instance, _ in self._meet_of(rank, meet)
        )

    def _meet(self, state: RunState, rank: int, meet: Instruction, out: TransitionListener) -> None:
        """Come to all spots of a meeting; whoever now finds nobody missing at any of its own goes
        on.
        """
        assert isinstance(meet, AwaitRendezvous)
        if meet.uneven:
            self._meet_unevenly(state, rank, meet, out)
            return
        waiting: dict[int, None] = {}
        for instance, expected in self.meetings(rank, meet):
            there = state.meets.setdefault(instance, {})
            there[rank] = None
            if len(there) == len(expected):
                waiting |= there
                del state.meets[instance]
        for member in (*(other for other in waiting if other != rank), rank):
            op, theirs, *_ = self.steps[member][state.pc[member]]
            if op == OP_RENDEZVOUS and not self._is_there(state, member, theirs):
                state.pc[member] += 1
                out.released(member)

    def _meet_unevenly(
        self, state: RunState, rank: int, meet: AwaitRendezvous, out: TransitionListener
    ) -> None:
        """Whoever finds all whom it expects there goes on; nobody leaves before."""
        ((instance, expected),) = self.meetings(rank, meet)
        there = state.meets.setdefault(instance, {})
        there[rank] = None
        open_still, all_there = False, frozenset(there)
        for member in tuple(there):
            op, theirs, *_ = self.steps[member][state.pc[member]]
            if op != OP_RENDEZVOUS or self._meet_of(member, theirs)[0][0] != instance:
                continue
            if theirs.lost or any(r not in all_there for r in self._meet_of(member, theirs)[0][1]):  # type: ignore[union-attr]
                open_still = True
                continue
            state.pc[member] += 1
            out.released(member)
        if not open_still and len(there) == len(expected):
            del state.meets[instance]

    def _drop(self, state: RunState, rank: int, drop: Instruction, out: TransitionListener) -> None:
        """G4: gloo has sent the notice of a message that has met nobody, and keeps its place in the
        queue: who meets it does so in vain (`Meetings.pair`), but a sender is let go
        (`p2p.work_dropped_irecv`). MPI ends the process (``~AsyncWork``)."""
        assert isinstance(drop, DropRequest)
        row = self.base[rank] + drop.row
        if self.profile.dropped == "crashes":
            text = "Attempted destruction of AsyncWork before work has completed, terminating the program."
            self._leave(state, rank, ExitRank(drop.position, "crashed", text), out)
        elif state.phase[row] == RUNNING:
            state.phase[row] = CLOSED
            out.cancelled(row)
            self.released(state, row, out)

    def _leave(self, state: RunState, rank: int, leave: ExitRank, out: TransitionListener) -> None:
        if state.ends[rank] is not None:
            return
        state.ends[rank] = leave
        out.ended(rank, leave.gone)
        for there in state.meets.values():
            there.pop(rank, None)
        if leave.gone:
            state.lost_ranks[rank] = None
            for row in range(self.base[rank], self.base[rank + 1]):
                if state.phase[row]:
                    self.cancel(state, row, out)

    def abort(self, state: RunState, out: TransitionListener) -> None:
        """G14: the processes that a mismatch kills."""
        while self.ranks_to_crash:
            rank = self.ranks_to_crash.pop(0)
            leave = ExitRank(
                self.position(state, rank), "crashed", "aborted: what came did not fit the buffer"
            )
            self._leave(state, rank, leave, out)
