"""Fits a cluster to measured points, says how far off it is, and puts measured times beside a
cluster's prices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Final, NamedTuple

import numpy as np

from distsim.common.errors import UsageError
from distsim.hardware.cluster import Cluster, MeasuredCurve, cluster_from
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.explain import explain_cost
from distsim.operations.registry import OPERATIONS
from distsim.real.calibrate.measured_points import MeasuredPoint, pool_points

#: Classes of sizes in which errors are told, by their upper bounds.
SIZE_CLASSES: Final = (
    (1 << 16, "to 64 KiB"),
    (1 << 20, "to 1 MiB"),
    (1 << 24, "to 16 MiB"),
    (1 << 62, "above"),
)
#: A fit stops after so many tries; each prices every point once.
_MAX_EVALUATIONS: Final = 60


class FitError(NamedTuple):
    """Errors of one operation in one class of sizes, as shares of the measured time.

    ``median``, ``worst``: each size predicted from the others. ``model_*``: by the fitted
    parameters alone.
    """

    op: str
    sizes: str
    points: int
    median: float
    worst: float
    model_median: float
    model_worst: float


@dataclass(frozen=True)
class CalibrationResult:
    """``spread``: median over the points of half the distance between quartiles, the noise that no
    fit can beat.
    """

    cluster: Cluster
    errors: tuple[FitError, ...]
    median: float
    worst: float
    model_median: float
    spread: float
    points: int


class _FitParameter(NamedTuple):
    """A parameter under fit: how it is read from a cluster and put back into one. Fitted in its
    logarithm.
    """

    read: Callable[[Cluster], float]
    write: Callable[[Cluster, float], Cluster]
    low: float
    high: float


def _with_part(cluster: Cluster, part: str, **changes: float) -> Cluster:
    return cluster.model_copy(update={part: getattr(cluster, part).model_copy(update=changes)})


_OVERHEAD = _FitParameter(
    lambda c: max(c.call_overhead_ns, 1),
    lambda c, x: c.model_copy(update={"call_overhead_ns": round(x)}),
    100,
    1e9,
)
_LATENCY = _FitParameter(
    lambda c: max(c.intra.latency_ns, 1),
    lambda c, x: _with_part(c, "intra", latency_ns=round(x)),
    10,
    1e9,
)
_BANDWIDTH = _FitParameter(
    lambda c: c.intra.attained,
    lambda c, x: _with_part(c, "intra", bytes_per_ns=x, efficiency=1.0),
    1e-3,
    1e4,
)
_REDUCE = _FitParameter(
    lambda c: c.reduce_bytes_per_ns or 5.0,
    lambda c, x: c.model_copy(update={"reduce_bytes_per_ns": x}),
    1e-2,
    1e3,
)
_NET_LATENCY = _FitParameter(
    lambda c: max(c.network.latency_ns, 1),
    lambda c, x: _with_part(c, "network", latency_ns=round(x)),
    10,
    1e9,
)
_NET_BANDWIDTH = _FitParameter(
    lambda c: c.nics.attained,
    lambda c, x: _with_part(c, "nics", bytes_per_ns=x, efficiency=1.0),
    1e-3,
    1e4,
)


def calibrate_cluster(
    points: Iterable[MeasuredPoint], base: Cluster, name: str, source: str
) -> CalibrationResult:
    """Fit ``base`` to measured points. Raises UsageError when there are none.

    Latency, bandwidth and overhead minimise the logarithm of predicted over measured time, with
    less weight on outliers, over groups that have the machine for themselves; under ``collectives:
    nccl`` the pooled constants of `distsim.hardware.cost.nccl_constants` stay, and the measured
    times alone correct them. ``error_band`` of the cluster tells how well sizes left out were
    predicted. On a flat cluster one thread of a process moves all its bytes, so what is under way
    at once hinders each other, as much as messages that cross were measured to
    (`Cluster.crossing`).
    """
    every = pool_points(points)
    found = tuple(p for p in every if OPERATIONS[p.op].kind != "batch")
    if not found:
        raise UsageError(
            "there is nothing to calibrate from: no call met another in these files",
            "`distsim bench --out FILE` measures",
        )
    plain = base.model_copy(update={"measured": ()})
    bare = plain if base.collectives == "nccl" else _fit_parameters(found, plain)
    curves = _curves(found)
    left_out = _held_out_errors(bare, found, curves)
    model = {p: abs(predicted_ns(CostModel(bare, *world_of(p)), p) / p.ns - 1) for p in found}
    errors = _errors(found, left_out, model)
    spread = float(np.median([p.spread for p in found]))
    shares = list(left_out.values()) or list(model.values())
    median, worst = float(np.median(shares)), max(shares)
    band = f"+-{median:.0%} median, {worst:.0%} worst of {len(shares)} sizes left out; runs spread by {spread:.0%}".replace(
        "%", " %"
    )
    cluster = bare.model_copy(
        update={"measured": curves, "name": name, "source": source, "error_band": band}
    )
    cluster = cluster.model_copy(update={"crossing": _crossing_slowdown(every, cluster)})
    return CalibrationResult(
        cluster_from(cluster.to_mapping()),
        errors,
        median,
        worst,
        float(np.median(list(model.values()))),
        spread,
        len(found),
    )


def predicted_ns(cost: CostModel, point: MeasuredPoint) -> int:
    """What a cost model says of a point, in its world (see `world_of`)."""
    if OPERATIONS[point.op].kind == "p2p":
        return cost.p2p_ns(0, 1 if point.nodes == 1 else cost.local_size, point.nbytes)
    return cost.collective_ns(OPERATIONS[point.op], tuple(range(point.group)), point.nbytes, 0)


def world_of(point: MeasuredPoint) -> tuple[int, int]:
    """World size and ranks per node that a point was measured in."""
    per_node = point.ranks if point.nodes == 1 else -(-point.group // point.nodes)
    return (
        (max(per_node, point.group), per_node)
        if point.nodes == 1
        else (per_node * point.nodes, per_node)
    )


def _fit_parameters(points: Sequence[MeasuredPoint], base: Cluster) -> Cluster:
    """The base with its parameters fitted to groups that fill their nodes; messages count in the
    smallest world alone.
    """
    from scipy.optimize import least_squares

    fewest = min((p.ranks for p in points if OPERATIONS[p.op].kind == "p2p"), default=0)
    used = [
        p
        for p in points
        if (p.ranks == fewest if OPERATIONS[p.op].kind == "p2p" else p.group == p.ranks * p.nodes)
    ] or list(points)
    inside, across = any(p.nodes == 1 for p in used), any(p.nodes > 1 for p in used)
    fitted = [_OVERHEAD]
    fitted += [_LATENCY, _BANDWIDTH] if inside else []
    fitted += [_REDUCE] if inside and base.collectives == "flat" else []
    fitted += [_NET_LATENCY, _NET_BANDWIDTH] if across else []

    def cluster(x: Sequence[float]) -> Cluster:
        found = base
        for parameter, value in zip(fitted, x, strict=True):
            found = parameter.write(found, exp(value))
        return found

    def residuals(x: Sequence[float]) -> list[float]:
        tried = cluster(x)
        models = {world: CostModel(tried, *world) for world in {world_of(p) for p in used}}
        return [log(predicted_ns(models[world_of(p)], p) / p.ns) for p in used]

    low, high = [log(k.low) for k in fitted], [log(k.high) for k in fitted]
    start = np.clip(
        [log(k.read(base)) for k in fitted], np.array(low) + 0.01, np.array(high) - 0.01
    )
    found = least_squares(
        residuals,
        start,
        bounds=(low, high),
        loss="soft_l1",
        diff_step=0.02,
        max_nfev=_MAX_EVALUATIONS,
    )
    return cluster(found.x.tolist())


def _crossing_slowdown(points: Sequence[MeasuredPoint], cluster: Cluster) -> float:
    """How much longer two messages that cross take than one, as a share of the moving time; median
    over sizes that are mostly moving."""
    both = [p for p in points if OPERATIONS[p.op].kind == "batch"]
    fewest = min((p.ranks for p in both), default=0)
    shares = []
    for point in both:
        cost = CostModel(cluster, *world_of(point))
        one, moving = cost.p2p_ns(0, 1, point.nbytes), point.nbytes / cost.bytes_per_ns(0, 1)
        if point.ranks == fewest and moving > one / 2:
            shares.append((point.ns - one) / moving)
    return round(min(max(float(np.median(shares)), 0.0), 2.0), 3) if shares else cluster.crossing


def _curves(points: Sequence[MeasuredPoint]) -> tuple[MeasuredCurve, ...]:
    """Measured times by circumstance, as they were measured: some fall with the size, where another
    protocol sets in.
    """
    found: dict[tuple[str, int, int, int], dict[int, int]] = defaultdict(dict)
    for point in points:
        found[point[:4]][point.nbytes] = point.ns
    return tuple(_curve(key, times) for key, times in found.items())


def _curve(key: tuple[str, int, int, int], times: dict[int, int]) -> MeasuredCurve:
    op, group, ranks, nodes = key
    return MeasuredCurve.model_construct(
        op=op, group=group, ranks=ranks, nodes=nodes, times=dict(sorted(times.items()))
    )


def _held_out_errors(
    bare: Cluster, points: Sequence[MeasuredPoint], curves: Sequence[MeasuredCurve]
) -> dict[MeasuredPoint, float]:
    """For each size between two others of its curve: the error of predicting it from the others."""
    found: dict[MeasuredPoint, float] = {}
    for point in points:
        curve = next(c for c in curves if (c.op, c.group, c.ranks, c.nodes) == point[:4])
        if not min(curve.times) < point.nbytes < max(curve.times):
            continue
        others = {size: ns for size, ns in curve.times.items() if size != point.nbytes}
        without = bare.model_copy(
            update={"measured": (curve.model_copy(update={"times": others}),)}
        )
        found[point] = abs(predicted_ns(CostModel(without, *world_of(point)), point) / point.ns - 1)
    return found


def _errors(
    points: Sequence[MeasuredPoint],
    left_out: dict[MeasuredPoint, float],
    model: dict[MeasuredPoint, float],
) -> tuple[FitError, ...]:
    groups: dict[tuple[str, str], list[MeasuredPoint]] = defaultdict(list)
    for point in points:
        groups[point.op, next(word for most, word in SIZE_CLASSES if point.nbytes <= most)].append(
            point
        )
    rows = []
    for (op, sizes), same in groups.items():
        errors = [left_out.get(p, model[p] if len(same) == 1 else None) for p in same]
        known = [e for e in errors if e is not None] or [0.0]
        alone = [model[p] for p in same]
        rows.append(
            FitError(
                op,
                sizes,
                len(same),
                float(np.median(known)),
                max(known),
                float(np.median(alone)),
                max(alone),
            )
        )
    return tuple(rows)


class CostResidual(NamedTuple):
    """A measured time and its price in ns. ``band``: factors on the price between which nine of ten
    measured times lie; None where the cluster's prices have none."""

    point: MeasuredPoint
    priced_ns: int
    band: tuple[float, float] | None

    @property
    def ratio(self) -> float:
        """Measured over priced."""
        return self.point.ns / self.priced_ns

    @property
    def parts(self) -> bool:
        """Whether the measured time is outside the band."""
        return self.band is not None and not self.band[0] <= self.ratio <= self.band[1]


def cost_residuals(points: Iterable[MeasuredPoint], cluster: Cluster) -> tuple[CostResidual, ...]:
    """Every measured size with its price, by operation, ranks, nodes and size; the median where a
    size was measured more than once.
    """
    models: dict[tuple[int, int], CostModel] = {}
    found = []
    for point in sorted(pool_points(points)):
        at = world_of(point)
        cost = models.setdefault(at, CostModel(cluster, *at))
        found.append(
            CostResidual(point, max(predicted_ns(cost, point), 1), _prediction_range(cost, point))
        )
    return tuple(found)


def _prediction_range(cost: CostModel, point: MeasuredPoint) -> tuple[float, float] | None:
    row = OPERATIONS[point.op]
    ranks = (
        (0, 1 if point.nodes == 1 else cost.local_size)
        if row.kind == "p2p"
        else tuple(range(point.group))
    )
    known = explain_cost(cost, row, ranks, point.nbytes)
    return None if known is None else (known.band.low, known.band.high)
