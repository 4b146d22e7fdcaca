"""Execute the steps of the explorer on the list of integers that `encoding` lays out.

Key idea: a step is *forced* if no other step can take its place: a rank passes a stop whose
requests are complete, or a message goes to the receive that names its sender. Forced steps never
invalidate one another's conditions (all tests have the form "has reached"), so their order does not
matter. They are executed at once, and only what remains afterwards counts as a state. The *choices*
that remain are `take` (which sender an any-source receive takes) and, in the reading ``mixed``,
`release` (a waiting call is buffered after all).

This module executes steps; `persistent_sets` decides which choices to try.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distsim.checker.explore.encoding import (
    NO_PAIR,
    AnySourceBox,
    BlockingCall,
    ProgramEncoding,
    StateTest,
)
from distsim.checker.explore.potential_mismatches import NO_ASSUMED_SOURCE, PostedCall

SearchState = list[int]

#: Flags of a state. On the way to it, a message met a receive that differs; a receive took another
#: sender than it relies on.
MISMATCH_SEEN, RELIANCE_BROKEN = 1, 2
#: From the third bit on, one flag per box: a message and a receive of the box mismatched, so
#: neither completes, and the box serves no receive any more.
_BOX_CLOSED = 4


class NamedReceives(NamedTuple):
    """The receives of a box that name one sender.

    ``posted[stop]`` is how many are posted once the receiver has passed that many stops;
    ``open_before[k]`` is how many any-source receives of the box precede the k-th.
    """

    pair: int
    posted: list[int]
    open_before: list[int]


class StateMachine:
    """An encoded program, prepared for execution.

    ``ends[rank]`` is the number of stops of a rank, which is its state once it has ended.
    ``hard[rank][stop]`` are the tests that must hold to pass a stop; ``soft[rank][stop]`` those
    that a buffered request does not need (in ``mixed`` only). ``sender_of`` and ``box_of_pair``
    describe a pair; ``messages[pair]`` and ``total[pair]`` are what its sender's whole program
    sends to the box. ``sent[pair][stop of the sender]`` and ``opened[box][stop of the receiver]``
    count messages and any-source receives posted by then.

    ``mismatched`` collects, over all executions, messages and receives of boxes that met and
    differ, as (pair, number of the message, receive); it is a dictionary to keep their order.
    """

    def __init__(self, encoding: ProgramEncoding) -> None:
        self.encoding, self.size = encoding, encoding.size
        self.ends = [len(stops) for stops in encoding.stops]
        # After its last stop a rank waits for a test that never holds, so `settle` needs no check
        # for the end of a program.
        self.hard = [
            [*(_hard_tests(stop) for stop in stops), (encoding.never,)] for stops in encoding.stops
        ]
        self.soft = [[*(_soft_tests(stop) for stop in stops), ()] for stops in encoding.stops]
        self.mismatched: dict[tuple[int, int, PostedCall], None] = {}
        self._prepare_boxes()
        self._prepare_named_receives()
        self._prepare_wakes()

    def _prepare_boxes(self) -> None:
        boxes = self.encoding.boxes
        self.receiver = [box.receiver for box in boxes]
        self.pairs_of: list[range] = []
        self.sender_of: list[int] = []
        self.box_of_pair: list[int] = []
        self.messages: list[list[PostedCall]] = []
        for number, box in enumerate(boxes):
            self.pairs_of.append(range(box.first_pair, box.first_pair + len(box.senders)))
            for sender in box.senders:
                self.sender_of.append(sender)
                self.box_of_pair.append(number)
                self.messages.append(box.messages[sender])
        self.total = [len(messages) for messages in self.messages]
        self.sent = [
            self._posted_by_stop(messages, sender)
            for messages, sender in zip(self.messages, self.sender_of, strict=True)
        ]
        self.opened = [self._posted_by_stop(box.any_source_receives, box.receiver) for box in boxes]
        # Boxes whose calls cannot mismatch, and whose receives rely on no sender, need no checks.
        self.may_mismatch = [_has_different_signatures(box) for box in boxes]
        self.has_assumed_source = [
            any(call.assumed_source != NO_ASSUMED_SOURCE for call in box.any_source_receives)
            for box in boxes
        ]

    def _posted_by_stop(self, calls: list[PostedCall], rank: int) -> list[int]:
        """How many of a rank's calls are posted once it has passed each number of stops."""
        stops = [call.stop for call in calls]
        return [bisect_right(stops, stop) for stop in range(self.ends[rank] + 1)]

    def _prepare_named_receives(self) -> None:
        """Prepare the receives by name that compete with any-source receives.

        ``touched[rank][stop]`` lists the boxes to serve again when a rank has passed that many
        stops, because it then posts a message or a receive there.
        """
        self.named: list[list[NamedReceives]] = []
        self.touched: list[list[list[int]]] = [[[] for _ in range(end + 1)] for end in self.ends]
        for number, box in enumerate(self.encoding.boxes):
            self.named.append(self._named_receives(number, box))
            if not self.named[number]:
                continue
            for rank, call in _posted_calls(box):
                touched = self.touched[rank][call.stop]
                if number not in touched:
                    touched.append(number)

    def _named_receives(self, number: int, box: AnySourceBox) -> list[NamedReceives]:
        found = []
        for sender, receives in box.named.items():
            pair = self.encoding.pair(number, sender)
            if pair == NO_PAIR:
                continue
            posted = self._posted_by_stop([named.receive for named in receives], box.receiver)
            found.append(NamedReceives(pair, posted, [named.open_before for named in receives]))
        return found

    def _prepare_wakes(self) -> None:
        """``wakes[index]``: ranks with a stop that tests this number of the state."""
        wakes: list[set[int]] = [set() for _ in range(self.encoding.awaited)]
        for rank in range(self.size):
            for tests in (*self.hard[rank], *self.soft[rank]):
                for index, _ in tests:
                    wakes[index].add(rank)
        self.wakes = [tuple(sorted(ranks)) for ranks in wakes]

    def initial(self) -> SearchState:
        """The state after the forced steps from the start of the program."""
        state = [0] * self.encoding.length
        for box, named in enumerate(self.named):
            if named:
                self.serve_named(state, box, [])
        self.settle(state, list(range(self.size)))
        return state

    # --- forced steps ---
    # `settle` and `serve_named` run for every stored state; they stay dense on purpose.
    def settle(self, state: SearchState, todo: list[int]) -> None:
        """Let the ranks of ``todo``, and the ranks they wake, pass stops until none can.

        ``state[awaited + rank]`` becomes the first index whose test fails; a change of that number
        wakes the rank.
        """
        hard, soft, touched = self.hard, self.soft, self.touched
        awaited, wakes = self.encoding.awaited, self.wakes
        while todo:
            rank = todo.pop()
            stop = start = state[rank]
            own_hard, own_soft, own_touched = hard[rank], soft[rank], touched[rank]
            waits_for = -1
            while waits_for < 0:
                for index, minimum in own_hard[stop]:
                    if state[index] < minimum:
                        waits_for = index
                        break
                else:
                    for index, minimum in own_soft[stop]:
                        if state[index] < minimum:
                            waits_for = index
                            break
                    else:
                        stop += 1
                        if own_touched[stop]:
                            state[rank] = stop
                            for box in own_touched[stop]:
                                self.serve_named(state, box, todo)
            state[awaited + rank] = waits_for
            if stop != start:
                state[rank] = stop
                todo += [other for other in wakes[rank] if state[awaited + other] == rank]

    def serve_named(self, state: SearchState, box: int, todo: list[int]) -> None:
        """Deliver messages of a box to receives that name their sender.

        Such a receive must wait until all any-source receives posted before it have been served.
        Ranks that this wakes are added to ``todo``.
        """
        encoding = self.encoding
        if state[encoding.flags] & _BOX_CLOSED << box:
            return
        open_served = state[encoding.served + box]
        stop = state[self.receiver[box]]
        for pair, posted, open_before in self.named[box]:
            sender = self.sender_of[pair]
            served_at, consumed_at = encoding.named_served + pair, encoding.consumed + pair
            served_before = served = state[served_at]
            consumed = state[consumed_at]
            sent = self.sent[pair][state[sender]]
            while served < posted[stop] and open_before[served] <= open_served and consumed < sent:
                if self.may_mismatch[box]:
                    receive = encoding.boxes[box].named[sender][served].receive
                    if not self._matches(state, pair, consumed, receive):
                        break
                served, consumed = served + 1, consumed + 1
            if served != served_before:
                state[served_at], state[consumed_at] = served, consumed
                for index in (served_at, consumed_at):
                    todo += [
                        rank
                        for rank in self.wakes[index]
                        if state[encoding.awaited + rank] == index
                    ]

    # --- choices ---
    def takes(self, state: SearchState, box: int) -> list[int]:
        """The pairs whose oldest message the oldest any-source receive of a box may take now."""
        encoding = self.encoding
        if state[encoding.flags] & _BOX_CLOSED << box:
            return []
        if state[encoding.served + box] >= self.opened[box][state[self.receiver[box]]]:
            return []
        consumed, sent, sender = encoding.consumed, self.sent, self.sender_of
        return [
            pair
            for pair in self.pairs_of[box]
            if sent[pair][state[sender[pair]]] > state[consumed + pair]
        ]

    def take(self, state: SearchState, pair: int) -> None:
        """The oldest any-source receive of the pair's box takes the pair's oldest message."""
        encoding, box = self.encoding, self.box_of_pair[pair]
        served, consumed = encoding.served + box, encoding.consumed + pair
        awaited, wakes = encoding.awaited, self.wakes
        if self.may_mismatch[box] or self.has_assumed_source[box]:
            receive = encoding.boxes[box].any_source_receives[state[served]]
            if receive.assumed_source not in (NO_ASSUMED_SOURCE, self.sender_of[pair]):
                state[encoding.flags] |= RELIANCE_BROKEN
            if not self._matches(state, pair, state[consumed], receive):
                return
        state[self.size + pair] += 1
        state[served] += 1
        state[consumed] += 1
        todo = [rank for rank in wakes[served] if state[awaited + rank] == served]
        todo += [rank for rank in wakes[consumed] if state[awaited + rank] == consumed]
        if self.named[box]:
            self.serve_named(state, box, todo)
        self.settle(state, todo)

    def _matches(self, state: SearchState, pair: int, number: int, receive: PostedCall) -> bool:
        """Whether a message matches its receive. If not, close the box: neither ever completes."""
        if self.messages[pair][number].signature == receive.signature:
            return True
        state[self.encoding.flags] |= MISMATCH_SEEN | _BOX_CLOSED << self.box_of_pair[pair]
        self.mismatched[pair, number, receive] = None
        return False

    def can_release(self, state: SearchState, rank: int) -> bool:
        """Whether a rank could proceed if all it still waits for were buffered (``mixed`` only)."""
        stop = state[rank]
        if stop >= self.ends[rank] or not self.soft[rank][stop]:
            return False
        return holds(state, self.hard[rank][stop])

    def release(self, state: SearchState, rank: int) -> None:
        """Let a rank pass its stop, because what it waits for is buffered."""
        stop = state[rank] + 1
        state[rank] = stop
        awaited = self.encoding.awaited
        todo = [other for other in self.wakes[rank] if state[awaited + other] == rank]
        for box in self.touched[rank][stop]:
            self.serve_named(state, box, todo)
        todo.append(rank)
        self.settle(state, todo)

    def apply(self, state: SearchState, choice: int) -> None:
        """Execute a choice: a pair to take, or a `release_choice`."""
        rank = released_rank(choice)
        if rank is None:
            self.take(state, choice)
        else:
            self.release(state, rank)

    def blocked(self, state: SearchState) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank, end in enumerate(self.ends) if state[rank] != end]


