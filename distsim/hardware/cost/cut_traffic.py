"""Bytes that must leave and enter the parts of a group: nodes, network leaves, slots of a switch.

The parts may differ in size. In an all_gather, for example, a part receives everything that the
other parts hold, even if it contributes little. Which part forwards the data is not determined by
the operation. This module assumes a ring of parts, in which each part passes on everything that the
next one lacks; no other order puts less load on the busiest link. Bytes are relative to the
operation's buffer, as nccl-tests counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distsim.hardware.cost.link_loads import CostedOperation, implemented_collective

#: Operations in which every byte has exactly one source rank and one destination rank.
EXCHANGE_COLLECTIVES = ("all_to_all", "gather", "scatter")


class CutTraffic(NamedTuple):
    """Bytes that leave a part, and bytes that enter it."""

    out: float
    into: float


def traffic_across_cuts(
    row: type[CostedOperation], counts: Sequence[int], root: int = 0
) -> list[CutTraffic]:
    """Traffic of each part, for parts with ``counts`` ranks.

    ``root`` is the index of the part that contains the root. all_reduce, broadcast and reduce put
    the same traffic on each part (`CostedOperation.busbw_factor` for the number of parts).
    """
    n, parts, kind = sum(counts), len(counts), implemented_collective(row)
    lacking = [(n - count) / n for count in counts]
    if parts < 2:
        return [CutTraffic(0.0, 0.0)] * parts
    if kind in EXCHANGE_COLLECTIVES:
        return exchange_traffic(kind, counts, root, n)
    if kind == "all_gather":
        return [CutTraffic(lacking[(k + 1) % parts], less) for k, less in enumerate(lacking)]
    if kind == "reduce_scatter":
        return [CutTraffic(less, lacking[k - 1]) for k, less in enumerate(lacking)]
    return [CutTraffic(row.busbw_factor(parts), row.busbw_factor(parts))] * parts


def exchange_traffic(
    kind: str, counts: Sequence[int], root: int | None, n: int
) -> list[CutTraffic]:
    """Traffic between parts of a group of ``n`` ranks, in an exchange.

    ``root`` is the index of the part with the root, or None if none of these parts contains it.
    """
    among = sum(counts)
    if kind == "all_to_all":
        return [
            CutTraffic(count * (among - count) / n, count * (among - count) / n) for count in counts
        ]
    if root is None:
        return [CutTraffic(0.0, 0.0)] * len(counts)
    gathered = [
        CutTraffic(0.0, (among - count) / n) if k == root else CutTraffic(count / n, 0.0)
        for k, count in enumerate(counts)
    ]
    return gathered if kind == "gather" else [CutTraffic(into, out) for out, into in gathered]
