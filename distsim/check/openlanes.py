"""Who meets whom where a receive may take a message of any source.

Once a receive is open to anyone, counters do not say who met: each message and each receive gets a *ticket*, and the queues of
each inbox (group, receiver, tag) are kept. An open receive takes the lowest-numbered sender's message; a message goes to the
earliest posted receive that accepts it (`cases/FORMAT.md`, Meaning).
"""

from __future__ import annotations

from typing import NamedTuple

from distsim.check.layout import Layout


class Ticket(NamedTuple):
    """Who posted: rank, position of the call, part of a batch (-1), signature, channel."""

    rank: int
    position: int
    part: int
    signature: int
    channel: int


class Inboxes:
    """All open queues of one pass."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        keys: dict[tuple[int, int, int], int] = {}
        self.inbox = [
            keys.setdefault(key, len(keys)) for key in zip(layout.chan_group, layout.chan_dst, layout.chan_tag, strict=True)
        ]
        self.messages: list[list[int]] = [[] for _ in keys]
        self.receives: list[list[int]] = [[] for _ in keys]
        self.tickets: list[Ticket] = []
        self.partner: list[int] = []  # ticket -> the ticket it met, -1 none
        self.waiting: dict[int, int] = {}  # ticket -> rank that waits for it
        self.choices: set[tuple[int, int]] = set()  # (rank, position) of open receives that had more than one sender to take from

    def post(self, ticket: Ticket, sends: bool) -> tuple[int, list[int]]:
        """(number of the ticket, ranks to wake)."""
        number = len(self.tickets)
        self.tickets.append(ticket)
        self.partner.append(-1)
        other = self._receive_for(ticket) if sends else self._message_for(ticket)
        queue = (self.messages if sends else self.receives)[self.inbox[ticket.channel]]
        if other < 0:
            queue.append(number)
            return number, []
        self.partner[number], self.partner[other] = other, number
        rank = self.waiting.pop(other, None)
        return number, [] if rank is None else [rank]

    def _receive_for(self, ticket: Ticket) -> int:
        queue = self.receives[self.inbox[ticket.channel]]
        for i, number in enumerate(queue):
            source = self.layout.chan_src[self.tickets[number].channel]
            if source in (-1, ticket.rank):
                return queue.pop(i)
        return -1

    def _message_for(self, ticket: Ticket) -> int:
        queue = self.messages[self.inbox[ticket.channel]]
        source = self.layout.chan_src[ticket.channel]
        senders = [self.tickets[number].rank for number in queue]
        if source < 0 and senders:
            if len(set(senders)) > 1:
                self.choices.add(ticket[:2])
            source = min(senders)
        return queue.pop(senders.index(source)) if source in senders else -1
