"""Repeated calls: templates of calls, and a fast path for frames that only repeat calls.

A rank describes a call that it will make again once, in a ``template`` message. From then on it
sends the template's number; the call's own number and payloads follow the text of the frame.

Loops of blocking messages with small tensors send the same few frames again and again. For them,
`cached_call_frame` looks up once what a frame does, and `replay_cached_calls` does it, with the
same effect as the handlers of the event loop. It is dense on purpose: it runs for each message.
"""

from __future__ import annotations

from typing import Any, Final

from distsim.script_capture.hub.collective_results import CallContribution
from distsim.script_capture.hub.matching import CallTemplate, RankCall
from distsim.script_capture.hub.state import (
    HubConnection,
    HubEvent,
    HubState,
    PendingReply,
    RankProcess,
)
from distsim.script_capture.protocol.wire import CALL_NUMBER_BYTES, PayloadReader

#: Shared by all events of repeated calls; they have no facts of their own.
_NO_FACTS: Final[dict[str, Any]] = {}


def register_template(process: RankProcess, message: list[Any]) -> None:
    """Handle a ``template`` message."""
    _, name, site, group, op, peer, tag, is_async, waited, facts, counts = message
    process.templates[name] = CallTemplate(
        site,
        process.groups[group],
        op,
        peer,
        tag,
        is_async,
        waited,
        facts,
        counts,
        CallContribution((), facts),
    )


def call_from_template(
    process: RankProcess, name: int, blobs: PayloadReader
) -> tuple[CallTemplate, RankCall]:
    """The call of a ``repeat`` message."""
    template = process.templates[name]
    number = int.from_bytes(blobs.take(CALL_NUMBER_BYTES), "little")
    payloads = [blobs.take(count) for count in template.counts]
    contribution = CallContribution(payloads, template.facts)
    call = RankCall(
        process.rank,
        number,
        template.op,
        template.group,
        template.peer,
        template.tag,
        contribution,
    )
    return template, call


class CachedCallFrame(tuple[tuple[HubConnection | None, CallTemplate], ...]):
    """The calls of a frame, in order: sends (None), and receives with the connection that waits."""

    __slots__ = ()


def cached_call_frame(process: RankProcess, message: list[Any]) -> CachedCallFrame | list[Any]:
    """The calls of a frame if it contains nothing else; otherwise the message itself."""
    parts: list[tuple[HubConnection | None, CallTemplate]] = []
    for submessage in message:
        # ["repeat", name], or ["ask", token, "repeat", name] with a reply connection
        connection = None
        if submessage[0] == "ask":
            connection = process.connections[submessage[1]]
        if submessage[-2:-1] != ["repeat"]:
            return message
        template = process.templates.get(submessage[-1])
        expected_op = "isend" if connection is None else "irecv"
        if template is None or not template.waited or template.op != expected_op:
            return message
        parts.append((connection, template))
    return CachedCallFrame(parts)


def replay_cached_calls(
    state: HubState, frame: CachedCallFrame, process: RankProcess, blob: bytes
) -> None:
    """Make the calls of a frame. ``blob``: for each call its number, then its payload."""
    position = 0
    state.progress += len(frame)
    state.polls = 0
    for connection, template in frame:
        site, group, op, peer, tag, _, _, facts, counts, contribution = template
        number = int.from_bytes(blob[position : position + CALL_NUMBER_BYTES], "little")
        position += CALL_NUMBER_BYTES
        call = RankCall(process.rank, number, op, group, peer, tag, contribution)
        process.calls[number] = call
        event = HubEvent(
            number, "call", site, call, True, 0, (), None, _NO_FACTS, process.thread, True
        )
        process.events.append(event)
        if connection is None:
            end = position + counts[0]
            _deliver_message(state, call, facts, blob[position:end])
            position = end
        else:
            pending = PendingReply(connection, call, site=site, event=event)
            connection.pending = process.waiting[number] = pending
            for done in state.matcher.post_receive(call):
                state.deliver(done)


def _deliver_message(state: HubState, send: RankCall, facts: list[Any], payload: bytes) -> None:
    """Post a send. Most often a receive waits for it, and its payload is forwarded at once."""
    receive = state.matcher.match_waiting_receive(send)
    pending = None
    if receive is not None:
        pending = state.ranks[receive.rank].waiting.pop(receive.number, None)
    if receive is not None and pending is not None:
        receive.results = []
        pending.connection.send_payload(send.rank, payload)
        return
    send.contribution = CallContribution([payload], facts)
    if receive is not None:
        # It matched, but no thread waits for it yet: keep the payload.
        receive.results = [[payload]]
        receive.matched_send = send
        state.deliver(receive)
        return
    for done in state.matcher.post(send):
        if done is not send:
            state.deliver(done)
