"""Folded equals unfolded: every time of every rank, outcome, verdict and timeline
(`tests.support.folding`).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from distsim.common.errors import UsageError
from distsim.program.lower import lower
from distsim.scenario import Scenario, load, loads
from distsim.simulation import check_scenario as check_module
from distsim.simulation.check_scenario import check_scenario
from distsim.simulation.simulate_scenario import cost_model, simulate
from tests.support.folding import Compared, compared
from tests.support.spmd import program

ROOT = Path(__file__).resolve().parents[2]
#: Seeds by the chunk, so that a short run of some tests has some of them.
QUICK, MANY, CHUNK = 200, 2_000, 20

DATA_PARALLEL = """
world: {nodes: 8, ranks_per_node: 8}
backend: nccl
cluster: dgx-a100
mesh: {dp: 8, pp: 2, tp: 4}
program:
  - {recv: {tensor: {shape: [4096]}, group: pp, group_src: 0}, ranks: pp == 1}
  - compute: {name: forward, time: 3 ms}
  - all_reduce: {tensor: {shape: [4096]}, group: tp}
  - {send: {tensor: {shape: [4096]}, group: pp, group_dst: 1}, ranks: pp == 0}
  - all_reduce: {tensor: {shape: [1000000]}, group: dp}
"""


def _random(seeds: range) -> dict[int, Compared]:
    return {seed: compared(Scenario(**_drawn(seed))) for seed in seeds}


def _drawn(seed: int) -> dict[str, Any]:
    """In most programs processes stay. Where they end, many do not fold: it matters which rank
    raises first.
    """
    drawn = program(seed)
    if seed % 4:
        drawn["options"] = {**drawn.get("options", {}), "stays_connected": True}
    return drawn


def _differences(found: dict[int, Compared]) -> dict[int, tuple[str, ...]]:
    """By seed, what differs between the folded and the unfolded run."""
    return {seed: one.differences for seed, one in found.items() if one.differences}


@pytest.mark.parametrize("first", range(0, QUICK, CHUNK))
def test_random_programs_of_many_ranks_give_the_same_result_folded(first: int) -> None:
    """With slow and late ranks and slow links among them; some of them fold."""
    found = _random(range(first, first + CHUNK))

    assert _differences(found) == {}
    assert sum(one.folded for one in found.values()) > CHUNK // 11


def test_some_of_the_random_programs_that_fold_hang() -> None:
    ended = Counter(one.outcome for one in _random(range(60)).values() if one.folded)

    assert min(ended["hangs"], ended["completes"]) > 1


@pytest.mark.slow
def test_two_thousand_random_programs_give_the_same_result_folded() -> None:
    found = _random(range(10_000, 10_000 + MANY))
    folded = [one for one in found.values() if one.folded]

    assert _differences(found) == {}
    assert len(folded) > MANY // 8
    assert Counter(one.outcome for one in folded)["hangs"] > 0


def test_scenarios_give_the_same_result_folded() -> None:
    files = sorted((ROOT / "scenarios").glob("*.yaml"))
    found = {path.stem: compared(load(str(path))) for path in files}

    assert {name: one.differences for name, one in found.items() if one.differences} == {}
    assert sum(one.folded for one in found.values()) > 5


def test_one_replica_represents_all_and_every_rank_keeps_its_times() -> None:
    scenario = loads(DATA_PARALLEL)
    folded, whole = simulate(scenario, fold=True), simulate(scenario, fold=False)

    assert folded.run.section is not None
    assert list(folded.run.section.program.present) == [0, 4]
    assert folded.timeline == whole.timeline
    assert folded.verdict == whole.verdict
    assert folded.findings == whole.findings
    assert folded.run.final_state == whole.run.final_state
    assert len(folded.run.trace) == len(whole.run.trace)


def test_a_slow_rank_separates_only_its_replica_and_its_groups() -> None:
    scenario = loads(DATA_PARALLEL + "faults: [{kind: slow, rank: 37, factor: 2}]\n")
    one = compared(scenario)

    assert one.differences == ()
    assert one.folded
    assert 4 < one.kept <= 16


def test_nothing_folds_if_every_rank_is_different() -> None:
    """A message travels down all ranks: each gets it later than the one before."""
    chain = """
