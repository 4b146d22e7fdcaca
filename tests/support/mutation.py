"""Mutation testing: the share of small code changes (mutants) that at least one test detects.

    python -m tests.support.mutation                    all parts (hours); fails if a rate is under 90 %
    python -m tests.support.mutation hardware values    these parts
    python -m tests.support.mutation distsim/backends/message_matching.py   these files
    python -m tests.support.mutation values --sample 50   50 mutants per file; --seed N draws different ones
    python -m tests.support.mutation checker --total 40   40 mutants of the whole part
    python -m tests.support.mutation --spread 60   60 mutants of all parts, in proportion to their size
    python -m tests.support.mutation hardware --tests hardware/test_cost_edges.py   only these tests
    python -m tests.support.mutation values --seconds 5   only the shortest 5 s of tests: a lower bound

A part is a package together with its test folder. The tests of a part are collected once and run
twice. The first run measures how long each test takes. The second run records which lines each test
reaches. It includes forked processes (ranks under the hub), but not commands that start as separate
processes. Then each mutant runs in a forked process. The process replaces the changed function and
runs the tests that reach it, shortest first, until one fails. If the change is in code that runs at
import, the process imports all modules again and runs all tests of the part. A mutant that needs
much more CPU time than the original counts as detected.

tests/data/equivalent_mutants.json lists the mutants that no test can distinguish from the code,
with reasons.

Why not mutmut or cosmic-ray: mutmut (3.8) changes only copies of functions, so it never mutates a
table of a module, and it supports equivalent mutants only as comments in the code. cosmic-ray (8.7)
starts a new test process for each mutant, which takes 3 s here.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

# With CI set, every run draws the same random programs. Shrinking a failing example is unnecessary.
os.environ |= {"CI": "1", "DISTSIM_SHRINK": "0"}
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
from _pytest.runner import runtestprotocol  # noqa: E402

from tests.support.marks import Marks, functions_of  # noqa: E402
from tests.support.mutants import Mutant, counts_by_size, draw_sample, mutants_of  # noqa: E402

EQUIVALENT = ROOT / "tests" / "data" / "equivalent_mutants.json"
#: Part -> (patterns of its files, its test folders or test files under tests/).
#: A file belongs to the first part whose patterns match it.
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "strategies": (("distsim/scenario/strategies/**/*.py",), ("strategies",)),
    "scenario": (("distsim/scenario/**/*.py",), ("scenario",)),
    "semantics": (
        ("distsim/semantics/**/*.py",),
        ("semantics", "engine/test_event_driven.py", "backends/test_backend_rules.py"),
    ),
    **{
        package: ((f"distsim/{package}/**/*.py",), (package,))
        for package in (
            "analysis",
            "api",
            "backends",
            "checker",
            "cli",
            "common",
            "engine",
            "findings",
            "hang_doctor",
            "hardware",
            "operations",
            "output",
            "planning",
            "program",
            "real",
            "repair",
            "script_capture",
            "simulation",
            "trace",
            "values",
        )
    },
}
REQUIRED_RATE = 0.9
#: A mutant may use TIME_FACTOR times the CPU time of its tests on the original, plus GRACE_S.
TIME_FACTOR, GRACE_S = 4.0, 10
#: Address space of a mutant's process. Captures reserve much more than they use.
MAX_ADDRESS_SPACE = 32 << 30
KILLED, SURVIVED = 1, 0


@dataclass
class Tally:
    """The results of the mutants of one file."""

    killed: int = 0
    equivalent: int = 0
    survivors: list[Mutant] = field(default_factory=list)

    @property
    def rate(self) -> float:
        counted = self.killed + len(self.survivors)
        return self.killed / counted if counted else 1.0


# --- test durations and reached lines ---


def run_in_fork(action: Callable[[], Any], cpu_s: float = 3600) -> Any:
    """Call ``action`` in a forked process and return its result, which must fit in JSON.

    Returns None if the process crashed or exceeded a limit.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        limit_child(cpu_s)
        code = 1
        try:
            with os.fdopen(writing, "w", encoding="utf-8") as out:
                json.dump(action(), out)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if status == 0 and text else None


def limit_child(cpu_s: float) -> None:
    """Discard output and limit CPU time, memory and wall time.

    The wall-time limit is generous. It ends mutants that sleep forever.
    """
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 1)
    os.dup2(null_device, 2)
    seconds = max(int(cpu_s), 1)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 2))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(20 * seconds + 60)


