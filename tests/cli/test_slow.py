"""`distsim slow` on the command line: exit status, files, errors."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

import distsim
from distsim.cli.application import application
from distsim.trace.recordings.read_recording import SAMPLE
from tests.support.chakra_traces import write_linked_job
from tests.support.nsight_exports import write_job


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
    from distsim.trace.recordings.read_recording import SAMPLE

    assert "`distsim slow` on these files" in " ".join(distsim.doctor(SAMPLE).to_text().split())


@pytest.mark.parametrize("write", [write_linked_job, write_job])
def test_doctor_points_to_slow_on_a_folder_of_other_recordings(tmp_path, write):
    folder = write(tmp_path, (1.0, 1.0))

    assert "`distsim slow` on these files" in " ".join(distsim.doctor(folder).to_text().split())


def sample_copy(folder):
    """The four recordings of the sample in a folder of their own."""
    folder.mkdir()
    for file in SAMPLE.glob("*.json*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("option", ["--trace", "-o"])
def test_no_recording_is_ever_overwritten(tmp_path, option):
    job = sample_copy(tmp_path / "job")
    recording = job / ("rank0.json" if option == "--trace" else "rank0.svg")
    shutil.copy(next(job.glob("*.json*")), recording)
    before = recording.read_bytes()

    done = run(str(job), option, str(recording))

    assert isinstance(done.exception, distsim.UsageError)
    assert "is an input file" in done.exception.message
    assert recording.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trace.json.gz", "unknown suffix"),
        ("nowhere/trace.json", "does not exist"),
    ],
)
def test_the_name_of_the_trace_is_checked_before_anything_is_read(tmp_path, name, message):
    done = run("nothing-is-read", "--trace", str(tmp_path / name))

    assert isinstance(done.exception, distsim.UsageError)
    assert message in done.exception.message


def test_picture_and_trace_need_two_files(tmp_path):
    (tmp_path / "both.svg").symlink_to(tmp_path / "both.json")

    done = run("sample", "-o", str(tmp_path / "both.svg"), "--trace", str(tmp_path / "both.json"))

    assert isinstance(done.exception, distsim.UsageError)
    assert "-o and --trace" in done.exception.message


def test_suffixes_may_be_in_upper_case(tmp_path):
    assert run("sample", "-o", str(tmp_path / "JOB.HTML")).exit_code == 1
    assert "Rank 2 is a straggler" in (tmp_path / "JOB.HTML").read_text()


def test_a_trace_with_calls_that_never_ended_is_a_hang(tmp_path):
    path = tmp_path / "hang.jsonl"
    scenario = tmp_path / "hang.yaml"
    scenario.write_text(
        "world: 2\nbackend: gloo\ntensors: {x: {shape: [4]}}\nprogram:\n"
        "- all_reduce: {tensor: x}\n- all_reduce: {tensor: x}\n  ranks: rank == 0\n"
    )
    CliRunner().invoke(application(), ["simulate", str(scenario), "--trace", str(path)])

    done = run(str(path), "--fail-above", "90%")

    assert done.exit_code == 1
    assert done.stdout.startswith("This job hangs: use `distsim doctor")
