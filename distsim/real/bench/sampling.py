"""Times every operation of a plan with torch.distributed, on forked processes over loopback.

A sample is what the cost model predicts: the time from a common start until the last rank returns
from the call. The ranks arrive as in a program, from work of their own, with other data in their
caches. All ranks of one machine read the same monotonic clock, so times can be compared across
processes.
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

#: The common start comes this long after a barrier, and the ranks sleep until then, so that neither
#: caches nor threads are warm. They spin for the last part.
_START_LEAD_NS = 10_000_000
_SPIN_NS = 500_000
_POLL_S = 0.0005
_DTYPE = "float32"
_ELEMENT_BYTES = 4


class BenchItem(NamedTuple):
    """An operation to measure.

    ``nbytes``: the size of the larger buffer, as nccl-tests counts; 0 for barriers. ``group``:
    ranks in a group. Neighbours form a group, and all groups work at the same time. A message goes
    from the first rank of a group to the second; a batch sends one message each way.
    """

    op: str
    nbytes: int
    group: int


def sample_durations(
    world_size: int, plan: Sequence[BenchItem], rounds: int, warmup: int, timeout_s: float
) -> NDArray[np.int64]:
    """Durations in ns, shape (rounds, items), on ``world_size`` ranks with gloo.

    Raises EnvironmentFault if torch is missing or a rank fails.
    """
    require_torch()
    import torch.distributed

    torch.set_num_threads(1)
    programs = [_bench_program(item, world_size) for item in plan]
    shape = (warmup + rounds, len(plan), world_size + 1)  # the last column: the common start
    shared = mmap.mmap(-1, max(int(np.prod(shape)), 1) * 8)
    ranks = ProcessLauncher("fork")
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{os.getpid()}-") as folder:
        store = Path(folder, "store")
        job = _BenchJob(programs, world_size, store, shared, shape, timeout_s, os.getpid())
        try:
            ranks.start_each(_run_bench_rank, job, range(world_size))
            _wait_for_ranks(ranks, timeout_s, Path(folder, "error"))
        finally:
            ranks.end(0.0)
    times = np.frombuffer(shared, dtype=np.int64).reshape(shape)[warmup:]
    starts, ends = times[..., world_size], times[..., :world_size]
    return np.asarray(ends.max(axis=2) - starts)


def _wait_for_ranks(ranks: ProcessLauncher, timeout_s: float, error: Path) -> None:
    """Wait until all ranks have ended.

    Raises EnvironmentFault at once if one failed, or if the time is up.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        exit_codes = {ranks.exit_of(rank) for rank in ranks.processes}
        if any(exit_codes):
            reason = "a rank ended early"
            if error.exists():
                reason = error.read_text(encoding="utf-8")
            raise EnvironmentFault(f"the measurement was stopped: {reason}")
        if None not in exit_codes:
            return
        if time.monotonic() > deadline:
            raise EnvironmentFault(
                f"the measurement took more than {timeout_s:.0f} s and was stopped",
                "use fewer sizes, samples or ranks, or a longer --timeout",
            )
        time.sleep(0.02)


# --- one rank ---


class _BenchJob(NamedTuple):
    """What every rank needs. ``times``: shared memory of an array of this ``shape``."""

    programs: Sequence[Program]
    world_size: int
    store: Path
    times: mmap.mmap
    shape: tuple[int, int, int]
    timeout_s: float
    parent: int


def _run_bench_rank(job: _BenchJob, rank: int) -> None:
    """Run one rank in a forked process; ends the process, with status 0 on success."""
    die_with_parent(job.parent)
    status = 1
    try:
        import torch.distributed as dist

        os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        dist.init_process_group(
            "gloo",
            f"file://{job.store}",
            rank=rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout_s),
        )
        calls = [
            [_with_separate_output(call) for _, call in program.calls_of(rank)]
            for program in job.programs
        ]
        times = np.frombuffer(job.times, dtype=np.int64).reshape(job.shape)
        group_sizes = [program.groups[1].size for program in job.programs]
        groups = _groups_by_size(group_sizes, rank, job.world_size)
        _run_rounds(rank, calls, groups, times)
        dist.destroy_process_group()
        status = 0
    except Exception as error:
        job.store.with_name("error").write_text(f"rank {rank}: {error}", encoding="utf-8")
    finally:
        os._exit(status)


