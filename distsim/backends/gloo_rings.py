"""Simulate the rings of gloo message by message, for members whose sizes differ.

gloo implements all_reduce, reduce and all_gather as rings. all_reduce and reduce cut a tensor into
segments, at least two for each rank and none above 1 MiB, and pass them to the previous rank.
all_gather passes halves of the inputs to the next rank. (Read in gloo's allreduce.cc, reduce.cc and
allgather.cc; compared with real runs by tests/backends/test_gloo_rings.py.)

If the members call a ring with different sizes, the outcome follows from the individual messages:
a segment that is larger than the room for it aborts its receiver, and a segment that is never sent
blocks its receiver forever. No rank aborts if rounding gives both sizes the same segments, as with
fewer elements than segments, or with more than 1 MiB for each rank.

The simulation has no clock and moves no data: it decides only which members abort, complete or
block.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from distsim.operations.core.backend_bindings import GLOO_MAX_SEGMENT_BYTES

#: The simulation stops after this many steps of all members together, which takes about a second.
#: Members that have not completed by then count as blocked.
_MAX_STEPS = 1 << 19
#: The same limit after the first abort: its neighbours find their connections closed, and so do
#: their neighbours.
_MAX_STEPS_AFTER_ABORT = 1 << 17
#: The steps of each member while other members are missing: the first two segments each way.
_STEPS_WITH_RANKS_MISSING = 4
#: The root of a ring without a root.
NO_ROOT = -1


class RingContribution(NamedTuple):
    """The data of one member in one ring."""

    nbytes: int
    #: The bytes of one element.
    item: int
    #: The group rank of the root, or `NO_ROOT`.
    root: int = NO_ROOT


class RingOutcome(NamedTuple):
    """The outcome of a ring, by group rank."""

    aborts: frozenset[int]
    #: The members that complete.
    through: frozenset[int]
    #: For each blocked member, the peer that it waits for.
    waits: dict[int, int]


class _RingStep(NamedTuple):
    """One step of a member: it posts a message, or waits for one that it posted before.

    ``length`` is the size of the posted message. It is `_WAIT` for a wait; then ``back`` selects
    the message: 1 is the latest that the member has posted.
    """

    peer: int
    sends: bool
    length: int
    back: int = 0


#: The length of a step that waits.
_WAIT = -1
#: The length of a segment that does not exist: nothing is posted for it.
_NO_SEGMENT = -1
#: A round number that is larger than those of all rounds.
_AFTER_ALL_ROUNDS = 1 << 62
#: Rounds of each direction that a member posts before it waits for the oldest one.
_ROUNDS_IN_FLIGHT = 2
#: The lengths that are received and sent in one round (`_NO_SEGMENT`: none).
_RoundLengths = tuple[int, int]


# --- the steps of one member ---
class _PostedMessage(NamedTuple):
    """A message that a member has posted and must still wait for."""

    round_number: int
    sends: bool
    #: The number of messages that the member had posted before this one.
    position: int


def _pipelined_steps(
    rounds: Iterable[tuple[int, _RoundLengths]], source: int, target: int
) -> Iterator[_RingStep]:
    """The steps of a member that keeps two rounds in flight.

    ``rounds`` are the rounds that move anything, each with its number, in order.
    """
    posted_count = 0
    in_flight = deque[_PostedMessage]()
    # The additional last round moves nothing: it makes the loop wait for all messages in flight.
    for round_number, lengths in chain(rounds, ((_AFTER_ALL_ROUNDS, ()),)):
        while in_flight and in_flight[0].round_number <= round_number - _ROUNDS_IN_FLIGHT:
            oldest = in_flight.popleft()
            peer = target if oldest.sends else source
            yield _RingStep(peer, oldest.sends, _WAIT, posted_count - oldest.position)
        # The last round has no lengths, hence `strict=False`.
        for sends, length in zip((False, True), lengths, strict=False):
            if length != _NO_SEGMENT:
                in_flight.append(_PostedMessage(round_number, sends, posted_count))
                posted_count += 1
                yield _RingStep(target if sends else source, sends, length)


class _SegmentedTensor(NamedTuple):
    """A tensor of ``total`` bytes that is cut into segments of ``size`` bytes.

    There may be more segments than the tensor fills: the last ones are then empty.
    """

    total: int
    segments: int
    size: int
    #: The number of segments that belong to each rank.
    each: int

    def length(self, number: int) -> int:
        """The bytes of a segment, whose number wraps around; `_NO_SEGMENT` behind the end."""
        remaining = self.total - number % self.segments * self.size
        return min(self.size, remaining) if remaining > 0 else _NO_SEGMENT

    def rounds(self, count: int, first: int) -> Iterator[tuple[int, _RoundLengths]]:
        """``count`` rounds, which send the segments from number ``first`` on.

        Each round receives the corresponding segment of the next rank. Rounds that move nothing are
        skipped: a small tensor on many ranks consists mostly of empty segments.
        """
        i = 0
        while i < count:
            received = first + self.each + i
            sent = first + i
            empty_rounds = min(self._empty_segments_from(received), self._empty_segments_from(sent))
            if empty_rounds:
                i += empty_rounds
            else:
                yield i, (self.length(received), self.length(sent))
                i += 1

    def _empty_segments_from(self, number: int) -> int:
        """How many empty segments follow each other from this number on, up to the wrap-around."""
        filled = _ceil_div(self.total, self.size)
        position = number % self.segments
        return self.segments - position if position >= filled else 0


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _round_up(value: int, unit: int) -> int:
    return _ceil_div(value, unit) * unit


def _all_reduce_steps(me: int, n: int, share: RingContribution) -> Iterator[_RingStep]:
    """A reduce-scatter around the ring, then an all-gather."""
    max_segment = share.item * max(1, GLOO_MAX_SEGMENT_BYTES // share.item)
    segments = _round_up(max(_ceil_div(share.nbytes, max_segment), 2 * n), n)
    size = _round_up(_ceil_div(share.nbytes, segments), share.item)
    tensor = _SegmentedTensor(share.nbytes, segments, size, segments // n)
    source, target = (me + 1) % n, (me - 1) % n
    for first_owner in (me + 1, me):
        rounds = tensor.rounds(segments - tensor.each, first_owner * tensor.each)
        yield from _pipelined_steps(rounds, source, target)


def _reduce_steps(me: int, n: int, share: RingContribution) -> Iterator[_RingStep]:
    """A reduce-scatter around the ring; then every member sends its chunk to the root."""
    max_segment = share.item * (GLOO_MAX_SEGMENT_BYTES // share.item)
    size = _round_up(min(_ceil_div(share.nbytes, 2 * n), max_segment), share.item)
    segments = _round_up(max(_ceil_div(share.nbytes, size), 2 * n), n)
    tensor = _SegmentedTensor(share.nbytes, segments, size, segments // n)
    rounds = tensor.rounds(segments - 2, (me + 1) * tensor.each)
    yield from _pipelined_steps(rounds, source=(me + 1) % n, target=(me - 1) % n)

    transfers = list(_chunks_to_root(me, n, share, tensor.each * size))
    yield from transfers
    for back, transfer in zip(range(len(transfers), 0, -1), transfers, strict=True):
        yield _RingStep(transfer.peer, transfer.sends, _WAIT, back)


def _chunks_to_root(
    me: int, n: int, share: RingContribution, chunk_bytes: int
) -> Iterator[_RingStep]:
    """The transfers to the root at the end of a reduce; ranks behind the tensor's end have none."""
    is_root = me == share.root
    owners = [rank for rank in range(n) if rank != me] if is_root else [me]
    for owner in owners:
        length = min(chunk_bytes, share.nbytes - owner * chunk_bytes)
        if length > 0:
            yield _RingStep(owner if is_root else share.root, not is_root, length)


