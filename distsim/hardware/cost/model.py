"""The cost model: predicted durations of computations, messages and collectives on one cluster.

The structure is Hockney's (latency + bytes / bandwidth), summed over the rounds of a collective's
schedule. Each class of link has one latency and one bandwidth. A round lasts as long as its slowest
transfer. Transfers of the same round that leave or enter the same rank, or pass the same node's
network cards, share that bandwidth. On clusters with ``collectives: rails`` the model takes the
cheapest of these forms, as NCCL chooses among its algorithms:

- the operation's own schedule in the order of group ranks (flat);
- rings through every network card (rail ring): ``busbw <= min(link, sum of the cards)``;
- all pairs in one group of sends and receives, for all_to_all;
- two levels: reduce_scatter inside a node, all_reduce per rail, all_gather inside a node; only for
  groups with the same number of ranks on each node;
- a pipelined chain for broadcast and reduce.

A cluster's ``algorithms`` overrides this choice with one algorithm of
`distsim.operations.core.algorithms`, or with the cheapest of them all. By default, flat clusters
use the first algorithm, because Gloo uses the same one at every size, and clusters with rails use
the cheapest of the forms above.

Times that were measured on the cluster correct all of these costs
(`distsim.hardware.cluster.measured_correction`).

This module knows no operation by name: callers pass rows of the operation table.

Sources: Thakur, Rabenseifner, Gropp (2005) for the flat forms; NCCL src/graph/tuning.cc for the
latencies of a rail ring; nccl-tests doc/PERFORMANCE.md for bytes and busbw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from math import ceil, log2, sqrt
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from distsim.common.errors import UsageError
from distsim.common.message_text import did_you_mean, name_list
from distsim.hardware.cluster.description import Cluster, MeasuredCurve
from distsim.hardware.cluster.measured_correction import MeasuredCorrection, weighted_curves
from distsim.hardware.cost import nccl_curves
from distsim.hardware.cost.link_loads import (
    CHEAPEST,
    CostedOperation,
    GroupPlacement,
    ScheduleLoad,
    check_algorithm_names,
    implemented_collective,
    schedule_load,
    written_load,
)
from distsim.hardware.cost.nccl_constants import LAUNCH_NS
from distsim.hardware.cost.nccl_context import NcclOperation
from distsim.hardware.cost.nccl_placement import (
    context_of_group,
    context_of_message,
    merge_nvlink_domains,
    nccl_operation_of,
)
from distsim.hardware.cost.switch_uplinks import SwitchUplinks
from distsim.operations.core.algorithms import CollectiveAlgorithm, Round, RoundsFunction
from distsim.operations.core.resolved_call import KernelWork

IntArray = NDArray[np.int64]
LinkClass = Literal["self", "intra", "inter"]


class SlowLink(Protocol):
    """A link fault that divides a link's bandwidth by ``factor``.

    It affects the named ``nodes``, or all nodes if there are none.
    """

    @property
    def link(self) -> str:
        """The kind of link that is slow."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes whose links are slow; empty for all."""

    @property
    def factor(self) -> float:
        """The factor by which times grow."""


#: The operation whose measured times apply to every message.
_MESSAGE = "send"


