"""The rules: what may happen in a state, and what it brings about. No clock; a driver chooses."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from distsim.match import ANY, Matcher
from distsim.ops.records import Call
from distsim.ops.table import OPS
from distsim.profiles.record import Meeting, Mishap
from distsim.rules.code import Drop, Launch, Leave, Meet, Part, PartKind, Post, Sync, Wait
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
    Met,
    Mismatched,
    Phase,
    Released,
    Started,
    State,
)  # fmt: skip
from distsim.rules.tables import Tables

#: What a gloo rank is told that waits for a transfer with a dead one (2.4).
PEER_CLOSED = "Connection closed by peer. This is typically caused by a remote worker crashing"


class Rules(Tables):
    """What may happen to a `State` of a program under a profile. The tables are static; only states change."""

    # --- states ---
    def initial(self) -> State:
        """Nobody has begun. Absent ranks never will."""
        n = self.program.world_size
        absent = {fault.rank for fault in self.program.faults if fault.kind == "absent"}
        ends: list[Leave | None] = [Leave(0, "absent") if rank in absent else None for rank in range(n)]
        return State([0] * n, ends, [0] * n, {}, {}, {}, {}, {}, {}, Matcher(self.profile.specific_first))

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
        return type(instruction) is not Meet or rank not in state.meets.get(instruction.key, ())

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
        return events

    def settle(self, state: State) -> list[Event]:
        """Run, in place, all that has no alternative: then `enabled` offers takes only, or nothing. What happened, in order."""
        events: list[Event] = []
        todo = deque(rank for rank in range(len(state.pc)) if state.ends[rank] is None)
        due = [row for row in sorted(state.phase) if state.phase[row] is Phase.DUE]
        while todo or due:
            if due:
                row = due.pop()
                new = self.advance(state, Choice(FINISH, row)) if state.phase.get(row) is Phase.DUE else []
            elif self.can_step(state, todo[0]):
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

    # --- the host ---
    def _step(self, state: State, rank: int, events: list[Event]) -> None:
        instruction = self.code[rank][state.pc[rank]]
        if isinstance(instruction, Post):
            state.pc[rank] += 1
            self._post(state, instruction.launch, events)
        elif isinstance(instruction, Wait) and any(row in state.phase for row in instruction.rows):
            self._leave(state, rank, Leave(instruction.position, "raised", PEER_CLOSED), events)
        elif isinstance(instruction, Meet):
            self._meet(state, rank, instruction, events)
        elif isinstance(instruction, Leave):
            self._leave(state, rank, instruction, events)
        else:
            state.pc[rank] += 1
            if isinstance(instruction, Drop):
                self._drop(state, instruction, events)

    def _meet(self, state: State, rank: int, instruction: Meet, events: list[Event]) -> None:
        there = state.meets.setdefault(instruction.key, [])
        there.append(rank)
        if len(there) == len(instruction.members):
            del state.meets[instruction.key]
            for member in there:
                state.pc[member] += 1
                events.append(Released(member))

    def _drop(self, state: State, instruction: Drop, events: list[Event]) -> None:
        """G4: gloo cancels a message that has met nobody. MPI ends the process (``~AsyncWork``)."""
        part = self.parts[instruction.row]
        if self.profile.dropped == "crashes":
            text = "Attempted destruction of AsyncWork before work has completed, terminating the program."
            self._leave(state, part.rank, Leave(instruction.position, "crashed", text), events)
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
        if launch.workers is not None and launch.row not in state.workers[launch.workers.key][: launch.workers.width]:
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

    # --- meeting ---
    def _arrive(self, state: State, part: Part, events: list[Event]) -> None:
        if part.kind is PartKind.WORK:
            self._due(state, part.row, events)
        elif part.kind is PartKind.COLLECTIVE:
            self._join(state, part, events)
        elif part.kind is PartKind.SEND:
            state.matcher.send(part.box, part.rank, part.row)
            self._run_ahead(state, part, events)
            self._meet_messages(state, part.box, part.rank, events)
        else:
            state.matcher.receive(part.box, part.peer, part.row)
            if part.peer != ANY:
                self._meet_messages(state, part.box, part.peer, events)

    def _meet_messages(self, state: State, box: Hashable, sender: int, events: list[Event]) -> None:
        while (pair := state.matcher.meet(box, sender)) is not None:
            self._pair(state, *pair, events)

    def _settle_box(self, state: State, box: Hashable, events: list[Event]) -> None:
        """An any-source receive is gone: messages of other senders may now be settled."""
        place = state.matcher.boxes.get(box)
        for sender in sorted(place.sends) if place is not None else ():
            self._meet_messages(state, box, sender, events)

    def _run_ahead(self, state: State, part: Part, events: list[Event]) -> None:
        """A send that the back end buffers is done with before its receive."""
        lane = (part.box, part.rank)
        ahead = state.ahead.get(lane, 0)
        if self.profile.credit(part.nbytes, ahead, self.program.options):
            state.ahead[lane] = ahead + part.nbytes
            self._due(state, part.row, events)

    def _pair(self, state: State, send: int, receive: int, events: list[Event]) -> None:
        sender, receiver = self.parts[send], self.parts[receive]
        events.append(Met((send, receive), None))
        same = sender.signature == receiver.signature and sender.tag == receiver.tag
        mishap = None if same else self._judge((send, receive), None, events)
        if state.phase.get(send) is Phase.RUNNING:
            state.mates[send], state.mates[receive] = receive, send
            self._due(state, send, events)
        else:
            lane = (sender.box, sender.rank)
            left = state.ahead.pop(lane, 0) - sender.nbytes
            if left > 0:
                state.ahead[lane] = left
            for row in state.matcher.waiting_sends(sender.box, sender.rank):
                if state.phase.get(row) is Phase.RUNNING:
                    self._run_ahead(state, self.parts[row], events)
        self._due(state, receive, events)
        if mishap is not None and mishap.crash:
            state.mates.pop(send, None)  # the data has left the sender: its send succeeds (G14)
            state.mates.pop(receive, None)
            self._crash(state, mishap, events)

    def _join(self, state: State, part: Part, events: list[Event]) -> None:
        there = state.matcher.join(part.box, part.rank, part.row)
        complete = len(there) == len(part.members)
        if complete:
            events.append(Met(tuple(there.values()), part.box))
        first = next(iter(there.values()))
        mishap = None
        if self.parts[first].signature != part.signature or (complete and self._uneven(there)):
            mishap = self._judge(tuple(there.values()), part.box, events)
        if state.phase.get(first) is Phase.JAMMED or (mishap is not None and mishap.hangs):
            self._jam(state, there)
        for row in self._ready(state, part, there, complete):
            self._due(state, row, events)
        if complete:
            state.matcher.close(part.box)
        if mishap is not None:
            self._crash(state, mishap, events)

    def _ready(self, state: State, part: Part, there: dict[int, int], complete: bool) -> list[int]:
        """Rows of a collective that need wait no longer."""
        if self.plain(part) and not complete:
            return []
        running = [row for row in there.values() if state.phase.get(row) is Phase.RUNNING]
        return running if complete else [row for row in running if not self.lacking(state, row)[0]]

    def _uneven(self, there: dict[int, int]) -> bool:
        """A pairwise operation whose parts may differ in size."""
        first = next(iter(there.values()))
        row = OPS[self.parts[first].op]
        if not row.pairwise:
            return False
        differ = any(self.parts[other].signature != self.parts[first].signature for other in there.values())
        return differ or "numel" not in row.agreement(self.call(first))

    def _jam(self, state: State, there: dict[int, int]) -> None:
        for rank, row in there.items():
            if state.phase.get(row) in (Phase.RUNNING, Phase.JAMMED):
                state.phase[row] = Phase.JAMMED
                state.jams[row] = tuple(r for r in there if r != rank)

    def _judge(self, rows: tuple[int, ...], key: Hashable, events: list[Event]) -> Mishap | None:
        """Do calls that met differ, in what, and what comes of it."""
        parts = [self.parts[row] for row in rows]
        calls = tuple(self.call(row) for row in rows)
        fields = differences(calls, key is None, len(rows) == len(parts[0].members))
        if key is None and parts[0].tag != parts[1].tag:
            fields += ("tag",)
        if not fields:
            return None
        nbytes = tuple(part.nbytes for part in parts)
        mishap = self.profile.mismatch(Meeting(fields, calls, nbytes, key is None))
        events.append(Mismatched(rows, fields, mishap.outcome, key))
        return mishap

    def _crash(self, state: State, mishap: Mishap, events: list[Event]) -> None:
        for rank in mishap.crash:
            leave = Leave(self.position(state, rank), "crashed", "aborted: what came did not fit the buffer")
            self._leave(state, rank, leave, events)

    def _due(self, state: State, row: int, events: list[Event]) -> None:
        state.phase[row] = Phase.DUE
        events.append(Due(row))


def differences(calls: tuple[Call, ...], is_message: bool, complete: bool) -> tuple[str, ...]:
    """The words in which calls that met differ (`agreement` of their rows).

    Of operations that agree pair by pair (all_to_all) the sizes are compared when all are there.
    """
    said = [OPS[c.op].agreement(c) if is_message else {"op": c.op, **OPS[c.op].agreement(c)} for c in calls]
    names = dict.fromkeys(name for words in said for name in words)
    fields = tuple(name for name in names if any(words.get(name) != said[0].get(name) for words in said))
    row = OPS[calls[0].op]
    if not row.pairwise or "op" in fields:
        return fields
    uneven = complete and ("numel" in fields or "numel" not in said[0])
    fields = tuple(name for name in fields if name not in ("numel", "splits"))
    return (*fields, "splits") if uneven and row.cross_faults(sorted(calls, key=lambda c: c.group_rank)) else fields
