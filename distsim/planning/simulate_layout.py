"""Simulates the step of a layout call by call, as `distsim simulate` does.

The estimate (`distsim.planning.estimate`) times each transfer and each kernel alone, which is never
longer than a simulation in which simultaneous transfers share links. So it is enough to simulate
the layouts with the fastest estimates.
"""

from __future__ import annotations

from typing import NamedTuple

from distsim.engine import MAX_SHARED_LINK_CALLS, may_fold_shared_links
from distsim.planning.layout_result import LayoutResult
from distsim.planning.layouts import PlanRequest
from distsim.program.lower import lower
from distsim.scenario import Scenario
from distsim.simulation.simulate_scenario import cost_model, simulate_program

#: Equal ranks that share a network card cannot be folded, so all of them are simulated in the order
#: of time. Programs with more calls are too large for that.
_MAX_EVENT_DRIVEN_CALLS = 60_000


class LayoutToSimulate(NamedTuple):
    """A layout with its estimate, and the request that it belongs to."""

    request: PlanRequest
    outcome: LayoutResult


def simulate_layout(task: LayoutToSimulate) -> LayoutResult:
    """The outcome with the simulated time of the step.

    The shares stay as they were estimated; the additional time is distributed over all parts.
    """
    request, estimated = task
    data = request.scenario(estimated.layout, request.cluster.name)
    scenario = Scenario(**{key: value for key, value in data.items() if key != "cluster"})
    program = lower(scenario)
    cost = cost_model(scenario, program, request.cluster)
    if not request.cluster.shared_links or program.call_count > MAX_SHARED_LINK_CALLS:
        # A simulation would time each transfer alone too.
        return estimated._replace(timed="exact")
    if not may_fold_shared_links(program, cost) and program.call_count > _MAX_EVENT_DRIVEN_CALLS:
        return estimated._replace(timed="short")
    simulation = simulate_program(
        scenario, program, cost, with_verdict=False, with_values=False, fold=True
    )
    return estimated.taking(simulation.makespan_ns)._replace(timed="exact")


__all__ = ["LayoutToSimulate", "simulate_layout"]
