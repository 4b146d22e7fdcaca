"""Finds the pause that makes a rank slow, by the borders of its operations.

The rank and its peers run the same operations in a step, so their borders correspond. The place is
the interval with the largest excess over the peers; it may contain work that no profiler records.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from distsim.analysis.slow_jobs.slow_job import SlowPlace
from distsim.trace.recordings.event_graph import Times
from distsim.trace.recordings.recording import Recording, StepOperations

#: The place explains at least this share of the rank's excess.
_LEAST_SHARE = 0.5
#: A repeated pause exceeds the longest one of the peers at this place by this factor.
_OF_PEERS = 3.0


def find_slow_place(
    recording: Recording, rank: int, peers: tuple[int, ...], steps: list[int], excess_ns: float
) -> SlowPlace | None:
    """The place with the largest excess in these steps; None if no place explains most of it.

    A pause in every micro-batch is spread over several places with the same pair of borders.
    """
    for compare in (_compare_steps, _compare_pairs):
        compared = compare(recording, rank, peers, steps)
        place = None if compared is None else _largest_excess(compared, excess_ns)
        if place is not None:
            return place
    return None


def _largest_excess(compared: _ComparedSteps, excess_ns: float) -> SlowPlace | None:
    difference = (compared.mine - compared.peers).mean(axis=0)
    place = int(difference.argmax())
    if difference[place] < _LEAST_SHARE * excess_ns:
        return None
    after, before = compared.intervals[place]
    peer_ns = float(compared.peers[:, place].mean())
    return SlowPlace(after, before, float(difference[place]), peer_ns, len(compared.steps))


def repeated_pause_steps(
    recording: Recording, rank: int, peers: tuple[int, ...], steps: list[int], limit_ns: float
) -> list[int]:
    """The positions in ``steps`` in which a pause beyond a limit repeats at one place.

    On a busy machine, the work of a whole step varies more than the pause at any single place. The
    pause must also exceed anything that the peers show at this place.
    """
    compared = _compare_steps(recording, rank, peers, steps)
    if compared is None:
        return []
    limits = np.maximum(compared.peers + limit_ns, _OF_PEERS * compared.peer_maximum)
    is_long = compared.mine > limits
    place = int(is_long.sum(axis=0).argmax())
    return [steps.index(compared.steps[i]) for i in np.flatnonzero(is_long[:, place])]


class _ComparedSteps(NamedTuple):
    """Intervals between borders, by step: of the rank, and the median of its peers.

    ``peer_maximum``: the longest interval of any peer in any step.
    """

    intervals: list[tuple[str, str]]
    steps: list[int]
    mine: Times
    peers: Times
    peer_maximum: Times


def _compare_steps(
    recording: Recording, rank: int, peers: tuple[int, ...], steps: list[int]
) -> _ComparedSteps | None:
    """The most frequent sequence of operations of a rank, in steps that a peer shares."""
    found: dict[tuple[str, ...], list[tuple[int, Times, Times]]] = {}
    for step in steps:
        mine = recording.operations.get((rank, step))
        if mine is None or len(mine.times) < 2:
            continue
        theirs = [recording.operations.get((peer, step)) for peer in peers]
        same = [_intervals(one) for one in theirs if one and one.names == mine.names]
        if same:
            found.setdefault(mine.names, []).append((step, _intervals(mine), np.array(same)))
    if not found:
        return None
    names = max(found, key=lambda key: len(found[key]))
    return _compared(list(pairwise(names)), found[names])


def _compare_pairs(
    recording: Recording, rank: int, peers: tuple[int, ...], steps: list[int]
) -> _ComparedSteps | None:
    """The same for peers with another order, as in a 1F1B pipeline: totals by pair of borders."""
    pairs: dict[tuple[str, str], int] = {}
    found = []
    for step in steps:
        present = [recording.operations.get((one, step)) for one in (rank, *peers)]
        if present[0] is None:
            continue
        totals = [_pair_totals(one, pairs) for one in present if one is not None]
        if len(totals) > 1:
            found.append((step, totals[0], totals[1:]))
    if not found:
        return None
    padded = [
        (step, _padded(mine, len(pairs)), np.array([_padded(one, len(pairs)) for one in theirs]))
        for step, mine, theirs in found
    ]
    return _compared(list(pairs), padded)


def _compared(
    intervals: list[tuple[str, str]], steps: list[tuple[int, Times, Times]]
) -> _ComparedSteps:
    """``steps``: number of a step, intervals of the rank, intervals by peer."""
    return _ComparedSteps(
        intervals,
        [number for number, _, _ in steps],
        np.array([mine for _, mine, _ in steps]),
        np.array([np.median(theirs, axis=0) for _, _, theirs in steps]),
        np.max([theirs.max(axis=0) for _, _, theirs in steps], axis=0),
    )


def _pair_totals(operations: StepOperations, pairs: dict[tuple[str, str], int]) -> Times:
    numbers = [pairs.setdefault(pair, len(pairs)) for pair in pairwise(operations.names)]
    totals = np.bincount(numbers, weights=_intervals(operations), minlength=len(pairs))
    return totals.astype(np.float64)


def _padded(totals: Times, count: int) -> Times:
    return np.pad(totals, (0, count - len(totals)))


def _intervals(operations: StepOperations) -> Times:
    """The time between neighbouring borders, without waiting."""
    return np.asarray(np.diff(operations.times) - operations.waited[1:])
