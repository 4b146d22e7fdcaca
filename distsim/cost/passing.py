"""What must leave and enter the parts that a group is cut into: nodes, leaves of a network, slots behind a switch.

Parts need not be alike: of an all_gather a part takes what the others have, however little it gives. Who hands it on is not said by
that: here the parts are a ring, where each gives the next all that the next has not, and no other order spares the busiest way anything.
Bytes are for each byte of the operation's buffer, as nccl-tests counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distsim.cost.loads import Row, brings_about

#: Operations of which every byte has one rank that it is for, or is from.
EXCHANGES = ("all_to_all", "gather", "scatter")


class Passed(NamedTuple):
    """Bytes out of a part, and into it."""

    out: float
    into: float


def passed(row: type[Row], counts: Sequence[int], root: int = 0) -> list[Passed]:
    """Of parts with so many ranks each; ``root``: the part that has the root. all_reduce, broadcast and reduce pass each part alike
    (`Row.busbw_factor` of the parts)."""
    n, parts, kind = sum(counts), len(counts), brings_about(row)
    lacking = [(n - count) / n for count in counts]
    if parts < 2:
        return [Passed(0.0, 0.0)] * parts
    if kind in EXCHANGES:
        return exchanged(kind, counts, root, n)
    if kind == "all_gather":
        return [Passed(lacking[(k + 1) % parts], less) for k, less in enumerate(lacking)]
    if kind == "reduce_scatter":
        return [Passed(less, lacking[k - 1]) for k, less in enumerate(lacking)]
    return [Passed(row.busbw_factor(parts), row.busbw_factor(parts))] * parts


def exchanged(kind: str, counts: Sequence[int], root: int | None, n: int) -> list[Passed]:
    """Of what parts of a group of ``n`` ranks send to each other; ``root``: None where it is in none of them."""
    among = sum(counts)
    if kind == "all_to_all":
        return [Passed(count * (among - count) / n, count * (among - count) / n) for count in counts]
    if root is None:
        return [Passed(0.0, 0.0)] * len(counts)
    gathered = [Passed(0.0, (among - count) / n) if k == root else Passed(count / n, 0.0) for k, count in enumerate(counts)]
    return gathered if kind == "gather" else [Passed(into, out) for out, into in gathered]