def release_choice(rank: int) -> int:
    """The number that stands for "release this rank" where a pair stands for "take from it"."""
    return -2 - rank


def released_rank(choice: int) -> int | None:
    """The rank that a choice releases; None if the choice is a pair to take."""
    return -2 - choice if choice < 0 else None


def holds(state: SearchState, tests: Sequence[StateTest]) -> bool:
    """Whether all tests hold in a state."""
    return all(state[index] >= minimum for index, minimum in tests)


def _hard_tests(stop: BlockingCall) -> tuple[StateTest, ...]:
    """The tests that must hold even if the stop's requests are buffered where possible."""
    return tuple(test for request in stop.requests for test in request.least)


def _soft_tests(stop: BlockingCall) -> tuple[StateTest, ...]:
    """The tests of the requests that may be buffered."""
    bufferable = [request for request in stop.requests if request.least != request.tests]
    return tuple(test for request in bufferable for test in request.tests)


def _posted_calls(box: AnySourceBox) -> Iterator[tuple[int, PostedCall]]:
    """Every message and receive of a box, with its rank."""
    for sender, messages in box.messages.items():
        for message in messages:
            yield sender, message
    for receive in box.any_source_receives:
        yield box.receiver, receive
    for receives in box.named.values():
        for named in receives:
            yield box.receiver, named.receive


def _has_different_signatures(box: AnySourceBox) -> bool:
    return len({call.signature for _, call in _posted_calls(box)}) > 1
