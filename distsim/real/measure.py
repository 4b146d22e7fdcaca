"""Times torch.distributed on this machine: every operation of a plan, round after round, on forked processes over loopback.

A sample is what the simulator prices: from the moment at which all ranks are due until the last one leaves the call. The ranks come
to it as they do in a program: from work of their own, their caches full of other things. All ranks of one machine read the same
monotonic clock, so moments can be compared across processes.
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
#: All ranks are due so long after they have met, asleep: by then neither caches nor threads are warm. The last part of it they spin.
_LEAD_NS = 10_000_000
_SPIN_NS = 500_000
_POLL_S = 0.0005
_DTYPE = "float32"
_ELEMENT = 4


class Item(NamedTuple):
    """One thing to measure. ``nbytes`` as nccl-tests counts: the large buffer; 0 for barriers.

    ``group``: ranks in a group; neighbours make a group, and all groups work at once. A message goes from the first to the second;
    of a batch, one goes each way.
    """

    op: str
    nbytes: int
    group: int


def measure(n: int, plan: Sequence[Item], rounds: int, warmup: int, timeout_s: float) -> NDArray[np.int64]:
    """Durations in ns, shape (rounds, items), on ``n`` ranks with gloo. Raises EnvironmentFault when torch is missing or a rank fails."""
    try:
        import torch
        import torch.distributed
    except ImportError:
        raise EnvironmentFault("torch is not installed, and measuring needs it", "pip install 'distsim[real]'") from None
    torch.set_num_threads(1)
    programs = [_program(item, n) for item in plan]
    shape = (warmup + rounds, len(plan), n + 1)  # the last one is when all are due
    shared = mmap.mmap(-1, max(int(np.prod(shape)), 1) * 8)
    context = multiprocessing.get_context("fork")
    name = f"distsim-run-{os.getpid()}-"  # what a killed bench left is removed by the next run
    with tempfile.TemporaryDirectory(prefix=name) as folder:
        job = (programs, n, Path(folder, "store"), shared, shape, timeout_s, os.getpid())
        ranks = [context.Process(target=_rank, args=(rank, *job), name=f"rank {rank}", daemon=True) for rank in range(n)]
        try:
            for process in ranks:
                process.start()
            _await(ranks, timeout_s, Path(folder, "error"))
        finally:
            _end(ranks)
    times = np.frombuffer(shared, dtype=np.int64).reshape(shape)[warmup:]
    return np.asarray(times[..., :n].max(axis=2) - times[..., n])


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
    rank: int, programs: Sequence[Program], n: int, store: Path, shared: mmap.mmap, shape: tuple[int, ...], timeout_s: float,
    parent: int,
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
        groups = _group_of(dist, [program.groups[1].size for program in programs], rank, n)
        _rounds(dist, rank, calls, groups, times)
        dist.destroy_process_group()
        status = 0
    except Exception as error:
        store.with_name("error").write_text(f"rank {rank}: {error}", encoding="utf-8")
    finally:
        os._exit(status)


def _group_of(dist: Any, sizes: Sequence[int], rank: int, n: int) -> dict[int, Any]:
    """torch's groups by size; all ranks make all of them, in one order (torch.distributed.new_group)."""
    mine: dict[int, Any] = {n: None}
    for size in sorted({*sizes} - {n}):
        for first in range(0, n // size * size, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= rank < first + size:
                mine[size] = group
    return mine


def _rounds(dist: Any, rank: int, calls: Sequence[Sequence[Call]], groups: dict[int, Any], times: NDArray[np.int64]) -> None:
    pool, n = _Pool(calls), times.shape[2] - 1
    for round_ in times:
        for own, cells in zip(calls, round_, strict=True):
            work = [(OPS[call.op], call, groups[call.group.size]) for call in own]
            pool.renew(own)
            dist.barrier()
            if rank == 0:
                cells[n] = time.monotonic_ns() + _LEAD_NS
            while not (due_ns := int(cells[n])):
                time.sleep(_POLL_S)
            while (left := due_ns - time.monotonic_ns()) > 0:
                if left > _SPIN_NS:
                    time.sleep((left - _SPIN_NS) / 1e9)
            for row, call, group in work:
                requests: Any = row.torch_call(dist, call, pool, group)
                for request in requests if call.parts else ():
                    request.wait()
            cells[rank] = time.monotonic_ns()


def _buffers(call: Call) -> list[Buffer]:
    return [buffer for piece in call.parts or (call,) for buffer in (*piece.inputs, *piece.outputs)]


class _Pool:
    """``pool[buffer]`` is a tensor of the buffer's shape; inputs share memory, and so do outputs, touched once before it counts."""

    def __init__(self, calls: Sequence[Sequence[Call]]) -> None:
        import torch

        buffers = [b for own in calls for call in own for b in _buffers(call)]
        most = max((b.numel for b in buffers), default=1)
        self._memory = {name: torch.ones(most) for name in ("in", "out")}

    def renew(self, calls: Sequence[Call]) -> None:
        """Write all numbers of a sample anew, as a program does between two steps."""
        for call in calls:
            for buffer in _buffers(call):
                self[buffer].fill_(1)

    def __getitem__(self, buffer: Buffer) -> Any:
        return self._memory[buffer.name][: buffer.numel].view(buffer.shape)


def _program(item: Item, n: int) -> Program:
    """The calls of every rank for one sample."""
    row, numel, g = OPS[item.op], item.nbytes // _ELEMENT, item.group
    groups = {f"group {k}": list(range(k * g, k * g + g)) for k in range(n // g)}
    plain: dict[int, list[dict[str, Any]]] = {}
    for rank in range(n // g * g):
        first = rank // g * g
        call = {"op": item.op, "group": f"group {rank // g}", "dtype": _DTYPE, "tensor": "in", "numel": numel}
        there = {first: first + 1, first + 1: first}.get(rank)
        if row.kind != "collective" and there is None:
            plain[rank] = []
        elif row.kind == "batch":
            ways = [{**call, "op": op, "tensor": name, "peer": there} for op, name in (("isend", "in"), ("irecv", "out"))]
            plain[rank] = [{"op": item.op, "ops": ways}]
        elif row.kind == "p2p":
            plain[rank] = [{**call, "op": "send" if rank == first else "recv", "peer": there}]
        else:
            share = numel if row.pairwise or row.input_parts == row.output_parts == "one" else numel // g
            plain[rank] = [{**call, "numel": max(share, 1), "root": first}]
    return build_program(n, plain, groups=groups)


def _apart(call: Call) -> Call:
    """The call as torch takes it: an output of its own unless it works in place; one flat tensor unless torch wants a list."""
    if "tensor" in OPS[call.op].model_fields:
        return call
    flat = call.op.endswith(("_tensor", "_single"))

    def named(buffers: tuple[Buffer, ...], name: str) -> tuple[Buffer, ...]:
        return tuple(replace(b, name=name, shape=(b.numel,) if flat else b.shape) for b in buffers)

    return replace(call, inputs=named(call.inputs, "in"), outputs=named(call.outputs, "out"))


__all__ = ["Item", "measure"]
