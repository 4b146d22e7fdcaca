"""Measured durations that a cluster's file may carry, and how they correct the model's prices.

At a measured size the price is the measured time. Between two of them the ratio of measured to modelled time is interpolated in the
logarithms of both, and beyond the ends it stays as it is there; so the model keeps the say about sizes and group sizes that
nobody measured. Joining every fourth size of a sweep like this misses the others by 8 % (57 open nccl-tests tables).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import exp, log

from distsim.cluster.model import Curve

#: A group of another size tells less about a price than one beside other neighbours.
_GROUP, _NODES, _RANKS = 4.0, 4.0, 1.0


class Correction:
    """Measured over modelled, as a function of bytes."""

    def __init__(self, curve: Curve, modelled: Callable[[int], float]) -> None:
        points = sorted((nbytes, ns / max(modelled(nbytes), 1.0)) for nbytes, ns in curve.times.items() if ns > 0)
        self._at = [log(max(nbytes, 1)) for nbytes, _ in points]
        self._ratio = [log(ratio) for _, ratio in points]

    def factor(self, nbytes: int) -> float:
        """What to multiply the modelled price by."""
        at, x = self._at, log(max(nbytes, 1))
        if not at:
            return 1.0
        i = bisect_right(at, x)
        if i == 0 or i == len(at):
            return exp(self._ratio[min(i, len(at) - 1)] if i == 0 else self._ratio[-1])
        share = (x - at[i - 1]) / (at[i] - at[i - 1])
        return exp(self._ratio[i - 1] + share * (self._ratio[i] - self._ratio[i - 1]))


def nearest(curves: Sequence[Curve], op: str, group: int, ranks: int, nodes: int) -> Curve | None:
    """The curve of an operation whose circumstances are the most like these: group size, nodes of it, busy ranks per node."""
    found = [curve for curve in curves if curve.op == op]
    wanted = ((_GROUP, group), (_NODES, nodes), (_RANKS, ranks))

    def distance(curve: Curve) -> float:
        return sum(w * abs(log(a / b)) for (w, a), b in zip(wanted, (curve.group, curve.nodes, curve.ranks), strict=True))

    return min(found, key=distance, default=None)


__all__ = ["Correction", "nearest"]
