"""The step of a layout as `distsim simulate` tells it, call by call, where what is under way at
once shares links or a device.

A plan prices each transfer and each kernel alone (`distsim.planning.estimate`), which is never
longer. So the fastest so timed are simulated, until those that are shown are the fastest of all.
"""

from __future__ import annotations

from typing import NamedTuple

from distsim.engine import MAX_SHARED_LINK_CALLS, may_fold_shared_links
from distsim.planning.layout_result import LayoutResult
from distsim.planning.layouts import PlanRequest
from distsim.program.lower import lower
from distsim.scenario import Scenario
from distsim.simulation.simulate_scenario import cost_model, simulate_program

#: Ranks that do the same and have a network card in common are all followed in the order of time;
#: up to so many calls.
_MAX_EVENT_DRIVEN_CALLS = 60_000


class LayoutToSimulate(NamedTuple):
    """A layout that was timed, and of what."""

    question: PlanRequest
    outcome: LayoutResult


def simulate_layout(asked: LayoutToSimulate) -> LayoutResult:
    """The outcome with the step's time as `simulate` tells it; shares stay, what became longer is
    dealt out over all.
    """
    question, one = asked
    data = question.scenario(one.layout, question.cluster.name)
    scenario = Scenario(**{key: value for key, value in data.items() if key != "cluster"})
    program = lower(scenario)
    cost = cost_model(scenario, program, question.cluster)
    if not question.cluster.shared_links or program.call_count > MAX_SHARED_LINK_CALLS:
        return one._replace(timed="exact")  # then a simulation prices each alone, too
    if not may_fold_shared_links(program, cost) and program.call_count > _MAX_EVENT_DRIVEN_CALLS:
        return one._replace(timed="short")
    found = simulate_program(
        scenario, program, cost, with_verdict=False, with_values=False, fold=True
    )
    return one.taking(found.makespan_ns)._replace(timed="exact")


__all__ = ["LayoutToSimulate", "simulate_layout"]
