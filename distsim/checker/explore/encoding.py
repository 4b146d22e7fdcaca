"""Encode a program with any-source receives as tables of integers for the explorer.

Key idea: a rank's program is reduced to its *stops*, the calls at which the rank may wait. Between
two stops a rank only posts calls, and each posted call is recorded with the number of stops that
precede it. Every wait condition then has the form ``(index, minimum)``: the state's number at
``index`` has reached ``minimum``. This works because control flow is fixed: "the k-th receive of
this channel is posted" means "that rank has reached its stop s". Only what an any-source receive
takes depends on the execution, so only that needs counters of its own.

A state is one list of integers; `ProgramEncoding` documents its layout. The first ``key_size``
numbers determine all others.

Calls that meet and mismatch never complete: an execution ends there for their ranks. This module
only builds the tables; `steps` runs them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distsim.backends import CONTRACT_READINGS, BackendProfile
from distsim.checker.explore.potential_mismatches import (
    NO_ASSUMED_SOURCE,
    PostedCall,
    PotentialMismatches,
)
from distsim.checker.matching.channel_layout import ANY_SOURCE, WHOLE_CALL, ChannelLayout
from distsim.operations.registry import OPERATIONS
from distsim.program.code import at_row as value_at
from distsim.semantics.form.instructions import (
    ExitRank,
    LaunchPart,
    PartKind,
    PostLaunch,
    WaitForRows,
)

#: (index into the state, minimum): holds once the number at the index has reached the minimum.
StateTest = tuple[int, int]

#: Number of a pair (box, sender) that does not exist: the sender has no message for the box.
NO_PAIR = -1


class AwaitedRequest(NamedTuple):
    """A request that a stop waits for.

    ``position`` and ``part`` identify the call that made the request. ``ranks`` are the peers that
    must arrive: all of them, or one of them if ``any`` is set. ``tests`` must hold under the
    reading. ``least`` must hold even if this request is buffered; it differs from ``tests`` only in
    the reading ``mixed``.
    """

    position: int
    part: int
    ranks: tuple[int, ...]
    any: bool
    tests: tuple[StateTest, ...]
    least: tuple[StateTest, ...]


class BlockingCall(NamedTuple):
    """A stop: a call that may wait, with its position and the requests it waits for."""

    position: int
    requests: tuple[AwaitedRequest, ...]


class NamedReceive(NamedTuple):
    """A receive of a box that names its sender.

    ``open_before`` is the number of any-source receives of the box posted before it: a message goes
    to it only after they have been served.
    """

    receive: PostedCall
    open_before: int


@dataclass(eq=False)
class AnySourceBox:
    """Messages to one receiver in one group under one tag, where some receive has any source.

    ``any_source_receives`` are in program order. ``senders`` are the ranks with messages for the
    box, ascending. ``first_pair`` numbers the first of them among the (box, sender) pairs of all
    boxes; the others follow. ``named`` maps a sender to the receives that name it.
    """

    receiver: int
    group: int
    first_pair: int = 0
    any_source_receives: list[PostedCall] = field(default_factory=list)
    senders: list[int] = field(default_factory=list)
    messages: dict[int, list[PostedCall]] = field(default_factory=dict)
    named: dict[int, list[NamedReceive]] = field(default_factory=dict)

    @property
    def has_surplus(self) -> bool:
        """Whether the box gets more messages than it has receives."""
        messages = sum(len(calls) for calls in self.messages.values())
        named = sum(len(receives) for receives in self.named.values())
        return messages > len(self.any_source_receives) + named


@dataclass(eq=False)
class RankStops:
    """One rank's stops, each as (position, awaited rows), and how its program ends."""

    stops: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    status: str = "ended"
    message: str = ""
    end: int = 0


class EncodedRow(NamedTuple):
    """A posted row: its part, its channel or (for a collective) sequence, its number there."""

    part: LaunchPart
    meeting: int
    number: int


