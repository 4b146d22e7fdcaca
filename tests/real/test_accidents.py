"""What can befall a run from outside: full disks, stopped ranks, launchers that vanish, impatient
fingers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from distsim.cli.shared import console
from distsim.cli.shared.trace_output import check_trace_path, write_recording
from distsim.common.errors import EnvironmentFault, UsageError
from distsim.output.text.real_run import real_run_text
from distsim.real.launch.coordinator import LaunchCoordinator, StoreCoordinator
from distsim.real.launch.monitor import RankMonitor
from distsim.real.launch.start_methods import ProcessLauncher
from distsim.real.results.postmortem import postmortem
from distsim.real.run import RealRun, RealRunOptions, run_scenario
from distsim.real.shared.job import WorkerJob
from distsim.real.shared.progress_file import (
    STOPPED_MESSAGE,
    ProgressField,
    ProgressFile,
    RankPhase,
    parse_snapshot,
)
from distsim.real.shared.rendezvous import connect_store, listen, serve_store
from distsim.simulation.simulate_scenario import simulate
from tests.real.test_launch import free_port
from tests.support.harness import Cli
from tests.support.real_runs import (
    ROOT,
    children,
    deaf,
    folders,
    forget_others,
    run,
    scenario,
    until,
    written,
)

pytest.importorskip("torch")

LONG = """
name: long
world: 2
tensors: {x: {shape: [8], dtype: int64, value: 1}}
program:
  - repeat: {times: 6000, steps: [{all_reduce: {tensor: x}}, {compute: {time: 1 ms}}]}
"""


def no_room(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


# --- full disks ---


def test_a_progress_file_without_space_is_an_environment_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else the first store into its pages would be a SIGBUS."""
    monkeypatch.setattr(Path, "write_bytes", no_room)
    with pytest.raises(EnvironmentFault, match=r"cannot write .*board-0: No space left"):
        ProgressFile(tmp_path / "board-0", create=True)


def test_a_progress_file_is_allocated_before_it_is_mapped(tmp_path: Path):
    ProgressFile(tmp_path / "b", create=True).close()

    assert (tmp_path / "b").stat().st_blocks > 0


