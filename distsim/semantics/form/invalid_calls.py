"""What a rank does at a call that may not be made.

A call breaks the rules of torch.distributed (`CodeCall.invalid`), or only the backend rejects it.
The backend's profile says what follows, for one call at a time (`BackendProfile.invalid`). This
module adds the cases in which the answer depends on other calls of the program.
"""

from __future__ import annotations

from typing import NamedTuple

from distsim.backends.message_matching import ANY_SENDER
from distsim.backends.profile import BackendProfile, InvalidCallReaction
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall, InvalidRows, SharedCode, at_row
from distsim.program.model import Program

#: Findings about calls that break the rules without producing wrong data: a message to the own
#: rank, a second wait, a call on a destroyed group.
_HARMLESS_FINDINGS = ("DS102", "DS105", "DS108")


class CallProblem(NamedTuple):
    """Why a call may not be made, and what follows.

    ``code``: the finding about a call that breaks the rules; empty if only the backend rejects it.
    """

    reaction: InvalidCallReaction
    text: str
    code: str = ""

    @property
    def corrupts_data(self) -> bool:
        """Whether the call produces wrong data if the backend executes it all the same."""
        return self.code not in _HARMLESS_FINDINGS


class CallPlace(NamedTuple):
    """A call, as one rank reaches it.

    ``collectives_before``: how many collectives the rank has called on the call's group before.
    """

    program: Program
    profile: BackendProfile
    rank: int
    code: SharedCode
    position: int
    collectives_before: int


def problem_of_invalid_call(place: CallPlace, part: CodeCall, invalid: InvalidRows) -> CallProblem:
    """The problem of a call that breaks the rules.

    ``part``: the invalid part of a batch, or the call itself.
    """
    return CallProblem(_reaction(place, part, invalid.code), invalid.text, invalid.code)


def _reaction(place: CallPlace, part: CodeCall, code: str) -> InvalidCallReaction:
    program, call = place.program, place.code.calls[place.position]
    # A message to the own rank (DS102) is judged with its batch, which may contain both sides.
    judged = program.resolve(place.rank, call if code == "DS102" else part)
    reaction = place.profile.invalid(judged, code, program.options)
    if code == "DS105" and reaction == "hangs":
        # Only messages hang when they are waited for again.
        return "hangs" if _waits_for_message_again(place.code, place.position) else "goes on"
    if code == "DS108" and reaction == "goes on" and not _all_members_call(place):
        return "raises"
    return reaction


def _waits_for_message_again(code: SharedCode, position: int) -> bool:
    waited_again = [code.calls[position - distance] for distance in code.calls[position].again]
    return any(OPERATIONS[call.op].kind in ("p2p", "batch") for call in waited_again)


def _all_members_call(place: CallPlace) -> bool:
    """Whether every member makes this call on a destroyed group.

    Otherwise the missing member closes its connection, when its process ends or its group object is
    freed. torch then raises "ValueError: Process group … is not initialized in the world group map"
    in place of gloo's error (run on gloo, torch 2.13). While the missing member keeps the object,
    for example in a barrier of the world, the call waits for that.
    """
    program = place.program
    group = program.resolve(place.rank, place.code.calls[place.position]).group
    return all(
        _collective_count(program, member, group.id) > place.collectives_before
        for member in group.ranks
    )


def _collective_count(program: Program, rank: int, group_id: int) -> int:
    """How many collectives a rank's whole program calls on a group."""
    calls = (call for _, call in program.calls_of(rank) if call.group.id == group_id)
    return sum(OPERATIONS[call.op].kind == "collective" for call in calls)


def partners_of_repeated_wait(code: SharedCode, row: int, position: int) -> tuple[int, ...]:
    """The partners of the requests that a call waits for a second time, so that it hangs."""
    peers: set[int] = set()
    for distance in code.calls[position].again:
        target = code.calls[position - distance]
        for part in (target, *target.parts):
            if part.endpoint >= 0:
                peers.add(int(at_row(code.endpoints[part.endpoint].peer, row)))
    return tuple(sorted(peers - {ANY_SENDER}))
