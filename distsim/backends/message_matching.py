"""Who meets whom where receives may be open to any source: pure matching of posted messages by key.
No clock, no back end.

What is posted is an integer (an *item*, the caller's own number); what it means is the caller's
business.

Messages travel through *boxes*: one per receiving end (the profile says what makes one: group,
receiver and tag, say). Inside a box two messages of one sender keep their order, and a message goes
to the earliest posted receive that accepts it. So the only thing left open is which sender an
any-source receive takes: `takes` lists what is possible, the caller chooses.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import field
from typing import NamedTuple

from distsim.common.records import dataclass

#: The sender of a receive that accepts any.
ANY_SENDER = -1


class AnySourceMatch(NamedTuple):
    """An any-source receive may take this message now."""

    receive: int
    send: int


@dataclass(slots=True)
class MatchingQueues:
    """Open messages by sender, open receives by the sender they name (`ANY_SENDER` for any), each
    with its number of arrival.
    """

    sends: dict[int, list[int]] = field(default_factory=dict)
    receives: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    posted: int = 0

    def copy(self) -> MatchingQueues:
        return MatchingQueues(
            {s: list(v) for s, v in self.sends.items()},
            {s: list(v) for s, v in self.receives.items()},
            self.posted,
        )

    def key(self) -> Hashable:
        """Equal for boxes that behave alike: only the order of open receives counts, not their
        numbers.
        """
        order = sorted((n, source, item) for source, v in self.receives.items() for n, item in v)
        return tuple(sorted((s, tuple(v)) for s, v in self.sends.items())), tuple(
            entry[1:] for entry in order
        )


class MessageMatcher:
    """Open messages and receives.

    ``specific_first``: a receive that names its sender goes before an older one from any source, as
    in Gloo (semantics 2.1: "any-source receive posted before a specific one").
    """

    __slots__ = ("boxes", "specific_first")

    def __init__(self, specific_first: bool = False) -> None:
        self.specific_first = specific_first
        self.boxes: dict[Hashable, MatchingQueues] = {}

    def copy(self) -> MessageMatcher:
        twin = MessageMatcher(self.specific_first)
        twin.boxes = {k: b.copy() for k, b in self.boxes.items()}
        return twin

    def key(self) -> Hashable:
        """Hashable; equal for matchers that behave alike."""
        return frozenset((k, b.key()) for k, b in self.boxes.items())

    # --- messages ---
    def send(self, box: Hashable, sender: int, item: int) -> None:
        self.boxes.setdefault(box, MatchingQueues()).sends.setdefault(sender, []).append(item)

    def receive(self, box: Hashable, source: int, item: int) -> None:
        """Post a receive; ``source`` is the sender it accepts, or `ANY_SENDER`."""
        place = self.boxes.setdefault(box, MatchingQueues())
        place.receives.setdefault(source, []).append((place.posted, item))
        place.posted += 1

    def meet(self, box: Hashable, sender: int) -> tuple[int, int] | None:
        """Match the sender's oldest message with the receive it must go to: (send, receive), or
        None when nothing is settled.

        A message that an any-source receive could take is not settled; see `takes`.
        """
        place = self.boxes.get(box)
        if place is None or not place.sends.get(sender) or not place.receives.get(sender):
            return None
        if (
            not self.specific_first
            and place.receives.get(ANY_SENDER)
            and place.receives[ANY_SENDER][0] < place.receives[sender][0]
        ):
            return None
        return self._match(box, place, sender, sender)

    def takes(self) -> list[AnySourceMatch]:
        """What the oldest any-source receive of each box may take, in the order in which boxes were
        first used.
        """
        return [take for box in self.boxes for take in self.takes_of(box)]

    def takes_of(self, box: Hashable) -> list[AnySourceMatch]:
        place = self.boxes[box]
        open_any = place.receives.get(ANY_SENDER)
        if not open_any:
            return []
        number, item = open_any[0]
        return [
            AnySourceMatch(item, sends[0])
            for sender, sends in sorted(place.sends.items())
            if sends and not self.named_first(place, sender, number)
        ]

    def named_first(self, place: MatchingQueues, sender: int, number: int) -> bool:
        """A receive that names the sender goes before the open one of this number."""
        named = place.receives.get(sender, ())
        return any(self.specific_first or n < number for n, _ in named[:1])

    def take(self, box: Hashable, sender: int) -> tuple[int, int]:
        """Give the sender's oldest message to the oldest any-source receive: (send, receive)."""
        return self._match(box, self.boxes[box], sender, ANY_SENDER)

    def _match(
        self, box: Hashable, place: MatchingQueues, sender: int, source: int
    ) -> tuple[int, int]:
        send = place.sends[sender].pop(0)
        receive = place.receives[source].pop(0)[1]
        self._tidy(box, place, sender, source)
        return send, receive

    def _tidy(self, box: Hashable, place: MatchingQueues, sender: int, source: int) -> None:
        if not place.sends.get(sender):
            place.sends.pop(sender, None)
        if not place.receives.get(source):
            place.receives.pop(source, None)
        if not place.sends and not place.receives:
            del self.boxes[box]

    def withdraw(self, box: Hashable, item: int) -> bool:
        """Take back a message or a receive that has met nobody; False when it is not there."""
        place = self.boxes.get(box)
        if place is None:
            return False
        for sender, sends in place.sends.items():
            if item in sends:
                sends.remove(item)
                self._tidy(box, place, sender, ANY_SENDER)
                return True
        for source, receives in place.receives.items():
            for entry in receives:
                if entry[1] == item:
                    receives.remove(entry)
                    self._tidy(box, place, source, source)
                    return True
        return False

    def open_sends(self) -> Iterator[int]:
        """Messages that no receive has met."""
        for place in self.boxes.values():
            for sends in place.sends.values():
                yield from sends

    def waiting_sends(self, box: Hashable, sender: int) -> list[int]:
        """The sender's open messages in a box, oldest first."""
        place = self.boxes.get(box)
        return list(place.sends.get(sender, ())) if place is not None else []
