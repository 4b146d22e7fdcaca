"""From the tables of all ranks to one trace: clocks brought together, calls that met matched,
starts worked out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
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

PostedRows = list[tuple[int, ResolvedCall]]  # (row of the trace, call)


class RankTimeTable(NamedTuple):
    """A rank's table of a repetition. ``zero_ns``: what its clock showed at the common start."""

    table: bytes
    zero_ns: int


def merge_rank_tables(
    program: Program,
    tables: Mapping[int, RankTimeTable],
    left: FinalState,
    outcome: str,
    header: Mapping[str, object],
) -> Trace:
    """One trace of a recorded run. ``header``: what the recording adds to the header, ``backend``
    and ``cluster`` among it.
    """
    columns = RunColumns(program)
    sources: dict[int, int] = {}
    launched: dict[int, int] = {}
    for rank, times in tables.items():
        _add_rank_table(columns, rank, times, sources, launched)
    rows = _posted_rows(program, columns)
    _number_matches(columns, rows, sources)
    _set_starts(columns, rows, str(header["backend"]), launched)
    makespan_ns = max(
        (int(max(c, default=0)) for c in (columns.returned, columns.finished, columns.posted)),
        default=0,
    )
    trace = build_trace(
        program,
        columns,
        left,
        profile=str(header["backend"]),
        outcome=outcome,
        makespan_ns=max(makespan_ns, 0),
        cluster=str(header["cluster"]),
    )
    complete = (
        bool(left.ends) and not left.blocked and all(end.status == "ended" for end in left.ends)
    )
    said = {
        str(end.rank): end.message for end in left.ends if end.message and end.status != "ended"
    }
    facts = {
        **trace.header,
        **header,
        "source": "recorded",
        "complete": complete,
        **({"said": said} if said else {}),
    }
    return Trace(facts, trace.tables, trace.columns)


def _add_rank_table(
    columns: RunColumns,
    rank: int,
    rank_times: RankTimeTable,
    sources: dict[int, int],
    launched: dict[int, int],
) -> None:
    """A rank's table into the columns; ``launched``: row -> when its device came to it."""
    base, zero_ns = columns.base[rank], rank_times.zero_ns
    table = read_call_times(rank_times.table)
    size = min(len(table["posted"]), columns.base[rank + 1] - base)
    for name in ("posted", "returned", "finished", "waited"):
        times = np.array(table[name][:size], dtype=np.int64)
        shifted = np.where(times >= 0, np.maximum(times - zero_ns, 0), NEVER)
        np.frombuffer(getattr(columns, name), dtype=np.int64)[base : base + size] = shifted
    for i in range(size):
        if table["source"][i] >= 0:
            sources[base + i] = table["source"][i]
        if table["launched"][i] >= 0:
            launched[base + i] = max(table["launched"][i] - zero_ns, 0)


def _posted_rows(program: Program, columns: RunColumns) -> PostedRows:
    """Every row that was posted, with its call; batches by their parts."""
    found: PostedRows = []
    for rank in range(program.world_size):
        for position, call in program.calls_of(rank):
            row = columns.row(program, rank, position)
            pieces = (
                [(row + 1 + k, part) for k, part in enumerate(call.parts)]
                if call.parts
                else [(row, call)]
            )
            found += [(r, c) for r, c in pieces if columns.posted[r] >= 0]
    return found


def _number_matches(columns: RunColumns, rows: PostedRows, sources: Mapping[int, int]) -> None:
    """Number what met. A receive from any source took the next message of the rank that it says
    itself; one that took none has no match.
    """
    calls = CallMatching[int]()
    for row, call in rows:
        if OPERATIONS[call.op].kind in ("p2p", "collective"):
            calls.post(row, call, sources.get(row))
    for number, met in enumerate(calls.met()):
        for row in met:
            columns.match[row] = number


def _set_starts(
    columns: RunColumns, rows: PostedRows, backend: str, launched: Mapping[int, int]
) -> None:
    """A transfer starts when the last one it needs has come; work of one rank's own when it is
    posted, or its device comes to it.
    """
    members: dict[int, list[tuple[int, ResolvedCall]]] = defaultdict(list)
    for row, call in rows:
        match = columns.match[row]
        if match >= 0:
            members[match].append((row, call))
        elif OPERATIONS[call.op].kind in ("local", "group"):
            columns.started[row] = launched.get(row, columns.posted[row])
    for met in members.values():
        posted = {call.rank: launched.get(row, columns.posted[row]) for row, call in met}
        for row, call in met:
            needed = _awaited_ranks(call, backend)
            if all(rank in posted for rank in needed):
                start = max(posted[rank] for rank in needed)
                end = columns.finished[row]
                columns.started[row] = start if end < 0 else min(start, end)


def _awaited_ranks(call: ResolvedCall, backend: str) -> tuple[int, ...]:
    """Whom a call waits for, itself included."""
    if OPERATIONS[call.op].kind != "collective":
        peers = OPERATIONS[call.op].parties(call)
        return peers if call.peer is not None else (call.rank,)
    profile, group = BACKEND_PROFILES.get(backend), call.group
    root = group.group_rank(call.root) if call.root is not None else 0
    needs = (
        profile.needs(call.op, group.size, root, call.group_rank) if profile is not None else None
    )
    return (
        group.ranks
        if needs is None
        else tuple(sorted({call.rank, *(group.ranks[i] for i in needs)}))
    )
