"""The schedule grid of a pipeline, and which part of a large program a data flow draws."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from distsim.common.errors import UsageError
from distsim.output.pictures.views.dataflow import dataflow_diagram
from distsim.output.pictures.views.schedule import pipeline_passes, schedule_svg
from distsim.output.trace_data.lanes import RankRows
from distsim.output.trace_data.selection import parse_selection
from distsim.scenario import load
from distsim.simulation.simulate_scenario import Simulation, simulate
from tests.support.views_made import made, work

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


def of(name: str) -> Simulation:
    return simulate(load(str(SCENARIOS / f"{name}.yaml")), with_verdict=False, with_values=False)


def words(svg: str) -> list[str]:
    return [
        text.text or ""
        for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_a_pass_shows_the_number_of_its_micro_batch_and_chunk():
    """Interleaved 1F1B on four ranks: four micro-batches through chunk 0, then the same through
    chunk 1 (arXiv:2104.04473, figure 4).
    """
    done = of("strategies/pipeline_interleaved")
    trace = done.run.trace
    found = pipeline_passes(trace, RankRows(trace)(0).tolist(), done.program, 0)

    assert [(p.kind, p.micro, p.chunk) for p in found[:8]] == [
        *(("F", m, 0) for m in range(4)),
        *(("F", m, 1) for m in range(4)),
    ]
    assert [(p.kind, p.micro, p.chunk) for p in found if p.kind == "B"][:2] == [
        ("B", 0, 1),
        ("B", 1, 1),
    ]
    assert {(p.kind, p.micro, p.chunk) for p in found} == {
        (k, m, c) for k in "FB" for m in range(8) for c in range(2)
    }
    assert [
        (p.kind, p.micro, p.chunk)
        for p in pipeline_passes(trace, RankRows(trace)(0).tolist(), None, 0)
    ] == [(p.kind, p.micro, p.chunk) for p in found]


def test_computes_of_one_pass_have_one_number_and_are_drawn_as_one_box():
    """Two micro-batches of two layers: attention and mlp of each layer, then the loss; backwards
    three computes.
    """
    forward = [
        work("forward attention"),
        work("forward mlp"),
        work("forward attention"),
        work("forward mlp"),
        work("forward loss"),
    ]
    backward = [work(f"backward {part}") for part in ("loss", "mlp", "attention")]
    trace = made(1, {0: [*forward, *backward, *forward, *backward]})[1].trace

    found = [(p.kind, p.micro) for p in pipeline_passes(trace, list(range(16)), None, 0)]
    assert found == [(kind, micro) for micro in (0, 1) for kind in "FFFFFBBB"]
    svg = schedule_svg(trace)
    shown = words(svg)
    assert shown[shown.index("rank 0") + 1 :] == ["0", "0", "1", "1"], "a box for each pass"
    assert float(ElementTree.fromstring(svg).get("width", "inf")) <= 1700


def test_replicas_share_a_lane_and_the_bubble_is_reported():
    shown = words(schedule_svg(of("pipeline_1f1b").run.trace))

    assert "ranks 0, 4" in shown
    assert shown.count("7") == 8  # each of four lanes: the last micro-batch forward and backward
    assert any("27 % bubble" in word and "8 ranks in 4 lanes" in word for word in shown)


def test_halves_of_backward_passes_have_letters_and_a_selection_is_possible():
    done = of("strategies/pipeline_zb1p")

    assert {"0I", "0W", "7W"} <= set(words(schedule_svg(done.run.trace, done.program)))
    part = words(
        schedule_svg(done.run.trace, done.program, parse_selection(ranks="1", time="0 ms..20 ms"))
    )
    assert "rank 1" in part
    assert "rank 0" not in part


def test_a_program_without_passes_is_refused_with_a_reason():
    with pytest.raises(UsageError, match="forward or backward"):
        schedule_svg(made(2, {r: [work("step")] for r in range(2)})[1].trace)


def test_the_data_flow_of_many_steps_shows_one_and_a_long_pipeline_points_to_the_grid():
    program, run = made(2, {r: [work("forward"), work("backward")] * 30 for r in range(2)})
    notes = dataflow_diagram(program, run).notes

    assert any("--view schedule" in note for note in notes)
    done = of("killed_at_iteration_3")
    assert {"killed_r2", "end_r2"} & {i.id for i in dataflow_diagram(done.program, done.run).items}


def test_calls_common_to_ranks_are_level():
    """hybrid: the backward pass of ranks 0 and 2 stands in one row, though a band passes rank 2."""
    done = of("hybrid")
    rows = {item.id: item.row for item in dataflow_diagram(done.program, done.run).items}

    assert rows["r0_3"] == rows["r2_3"]
