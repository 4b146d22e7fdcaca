"""Adapt the `expect` of a scenario to its repair.

A faulty scenario may expect its fault, for example `verdict: deadlock`. After the repair such an
expectation is false, and `distsim test` would fail. Only expectations that the original file met
and the repaired file does not meet are changed: a key that the repair decides gets its new value,
and every other one is removed. Expectations that were already unmet stay, because the repair did
not make them false.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from distsim.common.errors import RESOURCE_ERRORS, DistsimError
from distsim.repair.scenario_data import ScenarioData
from distsim.scenario import loads
from distsim.simulation.expectations import unmet_expectations
from distsim.simulation.simulate_scenario import Simulation, simulate

#: Details of a failure; a repaired file has none of them.
_FAILURE_KEYS = ("depends_on", "ranks", "core")


class ChangedExpectations(NamedTuple):
    """``expect``: the new section (None: no expectation is left). ``words``: what was changed."""

    expect: ScenarioData | None
    words: tuple[str, ...]


def updated_expectations(
    expect: ScenarioData, before: str, after: str, file: str
) -> ChangedExpectations:
    """The `expect` section of the repaired text ``after``; ``before`` is the original text."""
    try:
        original, repaired = _simulated(before, file), _simulated(after, file)
        unmet_before = {unmet.what for unmet in unmet_expectations(original)}
        unmet_after = {unmet.what for unmet in unmet_expectations(repaired)}
    except (DistsimError, *RESOURCE_ERRORS):
        return ChangedExpectations(expect, ())
    false_now = unmet_after - unmet_before
    changed: ScenarioData = {}
    false_keys = []
    for key, value in expect.items():
        new = _new_value(key, value, repaired, false_now)
        if new == value and type(new) is type(value):
            changed[key] = value
            continue
        false_keys.append(key)
        if new is not None:
            changed[key] = new
    words: tuple[str, ...] = ()
    if false_keys:
        named = ", ".join(false_keys)
        words = (f"the patch also updates these keys of `expect`: {named}",)
    return ChangedExpectations(changed or None, words)


def _simulated(text: str, file: str) -> Simulation:
    return simulate(loads(text, file))


def _new_value(key: str, value: Any, repaired: Simulation, false_now: set[str]) -> Any:
    """The value of a key of `expect` after the repair; None to remove it."""
    if key == "verdict" and key in false_now and repaired.verdict is not None:
        return repaired.verdict.verdict
    if key == "outcome":
        return _new_outcome(value, repaired, false_now)
    if key in _FAILURE_KEYS or key == "findings":
        return None if key in false_now else value
    if key == "values" and isinstance(value, dict):
        kept = {
            name: numbers
            for name, numbers in value.items()
            if not any(what.startswith(f"{name} on rank ") for what in false_now)
        }
        return kept or None
    return None if key in false_now else value


def _new_outcome(value: Any, repaired: Simulation, false_now: set[str]) -> Any:
    if not isinstance(value, dict):
        return repaired.outcome if "outcome" in false_now else value
    changed = dict(value)
    for backend in value:
        if f"outcome under {backend}" in false_now:
            run = simulate(
                repaired.scenario, backend=backend, with_verdict=False, with_values=False
            )
            changed[backend] = run.outcome
    return changed


__all__ = ["ChangedExpectations", "updated_expectations"]