def measure_durations(items: Sequence[pytest.Item]) -> list[float]:
    """The CPU seconds of every test, each with its own fixtures.

    The tests run in a forked process, so they do not change this one.
    """

    def measure() -> list[tuple[bool, float]]:
        found = []
        for item in items:
            began = seconds_used()
            found.append((run_item(item), seconds_used() - began))
        return found

    measured = run_in_fork(measure)
    if measured is None:
        raise SystemExit("the tests ended their process or took more than an hour")
    if broken := [
        item.nodeid for item, (passed, _) in zip(items, measured, strict=True) if not passed
    ]:
        raise SystemExit(f"these tests fail on the original code: {', '.join(broken)}")
    return [seconds for _, seconds in measured]


def seconds_used() -> float:
    """CPU seconds of this process and of its finished child processes."""
    own, others = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def lines_reached(
    items: Sequence[pytest.Item], order: Sequence[int], files: Sequence[str]
) -> list[set[tuple[str, int]]]:
    """For each test, the lines of the files that it reaches.

    Only the tests in ``order`` run. The others have no lines.
    """

    marks = Marks(files)

    def measure() -> dict[int, list[int] | None]:
        found = dict[int, list[int] | None]()
        marks.install()
        for i in order:
            marks.clear()
            found[i] = marks.reached() if run_item(items[i]) else None
        return found

    # JSON turns the numbers of the tests into strings.
    measured = run_in_fork(measure)
    if measured is None:
        raise SystemExit("the tests ended their process when they ran in a different order")
    if broken := [items[int(i)].nodeid for i, numbers in measured.items() if numbers is None]:
        raise SystemExit(f"these tests fail in a different order: {', '.join(broken)}")
    statements = [[marks.lines[n] for n in measured.get(str(i), ())] for i in range(len(items))]
    return [{(file, line) for file, lines in each for line in lines} for each in statements]


def run_item(item: pytest.Item) -> bool:
    """Run one test with its setup and teardown, and return whether it passed."""
    item._initrequest()  # type: ignore[attr-defined]
    reports = runtestprotocol(item, nextitem=None, log=False)
    return not any(report.failed for report in reports)


# --- one mutant ---


def functions_in_memory(file: str, qualified: str) -> list[FunctionType]:
    """All function objects with this file and qualified name."""
    return [
        f
        for f in gc.get_objects()
        if type(f) is FunctionType
        and f.__code__.co_filename == file
        and f.__code__.co_qualname == qualified
    ]


def replace_function(mutant: Mutant, file: str) -> bool:
    """Give the changed function its new code; False if no such function object exists."""
    changed = [
        code for code in functions_of(mutant.code(file)) if code.co_qualname == mutant.function
    ]
    targets = functions_in_memory(file, mutant.function or "")
    done = False
    for code in changed:
        for function in targets:
            if (
                function.__code__.co_firstlineno == code.co_firstlineno
                and function.__code__.co_freevars == code.co_freevars
            ):
                function.__code__ = code
                done = True
    return done


def module_of(path: str) -> str:
    """The module name of a file, given relative to the project's folder."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Loader(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Import one module with its changed code."""

    def __init__(self, mutant: Mutant, file: str) -> None:
        super().__init__(module_of(mutant.path), file)
        self.mutant = mutant

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        return self.mutant.code(self.path)


def fails_after_reimport(mutant: Mutant, file: str, tests: Sequence[str]) -> bool:
    """Import all modules of the project again, with the mutant, and run the tests.

    ``tests``: the ids of the tests. Returns whether a test failed or the import raised.
    """
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None) or ""
        ours = (
            where.startswith(f"{ROOT}/")
            and "site-packages" not in where
            and name not in ("__main__", "tests.mutants")
        )
        # A package without an `__init__` has no file, so names count too.
        if ours or name.partition(".")[0] == "distsim":
            del sys.modules[name]
    loader = Loader(mutant, file)
    sys.meta_path.insert(0, loader)
    os.chdir(ROOT)
    try:
        # Import before pytest starts, because pytest puts its own finder first.
        importlib.import_module(loader.name)
    except Exception:
        return True
    return pytest.main([*tests, *QUIET, "-x"]) != pytest.ExitCode.OK


