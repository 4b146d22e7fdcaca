"""Where a price on GPUs comes from: every form that NCCL weighs at a size, term by term."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from distsim.hardware.cluster import PRESETS
from distsim.hardware.cost import nccl_curves
from distsim.hardware.cost.link_loads import PricedOperation, implemented_collective
from distsim.hardware.cost.max_min_fairness import LinkPorts
from distsim.hardware.cost.model import CostModel
from distsim.hardware.cost.nccl_context import NcclContext, NcclOperation
from distsim.hardware.cost.nccl_placement import (
    context_of_group,
    context_of_message,
    nccl_operation_of,
)
from distsim.hardware.cost.prediction_range import PredictionRange, range_of_prediction


class ExplainedLatency(NamedTuple):
    """A latency of a form: ``us``, the constant's name and value, and how much of it is spent."""

    what: str
    us: float
    constant: str
    value: float
    amount: float


class ExplainedForm(NamedTuple):
    """A form at one size. ``gbs``: the algorithm bandwidth that it reaches, of ``counted_gbs`` in
    NCCL's tables.
    """

    algorithm: str
    protocol: str
    us: float
    terms: tuple[ExplainedLatency, ...]
    moving_us: float
    gbs: float
    counted_gbs: float
    shares: tuple[tuple[str, float, float], ...]  # constant, value, power


class LinkBottleneck(NamedTuple):
    """The busiest of the links of a kind that an operation must pass: bytes there, its attained
    GB/s, and what they take, in ns.
    """

    name: str
    nbytes: int
    gbs: float
    ns: int


class CostExplanation(NamedTuple):
    """``candidates``: dearest last. ``ways``: the narrowest first. ``ns``: the price, at least
    ``bound_ns``.
    """

    kind: NcclOperation
    at: NcclContext
    nbytes: int
    ns: int
    bound_ns: int
    busbw: float
    candidates: tuple[ExplainedForm, ...]
    band: PredictionRange
    measured: bool
    ways: tuple[LinkBottleneck, ...]
    issue_us: float


def explain_cost(
    cost: CostModel,
    row: type[PricedOperation],
    ranks: tuple[int, ...],
    nbytes: int,
    ways: bool = False,
) -> CostExplanation | None:
    """The price of an operation among these ranks, with the ``ways`` that it must pass if they are
    asked for; None where the cluster or the operation is not priced by NCCL's forms."""
    kind: NcclOperation | None = (
        "send"
        if not implemented_collective(row) and row.busbw_factor(2) == 1
        else nccl_operation_of(row)
    )
    if not cost.nccl or kind is None or len(ranks) < 2:
        return None
    at = (context_of_message if kind == "send" else context_of_group)(
        cost.cluster, cost.placement(ranks)
    )
    size, constants = np.array([float(max(nbytes, 1))]), nccl_curves.constants_in_context(at)
    found = [
        _explained_form(nccl_curves.form_time(form, constants, size), dict(constants))
        for form in nccl_curves.candidate_forms(kind, at, size)
    ]
    ns = (
        cost.p2p_ns(ranks[0], ranks[-1], nbytes)
        if kind == "send"
        else cost.collective_ns(row, ranks, nbytes, ranks[0])
    )
    busbw = row.busbw_factor(len(ranks)) * nbytes / ns
    known = (
        None if cost.name in PRESETS else False
    )  # what somebody describes was not compared with anything
    every = tuple(sorted(found, key=lambda c: c.us))
    return CostExplanation(
        kind,
        at,
        nbytes,
        ns,
        nccl_curves.lower_bound_ns(kind, at, nbytes),
        busbw,
        every,
        range_of_prediction(at, nbytes, known),
        bool(cost.cluster.measured),
        _bottlenecks(cost, row, ranks, nbytes, at) if ways else (),
        nccl_curves.launch_us(kind, at),
    )


def _bottlenecks(
    cost: CostModel,
    row: type[PricedOperation],
    ranks: tuple[int, ...],
    nbytes: int,
    at: NcclContext,
) -> tuple[LinkBottleneck, ...]:
    """What must pass each kind of link, as `distsim.hardware.cost.max_min_fairness` counts it: a
    rank's own, a card, a switch's way up. Where the switch inside reduces, an all_reduce passes a
    rank's link once; so a card where the network does."""
    ports = LinkPorts(cost)
    message = ports.of_message(ranks[0], ranks[-1]) if not implemented_collective(row) else None
    asked = ports.asked(row, ranks) if message is None else dict.fromkeys(message.ports, 1.0)
    once = (
        1.0
        if implemented_collective(row) == "all_reduce" and nccl_curves.switch_reduces(at)
        else inf
    )
    at_card = (
        1.0 / min(ports.cards, at.per_node)
        if implemented_collective(row) == "all_reduce" and at.reducing
        else inf
    )
    found: dict[str, LinkBottleneck] = {}
    for port, each in asked.items():
        reach = (
            cost.cluster.intra.reach(at.per_node if message is None else 2)
            if port < ports.threads
            else 1.0
        )
        gbs, name = reach * float(ports.capacity[port]), ports.name(port)
        each = (
            min(each, once)
            if port < ports.threads
            else min(each, at_card)
            if port < ports.first_pool
            else each
        )
        kind = "".join(c for c in name if not c.isdigit()).removesuffix(" out").removesuffix(" in")
        if kind not in found or each * nbytes / gbs > found[kind].ns + 1:
            found[kind] = LinkBottleneck(
                name, round(each * nbytes), gbs, round(each * nbytes / gbs)
            )
    return tuple(sorted(found.values(), key=lambda way: -way.ns))


def _explained_form(found: nccl_curves.FormTime, known: dict[str, float]) -> ExplainedForm:
    terms = tuple(
        ExplainedLatency(
            part.what,
            float(us[0]),
            part.constant,
            known[part.constant],
            float(np.ravel(part.us)[0]),
        )
        for part, us in found.latencies
        if us[0] > 0
    )
    shares = tuple((name, known[name], power) for name, power in found.form.powers)
    return ExplainedForm(
        found.form.algorithm,
        found.form.protocol,
        float(found.total[0]),
        terms,
        float(found.moving[0]),
        float(found.gbs[0]),
        float(found.form.gbs[0]),
        shares,
    )
