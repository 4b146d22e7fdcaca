"""What an ended exploration state says: who is blocked on whom, what met and does not fit, what was
never received.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distsim.checker.explore.encoding import AwaitedRequest
from distsim.checker.explore.potential_mismatches import PostedCall
from distsim.checker.explore.steps import SearchState, StateMachine
from distsim.checker.matching.call_mismatch import CallMismatch, message_mismatch
from distsim.checker.matching.channel_layout import ChannelLayout
from distsim.findings.final_state import BlockedRank, FinalState, RankEnd, WaitDependency


def open_needs(machine: StateMachine, state: SearchState, rank: int) -> list[WaitDependency]:
    """What a blocked rank still waits for."""
    out = []
    for request in machine.tables.stops[rank][state[rank]].requests:
        if all(state[i] >= v for i, v in request.tests):
            continue
        out.append(
            WaitDependency(
                request.position, request.part, _missing_ranks(state, request), request.any
            )
        )
    return out


def _missing_ranks(state: SearchState, request: AwaitedRequest) -> tuple[int, ...]:
    """The ranks that have not come; all, where it does not fit what came."""
    if request.any:
        return request.ranks
    return (
        tuple(r for r, (i, v) in zip(request.ranks, request.tests, strict=False) if state[i] < v)
        or request.ranks
    )


def standstill_at(machine: StateMachine, state: SearchState) -> FinalState:
    """The record of a state in which nothing is left to take."""
    ends, blocked = [], []
    for rank, posts in enumerate(machine.tables.posts):
        if state[rank] == machine.ends[rank]:
            ends.append(RankEnd(rank, posts.status, posts.end, message=posts.message))  # type: ignore[arg-type]
            continue
        position = machine.tables.stops[rank][state[rank]].position
        ends.append(RankEnd(rank, "blocked", position))
        blocked.append(BlockedRank(rank, position, tuple(open_needs(machine, state, rank))))
    return FinalState(
        tuple(ends), tuple(blocked), tuple(sorted(_unreceived_messages(machine, state)))
    )


def _unreceived_messages(
    machine: StateMachine, state: SearchState
) -> Iterator[tuple[int, int, int]]:
    tables = machine.tables
    for pair, messages in enumerate(machine.messages):
        sender = machine.sender_of[pair]
        there = machine.sent[pair][state[sender]]
        yield from (
            (sender, m.position, m.part) for m in messages[state[tables.gone + pair] : there]
        )
    layout = tables.layout
    for channel, sends in tables.sends.items():
        if channel not in tables.box_of:
            sender, receiver = layout.chan_src[channel], layout.chan_dst[channel]
            taken = sum(p.stop <= state[receiver] for p in tables.receives.get(channel, ()))
            there = sum(p.stop <= state[sender] for p in sends)
            yield from ((sender, m.position, m.part) for m in sends[taken:there])


def deadlock_core(
    machine: StateMachine, state: SearchState, blocked: Sequence[int]
) -> tuple[int, ...]:
    """Blocked ranks on a circle, and those that wait directly for one who has left: as
    `waitfor.wait_for`, without its words.
    """
    inside = sum(1 << r for r in blocked)
    edges = [0] * machine.size
    lost = 0
    for rank in blocked:
        for request in machine.tables.stops[rank][state[rank]].requests:
            if all(state[i] >= v for i, v in request.tests):
                continue
            towards = sum(1 << r for r in _missing_ranks(state, request))
            edges[rank] |= towards & inside
            if towards & ~inside if not request.any else not towards & inside:
                lost |= 1 << rank
    return tuple(r for r in blocked if lost >> r & 1 or _is_on_cycle(edges, r))


def _is_on_cycle(edges: list[int], start: int) -> bool:
    """A rank is on a circle: it comes back to itself."""
    seen, new = 0, edges[start]
    while new:
        if new >> start & 1:
            return True
        seen |= new
        step, bits = 0, new
        while bits:
            low = bits & -bits
            step |= edges[low.bit_length() - 1]
            bits ^= low
        new = step & ~seen
    return False


class MismatchCollector:
    """Finds what met and differs in ended states. Nothing to do where all that can meet is alike,
    as in most programs.
    """

    def __init__(self, machine: StateMachine) -> None:
        self.machine, self.may_mismatch = machine, machine.tables.may_mismatch
        self.layout: ChannelLayout = machine.tables.layout
        self.found: dict[object, CallMismatch] = {}

    def bad(self, state: SearchState) -> bool:
        """Something that met in an ended state differs; what, goes to ``found``."""
        bad, seen = False, set()
        for sequence, n, calls in self.may_mismatch.sequences:
            came = tuple(rank for rank, call in calls if state[rank] >= call.stop)
            if sequence in seen or len(came) < 2:
                continue
            unlike = self.may_mismatch.judge(sequence, n, came)
            if unlike is not None:
                bad = True
                seen.add(sequence)
                self.found.setdefault((sequence, n), unlike)
        for channel, k, s, r in self.may_mismatch.pairs:
            src, dst = self.layout.chan_src[channel], self.layout.chan_dst[channel]
            if state[src] >= s.stop and state[dst] >= r.stop:
                bad = True
                self.found.setdefault((-1, channel, k), self._pair(k, src, s, dst, r))
        return bad

    def _pair(self, k: int, src: int, s: PostedCall, dst: int, r: PostedCall) -> CallMismatch:
        return message_mismatch(
            self.layout.program, k, (src, s.position, s.part), (dst, r.position, r.part), 0
        )

    def mismatches(self) -> tuple[CallMismatch, ...]:
        """All that was found, with the messages of open boxes that did not fit."""
        machine = self.machine
        opened = []
        for pair, k, receive in machine.unfit:
            receiver = machine.receiver[machine.box_of_pair[pair]]
            opened.append(
                self._pair(k, machine.sender_of[pair], machine.messages[pair][k], receiver, receive)
            )
        collective = [u for u in self.found.values() if u.sequence >= 0]
        return (*collective, *(u for u in self.found.values() if u.sequence < 0), *opened)
