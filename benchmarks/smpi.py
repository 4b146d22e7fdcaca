"""CPU time of SimGrid's SMPI on the same programs, to compare with distsim.

    python benchmarks/smpi.py FILE…        # ring.yaml and others of the same calls: both whole processes, interleaved, medians of CPU time

The Debian package `libsimgrid-dev` contains `smpirun`. distsim starts from YAML and reports a
verdict. SMPI starts from one text trace per rank, and the time to write the traces is not counted.
The flags of SMPI switch off its correction factors for TCP, so that both tools assume 25 GB/s and
5 us between any two ranks. A replay supports only the world group. Collectives of other groups are
omitted, which makes the comparison easier for SMPI.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.scenario import load

REPEATS = 5
PLATFORM = """<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="c" prefix="n" suffix="" radical="0-{last}" speed="1Gf" bw="25GBps" lat="2.5us" sharing_policy="SPLITDUPLEX"/>
</platform>
"""
#: MPI_BYTE in a trace.
_BYTE = 6


def is_there() -> bool:
    return shutil.which("smpirun") is not None


def write_traces(program: Program, folder: Path) -> list[str]:
    """A program's calls, one text file a rank; the command that replays them."""
    names = []
    for rank in range(program.world_size):
        path = folder / f"rank{rank}.txt"
        path.write_text(
            "\n".join([f"{rank} init", *_lines(program, rank), f"{rank} finalize", ""]),
            encoding="utf-8",
        )
        names.append(str(path))
    (folder / "traces").write_text("\n".join(names) + "\n", encoding="utf-8")
    hosts = "".join(f"n{rank}\n" for rank in range(program.world_size))
    (folder / "hosts").write_text(hosts, encoding="utf-8")
    (folder / "platform.xml").write_text(
        PLATFORM.format(last=program.world_size - 1), encoding="utf-8"
    )
    flags = ["smpi/host-speed:1Gf", "smpi/bw-factor:0:1", "smpi/lat-factor:0:1"]
    return [
        "smpirun",
        "-replay",
        str(folder / "traces"),
        "-platform",
        str(folder / "platform.xml"),
        "-hostfile",
        str(folder / "hosts"),
        "-np",
        str(program.world_size),
        *(f"--cfg={flag}" for flag in flags),
    ]


def _lines(program: Program, rank: int) -> list[str]:
    found = []
    for _, call in program.calls_of(rank):
        if call.op in ("send", "isend", "recv", "irecv"):
            found.append(f"{rank} {call.op} {call.peer} 0 {call.input_nbytes} {_BYTE}")
        elif call.op == "compute":
            found.append(f"{rank} compute {call.time_ns}")  # flops at 1 Gflop/s
        elif call.op == "wait":
            found.append(f"{rank} waitall")
        elif call.op == "all_reduce" and call.group.size == program.world_size:
            found.append(f"{rank} allreduce {call.input_nbytes} 0 {_BYTE}")
    return found


def cpu_seconds(command: list[str]) -> float:
    """CPU seconds of a process and of those that it waits for; it must succeed."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode not in (0, 1):
        sys.exit(f"{' '.join(command[:4])} ended with {child.returncode}")
    return usage.ru_utime + usage.ru_stime


def compare(file: str) -> None:
    """Print both medians, and the median of the rounds' ratios."""
    ours = [sys.executable, "-m", "distsim", "simulate", file]
    with tempfile.TemporaryDirectory() as folder:
        theirs = write_traces(lower(load(file)), Path(folder))
        cpu_seconds(ours)
        pairs = [(cpu_seconds(ours), cpu_seconds(theirs)) for _ in range(REPEATS)]
    mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"{file}: distsim {mine:.2f} s, SMPI {other:.2f} s of CPU, ratio {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="[default: ring.yaml]")
    options = parser.parse_args()
    if not is_there():
        sys.exit("smpirun is not installed (Debian: apt-get install libsimgrid-dev)")
    for file in options.files or [str(Path(__file__).parent / "ring.yaml")]:
        compare(file)


if __name__ == "__main__":
    main()
