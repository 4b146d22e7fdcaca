"""Ranks without a trace: what their lateness costs, seen from the ranks that have one.

A communication with missing members takes from the last start that is recorded to its end. If a
missing rank starts later, its lateness is part of that time. The reference is the usual transfer of
communications of the same kind whose members are all recorded. If there are none, it is the
predicted time on the preset `cpu-10gbe`, or the shortest recorded time if that is less. A missing
rank is blamed only if in *every* step the same communication with it takes longer than the
reference by 20 % of the step, and ten times longer than the reference itself. Nothing separates the
rank from the network to it.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from distsim.hardware.cluster import cluster_from
from distsim.hardware.cost import CostModel
from distsim.recordings.event_graph import Flags, Numbers, Times
from distsim.recordings.recording import Recording, places_in_step
from distsim.slow_jobs.peer_groups import PeerGroups
from distsim.slow_jobs.slow_job import SlowFinding

#: Of a step: how late a missing rank is in every step, and what it costs on average. The first is
#: above the 19 % that appeared in clean runs on an overloaded machine.
_LEAST_LATENESS = 0.20
_LEAST_COST = 0.10
_OF_REFERENCE = 10.0
_REFERENCE_CLUSTER = "cpu-10gbe"
#: Predicted times are at most this much too short on this preset.
_PRICE_MARGIN = 1.4


def missing_rank_finding(
    recording: Recording, groups: PeerGroups, counted: Flags, step_times: Times
) -> SlowFinding | None:
    """The finding about ranks without a trace, if they are late in every step."""
    graph = recording.graph
    incomplete = _incomplete_meetings(recording)
    if not incomplete.any():
        return None
    reference = _references(groups, incomplete)
    rows = np.flatnonzero(incomplete[graph.columns.meeting] & ~graph.is_work)
    rows = rows[counted[graph.columns.step[rows]] & (graph.columns.step[rows] >= 0)]
    late = _late_in_every_step(groups, rows, reference, counted, step_times)
    if late is None:
        return None
    own = graph.own.copy()
    own[rows] = np.minimum(own[rows], reference[rows])
    before = float(step_times[counted].mean())
    cost = before - float(graph.step_times(own)[counted].mean())
    if cost < _LEAST_COST * before:
        return None
    meeting = int(graph.columns.meeting[late])
    steps = int(counted.sum())
    blamed = recording.missing_members[meeting]
    return SlowFinding("missing rank", blamed, cost, cost / before, steps, steps)


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


def _references(groups: PeerGroups, incomplete: Flags) -> Times:
    """By row, the usual transfer of its operation and size."""
    graph = groups.graph
    columns = graph.columns
    complete_times: dict[tuple[int, int], list[float]] = defaultdict(list)
    all_times: dict[tuple[int, int], list[float]] = defaultdict(list)
    rows = np.flatnonzero(~graph.is_work)
    keys = [(int(columns.label[row]), int(columns.nbytes[row])) for row in rows]
    for row, key in zip(rows, keys, strict=True):
        own = float(graph.own[row])
        all_times[key].append(own)
        if not incomplete[columns.meeting[row]]:
            complete_times[key].append(own)
    prices = _TransferPrices()
    result = np.zeros(len(graph))
    for row, key in zip(rows, keys, strict=True):
        known = complete_times.get(key)
        if known:
            result[row] = np.median(known)
        else:
            result[row] = min(min(all_times[key]), prices.of(key[1]))
    return result


class _TransferPrices:
    """Predicted times of a transfer of some bytes to another node and back."""

    def __init__(self) -> None:
        self.model = CostModel(cluster_from(_REFERENCE_CLUSTER), world_size=2, local_size=1)

    def of(self, nbytes: int) -> float:
        """The time; infinite if the recording holds no size."""
        return _PRICE_MARGIN * 2 * self.model.p2p_ns(0, 1, nbytes) if nbytes else float("inf")
