"""compute and sleep for real: busy for the stated time, asleep where ranks outnumber cores, or a matmul of the stated flops."""

from __future__ import annotations

import time
from typing import Any

from distsim.ops.records import Call
from distsim.real.board import Board, Word

#: Side of the square matrices that flops are spent on.
_SIDE = 256
#: Sleeping longer than this at a stretch would miss the end; the rest is spun.
_COARSE_NS = 200_000
#: Clock cycles of a GPU that are timed to learn its rate.
_CYCLES = 20_000_000


class Labour:
    """Works for one rank. ``factor``: a slow rank takes so much longer (fault `slow`)."""

    def __init__(self, board: Board, busy: bool, factor: float, device: str) -> None:
        self.board, self.busy, self.factor, self.device = board, busy, factor, device
        self._matrices: dict[str, Any] = {}

    def compute(self, call: Call) -> None:
        """Take the time that the call states, or do the flops and move the bytes that it states."""
        if call.flops or call.mem_bytes:
            self._flops(call.flops * self.factor, call.dtype or "float32")
            self._bytes(int(call.mem_bytes * self.factor))
        elif self.device != "cpu" and call.queue != "host":
            self._on_device(round(call.time_ns * self.factor))
        else:
            self.spend(round(call.time_ns * self.factor), self.busy)

    def spend(self, duration_ns: int, busy: bool) -> None:
        """Pass the time, spinning or asleep; the board says until when, so that it is not taken for a standstill."""
        end = time.monotonic_ns() + duration_ns
        self.board.words[Word.BUSY_UNTIL_NS] = end
        while True:
            left = end - time.monotonic_ns()
            if left <= 0:
                return
            if not busy and left > _COARSE_NS:
                time.sleep((left - _COARSE_NS) / 1e9)

    def _flops(self, flops: float, dtype: str) -> None:
        """n³ matmuls of 2n³ flops each; every one counts as progress."""
        left = flops
        while left > 0:
            pair = self._pair(dtype)
            pair[0] @ pair[1]
            left -= 2 * _SIDE**3
            self.board.words[Word.PROGRESS] += 1

    def _pair(self, dtype: str) -> Any:
        if dtype not in self._matrices:
            import torch

            kind = getattr(torch, dtype)
            self._matrices[dtype] = [torch.ones(_SIDE, _SIDE, device=self.device).to(kind) for _ in range(2)]
        return self._matrices[dtype]

    def _bytes(self, nbytes: int) -> None:
        """Copies: a byte read and a byte written count as two moved."""
        import torch

        block = 1 << 22
        source = self._matrices.setdefault("bytes", torch.ones(block, dtype=torch.uint8, device=self.device))
        while nbytes > 0:
            source.clone()
            nbytes -= 2 * block
            self.board.words[Word.PROGRESS] += 1

    def _on_device(self, duration_ns: int) -> None:
        """Keep the current stream busy. torch.cuda._sleep counts clock cycles, so its rate is measured once."""
        import torch

        cuda: Any = torch.cuda
        if "rate" not in self._matrices:
            start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            start.record()
            cuda._sleep(_CYCLES)
            end.record()
            cuda.synchronize()
            self._matrices["rate"] = _CYCLES / (start.elapsed_time(end) * 1e6)
        cuda._sleep(max(1, int(duration_ns * self._matrices["rate"])))


__all__ = ["Labour"]
