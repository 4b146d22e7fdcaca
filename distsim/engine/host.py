"""The fast engine of the back ends whose host waits for its own requests: gloo and mpi.

A flattened form of the explicit rules (`distsim.rules`), for programs in which nobody's order of arrival decides anything: every
receive names its source, no link is shared, no queue of a back end fills up, no rank dies (`why_not`). Then each rank can run ahead
on a clock of its own. A completion time is fixed where the two sides meet, and simpy is entered only where a rank really has to wait.
`tests/test_engines_agree.py` holds this engine to the time-ordered one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Hashable
from typing import Any

import numpy as np
import simpy

from distsim.cost import CostModel
from distsim.engine.fill import fill
from distsim.engine.flat import BLOCKING, COMPUTE, IRECV, ISEND, JOIN, WAIT, Disagree, Flat, Prices, flatten, of_row, varies
from distsim.engine.record import Columns
from distsim.engine.wake import Wake
from distsim.ops.records import Group
from distsim.ops.table import OPS
from distsim.profiles import Profile
from distsim.program.records import Code, CodeCall, Program, at
from distsim.standstill import Blocked, Need, RankEnd, Standstill

_Process = Generator[Any, Any, None]


class _Rank:
    """A rank's host: the row it waits for (-1: none), the row of the call it is in (-1: at its end), the event that lets it go on."""

    __slots__ = ("counts", "event", "now", "on", "rank", "row")

    def __init__(self, rank: int) -> None:
        self.rank, self.on, self.row, self.now = rank, -1, 0, 0
        self.counts: dict[int, int] = {}  # group -> collectives so far
        self.event: Any = None


class _Channel:
    """One (group, source, destination, tag): what was posted on one side and not yet met by the other."""

    __slots__ = ("price", "recvs", "sends")

    def __init__(self, price: Prices) -> None:
        self.sends: deque[tuple[int, int, int, int, _Rank]] = deque()  # time, row, bytes, signature, host
        self.recvs: deque[tuple[int, int, int, _Rank]] = deque()  # time, row, signature, host
        self.price = price


class _Meeting:
    """One collective call of a group on its way: who has come, when, and what they wait for."""

    __slots__ = ("came", "group", "latest", "needs", "price", "rows", "signature")

    def __init__(self, signature: int, price: int, group: Group, needs: dict[int, set[int]] | None) -> None:
        self.came: dict[int, int] = {}  # rank -> time
        self.rows: dict[int, tuple[int, _Rank]] = {}
        self.latest, self.signature, self.price, self.group, self.needs = 0, signature, price, group, needs


