"""Run fuzz targets on mutants of valid inputs.

    python -m tests.fuzz 20000                        all targets, a fresh seed
    python -m tests.fuzz 500 --target dump --seed 7
    python -m tests.fuzz 1 --target dump --seed 7 --first 123    repeat case 123
    python -m tests.fuzz 20000 --save FOLDER          write the inputs of failures there

Exit status 1: something failed. Add the input of a mended failure to tests/fuzz/corpus/TARGET.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from tests.fuzz.campaign import run, save, show
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", type=int, help="number of cases, shared by the targets")
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    targets = options.target or list(TARGETS)
    failures = []
    for target in targets:
        cases = max(1, options.cases // len(targets))
        found = run(target, options.seed, cases, options.first, show)
        show(f"{target}: {cases} cases with seed {options.seed}, {len(found)} failures")
        failures += found
    if options.save is not None:
        for failure in failures:
            show(f"wrote {save(failure, options.save)}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
