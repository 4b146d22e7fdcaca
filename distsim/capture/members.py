"""Records of the hub: a process, its lines, what it asked, what it said it did."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple

from distsim.capture.matching import Posted, Team
from distsim.capture.repeats import Shape
from distsim.capture.wire import Frames, Texts, frame, frame_again, result_head

Place = tuple[str, int, str, str]
#: Answers of the hub, but for the numbers of their tensors.
_RESULTS: Final = Texts()


class Failure(NamedTuple):
    """How a process ended: ``how`` is ended, raised, exited or killed.

    ``refused``: where torch took exception to an argument, the code of the finding that says so.
    """

    how: str
    code: int = 0
    text: str = ""
    place: Place = ("", 0, "", "")
    trace: str = ""
    refused: str = ""


def failure_of_status(code: int) -> Failure:
    """Of a process that said nothing itself. ``code``: its exit status, or the negative number of the signal that ended it."""
    if code < 0:
        with suppress(ValueError):
            return Failure("killed", code, signal.Signals(-code).name)
        return Failure("killed", code, f"signal {-code}")
    return Failure("exited" if code else "ended", code)


@dataclass(slots=True)
class Event:
    """Something that a rank did, in the order of ``number``. ``targets``: the calls that a wait or a drop is about."""

    number: int
    kind: str
    site: int
    call: Posted | None = None
    is_async: bool = False
    batch: int = 0
    targets: tuple[int, ...] = ()
    team: Team | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    lane: int = 0  # which of the rank's threads; 0 is the main one and those of C++ that work for it
    waited: bool = False  # a call, and the wait for it, which has the next number

    def wait(self) -> Event:
        """The wait for it, of a call that is waited for at once; itself of any other."""
        return Event(self.number + 1, "wait", self.site, targets=(self.number,), lane=self.lane) if self.waited else self


def told_apart(events: Sequence[Event]) -> list[Event]:
    """Events in order, each wait by itself."""
    waits = [e.wait() for e in events if e.waited]
    return sorted([*events, *waits], key=attrgetter("number"))


@dataclass(eq=False)
class Line:
    """A connection. ``remote``: its descriptor on the other side, where thread ``tid`` reads it."""

    socket: socket.socket
    kind: str = ""
    member: Member | None = None
    tid: int = 0
    remote: int = -1
    owed: Question | None = None
    frames: Frames = field(default_factory=Frames)

    def send(self, data: bytes) -> None:
        with suppress(OSError):  # the rank has ended; its end is told elsewhere
            self.socket.sendall(data)

    def gives(self, source: int, payload: bytes) -> None:
        """A result of one payload."""
        self.owed = None
        try:
            self.socket.sendall(result_head(source, len(payload)) + payload)
        except OSError:  # as in `send`
            return

    def result(self, call: Posted, verb: str = "result") -> None:
        found = call.outs or []
        if verb == "result" and len(found) == 1 and len(found[0]) == 1 and isinstance(found[0][0], bytes):  # as most are
            self.gives(call.source, found[0][0])
            return
        outs, blobs = carried(found)
        if verb == "done":
            self.send(frame([verb, outs, call.source, call.number], blobs))
            return
        key = (call.source, *[tuple([tuple(piece) for piece in pieces]) for pieces in outs])
        self.send(frame_again(_RESULTS.of(key, lambda: [verb, outs, call.source]), blobs))


@dataclass(eq=False, slots=True)
class Question:
    """A thread that waits for an answer, and for what."""

    line: Line
    call: Posted | None = None
    poll: Posted | None = None
    keys: Sequence[str] | None = None
    pops: bool = False  # what comes next out of the queues of these names
    space: str = ""
    meeting: str = ""
    site: int = 0
    limit_ns: int | None = None
    since: float = field(default_factory=time.monotonic)
    event: Event | None = None  # the call or the wait that it is

    def answer(self, message: Sequence[object]) -> None:
        self.line.owed = None
        self.line.send(frame(message))

    def result(self, call: Posted) -> None:
        self.line.owed = None
        self.line.result(call)

    def refuse(self, kind: str, text: str) -> None:
        self.answer(["raise", kind, text])


@dataclass(eq=False)
class Member:
    """A process of the program."""

    pid: int
    rank: int = -1
    planned: int = -1
    lines: dict[int, Line] = field(default_factory=dict)
    notices: Line | None = None
    unheard: int = 0
    idle: frozenset[int] = frozenset()
    sites: dict[int, Place] = field(default_factory=dict)
    teams: dict[int, Team] = field(default_factory=dict)
    shapes: dict[int, Shape] = field(default_factory=dict)
    made: dict[Any, int] = field(default_factory=dict)
    calls: dict[int, Posted] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    waiting: dict[int, Question] = field(default_factory=dict)
    futures: set[int] = field(default_factory=set)
    lane: int = 0  # the thread that speaks
    ended: Failure | None = None
    gone: bool = False
    asked_at: int = -1  # the hub's progress when it last asked for what this member has not said yet

    @property
    def over(self) -> bool:
        return self.gone

    def as_it_stands(self) -> Member:
        """A copy that stays as this one is now."""
        return replace(self, events=list(self.events), waiting=dict(self.waiting), futures=set(self.futures))

    def opens(self, line: Line, message: Sequence[Any]) -> None:
        """A connection of this process says what it is for."""
        line.kind = message[0]
        if line.kind == "line":
            line.tid, line.remote = message[3], message[4]
            self.lines[message[2]] = line
            line.send(frame(["ok"]))
        elif line.kind == "notices":
            line.tid, line.remote = message[2], message[3]
            self.notices = line

    def heard(self, *_: object) -> None:
        """It has read a notice."""
        self.unheard -= 1

    def threads(self, message: Sequence[Any], *_: object) -> None:
        """Which of its threads run no line of the user's."""
        self.idle = frozenset(message[1])

    def polls_wait(self) -> None:
        """Who asks whether a call is done waits for it."""
        for number, question in self.waiting.items():
            if question.poll is not None:
                self.events.append(Event(number, "wait", question.site, targets=(question.poll.number,)))

    def note(self, event: Event) -> None:
        event.lane = self.lane
        self.events.append(event)

    def asks(self, question: Question, call: Posted, site: int) -> None:
        """A thread waits for a call, by what it did last."""
        question.call, question.site, question.event = call, site, self.events[-1]
        self.waiting[call.number] = question

    def is_waiting(self) -> bool:
        """It waits for the hub in some thread, and has read all that was said to it."""
        return self.unheard == 0 and (bool(self.futures) or any(line.owed is not None for line in self.lines.values()))

    def remotes(self) -> set[int]:
        """Descriptors on which a wait is one for the hub: of lines that are owed an answer, and that of notices."""
        found = {line.remote for line in self.lines.values() if line.owed is not None}
        return found | ({self.notices.remote} if self.notices is not None else set())

    def may_hold(self) -> bool:
        """Can there be calls that it made and has not said? Not where its main thread has asked something."""
        return self.notices is not None and not any(
            line.owed is not None and line.tid == self.pid for line in self.lines.values()
        )

    def ask(self, what: str) -> None:
        """``threads``: which of them run no line of the user's. ``held``: to say what it has not said; any answer does that."""
        if self.notices is not None:
            self.unheard += 1
            self.notices.send(frame([what]))


def carried(outs: Sequence[Sequence[Any]]) -> tuple[list[list[list[int]]], list[bytes]]:
    """A result as a frame carries it, and the bytes beside it."""
    blobs = [payload for out in outs for payload in out if isinstance(payload, bytes)]
    return [[[len(p)] if isinstance(p, bytes) else p for p in out] for out in outs], blobs
