"""Held-out jobs for `distsim slow`: no threshold was chosen by looking at them.

    python benchmarks/slow_jobs_held_out.py record DIR    # a few minutes on two cores; torch, gcc
    python benchmarks/slow_jobs_held_out.py check DIR     # what is found in each, and a summary
    python benchmarks/slow_jobs_held_out.py record DIR 1  # other slow ranks, and longer pauses

The programs differ from those of slow_jobs.py: a convolutional net with buffers under DDP, a
transformer under FSDP2, an MLP under tensor parallelism, and a GPipe pipeline. The slow rank, its
pause and the number of steps vary. A pause in the communication delays one write to a socket.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

WORLD = 4
WIDTH = 96


class Job(NamedTuple):
    """A job; ``place`` is none without a planted pause, ``every``: in every how many steps."""

    kind: str
    place: str
    every: int = 1
    rank: int = 0
    pause_ms: int = 80
    run: int = 1

    @property
    def steps(self) -> int:
        return 12 if self.every == 3 or self.run == 2 else 5

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.place}-{self.every}-{self.run}"


JOBS = (
    Job("ddp", "forward", 1, 1),
    Job("ddp", "backward", 3, 3),
    Job("ddp", "optimizer", 1, 0),
    Job("ddp", "loader", 3, 1, 110),
    Job("fsdp2", "forward", 3, 0, 110),
    Job("fsdp2", "backward", 1, 3),
    Job("fsdp2", "optimizer", 3, 1, 110),
    Job("pipeline", "forward", 1, 1, 60),
    Job("pipeline", "backward", 3, 2, 110),
    Job("tp", "forward", 1, 3),
    Job("tp", "backward", 3, 0, 110),
    Job("ddp", "communication", 3, 2, 110),
    Job("fsdp2", "communication", 3, 3, 110),
    # In every step, only a prediction shows that communication is slow.
    Job("ddp", "communication", 1, 1, 110),
    *(Job(kind, "none", run=run) for kind in ("ddp", "fsdp2", "tp", "pipeline") for run in (1, 2)),
)

#: Delays the next write to a socket once.
_SLOW_SOCKET = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
static volatile int armed_ms = 0;
void delay_next_write(int ms) { armed_ms = ms; }
static void pause_once(void) {
  int ms = __sync_lock_test_and_set(&armed_ms, 0);
  if (ms) usleep(ms * 1000);
}
ssize_t writev(int fd, const struct iovec *v, int n) {
  static ssize_t (*real)(int, const struct iovec *, int);
  if (!real) real = dlsym(RTLD_NEXT, "writev");
  pause_once();
  return real(fd, v, n);
}
ssize_t sendmsg(int fd, const struct msghdr *m, int f) {
  static ssize_t (*real)(int, const struct msghdr *, int);
  if (!real) real = dlsym(RTLD_NEXT, "sendmsg");
  pause_once();
  return real(fd, m, f);
}
"""


