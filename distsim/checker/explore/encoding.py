"""A program with receives open to any source, as tables of integers for the explorer.

A rank's code shrinks to its *stops*, the calls that may wait; what it posts between two stops is a
table of stop numbers. Every condition becomes ``(i, v)``: the state's number i has reached v. That
works because control flow is fixed: "the k-th receive of this channel is posted" is "that rank has
come to its stop v", and only what an open receive takes is a count of its own. Calls that meet and
do not fit never end: an execution is over where that happens.

The state is one list of integers; see `Layout of the state` below. Its first ``key_size`` numbers
decide all others.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from distsim.backends import CONTRACT_READINGS, BackendProfile
from distsim.checker.explore.potential_mismatches import PostedCall, PotentialMismatches
from distsim.checker.matching.channel_layout import ChannelLayout
from distsim.operations.registry import OPERATIONS
from distsim.program.code import at_row as value_at
from distsim.semantics.form.instructions import (
    ExitRank,
    LaunchPart,
    PartKind,
    PostLaunch,
    WaitForRows,
)

#: (number of the state, value it must reach).
StateTest = tuple[int, int]


class AwaitedRequest(NamedTuple):
    """What a stop waits for. ``position`` and ``part``: the call whose request it is. ``ranks``:
    who has to come (None: see ``sequence``).

    ``tests`` must hold under the reading; ``least`` must hold even where this request is buffered
    (equal outside ``mixed``).
    """

    position: int
    part: int
    ranks: tuple[int, ...]
    any: bool
    tests: tuple[StateTest, ...]
    least: tuple[StateTest, ...]


class BlockingCall(NamedTuple):
    """A call that may wait: its position, and the requests it waits for."""

    position: int
    requests: tuple[AwaitedRequest, ...]


@dataclass(eq=False)
class AnySourceBox:
    """Messages to one receiver in one group under one tag, where some receive is open to any
    source.

    ``anys``: the open receives in order. ``senders``: their ranks, ascending; ``first`` numbers the
    first of them among all (box, sender) pairs. ``named[sender]``: receives that name it, each with
    how many open ones stand before it.
    """

    receiver: int
    group: int
    first: int = 0
    any_source_receives: list[PostedCall] = field(default_factory=list)
    senders: list[int] = field(default_factory=list)
    messages: dict[int, list[PostedCall]] = field(default_factory=dict)
    named: dict[int, list[tuple[PostedCall, int]]] = field(default_factory=dict)


@dataclass(eq=False)
class RankStops:
    """What the walk over one rank's instructions finds. ``stops``: position and the rows that are
    waited for.
    """

    stops: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    status: str = "ended"
    message: str = ""
    end: int = 0


class EncodedRow(NamedTuple):
    """A row that others may need: its part, and its number on its channel or sequence,
    ``where``.
    """

    part: LaunchPart
    where: int
    number: int


class ProgramEncoding:
    """See the module. ``absent``: ranks that never start.

    Layout of the state, n ranks, m pairs of box and sender, b boxes: ``[stop of each rank:
    n][messages taken by open receives, per pair: m][flags: 1]`` is the key, then derived numbers
    ``[open receives served, per box: b][receives by name served, per pair: m][messages gone, per
    pair: m][zero: 1]`` and ``[the number that each rank waits for, -1 when it has ended or never:
    n]``.
    """

    def __init__(
        self, layout: ChannelLayout, reading: str, absent: frozenset[int] = frozenset()
    ) -> None:
        self.layout, self.reading = layout, reading
        self.size = layout.program.world_size
        self.sends: dict[int, list[PostedCall]] = defaultdict(list)  # channel -> messages
        self.receives: dict[int, list[PostedCall]] = defaultdict(list)
        self.joins: dict[tuple[int, int], list[PostedCall]] = defaultdict(
            list
        )  # (sequence, rank) -> calls
        self.boxes: list[AnySourceBox] = []
        self.box_of: dict[int, int] = {}  # channel -> open box
        self.profile: BackendProfile = CONTRACT_READINGS[
            "rendezvous" if reading == "mixed" else reading
        ]
        self.rows: dict[int, EncodedRow] = {}
        walks = [self._walk(rank, absent) for rank in range(self.size)]
        self._make_boxes()
        self._number()
        self.may_mismatch = PotentialMismatches(
            layout, self.joins, self.sends, self.receives, self.box_of
        )
        self.posts = walks
        self._sequence_tests: dict[tuple[int, int], tuple[StateTest, ...]] = {}
        self.stops = [
            [BlockingCall(p, self._requests(r, rows)) for p, rows in walks[r].stops]
            for r in range(self.size)
        ]

    # --- first pass: what is posted where ---
    def _walk(self, rank: int, absent: frozenset[int]) -> RankStops:
        found, linked = RankStops(), self.layout.linked
        if rank in absent:
            found.status = "absent"
            return found
        for instruction in linked.unit_of[rank].instructions:
            if isinstance(instruction, PostLaunch):
                for part in instruction.launch.parts:
                    self._post(rank, part, len(found.stops))
            elif isinstance(instruction, WaitForRows):
                rows = tuple(
                    row for row in instruction.rows if self._may_wait(linked.base[rank] + row)
                )
                if rows:
                    found.stops.append((instruction.position, rows))
            elif isinstance(instruction, ExitRank):
                found.status, found.message, found.end = (
                    instruction.status,
                    instruction.message,
                    instruction.position,
                )
        return found

    def _may_wait(self, row: int) -> bool:
        """A row that a reading may make its rank wait for."""
        if row not in self.rows:
            return False
        part = self.rows[row].part
        return (
            part.kind is not PartKind.SEND
            or self.reading != "buffered"
            or OPERATIONS[part.call.op].signals
        )

    def _post(self, rank: int, part: LaunchPart, stop: int) -> None:
        layout, program, call = self.layout, self.layout.program, part.call
        if part.kind is PartKind.WORK:
            return
        row, assume = program.row_of[rank], -1
        if part.kind is PartKind.COLLECTIVE:
            where = layout.sequence_of[
                layout.member[rank][layout.slot(program.code_of[rank], call)]
            ]
            posts = self.joins[where, rank]
        else:
            sends = part.kind is PartKind.SEND
            where = (layout.send_chan if sends else layout.recv_chan)[rank][call.port]
            posts = (self.sends if sends else self.receives)[where]
            relied_on = None if sends else call.fields.get("assume_src")
            assume = -1 if relied_on is None else int(value_at(relied_on, row))
        self.rows[layout.linked.base[rank] + part.row] = EncodedRow(part, where, len(posts))
        posts.append(
            PostedCall(stop, part.position, part.part, int(value_at(call.signature, row)), assume)
        )

    # --- boxes ---
    def _make_boxes(self) -> None:
        layout, numbers = self.layout, {}
        keys = list(zip(layout.chan_group, layout.chan_dst, layout.chan_tag, strict=True))
        for channel in sorted(self.receives):
            if layout.chan_src[channel] < 0:
                numbers[keys[channel]] = len(self.boxes)
                self.boxes.append(
                    AnySourceBox(
                        layout.chan_dst[channel],
                        layout.chan_group[channel],
                        any_source_receives=self.receives[channel],
                    )
                )
        for channel in sorted({*self.sends, *self.receives}):
            if keys[channel] not in numbers:
                continue
            number = self.box_of[channel] = numbers[keys[channel]]
            box, source = self.boxes[number], layout.chan_src[channel]
            if source >= 0 and channel in self.sends:
                box.messages[source] = self.sends[channel]
            if source >= 0 and channel in self.receives:
                order = [(p.position, p.part) for p in box.any_source_receives]
                box.named[source] = [
                    (p, sum(o < (p.position, p.part) for o in order))
                    for p in self.receives[channel]
                ]

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
    def _requests(self, rank: int, rows: tuple[int, ...]) -> tuple[AwaitedRequest, ...]:
        base = self.layout.linked.base[rank]
        return tuple(self._request(rank, self.rows[base + row]) for row in rows)

    def _request(self, rank: int, row: EncodedRow) -> AwaitedRequest:
        if row.part.kind is PartKind.COLLECTIVE:
            found = self._collective(rank, row, self.profile)
            least = (
                self._collective(rank, row, CONTRACT_READINGS["buffered"]).tests
                if self.reading == "mixed"
                else found.tests
            )
            return found._replace(least=least)
        sends, channel, k = row.part.kind is PartKind.SEND, row.where, row.number
        layout, box, part = self.layout, self.box_of.get(row.where), row.part
        other = layout.chan_dst[channel] if sends else layout.chan_src[channel]
        tests: tuple[StateTest, ...]
        if (
            sends and OPERATIONS[part.call.op].signals
        ):  # the cell must be empty: the signal before was taken
            posts, tests = self.receives.get(channel, []), ()
            if k:
                tests = ((other, posts[k - 1].stop) if k <= len(posts) else (self.zero, 1),)
            return AwaitedRequest(part.position, part.part, (other,), False, tests, tests)
        if box is None:
            posts = (self.receives if sends else self.sends).get(channel, [])
            tests = ((other, posts[k].stop) if k < len(posts) else (self.zero, 1),)
            tests += ((self.zero, 1),) if (channel, k) in self.may_mismatch.bad_pairs else ()
        elif sends:
            tests = ((self.gone + self.pair(box, rank), k + 1),)
        elif other >= 0:
            pair = self.pair(box, other)
            tests = ((self.by_name + pair, k + 1) if pair >= 0 else (self.zero, 1),)
        else:
            ranks = tuple(r for r in layout.sequence_ranks[layout.chan_group[channel]] if r != rank)
            tests = ((self.served + box, k + 1),)
            return AwaitedRequest(part.position, part.part, ranks, True, tests, tests)
        buffered = sends and self.reading == "mixed"
        return AwaitedRequest(
            part.position, part.part, (other,), False, tests, () if buffered else tests
        )

    def _collective(self, rank: int, row: EncodedRow, profile: BackendProfile) -> AwaitedRequest:
        part, sequence, n = row.part, row.where, row.number
        members, written = self.layout.sequence_ranks[sequence], part.call.fields.get("root")
        root = (
            members[0]
            if written is None
            else int(value_at(written, self.layout.program.row_of[rank]))
        )
        needed = profile.needs(part.call.op, len(members), members.index(root), members.index(rank))
        if needed is None:
            tests = self.sequence_tests(sequence, n)
            return AwaitedRequest(part.position, -1, members, False, tests, tests)
        ranks, mine = (
            tuple(members[i] for i in sorted(needed)),
            self.joins[sequence, rank][n].signature,
        )
        theirs = [
            call for other in ranks for call in self.joins.get((sequence, other), ())[n : n + 1]
        ]
        fits = all(call.signature == mine for call in theirs)
        tests = (
            *(self._come(sequence, other, n) for other in ranks),
            *(() if fits else ((self.zero, 1),)),
        )
        return AwaitedRequest(part.position, -1, ranks, False, tests, tests)

    def sequence_tests(self, sequence: int, n: int) -> tuple[StateTest, ...]:
        """All members have made the sequence's n-th call."""
        if (sequence, n) not in self._sequence_tests:
            tests = tuple(
                self._come(sequence, rank, n) for rank in self.layout.sequence_ranks[sequence]
            )
            self._sequence_tests[sequence, n] = tests + (
                ((self.zero, 1),) if (sequence, n) in self.may_mismatch.bad_sequences else ()
            )
        return self._sequence_tests[sequence, n]

    def _come(self, sequence: int, rank: int, n: int) -> StateTest:
        calls = self.joins.get((sequence, rank), ())
        return (rank, calls[n].stop) if n < len(calls) else (self.zero, 1)
