"""Simulated time: a program, the rules of a back end and the prices of a cluster give a `Run`."""

from __future__ import annotations

from collections.abc import Mapping

from distsim.collection import no_collection
from distsim.cost import CostModel
from distsim.engine.choice import why_not_fast
from distsim.engine.deadlines import outlasts
from distsim.engine.device import DeviceEngine
from distsim.engine.flat import Disagree
from distsim.engine.host import HostEngine
from distsim.engine.record import Columns, Queues, Run, build_trace
from distsim.profiles import Profile
from distsim.program.records import Program
from distsim.standstill import Standstill

__all__ = ["Run", "run"]


#: A call, or a part of a batch: rank, position, part (-1: none).
CallKey = tuple[int, int, int]


def run(
    program: Program, profile: Profile, cost: CostModel, *, ordered: bool = False, follow: Mapping[CallKey, CallKey] | None = None
) -> Run:
    """Simulate a program under a profile.

    The fast engine runs where it is exact; ``ordered`` asks for the time-ordered one all the same. Both give the same times.
    ``follow``: the message that each receive from any source must take, in place of the one that comes first. Raises UsageError
    where such a message never comes.
    """
    with no_collection():
        return _run(program, profile, cost, ordered, follow)


def _run(program: Program, profile: Profile, cost: CostModel, ordered: bool, follow: Mapping[CallKey, CallKey] | None) -> Run:
    if not ordered and not follow and why_not_fast(program, profile, cost) is None:
        engine: type[DeviceEngine | HostEngine] = DeviceEngine if profile.device else HostEngine
        try:
            left = engine(program, profile, cost).run()
            if not outlasts(program, profile, left[0]):
                return _fast(program, profile, cost, *left)
        except Disagree:
            pass  # something met that does not fit: the explicit rules know what comes of it
    from distsim.engine.ordered import run_ordered

    return run_ordered(program, profile, cost, follow)


def _fast(
    program: Program, profile: Profile, cost: CostModel, columns: Columns, standstill: Standstill, queues: Queues | None = None
) -> Run:
    outcome = "hangs" if standstill.blocked else "completes"
    makespan = max((*(end.at_ns for end in standstill.ends), max(columns.finished, default=0)), default=0)
    trace = build_trace(
        program, columns, standstill, profile=profile.name, outcome=outcome, makespan_ns=makespan, cluster=cost.name,
        queues=queues, prices=cost.cluster.to_mapping(),
    )  # fmt: skip
    return Run(program, profile.name, outcome, trace, standstill, makespan)
