"""A rank's side of the connection to the hub.

One connection goes out. It carries what all threads of the rank report, so the order of calls is
kept. Each thread that waits has a reply connection of its own. One more thread reads notices.

Messages for which no thread waits are collected, and sent with the next message that needs a reply
or when the hub asks for them: a system call per message would dominate the run. The messages are
listed in `distsim.script_capture.protocol.message_types`.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from distsim.script_capture.cuda.stream_log import DEFAULT_STREAM, StreamLog, StreamStep
from distsim.script_capture.protocol.blocked_threads import threads_on_timer
from distsim.script_capture.protocol.message_types import NO_CALL_SITE, CallOrigin
from distsim.script_capture.protocol.wire import (
    READ_SIZE,
    EncodingCache,
    FrameDecoder,
    HubAddress,
    PayloadLocation,
    PayloadReader,
    SharedMemoryAllocator,
    SharedMemoryRegions,
    connect_to_hub,
    encode_frame,
    encode_repeated_frame,
    encoded_call_number,
    result_frame_prefix,
    send_introduction,
)
from distsim.script_capture.rank.call_sites import CallSiteFinder

if TYPE_CHECKING:
    from distsim.script_capture.compute.kernel_counter import KernelCounter

#: More collected messages than this are sent at once.
_MAX_HELD_MESSAGES: Final = 64
_MAIN_THREAD: Final = 0
_NO_SITE: Final = 0
_NO_GROUP: Final = 0

#: The message, and its inline payloads.
HubReply = tuple[list[Any], PayloadReader]


class CachedResult(NamedTuple):
    """The result of a repeated receive.

    Its bytes are at ``address`` of the thread's buffer. If the reply has another form, ``address``
    is 0 and ``reply`` holds it.
    """

    number: int
    address: int
    reply: HubReply | None


class _ReplyConnection(threading.local):
    """The reply connection of the current thread."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.token = 0
        self.decoder = FrameDecoder()
        self.buffer = bytearray(READ_SIZE)
        self.buffer_address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))


