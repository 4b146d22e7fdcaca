"""Blocking messages of small tensors that a rank sends and receives in a loop: their frames come
again, but for numbers and payloads.

What such a frame says is looked up once. What is done then is what the hub does for each of its
calls by itself, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from distsim.script_capture.hub.call_templates import CALL_NUMBER_BYTES, CallTemplate
from distsim.script_capture.hub.collective_results import CallContribution
from distsim.script_capture.hub.matching import RankCall
from distsim.script_capture.hub.state import HubConnection, HubEvent, PendingReply, RankProcess

if TYPE_CHECKING:
    from distsim.script_capture.hub.event_loop import Hub

_NO_FACTS: Final[dict[str, Any]] = {}


class CachedCallFrame(tuple[tuple[HubConnection | None, CallTemplate], ...]):
    """What a frame says, in order: sends, and receives for which a line waits."""

    __slots__ = ()


def cached_call_frame(member: RankProcess, message: list[Any]) -> CachedCallFrame | list[Any]:
    """What a member's frame says; the frame itself where there is more in it."""
    parts: list[tuple[HubConnection | None, CallTemplate]] = []
    for said in message:
        line = member.lines[said[1]] if said[0] == "ask" else None
        shape = member.shapes.get(said[-1]) if said[-2:-1] == ["again"] else None
        if shape is None or not shape.waited or shape.op != ("isend" if line is None else "irecv"):
            return message
        parts.append((line, shape))
    return CachedCallFrame(parts)


def replay_cached_calls(hub: Hub, plan: CachedCallFrame, member: RankProcess, blob: bytes) -> None:
    """Do what a plan says. ``blob``: the numbers of its calls, each with its payload behind it."""
    at = 0
    hub.progress += len(plan)
    hub.polls = 0
    for line, shape in plan:
        site, team, op, peer, tag, _, _, facts, counts, bare = shape
        number = int.from_bytes(blob[at : at + CALL_NUMBER_BYTES], "little")
        at += CALL_NUMBER_BYTES
        call = member.calls[number] = RankCall(member.rank, number, op, team, peer, tag, bare)
        event = HubEvent(
            number, "call", site, call, True, 0, (), None, _NO_FACTS, member.lane, True
        )
        member.events.append(event)
        if line is None:
            end = at + counts[0]
            _deliver_message(hub, call, facts, blob[at:end])
            at = end
        else:
            line.owed = member.waiting[number] = PendingReply(line, call, site=site, event=event)
            for done in hub.matching.post_receive(call):
                hub.tell(done)


def _deliver_message(hub: Hub, call: RankCall, facts: list[Any], payload: bytes) -> None:
    """A message: most often somebody waits for it, and it goes there at once."""
    taker = hub.matching.match_waiting_receive(call)
    question = hub.ranks[taker.rank].waiting.pop(taker.number, None) if taker is not None else None
    if taker is not None and question is not None:
        taker.outs = []
        question.line.gives(call.rank, payload)
        return
    call.side = CallContribution([payload], facts)
    if taker is not None:
        taker.outs, taker.origin = [[payload]], call
    for done in [taker] if taker is not None else hub.matching.post(call):
        if done is not call:
            hub.tell(done)
