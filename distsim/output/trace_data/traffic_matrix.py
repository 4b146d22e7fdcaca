"""The bytes that each rank sends to each other rank over a run.

Messages count as they were sent; a collective counts by its first algorithm.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.operations.core.algorithms import CollectiveAlgorithm
from distsim.operations.registry import OPERATIONS
from distsim.output.trace_data.messages import matched_messages
from distsim.trace.model import Trace

Bytes = NDArray[np.int64]
#: The largest number of rows; with more ranks, the ranks of a node (or of several) share a row.
MAX_MATRIX_ROWS = 64
_COLLECTIVE_OPS = tuple(name for name, row in OPERATIONS.items() if row.kind == "collective")


class TrafficMatrix(NamedTuple):
    """``sent[i, j]``: bytes from block i to block j, in blocks of ``block`` neighbouring ranks.

    ``by``: the algorithm of each operation. ``ranks``: the ranks of the rows, if they were
    selected.
    """

    sent: Bytes
    block: int
    by: dict[str, str]
    ranks: tuple[int, ...] = ()


def ranks_per_row(trace: Trace) -> int:
    """The number of ranks that share a row: one if there is room, else those of a node or of
    several nodes.
    """
    world, local = trace.world_size, max(int(trace.header.get("local_size") or 0), 1)
    if world <= MAX_MATRIX_ROWS:
        return 1
    return (
        local * ceil(world / local / MAX_MATRIX_ROWS)
        if local > 1
        else ceil(world / MAX_MATRIX_ROWS)
    )


def measure_traffic(
    trace: Trace, block: int = 1, groups: tuple[int, ...] | None = None
) -> TrafficMatrix:
    """The bytes from each block of ranks to each other. ``groups``: only traffic in these groups;
    None: all.
    """
    size = -(-max(trace.world_size, 1) // block)
    sent, by = np.zeros((size, size), dtype=np.int64), dict[str, str]()
    found = matched_messages(trace, trace.makespan_ns)
    mine = (
        np.ones(len(found), dtype=bool)
        if groups is None
        else np.isin(trace["group"][found.send], groups)
    )
    np.add.at(
        sent,
        (found.source[mine] // block, found.target[mine] // block),
        trace["nbytes"][found.send[mine]].astype(np.int64),
    )
    for (op, group, nbytes, root), calls in _collective_counts(trace, groups).items():
        row, ranks = OPERATIONS[op], np.array(trace.header["groups"][group][1], dtype=np.int64)
        if not row.algorithms or len(ranks) < 2:
            continue
        name, algorithm = next(iter(row.algorithms.items()))
        by[op] = name
        at = np.searchsorted(ranks, root) if root >= 0 and row.root_field else 0
        source, target, chunks = algorithm_transfers(
            algorithm, len(ranks), int(min(at, len(ranks) - 1))
        )
        each = calls * algorithm.chunk_nbytes(len(ranks), nbytes)
        np.add.at(sent, (ranks[source] // block, ranks[target] // block), chunks * each)
    return TrafficMatrix(sent, block, by)


def _collective_counts(
    trace: Trace, groups: tuple[int, ...] | None
) -> dict[tuple[str, int, int, int], int]:
    """The number of matched collectives by (operation, group, bytes, root)."""
    rows = np.flatnonzero(
        trace.ops(*_COLLECTIVE_OPS) & (trace["match"] >= 0) & (trace["nbytes"] > 0)
    )
    rows = rows if groups is None else rows[np.isin(trace["group"][rows], groups)]
    _, first = np.unique(trace["match"][rows], return_index=True)
    met: dict[tuple[str, int, int, int], int] = {}
    columns = (trace[name][rows[first]].tolist() for name in ("op", "group", "nbytes", "peer"))
    for op, group, nbytes, root in zip(*columns, strict=True):
        key = (trace.tables["op"][op], group, nbytes, root)
        met[key] = met.get(key, 0) + 1
    return met


class TransferColumns(NamedTuple):
    """The transfers of an algorithm over all rounds, in group ranks; ``chunks``: how many."""

    source: Bytes
    target: Bytes
    chunks: Bytes


def algorithm_transfers(algorithm: CollectiveAlgorithm, n: int, root: int = 0) -> TransferColumns:
    """What a group of ``n`` ranks transfers."""
    return _cached_transfers(algorithm, n, root)


@cache
def _cached_transfers(algorithm: CollectiveAlgorithm, n: int, root: int) -> TransferColumns:
    if algorithm.rotations is not None:
        ranks = np.arange(n)
        parts = [
            (ranks, (ranks + one.distance) % n, np.full(n, one.rounds * one.chunks))
            for one in algorithm.rotations(n)
        ]
        return TransferColumns(*map(np.concatenate, zip(*parts, strict=True)))
    moved = np.array(
        [(t.src, t.dst) for round_ in algorithm.rounds(n, root) for t in round_], dtype=np.int64
    ).reshape(-1, 2)
    found, count = np.unique(moved, axis=0, return_counts=True)
    return TransferColumns(found[:, 0], found[:, 1], count)


__all__ = [
    "MAX_MATRIX_ROWS",
    "TrafficMatrix",
    "ranks_per_row",
    "algorithm_transfers",
    "measure_traffic",
]