class Pause:
    """Pauses the slow rank of a job at one place."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.is_slow = rank == job.rank
        self.step = 0

    def at(self, place: str) -> None:
        job = self.job
        if not self.is_slow or place != job.place or self.step % job.every:
            return
        if place == "communication":
            ctypes.CDLL(None).delay_next_write(job.pause_ms)
        else:
            time.sleep(job.pause_ms / 1000)


def pausing_layers(pause: Pause):
    """Modules that pause in the forward or in the backward pass."""
    import torch
    from torch import nn

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.view_as(x)

        @staticmethod
        def backward(context, gradient):
            pause.at("backward")
            pause.at("communication")
            return gradient

    class Pausing(nn.Module):
        def forward(self, x):
            pause.at("forward")
            return Identity.apply(x)

    return Pausing()


def convolutional_net(pause: Pause):
    from torch import nn

    layers: list[nn.Module] = [nn.Conv1d(8, 32, 3, padding=1), nn.BatchNorm1d(32), nn.GELU()]
    layers += [pausing_layers(pause), nn.Conv1d(32, 32, 3, padding=1), nn.SiLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * WIDTH, 64))


def transformer(pause: Pause, count: int):
    from torch import nn

    blocks: list[nn.Module] = [
        nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(count)
    ]
    return nn.Sequential(*blocks[:1], pausing_layers(pause), *blocks[1:])


def sharded_model(job: Job, pause: Pause):
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    if job.kind == "ddp":
        return nn.parallel.DistributedDataParallel(convolutional_net(pause), bucket_cap_mb=0.1)
    mesh = init_device_mesh("cpu", (WORLD,))
    if job.kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        model = transformer(pause, 3)
        for block in model:
            if list(block.parameters()):
                fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    layers = [nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)]
    model = nn.Sequential(*layers, pausing_layers(pause), nn.Linear(WIDTH, WIDTH))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def training_step(job: Job, pause: Pause) -> Callable[[], None]:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    shape = {"ddp": (8, WIDTH), "fsdp2": (12, WIDTH), "tp": (WIDTH,)}[job.kind]

    class Stream(IterableDataset):
        def __iter__(self):
            number = 0
            while True:
                number += 1
                if number % 16 == 9:
                    pause.at("loader")
                yield torch.full(shape, 0.01 * (number % 7))

    model = sharded_model(job, pause)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    batches = iter(DataLoader(Stream(), batch_size=16))

    def step() -> None:
        loss = model(next(batches)).pow(2).mean()
        loss.backward()
        pause.at("optimizer")
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline_step(pause: Pause, rank: int) -> Callable[[], None]:
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), pausing_layers(pause))
    model.append(nn.Linear(WIDTH, WIDTH))
    stage = PipelineStage(model, rank, WORLD, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 3, loss_fn=lambda y, target: (y - target).abs().mean())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        x = torch.ones(48, WIDTH)
        arguments = (x,) if rank == 0 else ()
        options = {"target": x, "losses": []} if rank == WORLD - 1 else {}
        schedule.step(*arguments, **options)
        optimizer.step()
        optimizer.zero_grad()

    return step


def run_rank(rank: int, jobs: list[Job], ports: list[int], folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule

    torch.set_num_threads(1)
    for job, port in zip(jobs, ports, strict=True):
        torch.manual_seed(1)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", rank=rank, world_size=WORLD)
        pause = Pause(job, rank)
        step = pipeline_step(pause, rank) if job.kind == "pipeline" else training_step(job, pause)
        pause.step = 1
        step()
        dist.barrier()
        path = f"{folder}/{job.name}/rank{rank}.json.gz"
        with profile(
            activities=[ProfilerActivity.CPU],
            record_shapes=True,
            schedule=schedule(wait=1, warmup=1, active=job.steps, repeat=1),
            on_trace_ready=lambda done, path=path: done.export_chrome_trace(path),
        ) as profiler:
            for number in range(job.steps + 2):
                pause.step = number
                step()
                profiler.step()
        dist.barrier()
        dist.destroy_process_group()


def record(folder: Path, rotation: int) -> None:
    jobs = [rotated(job, rotation) for job in JOBS if not (folder / job.name).exists()]
    ports = []
    for job in jobs:
        (folder / job.name).mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    library = folder / "slow_socket.so"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=_SLOW_SOCKET, text=True, check=True)
    if os.environ.get("LD_PRELOAD") != str(library):
        for job in jobs:
            (folder / job.name).rmdir()
        os.environ["LD_PRELOAD"] = str(library)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    import torch.multiprocessing as multiprocessing

    arguments = (jobs, ports, str(folder))
    multiprocessing.start_processes(run_rank, arguments, nprocs=WORLD, start_method="fork")


def rotated(job: Job, rotation: int) -> Job:
    """The same job with another slow rank; in a pipeline only the middle stages have peers."""
    rank = (job.rank + rotation) % WORLD
    if job.kind == "pipeline":
        rank = 1 + (job.rank - 1 + rotation) % 2
    return job._replace(rank=rank, pause_ms=job.pause_ms + 20 * rotation)


#: Place of the pause -> the border behind it.
BORDERS = {
    "forward": "begin Identity",
    "backward": "end IdentityBackward",
    "optimizer": "begin Optimizer.step#AdamW.step",
    "loader": "begin aten::full",
}


def expected(job: Job) -> tuple[str, tuple[int, ...], str] | None:
    """The kind, the ranks and the phase of the right finding."""
    if job.place == "none":
        return None
    if job.place == "communication":
        return ("slow communication", tuple(range(WORLD)), "")
    kind = "straggler" if job.every == 1 else "intermittent"
    return (kind, (job.rank,), {"loader": "data"}.get(job.place, job.place))


def check(folder: Path, rotation: int) -> int:
    """Print what is found in each job. Returns the number of wrong answers."""
    import distsim

    wrong = 0
    for job in (rotated(job, rotation) for job in JOBS):
        is_always_slow = job.place == "communication" and job.every == 1
        cluster = "cpu-10gbe" if is_always_slow else None
        answer = distsim.slow(folder / job.name, cluster=cluster)
        found = [(one.kind, one.ranks, one.phase) for one in answer.findings]
        right = expected(job)
        if job.place == "communication":
            # The operation depends on the order in which the threads of Gloo write.
            found = [(kind, ranks, "") for kind, ranks, _ in found]
        good = not found if right is None else bool(found) and found[0] == right
        if job.place in BORDERS and good:
            place = answer.findings[0].place
            good = place is not None and place.before == BORDERS[job.place]
        wrong += not good
        shares = [f"{one.share:.0%}" for one in answer.findings]
        places = [(one.place.after, one.place.before) for one in answer.findings if one.place]
        print("ok   " if good else "WRONG", job.name, answer.verdict, found, shares, places)
    print(f"{wrong} of {len(JOBS)} wrong")
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("folder", type=Path, help="Folder of the recordings.")
    parser.add_argument("chosen", type=int, nargs="?", default=0, help="[default: 0]")
    options = parser.parse_args()
    target = options.folder.resolve()
    if options.action == "record":
        record(target, options.chosen)
    else:
        sys.exit(check(target, options.chosen) > 0)