def _all_gather_steps(me: int, n: int, share: RingContribution) -> Iterator[_RingStep]:
    """Each input goes around the ring in two halves."""
    half = share.nbytes // 2
    halves = (half, share.nbytes - half)
    lengths = [(length, length) for length in halves] * (n - 1)
    yield from _pipelined_steps(enumerate(lengths), source=(me - 1) % n, target=(me + 1) % n)


#: Collective -> the steps of a member, given its group rank, the group size and its contribution.
RING_STEPS: dict[str, Callable[[int, int, RingContribution], Iterator[_RingStep]]] = {
    "all_reduce": _all_reduce_steps,
    "reduce": _reduce_steps,
    "all_gather": _all_gather_steps,
}


# --- all members together ---
class _RingMessage:
    """One end of a message: the rank that posted it, its length, and whether it is matched."""

    __slots__ = ("done", "length", "rank")

    def __init__(self, rank: int, length: int) -> None:
        self.rank = rank
        self.length = length
        self.done = False


class _RingSimulation:
    """The state of one ring while its members take their steps."""

    def __init__(self, steps: dict[int, Iterator[_RingStep]]) -> None:
        self.steps = steps
        #: The next step of each member; None if it has completed.
        self.at: dict[int, _RingStep | None] = {me: next(mine, None) for me, mine in steps.items()}
        #: All messages that each member has posted, in order.
        self.posted: dict[int, list[_RingMessage]] = {me: [] for me in steps}
        #: (sender, receiver, whether posted by the sender) -> unmatched messages, in order.
        self.waiting: dict[tuple[int, int, bool], deque[_RingMessage]] = defaultdict(deque)
        self.aborts: set[int] = set()

    def run(self, max_steps: int) -> None:
        """Let all members take one step after the other, until none can or the limit is reached."""
        remaining = max_steps
        while remaining > 0:
            moved = [self.move(me) for me in self.steps]
            if not any(moved):
                return
            if self.aborts:
                remaining = min(remaining, _MAX_STEPS_AFTER_ABORT // len(self.steps))
            remaining -= 1

    @property
    def blocked(self) -> dict[int, int]:
        """Blocked member -> the peer that it waits for."""
        return {
            me: step.peer
            for me, step in self.at.items()
            if step is not None and me not in self.aborts
        }

    def move(self, me: int) -> bool:
        """Take a member's next step; False if it cannot take one."""
        step = self.at[me]
        if step is None or me in self.aborts:
            return False
        if step.length == _WAIT:
            if not self.posted[me][-step.back].done:
                return False
        else:
            self._post(me, step)
        self.at[me] = next(self.steps[me], None)
        return True

    def _post(self, me: int, step: _RingStep) -> None:
        mine = _RingMessage(me, step.length)
        sender, receiver = (me, step.peer) if step.sends else (step.peer, me)
        self.posted[me].append(mine)
        opposite = self.waiting[sender, receiver, not step.sends]
        if not opposite or receiver in self.aborts:
            self.waiting[sender, receiver, step.sends].append(mine)
            return
        other = opposite.popleft()
        sent, room = (mine, other) if step.sends else (other, mine)
        sent.done = True
        room.done = sent.length <= room.length
        if not room.done:
            self.aborts.add(room.rank)


@lru_cache(maxsize=256)
def simulate_ring(
    kind: str, n: int, shares: tuple[tuple[int, tuple[RingContribution, ...]], ...]
) -> RingOutcome:
    """The outcome of a ring of `RING_STEPS` on ``n`` ranks.

    ``shares`` lists the members that have arrived: group rank, and a contribution for each ring
    that the call consists of. gloo runs two of these rings at a time; each is simulated by itself.
    Members that have not arrived send nothing. gloo skips a contribution of no bytes.
    """
    ring_count = max((len(mine) for _, mine in shares), default=0)
    has_all_members = len(shares) == n
    aborts = set[int]()
    incomplete = set[int]()
    waits = dict[int, int]()
    for k in range(ring_count):
        kth_shares = {me: mine[k] for me, mine in shares if k < len(mine)}
        steps = {
            me: RING_STEPS[kind](me, n, share) for me, share in kth_shares.items() if share.nbytes
        }
        ring = _RingSimulation(steps)
        max_steps = _MAX_STEPS // max(len(steps), 1)
        ring.run(max_steps if has_all_members else _STEPS_WITH_RANKS_MISSING)
        aborts |= ring.aborts
        incomplete |= ring.aborts | ring.blocked.keys()
        waits |= ring.blocked
    through = frozenset(me for me, _ in shares) - incomplete
    return RingOutcome(frozenset(aborts), through, waits)
