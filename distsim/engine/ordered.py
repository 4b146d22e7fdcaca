"""A run of the time-ordered engine as a `Run`: outcome, trace, and what the back end's rules made of calls that don't fit."""

from __future__ import annotations

from distsim.cost import CostModel
from distsim.engine.deadlines import late_findings
from distsim.engine.general import Ordered, simulate_in_order
from distsim.engine.record import Queues, Run, build_trace
from distsim.profiles import Profile
from distsim.program.records import Program

#: Outcomes from worst to best; the worst thing that any rank met is the run's outcome.
WORST_FIRST = ("crashes", "raises", "undefined", "hangs", "wrong-data", "completes")


def run_ordered(program: Program, profile: Profile, cost: CostModel) -> Run:
    """Simulate in the order of time. See `distsim.engine.run`."""
    left = simulate_in_order(program, profile, cost)
    outcome = outcome_of(program, left)
    trace = build_trace(
        program, left.columns, left.standstill, profile=profile.name, outcome=outcome, makespan_ns=left.end_ns, cluster=cost.name,
        queues=_queues(left),
    )  # fmt: skip
    mismatches = tuple((rows, fields) for rows, fields, _ in left.mismatches)
    return Run(program, profile.name, outcome, trace, left.standstill, left.end_ns, mismatches=mismatches, path="ordered",
               findings=late_findings(program, profile, left.late))  # fmt: skip


def outcome_of(program: Program, left: Ordered) -> str:
    """The worst that happened. A rank that a fault killed counts as a crash only where nothing else came of it."""
    happened = {outcome for _, _, outcome in left.mismatches}
    words = {"raised": "raises", "crashed": "crashes", "blocked": "hangs"}
    happened |= {words[end.status] for end in left.standstill.ends if end.status in words}
    if left.standstill.blocked:
        happened.add("hangs")
    if not happened - {"completes"} and any(end.status == "killed" for end in left.standstill.ends):
        return "crashes"
    return next((word for word in WORST_FIRST if word in happened), "completes")


def _queues(left: Ordered) -> Queues:
    names = list(dict.fromkeys(left.queues.values()))
    numbers = [-1] * len(left.columns.posted)
    for row, name in left.queues.items():
        numbers[row] = names.index(name)
    return numbers, names
