"""Bandwidth sharing: the ports that transfers use, and the max-min fair rate that each one gets.

A *port* is one direction of a link: a rank's link to the other ranks of its node, or a network
card. While a transfer moves bytes, it uses its busiest port at full rate, and its other ports in
proportion to the bytes that it puts there. The fixed parts of its cost (launch, hops) use no port.
So n equal transfers through one port take n times as long. On flat clusters one thread moves all
bytes of a process (gloo: tcp/loop.cc): n transfers through that thread each slow down to 1 / (1 +
(n - 1) crossing), with `Cluster.crossing`.

Rates result from progressive filling: all rates grow equally until a port is full or a transfer
reaches its own limit (Bertsekas, Gallager, Data Networks, 6.5.2: max-min flow control). For a
collective, the bytes that must cross a port are those of the bandwidth bound, as nccl-tests counts
them (doc/PERFORMANCE.md), if its nodes have equally many ranks; otherwise see
`distsim.hardware.cost.cut_traffic`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.hardware.cost.cut_traffic import (
    EXCHANGE_COLLECTIVES,
    CutTraffic,
    exchange_traffic,
    traffic_across_cuts,
)
from distsim.hardware.cost.link_loads import CostedOperation, implemented_collective
from distsim.hardware.cost.model import CostModel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class PortDemand(NamedTuple):
    """The ports that a transfer uses while its bytes move.

    ``weights`` are the bytes at each port per byte at the busiest port. ``rate`` is the transfer's
    rate at its busiest port without other traffic, in bytes per ns.
    """

    ports: tuple[int, ...]
    weights: tuple[float, ...]
    rate: float


#: Levels whose ratio is smaller count as equal.
_RELATIVE_TOLERANCE = 1 + 1e-12
#: The demand of a transfer that uses no shared port.
NO_DEMAND = PortDemand((), (), 1.0)


class LinkPorts:
    """The ports of a cluster, by number.

    Rank r has port 2r (out) and 2r + 1 (in). Then follow the ranks' threads, the network cards of
    every node, and the uplinks of switches (`distsim.hardware.cost.switch_uplinks`). ``capacity``
    is in bytes per ns, by port number. Threads have no capacity; ``crossing`` limits them instead.
    """

    def __init__(self, cost: CostModel) -> None:
        cluster, self.cost = cost.cluster, cost
        size, self.cards = max(cost.world_size, 1), cluster.nics.count
        nodes = -(-size // cost.local_size)
        self.crossing = cluster.crossing if cluster.collectives == "flat" else 0.0
        self.threads, self.first_card = 2 * size, 3 * size
        node = np.arange(size) // cost.local_size
        inside = cluster.intra.attained_bytes_per_ns / np.array(
            [cost.slow_intra(n) for n in range(nodes)]
        )
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
        # As a list, because one element of an array is slow to read.
        self._capacity_list: list[float] = self.capacity.tolist()
        #: Whether network traffic uses the same link as traffic inside the node.
        self.through_intra = cluster.intra.kind == "pcie"
        self._of_pair: dict[tuple[int, int], PortDemand] = {}
        self._of_group: dict[tuple[str, tuple[int, ...], int], PortDemand] = {}

    def card(self, rank: int) -> int:
        """The port out of a rank's network card; the next number is its port in."""
        node, local = divmod(rank, self.cost.local_size)
        return self.first_card + 2 * (node * self.cards + local % self.cards)

    def are_threads(self, ports: IntArray) -> NDArray[np.bool_]:
        """Which of some ports are the threads of processes."""
        return (self.threads <= ports) & (ports < self.first_card)

    @property
    def shared_cards(self) -> bool:
        """Whether ranks share a card and send to other nodes, or share a switch's uplink."""
        return (
            bool(self.pools.levels)
            or self.cards < min(self.cost.local_size, self.cost.world_size) < self.cost.world_size
        )

    def name(self, port: int) -> str:
        """A readable name for a port."""
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
        """Demand of a message between two ranks; a message to itself uses no port."""
        found = self._of_pair.get((src, dst))
        if found is None:
            found = self._of_pair[src, dst] = self._message(src, dst)
        return found

    def _message(self, src: int, dst: int) -> PortDemand:
        link = self.cost.link_class(src, dst)
        if link == "self":
            return NO_DEMAND
        ports: tuple[int, ...] = ()
        if link == "intra" or self.through_intra:
            ports = (2 * src, 2 * dst + 1)
        if link == "inter":
            ports += (self.card(src), self.card(dst) + 1)
        if self.pools.levels:
            ports += tuple(self.first_pool + port for port in self.pools.of_message(src, dst))
        capacity = self._capacity_list
        rate = min([capacity[port] for port in ports])
        weights = (1.0,) * len(ports)
        if self.crossing:
            ports += (self.threads + src, self.threads + dst)
            weights += (0.0, 0.0)
        return PortDemand(ports, weights, rate)

    # --- collectives ---
    def of_collective(
        self, row: type[CostedOperation], ranks: tuple[int, ...], root: int | None = None
    ) -> PortDemand:
        """Demand of a collective among ranks, cached per group.

        ``root`` is a global rank; by default the first of ``ranks``.
        """
        key = (row.op, ranks, ranks[0] if root is None else root)
        found = self._of_group.get(key)
        if found is None:
            found = self._of_group[key] = (
                self._collective(row, *key[1:]) if len(ranks) > 1 else NO_DEMAND
            )
        return found

    def asked(
        self, row: type[CostedOperation], ranks: tuple[int, ...], root: int | None = None
    ) -> dict[int, float]:
        """Bytes that a collective puts on each port that it uses, per byte of its buffer."""
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
        self, row: type[CostedOperation], ranks: tuple[int, ...], root: int
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
        """Add the traffic of one node's ranks on their links to each other.

        Where the network cards are reached over the same links (PCIe), the node's network traffic
        is added too.
        """
        share = 1 / len(mates) if self.through_intra else 0.0
        for rank, own in zip(mates, inside, strict=True):
            asked[2 * rank] = asked.get(2 * rank, 0.0) + own.out + share * through.out
            asked[2 * rank + 1] = asked.get(2 * rank + 1, 0.0) + own.into + share * through.into

    def _add_cards(self, asked: dict[int, float], mates: list[int], through: CutTraffic) -> None:
        """Add a node's network traffic, divided equally among the cards that the ranks use."""
        cards = sorted({self.card(rank) for rank in mates})
        for card in cards:
            asked[card] = asked.get(card, 0.0) + through.out / len(cards)
            asked[card + 1] = asked.get(card + 1, 0.0) + through.into / len(cards)


