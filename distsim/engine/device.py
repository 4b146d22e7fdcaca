"""The fast engine of the back end whose host only enqueues: nccl.

A flattened form of the explicit rules (`distsim.rules.device`), for programs without what `engine.choice` names. Launches form a graph: one
starts when those before it on its stream and its communicator, and those that its stream joined, have finished; it finishes at a time that
the match fixes. So times flow through the graph by themselves, in any order, and simpy is entered only where a host waits.
`tests/test_engines_agree.py` holds this engine to the time-ordered one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Generator, Hashable
from typing import Any

import simpy

from distsim.cost import CostModel
from distsim.engine.device_calls import BATCH, GROUP, HOST, MESSAGE, STOP, STREAM, WAIT, WORK, device_calls
from distsim.engine.device_graph import Graph
from distsim.engine.device_parts import Comm, Lane, Node, Rank
from distsim.engine.flat import Flat, Prices, of_row, varies
from distsim.engine.record import Columns
from distsim.engine.wake import Wake
from distsim.profiles import Profile
from distsim.program.records import Code, Program, at
from distsim.standstill import Blocked, Need, RankEnd, Standstill

_Process = Generator[Any, Any, None]


class DeviceEngine:
    """One run. `run` returns the columns, the standstill and the queue of each row."""

    def __init__(self, program: Program, profile: Profile, cost: CostModel) -> None:
        self.program, self.profile, self.cost = program, profile, cost
        self.eager_init = program.options.get("init") == "eager"
        self.env = simpy.Environment()
        self.columns = Columns(program)
        self.graph = Graph(program, profile, cost, self.columns)
        self.queue = array("i", [-1]) * self.columns.base[-1]
        self.queue_names: dict[str, int] = {}
        self.comms: dict[tuple[int, ...], Comm] = {}
        self.links: dict[Hashable, Prices] = {}
        self.nodes: dict[int, Node] = {}  # launches with a request, by row
        self.ranks = [Rank(rank) for rank in range(program.world_size)]

    def run(self) -> tuple[Columns, Standstill, tuple[Any, list[str]]]:
        codes = [device_calls(self.program, self.cost, code) for code in self.program.codes]
        vary = [varies(calls) for calls in codes]
        for me in self.ranks:
            code, row, number = self.program.code(me.rank), self.program.row_of[me.rank], self.program.code_of[me.rank]
            calls = of_row(codes[number], vary[number], code, row)
            self.env.process(self._host(me, code, row, calls, self.columns.base[me.rank]))
        self.env.run()
        return self.columns, self._standstill(), (self.queue, list(self.queue_names))

    # --- the host ---
    def _host(self, me: Rank, code: Code, row: int, calls: list[Flat], base: int) -> _Process:
        columns, t = self.columns, 0
        for kind, offset, a, b, c, stream in calls:
            i = base + offset
            columns.posted[i] = t
            for _, r, *_ in a if kind == BATCH else ():
                columns.posted[base + r] = t
            me.row, me.now = offset, t
            stop: list[Node] = []
            if kind <= GROUP:
                comm = self._comm(me, code, row, kind, a)
                if comm not in me.met and not self._all_met(me, comm, t):
                    yield me.event
                t = max(t, comm.latest)
                stop = self._communicate(me, kind, i, base, t, comm, a, b, c, stream)
            elif kind == WORK:  # a: duration
                self._work(me, i, t, a, stream)
            elif kind == HOST:  # a: duration
                columns.started[i], t = t, t + a
                columns.finished[i] = t
            elif kind == WAIT:  # a: rows of the launches, b: rows that count as waited for, c: is the host stopped
                stop = self._join(me, stream, [self.nodes[base + r] for r in a], c)
            elif kind == STREAM:  # a: the stream that is waited for
                self._join(me, stream, list(me.holds.get(a, {}).values()), ())
            elif kind == STOP:
                stop = me.newest()
            for node in stop:
                if node.end < 0:
                    me.event = node.waiter = Wake(self.env)
                    yield me.event
                t = max(t, node.end)
            for r in b if kind == WAIT else ():
                columns.waited[base + r] = t
            columns.returned[i] = t
            for _, r, *_ in a if kind == BATCH else ():
                columns.returned[base + r] = t
        me.row, me.now = code.offsets[-1], t
        for node in me.newest():  # as destroy_process_group does, the end waits for the device
            if node.end < 0:
                me.event = node.waiter = Wake(self.env)
                yield me.event
            t = max(t, node.end)
        me.row, me.now = -1, t

    def _all_met(self, me: Rank, comm: Comm, t: int) -> bool:
        """First use of a communicator: True when all its members have come; else the host waits for ``me.event``."""
        me.met.add(comm)
        if self.eager_init:
            return True
        comm.came.add(me.rank)
        comm.latest = max(comm.latest, t)
        if len(comm.came) < len(comm.members):
            me.where, me.event = comm, Wake(self.env)
            comm.waiting.append(me)
            return False
        for other in comm.waiting:
            other.where = None
            other.event.at(comm.latest)
        return True

    def _comm(self, me: Rank, code: Code, row: int, kind: int, port: Any) -> Comm:
        """The communicator of a call: a pair's own for single messages under lazy init, else the group's."""
        if kind == GROUP:
            return self._group_comm(at(code.groups[port], row))
        if kind == BATCH:
            return self._port(me, code, row, port[0][2], True)[0]
        return self._port(me, code, row, port, self.eager_init)[0]

    def _port(self, me: Rank, code: Code, row: int, number: int, of_group: bool) -> tuple[Comm, Lane, Lane]:
        """Communicator, lane out and lane in of a code's port."""
        key = 2 * number + of_group
        found = me.ports.get(key)
        if found is None:
            port = code.ports[number]
            group, peer = at(code.groups[port.group], row), at(port.peer, row)
            comm = self._group_comm(group) if of_group else self._pair_comm(group, min(me.rank, peer), max(me.rank, peer))
            found = me.ports[key] = (comm, self._lane(comm, me.rank, peer), self._lane(comm, peer, me.rank))
        return found

    def _group_comm(self, group: int) -> Comm:
        if (group,) not in self.comms:
            self.comms[(group,)] = Comm(self.program.groups[group], self.program.groups[group].ranks)
        return self.comms[(group,)]

    def _pair_comm(self, group: int, low: int, high: int) -> Comm:
        if (group, low, high) not in self.comms:
            self.comms[group, low, high] = Comm(self.program.groups[group], (low, high))
        return self.comms[group, low, high]

    def _lane(self, comm: Comm, src: int, dst: int) -> Lane:
        if (src, dst) not in comm.lanes:
            link = (self.cost.node(src), self.cost.node(dst)) if self.program.link_faults else self.cost.link_class(src, dst)
            if link not in self.links:
                self.links[link] = Prices(lambda nbytes: self.cost.p2p_ns(src, dst, nbytes))
            comm.lanes[src, dst] = Lane(self.links[link])
        return comm.lanes[src, dst]

    # --- launches ---
    def _communicate(
        self, me: Rank, kind: int, i: int, base: int, t: int, comm: Comm, a: Any, b: Any, c: Any, stream: str
    ) -> list[Node]:
        """Launch a message, a batch or a collective; the launches that the host must see finished."""
        if kind == GROUP:  # a: group port, b: the call, c: signature
            number = me.counts.get(comm, 0)
            me.counts[comm] = number + 1
            node = self._launch(me, i, t, (GROUP, comm, number, b, c, me.rank), comm, stream, on_stream=not b.is_async)
            return [node] if b.op == "barrier" and not b.is_async else []
        if kind == MESSAGE:  # a: port, b: bytes, c: (does it send, signature and tag, blocking)
            sends, signature, blocking = c & 1, c >> 2, c & 2
            ports = me.ports[2 * a + self.eager_init]
            node = self._launch(me, i, t, (MESSAGE, ((sends, i, ports[1] if sends else ports[2], b, signature),)), comm, stream)
        else:  # a: parts (does it send, row, port, bytes, signature and tag), b: blocking
            code, row = self.program.code(me.rank), self.program.row_of[me.rank]
            parts = []
            for sends, offset, port, nbytes, signature in a:
                _, out, into = self._port(me, code, row, port, True)
                self.queue[base + offset] = self._label(comm.label)
                parts.append((sends, base + offset, out if sends else into, nbytes, signature))
            blocking = b
            node = self._launch(me, i, t, (BATCH, tuple(parts)), comm, stream)
        if blocking:
            self._join(me, stream, [node], ())
        return []

    def _launch(self, me: Rank, row: int, t: int, act: Any, comm: Comm, stream: str, on_stream: bool = False) -> Node:
        """Enqueue on a communicator's stream or on the one that issues it, behind what the communicator and the issuing one hold."""
        before = me.issued.get(comm)
        node = self.nodes[row] = Node(row, t, act, comm)
        for other in me.holds.get(stream, {}).values():
            self._after(node, other)
        if before is not None:
            self._after(node, before)
        me.issued[comm] = node
        if on_stream:
            me.holds[stream] = {stream: node}
        self.queue[row] = self._label((stream or "current") if on_stream else comm.label)
        if not node.pending:
            self.graph.go(node)
        return node

    def _work(self, me: Rank, row: int, t: int, duration: int, stream: str) -> None:
        """Compute on a stream."""
        node = Node(row, t, (WORK, duration), stream)
        for other in me.holds.get(stream, {}).values():
            self._after(node, other)
        me.holds[stream] = {stream: node}
        self.queue[row] = self._label(stream or "current")
        if not node.pending:
            self.graph.go(node)

    def _label(self, name: str) -> int:
        return self.queue_names.setdefault(name, len(self.queue_names))

    def _after(self, node: Node, other: Node) -> None:
        if other.end < 0:
            other.succ.append(node)
            node.pending += 1
        elif other.end > node.ready:
            node.ready = other.end

    def _join(self, me: Rank, stream: str, nodes: list[Node], stops: tuple[bool, ...]) -> list[Node]:
        """A stream waits for launches; those that stop the host too."""
        held = me.holds.setdefault(stream, {})
        for node in nodes:
            there = held.get(node.queue)
            if there is None or there.row < node.row:
                held[node.queue] = node
        return [node for node, stop in zip(nodes, stops, strict=False) if stop]

    # --- the end ---
    def _standstill(self) -> Standstill:
        open_needs = self._open_needs()
        ends, blocked = [], []
        for me in self.ranks:
            code = self.program.code(me.rank)
            if me.row < 0:
                ends.append(RankEnd(me.rank, "ended", len(code.calls), me.now))
                continue
            position = bisect_right(code.offsets, me.row) - 1
            ends.append(RankEnd(me.rank, "blocked", position, me.now))
            missing = () if me.where is None else tuple(r for r in me.where.members if r not in me.where.came)
            needs = (Need(position, -1, missing),) if missing else tuple(open_needs.get(me.rank, ()))
            blocked.append(Blocked(me.rank, position, needs, me.now, True))
        return Standstill(tuple(ends), tuple(blocked), tuple(self._unreceived()))

    def _open_needs(self) -> dict[int, list[Need]]:
        """What started on a device and waits for others, by rank."""
        found: dict[int, list[Need]] = {}
        for comm in self.comms.values():
            for (src, dst), lane in comm.lanes.items():
                for sent in lane.sends:
                    if sent.left < 0:
                        found.setdefault(src, []).append(Need(*self._place(src, sent.row), (dst,)))
                for _, row, _, _ in lane.recvs:
                    found.setdefault(dst, []).append(Need(*self._place(dst, row), (src,)))
            for meeting in comm.meetings.values():
                there = {rank for rank, _ in meeting.came}
                missing = tuple(r for r in comm.members if r not in there)
                for rank, node in meeting.came:
                    found.setdefault(rank, []).append(Need(*self._place(rank, node.row), missing))
        return {rank: sorted(needs) for rank, needs in found.items()}

    def _place(self, rank: int, row: int) -> tuple[int, int]:
        offsets, row = self.program.code(rank).offsets, row - self.columns.base[rank]
        position = bisect_right(offsets, row) - 1
        return position, row - offsets[position] - 1

    def _unreceived(self) -> list[tuple[int, int, int]]:
        return sorted(
            (src, *self._place(src, sent.row))
            for comm in self.comms.values()
            for (src, _), lane in comm.lanes.items()
            for sent in lane.sends
        )
