"""The critical path of a run: the chain of work and transfers that determined its duration.

The path is found backwards, from the call that finished last: each call was able to start when a
certain other call ended, which is the previous piece of the path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.findings.finding_types import SourceLocation
from distsim.operations.registry import COMPUTE_OPS, LOCAL_OPS, REMOTE_OPS
from distsim.trace.model import NO_LOCATION, Trace

IntArray = NDArray[np.int64]
_NEVER = np.iinfo(np.int64).max
#: ``late start``: the process had not started yet. ``wait``: no recorded work explains the time.
PathTimeKind = Literal["compute", "transfer", "sleep", "late start", "wait"]


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
    call could start when a call ended on the rank that arrived last. The arrival of a peer can also
    release the host, which waits for it while NCCL creates a communicator. If nothing ended then
    (for example in a run that hangs), a piece ``wait`` reaches back to the last call that this rank
    had finished.
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
        pieces.append(walk.gap(-1, rank, until, makespan_ns))
    while row >= 0:
        start, cause, waiter = walk.start_and_cause(row)
        pieces.append(walk.piece(row, start, until))
        until = start if cause >= 0 else 0
        if cause < 0 and start > 0:
            waiting_rank = int(walk.rank[waiter])
            cause, until = walk.before(waiting_rank, start)
            pieces.append(walk.gap(waiter, waiting_rank, until, start))
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
        self._sends = trace.ops("send", "isend")
        # Rows of work and transfers, sorted by (rank, end): the walk searches by both.
        moves = (self._match >= 0) & ~trace.ops(*LOCAL_OPS)
        busy = self._computes | self._sleeps | moves | trace.ops(*REMOTE_OPS)
        rows = np.flatnonzero(busy & (self.start >= 0) & (self.end >= self.start))
        keys = self.rank[rows].astype(np.int64) * self._span + self.end[rows]
        order = np.argsort(keys, kind="stable")
        self._rows, self._keys = rows[order], keys[order]
        self._matched = np.flatnonzero(moves)
        by_match = np.argsort(self._match[self._matched], kind="stable")
        self._by_match = self._matched[by_match]
        self._matches = self._match[self._by_match]
        #: When the work of a row began: its start, or the start of a message that was sent earlier.
        self.began = self._start_of_eager_messages()

    # --- computed only if a walk asks for them ---
    @cached_property
    def _by_post(self) -> IntArray:
        """The rows of transfers, sorted by (rank, time at which they were posted)."""
        rows = self._matched
        return rows[np.lexsort((self.posted[rows], self.rank[rows]))]

    @cached_property
    def _post_keys(self) -> IntArray:
        """The keys by which `_by_post` is sorted."""
        return self.rank[self._by_post].astype(np.int64) * self._span + self.posted[self._by_post]

    @cached_property
    def _first_post(self) -> IntArray:
        """When each rank made its first call; `_NEVER` for ranks without any."""
        posts = self.posted.astype(np.int64)
        first = np.full(self.trace.world_size, _NEVER, np.int64)
        np.minimum.at(first, self.rank[posts >= 0], posts[posts >= 0])
        return first

    def _start_of_eager_messages(self) -> IntArray:
        """The starts of all rows; of a receive whose message was on its way, the start of the send.

        A send that began together with its receive may have waited for it: the parts of an NCCL
        batch begin when the last peer has arrived.
        """
        began = self.start.astype(np.int64)
        is_new = np.concatenate([[True], self._matches[1:] != self._matches[:-1], [True]])
        firsts = np.flatnonzero(is_new)
        pairs = firsts[:-1][np.diff(firsts) == 2]
        one, other = self._by_match[pairs], self._by_match[pairs + 1]
        for recv, send in ((one, other), (other, one)):
            is_eager = (
                self._recvs[recv]
                & (self.start[send] >= 0)
                & (self.start[send] < self.start[recv])
                & (self.start[send] <= self.end[send])
                & (self.end[send] < self.end[recv])
            )
            began[recv[is_eager]] = self.start[send[is_eager]]
        return began

    def last(self) -> tuple[int, int, int]:
        """The call that finished last, as (row, rank, end); row -1 if there is none."""
        took_time = self.end[self._rows] > self.began[self._rows]
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

        The send of an eager message did not wait for another rank.
        """
        members = self.members(row)
        is_eager = self.began[row] < self.start[row]
        return int(self.began[row]), members[1:] if is_eager else members

    def start_and_cause(self, row: int) -> tuple[int, int, int]:
        """When this row's work began, and what ended then; see `cause`."""
        start, members = self.origin(row)
        cause, waiter = self.cause(members, start)
        own_start = int(self.start[row])
        if cause >= 0 or not 0 < start < own_start:
            return start, cause, waiter
        # The message was on its way, but its receive waited for an earlier kernel.
        if own_start < self.end[row]:
            own_cause, own_waiter = self.cause(self.members(row), own_start)
            if own_cause >= 0:
                return own_start, own_cause, own_waiter
        return start, cause, waiter

    def cause(self, members: IntArray, at_ns: int) -> tuple[int, int]:
        """The row that ended at this instant on the rank that arrived last, or -1.

        The second result is that rank's own row in ``members``.
        """
        # Members posted at the start itself arrived last and determined it: examine them first.
        is_last = self.posted[members] >= at_ns
        order = np.concatenate([members[is_last], members[~is_last]])
        seen: set[int] = set()
        todo = order.tolist()
        arrival: tuple[int, int] | None = None
        for member in todo:
            rank = int(self.rank[member])
            if rank in seen:
                continue
            seen.add(rank)
            for row in self._ending(rank, at_ns):
                if self.start[row] < at_ns:
                    return row, member
                # The row has no duration. It may be a receive whose message arrived now. But it may
                # also have waited for work that ended now, so work of any rank takes precedence.
                if self.began[row] < at_ns and arrival is None:
                    arrival = row, member
                # A match without duration is no cause itself: continue with its participants. A
                # send without duration may have waited for a buffer of its receiver.
                mates = self.members(row)
                if self._sends[row] or (self.end[mates] == at_ns).all():
                    todo.extend(mates.tolist())
            todo.extend(self._late_peers(rank, at_ns))
        return arrival or (-1, int(order[0]))

    def _late_peers(self, rank: int, at_ns: int) -> list[int]:
        """The rows, posted by peers at this instant, for which the host of a rank was waiting.

        A host that creates an NCCL communicator is blocked in its last call until every member has
        arrived. Such a call is not over by then, so `_ending` does not find it.
        """
        end = int(np.searchsorted(self._post_keys, rank * self._span + at_ns))
        if end == 0 or self._post_keys[end - 1] < rank * self._span:
            return []
        start = int(np.searchsorted(self._post_keys, self._post_keys[end - 1]))
        peers: list[int] = []
        # The parts of one batch are posted together.
        for row in self._by_post[start:end].tolist():
            members = self.members(row)
            if self.posted[members].max() == at_ns:
                peers.extend(members[self.posted[members] == at_ns].tolist())
        return peers

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
            if self.end[row] > self.began[row]:
                return row, int(self.end[row])
            i -= 1
        return -1, 0

    def piece(
        self, row: int, start_ns: int, end_ns: int, why: PathTimeKind | None = None
    ) -> CriticalPathPiece:
        if why is None:
            why = "compute" if self._computes[row] else "sleep" if self._sleeps[row] else "transfer"
        return CriticalPathPiece(row, int(self.rank[row]), start_ns, end_ns, why)

    def gap(self, row: int, rank: int, start_ns: int, end_ns: int) -> CriticalPathPiece:
        """Time without work, before ``row``.

        At the beginning of a run, all ranks wait in init_process_group for the process that starts
        last.
        """
        latest = self._last_starter(end_ns) if start_ns == 0 else None
        if latest is not None:
            return CriticalPathPiece(-1, latest, 0, end_ns, "late start")
        return CriticalPathPiece(row, rank, start_ns, end_ns, "wait")

    def _last_starter(self, at_ns: int) -> int | None:
        """The rank whose process started at this instant; None if that is not known."""
        starters = np.flatnonzero(self._first_post == at_ns)
        if len(starters):
            return int(starters[0])
        # A rank without calls also joins init_process_group; then no rank works before.
        absent = np.flatnonzero(self._first_post == _NEVER)
        if len(absent) and not (self.began[self._rows] < at_ns).any():
            return int(absent[0])
        return None

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
