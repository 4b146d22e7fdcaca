"""`distsim shrink`: what is left fails as the whole did, and nothing more can go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from distsim.checker.verdict import verdict_of
from distsim.common.errors import ScenarioErrors, UsageError
from distsim.program.lower import lower
from distsim.repair.remove_rank import without_rank
from distsim.repair.shrink import failure_of, shrink, shrink_scenario
from distsim.repair.shrink_candidates import smaller_scenarios
from distsim.scenario import load, loads
from distsim.scenario.format.source.yaml_nodes import dump_yaml
from distsim.simulation.check_scenario import check_scenario
from tests.support.single_faults import faulty_programs

#: Failing scenarios of several kinds, and under which back end.
_FAILING = {
    "z01_ring_recv_first": "gloo",
    "f05_forgot_the_group": "nccl",
    "f10_made_by_members_only": "gloo",
    "f11_uneven_batches": "nccl",
    "z03_tag_mismatch": "nccl",
    "z19_fewer_micro_batches_than_stages": "gloo",
    "z24_reduce_and_message": "nccl",
}


@pytest.mark.parametrize("name", _FAILING)
def test_the_shrunk_scenario_keeps_verdict_cause_and_outcome_in_at_most_12_calls(
    name: str, root: Path
) -> None:
    whole = load(str(root / f"scenarios/zoo/{name}.yaml")).model_copy(
        update={"backend": _FAILING[name]}
    )

    found = shrink_scenario(whole)

    small = loads(found.text)
    assert failure_of(check_scenario(small), lower(small)) == found.failure
    assert found.calls == (lower(whole).call_count, lower(small).call_count)
    assert found.calls[1] <= min(12, found.calls[0])
    assert found.whole


def test_a_long_loop_on_eight_ranks_shrinks_to_the_two_conflicting_calls() -> None:
    """Loops are unrolled to what is needed, ranks that do nothing for it are gone, sizes are one
    element.
    """
    whole = loads(
        "name: long\nworld: 8\nbackend: gloo\ntensors: {x: {shape: [1000, 1000]}, y: {shape: [5]}}\nprogram:\n"
        "- repeat: {times: 125, steps: [{all_reduce: {tensor: x}}, {compute: 1 ms}]}\n"
        "- {all_reduce: {tensor: y}, ranks: [0, 1, 2, 3, 4, 6, 7]}\n- {barrier: , ranks: 5}\n- barrier\n"
    )

    found = shrink_scenario(whole)

    assert (found.ranks, found.calls) == ((8, 2), (2_016, 2))
    assert "repeat" not in found.text
    assert "1000" not in found.text


def test_a_scenario_that_does_not_fail_is_refused_naming_a_backend_on_which_it_does(
    root: Path,
) -> None:
    whole = load(str(root / "scenarios/zoo/z24_reduce_and_message.yaml"))

    with pytest.raises(UsageError) as refused:
        shrink_scenario(whole)

    assert "does not fail on gloo" in refused.value.message
    assert "--backend nccl" in str(refused.value.remedy)


def test_a_limit_on_the_number_of_tries_is_kept_and_reported(root: Path) -> None:
    found = shrink_scenario(load(str(root / "scenarios/zoo/z01_ring_recv_first.yaml")), most=5)

    assert (found.tried, found.whole) == (5, False)


def test_a_rank_in_the_middle_is_removed_with_its_messages_and_the_rest_renumbered() -> None:
    """Numbers after it are one less, wherever ranks are named by number."""
    data: dict[str, Any] = {
        "world": 4,
        "groups": {"g": [0, 1, 3]},
        "faults": [{"rank": 1, "kind": "kill"}, {"rank": 3, "kind": "kill"}],
        "program": [
            {"send": {"tensor": "x", "dst": 1}, "ranks": 0},
            {"send": {"tensor": "x", "dst": 3}, "ranks": [0, 1, 2]},
            {"ranks": 1, "steps": ["barrier"]},
            {"broadcast": {"tensor": "x", "src": {2: 3, "else": 0}}},
            "barrier",
        ],
    }

    assert without_rank(data, 1) == {
        "world": 4,
        "groups": {"g": [0, 2]},
        "faults": [{"rank": 2, "kind": "kill"}],
        "program": [
            {"send": {"tensor": "x", "dst": 2}, "ranks": [0, 1]},
            {"broadcast": {"tensor": "x", "src": {1: 2, "else": 0}}},
            "barrier",
        ],
    }


def test_any_predicate_can_guide_shrinking() -> None:
    """Of 64 steps, the two that are asked for stay; a candidate that is no scenario counts as one
    that shows nothing.
    """

    def shows(data: dict[str, Any]) -> bool:
        loads("world: 0") if not data["program"] else None
        return {"a", "b"} <= {step["compute"]["name"] for step in data["program"]}

    steps = [
        {"compute": {"time": "1 ms", "name": name}} for name in ("c" * 30 + "a" + "c" * 30 + "b")
    ]

    assert [
        s["compute"]["name"] for s in shrink({"world": 1, "program": steps}, shows)["program"]
    ] == ["a", "b"]


def test_the_command_writes_a_file_that_tests_itself(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "small.yaml"

    found = cli("shrink", "scenarios/zoo/z02_both_send_first.yaml", "-o", out)

    assert found.returncode == 0, found.stderr
    assert "first finding DS301" in found.stderr
    assert cli("test", out).returncode == 0


_OBSERVED_ORDER = """
world: 2
backend: nccl
groups: {g1: [0, 1], g2: [0, 1]}
tensors: {x: {shape: [4]}, y: {shape: [4]}}
program:
  - ranks: 0
    steps:
      - all_reduce: {tensor: x, group: g1}
      - all_reduce: {tensor: y, group: g2}
  - ranks: 1
    steps:
      - all_reduce: {tensor: y, group: g2}
      - all_reduce: {tensor: x, group: g1}
