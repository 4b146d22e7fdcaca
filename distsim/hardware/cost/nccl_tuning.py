"""NCCL's own cost tables, by which it chooses an algorithm, as formulas over all sizes at once.

A form's time is the sum of its latencies plus ``bytes / bandwidth``. These tables only rank the
forms; `distsim.hardware.cost.nccl_constants` corrects them to real costs.

Sources: NCCL v2.30.7, src/graph/tuning.cc (latencies in us, bandwidths in GB/s) and
src/graph/topo.h.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, log2
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.hardware.cost.nccl_context import NcclContext, NcclOperation

Array = NDArray[np.float64]

PROTOCOLS: Final = ("LL", "LL128", "Simple")
#: GPUDirect-TCPX (A3 High) and TCPXO (A3 Mega).
_GOOGLE_TRANSPORTS: Final = ("tcpx", "tcpxo")
#: Latencies by protocol (LL, LL128, Simple). ``xgmi`` and ``rccl's network`` are RCCL's hops for
#: MI300X (ROCm/rccl 0cbce2a7, src/graph/tuning.cc, tuning_model_5). RCCL has 320 us for Simple in a
#: ring over the network. That value only keeps RCCL from choosing such rings and is no real hop
#: latency, so NCCL's 14 us are used instead, and NCCL's base latencies too.
_BASE_US: Final = {
    "tree": (6.8, 14.0, 8.4),
    "ring": (6.6, 14.0, 8.4),
    "all pairs": (6.6, 14.0, 8.4),
    "pat": (8.0, 8.0, 8.0),
}
_HOP_US: Final = {
    "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)},
    "pcie": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
    "xgmi": {"tree": (0.9, 0.9, 2.3), "ring": (0.8, 0.8, 2.1)},
    "network": {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)},
    "rccl's network": {"tree": (10.5, 10.5, 25.0), "ring": (9.5, 9.5, 14.0)},
}
#: Hops of algorithms that use Simple only: NVLS through the switch of a node and between switches,
#: PAT, and CollNet inside a node and through the network's switches.
_NVLS_HOP, _NVLS_TREE_HOP, _PAT_HOP, _COLLNET_INSIDE, _COLLNET_BETWEEN = 25.0, 20.9, 14.0, 3.7, 31.0
#: Limits of LL's bandwidth. Inside one node by architecture; across nodes for (two nodes, more), by
#: the CPU unless the architecture has a row.
_LL_MAX: Final = {
    "volta": 39.0,
    "ampere": 87.7,
    "ada": 87.7,
    "hopper": 141.0,
    "blackwell": 282.0,
    "cdna3": 141.0,
}
_LL_MAX_ACROSS: Final = {
    "intel": (39.0, 20.4),
    "amd": (22.5, 19.0),
    "hopper": (45.0, 35.0),
    "blackwell": (90.0, 70.0),
}
_TREE_128: Final = {"volta": 20.0, "ampere": 20.0, "hopper": 36.7, "blackwell": 55.6, "cdna3": 36.7}
#: Channels of a ring. NCCL's search doubles the paths that it finds: 12 over NVLink, 2 over PCIe.
_CHANNELS: Final = {"volta": 12, "ampere": 24, "hopper": 24, "blackwell": 32, "cdna3": 32}
#: Share of the bandwidth that NVLS reaches. An architecture without an entry has no NVLS.
NVLS_EFFICIENCY: Final = {"hopper": 0.85, "blackwell": 0.74}
#: Blocks that start together (NCCL_CGA_CLUSTER_SIZE); 1 by default.
_BLOCK_CLUSTER_SIZE: Final = {"hopper": 4, "blackwell": 4}
#: Correction of a tree's bandwidth by floor(log2(bytes / 64)).
_TREE_BY_SIZE: Final = {
    "LL": (
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.7,
        0.7,
        0.7,
        0.7,
        0.6,
        0.5,
        0.4,
        0.4,
        0.5,
        0.6,
        0.7,
        0.8,
        0.9,
        1,
        1,
        1,
        1,
    ),
    "LL128": (
        1,
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.8,
        0.8,
        0.7,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.8,
        0.9,
        0.9,
        0.9,
        0.9,
        1,
        1,
    ),
    "Simple": (
        0.9,
        0.9,
        0.9,
        0.9,
        0.9,
        0.9,
        0.9,
        0.8,
        0.7,
        0.6,
        0.6,
        0.5,
        0.5,
        0.5,
        0.5,
        0.6,
        0.7,
        0.8,
        0.7,
        0.7,
        0.8,
        0.9,
        0.9,
    ),
}
#: NCCL's "plateau": a factor on Simple's latency in rings between nodes.
_PLATEAU: Final = 1.4


#: Bandwidth in GB/s at sizes where a form does not run: so low that it is never chosen.
_NEVER: Final = 1e-9


class LatencyTerm(NamedTuple):
    """One latency of a form: ``us`` times the named constant; ``what`` describes it for people."""

    constant: str
    us: float | Array
    what: str


class NcclForm(NamedTuple):
    """An algorithm with a protocol.

    ``gbs`` is the algorithm bandwidth at each size. ``powers`` are the constants, with exponents,
    that give the share of it which is reached.
    """

    algorithm: str
    protocol: str
    parts: tuple[LatencyTerm, ...]
    gbs: Array
    powers: tuple[tuple[str, float], ...]


def ring_steps(kind: NcclOperation, n: int) -> int:
    """Number of steps of a ring, as NCCL counts them."""
    return {"all_reduce": 2 * (n - 1), "all_gather": n - 1, "reduce_scatter": n - 1}.get(kind, n)


def collective_forms(kind: NcclOperation, at: NcclContext, nbytes: Array) -> tuple[NcclForm, ...]:
    """Every form that NCCL considers for a collective at these sizes.

    Sizes are whole buffers, as nccl-tests counts them.
    """
    found = [*_ring_forms(kind, at, nbytes)]
    if kind == "all_reduce":
        found += [
            *_all_pairs_forms(at, nbytes),
            *_tree_forms(at, nbytes),
            *_nvls_forms(kind, at, nbytes),
            *_collnet_forms(at, nbytes),
        ]
    elif kind in ("all_gather", "reduce_scatter"):
        found += [*_nvls_forms(kind, at, nbytes), *_pat_forms(at, nbytes)]
    return tuple(found)


def _protocols(at: NcclContext) -> tuple[str, ...]:
    """The protocols that a group may use.

    LL128 needs 128-byte stores that arrive undivided. NVLink guarantees that inside a node; a GPU
    alone on its node has no such link. Between nodes the network card must be behind the GPU's PCIe
    switch (tuning.cc: PXB), but with Slingshot it is attached to the CPU. LL and LL128 also need
    data to arrive in order. Over EFA before P5, the EFA plugin therefore allows only Simple
    (aws-ofi-nccl, src/platform-aws.cpp: ``NCCL_PROTO``), as do Google's settings for GPUDirect-TCPX
    and TCPXO.
    """
    on_old_efa = at.transport == "efa" and at.architecture in ("volta", "ampere")
    if at.transport in _GOOGLE_TRANSPORTS or (at.nodes > 1 and on_old_efa):
        return ("Simple",)

    passes_inside = at.per_node > 1 or at.nodes == 1
    stores_arrive_whole = at.link == "nvlink" and at.architecture != "cdna3"
    card_behind_switch = at.nodes == 1 or at.transport != "slingshot"
    if stores_arrive_whole and passes_inside and card_behind_switch:
        return PROTOCOLS
    return ("LL", "Simple")


def _hop_latencies(at: NcclContext, algorithm: str, protocol: str) -> tuple[float, float]:
    """(inside a node, between nodes): time of one hop in us."""
    is_amd = at.architecture == "cdna3"
    if at.link != "nvlink":
        link = "pcie"
    else:
        link = "xgmi" if is_amd else "nvlink"
    inside = _HOP_US[link][algorithm]
    network = _HOP_US["rccl's network" if is_amd else "network"]
    one_per_node = at.per_node == 1 and algorithm == "ring"
    between = network["tree" if one_per_node else algorithm]
    column = PROTOCOLS.index(protocol)
    return inside[column], between[column]


def ring_gbs(at: NcclContext) -> float:
    """Bus bandwidth of a ring over all links and network cards."""
    rates = []
    if at.per_node > 1 or at.nodes == 1:
        rates.append(at.intra_gbs)
    if at.nodes > 1:
        rates.append(at.inter_gbs)
    return min(rates)


def _cards_limit_suffix(at: NcclContext) -> str:
    """``x`` if the network cards are slower than the links inside a node."""
    cards_are_slower = at.per_node == 1 or at.inter_gbs < at.intra_gbs
    return "x" if at.nodes > 1 and cards_are_slower else ""


def _ll_gbs(at: NcclContext, total: float) -> float:
    if at.nodes == 1:
        return min(_LL_MAX.get(at.architecture, 87.7), total / 2)
    row = at.architecture if at.architecture in _LL_MAX_ACROSS else at.cpu
    return min(_LL_MAX_ACROSS.get(row, (39.0, 20.4))[at.nodes > 2], total / 2)


def ring_channels(at: NcclContext) -> int:
    """Number of channels of a ring."""
    return _CHANNELS.get(at.architecture, 16) if at.link == "nvlink" else 4


#: (threads of a channel's block, bytes per thread below which NCCL uses fewer channels).
_THREADS: Final = {"LL": (512, 8), "LL128": (640, 8), "Simple": (512, 64)}


def _channel_starts(
    at: NcclContext, nbytes: Array, protocol: str, times: int
) -> Iterator[LatencyTerm]:
    """Time to start each channel's block: few channels for small messages, all for large ones.

    Source: ``calculateNumChannels``, enqueue.cc.
    """
    threads, each = _THREADS[protocol]
    wanted = nbytes / (threads * each * (times if protocol == "LL" else 1))
    cluster_size = _BLOCK_CLUSTER_SIZE.get(at.architecture, 1)
    count = np.clip(wanted, 1.0, float(ring_channels(at))) / cluster_size
    yield LatencyTerm("channel", count, "a block for each channel")


def _ring_forms(kind: NcclOperation, at: NcclContext, nbytes: Array) -> Iterator[NcclForm]:
    n, total, count = at.n, ring_gbs(at), ring_steps(kind, at.n)
    rooted = kind in ("broadcast", "reduce")
    across = {"all_reduce": 2 * (at.nodes - 1)}.get(kind, at.nodes - 1)
    for protocol in _protocols(at):
        inside, between = _hop_latencies(at, "ring", protocol)
        hops = max(count - across, 0) if not rooted else max(min(at.per_node, n) - 1, 0)
        bus = {"LL": _ll_gbs(at, total), "LL128": 0.92 * total, "Simple": total}[protocol]
        is_simple_all_reduce = kind == "all_reduce" and protocol == "Simple"
        plateau = _PLATEAU if is_simple_all_reduce and at.nodes > 1 else 1.0
        parts = [
            *_start_terms("ring", protocol, at),
            *_channel_starts(at, nbytes, protocol, at.n),
            LatencyTerm(f"hop inside, {protocol}", hops * inside * plateau, f"{hops} hops inside"),
            LatencyTerm(
                f"hop between, {protocol}",
                across * between * plateau,
                f"{across} hops between nodes",
            ),
        ]
        gbs = bus * (n / count if not rooted else 1.0) * np.ones_like(nbytes)
        yield NcclForm(
            "ring",
            protocol,
            tuple(parts),
            gbs,
            _bandwidth_powers(protocol, at, 0.0 if rooted else 1.0),
        )


def _bandwidth_powers(
    protocol: str, at: NcclContext, rings: float = 1.0
) -> tuple[tuple[str, float], ...]:
    """The constants that a protocol's bandwidth is multiplied by, with their exponents."""
    around = rings * float(np.log((at.n - 1) / at.n))
    if protocol == "Simple":
        return (
            (f"bandwidth, Simple{_cards_limit_suffix(at)}", 1.0),
            ("ring, Simple", around),
            *_crowd_powers(at),
        )
    return (f"bandwidth, {protocol}", 1.0), ("ring, LL", around)


