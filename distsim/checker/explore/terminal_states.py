"""Interpret a terminal state of the explorer: blocked ranks, mismatches, unreceived messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distsim.checker.explore.encoding import AwaitedRequest
from distsim.checker.explore.potential_mismatches import PostedCall
from distsim.checker.explore.steps import SearchState, StateMachine, holds
from distsim.checker.matching.call_mismatch import CallMismatch, message_mismatch
from distsim.checker.matching.channel_layout import ChannelLayout
from distsim.findings.final_state import BlockedRank, FinalState, RankEnd, WaitDependency


def final_state_at(machine: StateMachine, state: SearchState) -> FinalState:
    """The record of a state in which no receive can take a message."""
    ends: list[RankEnd] = []
    blocked: list[BlockedRank] = []
    for rank, rank_stops in enumerate(machine.encoding.rank_stops):
        if state[rank] == machine.ends[rank]:
            status, end = rank_stops.status, rank_stops.end
            ends.append(RankEnd(rank, status, end, message=rank_stops.message))  # type: ignore[arg-type]
            continue
        position = machine.encoding.stops[rank][state[rank]].position
        ends.append(RankEnd(rank, "blocked", position))
        blocked.append(BlockedRank(rank, position, tuple(_open_waits(machine, state, rank))))
    unreceived = sorted(_unreceived_messages(machine, state))
    return FinalState(tuple(ends), tuple(blocked), tuple(unreceived))


def _open_requests(machine: StateMachine, state: SearchState, rank: int) -> list[AwaitedRequest]:
    """The requests that a blocked rank still waits for."""
    stop = machine.encoding.stops[rank][state[rank]]
    return [request for request in stop.requests if not holds(state, request.tests)]


def _open_waits(machine: StateMachine, state: SearchState, rank: int) -> Iterator[WaitDependency]:
    for request in _open_requests(machine, state, rank):
        missing = _missing_ranks(state, request)
        yield WaitDependency(request.position, request.part, missing, request.any)


def _missing_ranks(state: SearchState, request: AwaitedRequest) -> tuple[int, ...]:
    """The ranks that have not arrived; all ranks, if they have arrived and mismatch."""
    if request.any:
        return request.ranks
    # A request may have one more test that never holds, which belongs to no rank.
    tested = zip(request.ranks, request.tests, strict=False)
    missing = tuple(rank for rank, test in tested if not holds(state, (test,)))
    return missing or request.ranks


def _unreceived_messages(
    machine: StateMachine, state: SearchState
) -> Iterator[tuple[int, int, int]]:
    """(sender, position, part) of the messages that are sent and that no receive has taken."""
    encoding = machine.encoding
    for pair, messages in enumerate(machine.messages):
        sender = machine.sender_of[pair]
        # Of these messages the state counts how many were taken, because any receive of the box
        # may take them.
        sent, taken = machine.sent[pair][state[sender]], state[encoding.consumed + pair]
        for message in messages[taken:sent]:
            yield sender, message.position, message.part
    layout = encoding.layout
    for channel, messages in encoding.sends.items():
        if channel in encoding.box_of:
            continue
        sender, receiver = layout.chan_src[channel], layout.chan_dst[channel]
        # Every receive names its sender, so the k-th receive takes the k-th message.
        taken = _posted_by(encoding.receives.get(channel, ()), state[receiver])
        sent = _posted_by(messages, state[sender])
        for message in messages[taken:sent]:
            yield sender, message.position, message.part


def _posted_by(calls: Sequence[PostedCall], stop: int) -> int:
    """How many of a rank's calls are posted once it has passed ``stop`` stops."""
    return sum(call.stop <= stop for call in calls)


