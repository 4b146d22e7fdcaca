"""How a mixture of experts routes tokens: rows that each rank sends to each other rank.

The router is a model of an imbalanced one: experts have random popularities, drawn from a seed, so
that the result is the same on every machine. No rank's tokens are followed one by one; only their
numbers are.

Sources: Lepikhin et al., GShard (arXiv 2006.16668), capacity and its padding; Fedus et al., Switch
Transformer (arXiv 2101.03961), section 2.2, capacity factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import ceil, e, prod
from random import Random
from typing import NamedTuple


class AxisPosition(NamedTuple):
    """A rank's coordinate on an axis of the mesh, and the ranks of its group in order."""

    coordinate: int
    group: tuple[int, ...]


def axis_positions(mesh: Mapping[str, int], axis: str) -> list[AxisPosition]:
    """The position of every global rank on an axis."""
    names = list(mesh)
    stride = prod(mesh[name] for name in names[names.index(axis) + 1 :])
    size = mesh[axis]
    positions = []
    for rank in range(prod(mesh.values())):
        coordinate = rank // stride % size
        first = rank - coordinate * stride
        group = tuple(first + k * stride for k in range(size))
        positions.append(AxisPosition(coordinate, group))
    return positions


class ExpertRouter(NamedTuple):
    """The parameters of a router.

    ``imbalance`` spreads the popularity of the experts: each has the weight e**(imbalance * g) with
    g from a normal distribution, the same for all ranks. A rank's tokens are distributed by weight.
    ``capacity_factor`` limits the rows of every expert to that many even shares (rounded up);
    ``pad`` fills them up to this limit.
    """

    experts: int
    tokens: int
    top_k: int
    imbalance: float
    seed: int
    capacity_factor: float | None = None
    pad: bool = False

    @property
    def capacity(self) -> int | None:
        """The largest number of rows that an expert takes from a rank; None: no limit."""
        if self.capacity_factor is None:
            return None
        return ceil(self.capacity_factor * self.tokens * self.top_k / self.experts)


def routed_rows(router: ExpertRouter, world_size: int, ranks: int) -> list[tuple[int, ...]]:
    """``rows[r][d]``: rows that global rank r sends to coordinate d of its group.

    Coordinate d has the experts d * experts/ranks and the following.
    """
    draw = Random(router.seed)
    weights = [e ** (router.imbalance * draw.gauss(0.0, 1.0)) for _ in range(router.experts)]
    # No token visits an expert twice, so an expert gets at most all tokens.
    rows = apportioned(router.tokens * router.top_k, weights, router.tokens)
    capacity = router.capacity
    if capacity is not None:
        rows = [capacity if router.pad else min(n, capacity) for n in rows]

    experts_per_rank = router.experts // ranks
    by_destination = tuple(
        sum(rows[d * experts_per_rank : (d + 1) * experts_per_rank]) for d in range(ranks)
    )
    if router.imbalance == 0 or router.pad:
        return [by_destination] * world_size
    return [
        _with_jitter(by_destination, Random(f"{router.seed}/{rank}"), router.imbalance)
        for rank in range(world_size)
    ]


def apportioned(total: int, weights: Sequence[float], most: int) -> list[int]:
    """Split ``total`` into whole parts near to the weights, which add up exactly.

    No part is larger than ``most``; what exceeds it is distributed among the others by weight.
    """
    full: set[int] = set()
    while True:
        open_parts = [k for k in range(len(weights)) if k not in full]
        parts = dict.fromkeys(full, most)
        parts |= _proportional_parts(total - most * len(full), weights, open_parts)
        too_large = {k for k in open_parts if parts[k] > most}
        if not too_large:
            return [parts[k] for k in range(len(weights))]
        full |= too_large


def _proportional_parts(
    total: int, weights: Sequence[float], indices: Sequence[int]
) -> dict[int, int]:
    """Parts of ``total`` by weight for some indices.

    The cumulative sums are rounded, not the parts, so that the parts add up.
    """
    if not indices:
        return {}
    sums = list(accumulate(weights[k] for k in indices))
    marks = [0, *(round(total * s / sums[-1]) for s in sums)]
    return {k: end - start for k, (start, end) in zip(indices, pairwise(marks), strict=True)}


def _with_jitter(rows: tuple[int, ...], draw: Random, imbalance: float) -> tuple[int, ...]:
    """A rank's own batch differs a little from the average.

    Up to a quarter of the rows of each destination move to the next destination.
    """
    jittered = list(rows)
    for d in range(len(jittered)):
        moved = int(jittered[d] * min(imbalance, 1.0) * draw.random() / 4)
        jittered[d] -= moved
        jittered[(d + 1) % len(jittered)] += moved
    return tuple(jittered)
