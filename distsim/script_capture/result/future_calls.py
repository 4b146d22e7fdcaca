"""Calls that a blocked rank is assumed to make later, because other ranks wait for them.

A captured program ends where its ranks are blocked; what they would have called next is not known.
If other ranks wait for a blocked rank, that is not its fault: it is assumed to make the missing
calls after the call in which it is blocked. So the findings say which rank waits for which, and not
that calls are missing. A rank that has ended makes no more calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from distsim.operations.registry import OPERATIONS
from distsim.script_capture.hub.collective_results import CallContribution
from distsim.script_capture.hub.matching import RankCall
from distsim.script_capture.hub.state import HubEvent, RankProcess
from distsim.script_capture.protocol.message_types import NO_CALL_SITE
from distsim.script_capture.result.recorded_calls import CapturedCall

#: The incomplete calls that each blocked rank waits for.
BlockedRanks = Mapping[int, list[RankCall]]


def incomplete_calls(process: RankProcess) -> list[RankCall]:
    """The calls that a rank waits for and that are not done, in order."""
    waited = [pending.call or pending.polled_call for pending in process.waiting.values()]
    waited += [process.calls[number] for number in process.futures]
    found = {call.number: call for call in waited if call is not None and not call.done}
    return [found[number] for number in sorted(found)]


def assumed_future_calls(processes: Sequence[RankProcess]) -> dict[int, list[CapturedCall]]:
    """For each blocked rank, the calls that it is assumed to make."""
    blocked: dict[int, list[RankCall]] = {}
    for rank, process in enumerate(processes):
        if process.ended is None and (process.waiting or process.futures):
            blocked[rank] = incomplete_calls(process)

    found: dict[int, list[CapturedCall]] = {rank: [] for rank in blocked}
    assumed_collectives: set[tuple[int, int]] = set()
    for rank, calls in blocked.items():
        for call in calls:
            if OPERATIONS[call.op].kind == "p2p":
                if call.peer in blocked and not _has_unmatched_send(processes, blocked, call, rank):
                    send = _matching_send(call, rank)
                    found[call.peer].append(CapturedCall("send", NO_CALL_SITE, (send,)))
                continue
            for other in _missing_ranks(call):
                key = (id(call.collective), other)
                if other in blocked and key not in assumed_collectives:
                    assumed_collectives.add(key)
                    other_call = _call_of_peer(call, other)
                    found[other].append(CapturedCall(call.op, NO_CALL_SITE, (other_call,)))
    for rank in blocked:
        found[rank] += _assumed_receives(processes, blocked, rank)
    for rank, startup_call in _missing_startup_calls(processes, blocked):
        found[rank].append(startup_call)
    return found


def _has_unmatched_send(
    processes: Sequence[RankProcess], blocked: BlockedRanks, receive: RankCall, receiver: int
) -> bool:
    """Whether the peer of a receive has sent a message to it that no receive takes.

    Then that is its message, with a wrong tag. A send in which the peer is blocked does not count.
    """
    for call in processes[receive.peer].calls.values():
        if call in blocked[receive.peer] or call.op not in ("send", "isend"):
            continue
        is_same_route = call.peer == receiver and call.group is receive.group
        if is_same_route and call.device == receive.device and not call.match_number:
            return True
    return False


def _assumed_receives(
    processes: Sequence[RankProcess], blocked: BlockedRanks, receiver: int
) -> Iterator[CapturedCall]:
    """The receives of messages that other blocked ranks have sent to a rank.

    The rank must be blocked in a collective: if it waits for another message, one of the two
    messages is wrong.
    """
    if any(OPERATIONS[call.op].kind == "p2p" for call in blocked[receiver]):
        return
    for sender in blocked:
        for call in processes[sender].calls.values():
            is_sent = call.op in ("send", "isend") and call.peer == receiver
            if is_sent and not call.match_number:
                yield CapturedCall("recv", NO_CALL_SITE, (_matching_receive(call, receiver),))


def _matching_receive(send: RankCall, receiver: int) -> RankCall:
    """The receive that a send waits for, with a number that no real call has."""
    side = send.contribution
    contribution = CallContribution((), [[], side.input_shapes, side.dtype, {}])
    return RankCall(receiver, -send.number, "irecv", send.group, send.rank, send.tag, contribution)


def _matching_send(receive: RankCall, receiver: int) -> RankCall:
    """The send that a receive waits for, with a number that no real call has."""
    side = receive.contribution
    contribution = CallContribution((), [side.output_shapes, [], side.dtype, {}])
    return RankCall(
        receive.peer,
        -receive.number,
        "isend",
        receive.group,
        receiver,
        receive.tag,
        contribution,
    )


def _missing_ranks(call: RankCall) -> list[int]:
    """The global ranks that have not arrived at a collective."""
    arrived = call.collective.arrived if call.collective is not None else {}
    return [rank for position, rank in enumerate(call.group.ranks) if position not in arrived]


def _call_of_peer(call: RankCall, rank: int) -> RankCall:
    """A collective as another member calls it: its root has a list where others have none."""
    side = call.contribution
    size = len(call.group.ranks)
    is_root = rank == call.peer
    inputs = side.input_shapes
    outputs = side.output_shapes
    if call.op == "scatter":
        inputs = outputs * size if is_root else []
    elif call.op == "gather":
        outputs = inputs * size if is_root else []
    elif call.op == "all_to_all_single" and side.extra.get("input_splits"):
        # How the peer would split its tensor is not known.
        inputs = outputs = [[prod(inputs[0])]]
    extra = {key: value for key, value in side.extra.items() if not key.endswith("_splits")}
    contribution = CallContribution((), [inputs, outputs, side.dtype, extra])
    return replace(call, rank=rank, number=-call.number, contribution=contribution, results=None)


def _missing_startup_calls(
    processes: Sequence[RankProcess], blocked: BlockedRanks
) -> Iterator[tuple[int, CapturedCall]]:
    """init_process_group on each blocked rank that is not in it, if others wait in it."""
    events: dict[str, HubEvent] = {}
    for process in processes:
        for number, pending in process.waiting.items():
            if pending.startup_op:
                events[pending.startup_op] = _last_event(process, number)
    for op, event in events.items():
        for rank in blocked:
            waiting = processes[rank].waiting.values()
            if not any(pending.startup_op == op for pending in waiting):
                startup = HubEvent(0, op, 0, group=event.group, facts=event.facts)
                yield rank, CapturedCall(op, NO_CALL_SITE, event=startup)


def _last_event(process: RankProcess, number: int) -> HubEvent:
    """The event with this number, searched from the end: it is one of the last."""
    return next(event for event in reversed(process.events) if event.number == number)
