"""compute and sleep for real: busy for the stated time, asleep where ranks outnumber cores, or a
matmul of the stated flops.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from types import ModuleType
from typing import TYPE_CHECKING

from distsim.operations.core.resolved_call import ResolvedCall
from distsim.real.shared.progress_file import ProgressField, ProgressFile

if TYPE_CHECKING:
    from torch import Tensor

    from distsim.simulation.simulate_scenario import Simulation

#: Sides of the square matrices that flops are spent on; the CPU takes the smallest.
_SIDES = (4096, 2048, 1024, 512, 256)
#: Sleeping longer than this at a stretch would miss the end; the rest is spun.
_SLEEP_MARGIN_NS = 200_000
#: Clock cycles of a GPU that are timed to learn its rate.
_CYCLES = 20_000_000


#: Flops, and bytes to move, that a rank of a run does for real: some ten seconds of a core (a GPU:
#: of the GPU).
_MAX_REAL_WORK = {"cpu": (2e11, 4e10), "cuda": (2e15, 2e13)}
#: (flops, bytes, dtype, kernels) of a compute -> ns.
ComputeTimes = Mapping[tuple[float, float, str | None, int], int]


def simulated_compute_times(
    simulation: Simulation, ranks: Sequence[int], kind: str
) -> ComputeTimes:
    """What computes that state flops take on the scenario's cluster, where this machine is too slow
    to do them; else nothing.
    """
    program, found = simulation.program, dict[tuple[float, float, str | None, int], int]()
    heaviest = [0.0, 0.0]
    for rank in ranks:
        priced = [
            call
            for _, call in program.calls_of(rank)
            if call.op == "compute" and (call.flops or call.mem_bytes)
        ]
        heaviest = [
            max(heaviest[0], sum(c.flops for c in priced)),
            max(heaviest[1], sum(c.mem_bytes for c in priced)),
        ]
        for call in priced:
            if compute_key(call) not in found:
                found[compute_key(call)] = simulation.cost.compute_ns(
                    0, call.flops, call.mem_bytes, call.dtype or "float32", call.kernels
                )
    return (
        found
        if any(amount > most for amount, most in zip(heaviest, _MAX_REAL_WORK[kind], strict=True))
        else {}
    )


def compute_key(call: ResolvedCall) -> tuple[float, float, str | None, int]:
    return call.flops, call.mem_bytes, call.dtype, call.kernels


def wait_until(end_ns: int, spin_ns: float) -> None:
    """Until CLOCK_MONOTONIC shows the time: asleep, and for the last part, which a sleep would
    miss, spinning.
    """
    while (left := end_ns - time.monotonic_ns()) > 0:
        if left > spin_ns:
            time.sleep((left - spin_ns) / 1e9)


class ComputeLoad:
    """Works for one rank. ``factor``: a straggler takes so much longer (fault `slow`)."""

    def __init__(
        self,
        board: ProgressFile,
        busy: bool,
        factor: float,
        device: str = "cpu",
        cuda: ModuleType | None = None,
        prices: ComputeTimes | None = None,
    ) -> None:
        self.board, self.busy, self.factor, self.device, self.cuda = (
            board,
            busy,
            factor,
            device,
            cuda,
        )
        self.prices = prices or {}
        self._matrices: dict[tuple[str, int, bool], Sequence[Tensor]] = {}
        self._cycles_per_ns = 0.0

    def prepare(self, calls: Iterable[ResolvedCall]) -> None:
        """Make what the computes of a program need of a GPU, so that no time of a run goes into
        it.
        """
        for call in calls:
            cuda = self._gpu_of(call)
            if call.op == "compute" and cuda is not None:
                if self.prices or not (call.flops or call.mem_bytes):
                    if not self._cycles_per_ns:
                        self._measure(cuda)
                    continue
                for side in _SIDES:
                    if call.flops * self.factor >= 2 * side**3 or (
                        call.flops and side == _SIDES[-1]
                    ):
                        self._multiply(call.dtype, side, gpu=True)
                self._bytes(min(int(call.mem_bytes), 1), gpu=True)

    def _gpu_of(self, call: ResolvedCall) -> ModuleType | None:
        """torch.cuda, or a stand-in; None where the host does the work."""
        return None if call.queue == "host" else self.cuda

    def compute(self, call: ResolvedCall) -> None:
        """Take the time that the call states, or do the flops and move the bytes that it states."""
        time_ns = round(self.prices.get(compute_key(call), call.time_ns) * self.factor)
        cuda = self._gpu_of(call)
        if not self.prices and (call.flops or call.mem_bytes):
            self._flops(call.flops * self.factor, call.dtype, cuda is not None)
            self._bytes(int(call.mem_bytes * self.factor), cuda is not None)
        elif cuda is not None:
            cuda._sleep(max(1, round(time_ns * self._cycles_per_ns)))
        else:
            self.spend(time_ns, self.busy)

    def spend(self, duration_ns: int, busy: bool) -> None:
        """Pass the time, spinning or asleep; the board says until when, so that it is not taken for
        a standstill.
        """
        end_ns = time.monotonic_ns() + duration_ns
        self.board.words[ProgressField.BUSY_UNTIL_NS] = end_ns
        wait_until(end_ns, inf if busy else _SLEEP_MARGIN_NS)

    def _flops(self, flops: float, dtype: str | None, gpu: bool) -> None:
        """n³ matmuls of 2n³ flops each; every one counts as progress. A GPU gets the largest that
        fit.
        """
        left = flops
        for side in _SIDES if gpu else _SIDES[-1:]:
            while left >= 2 * side**3 or (side == _SIDES[-1] and left > 0):
                self._multiply(dtype, side, gpu)
                left -= 2 * side**3
                self.board.words[ProgressField.PROGRESS] += 1

    def _multiply(self, dtype: str | None, side: int, gpu: bool) -> None:
        """Matrices of the dtype; in float32 where it is none or one that a GPU's torch can't
        multiply.
        """
        import torch

        kind = getattr(torch, dtype or "float32")
        name = (
            "float32"
            if gpu and (not kind.is_floating_point or kind.itemsize < 2)
            else dtype or "float32"
        )
        pair = self._matrices.get((name, side, gpu))
        if pair is None:
            one = torch.ones(side, side, device=self.device if gpu else "cpu").to(
                getattr(torch, name)
            )
            pair = self._matrices[name, side, gpu] = (one, one.clone())
        pair[0] @ pair[1]

    def _bytes(self, nbytes: int, gpu: bool) -> None:
        """Copies: a byte read and a byte written count as two moved."""
        import torch

        block, key = 1 << 22, ("bytes", 0, gpu)
        if nbytes > 0 and key not in self._matrices:
            self._matrices[key] = torch.ones(
                2, block, dtype=torch.uint8, device=self.device if gpu else "cpu"
            ).unbind()
        while nbytes > 0:
            source, target = self._matrices[key]
            target.copy_(source)
            nbytes -= 2 * block
            self.board.words[ProgressField.PROGRESS] += 1

    def _measure(self, cuda: ModuleType) -> None:
        """torch.cuda._sleep counts clock cycles: how many are a nanosecond, at speed and with the
        device to itself.
        """
        for _ in range(4):
            start, end = (cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            cuda._sleep(_CYCLES)
            end.record()
            cuda.synchronize()
            self._cycles_per_ns = max(
                self._cycles_per_ns, _CYCLES / (start.elapsed_time(end) * 1e6)
            )
