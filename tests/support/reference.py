"""A deliberately naive simulator of the contract's three readings, to hold the real ones to.

It shares nothing with them: it works on the plain calls that `build_program` takes, keeps no
queues, and asks every rank again and again, each time from the beginning, until nothing changes. No
receives from any source, no faults, no invalid calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Plain = Mapping[str, Any]
Request = tuple[int, int, int]  # rank, index of the call, index in its batch (-1)

MESSAGES = ("send", "recv", "isend", "irecv")
LOCAL = ("compute", "wait", "synchronize")


class Reference:
    def __init__(
        self,
        world_size: int,
        programs: Mapping[int, Sequence[Plain]],
        groups: Mapping[str, Sequence[int]],
        reading: str,
    ) -> None:
        self.size, self.programs, self.reading = world_size, programs, reading
        self.groups = {
            "world": list(range(world_size)),
            **{name: sorted(ranks) for name, ranks in groups.items()},
        }
        self.reached = dict.fromkeys(
            range(world_size), 0
        )  # calls begun: 0 … reached (the last one may be blocking)

    def stuck(self) -> tuple[int, ...]:
        """The ranks that never come to their end."""
        moved = True
        while moved:
            moved = False
            for rank in range(self.size):
                while self.reached[rank] < len(self.programs[rank]) and self.may_leave(
                    rank, self.reached[rank]
                ):
                    self.reached[rank] += 1
                    moved = True
        return tuple(r for r in range(self.size) if self.reached[r] < len(self.programs[r]))

    def begun(self, rank: int) -> list[tuple[Request, Plain]]:
        """All that a rank has posted, batches in pieces."""
        posted = []
        for k, call in enumerate(self.programs[rank][: self.reached[rank] + 1]):
            pieces = (
                [(i, piece) for i, piece in enumerate(call["ops"])]
                if "ops" in call
                else [(-1, call)]
            )
            posted += [((rank, k, i), piece) for i, piece in pieces]
        return posted

    def may_leave(self, rank: int, k: int) -> bool:
        call = self.programs[rank][k]
        if call["op"] == "wait":
            handles = set(call["handles"])
            mine = [i for i in range(k) if self.programs[rank][i].get("handle") in handles]
            newest = {self.programs[rank][i]["handle"]: i for i in mine}
            return all(
                self.is_done(request) for i in newest.values() for request in self.requests(rank, i)
            )
        if (
            call["op"] in LOCAL
            or call["op"] in ("isend", "irecv")
            or call.get("async")
            or call.get("handle")
        ):
            return True
        return all(self.is_done(request) for request in self.requests(rank, k))

    def requests(self, rank: int, k: int) -> list[Request]:
        return [request for request, _ in self.begun(rank) if request[1] == k]

    def is_done(self, request: Request) -> bool:
        rank, k, i = request
        call = self.programs[rank][k] if i < 0 else self.programs[rank][k]["ops"][i]
        if call["op"] in MESSAGES:
            return self.message_is_done(request, call)
        return self.collective_is_done(request, call)

    def message_is_done(self, request: Request, call: Plain) -> bool:
        sends = call["op"].endswith("send")
        if sends and self.reading == "buffered":
            return True
        me, peer = request[0], call["peer"]
        mine = [r for r, c in self.begun(me) if self.same_way(c, call, call["op"][-4:], peer)]
        theirs = [
            r
            for r, c in self.begun(peer)
            if self.same_way(c, call, "recv" if sends else "send", me)
        ]
        return mine.index(request) < len(theirs)

    def same_way(self, call: Plain, like: Plain, direction: str, peer: int) -> bool:
        def channel(c: Plain) -> tuple[Any, Any]:
            return c.get("tag", 0), c.get("group") or "world"

        return (
            call["op"] in MESSAGES
            and call["op"].endswith(direction)
            and call["peer"] == peer
            and channel(call) == channel(like)
        )

    def collective_is_done(self, request: Request, call: Plain) -> bool:
        group, me = call.get("group") or "world", request[0]
        number = self.on(me, group).index(request)
        came = [rank for rank in self.groups[group] if len(self.on(rank, group)) > number]
        return set(self.needs(call, me, self.groups[group])) <= set(came)

    def on(self, rank: int, group: str) -> list[Request]:
        """A rank's collectives on a group, so far."""
        return [
            r
            for r, c in self.begun(rank)
            if c["op"] not in (*MESSAGES, *LOCAL) and (c.get("group") or "world") == group
        ]

    def needs(self, call: Plain, me: int, members: list[int]) -> list[int]:
        root, op = int(call.get("root") or 0), call["op"]
        if self.reading == "rendezvous" or op not in ("broadcast", "scatter", "reduce", "gather"):
            return members
        gives = (me == root) == (op in ("broadcast", "scatter"))
        if self.reading == "early":
            return members if me == root else [root]
        return [] if gives else members if me == root else [root]
