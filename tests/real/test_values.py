"""The values that a recorded run carries: those of the real tensors, to be laid beside the
simulator's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distsim.analysis.run_comparison import compare_runs
from distsim.output.json.tensor_values import trace_header_values
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import simulate
from distsim.trace.model import Trace
from tests.support import real_runs

pytest.importorskip("torch", reason="torch is not installed (extra `real`): nothing runs for real")

SUMS = """
name: sums
world: 4
backend: gloo
tensors:
  whole: {shape: [200], dtype: int32, value: index * rank}
  broken: {shape: [5000], dtype: float32, value: (index % 97) * 0.137 + rank * 0.31}
  moved: {shape: [3], dtype: bfloat16, value: [1.5, 2.5, 3.5]}
  spoiled: {shape: [2], dtype: float32, value: rank}
  unknown: {shape: [2]}
program:
  - all_reduce: {tensor: whole}
  - all_reduce: {tensor: broken}
  - broadcast: {tensor: moved, src: 1}
  - reduce: {tensor: spoiled, dst: 0}
  - all_reduce: {tensor: unknown}
"""


def test_a_recording_has_values_comparable_with_simulated_ones() -> None:
    """Integers and what was moved exactly, sums of four floats by the tolerance; not what gloo
    leaves away from a reduce's root.
    """
    scenario = loads(SUMS)
    recorded = real_runs.run(scenario).trace
    done = simulate(scenario)
    simulated = Trace(
        {**done.run.trace.header, **trace_header_values(done)},
        done.run.trace.tables,
        done.run.trace.columns,
    )

    found = compare_runs(recorded, simulated)

    assert recorded.header["values"]["moved"] == {rank: [1.5, 2.5, 3.5] for rank in "0123"}
    assert recorded.header["values"]["spoiled"] == {"0": 6.0}
    assert "unknown" not in recorded.header["values"]
    assert recorded.header["value_dtypes"] == {
        "broken": "float32",
        "moved": "bfloat16",
        "spoiled": "float32",
        "whole": "int32",
    }
    assert found.values.differ == 0
    assert found.values.equal + found.values.close == 13
    assert (found.values.equal >= 9, found.values.one_sided) == (True, 3)


def test_the_command_writes_real_and_simulated_values_and_compares_them(
    cli: Any, tmp_path: Path
) -> None:
    real, simulated, without = (
        tmp_path / f"{name}.jsonl" for name in ("real", "simulated", "without")
    )
    words = ("scenarios/hybrid.yaml", "--backend", "gloo")
    cli("run", *words, "--real", "--trace", real)
    cli("simulate", *words, "--trace", simulated)
    cli("simulate", *words, "--no-values", "--trace", without)

    both = json.loads(
        cli("compare", real, simulated, "--tolerance", "100000%", "--format", "json").stdout
    )
    one = cli("compare", real, without, "--tolerance", "100000%")

    assert (both["same"], both["values"]) == (
        True,
        {"equal": 4, "close": 0, "differ": 0, "one_sided": 0, "lacking": ""},
    )
    assert one.returncode == 0
    assert "values are not compared: B did not record them" in one.stdout
