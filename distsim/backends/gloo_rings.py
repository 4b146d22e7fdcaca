"""gloo's rings, message by message: what becomes of members that do not bring equally much.

all_reduce and reduce cut a tensor into segments, at least two for each rank and none above 1 MiB,
and hand them to the rank before; all_gather hands halves of the inputs to the rank behind (read in
allreduce.cc, reduce.cc, allgather.cc; held to runs by tests/backends/test_gloo_rings.py). A segment
that is larger than the room for it aborts its receiver, one that never comes is waited for. Where
the rounding up gives both the same segments, as with fewer elements than segments or with more than
1 MiB for each, nobody aborts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

#: gloo's default of the largest segment, bytes (`kMaxSegmentSize`).
_MAX_SEGMENT_BYTES = 1 << 20
#: Steps of all members together that are followed; who is not round by then counts as stuck. About
#: a second.
_MAX_STEPS = 1 << 19
#: The same after the first has aborted: its neighbours find their connections closed, and theirs.
_MAX_STEPS_AFTER_ABORT = 1 << 17
#: Steps of each member while others are missing: the first two segments each way.
_STEPS_WITH_RANKS_MISSING = 4


class RingContribution(NamedTuple):
    """What one member brings to one ring: bytes, and those of an element. ``root`` is a group rank;
    -1 where there is none.
    """

    nbytes: int
    item: int
    root: int = -1


class RingOutcome(NamedTuple):
    """By group rank: who aborts, who is through, and whom each of the others waits for in the
    end.
    """

    aborts: frozenset[int]
    through: frozenset[int]
    waits: dict[int, int]


class _RingStep(NamedTuple):
    """A message that is posted, or (``length`` -1) the wait for the ``back``-th posted before it.
    ``peer``: the other side.
    """

    peer: int
    sends: bool
    length: int
    back: int = 0


#: After every round.
_AFTER_ALL_ROUNDS = 1 << 62
#: Lengths that are received and sent at once, -1: nothing is.
_RoundLengths = tuple[int, int]


# --- what each member does ---
def _pipelined_steps(
    rounds: Iterable[tuple[int, _RoundLengths]], source: int, target: int
) -> Iterator[_RingStep]:
    """Two rounds under way at a time, of which those that move anything are given by their number.
    Of the k-th post the wait goes ``back`` to."""
    posted, waits = 0, deque[tuple[int, bool, int]]()
    for i, lengths in chain(rounds, ((_AFTER_ALL_ROUNDS, ()),)):
        while waits and waits[0][0] <= i - 2:
            _, sends, first = waits.popleft()
            yield _RingStep(target if sends else source, sends, -1, posted - first)
        for sends, length in zip((False, True), lengths, strict=False):
            if length >= 0:
                waits.append((i, sends, posted))
                posted += 1
                yield _RingStep(target if sends else source, sends, length)


class _SegmentedTensor(NamedTuple):
    """A tensor in so many ``segments`` of ``size`` bytes, ``each`` of a rank."""

    total: int
    segments: int
    size: int
    each: int

    def length(self, number: int) -> int:
        """Of a segment, counted round; -1 behind the tensor's end."""
        left = self.total - number % self.segments * self.size
        return min(self.size, left) if left > 0 else -1

    def rounds(self, number: int, first: int) -> Iterator[tuple[int, _RoundLengths]]:
        """So many rounds that send the segments from a number on, and receive those of the next
        rank's; those that move nothing are passed over."""
        filled, i = -(-self.total // self.size), 0
        while i < number:
            gaps = [
                -at % self.segments if at % self.segments >= filled else 0
                for at in (first + self.each + i, first + i)
            ]
            if all(gaps):
                i += min(gaps)
            else:
                yield i, (self.length(first + self.each + i), self.length(first + i))
                i += 1


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _all_reduce_steps(me: int, n: int, share: RingContribution) -> Iterator[_RingStep]:
    most = share.item * max(1, _MAX_SEGMENT_BYTES // share.item)
    count = _round_up(max(-(-share.nbytes // most), 2 * n), n)
    cut = _SegmentedTensor(
        share.nbytes, count, _round_up(-(-share.nbytes // count), share.item), count // n
    )
    for first in (me + 1, me):
        yield from _pipelined_steps(
            cut.rounds(count - cut.each, first * cut.each), (me + 1) % n, (me - 1) % n
        )


def _reduce_steps(me: int, n: int, share: RingContribution) -> Iterator[_RingStep]:
    most = share.item * (_MAX_SEGMENT_BYTES // share.item)
    size = _round_up(min(-(-share.nbytes // (2 * n)), most), share.item)
    count = _round_up(max(-(-share.nbytes // size), 2 * n), n)
    cut = _SegmentedTensor(share.nbytes, count, size, count // n)
    yield from _pipelined_steps(
        cut.rounds(count - 2, (me + 1) * cut.each), (me + 1) % n, (me - 1) % n
    )
    chunk = cut.each * size
    others = [rank for rank in range(n) if rank != me] if me == share.root else [me]
    pieces = ((rank, min(chunk, share.nbytes - rank * chunk)) for rank in others)
    moves = [
        _RingStep(share.root, True, length) if rank == me else _RingStep(rank, False, length)
        for rank, length in pieces
    ]
    moves = [move for move in moves if move.length > 0]
    yield from moves
    for back, move in zip(range(len(moves), 0, -1), moves, strict=True):
        yield _RingStep(move.peer, move.sends, -1, back)


def _all_gather_steps(me: int, n: int, share: RingContribution) -> Iterator[_RingStep]:
    halves = (share.nbytes // 2, share.nbytes - share.nbytes // 2)
    yield from _pipelined_steps(
        enumerate((half, half) for _ in range(n - 1) for half in halves), (me - 1) % n, (me + 1) % n
    )


#: The rings by their kind, of (group rank, group size, share).
RING_STEPS: dict[str, Callable[[int, int, RingContribution], Iterator[_RingStep]]] = {
    "all_reduce": _all_reduce_steps,
    "reduce": _reduce_steps,
    "all_gather": _all_gather_steps,
}


# --- all of them together ---
class _RingMessage:
    """One side of a message that is posted: whose, how long, and whether it has met the other
    side.
    """

    __slots__ = ("done", "length", "rank")

    def __init__(self, rank: int, length: int) -> None:
        self.rank = rank
        self.length = length
        self.done = False


class _RingSimulation:
    def __init__(self, steps: dict[int, Iterator[_RingStep]]) -> None:
        self.steps = steps
        self.at: dict[int, _RingStep | None] = {me: next(mine, None) for me, mine in steps.items()}
        self.posted: dict[int, list[_RingMessage]] = {me: [] for me in steps}
        self.waiting: dict[tuple[int, int, bool], deque[_RingMessage]] = defaultdict(
            deque
        )  # sender, receiver, which side
        self.aborts: set[int] = set()

    def move(self, me: int) -> bool:
        """Take a member's next step, if it can."""
        step = self.at[me]
        if step is None or me in self.aborts:
            return False
        # A step without a length waits for an earlier message.
        if step.length < 0 and not self.posted[me][-step.back].done:
            return False
        if step.length >= 0:
            self._post(me, step)
        self.at[me] = next(self.steps[me], None)
        return True

    def _post(self, me: int, step: _RingStep) -> None:
        mine = _RingMessage(me, step.length)
        ends = (me, step.peer) if step.sends else (step.peer, me)
        self.posted[me].append(mine)
        others = self.waiting[*ends, not step.sends]
        if not others or ends[1] in self.aborts:
            self.waiting[*ends, step.sends].append(mine)
            return
        other = others.popleft()
        sent, room = (mine, other) if step.sends else (other, mine)
        sent.done = True
        room.done = sent.length <= room.length
        if not room.done:
            self.aborts.add(room.rank)


@lru_cache(maxsize=256)
def simulate_ring(
    kind: str, n: int, shares: tuple[tuple[int, tuple[RingContribution, ...]], ...]
) -> RingOutcome:
    """What comes of a ring (of `RING_STEPS`) of ``n`` ranks. ``shares``: by group rank what each of
    those who came brings, a share for each ring that it goes round, two at a time; one of no bytes
    is left out by gloo. Who did not come sends nothing."""
    most = max((len(mine) for _, mine in shares), default=0)
    aborts, through, waits = set[int](), {me for me, _ in shares}, dict[int, int]()
    for k in range(most):
        steps = {
            me: RING_STEPS[kind](me, n, mine[k])
            for me, mine in shares
            if k < len(mine) and mine[k].nbytes
        }
        run = _RingSimulation(steps)
        left = _MAX_STEPS // max(len(steps), 1) if len(shares) == n else _STEPS_WITH_RANKS_MISSING
        while left > 0 and max([run.move(me) for me in steps], default=False):
            left = min(left, _MAX_STEPS_AFTER_ABORT // len(steps) if run.aborts else left) - 1
        aborts |= run.aborts
        through -= {me for me in steps if run.at[me] is not None} | run.aborts
        waits |= {
            me: step.peer
            for me, step in run.at.items()
            if step is not None and me not in run.aborts
        }
    return RingOutcome(frozenset(aborts), frozenset(through), waits)
