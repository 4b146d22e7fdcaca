"""The times that follow from what the fast engine noted: posts, returns, starts, matches and waits, for all ranks at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from distsim.engine.flat import request_rows
from distsim.engine.record import Columns
from distsim.ops.table import OPS
from distsim.program.records import Code, Program, at


def fill(program: Program, columns: Columns, stuck: Mapping[int, int], eager: int, one_by_one: bool = False) -> None:
    """Complete the columns of a host-driven run. ``stuck``: rank → row (in its own rows) of the call that it is blocked in.

    ``one_by_one``: a wait for several handles ends each in turn, so the first may be waited for before the last.
    A host does nothing between two calls, so each call is posted when the one before it returned.
    """
    base = np.array(columns.base, dtype=np.int64)
    end = base[1:].copy()
    for rank, row in stuck.items():
        end[rank] = base[rank] + row
    posted, returned, started, finished, waited, match = (
        np.frombuffer(getattr(columns, n), dtype=np.int64)
        for n in ("posted", "returned", "started", "finished", "waited", "match")
    )
    _posts(base, end, posted, returned)
    for code in program.codes:
        _batches(columns, code, posted, returned)
    _meetings(program, columns, posted, started, finished, match, eager)
    for code in program.codes:
        _computes(columns, code, started, posted)
        if one_by_one:
            _waits_in_turn(columns, code, waited, posted, finished)
        else:
            _waits(columns, code, waited, returned)
        if code.guards is not None:
            _unmade(columns, code, posted, returned)


def _posts(base: NDArray[np.int64], end: NDArray[np.int64], posted: NDArray[np.int64], returned: NDArray[np.int64]) -> None:
    """Carry the clock forward over calls that took no time, rank by rank at once."""
    rows = np.arange(len(returned))
    reached = np.zeros(len(returned) + 1, dtype=np.int64)
    np.add.at(reached, base[:-1], 1)
    np.add.at(reached, end, -1)
    reached_rows = np.cumsum(reached[:-1]) > 0
    last = np.maximum.accumulate(np.where(returned >= 0, rows, -1))
    start = np.repeat(base[:-1], np.diff(base))
    clock = np.where(last >= start, returned[last], 0)
    before = np.concatenate(([0], clock[:-1]))
    before[base[:-1][base[:-1] < len(before)]] = 0
    posted[reached_rows] = before[reached_rows]
    returned[reached_rows] = clock[reached_rows]
    stuck = end[end < base[1:]]
    posted[stuck] = before[stuck]


def _batches(columns: Columns, code: Code, posted: NDArray[np.int64], returned: NDArray[np.int64]) -> None:
    """The parts of a batch are posted with it and return with it."""
    pairs = [(code.offsets[p] + k, code.offsets[p]) for p, call in enumerate(code.calls) for k in range(1, len(call.parts) + 1)]
    _copy(columns, code, pairs, (posted, posted), (returned, returned))


def _copy(
    columns: Columns, code: Code, pairs: list[tuple[int, int]], *times: tuple[NDArray[np.int64], NDArray[np.int64]]
) -> None:
    """For each pair of a code's rows, on all its ranks: the first row's time becomes the second row's. ``times``: (to, from) columns."""
    if not pairs:
        return
    rows, sources = np.array(pairs, dtype=np.int64).T
    for rank in code.ranks:
        base = columns.base[rank]
        for target, source in times:
            target[base + rows] = source[base + sources]


def _meetings(program: Program, columns: Columns, posted: NDArray[np.int64], started: NDArray[np.int64], finished: NDArray[np.int64],
              match: NDArray[np.int64], eager: int) -> None:  # fmt: skip
    """`match` points from the later side of a message to the earlier one (collectives: -2 - row); make it one number for all who met."""
    later = np.flatnonzero(match >= 0)
    earlier = match[later]
    began = np.maximum(posted[later], posted[earlier])
    started[later] = started[earlier] = began
    match[later] = match[earlier] = np.minimum(later, earlier)
    together = np.flatnonzero(match < -1)
    match[together] = -2 - match[together]
    if eager >= 0:
        for code in program.codes:
            _left_behind(columns, code, posted, started, eager)


def _left_behind(columns: Columns, code: Code, posted: NDArray[np.int64], started: NDArray[np.int64], eager: int) -> None:
    """A send that is not waited for starts when it is posted."""
    for position, call in enumerate(code.calls):
        for part, piece in enumerate(call.parts or (call,), 1 if call.parts else 0):
            if OPS[piece.op].direction == "send":
                for row, rank in enumerate(code.ranks):
                    here = columns.base[rank] + code.offsets[position] + part
                    if at(piece.nbytes, row) <= eager and posted[here] >= 0:
                        started[here] = posted[here]


def _computes(columns: Columns, code: Code, started: NDArray[np.int64], posted: NDArray[np.int64]) -> None:
    rows = np.array(
        [code.offsets[p] for p, call in enumerate(code.calls) if call.op in ("compute", "sleep", "assign")], dtype=np.int64
    )
    for rank in code.ranks if len(rows) else ():
        started[columns.base[rank] + rows] = posted[columns.base[rank] + rows]


def _waits(columns: Columns, code: Code, waited: NDArray[np.int64], returned: NDArray[np.int64]) -> None:
    """`waited`: when the wait on a request returned."""
    pairs = [(row, code.offsets[p]) for p, call in enumerate(code.calls) for d in call.waits for row in request_rows(code, p - d)]
    _copy(columns, code, pairs, (waited, returned))


def _waits_in_turn(
    columns: Columns, code: Code, waited: NDArray[np.int64], posted: NDArray[np.int64], finished: NDArray[np.int64]
) -> None:
    """`waited` where a wait for several handles waits for one after the other."""
    base = np.array([columns.base[rank] for rank in code.ranks], dtype=np.int64)
    for position, call in enumerate(code.calls):
        clock, alive = posted[base + code.offsets[position]], np.ones(len(base), dtype=np.bool_)
        for distance in call.waits:
            rows = np.array(request_rows(code, position - distance), dtype=np.int64)
            ends = finished[base[:, None] + rows]
            alive &= (ends >= 0).all(axis=1) & (clock >= 0)
            clock = np.maximum(clock, ends.max(axis=1))
            waited[base[:, None] + rows] = np.where(alive, clock, -1)[:, None]


def _unmade(columns: Columns, code: Code, posted: NDArray[np.int64], returned: NDArray[np.int64]) -> None:
    """A guarded call of a rank that the guard shuts out never happened."""
    for position, mask in enumerate(code.guards or ()):
        for row in () if mask is None else np.flatnonzero(~mask).tolist():
            base = columns.base[code.ranks[row]]
            rows = slice(base + code.offsets[position], base + code.offsets[position + 1])
            posted[rows] = returned[rows] = -1
