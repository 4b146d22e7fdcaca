"""Runs that fail: they end in time, leave nothing behind, keep what was recorded, and name the
cause the simulation names.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from distsim.output.text.real_run import real_run_text
from distsim.output.trace_data.partial_run import partial_run_text
from distsim.real import run as real
from distsim.real.shared.progress_file import ProgressFile, RankPhase
from distsim.trace.jsonl import parse_trace, read_trace, trace_lines
from distsim.trace.run_end import is_partial
from tests.support.command_json import checked_json
from tests.support.harness import Cli
from tests.support.real_runs import ROOT, children, deaf, folders, run, scenario, until, written

pytest.importorskip("torch")

CASES = [  # scenario, culprits, code
    ("head_to_head_sends", (0, 1), "DS301"),
    ("skipped_barrier", (2,), "DS302"),
    ("killed_at_iteration_3", (2,), "DS303"),
    ("never_starts", (3,), "DS303"),
    ("tag_mismatch", (0, 1), "DS304"),
]


@pytest.mark.parametrize(("name", "culprits", "code"), CASES, ids=[c[0] for c in CASES])
def test_a_faulty_scenario_ends_as_simulated_with_its_cause_and_leaves_no_process(
    name: str, culprits: tuple[int, ...], code: str
):
    done = run(scenario(name), timeout_s=2)

    assert done.reason in ("standstill", "done")
    assert not any("imed out" in end.message for end in done.final_state.ends), (
        "ended by a timeout of gloo's, a minute later"
    )
    assert done.outcome == done.simulation.outcome
    assert done.agrees, done.differences
    assert done.culprits == culprits
    assert code in {f.code for f in done.findings}
    assert code in {f.code for f in done.simulation.findings}
    assert not done.trace.header["complete"]
    assert (
        max(len(line) for line in real_run_text(done).splitlines() if str(ROOT) not in line) <= 80
    )  # a path is not broken
    assert (children(), folders()) == (set(), [])


def test_a_blocked_rank_shows_its_call_and_its_python_stack():
    done = run(scenario("head_to_head_receives"), timeout_s=2)

    assert set(done.stacks) == {0, 1}
    assert all("in recv" in text for text in done.stacks.values())
    assert "blocked  recv  line" in real_run_text(done)


LOOP = """
world: 4
iterations: 2000
tensors: {x: {shape: [256], value: 1.0}, y: {like: x}}
program:
  - all_reduce: {tensor: x, op: max}
  - isend: {tensor: x, dst: (rank + 1) % world_size, as: h}
  - recv: {tensor: y, src: (rank - 1) % world_size}
  - wait: h
