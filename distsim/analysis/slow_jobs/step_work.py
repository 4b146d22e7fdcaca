"""The work of each rank in each step, and its excess over the peers."""

from __future__ import annotations

import numpy as np

from distsim.analysis.slow_jobs.ideal_times import low_median
from distsim.analysis.slow_jobs.peer_groups import PeerGroups
from distsim.trace.recordings.event_graph import Times


def work_by_label(groups: PeerGroups, own: Times) -> Times:
    """The total own time of work, by rank, step and label."""
    graph = groups.graph
    shape = (len(groups.ranks), len(graph.steps), len(graph.labels))
    rows = np.flatnonzero(graph.is_work & (graph.columns.step >= 0))
    cells = (groups.rank_index[rows], graph.columns.step[rows], graph.columns.label[rows])
    totals = np.zeros(shape)
    np.add.at(totals, cells, own[rows])
    return totals


def peer_work(groups: PeerGroups, totals: Times) -> Times:
    """For each rank, the median of its peers' totals; NaN without peers.

    ``totals`` has a row per rank, and any further axes.
    """
    result = np.full(totals.shape, np.nan)
    for position in range(len(groups.ranks)):
        peers = groups.peers_of(position)
        if peers:
            result[position] = np.median(totals[peers], axis=0)
    return result


def excess_over_others(totals: Times, members: list[int]) -> Times:
    """By step, how much longer ranks work than the mean of all other ranks."""
    others = [position for position in range(len(totals)) if position not in members]
    slow = np.array([low_median(column) for column in totals[members].T])
    return np.asarray(slow - totals[others].mean(axis=0))
