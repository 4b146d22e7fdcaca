"""Garbage collection, checkpoints and data loading that a profile shows are named as causes."""

from __future__ import annotations

from dataclasses import replace

import pytest

import distsim
from distsim.analysis.slow_jobs.activity_hints import activity_hint
from distsim.analysis.slow_jobs.analyze import analyze_recording
from distsim.trace.recordings.graph_builder import EventRow, GraphBuilder
from distsim.trace.recordings.readers.distsim_trace import recording_of_trace
from distsim.trace.recordings.recording import (
    CHECKPOINT,
    DATA_LOADING,
    GARBAGE_COLLECTION,
    Recording,
)
from tests.support.sample_profiles import change_profile, copy_of_sample


def add_function(folder, rank, *functions, steps=None):
    """Add Python functions to the long pause of each step of a sample profile, each 50 ms long."""

    def edit(data):
        events = data["traceEvents"]
        marks = [e for e in events if str(e.get("name")).startswith("ProfilerStep#")]
        for mark in marks[:steps]:
            for i, name in enumerate(functions):
                start = mark["ts"] + 5_000 + i * 52_000
                event = {"ph": "X", "cat": "python_function", "name": name, "tid": mark["tid"]}
                events.append({**event, "pid": mark["pid"], "ts": start, "dur": 50_000})

    change_profile(folder / f"rank{rank}.json.gz", edit)


@pytest.mark.parametrize(
    ("functions", "hint"),
    [
        (("Python GC", "<built-in function collect>"), "Python's garbage collector takes 100 ms"),
        (("torch/serialization.py(944): save",) * 2, "Saving a checkpoint takes 100 ms"),
        (
            ("torch/distributed/checkpoint/state_dict_saver.py(87): save",) * 2,
            "Saving a checkpoint",
        ),
    ],
)
def test_a_python_function_in_the_pause_of_the_straggler_is_its_cause(tmp_path, functions, hint):
    folder = copy_of_sample(tmp_path / "job")
    add_function(folder, 2, *functions)
    answer = distsim.slow(folder)

    assert answer.findings[0].ranks == (2,)
    assert answer.findings[0].hints[0].startswith(hint)
    assert "0 ns on the peers" in answer.findings[0].hints[0]


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (1,)])
def test_an_activity_that_the_peers_show_too_or_that_is_elsewhere_is_no_cause(tmp_path, ranks):
    folder = copy_of_sample(tmp_path / "job")
    for rank in ranks:
        add_function(folder, rank, "Python GC", "Python GC")

    assert "No operation is recorded in this gap" in distsim.slow(folder).findings[0].hints[0]


def test_nested_functions_count_once(tmp_path):
    folder = copy_of_sample(tmp_path / "job")
    add_function(folder, 2, "Python GC")
    add_function(folder, 2, "<built-in function collect>")
    recording = distsim.slow(folder).raw.recording

    assert recording.activities[2, 0][GARBAGE_COLLECTION] == pytest.approx(50e6)


def test_the_data_loader_is_named(tmp_path):
    recording = distsim.slow("sample").raw.recording
    times = {(rank, step): {DATA_LOADING: 1e6} for rank in range(4) for step in range(6)}
    times |= {(2, step): {DATA_LOADING: 90e6, CHECKPOINT: 10e6} for step in range(6)}
    hint = activity_hint(replace(recording, activities=times), 2, (0, 1, 3), range(6), 120e6)

    assert hint.startswith("Waiting for the DataLoader takes 90 ms per step here, and 1 ms on the")


def uneven_recording():
    """Each of 8 ranks computes for 5 ms longer in its own steps."""
    trace = distsim.simulate(
        "world: 8\nbackend: gloo\niterations: 16\ntensors: {x: {shape: [256]}}\nprogram:\n"
        "- compute: {time: '(iteration % 8 == rank) * 5 ms + 10 ms'}\n- all_reduce: x\n",
        verdict=False,
    ).trace
    return recording_of_trace(trace, "run.jsonl")


def test_garbage_collection_on_different_ranks_makes_work_uneven():
    recording = uneven_recording()
    collected = {(step % 8, step): {GARBAGE_COLLECTION: 5e6} for step in range(16)}

    assert analyze_recording(recording).verdict != "uneven"
    found = analyze_recording(replace(recording, activities=collected))
    assert found.verdict == "uneven"
    assert "on different ranks in different steps (8 ranks)" in found.findings[0].hints[0]


def recording_of_unequal_lengths(related_ranks):
    """Four ranks whose forward times vary from step to step.

    Backward takes twice as long as forward on the first ``related_ranks`` ranks, and varies
    independently of forward on the others.
    """
    builder = GraphBuilder()
    last = {rank: [] for rank in range(4)}
    start = 0.0
    for step in range(16):
        ends = {}
        for rank in range(4):
            varying = 10e6 * (1 + (step + rank) % 4)
            other = 10e6 * (1 + (step // 4 + rank) % 4)
            middle = start + varying
            ends[rank] = middle + 2 * (varying if rank < related_ranks else other)
            forward = EventRow(rank, 0, "forward", step, start, middle)
            backward = EventRow(rank, 0, "backward", step, middle, ends[rank])
            last[rank] = [builder.add(forward, last[rank])]
            last[rank] = [builder.add(backward, last[rank])]
        end = max(ends.values()) + 1e6
        for rank in range(4):
            row = EventRow(rank, 1, "all_reduce", step, ends[rank], end, (step, 0), 4096)
            last[rank] = [builder.add(row, last[rank])]
        start = end
    return Recording(builder.graph(list(range(16)), {}), "test", ("f",), world_size=4)


@pytest.mark.parametrize(("related_ranks", "is_named"), [(4, True), (3, True), (2, False)])
def test_unequal_lengths_are_named_if_backward_follows_forward_on_three_quarters_of_the_ranks(
    related_ranks, is_named
):
    answer = analyze_recording(recording_of_unequal_lengths(related_ranks))

    hints = [finding.hints[0] for finding in answer.findings if finding.kind == "uneven"]
    assert any("sequences of unequal length" in hint for hint in hints) == is_named
