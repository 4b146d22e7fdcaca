"""Count what distsim survives: failing files, lack of space and memory, and kills.

    python -m tests.faults                 print the counts
    python -m tests.faults --kills 34      so many kills of each command
    python -m tests.faults --only-kills    only the kills
    python -m tests.faults --write         write docs/explanation/reliability.md as well

Exit status 1: something was wrong. Takes about forty minutes.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.faults.failing_files import (
    COMMANDS,
    MOST_PER_KIND,
    OPERATIONS,
    ROOT,
    Count,
    failing_operations,
    limited_resources,
)
from tests.faults.kills import KILLS

PAGE = ROOT / "docs" / "explanation" / "reliability.md"
#: Limits of a file's size, in bytes: the file system has room for so much.
_FILE_SIZES = (0, 1, 100, 1000, 4096, 10_000, 65_536)
#: Memory beyond what the process uses at the start, in MiB.
_MORE_MEMORY = (1, 2, 4, 8, 16, 32, 64, 128)
_NAMES = {"create": "creation of a file"}
_COMPLETE_FILES = "each file is as before or complete; a documented exit status"


class Row(NamedTuple):
    fault: str
    runs: int
    problems: int
    required: str


def file_rows() -> Iterator[tuple[Row, list[str]]]:
    import distsim.cli.application

    distsim.cli.application.application()  # loads all commands once, before the forks
    for operation in OPERATIONS:
        counts = [failing_operations(command, (operation,)) for command in COMMANDS]
        yield _row(
            f"the n-th {_NAMES.get(operation, operation)} fails",
            counts,
            _COMPLETE_FILES,
        )
    sizes = [(resource.RLIMIT_FSIZE, size) for size in _FILE_SIZES]
    counts = [limited_resources(command, sizes) for command in COMMANDS]
    yield _row("a file must not grow beyond a limit", counts, _COMPLETE_FILES)
    base = _data_bytes()
    memory = [(resource.RLIMIT_DATA, base + (size << 20)) for size in _MORE_MEMORY]
    counts = [limited_resources(command, memory) for command in COMMANDS]
    yield _row("memory runs out", counts, _COMPLETE_FILES)


def _row(fault: str, counts: list[Count], required: str) -> tuple[Row, list[str]]:
    problems = [problem for count in counts for problem in count.problems]
    return Row(fault, sum(count.runs for count in counts), len(problems), required), problems


def _data_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[5]) * resource.getpagesize()


def kill_rows(kills: int, seed: int) -> Iterator[tuple[Row, list[str]]]:
    for name, kill in KILLS.items():
        problems = []
        for number in range(kills):
            with tempfile.TemporaryDirectory(prefix="distsim-kills-") as folder:
                draw = random.Random(f"{name} {seed} {number}")
                problem = kill(Path(folder), draw, f"{name} {seed} {number}")
            if problem:
                problems.append(f"{name}, seed {seed}, kill {number}: {problem}")
        required = "no process and no half-written file is left, no row is lost"
        yield Row(f"`{name}` is killed", kills, len(problems), required), problems


def page(rows: list[Row]) -> str:
    table = "\n".join(
        f"| {row.fault} | {row.runs} | {row.required} | {row.problems} |" for row in rows
    )
    return f"""\
# Reliability

Written by `python -m tests.faults --write`, which makes operations fail on purpose and checks the files that remain. Each file operation of
{len(COMMANDS)} commands fails once (the first {MOST_PER_KIND} of each kind). Kills come at random moments, by SIGKILL, SIGTERM or SIGINT.

| fault | runs | required | broken |
|---|---|---|---|
{table}

Files are written to a temporary file in the same folder, synced and renamed, so that a reader never sees a half-written file. A sweep appends
rows to its table. After a kill, it continues with the rows that are missing.

Tests cover further conditions:

- `tests/cli/test_robust_output.py`: links, pipes, devices, closed and full streams, read-only files
- `tests/real/test_accidents.py`: full disks, stopped and killed ranks, unknown hosts
- `tests/faults`: no shared memory, a port in use, jumps of the clock, two runs in one folder
- `python -m tests.fuzz`: damaged inputs for every reader
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=17)
    parser.add_argument("--only-kills", action="store_true")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows, failures = [], 0
    file_faults = iter(()) if options.only_kills else file_rows()
    for source in (file_faults, kill_rows(options.kills, options.seed)):
        for row, problems in source:
            rows.append(row)
            failures += len(problems)
            sys.stdout.write(f"{row.fault}: {row.runs} runs, {row.problems} broken\n")
            sys.stdout.writelines(f"  {problem}\n" for problem in problems)
            sys.stdout.flush()
    if options.write:
        PAGE.write_text(page(rows), encoding="utf-8")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
