"""Times torch.distributed on this machine: every operation of a plan, round after round, on forked processes over loopback.

A sample is what the simulator prices: from the moment the last rank comes to the call until the last rank leaves it. All ranks of
one machine read the same monotonic clock, so the two moments can be compared across processes.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.errors import EnvironmentFault
from distsim.ops.records import Buffer, Call
from distsim.ops.table import OPS
from distsim.program.build import build_program
from distsim.program.records import Program

_PR_SET_PDEATHSIG = 1
#: All ranks begin a sample so long after they have met: those that woke late are there by then.
_LEAD_NS = 300_000
_DTYPE = "float32"
_ELEMENT = 4
_SIDES = (("inputs", "in"), ("outputs", "out"))


class Item(NamedTuple):
    """One thing to measure. ``nbytes`` as nccl-tests counts: the large buffer; 0 for barriers."""

    op: str
    nbytes: int


def measure(n: int, plan: Sequence[Item], rounds: int, warmup: int, timeout_s: float) -> NDArray[np.int64]:
    """Durations in ns, shape (rounds, items), on ``n`` ranks with gloo. Raises EnvironmentFault when torch is missing or a rank fails."""
    try:
        import torch
        import torch.distributed
    except ImportError:
        raise EnvironmentFault("torch is not installed, and measuring needs it", "pip install 'distsim[real]'") from None
    torch.set_num_threads(1)
    programs = [_program(item, n) for item in plan]
    shape = (warmup + rounds, len(plan), n, 2)
    shared = mmap.mmap(-1, max(int(np.prod(shape)), 1) * 8)
    starts = mmap.mmap(-1, 8)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="distsim-bench-") as folder:
        job = (programs, n, Path(folder, "store"), shared, shape, starts, timeout_s, os.getpid())
        ranks = [context.Process(target=_rank, args=(rank, *job), name=f"rank {rank}", daemon=True) for rank in range(n)]
        try:
            for process in ranks:
                process.start()
            _await(ranks, timeout_s, Path(folder, "error"))
        finally:
            _end(ranks)
    times = np.frombuffer(shared, dtype=np.int64).reshape(shape)[warmup:]
    return np.asarray(times[..., 1].max(axis=2) - times[..., 0].max(axis=2))


def _await(ranks: Sequence[Any], timeout_s: float, error: Path) -> None:
    """Until all have ended. Raises EnvironmentFault at once when one failed, or when time is up."""
    limit = time.monotonic() + timeout_s
    while any(process.is_alive() for process in ranks) and not any(process.exitcode for process in ranks):
        if time.monotonic() > limit:
            why = f"the measurement took more than {timeout_s:.0f} s and was broken off"
            raise EnvironmentFault(why, "ask for fewer sizes, rounds or ranks, or for a longer --timeout")
        time.sleep(0.02)
    if any(process.exitcode for process in ranks):
        why = error.read_text(encoding="utf-8") if error.exists() else "a rank ended early"
        raise EnvironmentFault(f"the measurement was broken off: {why}")


def _end(ranks: Sequence[Any]) -> None:
    for process in ranks:
        if process.pid is not None and process.is_alive():
            with suppress(ProcessLookupError):
                process.kill()
    for process in ranks:
        if process.pid is not None:
            process.join(5)


# --- one rank ---


def _rank(
    rank: int, programs: Sequence[Program], n: int, store: Path, shared: mmap.mmap, shape: tuple[int, ...], starts: mmap.mmap,
    timeout_s: float, parent: int,
) -> None:  # fmt: skip
    """A forked process; ends with status 0 when it came to the end."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    status = 1
    try:
        import torch.distributed as dist

        os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=n, timeout=timedelta(seconds=timeout_s))
        calls = [[_apart(call) for _, call in program.calls_of(rank)] for program in programs]
        times = np.frombuffer(shared, dtype=np.int64).reshape(shape)
        _rounds(dist, rank, calls, times, np.frombuffer(starts, dtype=np.int64))
        dist.destroy_process_group()
        status = 0
    except Exception as error:
        store.with_name("error").write_text(f"rank {rank}: {error}", encoding="utf-8")
    finally:
        os._exit(status)


def _rounds(dist: Any, rank: int, calls: Sequence[Sequence[Call]], times: NDArray[np.int64], start: NDArray[np.int64]) -> None:
    pool = _Pool(calls)
    for round_ in range(len(times)):
        for k, own in enumerate(calls):
            work = [(OPS[call.op], call) for call in own]
            dist.barrier()
            if rank == 0:
                start[0] = time.monotonic_ns() + _LEAD_NS
            dist.barrier()
            while (left := int(start[0]) - time.monotonic_ns()) > 0:
                time.sleep(left / 1e9)
            times[round_, k, rank, 0] = time.monotonic_ns()
            for row, call in work:
                row.torch_call(dist, call, pool, None)
            times[round_, k, rank, 1] = time.monotonic_ns()


class _Pool:
    """``pool[buffer]`` is a tensor of the buffer's shape; inputs share memory, and so do outputs, touched once before it counts."""

    def __init__(self, calls: Sequence[Sequence[Call]]) -> None:
        import torch

        buffers = [b for own in calls for call in own for b in (*call.inputs, *call.outputs)]
        most = max((b.numel for b in buffers), default=1)
        self._memory = {name: torch.ones(most) for name in ("in", "out")}

    def __getitem__(self, buffer: Buffer) -> Any:
        return self._memory[buffer.name][: buffer.numel].view(buffer.shape)


def _program(item: Item, n: int) -> Program:
    """The calls of every rank for one sample: a collective of all, or messages from each even rank to the next one."""
    row = OPS[item.op]
    numel = item.nbytes // _ELEMENT
    if row.kind == "p2p":
        plain = {r: [_message(r, n, numel)] for r in range(n)}
        return build_program(n, {r: calls for r, calls in plain.items() if calls[0]})
    share = numel if row.pairwise or row.input_parts == row.output_parts == "one" else numel // n
    call = {"op": item.op, "numel": max(share, 1), "dtype": _DTYPE, "tensor": "in", "reduce_op": "sum"}
    return build_program(n, {r: [call] for r in range(n)})


def _apart(call: Call) -> Call:
    """The call as torch takes it: an output of its own unless it works in place; one flat tensor unless torch wants a list."""
    if "tensor" in OPS[call.op].model_fields:
        return call
    flat = call.op.endswith(("_tensor", "_single"))
    named = {side: [replace(b, name=name, shape=(b.numel,) if flat else b.shape) for b in getattr(call, side)] for side, name in _SIDES}
    return replace(call, **{side: tuple(buffers) for side, buffers in named.items()})


def _message(rank: int, n: int, numel: int) -> dict[str, Any]:
    peer = rank ^ 1
    if peer >= n:
        return {}
    return {"op": "recv" if rank % 2 else "send", "peer": peer, "numel": numel, "dtype": _DTYPE, "tensor": "in"}


__all__ = ["Item", "measure"]