QUIET = (
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:benchmark",
    "-s",
    "--no-header",
    "-m",
    "not slow",
)


class Part:
    """The files and tests of a part; a pytest plugin that runs mutants instead of the tests."""

    def __init__(
        self, files: Sequence[Path], tests: Sequence[Path], options: argparse.Namespace
    ) -> None:
        self.files, self.tests, self.options = files, tests, options
        self.tallies: dict[str, Tally] = {}
        self.equivalent: dict[str, str] = json.loads(EQUIVALENT.read_text(encoding="utf-8"))

    def run(self) -> dict[str, Tally]:
        pytest.main([*map(str, self.tests), *QUIET], plugins=[self])
        return self.tallies

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = session.items
        for path in self.files:
            importlib.import_module(module_of(str(path.relative_to(ROOT))))
        self.seconds = measure_durations(self.items)
        report(f"{len(self.items)} tests, {sum(self.seconds):.0f} s of CPU time")
        order = [
            i
            for seconds, i in sorted(zip(self.seconds, range(len(self.items)), strict=True))
            if seconds <= self.options.seconds
        ]
        self.lines = lines_reached(self.items, order, [str(path) for path in self.files])
        self.check_unchanged_code()
        for path, mutants in self.mutants().items():
            self.tallies[str(path.relative_to(ROOT))] = self.judge(path, mutants)
        return True

    def mutants(self) -> dict[Path, list[Mutant]]:
        """The mutants of each file, or a sample of them.

        If the sample is drawn from all files together (`--total`), files without a mutant are
        omitted.
        """
        found = {
            path: [m for m in mutants_of(path, ROOT) if self.options.only in str(m)]
            for path in self.files
        }
        if self.options.sample:
            found = {
                path: draw_sample(mutants, self.options.sample, self.options.seed)
                for path, mutants in found.items()
            }
        if self.options.total:
            some = set(
                map(
                    str,
                    draw_sample(
                        [m for mutants in found.values() for m in mutants],
                        self.options.total,
                        self.options.seed,
                    ),
                )
            )
            found = {
                path: [m for m in mutants if str(m) in some] for path, mutants in found.items()
            }
        return {
            path: mutants for path, mutants in found.items() if mutants or not self.options.total
        }

    def check_unchanged_code(self) -> None:
        """Check that the tests pass if modules are imported again without a change."""
        unchanged = Mutant.unchanged(self.files[0], ROOT)
        limit = GRACE_S + TIME_FACTOR * sum(self.seconds)
        if (
            run_in_fork(
                lambda: fails_after_reimport(
                    unchanged, str(self.files[0]), self.test_ids(str(self.files[0]))
                ),
                60 + limit,
            )
            is not False
        ):
            raise SystemExit("tests fail if the modules are imported again")

    def judge(self, path: Path, mutants: Sequence[Mutant]) -> Tally:
        tally = Tally()
        for number, mutant in enumerate(mutants, 1):
            if number % 50 == 0:
                report(f"{mutant.path}: {number} of {len(mutants)}")
            if f"{mutant.path}: {mutant.name}" in self.equivalent:
                tally.equivalent += 1
            elif self.is_detected(mutant, str(path)):
                tally.killed += 1
            else:
                tally.survivors.append(mutant)
                report(f"survived  {mutant}")
        report(
            f"{path.relative_to(ROOT)}: {tally.rate:.0%} of {len(mutants) - tally.equivalent} noticed"
        )
        return tally

    def is_detected(self, mutant: Mutant, file: str) -> bool:
        """Whether a test fails. A crash, a timeout and exhausted memory count as failures."""
        wanted = {(file, line) for line in range(mutant.first, mutant.last + 1)}
        order = self.shortest(
            [(seconds, i) for i, seconds in enumerate(self.seconds) if wanted & self.lines[i]]
        )
        limit = GRACE_S + TIME_FACTOR * sum(seconds for seconds, _ in order)
        if mutant.function is not None and order:

            def action() -> int:
                if not replace_function(mutant, file):
                    return 2
                return KILLED if any(not run_item(self.items[i]) for _, i in order) else SURVIVED

            found = run_in_fork(action, limit)
            if found != 2:
                return found != SURVIVED
        if mutant.function is None or order:
            limit = 60 + TIME_FACTOR * sum(self.seconds)
            return (
                run_in_fork(
                    lambda: (
                        KILLED
                        if fails_after_reimport(mutant, file, self.test_ids(file))
                        else SURVIVED
                    ),
                    limit,
                )
                != SURVIVED
            )
        return False

    def shortest(self, durations: list[tuple[float, int]]) -> list[tuple[float, int]]:
        """The shortest tests whose total duration stays within `--seconds`, shortest first."""
        ordered = sorted(durations)
        total = list(accumulate(seconds for seconds, _ in ordered))
        return [
            pair
            for pair, until in zip(ordered, total, strict=True)
            if until <= self.options.seconds
        ]

    def test_ids(self, file: str) -> list[str]:
        """The ids of the tests, first those that reach the file, each group shortest first."""
        reached = [any(where == file for where, _ in lines) for lines in self.lines]
        order = self.shortest(
            [(seconds, i) for i, seconds in enumerate(self.seconds) if reached[i]]
        )
        order += self.shortest(
            [(seconds, i) for i, seconds in enumerate(self.seconds) if not reached[i]]
        )
        return [self.items[i].nodeid for _, i in order]


