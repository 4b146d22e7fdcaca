"""A run of the time-ordered engine as a `Run`: outcome, trace, and what the back end's rules made of calls that don't fit."""

from __future__ import annotations

from distsim.cost import CostModel
from distsim.engine.deadlines import late_findings
from distsim.engine.general import Follow, Ordered, simulate_in_order
from distsim.engine.record import Run, build_trace, worst_of
from distsim.profiles import Profile
from distsim.program.records import Program


def run_ordered(program: Program, profile: Profile, cost: CostModel, follow: Follow | None = None) -> Run:
    """Simulate in the order of time. See `distsim.engine.run`."""
    left = simulate_in_order(program, profile, cost, follow)
    outcome = outcome_of(program, left)
    trace = build_trace(
        program, left.columns, left.standstill, profile=profile.name, outcome=outcome, makespan_ns=left.end_ns, cluster=cost.cluster,
        queues=left.queues,
    )  # fmt: skip
    mismatches = tuple((rows, fields) for rows, fields, _ in left.mismatches)
    return Run(program, profile.name, outcome, trace, left.standstill, left.end_ns, mismatches=mismatches, path="ordered",
               findings=late_findings(program, profile, left.late))  # fmt: skip


def outcome_of(program: Program, left: Ordered) -> str:
    """The worst that happened in a run."""
    return worst_of(
        left.standstill, {*(outcome for _, _, outcome in left.mismatches), *(("undefined",) if left.undefined else ())}
    )
