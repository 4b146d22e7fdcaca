"""The rules of an ordered run: what may happen in a state, and what it brings about.

    rules = TransitionRules(program, BACKEND_PROFILES["gloo"])
    state = rules.initial()
    while choices := rules.enabled(state):
        state = rules.apply(state, choices[0])
    blocked_state_at(rules, state).stuck    # distsim.semantics.ordered.blocked_state

Key idea: the rules have no clock. A driver chooses what happens next: the event-driven engine by
time, `TransitionRules.settle` in any order, an explorer every choice in turn.

Most names of rules (G4, G10, …) are those of docs/explanation/semantics.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from distsim.backends.gloo import monitored_barrier_error
from distsim.backends.message_matching import MessageMatcher
from distsim.backends.profile import BackendProfile
from distsim.findings.final_state import RankEndStatus
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
from distsim.semantics.ordered.exit_rules import ExitRules
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
from distsim.semantics.ordered.state import (
    CHOICE_CLOSE,
    CHOICE_FINISH,
    CHOICE_STEP,
    CHOICE_TAKE,
    CLOSED,
    DUE,
    RUNNING,
    GroupsClosed,
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

#: The error of a gloo rank that waits for a transfer with a dead rank, or on a group that the other
#: side has closed (2.4, G10).
PEER_CLOSED_MESSAGE = (
    "Connection closed by peer. This is typically caused by a remote worker crashing"
)
#: The error of a gloo rank on a group on which it has itself timed out (G10).
OWN_TIMEOUT_MESSAGE = "Application timeout caused pair closure"
_DROPPED_WORK_MESSAGE = (
    "Attempted destruction of AsyncWork before work has completed, terminating the program."
)
#: What a rank reports that a mismatch ends, by its status.
_MISMATCH_MESSAGES: dict[RankEndStatus, str] = {
    "crashed": "aborted: what came did not fit the buffer",
    "raised": "EOFError: Ran out of input",
}
_SEND = int(PartKind.SEND)
#: What `TransitionRules.open_row` returns if no row is open.
NO_OPEN_ROW = -1


class TransitionRules(ExitRules):
    """What may happen to a `RunState` of a program under a profile.

    The tables that it inherits are static; only states change.
    """

    def __init__(
        self, program: Program | LinkedProgram, profile: BackendProfile | None = None
    ) -> None:
        super().__init__(program, profile)
        self.ranks_to_end = []

    # --- states ---
    def initial(self) -> RunState:
        """No rank has started. Absent ranks, and ranks that another represents, never will."""
        size = self.program.world_size
        absent = {fault.rank for fault in self.program.faults if fault.kind == "absent"}
        never_start = set(absent)
        if self.program.representative_of is not None:
            never_start |= set(range(size)) - set(self.program.present)
        ends: list[ExitRank | None] = [None] * size
        for rank in never_start:
            ends[rank] = ExitRank(0, "absent")
        return RunState(
            pc=[0] * size,
            ends=ends,
            exiting={},
            joining={},
            open_launches=[0] * size,
            phase=bytearray(self.linked.rows),
            queues={},
            at_rendezvous={},
            sends={},
            receives={},
            arrived={},
            buffered_bytes={},
            hung_on={},
            receive_of={},
            closed_groups={},
            dropped={},
            matcher=MessageMatcher(self.profile.specific_first),
            lost_ranks=dict.fromkeys(sorted(absent)),
            silenced={},
            arrived_by_kind={},
        )

    def instruction(self, state: RunState, rank: int) -> Instruction:
        """A host's next instruction. Its rows count from the rank's first row."""
        return self.steps[rank][state.pc[rank]][1]

    def position(self, state: RunState, rank: int) -> int:
        """The call that a rank's host is in, or the position of its end."""
        end = state.ends[rank]
        return end.position if end is not None else self.instruction(state, rank).position

    # --- what may happen ---
    def enabled(self, state: RunState) -> list[SchedulerChoice]:
        """All that may happen next, in a fixed order.

        Hosts by rank come first, then rows that are due, any-source receives, and processes that
        exit while messages are open.
        """
        ranks = [rank for rank in range(len(state.pc)) if self.can_step(state, rank)]
        choices = [SchedulerChoice(CHOICE_STEP, rank) for rank in ranks]
        choices += [SchedulerChoice(CHOICE_FINISH, row) for row in self.due_rows(state)]
        choices += [SchedulerChoice(CHOICE_TAKE, *take) for take in state.matcher.takes()]
        choices += self.exits_with_open_messages(state)
        return choices or self._exits(state)[:1]

    def exits_with_open_messages(self, state: RunState) -> list[SchedulerChoice]:
        """Exits by which messages may be lost: whether they happen before or after others is a
        race.
        """
        return [exit for exit in self._exits(state) if self.open_messages(state, exit.a)]

    def _exits(self, state: RunState) -> list[SchedulerChoice]:
        """Processes whose exit may proceed. An exit is slow: transfers that have begun finish
        before, and all but `exits_with_open_messages` wait until nothing else can happen.
        """
        ready = (rank for rank in state.exiting if self._may_continue_exit(state, rank))
        return [SchedulerChoice(CHOICE_CLOSE, rank) for rank in ready]

    def _may_continue_exit(self, state: RunState, rank: int) -> bool:
        is_transferring = DUE in state.phase[self.base[rank] : self.base[rank + 1]]
        return not is_transferring and self.can_continue_exit(state, rank)

    def due_rows(self, state: RunState) -> list[int]:
        """The rows for which everything that they need has arrived."""
        rows = []
        row = state.phase.find(DUE)
        while row >= 0:
            rows.append(row)
            row = state.phase.find(DUE, row + 1)
        return rows

    def can_step(self, state: RunState, rank: int) -> bool:
        """Whether a rank can execute its next instruction."""
        if state.ends[rank] is not None:
            return False
        op, instruction, task, _, rows = self.steps[rank][state.pc[rank]]
        if op == OP_POST:
            needs_lock = self.lock and task is not None and task.locks
            return not (needs_lock and self.worker_has_lock(state, rank))
        if op == OP_WAIT:
            if self.open_row(state, rank, rows) < 0:
                return True
            return bool(state.lost_ranks) and self._wait_is_broken(state, rank, instruction)
        if op == OP_SYNC:
            return state.open_launches[rank] == 0
        if op == OP_RENDEZVOUS:
            return not self._waits_at(state, rank, instruction)
        if op == OP_LOCK:
            return not self.worker_has_lock(state, rank)
        return op != OP_BLOCK

    def open_row(self, state: RunState, rank: int, rows: tuple[int, ...]) -> int:
        """The first of ``rows`` that is open, or `NO_OPEN_ROW`."""
        phase, base = state.phase, self.base[rank]
        for row in rows:
            if phase[base + row]:
                return base + row
        return NO_OPEN_ROW

    def _wait_is_broken(self, state: RunState, rank: int, wait: Instruction) -> bool:
        """Whether the request that is waited for at the moment can never finish.

        Requests are waited for one after the other, so only the current wait notices a death
        (observed in a run).
        """
        assert isinstance(wait, WaitForRows)
        row = self.open_row(state, rank, wait.rows)
        return row >= 0 and self.broken(state, row)

    # --- making a choice ---
    def apply(self, state: RunState, choice: SchedulerChoice) -> RunState:
        """The state after a choice; ``state`` itself does not change."""
        after = state.copy()
        self.advance(after, choice)
        return after

    def advance(self, state: RunState, choice: SchedulerChoice) -> list[TransitionEvent]:
        """Make a choice in place; return what it brought about."""
        out = TransitionRecorder()
        self.make(state, choice, out)
        return out.events

    def make(self, state: RunState, choice: SchedulerChoice, out: TransitionListener) -> None:
        """Make a choice in place, and report to a listener what it brings about."""
        if choice.kind == CHOICE_STEP:
            self.step(state, choice.a, out)
        elif choice.kind == CHOICE_FINISH:
            self.finish(state, choice.a, out)
        elif choice.kind == CHOICE_TAKE:
            self.take(state, choice.b, out)
        else:
            self.continue_exit(state, choice.a, out)

    def take(self, state: RunState, send: int, out: TransitionListener) -> None:
        """The oldest any-source receive of the message's box takes the message."""
        box = self.box[send]
        self.pair(state, *state.matcher.take(box, self.rank_of[send]), out)
        self.settle_box(state, box, out)
        self.abort(state, out)

    def settle(
        self, state: RunState, hold: Callable[[RunState, int], bool] | None = None
    ) -> list[TransitionEvent]:
        """Run, in place, everything that has no alternative; return what happened, in order.

        Afterwards `enabled` offers takes only, or nothing. ``hold`` returns whether a rank's next
        step has an alternative; such steps are not run, and `enabled` offers them too.
        """
        out = TransitionRecorder()
        ranks = deque(rank for rank, end in enumerate(state.ends) if end is None)
        due, seen = self.due_rows(state), 0
        while ranks or due:
            if due:
                row = due.pop()
                if state.phase[row] == DUE:
                    self.finish(state, row, out)
            elif self.can_step(state, ranks[0]) and not (
                hold is not None and hold(state, ranks[0])
            ):
                self.step(state, ranks[0], out)
            else:
                ranks.popleft()
                continue
            for event in out.events[seen:]:
                if type(event) is RowDue:
                    due.append(event.row)
                elif type(event) is RowDone:
                    ranks.append(self.rank_of[event.row])
                elif type(event) is HostReleased:
                    ranks.append(event.rank)
                elif self._breaks_waits(event):
                    # Any rank may have waited for the process that has ended.
                    ranks.extend(range(len(state.pc)))
            seen = len(out.events)
        return out.events

    def _breaks_waits(self, event: TransitionEvent) -> bool:
        """Whether connections have closed, so that waits of other ranks may raise."""
        if type(event) is RankEnded:
            return event.gone and self.detects_peer_death
        return type(event) is GroupsClosed

    def finish(self, state: RunState, row: int, out: TransitionListener) -> None:
        """A row that is due finishes."""
        task = self.task_of[row]
        if task is not None and task.plain:
            # The same as `end_row` for the frequent case of a launch with one part and no queue.
            state.phase[row] = CLOSED
            if self.kind[row] == _SEND:
                state.receive_of.pop(row, None)
            out.done(row)
            rank = self.rank_of[row]
            state.open_launches[rank] -= 1
            for follower in task.followers:
                self.try_start(state, rank, follower, out)
        else:
            self.end_row(state, row, out)
        if self.ranks_to_end:
            self.abort(state, out)
        if state.joining and self.rank_of[row] in state.joining:
            self.cancel_broken_collectives(state, out)

    def kill(self, state: RunState, rank: int, end: ExitRank, out: TransitionListener) -> None:
        """End a rank from outside, at its current instruction: a fault at a given time."""
        if state.ends[rank] is None:
            state.ends[rank] = end
            self.close_process(state, rank, out)
        self.abort(state, out)

    def close(self, state: RunState, rank: int, group: int) -> None:
        """G10: a timeout closes a group's connections in the rank's process.

        Ranks that wait for a transfer there find out through `broken`.
        """
        state.closed_groups[rank, group] = True
        state.lost_ranks[rank] = None

    # --- the host ---
    def step(self, state: RunState, rank: int, out: TransitionListener) -> None:
        """Run the next instruction of a rank, which must be able to step."""
        op, instruction, task, _, rows = self.steps[rank][state.pc[rank]]
        if op == OP_POST:
            assert task is not None
            state.pc[rank] += 1
            self.post(state, rank, task, out)
        elif op == OP_WAIT and state.lost_ranks and self.open_row(state, rank, rows) >= 0:
            # `can_step` permits this only if the wait is broken.
            self._raise(state, rank, instruction, out)
        elif op == OP_RENDEZVOUS:
            self._arrive_at_rendezvous(state, rank, instruction, out)
        elif op == OP_EXIT:
            assert isinstance(instruction, ExitRank)
            self.end_program(state, rank, instruction, out)
        else:
            state.pc[rank] += 1
            if op == OP_DROP:
                self._drop(state, rank, instruction, out)
            elif self.lock and op == OP_WAIT:
                self.start_waiting_collective(state, rank, out)
        if self.ranks_to_end:
            self.abort(state, out)

    def _raise(
        self, state: RunState, rank: int, wait: Instruction, out: TransitionListener
    ) -> None:
        """A wait raises: its request is with a dead rank, or on a group that is closed."""
        assert isinstance(wait, WaitForRows)
        rows = [self.base[rank] + row for row in wait.rows]
        parts = [row for row in rows if self.part_of[row] is not None]
        timed_out_itself = any((rank, self.group[row]) in state.closed_groups for row in parts)
        message = OWN_TIMEOUT_MESSAGE if timed_out_itself else PEER_CLOSED_MESSAGE
        broken = next((row for row in parts if state.phase[row]), NO_OPEN_ROW)
        if broken != NO_OPEN_ROW and self.part(broken).call.op == "monitored_barrier":
            message = self._monitored_barrier_message(state, broken) or message
        self.end_program(state, rank, ExitRank(wait.position, "raised", message), out)

    def _monitored_barrier_message(self, state: RunState, row: int) -> str:
        """What the rank that checks the arrivals says if a member can no longer arrive."""
        rank, group, call = self.rank_of[row], self.program.groups[self.group[row]], self.call(row)
        if group.ranks[0] != rank:
            return ""
        arrived = state.arrived.get(self.instance[row], {})
        missing = [member for member in group.ranks if member not in arrived]
        world_ns = self.program.options.get("timeout_ns") if group.id == 0 else None
        limit_ns = call.timeout_ns or group.timeout_ns or world_ns or self.profile.timeout_ns
        return monitored_barrier_error(rank, missing, call.wait_all_ranks, int(limit_ns))

    def start_waiting_collective(self, state: RunState, rank: int, out: TransitionListener) -> None:
        """The host has released the lock: a collective that waits for it starts."""
        for row in self.worker_queue(state, rank)[:1]:
            self.try_start(state, rank, self.task(row), out)

    # --- rendezvous ---
    def _meetings_of(
        self, rank: int, instruction: Instruction
    ) -> list[tuple[int, tuple[int, ...]]]:
        assert isinstance(instruction, AwaitRendezvous)
        return self.meetings(rank, instruction)

    def _waits_at(self, state: RunState, rank: int, instruction: Instruction) -> bool:
        """Whether the rank has arrived at a rendezvous that others have not reached yet."""
        return any(
            rank in state.at_rendezvous.get(instance, ())
            for instance, _ in self._meetings_of(rank, instruction)
        )

    def _arrive_at_rendezvous(
        self, state: RunState, rank: int, instruction: Instruction, out: TransitionListener
    ) -> None:
        """Arrive at all instances of a rendezvous; release ranks that miss no other now."""
        assert isinstance(instruction, AwaitRendezvous)
        if instruction.uneven:
            self._arrive_at_uneven_rendezvous(state, rank, instruction, out)
            return
        completed: dict[int, None] = {}  # members of the instances that this arrival completes
        for instance, expected in self.meetings(rank, instruction):
            arrived = state.at_rendezvous.setdefault(instance, {})
            arrived[rank] = None
            if len(arrived) == len(expected):
                completed |= arrived
                del state.at_rendezvous[instance]
        # The rank itself goes last, as the last to arrive.
        for member in (*(other for other in completed if other != rank), rank):
            op, theirs, *_ = self.steps[member][state.pc[member]]
            if op == OP_RENDEZVOUS and not self._waits_at(state, member, theirs):
                state.pc[member] += 1
                out.released(member)

    def _arrive_at_uneven_rendezvous(
        self, state: RunState, rank: int, rendezvous: AwaitRendezvous, out: TransitionListener
    ) -> None:
        """Members expect different ranks: each continues when all that it expects have arrived.

        A rank that has continued still counts as arrived for the others.
        """
        ((instance, expected),) = self.meetings(rank, rendezvous)
        arrived = state.at_rendezvous.setdefault(instance, {})
        arrived[rank] = None
        some_still_wait, all_arrived = False, frozenset(arrived)
        for member in tuple(arrived):
            op, theirs, *_ = self.steps[member][state.pc[member]]
            if op != OP_RENDEZVOUS:
                continue
            member_instance, member_expects = self._meetings_of(member, theirs)[0]
            if member_instance != instance:
                continue
            assert isinstance(theirs, AwaitRendezvous)
            if theirs.lost or any(other not in all_arrived for other in member_expects):
                some_still_wait = True
                continue
            state.pc[member] += 1
            out.released(member)
        if not some_still_wait and len(arrived) == len(expected):
            del state.at_rendezvous[instance]

    # --- ends ---
    def _drop(
        self, state: RunState, rank: int, instruction: Instruction, out: TransitionListener
    ) -> None:
        """The program drops the last handle of a message's request.

        G4: gloo cancels it. MPI ends the process (``~AsyncWork``).
        """
        assert isinstance(instruction, DropRequest)
        row = self.base[rank] + instruction.row
        if self.profile.dropped == "crashes":
            end = ExitRank(instruction.position, "crashed", _DROPPED_WORK_MESSAGE)
            self.end_program(state, rank, end, out)
        elif state.phase[row] == RUNNING:
            self.drop_message(state, row, out)

    def abort(self, state: RunState, out: TransitionListener) -> None:
        """End the ranks that a mismatch kills (G14), or that raise because of it."""
        while self.ranks_to_end:
            rank, status = self.ranks_to_end.pop(0)
            end = ExitRank(self.position(state, rank), status, _MISMATCH_MESSAGES[status])
            self.end_program(state, rank, end, out)