class PortUses(NamedTuple):
    """The ports of several transfers: transfer ``flow[i]`` puts ``weight[i]`` on ``port[i]``."""

    port: IntArray
    weight: FloatArray
    flow: IntArray


class DemandTable:
    """Demands as columns, so that those of thousands of transfers can be selected at once."""

    def __init__(self) -> None:
        self._number_of: dict[int, int] = {}
        self._demands: list[PortDemand] = []
        self._rates = array("d")
        #: The ports of demand n are those from ``_first[n]`` up to ``_first[n + 1]``.
        self._first = array("q", [0])
        self._ports = array("q")
        self._weights = array("d")

    def numbers(self, demands: Sequence[PortDemand]) -> IntArray:
        """The numbers of some demands in this table; adds the new ones."""
        number_of = self._number_of
        new = []
        for demand in demands:
            if id(demand) not in number_of:
                number_of[id(demand)] = len(number_of)
                new.append(demand)
        self._add(new)
        return np.array([number_of[id(demand)] for demand in demands], dtype=np.int64)

    def _add(self, new: list[PortDemand]) -> None:
        # The table keeps the demands, so that no other objects get their identities.
        self._demands += new
        self._rates.extend([demand.rate for demand in new])
        ends = accumulate([len(demand.ports) for demand in new], initial=self._first.pop())
        self._first.extend(ends)
        self._ports.extend(chain.from_iterable([demand.ports for demand in new]))
        self._weights.extend(chain.from_iterable([demand.weights for demand in new]))

    def rates(self, numbers: IntArray) -> FloatArray:
        """The rate of each numbered demand."""
        return np.frombuffer(self._rates, dtype=np.float64)[numbers]

    def uses(self, numbers: IntArray) -> PortUses:
        """The ports of numbered demands, in this order."""
        first = np.frombuffer(self._first, dtype=np.int64)
        begin = first[numbers]
        counts = first[numbers + 1] - begin
        flow = np.repeat(np.arange(len(numbers)), counts)
        # Use i of the result is use `i - (uses of the demands before)` of its own demand.
        uses_before = np.cumsum(counts) - counts
        places = np.arange(len(flow)) + np.repeat(begin - uses_before, counts)
        port = np.frombuffer(self._ports, dtype=np.int64)[places]
        return PortUses(port, np.frombuffer(self._weights, dtype=np.float64)[places], flow)


