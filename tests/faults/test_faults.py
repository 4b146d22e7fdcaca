"""Commands survive failing files, kills and unusual machines; `python -m tests.faults` runs all."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import failing_files
from tests.faults.failing_files import COMMANDS, ROOT, Command, Outcome, wrong_after
from tests.faults.kills import KILLS, start

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="runs commands in forked processes")
RUN = "world: 2\ntensors: {x: {shape: [4]}}\nprogram:\n  - repeat: {times: 20, steps: [all_reduce: x]}\n"


def test_each_failing_file_operation_leaves_whole_files() -> None:
    importlib.import_module("distsim.cli.commands.render")  # once, before the forks
    command = Command("render s.yaml --view groups -o out.dot", ("out.dot",))
    count = failing_files.failing_operations(command)

    assert count.runs >= 4
    assert count.problems == ()


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words)
def test_each_failing_file_operation_of_every_command_leaves_whole_files(command: Command) -> None:
    assert failing_files.failing_operations(command).problems == ()


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        (Outcome(3, "", True, {"a": b"before"}), "exit status 3"),
        (Outcome(-signal.SIGSEGV, "", True, {"a": b"before"}), "exit status -11"),
        (Outcome(2, "Traceback", True, {"a": b"before"}), "a traceback"),
        (Outcome(4, "", True, {"a": b"hal"}), "a is neither as before nor complete"),
        (Outcome(4, "", True, {"a": b"before", ".a.part": b""}), ".a.part is neither"),
        (Outcome(4, "", True, {}), "lost a"),
        (Outcome(4, "", True, {"a": b"whole"}), ""),
    ],
)
def test_the_check_of_a_failed_run_sees_damage(end: Outcome, problem: str) -> None:
    found = wrong_after({"a": b"before"}, {"a": b"whole"}, end)

    assert found.startswith(problem)
    assert bool(found) == bool(problem)


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLS)
def test_commands_killed_at_random_moments_leave_no_process_and_whole_files(
    name: str, tmp_path: Path
) -> None:
    if name in ("run --real", "capture"):
        pytest.importorskip("torch")
    seed = random.SystemRandom().randrange(10**6)
    problems = []
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        draw = random.Random(f"{name} {seed} {number}")
        problems.append(KILLS[name](folder, draw, f"{name} {seed} {number}"))

    assert set(problems) == {""}, f"seed {seed}"


@pytest.mark.slow
def test_two_runs_that_write_one_trace_leave_one_whole_trace(tmp_path: Path) -> None:
    from distsim.trace.jsonl import read_trace

    (tmp_path / "s.yaml").write_text(RUN)
    words = ("simulate", "s.yaml", "--trace", "t.jsonl")
    runs = [start(tmp_path, f"two {number}", *words) for number in range(2)]

    assert [run.wait(timeout=120) for run in runs] == [0, 0]
    assert len(read_trace(tmp_path / "t.jsonl")) == 40
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.yaml", "t.jsonl"]


def distsim(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "s.yaml").write_text(RUN)
    return subprocess.run(
        [sys.executable, "-m", "distsim", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_a_real_run_names_a_port_that_is_in_use(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = distsim(tmp_path, "run", "s.yaml", "--real", "--master-port", port)

    assert done.returncode == 4
    assert port in done.stderr
    assert "Traceback" not in done.stderr


#: A module that every Python process imports first: the clock of the machine jumps by up to a day.
JUMPS = """
import random, time
real_time, real_time_ns = time.time, time.time_ns
time.time = lambda: real_time() + random.uniform(-86400, 86400)
time.time_ns = lambda: real_time_ns() + random.randint(-86400 * 10**9, 86400 * 10**9)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [("run", "s.yaml", "--real", "--backend", "gloo"), ("simulate", "s.yaml")],
    ids=" ".join,
)
def test_jumps_of_the_clock_change_no_outcome(tmp_path: Path, words: tuple[str, ...]) -> None:
    pytest.importorskip("torch")
    (tmp_path / "sitecustomize.py").write_text(JUMPS)
    done = distsim(tmp_path, *words, PYTHONPATH=f"{tmp_path}:{ROOT}")

    assert done.returncode == 0, done.stderr
    assert "completes" in done.stdout


TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1 << 16))
print("done", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0 or not shutil.which("unshare"),
    reason="hiding /dev/shm needs a mount namespace, and so root",
)
@pytest.mark.parametrize(
    "words",
    [
        ("run", "s.yaml", "--real", "--backend", "gloo"),
        ("capture", "--nproc", "2", "--", "python", "train.py"),
    ],
    ids=lambda words: words[0],
)
def test_without_shared_memory_a_command_works_or_says_what_is_missing(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "s.yaml").write_text(RUN)
    (tmp_path / "train.py").write_text(TRAIN)
    hidden = 'mount -t tmpfs -o ro,size=4k none /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", hidden, "sh", sys.executable, "-m", "distsim", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode in (0, 4), done.stderr
    assert "Traceback" not in done.stderr
    if done.returncode == 4:
        assert "help:" in done.stderr