def test_an_unwritable_trace_does_not_lose_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    trace = simulate(scenario("group_sum")).run.trace
    monkeypatch.setattr(os, "replace", no_room)
    with pytest.raises(EnvironmentFault, match="No space left"):
        write_recording(tmp_path / "t.jsonl", trace, lambda: "the report")

    assert capsys.readouterr().out == "the report\n"
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_writing_leaves_no_temporary_file(tmp_path: Path):
    def pieces():
        yield "one line"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        console.write_file(tmp_path / "t.jsonl", pieces())

    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_directory_is_named_before_the_run():
    with pytest.raises(UsageError, match="cannot write into /proc"):
        check_trace_path(Path("/proc/t.jsonl"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_standard_output_is_an_environment_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "distsim", "run", "scenarios/hybrid.yaml"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    assert done.returncode == 4
    assert "cannot write standard output" in done.stderr


# --- ranks that do not answer, or die under another launcher ---


def struck(number: signal.Signals, launcher: str | None = None) -> RealRun:
    """A run whose rank 1 gets a signal in the middle of its program."""
    done: list[int] = []

    def strike() -> None:
        end = time.monotonic() + 300
        while time.monotonic() < end and not done:
            for path in (folder / "board-1" for folder in folders()):
                if path.exists() and path.stat().st_size:
                    board = parse_snapshot(path.read_bytes(), 1)
                    if board.phase == RankPhase.IN_CALL and board.position > 20:
                        os.kill(board.pid, number)
                        done.append(board.pid)
            time.sleep(0.01)

    thread = threading.Thread(target=strike)
    thread.start()
    found = run(written(LONG), timeout_s=1.5, launcher=launcher)
    thread.join()
    assert done
    return found


def test_a_stopped_rank_is_the_cause_and_reported_as_stopped():
    forget_others()
    found = struck(signal.SIGSTOP)

    assert (found.outcome, found.culprits) == ("hangs", (1,))
    assert STOPPED_MESSAGE in real_run_text(found)
    assert "raised an error" not in real_run_text(found)
    assert [f.code for f in found.findings] == ["DS303"]
    assert children() == set()


@pytest.mark.slow
def test_with_the_elastic_launcher_a_killed_rank_is_distinguished_from_its_followers():
    forget_others()
    found = struck(signal.SIGKILL, "elastic")

    assert found.culprits == (1,)
    assert found.final_state.ends[1].status == "killed"
    assert [f.code for f in found.findings] == ["DS303"]


@pytest.mark.slow
def test_the_elastic_launcher_leaves_no_directory_of_logs(tmp_path: Path, cli: Cli):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "distsim",
            "run",
            "scenarios/send_one.yaml",
            "--real",
            "--backend",
            "gloo",
            "--launcher",
            "elastic",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )

    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_failure_of_the_elastic_launcher_itself_is_an_environment_error(
    monkeypatch: pytest.MonkeyPatch,
):
    """Else its ranks, which never came, would count as ended."""
    from torch.distributed.launcher import api

    monkeypatch.setattr(api, "elastic_launch", no_room)
    with pytest.raises(EnvironmentFault, match=r"elastic launcher failed: .*No space left"):
        run_scenario(scenario("group_sum"), RealRunOptions(backend="gloo", launcher="elastic"))


def test_a_rank_that_dies_while_loading_is_no_outcome_of_the_scenario(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        "distsim.real.worker.rank_process._set_up_process", lambda job, rank, board: os._exit(7)
    )
    with pytest.raises(EnvironmentFault, match="rank 0 ended before it had started, with status 7"):
        run_scenario(scenario("group_sum"), RealRunOptions(backend="gloo"))


def test_a_timeout_is_reported_as_in_the_simulation_with_the_late_rank_as_the_cause():
    late = simulate(scenario("findings/ds804_late"), backend="gloo")
    boards = {
        0: _board(0, RankPhase.RAISED, "RuntimeError: Connection closed by peer"),
        1: _board(
            1,
            RankPhase.RAISED,
            "RuntimeError: Timed out waiting 1000ms for recv operation to complete",
        ),
    }
    left = postmortem(late, boards, {0: 1, 1: 1}, 1, {})

    assert [f.code for f in left.findings] == ["DS804"]
    assert left.culprits == (0,)


def _board(rank: int, phase: RankPhase, message: str):
    from distsim.real.shared.progress_file import ProgressSnapshot

    position = 1 if rank == 0 else 0
    return ProgressSnapshot(rank, 1, phase, position, 1, 5, 0, 0, 0, message)


# --- launchers that vanish ---


def _alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_ranks_of_a_fork_server_end_with_their_launcher(tmp_path: Path):
    file = tmp_path / "long.yaml"
    file.write_text(LONG)
    command = [
        sys.executable,
        "-m",
        "distsim",
        "run",
        str(file),
        "--real",
        "--backend",
        "gloo",
        "--launcher",
        "forkserver",
    ]
    launcher = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}, cwd=ROOT
    )

    def pids() -> list[int]:
        return [
            parse_snapshot(p.read_bytes(), 0).pid
            for p in tmp_path.glob("distsim-run-*/board-*")
            if p.stat().st_size
        ]

    try:
        until(lambda: len(pids()) == 2 and all(pids()))
        ranks = pids()
    finally:
        launcher.kill()
        launcher.wait()
    until(lambda: not _alive(ranks))
    assert _alive(ranks) == []


def pair(limit_s: float) -> tuple[StoreCoordinator, StoreCoordinator]:
    door, port = listen("127.0.0.1", 0, allow_other_port=False)
    first = serve_store(door, "127.0.0.1", port)
    return StoreCoordinator(first, 0, 2, limit_s), StoreCoordinator(
        connect_store("127.0.0.1", port, 5), 1, 2, limit_s
    )


