"""Calls that a line of the script makes again and again: what they are is told once, and known by a number from then on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from distsim.capture.data import Side
from distsim.capture.matching import Posted, Team
from distsim.capture.wire import Blobs

if TYPE_CHECKING:
    from distsim.capture.members import Member

#: Bytes of a call's number, before its payloads: the text of a frame that comes again stays the same.
NUMBER: Final = 8


class Shape(NamedTuple):
    """All of a call but its number and its numbers. ``waited``: its rank waits for it at once, which is a call of its own, the next.

    ``bare``: what its side says of it, without payloads.
    """

    site: int
    team: Team
    op: str
    peer: int
    tag: int
    is_async: bool
    waited: bool
    facts: list[Any]
    counts: list[int]
    bare: Side


def numbered(number: int) -> bytes:
    """A call's number as its frame carries it."""
    return number.to_bytes(NUMBER, "little")


def learn(member: Member, message: list[Any]) -> None:
    """Keep what a member says of the calls that it will make."""
    _, name, site, group, op, peer, tag, is_async, waited, facts, counts = message
    team, bare = member.teams[group], Side((), facts)
    member.shapes[name] = Shape(site, team, op, peer, tag, is_async, waited, facts, counts, bare)


def call_of(member: Member, name: int, blobs: Blobs) -> tuple[Shape, Posted]:
    """The call that a member makes once more."""
    shape = member.shapes[name]
    number = int.from_bytes(blobs.take(NUMBER), "little")
    side = Side([blobs.take(count) for count in shape.counts], shape.facts)
    return shape, Posted(member.rank, number, shape.op, shape.team, shape.peer, shape.tag, side)
