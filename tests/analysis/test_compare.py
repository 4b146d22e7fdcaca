"""Two runs side by side: alignment, where they part, and a difference in makespan that adds up."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from distsim.analysis.run_comparison import compare_runs
from distsim.backends import BACKEND_PROFILES
from distsim.engine import run_program
from distsim.hardware.cluster import cluster_from
from distsim.hardware.cost import CostModel
from distsim.output.pictures.run_overlay import overlay_svg
from distsim.output.text.comparison import compare_json, compare_text
from distsim.program.from_calls import build_program
from distsim.scenario import load, loads
from distsim.simulation.simulate_scenario import simulate
from distsim.trace.jsonl import read_trace
from distsim.trace.model import Trace
from tests.support.harness import draws
from tests.support.random_programs import any_programs

NAMES = ("a.jsonl", "b.jsonl")


def trace(programs: Any, backend: str = "gloo", cluster: Any = "cpu-10gbe", **more: Any) -> Trace:
    program = build_program(len(programs), programs, backend=backend, **more)
    return run_program(
        program,
        BACKEND_PROFILES[backend],
        CostModel(cluster_from(cluster), program.world_size, program.local_size),
    ).trace


def step(compute_ns: int = 1_000_000, numel: int = 1 << 20) -> list[dict[str, Any]]:
    return [
        {"op": "compute", "time_ns": compute_ns, "name": "forward"},
        {"op": "all_reduce", "numel": numel},
    ]


def test_a_run_does_not_differ_from_itself() -> None:
    found = compare_runs(trace({0: step(), 1: step()}), trace({0: step(), 1: step()}))

    assert found.same
    assert len(found.pairs) == 4
    assert (found.divergences, found.worst_ns, [c.delta_ns for c in found.causes]) == (
        (),
        0,
        [0, 0],
    )
    assert "the same" in compare_text(found, NAMES)


def test_slower_compute_is_named_as_the_whole_cause() -> None:
    found = compare_runs(trace({0: step(), 1: step()}), trace({0: step(), 1: step(1_500_000)}))

    first = found.causes[0]
    assert not found.same
    assert (first.why, first.name, first.delta_ns) == ("compute", "forward", 500_000)
    assert found.divergences[0].kind == "time"
    assert (found.divergences[0].rank, found.a.row(found.divergences[0].a).name) == (1, "forward")
    assert "+500 us" in compare_text(found, NAMES)


def test_a_slower_network_is_reported_as_transfer_time_of_the_operation_and_size() -> None:
    slow = {"preset": "cpu-10gbe", "intra": {"bandwidth": "0.4 GB/s"}}
    found = compare_runs(trace({0: step(), 1: step()}), trace({0: step(), 1: step()}, cluster=slow))

    first = found.causes[0]
    assert (first.why, first.op, first.group, first.nbytes) == (
        "transfer",
        "all_reduce",
        "world",
        4 << 20,
    )
    assert first.delta_ns == found.makespans_ns[1] - found.makespans_ns[0]


@given(any_programs(), any_programs())
@settings(max_examples=draws(40), deadline=None)
def test_the_causes_sum_to_the_difference_of_the_makespans(one: Any, other: Any) -> None:
    """Whatever the two runs are, hung ones included."""
    a, b = trace(one.programs, groups=one.groups), trace(other.programs, groups=other.groups)
    found = compare_runs(a, b)

    assert sum(c.delta_ns for c in found.causes) == b.makespan_ns - a.makespan_ns
    assert {i for i, _ in found.pairs} | set(found.only_a) == set(range(len(a)))
    assert {j for _, j in found.pairs} | set(found.only_b) == set(range(len(b)))
    assert max(map(len, compare_text(found, NAMES).splitlines())) <= 80
    assert compare_runs(a, a).same


def test_a_cause_that_takes_time_in_a_run_has_calls_in_that_run() -> None:
    """Also in a recording, where a rank may wait before a call and then be at it."""
    recorded = read_trace("traces/hybrid_gloo_4.jsonl")
    found = compare_runs(
        recorded, simulate(load("scenarios/hybrid.yaml", sets=("backend=gloo",))).run.trace
    )

    times = [(c.a_ns, c.a_calls) for c in found.causes] + [
        (c.b_ns, c.b_calls) for c in found.causes
    ]
    assert [pair for pair in times if pair[0] and not pair[1]] == []
    assert {c.name for c in found.causes if c.a_calls and c.b_calls} >= {
        "forward",
        "backward",
        "optimizer",
    }


def test_a_missing_call_is_reported_where_it_is_missing() -> None:
    longer = [*step(), {"op": "barrier"}, *step()]
    shorter = [*step(), *step()]
    found = compare_runs(trace({0: longer, 1: longer}), trace({0: shorter, 1: shorter}))

    assert [found.a.row(i).op for i in found.only_a] == ["barrier", "barrier"]
    assert (found.only_b, len(found.pairs)) == ((), 8)
    assert any(p.kind == "call" and "barrier only in A" in p.text for p in found.divergences)


def test_a_different_match_of_equal_calls_is_reported_even_if_all_times_are_equal() -> None:
    """Two any-source receives take the two senders in the other order."""
    receiver = [{"op": "recv", "peer": None}, {"op": "recv", "peer": None}]
    early, late = (
        [{"op": "send", "peer": 0}],
        [{"op": "compute", "time_ns": 50}, {"op": "send", "peer": 0}],
    )
    found = compare_runs(
        trace({0: receiver, 1: early, 2: late}),
        trace({0: receiver, 1: late, 2: early}),
        tolerance=10.0,
    )

    met = [p for p in found.divergences if p.kind == "met"]
    assert [(p.rank, found.a.row(p.a).op) for p in met][:1] == [(0, "recv")]
    assert "met send of rank 1 in A, send of rank 2 in B" in met[0].text


def test_values_are_compared_if_both_runs_record_them() -> None:
    one = trace({0: step(), 1: step()})
    a, b = (
        Trace({**one.header, "values": {"x": {"0": value, "1": 7}}}, one.tables, one.columns)
        for value in (3, 4)
    )

    found = compare_runs(a, b)

    assert [(p.kind, p.rank, p.text) for p in found.divergences] == [
        ("value", 0, "x, element 0: 3 in A, 4 in B")
    ]
    assert compare_runs(a, one).same


def test_tolerance_is_relative_to_the_first_makespan() -> None:
    a, b = trace({0: step(), 1: step()}), trace({0: step(), 1: step(1_100_000)})
    share = 100_000 / a.makespan_ns

    assert compare_runs(a, b, tolerance=share * 1.001).same
    assert not compare_runs(a, b, tolerance=share * 0.999).same


def test_a_different_outcome_is_a_difference() -> None:
    send, recv = {"op": "send", "peer": 1}, {"op": "recv", "peer": 0}
    ends = trace({0: [send], 1: [recv]})
    hangs = trace({0: [recv | {"peer": 1}], 1: [recv]})

    found = compare_runs(ends, hangs, tolerance=100.0)

    assert not found.same
    assert "it hung" in compare_text(found, NAMES)
    assert [p.kind for p in found.divergences] == ["call", "met", "time"] or {
        p.kind for p in found.divergences
    } >= {"call"}


def test_comparing_a_run_that_stopped_reports_where_first_and_folds_the_rest() -> None:
    """The cause is the rank at work alone, though those that wait for it have waited for less long
    than it works.
    """
    text = "world: 3\niterations: 20\ntensors: {x: {shape: [256]}}\nprogram:\n  - compute: {name: step, time: 1 ms}\n  - all_reduce: x\n"
    good = simulate(loads(text), backend="gloo", with_values=False).run.trace
    columns = {name: column.copy() for name, column in good.columns.items()}
    late = columns["iteration"] > 15
    mine = (columns["rank"] == 0) & (columns["iteration"] == 15)
    waits = (columns["rank"] > 0) & (columns["iteration"] == 15) & (columns["nbytes"] > 0)
    for name in ("posted_ns", "returned_ns", "started_ns", "finished_ns"):
        columns[name][late | (mine & (columns["nbytes"] > 0))] = -1
        if name in ("returned_ns", "finished_ns"):
            columns[name][mine | waits] = -1
    bad = Trace(
        {**good.header, "outcome": "hangs", "complete": False, "makespan_ns": 20_000_000},
        good.tables,
        columns,
    )

    found = compare_runs(bad, good)
    told = compare_text(found, NAMES)

    first = " ".join(told.split("\nA: ")[0].split())
    assert (
        first
        == "A stopped in iteration 15: rank 0 in step, line 5; then ranks 1 and 2 in all_reduce, line 6, iteration 15"
    )
    assert "are not listed: they follow from the stop of A" in " ".join(told.split())
    assert "partial: it hung, after" in told
    assert {p.a for p in found.independent_divergences} <= set(
        np.flatnonzero(columns["finished_ns"] >= 0).tolist()
    )
    given = compare_json(compare_runs(good, bad), NAMES)["stopped"]
    assert isinstance(given, dict)
    assert (given["run"], given["stops"][0]["rank"], given["stops"][0]["iteration"]) == ("B", 0, 15)


def test_json_and_text_report_the_same_differences() -> None:
    found = compare_runs(trace({0: step(), 1: step()}), trace({0: step(), 1: step(1_500_000)}))

    data = compare_json(found, NAMES)

    assert (data["same"], data["makespan_ns"], data["aligned"]) == (
        False,
        list(found.makespans_ns),
        4,
    )
    assert data["causes"][0]["delta_ns"] == 500_000
    assert data["divergences"][0]["a"]["op"] == "compute"


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_overlay_draws_two_lanes_per_rank_and_marks_both_ends(backend: str) -> None:
    found = compare_runs(
        trace({0: step(), 1: step()}, backend), trace({0: step(), 1: step(1_500_000)}, backend)
    )

    picture = ET.fromstring(overlay_svg(found, NAMES))

    texts = [e.text for e in picture.iter() if e.tag.endswith("text")]
    ends = [
        e for e in picture.iter() if e.get("stroke-width") == "1.6" and e.get("x1") == e.get("x2")
    ]
    assert texts.count("A") == texts.count("B") == 2
    assert (
        len({e.get("x1") for e in ends})
        == len({e.get("stroke-dasharray") for e in ends})
        == len(ends)
        == 2
    )
    assert sum(t == "forward" for t in texts) == 4


def test_comparing_with_a_trace_simulates_under_the_backend_of_the_trace(
    cli: Any, tmp_path: Path
) -> None:
    file, picture = tmp_path / "a.jsonl", tmp_path / "both.svg"
    cli("simulate", "scenarios/hybrid.yaml", "--backend", "gloo", "--trace", file)

    same = cli("compare", file, "scenarios/hybrid.yaml", "-o", picture)
    other = cli(
        "compare", file, "scenarios/hybrid.yaml", "--cluster", "cpu-10gbe", "--format", "json"
    )

    assert same.returncode == 0
    assert picture.read_text(encoding="utf-8").startswith("<svg")
    assert other.returncode == 1
    assert '"same": false' in other.stdout
    assert cli("compare", file, tmp_path / "none.jsonl").returncode == 2
