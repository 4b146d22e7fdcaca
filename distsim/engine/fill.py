"""The times of every trace row, from what a run with local clocks noted: all ranks at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distsim.arrays import union
from distsim.engine.record import Columns
from distsim.semantics.blocked import host_position
from distsim.semantics.form import PartKind, Unit, Wait
from distsim.semantics.link import IntArray, Linked
from distsim.semantics.local import Progress

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
