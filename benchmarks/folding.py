"""Large programs, folded and not: whole processes from YAML, their CPU time and peak memory.

    python benchmarks/folding.py [--rounds N] [--only WORD] [--growth]

Each work runs once in each round, in turn; printed are the medians. CPU time, because a machine that others use as well says little of
wall time. Beside them stands what SimGrid's SMPI 3.32 took for the same work (wall time of a quiet machine of two cores; `smpi.py` measures
the ring anew where SimGrid is installed). ``--growth`` prints by which power of the number of calls and of ranks the time grows.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
RING, PIPELINE, LLAMA = (str(HERE / f"{name}.yaml") for name in ("ring", "pipeline", "llama3_405b"))
FLAT = """cluster: {name: flat, source: 25 GB/s full duplex and 5 us between any two ranks, preset: cpu-25gbe, call_overhead: 0 ns,
          intra: {kind: shm, latency: 5 us, bandwidth: 25 GB/s, efficiency: 1.0}}
"""
ALL_REDUCES = f"""name: all-reduces
world: 1024
backend: gloo
{FLAT}vars: {{times: 100}}
program: [repeat: {{times: times, steps: [all_reduce: {{tensor: {{shape: [16777216]}}}}]}}]
"""
STUCK = f"""name: stuck-ring
world: 1024
backend: gloo
{FLAT}program:
  - send: {{tensor: {{shape: [262144]}}, dst: (rank + 1) % world_size}}
  - recv: {{tensor: {{shape: [262144]}}, src: (rank - 1) % world_size}}
"""
LAYERS = """name: layers
world: {nodes: 128, ranks_per_node: 8}
backend: nccl
mesh: {dp: 128, tp: 8}
vars: {layers: 400}
program:
  - repeat:
      times: layers
      steps:
        - compute: {time: 100 us}
        - all_reduce: {tensor: {shape: [1048576]}, group: tp}
        - all_reduce: {tensor: {shape: [1048576]}, group: dp}
"""
SLOW = ["--set", "faults=[{kind: slow, rank: 5003, factor: 1.3}]"]


class Work(NamedTuple):
    """A command, with the text of its file where it has none. ``smpi_s``: SMPI's wall seconds for the same, None where it has no like."""

    name: str
    arguments: list[str]
    text: str = ""
    smpi_s: float | None = None
    status: int = 0


WORKS = (
    Work("ring, 1024 ranks x 100 rounds", ["simulate", RING], smpi_s=1.64),
    Work("the same, --no-fold", ["simulate", RING, "--no-fold"], smpi_s=1.64),
    Work("1F1B 8 x 32 x dp 128", ["simulate", PIPELINE], smpi_s=2.81),
    Work("the same, --no-fold", ["simulate", PIPELINE, "--no-fold"], smpi_s=2.81),
    Work("1F1B 8 x 32 x dp 2048, 16 384 ranks", ["simulate", PIPELINE, "--set", "mesh.dp=2048", "--set", "world=16384"]),
    Work(
        "Llama 3 405B, one pipeline, --no-fold", ["simulate", LLAMA, "--set", "world.nodes=16", "--set", "mesh.dp=1", "--no-fold"]
    ),
    Work("Llama 3 405B, all 16 384 ranks", ["simulate", LLAMA]),
    Work("the same with one slow rank", ["simulate", LLAMA, *SLOW]),
    Work("100 all_reduces on 1024 ranks", ["simulate"], ALL_REDUCES, 15.1),
    Work("the same, --no-fold", ["simulate", "--no-fold"], ALL_REDUCES, 15.1),
    Work("deadlocked ring of 1024", ["simulate"], STUCK, 0.73, 1),
    Work("check, 1024 ranks x 1200 calls", ["check"], LAYERS),
    Work("the same, --no-fold", ["check", "--no-fold"], LAYERS),
)


def measure(work: Work, more: list[str] | None = None) -> tuple[float, float, float]:
    """(CPU seconds, wall seconds, peak MiB) of one process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.yaml"
        file.write_text(work.text, encoding="utf-8")
        arguments = [*work.arguments, *([str(file)] if work.text else []), *(more or [])]
        start = time.perf_counter()
        child = subprocess.Popen([sys.executable, "-m", "distsim", *arguments], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != work.status:
        sys.exit(f"distsim {' '.join(arguments)} ended with {child.returncode}, not {work.status}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - start, usage.ru_maxrss / 1024


def table(works: list[Work], rounds: int) -> None:
    """Measure all works in turn, and print their medians."""
    found: dict[int, list[tuple[float, float, float]]] = {i: [] for i in range(len(works))}
    for _ in range(rounds):
        for i, work in enumerate(works):
            found[i].append(measure(work))
    print(f"{'work':40} {'CPU s':>7} {'wall s':>7} {'MiB':>5} {'SMPI s':>7}")
    for i, work in enumerate(works):
        cpu, wall, memory = (statistics.median(column) for column in zip(*found[i], strict=True))
        print(f"{work.name:40} {cpu:7.2f} {wall:7.2f} {memory:5.0f} {work.smpi_s or '':>7}")


def growth(rounds: int) -> None:
    """By which power the time beyond an empty program's grows: with the calls of each rank, and with ranks that do the same."""
    empty = statistics.median(measure(Work("", ["simulate"], "world: 1\nprogram: [barrier]\n"))[0] for _ in range(rounds))
    for name, key, sizes in (("calls of a rank", "vars.layers", (400, 4000)), ("ranks", "mesh.dp", (128, 1024))):
        times = []
        for size in sizes:
            more = ["--set", f"{key}={size}", *(["--set", f"world.nodes={size}"] if key == "mesh.dp" else [])]
            times.append(statistics.median(measure(Work("", ["simulate"], LAYERS), more)[0] for _ in range(rounds)) - empty)
        power = math.log(times[1] / times[0]) / math.log(sizes[1] / sizes[0])
        print(f"{name}: {sizes[0]} take {times[0]:.2f} s, {sizes[1]} take {times[1]:.2f} s: power {power:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="works whose names hold this")
    parser.add_argument("--growth", action="store_true")
    given = parser.parse_args()
    if given.growth:
        growth(given.rounds)
    else:
        table([work for work in WORKS if given.only in work.name], given.rounds)


if __name__ == "__main__":
    main()