def _crowd_powers(at: NcclContext) -> tuple[tuple[str, float], ...]:
    """Congestion when many nodes communicate: one constant for each doubling beyond two nodes."""
    return (("crowd", max(log2(at.nodes) - 1, 0.0)),) if at.nodes > 2 else ()


def _start_terms(algorithm: str, protocol: str, at: NcclContext) -> Iterator[LatencyTerm]:
    base = _BASE_US[algorithm][PROTOCOLS.index(protocol)]
    yield LatencyTerm("base", base, f"base of {algorithm} {protocol}")
    if protocol == "Simple":
        yield LatencyTerm("start, Simple", 1.0, "start of Simple")
    if protocol == "LL128":
        yield LatencyTerm("start, LL128", 1.0, "start of LL128")
    if protocol == "Simple" and at.nodes > 1:
        yield LatencyTerm("start, Simple between", 1.0, "start of Simple between nodes")


def _tree_forms(at: NcclContext, nbytes: Array) -> Iterator[NcclForm]:
    """Double binary trees: chains inside nodes, trees between them.

    On two nodes, each tree moves the buffer once. There is no tree over GPUDirect-TCPX, not even
    inside a machine: Google's settings for A3 High set ``NCCL_ALGO=Ring`` (for TCPXO
    ``Ring,Tree``).
    """
    if at.transport == "tcpx":
        return
    total = ring_gbs(at)
    if at.nodes != 2:
        wide = 0.92 * total / 2
    elif at.per_node > 1:
        wide = min(0.92 * at.intra_gbs / 2, at.inter_gbs)
    else:
        wide = 0.92 * at.inter_gbs
    for protocol in _protocols(at):
        if protocol == "Simple" and at.architecture == "cdna3" and at.nodes == 1:
            continue  # RCCL's tuning.cc disables this combination
        inside, between = _hop_latencies(at, "tree", protocol)
        limit = {
            "LL": min(wide / 3.8 * 2, _ll_gbs(at, total)) / 2,
            "LL128": min(
                wide * (7 / 9 if at.nodes == 1 else 120 / 128),
                ring_channels(at) * _TREE_128.get(at.architecture, 20.0) / 2,
            ),
            "Simple": wide,
        }[protocol]
        levels = floor(log2(at.nodes))
        parts = (
            *_start_terms("tree", protocol, at),
            *_channel_starts(at, nbytes, protocol, 1),
            LatencyTerm(
                f"hop inside, {protocol}",
                2 * (at.per_node - 1) * inside,
                f"{2 * (at.per_node - 1)} hops inside",
            ),
            LatencyTerm(
                f"hop between, {protocol}", 2 * levels * between, f"{2 * levels} hops between nodes"
            ),
        )
        gbs = limit * np.interp(
            np.log2(np.maximum(nbytes, 1) / 64), np.arange(23), _TREE_BY_SIZE[protocol]
        )
        powers = (
            *_bandwidth_powers(protocol, at),
            ("tree", 1.0),
            *((("two nodes", 1.0),) if at.nodes == 2 else ()),
        )
        yield NcclForm("tree", protocol, parts, gbs, powers)


