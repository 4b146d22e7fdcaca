"""Measured durations in a cluster's file, and how they correct the modelled costs.

At a measured size, the cost is the measured time. Between two measured sizes it is interpolated
(`MeasuredCorrection`) and stays between the two measured times. Beyond the first and last size, the
ratio of measured to modelled time stays constant. So the model still determines the shape where
there is no measurement.

If the first size took longer than the second, it contained the warm-up (a sweep starts there);
sizes between them get the second's time.

The number of ranks is treated in the same way: between two measured rank counts the logarithm of
the ratio is interpolated, and beyond them a quarter of the trend is extrapolated.
`benchmarks/accuracy/run.py` reports the remaining error.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import exp, log

from distsim.hardware.cluster.description import MeasuredCurve

#: Differences in group size and node count matter more than in the number of busy ranks per node.
_GROUP_WEIGHT, _NODES_WEIGHT, _RANKS_WEIGHT = 4.0, 4.0, 1.0


class MeasuredCorrection:
    """The ratio of measured to modelled time, as a function of bytes.

    Between two measured sizes, the time is the geometric mean of three estimates, because none of
    them alone predicts as well:

    - the modelled time times a ratio that is a monotone cubic in logarithms (Fritsch, Carlson,
      "Monotone piecewise cubic interpolation", SIAM J. Numer. Anal. 17, 1980, with the slopes of
      Fritsch, Butland 1984);
    - a straight line over the modelled time, which is right if only the model's scale is wrong;
    - a straight line over the bytes, which is right if the same form runs at both sizes.
    """

    def __init__(self, curve: MeasuredCurve, modelled: Callable[[int], float]) -> None:
        points = sorted((nbytes, ns) for nbytes, ns in curve.times.items() if ns > 0)
        self._modelled = modelled
        self._ns = [float(ns) for _, ns in points]
        self._first = self._ns[0] if points else 0.0
        # Fewer bytes never cost more: a slower first size contained the warm-up.
        self._ns[:1] = [min(self._ns[:2])] if points else []
        self._at = [log(max(nbytes, 1)) for nbytes, _ in points]
        self._nbytes = [float(nbytes) for nbytes, _ in points]
        self._predicted = [max(modelled(nbytes), 1.0) for nbytes, _ in points]
        self._ratio = [
            log(measured / predicted)
            for measured, predicted in zip(self._ns, self._predicted, strict=True)
        ]
        self._slopes = _monotone_slopes(self._at, self._ratio)

    def factor(self, nbytes: int) -> float:
        """The factor for the modelled cost at this size.

        In the setting of the measurement, the corrected cost between two sizes lies between their
        times.
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
        estimates = (
            modelled * exp(self._cubic(i, x)),
            self._along(i, modelled, self._predicted),
            self._along(i, nbytes, self._nbytes),
        )
        low, high = sorted((self._ns[i - 1], self._ns[i]))
        logarithms = [log(min(max(estimate, low), high)) for estimate in estimates]
        return exp(sum(logarithms) / len(logarithms)) / modelled

    def _cubic(self, i: int, x: float) -> float:
        """Logarithm of the ratio by the monotone cubic, between measured sizes i - 1 and i."""
        # Hermite form: one part from the values at both ends, one from the slopes there.
        width = self._at[i] - self._at[i - 1]
        share = (x - self._at[i - 1]) / width
        rest = 1.0 - share
        from_values = (
            rest * rest * (1 + 2 * share) * self._ratio[i - 1]
            + share * share * (3 - 2 * share) * self._ratio[i]
        )
        slopes = rest * self._slopes[i - 1] - share * self._slopes[i]
        return from_values + width * share * rest * slopes

    def _along(self, i: int, x: float, abscissas: Sequence[float]) -> float:
        """Time in ns on the straight line between measured sizes i - 1 and i, at abscissa ``x``."""
        first, last = abscissas[i - 1], abscissas[i]
        share = (x - first) / (last - first) if last > first else 0.5
        return self._ns[i - 1] + (self._ns[i] - self._ns[i - 1]) * min(max(share, 0.0), 1.0)


def _monotone_slopes(at: Sequence[float], value: Sequence[float]) -> list[float]:
    """Slopes of a monotone cubic at its points.

    Inner slopes are weighted harmonic means, or 0 at a turning point. The end slopes are those of
    the first and last segment.
    """
    if len(at) < 2:
        return [0.0] * len(at)
    widths = [b - a for a, b in pairwise(at)]
    secants = [(b - a) / width for (a, b), width in zip(pairwise(value), widths, strict=True)]
    inner = []
    for (w, v), (left, right) in zip(pairwise(widths), pairwise(secants), strict=True):
        turns = left * right <= 0
        inner.append(0.0 if turns else 3 * (w + v) / ((2 * v + w) / left + (v + 2 * w) / right))
    return [secants[0], *inner, secants[-1]]


def nearest_curve(
    curves: Sequence[MeasuredCurve], op: str, group: int, ranks: int, nodes: int
) -> MeasuredCurve | None:
    """The curve of an operation that was measured in the most similar setting.

    Similarity depends on group size, number of nodes, and busy ranks per node.
    """
    candidates = [curve for curve in curves if curve.op == op]
    wanted = ((_GROUP_WEIGHT, group), (_NODES_WEIGHT, nodes), (_RANKS_WEIGHT, ranks))

    def distance(curve: MeasuredCurve) -> float:
        measured = (curve.group, curve.nodes, curve.ranks)
        return sum(w * abs(log(a / b)) for (w, a), b in zip(wanted, measured, strict=True))

    return min(candidates, key=distance, default=None)


#: Share of the trend between two rank counts that is extrapolated beyond them. Two curves are
#: noisy; on both systems with three measured rank counts (`benchmarks/accuracy/run.py`) a quarter
#: predicts the third better than a half.
_EXTRAPOLATED_SHARE = 0.25


def weighted_curves(
    curves: Sequence[MeasuredCurve], op: str, group: int, ranks: int, nodes: int
) -> list[tuple[MeasuredCurve, float]]:
    """The (curve, weight) pairs that apply to a group.

    If the group fills its nodes and two rank counts were measured, these are the curves of the two
    neighbouring rank counts. Their weights add up to 1; outside the measured counts, one weight is
    negative. Otherwise the result is the nearest curve alone, or nothing if the operation has no
    curve.
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
    """The measured rank counts on both sides of ``group``, or the two nearest on one side."""
    below = [count for count in counts if count < group]
    above = [count for count in counts if count > group]
    if below and above:
        return below[-1], above[0]
    nearest = sorted(counts, key=lambda count: abs(log(count / group)))
    low, high = sorted(nearest[:2])
    return low, high


__all__ = ["MeasuredCorrection", "weighted_curves", "nearest_curve"]
