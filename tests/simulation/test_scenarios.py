"""The scenarios that come with distsim: each teaches one thing, and each has its output beside
it.
"""

from __future__ import annotations

import pytest

from distsim.operations.registry import OPERATIONS
from distsim.scenario import load
from distsim.simulation.expectations import check_expectations
from distsim.simulation.simulate_scenario import simulate
from tests.support.scenario_outputs import ROOT, SCENARIOS, output_of
from tests.support.strategy_checks import LARGE, STRATEGY_SCENARIOS

ALL = [*SCENARIOS, *STRATEGY_SCENARIOS]
#: But for the largest: its output, which begins with outcome and verdict, is compared below.
QUICK = [path for path in ALL if path.stem != LARGE]
each_scenario = pytest.mark.parametrize("path", ALL, ids=lambda p: f"{p.parent.name}/{p.stem}")


@each_scenario
def test_the_output_is_the_one_stored_next_to_the_scenario(path, monkeypatch):
    """After a wanted change: ``python -m tests.support.scenario_outputs``, then read the
    differences.
    """
    monkeypatch.chdir(ROOT)

    assert output_of(path) == path.with_suffix(".out").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", QUICK, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_scenario_meets_its_expectations(path):
    checked = check_expectations(path)

    assert (checked.status, [str(d) for d in checked.differences]) == ("passed", [])


def test_a_scenario_states_its_lesson_and_its_expected_outcome():
    wrong = []
    for path in ALL:
        scenario = load(str(path))
        wrong += (
            [(path.stem, "no comment at its head")]
            if not path.read_text(encoding="utf-8").startswith("# ")
            else []
        )
        wrong += [(path.stem, scenario.name)] if scenario.name != path.stem else []
        wrong += [(path.stem, "no sentence in about")] if not scenario.about.endswith(".") else []
        wrong += (
            [(path.stem, "no verdict")]
            if scenario.expect is None or scenario.expect.verdict is None
            else []
        )

    assert wrong == []


def test_the_output_fits_80_columns():
    texts = {path.stem: path.with_suffix(".out").read_text(encoding="utf-8") for path in ALL}

    assert [
        (stem, line) for stem, text in texts.items() for line in text.splitlines() if len(line) > 80
    ] == []


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda p: p.stem)
def test_both_engines_end_with_the_same_values(path):
    scenario = load(str(path))
    fast, ordered = (
        simulate(scenario, with_verdict=False),
        simulate(scenario, with_verdict=False, ordered=True),
    )

    assert (fast.outcome, fast.values.final) == (ordered.outcome, ordered.values.final)


def test_every_collective_and_message_has_a_scenario():
    written = "\n".join(path.read_text(encoding="utf-8") for path in SCENARIOS)
    meeting = [
        name
        for name, row in OPERATIONS.items()
        if row.kind in ("p2p", "collective", "batch", "wait")
    ]

    assert [
        name for name in meeting if f"- {name}:" not in written and f"- {name}\n" not in written
    ] == []


def test_every_stored_output_has_a_scenario():
    outputs = {
        path.with_suffix("")
        for folder in {p.parent for p in SCENARIOS}
        for path in folder.glob("*.out")
    }

    assert outputs == {p.with_suffix("") for p in SCENARIOS}