"""
_OBSERVED_SCHEDULE = """
world: 3
backend: gloo
tensors: {x: {shape: [4]}}
program:
  - {recv: {tensor: x}, ranks: 0}
  - {recv: {tensor: x, src: 1}, ranks: 0}
  - {send: {tensor: x, dst: 0}, ranks: rank > 0}
"""


def test_shrinking_keeps_the_wrong_order_of_two_groups() -> None:
    found = shrink_scenario(loads(_OBSERVED_ORDER))

    assert found.calls == (4, 4)
    assert found.text.count("group: g1") == found.text.count("group: g2") == 2


def test_shrinking_keeps_the_schedule_dependence_of_a_hang() -> None:
    found = shrink_scenario(loads(_OBSERVED_SCHEDULE))

    assert found.failure.depends_on == "schedule"
    assert found.ranks == (3, 3)


def test_a_program_that_fails_at_startup_shrinks_to_its_launch() -> None:
    text = (
        "world: 2\nbackend: nccl\ntensors: {x: {shape: [4]}}\nlaunch: {ports_taken: [29500]}\n"
        "program:\n  - repeat: {times: 3, steps: [all_reduce: {tensor: x}]}\n"
    )

    found = shrink_scenario(loads(text))

    assert found.failure.cause == "DS123"
    assert found.calls == (6, 0)


def test_no_candidate_drops_the_group_of_a_call() -> None:
    data = {"world": 2, "program": [{"all_reduce": {"tensor": "x", "group": "g"}}]}

    for candidate in smaller_scenarios(data):
        for step in candidate["program"]:
            assert step["all_reduce"]["group"] == "g"


def _core_waits(text: str) -> list[tuple[str, str, bool]]:
    """The operation and the group in which each rank of the core is blocked; any source or not."""
    program = lower(loads(text))
    verdict = verdict_of(program, 2000)
    assert verdict.final_state is not None
    waits = []
    for blocked in verdict.final_state.blocked:
        for need in blocked.needs if blocked.rank in verdict.core else ():
            at_end = need.position >= len(program.code(blocked.rank).calls)
            call = None if at_end else program.call(blocked.rank, need.position)
            waits.append(
                ("", "", need.any) if call is None else (call.op, call.group.name, need.any)
            )
    return sorted(waits)


@pytest.mark.parametrize("seed", range(2, 2 + 2 * int(os.environ.get("DISTSIM_DRAWS", "1"))))
def test_shrinking_a_random_hang_keeps_its_ranks_groups_and_calls(seed: int) -> None:
    """The blocked calls of the core, their groups and the dependence on order stay the same."""
    for _, faulty in faulty_programs(seed):
        try:
            whole = loads(dump_yaml(faulty))
            before = verdict_of(lower(whole), 2000)
        except ScenarioErrors:
            continue
        is_small = lower(whole).call_count < 25
        if before.verdict != "deadlock" or not is_small or check_scenario(whole).status() == 0:
            continue

        found = shrink_scenario(whole, most=150)

        after = verdict_of(lower(loads(found.text)), 2000)
        assert (after.verdict, after.depends_on) == (before.verdict, before.depends_on)
        assert len(after.core) == len(before.core)
        assert _core_waits(found.text) == _core_waits(dump_yaml(faulty))
        return
    pytest.skip("no fault of this seed makes a small program hang")
