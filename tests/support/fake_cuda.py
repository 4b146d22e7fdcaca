"""Stand-ins for torch.cuda and for torch.distributed on NCCL: streams are times at which they are
free, on a clock of the device's own.

What the host asks is answered as a GPU would at that moment, and every true time is known, so that
a test can hold what was measured to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed

#: Later than any test lives.
NEVER_NS = 10**18


class FakeCuda:
    """torch.cuda. ``offset_ns`` and ``drift``: the device's clock against the host's.
    ``cycles_per_ns``: of `_sleep`.
    """

    def __init__(
        self, offset_ns: int = 123_456_789, drift: float = 2e-5, cycles_per_ns: float = 1.5
    ) -> None:
        self.offset_ns, self.drift, self.cycles_per_ns = offset_ns, drift, cycles_per_ns
        self.began_ns = time.monotonic_ns()
        self.streams: list[FakeStream] = []
        self.default = FakeStream(self)
        self.current = self.default
        self.patience_s = 30.0

    def now(self) -> int:
        since = time.monotonic_ns() - self.began_ns
        return round(since * (1 + self.drift)) + self.offset_ns

    def host_ns(self, device_ns: int) -> int:
        """What the host's clock shows when the device's shows this."""
        return round((device_ns - self.offset_ns) / (1 + self.drift)) + self.began_ns

    def wait_until(self, device_ns: int) -> None:
        """As a thread does that waits for a device. Raises TimeoutError where a GPU would wait for
        ever.
        """
        end = time.monotonic() + self.patience_s
        while self.now() < device_ns:
            if time.monotonic() > end:
                raise TimeoutError("the device stands still")
            time.sleep(0.0002)

    # --- what torch.cuda has ---
    def Stream(self, priority: int = 0) -> FakeStream:  # noqa: N802
        return FakeStream(self)

    def Event(self, enable_timing: bool = False) -> FakeEvent:  # noqa: N802
        return FakeEvent(self)

    def default_stream(self) -> FakeStream:
        return self.default

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self) -> None:
        self.wait_until(max(stream.free_ns for stream in self.streams))

    def _sleep(self, cycles: int) -> None:
        self.current.give(round(cycles / self.cycles_per_ns))


class FakeStream:
    """torch.cuda.Stream: work is done in order, and is over at ``free_ns`` of the device's
    clock.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.free_ns = cuda, -NEVER_NS
        self.done: list[tuple[int, int]] = []  # begin and end of each work, device's clock
        cuda.streams.append(self)

    def give(self, duration_ns: int, after_ns: int = -NEVER_NS) -> int:
        begin = max(self.free_ns, self.cuda.now(), after_ns)
        self.free_ns = begin + duration_ns
        self.done.append((begin, self.free_ns))
        return self.free_ns

    def wait_stream(self, other: FakeStream) -> None:
        self.free_ns = max(self.free_ns, other.free_ns)


class FakeEvent:
    """torch.cuda.Event with timing: a float32 of milliseconds, as the driver's is."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.at_ns = cuda, 0

    def record(self) -> None:
        self.at_ns = max(self.cuda.current.free_ns, self.cuda.now())

    def query(self) -> bool:
        return self.cuda.now() >= self.at_ns

    def synchronize(self) -> None:
        self.cuda.wait_until(self.at_ns)

    def elapsed_time(self, other: FakeEvent) -> float:
        if not (self.query() and other.query()):
            raise RuntimeError("device not ready")
        return float(torch.tensor((other.at_ns - self.at_ns) / 1e6, dtype=torch.float32))


class FakeWork:
    """A Work of ProcessGroupNCCL: its wait makes the current stream wait, not the host."""

    def __init__(self, cuda: FakeCuda, end_ns: int) -> None:
        self.cuda, self.end_ns = cuda, end_ns

    def wait(self) -> None:
        self.cuda.current.free_ns = max(self.cuda.current.free_ns, self.end_ns)


class FakeNccl:
    """torch.distributed on NCCL, for one rank whose peers come at once; each operation takes
    ``takes_ns``, those in ``lost`` for ever.
    """

    def __init__(self, cuda: FakeCuda, takes_ns: int, lost: tuple[str, ...] = ()) -> None:
        self.cuda, self.takes_ns, self.lost = cuda, takes_ns, lost
        self.comm = FakeStream(cuda)
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def all_reduce(self, tensor: Any, op: Any, group: Any, async_op: bool) -> FakeWork | None:
        """Blocking: on the current stream. Async: on the communicator's, after what the current one
        holds.
        """
        if not async_op:
            self.cuda.current.give(self._takes("all_reduce"))
            return None
        return FakeWork(
            self.cuda, self.comm.give(self._takes("all_reduce"), self.cuda.current.free_ns)
        )

    def send(self, tensor: Any, peer: int, group: Any, tag: int) -> None:
        self._message("send")

    def recv(self, tensor: Any, peer: int, group: Any, tag: int) -> None:
        self._message("recv")

    def init_process_group(self, *args: Any, **named: Any) -> None:
        self.calls.append(("init_process_group", named))

    def _message(self, op: str) -> None:
        FakeWork(self.cuda, self.comm.give(self._takes(op), self.cuda.current.free_ns)).wait()

    def _takes(self, op: str) -> int:
        return NEVER_NS if op in self.lost else self.takes_ns
