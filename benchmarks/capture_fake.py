"""Memory and CPU of `distsim capture --fake` for a model that is far larger than this machine: FSDP2
with 8e9 parameters on 8 ranks.

    python benchmarks/capture_fake.py [ranks]

Memory is the sum of the proportional set sizes (/proc/PID/smaps_rollup) of all processes, sampled
twice a second; the largest sum is printed. Pages that ranks share count once.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

DRIVER = Path(__file__).parent / "capture_drivers" / "llama_8b.py"


def below(root: int) -> list[int]:
    """A process and those that descend from it."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
    found = {root}
    for _ in parents:
        more = {pid for pid, above in parents.items() if above in found} - found
        if not more:
            break
        found |= more
    return sorted(found)


def shared_out_kib(pid: int) -> int:
    """A process's memory in KiB, shared pages divided among their users."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ranks", nargs="?", default="8", help="[default: 8]")
    ranks = parser.parse_args().ranks
    command = [
        sys.executable,
        "-m",
        "distsim",
        "capture",
        "--fake",
        "--nproc",
        ranks,
        "--",
        "python",
        str(DRIVER),
    ]
    run = subprocess.Popen(command)
    most = 0
    while run.poll() is None:
        most = max(most, sum(shared_out_kib(pid) for pid in below(run.pid)))
        time.sleep(0.5)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{ranks} ranks: {most / 2**20:.2f} GiB peak, {spent.ru_utime + spent.ru_stime:.0f} s of CPU, status {run.returncode}"
    )


if __name__ == "__main__":
    main()
