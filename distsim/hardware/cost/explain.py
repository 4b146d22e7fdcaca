"""Explains a cost on GPUs: every form that NCCL considers at a size, term by term.

Only costs from NCCL's forms are explained. Clusters with other ``collectives`` have no such terms.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from distsim.hardware.cluster import PRESETS
from distsim.hardware.cost import nccl_curves
from distsim.hardware.cost.link_loads import CostedOperation, implemented_collective
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
    """A latency of a form: ``us`` is ``amount`` times the constant's ``value``."""

    what: str
    us: float
    constant: str
    value: float
    amount: float


class ExplainedForm(NamedTuple):
    """A form at one size.

    ``gbs`` is the algorithm bandwidth that it reaches; ``counted_gbs`` is the one in NCCL's tables.
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
    """The busiest link of its kind that an operation must use.

    ``nbytes`` cross it at ``gbs`` GB/s (attained bandwidth), which takes ``ns``.
    """

    name: str
    nbytes: int
    gbs: float
    ns: int


class CostExplanation(NamedTuple):
    """A cost and its parts.

    ``candidates`` are sorted by time, the slowest last. ``ways`` are sorted by time, the slowest
    link first. ``ns`` is the predicted cost; it is at least ``bound_ns``.
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
    row: type[CostedOperation],
    ranks: tuple[int, ...],
    nbytes: int,
    ways: bool = False,
) -> CostExplanation | None:
    """Explain the cost of an operation among these ranks.

    ``ways`` adds the links that the operation must use. Returns None if the cluster or the
    operation has no NCCL forms.
    """
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
    # A user's own cluster has never been compared with measurements.
    known = None if cost.name in PRESETS else False
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
    row: type[CostedOperation],
    ranks: tuple[int, ...],
    nbytes: int,
    at: NcclContext,
) -> tuple[LinkBottleneck, ...]:
    """The busiest link of each kind: a rank's own link, a network card, a switch's uplink.

    Bytes are counted by `distsim.hardware.cost.max_min_fairness`. If the switch inside the node
    reduces, an all_reduce crosses a rank's link once; the same holds for a card if the network
    reduces.
    """
    ports = LinkPorts(cost)
    message = ports.of_message(ranks[0], ranks[-1]) if not implemented_collective(row) else None
    asked = ports.asked(row, ranks) if message is None else dict.fromkeys(message.ports, 1.0)
    is_all_reduce = implemented_collective(row) == "all_reduce"
    most_at_link = 1.0 if is_all_reduce and nccl_curves.switch_reduces(at) else inf
    most_at_card = 1.0 / min(ports.cards, at.per_node) if is_all_reduce and at.reducing else inf
    reach = cost.cluster.intra.reach(at.per_node if message is None else 2)
    found: dict[str, LinkBottleneck] = {}
    for port, share in asked.items():
        gbs = float(ports.capacity[port])
        if port < ports.threads:
            gbs = reach * gbs
            share = min(share, most_at_link)
        elif port < ports.first_pool:
            share = min(share, most_at_card)
        name = ports.name(port)
        kind = "".join(c for c in name if not c.isdigit()).removesuffix(" out").removesuffix(" in")
        moving_ns = share * nbytes / gbs
        # Links of a kind may differ by rounding only; then the first one is named.
        if kind not in found or moving_ns > found[kind].ns + 1:
            found[kind] = LinkBottleneck(name, round(share * nbytes), gbs, round(moving_ns))
    return tuple(sorted(found.values(), key=lambda bottleneck: -bottleneck.ns))


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
