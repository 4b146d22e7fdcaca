"""Simulates a program under the rules of a backend with the costs of a cluster.

Key idea: local clocks are fast, and exact if no order of events matters and no transfers share a
link. So they run first; where their result does not hold, the event-driven engine runs. Both give
the same times wherever both are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from distsim.backends import BackendProfile
from distsim.common.records import gc_paused
from distsim.engine.local_run_columns import fill_columns
from distsim.engine.run_record import CallKey, RunColumns, SimulatedRun, build_trace, worst_outcome
from distsim.findings.final_state import FinalState
from distsim.hardware.cost import CostModel
from distsim.program.model import Program
from distsim.semantics.classes.representatives import FoldingError
from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.mismatches import ProgramMismatches, RowMismatch
from distsim.semantics.form.order_dependence import exits_change_result, why_order_matters
from distsim.semantics.local.blocked_ranks import blocked_state_of_run
from distsim.semantics.local.rank_clocks import RunProgress
from distsim.semantics.local.run import run_local_clocks

# Deadlines, overlap and the event-driven engine are imported inside functions: short commands do
# not need them, and start-up time counts.
if TYPE_CHECKING:
    from distsim.engine.event_driven import OrderedRun
    from distsim.program.features import Feature

#: Programs of more calls are not simulated by the event-driven engine just because they share
#: links: their transfers have the costs of transfers that run alone.
MAX_SHARED_LINK_CALLS = 300_000
#: Features of a program whose transfers may overlap with something.
_OVERLAPPING: frozenset[Feature] = frozenset(
    {"requests", "messages", "remote", "streams", "host work"}
)


def may_fold_shared_links(program: Program, cost: CostModel) -> bool:
    """Whether representatives may be simulated where transfers share links.

    That is `representative_program` with ``shared``. It is impossible if ranks have network cards
    in common, which joins kept ranks with others, or if single nodes have slow links.
    """
    from distsim.hardware.cost.max_min_fairness import LinkPorts

    if program.call_count > MAX_SHARED_LINK_CALLS or not cost.cluster.shared_links:
        return False
    return not cost.link_faults and not LinkPorts(cost).shared_cards


def run_program(
    program: Program,
    profile: BackendProfile,
    cost: CostModel,
    *,
    ordered: bool = False,
    follow: Mapping[CallKey, CallKey] | None = None,
    shared: bool = False,
) -> SimulatedRun:
    """Simulate a program under a profile.

    ``ordered`` asks for the event-driven engine even where local clocks are exact. ``follow``: the
    message that each any-source receive must take, instead of the one that arrives first. Raises
    UsageError if such a message never arrives. ``shared``: representatives stand for other ranks
    even where links are shared (`may_fold_shared_links`).
    """
    with gc_paused():
        linked = LinkedProgram(program, profile)
        run = None
        if not ordered and not follow:
            run = _run_with_local_clocks(linked, cost, shared)
        if run is None:
            run = _run_event_driven(linked, cost, follow)
        return run


def _run_with_local_clocks(
    linked: LinkedProgram, cost: CostModel, shared: bool
) -> SimulatedRun | None:
    """The run with local clocks; None if it is not exact.

    It is not if the order of events matters, if a wait exceeds its timeout, if transfers share
    links, or if ranks wait for one whose process has ended.
    """
    program, profile = linked.program, linked.profile
    mismatches = ProgramMismatches(linked)
    is_folded = program.representative_of is not None
    order_matters = why_order_matters(linked, mismatches) is not None
    times_out = roots_differ = exits_matter = False
    if not order_matters:
        done = run_local_clocks(linked, CompletionConditions(linked, cost))
        columns = fill_columns(done)
        # Members that name different roots split a collective into parts, which share links.
        roots_differ = bool(mismatches.partial_wait_rows) and cost.cluster.shared_links
        shares_links = roots_differ or _may_share_links(done, columns, mismatches, cost)
        times_out = _exceeds_timeout(program, profile, columns)
        too_large = program.call_count > MAX_SHARED_LINK_CALLS
        final_state = blocked_state_of_run(done)
        exits_matter = exits_change_result(linked, final_state, done.has_open_collective)
        if not times_out and not exits_matter and (not shares_links or too_large):
            met = list(mismatches.in_run(done.posted))
            run = _local_clock_result(done, cost, columns, final_state, met)
            return replace(run, alone=shares_links)
    if is_folded:
        needs_all_ranks = order_matters or times_out or roots_differ or exits_matter
        if needs_all_ranks or not shared or mismatches.partial_wait_rows:
            raise FoldingError
    return None


def _may_share_links(
    done: RunProgress, columns: RunColumns, mismatches: ProgramMismatches, cost: CostModel
) -> bool:
    if _never_overlaps(done.linked.program, mismatches, done.conditions):
        return False
    from distsim.engine.overlap import has_overlap

    return has_overlap(done.conditions, columns, cost)


def _never_overlaps(
    program: Program, mismatches: ProgramMismatches, conditions: CompletionConditions
) -> bool:
    """Whether no two transfers, or transfers and work, can overlap.

    So it is if ranks only compute and call collectives of the world, from which all return at the
    same time.
    """
    if program.representative_of is not None or not _OVERLAPPING.isdisjoint(program.features):
        return False
    if any(np.any(group) for code in program.codes for group in code.groups):
        return False  # a group other than the world
    return not mismatches.partial_wait_rows and not conditions.uneven


def _exceeds_timeout(program: Program, profile: BackendProfile, columns: RunColumns) -> bool:
    """Whether any wait exceeds its timeout.

    None does if the run ends before the timeout that all groups have.
    """
    ends = (np.asarray(column) for column in (columns.returned, columns.finished))
    last = max(np.max(column, initial=0) for column in ends)
    if "timeouts" not in program.features and last <= profile.timeout_ns:
        return False
    from distsim.engine.timeout_check import exceeds_timeout

    return exceeds_timeout(program, profile, columns)


def _local_clock_result(
    done: RunProgress,
    cost: CostModel,
    columns: RunColumns,
    final_state: FinalState,
    mismatches: Sequence[RowMismatch],
) -> SimulatedRun:
    linked = done.linked
    outcome = worst_outcome(final_state, (mismatch.outcome for mismatch in mismatches))
    end_times = [end.at_ns for end in final_state.ends]
    makespan = max([*end_times, int(np.max(columns.finished, initial=0))])
    trace = build_trace(
        linked.program,
        columns,
        final_state,
        profile=linked.profile.name,
        outcome=outcome,
        makespan_ns=makespan,
        cluster=cost.cluster,
        queues=linked.queue_names(),
    )
    return SimulatedRun(
        linked.program,
        linked.profile.name,
        outcome,
        trace,
        final_state,
        makespan,
        mismatches=tuple(mismatches),
    )


def _run_event_driven(
    linked: LinkedProgram, cost: CostModel, follow: Mapping[CallKey, CallKey] | None
) -> SimulatedRun:
    from distsim.engine.deadlines import timeout_findings
    from distsim.engine.event_driven import simulate_in_order

    program, profile = linked.program, linked.profile
    run = simulate_in_order(program, profile, cost, follow, linked=linked)
    outcome = outcome_of_ordered_run(run)
    trace = build_trace(
        program,
        run.columns,
        run.final_state,
        profile=profile.name,
        outcome=outcome,
        makespan_ns=run.end_ns,
        cluster=cost.cluster,
        queues=run.queues,
    )
    return SimulatedRun(
        program,
        profile.name,
        outcome,
        trace,
        run.final_state,
        run.end_ns,
        mismatches=run.mismatches,
        driver="event-driven",
        findings=timeout_findings(program, profile, run.late, run.final_state),
    )


def outcome_of_ordered_run(run: OrderedRun) -> str:
    """The worst outcome of an event-driven run."""
    outcomes = {mismatch.outcome for mismatch in run.mismatches}
    if run.undefined:
        outcomes.add("undefined")
    return worst_outcome(run.final_state, outcomes)
