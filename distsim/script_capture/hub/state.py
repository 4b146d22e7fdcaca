"""What the hub knows: processes, their connections, what they did, and what they wait for.

The event loop, the cache of repeated calls and the handling of quiescence all work on one
`HubState`, so that none of them has to import another.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple

from distsim.backends.profile import BackendProfile
from distsim.script_capture.hub.matching import CallMatcher, CallTemplate, GroupInstance, RankCall
from distsim.script_capture.hub.store_server import StoreServer
from distsim.script_capture.protocol.message_types import CallOrigin, ProcessExit
from distsim.script_capture.protocol.wire import (
    EncodingCache,
    FrameDecoder,
    SharedMemoryRegions,
    encode_frame,
    encode_repeated_frame,
    result_frame_prefix,
)

#: Texts of results, which the shapes of their payloads determine.
_RESULT_ENCODINGS: Final = EncodingCache()
#: `RankProcess.rank` of a process that has not joined the world.
NO_RANK: Final = -1


@dataclass(slots=True)
class HubEvent:
    """Something that a rank did. ``number`` orders the events of a rank.

    ``targets`` are the numbers of the calls that a wait or a drop is about. ``thread`` numbers the
    rank's threads; 0 is the main thread, and C++ threads that work for it. ``waited`` marks a call
    together with the wait for it, which has the next number. ``stream`` is the CUDA stream that was
    current, "" for the default one.
    """

    number: int
    kind: str
    site: int
    call: RankCall | None = None
    is_async: bool = False
    batch: int = 0
    targets: tuple[int, ...] = ()
    group: GroupInstance | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    thread: int = 0
    waited: bool = False
    stream: str = ""

    def wait(self) -> HubEvent:
        """The wait of a call that is waited for at once; the event itself for any other."""
        if not self.waited:
            return self
        return HubEvent(
            self.number + 1,
            "wait",
            self.site,
            targets=(self.number,),
            thread=self.thread,
            stream=self.stream,
        )


def with_separate_waits(events: Sequence[HubEvent]) -> list[HubEvent]:
    """Events in order, each wait as an event of its own."""
    waits = [event.wait() for event in events if event.waited]
    return sorted([*events, *waits], key=attrgetter("number"))


@dataclass(eq=False)
class HubConnection:
    """A connection to a process.

    ``kind`` is "out", "line" (a reply connection) or "notices". ``remote_descriptor`` is its
    descriptor in the process, where thread ``thread_id`` reads it. ``pending`` is the reply that is
    still to be sent on it.
    """

    socket: socket.socket
    kind: str = ""
    process: RankProcess | None = None
    thread_id: int = 0
    remote_descriptor: int = -1
    pending: PendingReply | None = None
    decoder: FrameDecoder = field(default_factory=FrameDecoder)
    #: Bytes of a first message that is not complete yet.
    introduction: bytes = b""

    def send(self, data: bytes) -> None:
        """Send bytes to the process, if it still runs."""
        with suppress(OSError):  # the rank has ended, which the out connection reports
            self.socket.sendall(data)

    def send_payload(self, source: int, payload: bytes) -> None:
        """Reply with a result of one payload. The hot path, hence no call of `send`."""
        self.pending = None
        try:
            self.socket.sendall(result_frame_prefix(source, len(payload)) + payload)
        except OSError:  # as in `send`
            return

    def send_result(self, call: RankCall) -> None:
        """Reply with the result of a call."""
        results = call.results or []
        if len(results) == 1 and len(results[0]) == 1:
            payload = results[0][0]
            if isinstance(payload, bytes):
                self.send_payload(call.source, payload)
                return
        locations, blobs = encoded_outputs(results)
        key = (call.source, *[tuple([tuple(piece) for piece in pieces]) for pieces in locations])
        text = _RESULT_ENCODINGS.of(key, lambda: ["result", locations, call.source])
        self.send(encode_repeated_frame(text, blobs))

    def send_done_notice(self, call: RankCall) -> None:
        """Send the result of a call that a future waits for."""
        locations, blobs = encoded_outputs(call.results or [])
        self.send(encode_frame(["done", locations, call.source, call.number], blobs))


@dataclass(eq=False, slots=True)
class PendingReply:
    """A thread of a rank that waits for a reply.

    It waits for one of:

    - a call (``call``),
    - the answer to a poll (``polled_call``),
    - keys of the store (``keys``; with ``pops``, for elements of their queues),
    - all ranks, in a start-up call (``startup_op``).

    ``event`` is the call or the wait that the thread is in.
    """

    connection: HubConnection
    call: RankCall | None = None
    polled_call: RankCall | None = None
    keys: Sequence[str] | None = None
    pops: bool = False
    space: str = ""
    startup_op: str = ""
    site: int = 0
    timeout_ns: int | None = None
    since: float = field(default_factory=time.monotonic)
    event: HubEvent | None = None

    def reply(self, message: Sequence[object]) -> None:
        """Send the reply: the thread continues."""
        self.connection.pending = None
        self.connection.send(encode_frame(message))

    def reply_result(self, call: RankCall) -> None:
        """Reply with the result of a call."""
        self.connection.pending = None
        self.connection.send_result(call)

    def reply_error(self, kind: str, text: str) -> None:
        """Let the thread raise: ``kind`` "store" is a DistStoreError, "error" a RuntimeError."""
        self.reply(["raise", kind, text])


class ValueReport(NamedTuple):
    """Checksums that a rank reports at a step, of values that ``ranks`` must share.

    ``owner``: the number of the model or optimizer on its rank.
    """

    kind: str
    owner: int
    ranks: tuple[int, ...]
    step: int
    place: CallOrigin
    entries: tuple[tuple[str, str], ...]


@dataclass(eq=False)
class RankProcess:
    """A process of the program.

    ``rank`` is `NO_RANK` until it joins the world. ``planned`` is the rank that it was started as,
    -1 if the script starts its ranks itself. ``waiting`` has the threads that wait, by the number
    of the call, of the poll or of the store operation. ``futures`` are numbers of calls that a
    future waits for. ``counts`` says how often the process created a group or made a start-up call.
    ``asked_at_progress`` is the hub's progress when it last asked for calls that were not sent yet.
    """

    pid: int
    rank: int = NO_RANK
    planned: int = -1
    connections: dict[int, HubConnection] = field(default_factory=dict)
    notices: HubConnection | None = None
    unread_notices: int = 0
    idle_threads: frozenset[int] = frozenset()
    sites: dict[int, CallOrigin] = field(default_factory=dict)
    groups: dict[int, GroupInstance] = field(default_factory=dict)
    templates: dict[int, CallTemplate] = field(default_factory=dict)
    counts: dict[Any, int] = field(default_factory=dict)
    calls: dict[int, RankCall] = field(default_factory=dict)
    events: list[HubEvent] = field(default_factory=list)
    waiting: dict[int, PendingReply] = field(default_factory=dict)
    futures: set[int] = field(default_factory=set)
    #: The thread that made the messages that arrive now.
    thread: int = 0
    #: The current CUDA stream of each thread that has selected one.
    streams: dict[int, str] = field(default_factory=dict)
    ended: ProcessExit | None = None
    disconnected: bool = False
    asked_at_progress: int = -1
    values: list[ValueReport] = field(default_factory=list)

    def snapshot(self) -> RankProcess:
        """A copy that stays as this record is now."""
        return replace(
            self, events=list(self.events), waiting=dict(self.waiting), futures=set(self.futures)
        )

    def register_connection(self, connection: HubConnection, message: Sequence[Any]) -> None:
        """Handle the first message of a connection, which says what the connection is for."""
        connection.kind = message[0]
        if connection.kind == "line":
            _, _, token, connection.thread_id, connection.remote_descriptor = message
            self.connections[token] = connection
            connection.send(encode_frame(["ok"]))
        elif connection.kind == "notices":
            _, _, connection.thread_id, connection.remote_descriptor = message
            self.notices = connection

    def next_count(self, key: object) -> int:
        """How often this key has been counted, this time included."""
        count = self.counts[key] = self.counts.get(key, 0) + 1
        return count

    def add_event(self, event: HubEvent) -> None:
        """Add an event of the thread whose messages arrive now."""
        event.thread = self.thread
        event.stream = self.streams.get(self.thread, "")
        self.events.append(event)

    def wait_for(self, pending: PendingReply, call: RankCall, site: int) -> None:
        """Note that a thread waits for a call, in the event that was added last."""
        pending.call = call
        pending.site = site
        pending.event = self.events[-1]
        self.waiting[call.number] = pending

    def record_polls_as_waits(self) -> None:
        """Add a wait for each poll: a thread that polls until a call is done waits for it."""
        for number, pending in self.waiting.items():
            if pending.polled_call is not None:
                targets = (pending.polled_call.number,)
                self.events.append(HubEvent(number, "wait", pending.site, targets=targets))

    def is_waiting(self) -> bool:
        """Whether one of its threads waits for the hub, and it has handled all notices."""
        if self.unread_notices:
            return False
        return bool(self.futures) or any(
            connection.pending is not None for connection in self.connections.values()
        )

    def hub_descriptors(self) -> set[int]:
        """Descriptors in the process on which a read is a wait for the hub."""
        found = {
            connection.remote_descriptor
            for connection in self.connections.values()
            if connection.pending is not None
        }
        if self.notices is not None:
            found.add(self.notices.remote_descriptor)
        return found

    def may_hold_calls(self) -> bool:
        """Whether it can have made calls that it has not sent yet.

        A process sends its calls before its main thread waits for a reply.
        """
        if self.notices is None:
            return False
        return not any(
            connection.pending is not None and connection.thread_id == self.pid
            for connection in self.connections.values()
        )

    def notify(self, verb: str) -> None:
        """Send a notice: "threads" or "held" (`distsim.script_capture.protocol.message_types`)."""
        if self.notices is not None:
            self.unread_notices += 1
            self.notices.send(encode_frame([verb]))


def encoded_outputs(
    outputs: Sequence[Sequence[Any]],
) -> tuple[list[list[list[int]]], list[bytes]]:
    """A result as a frame carries it: locations of the payloads, and the inline payloads."""
    blobs: list[bytes] = []
    locations: list[list[list[int]]] = []
    for output in outputs:
        pieces: list[list[int]] = []
        for payload in output:
            if isinstance(payload, bytes):
                pieces.append([len(payload)])
                blobs.append(payload)
            else:
                pieces.append(payload)
        locations.append(pieces)
    return locations, blobs


class HubState:
    """One hub's processes, worlds and calls.

    A script may start several worlds, one after the other. ``ranks``, ``world_size``, ``matcher``
    and ``store`` are those of the current one; ``past_worlds`` has sizes and ranks of earlier ones.
    ``progress`` counts everything that ranks did, apart from polls and unsuccessful checks.
    ``polls`` counts the polls answered since then.
    """

    def __init__(self, regions: SharedMemoryRegions, profile: BackendProfile) -> None:
        self.processes: dict[int, RankProcess] = {}  # by process id
        self.ranks: dict[int, RankProcess] = {}
        self.world_size = 0
        self.past_worlds: list[tuple[int, dict[int, RankProcess]]] = []
        self.matcher = CallMatcher(regions, profile)
        self.store = StoreServer()
        self.progress = 0
        self.polls = 0

    def running_processes(self) -> list[RankProcess]:
        """The ranks that have not ended; before all have joined, every process."""
        all_joined = self.world_size and len(self.ranks) == self.world_size
        processes = self.ranks if all_joined else self.processes
        return [process for process in processes.values() if not process.disconnected]

    def start_next_world(self) -> None:
        """Put the current world aside; groups, messages and keys of the store are not shared."""
        self.past_worlds.append((self.world_size, self.ranks))
        self.ranks = {}
        self.world_size = 0
        self.store = StoreServer()
        self.matcher = CallMatcher(self.matcher.regions, self.matcher.profile)

    def deliver(self, call: RankCall) -> None:
        """Send the result of a call that is done to the thread or the future that waits for it."""
        process = self.ranks[call.rank]
        pending = process.waiting.pop(call.number, None)
        if pending is not None:
            pending.reply_result(call)
            self.matcher.forget(call)
        elif call.number in process.futures and process.notices is not None:
            process.futures.discard(call.number)
            process.unread_notices += 1
            process.notices.send_done_notice(call)
            self.matcher.forget(call)
