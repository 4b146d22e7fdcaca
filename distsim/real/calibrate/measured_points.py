"""Measured durations of operations, from the results of a bench or from a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from distsim.operations.registry import OPERATIONS
from distsim.real.bench.measurement import BenchResult
from distsim.trace.model import Trace, TraceCall


class MeasuredPoint(NamedTuple):
    """The measured time of one operation at one size.

    ``group``: ranks in each group, which extends over ``nodes`` nodes; ``ranks``: busy ranks on
    each node. ``ns``: the median over ``samples``. ``spread``: half the distance between the
    quartiles, divided by the median.
    """

    op: str
    group: int
    ranks: int
    nodes: int
    nbytes: int
    ns: int
    spread: float = 0.0
    samples: int = 1


class Circumstance(NamedTuple):
    """Under which the times of a trace are comparable."""

    op: str
    group: int
    nodes: int
    nbytes: int


def points_from_bench(result: BenchResult) -> tuple[MeasuredPoint, ...]:
    """Everything that a bench measured, on one node."""
    return tuple(
        MeasuredPoint(
            row.op, row.group, row.ranks, 1, row.nbytes, row.median_ns, row.spread, row.samples
        )
        for row in result.rows
        if row.median_ns > 0
    )


def points_from_trace(trace: Trace) -> tuple[MeasuredPoint, ...]:
    """Medians over the calls that met.

    A duration lasts from the last start to the last finish. Calls that were delayed by other work
    are included.
    """
    local_size = int(trace.header.get("local_size") or trace.world_size) or 1
    samples: dict[Circumstance, list[int]] = defaultdict(list)
    for calls in _calls_by_match(trace).values():
        if len(calls) < 2 or not all(_has_finished(call) for call in calls):
            continue
        last_start_ns = max(max(call.posted_ns, call.started_ns) for call in calls)
        duration_ns = max(call.finished_ns for call in calls) - last_start_ns
        if duration_ns > 0:
            samples[_circumstance(calls, local_size)].append(duration_ns)
    busy_ranks = min(local_size, trace.world_size)
    return tuple(
        _measured_point(circumstance, busy_ranks, durations)
        for circumstance, durations in samples.items()
    )


def _calls_by_match(trace: Trace) -> dict[int, list[TraceCall]]:
    matches: dict[int, list[TraceCall]] = defaultdict(list)
    for call in trace.rows():
        if call.match >= 0 and _is_communication(call.op):
            matches[call.match].append(call)
    return matches


def _is_communication(op: str) -> bool:
    return op in OPERATIONS and OPERATIONS[op].kind in ("p2p", "collective")


def _has_finished(call: TraceCall) -> bool:
    return call.posted_ns >= 0 and call.finished_ns >= 0


def _circumstance(calls: Sequence[TraceCall], local_size: int) -> Circumstance:
    first = calls[0]
    op = first.op if OPERATIONS[first.op].kind == "collective" else "send"
    nodes = len({call.rank // local_size for call in calls})
    return Circumstance(op, len(calls), nodes, max(call.nbytes for call in calls))


def _measured_point(
    circumstance: Circumstance, busy_ranks: int, durations: Sequence[int]
) -> MeasuredPoint:
    low, median, high = np.percentile(durations, (25, 50, 75))
    return MeasuredPoint(
        circumstance.op,
        circumstance.group,
        busy_ranks,
        circumstance.nodes,
        circumstance.nbytes,
        int(median),
        float((high - low) / 2 / median),
        len(durations),
    )


def pool_points(points: Iterable[MeasuredPoint]) -> tuple[MeasuredPoint, ...]:
    """One point for each circumstance: the median of the points that several sources have."""
    groups: dict[tuple[str, int, int, int, int], list[MeasuredPoint]] = defaultdict(list)
    for point in points:
        groups[point[:5]].append(point)
    return tuple(
        MeasuredPoint(
            *circumstance,
            ns=int(np.median([point.ns for point in same])),
            spread=max(point.spread for point in same),
            samples=sum(point.samples for point in same),
        )
        for circumstance, same in sorted(groups.items())
    )
