"""Who takes up which links, and what each gets of them: max-min fair rates over links that
transfers share.

A *port* is one direction of a link: a rank's way to the others of its node, or a network card.
While a transfer moves its bytes it takes up its busiest port whole, and the others by the bytes
that it puts there; what its price has besides (launch, hops) takes up nothing. So n alike that
share a port take n times as long. On flat clusters one thread moves a process's bytes (gloo:
tcp/loop.cc): n that cross it are slowed down to 1 / (1 + (n - 1) crossing) each, by
`Cluster.crossing`.

Rates by progressive filling: all grow alike until a port is full or a transfer has what it can use
(Bertsekas, Gallager, Data Networks, 6.5.2: max-min flow control). Of a collective the bytes that
must cross a port are those of the bandwidth bound, as nccl-tests counts (doc/PERFORMANCE.md), where
its nodes are alike; else see `distsim.hardware.cost.cut_traffic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.hardware.cost.cut_traffic import (
    EXCHANGE_COLLECTIVES,
    CutTraffic,
    exchange_traffic,
    traffic_across_cuts,
)
from distsim.hardware.cost.link_loads import PricedOperation, implemented_collective
from distsim.hardware.cost.model import CostModel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class PortDemand(NamedTuple):
    """What a transfer takes up while its bytes move: ``ports``, bytes there for each byte at the
    busiest (``weights``), and the ``rate`` there when it is alone, in bytes per ns."""

    ports: tuple[int, ...]
    weights: tuple[float, ...]
    rate: float


#: Two levels that differ by less are one.
_RELATIVE_TOLERANCE = 1 + 1e-12
#: It takes up nothing that others could want.
NO_DEMAND = PortDemand((), (), 1.0)


class LinkPorts:
    """The ports of a cluster, numbered: of rank r 2r out and 2r + 1 in, then the ranks' threads,
    then every node's cards, then the ways up from switches
    (`distsim.hardware.cost.switch_uplinks`). ``capacity`` in bytes per ns by number; a thread's is
    counted otherwise (``crossing``)."""

    def __init__(self, cost: CostModel) -> None:
        cluster, self.cost = cost.cluster, cost
        size, self.cards = max(cost.world_size, 1), cluster.nics.count
        nodes = -(-size // cost.local_size)
        self.crossing = cluster.crossing if cluster.collectives == "flat" else 0.0
        self.threads, self.first_card = 2 * size, 3 * size
        node = np.arange(size) // cost.local_size
        inside = cluster.intra.attained / np.array([cost.slow_intra(n) for n in range(nodes)])
        card = cluster.rank_inter_bytes_per_ns / np.array(
            [cost.slow_inter(n) for n in range(nodes)]
        )
        self.pools, self.first_pool = cost.pools, self.first_card + 2 * self.cards * nodes
        self.capacity: FloatArray = np.concatenate(
            [
                np.repeat(inside[node], 2),
                np.full(size, np.inf),
                np.repeat(card, 2 * self.cards),
                np.array(cost.pools.capacity),
            ]
        )
        #: Whether bytes for the network pass the way that ranks inside use as well.
        self.through_intra = cluster.intra.kind == "pcie"
        self._of_pair: dict[tuple[int, int], PortDemand] = {}
        self._of_group: dict[tuple[str, tuple[int, ...], int], PortDemand] = {}

    def card(self, rank: int) -> int:
        """The port out of a rank's card; the next one goes in."""
        node, local = divmod(rank, self.cost.local_size)
        return self.first_card + 2 * (node * self.cards + local % self.cards)

    def is_thread(self, port: int) -> bool:
        """Whether it is the thread of a process."""
        return self.threads <= port < self.first_card

    @property
    def shared_cards(self) -> bool:
        """Ranks of a node have cards in common, and something to send to other nodes; or a switch's
        way up.
        """
        return (
            bool(self.pools.levels)
            or self.cards < min(self.cost.local_size, self.cost.world_size) < self.cost.world_size
        )

    def name(self, port: int) -> str:
        """What a port is called."""
        if port < self.threads:
            return f"rank {port // 2} link {'in' if port % 2 else 'out'}"
        if port < self.first_card:
            return f"rank {port - self.threads} loop"
        if port >= self.first_pool:
            return self.pools.name(port - self.first_pool)
        node, card = divmod((port - self.first_card) // 2, self.cards)
        return f"node {node} nic {card} {'in' if (port - self.first_card) % 2 else 'out'}"

    # --- messages ---
    def of_message(self, src: int, dst: int) -> PortDemand:
        """A message from rank to rank; to oneself it takes up nothing."""
        found = self._of_pair.get((src, dst))
        if found is None:
            found = self._of_pair[src, dst] = self._message(src, dst)
        return found

    def _message(self, src: int, dst: int) -> PortDemand:
        link = self.cost.link_class(src, dst)
        if link == "self":
            return NO_DEMAND
        ports = [2 * src, 2 * dst + 1] if link == "intra" or self.through_intra else []
        ports += [self.card(src), self.card(dst) + 1] if link == "inter" else []
        ports += [self.first_pool + port for port in self.pools.of_message(src, dst)]
        rate = float(min(self.capacity[port] for port in ports))
        threads = [self.threads + src, self.threads + dst] if self.crossing else []
        return PortDemand(
            (*ports, *threads), (*(1.0 for _ in ports), *(0.0 for _ in threads)), rate
        )

    # --- collectives ---
    def of_collective(
        self, row: type[PricedOperation], ranks: tuple[int, ...], root: int | None = None
    ) -> PortDemand:
        """A collective among ranks; a group's is worked out once. ``root``: the rank, where there
        is one; left out, the first.
        """
        key = (row.op, ranks, ranks[0] if root is None else root)
        found = self._of_group.get(key)
        if found is None:
            found = self._of_group[key] = (
                self._collective(row, *key[1:]) if len(ranks) > 1 else NO_DEMAND
            )
        return found

    def asked(
        self, row: type[PricedOperation], ranks: tuple[int, ...], root: int | None = None
    ) -> dict[int, float]:
        """Bytes that a collective among ranks puts on each port that it passes, for each byte of
        its buffer.
        """
        size, root = self.cost.local_size, ranks[0] if root is None else root
        on_node: dict[int, list[int]] = {}
        for rank in ranks:
            on_node.setdefault(rank // size, []).append(rank)
        across = traffic_across_cuts(
            row, [len(mates) for mates in on_node.values()], list(on_node).index(root // size)
        )
        asked: dict[int, float] = {}
        for mates, through in zip(on_node.values(), across, strict=True):
            self._add_links(
                asked, mates, _traffic_inside_node(row, mates, root, len(ranks)), through
            )
            self._add_cards(asked, mates, through)
        asked |= {
            self.first_pool + port: nbytes
            for port, nbytes in self.pools.of_collective(row, ranks, root).items()
        }
        return {port: nbytes for port, nbytes in asked.items() if nbytes > 0}

    def _collective(
        self, row: type[PricedOperation], ranks: tuple[int, ...], root: int
    ) -> PortDemand:
        asked = self.asked(row, ranks, root)
        ports = list(asked)
        if not ports:
            return NO_DEMAND
        busiest = max(ports, key=lambda port: asked[port] / self.capacity[port])
        rate, most = float(self.capacity[busiest]), asked[busiest]
        threads = [self.threads + rank for rank in ranks] if self.crossing else []
        weights = (*(asked[port] / most for port in ports), *(0.0 for _ in threads))
        return PortDemand((*ports, *threads), weights, rate)

    def _add_links(
        self,
        asked: dict[int, float],
        mates: list[int],
        inside: list[CutTraffic],
        through: CutTraffic,
    ) -> None:
        """What ranks of one node put on their ways to each other, and on those to the cards where
        they are the same.
        """
        share = 1 / len(mates) if self.through_intra else 0.0
        for rank, own in zip(mates, inside, strict=True):
            asked[2 * rank] = asked.get(2 * rank, 0.0) + own.out + share * through.out
            asked[2 * rank + 1] = asked.get(2 * rank + 1, 0.0) + own.into + share * through.into

    def _add_cards(self, asked: dict[int, float], mates: list[int], through: CutTraffic) -> None:
        """What passes the cards of a node, each of which takes as much."""
        cards = sorted({self.card(rank) for rank in mates})
        for card in cards:
            asked[card] = asked.get(card, 0.0) + through.out / len(cards)
            asked[card + 1] = asked.get(card + 1, 0.0) + through.into / len(cards)


def _traffic_inside_node(
    row: type[PricedOperation], mates: list[int], root: int, n: int
) -> list[CutTraffic]:
    """What each rank of a node sends to its mates and takes from them, in a group of ``n``: of
    other operations than exchanges as much as if the node were the group, since what comes from
    others, or goes to them, is cut among its ranks."""
    kind = implemented_collective(row)
    if kind in EXCHANGE_COLLECTIVES:
        return exchange_traffic(
            kind, [1] * len(mates), mates.index(root) if root in mates else None, n
        )
    factor = row.busbw_factor(len(mates)) if len(mates) > 1 else 0.0
    return [CutTraffic(factor, factor)] * len(mates)


def fair_rates(
    demands: Sequence[PortDemand], capacity: FloatArray, limits: Sequence[float] | None = None
) -> FloatArray:
    """What each of these transfers gets at its busiest port, in bytes per ns. ``limits``: in place
    of the rates that they have alone.

    Levels only rise as others are settled, so a round settles every transfer that can't use more
    than its ports' levels, and all at a port that is full before any other port of its
    transfers.
    """
    counts = [len(d.ports) for d in demands]
    ports = np.fromiter(chain.from_iterable(d.ports for d in demands), np.int64, sum(counts))
    weight = np.fromiter(chain.from_iterable(d.weights for d in demands), np.float64, len(ports))
    used, port_of = np.unique(ports, return_inverse=True)
    flow_of = np.repeat(np.arange(len(demands)), counts)
    limit = np.array([d.rate for d in demands] if limits is None else limits, dtype=np.float64)
    left, rates = capacity[used].astype(np.float64), limit.copy()
    while flow_of.size:
        load = np.bincount(port_of, weight, minlength=len(used))
        level = np.divide(left, load, out=np.full(len(used), np.inf), where=load > 0)
        rate = np.minimum(limit, _minimum_per_index(level[port_of], flow_of, len(demands)))
        full = level <= _minimum_per_index(rate[flow_of], port_of, len(used)) * _RELATIVE_TOLERANCE
        settled = limit <= rate
        settled[flow_of[full[port_of]]] = True
        gone = settled[flow_of]
        rates[flow_of[gone]] = rate[flow_of[gone]]
        left = np.maximum(
            left
            - np.bincount(port_of[gone], weight[gone] * rate[flow_of[gone]], minlength=len(used)),
            0.0,
        )
        flow_of, port_of, weight = flow_of[~gone], port_of[~gone], weight[~gone]
    return rates


def _minimum_per_index(values: FloatArray, of: IntArray, count: int) -> FloatArray:
    """The least value of each."""
    found = np.full(count, np.inf)
    np.minimum.at(found, of, values)
    return found
