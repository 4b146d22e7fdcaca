"""What each transfer and kernel of an event-driven run costs when it runs alone.

Key idea: a program repeats its calls, so rows are put into classes with equal costs once, with
numpy. The cost model is then asked at most once per class, when the first row of it starts.

How transfers that run at the same time slow each other down is not decided here, but in
`distsim.engine.link_sharing`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from distsim.hardware.cost import CostModel
from distsim.hardware.cost.max_min_fairness import NO_DEMAND, LinkPorts, PortDemand
from distsim.operations.core.operation_base import Operation
from distsim.operations.one_sided import FIRST_SIGNAL_TAG, SIGNAL_BYTES
from distsim.operations.registry import OPERATIONS
from distsim.semantics.form.instructions import PartKind
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.work_durations import durations_ns
from distsim.semantics.ordered.machine_tables import MachineTables

#: Part of the key of a work cost if it does not depend on the position of the call.
_ANY_POSITION = -1
#: The size of a signal, whose cost does not depend on its bytes, in the classes of messages.
_SIGNAL_SIZE = -1
#: The operation number of a row that is not a collective.
_NO_COLLECTIVE = -1


class MessageCost(NamedTuple):
    """What a message costs alone: ``ns``, of which ``moving_ns`` grow with the number of bytes."""

    ns: int
    moving_ns: int


class CollectiveCost(NamedTuple):
    """As `MessageCost`, with the ports that the collective uses while its bytes move."""

    ns: int
    moving_ns: int
    demand: PortDemand


class StandaloneCostTable:
    """The costs of a program's rows. ``ports``: the ports of shared links; None if none are."""

    def __init__(self, tables: MachineTables, cost: CostModel) -> None:
        self.tables = tables
        self.cost = cost
        self.program = tables.program
        self.ports = LinkPorts(cost) if cost.cluster.shared_links else None
        # By class of rows; not asked for yet: None.
        self._message_classes = _message_classes(tables.linked, cost)
        self._messages: list[MessageCost | None] = [None] * _count(self._message_classes)
        self._collective_classes = _collective_classes(tables.linked)
        self._collectives: list[CollectiveCost | None] = [None] * _count(self._collective_classes)
        self._collective_ns: dict[tuple[str, int, int, int | None], int] = {}
        self._work: dict[Hashable, list[int]] = {}

    def work_ns(self, row: int) -> int:
        """How long a row of work takes on its rank."""
        program = self.program
        rank, part = self.tables.rank_of[row], self.tables.part(row)
        # With jitter, each execution of a call has its own duration.
        position = part.position if program.jitter else _ANY_POSITION
        key = (program.code_of[rank], id(part.call), position)
        durations = self._work.get(key)
        if durations is None:
            code = program.code(rank)
            is_assign = part.call.op == "assign"
            ns = 0 if is_assign else durations_ns(program, self.cost, code, part.position)
            by_rank = np.broadcast_to(np.asarray(ns, dtype=np.int64), len(code.ranks))
            durations = self._work[key] = by_rank.tolist()
        return durations[program.row_of[rank]]

    def message(self, row: int) -> MessageCost:
        """The cost of a message, by the row of its send."""
        number = self._message_classes[row]
        cost = self._messages[number]
        if cost is None:
            cost = self._messages[number] = self._message_cost(row)
        return cost

    def _message_cost(self, row: int) -> MessageCost:
        source, destination = self.tables.rank_of[row], self.tables.peer[row]
        if self.tables.tag[row] >= FIRST_SIGNAL_TAG:
            return MessageCost(self.cost.one_sided_ns(source, destination, SIGNAL_BYTES), 0)
        ns = self.cost.p2p_ns(source, destination, self.tables.nbytes[row])
        if self.ports is None:
            return MessageCost(ns, 0)
        return MessageCost(ns, max(ns - self.cost.p2p_ns(source, destination, 0), 0))

    def collective(self, row: int) -> CollectiveCost:
        """The cost of a collective once its members have arrived, by the row of one of them."""
        number = self._collective_classes[row]
        cost = self._collectives[number]
        if cost is None:
            cost = self._collectives[number] = self._collective_cost(row)
        return cost

    def _collective_cost(self, row: int) -> CollectiveCost:
        operation = self._operation(row)
        ns = self._ns_of_collective(row, self.tables.nbytes[row])
        if self.ports is None or operation.kind != "collective":
            return CollectiveCost(ns, 0, NO_DEMAND)
        moving_ns = max(ns - self._ns_of_collective(row, 0), 0)
        demand = self.ports.of_collective(operation, self._members(row), self._root(row))
        return CollectiveCost(ns, moving_ns, demand)

    def _ns_of_collective(self, row: int, nbytes: int) -> int:
        """How long a row's collective would take if it moved ``nbytes``."""
        operation, members = self._operation(row), self._members(row)
        if operation.kind != "collective":
            return 0
        root = self._root(row)
        key = (operation.op, id(members), nbytes, root)
        if key not in self._collective_ns:
            self._collective_ns[key] = self.cost.collective_ns(operation, members, nbytes, root)
        return self._collective_ns[key]

    def _operation(self, row: int) -> type[Operation]:
        return OPERATIONS[self.tables.part(row).call.op]

    def _members(self, row: int) -> tuple[int, ...]:
        """All ranks of a collective, including those that a folded run does not simulate."""
        return self.tables.linked.whole[self.tables.instance[row]]

    def _root(self, row: int) -> int | None:
        """The rank of a collective's root; None if the operation has no root."""
        if self._operation(row).root_field is None:
            return None
        return self._members(row)[self.tables.root(row)]


def _count(classes: list[int]) -> int:
    """How many classes there are."""
    return max(classes, default=-1) + 1


def _message_classes(linked: LinkedProgram, cost: CostModel) -> list[int]:
    """Classes of messages with the same size and routes of equal cost, by row."""
    nbytes = np.where(linked.tag >= FIRST_SIGNAL_TAG, _SIGNAL_SIZE, linked.nbytes)
    sizes, size_number = np.unique(nbytes, return_inverse=True)
    # Rows that are not sends get classes too, but their costs are never asked for.
    route = cost.route_numbers(linked.rank, linked.peer)
    _, class_of = np.unique(route * len(sizes) + size_number.reshape(-1), return_inverse=True)
    classes: list[int] = class_of.reshape(-1).tolist()
    return classes


def _collective_classes(linked: LinkedProgram) -> list[int]:
    """Classes of collectives with the same operation, members, size and root, by row."""
    operation_numbers: dict[str, int] = {}
    member_numbers: dict[int, int] = {}
    class_of = np.full(linked.rows, _NO_COLLECTIVE, dtype=np.int64)
    for _, parts, rows in linked.parts(PartKind.COLLECTIVE):
        op = parts[0].call.op
        class_of[rows] = operation_numbers.setdefault(op, len(operation_numbers))
    members_of_instance = np.array(
        [member_numbers.setdefault(id(ranks), len(member_numbers)) for ranks in linked.whole],
        dtype=np.int64,
    )
    rows = np.flatnonzero(class_of >= 0)
    members = members_of_instance[linked.instance[rows]]
    columns = np.stack([class_of[rows], members, linked.nbytes[rows], linked.root[rows]], axis=1)
    _, numbers = np.unique(columns, axis=0, return_inverse=True)
    class_of[rows] = numbers.reshape(-1)
    classes: list[int] = class_of.tolist()
    return classes
