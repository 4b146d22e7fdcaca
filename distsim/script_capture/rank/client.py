"""A rank's side of the hub: one line out, on which calls keep their order, and a line for the
answers of each thread.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from distsim.script_capture.hub.call_templates import encoded_call_number
from distsim.script_capture.protocol import blocked_threads
from distsim.script_capture.protocol.wire import (
    READ_SIZE,
    EncodingCache,
    FrameDecoder,
    PayloadLocation,
    PayloadReader,
    SharedMemoryAllocator,
    SharedMemoryRegions,
    connect_to_hub,
    encode_frame,
    encode_repeated_frame,
    result_frame_prefix,
)
from distsim.script_capture.rank.call_sites import NO_CALL_SITE, CallOrigin, CallSiteFinder

if TYPE_CHECKING:
    from distsim.script_capture.compute.kernel_counter import KernelCounter

#: What is collected before a thread asks for an answer; more goes at once.
_MAX_HELD_MESSAGES: Final = 64

HubReply = tuple[list[Any], PayloadReader]


class _ReplyConnection(threading.local):
    """The answering line of this thread."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.token = 0
        self.frames = FrameDecoder()
        self.room = bytearray(READ_SIZE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.room))


class HubClient:
    """One process. ``rank``: its global rank, -1 before it is known; its region of shared memory
    has that number.
    """

    def __init__(self, address: str, regions: SharedMemoryRegions, sites: CallSiteFinder) -> None:
        self.address, self.regions, self.sites = address, regions, sites
        self.rank = -1
        self.arena: SharedMemoryAllocator | None = None
        self.on_notice: Callable[[list[object], PayloadReader], None] | None = None
        self.counted: KernelCounter | None = None
        self._reset()
        os.register_at_fork(after_in_child=self._forked)

    def _reset(self) -> None:
        self._lock, self._main = threading.RLock(), threading.get_ident()
        self._speaker, self._lane, self._hears = self._main, 0, 0
        self._lanes = {self._main: 0}
        self._out: socket.socket | None = None
        self._held: list[Sequence[object]] = []
        self._held_blobs: list[bytes] = []
        self._texts = EncodingCache()
        self.shapes: dict[object, int] = {}  # names of calls that are made again
        self._line = _ReplyConnection()
        self._sockets: list[socket.socket] = []
        self._known: dict[CallOrigin, int] = {}
        self._places = [NO_CALL_SITE]
        self._tokens = itertools.count(1)
        self._numbers = itertools.count(1)
        self.in_backward = False  # futures were asked for that C++ waits for when the pass ends
        self.groups: dict[object, int] = {}
        self._coming: Iterator[tuple[list[Any], bytes]] = iter(())

    def _forked(self) -> None:
        """A child is no rank until it says so; its parent's lines are not its own."""
        for line in self._sockets:
            line.close()
        self.rank, self.arena = -1, None
        if self.counted is not None:
            self.counted.take()
        self._reset()

    # --- joining ---
    @property
    def joined(self) -> bool:
        return self._out is not None

    def join(self, rank: int, world: int) -> None:
        """Become a rank of the program. Raises RuntimeError where the hub has no place for it."""
        if self._out is None:
            self._out = self._open()
            self._out.sendall(encode_frame(["out", os.getpid()]))
            self._listen()
        if rank >= 0 and self.rank < 0:
            self.rank = rank
            self.arena = (
                SharedMemoryAllocator(self.regions, rank) if rank < len(self.regions.maps) else None
            )
            self.ask(["rank", rank, world])

    def _open(self) -> socket.socket:
        line = connect_to_hub(self.address)
        self._sockets.append(line)
        return line

    def _answers(self) -> _ReplyConnection:
        """This thread's line, open."""
        line = self._line
        if line.socket is None:
            line.socket, line.token = self._open(), next(self._tokens)
            line.socket.sendall(
                encode_frame(
                    [
                        "line",
                        os.getpid(),
                        line.token,
                        threading.get_native_id(),
                        line.socket.fileno(),
                    ]
                )
            )
            self._read(line)
        return line

    def _read(self, line: _ReplyConnection, data: bytes = b"") -> HubReply:
        """The next answer. ``data``: what of it was read."""
        assert line.socket is not None
        while True:
            data = data or line.socket.recv(READ_SIZE)
            if not data:
                os._exit(1)  # the hub is gone, and with it everybody whom this rank could meet
            for message, blob in line.frames.feed(data):
                return message, PayloadReader(blob)
            data = b""

    # --- saying ---
    def hold(self, message: Sequence[object], blobs: Sequence[bytes] = ()) -> None:
        """Say it with the next thing that is said: nobody waits for it."""
        with self._lock:
            if threading.get_ident() != self._speaker:
                self._speaks()
            self._held.append(message)
            self._held_blobs += blobs
            if len(self._held) > _MAX_HELD_MESSAGES:
                self.flush()

    def _speaks(self) -> None:
        """Another thread goes on: say which. Those that C++ made work for the main thread, as
        autograd's do in a backward pass.
        """
        self._speaker = threading.get_ident()
        lane = self._lanes.get(self._speaker)
        if lane is None:
            made_by_cpp = isinstance(threading.current_thread(), threading._DummyThread)
            lane = self._lanes[self._speaker] = 0 if made_by_cpp else len(self._lanes)
        if lane != self._lane:
            self._lane = lane
            self._held.append(["lane", lane])

    def post(self, message: Sequence[object], blobs: Sequence[bytes] = ()) -> None:
        """A call for which nobody here waits yet. The main thread says it with its next question,
        or where the hub asks for it.
        """
        (self.hold if threading.get_ident() == self._main else self.say)(message, blobs)

    def say(self, message: Sequence[object], blobs: Sequence[bytes] = ()) -> None:
        """Say it now."""
        with self._lock:
            if threading.get_ident() not in (self._speaker, self._hears):
                self._speaks()
            self._held.append(message)
            self._held_blobs += blobs
            self.flush()

    def flush(self) -> None:
        with self._lock:
            if self._out is not None and self._held:
                if list in map(type, self._held):
                    held = encode_frame(self._held, self._held_blobs)
                else:
                    held = encode_repeated_frame(
                        self._texts.of(tuple(self._held), None), self._held_blobs
                    )
                self._held, self._held_blobs = [], []
                try:
                    self._out.sendall(held)
                except OSError:
                    os._exit(1)

    def ask(self, message: Sequence[object], blobs: Sequence[bytes] = ()) -> HubReply:
        """Say it and wait for the answer. Raises what the hub answers with."""
        self.hand_over_notices()
        line = self._answers()
        self.say(
            ("ask", line.token, *message)
            if type(message) is tuple
            else ["ask", line.token, *message],
            blobs,
        )
        return self._heard(line)

    def _heard(self, line: _ReplyConnection, data: bytes = b"") -> HubReply:
        answer, found = self._read(line, data)
        if answer[0] == "raise":
            raise _exception_from_reply(answer[1], answer[2])
        return answer, found

    # --- saying again ---
    def send_cached(self, name: int, payload: bytes) -> None:
        """Make a call that is known by this name and waits for nobody, as `post` does."""
        with self._lock:
            thread = threading.get_ident()
            if thread != self._speaker:
                self._speaks()
            self._held_blobs += (encoded_call_number(self._pair()), payload)
            self._held.append(("again", name))
            if thread != self._main or len(self._held) > _MAX_HELD_MESSAGES:
                self.flush()

    def receive_cached(
        self, name: int, source: int, count: int
    ) -> tuple[int, int, HubReply | None]:
        """Make a call that is known by this name, and wait for its ``count`` bytes.

        Returns its number, and where the bytes lie; or the answer, where it is another.
        """
        line = self._answers()
        with self._lock:
            if threading.get_ident() != self._speaker:
                self._speaks()
            number = self._pair()
            self._held_blobs.append(encoded_call_number(number))
            self._held.append(("ask", line.token, "again", name))
            self.flush()
        head, room = result_frame_prefix(source, count), line.room
        assert line.socket is not None
        got = line.socket.recv_into(room)
        if got == len(head) + count and room.startswith(head):
            return number, line.address + len(head), None
        return number, 0, self._heard(line, bytes(room[:got]) or line.socket.recv(READ_SIZE))

    def number(self) -> int:
        """The next number in the order of what this rank does; what it computed until now has the
        one before.
        """
        if self.counted is not None and self.rank >= 0:
            self.report_computed()
        return next(self._numbers)

    def _pair(self) -> int:
        """As `number`, under the lock; the one behind it is the caller's as well."""
        first = next(self._numbers) if self.counted is None else self.number()
        next(self._numbers)
        return first

    def learn(self, key: object, facts: Sequence[object]) -> int:
        """A name for calls that are alike but for their numbers; ``facts`` as `repeats.Shape` has
        them. Told to the hub once.
        """
        with self._lock:
            name = self.shapes[key] = len(self.shapes) + 1
            self.hold(["shape", name, *facts])
        return name

    def aside(self) -> int:
        """A number for what may come at any time, as the end of a request that nobody holds."""
        return next(self._numbers)

    def report_computed(self, at_end: bool = False) -> None:
        """Say what was computed since the last time, if anything was. ``at_end``: there is no
        script any more whose line it could have.
        """
        stretch = self.counted.take() if self.counted is not None else None
        if stretch is not None and stretch.kernels:
            kernels = [[*kernel, count] for kernel, count in stretch.kernels]
            self.hold(
                [
                    "mark",
                    next(self._numbers),
                    0 if at_end else self.site(4),
                    "compute",
                    0,
                    {"kernels": kernels},
                ]
            )

    def site(self, depth: int = 3) -> int:
        """The number of the call site, told to the hub once."""
        return self.site_of(self.sites.where(depth))

    def site_of(self, where: CallOrigin) -> int:
        """The number of a place."""
        number = self._known.get(where)
        if number is None:
            with self._lock:
                number = self._known[where] = len(self._known) + 1
                self._places.append(where)
                self.hold(["site", number, *where])
        return number

    def place(self, site: int) -> CallOrigin:
        """Of a call site, by its number."""
        return self._places[site]

    # --- notices ---
    def _listen(self) -> None:
        started = threading.Event()
        threading.Thread(target=self._notices, args=(started,), name="distsim", daemon=True).start()
        started.wait()

    def _notices(self, started: threading.Event) -> None:
        line = self._open()
        line.sendall(
            encode_frame(["notices", os.getpid(), threading.get_native_id(), line.fileno()])
        )
        self._coming = _incoming_messages(line)
        self._hears = threading.get_ident()
        started.set()
        self._hear()

    def _hear(self) -> None:
        """Take one notice after the other, until another thread does it."""
        me = self._hears = threading.get_ident()
        for message, blob in self._coming:
            if message[0] == "threads":
                self.say(["threads", self.idle_threads()])
            elif message[0] == "done" and self.on_notice is not None:
                self.on_notice(message, PayloadReader(blob))
            if self._hears != me:
                return
            self.say(["heard"])

    def hand_over_notices(self) -> None:
        """Before a wait. In a callback of a future, another thread takes what comes from here on:
        it may be what the callback waits for.
        """
        if threading.get_ident() == self._hears:
            self._hears = 0
            self.say(["heard"])
            threading.Thread(target=self._hear, name="distsim", daemon=True).start()

    def idle_threads(self) -> list[int]:
        """Native ids of daemon threads in which no line of the user's is running, and of a
        library's own threads that sleep on a timer, as Kineto's does while a profiler runs."""
        frames, known = sys._current_frames(), threading.enumerate()
        daemons = [
            t.native_id or 0
            for t in known
            if t.daemon and t.native_id and not self.sites.is_busy(frames.get(t.ident or 0))
        ]
        return [
            *daemons,
            *set(blocked_threads.threads_on_timer(os.getpid())).difference(
                t.native_id for t in known
            ),
        ]

    # --- payloads ---
    def allocate_payload(self, count: int) -> tuple[int, PayloadLocation] | None:
        """(address, piece) of room in this rank's region; None where the payload travels in the
        frame.
        """
        if self.arena is None or (offset := self.arena.take(count)) is None:
            return None
        return self.arena.address(offset), [self.arena.region, offset, count]


def _incoming_messages(line: socket.socket) -> Iterator[tuple[list[Any], bytes]]:
    """What comes on a line, until it is closed."""
    frames = FrameDecoder()
    while data := line.recv(READ_SIZE):
        yield from frames.feed(data)


def _exception_from_reply(kind: str, text: str) -> BaseException:
    if kind == "store":
        from torch.distributed import DistStoreError

        return DistStoreError(text)
    if kind == "refused":
        return SystemExit(text)
    return RuntimeError(text)