def deadlock_core(
    machine: StateMachine, state: SearchState, blocked: Sequence[int]
) -> tuple[int, ...]:
    """The blocked ranks on a wait-for cycle, and those that wait directly for an exited rank.

    The result equals the core of `diagnosis.wait_for_graph.build_wait_for_graph`. This version has
    no words for reports and keeps sets of ranks as bits of integers, because it runs for every new
    set of blocked ranks.
    """
    inside = sum(1 << rank for rank in blocked)
    edges = [0] * machine.size
    hopeless = 0
    for rank in blocked:
        for request in _open_requests(machine, state, rank):
            awaited = sum(1 << other for other in _missing_ranks(state, request))
            edges[rank] |= awaited & inside
            if request.any:
                # One message is enough, so it is hopeless only if all its senders have exited.
                cannot_complete = not awaited & inside
            else:
                cannot_complete = bool(awaited & ~inside)
            if cannot_complete:
                hopeless |= 1 << rank
    return tuple(rank for rank in blocked if hopeless >> rank & 1 or _is_on_cycle(edges, rank))


def _is_on_cycle(edges: list[int], start: int) -> bool:
    """Whether a rank reaches itself; ``edges[rank]`` has a bit for each rank it waits for."""
    seen, frontier = 0, edges[start]
    while frontier:
        if frontier >> start & 1:
            return True
        seen |= frontier
        reached, bits = 0, frontier
        while bits:
            lowest = bits & -bits
            reached |= edges[lowest.bit_length() - 1]
            bits ^= lowest
        frontier = reached & ~seen
    return False


class MismatchCollector:
    """Collects the mismatches of terminal states.

    In most programs no calls can mismatch, and there is nothing to do.
    """

    def __init__(self, machine: StateMachine) -> None:
        self.machine = machine
        self.potential = machine.encoding.potential_mismatches
        self.layout: ChannelLayout = machine.encoding.layout
        self._collectives: dict[tuple[int, int], CallMismatch] = {}
        self._messages: dict[tuple[int, int], CallMismatch] = {}

    def has_mismatch(self, state: SearchState) -> bool:
        """Whether calls that met in a terminal state mismatch; records the mismatches."""
        # Both must run: each records what it finds.
        in_collectives = self._record_collectives(state)
        in_messages = self._record_messages(state)
        return in_collectives or in_messages

    def _record_collectives(self, state: SearchState) -> bool:
        """Record the first mismatch of each sequence: the later calls there never complete."""
        mismatched_sequences: set[int] = set()
        for sequence, number, calls in self.potential.sequences:
            arrived = tuple(rank for rank, call in calls if state[rank] >= call.stop)
            # A call that only one member has reached cannot differ from another one.
            if sequence in mismatched_sequences or len(arrived) < 2:
                continue
            mismatch = self.potential.mismatch_of(sequence, number, arrived)
            if mismatch is not None:
                mismatched_sequences.add(sequence)
                self._collectives.setdefault((sequence, number), mismatch)
        return bool(mismatched_sequences)

    def _record_messages(self, state: SearchState) -> bool:
        found = False
        for channel, number, message, receive in self.potential.pairs:
            sender, receiver = self.layout.chan_src[channel], self.layout.chan_dst[channel]
            if state[sender] >= message.stop and state[receiver] >= receive.stop:
                found = True
                mismatch = self._message_mismatch(number, sender, message, receiver, receive)
                self._messages.setdefault((channel, number), mismatch)
        return found

    def _message_mismatch(
        self, number: int, sender: int, message: PostedCall, receiver: int, receive: PostedCall
    ) -> CallMismatch:
        sent = (sender, message.position, message.part)
        received = (receiver, receive.position, receive.part)
        return message_mismatch(self.layout.program, number, sent, received, 0)

    def mismatches(self) -> tuple[CallMismatch, ...]:
        """All recorded mismatches, and those of the messages of boxes."""
        machine = self.machine
        in_boxes = []
        for pair, number, receive in machine.mismatched:
            sender, receiver = machine.sender_of[pair], machine.receiver[machine.box_of_pair[pair]]
            message = machine.messages[pair][number]
            in_boxes.append(self._message_mismatch(number, sender, message, receiver, receive))
        return (*self._collectives.values(), *self._messages.values(), *in_boxes)
