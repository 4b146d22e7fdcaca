"""A program with receives open to any source, as tables of integers for the explorer.

A rank's code shrinks to its *stops*, the calls that may wait; what it posts between two stops is a table of stop numbers. Every
condition becomes ``(i, v)``: the state's number i has reached v. That works because control flow is fixed: "the k-th receive of
this channel is posted" is "that rank has come to its stop v", and only what an open receive takes is a count of its own. Calls
that meet and do not fit never end: an execution is over where that happens.

The state is one list of integers; see `Layout of the state` below. Its first ``key_size`` numbers decide all others.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distsim.check.instructions import (
    ALL,
    CAME,
    JOIN,
    JOIN_ASYNC,
    LEAVE,
    POST,
    ROOT,
    TAKEN,
    WAIT,
    WAIT_JOIN,
    Condition,
    RankCodes,
    Reading,
)  # fmt: skip
from distsim.check.layout import Layout
from distsim.check.leftovers import conditions_of
from distsim.check.suspects import Posted, Suspects
from distsim.program.records import at as value_at

#: (number of the state, value it must reach).
Test = tuple[int, int]


class Request(NamedTuple):
    """What a stop waits for. ``position`` and ``part``: the call whose request it is. ``ranks``: who has to come (None: see ``lane``).

    ``tests`` must hold under the reading; ``least`` must hold even where this request is buffered (equal outside ``mixed``).
    """

    position: int
    part: int
    ranks: tuple[int, ...]
    any: bool
    tests: tuple[Test, ...]
    least: tuple[Test, ...]


class Stop(NamedTuple):
    """A call that may wait: its position, and the requests it waits for."""

    position: int
    requests: tuple[Request, ...]


@dataclass(eq=False)
class OpenBox:
    """Messages to one receiver in one group under one tag, where some receive is open to any source.

    ``anys``: the open receives in order. ``senders``: their ranks, ascending; ``first`` numbers the first of them among all
    (box, sender) pairs. ``named[sender]``: receives that name it, each with how many open ones stand before it.
    """

    receiver: int
    group: int
    first: int = 0
    anys: list[Posted] = field(default_factory=list)
    senders: list[int] = field(default_factory=list)
    messages: dict[int, list[Posted]] = field(default_factory=dict)
    named: dict[int, list[tuple[Posted, int]]] = field(default_factory=dict)


@dataclass(eq=False)
class RankPosts:
    """What the walk over one rank's instructions finds."""

    stops: list[tuple[int, list[Condition], list[Condition]]] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)  # position -> number of what was posted, per part
    status: str = "ended"
    message: str = ""
    end: int = 0


