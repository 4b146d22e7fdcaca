"""Brings the clocks of ranks together, by communications that all members leave together.

Ranks of one host share a clock, and their recordings obey causality: no member leaves a collective
before another one enters it. If the recordings obey it, the clocks are kept. Otherwise the offset
of two ranks is the median of the differences of their ends in common collectives. Pairs are joined
along the largest number of common collectives. Collectives with a root do not count, because their
members leave at different times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping

import numpy as np

from distsim.trace.recordings.recording import ClockAlignment

#: Clocks that disagree by no more are kept as they are.
_KEPT_ERROR_NS = 1e6
#: meeting -> rank -> (start, end)
Meetings = Mapping[Hashable, Mapping[int, tuple[float, float]]]


def align_clocks(meetings: Meetings, ranks: list[int]) -> ClockAlignment:
    """The offset of each rank, 0 if the clocks agree. ``meetings``: without rooted collectives."""
    none = dict.fromkeys(ranks, 0.0)
    worst = worst_violation(meetings, none)
    if worst <= _KEPT_ERROR_NS:
        return ClockAlignment(none, worst)
    offsets = _offsets(meetings, ranks)
    return ClockAlignment(offsets, worst_violation(meetings, offsets))


def worst_violation(meetings: Meetings, offsets: Mapping[int, float]) -> float:
    """The longest time by which a member ends before another one starts."""
    worst = 0.0
    for members in meetings.values():
        if len(members) < 2:
            continue
        last_start = max(start + offsets[rank] for rank, (start, _) in members.items())
        first_end = min(end + offsets[rank] for rank, (_, end) in members.items())
        worst = max(worst, last_start - first_end)
    return worst


def _offsets(meetings: Meetings, ranks: list[int]) -> dict[int, float]:
    differences: dict[tuple[int, int], list[float]] = defaultdict(list)
    for members in meetings.values():
        present = sorted(members)
        # One comparison per rank and meeting is enough to connect all members.
        for other in present[1:]:
            first = present[0]
            differences[first, other].append(members[first][1] - members[other][1])
    links = sorted(differences, key=lambda pair: (-len(differences[pair]), pair))
    offsets = {ranks[0]: 0.0} if ranks else {}
    while len(offsets) < len(ranks):
        joined = next(
            (pair for pair in links if (pair[0] in offsets) != (pair[1] in offsets)), None
        )
        if joined is None:
            # No communication connects this rank with the others, so its clock is unknown.
            offsets[next(rank for rank in ranks if rank not in offsets)] = 0.0
            continue
        first, other = joined
        shift = float(np.median(differences[joined]))
        if first in offsets:
            offsets[other] = offsets[first] + shift
        else:
            offsets[first] = offsets[other] - shift
    return {rank: float(round(offset)) for rank, offset in offsets.items()}
