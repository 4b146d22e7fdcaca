"""Matches posted calls across ranks, and derives what each blocked rank waits for.

Key idea: torch.distributed matches by order. A channel is a group, sender, receiver and tag. The
k-th message of a channel meets its k-th receive. The n-th collective of a group on one rank meets
the n-th on the others. So it is enough to know how many calls each rank has posted; no clock is
needed.

Only a receive from any source is ambiguous. If it reported its source, that source is taken;
otherwise it takes the first available message in the order of senders, which is a guess.

The same matching numbers the matches of a recorded trace (`merge_tables`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from distsim.findings.final_state import WaitDependency
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.trace.model import Trace

Key = TypeVar("Key", bound=Hashable)

#: In place of the number of a part of a batch: the call itself.
WHOLE_CALL: Final = -1


class MessageChannel(NamedTuple):
    """Messages of one channel are received in the order in which they were sent."""

    group: int
    sender: int
    receiver: int
    tag: int


class AnySourceChannel(NamedTuple):
    """The receives from any source that compete for the same messages."""

    group: int
    receiver: int
    tag: int


class CollectiveKey(NamedTuple):
    """One collective of a group: the ``number``-th of its kind on each member."""

    kind: str
    group: int
    number: int


class CallMatching(Generic[Key]):
    """Posted calls, registered under keys of the caller's choice.

    Invariant: the lists hold the keys in posting order, so equal indices of ``sends`` and
    ``receives`` in one channel have met. ``any_source`` holds receives whose source is unknown;
    `_match_any_source` moves them to ``receives``.
    """

    def __init__(self) -> None:
        self.sends: dict[MessageChannel, list[Key]] = defaultdict(list)
        self.receives: dict[MessageChannel, list[Key]] = defaultdict(list)
        self.any_source: dict[AnySourceChannel, list[Key]] = defaultdict(list)
        self.participants: dict[CollectiveKey, dict[int, Key]] = defaultdict(dict)  # by rank
        self.collective_of: dict[Key, CollectiveKey] = {}
        self._posted: dict[tuple[str, int, int], int] = defaultdict(int)  # (kind, group, rank)

    def post(self, key: Key, call: ResolvedCall, source: int | None) -> None:
        """Register a send, a receive or a collective.

        ``source``: the rank whose message a receive from any source took, if the receive reported
        it.
        """
        operation = OPERATIONS[call.op]
        group, rank = call.group.id, call.rank
        if operation.kind != "p2p":
            self._post_collective(key, operation.kind, group, rank)
            return
        if operation.direction == "send":
            self.sends[MessageChannel(group, rank, call.peer or 0, call.tag)].append(key)
            return
        sender = call.peer if call.peer is not None else source
        if sender is None:
            self.any_source[AnySourceChannel(group, rank, call.tag)].append(key)
        else:
            self.receives[MessageChannel(group, sender, rank, call.tag)].append(key)

    def _post_collective(self, key: Key, kind: str, group: int, rank: int) -> None:
        number = self._posted[kind, group, rank]
        self._posted[kind, group, rank] = number + 1
        collective = CollectiveKey(kind, group, number)
        self.collective_of[key] = collective
        self.participants[collective][rank] = key

    def message_pairs(self) -> Iterator[tuple[Key, Key]]:
        """(send, receive) of every message that was received."""
        for channel, sends in self.sends.items():
            yield from zip(sends, self.receives.get(channel, ()), strict=False)

    def matches(self) -> list[tuple[Key, ...]]:
        """The keys of calls that met: messages first, then collectives."""
        collectives = [tuple(keys.values()) for keys in self.participants.values() if len(keys) > 1]
        return [*self.message_pairs(), *collectives]


# --- what is missing ---


class PostedRequest(NamedTuple):
    """A posted call, or a part of a posted batch (``part`` is `WHOLE_CALL` otherwise)."""

    rank: int
    position: int
    part: int


class RankWait(NamedTuple):
    """What a rank that is blocked in a call waits for.

    ``needs``: counterparts that no rank has posted. ``others``: the other ranks of the calls whose
    completion is awaited, whether they have posted or not.
    """

    needs: tuple[WaitDependency, ...] = ()
    others: tuple[int, ...] = ()


class WaitAnalysis(NamedTuple):
    """Which rank waits for which.

    ``at``: the wait of a rank that is in a call, by (rank, position). ``unreceived``: messages
    without a receive. ``taken``: the message that each receive from any source took, as far as
    these receives reported their source.
    """

    at: dict[tuple[int, int], RankWait]
    unreceived: tuple[PostedRequest, ...]
    taken: Mapping[PostedRequest, PostedRequest]


def analyze_waits(
    program: Program,
    posted: Sequence[int],
    stuck: Collection[tuple[int, int]],
    sources: Mapping[PostedRequest, int],
) -> WaitAnalysis:
    """Match all posted calls and find what the stuck ones lack.

    ``posted``: how many calls of its program each rank has posted. ``stuck``: the (rank, position)
    of interest. ``sources``: the reported sources of receives from any source; the other receives
    take the available messages in the order of senders.
    """
    calls = _matched_calls(program, posted, sources)
    taken = {receive: send for send, receive in calls.message_pairs() if receive in sources}
    served = _match_any_source(calls)
    missing = _MissingCalls(program, calls, sources, served)
    unreceived: list[PostedRequest] = []
    for channel, sends in calls.sends.items():
        unreceived += sends[len(calls.receives[channel]) :]
    waits = {(rank, position): missing.wait(rank, position) for rank, position in stuck}
    return WaitAnalysis(waits, tuple(sorted(unreceived)), taken)


def _matched_calls(
    program: Program, posted: Sequence[int], sources: Mapping[PostedRequest, int]
) -> CallMatching[PostedRequest]:
    calls = CallMatching[PostedRequest]()
    for rank, count in enumerate(posted):
        for position, call in program.calls_of(rank):
            if position >= count:
                break
            for request, piece in _requests(rank, position, call):
                calls.post(request, piece, sources.get(request))
    return calls


def _requests(
    rank: int, position: int, call: ResolvedCall
) -> list[tuple[PostedRequest, ResolvedCall]]:
    """The requests of a call that meet calls of other ranks: the parts of a batch, or itself."""
    if call.parts:
        return [
            (PostedRequest(rank, position, part), piece) for part, piece in enumerate(call.parts)
        ]
    if OPERATIONS[call.op].kind in ("p2p", "collective") or call.op == "new_group":
        return [(PostedRequest(rank, position, WHOLE_CALL), call)]
    return []


def _match_any_source(calls: CallMatching[PostedRequest]) -> set[PostedRequest]:
    """Give available messages to receives whose source is unknown; return the served receives."""
    served = set[PostedRequest]()
    for competing, requests in calls.any_source.items():
        channels = sorted(
            channel
            for channel in calls.sends
            if AnySourceChannel(channel.group, channel.receiver, channel.tag) == competing
        )
        for request in requests:
            channel = _first_channel_with_message(calls, channels)
            if channel is not None:
                calls.receives[channel].append(request)
                served.add(request)
    return served


def _first_channel_with_message(
    calls: CallMatching[PostedRequest], channels: Sequence[MessageChannel]
) -> MessageChannel | None:
    """The first of these channels with more messages than receives."""
    for channel in channels:
        if len(calls.sends[channel]) > len(calls.receives[channel]):
            return channel
    return None


class _MissingCalls(NamedTuple):
    """What the stuck calls need.

    ``served``: receives from any source, without a reported source, that took a message.
    """

    program: Program
    calls: CallMatching[PostedRequest]
    sources: Mapping[PostedRequest, int]
    served: set[PostedRequest]

    def wait(self, rank: int, position: int) -> RankWait:
        """The wait of a rank that is in a call: for the call itself, or for its requests."""
        if position >= len(self.program.code(rank).calls):
            return RankWait()
        distances = self.program.code_call(rank, position).waits
        awaited = [position - distance for distance in distances] or [position]
        needs: list[WaitDependency] = []
        others = set[int]()
        for awaited_position in awaited:
            call = self.program.call(rank, awaited_position)
            needs += self._needs(rank, awaited_position, call)
            for piece in call.parts or (call,):
                others.update(OPERATIONS[piece.op].parties(piece))
        others.discard(rank)
        world_size = self.program.world_size
        # A call may name an invalid peer; such a rank cannot be waited for.
        valid = sorted(other for other in others if 0 <= other < world_size)
        return RankWait(tuple(needs), tuple(valid))

    def _needs(self, rank: int, position: int, call: ResolvedCall) -> Iterator[WaitDependency]:
        for request, piece in _requests(rank, position, call):
            if OPERATIONS[piece.op].kind != "p2p":
                ranks, any_one = self._missing_members(request, call), False
            elif piece.peer is None and request not in self.sources:
                ranks, any_one = self._possible_senders(request, piece), True
            else:
                ranks, any_one = self._missing_peer(request, piece), False
            if ranks:
                yield WaitDependency(position, request.part, ranks, any_one)

    def _missing_members(self, request: PostedRequest, call: ResolvedCall) -> tuple[int, ...]:
        """The members of a collective's group that have not posted it."""
        arrived = self.calls.participants[self.calls.collective_of[request]]
        members = call.ranks if call.op == "new_group" else call.group.ranks
        return tuple(rank for rank in members if rank not in arrived)

    def _possible_senders(self, request: PostedRequest, call: ResolvedCall) -> tuple[int, ...]:
        """The ranks whose message would complete a receive from any source."""
        if request in self.served:
            return ()
        return tuple(rank for rank in call.group.ranks if rank != call.rank)

    def _missing_peer(self, request: PostedRequest, call: ResolvedCall) -> tuple[int, ...]:
        """The peer of a message, if it has not posted the counterpart."""
        rank, group, tag = call.rank, call.group.id, call.tag
        peer = self.sources.get(request, call.peer if call.peer is not None else rank)
        if not 0 <= peer < self.program.world_size:
            return ()
        if OPERATIONS[call.op].direction == "send":
            channel = MessageChannel(group, rank, peer, tag)
            own, counterparts = self.calls.sends[channel], self.calls.receives[channel]
        else:
            channel = MessageChannel(group, peer, rank, tag)
            own, counterparts = self.calls.receives[channel], self.calls.sends[channel]
        has_met = request in own and own.index(request) < len(counterparts)
        return () if has_met else (peer,)


