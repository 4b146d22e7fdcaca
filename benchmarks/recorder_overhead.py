"""Measures what `distsim.recorder` adds to a step, as ratios within one run.

    python benchmarks/recorder_overhead.py [BLOCKS]

Two Gloo ranks train a small model under DDP. Blocks of steps without the recorder, with a waiting
recorder, and in a window alternate, so changes of the machine's load affect all of them. Printed:
the median CPU time of a step of each kind relative to no recorder, which other processes hardly
affect, and the time of the hook alone.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time

STEPS = 8


def run_rank(rank: int, blocks: int, port: int, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    import distsim.recorder

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    layers = [nn.Linear(512, 512) for _ in range(6)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(64, 512)
    times: dict[str, list[float]] = {"off": [], "waiting": [], "window": []}

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for block in range(blocks):
        for kind in times:
            if kind == "waiting":
                distsim.recorder.start(folder, first=10**6)
            elif kind == "window":
                distsim.recorder.start(f"{folder}/{block}", first=1, steps=2 * STEPS, windows=1)
                # The profiler starts after one step, and warms up in the next one.
                step()
                step()
            dist.barrier()
            for _ in range(STEPS):
                begin = time.process_time()
                step()
                times[kind].append(time.process_time() - begin)
            distsim.recorder.stop()
    if rank == 0:
        report(times)
        report_hook(optimizer)
    dist.barrier()
    dist.destroy_process_group()


def report(times: dict[str, list[float]]) -> None:
    base = statistics.median(times["off"])
    for kind, values in times.items():
        median = statistics.median(values)
        print(
            f"{kind:8} {median * 1e3:8.3f} ms CPU  ratio {median / base:.3f}  {len(values)} steps"
        )


def report_hook(optimizer: object) -> None:
    """The time of one call of the hook between windows."""
    from pathlib import Path

    from distsim.recorder import Recorder

    recorder = Recorder(Path("unused"), 1, 10**9, 10**9, 1)
    begin = time.perf_counter()
    for _ in range(100_000):
        recorder._after_optimizer(optimizer, (), {})
    print(f"hook     {(time.perf_counter() - begin) * 10:8.3f} us per step")


if __name__ == "__main__":
    import torch.multiprocessing as multiprocessing

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", type=int, nargs="?", default=12, help="[default: 12]")
    count = parser.parse_args().steps
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        chosen = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as target:
        multiprocessing.spawn(run_rank, (count, chosen, target), nprocs=2)
