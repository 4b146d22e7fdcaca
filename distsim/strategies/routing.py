"""Which tokens go where: how many rows of its batch a rank sends to each rank of its expert group. Seeded, the same on any machine."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from math import ceil, prod
from random import Random


def coordinates(mesh: Mapping[str, int], axis: str) -> list[tuple[int, tuple[int, ...]]]:
    """Per global rank: its coordinate on the axis, and the global ranks of its group in order."""
    names = list(mesh)
    below = prod(mesh[name] for name in names[names.index(axis) + 1 :])
    world, n = prod(mesh.values()), mesh[axis]
    found = []
    for rank in range(world):
        mine = rank // below % n
        first = rank - mine * below
        found.append((mine, tuple(first + k * below for k in range(n))))
    return found


def routed(
    world_size: int,
    ranks: int,
    experts: int,
    tokens: int,
    top_k: int,
    imbalance: float,
    seed: int,
    capacity_factor: float | None,
    pad: bool,
) -> list[tuple[int, ...]]:
    """``sends[r][d]``: rows that rank r sends to coordinate d, whose experts are d * experts/ranks and the following.

    ``imbalance`` spreads the experts' popularity: each is weighed e**(imbalance * g) with g from a normal distribution, the same for all
    ranks; a rank's tokens are dealt out by weight. ``capacity_factor`` cuts every expert's rows to that many even shares (rounded up).
    """
    draw = Random(seed)
    weights = [2.718281828459045 ** (imbalance * draw.gauss(0.0, 1.0)) for _ in range(experts)]
    capacity = None if capacity_factor is None else ceil(capacity_factor * tokens * top_k / experts)
    rows = dealt(tokens * top_k, weights, tokens)
    if capacity is not None:
        rows = [capacity if pad else min(n, capacity) for n in rows]
    each = experts // ranks
    by_rank = tuple(sum(rows[d * each : (d + 1) * each]) for d in range(ranks))
    if imbalance == 0 or pad:
        return [by_rank] * world_size
    return [_jittered(by_rank, Random(f"{seed}/{rank}"), imbalance) for rank in range(world_size)]


def dealt(total: int, weights: list[float], most: int) -> list[int]:
    """``total`` in whole parts of at most ``most`` (no token visits an expert twice), near to the weights, adding up exactly."""
    full: set[int] = set()
    while True:
        left, open_ = total - most * len(full), [k for k in range(len(weights)) if k not in full]
        sums = list(accumulate(weights[k] for k in open_))
        marks = [0, *(round(left * s / sums[-1]) for s in sums)] if open_ else [0]
        parts = {k: b - a for k, (a, b) in zip(open_, pairwise(marks), strict=True)}
        over = {k for k, part in parts.items() if part > most}
        if not over:
            return [most if k in full else parts[k] for k in range(len(weights))]
        full |= over


def _jittered(rows: tuple[int, ...], draw: Random, imbalance: float) -> tuple[int, ...]:
    """A rank's own batch differs from the average a little: part of its rows move to the next destination."""
    found = list(rows)
    for d in range(len(found)):
        moved = int(found[d] * min(imbalance, 1.0) * draw.random() / 4)
        found[d] -= moved
        found[(d + 1) % len(found)] += moved
    return tuple(found)
