"""Folding: equal ranks share a lane, and equal steps are drawn once.

All views fold by the same rule. Ranks are *equal* if every call agrees in operation, name, size and
all times. Ranks of one *pattern* (``alike`` in the code) agree in everything except the times.
Important ranks (slow, dead, on the critical path) keep a lane of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from distsim.output.text_layout import rank_list
from distsim.trace.model import Trace

HashArray = NDArray[np.uint64]
Ints = NDArray[np.int64]

_TIME_COLUMNS: Final = ("posted_ns", "returned_ns", "started_ns", "finished_ns")
_HASH_MULTIPLIER: Final = np.uint64(
    0x9E3779B97F4A7C15
)  # 2^64 by the golden ratio: Fibonacci hashing (Knuth, TAOCP vol. 3, 6.4)


class RankLane(NamedTuple):
    """Ranks that are drawn as one.

    ``like``: ``equal`` in everything, ``alike`` except for their times, or ``mixed``: ranks that
    share nothing but the lack of a lane of their own.
    """

    ranks: tuple[int, ...]
    like: Literal["equal", "alike", "mixed"] = "equal"

    @property
    def first(self) -> int:
        """The lowest rank."""
        return self.ranks[0]

    @property
    def drawn_ranks(self) -> tuple[int, ...]:
        """The ranks whose activity is drawn: one of equal ranks is enough."""
        return self.ranks[:1] if self.like == "equal" else self.ranks

    @property
    def title(self) -> str:
        """``rank 3`` or ``ranks 0-7``."""
        return f"rank {self.first}" if len(self.ranks) == 1 else f"ranks {rank_list(self.ranks, 2)}"

    @property
    def about(self) -> str:
        """``8 identical ranks``; empty for a single rank."""
        words = {"equal": "identical ranks", "alike": "similar ranks, mean", "mixed": "ranks, mean"}
        return f"{len(self.ranks)} {words[self.like]}" if len(self.ranks) > 1 else ""


@dataclass(frozen=True)
class EqualSteps:
    """Consecutive equal iterations: the number of the first, the number of iterations (``times``),
    and the start and end of the first.
    """

    first: int
    times: int
    start_ns: int
    end_ns: int


class RankRows:
    """The rows of each rank, in order, for any order of the trace's rows."""

    def __init__(self, trace: Trace) -> None:
        rank = trace["rank"]
        ordered = not len(rank) or bool((np.diff(rank) >= 0).all())
        self._order = None if ordered else np.argsort(rank, kind="stable")
        self._edges = np.searchsorted(
            rank if self._order is None else rank[self._order], np.arange(trace.world_size + 1)
        )

    def __call__(self, rank: int) -> Ints:
        low, high = self._edges[rank : rank + 2].tolist()
        return np.arange(low, high) if self._order is None else self._order[low:high]


