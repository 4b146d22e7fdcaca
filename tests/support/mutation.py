"""Mutation testing: the share of small changes of the code that at least one test detects.

    python -m tests.support.mutation                    all parts (hours); fails if a part is under 90 %
    python -m tests.support.mutation hardware values    these parts
    python -m tests.support.mutation distsim/backends/message_matching.py   these files, with the tests of their part
    python -m tests.support.mutation values --sample 50   50 mutants per file; --seed N draws others
    python -m tests.support.mutation checker --total 40   40 mutants of the whole part
    python -m tests.support.mutation --spread 60   60 mutants of all parts, by their size
    python -m tests.support.mutation hardware --tests hardware/test_cost_edges.py   only these tests
    python -m tests.support.mutation values --seconds 5   only the shortest 5 s of tests: a lower bound

The tests of a part are collected once and run twice. The first run measures how long each test
takes. The second run records which lines each test reaches, with marks between the statements of
the part's functions. It also sees forked processes (ranks under the hub), but not commands that
start as separate processes. Then a process is forked for each mutant. It replaces the function by
the changed one and runs the tests that reach it, shortest first, until one fails. For a change in
code that runs at import, the module is imported again and all tests of the part run. A mutant that
takes much longer than the tests did counts as detected. This limit counts CPU time, so it does not
depend on load.

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

os.environ |= {
    "CI": "1",
    "DISTSIM_SHRINK": "0",
}  # the same random programs in each run; a disagreement is enough
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
from _pytest.runner import runtestprotocol  # noqa: E402

from tests.support.marks import Marks, functions_of  # noqa: E402
from tests.support.mutants import Mutant, drawn, mutants_of, shares  # noqa: E402

EQUIVALENT = ROOT / "tests" / "data" / "equivalent_mutants.json"
#: Part -> (its files as patterns, the test folders or files that ought to notice, under tests/).
#: A file belongs to the first part that names it.
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
WANTED = 0.9
#: Of a mutant's tests together: so many times the processor seconds they took unchanged, and these
#: on top.
PATIENCE, GRACE_S = 4.0, 10
MEMORY = 6 << 30
KILLED, SURVIVED = 1, 0


@dataclass
class Tally:
    """What became of a file's mutants."""

    killed: int = 0
    equivalent: int = 0
    survivors: list[Mutant] = field(default_factory=list)

    @property
    def rate(self) -> float:
        counted = self.killed + len(self.survivors)
        return self.killed / counted if counted else 1.0


# --- what each test reaches ---


def in_a_fork(act: Callable[[], Any], cpu_s: float = 3600) -> Any:
    """What ``act`` gives, by way of JSON; None where the process ended otherwise."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        limit_child(cpu_s)
        code = 1
        try:
            with os.fdopen(writing, "w", encoding="utf-8") as out:
                json.dump(act(), out)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if status == 0 and text else None


def limit_child(cpu_s: float) -> None:
    """Processor time, memory, and wall time as the last resort (a mutant that sleeps for ever)."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    seconds = max(int(cpu_s), 1)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 2))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(20 * seconds + 60)


def timed(items: Sequence[pytest.Item]) -> list[float]:
    """The processor seconds of every test, each with fixtures of its own, in a process apart: this
    one stays as it was.
    """

    def measure() -> list[tuple[bool, float]]:
        found = []
        for item in items:
            began = seconds_used()
            found.append((run_item(item), seconds_used() - began))
        return found

    measured = in_a_fork(measure)
    if measured is None:
        raise SystemExit("the tests end their own process, or take more than an hour")
    if broken := [
        item.nodeid for item, (passed, _) in zip(items, measured, strict=True) if not passed
    ]:
        raise SystemExit(f"tests fail on the unchanged code: {', '.join(broken)}")
    return [seconds for _, seconds in measured]


