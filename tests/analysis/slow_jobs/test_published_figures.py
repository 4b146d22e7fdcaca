"""The published figures of arXiv 2505.05713 (ByteDance-Seed/StragglerAnalysis, folder `data`).

The data are not part of this project. DISTSIM_STRAGGLER_DATA names a folder with them.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import distsim
from distsim.analysis.slow_jobs.ideal_times import mean_ideal
from distsim.analysis.slow_jobs.peer_groups import find_peer_groups
from distsim.trace.recordings.readers.operation_table import read_operation_table

DATA = Path(os.environ.get("DISTSIM_STRAGGLER_DATA", "/nonexistent"))
TRACES = ("AR", "SE", "ST")
#: The published data are float32.
TOLERANCE = 1e-5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason="DISTSIM_STRAGGLER_DATA names no folder"),
]


@cache
def published(name: str, kind: str = "result") -> dict[str, object]:
    return json.loads((DATA / f"{kind}-{name}.json").read_text())


class Job:
    """The own times of a trace, recorded and ideal, and the step times of what-ifs in seconds."""

    def __init__(self, name: str) -> None:
        path = DATA / f"trace-{name}.parquet"
        self.recording = read_operation_table(path)
        self.graph = self.recording.graph
        groups = find_peer_groups(self.graph, np.ones(len(self.graph.steps), dtype=bool))
        self.own = self.graph.own
        self.ideal = mean_ideal(groups, self.own, frozenset({"layernorm-grads-all-reduce"}))
        self.stage = np.array([self.recording.stages[int(r)] for r in self.graph.columns.rank])
        from pyarrow import parquet

        self.dp_rank = parquet.read_table(path, columns=["dp_rank"])["dp_rank"].to_numpy()
        self.label = np.array(self.graph.labels)[self.graph.columns.label]

    def seconds(self, *own: np.ndarray, late: bool = False) -> np.ndarray:
        gap = self.graph.gap if late else np.zeros(len(self.graph))
        return self.graph.step_times(np.stack(own, axis=1), gap) / 1e9

    def rows(self, dimension: str, key: str) -> np.ndarray:
        if dimension == "optype":
            if key.endswith("-pp-comm"):
                kind = key.removesuffix("-pp-comm")
                return np.isin(self.label, [f"{kind}-send", f"{kind}-recv"])
            return self.label == key
        return (self.dp_rank if dimension == "dp_rank" else self.stage) == int(key)


@cache
def job(name: str) -> Job:
    return Job(name)


@pytest.mark.parametrize("name", TRACES)
def test_step_times_recorded_without_delay_and_ideal(name):
    one, expected = job(name), published(name)
    recorded = one.seconds(one.own, late=True)[:, 0]
    no_delay, ideal = one.seconds(one.own, one.ideal).T
    columns = {"step_t_base": recorded, "step_t_nodelay": no_delay, "step_t_noblk": ideal}

    for key, times in columns.items():
        for step, time in zip(one.graph.steps, times, strict=True):
            assert time == pytest.approx(expected[key][str(step)], rel=TOLERANCE), (key, step)
    assert no_delay.mean() / ideal.mean() == pytest.approx(
        expected["blocking_slowdown"], rel=TOLERANCE
    )


@pytest.mark.parametrize("dimension", ["optype", "dp_rank", "stage"])
@pytest.mark.parametrize("name", TRACES)
def test_slowdowns_by_operation_replica_and_stage_also_by_step(name, dimension):
    one, expected = job(name), published(name)
    totals = expected[f"blocking_decompose_by_{dimension}"]
    by_step = expected[f"blocking_decompose_by_{dimension}_per_step"]
    kept = [np.where(one.rows(dimension, key), one.own, one.ideal) for key in totals]
    times = one.seconds(one.ideal, *kept)
    ideal = times[:, 0]

    for column, key in enumerate(totals, start=1):
        ratio = times[:, column].mean() / ideal.mean()
        assert ratio == pytest.approx(totals[key], rel=TOLERANCE), key
        for i, step in enumerate(one.graph.steps):
            assert times[i, column] / ideal[i] == pytest.approx(
                by_step[str(step)][key], rel=TOLERANCE
            ), (key, step)


@pytest.mark.parametrize("name", TRACES)
def test_the_share_of_the_last_stage(name):
    """M_S: what the last stage alone removes and adds."""
    one, expected = job(name), published(name, "ms")
    last = one.stage == one.stage.max()
    removed, added = np.where(last, one.ideal, one.own), np.where(last, one.own, one.ideal)
    original, ideal, removal, addition = one.seconds(one.own, one.ideal, removed, added).mean(0)

    assert original == pytest.approx(expected["tori"], rel=TOLERANCE)
    assert removal == pytest.approx(expected["trem"], rel=TOLERANCE)
    assert addition == pytest.approx(expected["tadd"], rel=TOLERANCE)
    share = (original - removal) / (original - ideal)
    assert share == pytest.approx(expected["Ms"], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "verdict", "ranks", "share"),
    [
        ("AR", "straggler", (0,), 0.50),
        ("SE", "uneven", None, 0.24),
        ("ST", "long stage", (6, 7), 0.13),
    ],
)
def test_the_published_root_cause_is_the_first_finding(name, verdict, ranks, share):
    answer = distsim.slow(DATA / f"trace-{name}.parquet")
    first = answer.findings[0]

    assert answer.verdict == first.kind == verdict
    assert ranks is None or first.ranks == ranks
    assert first.share == pytest.approx(share, abs=0.01)


def test_the_straggler_without_a_trace_is_found_and_healthy_workers_are_not(tmp_path):
    from pyarrow import compute, parquet

    def without(name: str, rank: int) -> distsim.api.results.SlowAnswer:
        table = parquet.read_table(DATA / f"trace-{name}.parquet")
        path = tmp_path / f"{name}-{rank}.parquet"
        parquet.write_table(table.filter(compute.not_equal(table["rank"], rank)), path)
        return distsim.slow(path)

    assert without("AR", 0).findings[0].kind == "missing rank"
    assert without("AR", 0).findings[0].ranks == (0,)
    for name, rank in (("AR", 20), ("ST", 7), ("ST", 2), ("SE", 80)):
        kinds = {finding.kind for finding in without(name, rank).findings}
        assert "missing rank" not in kinds, (name, rank)
