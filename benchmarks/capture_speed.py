"""CPU time of scripts under `distsim capture`, compared with torchrun on Gloo.

    python benchmarks/capture_speed.py [calls|ddp|hang|many] [--repeat 3]

CPU time includes all ranks and the process that started them. ``calls`` runs one kind of call in a
loop on 2 and 4 ranks, alternately both ways, and prints medians of microseconds of CPU per call.
``ddp`` runs a whole DDP script, including imports. ``hang`` measures the seconds from the moment at
which two ranks are blocked to the end of the report. ``many`` runs a small DDP program on 64 ranks
and a ring of messages on 256 ranks, and prints the CPU time and the memory of all processes
(proportional shares, proc(5) smaps_rollup).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

CALLS = """
import json, os, sys, time
import torch, torch.distributed as dist

def hub_ns():
    return int(open(f"/proc/{os.getppid()}/schedstat").read().split()[0])

dist.init_process_group("gloo")
rank, kind, count = dist.get_rank(), sys.argv[1], int(sys.argv[2])
x = torch.ones((4 << 20) // 4 if kind == "all_reduce 4 MiB" else 256)

def step():
    if kind == "ping-pong":
        if rank == 0:
            dist.send(x, 1), dist.recv(x, 1)
        elif rank == 1:
            dist.recv(x, 0), dist.send(x, 0)
    else:
        dist.all_reduce(x)

for _ in range(5):
    step()
dist.barrier()
begin, hub = time.process_time_ns(), hub_ns()
for _ in range(count):
    step()
mine = time.process_time_ns() - begin
dist.barrier()
told = [None] * dist.get_world_size()
hub = hub_ns() - hub
dist.all_gather_object(told, mine)
if rank == 0:
    print(json.dumps({"ranks": sum(told), "hub": hub}), flush=True)
dist.destroy_process_group()
"""
DDP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
HANG = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
os.write(1, f"stands {time.monotonic()}{chr(10)}".encode())
dist.recv(torch.ones(1), 1 - dist.get_rank())
"""
RING = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size, x = dist.get_rank(), dist.get_world_size(), torch.ones(16)
for _ in range(3):
    if rank == 0:
        dist.send(x, 1)
        dist.recv(x, size - 1)
    else:
        dist.recv(x, rank - 1)
        dist.send(x, (rank + 1) % size)
dist.destroy_process_group()
"""
KINDS = {"all_reduce 1 KiB": 1000, "ping-pong": 1000, "all_reduce 4 MiB": 40}
#: The most that capture may take of what Gloo does.
BARS = {"all_reduce 1 KiB": 0.5, "ping-pong": 1.0, "all_reduce 4 MiB": 1.0, "ddp": 0.5}
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONWARNINGS": "ignore",
}


def command(way: str, ranks: int, *words: str) -> list[str]:
    """How a script is started."""
    if way == "gloo":
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            *words,
        ]
    return [
        sys.executable,
        "-m",
        "distsim",
        "capture",
        "--nproc",
        str(ranks),
        "--",
        "python",
        *words,
    ]


def ran(way: str, ranks: int, *words: str) -> tuple[str, float]:
    """What it writes, and CPU seconds of all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        command(way, ranks, *words), capture_output=True, text=True, env=ENVIRONMENT
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode not in (0, 1):
        raise SystemExit(ended.stderr)
    return ended.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def calls(script: Path, repeat: int) -> None:
    """CPU of a call, both ways in turn."""
    script.write_text(CALLS)
    for ranks in (2, 4):
        for kind, count in KINDS.items():
            found: dict[str, list[tuple[float, float]]] = {"gloo": [], "capture": []}
            for _ in range(repeat):
                for way, times in found.items():
                    line = next(
                        line
                        for line in ran(way, ranks, script.name, kind, str(count))[0].splitlines()
                        if line[:1] == "{"
                    )
                    told = json.loads(line)
                    times.append((told["ranks"] / count / 1e3, told["hub"] / count / 1e3))
            gloo, ours = (
                statistics.median(a + b for a, b in found[way]) for way in ("gloo", "capture")
            )
            hub = statistics.median(b for _, b in found["capture"])
            say(
                f"{kind}, {ranks} ranks",
                ours,
                gloo,
                BARS[kind],
                f"us of CPU a call, {hub:.0f} of it the hub's",
            )


def ddp(script: Path, repeat: int) -> None:
    script.write_text(DDP)
    for ranks in (2, 4):
        found = {way: [] for way in ("gloo", "capture")}
        for _ in range(repeat):
            for way, times in found.items():
                times.append(ran(way, ranks, script.name)[1])
        say(
            f"DDP, {ranks} ranks",
            *(statistics.median(found[way]) for way in ("capture", "gloo")),
            BARS["ddp"],
            "s of CPU in all",
        )


def say(what: str, ours: float, gloo: float, bar: float, unit: str) -> None:
    verdict = "good" if ours <= bar * gloo else "MISSED"
    print(
        f"{verdict:7}{what}: {ours:.3g} {unit}, Gloo {gloo:.3g} {unit}; ratio {ours / gloo:.2f}, limit {bar}",
        flush=True,
    )


def hang(script: Path, repeat: int) -> None:
    script.write_text(HANG)
    found = []
    for _ in range(repeat):
        with subprocess.Popen(
            command("capture", 2, script.name), stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        ) as started:
            assert started.stdout is not None
            stands = reported = 0.0
            for line in started.stdout:
                if line.startswith("stands"):
                    stands = max(stands, float(line.split()[1]))
                elif "verdict deadlock" in line:
                    reported = time.monotonic()
        if not stands or reported < stands:
            sys.exit("capture reported no hang")
        found.append(reported - stands)
    middle = statistics.median(found)
    print(
        f"{'good' if middle <= 0.5 else 'MISSED':7}a hang of 2 ranks: reported {middle:.2f} s after the ranks blocked, limit 0.5 s",
        flush=True,
    )


def many(script: Path, repeat: int) -> None:
    for text, ranks, what in ((DDP, 64, "DDP, 64 ranks"), (RING, 256, "a ring of 256 ranks")):
        script.write_text(text)
        peak = Peak()
        out, cpu = ran("capture", ranks, script.name)
        gib = peak.stop() / 2**30
        verdict = (
            "good"
            if "verdict ok" in out and (ranks != 64 or (cpu <= 60 and gib <= 3))
            else "MISSED"
        )
        print(
            f"{verdict:7}{what}: {cpu:.1f} s of CPU, {gib:.2f} GiB; {out.splitlines()[0] if out else 'nothing'}",
            flush=True,
        )


class Peak:
    """Samples the memory of all processes below this one."""

    def __init__(self) -> None:
        self.most, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._over.wait(3.0):
            self.most = max(self.most, sum(map(_pss, _below(os.getpid()))))

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self.most


def _pss(pid: int) -> int:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return 0


def _below(root: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def main() -> None:
    parts = {"calls": calls, "ddp": ddp, "hang": hang, "many": many}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="*", choices=[*parts, []], default=list(parts))
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for part in given.part or parts:
            parts[part](Path("train.py"), given.repeat)


if __name__ == "__main__":
    main()
