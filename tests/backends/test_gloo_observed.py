"""The gloo profile against what gloo was observed to do, case by case (torch 2.13).

Compared are classes of a rank's end, not which rank times out first: fine, cut off (a timeout, or a
connection that another's timeout or end closed), raised by itself, killed by a signal.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from distsim.backends import BACKEND_PROFILES, default_cluster
from distsim.engine import outcome_of_ordered_run
from distsim.engine.event_driven import simulate_in_order
from distsim.findings.final_state import RankEnd
from distsim.hardware.cost import CostModel
from tests.support.gloo_observed import CASES, LEFT_OUT, Case

OBSERVED = Path(__file__).resolve().parents[1] / "data" / "agreed" / "gloo_ends.yaml"
CLOSED = ("Connection closed", "Application timeout", "Timed out", "Wait timeout")


@pytest.fixture(scope="module")
def observed() -> dict[str, dict[int, str]]:
    """Case -> rank -> the class of its end in the lab: that of its first step which failed."""
    cases = yaml.safe_load(OBSERVED.read_text(encoding="utf-8"))
    return {
        case: {rank: end for end, ranks in ends.items() for rank in ranks}
        for case, ends in cases.items()
    }


def found(end: RankEnd) -> str:
    if end.status == "raised":
        return (
            "cut off"
            if end.message.startswith(CLOSED) or "failed to pass monitoredBarrier" in end.message
            else "raised"
        )
    return {"blocked": "cut off", "crashed": "killed"}.get(end.status, "fine")


def test_every_observed_case_is_tested_or_excluded_with_a_reason(
    observed: dict[str, dict[int, str]],
) -> None:
    """At least 140 of the 190 are told."""
    assert set(observed) == set(CASES) | set(LEFT_OUT)
    assert not set(CASES) & set(LEFT_OUT)
    assert len(observed) == 190
    assert len(CASES) >= 140


@pytest.mark.parametrize("name", CASES)
def test_a_case_ends_as_observed(observed: dict[str, dict[int, str]], name: str) -> None:
    case: Case = CASES[name]
    program = case.program()
    cost = CostModel(default_cluster("gloo"), program.world_size, program.local_size)
    left = simulate_in_order(program, BACKEND_PROFILES["gloo"], cost)
    theirs = observed[name]
    ours = {end.rank: found(end) for end in left.final_state.ends if end.rank in theirs}
    if case.either:
        assert {r: e for r, e in ours.items() if r not in case.either} == {
            r: e for r, e in theirs.items() if r not in case.either
        }
        assert any(end in ("killed", "cut off") for end in ours.values())
        return
    assert ours == theirs
    if set(ours.values()) == {"fine"} and not case.faults:
        assert outcome_of_ordered_run(left) == ("wrong-data" if case.wrong else "completes")


def test_the_manual_describes_each_rule(root: Path) -> None:
    text = (root / "docs" / "explanation" / "semantics.md").read_text()
    rules = [
        *(f"G{i}" for i in range(1, 17)),
        *(f"N{i}" for i in range(1, 16)),
        *(f"M{i}" for i in range(1, 8)),
    ]
    assert [rule for rule in rules if f"**{rule}** " not in text] == []