class HostEngine:
    """One run. `run` returns the columns and the standstill."""

    def __init__(self, program: Program, profile: Profile, cost: CostModel) -> None:
        self.program, self.profile, self.cost = program, profile, cost
        self.env = simpy.Environment()
        self.columns = Columns(program)
        self.eager = eager_limit(program, profile)
        self.channels: dict[tuple[int, int, int, int], _Channel] = {}
        self.links: dict[Hashable, Prices] = {}
        self.meetings: dict[tuple[int, int, Hashable], _Meeting] = {}
        self.ranks = [_Rank(rank) for rank in range(program.world_size)]

    def run(self) -> tuple[Columns, Standstill]:
        codes = [flatten(self.program, self.cost, code) for code in self.program.codes]
        vary = [varies(calls) for calls in codes]
        for rank, me in enumerate(self.ranks):
            code, row = self.program.code(rank), self.program.row_of[rank]
            number = self.program.code_of[rank]
            calls = of_row(codes[number], vary[number], code, row)
            self.env.process(self._host(me, calls, self.columns.base[rank], *self._channels(rank, code, row)))
        self.env.run()
        fill(self.program, self.columns, {me.rank: me.row for me in self.ranks if me.row >= 0}, self.eager, self.profile.lock)
        return self.columns, self._standstill()

    def _channels(self, rank: int, code: Code, row: int) -> tuple[list[_Channel], list[_Channel]]:
        """For each port of the code, this rank's channels out and in."""
        keys = [(at(code.groups[p.group], row), at(p.peer, row), at(p.tag, row)) for p in code.ports]
        return ([self._channel((g, rank, peer, tag)) for g, peer, tag in keys],
                [self._channel((g, peer, rank, tag)) for g, peer, tag in keys])  # fmt: skip

    def _channel(self, key: tuple[int, int, int, int]) -> _Channel:
        found = self.channels.get(key)
        if found is None:
            _, src, dst, _ = key
            link = (self.cost.node(src), self.cost.node(dst)) if self.program.link_faults else self.cost.link_class(src, dst)
            if link not in self.links:
                self.links[link] = Prices(lambda nbytes: self.cost.p2p_ns(src, dst, nbytes))
            found = self.channels[key] = _Channel(self.links[link])
        return found

    def _host(self, me: _Rank, calls: list[Flat], base: int, outs: list[_Channel], ins: list[_Channel]) -> _Process:
        """A rank's program on its own clock. Only what others need is noted on the way; `engine.fill` adds what follows from it."""
        returned, finished, match = self.columns.returned, self.columns.finished, self.columns.match
        eager, meet, env, t = self.eager, self._meet, self.env, 0
        for kind, offset, a, b, c in calls:
            i, way = base + offset, kind & 3
            if way == ISEND:  # a: port, b: bytes, c: signature
                channel = outs[a]
                if channel.recvs:
                    came, other, signature, peer = channel.recvs.popleft()
                    if signature != c:
                        raise Disagree
                    match[i] = other
                    if b > eager:
                        end = finished[i] = finished[other] = (came if came > t else t) + channel.price[b]
                    else:
                        finished[i], end = t, t + channel.price[b]
                        finished[other] = end = came if came > end else end
                    if peer.on == other:
                        peer.event.at(end)
                else:
                    channel.sends.append((t, i, b, c, me))
                    if b <= eager:
                        finished[i] = t
            elif way == IRECV:
                channel = ins[a]
                if channel.sends:
                    came, other, size, signature, peer = channel.sends.popleft()
                    if signature != c:
                        raise Disagree
                    match[i] = other
                    if size > eager:
                        end = finished[i] = finished[other] = (came if came > t else t) + channel.price[size]
                        if peer.on == other:
                            peer.event.at(end)
                    else:
                        end = came + channel.price[size]
                        finished[i] = t if t > end else end
                else:
                    channel.recvs.append((t, i, c, me))
            elif way == JOIN:  # a: group port, b: the call, c: signature
                meet(me, i, t, a, b, c)
            elif kind == COMPUTE:  # a: duration
                t += a
                finished[i] = returned[i] = t
            if kind < BLOCKING:
                continue
            for row in a if kind == WAIT else (offset,):  # the rows that the host must see finished
                end = finished[base + row]
                if end < 0:
                    me.on, me.row, me.now = base + row, offset, t
                    me.event = Wake(env)
                    yield me.event
                    me.on = -1
                    end = finished[base + row]
                if end > t:
                    t = end
            returned[i] = t
        me.row, me.now = -1, t

    # --- collectives ---
    def _meet(self, me: _Rank, row: int, t: int, port: int, call: CodeCall, signature: int) -> None:
        """Join the next collective of a group; those whose needs are all there get their finishing time."""
        code = self.program.code(me.rank)
        group = self.program.groups[at(code.groups[port], self.program.row_of[me.rank])]
        number = me.counts.get(group.id, 0)
        me.counts[group.id] = number + 1
        key = (group.id, number, self.profile.slot(call.op, at(call.fields.get("root"), self.program.row_of[me.rank])))
        meeting = self.meetings.get(key)
        if meeting is None:
            meeting = self.meetings[key] = self._open(me.rank, call, group, signature)
        elif meeting.signature != signature:
            raise Disagree
        meeting.came[me.rank] = t
        meeting.rows[me.rank] = (row, me)
        if t > meeting.latest:
            meeting.latest = t
        if meeting.needs is not None:
            self._leave_early(meeting)
        elif len(meeting.came) == group.size:
            finish = meeting.latest + meeting.price
            for other, peer in meeting.rows.values():
                self._finish(other, peer, meeting.latest, finish)
        if len(meeting.came) == group.size:
            first = min(other for other, _ in meeting.rows.values())
            for other, _ in meeting.rows.values():
                self.columns.match[other] = -2 - first
            del self.meetings[key]

    def _open(self, rank: int, call: CodeCall, group: Group, signature: int) -> _Meeting:
        plain = self.program.resolve(rank, call)
        root = group.group_rank(plain.root) if plain.root is not None else 0
        price = self.cost.collective_ns(OPS[call.op], group.ranks, OPS[call.op].nbytes(plain), plain.root)
        needs = [self.profile.needs(call.op, group.size, root, me) for me in range(group.size)]
        early = {r: {group.ranks[k] for k in n} for r, n in zip(group.ranks, needs, strict=True) if n is not None}
        for r in group.ranks if early else ():
            early.setdefault(r, set(group.ranks))
        return _Meeting(signature, price, group, early or None)

    def _leave_early(self, meeting: _Meeting) -> None:
        """Members of a rooted collective leave as soon as those have come whom they need."""
        assert meeting.needs is not None
        for rank in [r for r in meeting.came if r in meeting.needs]:
            if meeting.needs[rank] <= meeting.came.keys():
                began = max(meeting.came[r] for r in (*meeting.needs.pop(rank), rank))
                self._finish(*meeting.rows[rank], began, began + meeting.price)

    def _finish(self, row: int, peer: _Rank, began: int, finish: int) -> None:
        self.columns.started[row], self.columns.finished[row] = began, finish
        if peer.on == row:
            peer.event.at(finish)

    # --- the end ---
    def _standstill(self) -> Standstill:
        ends, blocked = [], []
        for me in self.ranks:
            if me.row < 0:
                ends.append(RankEnd(me.rank, "ended", len(self.program.code(me.rank).calls), me.now))
            else:
                position, _ = self._place(me.rank, self.columns.base[me.rank] + me.row)
                ends.append(RankEnd(me.rank, "blocked", position, me.now))
                blocked.append(Blocked(me.rank, position, self._needs(me, position), me.now))
        unreceived = sorted(
            (me.rank, *self._place(me.rank, row)) for channel in self.channels.values() for _, row, _, _, me in channel.sends
        )
        return Standstill(tuple(ends), tuple(blocked), tuple(unreceived))

    def _place(self, rank: int, row: int) -> tuple[int, int]:
        """(position, part) of a trace row."""
        offsets = self.program.code(rank).offsets
        position = bisect_right(offsets, row - self.columns.base[rank]) - 1
        return position, row - self.columns.base[rank] - offsets[position] - 1

    def _needs(self, me: _Rank, where: int) -> tuple[Need, ...]:
        """The open requests that a blocked rank waits for, and whom they need."""
        code = self.program.code(me.rank)
        positions = [where - d for d in code.calls[where].waits] or [where]
        found = []
        for position in positions:
            for part, piece in enumerate(
                (code.calls[position].parts or (code.calls[position],)), 0 if code.calls[position].parts else -1
            ):
                row = self.columns.row(self.program, me.rank, position, part)
                if self.columns.finished[row] < 0:
                    found.append(Need(position, part, self._missing(me, code, piece, row)))
        return tuple(found)

    def _missing(self, me: _Rank, code: Code, call: CodeCall, row: int) -> tuple[int, ...]:
        if call.port >= 0:
            return (at(code.ports[call.port].peer, self.program.row_of[me.rank]),)
        meeting = next(m for m in self.meetings.values() if m.rows.get(me.rank, (-1,))[0] == row)
        wanted = meeting.group.ranks if meeting.needs is None else meeting.needs.get(me.rank, ())
        return tuple(sorted(r for r in wanted if r not in meeting.came))


def eager_limit(program: Program, profile: Profile) -> int:
    """The largest message of the program that a send may leave behind before its receive comes; -1 where none may."""
    sizes = {n for code in program.codes for call in code.calls for part in (call, *call.parts) if part.port >= 0
             for n in np.unique(part.nbytes).tolist()}  # fmt: skip
    return max((n for n in sizes if profile.credit(n, 0, program.options)), default=-1)
