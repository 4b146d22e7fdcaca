"""Replays a trace with its recorded times: also communication takes as long as it did.

The event graph of the recording is evaluated again. Without a scale, every time is reproduced to
the nanosecond. With one, computes or pauses take another time, waits follow from that, and each
communication still takes its recorded time after its last member arrives. On another cluster, it
takes the time that the engine predicts for it in a simulated replay there, shared links included.

Times that are no event of the graph, such as the posting of a request, move with the host: they
keep their distance to the host's events around them. Calls that never ended are in no graph and
move in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.analysis.slow_jobs.job_changes import JobChanges, changed_work
from distsim.analysis.slow_jobs.peer_groups import find_peer_groups
from distsim.analysis.timeline import Timeline, build_timeline
from distsim.backends import BACKEND_PROFILES
from distsim.common.errors import UsageError
from distsim.simulation.trace_replay import ClusterChoice, ReplayResult, replay_trace
from distsim.simulation.trace_replay.rebuild import UNSCALED, ReplayScale
from distsim.trace.model import TIME_COLUMNS, Trace, TraceColumn
from distsim.trace.recordings.event_graph import EventGraph, Flags, Numbers, Times
from distsim.trace.recordings.readers.distsim_trace import HOST_LANE, recording_of_trace
from distsim.trace.run_end import is_partial

_NO_CHANGES = JobChanges()


@dataclass(frozen=True)
class RecordedReplay:
    """``trace`` has the rows of ``source`` with the times of the replay.

    ``events``: how many events the graph has. ``largest_change_ns``: by how much the replay moves
    an event; 0 without a change. ``cluster``: the hardware model whose predicted times
    communication takes, empty if it takes the recorded ones.
    """

    source: Trace
    trace: Trace
    events: int
    largest_change_ns: int
    cluster: str = ""

    @cached_property
    def timeline(self) -> Timeline:
        """How the time is spent."""
        return build_timeline(self.trace)

    @property
    def makespan_ns(self) -> int:
        """The duration of the replayed run."""
        return self.trace.makespan_ns

    @property
    def outcome(self) -> str:
        """The recorded outcome; "partial" for a run that did not come to its end."""
        if is_partial(self.source):
            return "partial"
        return str(self.source.header.get("outcome") or "completes")


class _MovedEvents(NamedTuple):
    """The events of a graph, and by how much the replay moves their starts and ends."""

    graph: EventGraph
    start: Times
    end: Times


def replay_as_recorded(
    trace: Trace,
    *,
    name: str = "trace",
    scale: ReplayScale = UNSCALED,
    changes: JobChanges = _NO_CHANGES,
    cluster: ClusterChoice = None,
) -> RecordedReplay:
    """Evaluate the recorded events of a trace again. Raises UsageError if no call ended.

    ``cluster``: communication takes the time that is predicted there. Its name in ``changes`` is
    not used.
    """
    if not len(trace):
        raise UsageError(f"{name} contains no calls", "record a run with at least one call")
    if not _has_ended_calls(trace):
        return RecordedReplay(trace, trace, 0, 0)
    graph = recording_of_trace(trace, name).graph
    own, gap = _scaled(trace, graph, scale)
    if changes.like_peers or changes.factors:
        groups = find_peer_groups(graph, np.ones(len(graph.steps), dtype=bool))
        own = np.rint(changed_work(groups, own, changes, _computes(trace, graph)))
    cluster_name = ""
    if cluster is not None:
        predicted = replay_trace(trace, cluster=cluster)
        own = _with_predicted_transfers(graph, own, predicted, name)
        cluster_name = predicted.cost.name
    start, end = graph.replay(own, gap)
    moved = _MovedEvents(graph, start - graph.columns.start, end - graph.columns.end)
    change = round(float(max(np.abs(moved.start).max(), np.abs(moved.end).max())))
    return RecordedReplay(trace, _moved_trace(trace, moved), len(graph), change, cluster_name)


def _with_predicted_transfers(
    graph: EventGraph, own: Times, predicted: ReplayResult, name: str
) -> Times:
    """The own times, with those of communication from a simulated replay of the same calls.

    Raises UsageError if a call does not end in that replay.
    """
    there = recording_of_trace(predicted.trace, name).graph
    rows = np.flatnonzero(~there.is_work)
    time_of = np.full(len(predicted.trace), np.nan)
    time_of[_sources(there)[rows]] = there.own[rows]
    result = np.where(graph.is_work, own, time_of[_sources(graph)])
    if np.isnan(result).any():
        raise UsageError(
            f"{name}: some calls of this trace do not end on {predicted.cost.name}, so they have "
            "no predicted times",
            "replay it without --as-recorded to see which",
        )
    return result


def _has_ended_calls(trace: Trace) -> bool:
    return bool((np.maximum(trace["returned_ns"], trace["finished_ns"]) >= 0).any())


def _scaled(trace: Trace, graph: EventGraph, scale: ReplayScale) -> tuple[Times, Times]:
    """The recorded own times and gaps, with those of computes and pauses scaled."""
    own, gap = graph.own.copy(), graph.gap.copy()
    columns = graph.columns
    own[_computes(trace, graph)] *= scale.compute
    is_pause = (columns.lane == HOST_LANE) | ~graph.is_work
    # The time before the first call of a rank is no pause between calls.
    first = np.unique(columns.rank, return_index=True)[1]
    is_pause[first] = False
    gap[is_pause] *= scale.gaps
    return np.rint(own), np.rint(gap)


def _computes(trace: Trace, graph: EventGraph) -> Flags:
    """The events that are computations."""
    is_compute = trace.ops("compute")[_sources(graph)] & graph.is_work
    profile = BACKEND_PROFILES.get(str(trace.header.get("backend")))
    if profile is not None and profile.device:
        # On streams, the host's row of a compute is its launch.
        is_compute &= graph.columns.lane != HOST_LANE
    return np.asarray(is_compute)


def _moved_trace(trace: Trace, moved: _MovedEvents) -> Trace:
    columns = {name: column.copy() for name, column in trace.columns.items()}
    ranks = trace["rank"]
    for rank in np.unique(ranks):
        rows = np.flatnonzero(ranks == rank)
        anchors, shifts = _host_shifts(moved, int(rank))
        for name in TIME_COLUMNS:
            columns[name][rows] = _shifted(trace[name][rows], anchors, shifts)
    _move_work(trace, moved, columns)
    header = dict(trace.header)
    if header.get("makespan_ns") is not None:
        header["makespan_ns"] = 0
        latest = Trace(header, trace.tables, columns).makespan_ns
        unchanged = not (moved.start.any() or moved.end.any())
        # A recording may have ended later than its last call.
        header["makespan_ns"] = trace.makespan_ns if unchanged else latest
    return Trace(header, trace.tables, columns)


def _host_shifts(moved: _MovedEvents, rank: int) -> tuple[Times, Times]:
    """The recorded times of the host's events, and by how much each of them moves."""
    columns = moved.graph.columns
    rows = np.flatnonzero((columns.rank == rank) & (columns.lane == HOST_LANE))
    times = np.stack([columns.start[rows], columns.end[rows]], axis=1).ravel()
    shifts = np.stack([moved.start[rows], moved.end[rows]], axis=1).ravel()
    order = np.argsort(times, kind="stable")
    return times[order], shifts[order]


