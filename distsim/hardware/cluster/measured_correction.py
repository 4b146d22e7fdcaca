"""Measured durations that a cluster's file may carry, and how they correct the model's prices.

At a measured size the price is the measured time. Between two of them it is interpolated
(`MeasuredCorrection`), and beyond the ends the ratio of measured to modelled time stays as it is
there; so the model keeps the say about sizes that nobody measured, and the price stays between the
two measured times. A first size that took longer than the second warmed up (a sweep begins there):
what lies between is the second's. So it is in the number of ranks: between two measured ones the
logarithm of the ratio is interpolated, beyond them a quarter of the trend is believed. How far off
that is: `benchmarks/accuracy/run.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import exp, log

from distsim.hardware.cluster.description import MeasuredCurve

#: A group of another size tells less about a price than one beside other neighbours.
_GROUP_WEIGHT, _NODES_WEIGHT, _RANKS_WEIGHT = 4.0, 4.0, 1.0


class MeasuredCorrection:
    """Measured over modelled, as a function of bytes. Between two measured sizes the time is the
    geometric mean of three: the modelled one times a ratio that is a monotone cubic in logarithms
    (Fritsch, Carlson, "Monotone piecewise cubic interpolation", SIAM J. Numer. Anal. 17, 1980, with
    the slopes of Fritsch, Butland 1984); the straight line over what is modelled, right where only
    the model's scale is wrong; and the one over the bytes, right where one form runs at both. None
    of them alone predicts as well."""

    def __init__(self, curve: MeasuredCurve, modelled: Callable[[int], float]) -> None:
        points = sorted((nbytes, ns) for nbytes, ns in curve.times.items() if ns > 0)
        self._modelled = modelled
        self._ns = [float(ns) for _, ns in points]
        self._first = self._ns[0] if points else 0.0
        self._ns[:1] = [min(self._ns[:2])] if points else []  # fewer bytes cost no more
        self._at = [log(max(nbytes, 1)) for nbytes, _ in points]
        self._nbytes = [float(nbytes) for nbytes, _ in points]
        self._predicted = [max(modelled(nbytes), 1.0) for nbytes, _ in points]
        self._ratio = [
            log(measured / predicted)
            for measured, predicted in zip(self._ns, self._predicted, strict=True)
        ]
        self._slopes = _monotone_slopes(self._at, self._ratio)

    def factor(self, nbytes: int) -> float:
        """What to multiply the modelled price by. Between two measured sizes the price of what was
        measured is between their times.
        """
        at, ratio, x = self._at, self._ratio, log(max(nbytes, 1))
        if not at:
            return 1.0
        i = bisect_right(at, x)
        if i == 0 or i == len(at):
            return exp(ratio[0] if i == 0 else ratio[-1])
        if x == at[i - 1]:
            return exp(ratio[i - 1]) if i > 1 else self._first / self._predicted[0]
        modelled = max(self._modelled(nbytes), 1.0)
        ways = (
            modelled * exp(self._cubic(i, x)),
            self._along(i, modelled, self._predicted),
            self._along(i, nbytes, self._nbytes),
        )
        low, high = sorted((self._ns[i - 1], self._ns[i]))
        return exp(sum(log(min(max(way, low), high)) for way in ways) / len(ways)) / modelled

    def _cubic(self, i: int, x: float) -> float:
        """The logarithm of the ratio before the i-th measured size."""
        wide = self._at[i] - self._at[i - 1]
        share = (x - self._at[i - 1]) / wide
        rest = 1.0 - share
        found = (
            rest * rest * (1 + 2 * share) * self._ratio[i - 1]
            + share * share * (3 - 2 * share) * self._ratio[i]
        )
        return found + wide * share * rest * (rest * self._slopes[i - 1] - share * self._slopes[i])

    def _along(self, i: int, here: float, there: Sequence[float]) -> float:
        """ns on the straight line between the times before and at the i-th measured size, over what
        is ``there`` of them.
        """
        first, last = there[i - 1], there[i]
        share = (here - first) / (last - first) if last > first else 0.5
        return self._ns[i - 1] + (self._ns[i] - self._ns[i - 1]) * min(max(share, 0.0), 1.0)


def _monotone_slopes(at: Sequence[float], value: Sequence[float]) -> list[float]:
    """Slopes of a monotone cubic: weighted harmonic means inside, 0 where the value turns, and at
    the ends those of the last piece.
    """
    if len(at) < 2:
        return [0.0] * len(at)
    wide = [b - a for a, b in pairwise(at)]
    steep = [(b - a) / w for (a, b), w in zip(pairwise(value), wide, strict=True)]
    inner = []
    for (w, v), (one, other) in zip(pairwise(wide), pairwise(steep), strict=True):
        turns = one * other <= 0
        inner.append(0.0 if turns else 3 * (w + v) / ((2 * v + w) / one + (v + 2 * w) / other))
    return [steep[0], *inner, steep[-1]]


def nearest_curve(
    curves: Sequence[MeasuredCurve], op: str, group: int, ranks: int, nodes: int
) -> MeasuredCurve | None:
    """The curve of an operation whose circumstances are the most like these: group size, nodes of
    it, busy ranks per node.
    """
    found = [curve for curve in curves if curve.op == op]
    wanted = ((_GROUP_WEIGHT, group), (_NODES_WEIGHT, nodes), (_RANKS_WEIGHT, ranks))

    def distance(curve: MeasuredCurve) -> float:
        return sum(
            w * abs(log(a / b))
            for (w, a), b in zip(wanted, (curve.group, curve.nodes, curve.ranks), strict=True)
        )

    return min(found, key=distance, default=None)


#: How much of the trend from one rank count to another is believed beyond them: two curves are
#: noisy, and on each of the two systems that have three rank counts (`benchmarks/accuracy/run.py`)
#: a quarter predicts the third better than a half.
_EXTRAPOLATED_SHARE = 0.25


def weighted_curves(
    curves: Sequence[MeasuredCurve], op: str, group: int, ranks: int, nodes: int
) -> list[tuple[MeasuredCurve, float]]:
    """(curve, weight) of those that tell about a group that fills its nodes: the two measured rank
    counts next to it, where there are two.

    Their weights add up to 1; beyond both of them one is negative. Else the nearest alone, and
    nothing where the operation has no curve.
    """
    nearest = nearest_curve(curves, op, group, ranks, nodes)
    if nearest is None:
        return []
    if nearest.group == group:
        return [(nearest, 1.0)]

    comparable = {
        curve.group: curve for curve in curves if _is_comparable(curve, op, ranks, nodes > 1)
    }
    if _fills_its_nodes(nearest):
        comparable[nearest.group] = nearest
    group_fills_nodes = group == ranks * nodes
    if not group_fills_nodes or nearest.group not in comparable or len(comparable) < 2:
        return [(nearest, 1.0)]

    low, high = _two_rank_counts(sorted(comparable), group)
    share = log(group / low) / log(high / low)
    if share > 1:
        share = 1 + _EXTRAPOLATED_SHARE * (share - 1)
    elif share < 0:
        share *= _EXTRAPOLATED_SHARE
    return [(comparable[low], 1 - share), (comparable[high], share)]


def _fills_its_nodes(curve: MeasuredCurve) -> bool:
    return curve.group == curve.ranks * curve.nodes


def _is_comparable(curve: MeasuredCurve, op: str, ranks: int, across_nodes: bool) -> bool:
    """Whether a curve differs from the group only in the number of ranks or nodes."""
    if curve.op != op or not _fills_its_nodes(curve):
        return False
    if across_nodes:
        return curve.nodes > 1 and curve.ranks == ranks
    return curve.nodes == 1


def _two_rank_counts(counts: Sequence[int], group: int) -> tuple[int, int]:
    """The measured rank counts on both sides of ``group``; else the two nearest on one side."""
    below = [count for count in counts if count < group]
    above = [count for count in counts if count > group]
    if below and above:
        return below[-1], above[0]
    nearest = sorted(counts, key=lambda count: abs(log(count / group)))
    low, high = sorted(nearest[:2])
    return low, high


__all__ = ["MeasuredCorrection", "weighted_curves", "nearest_curve"]
