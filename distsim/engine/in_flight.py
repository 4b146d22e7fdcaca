"""When a row that is due ends in an event-driven run: at once, at a known time, or when its flow
ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from distsim.engine.event_clock import EventClock
from distsim.engine.link_sharing import ActiveFlow, FlowScheduler
from distsim.engine.message_arrivals import MessageArrivals
from distsim.engine.standalone_costs import StandaloneCostTable
from distsim.hardware.cost import CostModel
from distsim.operations.one_sided import FIRST_SIGNAL_TAG
from distsim.semantics.form.instructions import PartKind
from distsim.semantics.ordered.transitions import TransitionRules

_SEND, _RECEIVE, _WORK = int(PartKind.SEND), int(PartKind.RECEIVE), int(PartKind.WORK)
#: Its end is not known yet.
END_UNKNOWN: Final = -1
#: When something arrives that is on its way: nobody knows, but not before anything that is there.
_IN_FLIGHT: Final = 1 << 62


class InFlightTransfers:
    """Ends of rows that are due. ``mate``: the other side of each message that has met. ``finish``
    and ``take``: see to a row that is done, and to receives from any source."""

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
        self.rules, self.clock, self.arrivals, self.mate, self.take = (
            rules,
            clock,
            arrivals,
            mate,
            take,
        )
        self.prices = StandaloneCostTable(rules, cost)
        device, ports = cost.cluster.device, self.prices.ports
        slower = (device.overlap_compute, device.overlap_transfers)
        self.flows = (
            None if ports is None else FlowScheduler(ports, clock, slower, finish, self._arrive)
        )
        self.open_sources = bool(rules.open_boxes)
        self.alone: dict[int, int] = {}
        self._on_way: dict[int, ActiveFlow] = {}
        self._of_instance: dict[int, ActiveFlow] = {}

    def end_of(self, row: int) -> int:
        """The end of a row that is due now, in ns; `END_UNKNOWN` where its flow will tell."""
        kind, now = self.rules.kind[row], self.clock.now
        if kind == _SEND:
            return self._send(row, now)
        if kind == _RECEIVE:
            send = self.mate[row]
            if send not in self._on_way:
                return self.arrivals.arrived[send]
            self._on_way[send].rows.append(row)
            return END_UNKNOWN
        return self._work(row, now) if kind == _WORK else self._collective(row, now)

    def _send(self, row: int, now: int) -> int:
        price, ahead = self.prices.message(row), self.mate[row] < 0
        if self.flows is None or price.ns <= 0 or self.rules.tag[row] >= FIRST_SIGNAL_TAG:
            end = self.arrivals.arrived[row] = now + price.ns
            if ahead and self.open_sources:
                self.clock.put(end, self.take)
            return now if ahead else end
        src, dst = self.rules.rank_of[row], self.rules.peer[row]
        ranks = (src, dst) if src != dst else (src,)
        flow = self.flows.transfer(
            [] if ahead else [row], price.demand, ranks, price.ns, price.moving
        )
        flow.send, self._on_way[row], self.arrivals.arrived[row] = row, flow, _IN_FLIGHT
        return now if ahead else END_UNKNOWN

    def _arrive(self, send: int) -> None:
        """The data of a message is there."""
        del self._on_way[send]
        self.arrivals.arrived[send] = self.clock.now
        if self.open_sources and self.mate[send] < 0:
            self.arrivals.changed[self.rules.box[send]] = None
            self.clock.put(self.clock.now, self.take)

    def _work(self, row: int, now: int) -> int:
        ns = self.prices.work_ns(row)
        if self.flows is None or not self.flows.beside:
            return now + ns
        if ns <= 0 or self.rules.part(row).call.op != "compute":
            return now + ns
        self.flows.work(row, self.rules.rank_of[row], ns)
        self.alone[row] = ns
        return END_UNKNOWN

    def _collective(self, row: int, now: int) -> int:
        """The first member that is due starts the collective's flow.

        A member whose cost differs from that of the flow has its own end.
        """
        price, instance = self.prices.collective(row), self.rules.instance[row]
        flow = self._of_instance.get(instance)
        if self.flows is None or price.ns <= 0:
            return now + price.ns
        if flow is not None and price.ns != flow.price:
            return now + price.ns
        if flow is None:
            members = self.rules.members[instance]
            self._of_instance[instance] = self.flows.transfer(
                [row], price.demand, members, price.ns, price.moving
            )
        elif flow.began == now:
            flow.rows.append(row)
        else:
            self.flows.late_row(flow, row, price.ns)
        return END_UNKNOWN
