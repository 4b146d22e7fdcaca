"""Whole processes: how long they take and how much memory they reach.

    python benchmarks/whole.py

Prints, for each command, the median wall time of five runs after a warm-up and the peak resident
memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
COMMANDS = {
    "distsim --help": ["--help"],
    "distsim simulate scenarios/hybrid.yaml": [
        "simulate",
        str(HERE.parent / "scenarios" / "hybrid.yaml"),
    ],
    "distsim simulate benchmarks/ring.yaml": ["simulate", str(HERE / "ring.yaml")],
    "distsim simulate benchmarks/pipeline.yaml": ["simulate", str(HERE / "pipeline.yaml")],
}


def measure(arguments: list[str]) -> tuple[float, float]:
    """(wall seconds, peak MiB) of one process of its own."""
    start = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "distsim", *arguments], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in (0, 1):
        sys.exit(f"distsim {' '.join(arguments)} ended with {child.returncode}")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for name, arguments in COMMANDS.items():
        measure(arguments)
        runs = [measure(arguments) for _ in range(5)]
        print(
            f"{name}: {statistics.median(t for t, _ in runs):.2f} s, {max(m for _, m in runs):.0f} MiB"
        )


if __name__ == "__main__":
    main()
