"""A communication that is slow again and again, although all members arrive.

The transfer of a communication takes from the arrival of its last member to its end. In a clean
run on a busy machine, some transfer is long in every step, but each time another one. So a finding
needs the same communication of a step to exceed its usual time in a quarter of at least ten steps,
each time by 15 % of the step: the thresholds of an intermittent rank.

The usual time is the median over the steps, so a communication that is slow in most steps looks
normal. With predicted times on a cluster, it is at most ten times the prediction, because hosts and
TCP add to what hardware takes.

All members end such a communication late, so no rank is named as the one with the slow network.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distsim.analysis.slow_jobs.peer_groups import PeerGroups
from distsim.analysis.slow_jobs.slow_job import SlowFinding
from distsim.common.units import show_bytes, show_ns
from distsim.trace.recordings.event_graph import Numbers, Times
from distsim.trace.recordings.recording import Recording

#: The share of a step by which a slow transfer exceeds the usual one, and the share of such steps.
_LEAST_EXCESS = 0.15
_SHARE_OF_STEPS = 0.25
_FEWEST_STEPS = 10
_OF_USUAL = 3.0
_OF_PREDICTED = 10.0
_LEAST_COST = 0.03


class _Transfer(NamedTuple):
    """One communication of a step: rows of its meetings, their transfer times and usual time.

    ``slow``: which of the meetings are slow.
    """

    meetings: Numbers
    times: Times
    usual_ns: float
    slow: Numbers


def slow_communication_finding(
    recording: Recording,
    groups: PeerGroups,
    counted: list[int],
    step_ns: float,
    gap: Times,
    predicted: Times | None = None,
) -> SlowFinding | None:
    """The costliest communication that is slow again and again.

    ``counted``: the numbers of the counted steps. ``predicted``: by row, the time of its transfer
    on a cluster.
    """
    needed = _SHARE_OF_STEPS * len(counted)
    if len(counted) < _FEWEST_STEPS:
        if predicted is None:
            return None
        # A prediction does not come from these few steps, but all of them must exceed it.
        needed = len(counted)
    # The lateness of a member without a trace looks like a long transfer.
    incomplete = list(recording.missing_members)
    transfers = _transfers(groups, counted, step_ns, incomplete, predicted)
    slow = [transfer for transfer in transfers if len(transfer.slow) >= needed]
    if not slow:
        return None
    worst = max(slow, key=lambda transfer: float(transfer.times[transfer.slow].sum()))
    cost = _cost_ns(groups, counted, worst, transfers, gap)
    if cost <= _LEAST_COST * step_ns:
        return None
    return _finding(groups, counted, worst, cost, step_ns)


def _transfers(
    groups: PeerGroups,
    counted: list[int],
    step_ns: float,
    incomplete: list[int],
    predicted: Times | None,
) -> list[_Transfer]:
    """All communications of a step, by the place of their first member."""
    graph = groups.graph
    columns = graph.columns
    rows = np.flatnonzero(~graph.is_work & np.isin(columns.step, counted) & columns.waits)
    if not len(rows):
        return []
    meeting, first, member_count = np.unique(
        columns.meeting[rows], return_index=True, return_counts=True
    )
    own = np.full(graph.meeting_count, np.inf)
    # A member that ends late for reasons of its own does not make the transfer slow.
    np.minimum.at(own, columns.meeting[rows], graph.own[rows])
    complete = (member_count > 1) & ~np.isin(meeting, incomplete)
    meeting, rows = meeting[complete], rows[first[complete]]
    keys = np.stack([columns.rank[rows], columns.place[rows], columns.label[rows]])
    _, place = np.unique(keys, axis=1, return_inverse=True)
    found = []
    for number in range(int(place.max(initial=-1)) + 1):
        members = np.flatnonzero(place == number)
        times = own[meeting[members]]
        usual = float(np.median(times))
        if predicted is not None:
            usual = min(usual, _OF_PREDICTED * float(predicted[rows[members]].max()))
        limit = max(usual + _LEAST_EXCESS * step_ns, _OF_USUAL * usual)
        slow = np.flatnonzero(times > limit)
        found.append(_Transfer(meeting[members], times, usual, slow))
    return found


def _cost_ns(
    groups: PeerGroups,
    counted: list[int],
    slow: _Transfer,
    transfers: list[_Transfer],
    gap: Times,
) -> float:
    """By how much a mean step is shorter if no transfer of the slow steps exceeds its usual time.

    Others are in the queue behind the slow one, and late, too.
    """
    graph = groups.graph
    columns = graph.columns
    usual = np.full(graph.meeting_count + 1, np.inf)
    for transfer in transfers:
        usual[transfer.meetings] = transfer.usual_ns
    in_slow_meeting = np.isin(columns.meeting, slow.meetings[slow.slow])
    in_slow_step = np.isin(columns.step, columns.step[in_slow_meeting]) & ~graph.is_work
    own = np.where(in_slow_step, np.minimum(graph.own, usual[columns.meeting]), graph.own)
    times = graph.step_times(np.stack([graph.own, own], axis=1), gap)[counted].mean(axis=0)
    return float(times[0] - times[1])


def _finding(
    groups: PeerGroups, counted: list[int], transfer: _Transfer, cost: float, step_ns: float
) -> SlowFinding:
    graph = groups.graph
    columns = graph.columns
    rows = np.flatnonzero(np.isin(columns.meeting, transfer.meetings[transfer.slow]))
    steps = sorted({int(step) for step in columns.step[rows]})
    ranks = tuple(sorted({int(rank) for rank in columns.rank[rows]}))
    operation = graph.labels[int(columns.label[rows[0]])]
    size = int(columns.nbytes[rows[0]])
    slow_ns = float(np.median(transfer.times[transfer.slow]))
    with_size = f" of {show_bytes(size)}" if size else ""
    hints = (
        f"This {operation}{with_size} takes {show_ns(round(slow_ns))} after its last member "
        f"arrives, and otherwise {show_ns(round(transfer.usual_ns))}.",
        "Check the network, and other jobs that use it or the cores of these hosts.",
    )
    names = tuple(graph.steps[step] for step in steps)
    return SlowFinding(
        kind="slow communication",
        ranks=ranks,
        cost_ns=cost,
        share=cost / step_ns,
        steps=len(steps),
        counted_steps=len(counted),
        phase=operation,
        hints=hints,
        slow_steps=names if len(steps) < len(counted) else (),
    )
