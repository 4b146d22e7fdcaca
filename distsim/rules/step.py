"""The rules: what may happen in a state, and what it brings about. No clock; a driver chooses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from distsim.match import Matcher
from distsim.ops.table import OPS
from distsim.rules.code import Drop, Launch, Leave, Lock, Meet, Part, PartKind, Post, Stuck, Sync, Wait
from distsim.rules.meeting import Meetings
from distsim.rules.state import (
    FINISH,
    STEP,
    TAKE,
    Cancelled,
    Choice,
    Done,
    Due,
    Ended,
    Event,
    Mismatched,
    Phase,
    Released,
    Started,
    State,
)  # fmt: skip

#: What a gloo rank is told that waits for a transfer with a dead one, or on a group that the other has closed (2.4, G10).
PEER_CLOSED = "Connection closed by peer. This is typically caused by a remote worker crashing"
#: What a gloo rank is told on a group on which it has itself timed out (G10).
OWN_CLOSURE = "Application timeout caused pair closure"


def _calls_library(launch: Launch) -> bool:
    """A message: it takes the process's lock. Work of the rank's own does not, and a collective is the worker's."""
    return not launch.workers and launch.parts[0].kind is not PartKind.WORK


class Rules(Meetings):
    """What may happen to a `State` of a program under a profile. The tables are static; only states change."""

    # --- states ---
    def initial(self) -> State:
        """Nobody has begun. Absent ranks never will."""
        n = self.program.world_size
        absent = {fault.rank for fault in self.program.faults if fault.kind == "absent"}
        ends: list[Leave | None] = [Leave(0, "absent") if rank in absent else None for rank in range(n)]
        return State([0] * n, ends, [0] * n, {}, {}, {}, {}, {}, {}, {}, Matcher(self.profile.specific_first))

    def enabled(self, state: State) -> list[Choice]:
        """All that may happen next, in a fixed order: hosts by rank, then rows that are due, then any-source receives."""
        choices = [Choice(STEP, rank) for rank in range(len(state.pc)) if self.can_step(state, rank)]
        choices += [Choice(FINISH, row) for row in sorted(state.phase) if state.phase[row] is Phase.DUE]
        return choices + [Choice(TAKE, *take) for take in state.matcher.takes()]

    def can_step(self, state: State, rank: int) -> bool:
        if state.ends[rank] is not None:
            return False
        instruction = self.code[rank][state.pc[rank]]
        if type(instruction) is Wait:
            if not any(row in state.phase for row in instruction.rows):
                return True
            return any(self.broken(state, row) for row in instruction.rows)
        if type(instruction) is Sync:
            return state.open[rank] == 0
        if type(instruction) is Meet:
            return rank not in state.meets.get(instruction.key, ())
        if type(instruction) is Lock or (self.profile.lock and type(instruction) is Post and _calls_library(instruction.launch)):
            return not self._worker_has_lock(state, rank)
        return type(instruction) is not Stuck

    # --- the process's one lock (mpi) ---
    def _worker_has_lock(self, state: State, rank: int) -> bool:
        """A collective of the rank is in its blocking call."""
        workers = self.profile.workers(rank, 0)
        queue = state.workers.get(workers.key, []) if workers is not None and self.profile.lock else []
        return bool(queue) and state.phase.get(queue[0]) is not Phase.QUEUED

    def _host_has_lock(self, state: State, rank: int) -> bool:
        """The rank's host is in the wait for a message."""
        return self.profile.lock and state.pc[rank] > 0 and type(self.code[rank][state.pc[rank] - 1]) is Lock

    def apply(self, state: State, choice: Choice) -> State:
        """The state after a choice; the given one stays as it was."""
        after = state.copy()
        self.advance(after, choice)
        return after

    def advance(self, state: State, choice: Choice) -> list[Event]:
        """Make a choice in place; what it brought about."""
        events: list[Event] = []
        if choice.kind == STEP:
            self._step(state, choice.a, events)
        elif choice.kind == FINISH:
            self._finish(state, choice.a, events)
        else:
            part = self.parts[choice.b]
            self._pair(state, *state.matcher.take(part.box, part.rank), events)
            self._settle_box(state, part.box, events)
        self._abort(state, events)
        return events

    def settle(self, state: State, hold: Callable[[State, int], bool] | None = None) -> list[Event]:
        """Run, in place, all that has no alternative: then `enabled` offers takes only, or nothing. What happened, in order.

        ``hold`` says of a rank whose next step has an alternative; then that is offered too.
        """
        events: list[Event] = []
        todo = deque(rank for rank in range(len(state.pc)) if state.ends[rank] is None)
        due = [row for row in sorted(state.phase) if state.phase[row] is Phase.DUE]
        while todo or due:
            if due:
                row = due.pop()
                new = self.advance(state, Choice(FINISH, row)) if state.phase.get(row) is Phase.DUE else []
            elif self.can_step(state, todo[0]) and not (hold is not None and hold(state, todo[0])):
                new = self.advance(state, Choice(STEP, todo[0]))
            else:
                todo.popleft()
                continue
            events += new
            for event in new:
                if type(event) is Due:
                    due.append(event.row)
                elif type(event) is Done:
                    todo.append(self.rank_of(event.row))
                elif type(event) is Released:
                    todo.append(event.rank)
                elif type(event) is Ended and event.gone:
                    todo.extend(range(len(state.pc)))
        return events

    def kill(self, state: State, rank: int, leave: Leave) -> list[Event]:
        """End a rank from outside, at its present instruction: a fault at a time."""
        events: list[Event] = []
        self._leave(state, rank, leave, events)
        return events

    def close(self, state: State, rank: int, group: int) -> None:
        """G10: a timeout closes a group's connections in the rank's process. Who waits there finds out (`broken`)."""
        state.closed[rank, group] = True

    # --- the host ---
    def _step(self, state: State, rank: int, events: list[Event]) -> None:
        instruction = self.code[rank][state.pc[rank]]
        if isinstance(instruction, Post):
            state.pc[rank] += 1
            self._post(state, instruction.launch, events)
        elif isinstance(instruction, Wait) and any(row in state.phase for row in instruction.rows):
            own = any((rank, self.parts[row].group) in state.closed for row in instruction.rows if row in self.parts)
            self._leave(state, rank, Leave(instruction.position, "raised", OWN_CLOSURE if own else PEER_CLOSED), events)
        elif isinstance(instruction, Meet):
            self._meet(state, rank, instruction, events)
        elif isinstance(instruction, Leave):
            self._leave(state, rank, instruction, events)
        else:
            state.pc[rank] += 1
            if isinstance(instruction, Drop):
                self._drop(state, instruction, events)
            elif self.profile.lock and isinstance(instruction, Wait):
                self._next_of_worker(state, rank, events)

    def _next_of_worker(self, state: State, rank: int, events: list[Event]) -> None:
        """The host gave the lock back: the collective that waited for it starts."""
        workers = self.profile.workers(rank, 0)
        for row in state.workers.get(workers.key, ())[:1] if workers is not None else ():
            self._try_start(state, self.launches[row], events)

    def _meet(self, state: State, rank: int, instruction: Meet, events: list[Event]) -> None:
        """Whoever finds all whom it expects there goes on; nobody leaves before."""
        there = state.meets.setdefault(instruction.key, [])
        there.append(rank)
        if not instruction.uneven and len(there) < len(instruction.members):
            return
        open_still = False
        for member in tuple(there):
            theirs = self._meeting_of(state, member, instruction)
            if theirs is None:
                continue
            if theirs.lost or any(r not in there for r in theirs.members):
                open_still = True
                continue
            state.pc[member] += 1
            events.append(Released(member))
        if not open_still and len(there) == len(instruction.members):
            del state.meets[instruction.key]

    def _meeting_of(self, state: State, rank: int, meet: Meet) -> Meet | None:
        """The meeting of this key in which a rank stands still; None when it has been let go."""
        theirs = self.code[rank][state.pc[rank]]
        return theirs if isinstance(theirs, Meet) and theirs.key == meet.key else None

    def _drop(self, state: State, instruction: Drop, events: list[Event]) -> None:
        """G4: gloo cancels a message that has met nobody. MPI ends the process (``~AsyncWork``).

        The notice of a dropped receive has gone out, so its sender is let go and the data is lost (`p2p.work_dropped_irecv`)."""
        part = self.parts[instruction.row]
        if self.profile.dropped == "crashes":
            text = "Attempted destruction of AsyncWork before work has completed, terminating the program."
            self._leave(state, part.rank, Leave(instruction.position, "crashed", text), events)
        elif state.phase.get(part.row) is Phase.RUNNING and part.kind is PartKind.RECEIVE:
            del state.phase[part.row]
            events.append(Cancelled(part.row))
            self._released(state, part.row, events)
        elif state.phase.get(part.row) is Phase.RUNNING:
            self._cancel(state, part.row, events)

    def _leave(self, state: State, rank: int, leave: Leave, events: list[Event]) -> None:
        if state.ends[rank] is not None:
            return
        state.ends[rank] = leave
        events.append(Ended(rank, leave.gone))
        for there in state.meets.values():
            if rank in there:
                there.remove(rank)
        if leave.gone:
            for row in [row for row in sorted(state.phase) if self.rank_of(row) == rank]:
                if row in state.phase:
                    self._cancel(state, row, events)

    def _cancel(self, state: State, row: int, events: list[Event]) -> None:
        """A row will never finish. Whoever is in the middle of a transfer with it is stuck."""
        phase, part = state.phase.pop(row), self.parts.get(row)
        events.append(Cancelled(row))
        if part is not None and phase is Phase.DUE:
            self._cut(state, part)
        elif part is not None and phase is Phase.RUNNING:
            if part.kind is PartKind.COLLECTIVE:
                state.matcher.leave(part.box, part.rank)
            else:
                state.matcher.withdraw(part.box, row)
                self._settle_box(state, part.box, events)
        state.jams.pop(row, None)
        self._released(state, row, events)

    def _cut(self, state: State, part: Part) -> None:
        mate = state.mates.pop(part.row, None)
        others = [mate] if mate is not None else []
        if part.kind is PartKind.COLLECTIVE:
            others = [r for r in sorted(state.phase) if r in self.parts and self.parts[r].box == part.box]
            if OPS[part.op].gives == "root":  # what the root gives has left it
                others = [r for r in others if self.parts[r].members[part.root] != self.parts[r].rank]
        for row in others:
            if state.phase.get(row) is Phase.DUE:
                state.phase[row] = Phase.JAMMED
                state.jams[row] = (part.rank,)

    # --- queues ---
    def _post(self, state: State, launch: Launch, events: list[Event]) -> None:
        state.phase[launch.row] = Phase.QUEUED
        if launch.is_unit:
            for part in launch.parts:
                state.phase[part.row] = Phase.QUEUED
        state.open[launch.rank] += 1
        if launch.workers is not None:
            state.workers.setdefault(launch.workers.key, []).append(launch.row)
        self._try_start(state, launch, events)

    def _try_start(self, state: State, launch: Launch, events: list[Event]) -> None:
        if state.phase.get(launch.row) is not Phase.QUEUED or any(row in state.phase for row in launch.after):
            return
        end = state.ends[launch.rank]
        if end is not None and end.gone:
            return
        if launch.workers is not None:
            if launch.row not in state.workers[launch.workers.key][: launch.workers.width]:
                return
            if self._host_has_lock(state, launch.rank):
                return
        if launch.is_unit:
            state.phase[launch.row] = Phase.RUNNING
            events.append(Started(launch.row))
        for part in launch.parts:
            state.phase[part.row] = Phase.RUNNING
            events.append(Started(part.row))
        for part in launch.parts:
            self._arrive(state, part, events)

    def _finish(self, state: State, row: int, events: list[Event]) -> None:
        del state.phase[row]
        mate = state.mates.pop(row, None)
        if mate is not None:
            state.mates.pop(mate, None)
        events.append(Done(row))
        unit = self.unit_of.get(row)
        if unit is None:
            self._released(state, row, events)
        elif not any(part.row in state.phase for part in self.launches[unit].parts):
            del state.phase[unit]
            events.append(Done(unit))
            self._released(state, unit, events)

    def _released(self, state: State, row: int, events: list[Event]) -> None:
        """A launch has ended: what waited behind it may start."""
        launch = self.launches.get(row)
        if launch is None:
            return
        state.open[launch.rank] -= 1
        if launch.workers is not None:
            queue = state.workers[launch.workers.key]
            queue.remove(row)
            if not queue:
                del state.workers[launch.workers.key]
            for other in queue[: launch.workers.width]:
                self._try_start(state, self.launches[other], events)
        for follower in self.followers.get(row, ()):
            self._try_start(state, self.launches[follower], events)

    # --- what does not fit ---
    def _abort(self, state: State, events: list[Event]) -> None:
        """G14: the processes that a mismatch kills."""
        i = 0
        while i < len(events):
            event = events[i]
            for rank in event.crash if isinstance(event, Mismatched) else ():
                leave = Leave(self.position(state, rank), "crashed", "aborted: what came did not fit the buffer")
                self._leave(state, rank, leave, events)
            i += 1
