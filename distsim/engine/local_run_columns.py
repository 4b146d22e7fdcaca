"""The trace columns of a run with local clocks, filled for all ranks at once.

Key idea: a host does nothing between two calls, so each call is posted when the one before it
returned. The run records only the returns of calls that wait; all other times follow from these,
from the posts, and from the conditions of `distsim.semantics.form.completion`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distsim.common.arrays import BoolArray, IntArray, sorted_union
from distsim.engine.run_record import RunColumns
from distsim.program.code import SharedCode
from distsim.semantics.form.instructions import CompilationUnit, PartKind, WaitForRows
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.local.blocked_ranks import host_position
from distsim.semantics.local.rank_clocks import RunProgress

NEVER = -1


def fill_columns(run: RunProgress) -> RunColumns:
    """The columns of a run."""
    linked = run.linked
    columns = RunColumns(linked.program)
    posted = np.asarray(run.posted, dtype=np.int64)
    ended = np.asarray(run.ended, dtype=np.int64)
    columns.posted, columns.returned = _host_times(run)
    _fill_messages(run, posted, columns)
    _fill_collectives(run, posted, columns)
    own_work = (linked.kind == PartKind.WORK) & (posted >= 0)
    columns.started[own_work], columns.finished[own_work] = posted[own_work], ended[own_work]
    _fill_batch_launches(linked, posted, ended, columns)
    columns.waited = _wait_times(run, columns.returned)
    return columns


def _host_times(run: RunProgress) -> tuple[IntArray, IntArray]:
    """(posted, returned): the host's clock, carried forward over calls that took no time."""
    linked, returned = run.linked, np.asarray(run.returned, dtype=np.int64)
    base = np.array(linked.base, dtype=np.int64)
    row_count, first_rows, sizes = linked.rows, base[:-1], np.diff(base)
    has_run = _has_run(run)
    #: By rank, the row of the call that its host is in, or the row behind its last one.
    end = first_rows.copy()
    for rank in np.flatnonzero(has_run).tolist():
        position = host_position(linked, run.hosts[rank])
        end[rank] += linked.program.code(rank).offsets[position]
    start_time = np.zeros(len(first_rows), dtype=np.int64)
    start_time[list(linked.program.delays)] = list(linked.program.delays.values())

    # The clock after each row: the last return so far of the same rank, else the rank's start.
    rows = np.arange(row_count)
    last_return = rows
    if row_count:
        last_return = np.maximum.accumulate(np.where(returned >= 0, rows, NEVER))
    own_first, limit = np.repeat(first_rows, sizes), np.repeat(end, sizes)
    has_returned = last_return >= own_first
    clock = np.where(has_returned, returned[last_return], np.repeat(start_time, sizes))
    before = np.concatenate(([0], clock[:-1]))[:row_count]
    has_rows = first_rows < base[1:]
    before[first_rows[has_rows]] = start_time[has_rows]

    posted_at = np.where(rows < limit, before, NEVER)
    returned_at = np.where(rows < limit, clock, NEVER)
    # A blocked host has posted the call that it is in.
    blocked_in = end[(end < base[1:]) & has_run]
    posted_at[blocked_in] = before[blocked_in]
    for unit in linked.units:
        _copy_batch_times(linked, unit, base, posted_at, returned_at)
        _erase_guarded_calls(linked, unit, base, posted_at, returned_at)
    return posted_at, returned_at


def _has_run(run: RunProgress) -> BoolArray:
    """By rank, whether it took any step; an absent rank never does."""
    return np.array([host.pc > 0 or host.key is not None for host in run.hosts], dtype=np.bool_)


def _copy_batch_times(
    linked: LinkedProgram,
    unit: CompilationUnit,
    base: IntArray,
    posted: IntArray,
    returned: IntArray,
) -> None:
    """The parts of a batch are posted, and return, with the batch."""
    code = linked.program.codes[unit.code]
    part_rows: list[int] = []
    batch_rows: list[int] = []
    for position, call in enumerate(code.calls):
        batch_row = code.offsets[position]
        part_rows += range(batch_row + 1, batch_row + 1 + len(call.parts))
        batch_rows += [batch_row] * len(call.parts)
    if part_rows:
        unit_base = base[list(unit.ranks)]
        parts = np.array(part_rows, dtype=np.int64)[:, None] + unit_base
        batches = np.array(batch_rows, dtype=np.int64)[:, None] + unit_base
        posted[parts], returned[parts] = posted[batches], returned[batches]