def seconds_used() -> float:
    """Processor seconds of this process and of those that it forked and waited for."""
    own, others = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def reached_by(
    items: Sequence[pytest.Item], order: Sequence[int], files: Sequence[str]
) -> list[set[tuple[str, int]]]:
    """The lines of the files that each of these tests reaches; the tests that are not in the order
    reach nothing.
    """

    marks = Marks(files)

    def measure() -> dict[int, list[int] | None]:
        found = dict[int, list[int] | None]()
        marks.lay()
        for i in order:
            marks.clear()
            found[i] = marks.reached() if run_item(items[i]) else None
        return found

    measured = in_a_fork(measure)
    if measured is None or (
        broken := [items[int(i)].nodeid for i, numbers in measured.items() if numbers is None]
    ):
        raise SystemExit(
            f"tests fail in another order: {', '.join(broken) if measured else 'they end their own process'}"
        )
    met = [[marks.lines[number] for number in measured.get(str(i), ())] for i in range(len(items))]
    return [{(file, line) for file, lines in numbers for line in lines} for numbers in met]


def run_item(item: pytest.Item) -> bool:
    """Set up, call and tear down one test, with nothing kept for the next."""
    item._initrequest()  # type: ignore[attr-defined]
    reports = runtestprotocol(item, nextitem=None, log=False)
    return not any(report.failed for report in reports)


# --- one mutant ---


def living(file: str, qualified: str) -> list[FunctionType]:
    """All functions of this name and file, whoever holds them."""
    return [
        f
        for f in gc.get_objects()
        if type(f) is FunctionType
        and f.__code__.co_filename == file
        and f.__code__.co_qualname == qualified
    ]


