"""Simulated traces as event graphs: exact replay, with every gap at least zero."""

from __future__ import annotations

import numpy as np
import pytest

import distsim
from distsim.trace.recordings.readers.distsim_trace import recording_of_trace
from tests.support.source_trees import ROOT

SCENARIOS = (
    "hybrid",
    "isend_irecv_wait",
    "prefetched_all_gather",
    "put_and_signal",
    "strategies/ddp",
    "strategies/pipeline_1f1b",
    "strategies/pipeline_dualpipe",
    "strategies/transformer_small",
)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_simulated_trace_replays_exactly(name, backend):
    trace = distsim.simulate(ROOT / "scenarios" / f"{name}.yaml", backend=backend).trace
    if not (trace["returned_ns"] >= 0).any():
        pytest.skip("no call ends under this backend")
    graph = recording_of_trace(trace, name).graph
    start, end = graph.replay()

    assert np.array_equal(start, graph.columns.start)
    assert np.array_equal(end, graph.columns.end)
    assert len(graph.negative_gaps()) == 0
