"""CPU time and peak memory of large programs, folded and not, each as a whole process from YAML.

    python benchmarks/folding.py [--rounds N] [--only WORD] [--growth] [--instructions] [--limit SECONDS]

Each program runs once in each round. The output shows medians of CPU time, because wall time is
unreliable on a shared machine. If SimGrid's SMPI is installed (`smpi.py`), it replays the same
calls in the same rounds. A process that takes more wall time than the limit is ended and does not
run again. ``--growth`` prints the exponent with which the time grows with calls and with ranks.
``--instructions`` counts the user-space instructions of each process (`perf stat`), which the load
of the machine does not change.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import smpi

from distsim.program.lower import lower
from distsim.scenario import loads

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
    """A command, with the text of its scenario unless it names a file. ``beside``: SMPI runs it too."""

    name: str
    arguments: list[str]
    text: str = ""
    beside: bool = False
    status: int = 0


WORKS = (
    Work("empty program", ["simulate"], "world: 1\nprogram: [barrier]\n"),
    Work("ring, 1024 ranks x 100 rounds", ["simulate", RING], beside=True),
    Work("the same ring, --all-ranks", ["simulate", RING, "--all-ranks"]),
    Work("1F1B 8 x 32 x dp 128", ["simulate", PIPELINE], beside=True),
    Work("the same 1F1B, --all-ranks", ["simulate", PIPELINE, "--all-ranks"]),
    Work(
        "1F1B 8 x 32 x dp 2048, 16 384 ranks",
        ["simulate", PIPELINE, "--set", "mesh.dp=2048", "--set", "world=16384"],
    ),
    Work(
        "Llama 3 405B, one pipeline, --all-ranks",
        ["simulate", LLAMA, "--set", "world.nodes=16", "--set", "mesh.dp=1", "--all-ranks"],
    ),
    Work("Llama 3 405B, all 16 384 ranks", ["simulate", LLAMA]),
    Work("Llama 3 405B with one slow rank", ["simulate", LLAMA, *SLOW]),
    Work("100 all_reduces on 1024 ranks", ["simulate"], ALL_REDUCES, beside=True),
    Work("the same all_reduces, --all-ranks", ["simulate", "--all-ranks"], ALL_REDUCES),
    Work("deadlocked ring of 1024", ["simulate"], STUCK, beside=True, status=1),
    Work("check, 1024 ranks x 1200 calls", ["check"], LAYERS),
    Work("the same check, --all-ranks", ["check", "--all-ranks"], LAYERS),
)
#: Bytecode is at hand, as after an installation.
_ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
}


class Taken(NamedTuple):
    """What one process took: seconds, MiB."""

    cpu: float
    wall: float
    memory: float


def measure(command: list[str], status: int, limit: float) -> Taken | None:
    """One process of its own, and those that it waits for; None where it runs over the limit."""
    start, late = time.perf_counter(), threading.Event()
    child = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_ENVIRONMENT,
        start_new_session=True,
    )

    def end() -> None:
        late.set()
        os.killpg(child.pid, signal.SIGKILL)

    timer = threading.Timer(limit, end)
    timer.start()
    _, ended, usage = os.wait4(child.pid, 0)
    timer.cancel()
    child.returncode = os.waitstatus_to_exitcode(ended)
    if late.is_set():
        return None
    if child.returncode != status:
        sys.exit(f"{' '.join(command)} ended with {child.returncode}, not {status}")
    return Taken(
        usage.ru_utime + usage.ru_stime, time.perf_counter() - start, usage.ru_maxrss / 1024
    )


def commands(work: Work, folder: Path) -> list[tuple[str, list[str], int]]:
    """(name, command, exit status) of a work: distsim's, and SMPI's."""
    file = folder / f"{abs(hash(work.name))}.yaml"
    file.write_text(work.text, encoding="utf-8")
    arguments = [*work.arguments, *([str(file)] if work.text else [])]
    found = [(work.name, [sys.executable, "-m", "distsim", *arguments], work.status)]
    if work.beside and smpi.is_there():
        traces = folder / file.stem
        traces.mkdir()
        text = work.text or Path(work.arguments[1]).read_text(encoding="utf-8")
        found.append((f"  SMPI: {work.name}", smpi.write_traces(lower(loads(text)), traces), 0))
    return found


def table(works: list[Work], rounds: int, limit: float) -> None:
    """Measure all works in turn, tell each as it is done, and print their medians."""
    found: dict[str, list[Taken]] = {}
    with tempfile.TemporaryDirectory() as folder:
        todo = [one for work in works for one in commands(work, Path(folder))]
        warm = measure(
            [
                sys.executable,
                "-m",
                "distsim",
                "simulate",
                str(HERE.parent / "scenarios" / "hybrid.yaml"),
            ],
            0,
            limit,
        )
        assert warm is not None
        for _ in range(rounds):
            for name, command, status in list(todo):
                took = measure(command, status, limit)
                print(
                    f"{name}: {'over the limit' if took is None else f'{took.cpu:.2f} s'}",
                    file=sys.stderr,
                    flush=True,
                )
                if took is None:
                    todo.remove((name, command, status))
                else:
                    found.setdefault(name, []).append(took)
    print(f"{'work':48} {'CPU s':>7} {'wall s':>7} {'MiB':>5} {'/ SMPI':>8}")
    for name, taken in found.items():
        cpu, wall, memory = (statistics.median(column) for column in zip(*taken, strict=True))
        other = found.get(f"  SMPI: {name}", [])
        ratio = (
            f"{statistics.median(a.cpu / b.cpu for a, b in zip(taken, other, strict=False)):8.3f}"
            if other
            else ""
        )
        print(f"{name:48} {cpu:7.2f} {wall:7.2f} {memory:5.0f} {ratio:>8}")


def instructions(works: list[Work], rounds: int) -> None:
    """Print the medians of the works' instructions, in thousand millions."""
    if shutil.which("perf") is None:
        sys.exit("perf is not installed")
    with tempfile.TemporaryDirectory() as folder:
        counted, todo = (
            Path(folder) / "counted",
            [commands(work, Path(folder))[0] for work in works],
        )
        found: dict[str, list[float]] = {name: [] for name, _, _ in todo}
        for _ in range(rounds + 1):  # one to warm up
            for name, command, status in todo:
                perf = ["perf", "stat", "-x,", "-e", "instructions:u", "-o", str(counted), *command]
                ended = subprocess.run(
                    perf,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_ENVIRONMENT,
                    check=False,
                )
                if ended.returncode != status:
                    sys.exit(f"{' '.join(command)} ended with {ended.returncode}, not {status}")
                found[name].append(
                    int(counted.read_text(encoding="utf-8").splitlines()[-1].partition(",")[0])
                    / 1e9
                )
    for name, taken in found.items():
        print(f"{name:48} {statistics.median(taken[1:]):7.2f}")


