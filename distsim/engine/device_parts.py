"""What the device engine is made of: launches, messages, communicators, ranks."""

from __future__ import annotations

from collections import deque
from typing import Any

from distsim.engine.flat import Prices
from distsim.ops.records import Group


class Node:
    """A launch. ``queue``: its communicator, or the stream of local work. ``pending``: launches before it that are not finished;
    ``parts``: messages of it that are still open."""

    __slots__ = ("act", "end", "latest", "parts", "pending", "queue", "ready", "row", "succ", "waiter")

    def __init__(self, row: int, ready: int, act: Any, queue: Comm | str) -> None:
        self.row, self.ready, self.act, self.queue = row, ready, act, queue
        self.pending, self.parts, self.end, self.latest = 0, 1, -1, 0
        self.succ: list[Node] = []
        self.waiter: Any = None


class Sent:
    """A message on its way: when it was ready, when it left (if it ran ahead of its receive), when it met its receive."""

    __slots__ = ("left", "met", "nbytes", "node", "ready", "row", "signature")

    def __init__(self, node: Node, row: int, nbytes: int, signature: int, ready: int) -> None:
        self.node, self.row, self.nbytes, self.signature, self.ready = node, row, nbytes, signature, ready
        self.left, self.met = -1, -1


class Lane:
    """One direction between two ranks on a communicator. ``ahead``: messages that ran ahead and may not have been taken yet."""

    __slots__ = ("ahead", "outstanding", "price", "recvs", "sends", "stalled")

    def __init__(self, price: Prices) -> None:
        self.sends: deque[Sent] = deque()
        self.recvs: deque[tuple[Node, int, int, int]] = deque()
        self.ahead: deque[Sent] = deque()
        self.outstanding, self.price = 0, price
        self.stalled: Sent | None = None


class Comm:
    """A communicator: its members meet on the host at first use."""

    __slots__ = ("came", "group", "label", "lanes", "latest", "meetings", "members", "waiting")

    def __init__(self, group: Group, members: tuple[int, ...]) -> None:
        self.group, self.members, self.came, self.latest = group, members, set[int](), 0
        pair = len(members) == 2 and members != group.ranks
        self.label = f"pair {members[0]}-{members[1]} of {group.name}" if pair else f"group {group.name}"
        self.waiting: list[Rank] = []
        self.lanes: dict[tuple[int, int], Lane] = {}
        self.meetings: dict[int, Meeting] = {}


class Meeting:
    """A collective call on its way."""

    __slots__ = ("came", "latest", "price", "signature")

    def __init__(self, signature: int, price: int) -> None:
        self.signature, self.price, self.latest = signature, price, 0
        self.came: list[tuple[int, Node]] = []


class Rank:
    """A rank's host and what its streams hold."""

    __slots__ = ("counts", "event", "holds", "issued", "met", "now", "ports", "rank", "row", "where")

    def __init__(self, rank: int) -> None:
        self.rank, self.row, self.now = rank, 0, 0  # row of the call that the host is in, -1 at its end
        #: What each stream holds ("": the default one), by communicator or by the stream of the launch. Of each the newest: those before
        #: it are done by then.
        self.holds: dict[str, dict[Comm | str, Node]] = {"": {}}
        self.issued: dict[Comm, Node] = {}  # the newest launch on each communicator
        self.counts: dict[Comm, int] = {}  # collectives so far
        self.ports: dict[int, tuple[Comm, Lane, Lane]] = {}
        self.met: set[Comm] = set()
        self.event: Any = None
        self.where: Comm | None = None  # whose members the host waits for

    def newest(self) -> list[Node]:
        """Launches such that all are done when these are."""
        return [*self.issued.values(), *(node for held in self.holds.values() for node in held.values())]
