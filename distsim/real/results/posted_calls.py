"""Which posted calls meet, by the order in which each rank posted them, and what ranks that got no
further therefore wait for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from distsim.findings.final_state import WaitDependency
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.trace.model import Trace

Key = TypeVar("Key", bound=Hashable)
MessageChannel = tuple[int, int, int, int]  # group, sender, receiver, tag
CollectiveKey = tuple[str, int, int]  # kind of operation, group, how many-th of its sequence


class CallMatching(Generic[Key]):
    """Posted calls under keys of the caller's. The k-th message of a channel meets its k-th
    receive, a group's n-th collective the n-th.
    """

    def __init__(self) -> None:
        self.sends: dict[MessageChannel, list[Key]] = defaultdict(list)
        self.receives: dict[MessageChannel, list[Key]] = defaultdict(list)
        self.open: dict[tuple[int, int, int], list[Key]] = defaultdict(
            list
        )  # (group, receiver, tag): from a source nobody knows
        self.joined: dict[CollectiveKey, dict[int, Key]] = defaultdict(dict)  # by rank
        self.meeting: dict[Key, CollectiveKey] = {}
        self._count: dict[tuple[str, int, int], int] = defaultdict(int)

    def post(self, key: Key, call: ResolvedCall, source: int | None) -> None:
        """A message, a receive or a collective. ``source``: whom a receive from any source met,
        where it says so.
        """
        row, group, me = OPERATIONS[call.op], call.group.id, call.rank
        peer = call.peer if call.peer is not None else source
        if row.kind != "p2p":
            n = self._count[row.kind, group, me]
            self._count[row.kind, group, me] = n + 1
            self.meeting[key] = row.kind, group, n
            self.joined[row.kind, group, n][me] = key
        elif row.direction == "send":
            self.sends[group, me, call.peer or 0, call.tag].append(key)
        elif peer is None:
            self.open[group, me, call.tag].append(key)
        else:
            self.receives[group, peer, me, call.tag].append(key)

    def met(self) -> list[tuple[Key, ...]]:
        """The keys of calls that met."""
        pairs = [
            pair
            for channel, sent in self.sends.items()
            for pair in zip(sent, self.receives.get(channel, ()), strict=False)
        ]
        return [*pairs, *(tuple(keys.values()) for keys in self.joined.values() if len(keys) > 1)]


# --- what is missing ---


class PostedRequest(NamedTuple):
    """A posted call: the rank, the call's position and its part of a batch (-1: none)."""

    rank: int
    position: int
    part: int


class RankWait(NamedTuple):
    """``needs``: what nobody has posted. ``others``: the other ranks of the calls that are waited
    for.
    """

    needs: tuple[WaitDependency, ...] = ()
    others: tuple[int, ...] = ()


class WaitAnalysis(NamedTuple):
    """``at``: what a rank that stands in a call waits for, by rank and position. ``unreceived``:
    messages without a receive. ``taken``: which message each receive from any source took that says
    whom it met."""

    at: dict[tuple[int, int], RankWait]
    unreceived: tuple[PostedRequest, ...]
    taken: Mapping[PostedRequest, PostedRequest]


def analyze_waits(
    program: Program,
    posted: Sequence[int],
    stuck: Collection[tuple[int, int]],
    sources: Mapping[PostedRequest, int],
) -> WaitAnalysis:
    """Who waits for whom. ``posted``: how many calls of its program each rank has posted.
    ``stuck``: (rank, position) of interest.

    ``sources``: whom receives from any source met, where they say so; the others take what is
    there, in order of senders.
    """
    calls = CallMatching[PostedRequest]()
    for rank, count in enumerate(posted):
        for position, call in program.calls_of(rank):
            if position >= count:
                break
            for request, piece in _requests(rank, position, call):
                calls.post(request, piece, sources.get(request))
    both = [
        zip(sent, calls.receives.get(channel, ()), strict=False)
        for channel, sent in calls.sends.items()
    ]
    taken = {receive: sent for pairs in both for sent, receive in pairs if receive in sources}
    missing = _MissingCalls(program, calls, sources, _match_any_source(calls))
    left = [
        request
        for channel, sent in calls.sends.items()
        for request in sent[len(calls.receives[channel]) :]
    ]
    return WaitAnalysis(
        {where: missing.wait(*where) for where in stuck}, tuple(sorted(left)), taken
    )


