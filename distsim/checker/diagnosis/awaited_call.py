"""The call that would end a wait: where the awaited rank has it, or that it has none, and what
comes close.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from distsim.checker.matching.call_index import CallIndex, MessageCall, part_call
from distsim.checker.wording import call_words, location_text, place_of_call
from distsim.findings.final_state import WaitDependency
from distsim.findings.finding_types import SourceLocation
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.one_sided import is_signal
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program

#: Open receive (rank, position, part) -> the message that it takes, as (rank, position, part).
TakenMessages = Mapping[Any, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class AwaitedCall:
    """What a need waits for on one awaited rank.

    ``position`` is the call there that would meet it, None where the rank's whole program has none.
    ``sequence`` is the collective's sequence, -1 for a message; ``number`` counts the calls before
    it on that sequence or channel; ``has`` how many the awaited rank's program makes. ``batched``:
    the message that waits is part of a batch.
    """

    call: ResolvedCall  # the one that waits
    rank: int  # the awaited one
    position: int | None
    sequence: int
    number: int
    has: int
    batched: bool = False

    @property
    def is_message(self) -> bool:
        return self.sequence < 0


class NearMiss(NamedTuple):
    """A call that would fit but for its ``what``: tag, group or peer."""

    what: str
    rank: int
    words: str
    place: SourceLocation | None


class ResolvedReceives:
    """A receive that has taken a sender's message stands as if it named that sender; one that took
    none is open to all.
    """

    def __init__(self, where: CallIndex, taken: TakenMessages) -> None:
        self.where, self.taken = where, taken
        layout = where.layout
        rows = zip(
            layout.chan_group, layout.chan_src, layout.chan_dst, layout.chan_tag, strict=True
        )
        self._open = (
            {(g, dst, tag): c for c, (g, src, dst, tag) in enumerate(rows) if src < 0}
            if layout.any_source
            else {}
        )

    def of(self, channel: int) -> list[MessageCall]:
        """The receives that the channel's messages may go to: in order those that name or took its
        sender, then the open ones.
        """
        layout = self.where.layout
        rank, sender = layout.chan_dst[channel], layout.chan_src[channel]
        named = self.where.messages(rank, channel, sends=False)
        opened = self._open.get((layout.chan_group[channel], rank, layout.chan_tag[channel]))
        if opened is None or opened == channel:
            return named
        receives = self.where.messages(rank, opened, sends=False)
        by = [self.taken.get((rank, m.position, m.part), (-1,))[0] for m in receives]
        mine = [m for m, who in zip(receives, by, strict=True) if who == sender]
        free = [m for m, who in zip(receives, by, strict=True) if who < 0]
        return sorted(named + mine, key=lambda m: m[:2]) + free

    def took(self, channel: int) -> list[MessageCall]:
        """The open receives that have taken a message of the channel's sender."""
        rank = self.where.layout.chan_dst[channel]
        return [m for m in self.of(channel) if (rank, m.position, m.part) in self.taken]

    def ordinal(self, channel: int, position: int, part: int) -> int:
        """Which of the channel's messages a receive by name waits for, from 0."""
        return sum(m[:2] < (position, part) for m in self.of(channel)[: self._settled(channel)])

    def _settled(self, channel: int) -> int:
        """How many of the receives have their sender."""
        receives, rank = self.of(channel), self.where.layout.chan_dst[channel]
        opened = self._open.get(
            (self.where.layout.chan_group[channel], rank, self.where.layout.chan_tag[channel])
        )
        if opened is None:
            return len(receives)
        free = [
            m
            for m in self.where.messages(rank, opened, sends=False)
            if (rank, m.position, m.part) not in self.taken
        ]
        return len(receives) - len(free)