# --- receives from any source ---


class DivergingReceive(NamedTuple):
    """A receive from any source that took another rank's message than in the simulation.

    ``source``: the sender in the real run; ``simulated``: the sender in the simulation.
    """

    request: PostedRequest
    source: int
    simulated: int


def diverging_receives(
    sources: Mapping[PostedRequest, int], simulated: Trace
) -> tuple[DivergingReceive, ...]:
    """The receives from any source that took another rank's message than in the simulated run.

    Receives that took no message in the simulation are omitted.
    """
    if not sources:
        return ()
    simulated_sources = _simulated_sources(simulated)
    found = []
    for request, source in sorted(sources.items()):
        simulated_source = simulated_sources.get(request)
        if simulated_source is not None and simulated_source != source:
            found.append(DivergingReceive(request, source, simulated_source))
    return tuple(found)


def _simulated_sources(trace: Trace) -> dict[PostedRequest, int]:
    """The sender for every matched message of a trace, by request (sends included)."""
    columns = [trace[name].tolist() for name in ("rank", "position", "part", "op", "match")]
    rows = [row for row in zip(*columns, strict=True) if row[-1] >= 0]
    senders = {
        match: rank
        for rank, _, _, op, match in rows
        if OPERATIONS[trace.text("op", op)].direction == "send"
    }
    return {
        PostedRequest(rank, position, part): senders[match]
        for rank, position, part, _, match in rows
        if match in senders
    }
