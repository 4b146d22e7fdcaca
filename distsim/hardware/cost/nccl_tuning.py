"""What NCCL holds its algorithms to cost: the tables by which it chooses among them, as formulas
over all sizes at once.

Figures: NCCL v2.30.7, src/graph/tuning.cc (latencies in us, bandwidths in GB/s), src/graph/topo.h.
A form's time is the sum of its latencies and ``bytes / bandwidth``. These tables rank; what the
chosen form really costs is `distsim.hardware.cost.nccl_constants`' to say.
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
#: ``xgmi`` and ``rccl's network``: RCCL's hops for MI300X (ROCm/rccl 0cbce2a7, src/graph/tuning.cc,
#: tuning_model_5). Its 320 us for Simple in a ring over the network keep it from rings there and
#: are no hop's: NCCL's 14 stand in their place, as its base latencies do.
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
#: Hops of what runs in Simple alone: through the switch inside, and between switches; of CollNet
#: inside, and through the network's.
_NVLS_HOP, _NVLS_TREE_HOP, _PAT_HOP, _COLLNET_INSIDE, _COLLNET_BETWEEN = 25.0, 20.9, 14.0, 3.7, 31.0
#: By architecture, of one node, two, more; across nodes LL's limit goes by the CPU instead.
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
#: Channels of a ring: NCCL's search doubles 12 paths of NVLink; 2 over PCIe.
_CHANNELS: Final = {"volta": 12, "ampere": 24, "hopper": 24, "blackwell": 32, "cdna3": 32}
_NVLS_EFFICIENCY: Final = {"hopper": 0.85, "blackwell": 0.74}
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
#: The "plateau" of rings between nodes: Simple's latency there.
_PLATEAU: Final = 1.4


#: GB/s of a form at sizes that it is not run at: slower than anything.
_NEVER: Final = 1e-9


class LatencyTerm(NamedTuple):
    """Latency of a form: ``us`` times the constant of that name, where ``over`` says which links it
    is spent on.
    """

    constant: str
    us: float | Array
    what: str


class NcclForm(NamedTuple):
    """An algorithm in a protocol. ``gbs``: algorithm bandwidth at each size; ``powers``: the
    constants that it reaches of it.
    """

    algorithm: str
    protocol: str
    parts: tuple[LatencyTerm, ...]
    gbs: Array
    powers: tuple[tuple[str, float], ...]


def ring_steps(kind: NcclOperation, n: int) -> int:
    """Steps of a ring, as NCCL counts them."""
    return {"all_reduce": 2 * (n - 1), "all_gather": n - 1, "reduce_scatter": n - 1}.get(kind, n)


def collective_forms(kind: NcclOperation, at: NcclContext, nbytes: Array) -> tuple[NcclForm, ...]:
    """Every form that NCCL would weigh for a collective, for these sizes (whole buffers, as
    nccl-tests counts).
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
    """What a group may use. LL128 needs stores of 128 bytes that arrive whole: NVLink inside; alone
    on its node a GPU has none to pass; between nodes a card behind the GPU's PCIe switch
    (tuning.cc: PXB), where Slingshot's hang on the CPU. LL and LL128 need what arrives in order:
    over EFA before P5 its plugin takes Simple alone (aws-ofi-nccl, src/platform-aws.cpp:
    ``NCCL_PROTO``), as Google's settings for GPUDirect-TCPX and TCPXO do."""
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
    """(inside, between nodes) us of a hop."""
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
    """busbw of a ring over all links and cards."""
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
    """Channels of a ring."""
    return _CHANNELS.get(at.architecture, 16) if at.link == "nvlink" else 4


#: Threads of a channel's block, and the bytes for each of them below which NCCL leaves channels
#: out.
_THREADS: Final = {"LL": (512, 8), "LL128": (640, 8), "Simple": (512, 64)}


def _channel_starts(
    at: NcclContext, nbytes: Array, protocol: str, times: int
) -> Iterator[LatencyTerm]:
    """What each channel's block costs to start: few for small messages, then all of them
    (``calculateNumChannels``, enqueue.cc)."""
    threads, each = _THREADS[protocol]
    wanted = nbytes / (threads * each * (times if protocol == "LL" else 1))
    together = (
        4 if at.architecture in ("hopper", "blackwell") else 1
    )  # blocks of a cluster start as one (NCCL_CGA_CLUSTER_SIZE)
    count = np.clip(wanted, 1.0, float(ring_channels(at))) / together
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
    """Which constants a protocol's bandwidth is multiplied by, and how often."""
    around = rings * float(np.log((at.n - 1) / at.n))
    if protocol == "Simple":
        return (
            (f"bandwidth, Simple{_cards_limit_suffix(at)}", 1.0),
            ("ring, Simple", around),
            *_crowd_powers(at),
        )
    return (f"bandwidth, {protocol}", 1.0), ("ring, LL", around)


def _crowd_powers(at: NcclContext) -> tuple[tuple[str, float], ...]:
    """Many nodes meet in the network: a power of one constant for each doubling beyond two."""
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
    """Double binary trees: chains inside, trees between nodes; on two nodes each moves the buffer
    once. None over GPUDirect-TCPX, inside a machine either: what its maker gives out for A3 High
    sets ``NCCL_ALGO=Ring`` (for TCPXO ``Ring,Tree``)."""
    if at.transport == "tcpx":
        return
    total = (
        at.intra_gbs
        if at.nodes == 1
        else min(at.intra_gbs, at.inter_gbs)
        if at.per_node > 1
        else at.inter_gbs
    )
    wide = (
        min(0.92 * at.intra_gbs / 2, at.inter_gbs)
        if at.nodes == 2 and at.per_node > 1
        else 0.92 * total / 2
    )
    if at.nodes == 2 and at.per_node == 1:
        wide = 0.92 * at.inter_gbs
    for protocol in _protocols(at):
        if protocol == "Simple" and at.architecture == "cdna3" and at.nodes == 1:
            continue  # RCCL's tuning.cc leaves it out
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


#: Of RCCL's exchange of all pairs by protocol: the fewest bytes, then the most with so many
#: channels (ROCm/rccl 0cbce2a7, tools/msccl-algorithms, allreduce-allpairs-8n-*.xml).
_ALL_PAIRS_LIMITS: Final = {
    "LL": (0, (1 << 16, 4), ((1 << 19) - 1, 8)),
    "Simple": (1 << 19, (1 << 24, 8), (1 << 24, 8)),
}


def runs_all_pairs(kind: NcclOperation, at: NcclContext) -> bool:
    """Whether RCCL runs its exchange of all pairs where the size allows: the whole node of eight
    MI300X, a process for each (its README, MSCCL)."""
    whole_node = at.nodes == 1 and at.n == 8 and at.driven == 1
    return whole_node and kind == "all_reduce" and at.architecture == "cdna3"


def _all_pairs_forms(at: NcclContext, nbytes: Array) -> Iterator[NcclForm]:
    """Each GPU sums a part that its mates send it, then sends the sum to all of them: two hops, all
    its links at once.
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
    """NVLS: the switch reduces and multiplies; between nodes a tree of switches."""
    efficiency = _NVLS_EFFICIENCY.get(at.architecture)
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
    """CollNet: the network's switches reduce (SHARP), so that each card moves the buffer's share
    once.
    """
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
    """Parallel trees with aggregation: one GPU on each node."""
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