# --- the command ---


def report(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def chosen_parts(
    words: Sequence[str], only: Sequence[str] | None
) -> Iterator[tuple[str, list[Path], list[Path]]]:
    """(part, files, tests) for the named parts and files, or for all parts if ``words`` is empty.

    ``only``: test folders or files that replace those of the parts.
    """
    taken = set[Path]()
    for part, (patterns, names) in PARTS.items():
        part_files = {
            path
            for pattern in patterns
            for path in ROOT.glob(pattern)
            if path.read_text(encoding="utf-8").strip()
        }
        files = sorted(part_files - taken)
        taken |= part_files
        if words and part not in words:
            files = [
                path
                for path in files
                if any(fnmatch.fnmatch(str(path.relative_to(ROOT)), word) for word in words)
            ]
        tests = sorted({path for name in only or names for path in _test_files(name)})
        if files:
            yield part, files, tests


def _test_files(name: str) -> list[Path]:
    """The test files of a folder (``engine``), or one file (``engine/test_streams.py``)."""
    place = ROOT / "tests" / name
    return sorted(place.rglob("test_*.py")) if place.is_dir() else [place]


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def table(tallies: dict[str, Tally]) -> Iterator[str]:
    yield f"{'file':40} mutants  killed  survived  equivalent  rate"
    for path, tally in tallies.items():
        total = tally.killed + tally.equivalent + len(tally.survivors)
        yield f"{path:40} {total:7}  {tally.killed:6}  {len(tally.survivors):8}  {tally.equivalent:10}  {tally.rate:4.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what",
        nargs="*",
        help=f"parts ({', '.join(PARTS)}) or files [default: all parts]",
    )
    parser.add_argument(
        "--sample", type=int, default=0, metavar="N", help="at most N mutants per file"
    )
    parser.add_argument(
        "--total",
        type=int,
        default=0,
        metavar="N",
        help="at most N mutants of the part's files together",
    )
    parser.add_argument(
        "--spread",
        type=int,
        default=0,
        metavar="N",
        help="N mutants of all chosen parts, in proportion to their lines, at least one each",
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="random seed of the sample"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        metavar="S",
        help="run only the shortest tests of a mutant, at most S seconds together",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only mutants whose line in the output contains this text",
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        metavar="NAME",
        help="run these test files under tests/ instead of the part's",
    )
    options = parser.parse_args()
    status, lines = 0, list[str]()
    parts = list(chosen_parts(options.what, options.tests))
    sizes = {part: sum(map(line_count, files)) for part, files, _ in parts}
    totals = counts_by_size(sizes, options.spread) if options.spread else {}
    for part, files, tests in parts:
        options.total = totals.get(part, options.total)
        report(f"{part}: {', '.join(path.stem for path in tests)}")
        pid, tallies = os.getpid(), Part(files, tests, options).run()
        if os.getpid() != pid:
            os._exit(1)
        counts = Counter(
            killed=sum(t.killed for t in tallies.values()),
            survived=sum(len(t.survivors) for t in tallies.values()),
        )
        rate = counts["killed"] / max(counts.total(), 1)
        lines += ["", *table(tallies), f"{part}: {rate:.1%} of {counts.total()} noticed"]
        status |= rate < REQUIRED_RATE or not counts.total()
    report("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
