"""The steps of the explorer: forced ones in any order, then the choices. Works on the list of
integers that `tables` lays out.

A step is *forced* when nothing can take its place: a rank goes on past a stop whose requests are
done, a message goes to the receive that names its sender. Forced steps never undo one another's
conditions (all tests are "has reached"), so their order does not matter and they are taken at once;
only what is left afterwards is a state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from distsim.checker.explore.encoding import AnySourceBox, ProgramEncoding, StateTest
from distsim.checker.explore.potential_mismatches import PostedCall

SearchState = list[int]

#: Flags of a state: on the way to it a message met a receive that differs; a receive took another
#: sender than it relies on. From the third bit on: in this open box two met that don't fit, so that
#: it serves nobody any more.
MISMATCH_SEEN, RELIANCE_BROKEN, _BOX_CLOSED = 1, 2, 4


class StateMachine:
    """Tables made ready to run. ``ends[rank]`` is the number of the stop that stands for a rank's
    end.

    ``sent[pair][stop of the sender]``: messages posted by then; ``opened[box][stop of the
    receiver]``: open receives posted. ``total[pair]``: messages that the sender's whole program has
    for the box. ``box_of_pair``, ``sender_of`` describe a pair. ``unfit``: messages and receives
    that met somewhere and differ, as (pair, number of the message, receive).
    """

    def __init__(self, tables: ProgramEncoding) -> None:
        self.tables, self.size = tables, tables.size
        stops, zero = tables.stops, ((tables.zero, 1),)
        self.ends = [len(s) for s in stops]
        self.hard: list[list[tuple[StateTest, ...]]] = [
            [*(tuple(t for q in stop.requests for t in q.least) for stop in s), zero] for s in stops
        ]
        self.soft: list[list[tuple[StateTest, ...]]] = [
            [
                *(
                    tuple(t for q in stop.requests if q.least != q.tests for t in q.tests)
                    for stop in s
                ),
                (),
            ]
            for s in stops
        ]
        boxes = tables.boxes
        self.sender_of = [s for box in boxes for s in box.senders]
        self.box_of_pair = [b for b, box in enumerate(boxes) for _ in box.senders]
        messages = [box.messages[s] for box in boxes for s in box.senders]
        self.total = [len(m) for m in messages]
        self.messages = messages
        self.unfit: dict[tuple[int, int, PostedCall], None] = {}
        self.uneven = [len({p.signature for p in _all_posted(box)}) > 1 for box in boxes]
        self.relied_on = [any(p.assume >= 0 for p in box.any_source_receives) for box in boxes]
        self.sent = [self._counts(m, s) for m, s in zip(messages, self.sender_of, strict=True)]
        self.opened = [self._counts(box.any_source_receives, box.receiver) for box in boxes]
        self.receiver = [box.receiver for box in boxes]
        self.pairs_of = [range(box.first, box.first + len(box.senders)) for box in boxes]
        self._prepare_named()
        self._prepare_wakes()

    def _counts(self, posts: list[PostedCall], rank: int) -> list[int]:
        """Per stop of a rank how many are posted by then."""
        stops = [p.stop for p in posts]
        return [bisect_right(stops, stop) for stop in range(self.ends[rank] + 1)]

    def _prepare_named(self) -> None:
        """Where receives by name stand beside open ones: (pair, posted by stop, open ones before
        each) per box.
        """
        self.named: list[list[tuple[int, list[int], list[int]]]] = []
        for b, box in enumerate(self.tables.boxes):
            found = []
            for sender, receives in box.named.items():
                pair = self.tables.pair(b, sender)
                if pair >= 0:
                    found.append(
                        (
                            pair,
                            self._counts([p for p, _ in receives], box.receiver),
                            [before for _, before in receives],
                        )
                    )
            self.named.append(found)
        self.touched: list[list[list[int]]] = [[[] for _ in range(end + 1)] for end in self.ends]
        for b, box in enumerate(self.tables.boxes):
            if self.named[b]:
                posts = [(s, p) for s, m in box.messages.items() for p in m] + [
                    (box.receiver, p) for p in box.any_source_receives
                ]
                posts += [(box.receiver, p) for receives in box.named.values() for p, _ in receives]
                for rank, post in posts:
                    if b not in self.touched[rank][post.stop]:
                        self.touched[rank][post.stop].append(b)

    def _prepare_wakes(self) -> None:
        """``wakes[i]``: ranks with a stop that tests number i of the state."""
        found: list[set[int]] = [set() for _ in range(self.tables.watch)]
        for rank in range(self.size):
            for tests in (*self.hard[rank], *self.soft[rank]):
                for i, _ in tests:
                    found[i].add(rank)
        self.wakes = [tuple(sorted(ranks)) for ranks in found]

    def initial(self) -> SearchState:
        """The state after the forced steps of the start."""
        state = [0] * self.tables.length
        for box, named in enumerate(self.named):
            if named:
                self.serve_named(state, box, [])
        self.settle(state, list(range(self.size)))
        return state

    # --- forced steps ---
    def settle(self, state: SearchState, todo: list[int]) -> None:
        """Let the ranks of ``todo`` go on, and whoever that wakes, until none can."""
        hard, soft, touched, watch, wakes = (
            self.hard,
            self.soft,
            self.touched,
            self.tables.watch,
            self.wakes,
        )
        while todo:
            rank = todo.pop()
            at = start = state[rank]
            mine, lighter, marks = hard[rank], soft[rank], touched[rank]
            waits = -1
            while waits < 0:
                for i, v in mine[at]:
                    if state[i] < v:
                        waits = i
                        break
                else:
                    for i, v in lighter[at]:
                        if state[i] < v:
                            waits = i
                            break
                    else:
                        at += 1
                        if marks[at]:
                            state[rank] = at
                            for box in marks[at]:
                                self.serve_named(state, box, todo)
            state[watch + rank] = waits
            if at != start:
                state[rank] = at
                todo += [other for other in wakes[rank] if state[watch + other] == rank]

    def serve_named(self, state: SearchState, box: int, todo: list[int]) -> None:
        """Messages of a box go to receives that name their sender, where no older open receive
        stands before these.
        """
        tables = self.tables
        served, stop, watch = state[tables.served + box], state[self.receiver[box]], tables.watch
        if state[tables.flags] & _BOX_CLOSED << box:
            return
        for pair, posted, before in self.named[box]:
            done = state[tables.by_name + pair]
            count, gone = posted[stop], state[tables.gone + pair]
            there = self.sent[pair][state[self.sender_of[pair]]]
            new = done
            while new < count and before[new] <= served and gone < there:
                receive = (
                    tables.boxes[box].named[self.sender_of[pair]][new][0]
                    if self.uneven[box]
                    else None
                )
                if receive is not None and not self._fits(state, pair, gone, receive):
                    break
                new, gone = new + 1, gone + 1
            if new != done:
                state[tables.by_name + pair], state[tables.gone + pair] = new, gone
                for i in (tables.by_name + pair, tables.gone + pair):
                    todo += [rank for rank in self.wakes[i] if state[watch + rank] == i]

    # --- choices ---
    def takes(self, state: SearchState, box: int) -> list[int]:
        """The pairs whose oldest message the oldest open receive of a box may take now."""
        tables = self.tables
        if (
            state[tables.flags] & _BOX_CLOSED << box
            or state[tables.served + box] >= self.opened[box][state[self.receiver[box]]]
        ):
            return []
        gone, sent, sender = tables.gone, self.sent, self.sender_of
        return [
            pair
            for pair in self.pairs_of[box]
            if sent[pair][state[sender[pair]]] > state[gone + pair]
        ]

    def take(self, state: SearchState, pair: int) -> None:
        """The oldest open receive of the pair's box takes the pair's oldest message."""
        tables, box = self.tables, self.box_of_pair[pair]
        served, gone, watch = tables.served + box, tables.gone + pair, tables.watch
        if self.uneven[box] or self.relied_on[box]:
            receive = tables.boxes[box].any_source_receives[state[served]]
            if receive.assume not in (-1, self.sender_of[pair]):
                state[tables.flags] |= RELIANCE_BROKEN
            if not self._fits(state, pair, state[gone], receive):
                return
        state[self.size + pair] += 1
        state[served] += 1
        state[gone] += 1
        wakes = self.wakes
        todo = [rank for rank in wakes[served] if state[watch + rank] == served]
        todo += [rank for rank in wakes[gone] if state[watch + rank] == gone]
        if self.named[box]:
            self.serve_named(state, box, todo)
        self.settle(state, todo)

    def _fits(self, state: SearchState, pair: int, k: int, receive: PostedCall) -> bool:
        """A message fits its receive; where not, their box is shut: neither of them ever ends."""
        if self.messages[pair][k].signature == receive.signature:
            return True
        state[self.tables.flags] |= MISMATCH_SEEN | _BOX_CLOSED << self.box_of_pair[pair]
        self.unfit[pair, k, receive] = None
        return False

    def can_release(self, state: SearchState, rank: int) -> bool:
        """The rank would go on if what it still waits for were buffered (``mixed`` alone)."""
        at = state[rank]
        return (
            at < self.ends[rank]
            and bool(self.soft[rank][at])
            and all(state[i] >= v for i, v in self.hard[rank][at])
        )

    def release(self, state: SearchState, rank: int) -> None:
        """Let a rank go on past its stop: what it waits for is buffered."""
        state[rank] = at = state[rank] + 1
        todo = [other for other in self.wakes[rank] if state[self.tables.watch + other] == rank]
        for box in self.touched[rank][at]:
            self.serve_named(state, box, todo)
        todo.append(rank)
        self.settle(state, todo)

    def blocked(self, state: SearchState) -> list[int]:
        """Ranks that are not at their end."""
        return [rank for rank, end in enumerate(self.ends) if state[rank] != end]


def _all_posted(box: AnySourceBox) -> Iterator[PostedCall]:
    """Every message and receive of a box."""
    yield from box.any_source_receives
    for messages in box.messages.values():
        yield from messages
    for receives in box.named.values():
        yield from (p for p, _ in receives)
