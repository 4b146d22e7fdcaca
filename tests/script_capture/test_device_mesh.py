"""The axes of a captured DeviceMesh are the axes of the written scenario, which runs the same calls."""

from __future__ import annotations

import pytest

from distsim.scenario import loads
from distsim.script_capture.launch.function_target import function_target
from distsim.script_capture.launch.parent_process import CaptureRunOptions, run_capture
from distsim.script_capture.protocol.blocked_threads import is_supported
from distsim.script_capture.result.evaluation import evaluate_capture
from distsim.simulation.simulate_scenario import simulate
from distsim.simulation.trace_replay.compact import compact_trace

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(not is_supported(), reason="needs Linux's /proc")


def trains_on_a_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(x, group=mesh.get_group("tp"))
        dist.all_reduce(x, group=mesh.get_group("dp"))


def test_the_axes_of_a_device_mesh_are_those_of_the_scenario() -> None:
    target = function_target(trains_on_a_mesh, "gloo", (), {}, True)
    options = CaptureRunOptions(target, 4, backend="gloo", timeout_s=900, keep_output=True)
    captured = evaluate_capture(run_capture(options)).simulation

    written = compact_trace(captured.run.trace)

    lines = [line.partition("  # ")[0].strip() for line in written.text.splitlines()]
    assert "mesh: {dp: 2, tp: 2}" in lines
    assert "- all_reduce: {tensor: {shape: [4]}, group: tp}" in lines
    assert "- all_reduce: {tensor: {shape: [4]}, group: dp}" in lines
    assert not any("new_group" in line for line in lines)
    again = simulate(loads(written.text))
    assert (again.outcome, again.makespan_ns) == (captured.outcome, captured.makespan_ns)
