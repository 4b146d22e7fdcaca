"""The time that members of communications wait for the last one to start."""

from __future__ import annotations

import numpy as np

from distsim.analysis.slow_jobs.peer_groups import PeerGroups
from distsim.analysis.slow_jobs.slow_job import WaitForRank
from distsim.trace.recordings.event_graph import Flags, Numbers, Times


def last_to_start(groups: PeerGroups) -> Numbers:
    """By meeting, the position of the rank that started last; -1 for meetings of one rank."""
    graph = groups.graph
    columns = graph.columns
    rows = np.flatnonzero(~graph.is_work & columns.provides)
    last = np.full(graph.meeting_count + 1, -1)
    is_last = columns.start[rows] >= graph.latest_start[columns.meeting[rows]]
    last[columns.meeting[rows[is_last]]] = groups.rank_index[rows[is_last]]
    return last


def waits_for_rank(groups: PeerGroups, rank: int, counted: Flags) -> WaitForRank | None:
    """Where and how long the other ranks wait for a rank, by waiting rank per step."""
    graph = groups.graph
    columns = graph.columns
    position = groups.ranks.index(rank)
    in_step = (columns.step >= 0) & counted[np.maximum(columns.step, 0)]
    late = last_to_start(groups)[columns.meeting] == position
    rows = np.flatnonzero(~graph.is_work & in_step & late & (groups.rank_index != position))
    rows = rows[columns.waits[rows]]
    if not len(rows):
        return None
    waited = graph.waited[rows]
    by_label = np.bincount(columns.label[rows], weights=waited, minlength=len(graph.labels))
    label = int(by_label.argmax())
    if by_label[label] <= 0:
        return None
    sizes = columns.nbytes[rows][columns.label[rows] == label]
    steps = max(int(counted.sum()), 1)
    shown = {}
    for other in np.unique(groups.rank_index[rows]):
        own_rows = rows[groups.rank_index[rows] == other]
        begin = columns.start[own_rows] + _step_offset(groups)[own_rows]
        shown[groups.ranks[other]] = _covered(begin, begin + graph.waited[own_rows]) / steps
    return WaitForRank(graph.labels[label], int(np.median(sizes)), shown)


def _step_offset(groups: PeerGroups) -> Times:
    """Moves independent steps apart, which otherwise begin at the same time."""
    columns = groups.graph.columns
    if not groups.graph.independent_steps:
        return np.zeros(len(columns.step))
    return np.asarray(columns.step * (columns.end.max() + 1))


def _covered(begin: Times, end: Times) -> float:
    """The total length of intervals, overlaps counted once: asynchronous waits may overlap."""
    order = np.argsort(begin, kind="stable")
    reached = np.maximum.accumulate(end[order])
    covered_from = np.concatenate([[-np.inf], reached[:-1]])
    return float(np.maximum(reached - np.maximum(begin[order], covered_from), 0).sum())
