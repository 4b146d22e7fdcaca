"""Simulated time: a program, the rules of a back end and the prices of a cluster give a
`SimulatedRun`.

A run with local clocks notes when its calls came and ended; from that the times of every trace row
are filled in, all ranks at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distsim.backends import BackendProfile
from distsim.common.arrays import IntArray, sorted_union
from distsim.common.records import gc_paused
from distsim.engine.run_record import RunColumns, SimulatedRun, build_trace, worst_outcome
from distsim.hardware.cost import CostModel
from distsim.program.code import Program
from distsim.semantics.classes.representatives import FoldingError
from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.instructions import CompilationUnit, PartKind, WaitForRows
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.mismatches import ProgramMismatches, RowMismatch
from distsim.semantics.form.order_dependence import why_order_matters
from distsim.semantics.local.blocked_ranks import blocked_state_of_run, host_position
from distsim.semantics.local.rank_clocks import RunProgress
from distsim.semantics.local.run import run_local_clocks

if TYPE_CHECKING:
    from distsim.engine.event_driven import OrderedRun
    from distsim.program.features import Feature


__all__ = [
    "MAX_SHARED_LINK_CALLS",
    "SimulatedRun",
    "fill_columns",
    "may_fold_shared_links",
    "outcome_of_ordered_run",
    "run_program",
]


#: Programs of more calls are not followed in the order of time only because they share links: their
#: prices stay those of each alone.
MAX_SHARED_LINK_CALLS = 300_000
#: A call, or a part of a batch: rank, position, part (-1: none).
CallKey = tuple[int, int, int]


def may_fold_shared_links(program: Program, cost: CostModel) -> bool:
    """Whether ranks that stand for all can do so in the order of time, where transfers share links
    (`section`'s ``shared``).

    Cards that ranks have in common join those who are there with those who are not, and slow links
    are of single nodes.
    """
    from distsim.hardware.cost.max_min_fairness import LinkPorts

    small = program.call_count <= MAX_SHARED_LINK_CALLS and cost.cluster.shared_links
    return small and not cost.link_faults and not LinkPorts(cost).shared_cards


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

    The fast engine runs where it is exact, and what it gives stands where nothing shared a link;
    ``ordered`` asks for the time-ordered one all the same. Both give the same times. ``follow``:
    the message that each receive from any source must take, in place of the one that comes first.
    Raises UsageError where such a message never comes. ``shared``: ranks that stand for others do
    so where links are shared, too (`may_fold_shared_links`).
    """
    with gc_paused():
        found = (
            None if ordered or follow else _run_with_local_clocks(program, profile, cost, shared)
        )
        if found is not None:
            return found
        return _run_event_driven(program, profile, cost, follow)


def _run_with_local_clocks(
    program: Program, profile: BackendProfile, cost: CostModel, shared: bool
) -> SimulatedRun | None:
    """The run of a program in which no order decides anything; None where one does, or what is
    under way shares links.
    """
    linked = LinkedProgram(program, profile)
    misfits = ProgramMismatches(linked)
    cut, late = program.representative_of is not None, True
    if why_order_matters(linked, misfits) is None:
        done = run_local_clocks(linked, CompletionConditions(linked, cost))
        columns = fill_columns(done)
        halves = (
            bool(misfits.early) and cost.cluster.shared_links
        )  # of a group whose members name different roots
        joined = halves or (
            not _never_overlaps(program, misfits, done.conditions)
            and _shares_links(done, columns, cost)
        )
        late = _exceeds_timeout(program, profile, columns)
        if not late and (not joined or program.call_count > MAX_SHARED_LINK_CALLS):
            return replace(
                _local_clock_result(done, cost, columns, list(misfits.in_run(done.posted))),
                alone=joined,
            )
        late = late or halves
    if cut and (late or not shared or misfits.early):
        raise FoldingError
    return None


def _never_overlaps(
    program: Program, misfits: ProgramMismatches, conditions: CompletionConditions
) -> bool:
    """Whether nothing can be under way beside anything else: ranks only compute and make
    collectives of the world, and all leave each at one time."""
    beside: frozenset[Feature] = frozenset(
        {"requests", "messages", "remote", "streams", "host work"}
    )
    of_world = not any(np.any(group) for code in program.codes for group in code.groups)
    alone = of_world and program.representative_of is None and beside.isdisjoint(program.features)
    return alone and not misfits.early and not conditions.uneven


def _shares_links(done: RunProgress, columns: RunColumns, cost: CostModel) -> bool:
    from distsim.engine.overlap import has_overlap

    return has_overlap(done.conditions, columns, cost)


def _exceeds_timeout(program: Program, profile: BackendProfile, columns: RunColumns) -> bool:
    """Whether a wait is longer than its timeout; none is where the run ends before the one that all
    groups have.
    """
    last = max(
        np.max(np.asarray(column), initial=0) for column in (columns.returned, columns.finished)
    )
    if "timeouts" not in program.features and last <= profile.timeout_ns:
        return False
    from distsim.engine.timeout_check import exceeds_timeout

    return exceeds_timeout(program, profile, columns)


def _local_clock_result(
    done: RunProgress, cost: CostModel, columns: RunColumns, misfits: Sequence[RowMismatch]
) -> SimulatedRun:
    left, linked = blocked_state_of_run(done), done.linked
    outcome = worst_outcome(left, (misfit.outcome for misfit in misfits))
    makespan = max(
        (*(end.at_ns for end in left.ends), int(np.max(columns.finished, initial=0))), default=0
    )
    trace = build_trace(
        linked.program,
        columns,
        left,
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
        left,
        makespan,
        mismatches=tuple((misfit.rows, misfit.fields) for misfit in misfits),
    )


def _run_event_driven(
    program: Program,
    profile: BackendProfile,
    cost: CostModel,
    follow: Mapping[CallKey, CallKey] | None,
) -> SimulatedRun:
    from distsim.engine.deadlines import timeout_findings
    from distsim.engine.event_driven import simulate_in_order

    left = simulate_in_order(program, profile, cost, follow)
    outcome = outcome_of_ordered_run(left)
    trace = build_trace(
        program,
        left.columns,
        left.final_state,
        profile=profile.name,
        outcome=outcome,
        makespan_ns=left.end_ns,
        cluster=cost.cluster,
        queues=left.queues,
    )
    mismatches = tuple((rows, fields) for rows, fields, _ in left.mismatches)
    return SimulatedRun(
        program,
        profile.name,
        outcome,
        trace,
        left.final_state,
        left.end_ns,
        mismatches=mismatches,
        path="ordered",
        findings=timeout_findings(program, profile, left.late),
    )


def outcome_of_ordered_run(left: OrderedRun) -> str:
    """The worst that happened in a run in the order of time."""
    return worst_outcome(
        left.final_state,
        {
            *(outcome for _, _, outcome in left.mismatches),
            *(("undefined",) if left.undefined else ()),
        },
    )


# --- the times of a run with local clocks ---


NEVER = -1


def fill_columns(run: RunProgress) -> RunColumns:
    """The columns of a run. A host does nothing between two calls, so each call is posted when the
    one before it returned.
    """
    linked = run.linked
    columns = RunColumns(linked.program)
    there, ended = np.asarray(run.posted, dtype=np.int64), np.asarray(run.ended, dtype=np.int64)
    columns.posted, columns.returned = _host_times(run)
    _fill_messages(run, there, columns)
    _fill_collectives(run, there, columns)
    own = (linked.kind == PartKind.WORK) & (there >= 0)
    columns.started[own], columns.finished[own] = there[own], ended[own]
    _fill_batch_launches(linked, there, ended, columns)
    columns.waited = _wait_times(run, columns.returned)
    return columns


def _host_times(run: RunProgress) -> tuple[IntArray, IntArray]:
    """(posted, returned): the host's clock carried forward over calls that took no time."""
    linked, returned = run.linked, np.asarray(run.returned, dtype=np.int64)
    base = np.array(linked.base, dtype=np.int64)
    size, starts = linked.rows, base[:-1]
    end = starts.copy()
    ran = np.array(
        [host.pc > 0 or host.key is not None for host in run.hosts], dtype=np.bool_
    )  # an absent rank never does
    for rank, host in enumerate(run.hosts):
        end[rank] += (
            linked.program.code(rank).offsets[host_position(linked, host)] if ran[rank] else 0
        )
    start = np.zeros(len(starts), dtype=np.int64)
    start[list(linked.program.delays)] = list(linked.program.delays.values())
    rows = np.arange(size)
    last = np.maximum.accumulate(np.where(returned >= 0, rows, NEVER)) if size else rows
    own_start, limit = np.repeat(starts, np.diff(base)), np.repeat(end, np.diff(base))
    clock = np.where(last >= own_start, returned[last], np.repeat(start, np.diff(base)))
    before = np.concatenate(([0], clock[:-1]))[:size]
    first = starts[starts < base[1:]]
    before[first] = start[starts < base[1:]]
    posted = np.where(rows < limit, before, NEVER)
    after = np.where(rows < limit, clock, NEVER)
    stuck = end[(end < base[1:]) & ran]
    posted[stuck] = before[stuck]
    for unit in linked.units:
        _fill_batch_and_guarded_times(linked, unit, base, posted, after)
    return posted, after


def _fill_batch_and_guarded_times(
    linked: LinkedProgram,
    unit: CompilationUnit,
    base: IntArray,
    posted: IntArray,
    returned: IntArray,
) -> None:
    """The parts of a batch are posted with it and return with it; a call that a guard leaves out
    never was.
    """
    code, of = linked.program.codes[unit.code], base[list(unit.ranks)]
    pairs = [
        (code.offsets[p] + k, code.offsets[p])
        for p, call in enumerate(code.calls)
        for k in range(1, len(call.parts) + 1)
    ]
    if pairs:
        rows, sources = (
            np.array(x, dtype=np.int64)[:, None] + of for x in zip(*pairs, strict=True)
        )
        posted[rows], returned[rows] = posted[sources], returned[sources]
    if code.guards is not None:
        made = {instruction.position for instruction in unit.instructions}
        gone = [
            r
            for p in range(len(code.calls))
            if p not in made
            for r in range(code.offsets[p], code.offsets[p + 1])
        ]
        index = np.array(gone, dtype=np.int64)[:, None] + of
        posted[index] = returned[index] = NEVER


def _fill_messages(run: RunProgress, there: IntArray, columns: RunColumns) -> None:
    """A pair starts when both are there; data that leaves before its receive starts when there is
    room for it.
    """
    found = run.conditions
    rows = np.flatnonzero(
        (run.linked.kind >= 0) & (run.linked.kind <= PartKind.RECEIVE) & (there >= 0)
    )
    mate = found.mate[rows]
    met = (mate >= 0) & (there[np.maximum(mate, 0)] >= 0)
    both, other = rows[met], mate[met]
    columns.match[both] = np.minimum(both, other)
    columns.started[both] = np.maximum(there[both], there[other])
    columns.finished[both] = found.message_ends(both, there)
    if not found.ahead.any():
        return
    ahead = rows[found.ahead[rows] & (found.need[rows] == -1)]
    left = ahead[(found.room[ahead] < 0) | (there[np.maximum(found.room[ahead], 0)] >= 0)]
    columns.started[ahead] = columns.finished[ahead] = NEVER
    columns.started[left] = columns.finished[left] = found.message_ends(left, there)


def _fill_collectives(run: RunProgress, there: IntArray, columns: RunColumns) -> None:
    linked, found = run.linked, run.conditions
    rows = np.flatnonzero((linked.kind == PartKind.COLLECTIVE) & (there >= 0))
    complete = np.array(run.missing, dtype=np.int64) == 0
    first = np.full(len(complete), linked.rows, dtype=np.int64)
    np.minimum.at(first, linked.instance[rows], rows)
    whole = rows[complete[linked.instance[rows]]]
    columns.match[whole] = first[linked.instance[whole]]
    done = whole
    if run.early:
        gone = [
            row
            for row in rows.tolist()
            if row in run.early and all(n >= 0 and there[n] >= 0 for n in run.early[row])
        ]
        done = sorted_union([row for row in whole.tolist() if row not in run.early], gone).astype(
            np.int64
        )
    columns.started[done] = found.collective_starts(
        done, there, np.array(run.latest, dtype=np.int64)
    )
    columns.finished[done] = columns.started[done] + found.price[done]


def _fill_batch_launches(
    linked: LinkedProgram, there: IntArray, ended: IntArray, columns: RunColumns
) -> None:
    """A batch that is one launch starts with its parts and ends with the last of them."""
    base = np.array(linked.base, dtype=np.int64)
    for unit in linked.units:
        of = base[list(unit.ranks)]
        for launch in (one for one in unit.launches if one.is_unit):
            rows = launch.row + of
            columns.started[rows], columns.finished[rows] = (
                there[launch.parts[0].row + of],
                ended[rows],
            )


def _wait_times(run: RunProgress, returned: IntArray) -> NDArray[np.int64]:
    """When the wait on a request returned."""
    linked, waited = run.linked, np.array(run.waited, dtype=np.int64)
    if linked.profile.lock:
        return waited
    base = np.array(linked.base, dtype=np.int64)
    for unit in linked.units:
        offsets = linked.program.codes[unit.code].offsets
        pairs = [
            (row, offsets[i.position])
            for i in unit.instructions
            if isinstance(i, WaitForRows)
            for row in i.waited
        ]
        if pairs:
            rows, calls = (
                np.array(x, dtype=np.int64)[:, None] + base[list(unit.ranks)]
                for x in zip(*pairs, strict=True)
            )
            waited[rows] = returned[calls]
    return waited
