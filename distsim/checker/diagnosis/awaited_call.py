"""Find the call that would end a wait, or establish that the awaited rank has none.

Key idea: the program fixes which calls are matched. So the counterpart of a rank's k-th call on a
channel or sequence is the k-th call of the awaited rank there, even if no execution reaches it. For
a message without a counterpart, calls that differ only in tag, group or peer (*near misses*) show
the likely mistake.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from distsim.checker.matching.call_index import CallIndex, MessageCall, part_call
from distsim.checker.matching.call_mismatch import NO_SEQUENCE
from distsim.checker.matching.channel_layout import ANY_SOURCE
from distsim.checker.wording import call_words, location_text, parenthesised, place_of_call
from distsim.findings.final_state import WaitDependency
from distsim.findings.finding_types import SourceLocation
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.one_sided import is_signal
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program

#: Any-source receive (rank, position, part) -> the message that it takes, as (rank, position,
#: part).
TakenMessages = Mapping[Any, tuple[int, int, int]]


#: `NearMiss.what` -> how the call differs.
_DIFFERENCE_WORDS = {
    "tag": "has another tag",
    "group": "uses another group",
    "peer": "names another rank",
    "channel": "uses another channel",
}


@dataclass(frozen=True, slots=True)
class AwaitedCall:
    """What a need waits for on one awaited rank.

    ``call`` is the call that waits, ``rank`` the awaited rank. ``position`` is the call of the
    awaited rank that would meet it, None if that rank's whole program has none. ``sequence`` is the
    collective's sequence (`NO_SEQUENCE` for a message). ``number`` counts the calls before it on
    that sequence or channel, ``has`` the calls of the awaited rank's program there. ``batched``:
    the message that waits is part of a batch.
    """

    call: ResolvedCall
    rank: int
    position: int | None
    sequence: int
    number: int
    has: int
    batched: bool = False

    @property
    def is_message(self) -> bool:
        """Whether the wait is for a message, not for a collective."""
        return self.sequence == NO_SEQUENCE


class NearMiss(NamedTuple):
    """A call that would be the counterpart but for its ``what``: tag, group or peer."""

    what: str
    rank: int
    words: str
    place: SourceLocation | None


class _MessageNeed(NamedTuple):
    """A need for a message with a named peer: the message's channel, direction and number."""

    channel: int
    sends: bool
    number: int


class ResolvedReceives:
    """The receives of a channel, with any-source receives assigned to senders.

    An any-source receive that has taken a message counts as if it named that sender; one that has
    taken none may still take any.
    """

    def __init__(self, call_index: CallIndex, taken: TakenMessages) -> None:
        self.call_index, self.layout, self.taken = call_index, call_index.layout, taken
        # (group, receiver, tag) -> channel of the any-source receives
        self._any_source_channels: dict[tuple[int, int, int], int] = {}
        if self.layout.any_source:
            for channel, source in enumerate(self.layout.chan_src):
                if source == ANY_SOURCE:
                    self._any_source_channels[self._box_key(channel)] = channel

    def _box_key(self, channel: int) -> tuple[int, int, int]:
        layout = self.layout
        return layout.chan_group[channel], layout.chan_dst[channel], layout.chan_tag[channel]

    def of(self, channel: int) -> list[MessageCall]:
        """The receives that the channel's messages may go to.

        First, in order, those that name the channel's sender or have taken a message of it; then
        the any-source receives that have taken none.
        """
        rank, sender = self.layout.chan_dst[channel], self.layout.chan_src[channel]
        named = self.call_index.messages(rank, channel, sends=False)
        any_source = self._any_source_channels.get(self._box_key(channel))
        if any_source is None or any_source == channel:
            return named
        took, free = [], []
        for receive in self.call_index.messages(rank, any_source, sends=False):
            message = self._taken_by(rank, receive)
            if message is None:
                free.append(receive)
            elif message[0] == sender:
                took.append(receive)
        return sorted(named + took, key=lambda receive: receive[:2]) + free

    def _taken_by(self, rank: int, receive: MessageCall) -> tuple[int, int, int] | None:
        return self.taken.get((rank, receive.position, receive.part))

    def taken_from(self, channel: int) -> list[MessageCall]:
        """The any-source receives that have taken a message of the channel's sender."""
        rank = self.layout.chan_dst[channel]
        return [receive for receive in self.of(channel) if self._taken_by(rank, receive)]

    def ordinal(self, channel: int, position: int, part: int) -> int:
        """The number of the channel's message that a receive by name waits for, from 0."""
        receives = self.of(channel)
        with_sender = receives[: len(receives) - self._count_free(channel)]
        return sum(receive[:2] < (position, part) for receive in with_sender)

    def _count_free(self, channel: int) -> int:
        """How many any-source receives that may take the channel's messages have taken none."""
        any_source = self._any_source_channels.get(self._box_key(channel))
        if any_source is None:
            return 0
        rank = self.layout.chan_dst[channel]
        receives = self.call_index.messages(rank, any_source, sends=False)
        return sum(self._taken_by(rank, receive) is None for receive in receives)


