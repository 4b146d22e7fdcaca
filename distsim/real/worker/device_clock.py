"""When the work of a call was done: by the host's clock on the CPU, by CUDA events on a GPU, mapped
onto the host's clock.

A device has its own clock, which only tells the time between two of its events. So each rank
synchronises the two clocks before and after the program: an event on an idle stream lies between
the host's times before its record and after its end, and half of that span is the error. Times
between the two points are interpolated, so the error is that of the worse one, and the rounding of
cudaEventElapsedTime, a float32 of milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from distsim.real.shared.progress_file import FINISHED, LAUNCHED, ProgressField, ProgressFile

if TYPE_CHECKING:
    from torch.cuda import Event, Stream
    from torch.distributed import Work

_now = time.monotonic_ns
#: Records of an event to choose the closest of.
_SYNC_TRIES = 20
#: How often launches are looked at while the program runs.
_POLL_S = 0.005
#: cudaEventElapsedTime's float32 has 24 bits.
_EVENT_ROUNDING = 2.0**-24


class ClockSyncPoint(NamedTuple):
    """An event whose time by the host's clock is known: ``host_ns``, off by ``error_ns`` at
    most.
    """

    event: Event
    host_ns: int
    error_ns: int


class DeviceWork(NamedTuple):
    """Work that a device was given: the call's position, its lines in the table, what it runs on,
    events before and behind it.
    """

    position: int
    cells: Sequence[int]
    queue: Hashable
    begin: Event
    end: Event
    compute: bool


class HostClock:
    """The CPU's: a blocking call's work is done when it returns, that of an async collective when
    its Work says so.
    """

    on_device = False
    error_ns = 0

    def __init__(self, tracks_futures: bool) -> None:
        self.tracks_futures = tracks_futures
        self.cells = memoryview(b"")

    def start(self, cells: memoryview) -> None:
        """A repetition begins, which writes into this table."""
        self.cells = cells

    def before(self) -> Event | None:
        """Called right before the work is given out; `done` and `follow` want what it returns."""
        return None

    def done(
        self,
        began: Event | None,
        position: int,
        cells: Sequence[int],
        queue: Hashable = "",
        compute: bool = False,
    ) -> None:
        """The call has waited for its work itself, or its work is the last on the current
        stream.
        """
        now = _now()
        for cell in cells:
            self.cells[cell + FINISHED] = now

    def follow(
        self,
        began: Event | None,
        position: int,
        cells: Sequence[int],
        works: Sequence[Work],
        queue: Hashable = "",
    ) -> None:
        """The work goes on by itself: note when it is done, even if nobody waits for it."""
        if not self.tracks_futures or len(works) != 1 or len(cells) != 1:
            return
        table, cell = self.cells, cells[0]

        def done(_: object) -> None:
            if table[cell + FINISHED] < 0:
                table[cell + FINISHED] = _now()

        with suppress(
            RuntimeError
        ):  # some of gloo's Works have no future; their finish is when the wait returns
            works[0].get_future().add_done_callback(done)

    def waited(self, position: int, cells: Sequence[int]) -> None:
        """A wait for the work has returned."""
        now = _now()
        for cell in cells:
            if self.cells[cell + FINISHED] < 0:
                self.cells[cell + FINISHED] = now

    def stream(self, name: str) -> AbstractContextManager[object]:
        """A context in which calls go to a named stream."""
        return nullcontext()

    def wait_stream(self, name: str, other: str) -> None:
        """What a stream is given from here on starts when the other has finished what it holds
        now.
        """

    def synchronize(self) -> None:
        """The host waits for the device."""

    def finish(self) -> None:
        """The repetition is over: all times are written."""


class DeviceClock(HostClock):
    """A GPU's. ``cuda``: torch.cuda; ``probes``: the Works' wait only makes a stream wait (nccl),
    so that one more may wait at once.
    """

    on_device = True

    def __init__(self, board: ProgressFile, cuda: ModuleType, probes: bool) -> None:
        super().__init__(tracks_futures=False)
        self.board, self.cuda, self.probes = board, cuda, probes
        self.streams: dict[str, Stream] = {}
        self._watchers: dict[Hashable, Stream] = {}
        self._synced: list[ClockSyncPoint] = []
        self._all: list[DeviceWork] = []
        self._pending: dict[Hashable, deque[DeviceWork]] = {}
        self._followed: set[int] = set()
        self._began: dict[int, Event | None] = {}
        self._looker: threading.Thread | None = None
        self._over = threading.Event()

    # --- a repetition ---
    def start(self, cells: memoryview) -> None:
        super().start(cells)
        for held in (self._all, self._pending, self._followed, self._began):
            held.clear()
        self.cuda.synchronize()
        self._synced = [self._sync()]
        self._over.clear()
        self._looker = threading.Thread(target=self._look_on, daemon=True)
        self._looker.start()

    def finish(self) -> None:
        """Wait for the device, synchronise the clocks again, and write all its times anew by both
        points.
        """
        try:
            self.cuda.synchronize()
        finally:
            self._over.set()
            if self._looker is not None:
                self._looker.join()
        self._look(everything=True)
        self._synced.append(self._sync())
        first, last = self._synced
        span_ms = first.event.elapsed_time(last.event)
        self.error_ns = (
            max(first.error_ns, last.error_ns) + int(span_ms * 1e6 * _EVENT_ROUNDING) + 1
        )
        self.board.words[ProgressField.CLOCK_ERROR_NS] = self.error_ns
        self._write(self._all, lambda event: _interpolated_ns(first, last, span_ms, event))

    def _sync(self) -> ClockSyncPoint:
        """The closest of several: an event on an idle device, between the host's times around
        it.
        """
        found: list[ClockSyncPoint] = []
        for _ in range(_SYNC_TRIES):
            event = self._event()
            before = _now()
            event.record()
            event.synchronize()
            after = _now()
            found.append(ClockSyncPoint(event, (before + after) // 2, (after - before + 1) // 2))
        return min(found, key=lambda point: point.error_ns)

    def _event(self) -> Event:
        event: Event = self.cuda.Event(enable_timing=True)
        return event

    # --- launches ---
    def before(self) -> Event:
        event = self._event()
        event.record()
        return event

    def done(
        self,
        began: Event | None,
        position: int,
        cells: Sequence[int],
        queue: Hashable = "",
        compute: bool = False,
    ) -> None:
        self._keep(position, cells, queue, began, self.before(), compute)

    def follow(
        self,
        began: Event | None,
        position: int,
        cells: Sequence[int],
        works: Sequence[Work],
        queue: Hashable = "",
    ) -> None:
        """A stream of its own waits for the Works, so that an event behind them tells their end
        even if the program never asks.

        No ``works``: a wait for them would stop the host.
        """
        if not self.probes or not works:
            self._began.update(dict.fromkeys(cells, began))
            return
        watcher = self._watchers.get(queue)
        if (
            watcher is None
        ):  # of the other pool than the back end's streams: no two of them are the same one
            watcher = self._watchers[queue] = self.cuda.Stream(priority=-1)
        with self.cuda.stream(watcher):
            for work in works:
                work.wait()
            end = self.before()
        self._followed.update(cells)
        self._keep(position, cells, queue, began, end)

    def waited(self, position: int, cells: Sequence[int]) -> None:
        """Where no stream waits for the Work, its end is when the current stream gets past the wait
        for it.
        """
        rest = [cell for cell in cells if cell not in self._followed and cell in self._began]
        if rest:
            self._keep(position, rest, ("wait", position), self._began[rest[0]], self.before())
        for cell in rest:
            del self._began[cell]

    def _keep(
        self,
        position: int,
        cells: Sequence[int],
        queue: Hashable,
        began: Event | None,
        end: Event,
        compute: bool = False,
    ) -> None:
        assert began is not None, "the clock of a device marks every beginning"
        work = DeviceWork(position, cells, queue, began, end, compute)
        self._all.append(work)
        self._pending.setdefault(queue, deque()).append(work)

    def stream(self, name: str) -> AbstractContextManager[object]:
        return nullcontext() if name in ("", "host") else self.cuda.stream(self._stream(name))

    def wait_stream(self, name: str, other: str) -> None:
        self._stream(name).wait_stream(self._stream(other))

    def _stream(self, name: str) -> Stream:
        if name not in self.streams:
            self.streams[name] = self.cuda.Stream() if name else self.cuda.default_stream()
        return self.streams[name]

    def synchronize(self) -> None:
        self.cuda.synchronize()

    # --- while it runs ---
    def _look_on(self) -> None:
        """Say on the board where the device is, until the repetition is over: the host may be far
        ahead of it, or stuck in a call.
        """
        while not self._over.wait(_POLL_S):
            with suppress(RuntimeError):  # a device that has failed says so to the host's next call
                self._look()

    def _look(self, everything: bool = False) -> None:
        words, done, first = self.board.words, [], None
        for queue in list(self._pending.values()):
            while queue and (everything or _is_done(queue[0].end)):
                done.append(queue.popleft())
            if queue:
                head = queue[0]
                first = head.position if first is None else min(first, head.position)
                if head.compute and _is_done(head.begin):
                    words[ProgressField.PROGRESS] += 1  # at work
        words[ProgressField.DEVICE] = 0 if first is None else first + 1
        if done and not everything:
            words[ProgressField.PROGRESS] += 1
            first_sync = self._synced[0]
            self._write(
                done,
                lambda event: (
                    first_sync.host_ns + round(first_sync.event.elapsed_time(event) * 1e6)
                ),
            )

    def _write(self, works: Sequence[DeviceWork], at_ns: Callable[[Event], int]) -> None:
        """Times of launches, each queue's one after the other: on it a launch starts when the one
        before it is done.
        """
        free: dict[Hashable, int] = {}
        for work in works:
            end_ns = at_ns(work.end)
            begin_ns = min(max(at_ns(work.begin), free.get(work.queue, 0)), end_ns)
            free[work.queue] = end_ns
            for cell in work.cells:
                self.cells[cell + LAUNCHED] = max(begin_ns, self.cells[cell])
                self.cells[cell + FINISHED] = max(end_ns, self.cells[cell])


def _is_done(event: Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _interpolated_ns(
    first: ClockSyncPoint, last: ClockSyncPoint, span_ms: float, event: Event
) -> int:
    """An event's time by the host's clock, on the line through both points."""
    since_ms = float(first.event.elapsed_time(event))
    if span_ms <= 0:
        return first.host_ns + round(since_ms * 1e6)
    return first.host_ns + round(since_ms / span_ms * (last.host_ns - first.host_ns))
