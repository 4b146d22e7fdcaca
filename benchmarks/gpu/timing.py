"""How `compute.py` takes times: device time of calls in turn, forward and backward passes,
clocks.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]
Row = dict[str, Any]
BF16 = torch.bfloat16


class Bench:
    """``tiny``: sizes for a rehearsal."""

    def __init__(self, device: str, tiny: bool) -> None:
        self.device, self.tiny, self.gpu = device, tiny, device != "cpu"

    def sync(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def random(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(dtype)

    def times(self, calls: Sequence[Call], goes: int = 5, budget_ms: float = 25.0) -> Row:
        """Device time of one call in us: median, least and most of ``goes`` batches, each of so
        many calls as ``budget_ms`` holds.
        """
        if not self.gpu:
            calls[0]()
            return {"us": 0.0, "least": 0.0, "most": 0.0}
        for call in calls:
            call()
        self.sync()
        first = self._batch(calls, len(calls), 3.0)
        count = max(len(calls), min(60, int(budget_ms * 1e3 / goes / max(first, 1.0))))
        each = sorted(self._batch(calls, count, max(4.0, 0.12 * count)) for _ in range(goes))
        return {
            "us": round(each[goes // 2], 2),
            "least": round(each[0], 2),
            "most": round(each[-1], 2),
        }

    def _batch(self, calls: Sequence[Call], count: int, wait_ms: float) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(wait_ms * 1.9e6))
        start.record()
        for index in range(count):
            calls[index % len(calls)]()
        end.record()
        self.sync()
        return float(start.elapsed_time(end)) * 1e3 / count

    def small(self, *sizes: int) -> tuple[int, ...]:
        return tuple(min(n, 64) for n in sizes) if self.tiny else sizes


def product(bench: Bench, kind: str, m: int, n: int, k: int, dtype: torch.dtype) -> list[Call]:
    """As autograd calls them: x w^T, dy w, dy^T x."""
    item = torch.empty((), dtype=dtype).element_size()
    sets = 1 if not bench.gpu else max(1, min(4, int(256e6 / (item * (m * k + n * k + m * n))) + 1))
    made: list[Call] = []
    for _ in range(sets):
        a = (
            bench.random(k, m, dtype=dtype).t()
            if kind == "wgrad"
            else bench.random(m, k, dtype=dtype)
        )
        b = (
            bench.random(n, k, dtype=dtype).t()
            if kind == "fwd"
            else bench.random(k, n, dtype=dtype)
        )
        made.append(
            partial(torch.mm, a, b, out=torch.empty(m, n, dtype=dtype, device=bench.device))
        )
    return made


def both(
    bench: Bench, row: Row, module: Callable[[Tensor], Tensor], x: Tensor, goes: int = 5
) -> Iterator[Row]:
    """A module's forward pass (as autograd sees it) and its backward pass, weights and input."""
    yield {**row, "way": "forward", **bench.times([lambda: module(x)], goes)}
    out = module(x)
    grad = torch.randn_like(out)
    owned = getattr(module, "parameters", None) or getattr(
        getattr(module, "func", None), "parameters", None
    )
    leaves = [x, *(owned() if owned is not None else ())]
    leaves = [t for t in leaves if t.requires_grad]
    yield {
        **row,
        "way": "backward",
        **bench.times([lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)], goes),
    }


ASKED = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_SMI = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits"]


def clocks() -> Row:
    try:
        found = subprocess.run(_SMI, capture_output=True, text=True, timeout=10, check=True).stdout
        return dict(zip(ASKED, found.strip().split(", "), strict=False))
    except Exception as error:
        return {"error": str(error)[:100]}


@contextmanager
def watched(rows: list[str]) -> Iterator[None]:
    """Clocks, power and temperature, five times a second."""
    try:
        process = subprocess.Popen([*_SMI, "-lms", "200"], stdout=subprocess.PIPE, text=True)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        process.terminate()
        rows += (process.communicate(timeout=10)[0] or "").splitlines()
