"""What is on its way in the order of time, and how fast: transfers that share links, and work
beside them.

A transfer takes its price when it is alone: first what does not grow with its bytes, which nobody
slows down, then its bytes. While bytes of several cross one port
(`distsim.hardware.cost.max_min_fairness`) each gets its fair share; shares are worked out again
where a transfer comes or goes, for those that its ports join. On devices that say so
(`Device.beside`), a rank's kernels and its transfers slow each other down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil

from distsim.engine.event_clock import EventClock
from distsim.hardware.cost.max_min_fairness import NO_DEMAND, LinkPorts, PortDemand, fair_rates

#: Parts of a ns that rounding may leave over.
_ROUNDING_NS = 1e-6


class ActiveFlow:
    """One transfer, or one piece of work (``ports`` empty). ``left``: ns that it would still take
    alone, at ``since``; ``speed``: ns of that in a ns. ``moves_at``: when its bytes begin to move.
    ``beside``: of a transfer how many of its ranks work, of work how many transfers its rank takes
    part in. ``rows`` are done at ``end``; ``later`` are rows that are due no earlier than a time of
    their own."""

    __slots__ = (
        "asked",
        "began",
        "begun_moving",
        "beside",
        "demand",
        "end",
        "is_work",
        "later",
        "left",
        "moves_at",
        "over",
        "price",
        "ranks",
        "rows",
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
        price: int,
        moving: int,
    ) -> None:
        self.rows, self.demand, self.ranks, self.began, self.price = rows, demand, ranks, now, price
        self.left, self.speed, self.is_work, self.over = float(moving), 1.0, False, False
        self.moves_at = self.since = now + price - moving
        self.end = self.asked = now + price
        self.begun_moving = False
        self.later: list[tuple[int, int]] = []
        self.beside, self.send = 0, -1

    def set_speed(self, speed: float, now: int) -> bool:
        """From now on at this speed; whether it comes to its end earlier than the clock has been
        told.
        """
        if speed == self.speed:
            return False
        since = max(self.since, min(now, self.end))
        self.left = max(self.left - (since - self.since) * self.speed, 0.0)
        self.since, self.speed = since, speed
        self.end = since + ceil(self.left / speed - _ROUNDING_NS)
        return self.end < self.asked


class FlowScheduler:
    """All that is on its way. ``finish`` is told each row that is done, ``arrive`` each message
    whose data came before its receive.

    ``slower``: by what a rank's work, and its transfers, take longer beside each other.
    """

    def __init__(
        self,
        ports: LinkPorts,
        clock: EventClock,
        slower: tuple[float, float],
        finish: Callable[[int], None],
        arrive: Callable[[int], None],
    ) -> None:
        self.ports, self.clock, self.slower = ports, clock, slower
        self._finish, self._arrive = finish, arrive
        self._at_port: dict[int, dict[ActiveFlow, None]] = {}
        self._of_rank: dict[int, dict[ActiveFlow, None]] = {}
        self._work_of: dict[int, dict[ActiveFlow, None]] = {}
        self._to_reshare: dict[ActiveFlow, None] = {}
        self.beside = slower != (1.0, 1.0)

    # --- coming ---
    def transfer(
        self, rows: list[int], demand: PortDemand, ranks: tuple[int, ...], price: int, moving: int
    ) -> ActiveFlow:
        """A message or a collective begins."""
        flow = ActiveFlow(
            rows, demand if moving else NO_DEMAND, ranks, self.clock.now, price, moving
        )
        self.clock.put(flow.end, lambda: self._ring(flow))
        crowd: dict[ActiveFlow, None] = {}
        for port in flow.demand.ports:
            there = self._at_port.setdefault(port, {})
            if there:
                crowd |= there
            there[flow] = None
        if crowd:
            for one in (flow, *crowd):
                self._moves(one)
        if self.beside:
            self._join_work(flow)
        return flow

    def work(self, row: int, rank: int, price: int) -> None:
        """A kernel begins."""
        now = self.clock.now
        flow = ActiveFlow([row], NO_DEMAND, (rank,), now, price, price)
        flow.is_work = True
        self._work_of.setdefault(rank, {})[flow] = None
        self.clock.put(flow.end, lambda: self._ring(flow))
        transfers = self._of_rank.get(rank, {})
        flow.beside = len(transfers)
        if flow.beside:
            self._adjust(flow)
        for other in transfers:
            self._count(other, 1)

    def _join_work(self, flow: ActiveFlow) -> None:
        for rank in flow.ranks:
            self._of_rank.setdefault(rank, {})[flow] = None
            working = self._work_of.get(rank)
            if working:
                flow.beside += len(working)
                for work in working:
                    self._count(work, 1)
        if flow.beside:
            self._adjust(flow)

    # --- going ---
    def _ring(self, flow: ActiveFlow) -> None:
        """The clock has come to where a flow ended when it was last asked."""
        now = self.clock.now
        if flow.over:
            return
        if now < flow.end:
            flow.asked = flow.end
            self.clock.put(flow.end, lambda: self._ring(flow))
            return
        flow.over = True
        self._leave(flow)
        if flow.send >= 0:
            self._arrive(flow.send)
        for row in flow.rows:
            self._finish(row)
        for row, at in flow.later:
            if at <= now:
                self._finish(row)
            else:
                self.clock.put(at, row)

    def _leave(self, flow: ActiveFlow) -> None:
        if flow.is_work:
            del self._work_of[flow.ranks[0]][flow]
            for other in self._of_rank.get(flow.ranks[0], ()):
                self._count(other, -1)
            return
        for port in flow.demand.ports:
            there = self._at_port[port]
            del there[flow]
            for other in there:
                self._mark_for_sharing(other)
        for rank in flow.ranks if self.beside else ():
            del self._of_rank[rank][flow]
            for work in self._work_of.get(rank, ()):
                self._count(work, -1)

    def late_row(self, flow: ActiveFlow, row: int, price: int) -> None:
        """A member of a collective that is due after others: as much later as the others were
        slowed down.
        """
        at = self.clock.now + price
        if flow.over:
            self.clock.put(at + flow.end - flow.began - flow.price, row)
        else:
            flow.later.append((row, at))

    # --- how fast ---
    def _count(self, flow: ActiveFlow, more: int) -> None:
        """So many more are beside it."""
        before, flow.beside = flow.beside, flow.beside + more
        if bool(before) != bool(flow.beside):
            self._adjust(flow)

    def _adjust(self, flow: ActiveFlow) -> None:
        """Who is beside a flow has changed."""
        if flow.is_work:
            self._set(flow, 1.0 / self.slower[0] if flow.beside else 1.0)
        elif self.slower[1] != 1.0:
            self._moves(flow)

    def _moves(self, flow: ActiveFlow) -> None:
        """Its bytes count among those at its ports, from when they move."""
        if flow.begun_moving:
            self._mark_for_sharing(flow)
            return
        flow.begun_moving = True
        if flow.moves_at <= self.clock.now:
            self._mark_for_sharing(flow)
        else:
            self.clock.put(flow.moves_at, lambda: self._mark_for_sharing(flow))

    def _mark_for_sharing(self, flow: ActiveFlow) -> None:
        """Shares around a flow have to be worked out again, once this instant is over."""
        if flow.over or flow.moves_at > self.clock.now:
            return
        if not self._to_reshare:
            self.clock.put(self.clock.now, self._share)
        self._to_reshare[flow] = None

    def _share(self) -> None:
        """Fair rates for all that are joined to those that came, or that others left, through
        ports.
        """
        stirred, self._to_reshare = self._to_reshare, {}
        now, seen = self.clock.now, set[ActiveFlow]()
        for first in stirred:
            if first not in seen and not first.over:
                joined = self._joined(first, now)
                seen.update(joined)
                self._rate(joined)

    def _joined(self, first: ActiveFlow, now: int) -> list[ActiveFlow]:
        found, ports, ahead = {first: None}, set[int](), [first]
        while ahead:
            for port in ahead.pop().demand.ports:
                if port in ports:
                    continue
                ports.add(port)
                for other in self._at_port[port]:
                    if other not in found and other.moves_at <= now:
                        found[other] = None
                        ahead.append(other)
        return list(found)

    def _rate(self, flows: list[ActiveFlow]) -> None:
        limits = [self._limit(flow) for flow in flows]
        if len(flows) > 1:
            rates: Iterable[float] = fair_rates(
                [flow.demand for flow in flows], self.ports.capacity, limits
            ).tolist()
        else:
            rates = limits
        for flow, rate in zip(flows, rates, strict=True):
            self._set(flow, rate / flow.demand.rate)

    def _limit(self, flow: ActiveFlow) -> float:
        """What a transfer could use of its busiest port, beside work and others that its processes'
        threads move.
        """
        slower, ports, now = self.slower[1] if flow.beside else 1.0, self.ports, self.clock.now
        crowd = 1
        if ports.crossing:
            threads = [port for port in flow.demand.ports if ports.is_thread(port)]
            moving = [
                sum(other.moves_at <= now for other in self._at_port[port]) for port in threads
            ]
            crowd = max(moving, default=1)
        return flow.demand.rate / (slower * (1.0 + (crowd - 1) * ports.crossing))

    def _set(self, flow: ActiveFlow, speed: float) -> None:
        if flow.set_speed(speed, self.clock.now):
            flow.asked = flow.end
            self.clock.put(flow.end, lambda: self._ring(flow))