def _groups_by_size(
    sizes: Sequence[int], rank: int, world_size: int
) -> dict[int, ProcessGroup | None]:
    """This rank's groups by size; None is the world.

    All ranks must create all groups in the same order (torch.distributed.new_group).
    """
    import torch.distributed as dist

    own_groups: dict[int, ProcessGroup | None] = {world_size: None}
    for size in sorted({*sizes} - {world_size}):
        for first in range(0, world_size // size * size, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= rank < first + size:
                own_groups[size] = group
    return own_groups


def _run_rounds(
    rank: int,
    calls: Sequence[Sequence[ResolvedCall]],
    groups: dict[int, ProcessGroup | None],
    times: NDArray[np.int64],
) -> None:
    """Measure all items once per round, and write the end of each into shared memory.

    ``calls``: this rank's calls by item. Rank 0 announces the common start in the last column.
    """
    import torch.distributed as dist

    tensors = _BenchTensors(calls)
    start_column = times.shape[2] - 1
    for round_times in times:
        for item_calls, cells in zip(calls, round_times, strict=True):
            work = [(OPERATIONS[call.op], call, groups[call.group.size]) for call in item_calls]
            tensors.renew(item_calls)
            dist.barrier()
            if rank == 0:
                cells[start_column] = time.monotonic_ns() + _START_LEAD_NS
            while not (start_ns := int(cells[start_column])):
                time.sleep(_POLL_S)
            wait_until(start_ns, _SPIN_NS)
            for operation, call, group in work:
                requests: Any = operation.torch_call(dist, call, tensors, group)
                for request in requests if call.parts else ():
                    request.wait()
            cells[rank] = time.monotonic_ns()


def _buffers(call: ResolvedCall) -> list[TensorBuffer]:
    return [buffer for piece in call.parts or (call,) for buffer in (*piece.inputs, *piece.outputs)]


class _BenchTensors:
    """``tensors[buffer]`` is a tensor of the buffer's shape.

    All inputs share one memory, and all outputs another. Both are allocated before anything is
    measured.
    """

    def __init__(self, calls: Sequence[Sequence[ResolvedCall]]) -> None:
        import torch

        sizes = [
            buffer.numel for item_calls in calls for call in item_calls for buffer in _buffers(call)
        ]
        largest = max(sizes, default=1)
        self._memory = {name: torch.ones(largest) for name in ("in", "out")}

    def renew(self, calls: Sequence[ResolvedCall]) -> None:
        """Rewrite all numbers of a sample, as a program does between two steps."""
        for call in calls:
            for buffer in _buffers(call):
                self[buffer].fill_(1)

    def __getitem__(self, buffer: TensorBuffer) -> Tensor:
        return self._memory[buffer.name][: buffer.numel].view(buffer.shape)


def _bench_program(item: BenchItem, world_size: int) -> Program:
    """The calls of every rank for one sample. Ranks beyond the last complete group make none."""
    group_count = world_size // item.group
    groups = {
        f"group {number}": list(range(number * item.group, (number + 1) * item.group))
        for number in range(group_count)
    }
    calls: dict[int, list[PlainCall]] = {
        rank: _bench_calls(item, rank) for rank in range(group_count * item.group)
    }
    return build_program(world_size, calls, groups=groups)


def _bench_calls(item: BenchItem, rank: int) -> list[PlainCall]:
    operation = OPERATIONS[item.op]
    numel = item.nbytes // _ELEMENT_BYTES
    group = rank // item.group
    first = group * item.group
    call = {
        "op": item.op,
        "group": f"group {group}",
        "dtype": _DTYPE,
        "tensor": "in",
        "numel": numel,
    }
    if operation.kind == "collective":
        has_whole_buffers = operation.input_parts == operation.output_parts == "one"
        if not (operation.pairwise or has_whole_buffers):
            # The larger buffer consists of a part for each rank, and `numel` is that of a part.
            numel //= item.group
        return [{**call, "numel": max(numel, 1), "root": first}]

    # Messages go between the first two ranks of a group.
    peer = {first: first + 1, first + 1: first}.get(rank)
    if peer is None:
        return []
    if operation.kind == "p2p":
        return [{**call, "op": "send" if rank == first else "recv", "peer": peer}]
    parts = [
        {**call, "op": op, "tensor": tensor, "peer": peer}
        for op, tensor in (("isend", "in"), ("irecv", "out"))
    ]
    return [{"op": item.op, "ops": parts}]


def _with_separate_output(call: ResolvedCall) -> ResolvedCall:
    """The call as torch expects it.

    It has a separate output unless it works in place, and flat tensors unless torch expects a list.
    """
    if "tensor" in OPERATIONS[call.op].model_fields:
        return call
    is_flat = call.op.endswith(("_tensor", "_single"))

    def renamed(buffers: tuple[TensorBuffer, ...], name: str) -> tuple[TensorBuffer, ...]:
        return tuple(
            replace(buffer, name=name, shape=(buffer.numel,) if is_flat else buffer.shape)
            for buffer in buffers
        )

    return replace(call, inputs=renamed(call.inputs, "in"), outputs=renamed(call.outputs, "out"))
