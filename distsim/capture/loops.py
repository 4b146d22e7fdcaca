"""Blocking messages of small tensors that a rank sends and receives in a loop: their frames come again, but for numbers and payloads.

What such a frame says is looked up once. What is done then is what the hub does for each of its calls by itself, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from distsim.capture.data import Side
from distsim.capture.matching import Posted
from distsim.capture.members import Event, Line, Member, Question
from distsim.capture.repeats import NUMBER, Shape

if TYPE_CHECKING:
    from distsim.capture.hub import Hub

_NOTHING: Final[dict[str, Any]] = {}


class Plan(tuple[tuple[Line | None, Shape], ...]):
    """What a frame says, in order: sends, and receives for which a line waits."""

    __slots__ = ()


def planned(member: Member, message: list[Any]) -> Plan | list[Any]:
    """What a member's frame says; the frame itself where there is more in it."""
    parts: list[tuple[Line | None, Shape]] = []
    for said in message:
        line = member.lines[said[1]] if said[0] == "ask" else None
        shape = member.shapes.get(said[-1]) if said[-2:-1] == ["again"] else None
        if shape is None or not shape.waited or shape.op != ("isend" if line is None else "irecv"):
            return message
        parts.append((line, shape))
    return Plan(parts)


def run(hub: Hub, plan: Plan, member: Member, blob: bytes) -> None:
    """Do what a plan says. ``blob``: the numbers of its calls, each with its payload behind it."""
    at = 0
    hub.progress += len(plan)
    hub.polls = 0
    for line, shape in plan:
        site, team, op, peer, tag, _, _, facts, counts, bare = shape
        number = int.from_bytes(blob[at : at + NUMBER], "little")
        at += NUMBER
        call = member.calls[number] = Posted(member.rank, number, op, team, peer, tag, bare)
        event = Event(number, "call", site, call, True, 0, (), None, _NOTHING, member.lane, True)
        member.events.append(event)
        if line is None:
            end = at + counts[0]
            _sent(hub, call, facts, blob[at:end])
            at = end
        else:
            line.owed = member.waiting[number] = Question(line, call, site=site, event=event)
            for done in hub.matching.await_message(call):
                hub.tell(done)


def _sent(hub: Hub, call: Posted, facts: list[Any], payload: bytes) -> None:
    """A message: most often somebody waits for it, and it goes there at once."""
    taker = hub.matching.hand_on(call)
    question = hub.ranks[taker.rank].waiting.pop(taker.number, None) if taker is not None else None
    if taker is not None and question is not None:
        taker.outs = []
        question.line.gives(call.rank, payload)
        return
    call.side = Side([payload], facts)
    if taker is not None:
        taker.outs, taker.origin = [[payload]], call
    for done in [taker] if taker is not None else hub.matching.post(call):
        if done is not call:
            hub.tell(done)
