"""In which order the calls of a run read and wrote: by time, and where times are equal, by cause.

Calls that take no time at all still follow one another. So the trace is walked once more without a
clock: a rank goes on until it is in a call that waits for others; calls that met take effect when
the last of them has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from distsim.backends import BACKEND_PROFILES
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall
from distsim.program.model import Program
from distsim.trace.model import Trace


class EffectEvent(NamedTuple):
    """A call (trace row) starts, and reads its inputs, or finishes, and writes its outputs. Events
    sort in order of effect.
    """

    at_ns: int
    number: int  # by cause
    finishes: bool
    row: int


class MatchTable(NamedTuple):
    """Trace rows by ``match`` id, and the match of each row (-1: it met nobody)."""

    members: dict[int, list[int]]
    match_of: list[int]


def match_table(trace: Trace) -> MatchTable:
    members: dict[int, list[int]] = {}
    match_of = trace["match"].tolist()
    for row, match in enumerate(match_of):
        if match >= 0:
            members.setdefault(match, []).append(row)
    return MatchTable(members, match_of)


def effect_events(program: Program, trace: Trace, matches: MatchTable) -> list[EffectEvent]:
    """All starts and finishes that can have an effect, in order. What never started or finished has
    none.
    """
    started, finished = _start_and_finish_times(trace)
    found = []
    for row, (first, last) in enumerate(causal_numbers(program, trace, matches)):
        if first >= 0 and started[row] >= 0:
            found.append(EffectEvent(started[row], first, False, row))
            if finished[row] >= 0:
                found.append(EffectEvent(finished[row], last, True, row))
    return sorted(found)


def causal_numbers(
    program: Program, trace: Trace, matches: MatchTable
) -> Iterator[tuple[int, int]]:
    """For each trace row the number of its start and of its finish, by cause; -1 where it never
    came to that.

    All that values know of who blocks whom: a list of matches in order of completion, had a run
    one, would say the same.
    """
    return _CausalNumbering(program, trace, matches).numbers()


def _start_and_finish_times(trace: Trace) -> tuple[list[int], list[int]]:
    """When each row starts and finishes. An `assign` on a host takes no time and may have none in
    the trace: then when posted.
    """
    started, finished = trace["started_ns"].tolist(), trace["finished_ns"].tolist()
    profile = BACKEND_PROFILES.get(str(trace.header.get("backend")))
    if "assign" not in trace.tables["op"] or (profile is not None and profile.device):
        return started, finished
    for row in np.flatnonzero(trace["op"] == trace.tables["op"].index("assign")).tolist():
        if started[row] < 0:
            started[row] = finished[row] = int(trace["posted_ns"][row])
    return started, finished


class _CausalNumbering:
    """Numbers every row's start and finish so that what one rank does, and what ranks do together,
    is in order.
    """

    def __init__(self, program: Program, trace: Trace, matches: MatchTable) -> None:
        self.program, self.matches = program, matches
        self.rank, self.position, self.part = (
            trace[name].tolist() for name in ("rank", "position", "part")
        )
        self.posted, op = trace["posted_ns"].tolist(), trace.tables["op"]
        self.row_class = [OPERATIONS[op[i]] for i in trace["op"].tolist()]
        self.started = [-1] * len(trace)
        self.finished = [-1] * len(trace)
        self.missing = {match: len(rows) for match, rows in matches.members.items()}
        self.clock = 0
        self.rows = self._rows_of_ranks()
        self.at = dict.fromkeys(self.rows, 0)  # the next row of each rank
        self.blocked: dict[int, deque[int]] = {}  # rank -> matches it waits for
        self.waiters: dict[int, list[int]] = {}  # match -> ranks
        self.ready: deque[int] = deque(self.rows)

    def numbers(self) -> Iterator[tuple[int, int]]:
        while True:
            while self.ready:
                self._advance(self.ready.popleft())
            if not self.blocked:
                return zip(self.started, self.finished, strict=True)
            self._release()

    def _rows_of_ranks(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        self.row_at: dict[tuple[int, int], list[int]] = {}
        for row, (rank, position) in enumerate(zip(self.rank, self.position, strict=True)):
            found.setdefault(rank, []).append(row)
            if self.matches.match_of[row] >= 0:
                self.row_at.setdefault((rank, position), []).append(row)
        return found

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _advance(self, rank: int) -> None:
        rows = self.rows[rank]
        while self.at[rank] < len(rows):
            row = rows[self.at[rank]]
            self.at[rank] += 1
            if self.posted[row] < 0:
                continue
            match = self.matches.match_of[row]
            if match >= 0:
                self._post(match)
            elif self.row_class[row].kind in ("local", "remote"):
                self.started[row], self.finished[row] = self._tick(), self._tick()
            if self._blocks(rank, row):
                return

    def _post(self, match: int) -> None:
        self.missing[match] -= 1
        if self.missing[match]:
            return
        first, last = self._tick(), self._tick()
        for row in self.matches.members[match]:
            if self.started[row] < 0:
                self.started[row] = first
            self.finished[row] = last
        for rank in self.waiters.pop(match, ()):
            waits = self.blocked[rank]
            waits.remove(match)
            if not waits:
                del self.blocked[rank]
                self.ready.append(rank)

    def _blocks(self, rank: int, row: int) -> bool:
        """Does the rank wait here? Unless it is in the middle of a batch, whose rows follow one
        another.
        """
        rows, at = self.rows[rank], self.at[rank]
        if at < len(rows) and self.position[rows[at]] == self.position[row]:
            return False
        open_matches = [m for m in self._waited(rank, row) if self.missing[m] > 0]
        if open_matches:
            self.blocked[rank] = deque(dict.fromkeys(open_matches))
            for match in self.blocked[rank]:
                self.waiters.setdefault(match, []).append(rank)
        return bool(open_matches)

    def _waited(self, rank: int, row: int) -> Iterator[int]:
        position = self.position[row]
        call = self.program.code_call(rank, position)
        for back in call.waits:
            yield from (
                self.matches.match_of[r] for r in self.row_at.get((rank, position - back), ())
            )
        if _is_blocking(call):
            yield from (self.matches.match_of[r] for r in self.row_at.get((rank, position), ()))

    def _release(self) -> None:
        """Nobody can go on, yet the run did: a send was buffered, a host ran ahead. Let the
        earliest go, senders first.
        """

        def order(rank: int) -> tuple[bool, int, int]:
            row = self.rows[rank][self.at[rank] - 1]
            return self.row_class[row].direction != "send", self.posted[row], rank

        rank = min(self.blocked, key=order)
        row = self.rows[rank][self.at[rank] - 1]
        if self.started[row] < 0 and self.row_class[row].direction == "send":
            self.started[row] = self._tick()
        for match in self.blocked.pop(rank):
            self.waiters[match].remove(rank)
        self.ready.append(rank)


def _is_blocking(call: CodeCall) -> bool:
    row = OPERATIONS[call.op]
    if row.kind == "batch":
        return not call.handled
    return row.kind in ("p2p", "collective") and not row.nonblocking and not call.is_async