def test_a_launcher_that_misses_the_end_has_exited_and_its_record_is_not_awaited(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("distsim.real.launch.coordinator._ACK_TIMEOUT_S", 0.2)
    first, _ = pair(limit_s=600)
    began = time.monotonic()

    assert first.decide("standstill") == "standstill"
    assert first.offset("end") == (0, 0)
    assert first.gone == (1,)
    assert first.gather({"facts": b"{}"}) == [{"facts": b"{}"}]
    assert first.agree_on(1) == 1
    assert time.monotonic() - began < 300  # not the ten minutes of its patience with others


def test_a_launcher_that_learns_of_the_end_has_not_exited():
    first, second = pair(limit_s=5)
    first.decide("done")
    second.decide("")
    answer = threading.Thread(target=second.offset, args=("end",))
    answer.start()
    first.offset("end")
    answer.join()

    assert first.gone == ()


def test_loss_of_the_store_of_the_first_launcher_is_reported_as_such():
    door, port = listen("127.0.0.1", 0, allow_other_port=False)
    first = serve_store(door, "127.0.0.1", port)
    second = StoreCoordinator(connect_store("127.0.0.1", port, 5), 1, 2, 1)
    del first
    with pytest.raises(EnvironmentFault, match="launcher of node 0 has exited"):
        until(lambda: second.decide(""))


def test_ctrl_c_ends_waiting_for_the_first_launcher():
    began = time.monotonic()
    with pytest.raises(EnvironmentFault, match="ended by SIGINT"):
        connect_store(
            "127.0.0.1",
            free_port(),
            600,
            lambda: "SIGINT" if time.monotonic() - began > 0.2 else "",
        )

    assert time.monotonic() - began < 300


def test_an_unknown_or_unreachable_host_is_an_environment_error_with_its_name():
    for wish, said in (
        (
            RealRunOptions(init="tcp://no-such-host.invalid:29511"),
            "the host no-such-host.invalid is unknown here",
        ),
        (
            RealRunOptions(master_addr="no-such-host.invalid"),
            "the host no-such-host.invalid is unknown here",
        ),
        (
            RealRunOptions(master_addr="192.0.2.1"),
            "192.0.2.1 is not an address of this node",
        ),  # TEST-NET-1, RFC 5737
        (
            RealRunOptions(init="tcp://192.0.2.1:29511", timeout_ns=500_000_000),
            "ranks 0-3 did not connect through tcp://192.0.2.1:29511",
        ),
    ):
        with pytest.raises(EnvironmentFault, match=re.escape(said)):
            run_scenario(scenario("group_sum"), replace(wish, backend="gloo"))


@pytest.mark.parametrize("busy", [True, False])
def test_loading_ranks_are_awaited_as_long_as_they_use_their_core(
    busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A rank of which nothing is seen counts as late after the limit; one that works does not,
    however long it takes.
    """
    monkeypatch.setattr("distsim.real.launch.monitor._CPU_CHECK_INTERVAL_NS", 1)
    begun, end = multiprocessing.Event(), multiprocessing.Event()
    rank = multiprocessing.get_context("fork").Process(
        target=_loading, args=(begun, end, busy), daemon=True
    )
    rank.start()
    begun.wait(300)
    program = simulate(scenario("group_sum")).program
    job = WorkerJob(program, "gloo", str(tmp_path), "127.0.0.1", 1, "env://", True, 1)
    watch = RankMonitor(
        job, range(4), ProcessLauncher("fork"), LaunchCoordinator(), 10**9, start_ns=1_500_000_000
    )
    try:
        until(
            lambda: (
                watch._look(),
                watch._reason() == "start" or watch.moved_ns - watch.began_ns > 900_000_000,
            )[1]
        )
    finally:
        end.set()
        rank.join(300)
        watch.finish(False)

    assert (watch.moved_ns - watch.began_ns > 900_000_000) == busy


def _loading(begun: Event, end: Event, busy: bool) -> None:
    begun.set()
    while not end.is_set():
        if not busy:
            time.sleep(0.5)


def test_a_wait_interrupted_by_the_stack_dump_signal_counts_as_blocked_not_raised(
    tmp_path: Path,
):
    """As torch's sockets do: waiting to connect again, they raise `DistNetworkError: Interrupted
    system call`.
    """
    program = simulate(scenario("group_sum")).program
    job = WorkerJob(program, "gloo", str(tmp_path), "127.0.0.1", 1, "env://", True, 1)
    watch = RankMonitor(
        job, range(4), ProcessLauncher("fork"), LaunchCoordinator(), 1, start_ns=300 * 10**9
    )
    begun = multiprocessing.Event()
    rank = multiprocessing.get_context("fork").Process(
        target=_woken, args=(begun, job), daemon=True
    )
    rank.start()
    try:
        assert begun.wait(300)
        for board in watch.progress_files.values():
            board.advance(RankPhase.IN_CALL, 0, time.monotonic_ns())
        watch.progress_files[0].words[ProgressField.PID] = rank.pid
        watched = watch.run()
        until(lambda: watch.progress_files[0].snapshot(0).phase == RankPhase.RAISED)
    finally:
        rank.kill()
        rank.join(300)
        watch.finish(False)

    assert (watched.reason, watched.stacks) == ("standstill", {0: "connect"})
    assert [here.phase for here in watched.seen.values()] == [RankPhase.IN_CALL] * 4


def _woken(begun: Event, job: WorkerJob) -> None:
    """A rank that raises at once when it is asked for its stack."""
    board = ProgressFile(job.progress_path(0))

    def woken(number: int, frame: object) -> None:
        board.advance(RankPhase.RAISED, 0, time.monotonic_ns())
        job.stack(0).write_text("connect")

    signal.signal(signal.SIGUSR1, woken)
    begun.set()
    while True:
        signal.pause()


# --- the user ---


def test_ctrl_c_in_a_progressing_run_blames_no_rank_and_a_second_one_keeps_the_report(
    tmp_path: Path,
):
    file, trace = tmp_path / "long.yaml", tmp_path / "t.jsonl"
    file.write_text(LONG)
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "distsim",
            "run",
            str(file),
            "--real",
            "--backend",
            "gloo",
            "--trace",
            str(trace),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=deaf,
    )

    def further() -> bool:
        boards = [
            parse_snapshot(p.read_bytes(), 0)
            for p in tmp_path.glob("distsim-run-*/board-*")
            if p.stat().st_size
        ]
        return len(boards) == 2 and all(
            b.phase == RankPhase.IN_CALL and b.position > 50 for b in boards
        )

    try:
        until(further)
        launcher.send_signal(signal.SIGINT)
        until(lambda: list(tmp_path.glob(".t.jsonl.*")) or trace.exists())
        launcher.send_signal(signal.SIGINT)
        text, errors = launcher.communicate(timeout=300)
    finally:
        launcher.kill()

    assert "ended by SIGINT" in text, errors
    assert "running" in text
    assert "Cause:" not in text
    assert "error DS" not in text
    header = json.loads(trace.read_text().partition("\n")[0])
    assert (header["complete"], header["outcome"]) == (False, "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["long.yaml", "t.jsonl"]


def test_rank_0_serves_a_store_named_by_the_user():
    done = run(scenario("group_sum"), init=f"tcp://127.0.0.1:{free_port()}")

    assert done.outcome == "completes"
    assert done.buffers_in_state("differs") == []


def test_an_unknown_rendezvous_is_refused_before_anything_starts():
    with pytest.raises(UsageError, match="unknown --init-method udp"):
        run_scenario(
            scenario("group_sum"), RealRunOptions(backend="gloo", init="udp://127.0.0.1:1")
        )


def test_the_plan_keeps_the_options_and_splits_the_world_as_requested(cli: Cli):
    asked = (
        "--backend",
        "gloo",
        "--timeout",
        "3 s",
        "--repeat",
        "5",
        "--trace",
        "x.jsonl",
        "--init-method",
        "tcp",
    )
    done = cli(
        "run",
        "scenarios/hybrid.yaml",
        *asked,
        "--nnodes",
        "2",
        "--master-addr",
        "n0",
        "--master-port",
        "1234",
    )
    text = " ".join(done.stdout.replace("\\\n", " ").split())

    assert "hybrid: 4 ranks on 2 nodes (2 ranks per node)" in text
    assert "MASTER_ADDR=n0 MASTER_PORT=1234" in text
    assert (
        "--real --backend gloo --timeout '3 s' --init-method tcp --repeat 5 --trace x.jsonl" in text
    )
    assert "torchrun --nproc_per_node=2 --nnodes=2 --node_rank=1 --master_addr=n0" in text


def test_the_plan_refuses_a_split_that_does_not_fit(cli: Cli):
    done = cli("run", "scenarios/hybrid.yaml", "--nnodes", "3")

    assert done.returncode == 2
    assert "cannot be divided by --nnodes 3" in done.stderr
