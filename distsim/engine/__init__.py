"""Simulated time: a program, the rules of a back end and the prices of a cluster give a `Run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from distsim.cost import CostModel
from distsim.engine.fill import fill
from distsim.engine.record import Columns, Run, build_trace, worst_of
from distsim.profiles import Profile
from distsim.program.records import Program
from distsim.records import no_collection
from distsim.semantics.blocked import standstill
from distsim.semantics.conditions import Conditions
from distsim.semantics.link import Linked
from distsim.semantics.local import Progress, go
from distsim.semantics.misfits import Misfit, Misfits, why_ordered
from distsim.semantics.section import Unfold

if TYPE_CHECKING:
    from distsim.engine.general import Ordered
    from distsim.program.features import Feature

__all__ = ["SHARED_CALLS", "Run", "may_share", "outcome_of", "run"]


#: Programs of more calls are not followed in the order of time only because they share links: their prices stay those of each alone.
SHARED_CALLS = 300_000
#: A call, or a part of a batch: rank, position, part (-1: none).
CallKey = tuple[int, int, int]


def may_share(program: Program, cost: CostModel) -> bool:
    """Whether ranks that stand for all can do so in the order of time, where transfers share links (`section`'s ``shared``).

    Cards that ranks have in common join those who are there with those who are not, and slow links are of single nodes.
    """
    from distsim.cost.sharing import Ports

    small = program.call_count <= SHARED_CALLS and cost.cluster.shared_links
    return small and not cost.link_faults and not Ports(cost).shared_cards


def run(
    program: Program, profile: Profile, cost: CostModel, *, ordered: bool = False, follow: Mapping[CallKey, CallKey] | None = None,
    shared: bool = False,
) -> Run:  # fmt: skip
    """Simulate a program under a profile.

    The fast engine runs where it is exact, and what it gives stands where nothing shared a link; ``ordered`` asks for the time-ordered
    one all the same. Both give the same times.
    ``follow``: the message that each receive from any source must take, in place of the one that comes first. Raises UsageError
    where such a message never comes. ``shared``: ranks that stand for others do so where links are shared, too (`may_share`).
    """
    with no_collection():
        found = None if ordered or follow else _free(program, profile, cost, shared)
        if found is not None:
            return found
        return _ordered(program, profile, cost, follow)


def _free(program: Program, profile: Profile, cost: CostModel, shared: bool) -> Run | None:
    """The run of a program in which no order decides anything; None where one does, or what is under way shares links."""
    linked = Linked(program, profile)
    misfits = Misfits(linked)
    cut, late = program.stands_for is not None, True
    if why_ordered(linked, misfits) is None:
        done = go(linked, Conditions(linked, cost))
        columns = fill(done)
        halves = bool(misfits.early) and cost.cluster.shared_links  # of a group whose members name different roots
        joined = halves or (not _one_at_a_time(program, misfits, done.conditions) and _shares(done, columns, cost))
        late = _outlasts(program, profile, columns)
        if not late and (not joined or program.call_count > SHARED_CALLS):
            return replace(_fast(done, cost, columns, list(misfits.met(done.posted))), alone=joined)
        late = late or halves
    if cut and (late or not shared or misfits.early):
        raise Unfold
    return None


def _one_at_a_time(program: Program, misfits: Misfits, conditions: Conditions) -> bool:
    """Whether nothing can be under way beside anything else: ranks only compute and make collectives of the world, and all leave each at
    one time."""
    beside: frozenset[Feature] = frozenset({"requests", "messages", "remote", "streams", "host work"})
    of_world = not any(np.any(group) for code in program.codes for group in code.groups)
    alone = of_world and program.stands_for is None and beside.isdisjoint(program.features)
    return alone and not misfits.early and not conditions.uneven


def _shares(done: Progress, columns: Columns, cost: CostModel) -> bool:
    from distsim.engine.overlap import shares

    return shares(done.conditions, columns, cost)


def _outlasts(program: Program, profile: Profile, columns: Columns) -> bool:
    """Whether a wait is longer than its timeout; none is where the run ends before the one that all groups have."""
    last = max(np.max(np.asarray(column), initial=0) for column in (columns.returned, columns.finished))
    if "timeouts" not in program.features and last <= profile.timeout_ns:
        return False
    from distsim.engine.outlasting import outlasts

    return outlasts(program, profile, columns)


def _fast(done: Progress, cost: CostModel, columns: Columns, misfits: Sequence[Misfit]) -> Run:
    left, linked = standstill(done), done.linked
    outcome = worst_of(left, (misfit.outcome for misfit in misfits))
    makespan = max((*(end.at_ns for end in left.ends), int(np.max(columns.finished, initial=0))), default=0)
    trace = build_trace(
        linked.program, columns, left, profile=linked.profile.name, outcome=outcome, makespan_ns=makespan, cluster=cost.cluster,
        queues=linked.queue_names(),
    )  # fmt: skip
    return Run(linked.program, linked.profile.name, outcome, trace, left, makespan,
               mismatches=tuple((misfit.rows, misfit.fields) for misfit in misfits))  # fmt: skip


def _ordered(program: Program, profile: Profile, cost: CostModel, follow: Mapping[CallKey, CallKey] | None) -> Run:
    from distsim.engine.deadlines import late_findings
    from distsim.engine.general import simulate_in_order

    left = simulate_in_order(program, profile, cost, follow)
    outcome = outcome_of(left)
    trace = build_trace(
        program, left.columns, left.standstill, profile=profile.name, outcome=outcome, makespan_ns=left.end_ns, cluster=cost.cluster,
        queues=left.queues,
    )  # fmt: skip
    mismatches = tuple((rows, fields) for rows, fields, _ in left.mismatches)
    return Run(program, profile.name, outcome, trace, left.standstill, left.end_ns, mismatches=mismatches, path="ordered",
               findings=late_findings(program, profile, left.late))  # fmt: skip


def outcome_of(left: Ordered) -> str:
    """The worst that happened in a run in the order of time."""
    return worst_of(
        left.standstill, {*(outcome for _, _, outcome in left.mismatches), *(("undefined",) if left.undefined else ())}
    )
