"""Ranks without a trace: what their lateness costs, seen from the ranks that have one.

A communication with missing members takes from the last start that is recorded to its end. If a
missing rank starts later, its lateness is part of that time. The reference is the usual transfer of
communications of the same kind whose members are all recorded. If there are none, it is the
predicted time on the given cluster (`cpu-10gbe` by default), or the shortest recorded time if that
is less.

A missing rank is blamed if the same communication is late in *every* step, by 20 % of the step and
ten times the reference. It is also blamed if its communications together cost 20 % of each of ten
steps, compared with complete ones. Nothing separates the rank from the network to it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from distsim.analysis.slow_jobs.peer_groups import PeerGroups
from distsim.analysis.slow_jobs.slow_job import SlowFinding
from distsim.hardware.cluster import Cluster, cluster_from
from distsim.hardware.cost import CostModel
from distsim.trace.recordings.event_graph import Flags, Numbers, Times
from distsim.trace.recordings.recording import Recording, places_in_step

#: Shares of a step: how late a missing rank is in every step, and its cost on average. The first is
#: above the 19 % that appeared in clean runs on an overloaded machine.
_LEAST_LATENESS = 0.20
_LEAST_COST = 0.10
#: Fewer steps do not tell many slightly late messages from a slow network.
_FEWEST_STEPS = 10
_OF_REFERENCE = 10.0
_REFERENCE_CLUSTER = "cpu-10gbe"
#: Predicted times are at most this much too short on this preset.
_PRICE_MARGIN = 1.4


class _Reference(NamedTuple):
    """By row, the usual transfer time, and whether complete communications show it."""

    time: Times
    is_measured: Flags


def missing_rank_finding(
    recording: Recording,
    groups: PeerGroups,
    counted: Flags,
    gap: Times,
    cluster: Cluster | None = None,
) -> SlowFinding | None:
    """The finding about ranks without a trace, if they are late in every step.

    ``gap``: the recorded gaps without late starts. In a table of a pipeline, the gaps of the
    neighbours of a slow stage hide its lateness.
    """
    graph = recording.graph
    incomplete = _incomplete_meetings(recording)
    if not incomplete.any():
        return None
    step_times = graph.step_times(gap=gap)
    reference = _references(groups, incomplete, cluster)
    rows = np.flatnonzero(incomplete[graph.columns.meeting] & ~graph.is_work)
    rows = rows[counted[graph.columns.step[rows]] & (graph.columns.step[rows] >= 0)]
    late = _late_in_every_step(groups, rows, reference.time, counted, step_times)
    if late is None:
        rows = rows[reference.is_measured[rows]]
        late = _slow_in_every_step(groups, rows, reference.time, counted, gap)
    if late is None:
        return None
    costs = _costs_by_step(groups, rows, reference.time, gap)[counted]
    before = float(step_times[counted].mean())
    cost = float(costs.mean())
    if cost < _LEAST_COST * before:
        return None
    meeting = int(graph.columns.meeting[late])
    steps = int(counted.sum())
    blamed = recording.missing_members[meeting]
    return SlowFinding("missing rank", blamed, cost, cost / before, steps, steps)


def _costs_by_step(groups: PeerGroups, rows: Numbers, reference: Times, gap: Times) -> Times:
    """By how much each step is shorter if these communications take their usual time."""
    graph = groups.graph
    own = graph.own.copy()
    own[rows] = np.minimum(own[rows], reference[rows])
    times = graph.step_times(np.stack([graph.own, own], axis=1), gap)
    return np.asarray(times[:, 0] - times[:, 1])


def _slow_in_every_step(
    groups: PeerGroups, rows: Numbers, reference: Times, counted: Flags, gap: Times
) -> int | None:
    """The row with the largest excess, if all rows together cost much in every step.

    A slow stage of a pipeline delays each of its many messages a little.
    """
    if not len(rows) or int(counted.sum()) < _FEWEST_STEPS:
        return None
    shares = _costs_by_step(groups, rows, reference, gap) / groups.graph.step_times(gap=gap)
    if shares[counted].min() <= _LEAST_LATENESS:
        return None
    return int(rows[(groups.graph.own[rows] - reference[rows]).argmax()])


def _late_in_every_step(
    groups: PeerGroups, rows: Numbers, reference: Times, counted: Flags, step_times: Times
) -> int | None:
    """A row of the communication that is late in all counted steps, None without one.

    On a busy machine, some communication is slow in every step, but each time another one.
    """
    columns = groups.graph.columns
    own = groups.graph.own[rows]
    excess = own - reference[rows]
    excess[own <= _OF_REFERENCE * np.maximum(reference[rows], 1.0)] = 0
    shares = excess / step_times[columns.step[rows]]
    least: dict[tuple[int, int], list[float]] = defaultdict(list)
    places = places_in_step(columns.rank, columns.step)[rows]
    keys = list(zip(columns.rank[rows].tolist(), places.tolist(), strict=True))
    for key, share in zip(keys, shares.tolist(), strict=True):
        least[key].append(share)
    needed = int(counted.sum())
    seen = {key: min(values) for key, values in least.items() if len(values) >= needed}
    place = max(seen, key=lambda key: seen[key], default=None)
    if place is None or seen[place] <= _LEAST_LATENESS:
        return None
    return int(rows[keys.index(place)])


def _incomplete_meetings(recording: Recording) -> Flags:
    """By meeting, whether ranks without a trace take part."""
    graph = recording.graph
    result = np.zeros(graph.meeting_count + 1, dtype=bool)
    result[list(recording.missing_members)] = True
    return result


def _references(groups: PeerGroups, incomplete: Flags, cluster: Cluster | None) -> _Reference:
    """The usual transfer of each row's operation and size."""
    graph = groups.graph
    columns = graph.columns
    costs = _TransferCosts(cluster or cluster_from(_REFERENCE_CLUSTER))
    rows = np.flatnonzero(~graph.is_work)
    keys, key_of = np.unique(
        np.stack([columns.label[rows], columns.nbytes[rows]]), axis=1, return_inverse=True
    )
    result = _Reference(np.zeros(len(graph)), np.zeros(len(graph), dtype=bool))
    for number in range(keys.shape[1]):
        same = rows[key_of == number]
        complete = same[~incomplete[columns.meeting[same]]]
        if len(complete):
            result.time[same] = np.median(graph.own[complete])
            result.is_measured[same] = True
        else:
            cost_ns = costs.of(int(keys[1, number]))
            result.time[same] = min(float(graph.own[same].min()), cost_ns)
    return result


class _TransferCosts:
    """Predicted times of a transfer of some bytes to another node and back."""

    def __init__(self, cluster: Cluster) -> None:
        self.model = CostModel(cluster, world_size=2, local_size=1)

    def of(self, nbytes: int) -> float:
        """The time; infinite if the recording holds no size."""
        return _PRICE_MARGIN * 2 * self.model.p2p_ns(0, 1, nbytes) if nbytes else float("inf")
