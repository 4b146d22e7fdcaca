"""How many faulty programs `distsim check --fix` repairs: those of tests/data/agreed that deadlock
or mismatch, each as a scenario.

    python benchmarks/repairs.py [--only dl0001,…] [--texts DIR]

A program counts as repaired where a changed file checks `ok` under every reading and completes
under the program's back end.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from distsim.repair.search import find_repairs  # noqa: E402
from tests.support.agreed import load_cases, scenario_of  # noqa: E402

FAULTS = ("deadlock", "mismatch")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", help="ids, with commas")
    parser.add_argument("--texts", type=Path, help="write each program and its repair here")
    given = parser.parse_args()
    only = set(given.only.split(",")) if given.only else None
    chosen = [
        case
        for case in load_cases()
        if case["expect"]["verdict"] in FAULTS and (only is None or case["id"] in only)
    ]
    found: Counter[tuple[str, bool]] = Counter()
    for case in chosen:
        file = scenario_of(case)
        begun, verdict = time.process_time(), case["expect"]["verdict"]
        best = find_repairs(file, f"{case['id']}.yaml")
        found[verdict, bool(best)] += 1
        said = "; then ".join(best[0].words) if best else "NONE"
        print(
            f"{case['id']:8} {case['category'][:24]:24} {verdict:9} {time.process_time() - begun:5.1f} s  {said}",
            flush=True,
        )
        if given.texts is not None:
            given.texts.mkdir(parents=True, exist_ok=True)
            (given.texts / f"{case['id']}.yaml").write_text(file)
            if best:
                (given.texts / f"{case['id']}.patch").write_text(best[0].patch)
    for verdict in FAULTS:
        good, bad = found[verdict, True], found[verdict, False]
        if good + bad:
            print(f"{verdict}: {good} of {good + bad} repaired, {100 * good / (good + bad):.0f} %")


if __name__ == "__main__":
    main()
