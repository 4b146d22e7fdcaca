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

from distsim.script_capture.hub.call_templates import CallTemplate
from distsim.script_capture.hub.matching import GroupInstance, RankCall
from distsim.script_capture.protocol.wire import (
    EncodingCache,
    FrameDecoder,
    encode_frame,
    encode_repeated_frame,
    result_frame_prefix,
)

Place = tuple[str, int, str, str]
#: Answers of the hub, but for the numbers of their tensors.
_RESULT_ENCODINGS: Final = EncodingCache()


class ProcessExit(NamedTuple):
    """How a process ended: ``how`` is ended, raised, exited or killed.

    ``refused``: where torch took exception to an argument, the code of the finding that says so.
    """

    how: str
    code: int = 0
    text: str = ""
    place: Place = ("", 0, "", "")
    trace: str = ""
    refused: str = ""


def exit_of_status(code: int) -> ProcessExit:
    """Of a process that said nothing itself. ``code``: its exit status, or the negative number of
    the signal that ended it.
    """
    if code < 0:
        with suppress(ValueError):
            return ProcessExit("killed", code, signal.Signals(-code).name)
        return ProcessExit("killed", code, f"signal {-code}")
    return ProcessExit("exited" if code else "ended", code)


@dataclass(slots=True)
class HubEvent:
    """Something that a rank did, in the order of ``number``. ``targets``: the calls that a wait or
    a drop is about.
    """

    number: int
    kind: str
    site: int
    call: RankCall | None = None
    is_async: bool = False
    batch: int = 0
    targets: tuple[int, ...] = ()
    team: GroupInstance | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    lane: int = (
        0  # which of the rank's threads; 0 is the main one and those of C++ that work for it
    )
    waited: bool = False  # a call, and the wait for it, which has the next number

    def wait(self) -> HubEvent:
        """The wait for it, of a call that is waited for at once; itself of any other."""
        return (
            HubEvent(self.number + 1, "wait", self.site, targets=(self.number,), lane=self.lane)
            if self.waited
            else self
        )


def with_separate_waits(events: Sequence[HubEvent]) -> list[HubEvent]:
    """Events in order, each wait by itself."""
    waits = [e.wait() for e in events if e.waited]
    return sorted([*events, *waits], key=attrgetter("number"))


@dataclass(eq=False)
class HubConnection:
    """A connection. ``remote``: its descriptor on the other side, where thread ``tid`` reads it."""

    socket: socket.socket
    kind: str = ""
    member: RankProcess | None = None
    tid: int = 0
    remote: int = -1
    owed: PendingReply | None = None
    frames: FrameDecoder = field(default_factory=FrameDecoder)

    def send(self, data: bytes) -> None:
        with suppress(OSError):  # the rank has ended; its end is told elsewhere
            self.socket.sendall(data)

    def gives(self, source: int, payload: bytes) -> None:
        """A result of one payload."""
        self.owed = None
        try:
            self.socket.sendall(result_frame_prefix(source, len(payload)) + payload)
        except OSError:  # as in `send`
            return

    def result(self, call: RankCall, verb: str = "result") -> None:
        found = call.outs or []
        if (
            verb == "result"
            and len(found) == 1
            and len(found[0]) == 1
            and isinstance(found[0][0], bytes)
        ):  # as most are
            self.gives(call.source, found[0][0])
            return
        outs, blobs = encoded_outputs(found)
        if verb == "done":
            self.send(encode_frame([verb, outs, call.source, call.number], blobs))
            return
        key = (call.source, *[tuple([tuple(piece) for piece in pieces]) for pieces in outs])
        self.send(
            encode_repeated_frame(
                _RESULT_ENCODINGS.of(key, lambda: [verb, outs, call.source]), blobs
            )
        )


@dataclass(eq=False, slots=True)
class PendingReply:
    """A thread that waits for an answer, and for what."""

    line: HubConnection
    call: RankCall | None = None
    poll: RankCall | None = None
    keys: Sequence[str] | None = None
    pops: bool = False  # what comes next out of the queues of these names
    space: str = ""
    meeting: str = ""
    site: int = 0
    limit_ns: int | None = None
    since: float = field(default_factory=time.monotonic)
    event: HubEvent | None = None  # the call or the wait that it is

    def answer(self, message: Sequence[object]) -> None:
        self.line.owed = None
        self.line.send(encode_frame(message))

    def result(self, call: RankCall) -> None:
        self.line.owed = None
        self.line.result(call)

    def refuse(self, kind: str, text: str) -> None:
        self.answer(["raise", kind, text])


