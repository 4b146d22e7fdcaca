"""Compare two runs: align their calls, find the first divergences, and explain the makespans.

Calls are aligned rank by rank in program order, by their arguments (operation, group, peer, tag,
bytes, dtype), never by their times. The two critical paths explain the difference of the makespans:
each path covers its whole run without gaps, so the differences of their shares add up to the
difference of the makespans exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from distsim.analysis.critical_path import path_pieces
from distsim.analysis.timeline import rank_times
from distsim.operations.registry import OPERATIONS
from distsim.trace.model import Trace, TraceCall
from distsim.trace.packed_values import EPSILON, TensorNumber, ValueDifference, compare_packed
from distsim.trace.run_end import StoppedRank, is_partial, stopped_ranks

DivergenceKind = Literal["call", "met", "value", "time"]
#: Above this number of calls, difflib may ignore frequent elements (its "autojunk"), to stay fast.
_MAX_EXACT_ALIGNMENT: Final = 2000


class RunDivergence(NamedTuple):
    """A difference between two runs; ``a`` and ``b`` are rows of the traces, or -1.

    For values: ``tensor`` is the name, ``element`` the first element that differs (-1 if unknown),
    and ``numbers`` are the values of A and B there.
    """

    kind: DivergenceKind
    rank: int
    a: int
    b: int
    text: str
    at_ns: int
    tensor: str = ""
    element: int = -1
    numbers: tuple[TensorNumber | None, TensorNumber | None] | None = None


class CriticalPathDelta(NamedTuple):
    """One kind of work on both critical paths.

    ``why`` is compute, transfer, sleep or wait. ``delta_ns`` is b - a.
    """

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


class OperationTimes(NamedTuple):
    """All aligned calls of one operation, group (of one axis) and size.

    Times are means: of the time in flight, and of the waiting time in the call before that.
    """

    op: str
    name: str
    group: str
    nbytes: int
    calls: int
    a_ns: int
    b_ns: int
    a_waiting_ns: int
    b_waiting_ns: int


class RankTimeShares(NamedTuple):
    """The time shares of one rank in ns, each as (A, B)."""

    rank: int
    compute: tuple[int, int]
    exposed: tuple[int, int]
    waiting: tuple[int, int]
    idle: tuple[int, int]


class ValueMatchCounts(NamedTuple):
    """Number of (tensor, rank) pairs by result of the comparison.

    ``close``: within the error that another order of additions may cause. ``one_sided``: known in
    only one run. ``lacking``: the runs without values, as "A", "B" or "AB".
    """

    equal: int = 0
    close: int = 0
    differ: int = 0
    one_sided: int = 0
    lacking: str = ""


@dataclass(frozen=True)
class RunComparison:
    """The result of `compare_runs`.

    ``pairs`` are the aligned rows of A and B. ``divergences`` are in the order of time in A.
    ``same``: no difference exceeds the tolerance.
    """

    a: Trace
    b: Trace
    tolerance: float
    pairs: tuple[tuple[int, int], ...]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    divergences: tuple[RunDivergence, ...]
    causes: tuple[CriticalPathDelta, ...]
    ops: tuple[OperationTimes, ...]
    ranks: tuple[RankTimeShares, ...]
    worst_ns: int  # the largest difference between the ends of two aligned calls
    values: ValueMatchCounts
    stopped: str = ""  # "A" or "B": the run that did not come to its end, where the other did

    @property
    def stops(self) -> tuple[StoppedRank, ...]:
        """Where the ranks of the run that stopped are, the cause first."""
        if not self.stopped:
            return ()
        return stopped_ranks(self.a if self.stopped == "A" else self.b)

    @property
    def independent_divergences(self) -> tuple[RunDivergence, ...]:
        """The divergences that do not follow from the fact that one run stopped.

        Calls of that run that never end, or were never made, are consequences.
        """
        if not self.stopped:
            return self.divergences
        return tuple(d for d in self.divergences if not self._follows_from_stop(d))

    def _follows_from_stop(self, divergence: RunDivergence) -> bool:
        if self.stopped == "A":
            trace, row = self.a, divergence.a
        else:
            trace, row = self.b, divergence.b
        if row < 0:
            # Only the other run has this call.
            return bool(trace.header.get("cut")) and divergence.kind == "call"
        if divergence.kind == "value":
            return True
        never_posted = trace["posted_ns"][row] < 0
        never_ended = max(trace["finished_ns"][row], trace["returned_ns"][row]) < 0
        return bool(never_posted or never_ended)

    @property
    def same(self) -> bool:
        longest = max(self.worst_ns, abs(self.makespans_ns[0] - self.makespans_ns[1]))
        return (
            not self.divergences
            and self.outcomes[0] == self.outcomes[1]
            and longest <= self.tolerance * self.makespans_ns[0]
        )

    @property
    def makespans_ns(self) -> tuple[int, int]:
        return self.a.makespan_ns, self.b.makespan_ns

    @property
    def outcomes(self) -> tuple[str, str]:
        return str(self.a.header.get("outcome") or ""), str(self.b.header.get("outcome") or "")


def compare_runs(a: Trace, b: Trace, tolerance: float = 0.0) -> RunComparison:
    """Compare two runs.

    Ends of calls may differ by the share ``tolerance`` of A's makespan before they count as
    different.

    Values are compared if both headers contain them. The comparison is exact, with one exception: a
    recorded run may add floats in a different order if there are more than two terms. Such values
    may differ by n·ε for each reduction over n ranks (ε: the dtype's spacing at 1).
    """
    rows = list(a.rows()), list(b.rows())
    pairs, only_a, only_b = _align_calls(*rows)
    allowed = tolerance * a.makespan_ns
    ends = [
        (
            max(rows[0][i].finished_ns, rows[0][i].returned_ns),
            max(rows[1][j].finished_ns, rows[1][j].returned_ns),
        )
        for i, j in pairs
    ]
    value_divergences, counts = _value_divergences(a, b, rows)
    found = [
        *_missing_call_divergences(rows, only_a, only_b),
        *_matching_divergences(rows, pairs),
        *value_divergences,
        *_time_divergences(rows, pairs, ends, allowed),
    ]
    order: dict[DivergenceKind, int] = {"call": 0, "met": 1, "value": 2, "time": 3}
    found.sort(key=lambda p: (p.at_ns < 0, p.at_ns, order[p.kind], p.rank, p.a, p.b))
    worst = max((abs(x - y) for x, y in ends), default=0)
    return RunComparison(
        a,
        b,
        tolerance,
        tuple(pairs),
        tuple(only_a),
        tuple(only_b),
        tuple(found),
        _critical_path_deltas(a, b),
        _operation_times(rows, pairs),
        _rank_time_shares(a, b),
        worst,
        counts,
        _stopped_runs_text(a, b),
    )


def _stopped_runs_text(a: Trace, b: Trace) -> str:
    return {(True, False): "A", (False, True): "B"}.get((is_partial(a), is_partial(b)), "")


# --- alignment ---


def _alignment_key(call: TraceCall) -> Hashable:
    return (*call[1:8], call.name, call.part >= 0)


class _CallAlignment(NamedTuple):
    """Which rows of two traces are the same call: pairs of rows, and rows of one trace alone."""

    pairs: list[tuple[int, int]]
    only_a: list[int]
    only_b: list[int]


def _align_calls(a: Sequence[TraceCall], b: Sequence[TraceCall]) -> _CallAlignment:
    sides: tuple[dict[int, list[int]], ...] = (defaultdict(list), defaultdict(list))
    for side, rows in zip(sides, (a, b), strict=True):
        for i, call in enumerate(rows):
            side[call.rank].append(i)
    pairs, only_a, only_b = [], [], []
    for rank in sorted({*sides[0], *sides[1]}):
        rows_a, rows_b = sides[0].get(rank, []), sides[1].get(rank, [])
        matched = _longest_matches(
            [_alignment_key(a[i]) for i in rows_a], [_alignment_key(b[j]) for j in rows_b]
        )
        pairs += [(rows_a[i], rows_b[j]) for i, j in matched]
        matched_a, matched_b = {i for i, _ in matched}, {j for _, j in matched}
        only_a += [row for i, row in enumerate(rows_a) if i not in matched_a]
        only_b += [row for j, row in enumerate(rows_b) if j not in matched_b]
    return _CallAlignment(pairs, only_a, only_b)


def _longest_matches(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Positions of equal elements in both sequences, in order.

    Common elements at both ends are matched first; the rest is matched by longest common blocks.
    """
    start, most = 0, min(len(a), len(b))
    while start < most and a[start] == b[start]:
        start += 1
    end = 0
    while end < most - start and a[-1 - end] == b[-1 - end]:
        end += 1
    found = [(i, i) for i in range(start)]
    middle_a, middle_b = a[start : len(a) - end], b[start : len(b) - end]
    if middle_a and middle_b:
        blocks = SequenceMatcher(
            None, middle_a, middle_b, autojunk=len(middle_a) > _MAX_EXACT_ALIGNMENT
        ).get_matching_blocks()
        found += [(start + x + k, start + y + k) for x, y, size in blocks for k in range(size)]
    return found + [(len(a) - end + k, len(b) - end + k) for k in range(end)]


# --- divergences ---


def _missing_call_divergences(
    rows: tuple[list[TraceCall], list[TraceCall]], only_a: Sequence[int], only_b: Sequence[int]
) -> Iterator[RunDivergence]:
    for side, only in enumerate((only_a, only_b)):
        for i in only:
            call = rows[side][i]
            where = (i, -1) if side == 0 else (-1, i)
            yield RunDivergence(
                "call", call.rank, *where, f"{call_text(call)} only in {'AB'[side]}", call.posted_ns
            )


def _matching_divergences(
    rows: tuple[list[TraceCall], list[TraceCall]], pairs: Sequence[tuple[int, int]]
) -> Iterator[RunDivergence]:
    """Aligned calls whose partners in the two runs are not aligned with each other."""
    across = dict(pairs)
    met_a, met_b = _rows_by_match(rows[0]), _rows_by_match(rows[1])
    for i, j in pairs:
        a, b = rows[0][i], rows[1][j]
        partners_a = {across.get(k, -1) for k in met_a.get(a.match, ()) if k != i}
        partners_b = {k for k in met_b.get(b.match, ()) if k != j}
        if partners_a != partners_b:
            in_a = _partners_text(rows[0], met_a.get(a.match, ()), i)
            in_b = _partners_text(rows[1], met_b.get(b.match, ()), j)
            text = f"{call_text(a)} met {in_a} in A, {in_b} in B"
            yield RunDivergence("met", a.rank, i, j, text, a.posted_ns)


def _rows_by_match(rows: Sequence[TraceCall]) -> dict[int, list[int]]:
    """The members of each communication that took place.

    A recording also numbers calls that were posted for the same communication before a rank died,
    but they exchanged nothing, and a simulation does not match them.
    """
    found: dict[int, list[int]] = defaultdict(list)
    took_place: set[int] = set()
    for i, call in enumerate(rows):
        if call.match >= 0 and call.op not in ("compute", "sleep"):
            found[call.match].append(i)
            if call.finished_ns >= 0:
                took_place.add(call.match)
    return {match: found[match] for match in took_place if len(found[match]) > 1}


def _partners_text(rows: Sequence[TraceCall], members: Sequence[int], me: int) -> str:
    others = sorted({rows[k].rank for k in members if k != me})
    if not others:
        return "nobody"
    word = "rank" if len(others) == 1 else "ranks"
    return f"{rows[next(k for k in members if k != me)].op} of {word} {', '.join(map(str, others))}"


def _recorded_values(trace: Trace) -> dict[tuple[str, int], Any]:
    """The values in the header of a trace, by label and rank."""
    values: dict[tuple[str, int], Any] = {}
    for label, by_rank in trace.header["values"].items():
        for rank, value in by_rank.items():
            values[label, int(rank)] = value
    return values


def _value_divergences(
    a: Trace, b: Trace, rows: tuple[list[TraceCall], list[TraceCall]]
) -> tuple[list[RunDivergence], ValueMatchCounts]:
    lacking = "".join(
        side for side, trace in (("A", a), ("B", b)) if trace.header.get("values") is None
    )
    if lacking:
        return [], ValueMatchCounts(lacking=lacking)
    values_a = _recorded_values(a)
    values_b = _recorded_values(b)
    both = [key for key in values_a if key in values_b]
    tolerances = _RankTolerances(a, b, rows)
    count: dict[str, int] = defaultdict(int)
    found = []
    for label, rank in both:
        state, where = compare_packed(
            values_a[label, rank], values_b[label, rank], tolerances.of(label, rank)
        )
        count[state] += 1
        if where is not None:
            numbers = None if where.a is where.b is None else (where.a, where.b)
            found.append(
                RunDivergence(
                    "value",
                    rank,
                    -1,
                    -1,
                    _value_text(label, where),
                    -1,
                    label,
                    where.element,
                    numbers,
                )
            )
    return found, ValueMatchCounts(
        count["equal"],
        count["close"],
        count["differs"],
        len({*values_a} ^ {*values_b}) + count["unknown"],
    )


def _value_text(label: str, where: ValueDifference) -> str:
    if where.a is None and where.b is None:
        return f"{label} differs in {where.where}, by digest"
    return f"{label}, {where.where}: {_number_text(where.a)} in A, {_number_text(where.b)} in B"


class _RankTolerances:
    """Tolerances for values: they grow with a rank's reductions over more than two ranks."""

    def __init__(self, a: Trace, b: Trace, rows: tuple[list[TraceCall], list[TraceCall]]) -> None:
        self.dtypes: dict[str, str] = {
            **(b.header.get("value_dtypes") or {}),
            **(a.header.get("value_dtypes") or {}),
        }
        self.terms: dict[int, int] = {}
        # Simulated runs always add in the same order, so they need no tolerance.
        if "recorded" in (a.header.get("source"), b.header.get("source")):
            for trace, calls in ((a, rows[0]), (b, rows[1])):
                for rank, terms in _reduction_terms(trace, calls).items():
                    self.terms[rank] = max(terms, self.terms.get(rank, 0))

    def of(self, label: str, rank: int) -> float:
        return self.terms.get(rank, 0) * EPSILON.get(self.dtypes.get(label, ""), 0.0)


def _reduction_terms(trace: Trace, calls: Sequence[TraceCall]) -> dict[int, int]:
    """For each rank, the sum of the sizes of the groups that it reduced over.

    Groups of up to two ranks do not count: the order of one addition does not matter.
    """
    groups = [(name, set(ranks)) for name, ranks in trace.header.get("groups") or ()]
    terms: dict[int, int] = defaultdict(int)
    for call in calls:
        if call.op not in OPERATIONS or not OPERATIONS[call.op].reduces:
            continue
        named = (ranks for name, ranks in groups if name == call.group)
        members: set[int] = next((ranks for ranks in named if call.rank in ranks), set())
        size = len(members) or trace.world_size
        terms[call.rank] += size if size > 2 else 0
    return terms


def _number_text(value: TensorNumber | None) -> str:
    text = str(value)
    return text if len(text) <= 24 else text[:23] + "…"


def _time_divergences(
    rows: tuple[list[TraceCall], list[TraceCall]],
    pairs: Sequence[tuple[int, int]],
    ends: Sequence[tuple[int, int]],
    allowed: float,
) -> Iterator[RunDivergence]:
    """Calls that end only in one run, or at times that differ by more than ``allowed`` ns."""
    for (i, j), (end_a, end_b) in zip(pairs, ends, strict=True):
        if (end_a < 0) != (end_b < 0):
            what = f"ends only in {'B' if end_a < 0 else 'A'}"
        elif abs(end_a - end_b) > allowed:
            what = "ends at another time"
        else:
            continue
        call = rows[0][i]
        text = f"{call_text(call)} {what}"
        yield RunDivergence("time", call.rank, i, j, text, call.posted_ns)


def call_text(call: TraceCall) -> str:
    """A call in a few words: ``rank 2: send to 3``."""
    peer = ""
    if call.peer is not None and "recv" in call.op:
        peer = f" from {call.peer}"
    elif call.peer is not None and "send" in call.op:
        peer = f" to {call.peer}"
    return f"rank {call.rank}: {call.name or call.op}{peer}"


# --- causes of the difference between the makespans ---


def _critical_path_deltas(a: Trace, b: Trace) -> tuple[CriticalPathDelta, ...]:
    """Time on the two critical paths by kind of work, the largest difference first."""
    sums: dict[tuple[str, str, str, str, int], list[int]] = {}
    for side, trace in enumerate((a, b)):
        last: tuple[object, ...] | None = None
        for piece in path_pieces(trace, trace.makespan_ns):
            key = _delta_key(trace, piece.row, piece.why)
            entry = sums.setdefault(key, [0, 0, 0, 0])
            entry[side] += piece.end_ns - piece.start_ns
            entry[2 + side] += last != (key, piece.row, piece.rank)
            last = (key, piece.row, piece.rank)
    causes = [CriticalPathDelta(*key, *entry) for key, entry in sums.items()]
    return tuple(sorted(causes, key=lambda c: (-abs(c.delta_ns), c[:5])))


def _delta_key(trace: Trace, row: int, why: str) -> tuple[str, str, str, str, int]:
    if row < 0:
        return (why, "", "", "", 0)
    op, name, group = (trace.text(n, int(trace[n][row])) for n in ("op", "name", "group"))
    local = op in ("compute", "sleep", "assign", "wait", "wait_stream", "synchronize")
    return (
        why,
        _MESSAGE_OP.get(op, op),
        name,
        "" if local else group.partition("[")[0],
        int(trace["nbytes"][row]),
    )


#: Both sides of a message count as the same kind of work.
_MESSAGE_OP: Final = {"recv": "send", "isend": "send", "irecv": "send"}


def _operation_times(
    rows: tuple[list[TraceCall], list[TraceCall]], pairs: Sequence[tuple[int, int]]
) -> tuple[OperationTimes, ...]:
    groups: dict[tuple[str, str, str, int], list[tuple[int, int, int, int]]] = defaultdict(list)
    for i, j in pairs:
        a, b = rows[0][i], rows[1][j]
        times = [
            (
                c.finished_ns - c.started_ns,
                c.started_ns - c.posted_ns,
                min(c.started_ns, c.finished_ns),
            )
            for c in (a, b)
        ]
        if min(t[2] for t in times) >= 0:
            key = (a.op, a.name, a.group.partition("[")[0], a.nbytes)
            groups[key].append((times[0][0], times[1][0], max(times[0][1], 0), max(times[1][1], 0)))
    found = [
        OperationTimes(*key, len(t), *(round(x) for x in np.mean(t, axis=0)))
        for key, t in groups.items()
    ]
    return tuple(
        sorted(
            found, key=lambda o: -abs((o.b_ns + o.b_waiting_ns - o.a_ns - o.a_waiting_ns) * o.calls)
        )
    )


def _rank_time_shares(a: Trace, b: Trace) -> tuple[RankTimeShares, ...]:
    shares = zip(rank_times(a, a.makespan_ns), rank_times(b, b.makespan_ns), strict=False)
    return tuple(
        RankTimeShares(
            x.rank,
            (x.compute_ns, y.compute_ns),
            (x.exposed_comm_ns, y.exposed_comm_ns),
            (x.waiting_ns, y.waiting_ns),
            (x.idle_ns, y.idle_ns),
        )
        for x, y in shares
    )
