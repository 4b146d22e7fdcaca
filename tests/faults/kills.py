"""End commands at random moments, and look at what is left.

Nothing may be left of a command but files that can be used: no process, no half-written file, no
lost row. A process belongs to a command if a mark is in its environment.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Final

from distsim.trace.recordings.read_recording import SAMPLE
from tests.script_capture import test_kills as captures

# A shell starts what runs in its background with Ctrl-C ignored, which commands would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
_DUMPS: Final = Path(__file__).resolve().parents[1] / "data/doctor/hangs/early_break.zip"
#: Four of these files are enough for `slow` to read them in several processes.
_LARGE_PROFILE_BYTES: Final = 3 << 20
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
    process.wait(timeout=600)
    captures.until(lambda: not captures.marked(token), 30)
    left = captures.marked(token)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return f"{len(left)} processes were left" if left else ""


def kill_sweep(folder: Path, draw: Random, token: str) -> str:
    """Kill a sweep and run it again: the table must have each row once. "": it has."""
    (folder / "s.yaml").write_text(_SWEEP)
    jobs = draw.choice(("1", "2"))
    words = ("sweep", "s.yaml", "--grid", _GRID, "-j", jobs, "-o", "out.csv")
    left = _kill_at(start(folder, token, *words), draw, 12.0, token)
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
    return left or _strange_files(folder, _NAMES_OF_RUN)


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


def kill_slow(folder: Path, draw: Random, token: str) -> str:
    """Kill `slow` while several processes read profiles."""
    profiles = folder / "profiles"
    profiles.mkdir()
    for packed in SAMPLE.glob("*.json.gz"):
        profile = gzip.decompress(packed.read_bytes())
        (profiles / packed.stem).write_bytes(profile.ljust(_LARGE_PROFILE_BYTES))
    words = ("slow", "profiles", "-j", "2", "--trace", "out.json")
    left = _kill_at(start(folder, token, *words), draw, 8.0, token)
    if (folder / "out.json").exists():
        json.loads((folder / "out.json").read_bytes())
    return left or _strange_files(folder, {"profiles", "out.json"})


def kill_doctor(folder: Path, draw: Random, token: str) -> str:
    words = ("doctor", str(_DUMPS), "--view", "wait-for", "-o", "out.svg")
    left = _kill_at(start(folder, token, *words), draw, 8.0, token)
    return left or _damaged_text(folder, "out.svg", "</svg>")


def kill_report(folder: Path, draw: Random, token: str) -> str:
    (folder / "s.yaml").write_text(_SWEEP)
    words = ("report", "s.yaml", "-o", "out.html")
    left = _kill_at(start(folder, token, *words), draw, 8.0, token)
    return left or _damaged_text(folder, "out.html", "</html>")


def _damaged_text(folder: Path, name: str, end: str) -> str:
    """What is wrong with a file that must end in ``end`` if it exists."""
    path = folder / name
    if path.exists() and not path.read_text().rstrip().endswith(end):
        return f"{name} is not complete"
    return _strange_files(folder, {"s.yaml", name})


def _strange_files(folder: Path, known: set[str]) -> str:
    strange = sorted({path.name for path in folder.iterdir()} - known)
    return f"left {', '.join(strange)}" if strange else ""


KILLS: Final = {
    "sweep": kill_sweep,
    "run --real": kill_real_run,
    "capture": kill_capture,
    "slow": kill_slow,
    "doctor": kill_doctor,
    "report": kill_report,
}
