"""Records when the work of a call was finished, on the CPU or on a GPU.

On the CPU the host's clock says so. On a GPU, CUDA events are mapped onto the host's clock: a
device has its own clock, which only gives the time between two of its events. So each rank
synchronises the two clocks before and after the program. An event on an idle stream lies between
the host's times before its record and after its end, and half of that span is the error. Times
between these two points are interpolated. So the error is that of the worse point, plus the
rounding of cudaEventElapsedTime, which returns milliseconds as a float32.

Nothing here makes the host wait during the run: events are recorded and read later, by a thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from distsim.real.shared.progress_file import (
    FINISHED,
    LAUNCHED,
    NO_DEVICE_POSITION,
    ProgressField,
    ProgressFile,
)

if TYPE_CHECKING:
    from torch.cuda import Event, Stream
    from torch.distributed import Work

_now = time.monotonic_ns
#: How many events are recorded to choose the one with the smallest error.
_SYNC_TRIES = 20
#: How often the progress of the device is checked while the program runs.
_POLL_S = 0.005
#: cudaEventElapsedTime's float32 has 24 bits.
_EVENT_ROUNDING = 2.0**-24


class ClockSyncPoint(NamedTuple):
    """An event whose time on the host's clock is known, up to ``error_ns``."""

    event: Event
    host_ns: int
    error_ns: int


class DeviceWork(NamedTuple):
    """Work that was launched on a device.

    ``cells``: the rows of the call in the time table, as offsets of their first cells. ``queue``:
    works of one queue run one after the other. ``begin``, ``end``: events around the work.
    """

    position: int
    cells: Sequence[int]
    queue: Hashable
    begin: Event
    end: Event
    compute: bool


class HostClock:
    """The clock of ranks on the CPU.

    The work of a blocking call is finished when the call returns, that of an asynchronous
    collective when its Work says so. `DeviceClock` overrides all methods that differ on a GPU.
    """

    on_device = False
    error_ns = 0

    def __init__(self, tracks_futures: bool) -> None:
        self.tracks_futures = tracks_futures
        self.cells = memoryview(b"")

    def start(self, cells: memoryview) -> None:
        """A repetition begins; its times go to this table."""
        self.cells = cells

    def before(self) -> Event | None:
        """Call this before the work is launched; pass the result to `done` or `follow`."""
        return None

    def done(
        self,
        began: Event | None,
        position: int,
        cells: Sequence[int],
        queue: Hashable = "",
        compute: bool = False,
    ) -> None:
        """The call has waited for its work, or its work is the last on the current stream."""
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
        """The work continues in the background: record its end even if no call waits for it."""
        is_single = len(works) == 1 and len(cells) == 1
        if not self.tracks_futures or not is_single:
            return
        # Bound here, because `self.cells` is another table in the next repetition.
        table, cell = self.cells, cells[0]

        def done(_: object) -> None:
            if table[cell + FINISHED] < 0:
                table[cell + FINISHED] = _now()

        # Some of gloo's Works have no future; they are finished when the wait returns.
        with suppress(RuntimeError):
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
        """Later work of stream ``name`` starts after what ``other`` contains now."""

    def synchronize(self, stream: str = "") -> None:
        """The host waits for the device, or for one stream of it."""

    def finish(self) -> None:
        """The repetition is over: all times are written."""


