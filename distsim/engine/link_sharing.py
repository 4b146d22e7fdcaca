"""How fast transfers and kernels progress while they share links or devices in an event-driven run.

Key idea: a transfer that is alone takes exactly its cost. The cost has two phases: first the part
that does not depend on the number of bytes, which nothing slows down, then the bytes. While the
bytes of several transfers cross one port (`distsim.hardware.cost.max_min_fairness`), each transfer
gets its max-min fair share. Shares are computed again whenever a transfer starts or ends, but only
for the transfers that are connected to it through shared ports.

On devices with a slowdown for overlap (`Device.overlap_compute`, `Device.overlap_transfers`), the
kernels and the transfers of a rank also slow each other down.

This module does not know the rules of a backend: it gets rows of the program with their costs, and
reports when they finish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from math import ceil

import numpy as np

from distsim.engine.event_clock import EventClock
from distsim.hardware.cost.max_min_fairness import NO_DEMAND, LinkPorts, PortDemand, fair_rates

#: Tolerance for rounding errors, ns: a smaller remainder does not delay the end to the next ns.
_ROUNDING_NS = 1e-6


class ActiveFlow:
    """A transfer, or a kernel (``is_work``; it uses no ports), that is in progress.

    - ``remaining_ns``: how long it would still take alone, as of time ``since``; ``speed``: how
      many ns of that pass per ns of simulated time (1.0: as if alone).
    - ``moves_at``: when its bytes begin to move; ``is_sharing``: this time has been scheduled or
      has passed, so the flow takes part in the sharing of its ports.
    - ``overlapping``: for a transfer, the number of kernels that run on its ranks; for a kernel,
      the number of transfers of its rank.
    - ``end``: when it ends at its present speed; ``scheduled_end``: the time for which the clock
      has an entry. The entry may be too early, never too late.
    - ``rows``: rows that finish at ``end``; ``late_rows``: (row, earliest time of its finish).
    - ``send``: the row of a message's send; -1 for other flows.
    """

    __slots__ = (
        "began",
        "cost_ns",
        "demand",
        "done",
        "end",
        "is_sharing",
        "is_work",
        "late_rows",
        "moves_at",
        "overlapping",
        "ranks",
        "remaining_ns",
        "rows",
        "scheduled_end",
        "send",
        "since",
        "speed",
    )

    def __init__(
        self,
        rows: list[int],
        demand: PortDemand,
        ranks: tuple[int, ...],
        now: int,
        cost_ns: int,
        moving_ns: int,
    ) -> None:
        """Start a flow that takes ``cost_ns`` alone; ``moving_ns`` of them grow with its bytes."""
        self.rows = rows
        self.demand = demand
        self.ranks = ranks
        self.began = now
        self.cost_ns = cost_ns
        self.remaining_ns = float(moving_ns)
        self.speed = 1.0
        self.is_work = False
        self.done = False
        self.moves_at = self.since = now + cost_ns - moving_ns
        self.end = self.scheduled_end = now + cost_ns
        self.is_sharing = False
        self.late_rows: list[tuple[int, int]] = []
        self.overlapping = 0
        self.send = -1

    def set_speed(self, speed: float, now: int) -> bool:
        """Continue at a new speed; whether it then ends before the clock's entry for it."""
        if speed == self.speed:
            return False
        # Not before `moves_at`: until then no bytes move, so a speed has no effect. This is
        # max(self.since, min(now, self.end)), without the two calls: a large all-to-all comes here
        # half a million times.
        since = now if now < self.end else self.end
        if since > self.since:
            remaining_ns = self.remaining_ns - (since - self.since) * self.speed
            self.remaining_ns = remaining_ns if remaining_ns > 0.0 else 0.0
            self.since = since
        else:
            since = self.since
        self.speed = speed
        self.end = since + ceil(self.remaining_ns / speed - _ROUNDING_NS)
        return self.end < self.scheduled_end