"""


def kill_somebody(seed: int, killed: list[int]) -> threading.Thread:
    """Watches for the run's boards, until a random rank has come to a random call of the first
    quarter, and kills it.
    """
    chance = random.Random(seed)
    victim, position, later_s = chance.randrange(4), chance.randrange(2000), chance.random() * 0.002

    def act() -> None:
        end = time.monotonic() + 300
        while time.monotonic() < end:
            for folder in folders():
                path = folder / f"board-{victim}"
                if path.exists() and path.stat().st_size:
                    board = ProgressFile(path)
                    seen = board.snapshot(victim)
                    board.close()
                    if (
                        seen.phase in (RankPhase.RUNNING, RankPhase.IN_CALL)
                        and seen.position >= position
                    ):
                        time.sleep(later_s)
                        killed.append(victim)
                        os.kill(seen.pid, signal.SIGKILL)
                        return
            time.sleep(0.002)

    return threading.Thread(target=act)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 23))]
)
def test_a_rank_killed_at_any_moment_gives_an_orderly_end_and_a_readable_trace(seed: int):
    killed: list[int] = []
    thread = kill_somebody(seed, killed)
    thread.start()
    done = run(written(LOOP), timeout_s=3)
    thread.join()

    assert done.culprits == tuple(killed)
    assert done.outcome in ("raises", "crashes")
    assert {f.code for f in done.findings} == {"DS303"}
    trace = parse_trace("".join(trace_lines(done.trace)).splitlines(keepends=True))
    assert not trace.header["complete"]
    assert (trace["posted_ns"] >= 0).any()
    assert (children(), folders()) == (set(), [])


def processes_of(marker: str) -> list[int]:
    """Processes with this text in their environment, which forks inherit."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        signal.SIGHUP,
        signal.SIGKILL,
    ],
)
def test_a_launcher_that_ends_ends_its_ranks(number: signal.Signals, tmp_path: Path):
    marker = f"DISTSIM_TEST_MARK={tmp_path.name}-{number.name}-{os.getpid()}"
    name, _, value = marker.partition("=")
    trace = tmp_path / "partial.jsonl"
    command = [
        sys.executable,
        "-m",
        "distsim",
        "run",
        "scenarios/head_to_head_sends.yaml",
        "--real",
        "--force",
        "--timeout",
        "60 s",
        "--trace",
        str(trace),
    ]
    environment = {**os.environ, name: value, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    launcher = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=deaf,
    )
    try:
        until(lambda: _stuck(tmp_path) == 2)
        launcher.send_signal(number)
        text, _ = launcher.communicate(timeout=300)
    finally:
        launcher.kill()

    until(lambda: processes_of(marker) == [])
    left = read_trace(f"{trace}.partial") if number == signal.SIGKILL else read_trace(trace)
    assert is_partial(left)
    assert partial_run_text(left).startswith("partial: it")
    if number != signal.SIGKILL:
        assert launcher.returncode == 4
        assert f"ended by {number.name}" in text
        assert list(tmp_path.glob("distsim-run-*")) == []
        assert not Path(f"{trace}.partial").exists()
        assert not parse_trace(trace.read_text().splitlines(keepends=True)).header["complete"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_launcher_killed_at_any_moment_leaves_a_trace_whose_replay_shows_the_end(
    seed: int, tmp_path: Path, cli: Cli
):
    """From the first call of a rank on; what was written before the end is in it."""
    name, value = "DISTSIM_TEST_MARK", f"{tmp_path.name}-{seed}-{os.getpid()}"
    (tmp_path / "loop.yaml").write_text(
        LOOP.replace("iterations: 2000", "iterations: 500") + "  - sleep: 200 ms\n"
    )
    later_s = random.Random(seed).random() * 5
    trace = tmp_path / "t.jsonl"
    command = [
        sys.executable,
        "-m",
        "distsim",
        "run",
        str(tmp_path / "loop.yaml"),
        "--real",
        "--trace",
        str(trace),
    ]
    environment = {**os.environ, name: value, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    launcher = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: _stuck(tmp_path) > 0)
        time.sleep(later_s)
        written = bool(_posted(trace)) if later_s < 2 else until(lambda: _posted(trace)) is None
    finally:
        launcher.kill()
        launcher.wait()
    until(lambda: processes_of(f"{name}={value}") == [])

    left = read_trace(f"{trace}.partial")
    assert is_partial(left)
    assert _posted(trace) or not written
    told = cli("replay", f"{trace}.partial")
    assert partial_run_text(left) in " ".join(told.stdout.split())
    assert "completes" not in told.stdout.splitlines()[0]


def _posted(trace: Path) -> int:
    """Calls that the recording under way holds."""
    return int((read_trace(f"{trace}.partial")["posted_ns"] >= 0).sum())


def _stuck(folder: Path) -> int:
    count = 0
    for path in folder.glob("distsim-run-*/board-*"):
        if path.stat().st_size:
            board = ProgressFile(path)
            count += board.snapshot(0).phase == RankPhase.IN_CALL
            board.close()
    return count


def test_leftovers_of_a_killed_launcher_are_removed_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / f"distsim-run-{gone.pid}-x").mkdir()
    (tmp_path / f"distsim-run-{os.getpid()}-y").mkdir()
    real._remove_stale_folders()

    assert [p.name for p in tmp_path.iterdir()] == [f"distsim-run-{os.getpid()}-y"]


def test_a_program_that_would_hang_is_refused_with_the_diagnosis(cli: Cli):
    done = cli("run", "scenarios/head_to_head_sends.yaml", "--real")

    assert done.returncode == 1
    assert "DS301" in done.stdout
    assert "--force" in done.stderr


@pytest.mark.parametrize("force", [(), ("--force", "--timeout", "1 s")], ids=["refused", "forced"])
def test_json_of_a_failed_run_follows_its_schema(cli: Cli, force: tuple[str, ...]):
    """Closed, for a run that is refused, and for one that stood still, with stacks and places."""
    done = cli(
        "run",
        "scenarios/head_to_head_sends.yaml",
        "--real",
        "--backend",
        "gloo",
        "--format",
        "json",
        *force,
    )
    report = checked_json("run", done.stdout)

    assert done.returncode == 1
    assert (report["schema_version"], report["findings"][0]["code"], "refused" in report) == (
        1,
        "DS301",
        not force,
    )
    assert force == () or all(rank["stack"] for rank in report["ranks"])


def test_nccl_without_a_gpu_suggests_gloo_by_name(cli: Cli):
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    done = cli("run", "scenarios/hybrid.yaml", "--real")

    assert done.returncode == 4
    assert "--backend gloo" in done.stderr


OWN_ERROR = """
world: 3
tensors: {x: {shape: [4]}}
program:
  - compute: {time: 20 ms}
  - {fail: out of memory, ranks: 1}
  - all_reduce: {tensor: x}
"""


def test_a_rank_with_its_own_error_is_the_cause_and_its_message_is_shown():
    done = run(written(OWN_ERROR), timeout_s=3)

    assert done.outcome == "raises"
    assert done.culprits == (1,)
    assert "out of memory" in real_run_text(done)
    assert done.agrees, done.differences