@dataclass(eq=False)
class RankProcess:
    """A process of the program."""

    pid: int
    rank: int = -1
    planned: int = -1
    lines: dict[int, HubConnection] = field(default_factory=dict)
    notices: HubConnection | None = None
    unread_notices: int = 0
    idle: frozenset[int] = frozenset()
    sites: dict[int, Place] = field(default_factory=dict)
    group_instances: dict[int, GroupInstance] = field(default_factory=dict)
    shapes: dict[int, CallTemplate] = field(default_factory=dict)
    made: dict[Any, int] = field(default_factory=dict)
    calls: dict[int, RankCall] = field(default_factory=dict)
    events: list[HubEvent] = field(default_factory=list)
    waiting: dict[int, PendingReply] = field(default_factory=dict)
    futures: set[int] = field(default_factory=set)
    lane: int = 0  # the thread that speaks
    ended: ProcessExit | None = None
    gone: bool = False
    asked_at_progress: int = (
        -1
    )  # the hub's progress when it last asked for what this member has not said yet

    @property
    def over(self) -> bool:
        return self.gone

    def snapshot(self) -> RankProcess:
        """A copy that stays as this one is now."""
        return replace(
            self, events=list(self.events), waiting=dict(self.waiting), futures=set(self.futures)
        )

    def opens(self, line: HubConnection, message: Sequence[Any]) -> None:
        """A connection of this process says what it is for."""
        line.kind = message[0]
        if line.kind == "line":
            line.tid, line.remote = message[3], message[4]
            self.lines[message[2]] = line
            line.send(encode_frame(["ok"]))
        elif line.kind == "notices":
            line.tid, line.remote = message[2], message[3]
            self.notices = line

    def heard(self, *_: object) -> None:
        """It has read a notice."""
        self.unread_notices -= 1

    def threads(self, message: Sequence[Any], *_: object) -> None:
        """Which of its threads run no line of the user's."""
        self.idle = frozenset(message[1])

    def record_polls_as_waits(self) -> None:
        """Who asks whether a call is done waits for it."""
        for number, question in self.waiting.items():
            if question.poll is not None:
                self.events.append(
                    HubEvent(number, "wait", question.site, targets=(question.poll.number,))
                )

    def note(self, event: HubEvent) -> None:
        event.lane = self.lane
        self.events.append(event)

    def asks(self, question: PendingReply, call: RankCall, site: int) -> None:
        """A thread waits for a call, by what it did last."""
        question.call, question.site, question.event = call, site, self.events[-1]
        self.waiting[call.number] = question

    def is_waiting(self) -> bool:
        """It waits for the hub in some thread, and has read all that was said to it."""
        return self.unread_notices == 0 and (
            bool(self.futures) or any(line.owed is not None for line in self.lines.values())
        )

    def hub_descriptors(self) -> set[int]:
        """Descriptors on which a wait is one for the hub: of lines that are owed an answer, and
        that of notices.
        """
        found = {line.remote for line in self.lines.values() if line.owed is not None}
        return found | ({self.notices.remote} if self.notices is not None else set())

    def may_hold_calls(self) -> bool:
        """Can there be calls that it made and has not said? Not where its main thread has asked
        something.
        """
        return self.notices is not None and not any(
            line.owed is not None and line.tid == self.pid for line in self.lines.values()
        )

    def ask(self, what: str) -> None:
        """``threads``: which of them run no line of the user's. ``held``: to say what it has not
        said; any answer does that.
        """
        if self.notices is not None:
            self.unread_notices += 1
            self.notices.send(encode_frame([what]))


def encoded_outputs(outs: Sequence[Sequence[Any]]) -> tuple[list[list[list[int]]], list[bytes]]:
    """A result as a frame carries it, and the bytes beside it."""
    blobs = [payload for out in outs for payload in out if isinstance(payload, bytes)]
    return [[[len(p)] if isinstance(p, bytes) else p for p in out] for out in outs], blobs
