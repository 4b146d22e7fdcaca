"""The critical path of a run: the chain of work and transfers that determined its duration.

The path is found backwards, from the call that finished last: each call was able to start when a
certain other call ended, which is the previous piece of the path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.findings.finding_types import SourceLocation
from distsim.operations.registry import COMPUTE_OPS, LOCAL_OPS, REMOTE_OPS
from distsim.trace.model import NO_LOCATION, Trace

IntArray = NDArray[np.int64]
PathTimeKind = Literal["compute", "transfer", "sleep", "wait"]


class CriticalPathSegment(NamedTuple):
    """A piece of the critical path; ``calls`` consecutive equal calls are merged."""

    rank: int
    op: str
    place: SourceLocation
    name: str
    start_ns: int
    end_ns: int
    why: PathTimeKind
    calls: int = 1


def critical_path(trace: Trace, makespan_ns: int) -> tuple[CriticalPathSegment, ...]:
    """The critical path, in order of time. Its pieces cover [0, makespan] without gaps.

    The path goes backwards from the last finish: each piece started when the previous one ended. A
    call could start when a call ended on the rank that arrived last. If nothing ended then (the
    host was busy, or no rank arrived), a piece ``wait`` reaches back to the last call that this
    rank had finished.
    """
    if makespan_ns <= 0:
        return ()
    walk = _BackwardWalk(trace, makespan_ns)
    return _merge_equal_segments(walk.segment(*piece) for piece in _walk_back(walk, makespan_ns))


class CriticalPathPiece(NamedTuple):
    """An unmerged piece of the critical path.

    ``row`` is a row of the trace, or -1 if nothing runs.
    """

    row: int
    rank: int
    start_ns: int
    end_ns: int
    why: PathTimeKind


def path_pieces(trace: Trace, makespan_ns: int) -> tuple[CriticalPathPiece, ...]:
    """The critical path with one piece per row of the trace; see `critical_path`."""
    return _walk_back(_BackwardWalk(trace, makespan_ns), makespan_ns) if makespan_ns > 0 else ()


def _walk_back(walk: _BackwardWalk, makespan_ns: int) -> tuple[CriticalPathPiece, ...]:
    pieces: list[CriticalPathPiece] = []
    row, rank, until = walk.last()
    if until < makespan_ns:
        pieces.append(CriticalPathPiece(-1, rank, until, makespan_ns, "wait"))
    while row >= 0:
        start, members = walk.origin(row)
        pieces.append(walk.piece(row, start, until))
        cause, waiter = walk.cause(members, start)
        until = start if cause >= 0 else 0
        if cause < 0 and start > 0:
            cause, until = walk.before(int(walk.rank[waiter]), start)
            pieces.append(walk.piece(waiter, until, start, "wait"))
        row = cause
    return tuple(reversed(pieces))


class _BackwardWalk:
    """Indexes of a trace: which calls ended at a time on a rank, and which calls matched."""

    def __init__(self, trace: Trace, makespan_ns: int) -> None:
        self.trace, self._span = trace, makespan_ns + 1
        self.rank, self.start, self.end, self.posted = (
            trace[n] for n in ("rank", "started_ns", "finished_ns", "posted_ns")
        )
        self._match = trace["match"]
        self._computes = trace.ops(*COMPUTE_OPS)
        self._sleeps = trace.ops("sleep")
        self._recvs = trace.ops("recv", "irecv")
        # Rows of work and transfers, sorted by (rank, end): the walk searches by both.
        moves = (self._match >= 0) & ~trace.ops(*LOCAL_OPS)
        busy = self._computes | self._sleeps | moves | trace.ops(*REMOTE_OPS)
        rows = np.flatnonzero(busy & (self.start >= 0) & (self.end >= self.start))
        keys = self.rank[rows].astype(np.int64) * self._span + self.end[rows]
        order = np.argsort(keys, kind="stable")
        self._rows, self._keys = rows[order], keys[order]
        matched = np.flatnonzero(moves)
        self._by_match = matched[np.argsort(self._match[matched], kind="stable")]
        self._matches = self._match[self._by_match]

    def last(self) -> tuple[int, int, int]:
        """The call that finished last, as (row, rank, end); row -1 if there is none."""
        took_time = self.end[self._rows] > self.start[self._rows]
        rows = self._rows[took_time]
        if not len(rows):
            return -1, 0, 0
        row = int(rows[np.argmax(self.end[rows])])
        return row, int(self.rank[row]), int(self.end[row])

    def members(self, row: int) -> IntArray:
        """The rows of this row's match, with the row itself first."""
        match = self._match[row]
        if match < 0:
            return np.array([row])
        low, high = np.searchsorted(self._matches, [match, match + 1])
        others = self._by_match[low:high]
        return np.concatenate([[row], others[others != row]])

    def origin(self, row: int) -> tuple[int, IntArray]:
        """When this row's work began, and the rows whose last arrival determined that time.

        An eager message, which was sent before its receive was posted, began with the send. The
        send did not wait for another rank.
        """
        members = self.members(row)
        if self._recvs[row] and len(members) == 2:
            send_start, send_end = int(self.start[members[1]]), int(self.end[members[1]])
            if 0 <= send_start <= send_end < self.end[row]:
                return send_start, members[1:]
        return int(self.start[row]), members

    def cause(self, members: IntArray, at_ns: int) -> tuple[int, int]:
        """The row that ended at this instant on the rank that arrived last, or -1.

        The second result is that rank's own row in ``members``.
        """
        # Members posted at the start itself arrived last and determined it: examine them first.
        is_last = self.posted[members] >= at_ns
        order = np.concatenate([members[is_last], members[~is_last]])
        seen: set[int] = set()
        todo = order.tolist()
        for member in todo:
            rank = int(self.rank[member])
            if rank in seen:
                continue
            seen.add(rank)
            for row in self._ending(rank, at_ns):
                if self.start[row] < at_ns:
                    return row, member
                mates = self.members(row)
                # A match without duration is no cause itself: continue with its participants.
                if (self.end[mates] == at_ns).all():
                    todo.extend(mates.tolist())
        return -1, int(order[0])

    def _ending(self, rank: int, at_ns: int) -> list[int]:
        """The rows of a rank that ended at an instant, the latest call first."""
        key = rank * self._span + at_ns
        low, high = np.searchsorted(self._keys, [key, key + 1])
        rows: list[int] = self._rows[low:high][::-1].tolist()
        return rows

    def before(self, rank: int, at_ns: int) -> tuple[int, int]:
        """The last row of a rank that ended before an instant and took time, and its end.

        The result is (-1, 0) if there is no such row.
        """
        i = int(np.searchsorted(self._keys, rank * self._span + at_ns)) - 1
        while i >= 0 and self._keys[i] >= rank * self._span:
            row = int(self._rows[i])
            if self.end[row] > self.start[row]:
                return row, int(self.end[row])
            i -= 1
        return -1, 0

    def piece(
        self, row: int, start_ns: int, end_ns: int, why: PathTimeKind | None = None
    ) -> CriticalPathPiece:
        if why is None:
            why = "compute" if self._computes[row] else "sleep" if self._sleeps[row] else "transfer"
        return CriticalPathPiece(row, int(self.rank[row]), start_ns, end_ns, why)

    def segment(
        self, row: int, rank: int, start_ns: int, end_ns: int, why: PathTimeKind
    ) -> CriticalPathSegment:
        if row < 0:
            return CriticalPathSegment(rank, "", NO_LOCATION, "", start_ns, end_ns, why)
        op, place, name = (
            self.trace.text(n, int(self.trace[n][row])) for n in ("op", "place", "name")
        )
        return CriticalPathSegment(rank, op, place, name, start_ns, end_ns, why)


def _merge_equal_segments(pieces: Iterable[CriticalPathSegment]) -> tuple[CriticalPathSegment, ...]:
    """Merge consecutive segments of equal calls."""
    merged: list[CriticalPathSegment] = []
    for piece in pieces:
        if merged and _merge_key(merged[-1]) == _merge_key(piece):
            before = merged.pop()
            piece = piece._replace(start_ns=before.start_ns, calls=before.calls + piece.calls)
        merged.append(piece)
    return tuple(merged)


def _merge_key(piece: CriticalPathSegment) -> Sequence[object]:
    return piece.rank, piece.op, piece.place, piece.name, piece.why
