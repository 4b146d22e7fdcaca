"""How far flows have progressed: a kernel on its own, or thousands of transfers at once.

Key idea: when a transfer of a large all-to-all starts or ends, thousands of others get another
speed. While bytes of a transfer move, its progress is therefore a row of an array, and a few numpy
calls change all rows. A test compares the two ways.

This module does not decide how fast a flow is; see `distsim.engine.link_sharing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from distsim.hardware.cost.max_min_fairness import DemandTable, PortDemand

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Tolerance for rounding errors, ns: a smaller remainder does not delay the end to the next ns.
_ROUNDING_NS: Final = 1e-6
#: The slot of a flow whose progress is not in a `ProgressTable`.
NO_SLOT: Final = -1
_FIRST_SIZE: Final = 64
#: A table is compacted if fewer than one slot of so many is taken.
_SLOTS_PER_FLOW: Final = 4
#: The end in a slot that is free: later than every time that can occur.
_NEVER: Final = np.iinfo(np.int64).max
#: The columns of a `ProgressTable`, named like the attributes of `ActiveFlow`.
_PROGRESS: Any = np.dtype(
    [
        ("demand", np.int64),
        ("remaining_ns", np.float64),
        ("speed", np.float64),
        ("since", np.int64),
        ("end", np.int64),
    ]
)


class ActiveFlow:
    """A transfer, or a kernel (``is_work``; it uses no ports), that is in progress.

    - ``remaining_ns``: how long it would still take alone, as of time ``since``; ``speed``: how
      many ns of that pass per ns of simulated time (1.0: as if alone).
    - ``moves_at``: when its bytes begin to move; ``is_sharing``: this time has been scheduled or
      has passed, so the flow takes part in the sharing of its ports.
    - ``overlapping``: for a transfer, the number of kernels that run on its ranks; for a kernel,
      the number of transfers of its rank.
    - ``end``: when it ends at its present speed; ``scheduled_end``: for a kernel, the time for
      which the clock has an entry. The entry may be too early, never too late.
    - ``slot``: where a `ProgressTable` keeps the progress; then the attributes here are outdated.
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
        "slot",
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
        self.slot = NO_SLOT

    def set_speed(self, speed: float, now: int) -> bool:
        """Continue at a new speed; whether it then ends before the clock's entry for it."""
        if speed == self.speed:
            return False
        # Not before `moves_at`: until then no bytes move, so a speed has no effect.
        since = max(self.since, min(now, self.end))
        self.remaining_ns = max(0.0, self.remaining_ns - (since - self.since) * self.speed)
        self.since = since
        self.speed = speed
        self.end = since + ceil(self.remaining_ns / speed - _ROUNDING_NS)
        return self.end < self.scheduled_end


class ProgressTable:
    """The progress of transfers, in slots, which are in the order in which the transfers entered.

    ``flows``: the transfer of each slot, None after it has left. ``count``: how many are in it.
    """

    def __init__(self) -> None:
        self.demands = DemandTable()
        self.flows: list[ActiveFlow | None] = []
        self.count = 0
        self._columns = np.zeros(0, dtype=_PROGRESS)
        self._set_size(_FIRST_SIZE)

    def _set_size(self, size: int) -> None:
        """Move the transfers to the first slots of new columns."""
        staying = [flow for flow in self.flows if flow is not None]
        columns = np.zeros(size, dtype=_PROGRESS)
        if staying:
            columns[: len(staying)] = self._columns[[flow.slot for flow in staying]]
        for slot, flow in enumerate(staying):
            flow.slot = slot
        self.flows = list(staying)
        self._columns = columns
        self.demand: IntArray = columns["demand"]
        self.remaining_ns: FloatArray = columns["remaining_ns"]
        self.speed: FloatArray = columns["speed"]
        self.since: IntArray = columns["since"]
        self.end: IntArray = columns["end"]

    def enter(self, flows: Sequence[ActiveFlow]) -> None:
        """Take over the progress of some transfers."""
        self._make_room(len(flows))
        first = len(self.flows)
        for slot, flow in enumerate(flows, first):
            flow.slot = slot
        self.flows += flows
        self.count += len(flows)
        entered = slice(first, len(self.flows))
        self.demand[entered] = self.demands.numbers([flow.demand for flow in flows])
        self.remaining_ns[entered] = [flow.remaining_ns for flow in flows]
        self.speed[entered] = [flow.speed for flow in flows]
        self.since[entered] = [flow.since for flow in flows]
        self.end[entered] = [flow.end for flow in flows]

    def _make_room(self, count: int) -> None:
        """Make room for ``count`` more transfers, and remove free slots if there are many."""
        is_sparse = len(self.flows) > max(_FIRST_SIZE, _SLOTS_PER_FLOW * self.count)
        if is_sparse or len(self.flows) + count > len(self._columns):
            self._set_size(max(_FIRST_SIZE, 2 * (self.count + count)))

    def leave(self, flow: ActiveFlow) -> None:
        """Remove a transfer that has ended."""
        flow.end = int(self.end[flow.slot])
        self.flows[flow.slot] = None
        self.end[flow.slot] = _NEVER
        flow.slot = NO_SLOT
        self.count -= 1

    def slots(self) -> IntArray:
        """The slots of all transfers."""
        return np.flatnonzero(self.end[: len(self.flows)] != _NEVER)

    def next_end(self) -> int | None:
        """When the next transfer ends; None if there are none."""
        return int(self.end[: len(self.flows)].min()) if self.count else None

    def ended(self, now: int) -> list[ActiveFlow]:
        """The transfers that have ended by now, in the order of their slots."""
        slots = np.flatnonzero(self.end[: len(self.flows)] <= now).tolist()
        flows = [self.flows[slot] for slot in slots]
        return [flow for flow in flows if flow is not None]

    def set_speeds(self, slots: IntArray, speeds: FloatArray, now: int) -> None:
        """As `ActiveFlow.set_speed`, for many transfers."""
        changes = speeds != self.speed[slots]
        slots, speeds = slots[changes], speeds[changes]
        since_before = self.since[slots]
        since = np.maximum(since_before, np.minimum(now, self.end[slots]))
        moved_ns = (since - since_before) * self.speed[slots]
        remaining_ns = np.maximum(0.0, self.remaining_ns[slots] - moved_ns)
        self.remaining_ns[slots] = remaining_ns
        self.since[slots] = since
        self.speed[slots] = speeds
        self.end[slots] = since + np.ceil(remaining_ns / speeds - _ROUNDING_NS).astype(np.int64)
