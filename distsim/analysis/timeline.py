"""Where the time of a run went: per rank, per collective, and along the critical path.

Every instant of a rank belongs to the first of these categories that applies:

- *compute*: a compute (or assign) runs. If the host only enqueues work, computes of the host itself
  (`on: host`) come after communication: like launches, they do not hide it.
- *exposed communication*: a message or collective of the rank is in flight, after its match.
- *waiting*: the host is in a call that has not been matched yet, or waits for a request. On a
  backend whose host runs ahead: a launch is posted and cannot start.
- *idle*: asleep, not started yet, or after the end.

Therefore the four times add up to the makespan exactly. They are computed from the columns of the
trace, for all ranks at once.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.analysis.critical_path import CriticalPathSegment, critical_path
from distsim.backends import BACKEND_PROFILES
from distsim.common.records import dataclass
from distsim.operations.registry import COMPUTE_OPS, LOCAL_OPS, OPERATIONS, REMOTE_OPS
from distsim.trace.model import NEVER, Trace

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_COLLECTIVE_OPS: Final = frozenset(
    name for name, row in OPERATIONS.items() if row.kind == "collective"
)
_COMMUNICATION_OPS: Final = tuple(
    name for name, row in OPERATIONS.items() if row.kind in ("p2p", "collective", "remote")
)


class RankTimes(NamedTuple):
    """The time shares of a rank: ``compute + exposed_comm + waiting + idle == makespan``.

    ``finished_ns`` is -1 for a rank that did not reach its end.
    """

    rank: int
    compute_ns: int
    exposed_comm_ns: int
    waiting_ns: int
    idle_ns: int
    finished_ns: int


class CollectiveTimes(NamedTuple):
    """All calls of one collective with the same size and group.

    Bandwidths are in GB/s, as nccl-tests defines them.
    """

    op: str
    group: str
    n: int  # ranks in the group
    nbytes: int
    calls: int
    duration_ns: int  # from the match to the last rank's end, mean over the calls
    algbw: float
    busbw: float


@dataclass(frozen=True)
class Timeline:
    """Result of `build_timeline`.

    ``iteration_ns`` is the median duration of an iteration after the first, or None if there is
    only one.
    """

    makespan_ns: int
    iteration_ns: int | None
    ranks: tuple[RankTimes, ...]
    collectives: tuple[CollectiveTimes, ...]
    critical_path: tuple[CriticalPathSegment, ...]


def build_timeline(trace: Trace, makespan_ns: int | None = None) -> Timeline:
    """Measure a run.

    ``makespan_ns`` may extend the trace's makespan; the additional time is idle or waiting time at
    the end.
    """
    end = max(makespan_ns or 0, trace.makespan_ns)
    return Timeline(
        end,
        iteration_ns(trace),
        rank_times(trace, end),
        collective_times(trace),
        critical_path(trace, end),
    )


# --- ranks ---


class _IntervalUnion:
    """The union of intervals for each rank, built by adding sets of intervals one after the other.

    ``lengths`` is the covered time of each rank. Because earlier sets keep what they cover, the
    growth of ``lengths`` assigns each instant to the first category that applies.
    """

    def __init__(self, world_size: int, makespan_ns: int) -> None:
        # All ranks share one time axis: rank r's interval starts at r * span. One extra ns keeps
        # intervals of neighbouring ranks apart.
        self._span = makespan_ns + 1
        self._edges = np.arange(world_size + 1, dtype=np.int64) * self._span
        self._starts = self._ends = np.empty(0, dtype=np.int64)
        self.lengths = np.zeros(world_size, dtype=np.int64)

    def add(self, selected: BoolArray, rank: IntArray, start: IntArray, end: IntArray) -> IntArray:
        """Add the selected intervals; return the growth of each rank's covered time."""
        keep = selected & (start < end)
        offset = rank[keep].astype(np.int64) * self._span
        starts = np.concatenate([self._starts, start[keep] + offset])
        ends = np.concatenate([self._ends, end[keep] + offset])
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        if len(starts):
            # A new interval of the union begins where no earlier interval reaches.
            first = np.flatnonzero(np.concatenate([[True], starts[1:] > reach[:-1]]))
            starts, ends = starts[first], np.concatenate([reach[first[1:] - 1], reach[-1:]])
        self._starts, self._ends = starts, ends
        covered = np.concatenate([[0], np.cumsum(ends - starts)])
        at = covered[np.searchsorted(starts, self._edges)]
        before, self.lengths = self.lengths, at[1:] - at[:-1]
        return self.lengths - before


