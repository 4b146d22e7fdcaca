"""Reads the calls of a rank that a data-flow picture draws.

Of a large run, single computes would fill the picture and leave no room for communication, so
consecutive computes of one pass share a box.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distsim.operations.registry import COMPUTE_OPS, OPERATIONS
from distsim.output.pictures.components.dataflow_rows import DrawnCall
from distsim.output.trace_data.activity import pass_letter
from distsim.program.model import Program
from distsim.trace.model import Trace

if TYPE_CHECKING:
    from distsim.engine.run_record import SimulatedRun


def rank_calls(
    program: Program,
    run: SimulatedRun,
    rank: int,
    column: int,
    chosen: NDArray[np.bool_],
    bound: tuple[int, bool],
) -> tuple[list[DrawnCall], int]:
    """The first (or last) of the chosen calls that a rank made, and how many there are. A batch
    counts as its parts.
    """
    trace, (most, last) = run.trace, bound
    batches = trace.ops(*(name for name, row in OPERATIONS.items() if row.kind == "batch")) & (
        trace["part"] < 0
    )
    rows = np.flatnonzero((trace["rank"] == rank) & chosen & ~batches).tolist()
    differs = {row for mismatch in run.mismatches for row in mismatch.rows}
    found: list[DrawnCall] = []
    runs = _joined_computes(run.trace, rows) if len(rows) > most else [[row] for row in rows]
    for joined in runs[-most:] if last else runs[:most]:
        row = _named_row(run.trace, joined)
        position, part = int(trace["position"][row]), int(trace["part"][row])
        call = program.call(rank, position)
        call = call.parts[part] if part >= 0 else call
        kind = OPERATIONS[call.op].kind
        done = int(trace["returned_ns" if kind == "wait" else "finished_ns"][row]) >= 0
        facts = (int(trace["match"][row]), done, int(trace["nbytes"][row]), row in differs)
        found.append(
            DrawnCall(
                column,
                rank,
                position,
                part,
                call,
                kind,
                *facts,
                joined=len(joined) - 1,
                joined_ns=_elapsed_ns(run.trace, joined),
                code=program.code_of[rank],
            )
        )
    _link_requests(program, rank, found)
    return found, len(rows)


def _joined_computes(trace: Trace, rows: Sequence[int]) -> list[list[int]]:
    """The rows of a rank, with consecutive computes of one pass together.

    Launches by the host belong to the pass around them.
    """
    computes = trace.ops(*COMPUTE_OPS)
    runs: list[list[int]] = []
    kind_of_run = ""
    for row in rows:
        name = trace.text("name", int(trace["name"][row]))
        kind = pass_letter(name) or name
        is_host_work = trace.text("queue", int(trace["queue"][row])) == "host"
        continues = bool(runs) and computes[row] and computes[runs[-1][-1]]
        if continues and (is_host_work or kind_of_run in (kind, "")):
            runs[-1].append(row)
        else:
            runs.append([row])
            kind_of_run = ""
        if not is_host_work:
            kind_of_run = kind
    return runs


def _named_row(trace: Trace, rows: Sequence[int]) -> int:
    """The row that gives a box its name: the first one that is not work of the host."""
    queue = trace["queue"]
    return next((r for r in rows if trace.text("queue", int(queue[r])) != "host"), rows[0])


def _elapsed_ns(trace: Trace, rows: Sequence[int]) -> int:
    """From the first start of some computes to their last end."""
    ends = trace["finished_ns"][list(rows)]
    return int(ends.max() - trace["started_ns"][list(rows)].min())


def _link_requests(program: Program, rank: int, events: Sequence[DrawnCall]) -> None:
    """Give each wait the requests that it ends."""
    by_position: dict[int, list[DrawnCall]] = {}
    for event in events:
        by_position.setdefault(event.position, []).append(event)
    for event in events:
        if event.kind == "wait":
            backs = program.code_call(rank, event.position).waits
            event.requests = [
                e for back in backs for e in by_position.get(event.position - back, ())
            ]
