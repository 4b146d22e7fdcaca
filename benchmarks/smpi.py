"""The ring of 1024 ranks beside SimGrid's SMPI trace replay (Debian package `simgrid`): whole processes, interleaved.

    python benchmarks/smpi.py

distsim starts from `ring.yaml`, verdict included; SMPI from text traces that are written before the clock starts. Prints the medians
and distsim's time over SMPI's. SimGrid's flags switch its TCP correction factors off, so that both price 25 GB/s and 5 us.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS, ROUNDS, NBYTES = 1024, 100, 1 << 20
REPEATS = 5
PLATFORM = """<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="c" prefix="n" suffix="" radical="0-{last}" speed="1Gf" bw="25GBps" lat="2.5us" sharing_policy="SPLITDUPLEX"/>
</platform>
"""


def write_traces(folder: Path) -> list[str]:
    """The same calls as ring.yaml, one text file per rank; the command that replays them."""
    names = []
    for rank in range(RANKS):
        one_round = [
            f"{rank} isend {(rank + 1) % RANKS} 0 {NBYTES} 6",
            f"{rank} irecv {(rank - 1) % RANKS} 0 {NBYTES} 6",
            f"{rank} waitall",
        ]
        path = folder / f"rank{rank}.txt"
        path.write_text("\n".join([f"{rank} init", *one_round * ROUNDS, f"{rank} finalize"]) + "\n")
        names.append(str(path))
    (folder / "traces").write_text("\n".join(names) + "\n")
    (folder / "hosts").write_text("\n".join(f"n{rank}" for rank in range(RANKS)) + "\n")
    (folder / "platform.xml").write_text(PLATFORM.format(last=RANKS - 1))
    flags = ["smpi/host-speed:1Gf", "smpi/bw-factor:0:1", "smpi/lat-factor:0:1"]
    return ["smpirun", "-replay", str(folder / "traces"), "-platform", str(folder / "platform.xml"), "-hostfile", str(folder / "hosts"),
            "-np", str(RANKS), *(f"--cfg={flag}" for flag in flags)]  # fmt: skip


def seconds(command: list[str]) -> float:
    """Wall seconds of a whole process; it must succeed."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed: {done.stderr[-2000:]}")
    return time.perf_counter() - start


def main() -> None:
    if shutil.which("smpirun") is None:
        sys.exit("smpirun is not installed (Debian: apt-get install simgrid)")
    ring = Path(__file__).parent / "ring.yaml"
    ours = [sys.executable, "-m", "distsim", "simulate", str(ring)]
    with tempfile.TemporaryDirectory() as folder:
        theirs = write_traces(Path(folder))
        seconds(ours), seconds(theirs)
        pairs = [(seconds(ours), seconds(theirs)) for _ in range(REPEATS)]
    mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"ring of {RANKS} ranks x {ROUNDS} rounds, whole process: distsim {mine:.2f} s, SMPI {other:.2f} s, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
