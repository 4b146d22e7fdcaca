"""Operation tables: columns, dependencies of a 1F1B schedule, CSV and Parquet."""

from __future__ import annotations

import csv

import numpy as np
import pytest

import distsim
from distsim.trace.recordings.readers.operation_table import COLUMNS, read_operation_table


def pipeline_rows(slow_worker: tuple[int, int] | None = None, steps: int = 6):
    """Two stages, two replicas, two micro-batches; durations in seconds.

    Stage 0 does F0 F1 B0 B1, stage 1 does F0 B0 F1 B1. Transfers take 1 ms after both sides are
    there. A slow worker's computations take three times as long.
    """
    rows = []

    def put(worker, step, optype, number, start, end):
        dp, stage = worker
        rows.append([dp, stage, 2 * dp + stage, step, optype, start, end - start, number, -1])

    for step in range(steps):
        for dp in range(2):
            slow = [3.0 if slow_worker == (dp, stage) else 1.0 for stage in range(2)]
            f0, b0, f1, b1 = 0.1 * slow[0], 0.2 * slow[0], 0.1 * slow[1], 0.2 * slow[1]
            first, second = (dp, 0), (dp, 1)
            sent = []
            for mb in range(2):
                put(first, step, "forward-compute", mb, f0 * mb, f0 * (mb + 1))
                sent.append(f0 * (mb + 1))
            free, ready = 0.0, []
            for mb in range(2):
                arrived = max(sent[mb], free) + 0.001
                put(first, step, "forward-send", mb, sent[mb], arrived)
                put(second, step, "forward-recv", mb, free, arrived)
                put(second, step, "forward-compute", mb, arrived, arrived + f1)
                put(second, step, "backward-compute", mb, arrived + f1, arrived + f1 + b1)
                free = arrived + f1
                ready.append(arrived + f1 + b1)
            host = sent[-1]
            for mb in range(2):
                asked = sent[0] if mb == 0 else host - b0
                arrived = max(ready[mb], host) + 0.001
                put(second, step, "backward-send", mb, ready[mb], arrived)
                put(first, step, "backward-recv", mb, min(asked, arrived), arrived)
                put(first, step, "backward-compute", mb, arrived, arrived + b0)
                host = arrived + b0
            ends = {first: host, second: ready[-1]}
            for worker, end in ends.items():
                put(worker, step, "optimizer", 0, end, end + 0.01)
    return rows


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    return path


def test_a_schedule_replays_exactly(tmp_path):
    recording = read_operation_table(write(tmp_path / "t.csv", pipeline_rows()))
    graph = recording.graph
    start, end = graph.replay()

    assert recording.stages == {0: 0, 1: 1, 2: 0, 3: 1}
    assert np.array_equal(start, graph.columns.start)
    assert np.array_equal(end, graph.columns.end)
    assert graph.independent_steps


def test_a_slow_worker_of_a_pipeline_is_the_straggler(tmp_path):
    answer = distsim.slow(write(tmp_path / "t.csv", pipeline_rows(slow_worker=(1, 0))))

    assert answer.verdict == "straggler"
    assert answer.findings[0].ranks == (2,)
    assert "All phases are slow" in answer.findings[0].hints[0]


def test_parquet_and_csv_give_the_same_answer(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = pipeline_rows(slow_worker=(0, 1))
    columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    parquet.write_table(arrow.table(columns), tmp_path / "t.parquet")

    from_csv = distsim.slow(write(tmp_path / "t.csv", rows)).to_json()
    from_parquet = distsim.slow(tmp_path / "t.parquet").to_json()

    assert from_csv["ranks"] == from_parquet["ranks"]


def changed(rows, column, value):
    """The rows with another value in the third one, which is row 4 of the file."""
    third = list(rows[2])
    third[COLUMNS.index(column)] = value
    return [*rows[:2], third, *rows[3:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [row[:-1] for row in rows], "no column mc"),
        (lambda rows: [[*row[:-1], 1] for row in rows], "interleaved"),
        (
            lambda rows: [[*row[:4], "teleport", *row[5:]] for row in rows],
            "unknown optype teleport",
        ),
        (
            lambda rows: changed(rows, "start_ts", "soon"),
            "row 4, column start_ts: soon is not a number",
        ),
        (
            lambda rows: changed(rows, "duration", "nan"),
            "row 4, column duration: nan is not a number",
        ),
        (
            lambda rows: changed(rows, "duration", -1),
            "row 4, column duration: -1 is not a number from",
        ),
        (
            lambda rows: changed(rows, "start_ts", -0.5),
            "row 4, column start_ts: -0.5 is not a number",
        ),
        (lambda rows: changed(rows, "duration", 1e300), "row 4, column duration: 1e.300 is not"),
        (lambda rows: changed(rows, "rank", 131072), "row 4, column rank: 131072 is not a whole"),
        (lambda rows: changed(rows, "stage", -2), "row 4, column stage: -2 is not a whole"),
        (lambda rows: changed(rows, "dp_rank", 0.5), "row 4, column dp_rank: 0.5 is not a whole"),
        (lambda rows: [*rows[:3], *rows[2:]], "rows 4 and 5 are the same operation"),
    ],
)
def test_a_table_that_cannot_be_read_names_the_reason(tmp_path, change, message):
    rows = change(pipeline_rows())
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS[: len(rows[0])])
        writer.writerows(rows)

    with pytest.raises(distsim.UsageError, match=message):
        distsim.slow(path)
