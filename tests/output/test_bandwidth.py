"""Bandwidth over size."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from distsim.common.errors import UsageError
from distsim.operations.registry import OPERATIONS
from distsim.output.pictures.components.view_interface import OperationMeasurement
from distsim.output.pictures.render import PictureInput, render_picture
from distsim.output.pictures.views.bandwidth import _LEFT, _TOP, _WIDTH
from distsim.output.trace_data.selection import parse_selection
from distsim.scenario import load, loads
from distsim.simulation.simulate_scenario import simulate

SCENARIO = Path(__file__).resolve().parents[2] / "scenarios" / "two_machines.yaml"
SVG = "{http://www.w3.org/2000/svg}"
LONE = "{name: n, world: 2, tensors: {x: {shape: [4]}}, program: [{barrier: {}}]}"


def subject(text: str | None = None) -> PictureInput:
    done = simulate(
        load(str(SCENARIO)) if text is None else loads(text), with_verdict=False, with_values=False
    )
    return PictureInput(done.program, done.run, cost=done.cost)


def test_simulated_calls_lie_on_the_curve_of_the_model_and_measured_ones_at_their_times():
    given = subject()
    trace = given.run.trace if given.run else None
    assert trace is not None
    sized = next(
        (n, g) for n, g in zip(trace["nbytes"].tolist(), trace["group"].tolist(), strict=True) if n
    )
    group = trace.tables["group"][sized[1]]
    n = len(trace.header["groups"][[g[0] for g in trace.header["groups"]].index(group)][1])
    op = next(
        trace.text("op", o)
        for o, size in zip(trace["op"].tolist(), trace["nbytes"].tolist(), strict=True)
        if size
    )
    svg = str(
        render_picture(
            "bandwidth",
            "svg",
            given._replace(measured=(OperationMeasurement(op, n, 1 << 20, 1 << 16),)),
        )
    )
    shapes = ElementTree.fromstring(svg)
    told = [title.text or "" for title in shapes.iter(f"{SVG}title")]

    assert any(
        word.startswith("1 MiB: algbw 16 GB/s, busbw ")
        and f"{16 * OPERATIONS[op].busbw_factor(n):.3g}" in word
        for word in told
    )
    line = next(p.get("d", "") for p in shapes.iter(f"{SVG}path") if p.get("stroke") == "#0B4F79")
    points = [tuple(map(float, pair.split())) for pair in line[1:].split("L")]
    dot = next(c for c in shapes.iter(f"{SVG}circle") if len(c))
    x, y = float(dot.get("cx", 0)), float(dot.get("cy", 0))
    left, right = (
        max(p for p in points if p[0] <= x + 0.01),
        min(p for p in points if p[0] >= x - 0.01),
    )
    assert points[0][0] == pytest.approx(_LEFT)
    assert points[-1][0] == pytest.approx(_LEFT + _WIDTH)
    assert min(left[1], right[1]) - 0.5 <= y <= max(left[1], right[1]) + 0.5
    assert y >= _TOP


def test_a_run_without_traffic_and_a_missing_group_are_refused():
    with pytest.raises(UsageError, match="no collective of this run moves data"):
        render_picture("bandwidth", "svg", subject(LONE))
    with pytest.raises(UsageError, match="no group `q`"):
        render_picture("bandwidth", "svg", subject()._replace(part=parse_selection(group="q")))
    with pytest.raises(UsageError, match="cost"):
        render_picture("bandwidth", "svg", subject()._replace(cost=None))


def test_groups_on_one_node_and_across_nodes_have_a_panel_each():
    text = """
world: {nodes: 2, ranks_per_node: 2}
backend: nccl
cluster: dgx-a100
mesh: {dp: 2, tp: 2}
tensors: {x: {shape: [4194304]}}
program:
  - all_reduce: {tensor: x, group: tp}
  - all_reduce: {tensor: x, group: dp}
"""
    svg = str(render_picture("bandwidth", "svg", subject(text)))
    titles = [t.text or "" for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    panels = [title.partition(":")[0] for title in titles if title.startswith("all_reduce")]

    assert panels == ["all_reduce, 2 ranks on 1 node", "all_reduce, 2 ranks on 2 nodes"]
