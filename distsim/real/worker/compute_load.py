"""Executes `compute` and `sleep` for real.

A compute that states a time spins (or sleeps if ranks outnumber cores). A compute that states flops
or bytes does matrix products and copies of that size. If the scenario's cluster is much faster than
this machine, that would take far too long; then such computes take their simulated time instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from math import inf
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from distsim.operations.core.resolved_call import KernelWork, ResolvedCall
from distsim.real.shared.job import ComputeTimes
from distsim.real.shared.progress_file import ProgressField, ProgressFile

if TYPE_CHECKING:
    from torch import Tensor

    from distsim.simulation.simulate_scenario import Simulation

#: Sides of the square matrices that are multiplied, largest first; the CPU uses the smallest.
_MATRIX_SIDES = (4096, 2048, 1024, 512, 256)
_SMALLEST_SIDE = _MATRIX_SIDES[-1]
#: Bytes that are copied at a time.
_COPY_BLOCK_BYTES = 1 << 22
#: A longer sleep might end too late, so the last part of a wait is spun.
_SLEEP_MARGIN_NS = 200_000
#: GPU clock cycles that are timed to learn the clock rate.
_TIMED_CYCLES = 20_000_000


class _RealWork(NamedTuple):
    """Work of all computes of one rank."""

    flops: float
    nbytes: float


#: What a rank does for real at most: about ten seconds of a core or of a GPU.
_MAX_REAL_WORK = {"cpu": _RealWork(2e11, 4e10), "cuda": _RealWork(2e15, 2e13)}


def simulated_compute_times(
    simulation: Simulation, ranks: Sequence[int], device_kind: str
) -> ComputeTimes:
    """The simulated times of computes that state flops, if this machine is too slow to do them.

    Empty if every rank can do its flops and copies for real.
    """
    limit = _MAX_REAL_WORK[device_kind]
    times: dict[tuple[KernelWork, ...], int] = {}
    is_too_much = False
    for rank in ranks:
        flops = nbytes = 0.0
        for work in _stated_work(simulation, rank):
            flops += sum(kernels.flops for kernels in work)
            nbytes += sum(kernels.nbytes for kernels in work)
            if work not in times:
                times[work] = simulation.cost.work_ns(work)
        is_too_much |= flops > limit.flops or nbytes > limit.nbytes
    return times if is_too_much else {}


def _stated_work(simulation: Simulation, rank: int) -> list[tuple[KernelWork, ...]]:
    """The work of each compute of a rank that states flops or bytes instead of a time."""
    calls = [call for _, call in simulation.program.calls_of(rank) if call.op == "compute"]
    return [call.kernel_work for call in calls if call.kernel_work]


def wait_until(end_ns: int, spin_ns: float) -> None:
    """Wait until CLOCK_MONOTONIC shows ``end_ns``.

    The last ``spin_ns`` are spun, because a sleep would end too late.
    """
    while (remaining_ns := end_ns - time.monotonic_ns()) > 0:
        if remaining_ns > spin_ns:
            time.sleep((remaining_ns - spin_ns) / 1e9)


class ComputeLoad:
    """Does the computes of one rank.

    ``slowdown``: factor on all durations (fault `slow`). ``compute_times``: simulated times that
    replace all real work; empty if the work is done for real.
    """

    def __init__(
        self,
        progress: ProgressFile,
        busy: bool,
        slowdown: float,
        device: str = "cpu",
        cuda: ModuleType | None = None,
        compute_times: ComputeTimes | None = None,
    ) -> None:
        self.progress = progress
        self.busy = busy
        self.slowdown = slowdown
        self.device = device
        self.cuda = cuda
        self.compute_times = compute_times or {}
        self._operands: dict[tuple[str, int, bool], Sequence[Tensor]] = {}
        self._cycles_per_ns = 0.0

    def prepare(self, calls: Iterable[ResolvedCall]) -> None:
        """Allocate and measure on the GPU what the computes need, before the run is timed."""
        for call in calls:
            cuda = self._gpu_of(call)
            if call.op == "compute" and cuda is not None:
                self._prepare_gpu(call, cuda)

    def _prepare_gpu(self, call: ResolvedCall, cuda: ModuleType) -> None:
        if self.compute_times or not call.kernel_work:
            if not self._cycles_per_ns:
                self._cycles_per_ns = _measure_clock_rate(cuda)
            return
        for kernels in call.kernel_work:
            for side in _MATRIX_SIDES:
                is_used = kernels.flops * self.slowdown >= 2 * side**3
                if is_used or (kernels.flops and side == _SMALLEST_SIDE):
                    self._multiply(kernels.dtype, side, on_gpu=True)
            self._copy(min(int(kernels.nbytes), 1), on_gpu=True)

    def _gpu_of(self, call: ResolvedCall) -> ModuleType | None:
        """torch.cuda (or a replacement in tests); None if the host does the work."""
        return None if call.queue == "host" else self.cuda

    def compute(self, call: ResolvedCall) -> None:
        """Take the stated time, or do the stated flops and copies."""
        cuda = self._gpu_of(call)
        work = call.kernel_work
        if work and not self.compute_times:
            for kernels in work:
                self._do_flops(kernels.flops * self.slowdown, kernels.dtype, cuda is not None)
                self._copy(int(kernels.nbytes * self.slowdown), cuda is not None)
            return
        stated_ns = self.compute_times.get(work, call.time_ns)
        duration_ns = round(stated_ns * self.slowdown)
        if cuda is not None:
            cuda._sleep(max(1, round(duration_ns * self._cycles_per_ns)))
        else:
            self.spend(duration_ns, self.busy)

    def spend(self, duration_ns: int, busy: bool) -> None:
        """Pass the time, spinning or sleeping.

        The progress file says until when, so that the launcher does not take it for a hang.
        """
        end_ns = time.monotonic_ns() + duration_ns
        self.progress.words[ProgressField.BUSY_UNTIL_NS] = end_ns
        wait_until(end_ns, inf if busy else _SLEEP_MARGIN_NS)

    def _do_flops(self, flops: float, dtype: str, on_gpu: bool) -> None:
        """Matrix products of 2n³ flops, on a GPU the largest that fit; each counts as progress."""
        remaining = flops
        for side in _MATRIX_SIDES if on_gpu else (_SMALLEST_SIDE,):
            while remaining >= 2 * side**3 or (side == _SMALLEST_SIDE and remaining > 0):
                self._multiply(dtype, side, on_gpu)
                remaining -= 2 * side**3
                self.progress.words[ProgressField.PROGRESS] += 1

    def _multiply(self, dtype: str, side: int, on_gpu: bool) -> None:
        """Multiply two matrices of the dtype, or of float32 if a GPU cannot multiply the dtype."""
        import torch

        name = dtype
        if on_gpu and not _gpu_can_multiply(getattr(torch, name)):
            name = "float32"
        operands = self._operands.get((name, side, on_gpu))
        if operands is None:
            ones = torch.ones(side, side, device=self.device if on_gpu else "cpu")
            matrix = ones.to(getattr(torch, name))
            operands = self._operands[name, side, on_gpu] = (matrix, matrix.clone())
        operands[0] @ operands[1]

    def _copy(self, nbytes: int, on_gpu: bool) -> None:
        """Copy blocks; a byte that is read and written counts as two bytes moved."""
        if nbytes <= 0:
            return
        import torch

        key = ("bytes", 0, on_gpu)
        if key not in self._operands:
            blocks = torch.ones(
                2, _COPY_BLOCK_BYTES, dtype=torch.uint8, device=self.device if on_gpu else "cpu"
            )
            self._operands[key] = blocks.unbind()
        source, target = self._operands[key]
        remaining = nbytes
        while remaining > 0:
            target.copy_(source)
            remaining -= 2 * _COPY_BLOCK_BYTES
            self.progress.words[ProgressField.PROGRESS] += 1


def _gpu_can_multiply(dtype: object) -> bool:
    """torch multiplies matrices on a GPU in floating-point types of two bytes and more."""
    import torch

    assert isinstance(dtype, torch.dtype)
    return dtype.is_floating_point and dtype.itemsize >= 2


def _measure_clock_rate(cuda: ModuleType) -> float:
    """Clock cycles per ns of `torch.cuda._sleep`, which counts cycles.

    The highest of several rates, that is with the device at full speed and otherwise idle.
    """
    rate = 0.0
    for _ in range(4):
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        cuda._sleep(_TIMED_CYCLES)
        end.record()
        cuda.synchronize()
        rate = max(rate, _TIMED_CYCLES / (start.elapsed_time(end) * 1e6))
    return rate