def rank_times(trace: Trace, makespan_ns: int) -> tuple[RankTimes, ...]:
    """The four time shares of every rank."""
    size, rank = trace.world_size, trace["rank"]
    posted, returned, started, finished = (
        trace[f"{n}_ns"] for n in ("posted", "returned", "started", "finished")
    )
    died = np.minimum(_death_times(trace, size), makespan_ns)
    last = np.where(died >= 0, died, makespan_ns)[rank] if size else rank
    computing, sleeping, local = trace.ops(*COMPUTE_OPS), trace.ops("sleep"), trace.ops(*LOCAL_OPS)
    was_posted, was_started = posted >= 0, started >= 0
    end = np.minimum(np.where(finished >= 0, finished, last), last)
    returned_by = np.minimum(np.where(returned >= 0, returned, last), last)
    # The order of the calls of add() below is the priority of the categories.
    cover = _IntervalUnion(size, makespan_ns)

    def add(mask: BoolArray, start: IntArray, end: IntArray) -> IntArray:
        return cover.add(mask, rank, start, end)

    on_host = trace.rows_with_text("queue", frozenset(("host",))) & _host_enqueues(trace)
    compute = add(computing & was_started & ~on_host, started, end)
    transfers = ((trace["match"] >= 0) | trace.ops(*REMOTE_OPS)) & ~local
    exposed = add(transfers & was_started & (finished >= 0), started, end)
    compute = compute + add(computing & was_started & on_host, started, end)
    waiting = add(was_posted & ~computing & ~sleeping, posted, returned_by)
    if _host_enqueues(trace):
        sleep_start = np.where(was_started, started, posted)
        sleep_end = np.where(was_started, end, returned_by)
        add(was_posted & sleeping, sleep_start, sleep_end)
        # A launch waits until its work starts on the device.
        has_start = was_started & ((finished >= 0) | computing)
        work_start = np.minimum(np.where(has_start, started, last), last)
        launches = was_posted & ~sleeping & ~trace.ops("wait", "wait_stream", "synchronize")
        waiting = waiting + add(launches, posted, work_start)
    idle = makespan_ns - compute - exposed - waiting
    ends = _rank_ends(trace, died)
    columns = (np.arange(size), compute, exposed, waiting, idle, ends)
    return tuple(RankTimes(*row) for row in zip(*(c.tolist() for c in columns), strict=True))


def _host_enqueues(trace: Trace) -> bool:
    """Whether the host only enqueued work for a device."""
    profile = BACKEND_PROFILES.get(str(trace.header.get("backend")))
    return profile is not None and profile.device


def _death_times(trace: Trace, size: int) -> IntArray:
    """When each rank's process terminated early; `NEVER` for the other ranks.

    ``header['ends']`` lists [rank, status, at_ns] of ranks that did not end normally.
    """
    died = np.full(size, NEVER, dtype=np.int64)
    for rank, status, at_ns in trace.header.get("ends", ()):
        if status not in ("ended", "blocked") and 0 <= rank < size:
            died[rank] = at_ns
    return died


