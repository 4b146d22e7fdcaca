"""What if: sums of the critical path, faster resources, two runs side by side, draws of chance; a
step's figures.
"""

from __future__ import annotations

import pytest

from distsim.common.errors import UsageError
from distsim.scenario import load, loads
from distsim.simulation.simulate_scenario import Simulation, simulate
from distsim.simulation.training_metrics import training_metrics
from distsim.simulation.what_if import (
    RESOURCES,
    critical_path_by_kind,
    makespan_distribution,
    metric_differences,
    parse_stragglers,
    random_scenarios,
    resource_speedups,
)
from tests.support.harness import ROOT, Cli

SCENARIOS = ROOT / "scenarios"
BOUND = (
    "world: {nodes: 2, ranks_per_node: 8}\nbackend: nccl\ncluster: {preset: dgx-h100, nics: {count: 1}}\n"
    "tensors: {x: {shape: [%d], dtype: bfloat16}}\nprogram:\n  - compute: {name: forward, flops: 4 TFLOP, dtype: bfloat16}\n"
    "  - compute: {name: copies, bytes: 1 GB}\n  - all_reduce: {tensor: x}\n"
)


def done(text: str) -> Simulation:
    return simulate(loads(text), with_values=False)


@pytest.mark.parametrize(
    "name",
    [
        "hybrid.yaml",
        "two_machines.yaml",
        "strategies/pipeline_1f1b.yaml",
        "strategies/transformer_small.yaml",
    ],
)
def test_the_critical_path_by_kind_adds_up_to_the_makespan(name: str) -> None:
    found = simulate(load(SCENARIOS / name), with_values=False)
    rows = critical_path_by_kind(found)

    assert sum(row.ns for row in rows) == found.makespan_ns
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert [row.ns for row in rows] == sorted((row.ns for row in rows), reverse=True)


def test_doubling_the_speed_saves_only_time_on_the_critical_path() -> None:
    """Matrix products, copies and a message through the cards, one after the other; no link inside
    a node decides.
    """
    found = done(BOUND % 500_000_000)
    path = {row.kind: row.ns for row in critical_path_by_kind(found)}
    rows = {row.resource: row.makespan_ns - found.makespan_ns for row in resource_speedups(found)}

    assert set(rows) == set(RESOURCES)
    assert rows["compute (FLOP/s)"] == pytest.approx(-path["forward"] / 2, rel=0.01)
    assert rows["device memory (HBM)"] == pytest.approx(-path["copies"] / 2, rel=0.02)
    assert rows["network cards"] < 0
    assert all(ns <= 0 for ns in rows.values())
    alone = done(
        "world: 2\nbackend: nccl\ncluster: dgx-h100\nprogram:\n  - compute: {name: forward, time: 3 ms}\n"
    )
    assert {row.change for row in resource_speedups(alone)} == {0.0}


def test_two_runs_differ_in_what_was_changed() -> None:
    a, b = done(BOUND % 1000), done((BOUND % 1000).replace("4 TFLOP", "8 TFLOP"))
    found = {row.what: row for row in metric_differences(a, b)}

    assert found["makespan"].change == pytest.approx(b.makespan_ns / a.makespan_ns - 1)
    assert found["critical path: forward"].change == pytest.approx(1, rel=0.01)
    assert found["critical path: copies"].change == 0
    assert {row.change for row in metric_differences(a, a)} <= {0.0, None}


def test_draws_are_reproducible_by_seed_and_contain_the_requested_number_of_slow_ranks() -> None:
    scenario = loads("world: 200\nprogram: [barrier]\nseed: 3\n")
    slow = [
        [f.ranks for f in one.faults]
        for one in random_scenarios(scenario, 20, parse_stragglers("10%x1.5"))
    ]

    assert slow == [
        [f.ranks for f in one.faults]
        for one in random_scenarios(scenario, 20, parse_stragglers("0.1x1.5"))
    ]
    assert [one.seed for one in random_scenarios(scenario, 3, None)] == [3, 4, 5]
    assert 200 < sum(len(ranks[0]) for ranks in slow if ranks) < 600
    for wrong in ("1%", "x2", "2x2", "1%x0.5", "a"):
        with pytest.raises(UsageError):
            parse_stragglers(wrong)


@pytest.mark.parametrize(
    ("runs", "t"), [(2, 12.706), (3, 4.303), (5, 2.776), (11, 2.228), (31, 2.042)]
)
def test_the_interval_of_a_mean_is_that_of_student(runs: int, t: float) -> None:
    """Quantiles from printed tables of t for 95 %, two-sided."""
    from statistics import fmean, stdev

    times = [100 * k * k + 1000 for k in range(runs)]
    found = makespan_distribution(times)

    assert found.high_ns - found.mean_ns == pytest.approx(t * stdev(times) / runs**0.5, rel=0.012)
    assert found.mean_ns == fmean(times)
    assert found.least_ns <= found.median_ns <= found.p95_ns <= found.most_ns


def test_only_a_transformer_has_transformer_figures_and_they_add_up() -> None:
    found = training_metrics(
        simulate(load(SCENARIOS / "strategies" / "llama3_8b.yaml"), with_values=False)
    )

    assert found is not None
    assert found.tokens == 8 * 4096
    assert sum(found.shares.values()) == pytest.approx(1)
    assert 0.3 < found.mfu < 0.6
    assert training_metrics(simulate(load(SCENARIOS / "hybrid.yaml"), with_values=False)) is None


class TestCommand:
    HYBRID = SCENARIOS / "hybrid.yaml"

    def test_a_job_that_does_not_fit_its_memory_exits_with_1(self, cli: Cli) -> None:
        assert (
            cli(
                "simulate", SCENARIOS / "strategies" / "llama3_8b_does_not_fit.yaml", "--no-values"
            ).returncode
            == 1
        )

    def test_what_if_and_against_print_their_tables_in_80_columns(self, cli: Cli) -> None:
        faster = cli("simulate", self.HYBRID, "--what-if")
        beside = cli(
            "simulate", self.HYBRID, "--set", "cluster=dgx-h100", "--compare-with", self.HYBRID
        )

        assert (faster.returncode, beside.returncode) == (0, 0)
        assert "with one resource twice as fast" in faster.stdout
        assert "unchanged: overlapped or unused" in faster.stdout
        assert "makespan" in beside.stdout
        assert [
            line
            for line in (faster.stdout + beside.stdout).splitlines()
            if len(line) > 80 and len(line.split()) > 2
        ] == []

    def test_repeated_draws_need_randomness(self, cli: Cli) -> None:
        told = cli("simulate", self.HYBRID, "--seeds", "3", "--stragglers", "50%x2")

        assert told.returncode == 0
        assert told.stdout.startswith("3 seeds (50 % of the ranks slowed by a factor of 2): mean ")
        for words in (
            ("--seeds", "3"),
            ("--stragglers", "1%x2"),
            ("--what-if", "--format", "json"),
        ):
            assert cli("simulate", self.HYBRID, *words).returncode == 2