def _traffic_inside_node(
    row: type[CostedOperation], mates: list[int], root: int, n: int
) -> list[CutTraffic]:
    """Bytes that each rank of a node exchanges with the node's other ranks, in a group of ``n``.

    Except for exchanges, the result is the same as if the node were the whole group: data that
    arrives from other nodes, or leaves for them, is divided among the node's ranks.
    """
    kind = implemented_collective(row)
    if kind in EXCHANGE_COLLECTIVES:
        return exchange_traffic(
            kind, [1] * len(mates), mates.index(root) if root in mates else None, n
        )
    factor = row.busbw_factor(len(mates)) if len(mates) > 1 else 0.0
    return [CutTraffic(factor, factor)] * len(mates)


def fair_rates(
    demands: Sequence[PortDemand], capacity: FloatArray, limits: FloatArray | None = None
) -> FloatArray:
    """The rate of each transfer at its busiest port, in bytes per ns.

    ``limits`` replaces the rates that the transfers have without other traffic. Levels only rise
    while other transfers are fixed. So one round can fix every transfer whose limit is below its
    ports' levels, and all transfers at a port that fills up before every other port of its
    transfers.
    """
    table = DemandTable()
    numbers = table.numbers(demands)
    limits = table.rates(numbers) if limits is None else limits
    return fair_rates_of_uses(table.uses(numbers), capacity, limits)


def fair_rates_of_uses(uses: PortUses, capacity: FloatArray, limit: FloatArray) -> FloatArray:
    """As `fair_rates`, for transfers whose ports are in arrays."""
    ports, weight, flow_of = uses
    count = len(limit)
    # Number each used port by one of its places in `ports`. Unlike np.unique, this sorts nothing.
    # The other places of the port have no load.
    slots = len(ports)
    slot_of_port = np.empty(len(capacity), dtype=np.int64)
    slot_of_port[ports] = np.arange(slots)
    port_of = slot_of_port[ports]
    available, rates = capacity[ports].astype(np.float64), limit.copy()
    while flow_of.size:
        load = np.bincount(port_of, weight, minlength=slots)
        level = np.divide(available, load, out=np.full(slots, np.inf), where=load > 0)
        rate = np.minimum(limit, _minimum_per_index(level[port_of], flow_of, count))
        full = level <= _minimum_per_index(rate[flow_of], port_of, slots) * _RELATIVE_TOLERANCE
        settled = limit <= rate
        settled[flow_of[full[port_of]]] = True
        fixed = settled[flow_of]
        rates[flow_of[fixed]] = rate[flow_of[fixed]]
        taken = np.bincount(port_of[fixed], weight[fixed] * rate[flow_of[fixed]], minlength=slots)
        available = np.maximum(available - taken, 0.0)
        flow_of, port_of, weight = flow_of[~fixed], port_of[~fixed], weight[~fixed]
    return rates


def _minimum_per_index(values: FloatArray, of: IntArray, count: int) -> FloatArray:
    """The smallest value for each index from 0 to ``count`` - 1; infinity if it has none."""
    found = np.full(count, np.inf)
    np.minimum.at(found, of, values)
    return found
