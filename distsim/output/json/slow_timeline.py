"""Writes a recorded job and its ideal for Perfetto, in Chrome's trace event format.

Each rank is a process with a thread for its host and one for each stream or kind of communication.
A second process shows the same rank in the ideal. Waiting and transfer are separate slices. A flow
arrow leads from the last rank that arrives to those that waited for it. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from distsim.analysis.slow_jobs.slow_job import SlowJob
from distsim.analysis.slow_jobs.waiting import last_to_start
from distsim.trace.recordings.event_graph import Times

#: Process numbers of ideal ranks begin here.
_IDEAL = 1_000_000
#: Shorter waits have no slice.
_LEAST_WAIT_NS = 1000.0


def slow_timeline(job: SlowJob) -> str:
    """The whole file."""
    graph = job.groups.graph
    columns = graph.columns
    events = list(_names(job))
    events += _slices(job, columns.start, columns.end, 0)
    start, end = graph.replay(job.ideal_own, job.ideal_gap)
    events += _slices(job, start, end, _IDEAL)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(job: SlowJob) -> Iterator[dict[str, object]]:
    for offset, kind in ((0, "recorded"), (_IDEAL, "ideal")):
        for rank in job.groups.ranks:
            pid = offset + rank
            name = f"rank {rank}, {kind}"
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            order = {"sort_index": 2 * rank + (offset > 0)}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": order}
            host = {"name": "host"}
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": 0, "args": host}


def _slices(job: SlowJob, start: Times, end: Times, offset: int) -> Iterator[dict[str, object]]:
    graph = job.groups.graph
    columns = graph.columns
    step_starts = _step_starts(job, start)
    last = last_to_start(job.groups)
    arrivals = np.full(graph.meeting_count + 1, -np.inf)
    counted = columns.provides & (columns.meeting >= 0)
    np.maximum.at(arrivals, columns.meeting[counted], start[counted])
    for row in range(len(graph)):
        rank, meeting = int(columns.rank[row]), int(columns.meeting[row])
        shift = float(step_starts[row])
        place = {"pid": offset + rank, "tid": int(columns.lane[row])}
        label = graph.labels[columns.label[row]]
        begin, finish = float(start[row]), float(end[row])
        arrival = float(arrivals[meeting]) if meeting >= 0 and columns.waits[row] else begin
        if arrival - begin > _LEAST_WAIT_NS:
            late = job.groups.ranks[last[meeting]]
            yield _slice(f"waiting for rank {late}", begin + shift, arrival + shift, place)
            if offset == 0:
                yield from _arrow(row, late, arrival + shift, place, int(columns.lane[row]))
            begin = arrival
        yield _slice(label, begin + shift, finish + shift, place)


def _step_starts(job: SlowJob, start: Times) -> Times:
    """By row, how far its step is moved; independent steps would all begin at zero."""
    graph = job.groups.graph
    if not graph.independent_steps:
        return np.zeros(len(graph))
    return np.asarray(graph.columns.step * (graph.columns.end.max() + 1e6))


def _slice(name: str, begin: float, end: float, place: dict[str, int]) -> dict[str, object]:
    return {"ph": "X", "name": name, "ts": begin / 1e3, "dur": max(end - begin, 0) / 1e3, **place}


def _arrow(
    number: int, late: int, time: float, place: dict[str, int], lane: int
) -> Iterator[dict[str, object]]:
    """From the rank that arrived last to one that waited for it."""
    flow = {"cat": "wait", "name": "arrives", "id": number, "ts": time / 1e3}
    yield {"ph": "s", **flow, "pid": late, "tid": lane}
    yield {"ph": "f", "bp": "e", **flow, **place}
