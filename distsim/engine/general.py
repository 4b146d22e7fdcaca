"""The time-ordered engine: the explicit rules (`distsim.rules`), driven by simpy's clock.

Everything happens at its own time, so the order of arrival is true: any-source receives, shared network cards, queues, dying
ranks, all three profiles. One process per rank follows the host; a transfer or a piece of device work is a plain timeout with a
callback. Slower than the fast engine, which a property test holds to this one.

Times: a pair finishes at max(both ready) + price, for both sides; a send that runs ahead of its receive is done when it is ready
and its data arrives at ready + price; a member of a collective finishes at max(arrival of those it needs) + price.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import simpy

from distsim.cost import CostModel
from distsim.engine.deadlines import Deadlines, Late, outlasts, run_with
from distsim.engine.record import Columns
from distsim.errors import UsageError
from distsim.match import ANY, Take
from distsim.ops.table import OPS
from distsim.profiles import Profile
from distsim.program.records import Program
from distsim.rules import (
    FINISH,
    STEP,
    TAKE,
    Choice,
    Done,
    Due,
    Ended,
    Event,
    Leave,
    Met,
    Mismatched,
    Part,
    PartKind,
    Phase,
    Released,
    Rules,
    Started,
    any_source,
    standstill,
)  # fmt: skip
from distsim.rules.code import Drop, Instruction, Meet, Post, Stuck, Wait
from distsim.semantics.durations import duration_ns
from distsim.standstill import Standstill


@dataclass(frozen=True)
class Ordered:
    """What a run left. ``matches``: rows that met, in the order in which the last of them finished. ``mismatches``: rows that met
    and differ, the fields in which they do, and the profile's outcome. ``end_ns``: when the last thing happened. ``late``: calls whose
    timeout ran out. ``undefined``: ranks that are stuck where the back end leaves open what happens."""

    columns: Columns
    standstill: Standstill
    matches: tuple[tuple[int, ...], ...]
    mismatches: tuple[tuple[tuple[int, ...], tuple[str, ...], str], ...]
    end_ns: int
    queues: Mapping[int, str]
    late: tuple[Late, ...] = ()
    undefined: tuple[int, ...] = ()


#: A call, or a part of a batch: rank, position, part (-1: none). And which message each receive from any source must take.
CallKey = tuple[int, int, int]
Follow = Mapping[CallKey, CallKey]


def simulate_in_order(program: Program, profile: Profile, cost: CostModel, follow: Follow | None = None) -> Ordered:
    """Run a program to its end or to a standstill; once more with deadlines, if a wait lasted longer than a timeout.

    A receive that ``follow`` names waits for its message although others are there. Raises UsageError where that never comes.
    """
    left = _Engine(program, profile, cost, follow=follow or {}).run()
    late = outlasts(program, profile, left.columns)
    return _Engine(program, profile, cost, timed=True, follow=follow or {}).run() if late else left


_ANEW = "`distsim check FILE --format json` writes it anew, for this file"


class _Engine:
    def __init__(self, program: Program, profile: Profile, cost: CostModel, follow: Follow, timed: bool = False) -> None:
        self.program, self.cost = program, cost
        self.rules = Rules(program, profile)
        self.state = self.rules.initial()
        self.deadlines = Deadlines(self.rules, self.state) if timed else None
        self.env: Any = simpy.Environment()
        self.columns = Columns(program)
        size = program.world_size
        self.wake: list[Any] = [None] * size  # the event that a blocked host waits for
        self.since = [0] * size  # when a host blocked, or ended
        self.position = [-1] * size  # the call that a host is in
        self.mates: dict[int, int] = {}
        self.arrival: dict[int, int] = {}  # of a message: when its data, or the notice of it, is at the receiver
        self.busy: dict[str, int] = {}  # a card's direction, or a process's loop -> until when
        self.delays: dict[Any, int] = {}  # of collectives, by the key under which they met
        self.met: list[tuple[int, ...]] = []
        self.differ: dict[Any, tuple[tuple[int, ...], tuple[str, ...], str]] = {}
        self.complete: dict[Any, tuple[int, ...]] = {}
        self.open_sources = any_source(program)
        self.follow = {self._row_of(receive): self._row_of(send) for receive, send in follow.items()}
        self.take_at = -1
        self.fresh: list[int] = []  # receives from any source that were posted just now

    def run(self) -> Ordered:
        for fault in self.program.faults:
            if fault.at_ns is not None and fault.kind in ("kill", "raise", "exit", "fail"):
                self._later(fault.at_ns, lambda f=fault: self._strike(f.rank, f.kind, f.code))
        for rank, end in enumerate(self.state.ends):
            if end is None:
                self.env.process(self._host(rank))
        if self.deadlines is None:
            self.env.run()
        else:
            run_with(self.env, self.deadlines, self.since, self._expire)
        return self._result()

    # --- hosts ---
    def _host(self, rank: int) -> Generator[Any, Any, None]:
        late = sum(f.delay_ns for f in self.program.faults if f.kind == "late" and f.rank == rank)
        if late:
            yield self.env.timeout(late)
        state, rules, code, blocked = self.state, self.rules, self.rules.code[rank], False
        while state.ends[rank] is None:
            instruction = code[state.pc[rank]]
            if instruction.position != self.position[rank]:
                self._enter(rank, instruction.position)
            if rules.can_step(state, rank):
                if isinstance(instruction, Drop) and self.rules.parts[instruction.row].position < instruction.position:
                    yield self.env.timeout(0)  # a request of an earlier call: whoever posts at this instant meets it first
                self._note_wait(instruction)
                self._do(Choice(STEP, rank))
                if self.deadlines is not None and isinstance(instruction, Post):
                    self.deadlines.enqueued(rank, instruction.launch.row, self.env.now)
                blocked = False
                if isinstance(instruction, Meet) and rules.can_step(state, rank):
                    yield self.env.timeout(0)  # the last to come lets the others go on first, in the order of their coming
            else:
                if not blocked:
                    blocked, self.since[rank] = True, self.env.now
                    if self.deadlines is not None:
                        self.deadlines.blocked(rank, self.env.now, instruction)
                self.wake[rank] = self.env.event()
                yield self.wake[rank]

    def _enter(self, rank: int, position: int) -> None:
        """The host goes on to its next call: the one before has returned."""
        now, before, code = self.env.now, self.position[rank], self.program.code(rank)
        base, offsets = self.columns.base[rank], code.offsets
        if before >= 0:
            for row in range(base + offsets[before], base + offsets[before + 1]):
                self.columns.returned[row] = now
        if position < len(code.calls):
            for row in range(base + offsets[position], base + offsets[position + 1]):
                self.columns.posted[row] = now
        self.position[rank] = position

    def _note_wait(self, instruction: Instruction) -> None:
        if isinstance(instruction, Wait):
            for row in instruction.waited:
                self.columns.waited[row] = self.env.now

    def _rouse(self, rank: int) -> None:
        event, self.wake[rank] = self.wake[rank], None
        if event is not None:
            event.succeed()

    def _strike(self, rank: int, kind: str, code: int) -> None:
        """A fault at a time."""
        if self.state.ends[rank] is not None:
            return
        status: Any = {"kill": "killed", "exit": "ended"}.get(kind, "raised")
        message = {"kill": "killed by a fault", "exit": f"exit {code} by a fault"}.get(kind, "raised by a fault")
        leave = Leave(self.rules.position(self.state, rank), status, message)
        self._handle(self.rules.kill(self.state, rank, leave))
        self._rouse(rank)

    def _expire(self) -> None:
        """A timeout runs out. A rank that is not in the wait itself finds its group closed when it comes to it (G10)."""
        if self.deadlines is None or self.deadlines.next_ns(self.since) != self.env.now:
            return
        rank, outcome = self.deadlines.expire()
        if isinstance(outcome, Leave):
            self._handle(self.rules.kill(self.state, rank, outcome))
        else:
            self.rules.close(self.state, rank, outcome)
        for other in range(len(self.wake)):
            self._rouse(other)

    # --- what happens ---
    def _do(self, choice: Choice) -> None:
        self._handle(self.rules.advance(self.state, choice))

    def _handle(self, events: list[Event]) -> None:
        """Write down what a choice brought about, and see to what follows from it."""
        at_once: list[int] = []
        for event in events:
            if isinstance(event, Due):
                end = self._end_ns(self.rules.parts[event.row])
                if end <= self.env.now:
                    at_once.append(event.row)
                else:
                    self._later(end, lambda row=event.row: self._finish(row))
            else:
                self._note(event)
        for row in at_once:
            self._finish(row)
        while self.fresh:
            self._take_what_waits(self.fresh.pop())
        if self.open_sources:
            self._look_for_takes()

    def _note(self, event: Event) -> None:
        now = self.env.now
        if isinstance(event, Done):
            self.columns.finished[event.row] = now
            self._rouse(self.rules.rank_of(event.row))
            if self.deadlines is not None and event.row in self.rules.launches:
                self.deadlines.done(self.rules.rank_of(event.row), now)
        elif isinstance(event, Started):
            if event.row in self.rules.parts:
                self.arrival.setdefault(event.row, now)
                if self.open_sources and self.rules.parts[event.row].peer == ANY:
                    self.fresh.append(event.row)
                if self.deadlines is not None:
                    self.deadlines.started(self.rules.parts[event.row], now)
            else:
                self.columns.started[event.row] = now
        elif isinstance(event, Met):
            self._note_met(event)
        elif isinstance(event, Mismatched):
            self.differ[event.rows if event.key is None else event.key] = (event.rows, event.fields, event.outcome)
        elif isinstance(event, Released):
            self._rouse(event.rank)
        elif isinstance(event, Ended):
            self.since[event.rank] = now
            for rank in range(len(self.wake)) if event.gone else ():
                self._rouse(rank)

    def _note_met(self, event: Met) -> None:
        for row in event.rows:
            self.columns.match[row] = min(event.rows)
        self.met.append(event.rows)
        if event.key is None:
            send, receive = event.rows
            self.mates[send], self.mates[receive] = receive, send
        else:
            self.complete[event.key] = event.rows

    def _finish(self, row: int) -> None:
        if self.state.phase.get(row) is Phase.DUE:
            self._do(Choice(FINISH, row))

    def _later(self, at_ns: int, act: Any) -> None:
        self.env.timeout(at_ns - self.env.now).callbacks.append(lambda _: act())

    # --- prices ---
    def _end_ns(self, part: Part) -> int:
        """When a row that is due finishes."""
        now, row = self.env.now, part.row
        self.columns.started[row] = now
        if part.kind is PartKind.WORK:
            return int(now) + (0 if part.op == "assign" else duration_ns(self.program, self.cost, part.rank, part.position))
        if part.kind is PartKind.COLLECTIVE:
            return int(now) + self._collective_ns(part)
        mate = self.mates.get(row)
        if part.kind is PartKind.SEND:
            self.arrival[row] = self._pass(part)
            if mate is None and self.open_sources:
                self._later(self.arrival[row], self._take)
            return int(now) if mate is None else self.arrival[row]
        return max(int(now), self.arrival[self.mates[row]])

    def _collective_ns(self, part: Part) -> int:
        row = OPS[part.op]
        if row.kind != "collective":
            return 0
        root = part.members[part.root] if row.root_field is not None else None
        price = self.cost.collective_ns(row, part.members, part.nbytes, root)
        if not self.cost.cluster.shared_links:
            return price
        return price + self._delay(part, price - self.cost.collective_ns(row, part.members, 0, root))

    def _delay(self, part: Part, moving_ns: int) -> int:
        """How long a collective waits until its members have moved what they took on before. The first member to start decides."""
        if part.box not in self.delays:
            loops, now = self.cost.loops_of(part.members), int(self.env.now)
            start = max([now, *(self.busy.get(loop.id, 0) for loop in loops)])
            self.busy |= {loop.id: start + moving_ns for loop in loops}
            self.delays[part.box] = start - now
        return self.delays[part.box]

    def _pass(self, part: Part) -> int:
        """When a message that leaves now is there.

        Where cards are shared, it waits until those on its way are free: first come, first served, busy for bytes / bandwidth.
        """
        start = int(self.env.now)
        cards = self.cost.nics_of(part.rank, part.peer) if self.cost.cluster.shared_links else ()
        start = max([start, *(self.busy.get(card.id, 0) for card in cards)])
        for card in cards:
            self.busy[card.id] = start + ceil(part.nbytes / card.bytes_per_ns)
        return start + self.cost.p2p_ns(part.rank, part.peer, part.nbytes)

    # --- receives from any source ---
    def _row_of(self, call: CallKey) -> int:
        """The row of a call that a schedule names."""
        rank, position, part = call
        size = self.program.world_size
        calls = self.program.code(rank).calls if 0 <= rank < size else []
        if not 0 <= position < len(calls) or not -1 <= part < len(calls[position].parts):
            raise UsageError(f"the schedule names call {position} of rank {rank}, which is not there", _ANEW)
        return self.columns.row(self.program, rank, position, part)

    def _allowed(self, take: Take) -> bool:
        """The schedule, if there is one, lets the receive take this message."""
        return self.follow.get(take.receive, take.send) == take.send

    def _misfits(self) -> None:
        """Raise where a receive still waits for a message that its schedule names, although it could take another."""
        for take in self.state.matcher.takes():
            if not self._allowed(take):
                part = self.rules.parts[take.receive]
                raise UsageError(f"the schedule does not fit: rank {part.rank} never gets the message that it must take", _ANEW)

    def _look_for_takes(self) -> None:
        """Decide once all that happens at this instant has happened."""
        if self.take_at != self.env.now and self.state.matcher.takes():
            self.take_at = self.env.now
            self._later(self.env.now, self._take)

    def _take_what_waits(self, receive: int) -> None:
        """A receive from any source takes at once what was there before it: "among waiting messages the first arrived wins" (2.1)."""
        parts = self.rules.parts
        if parts[receive].kind is not PartKind.RECEIVE or self.state.phase.get(receive) is not Phase.RUNNING:
            return
        there = [take for take in self.state.matcher.takes_of(parts[receive].box)
                 if take.receive == receive and self.arrival[take.send] < self.env.now and self._allowed(take)]  # fmt: skip
        if there:
            self._do(Choice(TAKE, *min(there, key=lambda take: (self.arrival[take.send], parts[take.send].rank))))

    def _take(self) -> None:
        """Each any-source receive takes what arrived first (at one instant: from the lowest rank)."""
        self.take_at = -1
        parts = self.rules.parts
        there = [take for take in self.state.matcher.takes() if self.arrival[take.send] <= self.env.now and self._allowed(take)]
        if there:
            first = min(there, key=lambda take: (self.arrival[take.send], parts[take.send].rank, take.receive))
            self._do(Choice(TAKE, *first))

    # --- the end ---
    def _result(self) -> Ordered:
        self._misfits()
        finished = self.columns.finished
        still = standstill(self.rules, self.state)
        ends = tuple(end if end.status == "absent" else replace(end, at_ns=self.since[end.rank]) for end in still.ends)
        blocked = tuple(b._replace(since_ns=self.since[b.rank]) for b in still.blocked)
        done = [(max(finished[row] for row in rows), min(rows), rows) for rows in self.met]
        matches = tuple(rows for end, _, rows in sorted(done) if end >= 0)
        differ = tuple((self.complete.get(key, rows), fields, outcome) for key, (rows, fields, outcome) in self.differ.items())
        end_ns = max([0, *self.since, *(end for end, _, _ in done), max(finished, default=0)])
        launches = self.rules.launches.values()
        queues = {part.row: launch.queue for launch in launches for part in launch.parts if launch.queue}
        return Ordered(self.columns, Standstill(ends, blocked, still.unreceived), matches, differ, end_ns, queues,
                       tuple(self.deadlines.late) if self.deadlines is not None else (), self._undefined())  # fmt: skip

    def _undefined(self) -> tuple[int, ...]:
        here = ((rank, self.rules.code[rank][self.state.pc[rank]]) for rank, end in enumerate(self.state.ends) if end is None)
        return tuple(rank for rank, instruction in here if isinstance(instruction, Stuck) and instruction.undefined)