#: RCCL's all-pairs exchange by protocol: the fewest bytes, then two (most bytes, channels) pairs
#: for few and for many channels (ROCm/rccl 0cbce2a7, tools/msccl-algorithms,
#: allreduce-allpairs-8n-*.xml).
_ALL_PAIRS_LIMITS: Final = {
    "LL": (0, (1 << 16, 4), ((1 << 19) - 1, 8)),
    "Simple": (1 << 19, (1 << 24, 8), (1 << 24, 8)),
}


def runs_all_pairs(kind: NcclOperation, at: NcclContext) -> bool:
    """Whether RCCL uses its all-pairs exchange if the size allows it.

    It does so on a whole node of eight MI300X with one process per GPU (RCCL's README, MSCCL).
    """
    whole_node = at.nodes == 1 and at.n == 8 and at.driven == 1
    return whole_node and kind == "all_reduce" and at.architecture == "cdna3"


def _all_pairs_forms(at: NcclContext, nbytes: Array) -> Iterator[NcclForm]:
    """RCCL's all-pairs all_reduce: two hops that use all of a GPU's links at once.

    Each GPU sums one part, which the other GPUs send to it, and then sends the sum to all of them.
    """
    for protocol, (fewest, few, most) in (
        _ALL_PAIRS_LIMITS.items() if runs_all_pairs("all_reduce", at) else ()
    ):
        runs = (nbytes >= fewest) & (nbytes <= most[0])
        if not runs.any():
            continue
        inside, _ = _hop_latencies(at, "ring", protocol)
        parts = (
            *_start_terms("all pairs", protocol, at),
            LatencyTerm(
                "channel", np.where(nbytes <= few[0], few[1], most[1]), "a block for each channel"
            ),
            LatencyTerm(f"hop inside, {protocol}", 2 * inside, "2 hops inside"),
        )
        bus = _ll_gbs(at, at.intra_gbs) if protocol == "LL" else at.intra_gbs
        gbs = np.where(runs, bus * at.n / ring_steps("all_reduce", at.n), _NEVER)
        yield NcclForm("all pairs", protocol, parts, gbs, _bandwidth_powers(protocol, at, 0.0))