world: 16
backend: gloo
program:
  - {recv: {tensor: {shape: [64]}, src: rank - 1}, ranks: rank > 0}
  - {send: {tensor: {shape: [64]}, dst: rank + 1}, ranks: rank < 15}
"""
    assert not compared(loads(chain)).folded


def test_a_program_that_does_not_fold_and_is_too_large_is_refused_with_an_estimate() -> None:
    text = "world: 4096\nbackend: gloo\nseed: 1\njitter: 0.1\nprogram:\n  - repeat: {times: 2000, steps: [compute: {time: 1 us}]}\n"
    with pytest.raises(UsageError, match="8,192,000 calls on 4,096 ranks: about"):
        simulate(loads(text))


def test_a_large_program_folds_automatically_with_the_same_result() -> None:
    """One iteration of a pipeline on 1024 ranks: eight of them stand for the others."""
    scenario = load(str(ROOT / "benchmarks" / "pipeline.yaml"), ["mesh.dp=16", "world=128"])
    folded, whole = simulate(scenario), simulate(scenario, fold=False)

    assert folded.run.section is not None
    assert len(folded.run.section.program.present) == 8
    assert folded.timeline == whole.timeline
    assert (folded.outcome, folded.verdict, folded.findings) == (
        whole.outcome,
        whole.verdict,
        whole.findings,
    )


BROADCAST = """
world: 32
backend: nccl
mesh: {dp: 4, tp: 8}
program:
  - repeat:
      times: 3
      steps:
        - compute: {time: 1 ms}
        - broadcast: {tensor: {shape: [4096]}, group: tp, group_src: 0}
        - all_reduce: {tensor: {shape: [1000000]}, group: dp}
"""


def test_a_backend_without_valid_representatives_is_checked_with_all_ranks() -> None:
    """A broadcast of gloo goes down a tree, so that each place of a group has times of its own;
    nccl has no such thing.
    """
    scenario = loads(BROADCAST)
    program = lower(scenario)
    part, apart = check_module._representative_section(program, cost_model(scenario, program), True)
    folded, whole = check_scenario(scenario, fold=True), check_scenario(scenario, fold=False)

    assert part is not None
    assert (len(part.present) < program.world_size, apart) == (True, {"gloo"})
    assert (folded.verdict, folded.profiles, folded.findings) == (
        whole.verdict,
        whole.profiles,
        whole.findings,
    )


def test_delays_of_a_rank_add_up_in_column_form_too() -> None:
    text = """
world: 9
backend: nccl
mesh: {a: 3, b: 3}
program: [compute: {time: 2 us * (b + 1)}]
faults: [{kind: late, ranks: 7, delay: 2 ms}, {kind: late, ranks: 7, delay: 3 ms}]
"""
    one = compared(loads(text))

    assert one.folded
    assert one.differences == ()
    assert simulate(loads(text)).makespan_ns > 5_000_000


@pytest.mark.parametrize(
    ("backend", "comes", "then"),
    [
        ("gloo", "rank // 4 != 1", "barrier: {group: odd}"),
        ("gloo", "rank < 4", "wait: all"),
        ("nccl", "rank // 2 % 2 == 1", "wait: all"),
    ],
)
def test_a_rank_missing_from_a_tree_or_as_its_root_is_not_represented_by_another(
    backend: str, comes: str, then: str
) -> None:
    """gloo's broadcast runs down a tree: of the ranks that do not come each holds up others. In the
    early reading the root does so.
    """
    text = f"""
world: 16
backend: {backend}
program:
  - {{broadcast: {{tensor: {{shape: [64]}}, src: 1}}, ranks: {comes}}}
  - {then}
groups: {{odd: {{by: rank % 2}}}}
"""
    assert compared(loads(text)).differences == ()
