"""Two runs laid side by side: which calls stand opposite each other, where the runs first part, and what makes one of them longer.

Calls are aligned rank by rank in program order, by what they are (operation, group, peer, tag, bytes, dtype), never by when they ran.
What adds to the difference in makespan is read from the two critical paths: each tiles its run, so the differences of their
shares add up to the difference of the makespans, exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from distsim.timeline import path_pieces, rank_times
from distsim.trace import Trace, TraceCall

Kind = Literal["call", "met", "value", "time"]
#: Beyond so many calls that don't simply follow each other, difflib may pass over frequent ones.
_THOROUGH: Final = 2000


class Parting(NamedTuple):
    """A difference. ``a``, ``b``: rows of the two traces, -1 where a run has no such call. ``rank`` is -1 for values of many ranks."""

    kind: Kind
    rank: int
    a: int
    b: int
    text: str
    at_ns: int


class Cause(NamedTuple):
    """One kind of work on the critical paths. ``why``: compute, transfer, sleep or wait. ``delta_ns`` = b - a."""

    why: str
    op: str
    name: str
    group: str
    nbytes: int
    a_ns: int
    b_ns: int
    a_calls: int
    b_calls: int

    @property
    def delta_ns(self) -> int:
        return self.b_ns - self.a_ns


class OpTimes(NamedTuple):
    """All aligned calls of one operation, group (of one axis) and size: mean time under way, and mean time in the call before that."""

    op: str
    name: str
    group: str
    nbytes: int
    calls: int
    a_ns: int
    b_ns: int
    a_waiting_ns: int
    b_waiting_ns: int


class RankShares(NamedTuple):
    """Of one rank, ns in A and in B."""

    rank: int
    compute: tuple[int, int]
    exposed: tuple[int, int]
    waiting: tuple[int, int]
    idle: tuple[int, int]


@dataclass(frozen=True)
class Comparison:
    """``pairs``: rows of A and B that stand opposite each other. ``partings``: in order of time in A. ``same``: none beyond tolerance."""

    a: Trace
    b: Trace
    tolerance: float
    pairs: tuple[tuple[int, int], ...]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    partings: tuple[Parting, ...]
    causes: tuple[Cause, ...]
    ops: tuple[OpTimes, ...]
    ranks: tuple[RankShares, ...]
    worst_ns: int  # the largest difference between the ends of two aligned calls

    @property
    def same(self) -> bool:
        longest = max(self.worst_ns, abs(self.makespans_ns[0] - self.makespans_ns[1]))
        return not self.partings and self.outcomes[0] == self.outcomes[1] and longest <= self.tolerance * self.makespans_ns[0]

    @property
    def makespans_ns(self) -> tuple[int, int]:
        return self.a.makespan_ns, self.b.makespan_ns

    @property
    def outcomes(self) -> tuple[str, str]:
        return str(self.a.header.get("outcome") or ""), str(self.b.header.get("outcome") or "")


def compare(a: Trace, b: Trace, tolerance: float = 0.0) -> Comparison:
    """Compare two runs. ``tolerance``: ends of calls may differ by this share of A's makespan before they count as different.

    Values are compared where both headers carry them (``values``: tensor -> rank -> numbers).
    """
    rows = list(a.rows()), list(b.rows())
    pairs, only_a, only_b = _aligned(*rows)
    allowed = tolerance * a.makespan_ns
    ends = [
        (max(rows[0][i].finished_ns, rows[0][i].returned_ns), max(rows[1][j].finished_ns, rows[1][j].returned_ns))
        for i, j in pairs
    ]
    found = [*_missing(rows, only_a, only_b), *_met_others(rows, pairs), *_values(a, b), *_late(rows, pairs, ends, allowed)]
    order: dict[Kind, int] = {"call": 0, "met": 1, "value": 2, "time": 3}
    found.sort(key=lambda p: (p.at_ns < 0, p.at_ns, order[p.kind], p.rank, p.a, p.b))
    worst = max((abs(x - y) for x, y in ends), default=0)
    return Comparison(
        a,
        b,
        tolerance,
        tuple(pairs),
        tuple(only_a),
        tuple(only_b),
        tuple(found),
        _causes(a, b),
        _ops(rows, pairs),
        _ranks(a, b),
        worst,
    )


# --- alignment ---


def _key(call: TraceCall) -> tuple[Any, ...]:
    return (*call[1:8], call.name, call.part >= 0)


def _aligned(a: Sequence[TraceCall], b: Sequence[TraceCall]) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """(pairs of rows, rows of A alone, rows of B alone)."""
    sides: tuple[dict[int, list[int]], ...] = (defaultdict(list), defaultdict(list))
    for side, rows in zip(sides, (a, b), strict=True):
        for i, call in enumerate(rows):
            side[call.rank].append(i)
    pairs, only_a, only_b = [], [], []
    for rank in sorted({*sides[0], *sides[1]}):
        mine, theirs = sides[0].get(rank, []), sides[1].get(rank, [])
        matched = _matched([_key(a[i]) for i in mine], [_key(b[j]) for j in theirs])
        pairs += [(mine[i], theirs[j]) for i, j in matched]
        left, right = {i for i, _ in matched}, {j for _, j in matched}
        only_a += [row for i, row in enumerate(mine) if i not in left]
        only_b += [row for j, row in enumerate(theirs) if j not in right]
    return pairs, only_a, only_b


def _matched(a: Sequence[Any], b: Sequence[Any]) -> list[tuple[int, int]]:
    """Positions that stand opposite each other: what is equal at both ends, and between them the longest common pieces."""
    start, most = 0, min(len(a), len(b))
    while start < most and a[start] == b[start]:
        start += 1
    end = 0
    while end < most - start and a[-1 - end] == b[-1 - end]:
        end += 1
    found = [(i, i) for i in range(start)]
    middle_a, middle_b = a[start : len(a) - end], b[start : len(b) - end]
    if middle_a and middle_b:
        blocks = SequenceMatcher(None, middle_a, middle_b, autojunk=len(middle_a) > _THOROUGH).get_matching_blocks()
        found += [(start + x + k, start + y + k) for x, y, size in blocks for k in range(size)]
    return found + [(len(a) - end + k, len(b) - end + k) for k in range(end)]


# --- where they part ---


def _missing(rows: tuple[list[TraceCall], list[TraceCall]], only_a: Sequence[int], only_b: Sequence[int]) -> Iterator[Parting]:
    for side, only in enumerate((only_a, only_b)):
        for i in only:
            call = rows[side][i]
            where = (i, -1) if side == 0 else (-1, i)
            yield Parting("call", call.rank, *where, f"{described(call)} only in {'AB'[side]}", call.posted_ns)


def _met_others(rows: tuple[list[TraceCall], list[TraceCall]], pairs: Sequence[tuple[int, int]]) -> Iterator[Parting]:
    """Aligned calls that met calls which are not aligned."""
    across = dict(pairs)
    met_a, met_b = _meetings(rows[0]), _meetings(rows[1])
    for i, j in pairs:
        a, b = rows[0][i], rows[1][j]
        mates_a = {across.get(k, -1) for k in met_a.get(a.match, ()) if k != i}
        mates_b = {k for k in met_b.get(b.match, ()) if k != j}
        if mates_a != mates_b:
            met = [
                _mates(calls, met.get(call.match, ()), k)
                for calls, met, call, k in ((rows[0], met_a, a, i), (rows[1], met_b, b, j))
            ]
            yield Parting("met", a.rank, i, j, f"{described(a)} met {met[0]} in A, {met[1]} in B", a.posted_ns)


def _meetings(rows: Sequence[TraceCall]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for i, call in enumerate(rows):
        if call.match >= 0 and call.op not in ("compute", "sleep"):
            found[call.match].append(i)
    return {match: members for match, members in found.items() if len(members) > 1}


def _mates(rows: Sequence[TraceCall], members: Sequence[int], me: int) -> str:
    others = sorted({rows[k].rank for k in members if k != me})
    if not others:
        return "nobody"
    word = "rank" if len(others) == 1 else "ranks"
    return f"{rows[next(k for k in members if k != me)].op} of {word} {', '.join(map(str, others))}"


def _values(a: Trace, b: Trace) -> Iterator[Parting]:
    mine, theirs = a.header.get("values"), b.header.get("values")
    if not mine or not theirs:
        return
    for tensor in sorted({*mine} & {*theirs}):
        left, right = ({str(rank): value for rank, value in side[tensor].items()} for side in (mine, theirs))
        for rank in sorted({*left} & {*right}, key=int):
            if left[rank] is not None and right[rank] is not None and left[rank] != right[rank]:
                text = f"{tensor} holds {_short(left[rank])} in A, {_short(right[rank])} in B"
                yield Parting("value", int(rank), -1, -1, text, -1)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else text[:23] + "…"


def _late(
    rows: tuple[list[TraceCall], list[TraceCall]],
    pairs: Sequence[tuple[int, int]],
    ends: Sequence[tuple[int, int]],
    allowed: float,
) -> Iterator[Parting]:
    for (i, j), (end_a, end_b) in zip(pairs, ends, strict=True):
        call = rows[0][i]
        if (end_a < 0) != (end_b < 0):
            yield Parting("time", call.rank, i, j, f"{described(call)} ends only in {'AB'[end_a < 0]}", call.posted_ns)
        elif abs(end_a - end_b) > allowed:
            yield Parting("time", call.rank, i, j, f"{described(call)} ends at another time", call.posted_ns)


def described(call: TraceCall) -> str:
    """A call in a few words: ``rank 2: send to 3``."""
    peer = (
        ""
        if call.peer is None
        else f" from {call.peer}"
        if "recv" in call.op
        else f" to {call.peer}"
        if "send" in call.op
        else ""
    )
    return f"rank {call.rank}: {call.name or call.op}{peer}"


# --- what makes the difference ---


def _causes(a: Trace, b: Trace) -> tuple[Cause, ...]:
    """Shares of the two critical paths, by what they went into; the largest difference first."""
    sums: dict[tuple[str, str, str, str, int], list[int]] = {}
    for side, trace in enumerate((a, b)):
        last: tuple[int, ...] | None = None
        for piece in path_pieces(trace, trace.makespan_ns):
            key = _cause_of(trace, piece.row, piece.why)
            entry = sums.setdefault(key, [0, 0, 0, 0])
            entry[side] += piece.end_ns - piece.start_ns
            entry[2 + side] += last != (piece.row, piece.rank)
            last = (piece.row, piece.rank)
    causes = [Cause(*key, *entry) for key, entry in sums.items()]
    return tuple(sorted(causes, key=lambda c: (-abs(c.delta_ns), c[:5])))


def _cause_of(trace: Trace, row: int, why: str) -> tuple[str, str, str, str, int]:
    if row < 0:
        return (why, "", "", "", 0)
    op, name, group = (trace.text(n, int(trace[n][row])) for n in ("op", "name", "group"))
    local = op in ("compute", "sleep", "assign", "wait", "synchronize")
    return (why, _MESSAGES.get(op, op), name, "" if local else group.partition("[")[0], int(trace["nbytes"][row]))


#: Both sides of a message are one kind of work.
_MESSAGES: Final = {"recv": "send", "isend": "send", "irecv": "send"}


def _ops(rows: tuple[list[TraceCall], list[TraceCall]], pairs: Sequence[tuple[int, int]]) -> tuple[OpTimes, ...]:
    groups: dict[tuple[str, str, str, int], list[tuple[int, int, int, int]]] = defaultdict(list)
    for i, j in pairs:
        a, b = rows[0][i], rows[1][j]
        times = [(c.finished_ns - c.started_ns, c.started_ns - c.posted_ns, min(c.started_ns, c.finished_ns)) for c in (a, b)]
        if min(t[2] for t in times) >= 0:
            key = (a.op, a.name, a.group.partition("[")[0], a.nbytes)
            groups[key].append((times[0][0], times[1][0], max(times[0][1], 0), max(times[1][1], 0)))
    found = [OpTimes(*key, len(t), *(round(x) for x in np.mean(t, axis=0))) for key, t in groups.items()]
    return tuple(sorted(found, key=lambda o: -abs((o.b_ns + o.b_waiting_ns - o.a_ns - o.a_waiting_ns) * o.calls)))


def _ranks(a: Trace, b: Trace) -> tuple[RankShares, ...]:
    shares = zip(rank_times(a, a.makespan_ns), rank_times(b, b.makespan_ns), strict=False)
    return tuple(
        RankShares(x.rank, (x.compute_ns, y.compute_ns), (x.exposed_comm_ns, y.exposed_comm_ns), (x.waiting_ns, y.waiting_ns),
                   (x.idle_ns, y.idle_ns)) for x, y in shares
    )  # fmt: skip


__all__ = ["Cause", "Comparison", "OpTimes", "Parting", "RankShares", "compare", "described"]