class AwaitedCallFinder:
    """Finds counterparts in the text of a program."""

    def __init__(self, program: Program, where: CallIndex, taken: TakenMessages) -> None:
        self.program, self.where = program, where
        self.receivers = ResolvedReceives(where, taken)
        self._ends: tuple[dict[int, list[int]], dict[int, list[int]]] | None = None

    def of(self, waiting: int, need: WaitDependency, awaited: int) -> AwaitedCall | None:
        """The counterpart on one rank; None where the need is no call (an implicit
        init_process_group).
        """
        if need.position >= len(self.program.code(waiting).calls):
            return None
        call = part_call(self.program, waiting, need.position, need.part)
        call = (
            call.parts[0] if call.parts else call
        )  # a batch as a whole waits: its first message speaks for it
        if OPERATIONS[call.op].kind == "p2p":
            return self._message(waiting, need, awaited, call)
        return (
            self._collective(waiting, need, awaited, call)
            if self.where.is_join(waiting, need.position)
            else None
        )

    def has_awaited_call(self, waiting: int, need: WaitDependency, awaited: int) -> bool:
        """The same question, answered from counts alone."""
        found = self._channel(waiting, need)
        if found is None:
            return True
        channel, sends, number = found
        if sends and self.where.layout.any_source:
            return len(self.receivers.of(channel)) > number
        return self.where.count(awaited, channel, sends=not sends) > number

    def taken_before(self, waiting: int, need: WaitDependency) -> list[int]:
        """Positions of the open receives of a rank that have taken messages which its receive by
        name could have had.
        """
        found = self._channel(waiting, need)
        return (
            [] if found is None or found[1] else [m.position for m in self.receivers.took(found[0])]
        )

    def _channel(self, waiting: int, need: WaitDependency) -> tuple[int, bool, int] | None:
        """(channel, does it send, which message of the channel) of a need for a message with a
        named peer.
        """
        calls = self.program.code(waiting).calls
        if need.any or need.position >= len(calls):
            return None
        call = calls[need.position]
        call = call.parts[max(need.part, 0)] if call.parts else call
        if call.port < 0:
            return None
        channel, sends = self.where.channel(waiting, call), OPERATIONS[call.op].direction == "send"
        if not sends and self.where.layout.any_source:
            return channel, sends, self.receivers.ordinal(channel, need.position, need.part)
        return (
            channel,
            sends,
            self.where.ordinal(waiting, channel, need.position, need.part, sends=sends),
        )

    def _message(
        self, waiting: int, need: WaitDependency, awaited: int, call: ResolvedCall
    ) -> AwaitedCall:
        found = self._channel(waiting, need)
        if found is None:
            return AwaitedCall(call, awaited, None, -1, 0, 0)
        channel, sends, number = found
        messages = (
            self.receivers.of(channel)
            if sends
            else self.where.messages(awaited, channel, sends=True)
        )
        position = messages[number].position if number < len(messages) else None
        batched = bool(self.program.code_call(waiting, need.position).parts)
        return AwaitedCall(call, awaited, position, -1, number, len(messages), batched)

    def _collective(
        self, waiting: int, need: WaitDependency, awaited: int, call: ResolvedCall
    ) -> AwaitedCall | None:
        sequence = self.where.sequence(waiting, self.program.code_call(waiting, need.position))
        mine, theirs = self.where.joins(waiting, sequence), self.where.joins(awaited, sequence)
        if need.position not in mine:
            return None
        number = mine.index(need.position)
        return AwaitedCall(
            call,
            awaited,
            theirs[number] if number < len(theirs) else None,
            sequence,
            number,
            len(theirs),
        )

    # --- near misses ---
    def near(self, waiting: int, found: AwaitedCall) -> list[NearMiss]:
        """Calls that almost fit a message without a counterpart: of the awaited rank, then those of
        others that name the waiting one.
        """
        sends = OPERATIONS[found.call.op].direction == "send"
        layout, word = self.where.layout, "channel" if is_signal(found.call.tag) else "tag"
        near = []
        for channel in self._channels_of(found.rank, waiting, sends):
            if self._spoken_for(channel, sends):
                continue
            if is_signal(layout.chan_tag[channel]) != is_signal(found.call.tag):
                continue
            here, there = (
                (layout.chan_dst, layout.chan_src) if sends else (layout.chan_src, layout.chan_dst)
            )
            differs = {
                word: layout.chan_tag[channel] != found.call.tag,
                "group": layout.chan_group[channel] != found.call.group.id,
                "peer": there[channel] not in (waiting, -1) or here[channel] != found.rank,
            }
            what = [word for word, does in differs.items() if does]
            messages = (
                self.where.messages(here[channel], channel, sends=not sends)
                if len(what) == 1
                else []
            )
            if messages:
                rank, message = here[channel], messages[0]
                words = call_words(part_call(self.program, rank, message.position, message.part))
                near.append(
                    NearMiss(
                        what[0], rank, words, place_of_call(self.program, rank, message.position)
                    )
                )
        return near

    def _channels_of(self, awaited: int, waiting: int, sends: bool) -> list[int]:
        """Channels on which the awaited rank receives (or sends), then those that lead from (or to)
        the waiting one.
        """
        from_rank, to_rank = self._by_end()
        here, there = (to_rank, from_rank) if sends else (from_rank, to_rank)
        others = self.where.layout.chan_dst if sends else self.where.layout.chan_src
        return here.get(awaited, []) + [
            c for c in there.get(waiting, ()) if others[c] not in (awaited, -1)
        ]

    def _by_end(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Channels by sender and by receiver."""
        if self._ends is None:
            self._ends = {}, {}
            for ends, ranks in zip(
                self._ends, (self.where.layout.chan_src, self.where.layout.chan_dst), strict=True
            ):
                for channel, rank in enumerate(ranks):
                    ends.setdefault(rank, []).append(channel)
        return self._ends

    def _spoken_for(self, channel: int, sends: bool) -> bool:
        """All calls of a channel's other end have counterparts."""
        layout = self.where.layout
        here, there = (
            (layout.chan_dst, layout.chan_src) if sends else (layout.chan_src, layout.chan_dst)
        )
        size = self.program.world_size
        if not (0 <= there[channel] < size and 0 <= here[channel] < size):
            return not 0 <= here[channel] < size
        own = self.where.count(here[channel], channel, sends=not sends)
        return own <= self.where.count(there[channel], channel, sends=sends)


def near_miss_lines(near: list[NearMiss]) -> list[str]:
    """Near misses as sentences."""
    return [
        f"almost: rank {n.rank} has {n.words} at {location_text(n.place)}; the {n.what} differs"
        for n in near
    ]