def growth(rounds: int, limit: float) -> None:
    """By which power the time beyond an empty program's grows: with the calls of each rank, and
    with ranks that do the same.
    """
    with tempfile.TemporaryDirectory() as folder:
        empty, layers = Path(folder) / "empty.yaml", Path(folder) / "layers.yaml"
        empty.write_text("world: 1\nprogram: [barrier]\n", encoding="utf-8")
        layers.write_text(LAYERS, encoding="utf-8")

        def seconds(command: str, file: Path, *sets: str) -> float:
            more = [word for text in sets for word in ("--set", text)]
            taken = [
                measure([sys.executable, "-m", "distsim", command, str(file), *more], 0, limit)
                for _ in range(rounds)
            ]
            return statistics.median(math.inf if one is None else one.cpu for one in taken)

        for command in ("simulate", "check"):
            seconds(command, empty)
            least = seconds(command, empty)
            for name, key, sizes in (
                ("calls of a rank", "vars.layers", (400, 4000)),
                ("ranks", "mesh.dp", (128, 1024)),
            ):
                also = [[f"world.nodes={size}"] if key == "mesh.dp" else [] for size in sizes]
                few, many = (
                    seconds(command, layers, f"{key}={size}", *more) - least
                    for size, more in zip(sizes, also, strict=True)
                )
                power = math.log(many / few) / math.log(sizes[1] / sizes[0])
                print(
                    f"{command}, {name}: {sizes[0]} take {few:.2f} s, {sizes[1]} take {many:.2f} s: power {power:.2f}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="Run programs whose names contain this.")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument(
        "--limit",
        type=float,
        default=600,
        help="Wall seconds after which a process is ended. [default: 600]",
    )
    given = parser.parse_args()
    if given.growth:
        growth(given.rounds, given.limit)
    elif given.instructions:
        instructions([work for work in WORKS if given.only in work.name], given.rounds)
    else:
        table([work for work in WORKS if given.only in work.name], given.rounds, given.limit)


if __name__ == "__main__":
    main()
