"""Every shipped scenario with every command, each in a process with limits.

    .venv/bin/python -m tests.support.every_scenario            # all pairs: some minutes
    .venv/bin/python -m tests.support.every_scenario 60 SEED    # a random sample of 60

A command may refuse a scenario. It must not end with exit status 3 or 4, print a traceback or a
control character, or exceed the time and memory of `tests.support.fuzz`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.fuzz import ROOT, SCENARIO, answer

#: Commands of `tests.support.fuzz` need a second file or a word; these do not.
COMMANDS = (
    *(one for one in SCENARIO if "BASE" not in one and "WORD" not in one),
    "check FILE --diff",
    "check FILE --all-ranks",
    "simulate FILE --what-if",
    "simulate FILE --seeds 2",
    "report FILE -o OUT/r.html",
    "shrink FILE -o OUT/s.yaml",
    "sweep FILE --grid backend=gloo,nccl -j 1",
    "sweep FILE --grid seed=1,2 -j 1 -o OUT/t.csv --format json",
    "render FILE --view memory -o OUT/m.svg",
    "render FILE --view traffic -o OUT/f.svg",
)
#: What these pairs may do: large jobs, which say so, and refusals for which `tests.support.fuzz`
#: would expect the file's name.
_ALLOWED = ("signal 24", "signal 9", "more memory", "a refusal")


class Pair(NamedTuple):
    scenario: str
    command: str


def pairs() -> list[Pair]:
    scenarios = sorted((ROOT / "scenarios").rglob("*.yaml"))
    names = [path.relative_to(ROOT).as_posix() for path in scenarios]
    return [Pair(name, command) for name in names for command in COMMANDS]


def chosen(count: int, seed: int) -> list[Pair]:
    return random.Random(seed).sample(pairs(), count)


def broken(asked: Sequence[Pair]) -> dict[Pair, str]:
    """The pairs that break a promise, and how. Exceeded limits are listed, too."""
    import distsim.cli.application  # noqa: F401  (shared by all processes)

    found = {}
    for pair in asked:
        with tempfile.TemporaryDirectory() as folder:
            file = str(ROOT / pair.scenario)
            words = pair.command.replace("FILE", file).replace("OUT", folder).split()
            problem = answer(words, Path(folder))
        if problem is not None:
            found[pair] = problem
    return found


def serious(found: dict[Pair, str]) -> dict[Pair, str]:
    """Without exceeded limits and without refusals that lack a place or a remedy."""
    return {pair: text for pair, text in found.items() if not text.startswith(_ALLOWED)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sample", type=int, nargs="?", help="Number of pairs. [default: all pairs]")
    parser.add_argument(
        "seed", type=int, nargs="?", default=0, help="Seed of the sample. [default: 0]"
    )
    options = parser.parse_args()
    asked = pairs() if options.sample is None else chosen(options.sample, options.seed)
    found = broken(asked)
    for pair, text in found.items():
        print(f"{pair.scenario}: {pair.command}: {text[:300]}")
    print(f"{len(asked)} runs; {len(serious(found))} broken promises, {len(found)} to look at")
    return int(bool(serious(found)))


if __name__ == "__main__":
    sys.exit(main())
