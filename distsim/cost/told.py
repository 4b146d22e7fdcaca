"""Where a price on GPUs comes from: every form that NCCL weighs at a size, term by term."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from distsim.cluster import PRESETS
from distsim.cost import nccl
from distsim.cost.band import Band, band_of
from distsim.cost.loads import Row, brings_about
from distsim.cost.model import CostModel
from distsim.cost.on_gpus import kind_of, message_setting, setting
from distsim.cost.setting import Kind, Setting
from distsim.cost.sharing import Ports


class Term(NamedTuple):
    """A latency of a form: ``us``, the constant's name and value, and how much of it is spent."""

    what: str
    us: float
    constant: str
    value: float
    amount: float


class Candidate(NamedTuple):
    """A form at one size. ``gbs``: the algorithm bandwidth that it reaches, of ``counted_gbs`` in NCCL's tables."""

    algorithm: str
    protocol: str
    us: float
    terms: tuple[Term, ...]
    moving_us: float
    gbs: float
    counted_gbs: float
    shares: tuple[tuple[str, float, float], ...]  # constant, value, power


class Way(NamedTuple):
    """The busiest of the links of a kind that an operation must pass: bytes there, its attained GB/s, and what they take, in ns."""

    name: str
    nbytes: int
    gbs: float
    ns: int


class Told(NamedTuple):
    """``candidates``: dearest last. ``ways``: the narrowest first. ``ns``: the price, at least ``bound_ns``."""

    kind: Kind
    at: Setting
    nbytes: int
    ns: int
    bound_ns: int
    busbw: float
    candidates: tuple[Candidate, ...]
    band: Band
    measured: bool
    ways: tuple[Way, ...]
    issue_us: float


def told(cost: CostModel, row: type[Row], ranks: tuple[int, ...], nbytes: int, ways: bool = False) -> Told | None:
    """The price of an operation among these ranks, with the ``ways`` that it must pass if they are asked for; None where the cluster or
    the operation is not priced by NCCL's forms."""
    kind: Kind | None = "send" if not brings_about(row) and row.busbw_factor(2) == 1 else kind_of(row)
    if not cost.nccl or kind is None or len(ranks) < 2:
        return None
    at = (message_setting if kind == "send" else setting)(cost.cluster, cost.placement(ranks))
    size, constants = np.array([float(max(nbytes, 1))]), nccl.constants_at(at)
    found = [_candidate(nccl.told(form, constants, size), dict(constants)) for form in nccl.forms(kind, at, size)]
    ns = cost.p2p_ns(ranks[0], ranks[-1], nbytes) if kind == "send" else cost.collective_ns(row, ranks, nbytes, ranks[0])
    busbw = row.busbw_factor(len(ranks)) * nbytes / ns
    known = None if cost.name in PRESETS else False  # what somebody describes was not compared with anything
    every = tuple(sorted(found, key=lambda c: c.us))
    return Told(
        kind,
        at,
        nbytes,
        ns,
        nccl.bound_ns(kind, at, nbytes),
        busbw,
        every,
        band_of(at, nbytes, known),
        bool(cost.cluster.measured),
        _ways(cost, row, ranks, nbytes, at) if ways else (),
        nccl.issue_us(kind, at),
    )


def _ways(cost: CostModel, row: type[Row], ranks: tuple[int, ...], nbytes: int, at: Setting) -> tuple[Way, ...]:
    """What must pass each kind of link, as `distsim.cost.sharing` counts it: a rank's own, a card, a switch's way up. Where the switch
    inside reduces, an all_reduce passes a rank's link once; so a card where the network does."""
    ports = Ports(cost)
    message = ports.of_message(ranks[0], ranks[-1]) if not brings_about(row) else None
    asked = ports.asked(row, ranks) if message is None else dict.fromkeys(message.ports, 1.0)
    once = 1.0 if brings_about(row) == "all_reduce" and nccl.reduces(at) else inf
    at_card = 1.0 / min(ports.cards, at.per_node) if brings_about(row) == "all_reduce" and at.reducing else inf
    found: dict[str, Way] = {}
    for port, each in asked.items():
        reach = cost.cluster.intra.reach(at.per_node if message is None else 2) if port < ports.threads else 1.0
        gbs, name = reach * float(ports.capacity[port]), ports.name(port)
        each = min(each, once) if port < ports.threads else min(each, at_card) if port < ports.first_pool else each
        kind = "".join(c for c in name if not c.isdigit()).removesuffix(" out").removesuffix(" in")
        if kind not in found or each * nbytes / gbs > found[kind].ns + 1:
            found[kind] = Way(name, round(each * nbytes), gbs, round(each * nbytes / gbs))
    return tuple(sorted(found.values(), key=lambda way: -way.ns))


def _candidate(found: nccl.Told, known: dict[str, float]) -> Candidate:
    terms = tuple(
        Term(part.what, float(us[0]), part.constant, known[part.constant], float(np.ravel(part.us)[0]))
        for part, us in found.latencies
        if us[0] > 0
    )
    shares = tuple((name, known[name], power) for name, power in found.form.powers)
    return Candidate(
        found.form.algorithm, found.form.protocol, float(found.total[0]), terms, float(found.moving[0]), float(found.gbs[0]),
        float(found.form.gbs[0]), shares,
    )  # fmt: skip
