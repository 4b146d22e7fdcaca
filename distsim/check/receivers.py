"""Which receives a channel's messages go to, where some are open to any source and an order of events is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distsim.check.whereabouts import Message, Whereabouts

#: Open receive (rank, position, part) -> the message that it takes, as (rank, position, part).
Taken = Mapping[Any, tuple[int, int, int]]


class Receivers:
    """A receive that has taken a sender's message stands as if it named that sender; one that took none is open to all."""

    def __init__(self, where: Whereabouts, taken: Taken) -> None:
        self.where, self.taken = where, taken
        layout = where.layout
        rows = zip(layout.chan_group, layout.chan_src, layout.chan_dst, layout.chan_tag, strict=True)
        self._open = {(g, dst, tag): c for c, (g, src, dst, tag) in enumerate(rows) if src < 0} if layout.any_source else {}

    def of(self, channel: int) -> list[Message]:
        """The receives that the channel's messages may go to: in order those that name or took its sender, then the open ones."""
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

    def took(self, channel: int) -> list[Message]:
        """The open receives that have taken a message of the channel's sender."""
        rank = self.where.layout.chan_dst[channel]
        return [m for m in self.of(channel) if (rank, m.position, m.part) in self.taken]

    def ordinal(self, channel: int, position: int, part: int) -> int:
        """Which of the channel's messages a receive by name waits for, from 0."""
        return sum(m[:2] < (position, part) for m in self.of(channel)[: self._settled(channel)])

    def _settled(self, channel: int) -> int:
        """How many of the receives have their sender."""
        receives, rank = self.of(channel), self.where.layout.chan_dst[channel]
        opened = self._open.get((self.where.layout.chan_group[channel], rank, self.where.layout.chan_tag[channel]))
        if opened is None:
            return len(receives)
        free = [m for m in self.where.messages(rank, opened, sends=False) if (rank, m.position, m.part) not in self.taken]
        return len(receives) - len(free)
