"""Times torch.distributed on this machine: every operation of a plan, round after round, on forked
processes over loopback.

A sample is what the simulator prices: from the moment at which all ranks are due until the last one
leaves the call. The ranks come to it as they do in a program: from work of their own, their caches
full of other things. All ranks of one machine read the same monotonic clock, so moments can be
compared across processes.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.common.errors import EnvironmentFault
from distsim.operations.core.resolved_call import ResolvedCall, TensorBuffer
from distsim.operations.registry import OPERATIONS
from distsim.program.from_calls import PlainCall, build_program
from distsim.program.model import Program
from distsim.real.launch.start_methods import ProcessLauncher
from distsim.real.shared.device_selection import require_torch
from distsim.real.shared.job import FOLDER_PREFIX
from distsim.real.worker.compute_load import wait_until
from distsim.real.worker.rank_process import die_with_parent

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

#: All ranks are due so long after they have met, asleep: by then neither caches nor threads are
#: warm. The last part of it they spin.
_START_LEAD_NS = 10_000_000
_SPIN_NS = 500_000
_POLL_S = 0.0005
_DTYPE = "float32"
_ELEMENT_BYTES = 4


class BenchItem(NamedTuple):
    """One thing to measure. ``nbytes`` as nccl-tests counts: the large buffer; 0 for barriers.

    ``group``: ranks in a group; neighbours make a group, and all groups work at once. A message
    goes from the first to the second; of a batch, one goes each way.
    """

    op: str
    nbytes: int
    group: int


def sample_durations(
    n: int, plan: Sequence[BenchItem], rounds: int, warmup: int, timeout_s: float
) -> NDArray[np.int64]:
    """Durations in ns, shape (rounds, items), on ``n`` ranks with gloo. Raises EnvironmentFault
    when torch is missing or a rank fails.
    """
    require_torch()
    import torch.distributed

    torch.set_num_threads(1)
    programs = [_bench_program(item, n) for item in plan]
    shape = (warmup + rounds, len(plan), n + 1)  # the last one is when all are due
    shared = mmap.mmap(-1, max(int(np.prod(shape)), 1) * 8)
    ranks = ProcessLauncher("fork")
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{os.getpid()}-") as folder:
        job = _BenchJob(programs, n, Path(folder, "store"), shared, shape, timeout_s, os.getpid())
        try:
            ranks.start_each(_run_bench_rank, job, range(n))
            _wait_for_ranks(ranks, timeout_s, Path(folder, "error"))
        finally:
            ranks.end(0.0)
    times = np.frombuffer(shared, dtype=np.int64).reshape(shape)[warmup:]
    return np.asarray(times[..., :n].max(axis=2) - times[..., n])


def _wait_for_ranks(ranks: ProcessLauncher, timeout_s: float, error: Path) -> None:
    """Until all have ended. Raises EnvironmentFault at once when one failed, or when time is up."""
    limit = time.monotonic() + timeout_s
    while None in (exits := {ranks.exit_of(rank) for rank in ranks.processes}) and not any(exits):
        if time.monotonic() > limit:
            why = f"the measurement took more than {timeout_s:.0f} s and was broken off"
            raise EnvironmentFault(
                why, "ask for fewer sizes, rounds or ranks, or for a longer --timeout"
            )
        time.sleep(0.02)
    if any(exits):
        why = error.read_text(encoding="utf-8") if error.exists() else "a rank ended early"
        raise EnvironmentFault(f"the measurement was broken off: {why}")


# --- one rank ---


class _BenchJob(NamedTuple):
    """What every rank is told. ``times``: the memory of an array of this ``shape`` that all ranks
    share.
    """

    programs: Sequence[Program]
    n: int
    store: Path
    times: mmap.mmap
    shape: tuple[int, int, int]
    timeout_s: float
    parent: int


def _run_bench_rank(job: _BenchJob, rank: int) -> None:
    """A forked process; ends with status 0 when it came to the end."""
    die_with_parent(job.parent)
    status = 1
    try:
        import torch.distributed as dist

        os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        dist.init_process_group(
            "gloo",
            f"file://{job.store}",
            rank=rank,
            world_size=job.n,
            timeout=timedelta(seconds=job.timeout_s),
        )
        calls = [
            [_with_separate_output(call) for _, call in program.calls_of(rank)]
            for program in job.programs
        ]
        times = np.frombuffer(job.times, dtype=np.int64).reshape(job.shape)
        _run_rounds(
            rank,
            calls,
            _group_of([program.groups[1].size for program in job.programs], rank, job.n),
            times,
        )
        dist.destroy_process_group()
        status = 0
    except Exception as error:
        job.store.with_name("error").write_text(f"rank {rank}: {error}", encoding="utf-8")
    finally:
        os._exit(status)


def _group_of(sizes: Sequence[int], rank: int, n: int) -> dict[int, ProcessGroup | None]:
    """torch's groups by size; all ranks make all of them, in one order
    (torch.distributed.new_group).
    """
    import torch.distributed as dist

    mine: dict[int, ProcessGroup | None] = {n: None}
    for size in sorted({*sizes} - {n}):
        for first in range(0, n // size * size, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= rank < first + size:
                mine[size] = group
    return mine


def _run_rounds(
    rank: int,
    calls: Sequence[Sequence[ResolvedCall]],
    groups: dict[int, ProcessGroup | None],
    times: NDArray[np.int64],
) -> None:
    import torch.distributed as dist

    pool, n = _BenchTensors(calls), times.shape[2] - 1
    for round_ in times:
        for own, cells in zip(calls, round_, strict=True):
            work = [(OPERATIONS[call.op], call, groups[call.group.size]) for call in own]
            pool.renew(own)
            dist.barrier()
            if rank == 0:
                cells[n] = time.monotonic_ns() + _START_LEAD_NS
            while not (due_ns := int(cells[n])):
                time.sleep(_POLL_S)
            wait_until(due_ns, _SPIN_NS)
            for row, call, group in work:
                requests: Any = row.torch_call(dist, call, pool, group)
                for request in requests if call.parts else ():
                    request.wait()
            cells[rank] = time.monotonic_ns()


def _buffers(call: ResolvedCall) -> list[TensorBuffer]:
    return [buffer for piece in call.parts or (call,) for buffer in (*piece.inputs, *piece.outputs)]


class _BenchTensors:
    """``pool[buffer]`` is a tensor of the buffer's shape; inputs share memory, and so do outputs,
    touched once before it counts.
    """

    def __init__(self, calls: Sequence[Sequence[ResolvedCall]]) -> None:
        import torch

        buffers = [b for own in calls for call in own for b in _buffers(call)]
        most = max((b.numel for b in buffers), default=1)
        self._memory = {name: torch.ones(most) for name in ("in", "out")}

    def renew(self, calls: Sequence[ResolvedCall]) -> None:
        """Write all numbers of a sample anew, as a program does between two steps."""
        for call in calls:
            for buffer in _buffers(call):
                self[buffer].fill_(1)

    def __getitem__(self, buffer: TensorBuffer) -> Tensor:
        return self._memory[buffer.name][: buffer.numel].view(buffer.shape)


def _bench_program(item: BenchItem, n: int) -> Program:
    """The calls of every rank for one sample."""
    row, numel, g = OPERATIONS[item.op], item.nbytes // _ELEMENT_BYTES, item.group
    groups = {f"group {k}": list(range(k * g, k * g + g)) for k in range(n // g)}
    plain: dict[int, list[PlainCall]] = {}
    for rank in range(n // g * g):
        first = rank // g * g
        call = {
            "op": item.op,
            "group": f"group {rank // g}",
            "dtype": _DTYPE,
            "tensor": "in",
            "numel": numel,
        }
        there = {first: first + 1, first + 1: first}.get(rank)
        if row.kind != "collective" and there is None:
            plain[rank] = []
        elif row.kind == "batch":
            ways = [
                {**call, "op": op, "tensor": name, "peer": there}
                for op, name in (("isend", "in"), ("irecv", "out"))
            ]
            plain[rank] = [{"op": item.op, "ops": ways}]
        elif row.kind == "p2p":
            plain[rank] = [{**call, "op": "send" if rank == first else "recv", "peer": there}]
        else:
            share = (
                numel
                if row.pairwise or row.input_parts == row.output_parts == "one"
                else numel // g
            )
            plain[rank] = [{**call, "numel": max(share, 1), "root": first}]
    return build_program(n, plain, groups=groups)


def _with_separate_output(call: ResolvedCall) -> ResolvedCall:
    """The call as torch takes it: an output of its own unless it works in place; one flat tensor
    unless torch wants a list.
    """
    if "tensor" in OPERATIONS[call.op].model_fields:
        return call
    flat = call.op.endswith(("_tensor", "_single"))

    def named(buffers: tuple[TensorBuffer, ...], name: str) -> tuple[TensorBuffer, ...]:
        return tuple(replace(b, name=name, shape=(b.numel,) if flat else b.shape) for b in buffers)

    return replace(call, inputs=named(call.inputs, "in"), outputs=named(call.outputs, "out"))
