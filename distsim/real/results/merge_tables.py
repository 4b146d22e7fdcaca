"""Merges the time tables of all ranks into one trace.

Three things have to be derived, because no rank knows them: times relative to the common start on
one clock, which calls met (by posting order, see `posted_calls`), and when each transfer started.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distsim.backends import BACKEND_PROFILES
from distsim.engine.run_record import RunColumns, build_trace
from distsim.findings.final_state import FinalState
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.real.results.posted_calls import CallMatching
from distsim.real.shared.progress_file import read_call_times
from distsim.trace.model import NEVER, Trace

_TIME_COLUMNS = ("posted", "returned", "finished", "waited")


class PostedRow(NamedTuple):
    """A row of the trace whose call, or part of a batch, was posted."""

    row: int
    call: ResolvedCall


class RankTimeTable(NamedTuple):
    """A rank's table of a repetition. ``zero_ns``: what its clock showed at the common start."""

    table: bytes
    zero_ns: int


def merge_rank_tables(
    program: Program,
    tables: Mapping[int, RankTimeTable],
    final_state: FinalState,
    outcome: str,
    header: Mapping[str, object],
) -> Trace:
    """One trace of a recorded run.

    ``header``: what the recording adds to the header; it must contain ``backend`` and ``cluster``.
    """
    backend = str(header["backend"])
    columns = RunColumns(program)
    sources: dict[int, int] = {}
    launched: dict[int, int] = {}
    for rank, rank_times in tables.items():
        _add_rank_table(columns, rank, rank_times, sources, launched)
    rows = _posted_rows(program, columns)
    _number_matches(columns, rows, sources)
    _set_starts(columns, rows, backend, launched)
    trace = build_trace(
        program,
        columns,
        final_state,
        profile=backend,
        outcome=outcome,
        makespan_ns=_makespan_ns(columns),
        cluster=str(header["cluster"]),
    )
    facts = {
        **trace.header,
        **header,
        "source": "recorded",
        "complete": _is_complete(final_state),
    }
    messages = {
        str(end.rank): end.message
        for end in final_state.ends
        if end.message and end.status != "ended"
    }
    if messages:
        facts["said"] = messages
    return Trace(facts, trace.tables, trace.columns)


def _makespan_ns(columns: RunColumns) -> int:
    last_times = [
        int(max(column, default=0))
        for column in (columns.returned, columns.finished, columns.posted)
    ]
    return max(*last_times, 0)


def _is_complete(final_state: FinalState) -> bool:
    """All ranks came to the end of their programs."""
    if not final_state.ends or final_state.blocked:
        return False
    return all(end.status == "ended" for end in final_state.ends)


def _add_rank_table(
    columns: RunColumns,
    rank: int,
    rank_times: RankTimeTable,
    sources: dict[int, int],
    launched: dict[int, int],
) -> None:
    """Copy a rank's table into the columns, with times relative to the common start.

    ``sources`` gets the reported sources of receives, ``launched`` the times at which a device came
    to a call; both by row.
    """
    base, zero_ns = columns.base[rank], rank_times.zero_ns
    table = read_call_times(rank_times.table)
    size = min(len(table["posted"]), columns.base[rank + 1] - base)
    for name in _TIME_COLUMNS:
        times = np.array(table[name][:size], dtype=np.int64)
        shifted = np.where(times >= 0, np.maximum(times - zero_ns, 0), NEVER)
        np.frombuffer(getattr(columns, name), dtype=np.int64)[base : base + size] = shifted
    for index in range(size):
        if table["source"][index] >= 0:
            sources[base + index] = table["source"][index]
        if table["launched"][index] >= 0:
            launched[base + index] = max(table["launched"][index] - zero_ns, 0)


def _posted_rows(program: Program, columns: RunColumns) -> list[PostedRow]:
    """Every row that was posted, with its call; the parts of a batch instead of the batch."""
    found: list[PostedRow] = []
    for rank in range(program.world_size):
        for position, call in program.calls_of(rank):
            row = columns.row(program, rank, position)
            if call.parts:
                pieces = [PostedRow(row + 1 + k, part) for k, part in enumerate(call.parts)]
            else:
                pieces = [PostedRow(row, call)]
            found += [piece for piece in pieces if columns.posted[piece.row] >= 0]
    return found


def _number_matches(
    columns: RunColumns, rows: Sequence[PostedRow], sources: Mapping[int, int]
) -> None:
    """Give the rows that met a common number.

    A receive from any source took the next message of the source that it reported; one that took no
    message reported none and has no match.
    """
    calls = CallMatching[int]()
    for row, call in rows:
        if OPERATIONS[call.op].kind in ("p2p", "collective"):
            calls.post(row, call, sources.get(row))
    for number, matched_rows in enumerate(calls.matches()):
        for row in matched_rows:
            columns.match[row] = number


def _set_starts(
    columns: RunColumns,
    rows: Sequence[PostedRow],
    backend: str,
    launched: Mapping[int, int],
) -> None:
    """Derive when work started.

    A transfer starts when the last rank that it needs has posted its call. Work of a single rank
    starts when it is posted. On a GPU the launch on the device counts instead of the post.
    """
    matches: dict[int, list[PostedRow]] = defaultdict(list)
    for posted_row in rows:
        row, call = posted_row
        match = columns.match[row]
        if match >= 0:
            matches[match].append(posted_row)
        elif OPERATIONS[call.op].kind in ("local", "group"):
            columns.started[row] = launched.get(row, columns.posted[row])
    for matched_rows in matches.values():
        ready_ns = {call.rank: launched.get(row, columns.posted[row]) for row, call in matched_rows}
        for row, call in matched_rows:
            needed = _needed_ranks(call, backend)
            if all(rank in ready_ns for rank in needed):
                start_ns = max(ready_ns[rank] for rank in needed)
                finish_ns = columns.finished[row]
                columns.started[row] = start_ns if finish_ns < 0 else min(start_ns, finish_ns)


def _needed_ranks(call: ResolvedCall, backend: str) -> tuple[int, ...]:
    """The ranks whose posts a call needs before it can start, including its own."""
    operation = OPERATIONS[call.op]
    if operation.kind != "collective":
        return operation.parties(call) if call.peer is not None else (call.rank,)
    group = call.group
    profile = BACKEND_PROFILES.get(backend)
    if profile is None:
        return group.ranks
    root = group.group_rank(call.root) if call.root is not None else 0
    needs = profile.needs(call.op, group.size, root, call.group_rank)
    if needs is None:  # all members
        return group.ranks
    return tuple(sorted({call.rank, *(group.ranks[i] for i in needs)}))
