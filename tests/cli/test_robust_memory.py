"""Memory that is not there is said, never fought for: a bound for every command, and a refusal with
place and remedy.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distsim.cli import process

ROOT = Path(__file__).resolve().parents[2]
TEXT = "world: 64\ntensors: {x: {shape: [4]}}\nprogram:\n  - repeat: {times: 60000, steps: [{all_reduce: {tensor: x}}]}\n"
resource = pytest.importorskip("resource", reason="limits as POSIX has them")


def bounded(file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of a process that may have 150 MB of data."""
    command = [
        "sh",
        "-c",
        'ulimit -d 150000 && exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "distsim",
        *words,
        str(file),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the kernel bounds data on Linux alone"
)
@pytest.mark.parametrize(
    "words",
    [("simulate",), ("check",), ("render", "--view", "timeline")],
    ids=lambda words: words[0],
)
def test_a_program_that_needs_more_memory_than_available_is_refused(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    file = tmp_path / "large.yaml"
    file.write_text(TEXT, encoding="utf-8")
    found = bounded(file, *words)

    assert found.returncode == 2
    assert "completes" not in found.stdout
    assert found.stderr.splitlines()[0] == f"{file}: not enough free memory"
    assert found.stderr.splitlines()[1].startswith("  help: take fewer ranks")


@pytest.mark.parametrize(
    ("free", "soft", "hard", "bound"),
    [
        (100 << 30, -1, -1, int((100 << 30) * 0.95)),
        (1 << 20, -1, -1, 512 << 20),
        (100 << 30, 1 << 30, -1, 1 << 30),
        (100 << 30, -1, 2 << 30, 2 << 30),
        (None, -1, -1, None),
    ],
)
def test_a_command_may_use_free_memory_minus_a_reserve_up_to_its_limit(
    monkeypatch: pytest.MonkeyPatch, free: int | None, soft: int, hard: int, bound: int | None
) -> None:
    """At least half a GiB, however little is free: the estimate of the system is one."""
    took: list[tuple[int, int]] = []
    watched: list[bool] = []
    monkeypatch.setattr(process, "_available_bytes", lambda: free)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: took.append(pair))
    monkeypatch.setattr(process, "_raise_before_limit", lambda: watched.append(True))
    process.limit_memory()

    assert took == ([] if bound is None else [(bound, hard)])
    assert watched == ([] if bound is None else [True])


def test_available_memory_is_the_minimum_of_machine_and_control_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "max").write_text(f"{5 << 30}\n", encoding="ascii")
    (tmp_path / "stat").write_text(f"file 7\nanon {2 << 30}\n", encoding="ascii")
    monkeypatch.setattr(
        process,
        "_CGROUP_FILES",
        (process._CgroupFiles(str(tmp_path / "max"), str(tmp_path / "stat"), "anon "),),
    )
    monkeypatch.setattr(process, "_number_after", _of_line_with(200 << 20, process._number_after))

    assert process._available_bytes() == 3 << 30
    (tmp_path / "max").write_text("max\n", encoding="ascii")
    assert process._available_bytes() == (200 << 20) * 1024


def _of_line_with(available_kib: int, real: Callable[[str, str], int]) -> Callable[[str, str], int]:
    """The machine's own number replaced; a control group's is read."""
    return lambda path, word: (
        available_kib if os.fspath(path) == "/proc/meminfo" else real(path, word)
    )
