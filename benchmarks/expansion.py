"""CPU time from the file of a pipeline to its calls: reading and expanding, then lowering.

    python benchmarks/expansion.py

The pipeline has an interleaved schedule, 8 ranks and 4 chunks. The number of micro-batches grows,
so that steps with quadratic cost become visible.
"""

from __future__ import annotations

import argparse
import sys
import time

from distsim.program.lower import lower
from distsim.scenario import loads

TEXT = """
name: interleaved
world: 8
mesh: {{pp: 8}}
program:
  - pipeline: {{schedule: interleaved_1f1b, chunks: 4, micro_batches: {count}, forward: 1 ms, backward: 2 ms, activation: {{shape: [16]}}}}
"""


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    lower(loads(TEXT.format(count=8)))  # what is imported at first use
    sys.stdout.write(f"{'micro-batches':>13}  {'load':>8}  {'lower':>8}\n")
    for count in (16, 32, 64, 128, 256):
        start = time.process_time()
        made = loads(TEXT.format(count=count))
        loaded = time.process_time()
        lower(made)
        done = time.process_time()
        sys.stdout.write(f"{count:13}  {loaded - start:6.2f} s  {done - loaded:6.2f} s\n")


if __name__ == "__main__":
    main()
