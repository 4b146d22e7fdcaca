"""Delta debugging of scenarios: remove everything that a failure does not need.

Source: Zeller and Hildebrandt, doi:10.1109/32.988498.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from distsim.checker.verdict import Verdict
from distsim.common.errors import RESOURCE_ERRORS, DistsimError, UsageError
from distsim.operations.registry import OPERATIONS
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.repair.shrink_candidates import ScenarioData, smaller_scenarios
from distsim.scenario import Scenario, loads
from distsim.scenario.format.source.yaml_nodes import dump_yaml
from distsim.simulation.check_scenario import MAX_STATES, CheckResult, check_scenario

#: Smaller scenarios that are tried before the smallest so far is taken.
MAX_SHRINK_TRIALS: Final = 3000
#: Smaller scenarios are small: a search over more orders of events than this is not worth its time.
_MAX_STATES: Final = 20_000


class WaitEdge(NamedTuple):
    """Why a rank of the core is blocked: operations and group, but no rank numbers.

    Ranks are renumbered when others are removed. ``awaited`` has a pair for each
    rank that it waits for. The first item is the operation that this rank is blocked in, or how it
    ended. The second item is whether it would make a call of the same kind on the group later. So
    a wrong order stays a wrong order.
    """

    op: str
    group: str
    any: bool
    awaited: tuple[tuple[str, bool], ...]


class FailureSignature(NamedTuple):
    """What a smaller scenario must preserve.

    ``cause``: the code of the first finding; "" if there is none. ``outcome``: that on the backend.
    ``core_size``: the number of ranks in the core (see `Verdict`). ``edges``: their waits.
    """

    verdict: str
    cause: str
    outcome: str
    depends_on: str | None = None
    core_size: int = 0
    edges: tuple[WaitEdge, ...] = ()

    def __str__(self) -> str:
        cause = f", first finding {self.cause}" if self.cause else ""
        return f"verdict {self.verdict}{cause}, outcome {self.outcome}"


class ShrinkResult(NamedTuple):
    """The smallest scenario found.

    ``calls`` and ``ranks``: their number before and after. ``whole``: nothing more can be removed;
    otherwise the bound on ``tried`` was reached.
    """

    text: str
    failure: FailureSignature
    calls: tuple[int, int]
    ranks: tuple[int, int]
    tried: int
    whole: bool


def shrink(
    data: ScenarioData, shows: Callable[[ScenarioData], bool], most: int = 600
) -> ScenarioData:
    """A smaller scenario that still ``shows`` the failure, after at most ``most`` trials.

    A scenario that raises a DistsimError does not show it.
    """
    return _ShrinkSearch(shows, most).smallest(data)


class _ShrinkSearch:
    """One search for a smaller scenario.

    ``tried``: the trials so far, at most ``most``. ``whole``: the last search ended because nothing
    more could be removed.
    """

    def __init__(self, shows: Callable[[ScenarioData], bool], most: int) -> None:
        self.shows, self.most, self.tried, self.whole = shows, most, 0, False

    def smallest(self, data: ScenarioData) -> ScenarioData:
        """Continue after each successful removal, and repeat until a whole pass removes nothing."""
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


def failure_of(result: CheckResult, program: Program) -> FailureSignature:
    """How a checked scenario fails.

    Raises UsageError if it does not fail on its backend.
    """
    assert result.verdict is not None
    if result.status() == 0:
        others = [name for name, o in result.profiles.items() if o.outcome != "completes"]
        hint = (
            f"use `--backend {others[0]}` to shrink the failure on that backend"
            if others
            else "there is no failure to preserve"
        )
        fail = "fail" if len(others) > 1 else "fails"
        worse = f" (but {' and '.join(others)} {fail})" if others else ""
        raise UsageError(f"{result.file} does not fail on {result.backend}{worse}", hint)
    return _signature(result, program)


def _signature(result: CheckResult, program: Program) -> FailureSignature:
    verdict = result.verdict
    assert verdict is not None
    cause = result.findings[0].code if result.findings else ""
    own = result.profiles[result.backend].outcome
    return FailureSignature(
        verdict.verdict,
        cause,
        own,
        verdict.depends_on,
        len(verdict.core),
        _core_waits(verdict, program),
    )


def _core_waits(verdict: Verdict, program: Program) -> tuple[WaitEdge, ...]:
    """The waits of the core in the example execution; ranks with equal waits count each."""
    state = verdict.final_state
    if state is None:
        return ()
    # By rank, the operation that it is blocked in, or how it ended; and the position.
    status: dict[int, str] = {end.rank: end.status for end in state.ends}
    positions = {end.rank: end.position for end in state.ends}
    for blocked in state.blocked:
        status[blocked.rank] = _call_at(program, blocked.rank, blocked.position)[0]
    edges = []
    for blocked in state.blocked:
        if blocked.rank not in verdict.core:
            continue
        for need in blocked.needs:
            op, group = _call_at(program, blocked.rank, need.position)
            awaited = []
            for rank in need.ranks:
                calls_later = _calls_later(program, rank, positions.get(rank, 0), op, group)
                awaited.append((status.get(rank, ""), calls_later))
            edges.append(WaitEdge(op, group, need.any, tuple(sorted(awaited))))
    return tuple(sorted(edges))


def _calls_later(program: Program, rank: int, after: int, op: str, group: str) -> bool:
    """Whether a rank has a call after a position that the operation on the group may meet."""
    if op not in OPERATIONS:
        return False
    is_collective = OPERATIONS[op].kind == "collective"
    for position, call in program.calls_of(rank):
        kind = OPERATIONS[call.op].kind
        meets = call.op == op if is_collective else kind in ("p2p", "batch")
        if position > after and meets and call.group.name == group:
            return True
    return False


def _call_at(program: Program, rank: int, position: int) -> tuple[str, str]:
    """The operation and the group of a call; empty after the last call."""
    if position >= len(program.code(rank).calls):
        return "", ""
    call = program.call(rank, position)
    return call.op, call.group.name


def shrink_scenario(
    scenario: Scenario,
    *,
    backend: str | None = None,
    most: int = MAX_SHRINK_TRIALS,
    max_states: int = MAX_STATES,
) -> ShrinkResult:
    """The smallest scenario found that fails in the same way (`FailureSignature`).

    The outcome is that on its backend (or ``backend``). Steps, ranks, loops, declarations, fields
    and sizes are removed or reduced one after the other; each smaller scenario is checked. Raises
    UsageError for a scenario that does not fail, and ScenarioErrors.
    """
    if backend is not None and backend != scenario.backend:
        scenario = scenario.model_copy(update={"backend": str(backend)})
    program = lower(scenario)
    wanted = failure_of(check_scenario(scenario, max_states=max_states), program)
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
    return result.status() != 0 and _signature(result, lower(scenario)) == wanted


def _scenario_text(data: ScenarioData, scenario: Scenario, wanted: FailureSignature) -> str:
    """The scenario file, with the failure as `expect`."""
    expect: dict[str, object] = {
        "verdict": wanted.verdict,
        "outcome": {scenario.backend: wanted.outcome},
    }
    if wanted.cause:
        expect["findings"] = [wanted.cause]
    if wanted.depends_on is not None:
        expect["depends_on"] = wanted.depends_on
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
