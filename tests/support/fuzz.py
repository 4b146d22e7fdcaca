"""Commands on damaged scenarios and traces, each in a process with limits.

    python -m tests.support.fuzz 10000        # cases from the files of scenarios/ and traces/
    python -m tests.support.fuzz 500 7        # other cases: another seed
    python -m tests.support.fuzz 1 7 123      # repeat case 123 of that seed

`tests.fuzz` calls the readers in Python; this script runs whole commands. It prints the cases that
broke a promise: exit status 3, a timeout, too much memory, an error message without a place or a
remedy, a control character in the output.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import re
import resource
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.mutations import mutant

ROOT = Path(__file__).resolve().parents[2]
CPU_S, MEMORY = 10, 1 << 30
#: Commands on a scenario and on a trace; FILE is the case, BASE what it was made of, OUT a folder
#: to write into, WORD a word of it.
SCENARIO = (
    "simulate FILE",
    "simulate FILE --format json",
    "simulate FILE --backend nccl",
    "simulate FILE --trace OUT/t.jsonl",
    "check FILE",
    "check FILE --format json",
    "check FILE --format sarif",
    "check FILE --format github",
    "expand FILE",
    "run FILE",
    "test FILE",
    "explain WORD",
    "explain FILE",
    "compare FILE BASE",
    "simulate BASE --cluster FILE",
    "render FILE --view dataflow --format dot",
    "render FILE --view groups --format mermaid",
    "render FILE --view timeline -o OUT/t.svg",
    "render FILE --view startup --format dot",
    "render FILE --view wait-for --format dot",
    "render FILE --view dataflow -o OUT/d.svg",
)
TRACE = (
    "replay FILE",
    "replay FILE --format json",
    "replay FILE --backend gloo --scale compute=0.5",
    "replay FILE --backend nccl",
    "replay FILE --cluster dgx-a100",
    "replay FILE --trace OUT/t.jsonl",
    "compare FILE BASE",
    "compare BASE FILE --format json",
    "compare FILE FILE -o OUT/c.svg",
    "compare FILE BASE --tolerance 5%",
)
#: What tells what to do: advice, or what would be right in the place.
REMEDY = re.compile(
    r"help: |expected|needs? |did you mean|known here are|known names|there (are|is) |declared are|presets are|allowed|first in|quote it|it has|"
    r"known|is outside|up to|holds |lists |twice|"
    r"(give|take|use|write|say) |unreadable|at (most|least)"
)


class Broken(NamedTuple):
    """A promise that a case broke."""

    case: int
    base: str
    command: str
    what: str


def bases() -> list[Path]:
    """Every scenario and trace of the project that a case may start from."""
    folders = (
        *(ROOT / "scenarios").rglob("*.yaml"),
        *(ROOT / "traces").rglob("*.yaml"),
        *(ROOT / "traces").rglob("*.jsonl"),
    )
    return sorted(path for path in folders if path.stat().st_size < 200_000)


def drawn(known: list[Path], draw: random.Random) -> Path:
    """One of them; every fourth is a trace."""
    traces = draw.random() < 0.25
    return draw.choice([path for path in known if (path.suffix == ".jsonl") == traces])


def _data_in_use() -> int:
    """Bytes of data of this process. A forked child starts with all data of its parent, which
    after thousands of tests may be more than a command may take.
    """
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[5]) * resource.getpagesize()


def _child(arguments: list[str], folder: Path) -> None:
    """Run a command in this process, and end it; its output goes to files."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    limit = _data_in_use() + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    signal.alarm(CPU_S * 30)
    for number, name in ((1, "out"), (2, "err")):
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(handle, number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", encoding="utf-8") for n in (1, 2))
    sys.argv = ["distsim", "--debug", *arguments]
    from distsim.cli.process import _run_command

    status = 99
    try:
        found = _run_command()
        status = found if isinstance(found, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def answer(arguments: list[str], folder: Path) -> str | None:
    """Which promise a command breaks, or None."""
    pid = os.fork()
    if pid == 0:
        _child(arguments, folder)
    _, ended, _ = os.wait4(pid, 0)
    said = (folder / "err").read_text(encoding="utf-8", errors="replace")
    printed = (folder / "out").read_text(encoding="utf-8", errors="replace")
    if os.WIFSIGNALED(ended):
        return f"signal {os.WTERMSIG(ended)}"
    status = os.waitstatus_to_exitcode(ended)
    if status not in (0, 1, 2):
        return f"status {status}: {said[-600:]}"
    if "Traceback" in said or any(c < " " and c not in "\n\t" for c in said + printed):
        return f"a traceback or a control character: {said[-300:]}"
    if "not enough free memory" in said + printed:
        return "more memory than it may take"
    return _refusal(said or printed, arguments) if status == 2 else None


def _refusal(said: str, arguments: list[str]) -> str | None:
    """What a refusal lacks: the place (the file that is refused, or the word), or what to do in
    some problem of it.
    """
    if not any(word in said for word in arguments[1:] if not word.startswith("-")):
        return f"a refusal without a place: {said[:300]}"
    if "--format" in arguments and not said.startswith("::"):
        return None  # the same problems, as JSON
    problems = re.split(r"^(?=\S)", said, flags=re.MULTILINE)
    lacking = [text for text in problems if text and not REMEDY.search(text)]
    return (
        f"a refusal without a remedy: {lacking[0][:300]}"
        if lacking and "help: " not in problems[-1]
        else None
    )


def command(base: Path, file: Path, folder: Path, draw: random.Random) -> list[str]:
    """The words of a command on the case."""
    words = re.findall(r"\w+", file.read_text(encoding="utf-8", errors="replace"))
    places = {"FILE": str(file), "BASE": str(base), "WORD": draw.choice(words) if words else "-1"}
    chosen = draw.choice(TRACE if base.suffix == ".jsonl" else SCENARIO)
    return [places.get(word, word.replace("OUT", str(folder))) for word in chosen.split()]


def run(cases: int, seed: int, tell: Any = None, first: int = 0) -> list[Broken]:
    """Broken promises of so many cases."""
    for module in (
        "simulation.simulate_scenario",
        "simulation.check_scenario",
        "simulation.trace_replay",
        "analysis.run_comparison",
        "output.text.simulation_report",
        "output.text.comparison",
        "output.pictures.render",
        "cli.application",
    ):
        __import__(f"distsim.{module}")
    known, found = bases(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in range(first, first + cases):
            draw = random.Random(f"{seed} {case}")
            base = drawn(known, draw)
            file = folder / f"case{base.suffix}"
            file.write_bytes(mutant(base.read_bytes(), base.suffix, draw))
            words = command(base, file, folder, draw)
            what = answer(words, folder)
            if what is not None:
                found.append(
                    Broken(
                        case,
                        base.name,
                        " ".join(words).replace(f"{name}/", ""),
                        what.replace(f"{name}/", ""),
                    )
                )
                if tell is not None:
                    tell(found[-1])
            if tell is not None and case % 500 == 499:
                tell(f"{case + 1} cases, {len(found)} broken")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = {"type": int, "nargs": "?"}
    parser.add_argument("cases", default=1000, help="Number of cases. [default: 1000]", **number)
    parser.add_argument("seed", default=0, help="Seed of the cases. [default: 0]", **number)
    parser.add_argument("first", default=0, help="Number of the first case. [default: 0]", **number)
    options = parser.parse_args()
    stream = io.TextIOWrapper(os.fdopen(os.dup(1), "wb"), encoding="utf-8", line_buffering=True)
    found = run(options.cases, options.seed, lambda said: stream.write(f"{said}\n"), options.first)
    stream.write(f"{options.cases} cases, {len(found)} broken promises\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
