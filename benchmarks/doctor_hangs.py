"""The 24 hangs of benchmarks/doctor.py: small programs of 2 to 8 Gloo ranks, each with one planted fault.

`# HERE` marks the lines; doctor must name one of them. ``FAULTS``: program -> (ranks, faulty ranks). If two ranks share the
fault (a wait-for cycle, a send and its receive), doctor may name either.
"""

from __future__ import annotations

import queue
import time

import torch
import torch.distributed as dist


def step(x: torch.Tensor) -> None:
    dist.all_reduce(x)


def load_batch(rank: int, slow: int) -> None:
    if rank == slow:
        time.sleep(600)  # HERE


def skipped_all_reduce(rank: int, x: torch.Tensor) -> None:
    step(x)
    if rank != 2:
        dist.all_reduce(x)  # HERE
    dist.all_reduce(x)
    dist.all_reduce(x)


def extra_all_reduce(rank: int, x: torch.Tensor) -> None:
    step(x)
    if rank == 1:
        dist.all_reduce(x)  # HERE
    dist.all_reduce(x)
    dist.all_reduce(x)


def barrier_in_branch(rank: int, x: torch.Tensor) -> None:
    step(x)
    if rank == 0:
        dist.barrier()  # HERE
    dist.all_reduce(x)


def different_kind(rank: int, x: torch.Tensor) -> None:
    step(x)
    if rank == 2:
        dist.broadcast(x, src=2)  # HERE
    else:
        dist.all_reduce(x)
    dist.barrier()


def different_size(rank: int, x: torch.Tensor) -> None:
    step(x)
    y = torch.ones(200_000 if rank == 3 else 100_000)  # HERE
    dist.all_reduce(y)  # HERE
    dist.barrier()


def different_dtype(rank: int, x: torch.Tensor) -> None:
    step(x)
    y = torch.ones(100_000, dtype=torch.float64 if rank == 1 else torch.float32)  # HERE
    dist.all_reduce(y)  # HERE
    dist.barrier()


def swapped_groups(rank: int, x: torch.Tensor) -> None:
    pair = dist.new_group([0, 1])
    step(x)
    if rank == 0:
        dist.all_reduce(x, group=pair)  # HERE
        dist.all_reduce(x)
    else:
        dist.all_reduce(x)  # HERE
        if rank == 1:
            dist.all_reduce(x, group=pair)


def ring_receives_first(rank: int, x: torch.Tensor) -> None:
    size = dist.get_world_size()
    step(x)
    dist.recv(x, src=(rank - 1) % size)  # HERE
    dist.send(x, dst=(rank + 1) % size)


def tags_differ(rank: int, x: torch.Tensor) -> None:
    step(x)
    if rank == 0:
        dist.send(x, dst=1, tag=1)  # HERE
    else:
        dist.recv(x, src=0, tag=2)  # HERE


def wrong_source(rank: int, x: torch.Tensor) -> None:
    step(x)
    if rank == 0:
        dist.send(x, dst=2)
    elif rank == 2:
        dist.recv(x, src=1)  # HERE
    dist.barrier()


def forgotten_send(rank: int, x: torch.Tensor) -> None:
    step(x)
    if rank == 1:
        dist.recv(x, src=0)  # HERE
    dist.barrier()  # HERE


def slow_host(rank: int, x: torch.Tensor) -> None:
    step(x)
    load_batch(rank, 1)
    dist.all_reduce(x)


def empty_queue(rank: int, x: torch.Tensor) -> None:
    step(x)
    if rank == 3:
        queue.Queue().get()  # HERE
    dist.all_reduce(x)


def busy_compute(rank: int, x: torch.Tensor) -> None:
    step(x)
    while rank == 4:  # HERE
        x = x * 1.0  # HERE
    dist.all_reduce(x)


def raised_before(rank: int, x: torch.Tensor) -> None:
    step(x)
    if rank == 2:
        raise ValueError("the batch is empty")  # HERE
    dist.all_reduce(x)


def uneven_batches(rank: int, x: torch.Tensor) -> None:
    for _ in range(5 if rank == 0 else 6):
        dist.all_reduce(x)  # HERE
    dist.barrier()  # HERE


def early_break(rank: int, x: torch.Tensor) -> None:
    for batch in range(6):
        if rank == 5 and batch == 3:
            break
        dist.all_reduce(x)  # HERE
    dist.broadcast(x, src=0)  # HERE


def pipeline_wrong_order(rank: int, x: torch.Tensor) -> None:
    step(x)
    if rank == 0:
        dist.recv(x, src=1, tag=0)
    elif rank == 1:
        dist.recv(x, src=2, tag=0)  # HERE
        dist.send(x, dst=0, tag=0)
        dist.recv(x, src=2, tag=1)
    else:
        dist.send(x, dst=1, tag=1)  # HERE
        dist.send(x, dst=1, tag=0)


def no_sync_forgotten(rank: int, x: torch.Tensor) -> None:
    for micro in range(3):
        if micro == 2 or rank == 3:
            dist.all_reduce(x)  # HERE
    dist.all_reduce(torch.ones(1))  # HERE


def monitored(rank: int, x: torch.Tensor) -> None:
    from datetime import timedelta

    step(x)
    if rank == 2:
        time.sleep(600)  # HERE
    dist.monitored_barrier(timeout=timedelta(seconds=1))


def new_group_in_branch(rank: int, x: torch.Tensor) -> None:
    step(x)
    if rank != 2:
        dist.new_group([0, 1, 2, 3])  # HERE
    dist.all_reduce(x)  # HERE


def skipped_in_pair(rank: int, x: torch.Tensor) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    step(x)
    if rank != 3:
        dist.all_reduce(x, group=groups[rank // 2])  # HERE
    dist.barrier()


def gather_for_all_gather(rank: int, x: torch.Tensor) -> None:
    step(x)
    parts = [torch.empty_like(x) for _ in range(4)]
    if rank == 3:
        dist.gather(x, None, dst=0)  # HERE
    else:
        dist.all_gather(parts, x)
    dist.barrier()


def never_came(rank: int, x: torch.Tensor) -> None:
    load_batch(rank, 1)
    dist.all_reduce(x)


#: Program -> (ranks, who is at fault).
FAULTS = {
    skipped_all_reduce: (4, {2}), extra_all_reduce: (4, {1}), barrier_in_branch: (4, {0}), different_kind: (3, {2}),
    different_size: (4, {3}), different_dtype: (3, {1}), swapped_groups: (4, {0, 1}), ring_receives_first: (4, {0, 1, 2, 3}),
    tags_differ: (2, {0, 1}), wrong_source: (3, {1, 2}), forgotten_send: (2, {0, 1}), slow_host: (4, {1}),
    empty_queue: (4, {3}), busy_compute: (5, {4}), raised_before: (4, {2}), uneven_batches: (4, {0}),
    early_break: (8, {5}), pipeline_wrong_order: (3, {1, 2}), no_sync_forgotten: (4, {3}), monitored: (3, {2}),
    new_group_in_branch: (4, {0, 1, 2, 3}), skipped_in_pair: (4, {2, 3}), gather_for_all_gather: (4, {3}),
    never_came: (2, {1}),
}  # fmt: skip
