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
    """``compute + exposed_comm + waiting + idle == makespan``. ``finished_ns`` is -1 for a rank
    that never came to its end.
    """

    rank: int
    compute_ns: int
    exposed_comm_ns: int
    waiting_ns: int
    idle_ns: int
    finished_ns: int


class CollectiveTimes(NamedTuple):
    """All calls of one collective with one size on one group. Bandwidths in GB/s, as nccl-tests
    defines them.
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
    """Made by `timeline`. ``iteration_ns``: median duration of an iteration after the first, None
    without a second.
    """

    makespan_ns: int
    iteration_ns: int | None
    ranks: tuple[RankTimes, ...]
    collectives: tuple[CollectiveTimes, ...]
    critical_path: tuple[CriticalPathSegment, ...]


def build_timeline(trace: Trace, makespan_ns: int | None = None) -> Timeline:
    """Measure a run. ``makespan_ns`` overrides the trace's (a longer one adds idle or waiting time
    at the end).
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
    """Intervals of all ranks, merged as layers are laid over each other; ``lengths`` is what they
    cover, rank by rank.
    """

    def __init__(self, world_size: int, makespan_ns: int) -> None:
        self._span = makespan_ns + 1  # ranks are laid end to end, one apart
        self._edges = np.arange(world_size + 1, dtype=np.int64) * self._span
        self._starts = self._ends = np.empty(0, dtype=np.int64)
        self.lengths = np.zeros(world_size, dtype=np.int64)

    def add(self, these: BoolArray, rank: IntArray, start: IntArray, end: IntArray) -> IntArray:
        """Lay some of these intervals over what is there; returns by how much each rank's cover
        grew.
        """
        keep = these & (start < end)
        offset = rank[keep].astype(np.int64) * self._span
        starts = np.concatenate([self._starts, start[keep] + offset])
        ends = np.concatenate([self._ends, end[keep] + offset])
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        if len(starts):
            first = np.flatnonzero(np.concatenate([[True], starts[1:] > reach[:-1]]))
            starts, ends = starts[first], np.concatenate([reach[first[1:] - 1], reach[-1:]])
        self._starts, self._ends = starts, ends
        covered = np.concatenate([[0], np.cumsum(ends - starts)])
        at = covered[np.searchsorted(starts, self._edges)]
        before, self.lengths = self.lengths, at[1:] - at[:-1]
        return self.lengths - before


def rank_times(trace: Trace, makespan_ns: int) -> tuple[RankTimes, ...]:
    """The four shares of every rank."""
    size, rank = trace.world_size, trace["rank"]
    posted, returned, started, finished = (
        trace[f"{n}_ns"] for n in ("posted", "returned", "started", "finished")
    )
    died = np.minimum(_death_times(trace, size), makespan_ns)
    last = np.where(died >= 0, died, makespan_ns)[rank] if size else rank
    computing, sleeping, local = trace.ops(*COMPUTE_OPS), trace.ops("sleep"), trace.ops(*LOCAL_OPS)
    made, ran = posted >= 0, started >= 0
    till = np.minimum(np.where(finished >= 0, finished, last), last)
    back = np.minimum(np.where(returned >= 0, returned, last), last)
    cover = _IntervalUnion(size, makespan_ns)

    def add(mask: BoolArray, start: IntArray, end: IntArray) -> IntArray:
        return cover.add(mask, rank, start, end)

    hosted = trace.rows_with_text("queue", frozenset(("host",))) & _host_enqueues(trace)
    compute = add(computing & ran & ~hosted, started, till)
    exposed = add(
        ((trace["match"] >= 0) | trace.ops(*REMOTE_OPS)) & ~local & ran & (finished >= 0),
        started,
        till,
    )
    compute = compute + add(computing & ran & hosted, started, till)
    waiting = add(made & ~computing & ~sleeping, posted, back)
    if _host_enqueues(trace):
        asleep = made & sleeping
        add(asleep, np.where(ran, started, posted), np.where(ran, till, back))
        start = np.minimum(np.where(ran & ((finished >= 0) | computing), started, last), last)
        waiting = waiting + add(
            made & ~sleeping & ~trace.ops("wait", "wait_stream", "synchronize"), posted, start
        )
    idle = makespan_ns - compute - exposed - waiting
    ends = _rank_ends(trace, died)
    columns = (np.arange(size), compute, exposed, waiting, idle, ends)
    return tuple(RankTimes(*row) for row in zip(*(c.tolist() for c in columns), strict=True))