class FlowScheduler:
    """All flows in progress, their speeds, and their entries in the clock.

    ``finish`` is called for each row that is done, ``arrive`` for the send of each message whose
    data have arrived. ``slowdowns``: by which factor a kernel takes longer during a transfer of its
    rank, and a transfer during a kernel.

    The collections of flows are dictionaries without values, not sets: their order is that of
    insertion, so a run is reproducible.
    """

    def __init__(
        self,
        ports: LinkPorts,
        clock: EventClock,
        slowdowns: tuple[float, float],
        finish: Callable[[int], None],
        arrive: Callable[[int], None],
    ) -> None:
        self.ports = ports
        self.clock = clock
        self.work_slowdown, self.transfer_slowdown = slowdowns
        self.overlap_slows = slowdowns != (1.0, 1.0)
        self._finish = finish
        self._arrive = arrive
        self._flows_at_port: dict[int, dict[ActiveFlow, None]] = {}
        self._transfers_of_rank: dict[int, dict[ActiveFlow, None]] = {}
        self._work_of_rank: dict[int, dict[ActiveFlow, None]] = {}
        self._flows_to_reshare: dict[ActiveFlow, None] = {}
        self._ports_to_reshare: dict[int, None] = {}

    # --- a flow starts ---
    def transfer(
        self,
        rows: list[int],
        demand: PortDemand,
        ranks: tuple[int, ...],
        cost_ns: int,
        moving_ns: int,
    ) -> ActiveFlow:
        """Start a message or a collective."""
        used = demand if moving_ns else NO_DEMAND
        flow = ActiveFlow(rows, used, ranks, self.clock.now, cost_ns, moving_ns)
        self.clock.put(flow.end, lambda: self._on_scheduled_end(flow))
        self._join_ports(flow)
        if self.overlap_slows:
            self._count_overlap_with_work(flow)
        return flow

    def _join_ports(self, flow: ActiveFlow) -> None:
        """Enter a new transfer at its ports, and let it share those where it is not alone.

        Constant time for each port, because an all-to-all written as messages has hundreds of
        transfers at one port. As soon as a second transfer joins a port, both take part in sharing
        it. So if several transfers are at a port, all of them already share it.
        """
        has_competitors = False
        for port in flow.demand.ports:
            at_port = self._flows_at_port.setdefault(port, {})
            if at_port:
                has_competitors = True
                if len(at_port) == 1:
                    self._share_from_first_byte(next(iter(at_port)))
            at_port[flow] = None
        if has_competitors:
            self._share_from_first_byte(flow)

    def work(self, row: int, rank: int, cost_ns: int) -> None:
        """Start a kernel."""
        flow = ActiveFlow([row], NO_DEMAND, (rank,), self.clock.now, cost_ns, cost_ns)
        flow.is_work = True
        self._work_of_rank.setdefault(rank, {})[flow] = None
        self.clock.put(flow.end, lambda: self._on_scheduled_end(flow))
        transfers = self._transfers_of_rank.get(rank, {})
        flow.overlapping = len(transfers)
        if flow.overlapping:
            self._update_slowdown(flow)
        for transfer in transfers:
            self._change_overlap(transfer, 1)

    def late_row(self, flow: ActiveFlow, row: int, cost_ns: int) -> None:
        """Add a member of a collective that is ready later than the member that started the flow.

        It finishes when its own cost has passed, and not before the flow. If the flow is over, the
        member is delayed by as much as sharing had delayed the flow.
        """
        at_ns = self.clock.now + cost_ns
        if flow.done:
            delay_ns = flow.end - flow.began - flow.cost_ns
            self.clock.put(at_ns + delay_ns, row)
        else:
            flow.late_rows.append((row, at_ns))

    def _count_overlap_with_work(self, flow: ActiveFlow) -> None:
        """Count the kernels that a new transfer overlaps with, and the transfer at each of them."""
        for rank in flow.ranks:
            self._transfers_of_rank.setdefault(rank, {})[flow] = None
            kernels = self._work_of_rank.get(rank)
            if kernels:
                flow.overlapping += len(kernels)
                for kernel in kernels:
                    self._change_overlap(kernel, 1)
        if flow.overlapping:
            self._update_slowdown(flow)

    # --- a flow ends ---
    def _on_scheduled_end(self, flow: ActiveFlow) -> None:
        """Handle a clock entry of a flow: finish it, or wait on if it has become slower."""
        now = self.clock.now
        # A flow that became faster has an earlier entry too, which finished it.
        if flow.done:
            return
        if now < flow.end:
            flow.scheduled_end = flow.end
            self.clock.put(flow.end, lambda: self._on_scheduled_end(flow))
            return
        flow.done = True
        self._remove(flow)
        if flow.send >= 0:
            self._arrive(flow.send)
        for row in flow.rows:
            self._finish(row)
        for row, at_ns in flow.late_rows:
            if at_ns <= now:
                self._finish(row)
            else:
                self.clock.put(at_ns, row)

    def _remove(self, flow: ActiveFlow) -> None:
        """Remove a flow that has ended, and give its share to the flows that remain."""
        if flow.is_work:
            self._remove_work(flow)
            return
        for port in flow.demand.ports:
            at_port = self._flows_at_port[port]
            del at_port[flow]
            if at_port:
                self._mark_port_for_sharing(port)
        if not self.overlap_slows:
            return
        for rank in flow.ranks:
            del self._transfers_of_rank[rank][flow]
            for kernel in self._work_of_rank.get(rank, ()):
                self._change_overlap(kernel, -1)

    def _remove_work(self, flow: ActiveFlow) -> None:
        rank = flow.ranks[0]
        del self._work_of_rank[rank][flow]
        for transfer in self._transfers_of_rank.get(rank, ()):
            self._change_overlap(transfer, -1)

    # --- overlap of kernels and transfers ---
    def _change_overlap(self, flow: ActiveFlow, change: int) -> None:
        """Change the number of flows that overlap with a flow.

        Only the first and the last of them change its speed: several slow it down as one does.
        """
        before = flow.overlapping
        flow.overlapping += change
        if bool(before) != bool(flow.overlapping):
            self._update_slowdown(flow)

    def _update_slowdown(self, flow: ActiveFlow) -> None:
        """Apply the slowdown of a flow for which overlap has begun or ended."""
        if flow.is_work:
            self._set_speed(flow, 1.0 / self.work_slowdown if flow.overlapping else 1.0)
        elif self.transfer_slowdown != 1.0:
            self._share_from_first_byte(flow)

    # --- shares of ports ---
    def _share_from_first_byte(self, flow: ActiveFlow) -> None:
        """Let a flow take part in the sharing of its ports, from the time when its bytes move."""
        if flow.is_sharing:
            self._mark_for_sharing(flow)
            return
        flow.is_sharing = True
        if flow.moves_at <= self.clock.now:
            self._mark_for_sharing(flow)
        else:
            self.clock.put(flow.moves_at, lambda: self._mark_for_sharing(flow))

    def _mark_for_sharing(self, flow: ActiveFlow) -> None:
        """Compute the shares around a flow again at the end of this instant.

        Flows that start or end at one instant cause a single computation.
        """
        if flow.done or flow.moves_at > self.clock.now:
            return
        self._schedule_resharing()
        self._flows_to_reshare[flow] = None

    def _mark_port_for_sharing(self, port: int) -> None:
        """As `_mark_for_sharing`, for all transfers that move bytes through a port."""
        self._schedule_resharing()
        self._ports_to_reshare[port] = None

    def _schedule_resharing(self) -> None:
        if not self._flows_to_reshare and not self._ports_to_reshare:
            self.clock.put(self.clock.now, self._reshare)

    def _reshare(self) -> None:
        """Compute fair rates for the marked flows and all that are connected to them by ports."""
        flows, self._flows_to_reshare = self._flows_to_reshare, {}
        ports, self._ports_to_reshare = self._ports_to_reshare, {}
        now = self.clock.now
        seen: set[ActiveFlow] = set()
        for flow in chain(flows, self._moving_flows(ports, now)):
            if flow not in seen and not flow.done:
                connected = self._connected_flows(flow, now)
                seen.update(connected)
                self._set_fair_speeds(connected)

    def _moving_flows(self, ports: Iterable[int], now: int) -> Iterator[ActiveFlow]:
        """For each port, one flow that moves bytes through it: the others are connected to it."""
        for port in ports:
            for flow in self._flows_at_port[port]:
                if flow.moves_at <= now:
                    yield flow
                    break

    def _connected_flows(self, first: ActiveFlow, now: int) -> list[ActiveFlow]:
        """All flows with moving bytes that ports connect to a flow, directly or through others."""
        found = {first: None}
        ports = list(first.demand.ports)
        seen_ports = set(ports)
        # The list grows while the loop runs.
        for port in ports:
            for flow in self._flows_at_port[port]:
                if flow in found or flow.moves_at > now:
                    continue
                found[flow] = None
                for other_port in flow.demand.ports:
                    if other_port not in seen_ports:
                        seen_ports.add(other_port)
                        ports.append(other_port)
        return list(found)

    def _set_fair_speeds(self, flows: list[ActiveFlow]) -> None:
        """Give each of some connected flows its max-min fair rate."""
        demands = [flow.demand for flow in flows]
        rates_alone = limits = np.array([demand.rate for demand in demands])
        if self.overlap_slows or self.ports.crossing:
            limits = np.array([self._rate_limit(flow) for flow in flows])
        rates = limits
        if len(flows) > 1:
            rates = fair_rates(demands, self.ports.capacity, limits)
        # Hot loop: a large all-to-all has 1 700 connected flows on average, of which three quarters
        # change their speed. A method call for those that keep it would double its time.
        for flow, speed in zip(flows, (rates / rates_alone).tolist(), strict=True):
            if speed != flow.speed:
                self._set_speed(flow, speed)

    def _rate_limit(self, flow: ActiveFlow) -> float:
        """The rate that a transfer could use if its ports were free.

        It falls while kernels run on its ranks, and while the threads of its processes move the
        bytes of other transfers too (``ports.crossing``).
        """
        slowdown = self.transfer_slowdown if flow.overlapping else 1.0
        ports = self.ports
        transfers_per_thread = 1
        if ports.crossing:
            threads = [port for port in flow.demand.ports if ports.is_thread(port)]
            moving = [self._moving_at(port) for port in threads]
            transfers_per_thread = max(moving, default=1)
        return flow.demand.rate / (slowdown * (1.0 + (transfers_per_thread - 1) * ports.crossing))

    def _moving_at(self, port: int) -> int:
        """How many transfers move bytes through a port now."""
        now = self.clock.now
        return sum(flow.moves_at <= now for flow in self._flows_at_port[port])

    def _set_speed(self, flow: ActiveFlow, speed: float) -> None:
        """Change the speed of a flow.

        A new clock entry is needed only if it ends earlier: if it ends later, its present entry
        makes a new one.
        """
        if flow.set_speed(speed, self.clock.now):
            flow.scheduled_end = flow.end
            self.clock.put(flow.end, lambda: self._on_scheduled_end(flow))