class CostModel:
    """Predicts durations on one cluster.

    All durations are integer ns, all sizes bytes, and all ranks global unless stated otherwise.
    ``local_size`` is the number of ranks per node: rank r is on node ``r // local_size``.
    ``link_faults`` make links slower. The same arguments always give the same cost. The model
    caches its results, so callers need no cache of their own.
    """

    def __init__(
        self,
        cluster: Cluster,
        world_size: int,
        local_size: int,
        link_faults: Sequence[SlowLink] = (),
    ) -> None:
        self.machine_size = max(local_size, 1)
        self._written = cluster
        self.cluster, self.local_size = cluster, self.machine_size
        if cluster.intra.domain:
            self.cluster, self.local_size = merge_nvlink_domains(cluster, self.machine_size)
        self.world_size = world_size
        self.name, self.source, self.error_band = cluster.name, cluster.source, cluster.error_band
        self.nccl = cluster.collectives == "nccl"
        # Part of the cost of a communication call.
        self.call_overhead_ns = cluster.call_overhead_ns
        # Part of the cost of a kernel whose cost is computed by the roofline model.
        self.launch_ns = cluster.device.launch_ns
        nodes = -(-max(world_size, 1) // self.local_size)
        self._slow_intra = [1.0] * nodes
        self._slow_inter = [1.0] * nodes
        for fault in link_faults:
            self._slow_down(fault, nodes)
        self.link_faults = tuple(link_faults)
        check_algorithm_names(cluster)
        self._p2p: dict[tuple[int, int, int], int] = {}
        # Costs of messages under NCCL, used while no link is faulty.
        self._by_class: dict[tuple[LinkClass, int], int] = {}
        self._collective_costs: dict[tuple[str, tuple[int, ...], int, int | None], int] = {}
        self._placements: dict[tuple[int, ...], GroupPlacement] = {}
        self._loads: dict[tuple[GroupPlacement, RoundsFunction, int], ScheduleLoad] = {}
        self._corrections: dict[tuple[str, int, int], list[tuple[MeasuredCorrection, float]]] = {}
        self._references: dict[tuple[int, int], CostModel] = {}

    @cached_property
    def pools(self) -> SwitchUplinks:
        """Uplinks that several ranks share because they are behind the same switch."""
        return SwitchUplinks(self._written, self.machine_size, self.world_size)

    @cached_property
    def _switched(self) -> bool:
        """Whether the cluster's file describes switches."""
        return self.cluster.network.leaf is not None or self.cluster.intra.per_switch is not None

    # --- links ---

    def _slow_down(self, fault: SlowLink, nodes: int) -> None:
        inter = ("nic", "network", "inter")
        intra = (self.cluster.intra.kind, "intra")
        if fault.link not in inter + intra:
            known = ("nic", "network", self.cluster.intra.kind)
            message = (
                f"cluster {self.name} has no link `{fault.link}`{did_you_mean(fault.link, known)}"
            )
            raise UsageError(message, f"links of this cluster: {name_list(known)}")
        factors = self._slow_inter if fault.link in inter else self._slow_intra
        # Machines that share an NVLink domain are one node here.
        named = {node * self.machine_size // self.local_size for node in fault.nodes}
        for node in named or range(nodes):
            if 0 <= node < nodes:
                factors[node] *= fault.factor

    def node(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.local_size

    def link_class(self, src: int, dst: int) -> LinkClass:
        """``self``, ``intra`` (same node) or ``inter``."""
        if src == dst:
            return "self"
        return "intra" if src // self.local_size == dst // self.local_size else "inter"

    def latency_ns(self, link: LinkClass) -> int:
        """One hop over a class of link."""
        return {
            "self": 0,
            "intra": self.cluster.intra.latency_ns,
            "inter": self.cluster.inter_latency_ns,
        }[link]

    def bytes_per_ns(self, src: int, dst: int) -> float:
        """Bandwidth of a message between two ranks without other traffic."""
        link = self.link_class(src, dst)
        if link == "self":
            # Each byte is read and written.
            device = self.cluster.device
            return device.memory_bytes_per_ns * device.memory_efficiency / 2
        src_node, dst_node = self.node(src), self.node(dst)
        if link == "intra":
            return self.cluster.intra.attained_bytes_per_ns / self._slow_intra[src_node]
        slowest = max(self._slow_inter[src_node], self._slow_inter[dst_node])
        return self.cluster.rank_inter_bytes_per_ns / slowest

    def slow_intra(self, node: int) -> float:
        """Factor by which faults divide the bandwidth inside a node."""
        return self._slow_intra[node]

    def slow_inter(self, node: int) -> float:
        """Factor by which faults divide the bandwidth of a node's network cards."""
        return self._slow_inter[node]

    # --- costs ---

    def route_numbers(self, src: IntArray, dst: IntArray) -> IntArray:
        """A number for each pair of ranks; if it is equal, messages of one size cost the same.

        With switches, each pair may have a cost of its own. With link faults, each pair of nodes
        may. Otherwise only the class of the link matters.
        """
        if self._switched:
            return src * self.world_size + dst
        src_node, dst_node = src // self.local_size, dst // self.local_size
        if self.link_faults:
            numbers = src_node * len(self._slow_intra) + dst_node
        else:
            numbers = (src_node != dst_node).astype(np.int64)
        return np.where(src == dst, -1, numbers)

    def p2p_ns(self, src: int, dst: int, nbytes: int) -> int:
        """Cost of a message between two ranks, from the match to the arrival of its last byte."""
        if self._switched or src == dst:
            key = (src, dst, nbytes)
        else:
            # Without switches, only the two nodes matter. Nodes are stored as negative numbers
            # because ranks are keys too.
            key = (~(src // self.local_size), ~(dst // self.local_size), nbytes)
        cost = self._p2p.get(key)
        if cost is not None:
            return cost

        cost = self._p2p_ns(src, dst, nbytes)
        if nbytes and self._switched:
            # The message cannot be faster than the slowest uplink that it crosses.
            for port in self.pools.of_message(src, dst):
                moving_ns = ceil(nbytes / self.pools.capacity[port])
                cost = max(cost, self._p2p_ns(src, dst, 0) + moving_ns)
        if self.cluster.measured:
            nodes = 1 if self.link_class(src, dst) == "intra" else 2
            cost = self._corrected(cost, _MESSAGE, 2, nodes, nbytes, None)
        self._p2p[key] = cost
        return cost

    def _p2p_ns(self, src: int, dst: int, nbytes: int) -> int:
        if self.nccl and src != dst:
            # Without link faults, all links of one class have the same cost.
            key = (self.link_class(src, dst), nbytes)
            cost = None if self.link_faults else self._by_class.get(key)
            if cost is None:
                cost = self._nccl_ns("send", self.placement((src, dst)), nbytes)
                self._by_class[key] = cost
            return cost
        return self.p2p_latency_ns(src, dst) + ceil(nbytes / self.bytes_per_ns(src, dst))

    def _nccl_ns(self, kind: NcclOperation, place: GroupPlacement, nbytes: int) -> int:
        """NCCL's cost, shifted where ``call_overhead`` differs from NCCL's fitted launch time.

        The fitted constants (`distsim.hardware.cost.nccl_constants`) already include ``LAUNCH_NS``,
        so only the difference is added.
        """
        if kind == _MESSAGE:
            at = context_of_message(self.cluster, place)
        else:
            at = context_of_group(self.cluster, place)
        cost = nccl_curves.cost_ns(kind, at, nbytes)
        extra = self.call_overhead_ns - LAUNCH_NS
        if not extra:
            return cost
        return max(cost + extra, nccl_curves.lower_bound_ns(kind, at, nbytes), 1)

    def p2p_latency_ns(self, src: int, dst: int) -> int:
        """The part of a message's cost that does not depend on its size."""
        return self.call_overhead_ns + self.latency_ns(self.link_class(src, dst))

    def one_sided_ns(self, src: int, dst: int, nbytes: int) -> int:
        """Cost in ns of a put, a get or a signal (4 bytes): latency plus bytes / bandwidth.

        The kernel that performs the stores is launched like any other kernel, and no protocol has
        to start. This cost is not fitted to measurements.
        """
        return self.latency_ns(self.link_class(src, dst)) + ceil(
            nbytes / self.bytes_per_ns(src, dst)
        )

    def compute_ns(
        self,
        time_ns: int,
        flops: float = 0.0,
        mem_bytes: float = 0.0,
        dtype: str = "float32",
        kernels: int = 1,
    ) -> int:
        """``time_ns`` if it is given, otherwise the cost by the roofline model.

        The roofline is: one launch per kernel + max(flops / attainable rate, bytes / memory
        bandwidth). ``dtype`` selects the device's rate. Source: Williams, Waterman, Patterson,
        "Roofline" (2009).
        """
        if time_ns > 0 or (flops <= 0 and mem_bytes <= 0):
            return time_ns
        device = self.cluster.device
        memory = mem_bytes / (device.memory_bytes_per_ns * device.memory_efficiency)
        return kernels * self.launch_ns + ceil(max(flops / device.flop_per_ns(dtype), memory))

    def work_ns(self, work: Iterable[KernelWork]) -> int:
        """The time of kernels that run one after the other."""
        return sum(
            self.compute_ns(0, kernels.flops, kernels.nbytes, kernels.dtype, kernels.kernels)
            for kernels in work
        )

    def collective_ns(
        self,
        row: type[CostedOperation],
        ranks: tuple[int, ...],
        nbytes: int,
        root: int | None = None,
    ) -> int:
        """Cost of a collective among ``ranks``, from the arrival of the last rank to the end.

        ``nbytes`` is counted as in nccl-tests (`row.nbytes`); ``root`` is a global rank. A group of
        one rank costs the call's overhead only.
        """
        key = (row.op, ranks, nbytes, root)
        cost = self._collective_costs.get(key)
        if cost is not None:
            return cost

        group_root = 0 if root is None else ranks.index(root)
        cost = self._collective_ns(row, ranks, nbytes, group_root)
        if nbytes and self._switched and self.pools.levels:
            # The collective cannot be faster than the slowest uplink that it crosses.
            latency_ns = self.collective_ns(row, ranks, 0, root)
            moving_ns = ceil(nbytes * self.pools.ns_per_byte(row, ranks, root))
            cost = max(cost, latency_ns + moving_ns)
        if self.cluster.measured and len(ranks) > 1:
            nodes = self.placement(ranks).nodes
            cost = self._corrected(cost, row.measured_as(), len(ranks), nodes, nbytes, row)
        self._collective_costs[key] = cost
        return cost

    def collectives_ns(
        self, row: type[CostedOperation], ranks: tuple[int, ...], nbytes: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """`collective_ns` for many sizes at once.

        On clusters with ``collectives: nccl``, a million sizes take a fraction of a second.
        """
        kind = nccl_operation_of(row)
        if kind is None or not self._has_plain_nccl_costs(ranks) or nbytes.min(initial=1) < 1:
            costs = [self.collective_ns(row, ranks, int(size), ranks[0]) for size in nbytes]
            return np.array(costs, dtype=np.int64)
        at = context_of_group(self.cluster, self.placement(ranks))
        return nccl_curves.cost_ns_by_size(kind, at, nbytes)

    def _has_plain_nccl_costs(self, ranks: tuple[int, ...]) -> bool:
        """Whether NCCL's cost curves apply without correction, replacement or extra limit."""
        if not self.nccl or len(ranks) < 2 or self.call_overhead_ns != LAUNCH_NS:
            return False
        return not (self.cluster.measured or self.cluster.algorithms or self.pools.levels)

    # --- measured times ---

    def _corrected(
        self,
        cost: int,
        op: str,
        group: int,
        nodes: int,
        nbytes: int,
        row: type[CostedOperation] | None,
    ) -> int:
        """A modelled cost, multiplied by the ratio of measured to modelled times at that size."""
        key = (op, group, nodes)
        if key not in self._corrections:
            found = weighted_curves(
                self.cluster.measured, op, group, min(self.local_size, self.world_size), nodes
            )
            self._corrections[key] = [
                (MeasuredCorrection(curve, self._modelled(curve, row)), weight)
                for curve, weight in found
            ]
        factor = 1.0
        for correction, weight in self._corrections[key]:
            factor *= correction.factor(nbytes) ** weight
        # Rounding may bring a tiny excess, which must not add a whole nanosecond.
        return ceil(cost * factor - 1e-6) if self._corrections[key] else cost

    def _modelled(
        self, curve: MeasuredCurve, row: type[CostedOperation] | None
    ) -> Callable[[int], float]:
        """The uncorrected cost by size, in the setting where a curve was measured."""
        per_node = curve.ranks if curve.nodes == 1 else -(-curve.group // curve.nodes)
        size = max(curve.group, per_node) if curve.nodes == 1 else per_node * curve.nodes
        if (size, per_node) not in self._references:
            bare = self.cluster.model_copy(update={"measured": ()})
            self._references[size, per_node] = CostModel(bare, size, per_node)
        reference = self._references[size, per_node]
        if row is None:
            return lambda nbytes: reference.p2p_ns(0, size - 1 if curve.nodes > 1 else 1, nbytes)
        return lambda nbytes: reference.collective_ns(row, tuple(range(curve.group)), nbytes, 0)

    def _collective_ns(
        self, row: type[CostedOperation], ranks: tuple[int, ...], nbytes: int, root: int
    ) -> int:
        if len(ranks) < 2:
            return self.call_overhead_ns
        place = self.placement(ranks)
        chosen = self.cluster.algorithms.get(implemented_collective(row), "")
        kind = nccl_operation_of(row) if self.nccl and not chosen else None
        if kind is not None:
            return self._nccl_ns(kind, place, nbytes if row.busbw_factor(2) else 4)

        every = tuple(row.algorithms.values())
        if chosen == CHEAPEST:
            named = every
        elif chosen:
            named = (row.algorithms[chosen],)
        else:
            named = every[:1]
        costs = [self.flat_ns(row, ranks, nbytes, root, algorithm) for algorithm in named]
        if self.cluster.collectives == "flat":
            return min(costs)

        # Without a chosen algorithm, every form that NCCL might lay over the cards competes.
        candidates = named if chosen else every
        forms = [self._in_form(algorithm, place, nbytes) for algorithm in candidates]
        if chosen in ("", CHEAPEST):
            forms.append(self._two_level(every, place, nbytes))
        costs += [self.call_overhead_ns + ceil(ns) for ns in forms if ns is not None]
        return min(costs)

    def schedule_ns(
        self, rounds: Iterable[Round], chunk_nbytes: int, ranks: tuple[int, ...]
    ) -> int:
        """Cost of rounds exactly as given: each round lasts as long as its slowest transfer.

        Every closed form is checked against this cost.
        """
        written = written_load(self.placement(ranks), list(rounds))
        return self.call_overhead_ns + ceil(self._load_ns(written, chunk_nbytes))

    def flat_ns(
        self,
        row: type[CostedOperation],
        ranks: tuple[int, ...],
        nbytes: int,
        root: int = 0,
        algorithm: CollectiveAlgorithm | None = None,
    ) -> int:
        """Cost of a schedule in the order of group ranks, by closed form if there is one.

        ``root`` is a group rank. The default algorithm is the first one of ``row``.
        """
        n, place = len(ranks), self.placement(ranks)
        algorithm = algorithm or next(iter(row.algorithms.values()))
        chunk = algorithm.chunk_nbytes(n, nbytes)
        return self.call_overhead_ns + ceil(
            self._load_ns(self._load_of(place, algorithm, root), chunk)
        )

    def link_bound_ns(self, row: type[CostedOperation], ranks: tuple[int, ...], nbytes: int) -> int:
        """Lower bound for every schedule: busbw factor x bytes / the group's fastest link."""
        if len(ranks) < 2:
            return 0
        kind = nccl_operation_of(row)
        if self.nccl and kind is not None:
            return nccl_curves.lower_bound_ns(
                kind, context_of_group(self.cluster, self.placement(ranks)), nbytes
            )
        return int(row.busbw_factor(len(ranks)) * nbytes / self.placement(ranks).fastest)

    # --- forms other than the flat one ---
    # Each returns ns without the call's overhead, or None if the form does not apply.

    def _in_form(
        self, algorithm: CollectiveAlgorithm, place: GroupPlacement, nbytes: int
    ) -> float | None:
        """Duration of an algorithm as NCCL would map it to cards and links."""
        if algorithm.shape == "chain":
            return self._chain(place, nbytes)
        if algorithm.shape == "all pairs":
            return self._load_ns(
                self._load_of(place, algorithm, 0), algorithm.chunk_nbytes(place.n, nbytes)
            )
        passes = algorithm.ring_passes(place.n)
        return self._rail_ring(passes, place, nbytes) if passes else None

    def _rail_ring(self, passes: int, place: GroupPlacement, nbytes: int) -> float:
        """A ring in the order of nodes, once per network card.

        A hop inside a node costs the link's latency, a hop between nodes the network's.
        """
        n = place.n
        if place.nodes == 1:
            around = n * self.latency_ns("intra")
        else:
            around = (n - place.nodes) * self.latency_ns("intra") + place.nodes * self.latency_ns(
                "inter"
            )
        return passes * (n - 1) / n * (around + nbytes / place.ring_bytes_per_ns)

    def _two_level(
        self, every: Sequence[CollectiveAlgorithm], place: GroupPlacement, nbytes: int
    ) -> float | None:
        """Inside the nodes, then along each rail, then inside the nodes again.

        The cost is ``passes * ((g-1)/g S/B_in + (N-1)/N S/g / B_rail)`` plus latencies. Between
        nodes the cheaper of two forms counts: a ring, or a tree (all_reduce) or Bruck (all_gather,
        reduce_scatter; NCCL's PAT).
        """
        passes = max((algorithm.ring_passes(place.n) for algorithm in every), default=0)
        g, nodes = place.per_node, place.nodes
        has_two_levels = nodes > 1 and g is not None and g > 1
        if not passes or not has_two_levels or g is None:
            return None
        inside = (g - 1) * self.latency_ns("intra") + (
            g - 1
        ) / g * nbytes * place.worst_intra / self.cluster.intra.attained_bytes_per_ns
        hop, shard = self.latency_ns("inter"), nbytes / g / place.rail_bytes_per_ns
        ring = (nodes - 1) * (hop + shard / nodes)
        steps = ceil(log2(nodes))
        tree = steps * (hop + shard) if passes == 2 else steps * hop + (nodes - 1) / nodes * shard
        return passes * (inside + min(ring, tree))

    def _chain(self, place: GroupPlacement, nbytes: int) -> float:
        """A pipelined chain through all ranks.

        With k pieces it takes ``(n-2+k)(a + S/k b)``; at the best k that is ``a + (sqrt((n-2)a) +
        sqrt(S b))^2``.
        """
        last = self.latency_ns("inter" if place.nodes > 1 else "intra")
        latency = (place.n - place.nodes) * self.latency_ns("intra") + (
            place.nodes - 1
        ) * self.latency_ns("inter")
        wire = nbytes / place.ring_bytes_per_ns
        return last + (sqrt(max(latency - last, 0)) + sqrt(wire)) ** 2

    # --- loads ---

    def placement(self, ranks: tuple[int, ...]) -> GroupPlacement:
        """The nodes of these ranks; groups with the same distribution share one placement.

        Nodes are numbered by first use, so that only the distribution over nodes matters. With link
        faults, nodes differ and keep their own numbers.
        """
        nodes = tuple(r // self.local_size for r in ranks)
        if not self.link_faults:
            numbers: dict[int, int] = {}
            nodes = tuple([numbers.setdefault(node, len(numbers)) for node in nodes])
        place = self._placements.get(nodes)
        if place is None:
            place = self._placements[nodes] = GroupPlacement(
                self.cluster, nodes, self._slow_intra, self._slow_inter
            )
        return place

    def _load_of(
        self, place: GroupPlacement, algorithm: CollectiveAlgorithm, root: int
    ) -> ScheduleLoad:
        """The load that a schedule puts on the links, cached."""
        key = (place, algorithm.rounds, root)
        if key not in self._loads:
            self._loads[key] = schedule_load(place, algorithm, root)
        return self._loads[key]

    def _load_ns(self, load: ScheduleLoad, chunk_nbytes: int) -> float:
        intra_latency = self.cluster.intra.latency_ns
        inter_latency = self.cluster.inter_latency_ns
        total = 0.0
        for asked, count in load.rounds:
            intra = 0.0 if asked.intra is None else intra_latency + asked.intra * chunk_nbytes
            inter = 0.0 if asked.inter is None else inter_latency + asked.inter * chunk_nbytes
            total += count * max(intra, inter)
        reduce_rate = self.cluster.reduce_bytes_per_ns
        if reduce_rate is None:
            return total  # reductions are hidden behind the transfers, as on a GPU
        return total + load.combined * chunk_nbytes / reduce_rate