def group_ranks_into_lanes(
    trace: Trace,
    ranks: Sequence[int],
    alone: Iterable[int] = (),
    most: int = 24,
    *,
    keep: NDArray[np.bool_] | None = None,
    beside: Trace | None = None,
) -> tuple[RankLane, ...]:
    """Lanes of the ranks, sorted by their lowest rank; about ``most`` of them.

    ``alone``: ranks that get a lane of their own if they differ from all others. ``keep``: the
    rows that count; None: all. ``beside``: another run, in which the ranks of a lane must be equal
    as well.

    First, equal ranks share a lane. If there are still too many lanes, ranks that differ only in
    their times share one, and the remaining ranks share the last lane.
    """
    chosen = np.asarray(ranks, dtype=np.int64)

    def classes(of: Ints, times: bool) -> list[tuple[int, ...]]:
        words = _rank_signatures(trace, times, keep)
        return _ranks_by_signature(
            of,
            words
            if beside is None
            else _paired_hashes(words, _rank_signatures(beside, times, None)),
        )

    equal = classes(chosen, True)
    if len(equal) <= most:
        return tuple(sorted((RankLane(members) for members in equal), key=lambda lane: lane.first))
    wanted = set(alone)
    single: list[tuple[int, ...]] = []
    others: list[tuple[int, ...]] = []
    for members in equal:
        if len(members) == 1 and members[0] in wanted:
            single.append(members)
        else:
            others.append(members)
    # Ranks with a lane of their own get at most half of the lanes.
    lanes = [RankLane(members) for members in single[: most // 2]]
    others += single[most // 2 :]
    remaining = sorted(rank for members in others for rank in members)
    alike = classes(np.array(remaining, dtype=np.int64), False)
    exact = set(equal)
    lanes += [
        RankLane(m, "equal" if m in exact else "alike") for m in alike[: most - len(lanes) - 1]
    ]
    shown = {lane.first for lane in lanes}
    unshown = [members for members in alike if members[0] not in shown]
    rest = [rank for members in unshown for rank in members]
    if rest:
        lanes.append(RankLane(tuple(sorted(rest)), "mixed" if len(rest) > 1 else "equal"))
    return tuple(sorted(lanes, key=lambda lane: lane.first))


def symmetric_ranks(
    trace: Trace, ranks: Sequence[int], keep: NDArray[np.bool_] | None = None
) -> list[tuple[int, ...]]:
    """Classes of ranks that make the same calls, at any times, sorted by their lowest ranks."""
    return sorted(
        _ranks_by_signature(np.asarray(ranks, dtype=np.int64), _rank_signatures(trace, False, keep))
    )


def _ranks_by_signature(ranks: Ints, signatures: HashArray) -> list[tuple[int, ...]]:
    """Classes of ranks with equal signatures: the largest class first, then by lowest rank."""
    found: dict[int, list[int]] = {}
    for rank, signature in zip(ranks.tolist(), signatures[ranks].tolist(), strict=True):
        found.setdefault(signature, []).append(rank)
    return sorted((tuple(members) for members in found.values()), key=lambda m: (-len(m), m[0]))


def _rank_signatures(trace: Trace, times: bool, keep: NDArray[np.bool_] | None) -> HashArray:
    """A hash of each rank's calls: equal for equal ranks. Different ranks have the same 64-bit hash
    with a probability of about 1 in 10^19.
    """
    rank, size = trace["rank"].astype(np.int64), trace.world_size
    rows = np.arange(len(rank)) if keep is None else np.flatnonzero(keep)
    rows = (
        rows[np.argsort(rank[rows], kind="stable")]
        if len(rows) and (np.diff(rank[rows]) < 0).any()
        else rows
    )
    edges = np.searchsorted(rank[rows], np.arange(size + 1))
    place = np.arange(len(rows)) - np.repeat(edges[:-1], np.diff(edges))
    words = row_hashes(trace, rows, times, 0)
    words = _mixed_hashes(words, place.astype(np.uint64))
    sums = np.concatenate([[np.uint64(0)], np.cumsum(words, dtype=np.uint64)])
    found: HashArray = _mixed_hashes(
        sums[edges[1:]] - sums[edges[:-1]], np.diff(edges).astype(np.uint64)
    )
    for number, status, at_ns in trace.header.get("ends", ()):
        if status not in ("ended", "blocked") and 0 <= number < size:
            found[number] ^= np.uint64(crc32(f"{status} {at_ns if times else 0}".encode()) + 1)
    return found


def _paired_hashes(words: HashArray, others: HashArray) -> HashArray:
    """One hash for each pair. A rank that is in one run only counts as 0 in the other."""
    size = max(len(words), len(others))
    return _mixed_hashes(
        np.pad(words, (0, size - len(words))), np.pad(others, (0, size - len(others)))
    )


def row_hashes(trace: Trace, rows: Ints, times: bool, offset: Ints | int) -> HashArray:
    """A hash of each row: call, size, and (with ``times``) the times minus ``offset``."""
    words = np.zeros(len(rows), dtype=np.uint64)
    for name in ("op", "name", "nbytes", "part"):
        words = _mixed_hashes(words, trace[name][rows].astype(np.int64).view(np.uint64))
    for name in ("group", "queue"):
        words = _mixed_hashes(words, _family_ids(trace, name)[trace[name][rows]])
    if not times:
        return _mixed_hashes(words, (trace["finished_ns"][rows] >= 0).astype(np.uint64))
    for name in _TIME_COLUMNS:
        column = trace[name][rows].astype(np.int64)
        words = _mixed_hashes(words, np.where(column >= 0, column - offset, -1).view(np.uint64))
    return words


def _family_ids(trace: Trace, name: str) -> HashArray:
    """The texts of a column by their family: ``tp[dp=0]`` and ``tp[dp=1]`` count as one. Index -1
    is not text.
    """
    texts = [re.sub(r"\[.*|pair \S+", "", str(text)) for text in trace.tables.get(name, [])]
    numbers = {text: i + 1 for i, text in enumerate(dict.fromkeys(texts))}
    return np.array([*(numbers[text] for text in texts), 0], dtype=np.uint64)


def _mixed_hashes(words: HashArray, more: HashArray) -> HashArray:
    found = (words ^ more) * _HASH_MULTIPLIER
    return found ^ (found >> np.uint64(29))


def group_equal_steps(trace: Trace, ranks: Sequence[int]) -> tuple[EqualSteps, ...]:
    """The iterations of the run, with consecutive equal ones joined; empty if there are none.

    Iterations are equal if all calls in them start and end at the same times after their start.
    """
    iteration = trace["iteration"]
    count = int(iteration.max()) + 1 if len(iteration) else 0
    if count < 2:
        return ()
    chosen = np.zeros(trace.world_size, dtype=bool)
    chosen[list(ranks)] = True
    rows = np.flatnonzero(chosen[trace["rank"]] & (iteration >= 0) & (trace["started_ns"] >= 0))
    rows = rows[np.argsort(iteration[rows], kind="stable")]
    step = iteration[rows]
    edges = np.searchsorted(step, np.arange(count + 1))
    if not len(rows) or (np.diff(edges) == 0).any():
        return ()
    start = np.minimum.reduceat(trace["started_ns"][rows], edges[:-1])
    end = np.maximum.reduceat(
        np.maximum(trace["finished_ns"], trace["started_ns"])[rows], edges[:-1]
    )
    sums = np.add.reduceat(_step_hashes(trace, rows, start[step], edges), edges[:-1])
    found: list[EqualSteps] = []
    words = zip(sums.tolist(), (end - start).tolist(), start.tolist(), end.tolist(), strict=True)
    last: tuple[int, int] | None = None
    for number, (word, length, begun, over) in enumerate(words):
        if (word, length) == last:
            before = found.pop()
            found.append(EqualSteps(before.first, before.times + 1, before.start_ns, before.end_ns))
        else:
            found.append(EqualSteps(number, 1, begun, over))
        last = (word, length)
    return tuple(found)


def most_repeated_step(steps: Sequence[EqualSteps]) -> EqualSteps | None:
    """The steps that most others are equal to, the first of several; None if there are no steps."""
    return max(steps, key=lambda step: (step.times, -step.first), default=None)


def representative_step(trace: Trace, ranks: Iterable[int]) -> tuple[tuple[int, int] | None, str]:
    """The start and end of the step that most others are equal to, and a text about it.

    None and an empty text if the run has less than two steps.
    """
    steps = group_equal_steps(trace, sorted(ranks))
    step = most_repeated_step(steps)
    if step is None:
        return None, ""
    count = sum(step.times for step in steps)
    equal = f", × {step.times} identical" if step.times > 1 else ""
    return (step.start_ns, step.end_ns), f"step {step.first} of {count}{equal}"


def _step_hashes(trace: Trace, rows: Ints, offset: Ints, edges: Ints) -> HashArray:
    words = row_hashes(trace, rows, False, 0)
    for name in ("started_ns", "finished_ns"):
        column = trace[name][rows]
        words = _mixed_hashes(
            words, np.where(column >= 0, column - offset, -1).astype(np.int64).view(np.uint64)
        )
    words = _mixed_hashes(words, trace["rank"][rows].astype(np.uint64))
    place = np.arange(len(rows)) - np.repeat(edges[:-1], np.diff(edges))
    return _mixed_hashes(words, place.astype(np.uint64))
