"""The event graph replays recordings exactly, and many what-ifs at once as one at a time."""

from __future__ import annotations

import numpy as np
import pytest

from distsim.trace.recordings.event_graph import CyclicDependencies, EventGraph
from distsim.trace.recordings.graph_builder import EventRow, GraphBuilder
from distsim.trace.recordings.readers.distsim_trace import read_distsim_trace
from tests.support.source_trees import ROOT

RECORDED = sorted((ROOT / "traces").glob("*.jsonl"))


def reference_replay(graph: EventGraph, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The definition of a replay, row by row, until nothing changes."""
    columns, count = graph.columns, len(graph)
    predecessors = [graph.before[graph.after == row].tolist() for row in range(count)]
    start, end = np.full(count, np.nan), np.full(count, np.nan)
    changed = True
    while changed:
        changed = False
        for row in range(count):
            ends = end[predecessors[row]] if predecessors[row] else columns.origin[row : row + 1]
            if np.isnan(start[row]) and not np.isnan(ends).any():
                start[row] = ends.max() + graph.gap[row]
                changed = True
            members = [row]
            if columns.meeting[row] >= 0 and columns.waits[row]:
                same = columns.meeting == columns.meeting[row]
                members += np.flatnonzero(same & columns.provides).tolist()
            if np.isnan(end[row]) and not np.isnan(start[members]).any():
                end[row] = start[members].max() + own[row]
                changed = True
    return start, end


def two_ranks_that_meet() -> GraphBuilder:
    """Rank 1 arrives 70 ns after rank 0; both leave after 30 ns more."""
    builder = GraphBuilder()
    for rank, length in ((0, 30.0), (1, 100.0)):
        work = builder.add(EventRow(rank, 0, "forward", 0, 0.0, length))
        meet = builder.add(EventRow(rank, 1, "all_reduce", 0, length, 130.0, "m"), [work])
        builder.add(EventRow(rank, 0, "optimizer", 0, 130.0, 140.0), [work, meet])
    return builder


def test_own_time_gap_and_waiting_follow_from_the_recorded_times():
    graph = two_ranks_that_meet().graph([0], {})

    assert graph.own.tolist() == [30, 30, 10, 100, 30, 10]
    assert graph.waited.tolist() == [0, 70, 0, 0, 0, 0]
    assert graph.gap.tolist() == [0] * 6


def test_a_what_if_moves_everything_that_depends_on_it():
    graph = two_ranks_that_meet().graph([0], {})
    faster = graph.own.copy()
    faster[3] = 30

    assert graph.step_times().tolist() == [140]
    assert graph.step_times(faster).tolist() == [70]


def test_a_small_send_that_returned_early_does_not_wait_for_its_receiver():
    builder = GraphBuilder()
    builder.add(EventRow(0, 0, "send", 0, 0.0, 5.0, "m"))
    late = builder.add(EventRow(1, 0, "compute", 0, 0.0, 50.0))
    builder.add(EventRow(1, 0, "recv", 0, 50.0, 60.0, "m"), [late])
    graph = builder.graph([0], {})

    assert graph.columns.waits.tolist() == [False, False, True]
    assert graph.own.tolist() == [5, 50, 10]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_runs_replay_exactly_with_every_gap_at_least_zero(path):
    graph = read_distsim_trace(path).graph
    start, end = graph.replay()

    assert np.array_equal(start, graph.columns.start)
    assert np.array_equal(end, graph.columns.end)
    assert len(graph.negative_gaps()) == 0


@pytest.mark.parametrize("path", RECORDED[:3], ids=lambda path: path.stem)
def test_what_ifs_agree_with_the_definition_row_by_row(path):
    graph = read_distsim_trace(path).graph
    factors = np.random.default_rng(1).uniform(0, 3, (len(graph), 3))
    own = np.rint(graph.own[:, None] * factors)

    start, end = graph.replay(own)

    for column in range(3):
        expected_start, expected_end = reference_replay(graph, own[:, column])
        assert np.array_equal(start[:, column], expected_start)
        assert np.array_equal(end[:, column], expected_end)


def test_durations_of_consecutive_steps_add_up_to_the_whole_time():
    graph = read_distsim_trace(ROOT / "traces" / "ring_gloo_4.jsonl").graph

    assert graph.step_times().sum() == graph.columns.end.max()


def test_a_cycle_is_refused():
    builder = GraphBuilder()
    a = builder.add(EventRow(0, 0, "a", 0, 0.0, 0.0))
    b = builder.add(EventRow(0, 0, "b", 0, 0.0, 0.0), [a])
    builder.before.append(b)
    builder.after.append(a)

    with pytest.raises(CyclicDependencies, match="2 of 2"):
        builder.graph([0], {}).replay()
