"""What a pass leaves behind: who is blocked on whom, how each rank ended, which messages nobody took."""

from __future__ import annotations

from typing import Any

from distsim.check.call_index import CallIndex
from distsim.check.instructions import (
    ALL,
    CAME,
    JOIN,
    POST,
    RECV,
    ROOT,
    SEND,
    TAKEN,
    WAIT,
    WAIT_JOIN,
    WAIT_RECV,
    WAIT_SEND,
    Condition,
    Instruction,
)  # fmt: skip
from distsim.check.onepass import Pass
from distsim.standstill import Blocked, Need, RankEnd, Standstill


def standstill(done: Pass, where: CallIndex) -> Standstill:
    """The record of a finished pass."""
    missing: dict[tuple[int, int, int | None], tuple[int, ...]] = {}
    absent = tuple(rank for rank, status in enumerate(done.status) if status == "absent")
    ends, blocked = [], []
    for rank, (status, position) in enumerate(zip(done.status, done.position, strict=True)):
        ends.append(RankEnd(rank, status or "blocked", position, message=done.message[rank]))  # type: ignore[arg-type]
        if status == "":
            needs = _needs(done, rank, position, missing) or (Need(position, -1, absent),)
            blocked.append(Blocked(rank, position, needs))
    return Standstill(tuple(ends), tuple(blocked), tuple(_unreceived(done, where)))


def conditions_of(instruction: Instruction) -> tuple[Condition, ...]:
    """What an instruction waits for, in the general form."""
    op, a, b = instruction
    if op in (SEND, RECV):
        return ((TAKEN if op == SEND else CAME, 0, a, -1),)
    if op == JOIN:
        return ((ALL, 0, a, -1),)
    if op in (WAIT_SEND, WAIT_RECV, WAIT_JOIN):
        return (({WAIT_SEND: TAKEN, WAIT_RECV: CAME, WAIT_JOIN: ALL}[op], a, b, -1),)
    return tuple(b) if op in (WAIT, POST) else ()


def _needs(done: Pass, rank: int, at: int, missing: dict[Any, tuple[int, ...]]) -> tuple[Need, ...]:
    """The unmet conditions of a blocked rank; equal sets of missing ranks are one tuple."""
    needs = []
    for condition in conditions_of(done.codes[rank][at]):
        if done.met(rank, at, condition):
            continue
        kind, distance, port, part = condition
        layout = done.layout
        if kind in (ALL, ROOT):
            lane, root = done.scope(rank, condition)
            key = (lane, done.number(rank, at, condition), root)
            if key not in missing:
                missing[key] = (root,) if root is not None else tuple(
                    r for r in layout.lane_ranks[lane] if not done.has_come(lane, key[1], r))  # fmt: skip
            needs.append(Need(at - distance, part, missing[key]))
        elif kind == TAKEN:
            needs.append(Need(at - distance, part, (layout.chan_dst[layout.send_chan[rank][port]],)))
        else:
            channel = layout.recv_chan[rank][port]
            needs.append(Need(at - distance, part, (layout.chan_src[channel],)))
    return tuple(needs)


def _unreceived(done: Pass, where: CallIndex) -> list[tuple[int, int, int]]:
    """(sender, position, part) of the messages that no receive took, in this order."""
    found = []
    for channel, (sent, received) in enumerate(zip(done.sent, done.received, strict=True)):
        if sent > received:
            sender = done.layout.chan_src[channel]
            found += [(sender, m.position, m.part) for m in where.messages(sender, channel, sends=True)[received:sent]]
    return sorted(found)
