"""CPU and wall time of functions under `distsim capture`, compared with Gloo.

    python benchmarks/capture.py [repetitions]

Each function runs in forked ranks, alternately under the hub of capture and on Gloo over loopback.
The CPU time includes all ranks and the hub. The output shows the medians of the ratio hub / Gloo.
Imports are not measured; ``capture_speed.py`` compares whole commands with torchrun.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from distsim.script_capture.launch.capture_target import CaptureTarget
from distsim.script_capture.launch.parent_process import CaptureRunOptions, run_capture

DDP = """\
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
net = DDP(torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(10):
    optimizer.zero_grad()
    net(torch.randn(16, 64)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def all_reduce(nbytes: int, times: int) -> Callable[[], None]:
    def work() -> None:
        x = torch.ones(nbytes // 4)
        for _ in range(times):
            dist.all_reduce(x)

    return work


def ping_pong(times: int) -> Callable[[], None]:
    def work() -> None:
        x, rank = torch.ones(256), dist.get_rank()
        for _ in range(times if rank < 2 else 0):
            if rank == 0:
                dist.send(x, 1)
            dist.recv(x, 1 - rank)
            if rank == 1:
                dist.send(x, 0)

    return work


def spent() -> float:
    """CPU seconds of this process and of all its ended children."""
    return sum(
        u.ru_utime + u.ru_stime
        for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def on_hub(work: Callable[[], None], ranks: int) -> None:
    def whole() -> None:
        dist.init_process_group("gloo")
        work()

    found = run_capture(
        CaptureRunOptions(CaptureTarget("benchmark", function=whole, home=__file__), ranks)
    )
    assert found.ended == "ended"


def on_gloo(work: Callable[[], None], ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                dist.init_process_group(
                    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
                )
                work()
                dist.barrier()
                os._exit(0)
            pids.append(pid)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * ranks


def measured(run: Callable[[], None]) -> tuple[float, float]:
    cpu, wall = spent(), time.perf_counter()
    run()
    return spent() - cpu, time.perf_counter() - wall


def compare(
    name: str, ranks: int, hub: Callable[[], None], gloo: Callable[[], None], repetitions: int
) -> None:
    turns = [(measured(hub), measured(gloo)) for _ in range(repetitions)]
    cpu, wall = (statistics.median(h[k] / g[k] for h, g in turns) for k in (0, 1))
    seconds = [statistics.median(t[k][0] for t in turns) for k in (0, 1)]
    print(
        f"{name:18} {ranks} ranks   CPU {cpu:5.2f}   wall {wall:5.2f}   ({seconds[0]:.2f} s and {seconds[1]:.2f} s of CPU)",
        flush=True,
    )


def commands(ranks: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """The DDP script as a user starts it."""
    script = Path(tempfile.gettempdir()) / f"distsim-benchmark-{os.getpid()}.py"
    script.write_text(DDP, encoding="utf-8")
    hub = [
        sys.executable,
        "-m",
        "distsim",
        "capture",
        "--nproc",
        str(ranks),
        "--",
        "python",
        str(script),
    ]
    gloo = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(script),
    ]

    def started(words: list[str]) -> Callable[[], None]:
        return lambda: subprocess.run(words, check=True, capture_output=True) and None

    return started(hub), started(gloo)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("repetitions", type=int, nargs="?", default=3, help="[default: 3]")
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    for ranks in (2, 4):
        for name, work in (
            ("all_reduce 1 KiB", all_reduce(1024, 1000)),
            ("all_reduce 4 MiB", all_reduce(4 << 20, 40)),
            ("ping-pong 1 KiB", ping_pong(1000)),
        ):
            hub = lambda w=work, n=ranks: on_hub(w, n)  # noqa: E731
            gloo = lambda w=work, n=ranks: on_gloo(w, n)  # noqa: E731
            compare(name, ranks, hub, gloo, repetitions)
        compare("DDP script", ranks, *commands(ranks), repetitions)


if __name__ == "__main__":
    main()
