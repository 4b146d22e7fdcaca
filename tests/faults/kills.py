"""End commands at random moments, and look at what is left.

Nothing may be left of a command but files that can be used: no process, no half-written file, no
lost row. A process belongs to a command if a mark is in its environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Final

from tests.script_capture import test_kills as captures

_SIGNALS: Final = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_SWEEP: Final = """\
world: 4
tensors: {x: {shape: [64]}}
program:
  - repeat: {times: 300, steps: [{compute: {time: (1 + rank) * 1 ms}}, {all_reduce: x}]}
"""
_RUN: Final = """\
world: 3
tensors: {x: {shape: [64]}}
program:
  - repeat: {times: 2000, steps: [{all_reduce: x}, {compute: {time: 1 ms}}]}
"""
_POINTS: Final = 12
_GRID: Final = f"seed={','.join(map(str, range(_POINTS)))}"


def start(folder: Path, token: str, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "distsim", *words],
        cwd=folder,
        env={**os.environ, captures.MARK: token, "PYTHONPATH": str(captures_root())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def captures_root() -> Path:
    return Path(__file__).resolve().parents[2]


def _kill_at(process: subprocess.Popen[bytes], draw: Random, latest_s: float, token: str) -> str:
    """Signal the command, wait for its end, and name the processes that are left."""
    time.sleep(draw.uniform(0.1, latest_s))
    process.send_signal(draw.choice(_SIGNALS))
    process.wait(timeout=120)
    captures.until(lambda: not captures.marked(token), 30)
    left = captures.marked(token)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return f"{len(left)} processes were left" if left else ""


def kill_sweep(folder: Path, draw: Random, token: str) -> str:
    """Kill a sweep and run it again: the table must have each row once. "": it has."""
    (folder / "s.yaml").write_text(_SWEEP)
    words = ("sweep", "s.yaml", "--grid", _GRID, "-j", "1", "-o", "out.csv")
    left = _kill_at(start(folder, token, *words), draw, 6.0, token)
    rows_before = _rows(folder / "out.csv")
    again = start(folder, token, *words)
    if again.wait(timeout=300):
        return f"the second run ended with status {again.returncode}"
    rows = _rows(folder / "out.csv")
    if len(rows) != _POINTS + 1 or len(set(rows)) != len(rows):
        return f"{len(rows) - 1} rows instead of {_POINTS}"
    lost = set(rows_before[:-1]) - set(rows)
    return left or (f"lost {len(lost)} rows" if lost else "")


def _rows(table: Path) -> list[str]:
    return table.read_text().splitlines() if table.exists() else []


def kill_real_run(folder: Path, draw: Random, token: str) -> str:
    """Kill a real run. What it has written must be a readable trace."""
    from distsim.trace.jsonl import read_trace

    (folder / "s.yaml").write_text(_RUN)
    words = ("run", "s.yaml", "--real", "--backend", "gloo", "--trace", "out.jsonl")
    left = _kill_at(start(folder, token, *words), draw, 12.0, token)
    for path in folder.glob("out.jsonl*"):
        if path.stat().st_size:
            read_trace(path)
    strange = sorted({path.name for path in folder.iterdir()} - _NAMES_OF_RUN)
    return left or (f"left {', '.join(strange)}" if strange else "")


_NAMES_OF_RUN: Final = {"s.yaml", "out.jsonl", "out.jsonl.partial"}


def kill_capture(folder: Path, draw: Random, token: str) -> str:
    """Kill a capture or one of its ranks."""
    left = captures.left_after(
        folder,
        token,
        draw.choice(_SIGNALS),
        of_rank=draw.random() < 0.25,
        after_s=draw.uniform(0.1, 2.0) * draw.choice((1, -3)),
    )
    return "; ".join(left)


KILLS: Final = {"sweep": kill_sweep, "run --real": kill_real_run, "capture": kill_capture}