def _shifted(times: TraceColumn, anchors: Times, shifts: Times) -> NDArray[np.int64]:
    happened = times >= 0
    if not len(anchors):
        return times.astype(np.int64)
    moved = times + np.rint(np.interp(times, anchors, shifts)).astype(np.int64)
    return np.where(happened, np.maximum(moved, 0), times)


def _move_work(trace: Trace, moved: _MovedEvents, columns: dict[str, TraceColumn]) -> None:
    """Set the times of communications, and of work on streams, from their own events."""
    graph = moved.graph
    events = np.flatnonzero((graph.columns.lane != HOST_LANE) | ~graph.is_work)
    rows = _sources(graph)[events]
    ended = np.rint(moved.end[events]).astype(np.int64)
    began = np.rint(moved.start[events]).astype(np.int64)
    # A communication begins when its last member arrives, so it keeps its distance to its end.
    began = np.where(graph.is_work[events], began, ended)
    for name, shift in (("started_ns", began), ("finished_ns", ended)):
        recorded = trace[name][rows]
        columns[name][rows] = np.where(recorded >= 0, recorded + shift, recorded)


def _sources(graph: EventGraph) -> Numbers:
    assert graph.columns.source is not None, "the graph of a trace knows the rows of the trace"
    return graph.columns.source


__all__ = ["RecordedReplay", "replay_as_recorded"]