class Tables:
    """See the module. ``absent``: ranks that never start.

    Layout of the state, n ranks, m pairs of box and sender, b boxes:
    ``[stop of each rank: n][messages taken by open receives, per pair: m][flags: 1]`` is the key, then derived numbers
    ``[open receives served, per box: b][receives by name served, per pair: m][messages gone, per pair: m][zero: 1]`` and
    ``[the number that each rank waits for, -1 when it has ended or never: n]``.
    """

    def __init__(self, layout: Layout, reading: str, absent: frozenset[int] = frozenset()) -> None:
        self.layout, self.reading = layout, reading
        self.size = layout.program.world_size
        self.sends: dict[int, list[Posted]] = defaultdict(list)  # channel -> messages
        self.receives: dict[int, list[Posted]] = defaultdict(list)
        self.joins: dict[tuple[int, int], list[Posted]] = defaultdict(list)  # (lane, rank) -> calls
        self.boxes: list[OpenBox] = []
        self.box_of: dict[int, int] = {}  # channel -> open box
        strict: Reading = "rendezvous" if reading == "mixed" else reading  # type: ignore[assignment]
        codes, loose = RankCodes(layout, strict), RankCodes(layout, "buffered")
        walks = [self._walk(rank, codes, loose, absent) for rank in range(self.size)]
        self._make_boxes()
        self._number()
        self.suspects = Suspects(layout, self.joins, self.sends, self.receives, self.box_of)
        self.posts = walks
        self._lane_tests: dict[tuple[int, int], tuple[Test, ...]] = {}
        self.stops = [[Stop(p, self._requests(r, p, hard, least)) for p, hard, least in walks[r].stops] for r in range(self.size)]

    # --- first pass: what is posted where ---
    def _walk(self, rank: int, codes: RankCodes, loose: RankCodes, absent: frozenset[int]) -> RankPosts:
        found = RankPosts()
        if rank in absent:
            found.status = "absent"
            return found
        light = loose.of(rank) if self.reading == "mixed" else None
        for position, instruction in enumerate(codes.of(rank)):
            op, a, b = instruction
            if op == LEAVE:
                found.status, found.message, found.end = a, b, position
                break
            made: Any = -1
            if op in (JOIN, JOIN_ASYNC):
                made = self._join(rank, a, b, position, len(found.stops))
            elif op == POST:
                made = [self._post(rank, position, part, post, len(found.stops)) for part, post in enumerate(a)]
            found.made.append(made)
            conditions = list(conditions_of(instruction)) if op in (JOIN, WAIT_JOIN, POST, WAIT) else []
            if conditions:
                least = conditions if light is None else list(conditions_of(light[position]))
                found.stops.append((position, conditions, least))
        return found

    def _join(self, rank: int, slot: int, signature: Any, position: int, stop: int) -> int:
        lane = self.layout.lane_of[self.layout.member[rank][slot]]
        if signature.__class__ is list:
            signature = signature[self.layout.program.row_of[rank]]
        calls = self.joins[lane, rank]
        calls.append(Posted(stop, position, -1, int(value_at(signature, self.layout.program.row_of[rank]))))
        return len(calls) - 1

    def _post(self, rank: int, position: int, index: int, post: tuple[int, int, Any], stop: int) -> int:
        kind, where, signature = post
        if kind == ALL:
            return self._join(rank, where, signature, position, stop)
        program, sends = self.layout.program, kind == TAKEN
        row, call = program.row_of[rank], program.code_call(rank, position)
        part = index if call.parts else -1
        channel = (self.layout.send_chan if sends else self.layout.recv_chan)[rank][where]
        assume = None if sends else (call.parts[part] if part >= 0 else call).fields.get("assume_src")
        posts = (self.sends if sends else self.receives)[channel]
        relied_on = -1 if assume is None else int(value_at(assume, row))
        posts.append(Posted(stop, position, part, int(value_at(signature, row)), relied_on))
        return len(posts) - 1

    # --- boxes ---
    def _make_boxes(self) -> None:
        layout, numbers = self.layout, {}
        keys = list(zip(layout.chan_group, layout.chan_dst, layout.chan_tag, strict=True))
        for channel in sorted(self.receives):
            if layout.chan_src[channel] < 0:
                numbers[keys[channel]] = len(self.boxes)
                self.boxes.append(OpenBox(layout.chan_dst[channel], layout.chan_group[channel], anys=self.receives[channel]))
        for channel in sorted({*self.sends, *self.receives}):
            if keys[channel] not in numbers:
                continue
            number = self.box_of[channel] = numbers[keys[channel]]
            box, source = self.boxes[number], layout.chan_src[channel]
            if source >= 0 and channel in self.sends:
                box.messages[source] = self.sends[channel]
            if source >= 0 and channel in self.receives:
                order = [(p.position, p.part) for p in box.anys]
                box.named[source] = [(p, sum(o < (p.position, p.part) for o in order)) for p in self.receives[channel]]

    def _number(self) -> None:
        """Number the pairs and lay out the state."""
        pairs = 0
        for box in self.boxes:
            box.first, box.senders = pairs, sorted(box.messages)
            pairs += len(box.senders)
        n, b = self.size, len(self.boxes)
        self.pairs, self.flags = pairs, n + pairs
        self.key_size = self.flags + 1
        self.served = self.key_size
        self.by_name = self.served + b
        self.gone = self.by_name + pairs
        self.zero = self.gone + pairs
        self.watch = self.zero + 1
        self.length = self.watch + n

    def pair(self, box: int, sender: int) -> int:
        """The number of a box and one of its senders; -1 where that rank sends nothing to it."""
        found = self.boxes[box]
        return found.first + found.senders.index(sender) if sender in found.messages else -1

    # --- second pass: conditions ---
    def _requests(self, rank: int, at: int, strict: list[Condition], least: list[Condition]) -> tuple[Request, ...]:
        light = {c[1:2] + c[3:]: c for c in least}  # by distance and part
        out = []
        for condition in strict:
            request = self._request(rank, at, condition)
            if request is not None:
                other = light.get(condition[1:2] + condition[3:])
                weak = self._request(rank, at, other) if other is not None and other != condition else None
                tests = () if other is None else request.tests if weak is None else weak.tests
                out.append(request._replace(least=tests))
        return tuple(out)

    def _request(self, rank: int, at: int, condition: Condition) -> Request | None:
        """One condition; None where its request was never posted."""
        kind, distance, where, part = condition
        kept = self.posts_of(rank, at - distance)
        k = kept[max(part, 0)] if isinstance(kept, list) else kept
        if k < 0:
            return None
        if kind in (ALL, ROOT):
            return self._collective(rank, at - distance, condition, k)
        channel = (self.layout.send_chan if kind == TAKEN else self.layout.recv_chan)[rank][where]
        layout, box = self.layout, self.box_of.get(channel)
        other = layout.chan_dst[channel] if kind == TAKEN else layout.chan_src[channel]
        if box is None:
            posts = (self.receives if kind == TAKEN else self.sends).get(channel, [])
            tests: tuple[Test, ...] = ((other, posts[k].stop) if k < len(posts) else (self.zero, 1),)
            tests += ((self.zero, 1),) if (channel, k) in self.suspects.bad_pairs else ()
        elif kind == TAKEN:
            tests = ((self.gone + self.pair(box, rank), k + 1),)
        elif other >= 0:
            pair = self.pair(box, other)
            tests = ((self.by_name + pair, k + 1) if pair >= 0 else (self.zero, 1),)
        else:
            ranks = tuple(r for r in layout.lane_ranks[layout.chan_group[channel]] if r != rank)
            tests = ((self.served + box, k + 1),)
            return Request(at - distance, part, ranks, True, tests, tests)
        return Request(at - distance, part, (other,), False, tests, tests if kind == CAME else ())

    def posts_of(self, rank: int, position: int) -> Any:
        """What a call posted: its number on its channel or lane, or one per part."""
        return self.posts[rank].made[position]

    def _collective(self, rank: int, position: int, condition: Condition, n: int) -> Request:
        kind, _, where, _ = condition
        slot, root, leaves = (where, -1, None) if kind == ALL else where
        lane = self.layout.lane_of[self.layout.member[rank][slot]]
        if kind == ROOT:
            root = int(root[self.layout.program.row_of[rank]] if isinstance(root, list) else root)
            alone = leaves if rank == root else leaves is False
            if alone:
                return Request(position, -1, (), False, (), ())
        if kind == ALL or rank == root:
            tests = self.lane_tests(lane, n)
            return Request(position, -1, self.layout.lane_ranks[lane], False, tests, tests)
        theirs = self.joins.get((lane, root), ())[n : n + 1]
        fits = all(call.signature == self.joins[lane, rank][n].signature for call in theirs)
        tests = (self._come(lane, root, n), *(() if fits else ((self.zero, 1),)))
        return Request(position, -1, (root,), False, tests, tests)

    def lane_tests(self, lane: int, n: int) -> tuple[Test, ...]:
        """All members have made the lane's n-th call."""
        if (lane, n) not in self._lane_tests:
            tests = tuple(self._come(lane, rank, n) for rank in self.layout.lane_ranks[lane])
            self._lane_tests[lane, n] = tests + (((self.zero, 1),) if (lane, n) in self.suspects.bad_lanes else ())
        return self._lane_tests[lane, n]

    def _come(self, lane: int, rank: int, n: int) -> Test:
        calls = self.joins.get((lane, rank), ())
        return (rank, calls[n].stop) if n < len(calls) else (self.zero, 1)
