"""The messages of a run from point to point: who sent what to whom, which receive took it, and
which other it could have taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.operations.registry import OPERATIONS
from distsim.trace.model import Trace

Ints = NDArray[np.int64]
_SEND_OPS = tuple(name for name, row in OPERATIONS.items() if row.direction == "send")
_RECV_OPS = tuple(name for name, row in OPERATIONS.items() if row.direction == "recv")


class MatchedMessages(NamedTuple):
    """Column by column, in the order of the sends. ``left_ns``: when it is on its way; ``came_ns``:
    when the receive has it; ``send`` and ``recv`` are rows of the trace."""

    source: Ints
    target: Ints
    sent_ns: Ints
    received_ns: Ints
    send: Ints
    recv: Ints

    def __len__(self) -> int:
        return len(self.send)


class AlternativeMatch(NamedTuple):
    """A receive from any source (a row), and a send (a row) that it could have taken in place of
    the one that it took.
    """

    recv: int
    send: int


def matched_messages(trace: Trace, end_ns: int) -> MatchedMessages:
    """The messages that were taken; one that is still on its way arrives at ``end_ns``."""
    match = trace["match"]
    sends, recvs = (
        np.flatnonzero(trace.ops(*ops) & (match >= 0)) for ops in (_SEND_OPS, _RECV_OPS)
    )
    recvs = recvs[np.argsort(match[recvs], kind="stable")]
    at = np.searchsorted(match[recvs], match[sends])
    met = at < len(recvs)
    met[met] = match[recvs[at[met]]] == match[sends[met]]
    send, recv = sends[met], recvs[at[met]]
    left = np.where(
        trace["started_ns"][send] >= 0, trace["started_ns"][send], trace["posted_ns"][send]
    )
    came = np.where(trace["finished_ns"][recv] >= 0, trace["finished_ns"][recv], end_ns)
    keep = left >= 0
    rank = trace["rank"].astype(np.int64)
    found = (rank[send], rank[recv], left, np.maximum(came, left), send, recv)
    return MatchedMessages(*(column[keep].astype(np.int64) for column in found))


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
    """Rows of sends and receives that were made and met nobody."""
    return np.flatnonzero(
        trace.ops(*_SEND_OPS, *_RECV_OPS) & (trace["match"] < 0) & (trace["posted_ns"] >= 0)
    )


def alternative_matches(trace: Trace, found: MatchedMessages) -> tuple[AlternativeMatch, ...]:
    """What receives from any source could have taken, in the order of the trace.

    Another sender's first message with the same tag in the same group, for which no receive
    before this one had a use, and which was sent before this receive had what it took: so it did
    not come about because of it. Messages of one sender do not overtake each other (MPI 4.1,
    section 3.5).
    """
    peer, tag, group, posted = trace["peer"], trace["tag"], trace["group"], trace["posted_ns"]
    boxes: dict[
        tuple[int, int, int], list[tuple[int, int]]
    ] = {}  # (receiver, tag, group) -> (send, its receive)
    for send, recv, target in zip(
        found.send.tolist(), found.recv.tolist(), found.target.tolist(), strict=True
    ):
        boxes.setdefault((target, int(tag[send]), int(group[send])), []).append((send, recv))
    for row in unmatched_rows(trace).tolist():
        if (
            peer[row] >= 0
            and OPERATIONS[trace.text("op", int(trace["op"][row]))].direction == "send"
        ):
            boxes.setdefault((int(peer[row]), int(tag[row]), int(group[row])), []).append(
                (row, len(trace))
            )
    made = []
    for send, recv, came in zip(
        found.send.tolist(), found.recv.tolist(), found.received_ns.tolist(), strict=True
    ):
        if peer[recv] >= 0:
            continue
        box = boxes[int(trace["rank"][recv]), int(tag[send]), int(group[send])]
        first: dict[int, int] = {}
        for other, taker in box:
            if taker > recv and posted[other] < came:
                first[int(trace["rank"][other])] = min(
                    other, first.get(int(trace["rank"][other]), other)
                )
        made += [
            AlternativeMatch(recv, other)
            for other in first.values()
            if trace["rank"][other] != trace["rank"][send]
        ]
    return tuple(sorted(made))


__all__ = [
    "AlternativeMatch",
    "LaneMessage",
    "MatchedMessages",
    "unmatched_rows",
    "alternative_matches",
    "matched_messages",
    "messages_between_lanes",
]