def _erase_guarded_calls(
    linked: LinkedProgram,
    unit: CompilationUnit,
    base: IntArray,
    posted: IntArray,
    returned: IntArray,
) -> None:
    """Calls that a guard excludes on the unit's ranks are never posted."""
    code: SharedCode = linked.program.codes[unit.code]
    if code.guards is None:
        return
    made = {instruction.position for instruction in unit.instructions}
    excluded: list[int] = []
    for position in range(len(code.calls)):
        if position not in made:
            excluded += range(code.offsets[position], code.offsets[position + 1])
    rows = np.array(excluded, dtype=np.int64)[:, None] + base[list(unit.ranks)]
    posted[rows] = returned[rows] = NEVER


def _fill_messages(run: RunProgress, posted: IntArray, columns: RunColumns) -> None:
    """A message starts when both sides are posted.

    Data that leave before their receive start when the buffer has room for them.
    """
    conditions = run.conditions
    is_message = (run.linked.kind >= 0) & (run.linked.kind <= PartKind.RECEIVE)
    rows = np.flatnonzero(is_message & (posted >= 0))
    mate = conditions.mate[rows]
    is_matched = (mate >= 0) & (posted[np.maximum(mate, 0)] >= 0)
    matched, other = rows[is_matched], mate[is_matched]
    columns.match[matched] = np.minimum(matched, other)
    columns.started[matched] = np.maximum(posted[matched], posted[other])
    columns.finished[matched] = conditions.message_ends(matched, posted)
    if not conditions.buffered.any():
        return
    buffered = rows[conditions.buffered[rows] & (conditions.need[rows] == -1)]
    freed_by = conditions.freed_by[buffered]
    sent = buffered[(freed_by < 0) | (posted[np.maximum(freed_by, 0)] >= 0)]
    columns.started[buffered] = columns.finished[buffered] = NEVER
    columns.started[sent] = columns.finished[sent] = conditions.message_ends(sent, posted)


def _fill_collectives(run: RunProgress, posted: IntArray, columns: RunColumns) -> None:
    linked, conditions = run.linked, run.conditions
    rows = np.flatnonzero((linked.kind == PartKind.COLLECTIVE) & (posted >= 0))
    is_complete = np.array(run.missing, dtype=np.int64) == 0
    first = np.full(len(is_complete), linked.rows, dtype=np.int64)
    np.minimum.at(first, linked.instance[rows], rows)
    matched = rows[is_complete[linked.instance[rows]]]
    columns.match[matched] = first[linked.instance[matched]]
    done = matched
    if run.partial_waits:
        # Such rows may be done before all members arrive, or not although all have arrived.
        waits_for_all = [row for row in matched.tolist() if row not in run.partial_waits]
        done_early = [row for row in rows.tolist() if _has_partners_posted(run, row, posted)]
        done = sorted_union(waits_for_all, done_early).astype(np.int64)
    latest = np.array(run.latest, dtype=np.int64)
    columns.started[done] = conditions.collective_starts(done, posted, latest)
    columns.finished[done] = columns.started[done] + conditions.duration[done]


def _has_partners_posted(run: RunProgress, row: int, posted: IntArray) -> bool:
    """Whether a row that does not wait for all members has what it needs."""
    needs = run.partial_waits.get(row)
    return needs is not None and all(other >= 0 and posted[other] >= 0 for other in needs)


def _fill_batch_launches(
    linked: LinkedProgram, posted: IntArray, ended: IntArray, columns: RunColumns
) -> None:
    """A batch that is one launch starts with its parts, and ends with the last of them."""
    base = np.array(linked.base, dtype=np.int64)
    for unit in linked.units:
        unit_base = base[list(unit.ranks)]
        for launch in (launch for launch in unit.launches if launch.is_unit):
            rows = launch.row + unit_base
            columns.started[rows] = posted[launch.parts[0].row + unit_base]
            columns.finished[rows] = ended[rows]


def _wait_times(run: RunProgress, returned: IntArray) -> NDArray[np.int64]:
    """When the wait for each request returned."""
    linked, waited = run.linked, np.array(run.waited, dtype=np.int64)
    if linked.profile.lock:
        return waited  # recorded during the run, because requests are waited for one by one
    base = np.array(linked.base, dtype=np.int64)
    for unit in linked.units:
        offsets = linked.program.codes[unit.code].offsets
        requests: list[int] = []
        waits: list[int] = []
        for instruction in unit.instructions:
            if isinstance(instruction, WaitForRows):
                requests += instruction.waited
                waits += [offsets[instruction.position]] * len(instruction.waited)
        if requests:
            unit_base = base[list(unit.ranks)]
            rows = np.array(requests, dtype=np.int64)[:, None] + unit_base
            calls = np.array(waits, dtype=np.int64)[:, None] + unit_base
            waited[rows] = returned[calls]
    return waited
