"""Requests that nobody waits for. Which call waits for which is written in the code, so no run is
needed to see it.
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
    """Requests of one place that are never waited for: by which ranks, how many in all, and why.

    ``overwritten``: the handle was bound again before it was waited for; ``dropped``: it was never
    kept.
    """

    site: int
    ranks: tuple[int, ...]
    count: int
    position: int
    dropped: bool
    overwritten: bool


def is_request_lost(program: Program, rank: int, position: int) -> bool:
    """Nobody can wait for the request of a call: it has no handle, or its handle is bound again
    first.
    """
    calls = program.code(rank).calls
    call = calls[position]
    return makes_request(call) and (
        not call.handled or any(position == p - d for p, c in enumerate(calls) for d in c.drops)
    )


def first_lost_message(program: Program, rank: int, other: int, group: int, end: int) -> int | None:
    """The first message between two ranks on a group of which nobody can wait for the request,
    before a position; None: there is none.
    """
    for position, call in program.calls_of(rank):
        if position >= end:
            break
        if (
            call.peer == other
            and call.group.id == group
            and is_request_lost(program, rank, position)
        ):
            return position
    return None


def request_leaks(program: Program, final_state: FinalState) -> tuple[RequestLeak, ...]:
    """All leaks of the calls that were reached, by place."""
    reached = {end.rank: end.position for end in final_state.ends}
    found: dict[tuple[int, bool, bool], tuple[set[int], list[int]]] = {}
    for code in program.codes:
        open_calls = _unawaited_requests(code)
        if not open_calls:
            continue
        overwritten = {p - d for p, call in enumerate(code.calls) for d in call.drops}
        for position, rows in open_calls:
            call = code.calls[position]
            ranks = [
                r
                for i, r in enumerate(code.ranks)
                if position < reached[r] and (rows is None or rows[i])
            ]
            if ranks:
                who, positions = found.setdefault(
                    (call.site, not call.handled, position in overwritten), (set(), [])
                )
                who.update(ranks)
                positions += [position] * len(ranks)
    return tuple(
        RequestLeak(site, tuple(sorted(who)), len(positions), positions[0], dropped, overwritten)
        for (site, dropped, overwritten), (who, positions) in sorted(found.items())
    )


def _unawaited_requests(
    code: SharedCode,
) -> list[tuple[int, np.ndarray[tuple[int], np.dtype[np.bool_]] | None]]:
    """(position, rows that leak: None for all) of each request without a wait."""
    if code.guards is None and not any(c.invalid for c in code.calls):
        waited = {p - d for p, call in enumerate(code.calls) for d in call.waits}
        asks = {id(call) for call in code.distinct_calls(parts=False) if makes_request(call)}
        return [
            (p, None) for p, call in enumerate(code.calls) if id(call) in asks and p not in waited
        ]
    rows = len(code.ranks)
    open_rows: dict[int, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}
    for position, call in enumerate(code.calls):
        guard = code.guards[position] if code.guards else None
        made = np.ones(rows, dtype=np.bool_) if guard is None else np.array(guard)
        if call.invalid is not None:
            made &= ~call.invalid[0]
        for d in call.waits:
            if position - d in open_rows:
                open_rows[position - d] &= ~made
        if makes_request(call) and made.any():
            open_rows[position] = made
    return [(p, mask) for p, mask in open_rows.items() if mask.any()]