class DeviceClock(HostClock):
    """The clock of ranks on a GPU.

    ``cuda``: torch.cuda. ``probes``: waiting for a Work only makes a stream wait (nccl), so an
    extra stream may wait at once to find out when the work ends.
    """

    on_device = True

    def __init__(self, progress: ProgressFile, cuda: ModuleType, probes: bool) -> None:
        super().__init__(tracks_futures=False)
        self.progress, self.cuda, self.probes = progress, cuda, probes
        self.streams: dict[str, Stream] = {}
        self._watchers: dict[Hashable, Stream] = {}
        self._synced: list[ClockSyncPoint] = []
        self._works: list[DeviceWork] = []
        self._pending: dict[Hashable, deque[DeviceWork]] = {}
        self._followed: set[int] = set()  # cells whose end a watcher stream records
        self._began: dict[int, Event | None] = {}  # by cell: work whose end only a wait will show
        self._poller: threading.Thread | None = None
        self._over = threading.Event()

    # --- a repetition ---
    def start(self, cells: memoryview) -> None:
        """Start the clock of a repetition, and the thread that polls the events."""
        super().start(cells)
        for collection in (self._works, self._pending, self._followed, self._began):
            collection.clear()
        self.cuda.synchronize()
        self._synced = [self._sync()]
        self._over.clear()
        self._poller = threading.Thread(target=self._poll, daemon=True)
        self._poller.start()

    def finish(self) -> None:
        """Wait for the device, synchronise the clocks again, and rewrite all times.

        While the program ran, times could only be derived from the first point; now both count.
        """
        try:
            self.cuda.synchronize()
        finally:
            self._over.set()
            if self._poller is not None:
                self._poller.join()
        self._clear_progress()
        self._synced.append(self._sync())
        first, last = self._synced
        span_ms = first.event.elapsed_time(last.event)
        self.error_ns = (
            max(first.error_ns, last.error_ns) + int(span_ms * 1e6 * _EVENT_ROUNDING) + 1
        )
        self.progress.words[ProgressField.CLOCK_ERROR_NS] = self.error_ns
        self._write_times(self._works, lambda event: _interpolated_ns(first, last, span_ms, event))

    def _sync(self) -> ClockSyncPoint:
        """The best of several events on the idle device, each between two times of the host."""
        points: list[ClockSyncPoint] = []
        for _ in range(_SYNC_TRIES):
            event = self._event()
            before = _now()
            event.record()
            event.synchronize()
            after = _now()
            points.append(ClockSyncPoint(event, (before + after) // 2, (after - before + 1) // 2))
        return min(points, key=lambda point: point.error_ns)

    def _event(self) -> Event:
        event: Event = self.cuda.Event(enable_timing=True)
        return event

    # --- launches ---
    def before(self) -> Event:
        """An event on the current stream, recorded before a call."""
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
        """Note the work of a call that began at ``began`` and was issued just now."""
        self._add_work(position, cells, queue, began, self.before(), compute)

    def follow(
        self,
        began: Event | None,
        position: int,
        cells: Sequence[int],
        works: Sequence[Work],
        queue: Hashable = "",
    ) -> None:
        """Let an extra stream wait for the Works, and record an event after that.

        So the end is known even if the program never waits. ``works`` is empty if waiting for them
        would stop the host; then the end is recorded in `waited`.
        """
        if not self.probes or not works:
            self._began.update(dict.fromkeys(cells, began))
            return
        watcher = self._watchers.get(queue)
        if watcher is None:
            # High priority, because torch takes these streams from another pool than those of the
            # backend: a watcher is never one of the backend's streams.
            watcher = self._watchers[queue] = self.cuda.Stream(priority=-1)
        with self.cuda.stream(watcher):
            for work in works:
                work.wait()
            end = self.before()
        self._followed.update(cells)
        self._add_work(position, cells, queue, began, end)

    def waited(self, position: int, cells: Sequence[int]) -> None:
        """Without an extra stream, the work ends when the current stream passes the wait."""
        unknown = [cell for cell in cells if cell in self._began and cell not in self._followed]
        if unknown:
            began = self._began[unknown[0]]
            self._add_work(position, unknown, ("wait", position), began, self.before())
        for cell in unknown:
            del self._began[cell]

    def _add_work(
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
        self._works.append(work)
        self._pending.setdefault(queue, deque()).append(work)

    def stream(self, name: str) -> AbstractContextManager[object]:
        """The context in which calls go to the stream of this name."""
        return nullcontext() if name in ("", "host") else self.cuda.stream(self._stream(name))

    def wait_stream(self, name: str, other: str) -> None:
        """Let one stream wait for the work issued on another so far."""
        self._stream(name).wait_stream(self._stream(other))

    def _stream(self, name: str) -> Stream:
        if name not in self.streams:
            self.streams[name] = self.cuda.Stream() if name else self.cuda.default_stream()
        return self.streams[name]

    def synchronize(self, stream: str = "") -> None:
        """Wait until the device, or one stream of it, has finished all work."""
        if stream:
            self._stream("" if stream == "current" else stream).synchronize()
        else:
            self.cuda.synchronize()

    # --- while it runs ---
    def _poll(self) -> None:
        """Write the device's progress until the repetition is over.

        The host may be far ahead of the device, or stuck in a call.
        """
        while not self._over.wait(_POLL_S):
            # A device that has failed reports this to the next call of the host.
            with suppress(RuntimeError):
                self._update_progress()

    def _update_progress(self) -> None:
        """Write the times of finished work, and which call the device is at."""
        words = self.progress.words
        finished: list[DeviceWork] = []
        unfinished_positions: list[int] = []
        for queue in list(self._pending.values()):  # the host adds queues meanwhile
            while queue and _is_done(queue[0].end):
                finished.append(queue.popleft())
            if queue:
                first = queue[0]
                unfinished_positions.append(first.position)
                if first.compute and _is_done(first.begin):
                    words[ProgressField.PROGRESS] += 1  # a running compute is progress
        words[ProgressField.DEVICE] = min(unfinished_positions, default=NO_DEVICE_POSITION) + 1
        if finished:
            words[ProgressField.PROGRESS] += 1
            self._write_times(finished, self._preliminary_ns)

    def _clear_progress(self) -> None:
        """All work is finished: the device is not behind the host any more."""
        for queue in self._pending.values():
            queue.clear()
        self.progress.words[ProgressField.DEVICE] = NO_DEVICE_POSITION + 1

    def _preliminary_ns(self, event: Event) -> int:
        """An event's time on the host's clock, by the first point alone."""
        first = self._synced[0]
        since_ms = float(first.event.elapsed_time(event))
        return first.host_ns + round(since_ms * 1e6)

    def _write_times(self, works: Sequence[DeviceWork], at_ns: Callable[[Event], int]) -> None:
        """Write launch and finish times.

        Works of one queue run one after the other, so a launch starts at the earliest when the one
        before it has finished, whatever its begin event says.
        """
        free_ns: dict[Hashable, int] = {}
        for work in works:
            end_ns = at_ns(work.end)
            begin_ns = min(max(at_ns(work.begin), free_ns.get(work.queue, 0)), end_ns)
            free_ns[work.queue] = end_ns
            for cell in work.cells:
                posted_ns = self.cells[cell]
                self.cells[cell + LAUNCHED] = max(begin_ns, posted_ns)
                self.cells[cell + FINISHED] = max(end_ns, posted_ns)


def _is_done(event: Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _interpolated_ns(
    first: ClockSyncPoint, last: ClockSyncPoint, span_ms: float, event: Event
) -> int:
    """An event's time on the host's clock, on the line through both points."""
    since_ms = float(first.event.elapsed_time(event))
    if span_ms <= 0:
        return first.host_ns + round(since_ms * 1e6)
    return first.host_ns + round(since_ms / span_ms * (last.host_ns - first.host_ns))