def _rank_ends(trace: Trace, died: IntArray) -> IntArray:
    """The end of the last call that a rank finished.

    It is -1 if the rank, or its device, is still in a call. A call of exit does not return: the
    rank ends there.
    """
    rank = trace["rank"]
    exits = trace.ops("exit")
    was_posted = trace["posted_ns"] >= 0
    ends = np.zeros(len(died), dtype=np.int64)
    np.maximum.at(ends, rank, np.maximum(trace["returned_ns"], trace["finished_ns"]))
    np.maximum.at(ends, rank[exits], trace["posted_ns"][exits])
    blocked = was_posted & (trace["returned_ns"] < 0) & ~exits
    if _host_enqueues(trace):
        # The host returned at once, but the device still works on the call.
        blocked |= was_posted & (trace["finished_ns"] < 0) & trace.ops(*_COMMUNICATION_OPS)
    ends[rank[blocked]] = NEVER
    return np.where(died >= 0, died, ends)


def iteration_ns(trace: Trace) -> int | None:
    """Median duration of the complete iterations after the first.

    An iteration lasts from the end of the previous one to its own end, over all ranks.
    """
    iteration, returned = trace["iteration"], trace["returned_ns"]
    count = int(iteration.max()) + 1 if len(trace) else 0
    if count < 2:
        return None
    ends = np.full(count, NEVER, dtype=np.int64)
    inside = iteration >= 0
    np.maximum.at(ends, iteration[inside], np.maximum(returned, trace["finished_ns"])[inside])
    incomplete = iteration[inside & (trace["posted_ns"] >= 0) & (returned < 0)]
    complete_count = int(incomplete.min()) if len(incomplete) else count
    steps = np.diff(ends[:complete_count])
    return int(np.median(steps)) if len(steps) else None


# --- collectives ---


def collective_times(trace: Trace) -> tuple[CollectiveTimes, ...]:
    """One entry per (operation, group, bytes), in the order of their first start."""
    return tuple(times_of_collective(trace, *one[:6]) for one in collective_totals(trace))


class CollectiveTotals(NamedTuple):
    """All calls of an operation with the same size and group.

    ``op`` and ``group`` are numbers in the trace's tables. ``began_ns`` is the start of the first
    call.
    """

    op: int
    group: int
    nbytes: int
    calls: int
    total_ns: int
    parties: int
    began_ns: int


def collective_totals(trace: Trace) -> tuple[CollectiveTotals, ...]:
    """Matched collectives by (operation, group, bytes), in the order of their first start."""
    rows = np.flatnonzero(
        trace.ops(*_COLLECTIVE_OPS) & (trace["match"] >= 0) & (trace["finished_ns"] >= 0)
    )
    if not len(rows):
        return ()
    rows = rows[np.argsort(trace["match"][rows], kind="stable")]
    first = np.flatnonzero(np.diff(trace["match"][rows], prepend=NEVER))
    began = np.minimum.reduceat(trace["started_ns"][rows], first)
    lasted = np.maximum.reduceat(trace["finished_ns"][rows], first) - began
    sizes = np.maximum.reduceat(trace["nbytes"][rows], first)
    parties = np.diff(first, append=len(rows))
    seen: dict[tuple[int, int, int], list[int]] = {}
    order = np.argsort(began, kind="stable")
    facts = (trace["op"][rows[first]], trace["group"][rows[first]], sizes, lasted, parties, began)
    for op, group, nbytes, ns, n, at in zip(
        *(column[order].tolist() for column in facts), strict=True
    ):
        entry = seen.setdefault((op, group, nbytes), [0, 0, n, at])
        entry[0] += 1
        entry[1] += ns
    return tuple(CollectiveTotals(*key, *entry) for key, entry in seen.items())


def times_of_collective(
    trace: Trace, op: int, group: int, nbytes: int, count: int, total_ns: int, parties: int
) -> CollectiveTimes:
    """The times of one operation on one group with one size, and its bandwidths in bytes per ns."""
    groups = trace.header.get("groups", ())
    n = len(groups[group][1]) if 0 <= group < len(groups) else parties
    name = trace.tables["op"][op]
    algbw = nbytes * count / total_ns if total_ns else 0.0
    busbw = algbw * OPERATIONS[name].busbw_factor(n)
    return CollectiveTimes(
        name, trace.text("group", group), n, nbytes, count, round(total_ns / count), algbw, busbw
    )
