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
from functools import partial
from itertools import chain

import numpy as np

from distsim.engine.event_clock import EventClock
from distsim.engine.flow_progress import NO_SLOT, ActiveFlow, FloatArray, IntArray, ProgressTable
from distsim.hardware.cost.max_min_fairness import (
    NO_DEMAND,
    LinkPorts,
    PortDemand,
    PortUses,
    fair_rates_of_uses,
)

#: The search for the transfers that are connected to one stops when it has found one of so many.
_ENOUGH_CONNECTED = 8


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
        #: The transfers that share ports and whose bytes move.
        self._moving = ProgressTable()
        #: By time: the transfers that share ports and whose bytes begin to move then.
        self._starting_at: dict[int, list[ActiveFlow]] = {}
        #: The time of the clock's entry for the next end in `_moving`; None if it has none.
        self._next_end: int | None = None
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
        self._join_ports(flow)
        if self.overlap_slows:
            self._count_overlap_with_work(flow)
        if not flow.is_sharing:
            self.clock.put(flow.end, partial(self._end_unshared, flow))
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
        self._schedule_end_of_work(flow)
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
    def _end_unshared(self, flow: ActiveFlow) -> None:
        """End a transfer that has its cost as its duration, unless it shares ports by now."""
        if not flow.done and flow.slot == NO_SLOT:
            self._end(flow)

    def _end_shared(self) -> None:
        """End the transfers in `_moving` whose end is now."""
        self._next_end = None
        for flow in self._moving.ended(self.clock.now):
            self._end(flow)
        self._schedule_next_end()

    def _schedule_next_end(self) -> None:
        """Move the clock entry for the next end in `_moving` to the right time."""
        end = self._moving.next_end()
        if end == self._next_end:
            return
        if self._next_end is not None:
            self.clock.cancel(self._next_end, self._end_shared)
        self._next_end = end
        if end is not None:
            self.clock.put(end, self._end_shared)

    def _end_work(self, flow: ActiveFlow) -> None:
        """Handle a clock entry of a kernel: end it, or wait on if it has become slower."""
        # A kernel that became faster has an earlier entry too, which ended it.
        if flow.done:
            return
        if self.clock.now < flow.end:
            self._schedule_end_of_work(flow)
            return
        self._end(flow)

    def _schedule_end_of_work(self, flow: ActiveFlow) -> None:
        flow.scheduled_end = flow.end
        self.clock.put(flow.end, partial(self._end_work, flow))

    def _end(self, flow: ActiveFlow) -> None:
        """End a flow: its rows finish, and its share goes to others."""
        flow.done = True
        self._remove(flow)
        if flow.send >= 0:
            self._arrive(flow.send)
        for row in flow.rows:
            self._finish(row)
        for row, at_ns in flow.late_rows:
            if at_ns <= self.clock.now:
                self._finish(row)
            else:
                self.clock.put(at_ns, row)

    def _remove(self, flow: ActiveFlow) -> None:
        """Remove a flow that has ended, and give its share to the flows that remain."""
        if flow.is_work:
            self._remove_work(flow)
            return
        if flow.slot != NO_SLOT:
            self._moving.leave(flow)
        for port in flow.demand.ports:
            at_port = self._flows_at_port[port]
            del at_port[flow]
            if at_port:
                # All transfers that move bytes through the port get new shares.
                self._schedule_resharing()
                self._ports_to_reshare[port] = None
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
            speed = 1.0 / self.work_slowdown if flow.overlapping else 1.0
            # A new clock entry is needed only if it ends earlier: if it ends later, its present
            # entry makes a new one.
            if flow.set_speed(speed, self.clock.now):
                self._schedule_end_of_work(flow)
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
            self._begin_to_move([flow])
        elif flow.moves_at in self._starting_at:
            self._starting_at[flow.moves_at].append(flow)
        else:
            self._starting_at[flow.moves_at] = [flow]
            self.clock.put(flow.moves_at, self._begin_those_that_start_now)

    def _begin_those_that_start_now(self) -> None:
        self._begin_to_move(self._starting_at.pop(self.clock.now))

    def _begin_to_move(self, flows: list[ActiveFlow]) -> None:
        """Let transfers share their ports: their bytes begin to move."""
        moving = [flow for flow in flows if not flow.done]
        if moving:
            self._moving.enter(moving)
            self._schedule_resharing()
            self._flows_to_reshare.update(dict.fromkeys(moving))

    def _mark_for_sharing(self, flow: ActiveFlow) -> None:
        """Compute the shares around a flow again at the end of this instant, if its bytes move.

        Flows that start or end at one instant cause a single computation.
        """
        if flow.slot != NO_SLOT:
            self._schedule_resharing()
            self._flows_to_reshare[flow] = None

    def _schedule_resharing(self) -> None:
        if not self._flows_to_reshare and not self._ports_to_reshare:
            self.clock.put(self.clock.now, self._reshare)

    def _reshare(self) -> None:
        """Compute fair rates for the marked flows and all that are connected to them by ports."""
        flows, self._flows_to_reshare = self._flows_to_reshare, {}
        ports, self._ports_to_reshare = self._ports_to_reshare, {}
        is_done = np.zeros(len(self._moving.flows), dtype=np.bool_)
        for flow in chain(flows, self._moving_flows(ports)):
            if flow.slot == NO_SLOT or is_done[flow.slot]:
                continue
            connected = self._connected_slots(flow)
            self._set_fair_speeds(connected)
            if len(connected) == self._moving.count:
                break
            is_done[connected] = True
        self._schedule_next_end()

    def _moving_flows(self, ports: Iterable[int]) -> Iterator[ActiveFlow]:
        """For each port, one flow that moves bytes through it: the others are connected to it."""
        for port in ports:
            for flow in self._flows_at_port[port]:
                if flow.slot != NO_SLOT:
                    yield flow
                    break

    def _connected_slots(self, first: ActiveFlow) -> IntArray:
        """The slots of all moving transfers that ports connect to one, directly or through others.

        If these are many, all moving transfers are returned, because computing the rates of all
        takes less time than a complete search. The rates of those that are not connected stay the
        same: they depend only on transfers that have not changed.
        """
        found = {first: None}
        ports = list(first.demand.ports)
        seen_ports = set(ports)
        # The list grows while the loop runs.
        for port in ports:
            for flow in self._flows_at_port[port]:
                if flow in found or flow.slot == NO_SLOT:
                    continue
                found[flow] = None
                for other_port in flow.demand.ports:
                    if other_port not in seen_ports:
                        seen_ports.add(other_port)
                        ports.append(other_port)
            if len(found) * _ENOUGH_CONNECTED >= self._moving.count:
                return self._moving.slots()
        return np.sort([flow.slot for flow in found])

    def _set_fair_speeds(self, slots: IntArray) -> None:
        """Give some transfers, with all that are connected to them, their max-min fair rates."""
        moving = self._moving
        demands = moving.demand[slots]
        uses = moving.demands.uses(demands)
        rates_alone = moving.demands.rates(demands)
        limits = self._rate_limits(slots, uses, rates_alone)
        rates = limits
        if len(slots) > 1:
            rates = fair_rates_of_uses(uses, self.ports.capacity, limits)
        moving.set_speeds(slots, rates / rates_alone, self.clock.now)

    def _rate_limits(self, slots: IntArray, uses: PortUses, rates_alone: FloatArray) -> FloatArray:
        """The rates that transfers could use if their ports were free.

        They fall while kernels run on their ranks, and while the threads of their processes move
        the bytes of other transfers too (``ports.crossing``).
        """
        slowdowns = np.ones(len(slots))
        if self.transfer_slowdown != 1.0:
            flows = [self._moving.flows[slot] for slot in slots.tolist()]
            overlaps = [flow is not None and flow.overlapping > 0 for flow in flows]
            slowdowns[overlaps] = self.transfer_slowdown
        if self.ports.crossing:
            is_thread = self.ports.are_threads(uses.port)
            port, flow_of = uses.port[is_thread], uses.flow[is_thread]
            transfers_per_thread = np.ones(len(slots), dtype=np.int64)
            np.maximum.at(transfers_per_thread, flow_of, np.bincount(port)[port])
            slowdowns *= 1.0 + (transfers_per_thread - 1) * self.ports.crossing
        return rates_alone / slowdowns
