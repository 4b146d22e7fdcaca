"""When a row that can start now will end in an event-driven run.

Key idea: there are three cases. The row ends at once; it ends after its cost; or it is part of a
flow that shares links or a device with others, and its end is known only when the flow ends
(`distsim.engine.link_sharing`). Only clusters with shared links have flows. Rows that take no time,
and signals of one-sided operations, never become flows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from distsim.engine.event_clock import EventClock
from distsim.engine.flow_progress import ActiveFlow
from distsim.engine.link_sharing import FlowScheduler
from distsim.engine.message_arrivals import MessageArrivals
from distsim.engine.standalone_costs import StandaloneCostTable
from distsim.hardware.cost import CostModel
from distsim.operations.one_sided import FIRST_SIGNAL_TAG
from distsim.semantics.form.instructions import PartKind
from distsim.semantics.ordered.transitions import TransitionRules

_SEND, _RECEIVE, _WORK = int(PartKind.SEND), int(PartKind.RECEIVE), int(PartKind.WORK)
#: The end is not known yet; the row's flow will report it.
END_UNKNOWN: Final = -1
#: Arrival time of a message whose flow has not ended: later than every time that can occur, so an
#: any-source receive prefers each message that has arrived.
_IN_FLIGHT: Final = 1 << 62


class InFlightTransfers:
    """The transfers and kernels in progress, and the ends of rows that start.

    - ``mate``: by row, the other side of each message that has matched; negative before.
    - ``finish``: called for a row whose flow has ended. ``take``: called when a message arrives
      that an any-source receive may take.
    - ``flows``: None if the cluster's links are not shared.
    - ``alone``: for each kernel that ran as a flow, its duration without overlap, ns.
    """

    def __init__(
        self,
        rules: TransitionRules,
        cost: CostModel,
        clock: EventClock,
        arrivals: MessageArrivals,
        mate: list[int],
        finish: Callable[[int], None],
        take: Callable[[], None],
    ) -> None:
        self.rules = rules
        self.clock = clock
        self.arrivals = arrivals
        self.mate = mate
        self.take = take
        self.costs = StandaloneCostTable(rules, cost)
        self.flows: FlowScheduler | None = None
        if self.costs.ports is not None:
            device = cost.cluster.device
            slowdowns = (device.overlap_compute, device.overlap_transfers)
            self.flows = FlowScheduler(self.costs.ports, clock, slowdowns, finish, self._arrive)
        self.has_any_source = bool(rules.open_boxes)
        self.alone: dict[int, int] = {}
        self._flow_of_send: dict[int, ActiveFlow] = {}
        self._flow_of_instance: dict[int, ActiveFlow] = {}

    def end_of(self, row: int) -> int:
        """Start a row; return its end in ns, or `END_UNKNOWN` if its flow will report it."""
        kind = self.rules.kind[row]
        now = self.clock.now
        if kind == _SEND:
            return self._send(row, now)
        if kind == _RECEIVE:
            send = self.mate[row]
            if send not in self._flow_of_send:
                return self.arrivals.arrived[send]
            self._flow_of_send[send].rows.append(row)
            return END_UNKNOWN
        if kind == _WORK:
            return self._work(row, now)
        return self._collective(row, now)

    def _send(self, row: int, now: int) -> int:
        cost = self.costs.message(row)
        # A send that starts before its receive has matched is buffered: the host goes on at once.
        is_buffered = self.mate[row] < 0
        if self.flows is None or cost.ns <= 0 or self.rules.tag[row] >= FIRST_SIGNAL_TAG:
            end = self.arrivals.arrived[row] = now + cost.ns
            if is_buffered and self.has_any_source:
                self.clock.put(end, self.take)
            return now if is_buffered else end
        source, destination = self.rules.rank_of[row], self.rules.peer[row]
        demand = self.flows.ports.of_message(source, destination)
        ranks = (source, destination) if source != destination else (source,)
        rows = [] if is_buffered else [row]
        flow = self.flows.transfer(rows, demand, ranks, cost.ns, cost.moving_ns)
        flow.send = row
        self._flow_of_send[row] = flow
        self.arrivals.arrived[row] = _IN_FLIGHT
        return now if is_buffered else END_UNKNOWN

    def _arrive(self, send: int) -> None:
        """Record that the data of a message have arrived."""
        del self._flow_of_send[send]
        self.arrivals.arrived[send] = self.clock.now
        if self.has_any_source and self.mate[send] < 0:
            self.arrivals.changed[self.rules.box[send]] = None
            self.clock.put(self.clock.now, self.take)

    def _work(self, row: int, now: int) -> int:
        ns = self.costs.work_ns(row)
        if self.flows is None or not self.flows.overlap_slows:
            return now + ns
        # Only kernels compete with transfers; other work of a rank does not.
        if ns <= 0 or self.rules.part(row).call.op != "compute":
            return now + ns
        self.flows.work(row, self.rules.rank_of[row], ns)
        self.alone[row] = ns
        return END_UNKNOWN

    def _collective(self, row: int, now: int) -> int:
        """The first member that is ready starts the collective's flow.

        A member whose cost differs from that of the flow has its own end.
        """
        cost = self.costs.collective(row)
        instance = self.rules.instance[row]
        flow = self._flow_of_instance.get(instance)
        if self.flows is None or cost.ns <= 0:
            return now + cost.ns
        if flow is not None and cost.ns != flow.cost_ns:
            return now + cost.ns
        if flow is None:
            members = self.rules.members[instance]
            self._flow_of_instance[instance] = self.flows.transfer(
                [row], cost.demand, members, cost.ns, cost.moving_ns
            )
        elif flow.began == now:
            flow.rows.append(row)
        else:
            self.flows.late_row(flow, row, cost.ns)
        return END_UNKNOWN
