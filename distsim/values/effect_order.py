"""In which order the calls of a run read and wrote: by time and, at equal times, by cause.

Key idea: calls that take no time still have an order. So the trace is executed once more without a
clock: a rank continues until it is in a call that waits for others, and matched calls take effect
when the last of them arrives. Each start and finish gets a number in the order of this execution,
which decides where times are equal.

This module does not know the rules of a backend. Where a rank was not blocked in the run, although
it would be here (a buffered send, a host that runs ahead), it lets the earliest rank continue.
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

#: The number of a start or finish that never happened.
_NEVER = -1


class EffectEvent(NamedTuple):
    """A call (trace row) starts and reads its inputs, or finishes and writes its outputs.

    Events sort in order of effect. ``number`` is the causal number of the start or finish.
    """

    at_ns: int
    number: int
    finishes: bool
    row: int


class MatchTable(NamedTuple):
    """Trace rows by ``match`` id, and the match of each row (-1: it matched no other call)."""

    members: dict[int, list[int]]
    match_of: list[int]


def match_table(trace: Trace) -> MatchTable:
    """The matches of a trace."""
    members: dict[int, list[int]] = {}
    match_of = trace["match"].tolist()
    for row, match in enumerate(match_of):
        if match >= 0:
            members.setdefault(match, []).append(row)
    return MatchTable(members, match_of)


def effect_events(program: Program, trace: Trace, matches: MatchTable) -> list[EffectEvent]:
    """All starts and finishes in order of effect.

    A call that never started reads nothing; a call that never finished writes nothing.
    """
    started, finished = _start_and_finish_times(trace)
    events = []
    for row, (first, last) in enumerate(causal_numbers(program, trace, matches)):
        if first == _NEVER or started[row] < 0:
            continue
        events.append(EffectEvent(started[row], first, False, row))
        if finished[row] >= 0:
            events.append(EffectEvent(finished[row], last, True, row))
    return sorted(events)


def causal_numbers(
    program: Program, trace: Trace, matches: MatchTable
) -> Iterator[tuple[int, int]]:
    """For each trace row the causal numbers of its start and of its finish; -1: never happened.

    This is all that values need to know about which call waits for which. A list of matches in
    order of completion would serve as well, but a run does not keep one.
    """
    return _CausalNumbering(program, trace, matches).numbers()


def _start_and_finish_times(trace: Trace) -> tuple[list[int], list[int]]:
    """When each row starts and finishes.

    An `assign` on a host takes no time, and may have no times in the trace. Then the time when it
    was posted is used.
    """
    started, finished = trace["started_ns"].tolist(), trace["finished_ns"].tolist()
    profile = BACKEND_PROFILES.get(str(trace.header.get("backend")))
    runs_on_device = profile is not None and profile.device
    if "assign" not in trace.tables["op"] or runs_on_device:
        return started, finished
    for row in np.flatnonzero(trace["op"] == trace.tables["op"].index("assign")).tolist():
        if started[row] < 0:
            started[row] = finished[row] = int(trace["posted_ns"][row])
    return started, finished


class _CausalNumbering:
    """Numbers every row's start and finish in an order that respects every dependency.

    Dependencies are the order of the calls of one rank, and the calls that match each other.

    - ``rows_of_rank``: the trace rows of each rank; ``next_row``: the index in it from which the
      rank continues.
    - ``matched_rows``: (rank, position) -> its rows that have a match.
    - ``missing``: by match, how many of its calls have not been posted yet.
    - ``blocked``: rank -> the matches that it waits for; ``waiters``: match -> blocked ranks.
      Both have the same pairs.
    - ``ready``: ranks that can continue.
    """

    def __init__(self, program: Program, trace: Trace, matches: MatchTable) -> None:
        self.program = program
        self.matches = matches
        self.rank = trace["rank"].tolist()
        self.position = trace["position"].tolist()
        self.posted = trace["posted_ns"].tolist()
        op_names = trace.tables["op"]
        self.operation = [OPERATIONS[op_names[number]] for number in trace["op"].tolist()]
        self.started = [_NEVER] * len(trace)
        self.finished = [_NEVER] * len(trace)
        self.missing = {match: len(rows) for match, rows in matches.members.items()}
        self.clock = 0
        self.rows_of_rank: dict[int, list[int]] = {}
        self.matched_rows: dict[tuple[int, int], list[int]] = {}
        for row, (rank, position) in enumerate(zip(self.rank, self.position, strict=True)):
            self.rows_of_rank.setdefault(rank, []).append(row)
            if matches.match_of[row] >= 0:
                self.matched_rows.setdefault((rank, position), []).append(row)
        self.next_row = dict.fromkeys(self.rows_of_rank, 0)
        self.blocked: dict[int, deque[int]] = {}
        self.waiters: dict[int, list[int]] = {}
        self.ready: deque[int] = deque(self.rows_of_rank)

    def numbers(self) -> Iterator[tuple[int, int]]:
        """By row, the numbers of its start and of its finish."""
        while True:
            while self.ready:
                self._advance(self.ready.popleft())
            if not self.blocked:
                return zip(self.started, self.finished, strict=True)
            self._release_one()

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _advance(self, rank: int) -> None:
        """Run a rank until it blocks or has no more rows."""
        rows = self.rows_of_rank[rank]
        while self.next_row[rank] < len(rows):
            row = rows[self.next_row[rank]]
            self.next_row[rank] += 1
            if self.posted[row] < 0:
                continue
            match = self.matches.match_of[row]
            if match >= 0:
                self._post(match)
            elif self.operation[row].kind in ("local", "remote"):
                self.started[row] = self._tick()
                self.finished[row] = self._tick()
            if self._blocks(rank, row):
                return

    def _post(self, match: int) -> None:
        """One more call of a match is posted; the last one completes the match."""
        self.missing[match] -= 1
        if self.missing[match]:
            return
        first, last = self._tick(), self._tick()
        for row in self.matches.members[match]:
            # A buffered send may have started earlier.
            if self.started[row] == _NEVER:
                self.started[row] = first
            self.finished[row] = last
        for rank in self.waiters.pop(match, ()):
            awaited = self.blocked[rank]
            awaited.remove(match)
            if not awaited:
                del self.blocked[rank]
                self.ready.append(rank)

    def _blocks(self, rank: int, row: int) -> bool:
        """Whether a rank waits in the call of a row. If it does, the rank becomes blocked."""
        # A batch has several rows, one after the other: only after the last one can it wait.
        rows, following = self.rows_of_rank[rank], self.next_row[rank]
        if following < len(rows) and self.position[rows[following]] == self.position[row]:
            return False
        open_matches = [m for m in self._awaited_matches(rank, row) if self.missing[m] > 0]
        if not open_matches:
            return False
        # Without duplicates: each match is removed only once when it completes.
        self.blocked[rank] = deque(dict.fromkeys(open_matches))
        for match in self.blocked[rank]:
            self.waiters.setdefault(match, []).append(rank)
        return True

    def _awaited_matches(self, rank: int, row: int) -> Iterator[int]:
        """The matches that must be complete before the call of a row returns."""
        position = self.position[row]
        call = self.program.code_call(rank, position)
        for distance in call.waits:
            yield from self._matches_of_call(rank, position - distance)
        if _is_blocking(call):
            yield from self._matches_of_call(rank, position)

    def _matches_of_call(self, rank: int, position: int) -> Iterator[int]:
        rows = self.matched_rows.get((rank, position), ())
        return (self.matches.match_of[row] for row in rows)

    def _release_one(self) -> None:
        """Let one rank continue when all are blocked here although the run went on.

        In the run a send was buffered, or a host ran ahead of its device. Senders go first, then
        the rank whose call was posted first.
        """
        rank = min(self.blocked, key=self._release_order)
        row = self._current_row(rank)
        if self.started[row] == _NEVER and self.operation[row].direction == "send":
            self.started[row] = self._tick()
        for match in self.blocked.pop(rank):
            self.waiters[match].remove(rank)
        self.ready.append(rank)

    def _release_order(self, rank: int) -> tuple[bool, int, int]:
        row = self._current_row(rank)
        return self.operation[row].direction != "send", self.posted[row], rank

    def _current_row(self, rank: int) -> int:
        """The row of the call that a rank is in."""
        return self.rows_of_rank[rank][self.next_row[rank] - 1]


def _is_blocking(call: CodeCall) -> bool:
    """Whether a call returns only when it is complete. A batch that returns requests does not."""
    operation = OPERATIONS[call.op]
    if operation.kind == "batch":
        return not call.handled
    if operation.kind not in ("p2p", "collective"):
        return False
    return not operation.nonblocking and not call.is_async