def _host_enqueues(trace: Trace) -> bool:
    """Did the host only enqueue, while a device worked?"""
    profile = BACKEND_PROFILES.get(str(trace.header.get("backend")))
    return profile is not None and profile.device


def _death_times(trace: Trace, size: int) -> IntArray:
    """When a rank's process was gone: ``header['ends']`` lists [rank, status, at_ns] of those that
    did not end by themselves.
    """
    died = np.full(size, NEVER, dtype=np.int64)
    for rank, status, at_ns in trace.header.get("ends", ()):
        if status not in ("ended", "blocked") and 0 <= rank < size:
            died[rank] = at_ns
    return died


def _rank_ends(trace: Trace, died: IntArray) -> IntArray:
    """The last thing a rank finished; -1 where it is still in a call, or its device is. An exit
    does not return: there it ends.
    """
    rank, leaves, ends = trace["rank"], trace.ops("exit"), np.zeros(len(died), dtype=np.int64)
    np.maximum.at(ends, rank, np.maximum(trace["returned_ns"], trace["finished_ns"]))
    np.maximum.at(ends, rank[leaves], trace["posted_ns"][leaves])
    stuck = (trace["posted_ns"] >= 0) & (trace["returned_ns"] < 0) & ~leaves
    if _host_enqueues(trace):
        stuck |= (
            (trace["posted_ns"] >= 0) & (trace["finished_ns"] < 0) & trace.ops(*_COMMUNICATION_OPS)
        )
    ends[rank[stuck]] = NEVER
    return np.where(died >= 0, died, ends)


def iteration_ns(trace: Trace) -> int | None:
    """Median duration of the iterations after the first, each taken from end to end over all ranks;
    whole ones only.
    """
    iteration, returned = trace["iteration"], trace["returned_ns"]
    count = int(iteration.max()) + 1 if len(trace) else 0
    if count < 2:
        return None
    ends = np.full(count, NEVER, dtype=np.int64)
    inside = iteration >= 0
    np.maximum.at(ends, iteration[inside], np.maximum(returned, trace["finished_ns"])[inside])
    broken = iteration[inside & (trace["posted_ns"] >= 0) & (returned < 0)]
    whole = int(broken.min()) if len(broken) else count
    steps = np.diff(ends[:whole])
    return int(np.median(steps)) if len(steps) else None


# --- collectives ---


def collective_times(trace: Trace) -> tuple[CollectiveTimes, ...]:
    """One row per (operation, group, bytes), in the order in which they first started."""
    return tuple(times_of_collective(trace, *one[:6]) for one in collective_totals(trace))


class CollectiveTotals(NamedTuple):
    """All calls of an operation with one size on a group (numbers in the trace's tables): how many,
    how long, when the first began.
    """

    op: int
    group: int
    nbytes: int
    calls: int
    total_ns: int
    parties: int
    began_ns: int


def collective_totals(trace: Trace) -> tuple[CollectiveTotals, ...]:
    """What met, by (operation, group, bytes), in the order in which they first started."""
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
    groups = trace.header.get("groups", ())
    n = len(groups[group][1]) if 0 <= group < len(groups) else parties
    name = trace.tables["op"][op]
    algbw = nbytes * count / total_ns if total_ns else 0.0
    busbw = algbw * OPERATIONS[name].busbw_factor(n)
    return CollectiveTimes(
        name, trace.text("group", group), n, nbytes, count, round(total_ns / count), algbw, busbw
    )
