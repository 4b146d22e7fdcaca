"""Delta debugging of scenarios: leave out whatever a failure can do without (Zeller and
Hildebrandt, doi:10.1109/32.988498).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from distsim.common.errors import RESOURCE_ERRORS, DistsimError, UsageError
from distsim.program.lower import lower
from distsim.repair.shrink_candidates import ScenarioData, smaller_scenarios
from distsim.scenario import Scenario, loads
from distsim.scenario.format.source.yaml_nodes import dump_yaml
from distsim.simulation.check_scenario import MAX_STATES, CheckResult, check_scenario

#: Smaller scenarios that are tried before the smallest so far is taken.
MAX_SHRINK_TRIALS: Final = 3000
#: Smaller scenarios are small: a search over more orders of events than this is not worth its time.
_MAX_STATES: Final = 20_000


class FailureSignature(NamedTuple):
    """What stays the same: the verdict, the first finding's code ("" where there is none), the
    outcome under the back end.
    """

    verdict: str
    cause: str
    outcome: str

    def __str__(self) -> str:
        cause = f", {self.cause} first" if self.cause else ""
        return f"verdict {self.verdict}{cause}, {self.outcome}"


class ShrinkResult(NamedTuple):
    """``text``: the scenario. ``calls``: of all ranks, before and after; ``ranks`` likewise.
    ``whole``: nothing more can be left out, else the bound on ``tried`` was hit."""

    text: str
    failure: FailureSignature
    calls: tuple[int, int]
    ranks: tuple[int, int]
    tried: int
    whole: bool


def shrink(
    data: ScenarioData, shows: Callable[[ScenarioData], bool], most: int = 600
) -> ScenarioData:
    """A smaller scenario that still ``shows`` it; after at most so many trials. What raises a
    DistsimError shows nothing.
    """
    return _ShrinkSearch(shows, most).smallest(data)


class _ShrinkSearch:
    """``tried`` of ``most`` so far; ``whole``: the last search ended because nothing more could be
    left out.
    """

    def __init__(self, shows: Callable[[ScenarioData], bool], most: int) -> None:
        self.shows, self.most, self.tried, self.whole = shows, most, 0, False

    def smallest(self, data: ScenarioData) -> ScenarioData:
        """Go on where something could be left out, and begin anew until a whole pass leaves out
        nothing.
        """
        skip, changed = 0, False
        while self.tried < self.most:
            found = self._next(data, skip)
            if found is not None:
                (skip, data), changed = found, True
            elif changed and self.tried < self.most:
                skip, changed = 0, False
            else:
                break
        self.whole = self.tried < self.most
        return data

    def _next(self, data: ScenarioData, skip: int) -> tuple[int, ScenarioData] | None:
        for k, candidate in enumerate(smaller_scenarios(data)):
            if k < skip:
                continue
            if self.tried >= self.most:
                return None
            self.tried += 1
            if self._holds(candidate):
                return k, candidate
        return None

    def _holds(self, data: ScenarioData) -> bool:
        try:
            return self.shows(data)
        except (DistsimError, *RESOURCE_ERRORS):  # no scenario any more
            return False


def failure_of(result: CheckResult) -> FailureSignature:
    """What a checked scenario fails with. Raises UsageError for one that does not fail under its
    back end.
    """
    assert result.verdict is not None
    own = result.profiles[result.backend].outcome
    if result.status() == 0:
        others = [name for name, o in result.profiles.items() if o.outcome != "completes"]
        hint = (
            f"`--backend {others[0]}` takes that one's rules"
            if others
            else "there is nothing to make small"
        )
        verb = "do" if len(others) > 1 else "does"
        worse = f", though {' and '.join(others)} {verb} not complete it" if others else ""
        raise UsageError(f"{result.file} does not fail under {result.backend}{worse}", hint)
    cause = result.findings[0].code if result.findings else ""
    return FailureSignature(result.verdict.verdict, cause, own)


def shrink_scenario(
    scenario: Scenario,
    *,
    backend: str | None = None,
    most: int = MAX_SHRINK_TRIALS,
    max_states: int = MAX_STATES,
) -> ShrinkResult:
    """The smallest scenario found with the same verdict, first finding and outcome under its back
    end (or ``backend``).

    Steps, ranks, loops, declarations, fields and sizes are left out or made smaller one after the
    other; each smaller scenario is checked anew. Raises UsageError for a scenario that does not
    fail, ScenarioErrors.
    """
    if backend is not None and backend != scenario.backend:
        scenario = scenario.model_copy(update={"backend": str(backend)})
    program = lower(scenario)
    wanted = failure_of(check_scenario(scenario, max_states=max_states))
    bound = min(max_states, _MAX_STATES)

    def shows(data: ScenarioData) -> bool:
        return _fails_with(loads(dump_yaml(data)), wanted, bound)

    search = _ShrinkSearch(shows, most)
    start = scenario.to_data(flat=True)
    best = search.smallest(start)
    text = _scenario_text(best, scenario, wanted)
    after = loads(text)
    calls, ranks = (
        (program.call_count, lower(after).call_count),
        (program.world_size, after.world.size),
    )
    return ShrinkResult(text, wanted, calls, ranks, search.tried, search.whole)


def _fails_with(scenario: Scenario, wanted: FailureSignature, max_states: int) -> bool:
    result = check_scenario(scenario, max_states=max_states)
    found = result.findings[0].code if result.findings else ""
    assert result.verdict is not None
    return (
        result.status() != 0
        and (result.verdict.verdict, found, result.profiles[result.backend].outcome) == wanted
    )


def _call_count(data: ScenarioData) -> int:
    return lower(loads(dump_yaml(data))).call_count


def _scenario_text(data: ScenarioData, scenario: Scenario, wanted: FailureSignature) -> str:
    """The file, with what comes of it as `expect`."""
    expect: dict[str, object] = {
        "verdict": wanted.verdict,
        "outcome": {scenario.backend: wanted.outcome},
    }
    if wanted.cause:
        expect["findings"] = [wanted.cause]
    rest = {key: value for key, value in data.items() if key not in ("name", "expect", "about")}
    return "# Written by distsim shrink: the fewest calls that fail in the same way.\n" + dump_yaml(
        {"name": f"{scenario.name}_small", **rest, "expect": expect}
    )


__all__ = [
    "MAX_SHRINK_TRIALS",
    "FailureSignature",
    "ShrinkResult",
    "failure_of",
    "shrink",
    "shrink_scenario",
]
