"""What a rank that stands still would have done later, as far as others wait for it.

A captured program ends where its ranks stand; what would have come is not known. Of a rank that
stands itself, others' waits are no fault of its: it is taken to come to all of them, after the call
in which it stands. So the diagnosis speaks of who holds whom, and not of calls that are missing. A
rank that has ended comes to nothing any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from distsim.operations.registry import OPERATIONS
from distsim.script_capture.hub.collective_results import CallContribution
from distsim.script_capture.hub.matching import RankCall
from distsim.script_capture.hub.state import HubEvent, RankProcess
from distsim.script_capture.rank.call_sites import NO_CALL_SITE
from distsim.script_capture.result.recorded_calls import CapturedCall


def incomplete_calls(member: RankProcess) -> list[RankCall]:
    """What a rank waits for and has not got."""
    asked = [q.call or q.poll for q in member.waiting.values()]
    found = {c.number: c for c in asked if c is not None and not c.done}
    found |= {n: member.calls[n] for n in member.futures if not member.calls[n].done}
    return [found[n] for n in sorted(found)]


def assumed_future_calls(members: Sequence[RankProcess]) -> dict[int, list[CapturedCall]]:
    """By rank: the calls that it is taken to make after the one in which it stands."""
    standing = {
        rank: incomplete_calls(m)
        for rank, m in enumerate(members)
        if m.ended is None and (m.waiting or m.futures)
    }
    found: dict[int, list[CapturedCall]] = {rank: [] for rank in standing}
    seen: set[tuple[int, int]] = set()
    for rank, calls in standing.items():
        for call in calls:
            if OPERATIONS[call.op].kind == "p2p":
                if call.peer in standing and not _has_unmatched_send(members, standing, call, rank):
                    found[call.peer].append(
                        CapturedCall("send", NO_CALL_SITE, (_matching_send(call, rank),))
                    )
            else:
                for other in _missing_ranks(call):
                    if other in standing and (id(call.gathering), other) not in seen:
                        seen.add((id(call.gathering), other))
                        found[other].append(
                            CapturedCall(call.op, NO_CALL_SITE, (_call_of_peer(call, other),))
                        )
    for rank, step in _missing_startup_calls(members, standing):
        found[rank].append(step)
    return found


def _has_unmatched_send(
    members: Sequence[RankProcess],
    standing: dict[int, list[RankCall]],
    call: RankCall,
    receiver: int,
) -> bool:
    """Did the peer of a receive send it something already that nobody takes, and go on? Then that
    is its message: its tag is wrong.
    """
    return any(
        c.op in ("send", "isend")
        and c.peer == receiver
        and c.team is call.team
        and c.on == call.on
        and not c.met
        for c in members[call.peer].calls.values()
        if c not in standing[call.peer]
    )


def _matching_send(call: RankCall, receiver: int) -> RankCall:
    return RankCall(
        call.peer,
        -call.number,
        "isend",
        call.team,
        receiver,
        call.tag,
        CallContribution((), [call.side.outs, [], call.side.dtype, {}]),
    )


def _missing_ranks(call: RankCall) -> list[int]:
    there = call.gathering.there if call.gathering is not None else {}
    return [rank for k, rank in enumerate(call.team.ranks) if k not in there]


def _call_of_peer(call: RankCall, rank: int) -> RankCall:
    """The call as another member makes it. Its root has a list where the others have none."""
    side, n = call.side, len(call.team.ranks)
    ins, outs = side.ins, side.outs
    if call.op == "scatter":
        ins = outs * n if rank == call.peer else []
    elif call.op == "gather":
        outs = ins * n if rank == call.peer else []
    elif call.op == "all_to_all_single" and side.extra.get("input_splits"):
        ins = outs = [[prod(ins[0])]]
    extra = {k: v for k, v in side.extra.items() if not k.endswith("_splits")}
    return replace(
        call,
        rank=rank,
        number=-call.number,
        side=CallContribution((), [ins, outs, side.dtype, extra]),
        outs=None,
    )


def _missing_startup_calls(
    members: Sequence[RankProcess], standing: dict[int, list[RankCall]]
) -> Iterator[tuple[int, CapturedCall]]:
    """init_process_group, where others stand in it."""
    events = {
        q.meeting: next(e for e in reversed(m.events) if e.number == n)
        for m in members
        for n, q in m.waiting.items()
        if q.meeting
    }
    for op, event in events.items():
        for rank in standing:
            if not any(q.meeting == op for q in members[rank].waiting.values()):
                yield (
                    rank,
                    CapturedCall(
                        op,
                        NO_CALL_SITE,
                        event=HubEvent(0, op, 0, team=event.team, facts=event.facts),
                    ),
                )
