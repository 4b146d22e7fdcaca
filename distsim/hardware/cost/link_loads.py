"""Placement of a group's ranks on nodes, and the load that a schedule puts on the links there.

The key idea: a round's duration depends only on the busiest port of each class of link, so a round
is reduced to two numbers (`RoundLoad`), and equal rounds are counted instead of listed. This module
computes no durations; see `distsim.hardware.cost.model`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from distsim.common.errors import UsageError
from distsim.common.message_text import did_you_mean, name_list
from distsim.hardware.cluster.description import Cluster
from distsim.operations.core.algorithms import ALGORITHMS, CollectiveAlgorithm, Round

#: Value of ``algorithms`` that selects the cheapest algorithm instead of a named one.
CHEAPEST = "cheapest"


class RoundLoad(NamedTuple):
    """Load of one round per class of link.

    Each value is ns per byte of one chunk at the busiest port, or None if nothing moves there.
    """

    intra: float | None
    inter: float | None


class GroupPlacement:
    """The node of each group rank, the link bandwidths (bytes per ns), and the loads of rounds."""

    def __init__(
        self,
        cluster: Cluster,
        nodes: tuple[int, ...],
        slow_intra: Sequence[float],
        slow_inter: Sequence[float],
    ) -> None:
        counts = Counter(nodes)
        self.n = len(nodes)
        self.nodes = len(counts)
        sizes = set(counts.values())
        #: Ranks per node, or None if nodes have different numbers of ranks.
        self.per_node = sizes.pop() if len(sizes) == 1 else None
        #: Largest and smallest number of ranks on one node.
        self.most, self.least = max(counts.values()), min(counts.values())
        #: Cache of `distsim.hardware.cost.nccl_placement.context_of_group`.
        self.setting: object = None
        self.worst_intra = max(slow_intra[node] for node in counts)
        self._node = np.array(nodes, dtype=np.int64)
        self._intra_cost = (
            np.array([slow_intra[node] for node in nodes]) / cluster.intra.attained_bytes_per_ns
        )
        self._inter_cost = (
            np.array([slow_inter[node] for node in nodes]) / cluster.rank_inter_bytes_per_ns
        )
        self._cards = cluster.nics.count
        slowest = max(slow_inter[node] for node in counts)
        self.worst_inter = slowest
        rails = min(cluster.nics.count, min(counts.values()))
        intra, rank_inter = (
            cluster.intra.attained_bytes_per_ns / self.worst_intra,
            cluster.rank_inter_bytes_per_ns / slowest,
        )
        #: Bandwidth of one rail if every rank of a node sends at the same time.
        self.rail_bytes_per_ns = min(
            rank_inter, rank_inter * cluster.nics.count / max(counts.values())
        )
        #: Bandwidth of a ring that uses every network card between nodes.
        self.ring_bytes_per_ns = min(
            [intra] * (self.n > self.nodes) + [rank_inter * rails] * (self.nodes > 1), default=intra
        )
        inside = [cluster.intra.attained_bytes_per_ns] * (self.n > self.nodes)
        across = [cluster.rank_inter_bytes_per_ns] * (self.nodes > 1)
        #: Bandwidth of the fastest link that any rank has, without faults.
        self.fastest = max(inside + across, default=intra)

    def round_load(self, src: Sequence[int], dst: Sequence[int]) -> RoundLoad:
        """Load of a round in which one chunk goes from each ``src[i]`` to ``dst[i]``."""
        return self._load(np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64), 1)

    def rotation_load(self, distance: int, chunks: int) -> RoundLoad:
        """Load of a round with ``chunks`` chunks from each rank to rank + ``distance``."""
        src = np.arange(self.n)
        return self._load(src, (src + distance) % self.n, chunks)

    def all_pairs_load(self) -> RoundLoad:
        """Load of a single round in which every rank sends one chunk to every other rank."""
        mates = np.bincount(self._node)[self._node]
        return self._ports(mates - 1, mates - 1, self.n - mates, self.n - mates)

    def _load(self, src: NDArray[np.int64], dst: NDArray[np.int64], chunks: int) -> RoundLoad:
        """Load of transfers of ``chunks`` chunks each."""
        crossing = self._node[src] != self._node[dst]
        counts = [
            np.bincount(end[mask], minlength=self.n) * chunks
            for mask in (~crossing, crossing)
            for end in (src, dst)
        ]
        return self._ports(*counts)

    def _ports(self, *counts: NDArray[np.int64]) -> RoundLoad:
        """Load from chunk counts per rank.

        The four counts are: out and in over links inside the node, out and in over the network.
        """
        intra = np.maximum(counts[0], counts[1])
        inter = np.maximum(counts[2], counts[3])
        load_intra = float((intra * self._intra_cost).max()) if intra.any() else None
        if not inter.any():
            return RoundLoad(load_intra, None)
        node_out, node_in = (
            np.bincount(self._node, weights=counts[2]),
            np.bincount(self._node, weights=counts[3]),
        )
        per_card = np.maximum(inter, np.maximum(node_out, node_in)[self._node] / self._cards)
        return RoundLoad(load_intra, float((per_card * self._inter_cost).max()))


# --- schedules ---


class CostedOperation(Protocol):
    """The attributes of an operation that the cost model needs.

    See `distsim.operations.core.operation_base.Operation`.
    """

    op: ClassVar[str]
    algorithms: ClassVar[Mapping[str, CollectiveAlgorithm]]

    @classmethod
    def measured_as(cls) -> str:
        """The operation whose measured times apply."""

    @classmethod
    def busbw_factor(cls, n: int) -> float:
        """The bus bandwidth factor (`Operation.busbw_factor`)."""


class ScheduleLoad(NamedTuple):
    """Load of a whole schedule.

    ``rounds`` are (load, number of such rounds). ``combined`` is the number of chunks that the
    busiest rank reduces, one after the other.
    """

    rounds: tuple[tuple[RoundLoad, int], ...]
    combined: int


def schedule_load(place: GroupPlacement, algorithm: CollectiveAlgorithm, root: int) -> ScheduleLoad:
    """Load of an algorithm's schedule, without building its rounds where a closed form exists."""
    if algorithm.shape == "all pairs":
        return ScheduleLoad(((place.all_pairs_load(), 1),), 0)
    if algorithm.rotations is None:
        return written_load(place, algorithm.rounds(place.n, root))
    rotations = list(algorithm.rotations(place.n))
    rounds = _count_equal_rounds(
        (place.rotation_load(r.distance, r.chunks), r.rounds) for r in rotations
    )
    combined = sum(r.rounds * r.chunks for r in rotations if r.reduce)
    return ScheduleLoad(rounds, combined)


