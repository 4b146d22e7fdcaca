"""`distsim.backends.message_matching` does what a list of all that is open, looked through from its
start, says that it must.
"""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest

from distsim.backends.message_matching import ANY_SENDER, AnySourceMatch, MessageMatcher

BOXES, RANKS = ("a", "b"), (0, 1, 2)


class Lists:
    """What is open, in the order in which it came; nothing is indexed."""

    def __init__(self, specific_first: bool) -> None:
        self.specific_first = specific_first
        self.sends: list[tuple[str, int, int]] = []
        self.receives: list[tuple[str, int, int]] = []
        self.used: list[str] = []

    def note(self, box: str) -> None:
        """Boxes stand in the order of their first use since they were empty."""
        open_boxes = {entry[0] for entry in (*self.sends, *self.receives)}
        self.used = [one for one in self.used if one in open_boxes] + [box] * (
            box in open_boxes and box not in self.used
        )

    def first(self, entries: list[tuple[str, int, int]], box: str, who: int) -> int | None:
        return next((k for k, entry in enumerate(entries) if entry[:2] == (box, who)), None)

    def meet(self, box: str, sender: int) -> tuple[int, int] | None:
        send, receive = self.first(self.sends, box, sender), self.first(self.receives, box, sender)
        older = self.first(self.receives, box, ANY_SENDER)
        if (
            send is None
            or receive is None
            or (older is not None and older < receive and not self.specific_first)
        ):
            return None
        return self.match(box, send, receive)

    def match(self, box: str, send: int, receive: int) -> tuple[int, int]:
        met = self.sends.pop(send)[2], self.receives.pop(receive)[2]
        self.note(box)
        return met

    def takes(self) -> list[AnySourceMatch]:
        found = []
        for box in self.used:
            opened = self.first(self.receives, box, ANY_SENDER)
            for sender in sorted({s for b, s, _ in self.sends if b == box}):
                named, send = (
                    self.first(self.receives, box, sender),
                    self.first(self.sends, box, sender),
                )
                free = named is None or (
                    not self.specific_first and opened is not None and named > opened
                )
                if opened is not None and send is not None and free:
                    found.append(AnySourceMatch(self.receives[opened][2], self.sends[send][2]))
        return found

    def take(self, box: str, sender: int) -> tuple[int, int]:
        send, receive = (
            self.first(self.sends, box, sender),
            self.first(self.receives, box, ANY_SENDER),
        )
        assert send is not None
        assert receive is not None
        return self.match(box, send, receive)

    def withdraw(self, box: str, item: int) -> bool:
        for entries in (self.sends, self.receives):
            for entry in entries:
                if entry[0] == box and entry[2] == item:
                    entries.remove(entry)
                    self.note(box)
                    return True
        return False

    def meaning(self) -> Hashable:
        """Equal where whatever comes next is answered alike."""
        sends = {
            (b, s): tuple(i for *where, i in self.sends if where == [b, s])
            for b, s, _ in self.sends
        }
        receives = {
            b: tuple(entry[1:] for entry in self.receives if entry[0] == b)
            for b, _, _ in self.receives
        }
        return frozenset(sends.items()), frozenset(receives.items())


def step(draw: random.Random, match: MessageMatcher, lists: Lists, item: int) -> None:
    """One thing happens to both, and both say the same."""
    box, rank = draw.choice(BOXES), draw.choice(RANKS)
    kind = draw.choice(("send", "receive", "receive any", "meet", "take", "withdraw"))
    if kind == "send":
        match.send(box, rank, item)
        lists.sends.append((box, rank, item))
    elif kind.startswith("receive"):
        source = ANY_SENDER if kind.endswith("any") else rank
        match.receive(box, source, item)
        lists.receives.append((box, source, item))
    elif kind == "meet":
        assert match.meet(box, rank) == lists.meet(box, rank)
    elif kind == "take":
        if (
            any(entry[0] == box and entry[1] == ANY_SENDER for entry in lists.receives)
            and lists.first(lists.sends, box, rank) is not None
        ):
            assert match.take(box, rank) == lists.take(box, rank)
    else:
        back = draw.randrange(item + 1)
        assert match.withdraw(box, back) == lists.withdraw(box, back)
    lists.note(box)


@pytest.mark.parametrize("specific_first", [False, True])
def test_the_index_answers_every_sequence_of_changes_like_plain_lists(
    specific_first: bool,
) -> None:
    """And the key is one for all states, however they came about, that answer alike, and for no
    others.
    """
    draw, states = random.Random(1), dict[Hashable, Hashable]()
    for _ in range(25):
        match, lists = (
            MessageMatcher(True) if specific_first else MessageMatcher(),
            Lists(specific_first),
        )
        for _ in range(60):
            twin, before = match.copy(), match.key()
            taken = {entry[2] for entry in (*lists.sends, *lists.receives)}
            step(draw, match, lists, min(set(range(len(taken) + 1)) - taken))
            assert twin.key() == before
            assert twin.specific_first == specific_first
            assert match.takes() == lists.takes()
            assert sorted(match.open_sends()) == sorted(i for *_, i in lists.sends)
            for box in BOXES:
                for rank in RANKS:
                    assert match.waiting_sends(box, rank) == [
                        i for b, s, i in lists.sends if (b, s) == (box, rank)
                    ]
            assert states.setdefault(match.key(), lists.meaning()) == lists.meaning()
            assert set(match.boxes) == {entry[0] for entry in (*lists.sends, *lists.receives)}

    assert len(set(states.values())) == len(states)


def test_a_copy_is_independent_of_its_original() -> None:
    match = MessageMatcher()
    match.send("a", 0, 1)
    match.receive("a", ANY_SENDER, 2)
    twin = match.copy()
    twin.send("a", 0, 3)
    twin.receive("a", ANY_SENDER, 4)
    twin.send("b", 0, 5)

    assert (list(match.open_sends()), match.takes()) == ([1], [AnySourceMatch(2, 1)])
    assert twin.take("a", 0) == (1, 2)
    assert twin.take("a", 0) == (3, 4)
    assert twin.key() != match.key()
