"""Match posted messages with receives, which may accept any source.

Messages are matched by key alone, without clock or backend. A posted message or receive is an
integer (an *item*), whose meaning only the caller knows.

Messages travel through *boxes*. The caller makes the key of a box from the receiving end, for
example group, receiver and tag, according to the backend's profile. Within a box, two messages of
one sender keep their order, and a message goes to the earliest posted receive that accepts it. Only
one choice remains open: the sender that an any-source receive accepts. `takes` lists the
possibilities, and the caller chooses.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import field
from typing import NamedTuple

from distsim.common.records import dataclass

#: The source of a receive that accepts any sender.
ANY_SENDER = -1


class AnySourceMatch(NamedTuple):
    """A message that an any-source receive can accept now."""

    receive: int
    send: int


@dataclass(slots=True)
class MatchingQueues:
    """The unmatched messages and receives of one box, each in the order of posting."""

    #: Sender -> items of messages.
    sends: dict[int, list[int]] = field(default_factory=dict)
    #: Accepted sender, or `ANY_SENDER` -> (number of the receive in this box, item).
    receives: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    #: The number of the next receive.
    posted: int = 0

    def copy(self) -> MatchingQueues:
        """An independent copy."""
        return MatchingQueues(
            {s: list(v) for s, v in self.sends.items()},
            {s: list(v) for s, v in self.receives.items()},
            self.posted,
        )

    def key(self) -> Hashable:
        """Equal for boxes with the same behaviour.

        Only the order of open receives counts, not their numbers.
        """
        in_order = sorted(
            (number, source, item)
            for source, receives in self.receives.items()
            for number, item in receives
        )
        open_sends = tuple(sorted((sender, tuple(v)) for sender, v in self.sends.items()))
        return open_sends, tuple((source, item) for _, source, item in in_order)


class MessageMatcher:
    """All unmatched messages and receives, by box.

    ``specific_first``: a receive that names its sender takes precedence over an older receive from
    any source, as in Gloo (semantics 2.1: "any-source receive posted before a specific one").
    """

    __slots__ = ("boxes", "specific_first")

    def __init__(self, specific_first: bool = False) -> None:
        self.specific_first = specific_first
        self.boxes: dict[Hashable, MatchingQueues] = {}

    def copy(self) -> MessageMatcher:
        """An independent copy."""
        twin = MessageMatcher(self.specific_first)
        twin.boxes = {k: b.copy() for k, b in self.boxes.items()}
        return twin

    def key(self) -> Hashable:
        """Hashable; equal for matchers with the same behaviour."""
        return frozenset((k, b.key()) for k, b in self.boxes.items())

    # --- messages ---
    def send(self, box: Hashable, sender: int, item: int) -> None:
        """Post a message of ``sender`` to a mailbox."""
        self.boxes.setdefault(box, MatchingQueues()).sends.setdefault(sender, []).append(item)

    def receive(self, box: Hashable, source: int, item: int) -> None:
        """Post a receive; ``source`` is the sender it accepts, or `ANY_SENDER`."""
        queues = self.boxes.setdefault(box, MatchingQueues())
        queues.receives.setdefault(source, []).append((queues.posted, item))
        queues.posted += 1

    def meet(self, box: Hashable, sender: int) -> tuple[int, int] | None:
        """Match the sender's oldest message with a receive that names the sender.

        Returns (send, receive), or None if there is no such pair, or if an older any-source receive
        could accept the message; see `takes`.
        """
        queues = self.boxes.get(box)
        if queues is None or not queues.sends.get(sender) or not queues.receives.get(sender):
            return None
        open_any = queues.receives.get(ANY_SENDER)
        if open_any and not self.specific_first and open_any[0] < queues.receives[sender][0]:
            return None
        return self._match(box, queues, sender, sender)

    def takes(self) -> list[AnySourceMatch]:
        """The messages that the oldest any-source receive of each box can accept.

        The order is that in which the boxes were first used.
        """
        return [take for box in self.boxes for take in self.takes_of(box)]

    def takes_of(self, box: Hashable) -> list[AnySourceMatch]:
        """Matches of receives from any source in a mailbox."""
        queues = self.boxes[box]
        open_any = queues.receives.get(ANY_SENDER)
        if not open_any:
            return []
        number, item = open_any[0]
        return [
            AnySourceMatch(item, sends[0])
            for sender, sends in sorted(queues.sends.items())
            if sends and not self.named_first(queues, sender, number)
        ]

    def named_first(self, queues: MatchingQueues, sender: int, number: int) -> bool:
        """Whether a receive that names the sender precedes the any-source receive ``number``."""
        named = queues.receives.get(sender, ())
        if not named:
            return False
        oldest_number = named[0][0]
        return self.specific_first or oldest_number < number

    def take(self, box: Hashable, sender: int) -> tuple[int, int]:
        """Match the sender's oldest message with the oldest any-source receive."""
        return self._match(box, self.boxes[box], sender, ANY_SENDER)

    def _match(
        self, box: Hashable, queues: MatchingQueues, sender: int, source: int
    ) -> tuple[int, int]:
        send = queues.sends[sender].pop(0)
        receive = queues.receives[source].pop(0)[1]
        self._tidy(box, queues, sender, source)
        return send, receive

    def _tidy(self, box: Hashable, queues: MatchingQueues, sender: int, source: int) -> None:
        if not queues.sends.get(sender):
            queues.sends.pop(sender, None)
        if not queues.receives.get(source):
            queues.receives.pop(source, None)
        if not queues.sends and not queues.receives:
            del self.boxes[box]

    def withdraw(self, box: Hashable, item: int) -> bool:
        """Remove an unmatched message or receive; False if there is none with this item."""
        queues = self.boxes.get(box)
        if queues is None:
            return False
        for sender, sends in queues.sends.items():
            if item in sends:
                sends.remove(item)
                self._tidy(box, queues, sender, ANY_SENDER)
                return True
        for source, receives in queues.receives.items():
            for entry in receives:
                if entry[1] == item:
                    receives.remove(entry)
                    self._tidy(box, queues, source, source)
                    return True
        return False

    def open_sends(self) -> Iterator[int]:
        """The items of all unmatched messages."""
        for queues in self.boxes.values():
            for sends in queues.sends.values():
                yield from sends

    def waiting_sends(self, box: Hashable, sender: int) -> list[int]:
        """The sender's unmatched messages in a box, oldest first."""
        queues = self.boxes.get(box)
        return list(queues.sends.get(sender, ())) if queues is not None else []
