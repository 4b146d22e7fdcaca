"""Where a price on GPUs comes from: every form that NCCL weighs at a size, term by term."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distsim.cost import nccl
from distsim.cost.band import Band, band_of
from distsim.cost.loads import Row
from distsim.cost.model import CostModel
from distsim.cost.on_gpus import kind_of, setting
from distsim.cost.setting import Kind, Setting


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


class Told(NamedTuple):
    """``candidates``: dearest last. ``ns``: the price, at least ``bound_ns``; ``launch_ns`` of a call that moves nothing."""

    kind: Kind
    at: Setting
    nbytes: int
    ns: int
    bound_ns: int
    busbw: float
    candidates: tuple[Candidate, ...]
    band: Band
    measured: bool


def told(cost: CostModel, row: type[Row], ranks: tuple[int, ...], nbytes: int) -> Told | None:
    """The price of an operation among these ranks; None where the cluster or the operation is not priced by NCCL's forms."""
    kind: Kind | None = "send" if row.kind == "p2p" else kind_of(row)
    if not cost.nccl or kind is None or len(ranks) < 2:
        return None
    at = setting(cost.cluster, cost.placement(ranks))
    size, known = np.array([float(max(nbytes, 1))]), nccl.constants_at(at)
    found = [_candidate(nccl.told(form, known, size), dict(known)) for form in nccl.forms(kind, at, size)]
    ns = cost.p2p_ns(ranks[0], ranks[-1], nbytes) if kind == "send" else cost.collective_ns(row, ranks, nbytes, ranks[0])
    busbw = row.busbw_factor(len(ranks)) * nbytes / ns
    every = tuple(sorted(found, key=lambda c: c.us))
    return Told(
        kind, at, nbytes, ns, nccl.bound_ns(kind, at, nbytes), busbw, every, band_of(at, nbytes), bool(cost.cluster.measured)
    )


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