def put_in_place(mutant: Mutant, file: str) -> bool:
    """Give the function its changed code; False where it isn't one that can be reached so."""
    changed = [
        code for code in functions_of(mutant.code(file)) if code.co_qualname == mutant.function
    ]
    targets = living(file, mutant.function or "")
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
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Loader(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Loads one module with its changed code."""

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


def load_anew(mutant: Mutant, file: str, tests: Sequence[str]) -> bool:
    """Forget all of the project's modules, load them with the mutant, run the tests (by their ids):
    True where one fails.
    """
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None) or ""
        ours = (
            where.startswith(f"{ROOT}/")
            and "site-packages" not in where
            and name not in ("__main__", "tests.mutants")
        )
        if (
            ours or name.partition(".")[0] == "distsim"
        ):  # a folder without an `__init__` has no file
            del sys.modules[name]
    loader = Loader(mutant, file)
    sys.meta_path.insert(0, loader)
    os.chdir(ROOT)
    try:
        importlib.import_module(loader.name)  # now: once pytest runs, its own finder comes first
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
    """A part's files and tests; a plugin that runs mutants in the place of the tests."""

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
        self.seconds = timed(self.items)
        said(f"{len(self.items)} tests, {sum(self.seconds):.0f} s of processor time")
        order = [
            i
            for seconds, i in sorted(zip(self.seconds, range(len(self.items)), strict=True))
            if seconds <= self.options.seconds
        ]
        self.lines = reached_by(self.items, order, [str(path) for path in self.files])
        self.check_that_nothing_fails_by_itself()
        for path, mutants in self.mutants().items():
            self.tallies[str(path.relative_to(ROOT))] = self.judge(path, mutants)
        return True

    def mutants(self) -> dict[Path, list[Mutant]]:
        """By file, as many as are wanted; a file of which a sample of the whole draws none is left
        out.
        """
        found = {
            path: [m for m in mutants_of(path, ROOT) if self.options.only in str(m)]
            for path in self.files
        }
        if self.options.sample:
            found = {
                path: drawn(mutants, self.options.sample, self.options.seed)
                for path, mutants in found.items()
            }
        if self.options.total:
            some = set(
                map(
                    str,
                    drawn(
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

    def check_that_nothing_fails_by_itself(self) -> None:
        """The control: code that is put in place or loaded anew, but unchanged, must pass as a
        mutant would have to.
        """
        unchanged = Mutant.unchanged(self.files[0], ROOT)
        limit = GRACE_S + PATIENCE * sum(self.seconds)
        if (
            in_a_fork(
                lambda: load_anew(unchanged, str(self.files[0]), self.ids_for(str(self.files[0]))),
                60 + limit,
            )
            is not False
        ):
            raise SystemExit("tests fail on modules that are imported again")

    def judge(self, path: Path, mutants: Sequence[Mutant]) -> Tally:
        tally = Tally()
        for number, mutant in enumerate(mutants, 1):
            if number % 50 == 0:
                said(f"{mutant.path}: {number} of {len(mutants)}")
            if f"{mutant.path}: {mutant.name}" in self.equivalent:
                tally.equivalent += 1
            elif self.is_noticed(mutant, str(path)):
                tally.killed += 1
            else:
                tally.survivors.append(mutant)
                said(f"survived  {mutant}")
        said(
            f"{path.relative_to(ROOT)}: {tally.rate:.0%} of {len(mutants) - tally.equivalent} noticed"
        )
        return tally

    def is_noticed(self, mutant: Mutant, file: str) -> bool:
        """A process that dies, runs out of time or of memory has noticed too."""
        wanted = {(file, line) for line in range(mutant.first, mutant.last + 1)}
        order = self.short(
            [(seconds, i) for i, seconds in enumerate(self.seconds) if wanted & self.lines[i]]
        )
        limit = GRACE_S + PATIENCE * sum(seconds for seconds, _ in order)
        if mutant.function is not None and order:

            def act() -> int:
                if not put_in_place(mutant, file):
                    return 2
                return KILLED if any(not run_item(self.items[i]) for _, i in order) else SURVIVED

            found = in_a_fork(act, limit)
            if found != 2:
                return found != SURVIVED
        if mutant.function is None or order:
            limit = 60 + PATIENCE * sum(self.seconds)
            return (
                in_a_fork(
                    lambda: KILLED if load_anew(mutant, file, self.ids_for(file)) else SURVIVED,
                    limit,
                )
                != SURVIVED
            )
        return False

    def short(self, timed: list[tuple[float, int]]) -> list[tuple[float, int]]:
        """The shortest first, as many as the seconds allow."""
        ordered = sorted(timed)
        total = list(accumulate(seconds for seconds, _ in ordered))
        return [
            pair
            for pair, until in zip(ordered, total, strict=True)
            if until <= self.options.seconds
        ]

    def ids_for(self, file: str) -> list[str]:
        """The tests that reach the file, the shortest first, then the others."""
        reached = [any(where == file for where, _ in lines) for lines in self.lines]
        order = self.short([(seconds, i) for i, seconds in enumerate(self.seconds) if reached[i]])
        order += self.short(
            [(seconds, i) for i, seconds in enumerate(self.seconds) if not reached[i]]
        )
        return [self.items[i].nodeid for _, i in order]


# --- the command ---


def said(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def chosen(
    words: Sequence[str], only: Sequence[str] | None
) -> Iterator[tuple[str, list[Path], list[Path]]]:
    """(part, files, tests) of the parts and files that are named; of all where none is. ``only``:
    tests in the place of theirs.
    """
    taken = set[Path]()
    for part, (patterns, names) in PARTS.items():
        there = {
            path
            for pattern in patterns
            for path in ROOT.glob(pattern)
            if path.read_text(encoding="utf-8").strip()
        }
        files = sorted(there - taken)
        taken |= there
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
    """A folder of tests, or one file: ``engine``, ``engine/test_streams.py``."""
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
        help="N mutants of all chosen parts together, by their lines, at least one of each",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the sample")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        metavar="S",
        help="only the shortest tests of a mutant",
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="mutants with this text in their line"
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        metavar="NAME",
        help="run these test files under tests/ instead of the part's",
    )
    options = parser.parse_args()
    status, lines = 0, list[str]()
    parts = list(chosen(options.what, options.tests))
    sizes = {part: sum(map(line_count, files)) for part, files, _ in parts}
    totals = shares(sizes, options.spread) if options.spread else {}
    for part, files, tests in parts:
        options.total = totals.get(part, options.total)
        said(f"{part}: {', '.join(path.stem for path in tests)}")
        pid, tallies = os.getpid(), Part(files, tests, options).run()
        if os.getpid() != pid:
            os._exit(1)
        counts = Counter(
            killed=sum(t.killed for t in tallies.values()),
            survived=sum(len(t.survivors) for t in tallies.values()),
        )
        rate = counts["killed"] / max(counts.total(), 1)
        lines += ["", *table(tallies), f"{part}: {rate:.1%} of {counts.total()} noticed"]
        status |= rate < WANTED or not counts.total()
    said("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
