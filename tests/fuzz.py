"""Mutated scenarios and traces, each in a process with bounds: what distsim answers to them.

    .venv/bin/python tests/fuzz.py 10000        # so many cases, from the files of scenarios/ and traces/
    .venv/bin/python tests/fuzz.py 500 7        # others: by another seed

A case is bytes (flipped, cut, doubled, spliced) or a YAML tree (values swapped for odd ones, keys dropped, doubled, renamed). Each runs
`simulate` and `check`, a trace `replay` and `compare`, in a child that may take so much processor time and memory. What is printed at
the end are the cases that broke a promise: exit status 3, no end in time, more memory, a refusal without a place or a remedy.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CPU_S, MEMORY = 10, 1 << 30
ODD: tuple[Any, ...] = (
    True, None, 0, -1, 1, 2**31, 2**53, -(2**63), 10**30, 1e30, 1e308, float("inf"), "", "nan", "rank", "-rank - 1", "1 // 0", "0 s",
    "1e30 s", "\x1b[31m", "a\nb", "::error::x", "é→", [], {}, [[]], [0, 0], {"0": 1}, "x" * 3000, "((((", "world", "all", "4 EiB", 0.5,
)  # fmt: skip


class Broken(NamedTuple):
    """A promise that a case broke."""

    case: int
    base: str
    command: str
    what: str


def bases() -> list[Path]:
    """Every scenario and trace of the project that a case may start from."""
    folders = (*(ROOT / "scenarios").rglob("*.yaml"), *(ROOT / "traces").rglob("*.yaml"), *(ROOT / "traces").rglob("*.jsonl"))
    return sorted(path for path in folders if path.stat().st_size < 200_000)


def mutant(path: Path, draw: random.Random) -> bytes:
    """A file like this one, but not quite."""
    data = path.read_bytes()
    if path.suffix == ".yaml" and draw.random() < 0.7:
        with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
            tree = yaml.safe_load(data)
            for _ in range(draw.randint(1, 3)):
                tree = _tree(tree, draw)
            return yaml.safe_dump(tree, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogateescape")
    for _ in range(draw.randint(1, 4)):
        data = _bytes(data, draw)
    return data


def _bytes(data: bytes, draw: random.Random) -> bytes:
    at, length = draw.randrange(len(data) + 1), draw.randint(1, 40)
    kind = draw.randrange(6)
    if kind == 0:
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + data[at + length :]
    if kind == 3:
        return data[: at + length] + data[at:]
    if kind == 4:
        return (
            data[:at]
            + draw.choice((b"99999999999999999999", b"-1", b"true", b"null", b"\xff", b"\0", b"{", b"]", b"1e400"))
            + data[at:]
        )
    digits = [m.span() for m in re.finditer(rb"\d+", data)]
    start, end = draw.choice(digits) if digits else (at, at)
    return data[:start] + str(draw.choice((0, 1, -1, 7, 2**31, 2**53, 2**64))).encode() + data[end:]


def _tree(tree: Any, draw: random.Random) -> Any:
    """The tree with one place in it changed."""
    places = list(_places(tree))
    if not places:
        return draw.choice(ODD)
    holder, key = draw.choice(places)
    kind = draw.randrange(8)
    if kind < 4:
        holder[key] = draw.choice(ODD)
    elif kind == 4:
        del holder[key]
    elif kind == 5:
        other, there = draw.choice(places)
        if there in other if isinstance(other, dict) else there < len(other):
            holder[key] = yaml.safe_load(yaml.safe_dump(other[there]))
    elif kind == 6 and isinstance(holder, dict):
        holder[draw.choice(("x", "ranks", "steps", "repeat", "tensor", 7))] = holder.pop(key)
    elif isinstance(holder, list):
        holder.insert(key, holder[key])
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(tree[key])


def _child(arguments: list[str], folder: Path) -> None:
    """Run a command in this process, and end it; its output goes to files."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.alarm(CPU_S * 30)
    for number, name in ((1, "out"), (2, "err")):
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(handle, number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", encoding="utf-8") for n in (1, 2))
    sys.argv = ["distsim", "--debug", *arguments]
    from distsim.cli.main import _status

    status = 99
    try:
        found = _status()
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
        return f"status {status}: {said[-400:]}"
    if "Traceback" in said or "\x1b" in said + printed:
        return f"a traceback or an escape sequence: {said[-300:]}"
    if status == 2 and arguments[1] not in said.split("\n")[0]:
        return f"a refusal without a place: {said[:300]}"
    if "takes more memory" in said:
        return "more memory than it may take"
    return None


def run(cases: int, seed: int, tell: Any = None) -> list[Broken]:
    """Broken promises of so many cases."""
    for module in (
        "distsim.simulation",
        "distsim.checking",
        "distsim.replay",
        "distsim.compare",
        "distsim.views.text",
        "distsim.cli.app",
    ):
        __import__(module)
    known, found = bases(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in range(cases):
            draw = random.Random(f"{seed} {case}")
            base = draw.choice(known)
            file = folder / f"case{base.suffix}"
            file.write_bytes(mutant(base, draw))
            commands = ("replay",) if base.suffix == ".jsonl" else (draw.choice(("simulate", "check")),)
            for command in commands:
                what = answer([command, str(file)], folder)
                if what is not None:
                    found.append(Broken(case, base.name, command, what))
                    if tell is not None:
                        tell(found[-1])
            if tell is not None and case % 500 == 499:
                tell(f"{case + 1} cases, {len(found)} broken")
    return found


def main() -> int:
    count, seed = (int(word) for word in (*sys.argv[1:], "0")[:2]) if len(sys.argv) > 1 else (1000, 0)
    stream = io.TextIOWrapper(os.fdopen(os.dup(1), "wb"), encoding="utf-8", line_buffering=True)
    found = run(count, seed, lambda said: stream.write(f"{said}\n"))
    stream.write(f"{count} cases, {len(found)} broken promises\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
