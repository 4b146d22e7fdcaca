"""How long what runs in the order of time takes when it is alone: each price is asked once, when it
is first needed.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from distsim.hardware.cost import CostModel
from distsim.hardware.cost.max_min_fairness import NO_DEMAND, LinkPorts, PortDemand
from distsim.operations.one_sided import FIRST_SIGNAL_TAG, SIGNAL_BYTES
from distsim.operations.registry import OPERATIONS
from distsim.semantics.form.instructions import PartKind
from distsim.semantics.form.work_durations import durations_ns
from distsim.semantics.ordered.machine_tables import MachineTables


class StandaloneCost(NamedTuple):
    """``ns`` alone, of which ``moving`` grow with the bytes; what it takes up meanwhile."""

    ns: int
    moving: int
    demand: PortDemand


class StandaloneCostTable:
    """The prices of a program's rows. ``ports``: where links are shared, what there is of them."""

    def __init__(self, tables: MachineTables, cost: CostModel) -> None:
        self.tables, self.cost, self.program = tables, cost, tables.program
        self.ports = LinkPorts(cost) if cost.cluster.shared_links else None
        self._classes, self._messages = _message_classes(tables)
        self._kinds, self._collectives = _collective_classes(tables)
        self._asked: dict[tuple[str, int, int, int | None], int] = {}
        self._work: dict[Hashable, list[int]] = {}

    def work_ns(self, row: int) -> int:
        tables, program = self.tables, self.program
        rank, part = tables.rank_of[row], tables.part(row)
        key = (program.code_of[rank], id(part.call), part.position if program.jitter else -1)
        found = self._work.get(key)
        if found is None:
            ns = (
                0
                if part.call.op == "assign"
                else durations_ns(program, self.cost, program.code(rank), part.position)
            )
            found = self._work[key] = np.broadcast_to(
                np.asarray(ns, dtype=np.int64), len(program.code(rank).ranks)
            ).tolist()
        return found[program.row_of[rank]]

    def message(self, row: int) -> StandaloneCost:
        """Of a message, by its send."""
        price = self._messages[self._classes[row]]
        if price is None:
            src, dst, cost = self.tables.rank_of[row], self.tables.peer[row], self.cost
            if self.tables.tag[row] >= FIRST_SIGNAL_TAG:  # it takes up nothing
                price = StandaloneCost(cost.one_sided_ns(src, dst, SIGNAL_BYTES), 0, NO_DEMAND)
            else:
                ns = cost.p2p_ns(src, dst, self.tables.nbytes[row])
                moving = max(ns - cost.p2p_ns(src, dst, 0), 0) if self.ports is not None else 0
                price = StandaloneCost(
                    ns,
                    moving,
                    self.ports.of_message(src, dst) if self.ports is not None else NO_DEMAND,
                )
            self._messages[self._classes[row]] = price
        return price

    def collective(self, row: int) -> StandaloneCost:
        """Of a collective whose members are there, for one of them."""
        price = self._collectives[self._kinds[row]]
        if price is None:
            ns = self._price(row, self.tables.nbytes[row])
            op, members = (
                OPERATIONS[self.tables.part(row).call.op],
                self.tables.linked.whole[self.tables.instance[row]],
            )
            if self.ports is None or op.kind != "collective":
                price = StandaloneCost(ns, 0, NO_DEMAND)
            else:
                price = StandaloneCost(
                    ns,
                    max(ns - self._price(row, 0), 0),
                    self.ports.of_collective(op, members, self._root(row)),
                )
            self._collectives[self._kinds[row]] = price
        return price

    def _price(self, row: int, nbytes: int) -> int:
        """Of a collective that moves so many bytes, in place of its own."""
        op, members = (
            OPERATIONS[self.tables.part(row).call.op],
            self.tables.linked.whole[self.tables.instance[row]],
        )
        if op.kind != "collective":
            return 0
        root = self._root(row)
        key = (op.op, id(members), nbytes, root)
        if key not in self._asked:
            self._asked[key] = self.cost.collective_ns(op, members, nbytes, root)
        return self._asked[key]

    def _root(self, row: int) -> int | None:
        """The rank that is a collective's root; None where it has none."""
        op, members = (
            OPERATIONS[self.tables.part(row).call.op],
            self.tables.linked.whole[self.tables.instance[row]],
        )
        return members[self.tables.root(row)] if op.root_field is not None else None


def _message_classes(tables: MachineTables) -> tuple[list[int], list[StandaloneCost | None]]:
    """(of each message the number of its class: the same ends and size; the price of each class,
    None while nobody has asked).
    """
    linked, size = tables.linked, tables.program.world_size
    sizes, size_of = np.unique(
        np.where(linked.tag >= FIRST_SIGNAL_TAG, -1, linked.nbytes), return_inverse=True
    )
    ends = linked.rank * (size + 1) + np.minimum(linked.peer, size - 1) + 1
    classes, of = np.unique(ends * len(sizes) + size_of.reshape(-1), return_inverse=True)
    return of.reshape(-1).tolist(), [None] * len(classes)


def _collective_classes(tables: MachineTables) -> tuple[list[int], list[StandaloneCost | None]]:
    """(of each collective the number of its kind: the same operation, members, size and root; the
    price of each kind, None while nobody has asked)."""
    linked, names, groups = tables.linked, dict[str, int](), dict[int, int]()
    op = np.full(linked.rows, -1, dtype=np.int64)
    for _, parts, rows in linked.parts(PartKind.COLLECTIVE):
        op[rows] = names.setdefault(parts[0].call.op, len(names))
    of_instance = np.array(
        [groups.setdefault(id(members), len(groups)) for members in linked.whole], dtype=np.int64
    )
    rows = np.flatnonzero(op >= 0)
    columns = np.stack(
        [op[rows], of_instance[linked.instance[rows]], linked.nbytes[rows], linked.root[rows]],
        axis=1,
    )
    kinds, of = np.unique(columns, axis=0, return_inverse=True)
    op[rows] = of.reshape(-1)
    return op.tolist(), [None] * len(kinds)