def _nvls_forms(kind: NcclOperation, at: NcclContext, nbytes: Array) -> Iterator[NcclForm]:
    """NVLS: the switch reduces and multicasts; between nodes a tree connects the switches."""
    efficiency = NVLS_EFFICIENCY.get(at.architecture)
    if efficiency is None or at.transport in _GOOGLE_TRANSPORTS:
        return  # Google's settings for TCPX and TCPXO: NCCL_NVLS_ENABLE=0
    if not at.switch or at.link != "nvlink" or at.per_node < 3:
        return
    inside = efficiency * at.intra_gbs
    if at.nodes == 1:
        gbs = inside if kind == "all_reduce" else inside * at.n / (at.n - 1)
        parts: tuple[LatencyTerm, ...] = (
            LatencyTerm("hop, NVLS", _NVLS_HOP, "through the switch"),
        )
        powers = (
            (("bandwidth, NVLS", 1.0),)
            if kind == "all_reduce"
            else (("bandwidth, NVLS gather", 1.0),)
        )
        yield NcclForm("NVLS", "Simple", parts, gbs * np.ones_like(nbytes), powers)
    elif kind == "all_reduce":
        levels = 2 * floor(log2(at.nodes))
        gbs = min(inside, at.inter_gbs / (1 if at.nodes == 2 else 2))
        parts = (
            LatencyTerm("hop, NVLS", _NVLS_HOP, "through the switch"),
            LatencyTerm(
                "hop between, NVLS", levels * _NVLS_TREE_HOP, f"{levels} hops between nodes"
            ),
        )
        powers = (
            ("bandwidth, NVLS tree", 1.0),
            *((("two nodes", 1.0),) if at.nodes == 2 else ()),
            *_crowd_powers(at),
        )
        yield NcclForm("NVLS tree", "Simple", parts, gbs * np.ones_like(nbytes), powers)


