"""Calls that a line of the script makes again and again: what they are is told once, and known by a
number from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from distsim.script_capture.hub.collective_results import CallContribution
from distsim.script_capture.hub.matching import GroupInstance, RankCall
from distsim.script_capture.protocol.wire import PayloadReader

if TYPE_CHECKING:
    from distsim.script_capture.hub.state import RankProcess

#: Bytes of a call's number, before its payloads: the text of a frame that comes again stays the
#: same.
CALL_NUMBER_BYTES: Final = 8


class CallTemplate(NamedTuple):
    """All of a call but its number and its numbers. ``waited``: its rank waits for it at once,
    which is a call of its own, the next.

    ``bare``: what its side says of it, without payloads.
    """

    site: int
    team: GroupInstance
    op: str
    peer: int
    tag: int
    is_async: bool
    waited: bool
    facts: list[Any]
    counts: list[int]
    bare: CallContribution


def encoded_call_number(number: int) -> bytes:
    """A call's number as its frame carries it."""
    return number.to_bytes(CALL_NUMBER_BYTES, "little")


def register_template(member: RankProcess, message: list[Any]) -> None:
    """Keep what a member says of the calls that it will make."""
    _, name, site, group, op, peer, tag, is_async, waited, facts, counts = message
    team, bare = member.group_instances[group], CallContribution((), facts)
    member.shapes[name] = CallTemplate(
        site, team, op, peer, tag, is_async, waited, facts, counts, bare
    )


def call_from_template(
    member: RankProcess, name: int, blobs: PayloadReader
) -> tuple[CallTemplate, RankCall]:
    """The call that a member makes once more."""
    shape = member.shapes[name]
    number = int.from_bytes(blobs.take(CALL_NUMBER_BYTES), "little")
    side = CallContribution([blobs.take(count) for count in shape.counts], shape.facts)
    return shape, RankCall(member.rank, number, shape.op, shape.team, shape.peer, shape.tag, side)
