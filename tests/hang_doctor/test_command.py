"""`distsim doctor` as a command: text of any width, JSON, the picture, the smallest scenario, live
ranks, what it refuses.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from distsim.cli.application import application
from distsim.common.errors import DistsimError, UsageError
from distsim.hang_doctor import diagnose_hang, read_evidence
from distsim.hang_doctor.minimal_scenario import minimal_scenario_text
from distsim.hang_doctor.readers.live_processes import rank_of_pid, rank_pids_of_launcher
from distsim.output.text.diagnosis import doctor_text
from distsim.real.shared.progress_file import ProgressFile, RankPhase
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import simulate
from tests.hang_doctor.test_logs import THREADS
from tests.hang_doctor.test_real_hangs import HANGS
from tests.support.doctor_dumps import dump, entry, write

#: Standstills of which the smallest scenario is simulated as one of gloo, nccl or mpi.
SMALL = (
    "barrier_in_branch",
    "different_kind",
    "different_size",
    "early_break",
    "forgotten_send",
    "pipeline_wrong_order",
    "ring_receives_first",
    "skipped_all_reduce",
    "slow_host",
    "swapped_groups",
    "tags_differ",
    "uneven_batches",
)


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(application(), ["doctor", *map(str, words)])


@pytest.fixture
def behind(tmp_path: Path) -> Path:
    done = [entry(1, "all_reduce", 10)]
    waiting = [*done, entry(2, "all_reduce", 12, "started")]
    return write(tmp_path, {0: dump(waiting), 1: dump(waiting), 2: dump(done), 3: dump(waiting)})


def test_the_report_starts_with_the_cause_and_exits_with_1(behind: Path) -> None:
    result = run(behind)

    assert result.exit_code == 1
    assert " ".join(result.output.split()).startswith(
        "rank 2 is behind (at call 1): ranks 0, 1 and 3 wait for it in all_reduce (default group, call 2)"
    )
    assert "ranks 0, 1 and 3: all_reduce at job/train.py:12 in train" in result.output


def test_dumps_of_a_job_without_a_hang_exit_with_0(tmp_path: Path) -> None:
    result = run(write(tmp_path, {rank: dump([entry(1, "all_reduce")]) for rank in range(4)}))

    assert (result.exit_code, result.output.splitlines()[0]) == (
        0,
        "no rank waits: ranks 0-3 have finished all recorded calls",
    )


@pytest.mark.parametrize("width", [40, 57, 80, 200])
def test_no_line_is_wider_than_requested_except_for_long_words(width: int) -> None:
    texts = [
        doctor_text(diagnose_hang(read_evidence([str(given)])), width)
        for given in (*HANGS[:6], *THREADS)
    ]

    wide = [line for text in texts for line in text.splitlines() if len(line) > width]
    assert [line for line in wide if len(line.split()) > 1] == []


def test_json_has_causes_waits_and_files(behind: Path) -> None:
    data: dict[str, Any] = json.loads(run(behind, "--format", "json").output)

    assert data["culprits"] == [2]
    assert data["causes"][0]["grade"] == "proved"
    assert data["causes"][0]["lines"][-1] == {
        "ranks": [0, 1, 3],
        "what": "all_reduce",
        "line": "/job/train.py:12",
        "function": "train",
    }
    assert [(w["rank"], w["call"], w["for"]) for w in data["waits"]] == [
        (0, 2, [2]),
        (1, 2, [2]),
        (3, 2, [2]),
    ]
    assert [f["kind"] for f in data["files"]] == ["Flight Recorder 2.10"] * 4


def test_the_order_of_the_files_does_not_matter(behind: Path) -> None:
    files = sorted(behind.iterdir())

    def told(paths: list[Path]) -> str:
        return doctor_text(diagnose_hang(read_evidence([str(p) for p in paths])), 100)

    assert told(files[::-1]) == told(files)


def test_the_picture_has_a_box_per_rank_and_an_arrow_to_each_awaited_rank(
    behind: Path, tmp_path: Path
) -> None:
    target = tmp_path / "hang.dot"

    assert run(behind, "--view", "wait-for", "-o", target).exit_code == 1
    text = target.read_text()

    assert [f"rank{r}" in text for r in range(4)] == [True] * 4
    assert text.count("rank0 -> rank2") == 1
    assert "rank2 -> " not in text


@pytest.mark.parametrize("name", SMALL)
def test_the_minimal_scenario_of_a_real_hang_does_not_complete(name: str) -> None:
    found = diagnose_hang(read_evidence([str(next(h for h in HANGS if h.stem == name))]))

    scenario = loads(minimal_scenario_text(found))
    done = simulate(scenario, with_values=False)

    assert done.verdict is not None
    assert done.outcome == "hangs" or done.verdict.verdict in ("deadlock", "mismatch")
    assert sum(len(done.program.code(r).calls) for r in range(done.program.world_size)) <= 12


def test_every_hang_has_a_minimal_scenario_that_hangs_or_a_reason_for_having_none() -> None:
    made, reasons = 0, []
    for hang in HANGS:
        try:
            minimal_scenario_text(diagnose_hang(read_evidence([str(hang)])))
            made += 1
        except DistsimError as refused:
            reasons.append(str(refused))

    assert made >= 18
    assert [reason for reason in reasons if "help:" not in reason] == []


def test_output_option_writes_the_scenario_or_reports_what_it_could_write(
    behind: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out" / "hang.yaml"
    out.parent.mkdir()

    assert run(behind, "-o", out).exit_code == 1
    assert out.read_text().startswith("# Written by distsim doctor")
    with pytest.raises(UsageError, match="unknown file type"):
        CliRunner().invoke(
            application(),
            ["doctor", str(behind), "-o", str(tmp_path / "x.txt")],
            catch_exceptions=False,
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no input was given"),
        (("nowhere",), "nowhere does not exist"),
        (("--pid", "999999999"), "process 999999999 does not exist"),
        (("--torchrun", "999999999"), "process 999999999 does not exist"),
    ],
)
def test_a_wrong_command_line_is_refused_with_a_remedy(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        CliRunner().invoke(application(), ["doctor", *words], catch_exceptions=False)

    assert refused.value.remedy


def test_a_trace_of_distsim_is_evidence(tmp_path: Path) -> None:
    source = "world: 3\nbackend: gloo\ntensors: {x: {shape: [4]}}\nprogram:\n- all_reduce: {tensor: x}\n- barrier: {}\n  ranks: rank != 1\n"
    (tmp_path / "s.yaml").write_text(source)
    CliRunner().invoke(
        application(), ["simulate", str(tmp_path / "s.yaml"), "--trace", str(tmp_path / "t.jsonl")]
    )

    found = diagnose_hang(read_evidence([str(tmp_path / "t.jsonl")]))

    assert found.main is not None
    assert (found.main.kind, found.culprits, found.main.number) == ("behind", (1,), 2)


def test_a_rank_that_a_trace_reports_as_killed_is_the_cause(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "world: 3\nbackend: gloo\ntensors: {x: {shape: [4]}}\n"
        "program:\n- all_reduce: {tensor: x}\n- all_reduce: {tensor: x}\n"
        "faults:\n- {rank: 1, kind: kill, before_call: 2}\n"
    )
    CliRunner().invoke(
        application(), ["simulate", str(tmp_path / "s.yaml"), "--trace", str(tmp_path / "t.jsonl")]
    )

    found = diagnose_hang(read_evidence([str(tmp_path / "t.jsonl")]))

    assert found.main is not None
    assert (found.main.kind, found.culprits) == ("crash", (1,))


def test_a_truncated_trace_is_read_up_to_its_last_complete_line(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "traces" / "collectives_gloo_2.jsonl").read_text()
    head = text.index("\n") + 1
    (tmp_path / "t.jsonl").write_text(text[: head + (len(text) - head) * 2 // 3])

    evidence = read_evidence([str(tmp_path / "t.jsonl")])

    assert evidence.files[0].problem.startswith("cut short: read up to line ")
    assert len(evidence.ranks[0].calls) > 5


def test_the_progress_file_of_a_rank_is_evidence(tmp_path: Path) -> None:
    board = ProgressFile(tmp_path / "board_rank_1", create=True)
    board.advance(RankPhase.RAISED, 3, 10)
    board.write_message("ValueError: the batch is empty")
    board.close()

    found = diagnose_hang(read_evidence([str(tmp_path)]))

    assert found.evidence.files[0].kind == "distsim progress file"
    assert found.main is not None
    assert (found.main.title, found.culprits) == (
        "rank 1 raised ValueError: the batch is empty before the others hung",
        (1,),
    )


# --- live ranks ---


@pytest.fixture
def live(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A launcher with two ranks that sleep; all are ended by their own numbers."""
    (tmp_path / "rank.py").write_text(
        "import time\n\ndef load():\n    print('up', flush=True)\n    time.sleep(120)\n\nload()\n"
    )
    (tmp_path / "launcher.py").write_text(
        "import os, subprocess, sys, time\n"
        "ranks = [subprocess.Popen([sys.executable, 'rank.py'], env={**os.environ, 'RANK': str(r)}) for r in range(2)]\n"
        "print(*[r.pid for r in ranks], flush=True)\ntime.sleep(120)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "launcher.py"], cwd=tmp_path, stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None
    words = b""
    while words.count(b"up") < 2 or not any(c in words for c in b"0123456789"):
        words += os.read(launcher.stdout.fileno(), 4096)
    time.sleep(0.1)
    ranks = rank_pids_of_launcher(launcher.pid)
    try:
        yield [launcher]
    finally:
        for pid in [*ranks, launcher.pid]:
            os.kill(pid, signal.SIGKILL)
        launcher.wait()
        launcher.stdout.close()


@pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="processes are found in /proc, which is Linux's"
)
def test_ranks_of_a_launcher_are_found_by_their_environment(
    live: list[subprocess.Popen[bytes]],
) -> None:
    assert [rank_of_pid(pid) for pid in rank_pids_of_launcher(live[0].pid)] == [0, 1]


@pytest.mark.skipif(
    shutil.which("py-spy") is None,
    reason="py-spy takes the stacks of live processes, and it is not installed",
)
def test_live_ranks_are_inspected_and_keep_running(live: list[subprocess.Popen[bytes]]) -> None:
    result = run("--torchrun", str(live[0].pid))

    assert "rank 0: outside any recorded call at rank.py:5 in load" in result.output
    assert live[0].poll() is None
    assert all(os.path.exists(f"/proc/{pid}") for pid in rank_pids_of_launcher(live[0].pid))


def test_unreadable_ranks_are_reported_in_the_exit_status(tmp_path: Path) -> None:
    """A cut dump does not prove that no rank waits."""
    cut = tmp_path / "fr_rank_0"
    cut.write_bytes(pickle.dumps(dump([entry(1, "all_reduce")]), protocol=2)[:300])
    done = run(cut)

    assert done.exit_code == 2
    assert "it is cut short" in " ".join(done.output.split())