def written_load(place: GroupPlacement, rounds: Sequence[Round]) -> ScheduleLoad:
    """Load of rounds exactly as given."""
    combined: Counter[int] = Counter()
    loads: list[tuple[RoundLoad, int]] = []
    for transfers in rounds:
        sources = [transfer.src for transfer in transfers]
        destinations = [transfer.dst for transfer in transfers]
        loads.append((place.round_load(sources, destinations), 1))
        combined.update(transfer.dst for transfer in transfers if transfer.reduce)
    return ScheduleLoad(_count_equal_rounds(loads), max(combined.values(), default=0))


def _count_equal_rounds(
    loads: Iterable[tuple[RoundLoad, int]],
) -> tuple[tuple[RoundLoad, int], ...]:
    """Equal rounds counted together, in order of first use."""
    counts: Counter[RoundLoad] = Counter()
    for load, times in loads:
        counts[load] += times
    return tuple(counts.items())


def implemented_collective(row: type[CostedOperation]) -> str:
    """The collective that the operation's algorithms implement; empty if it has none."""
    return next((algorithm.of for algorithm in row.algorithms.values()), "")


def check_algorithm_names(cluster: Cluster) -> None:
    """Raise UsageError if ``algorithms`` names an unknown collective or algorithm."""
    for collective, name in cluster.algorithms.items():
        known = ALGORITHMS.get(collective)
        if known is None:
            raise UsageError(
                (
                    f"cluster {cluster.name} sets `algorithms` for `{collective}`, which has "
                    f"none{did_you_mean(collective, ALGORITHMS)}"
                ),
                f"collectives with algorithms: {name_list(ALGORITHMS)}",
            )
        if name != CHEAPEST and name not in known:
            raise UsageError(
                f"cluster {cluster.name}: {collective} has no algorithm `{name}`"
                f"{did_you_mean(name, (*known, CHEAPEST))}",
                f"use {name_list(known)}, or `{CHEAPEST}` for the lowest cost",
            )
