"""`distsim slow` on the command line: exit status, files, errors."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import distsim
from distsim.cli.application import application


def run(*words: str):
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(application(), ["slow", *words])


def test_a_finding_gives_exit_status_1_and_no_line_beyond_80_columns():
    done = run("sample")

    assert done.exit_code == 1
    assert "Rank 2 is a straggler" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_loss_below_the_limit_gives_exit_status_0():
    assert run("sample", "--fail-above", "90%").exit_code == 0
    assert run("sample", "--fail-above", "10%").exit_code == 1


def test_json_has_the_verdict_all_ranks_and_a_breakdown_that_adds_up():
    answer = json.loads(run("sample", "--format", "json").stdout)

    assert answer["verdict"] == "straggler"
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1, 2, 3]
    total = sum(row["cost_ns"] for row in answer["breakdown"])
    assert total == pytest.approx(answer["step_ns"], abs=10)
    assert answer["recording"]["replay_error_ns"] == 0


def test_pictures_and_the_perfetto_file_are_written(tmp_path):
    names = {"svg": tmp_path / "job.svg", "html": tmp_path / "job.html"}
    for path in names.values():
        assert run("sample", "-o", str(path), "--trace", str(tmp_path / "job.json")).exit_code == 1

    assert "rank 2, step 2: +" in names["svg"].read_text()
    page = names["html"].read_text()
    assert "Rank 2 is a straggler" in page
    assert "<svg" in page
    events = json.loads((tmp_path / "job.json").read_text())["traceEvents"]
    slices = [event["name"] for event in events if event["ph"] == "X"]
    assert "waiting for rank 2" in slices
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"rank 2, recorded", "rank 2, ideal"} <= processes


def test_the_ideal_step_of_the_perfetto_file_is_shorter():
    answer = distsim.slow("sample")
    events = json.loads(answer.timeline())["traceEvents"]

    def last_end(pid: int) -> float:
        return max(e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["pid"] == pid)

    recorded, ideal = last_end(0), last_end(1_000_000)
    assert ideal < 0.2 * recorded


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "nowhere: no such file or folder"),
        (("sample", "-o", "job.png"), "job.png: unknown suffix"),
        (("sample", "--ideal", "best"), "ideal: unknown value 'best'"),
        (("sample", "--fail-above", "much"), "--fail-above much is not a share"),
    ],
)
def test_errors_name_the_cause(words, message):
    done = run(*words)

    assert isinstance(done.exception, distsim.UsageError)
    assert message in str(done.exception)


def test_doctor_points_to_slow_on_a_folder_of_profiles():
    from distsim.recordings.read_recording import SAMPLE

    assert "`distsim slow` on these files" in " ".join(distsim.doctor(SAMPLE).to_text().split())