def _requests(
    rank: int, position: int, call: ResolvedCall
) -> list[tuple[PostedRequest, ResolvedCall]]:
    """What of a call meets calls of other ranks."""
    if call.parts:
        return [
            (PostedRequest(rank, position, part), piece) for part, piece in enumerate(call.parts)
        ]
    meets = OPERATIONS[call.op].kind in ("p2p", "collective") or call.op == "new_group"
    return [(PostedRequest(rank, position, -1), call)] if meets else []


def _match_any_source(calls: CallMatching[PostedRequest]) -> set[PostedRequest]:
    """Receives from any source that nobody has told of, and that a message is there for."""
    found = set()
    for (group, me, tag), waiting in calls.open.items():
        channels = sorted(c for c in calls.sends if (c[0], c[2], c[3]) == (group, me, tag))
        for request in waiting:
            free = next((c for c in channels if len(calls.sends[c]) > len(calls.receives[c])), None)
            if free is not None:
                calls.receives[free].append(request)
                found.add(request)
    return found


class _MissingCalls(NamedTuple):
    """What calls lack to go on. ``served``: receives from any source that took a message."""

    program: Program
    calls: CallMatching[PostedRequest]
    sources: Mapping[PostedRequest, int]
    served: set[PostedRequest]

    def wait(self, rank: int, position: int) -> RankWait:
        """Of a rank that stands in a call: of the call itself, or of the requests that it waits
        for.
        """
        if position >= len(self.program.code(rank).calls):
            return RankWait()
        at = [position - distance for distance in self.program.code_call(rank, position).waits] or [
            position
        ]
        calls = [(p, self.program.call(rank, p)) for p in at]
        others = {
            r
            for _, call in calls
            for piece in call.parts or (call,)
            for r in OPERATIONS[piece.op].parties(piece)
        } - {rank}
        needs = tuple(need for p, call in calls for need in self._needs(rank, p, call))
        return RankWait(needs, tuple(sorted(r for r in others if 0 <= r < self.program.world_size)))

    def _needs(self, rank: int, position: int, call: ResolvedCall) -> Iterator[WaitDependency]:
        for request, piece in _requests(rank, position, call):
            if OPERATIONS[piece.op].kind == "p2p":
                ranks, any_one = self._peers(request, piece)
            else:
                there = self.calls.joined[self.calls.meeting[request]]
                members = call.ranks if call.op == "new_group" else call.group.ranks
                ranks, any_one = tuple(r for r in members if r not in there), False
            if ranks:
                yield WaitDependency(position, request.part, ranks, any_one)

    def _peers(self, request: PostedRequest, call: ResolvedCall) -> tuple[tuple[int, ...], bool]:
        """Whose message or receive is missing, and whether any one of them would do."""
        me, calls = call.rank, self.calls
        if call.peer is None and request not in self.sources:
            return () if request in self.served else tuple(
                r for r in call.group.ranks if r != me
            ), True
        peer = self.sources.get(request, call.peer if call.peer is not None else me)
        sending = OPERATIONS[call.op].direction == "send"
        channel = (
            (call.group.id, me, peer, call.tag) if sending else (call.group.id, peer, me, call.tag)
        )
        mine, theirs = (calls.sends, calls.receives) if sending else (calls.receives, calls.sends)
        done = request in mine[channel] and mine[channel].index(request) < len(theirs[channel])
        return () if done or not 0 <= peer < self.program.world_size else (peer,), False


# --- receives from any source ---


class DivergingReceive(NamedTuple):
    """A receive from any source that took a message of ``source``, and in the simulation one of
    ``simulated``.
    """

    request: PostedRequest
    source: int
    simulated: int


def diverging_receives(
    sources: Mapping[PostedRequest, int], simulated: Trace
) -> tuple[DivergingReceive, ...]:
    """Which receives from any source met another rank than in a simulated run of the same program.
    Those that met nobody there are left out."""
    if not sources:
        return ()
    senders = {
        m: rank
        for m, rank, op in zip(
            *(simulated[name].tolist() for name in ("match", "rank", "op")), strict=True
        )
        if m >= 0 and OPERATIONS[simulated.text("op", op)].direction == "send"
    }
    columns = (simulated[name].tolist() for name in ("rank", "position", "part", "match"))
    there = {
        PostedRequest(rank, position, part): senders[m]
        for rank, position, part, m in zip(*columns, strict=True)
        if m in senders
    }
    opened = ((request, source, there.get(request)) for request, source in sorted(sources.items()))
    return tuple(
        DivergingReceive(request, source, other)
        for request, source, other in opened
        if other not in (None, source)
    )
