"""How long what runs in the order of time takes: each price is asked once, when it is first needed."""

from __future__ import annotations

from collections.abc import Hashable
from math import ceil
from typing import Any

import numpy as np

from distsim.cost import CostModel
from distsim.ops.table import OPS
from distsim.semantics.durations import durations_ns
from distsim.semantics.form import PartKind
from distsim.semantics.tasks import Tables


class Prices:
    """The prices of a program's rows. Where links are shared, each card's direction and process's loop is ``busy`` until some time."""

    def __init__(self, tables: Tables, cost: CostModel) -> None:
        self.tables, self.cost, self.program = tables, cost, tables.program
        self.shared = cost.cluster.shared_links
        self.busy: dict[str, int] = {}
        self.delays: dict[int, int] = {}  # of collectives, by instance
        self._classes, self._messages = _classes(tables)
        self._kinds, self._collectives = _kinds(tables)
        self._asked: dict[tuple[str, int, int, int | None], int] = {}
        self._work: dict[Hashable, Any] = {}

    def work_ns(self, row: int) -> int:
        tables, program = self.tables, self.program
        rank, part = tables.rank_of[row], tables.part(row)
        key = (program.code_of[rank], id(part.call), part.position if program.jitter else -1)
        found = self._work.get(key)
        if found is None:
            ns = 0 if part.call.op == "assign" else durations_ns(program, self.cost, program.code(rank), part.position)
            found = self._work[key] = np.broadcast_to(np.asarray(ns, dtype=np.int64), len(program.code(rank).ranks)).tolist()
        return int(found[program.row_of[rank]])

    def message_ns(self, row: int, now: int) -> int:
        """When a message that leaves now is there.

        Where cards are shared, it waits until those on its way are free: first come, first served, busy for bytes / bandwidth.
        """
        price = self._messages[self._classes[row]]
        if price < 0:
            price = self.cost.p2p_ns(self.tables.rank_of[row], self.tables.peer[row], self.tables.nbytes[row])
            self._messages[self._classes[row]] = price
        return (self._when_free(row, now) if self.shared else now) + price

    def _when_free(self, row: int, now: int) -> int:
        """When the cards of a message are free; then it takes them."""
        cards = self.cost.nics_of(self.tables.rank_of[row], self.tables.peer[row])
        now = max([now, *(self.busy.get(card.id, 0) for card in cards)])
        for card in cards:
            self.busy[card.id] = now + ceil(self.tables.nbytes[row] / card.bytes_per_ns)
        return now

    def collective_ns(self, row: int, now: int) -> int:
        """How long a collective takes whose members are there, for one of them."""
        kind = self._kinds[row]
        price = self._collectives[kind]
        if price < 0:
            price = self._collectives[kind] = self._price(row, self.tables.nbytes[row])
        if not self.shared or OPS[self.tables.part(row).call.op].kind != "collective":
            return price
        instance = self.tables.instance[row]
        return price + self._delay(instance, self.tables.members[instance], price - self._price(row, 0), now)

    def _price(self, row: int, nbytes: int) -> int:
        """Of a collective that moves so many bytes, in place of its own."""
        op, members = OPS[self.tables.part(row).call.op], self.tables.members[self.tables.instance[row]]
        if op.kind != "collective":
            return 0
        root = members[self.tables.root(row)] if op.root_field is not None else None
        key = (op.op, id(members), nbytes, root)
        if key not in self._asked:
            self._asked[key] = self.cost.collective_ns(op, members, nbytes, root)
        return self._asked[key]

    def _delay(self, instance: int, members: tuple[int, ...], moving_ns: int, now: int) -> int:
        """How long a collective waits until its members have moved what they took on before. The first member to start decides."""
        if instance not in self.delays:
            loops = self.cost.loops_of(members)
            start = max([now, *(self.busy.get(loop.id, 0) for loop in loops)])
            self.busy |= {loop.id: start + moving_ns for loop in loops}
            self.delays[instance] = start - now
        return self.delays[instance]


def _classes(tables: Tables) -> tuple[list[int], list[int]]:
    """(of each message the number of its class: the same ends and size; the price of each class, -1 while nobody has asked)."""
    linked, size = tables.linked, tables.program.world_size
    sizes, size_of = np.unique(linked.nbytes, return_inverse=True)
    ends = linked.rank * (size + 1) + np.minimum(linked.peer, size - 1) + 1
    classes, of = np.unique(ends * len(sizes) + size_of.reshape(-1), return_inverse=True)
    return of.reshape(-1).tolist(), [-1] * len(classes)


def _kinds(tables: Tables) -> tuple[list[int], list[int]]:
    """(of each collective the number of its kind: the same operation, members, size and root; the price of each kind, -1 while nobody
    has asked)."""
    linked, names, groups = tables.linked, dict[str, int](), dict[int, int]()
    op = np.full(linked.rows, -1, dtype=np.int64)
    for _, part, rows in linked.parts(PartKind.COLLECTIVE):
        op[rows] = names.setdefault(part.call.op, len(names))
    of_instance = np.array([groups.setdefault(id(members), len(groups)) for members in linked.members], dtype=np.int64)
    rows = np.flatnonzero(op >= 0)
    columns = np.stack([op[rows], of_instance[linked.instance[rows]], linked.nbytes[rows], linked.root[rows]], axis=1)
    kinds, of = np.unique(columns, axis=0, return_inverse=True)
    op[rows] = of.reshape(-1)
    return op.tolist(), [-1] * len(kinds)
