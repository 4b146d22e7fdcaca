"""`distsim.backends.message_matching`: messages and receives meet in order, any-source receives are
left open.
"""

from __future__ import annotations

from distsim.backends.message_matching import ANY_SENDER, AnySourceMatch, MessageMatcher


def test_messages_of_one_sender_keep_their_order() -> None:
    match = MessageMatcher()
    for item in (1, 2):
        match.send("box", 0, item)
    match.receive("box", 0, 10)
    assert match.meet("box", 0) == (1, 10)
    assert match.meet("box", 0) is None
    assert list(match.open_sends()) == [2]


def test_channels_are_independent() -> None:
    match = MessageMatcher()
    match.send("a", 0, 1)
    match.receive("b", 0, 10)
    assert match.meet("a", 0) is None
    assert match.meet("b", 0) is None


def test_the_oldest_wildcard_receive_may_take_the_oldest_message_of_each_sender() -> None:
    match = MessageMatcher()
    match.receive("box", ANY_SENDER, 10)
    match.receive("box", ANY_SENDER, 11)
    for sender, item in ((2, 1), (1, 2), (1, 3)):
        match.send("box", sender, item)
    assert match.takes() == [AnySourceMatch(10, 2), AnySourceMatch(10, 1)]
    assert match.take("box", 1) == (2, 10)
    assert match.takes() == [AnySourceMatch(11, 3), AnySourceMatch(11, 1)]


def test_a_named_receive_behind_a_wildcard_waits_for_it_unless_named_ones_have_priority() -> None:
    for specific_first in (False, True):
        match = MessageMatcher(specific_first)
        match.receive("box", ANY_SENDER, 10)
        match.receive("box", 1, 11)
        match.send("box", 1, 1)
        assert match.meet("box", 1) == ((1, 11) if specific_first else None)
        assert match.takes() == ([] if specific_first else [AnySourceMatch(10, 1)])


def test_a_named_receive_before_a_wildcard_takes_the_message() -> None:
    match = MessageMatcher()
    match.receive("box", 1, 10)
    match.receive("box", ANY_SENDER, 11)
    match.send("box", 1, 1)
    assert match.takes() == []
    assert match.meet("box", 1) == (1, 10)


def test_withdrawn_items_match_nothing() -> None:
    match = MessageMatcher()
    match.send("box", 0, 1)
    assert match.withdraw("box", 1)
    assert not match.withdraw("box", 1)
    match.receive("box", 0, 10)
    assert match.meet("box", 0) is None


def test_the_key_does_not_depend_on_the_number_of_past_receives() -> None:
    one, two = MessageMatcher(), MessageMatcher()
    one.send("box", 0, 1)
    one.receive("box", 0, 9)
    one.receive("box", 1, 10)
    assert one.meet("box", 0) == (1, 9)
    two.receive("box", 1, 10)
    assert one.key() == two.key()
    assert one.copy().key() == one.key()
