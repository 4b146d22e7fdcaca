"""Exports of Nsight Systems: ranks, payloads of NCCL, missing tables, and foreign databases."""

from __future__ import annotations

import os
import sqlite3

import numpy as np
import pytest

import distsim
from distsim.common.errors import UsageError
from distsim.trace.recordings.read_recording import read_recording
from tests.support.nsight_exports import (
    BACKWARD,
    FORWARD,
    REDUCED_BYTES,
    STEPS,
    write_job,
)


def edit(path, *statements):
    database = sqlite3.connect(path)
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()


@pytest.mark.parametrize("one_file", [False, True])
@pytest.mark.parametrize("nccl", ["payloads", "ranges", "kernels"])
def test_the_slow_gpu_is_found(tmp_path, one_file, nccl):
    answer = distsim.slow(write_job(tmp_path, (1.0, 1.0, 1.5), one_file=one_file, nccl=nccl))

    assert answer.verdict == "straggler"
    assert answer.findings[0].ranks == (2,)
    assert answer.findings[0].cost_ns == pytest.approx((FORWARD + BACKWARD) * 500, rel=0.02)
    assert answer.raw.counted_steps == STEPS
    assert answer.raw.replay_error_ns == 0
    assert len(answer.raw.recording.graph.negative_gaps()) == 0


def test_equal_gpus_have_no_straggler(tmp_path):
    assert distsim.slow(write_job(tmp_path, (1.0, 1.0, 1.0))).verdict == "none"


def test_payloads_give_sizes_ranks_and_the_size_of_the_job(tmp_path):
    folder = write_job(tmp_path, (1.0, 1.0, 1.0))
    (folder / "report.1.sqlite").rename(folder / "other-name.sqlite")
    (folder / "report.2.sqlite").unlink()
    recording = read_recording([folder])

    assert recording.graph.ranks == [0, 1]
    assert recording.missing_ranks == (2,)
    assert set(recording.graph.columns.nbytes[~recording.graph.is_work]) == {REDUCED_BYTES}
    assert recording.format == "Nsight Systems export"
    assert not recording.notes


@pytest.mark.parametrize(
    ("nccl", "note"),
    [
        ("kernels", "contains no NVTX ranges of NCCL, so sizes and communicators are unknown"),
        ("ranges", "5 of 5 NCCL calls have no readable payload, so their sizes are unknown"),
    ],
)
def test_what_is_missing_is_noted(tmp_path, nccl, note):
    recording = read_recording([write_job(tmp_path, (1.0, 1.0), nccl=nccl)])

    assert any(note in line for line in recording.notes)


def test_processes_without_a_rank_are_numbered_by_their_gpus_with_a_note(tmp_path):
    recording = read_recording([write_job(tmp_path, (1.0, 1.0), one_file=True, nccl="kernels")])

    assert recording.graph.ranks == [0, 1]
    assert any("numbered in the order of their GPUs" in line for line in recording.notes)


def test_a_payload_that_does_not_fit_its_schema_is_not_used(tmp_path):
    folder = write_job(tmp_path, (1.0, 1.0))
    for path in folder.iterdir():
        edit(
            path, "UPDATE NVTX_EVENTS SET binaryData = x'00' || binaryData WHERE text LIKE 'nccl%'"
        )
    recording = read_recording([folder])

    assert set(recording.graph.columns.nbytes[~recording.graph.is_work]) == {0}
    assert recording.graph.ranks == [0, 1]


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        (["DROP TABLE StringIds"], "no export of Nsight Systems"),
        (["DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL"], "without GPU kernels"),
        (["DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL"], "contains no GPU kernels"),
        (
            ["ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN streamId"],
            "has no column streamId",
        ),
        (
            [
                "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME TO k",
                "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS SELECT * FROM k",
            ],
            "without GPU kernels",
        ),
    ],
)
def test_a_missing_part_is_named_in_one_line(tmp_path, statements, reason):
    file = write_job(tmp_path, (1.0,)) / "report.0.sqlite"
    edit(file, *statements)

    with pytest.raises(distsim.UsageError, match=reason) as error:
        distsim.slow(file)

    assert str(file) in error.value.message
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    "content", [b"", b"no database at all", b"SQLite format 3\x00" + b"\x07" * 600]
)
def test_a_file_that_is_no_database_is_refused(tmp_path, content):
    (tmp_path / "rank0.sqlite").write_bytes(content)

    with pytest.raises(distsim.UsageError, match=r"rank0.sqlite: (no readable SQLite|SQLite data)"):
        distsim.slow(tmp_path)


def test_values_that_are_not_times_are_skipped(tmp_path):
    folder = write_job(tmp_path, (1.0, 1.0))
    edit(
        folder / "report.0.sqlite",
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ('x', x'00', 0, 0, 7, 1, 1, 1, 1)",
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (-5, 9, 0, 0, 7, NULL, 'pid', 1, 1)",
        "INSERT INTO NVTX_EVENTS (start, end, eventType, text) VALUES ('a', NULL, 59, x'ff')",
    )

    assert distsim.slow(folder).verdict == "none"


def test_a_report_file_next_to_its_export_causes_no_note(tmp_path):
    folder = write_job(tmp_path, (1.0, 1.0))
    (folder / "report.0.nsys-rep").write_bytes(b"")

    assert not read_recording([folder]).notes


def test_the_exported_times_are_those_of_the_graph(tmp_path):
    graph = read_recording([write_job(tmp_path, (1.0, 1.25))]).graph

    ends = graph.columns.end[~graph.is_work].reshape(2, STEPS)
    assert np.array_equal(ends[0], ends[1])
    assert graph.waited.max() == (FORWARD + BACKWARD) * 250


@pytest.mark.parametrize("name", ["x.sqlite", "x.0.et", "x.json"])
def test_a_pipe_without_a_writer_or_an_endless_device_is_refused_at_once(tmp_path, name):
    path = tmp_path / name
    if name == "x.sqlite":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")

    with pytest.raises(UsageError, match="device"):
        read_recording([path])
