"""What must leave and enter the parts that a group is cut into: nodes, leaves of a network, slots
behind a switch.

Parts need not be alike: of an all_gather a part takes what the others have, however little it
gives. Who hands it on is not said by that: here the parts are a ring, where each gives the next all
that the next has not, and no other order spares the busiest way anything. Bytes are for each byte
of the operation's buffer, as nccl-tests counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distsim.hardware.cost.link_loads import PricedOperation, implemented_collective

#: Operations of which every byte has one rank that it is for, or is from.
EXCHANGE_COLLECTIVES = ("all_to_all", "gather", "scatter")


class CutTraffic(NamedTuple):
    """Bytes out of a part, and into it."""

    out: float
    into: float


def traffic_across_cuts(
    row: type[PricedOperation], counts: Sequence[int], root: int = 0
) -> list[CutTraffic]:
    """Of parts with so many ranks each; ``root``: the part that has the root. all_reduce, broadcast
    and reduce pass each part alike (`PricedOperation.busbw_factor` of the parts)."""
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
    """Of what parts of a group of ``n`` ranks send to each other; ``root``: None where it is in
    none of them.
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
