"""Which calls had been posted when a run stopped, what of them met, and what each stuck rank therefore waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from distsim.ops.records import Call
from distsim.ops.table import OPS
from distsim.program.records import Program
from distsim.standstill import Need, RankEnd


class Request(NamedTuple):
    """A posted message or receive: the rank, the call's position and its part of a batch (-1: none)."""

    rank: int
    position: int
    part: int


Channel = tuple[int, int, int, int]  # group, sender, receiver, tag


class Posted:
    """Counts of all that was posted. ``sources``: whom receives from any source met, by request, where they say so."""

    def __init__(self, program: Program, ends: Sequence[RankEnd], sources: Mapping[Request, int]) -> None:
        self.program, self.sources = program, sources
        self.sends: dict[Channel, list[Request]] = defaultdict(list)
        self.receives: dict[Channel, list[Request]] = defaultdict(list)
        self.open: dict[tuple[int, int, int], list[Request]] = defaultdict(list)  # (group, receiver, tag)
        self.joined: dict[tuple[str, int, int], set[int]] = defaultdict(set)  # (kind, group, n)
        self.number: dict[tuple[int, int], tuple[str, int, int]] = {}
        self.met: set[Request] = set()  # open receives that took a message
        for end in ends:
            self._rank(end)
        self._serve()

    def _rank(self, end: RankEnd) -> None:
        """All calls that the rank came to; the one it was in counts where it was not ended before it."""
        inside = end.status in ("blocked", "raised", "crashed", "silent")
        count: dict[tuple[str, int], int] = defaultdict(int)
        for position, call in self.program.calls_of(end.rank):
            if end.status == "absent" or position > end.position or (position == end.position and not inside):
                return
            kind = OPS[call.op].kind
            if kind == "collective" or call.op == "new_group":
                lane = (kind, call.group.id)
                self.number[end.rank, position] = (*lane, count[lane])
                self.joined[*lane, count[lane]].add(end.rank)
                count[lane] += 1
            for part, message in _messages(call):
                self._message(Request(end.rank, position, part), message)

    def _message(self, request: Request, call: Call) -> None:
        group, me = call.group.id, call.rank
        peer = call.peer if call.peer is not None else self.sources.get(request)
        if OPS[call.op].direction == "send":
            self.sends[group, me, call.peer or 0, call.tag].append(request)
        elif peer is None:
            self.open[group, me, call.tag].append(request)
        else:
            self.receives[group, peer, me, call.tag].append(request)

    def _serve(self) -> None:
        """Receives from any source that nobody has told of take what is there, in order of senders."""
        for (group, me, tag), waiting in self.open.items():
            channels = sorted(c for c in self.sends if (c[0], c[2], c[3]) == (group, me, tag))
            for request in waiting:
                free = next((c for c in channels if len(self.sends[c]) > len(self.receives[c])), None)
                if free is not None:
                    self.receives[free].append(request)
                    self.met.add(request)

    # --- what is missing ---
    def needs(self, rank: int, position: int) -> tuple[Need, ...]:
        """The needs of a rank that stands in a call: of the call itself, or of the requests that it waits for."""
        if position >= len(self.program.code(rank).calls):
            return ()
        code_call = self.program.code_call(rank, position)
        at = [position - distance for distance in code_call.waits] or [position]
        return tuple(need for p in at for need in self._of_call(rank, p))

    def others(self, rank: int, position: int) -> tuple[int, ...]:
        """The other ranks of the call that a rank stands in, or of the calls whose requests it waits for."""
        if position >= len(self.program.code(rank).calls):
            return ()
        waits = self.program.code_call(rank, position).waits
        calls = [self.program.call(rank, position - distance) for distance in waits or (0,)]
        found = {r for call in calls for c in (call.parts or (call,)) for r in OPS[c.op].parties(c)}
        return tuple(sorted(r for r in found - {rank} if 0 <= r < self.program.world_size))

    def _of_call(self, rank: int, position: int) -> Iterator[Need]:
        call = self.program.call(rank, position)
        if (rank, position) in self.number:
            there = self.joined[self.number[rank, position]]
            members = call.ranks if call.op == "new_group" else call.group.ranks
            missing = tuple(r for r in members if r not in there)
            if missing:
                yield Need(position, -1, missing)
        for part, message in _messages(call):
            request = Request(rank, position, part)
            ranks, any_one = self._lacking(request, message)
            if ranks:
                yield Need(position, part, ranks, any_one)

    def _lacking(self, request: Request, call: Call) -> tuple[tuple[int, ...], bool]:
        group, me, tag = call.group.id, call.rank, call.tag
        if call.peer is None and request not in self.sources:
            others = tuple(r for r in call.group.ranks if r != me)
            return (() if request in self.met else others), True
        peer = self.sources.get(request, call.peer if call.peer is not None else me)
        sending = OPS[call.op].direction == "send"
        channel = (group, me, peer, tag) if sending else (group, peer, me, tag)
        mine, theirs = (self.sends, self.receives) if sending else (self.receives, self.sends)
        here = mine[channel]
        done = request in here and here.index(request) < len(theirs[channel])
        inside = 0 <= peer < self.program.world_size
        return (() if done or not inside else (peer,)), False

    def unreceived(self) -> tuple[tuple[int, int, int], ...]:
        """Messages that no receive was posted for."""
        left = [r for channel, sent in self.sends.items() for r in sent[len(self.receives[channel]) :]]
        return tuple(sorted((r.rank, r.position, r.part) for r in left))


def _messages(call: Call) -> list[tuple[int, Call]]:
    if call.parts:
        return list(enumerate(call.parts))
    return [(-1, call)] if OPS[call.op].kind == "p2p" else []


__all__ = ["Posted", "Request"]
