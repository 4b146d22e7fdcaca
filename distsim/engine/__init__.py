"""Simulated time: a program, the rules of a back end and the prices of a cluster give a `Run`.

A run with local clocks notes when its calls came and ended; from that the times of every trace row are filled in, all ranks at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distsim.arrays import union
from distsim.cost import CostModel
from distsim.engine.record import Columns, Run, build_trace, worst_of
from distsim.profiles import Profile
from distsim.program.records import Program
from distsim.records import no_collection
from distsim.semantics.blocked import host_position, standstill
from distsim.semantics.conditions import Conditions
from distsim.semantics.form import PartKind, Unit, Wait
from distsim.semantics.link import IntArray, Linked
from distsim.semantics.local import Progress, go
from distsim.semantics.misfits import Misfit, Misfits, why_ordered
from distsim.semantics.section import Unfold

if TYPE_CHECKING:
    from distsim.engine.general import Ordered
    from distsim.program.features import Feature


__all__ = ["SHARED_CALLS", "Run", "fill", "may_share", "outcome_of", "run"]


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


# --- the times of a run with local clocks ---


NEVER = -1


def fill(run: Progress) -> Columns:
    """The columns of a run. A host does nothing between two calls, so each call is posted when the one before it returned."""
    linked = run.linked
    columns = Columns(linked.program)
    there, ended = np.asarray(run.posted, dtype=np.int64), np.asarray(run.ended, dtype=np.int64)
    columns.posted, columns.returned = _host_times(run)
    _messages(run, there, columns)
    _collectives(run, there, columns)
    own = (linked.kind == PartKind.WORK) & (there >= 0)
    columns.started[own], columns.finished[own] = there[own], ended[own]
    _units(linked, there, ended, columns)
    columns.waited = _waits(run, columns.returned)
    return columns


def _host_times(run: Progress) -> tuple[IntArray, IntArray]:
    """(posted, returned): the host's clock carried forward over calls that took no time."""
    linked, returned = run.linked, np.asarray(run.returned, dtype=np.int64)
    base = np.array(linked.base, dtype=np.int64)
    size, starts = linked.rows, base[:-1]
    end = starts.copy()
    ran = np.array([host.pc > 0 or host.key is not None for host in run.hosts], dtype=np.bool_)  # an absent rank never does
    for rank, host in enumerate(run.hosts):
        end[rank] += linked.program.code(rank).offsets[host_position(linked, host)] if ran[rank] else 0
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
        _unit_times(linked, unit, base, posted, after)
    return posted, after


def _unit_times(linked: Linked, unit: Unit, base: IntArray, posted: IntArray, returned: IntArray) -> None:
    """The parts of a batch are posted with it and return with it; a call that a guard leaves out never was."""
    code, of = linked.program.codes[unit.code], base[list(unit.ranks)]
    pairs = [(code.offsets[p] + k, code.offsets[p]) for p, call in enumerate(code.calls) for k in range(1, len(call.parts) + 1)]
    if pairs:
        rows, sources = (np.array(x, dtype=np.int64)[:, None] + of for x in zip(*pairs, strict=True))
        posted[rows], returned[rows] = posted[sources], returned[sources]
    if code.guards is not None:
        made = {instruction.position for instruction in unit.instructions}
        gone = [r for p in range(len(code.calls)) if p not in made for r in range(code.offsets[p], code.offsets[p + 1])]
        index = np.array(gone, dtype=np.int64)[:, None] + of
        posted[index] = returned[index] = NEVER


def _messages(run: Progress, there: IntArray, columns: Columns) -> None:
    """A pair starts when both are there; data that leaves before its receive starts when there is room for it."""
    found = run.conditions
    rows = np.flatnonzero((run.linked.kind >= 0) & (run.linked.kind <= PartKind.RECEIVE) & (there >= 0))
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


def _collectives(run: Progress, there: IntArray, columns: Columns) -> None:
    linked, found = run.linked, run.conditions
    rows = np.flatnonzero((linked.kind == PartKind.COLLECTIVE) & (there >= 0))
    complete = np.array(run.missing, dtype=np.int64) == 0
    first = np.full(len(complete), linked.rows, dtype=np.int64)
    np.minimum.at(first, linked.instance[rows], rows)
    whole = rows[complete[linked.instance[rows]]]
    columns.match[whole] = first[linked.instance[whole]]
    done = whole
    if run.early:
        gone = [row for row in rows.tolist() if row in run.early and all(n >= 0 and there[n] >= 0 for n in run.early[row])]
        done = union([row for row in whole.tolist() if row not in run.early], gone).astype(np.int64)
    columns.started[done] = found.collective_starts(done, there, np.array(run.latest, dtype=np.int64))
    columns.finished[done] = columns.started[done] + found.price[done]


def _units(linked: Linked, there: IntArray, ended: IntArray, columns: Columns) -> None:
    """A batch that is one launch starts with its parts and ends with the last of them."""
    base = np.array(linked.base, dtype=np.int64)
    for unit in linked.units:
        of = base[list(unit.ranks)]
        for launch in (one for one in unit.launches if one.is_unit):
            rows = launch.row + of
            columns.started[rows], columns.finished[rows] = there[launch.parts[0].row + of], ended[rows]


def _waits(run: Progress, returned: IntArray) -> NDArray[np.int64]:
    """When the wait on a request returned."""
    linked, waited = run.linked, np.array(run.waited, dtype=np.int64)
    if linked.profile.lock:
        return waited
    base = np.array(linked.base, dtype=np.int64)
    for unit in linked.units:
        offsets = linked.program.codes[unit.code].offsets
        pairs = [(row, offsets[i.position]) for i in unit.instructions if isinstance(i, Wait) for row in i.waited]
        if pairs:
            rows, calls = (np.array(x, dtype=np.int64)[:, None] + base[list(unit.ranks)] for x in zip(*pairs, strict=True))
            waited[rows] = returned[calls]
    return waited
