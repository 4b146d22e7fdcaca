"""Detect requests that are never waited for.

Which call waits for which request is fixed by the program, so nothing is executed.
"""

from __future__ import annotations

import numpy as np

from distsim.common.records import dataclass
from distsim.findings.final_state import FinalState
from distsim.program.code import SharedCode
from distsim.program.features import makes_request
from distsim.program.model import Program


@dataclass(frozen=True, slots=True)
class RequestLeak:
    """Requests of one place that are never waited for.

    ``count`` is their number on all ``ranks``; ``position`` is that of one of them.
    ``overwritten``: the handle was bound again before a wait. ``dropped``: there is no handle.
    """

    site: int
    ranks: tuple[int, ...]
    count: int
    position: int
    dropped: bool
    overwritten: bool


def is_request_lost(program: Program, rank: int, position: int) -> bool:
    """Whether no call can wait for the request of a call.

    The request has no handle, or its handle is bound again before a wait.
    """
    calls = program.code(rank).calls
    call = calls[position]
    if not makes_request(call):
        return False
    return not call.handled or position in _overwritten_requests(program.code(rank))


def _overwritten_requests(code: SharedCode) -> set[int]:
    """The positions of calls whose handle is bound again before a wait."""
    return {
        position - distance for position, call in enumerate(code.calls) for distance in call.drops
    }


def first_lost_message(program: Program, rank: int, other: int, group: int, end: int) -> int | None:
    """The first message to or from another rank, before a position, whose request is lost."""
    for position, call in program.calls_of(rank):
        if position >= end:
            break
        is_between_ranks = call.peer == other and call.group.id == group
        if is_between_ranks and is_request_lost(program, rank, position):
            return position
    return None


def request_leaks(program: Program, final_state: FinalState) -> tuple[RequestLeak, ...]:
    """All leaks among the calls that were reached, by place."""
    reached = {end.rank: end.position for end in final_state.ends}
    found: dict[tuple[int, bool, bool], tuple[set[int], list[int]]] = {}
    for code in program.codes:
        open_calls = _unawaited_requests(code)
        if not open_calls:
            continue
        overwritten = _overwritten_requests(code)
        for position, rows in open_calls:
            call = code.calls[position]
            leaking = [rank for row, rank in enumerate(code.ranks) if rows is None or rows[row]]
            ranks = [rank for rank in leaking if position < reached[rank]]
            if ranks:
                key = (call.site, not call.handled, position in overwritten)
                owners, positions = found.setdefault(key, (set(), []))
                owners.update(ranks)
                positions += [position] * len(ranks)
    return tuple(
        RequestLeak(site, tuple(sorted(owners)), len(positions), positions[0], dropped, overwritten)
        for (site, dropped, overwritten), (owners, positions) in sorted(found.items())
    )


def _unawaited_requests(
    code: SharedCode,
) -> list[tuple[int, np.ndarray[tuple[int], np.dtype[np.bool_]] | None]]:
    """(position, rows that leak) of each request without a wait; None for all rows."""
    if code.guards is None and not any(c.invalid for c in code.calls):
        waited: set[int] = set()
        for position, call in enumerate(code.calls):
            waited.update(position - distance for distance in call.waits)
        requests = {id(call) for call in code.distinct_calls(parts=False) if makes_request(call)}
        positions = [p for p, call in enumerate(code.calls) if id(call) in requests]
        return [(position, None) for position in positions if position not in waited]
    rows = len(code.ranks)
    open_rows: dict[int, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}
    for position, call in enumerate(code.calls):
        guard = code.guards[position] if code.guards else None
        made = np.ones(rows, dtype=np.bool_) if guard is None else np.array(guard)
        if call.invalid is not None:
            made &= ~call.invalid.rows
        for distance in call.waits:
            if position - distance in open_rows:
                open_rows[position - distance] &= ~made
        if makes_request(call) and made.any():
            open_rows[position] = made
    return [(p, mask) for p, mask in open_rows.items() if mask.any()]
