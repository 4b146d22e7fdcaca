"""The point-to-point messages of a run: sender, receiver, which receive took each message, and
which others that receive could have taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.operations.registry import OPERATIONS
from distsim.trace.model import Trace

Ints = NDArray[np.int64]
#: Operations that send or receive a message, including signals of one-sided transfers.
_SEND_OPS = tuple(name for name, row in OPERATIONS.items() if row.direction == "send")
_RECV_OPS = tuple(name for name, row in OPERATIONS.items() if row.direction == "recv")


class MatchedMessages(NamedTuple):
    """One column for each fact, in the order of the sends.

    ``source`` and ``target`` are ranks; ``send`` and ``recv`` are rows of the trace.
    """

    source: Ints
    target: Ints
    sent_ns: Ints
    received_ns: Ints
    send: Ints
    recv: Ints

    def __len__(self) -> int:
        return len(self.send)


class AlternativeMatch(NamedTuple):
    """A receive from any source, and a send whose message it could have taken instead; both are
    rows of the trace.
    """

    recv: int
    send: int


def matched_messages(trace: Trace, end_ns: int) -> MatchedMessages:
    """The messages that a receive took. One that is still in flight arrives at ``end_ns``."""
    match = trace["match"]
    sends = np.flatnonzero(trace.ops(*_SEND_OPS) & (match >= 0))
    receives = np.flatnonzero(trace.ops(*_RECV_OPS) & (match >= 0))
    receives = receives[np.argsort(match[receives], kind="stable")]
    place = np.searchsorted(match[receives], match[sends])
    has_receive = place < len(receives)
    has_receive[has_receive] = match[receives[place[has_receive]]] == match[sends[has_receive]]
    send, receive = sends[has_receive], receives[place[has_receive]]
    started, finished = trace["started_ns"][send], trace["finished_ns"][receive]
    sent_ns = np.where(started >= 0, started, trace["posted_ns"][send])
    received_ns = np.maximum(np.where(finished >= 0, finished, end_ns), sent_ns)
    rank = trace["rank"].astype(np.int64)
    columns = (rank[send], rank[receive], sent_ns, received_ns, send, receive)
    was_posted = sent_ns >= 0
    return MatchedMessages(*(column[was_posted].astype(np.int64) for column in columns))


class LaneMessage(NamedTuple):
    """A message between two lanes of a picture, with the rows of its send and its receive."""

    sender_lane: int
    receiver_lane: int
    send: int
    receive: int


def messages_between_lanes(trace: Trace, lane_of: Mapping[int, int]) -> Iterator[LaneMessage]:
    """The matched messages between ranks of different lanes, in the order of their sends.

    Signals of one-sided transfers are not messages here.
    """
    matched = trace["match"] >= 0
    sends = np.flatnonzero(trace.ops("send", "isend") & matched)
    receives = np.flatnonzero(trace.ops("recv", "irecv") & matched)
    receive_of = dict(zip(trace["match"][receives].tolist(), receives.tolist(), strict=True))
    for send in sends.tolist():
        receive = receive_of.get(int(trace["match"][send]))
        if receive is None:
            continue
        sender = lane_of.get(int(trace["rank"][send]))
        receiver = lane_of.get(int(trace["rank"][receive]))
        if sender is not None and receiver is not None and sender != receiver:
            yield LaneMessage(sender, receiver, send, receive)


def unmatched_rows(trace: Trace) -> Ints:
    """Rows of posted sends and receives that no call of another rank matched."""
    return np.flatnonzero(
        trace.ops(*_SEND_OPS, *_RECV_OPS) & (trace["match"] < 0) & (trace["posted_ns"] >= 0)
    )


def alternative_matches(trace: Trace, found: MatchedMessages) -> tuple[AlternativeMatch, ...]:
    """Other messages that receives from any source could have taken, in the order of the trace.

    Such a message is the first one of another sender with the same tag in the same group. No
    earlier receive took it, and it was posted before this receive had its message, so it cannot be
    a consequence of this receive. Messages of one sender do not overtake each other (MPI 4.1,
    section 3.5).
    """
    peer, rank, tag, group = trace["peer"], trace["rank"], trace["tag"], trace["group"]
    posted = trace["posted_ns"]
    mailboxes = _mailboxes(trace, found)
    alternatives = []
    columns = (found.send.tolist(), found.recv.tolist(), found.received_ns.tolist())
    for send, receive, received_ns in zip(*columns, strict=True):
        is_from_any_source = peer[receive] < 0
        if not is_from_any_source:
            continue
        first_of_sender: dict[int, int] = {}
        for other, taker in mailboxes[int(rank[receive]), int(tag[send]), int(group[send])]:
            if taker > receive and posted[other] < received_ns:
                sender = int(rank[other])
                first_of_sender[sender] = min(other, first_of_sender.get(sender, other))
        first_of_sender.pop(int(rank[send]), None)
        alternatives += [AlternativeMatch(receive, other) for other in first_of_sender.values()]
    return tuple(sorted(alternatives))


def _mailboxes(
    trace: Trace, found: MatchedMessages
) -> dict[tuple[int, int, int], list[tuple[int, int]]]:
    """All messages by receiver, tag and group: the row of the send, and of the receive that took
    it. Unmatched sends have a receive after all rows.
    """
    peer, tag, group = trace["peer"], trace["tag"], trace["group"]
    boxes: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    columns = (found.send.tolist(), found.recv.tolist(), found.target.tolist())
    for send, receive, receiver in zip(*columns, strict=True):
        key = (receiver, int(tag[send]), int(group[send]))
        boxes.setdefault(key, []).append((send, receive))
    for row in unmatched_rows(trace).tolist():
        operation = OPERATIONS[trace.text("op", int(trace["op"][row]))]
        if operation.direction == "send" and peer[row] >= 0:
            key = (int(peer[row]), int(tag[row]), int(group[row]))
            boxes.setdefault(key, []).append((row, len(trace)))
    return boxes


__all__ = [
    "AlternativeMatch",
    "LaneMessage",
    "MatchedMessages",
    "unmatched_rows",
    "alternative_matches",
    "matched_messages",
    "messages_between_lanes",
]
