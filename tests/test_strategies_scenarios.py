"""The scenarios of strategies, right ones and the mistakes people make with each: what they expect comes true."""

from __future__ import annotations

import pytest
from scenario_outputs import output_of
from strategy_checks import ROOT, STRATEGY_SCENARIOS, outcomes

from distsim.expectations import check_file
from distsim.scenario import load

each_scenario = pytest.mark.parametrize("path", STRATEGY_SCENARIOS, ids=lambda p: p.stem)


@each_scenario
def test_the_output_is_the_one_beside_the_scenario(path, monkeypatch):
    """After a wanted change: ``python tests/scenario_outputs.py``, then read the differences."""
    monkeypatch.chdir(ROOT)

    assert output_of(path) == path.with_suffix(".out").read_text(encoding="utf-8")


@each_scenario
def test_what_a_scenario_expects_comes_true(path):
    checked = check_file(path)

    assert (checked.status, [str(d) for d in checked.differences]) == ("passed", [])


@each_scenario
def test_a_correct_strategy_completes_under_gloo_and_nccl_lazy_and_eager(path):
    """A scenario that expects something else of a back end says why in its comment."""
    scenario = load(str(path))
    said = scenario.expect.outcome if isinstance(scenario.expect.outcome, dict) else {}
    if scenario.expect.verdict in ("ok", "leak") and set(said.values()) <= {"completes"}:
        assert set(outcomes(scenario).values()) == {"completes"}


@each_scenario
def test_a_scenario_says_what_it_teaches_and_what_must_come_out(path):
    scenario = load(str(path))

    assert path.read_text(encoding="utf-8").startswith("# ")
    assert scenario.name == path.stem
    assert scenario.about.endswith(".")
    assert scenario.expect.verdict is not None