class HubClient:
    """The connections of one process.

    ``rank`` is its global rank, -1 before it is known. Its region of shared memory has that number,
    and ``arena`` is None if there is no such region. ``templates`` are the numbers of calls that
    are made repeatedly. ``in_backward`` says that a future was requested for which C++ waits at the
    end of the backward pass.
    """

    def __init__(
        self, address: HubAddress, regions: SharedMemoryRegions, sites: CallSiteFinder
    ) -> None:
        self.address = address
        self.regions = regions
        self.sites = sites
        self.rank = -1
        self.arena: SharedMemoryAllocator | None = None
        self.on_done: Callable[[list[object], PayloadReader], None] | None = None
        self.counter: KernelCounter | None = None
        self.streams: StreamLog | None = None
        self.on_stream_step: Callable[[StreamStep], None] | None = None
        self._reset()
        os.register_at_fork(after_in_child=self._after_fork)

    def _reset(self) -> None:
        """Everything that a forked process must not share with its parent."""
        self._lock = threading.RLock()
        self._out: socket.socket | None = None
        self._sockets: list[socket.socket] = []
        self._reply_connection = _ReplyConnection()
        self._tokens = itertools.count(1)

        self._held_messages: list[Sequence[object]] = []
        self._held_blobs: list[bytes] = []
        self._encodings = EncodingCache()
        self.templates: dict[object, int] = {}
        self.groups: dict[object, int] = {}
        self.in_backward = False
        self._numbers = itertools.count(1)
        self._site_numbers: dict[CallOrigin, int] = {}
        self._sites = [NO_CALL_SITE]

        # Threads by Python's ident; their numbers count from the main thread.
        self._main_ident = threading.get_ident()
        self._speaking_ident = self._main_ident
        self._speaking_thread = _MAIN_THREAD
        self._thread_numbers = {self._main_ident: _MAIN_THREAD}
        #: By number of a thread: the current stream that was reported last.
        self._reported_streams: dict[int, str] = {}
        #: The thread that reads notices; 0 while another one is about to take over.
        self._notice_ident = 0
        self._incoming_notices: Iterator[tuple[list[Any], bytes]] = iter(())

    def _after_fork(self) -> None:
        """A child is not a rank until it joins, and must not use its parent's connections."""
        for connection in self._sockets:
            connection.close()
        self.rank = -1
        self.arena = None
        if self.counter is not None:
            self.counter.take()
        self._reset()

    # --- connections ---
    @property
    def joined(self) -> bool:
        """Whether the process is connected to the hub."""
        return self._out is not None

    def join(self, rank: int, world_size: int) -> None:
        """Connect to the hub, and become a rank unless ``rank`` is negative.

        Raises RuntimeError if the process cannot be this rank.
        """
        if self._out is None:
            self._out = self._connect()
            send_introduction(self._out, self.address, ["out", os.getpid()])
            self._start_notice_thread()
        if rank >= 0 and self.rank < 0:
            self.rank = rank
            has_region = rank < len(self.regions.maps)
            self.arena = SharedMemoryAllocator(self.regions, rank) if has_region else None
            self.request(["rank", rank, world_size])

    def _connect(self) -> socket.socket:
        connection = connect_to_hub(self.address)
        self._sockets.append(connection)
        return connection

    def _open_reply_connection(self) -> _ReplyConnection:
        """This thread's reply connection, opened if necessary."""
        connection = self._reply_connection
        if connection.socket is None:
            connection.socket = self._connect()
            connection.token = next(self._tokens)
            thread_id = threading.get_native_id()
            descriptor = connection.socket.fileno()
            introduction = ["line", os.getpid(), connection.token, thread_id, descriptor]
            send_introduction(connection.socket, self.address, introduction)
            self._read_reply(connection)
        return connection

    def _read_reply(self, connection: _ReplyConnection, data: bytes = b"") -> HubReply:
        """The next reply. ``data``: its first bytes, if they have been read already."""
        assert connection.socket is not None
        while True:
            data = data or connection.socket.recv(READ_SIZE)
            if not data:
                os._exit(1)  # the hub has ended, and no other rank can be reached without it
            for message, blob in connection.decoder.feed(data):
                return message, PayloadReader(blob)
            data = b""

    # --- sending ---
    def queue(self, message: Sequence[object], blobs: Sequence[bytes] = ()) -> None:
        """Send it with the next message: no thread waits for it."""
        with self._lock:
            if threading.get_ident() != self._speaking_ident:
                self._announce_thread()
            self._held_messages.append(message)
            self._held_blobs += blobs
            if len(self._held_messages) > _MAX_HELD_MESSAGES:
                self.flush()

    def _announce_thread(self) -> None:
        """Report that the following messages are those of another thread.

        Threads that C++ started count as the main thread: they work for it, as autograd's do in a
        backward pass.
        """
        self._speaking_ident = threading.get_ident()
        thread = self._thread_number()
        if thread != self._speaking_thread:
            self._speaking_thread = thread
            self._held_messages.append(["thread", thread])

    def _thread_number(self) -> int:
        """The number of the current thread."""
        ident = threading.get_ident()
        thread = self._thread_numbers.get(ident)
        if thread is None:
            started_by_cpp = isinstance(threading.current_thread(), threading._DummyThread)
            thread = _MAIN_THREAD if started_by_cpp else len(self._thread_numbers)
            self._thread_numbers[ident] = thread
        return thread

    def post(self, message: Sequence[object], blobs: Sequence[bytes] = ()) -> None:
        """Send a call for which this rank does not wait yet.

        The hub asks only for calls that a main thread holds back, so other threads send at once.
        """
        if threading.get_ident() == self._main_ident:
            self.queue(message, blobs)
        else:
            self.send(message, blobs)

    def send(self, message: Sequence[object], blobs: Sequence[bytes] = ()) -> None:
        """Send it now."""
        with self._lock:
            if threading.get_ident() not in (self._speaking_ident, self._notice_ident):
                self._announce_thread()
            self._held_messages.append(message)
            self._held_blobs += blobs
            self.flush()

    def flush(self) -> None:
        """Send everything that was collected."""
        with self._lock:
            if self._out is None or not self._held_messages:
                return
            if list in map(type, self._held_messages):
                frame = encode_frame(self._held_messages, self._held_blobs)
            else:
                # Messages that will be repeated are tuples, so they can be the key of the cache.
                text = self._encodings.of(tuple(self._held_messages), None)
                frame = encode_repeated_frame(text, self._held_blobs)
            self._held_messages = []
            self._held_blobs = []
            try:
                self._out.sendall(frame)
            except OSError:
                os._exit(1)

    def request(self, message: Sequence[object], blobs: Sequence[bytes] = ()) -> HubReply:
        """Send it and wait for the reply. Raises the error that the hub replies with."""
        self.hand_over_notices()
        connection = self._open_reply_connection()
        if type(message) is tuple:
            self.send(("ask", connection.token, *message), blobs)
        else:
            self.send(["ask", connection.token, *message], blobs)
        return self._checked_reply(connection)

    def _checked_reply(self, connection: _ReplyConnection, data: bytes = b"") -> HubReply:
        message, payloads = self._read_reply(connection, data)
        if message[0] == "raise":
            _, kind, text = message
            raise _exception_from_reply(kind, text)
        return message, payloads

    # --- repeated calls ---
    def register_template(self, key: object, facts: Sequence[object]) -> int:
        """Define a call that will be made repeatedly. Returns its number.

        ``facts`` are the first fields of `distsim.script_capture.hub.matching.CallTemplate`.
        """
        with self._lock:
            template = self.templates[key] = len(self.templates) + 1
            self.queue(["template", template, *facts])
        return template

    def send_cached(self, template: int, payload: bytes) -> None:
        """Make a repeated call that no thread waits for, as `post` does."""
        with self._lock:
            ident = threading.get_ident()
            if ident != self._speaking_ident:
                self._announce_thread()
            self._held_blobs += (encoded_call_number(self._next_two_numbers()), payload)
            self._held_messages.append(("repeat", template))
            if ident != self._main_ident or len(self._held_messages) > _MAX_HELD_MESSAGES:
                self.flush()

    def receive_cached(self, template: int, source: int, count: int) -> CachedResult:
        """Make a repeated call, and wait for its ``count`` bytes from rank ``source``.

        The expected reply is recognised by its first bytes, without decoding it.
        """
        connection = self._open_reply_connection()
        with self._lock:
            if threading.get_ident() != self._speaking_ident:
                self._announce_thread()
            number = self._next_two_numbers()
            self._held_blobs.append(encoded_call_number(number))
            self._held_messages.append(("ask", connection.token, "repeat", template))
            self.flush()
        prefix = result_frame_prefix(source, count)
        buffer = connection.buffer
        assert connection.socket is not None
        received = connection.socket.recv_into(buffer)
        if received == len(prefix) + count and buffer.startswith(prefix):
            return CachedResult(number, connection.buffer_address + len(prefix), None)
        data = bytes(buffer[:received]) or connection.socket.recv(READ_SIZE)
        return CachedResult(number, 0, self._checked_reply(connection, data))

    # --- numbers of events ---
    def next_number(self) -> int:
        """The next number in the order of events of this rank.

        What was computed until now is reported first, so its event has the number before.
        """
        if self.rank >= 0:
            if self.streams is not None:
                self.report_streams()
            if self.counter is not None:
                self.report_computed()
        return next(self._numbers)

    def _next_two_numbers(self) -> int:
        """As `next_number`, for a call and the wait for it. The caller holds the lock."""
        reports = self.counter is not None or self.streams is not None
        first = self.next_number() if reports else next(self._numbers)
        next(self._numbers)
        return first

    def unordered_number(self) -> int:
        """A number for what can happen at any time, such as the end of an unused request."""
        return next(self._numbers)

    def report_computed(self, at_end: bool = False) -> None:
        """Report what was computed since the last time, if anything.

        ``at_end``: the script has ended, so there is no line that it could have.
        """
        if self.counter is None:
            return
        interval = self.counter.take()
        if not interval.kernels:
            return
        number = next(self._numbers)
        site = _NO_SITE if at_end else self.site(4)
        kernels = [[*kernel, count] for kernel, count in interval.kernels]
        self.queue(["event", number, site, "compute", _NO_GROUP, {"kernels": kernels}])

    def report_streams(self, depth: int = 4) -> None:
        """Report what streams did since the last time, and which one is current, if it is news.

        What was computed before is reported first. The call site is searched from ``depth`` frames
        up.
        """
        if self.streams is None or self.rank < 0:
            return
        with self._lock:
            thread = self._thread_number()
            current = self.streams.current()
            steps = self.streams.take()
            if not steps and current == self._reported_streams.get(thread, DEFAULT_STREAM):
                return
            if self.on_stream_step is not None:
                for step in steps:
                    self.on_stream_step(step)
            self.report_computed()
            self._reported_streams[thread] = current
            site = self.site(depth) if steps else _NO_SITE
            self.queue(["streams", next(self._numbers), site, steps, current])

    # --- call sites ---
    def site(self, depth: int = 3) -> int:
        """The number of the call site, searched from ``depth`` frames up."""
        return self.site_of(self.sites.where(depth))

    def site_of(self, origin: CallOrigin) -> int:
        """The number of a place; the hub learns its meaning once."""
        number = self._site_numbers.get(origin)
        if number is None:
            with self._lock:
                number = self._site_numbers[origin] = len(self._site_numbers) + 1
                self._sites.append(origin)
                self.queue(["site", number, *origin])
        return number

    def origin_of(self, site: int) -> CallOrigin:
        """The place that a number of a call site means."""
        return self._sites[site]

    # --- notices ---
    def _start_notice_thread(self) -> None:
        started = threading.Event()
        threading.Thread(
            target=self._run_notice_thread, args=(started,), name="distsim", daemon=True
        ).start()
        started.wait()

    def _run_notice_thread(self, started: threading.Event) -> None:
        connection = self._connect()
        thread_id = threading.get_native_id()
        introduction = ["notices", os.getpid(), thread_id, connection.fileno()]
        send_introduction(connection, self.address, introduction)
        self._incoming_notices = _incoming_messages(connection)
        self._notice_ident = threading.get_ident()
        started.set()
        self._handle_notices()

    def _handle_notices(self) -> None:
        """Handle one notice after the other, until another thread takes over."""
        own_ident = self._notice_ident = threading.get_ident()
        for message, blob in self._incoming_notices:
            if message[0] == "threads":
                self.send(["threads", self.idle_threads()])
            elif message[0] == "done" and self.on_done is not None:
                self.on_done(message, PayloadReader(blob))
            if self._notice_ident != own_ident:
                return  # a callback of the future waited: see `hand_over_notices`
            self.send(["heard"])

    def hand_over_notices(self) -> None:
        """Call this before a wait: the thread that handles notices must not wait itself.

        A callback of a future runs in that thread. If it waits, another thread handles the notices
        from here on, because one of them may be what the callback waits for.
        """
        if threading.get_ident() == self._notice_ident:
            self._notice_ident = 0
            self.send(["heard"])
            threading.Thread(target=self._handle_notices, name="distsim", daemon=True).start()

    def idle_threads(self) -> list[int]:
        """Native ids of threads that never make a call of the script.

        Daemon threads without a frame of the user's, and threads of libraries that sleep on a
        timer, as Kineto's does while a profiler runs.
        """
        frames = sys._current_frames()
        python_threads = threading.enumerate()
        idle_daemons = []
        for thread in python_threads:
            is_busy = self.sites.is_busy(frames.get(thread.ident or 0))
            if thread.daemon and thread.native_id and not is_busy:
                idle_daemons.append(thread.native_id)
        on_timer = set(threads_on_timer(os.getpid()))
        on_timer.difference_update(thread.native_id for thread in python_threads)
        return [*idle_daemons, *on_timer]

    # --- payloads ---
    def allocate_payload(self, count: int) -> tuple[int, PayloadLocation] | None:
        """Address and location of room in this rank's region.

        None if there is none; then the payload travels in the frame.
        """
        if self.arena is None:
            return None
        offset = self.arena.take(count)
        if offset is None:
            return None
        return self.arena.address(offset), [self.arena.region, offset, count]


def _incoming_messages(connection: socket.socket) -> Iterator[tuple[list[Any], bytes]]:
    """What arrives on a connection, until it is closed."""
    decoder = FrameDecoder()
    while data := connection.recv(READ_SIZE):
        yield from decoder.feed(data)


def _exception_from_reply(kind: str, text: str) -> BaseException:
    if kind == "store":
        from torch.distributed import DistStoreError

        return DistStoreError(text)
    return RuntimeError(text)
