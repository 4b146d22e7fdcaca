"""Sentences that name the likely cause of a slow rank or of uneven work, with their evidence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distsim.analysis.slow_jobs.peer_groups import PeerGroups
from distsim.analysis.slow_jobs.slow_job import RankCost, SlowPlace
from distsim.trace.recordings.event_graph import Numbers, Times, sliced_lists

#: Phases that are slow by at least this factor count as slow.
_SLOW_RATIO = 1.15
#: A phase with this share of the excess is the only slow one.
_ONE_PHASE_SHARE = 0.8
_CORRELATED = 0.6
_FEWEST_PAIRS = 16


class LengthCorrelation(NamedTuple):
    """How forward and backward times of micro-batches vary together.

    ``share``: the share of ranks on which they correlate. ``median``: the median correlation.
    ``variation``: the standard deviation of forward times, relative to the mean.
    """

    share: float
    median: float
    variation: float


def slow_phase(rank: RankCost) -> str:
    """The phase with the largest excess."""
    return max(rank.phases, key=lambda label: rank.phases[label][0], default="")


def straggler_hints(rank: RankCost, place: SlowPlace | None) -> tuple[str, ...]:
    """What the slow phases of a rank suggest."""
    excess = {label: value for label, (value, _) in rank.phases.items() if value > 0}
    total = sum(excess.values())
    phase = slow_phase(rank)
    slow = [label for label, (_, ratio) in rank.phases.items() if ratio > _SLOW_RATIO]
    computing = [label for label in slow if label.startswith(("forward", "backward"))]
    if total and excess.get(phase, 0) < _ONE_PHASE_SHARE * total and len(computing) >= 2:
        return ("All phases are slow: check the machine (clock speed, temperature, other jobs).",)
    if phase == "data":
        return ("The time is lost before the first operation: check data loading on this rank.",)
    if place is not None and place.operation is None:
        return (
            "No operation is recorded in this gap: look for Python code, locks, I/O or garbage "
            "collection between these operations.",
        )
    if place is not None:
        return (
            f"The time is lost inside {place.operation}: compare its inputs with those of the "
            "other ranks.",
        )
    return ()


def length_correlation(groups: PeerGroups, own: Times) -> LengthCorrelation | None:
    """Whether forward and backward of a micro-batch vary together; None with too few of them.

    Sequences of unequal length make both longer. The means of the ranks are removed first, because
    a slow rank is slow in both.
    """
    pairs = [_paired_times(groups, own, position) for position in range(len(groups.ranks))]
    values = []
    variations = []
    for forward, backward in pairs:
        if len(forward) < _FEWEST_PAIRS or not forward.std() or not backward.std():
            continue
        values.append(float(np.corrcoef(forward, backward)[0, 1]))
        variations.append(float(forward.std() / forward.mean()))
    if not values:
        return None
    share = float(np.mean([value > _CORRELATED for value in values]))
    return LengthCorrelation(share, float(np.median(values)), float(np.median(variations)))


def _paired_times(groups: PeerGroups, own: Times, position: int) -> tuple[Times, Times]:
    """The forward and backward times of the micro-batches of a rank, in corresponding order."""
    kinds = []
    for prefix in ("forward", "backward"):
        labels = [i for i, name in enumerate(groups.graph.labels) if name.startswith(prefix)]
        rows = np.flatnonzero(
            groups.graph.is_work
            & groups.usual_rows
            & (groups.rank_index == position)
            & np.isin(groups.graph.columns.label, labels)
        )
        kinds.append(_by_step(groups, rows, own))
    forward, backward = kinds
    return (forward, backward) if len(forward) == len(backward) else (forward[:0], backward[:0])


def _by_step(groups: PeerGroups, rows: Numbers, own: Times) -> Times:
    steps = groups.graph.columns.step[rows]
    lists = sliced_lists(steps, rows, len(groups.graph.steps))
    return own[lists.items]
