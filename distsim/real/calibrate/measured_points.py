"""Measured durations from where they come: a bench, a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from distsim.operations.registry import OPERATIONS
from distsim.real.bench.measurement import BenchResult
from distsim.trace.model import Trace, TraceCall


class MeasuredPoint(NamedTuple):
    """``ns``: the median over ``samples``. ``group`` ranks in each group over ``nodes`` nodes,
    ``ranks`` busy on each node.
    """

    op: str
    group: int
    ranks: int
    nodes: int
    nbytes: int
    ns: int
    spread: float = 0.0  # half the distance between quartiles over the median
    samples: int = 1


def points_from_bench(found: BenchResult) -> tuple[MeasuredPoint, ...]:
    """Everything that was measured, on one node."""
    return tuple(
        MeasuredPoint(r.op, r.group, r.ranks, 1, r.nbytes, r.median_ns, r.spread, r.samples)
        for r in found.rows
        if r.median_ns > 0
    )


def points_from_trace(trace: Trace) -> tuple[MeasuredPoint, ...]:
    """Medians over the calls that met: from when the last one was there to the last finish. Calls
    that other work delayed are in it too."""
    met: dict[int, list[TraceCall]] = defaultdict(list)
    for call in trace.rows():
        if (
            call.match >= 0
            and call.op in OPERATIONS
            and OPERATIONS[call.op].kind in ("p2p", "collective")
        ):
            met[call.match].append(call)
    local = int(trace.header.get("local_size") or trace.world_size) or 1
    samples: dict[tuple[str, int, int, int], list[int]] = defaultdict(list)
    for calls in met.values():
        if len(calls) < 2 or min(min(c.posted_ns, c.finished_ns) for c in calls) < 0:
            continue
        op = calls[0].op if OPERATIONS[calls[0].op].kind == "collective" else "send"
        nodes = len({c.rank // local for c in calls})
        took = max(c.finished_ns for c in calls) - max(
            max(c.posted_ns, c.started_ns) for c in calls
        )
        if took > 0:
            samples[op, len(calls), nodes, max(c.nbytes for c in calls)].append(took)
    busy = min(local, trace.world_size)
    return tuple(
        _measured_point(op, n, busy, nodes, nbytes, took)
        for (op, n, nodes, nbytes), took in samples.items()
    )


def _measured_point(
    op: str, group: int, ranks: int, nodes: int, nbytes: int, took: Sequence[int]
) -> MeasuredPoint:
    low, median, high = np.percentile(took, (25, 50, 75))
    return MeasuredPoint(
        op, group, ranks, nodes, nbytes, int(median), float((high - low) / 2 / median), len(took)
    )


def pool_points(points: Iterable[MeasuredPoint]) -> tuple[MeasuredPoint, ...]:
    """One point for each circumstance: the median of those that several sources have."""
    found: dict[tuple[str, int, int, int, int], list[MeasuredPoint]] = defaultdict(list)
    for point in points:
        found[point[:5]].append(point)
    return tuple(
        MeasuredPoint(
            *key,
            int(np.median([p.ns for p in same])),
            max(p.spread for p in same),
            sum(p.samples for p in same),
        )
        for key, same in sorted(found.items())
    )
