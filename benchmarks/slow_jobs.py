"""Records real Gloo jobs with and without a planted delay, and checks what `distsim slow` finds.

    python benchmarks/slow_jobs.py record DIR    # about ten minutes on two cores; needs torch
    python benchmarks/slow_jobs.py check DIR     # what is found in each, and a summary

Each job has four ranks: DDP, FSDP2, tensor parallelism, or a 1F1B pipeline. Rank 2 sleeps in its
forward, backward, optimizer, before the step (data), or in its data loader; in every step, or in
every third.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path

WORLD = 4
SLOW_RANK = 2
PAUSE_S = 0.12
WIDTH = 384
KINDS = ("ddp", "fsdp2", "tp", "pipeline")
PLACES = ("forward", "backward", "optimizer", "data")
#: (kind, place, every how many steps, steps)
PLANTED = [
    *((kind, place, 1, 6) for kind in KINDS for place in PLACES),
    *((kind, "forward", 3, 15) for kind in KINDS),
    ("ddp", "loader", 1, 6),
    ("fsdp2", "loader", 1, 6),
]
CLEAN = [(kind, "none", run, 15 if run == 3 else 6) for kind in KINDS for run in (1, 2, 3, 4, 5)]


class Delay:
    """Sleeps at one place of the slow rank, in every n-th step."""

    def __init__(self, rank: int, place: str, every: int) -> None:
        self.rank, self.place, self.every = rank, place, every
        self.step = 0

    def at(self, place: str) -> None:
        if place == self.place and self.rank == SLOW_RANK and self.step % self.every == 0:
            time.sleep(PAUSE_S)


def blocks(delay: Delay, count: int):
    """Layers with the planted forward delay in the last but one, and a backward delay behind the second."""
    import torch
    from torch import nn

    class SlowBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            delay.at("backward")
            return gradient

    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.linear, self.number = nn.Linear(WIDTH, WIDTH), number

        def forward(self, x):
            y = torch.relu(self.linear(x))
            if self.number == max(count - 2, 0):
                delay.at("forward")
            return SlowBackward.apply(y) if self.number == min(1, count - 1) else y

    return nn.Sequential(*(Block(number) for number in range(count)))


def pipeline_step(rank: int, delay: Delay):
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model = blocks(delay, 2)
    stage = PipelineStage(model, rank, WORLD, torch.device("cpu"))
    schedule = Schedule1F1B(stage, WORLD, loss_fn=lambda y, target: ((y - target) ** 2).mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        delay.at("data")
        x = torch.randn(64, WIDTH)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == WORLD - 1:
            schedule.step(target=x, losses=[])
        else:
            schedule.step()
        delay.at("optimizer")
        optimizer.step()

    return step


def parallel_model(kind: str, delay: Delay):
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    model = blocks(delay, 4)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    mesh = init_device_mesh("cpu", (WORLD,))
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    styles = [ColwiseParallel(), RowwiseParallel()]
    return parallelize_module(model, mesh, {f"{i}.linear": styles[i % 2] for i in range(4)})


def training_step(kind: str, delay: Delay):
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset):
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int):
            if index % 32 == 3:
                delay.at("loader")
            return torch.full((WIDTH,), 0.1)

    model = parallel_model(kind, delay)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(DataLoader(Samples(), batch_size=32))

    def step() -> None:
        delay.at("data")
        model(next(batches)).square().mean().backward()
        delay.at("optimizer")
        optimizer.step()
        optimizer.zero_grad()

    return step


def run_rank(rank: int, kind: str, place: str, every: int, steps: int, folder: str, port: int):
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    delay = Delay(rank, place, every)
    step = pipeline_step(rank, delay) if kind == "pipeline" else training_step(kind, delay)
    step()
    dist.barrier()
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=1, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(f"{folder}/rank{rank}.json.gz"),
    ) as profiler:
        for _ in range(steps + 2):
            delay.step += 1
            step()
            profiler.step()
    dist.barrier()
    dist.destroy_process_group()


def record(folder: Path) -> None:
    import torch.multiprocessing as multiprocessing

    for kind, place, number, steps in (*PLANTED, *CLEAN):
        target = folder / f"{kind}-{place}-{number}"
        if target.exists():
            continue
        target.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        every = 1 if place == "none" else number
        arguments = (kind, place, every, steps, str(target), port)
        multiprocessing.spawn(run_rank, arguments, nprocs=WORLD)
        print(f"recorded {target}", flush=True)


def check(folder: Path) -> int:
    """Print what is found in each job. Returns the number of wrong answers."""
    import distsim

    wrong = 0
    for target in sorted(path for path in folder.iterdir() if path.is_dir()):
        place, number = target.name.split("-")[1:3]
        answer = distsim.slow(target)
        found = [(one.kind, one.ranks, one.phase) for one in answer.findings]
        phase = {"loader": "data"}.get(place, place)
        kind = "straggler" if number == "1" else "intermittent"
        expected = [] if place == "none" else [(kind, (SLOW_RANK,), phase)]
        good = found == expected
        wrong += not good
        where = [one.place for one in answer.findings]
        print("ok   " if good else "WRONG", target.name, answer.verdict, found, where)
    print(f"{wrong} wrong")
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("folder", type=Path, help="Folder of the recordings.")
    options = parser.parse_args()
    if options.action == "record":
        record(options.folder)
    else:
        sys.exit(check(options.folder) > 0)