class AwaitedCallFinder:
    """Finds counterparts in the text of a program."""

    def __init__(self, program: Program, call_index: CallIndex, taken: TakenMessages) -> None:
        self.program, self.call_index, self.layout = program, call_index, call_index.layout
        self.receives = ResolvedReceives(call_index, taken)
        self._by_sender: dict[int, list[int]] | None = None
        self._by_receiver: dict[int, list[int]] = {}

    def of(self, waiting: int, need: WaitDependency, awaited: int) -> AwaitedCall | None:
        """The counterpart on one awaited rank.

        None if the need is not a call that meets others, such as an implicit init_process_group.
        """
        if need.position >= len(self.program.code(waiting).calls):
            return None
        call = part_call(self.program, waiting, need.position, need.part)
        if call.parts:
            # A batch that waits as a whole is represented by its first message.
            call = call.parts[0]
        if OPERATIONS[call.op].kind == "p2p":
            return self._message(waiting, need, awaited, call)
        if self.call_index.is_join(waiting, need.position):
            return self._collective(waiting, need, awaited, call)
        return None

    def has_awaited_call(self, waiting: int, need: WaitDependency, awaited: int) -> bool:
        """Whether the awaited rank has a counterpart, decided by counting only."""
        message = self._message_need(waiting, need)
        if message is None:
            return True
        if message.sends and self.layout.any_source:
            return len(self.receives.of(message.channel)) > message.number
        count = self.call_index.count(awaited, message.channel, sends=not message.sends)
        return count > message.number

    def taken_before(self, waiting: int, need: WaitDependency) -> list[int]:
        """Positions of the rank's any-source receives that took a message its receive needs."""
        message = self._message_need(waiting, need)
        if message is None or message.sends:
            return []
        return [receive.position for receive in self.receives.taken_from(message.channel)]

    def _message_need(self, waiting: int, need: WaitDependency) -> _MessageNeed | None:
        """The need, if it is for a message with a named peer."""
        calls = self.program.code(waiting).calls
        if need.any or need.position >= len(calls):
            return None
        call = calls[need.position]
        if call.parts:
            call = call.parts[max(need.part, 0)]
        if call.endpoint < 0:
            return None
        channel = self.call_index.channel(waiting, call)
        sends = OPERATIONS[call.op].direction == "send"
        if not sends and self.layout.any_source:
            number = self.receives.ordinal(channel, need.position, need.part)
        else:
            number = self.call_index.ordinal(
                waiting, channel, need.position, need.part, sends=sends
            )
        return _MessageNeed(channel, sends, number)

    def _message(
        self, waiting: int, need: WaitDependency, awaited: int, call: ResolvedCall
    ) -> AwaitedCall:
        message = self._message_need(waiting, need)
        if message is None:
            return AwaitedCall(call, awaited, None, NO_SEQUENCE, 0, 0)
        channel, sends, number = message
        if sends:
            counterparts = self.receives.of(channel)
        else:
            counterparts = self.call_index.messages(awaited, channel, sends=True)
        position = counterparts[number].position if number < len(counterparts) else None
        batched = bool(self.program.code_call(waiting, need.position).parts)
        return AwaitedCall(call, awaited, position, NO_SEQUENCE, number, len(counterparts), batched)

    def _collective(
        self, waiting: int, need: WaitDependency, awaited: int, call: ResolvedCall
    ) -> AwaitedCall | None:
        code_call = self.program.code_call(waiting, need.position)
        sequence = self.call_index.sequence(waiting, code_call)
        own = self.call_index.joins(waiting, sequence)
        theirs = self.call_index.joins(awaited, sequence)
        if need.position not in own:
            return None
        number = own.index(need.position)
        position = theirs[number] if number < len(theirs) else None
        return AwaitedCall(call, awaited, position, sequence, number, len(theirs))

    # --- near misses ---
    def near_misses(self, waiting: int, awaited: AwaitedCall) -> list[NearMiss]:
        """Calls that are almost the counterpart of a message.

        First those of the awaited rank, then those of other ranks that name the waiting one.
        """
        sends = OPERATIONS[awaited.call.op].direction == "send"
        found = []
        for channel in self._candidate_channels(awaited.rank, waiting, sends):
            if self._all_have_counterparts(channel, sends):
                continue
            if is_signal(self.layout.chan_tag[channel]) != is_signal(awaited.call.tag):
                continue
            differences = self._differences(channel, waiting, awaited, sends)
            if len(differences) != 1:
                continue
            rank = self._counterpart_ranks(sends)[channel]
            messages = self.call_index.messages(rank, channel, sends=not sends)
            if messages:
                message = messages[0]
                call = part_call(self.program, rank, message.position, message.part)
                words = call_words(call, self.program)
                place = place_of_call(self.program, rank, message.position)
                found.append(NearMiss(differences[0], rank, words, place))
        return found

    def _differences(
        self, channel: int, waiting: int, awaited: AwaitedCall, sends: bool
    ) -> list[str]:
        """In what the calls of a channel differ from the awaited call."""
        layout, call = self.layout, awaited.call
        counterpart = self._counterpart_ranks(sends)[channel]
        own_side = self._counterpart_ranks(not sends)[channel]
        found = []
        if layout.chan_tag[channel] != call.tag:
            found.append("channel" if is_signal(call.tag) else "tag")
        if layout.chan_group[channel] != call.group.id:
            found.append("group")
        if own_side not in (waiting, ANY_SOURCE) or counterpart != awaited.rank:
            found.append("peer")
        return found

    def _counterpart_ranks(self, sends: bool) -> list[int]:
        """For each channel, the rank that a sender (or a receiver) of a message waits for."""
        return self.layout.chan_dst if sends else self.layout.chan_src

    def _candidate_channels(self, awaited: int, waiting: int, sends: bool) -> Iterator[int]:
        """The channels on which the awaited rank receives (or sends), then the others on which the
        waiting rank sends (or receives)."""
        if self._by_sender is None:
            self._by_sender = _channels_by_rank(self.layout.chan_src)
            self._by_receiver = _channels_by_rank(self.layout.chan_dst)
        of_counterpart, of_own_side = self._by_receiver, self._by_sender
        if not sends:
            of_counterpart, of_own_side = self._by_sender, self._by_receiver
        yield from of_counterpart.get(awaited, ())
        counterparts = self._counterpart_ranks(sends)
        for channel in of_own_side.get(waiting, ()):
            if counterparts[channel] not in (awaited, ANY_SOURCE):
                yield channel

    def _all_have_counterparts(self, channel: int, sends: bool) -> bool:
        """Whether all calls at the other end of a channel have counterparts."""
        counterpart = self._counterpart_ranks(sends)[channel]
        own_side = self._counterpart_ranks(not sends)[channel]
        ranks = range(self.program.world_size)
        if counterpart not in ranks or own_side not in ranks:
            return counterpart not in ranks
        calls = self.call_index.count(counterpart, channel, sends=not sends)
        return calls <= self.call_index.count(own_side, channel, sends=sends)


def _channels_by_rank(ranks: list[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for channel, rank in enumerate(ranks):
        found[rank].append(channel)
    return found


def near_miss_lines(near: list[NearMiss], shown: str) -> list[str]:
    """Near misses as sentences; ``shown``: a row above them, which names its call already."""
    lines = []
    for miss in near:
        place = parenthesised(location_text(miss.place))
        start = f"rank {miss.rank} calls {miss.words}{place}, which"
        if miss.words in shown:
            start = f"the call of rank {miss.rank}{place}"
        lines.append(f"near match: {start} {_DIFFERENCE_WORDS[miss.what]}")
    return lines