def _collnet_forms(at: NcclContext, nbytes: Array) -> Iterator[NcclForm]:
    """CollNet: the network's switches reduce (SHARP), so each card moves its share only once."""
    if not at.reducing or at.nodes < 2:
        return
    parts = (
        LatencyTerm(
            "hop inside, Simple",
            2 * _COLLNET_INSIDE * (1 + 0.2 * (at.per_node - 1)),
            "into the node and out of it",
        ),
        LatencyTerm("hop between, Simple", _COLLNET_BETWEEN, "through the network's switches"),
    )
    gbs = min(0.85 * at.intra_gbs, at.inter_gbs)
    yield NcclForm(
        "CollNet", "Simple", parts, gbs * np.ones_like(nbytes), (("bandwidth, Simplex", 1.0),)
    )


def _pat_forms(at: NcclContext, nbytes: Array) -> Iterator[NcclForm]:
    """PAT: parallel trees with aggregation, for one GPU per node."""
    if at.per_node > 1 or at.nodes < 2 or at.architecture == "cdna3":
        return
    parts = (
        *_start_terms("pat", "Simple", at),
        LatencyTerm(
            "hop between, Simple",
            floor(log2(at.nodes)) * _PAT_HOP / 3.5,
            f"{floor(log2(at.nodes))} levels between nodes",
        ),
        LatencyTerm("base", 2.8 * at.n, "of each rank"),
    )
    gbs = 0.75 * ring_gbs(at) * at.n / (at.n - 1) * np.ones_like(nbytes)
    yield NcclForm("PAT", "Simple", parts, gbs, (("bandwidth, Simplex", 1.0), *_crowd_powers(at)))