class ProgramEncoding:
    """The tables of one program under one reading. ``absent``: ranks that never start.

    Layout of a state, for n ranks, m pairs (box, sender) and b boxes. The key:

    * ``0``: for each rank, the number of stops it has passed (n numbers);
    * ``n``: for each pair, messages taken by any-source receives (m numbers);
    * ``flags``: see `steps` (1 number).

    Derived numbers, which speed up the tests:

    * ``served``: for each box, any-source receives served (b numbers);
    * ``named_served``: for each pair, receives by name served (m numbers);
    * ``consumed``: for each pair, messages taken by any receive (m numbers);
    * ``zero``: always 0, so that the test ``(zero, 1)`` never holds (1 number);
    * ``awaited``: for each rank, the index it waits for (n numbers).
    """

    def __init__(
        self, layout: ChannelLayout, reading: str, absent: frozenset[int] = frozenset()
    ) -> None:
        self.layout = layout
        self.reading = reading
        self.size = layout.program.world_size
        self.sends: dict[int, list[PostedCall]] = defaultdict(list)  # by channel
        self.receives: dict[int, list[PostedCall]] = defaultdict(list)  # by channel
        # Calls of collectives, by (sequence, rank).
        self.joins: dict[tuple[int, int], list[PostedCall]] = defaultdict(list)
        self.boxes: list[AnySourceBox] = []
        # Channel -> box, for the channels whose messages an any-source receive may take.
        self.box_of: dict[int, int] = {}
        # `mixed` may buffer each send or not: it starts from the strictest rules, and
        # AwaitedRequest.least says what must hold even then.
        strictest = "rendezvous" if reading == "mixed" else reading
        self.profile: BackendProfile = CONTRACT_READINGS[strictest]
        self.rows: dict[int, EncodedRow] = {}
        # First pass over all ranks: what is posted where. Conditions need the posts of other
        # ranks, so they are built in a second pass.
        self.rank_stops = [self._collect_stops(rank, absent) for rank in range(self.size)]
        self._make_boxes()
        self._lay_out_state()
        self.potential_mismatches = PotentialMismatches(
            layout, self.joins, self.sends, self.receives, self.box_of
        )
        self._sequence_tests: dict[tuple[int, int], tuple[StateTest, ...]] = {}
        self.stops = [self._blocking_calls(rank) for rank in range(self.size)]

    # --- first pass: what is posted where ---
    def _collect_stops(self, rank: int, absent: frozenset[int]) -> RankStops:
        """Record what a rank posts, and return its stops."""
        found = RankStops()
        if rank in absent:
            found.status = "absent"
            return found

        base = self.layout.linked.base[rank]
        for instruction in self.layout.linked.unit_of[rank].instructions:
            if isinstance(instruction, PostLaunch):
                for part in instruction.launch.parts:
                    self._record_post(rank, part, len(found.stops))
            elif isinstance(instruction, WaitForRows):
                rows = tuple(row for row in instruction.rows if self._may_wait(base + row))
                if rows:
                    found.stops.append((instruction.position, rows))
            elif isinstance(instruction, ExitRank):
                found.status = instruction.status
                found.message = instruction.message
                found.end = instruction.position
        return found

    def _may_wait(self, row: int) -> bool:
        """Whether the reading may make the rank of a row wait for it."""
        if row not in self.rows:
            return False
        part = self.rows[row].part
        if part.kind is not PartKind.SEND or self.reading != "buffered":
            return True
        # put_signal waits until the signal before it was taken, even where sends are buffered.
        return OPERATIONS[part.call.op].signals

    def _record_post(self, rank: int, part: LaunchPart, stop: int) -> None:
        """Record that a rank posts a part after it has passed ``stop`` stops."""
        if part.kind is PartKind.WORK:
            return
        layout, program, call = self.layout, self.layout.program, part.call
        row = program.row_of[rank]
        assumed_source = NO_ASSUMED_SOURCE
        if part.kind is PartKind.COLLECTIVE:
            slot = layout.slot(program.code_of[rank], call)
            meeting = layout.sequence_of[layout.member[rank][slot]]
            posts = self.joins[meeting, rank]
        elif part.kind is PartKind.SEND:
            meeting = layout.send_chan[rank][call.endpoint]
            posts = self.sends[meeting]
        else:
            meeting = layout.recv_chan[rank][call.endpoint]
            posts = self.receives[meeting]
            assumed = call.fields.get("assume_src")
            if assumed is not None:
                assumed_source = int(value_at(assumed, row))
        self.rows[layout.linked.base[rank] + part.row] = EncodedRow(part, meeting, len(posts))
        signature = int(value_at(call.signature, row))
        posts.append(PostedCall(stop, part.position, part.part, signature, assumed_source))

    # --- boxes ---
    def _make_boxes(self) -> None:
        """Gather the channels whose messages an any-source receive may take into boxes."""
        layout = self.layout
        keys = list(zip(layout.chan_group, layout.chan_dst, layout.chan_tag, strict=True))
        number_of_key: dict[tuple[int, int, int], int] = {}
        for channel in sorted(self.receives):
            if layout.chan_src[channel] != ANY_SOURCE:
                continue
            number_of_key[keys[channel]] = len(self.boxes)
            box = AnySourceBox(layout.chan_dst[channel], layout.chan_group[channel])
            box.any_source_receives = self.receives[channel]
            self.boxes.append(box)

        for channel in sorted({*self.sends, *self.receives}):
            if keys[channel] in number_of_key:
                self.box_of[channel] = number_of_key[keys[channel]]
                self._add_to_box(channel)

    def _add_to_box(self, channel: int) -> None:
        """Add the messages and receives of a channel with a named source to its box."""
        box, source = self.boxes[self.box_of[channel]], self.layout.chan_src[channel]
        if source == ANY_SOURCE:
            return
        if channel in self.sends:
            box.messages[source] = self.sends[channel]
        if channel in self.receives:
            open_calls = [(call.position, call.part) for call in box.any_source_receives]
            box.named[source] = [
                NamedReceive(call, _number_before(open_calls, call))
                for call in self.receives[channel]
            ]

    def _lay_out_state(self) -> None:
        """Number the pairs and compute the offsets that the class docstring lists."""
        pairs = 0
        for box in self.boxes:
            box.first_pair = pairs
            box.senders = sorted(box.messages)
            pairs += len(box.senders)
        self.flags = self.size + pairs
        self.key_size = self.flags + 1
        self.served = self.key_size
        self.named_served = self.served + len(self.boxes)
        self.consumed = self.named_served + pairs
        self.zero = self.consumed + pairs
        self.awaited = self.zero + 1
        self.length = self.awaited + self.size
        #: A test that never holds.
        self.never: StateTest = (self.zero, 1)

    def pair(self, box: int, sender: int) -> int:
        """The number of the pair (box, sender), or `NO_PAIR`."""
        found = self.boxes[box]
        if sender not in found.messages:
            return NO_PAIR
        return found.first_pair + found.senders.index(sender)

    # --- second pass: conditions ---
    def _blocking_calls(self, rank: int) -> list[BlockingCall]:
        base = self.layout.linked.base[rank]
        calls = []
        for position, rows in self.rank_stops[rank].stops:
            requests = tuple(self._request(rank, self.rows[base + row]) for row in rows)
            calls.append(BlockingCall(position, requests))
        return calls

    def _request(self, rank: int, row: EncodedRow) -> AwaitedRequest:
        if row.part.kind is PartKind.COLLECTIVE:
            return self._collective_request(rank, row)
        if row.part.kind is not PartKind.SEND:
            return self._receive_request(rank, row)
        if OPERATIONS[row.part.call.op].signals:
            return self._signal_request(row)
        return self._send_request(rank, row)

    def _signal_request(self, row: EncodedRow) -> AwaitedRequest:
        """A signal needs an empty cell: the signal before it must have been taken."""
        receiver = self.layout.chan_dst[row.meeting]
        receives = self.receives.get(row.meeting, [])
        tests: tuple[StateTest, ...] = ()
        if row.number:
            tests = (self._posted(receiver, receives, row.number - 1),)
        part = row.part
        return AwaitedRequest(part.position, part.part, (receiver,), False, tests, tests)

    def _send_request(self, rank: int, row: EncodedRow) -> AwaitedRequest:
        part, receiver = row.part, self.layout.chan_dst[row.meeting]
        tests: tuple[StateTest, ...]
        if row.meeting in self.box_of:
            pair = self.pair(self.box_of[row.meeting], rank)
            tests = ((self.consumed + pair, row.number + 1),)
        else:
            tests = self._counterpart_tests(row, receiver, self.receives)
        least = () if self.reading == "mixed" else tests
        return AwaitedRequest(part.position, part.part, (receiver,), False, tests, least)

    def _receive_request(self, rank: int, row: EncodedRow) -> AwaitedRequest:
        layout, part = self.layout, row.part
        box, sender = self.box_of.get(row.meeting), layout.chan_src[row.meeting]
        tests: tuple[StateTest, ...]
        if box is None:
            tests = self._counterpart_tests(row, sender, self.sends)
        elif sender == ANY_SOURCE:
            members = layout.sequence_ranks[layout.chan_group[row.meeting]]
            others = tuple(other for other in members if other != rank)
            tests = ((self.served + box, row.number + 1),)
            return AwaitedRequest(part.position, part.part, others, True, tests, tests)
        else:
            pair = self.pair(box, sender)
            served = (self.named_served + pair, row.number + 1)
            tests = (self.never if pair == NO_PAIR else served,)
        return AwaitedRequest(part.position, part.part, (sender,), False, tests, tests)

    def _counterpart_tests(
        self, row: EncodedRow, peer: int, posts: dict[int, list[PostedCall]]
    ) -> tuple[StateTest, ...]:
        """The peer has posted the counterpart on the same channel, and the two match."""
        tests = (self._posted(peer, posts.get(row.meeting, []), row.number),)
        if (row.meeting, row.number) in self.potential_mismatches.bad_pairs:
            return (*tests, self.never)
        return tests

    def _collective_request(self, rank: int, row: EncodedRow) -> AwaitedRequest:
        request = self._collective_under(self.profile, rank, row)
        if self.reading != "mixed":
            return request
        buffered = self._collective_under(CONTRACT_READINGS["buffered"], rank, row)
        return request._replace(least=buffered.tests)

    def _collective_under(
        self, profile: BackendProfile, rank: int, row: EncodedRow
    ) -> AwaitedRequest:
        """A collective needs all members, or (rooted, by the profile) only some of them."""
        part, sequence, number = row.part, row.meeting, row.number
        members, root = self.layout.sequence_ranks[sequence], part.call.fields.get("root")
        if root is None:
            root_rank = members[0]
        else:
            root_rank = int(value_at(root, self.layout.program.row_of[rank]))
        needed = profile.needs(
            part.call.op, len(members), members.index(root_rank), members.index(rank)
        )
        if needed is None:
            tests = self.sequence_tests(sequence, number)
            return AwaitedRequest(part.position, WHOLE_CALL, members, False, tests, tests)

        ranks = tuple(members[i] for i in sorted(needed))
        tests = tuple(self._joined(sequence, other, number) for other in ranks)
        own_signature = self.joins[sequence, rank][number].signature
        for other in ranks:
            theirs = self.joins.get((sequence, other), ())
            if number < len(theirs) and theirs[number].signature != own_signature:
                tests = (*tests, self.never)
                break
        return AwaitedRequest(part.position, WHOLE_CALL, ranks, False, tests, tests)

    def sequence_tests(self, sequence: int, number: int) -> tuple[StateTest, ...]:
        """All members have made the sequence's call of this number, and their calls match."""
        key = (sequence, number)
        if key not in self._sequence_tests:
            members = self.layout.sequence_ranks[sequence]
            tests = tuple(self._joined(sequence, rank, number) for rank in members)
            if key in self.potential_mismatches.bad_sequences:
                tests = (*tests, self.never)
            self._sequence_tests[key] = tests
        return self._sequence_tests[key]

    def _joined(self, sequence: int, rank: int, number: int) -> StateTest:
        """The rank has made its call of this number on a sequence."""
        return self._posted(rank, self.joins.get((sequence, rank), ()), number)

    def _posted(self, rank: int, calls: Sequence[PostedCall], number: int) -> StateTest:
        """The rank has posted the call of this number; never, if its program has fewer."""
        return (rank, calls[number].stop) if number < len(calls) else self.never


def _number_before(calls: list[tuple[int, int]], call: PostedCall) -> int:
    """How many of the calls, as (position, part), precede a call of the same rank."""
    return sum(other < (call.position, call.part) for other in calls)
