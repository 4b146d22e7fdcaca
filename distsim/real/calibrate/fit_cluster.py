"""Fits a cluster to measured points, estimates its errors, and compares it with measurements.

Key idea: errors are relative, so the fit works on logarithms: of the parameters, and of the
predicted time divided by the measured time. Only a few parameters are fitted. The measured times
stay in the cluster and correct it, so its error is estimated on held-out sizes, each in turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any, Final, NamedTuple

import numpy as np

from distsim.common.errors import EnvironmentFault, UsageError, raise_if_out_of_memory
from distsim.common.installation import install_command
from distsim.hardware.cluster import Cluster, MeasuredCurve, cluster_from
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.explain import explain_cost
from distsim.operations.registry import OPERATIONS
from distsim.real.calibrate.measured_points import MeasuredPoint, pool_points

#: Classes of sizes for which errors are reported, by their upper bounds.
SIZE_CLASSES: Final = (
    (1 << 16, "to 64 KiB"),
    (1 << 20, "to 1 MiB"),
    (1 << 24, "to 16 MiB"),
    (1 << 62, "above"),
)
#: A fit stops after this many evaluations; each predicts every point once.
_MAX_EVALUATIONS: Final = 60


class FitError(NamedTuple):
    """Errors of one operation in one class of sizes, as shares of the measured time.

    ``median``, ``worst``: each size is predicted from the other sizes. ``model_*``: predicted by
    the fitted parameters alone.
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
    """The fitted cluster and its errors, over all operations.

    ``median``, ``worst``, ``model_median``: see `FitError`. ``spread``: the median of the points'
    spreads, which is the noise that no fit can beat.
    """

    cluster: Cluster
    errors: tuple[FitError, ...]
    median: float
    worst: float
    model_median: float
    spread: float
    points: int


class _FitParameter(NamedTuple):
    """A parameter that is fitted, on a logarithmic scale between ``low`` and ``high``.

    ``read`` gets it from a cluster; ``write`` returns a cluster with another value.
    """

    read: Callable[[Cluster], float]
    write: Callable[[Cluster, float], Cluster]
    low: float
    high: float


def _with_part(cluster: Cluster, part: str, **changes: float) -> Cluster:
    """A copy of the cluster in which one of its parts has other values."""
    return cluster.model_copy(update={part: getattr(cluster, part).model_copy(update=changes)})


_OVERHEAD = _FitParameter(
    lambda cluster: max(cluster.call_overhead_ns, 1),
    lambda cluster, value: cluster.model_copy(update={"call_overhead_ns": round(value)}),
    100,
    1e9,
)
_LATENCY = _FitParameter(
    lambda cluster: max(cluster.intra.latency_ns, 1),
    lambda cluster, value: _with_part(cluster, "intra", latency_ns=round(value)),
    10,
    1e9,
)
_BANDWIDTH = _FitParameter(
    lambda cluster: cluster.intra.attained_bytes_per_ns,
    lambda cluster, value: _with_part(cluster, "intra", bytes_per_ns=value, efficiency=1.0),
    1e-3,
    1e4,
)
_REDUCE = _FitParameter(
    lambda cluster: cluster.reduce_bytes_per_ns or 5.0,
    lambda cluster, value: cluster.model_copy(update={"reduce_bytes_per_ns": value}),
    1e-2,
    1e3,
)
_NET_LATENCY = _FitParameter(
    lambda cluster: max(cluster.network.latency_ns, 1),
    lambda cluster, value: _with_part(cluster, "network", latency_ns=round(value)),
    10,
    1e9,
)
_NET_BANDWIDTH = _FitParameter(
    lambda cluster: cluster.nics.attained_bytes_per_ns,
    lambda cluster, value: _with_part(cluster, "nics", bytes_per_ns=value, efficiency=1.0),
    1e-3,
    1e4,
)


def calibrate_cluster(
    points: Iterable[MeasuredPoint], base: Cluster, name: str, source: str
) -> CalibrationResult:
    """Fit ``base`` to measured points. Raises UsageError if there are none.

    Latency, bandwidth and overhead minimise the logarithm of predicted over measured time, with
    less weight on outliers, over groups that have the machine for themselves. Under ``collectives:
    nccl`` the pooled constants of `distsim.hardware.cost.nccl_constants` stay, and only the
    measured times correct them. ``error_band`` of the cluster states how well omitted sizes were
    predicted.

    On a flat cluster a single thread of a process moves all its bytes, so simultaneous transfers
    slow each other down. `Cluster.crossing` is the slowdown measured with two crossing messages.
    """
    pooled = pool_points(points)
    single = tuple(point for point in pooled if OPERATIONS[point.op].kind != "batch")
    if not single:
        raise UsageError(
            "nothing to calibrate from: these files contain no matched calls",
            "run `distsim bench --output FILE`",
        )
    fitted = base.model_copy(update={"measured": ()})
    if base.collectives != "nccl":
        fitted = _fit_parameters(single, fitted)
    curves = _curves(single)
    held_out_errors = _held_out_errors(fitted, single, curves)
    model_errors = {point: _relative_error(fitted, point) for point in single}
    errors = _errors(single, held_out_errors, model_errors)
    spread = float(np.median([point.spread for point in single]))
    shares = list(held_out_errors.values()) or list(model_errors.values())
    median, worst = float(np.median(shares)), max(shares)
    error_band = (
        f"+-{median:.0%} median, {worst:.0%} worst of {len(shares)} held-out sizes; "
        f"runs spread by {spread:.0%}"
    ).replace("%", " %")
    cluster = fitted.model_copy(
        update={"measured": curves, "name": name, "source": source, "error_band": error_band}
    )
    cluster = cluster.model_copy(update={"crossing": _crossing_slowdown(pooled, cluster)})
    return CalibrationResult(
        # As it will be read from its file.
        cluster_from(cluster.to_mapping()),
        errors,
        median,
        worst,
        float(np.median(list(model_errors.values()))),
        spread,
        len(single),
    )


def _relative_error(cluster: Cluster, point: MeasuredPoint) -> float:
    """The error of a cluster's prediction, as a share of the measured time."""
    return abs(predicted_ns(CostModel(cluster, *world_of(point)), point) / point.ns - 1)


def predicted_ns(cost: CostModel, point: MeasuredPoint) -> int:
    """The predicted time of a point. ``cost`` must be for the point's world (see `world_of`)."""
    operation = OPERATIONS[point.op]
    ranks = _ranks_of(cost, point)
    if operation.kind == "p2p":
        sender, receiver = ranks
        return cost.p2p_ns(sender, receiver, point.nbytes)
    return cost.collective_ns(operation, ranks, point.nbytes, 0)


def _ranks_of(cost: CostModel, point: MeasuredPoint) -> tuple[int, ...]:
    """Ranks that stand for those that were measured: sender and receiver, or a group."""
    if OPERATIONS[point.op].kind == "p2p":
        return 0, 1 if point.nodes == 1 else cost.local_size
    return tuple(range(point.group))


def world_of(point: MeasuredPoint) -> tuple[int, int]:
    """World size and ranks per node in which a point was measured."""
    if point.nodes == 1:
        return max(point.ranks, point.group), point.ranks
    ranks_per_node = -(-point.group // point.nodes)
    return ranks_per_node * point.nodes, ranks_per_node


def _least_squares() -> Callable[..., Any]:
    """scipy's least-squares solver. Raises EnvironmentFault if scipy is not installed."""
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise_if_out_of_memory(error)
        raise EnvironmentFault(
            "fitting a cluster needs scipy, which is not installed", install_command("calibrate")
        ) from None
    solver: Callable[..., Any] = least_squares
    return solver


def _fit_parameters(points: Sequence[MeasuredPoint], base: Cluster) -> Cluster:
    """The base cluster with parameters fitted to the points that are not disturbed by others."""
    least_squares = _least_squares()
    used = _undisturbed_points(points)
    parameters = _parameters_to_fit(used, base)
    worlds = {world_of(point) for point in used}

    def cluster_with(logarithms: Sequence[float]) -> Cluster:
        cluster = base
        for parameter, logarithm in zip(parameters, logarithms, strict=True):
            cluster = parameter.write(cluster, exp(logarithm))
        return cluster

    def residuals(logarithms: Sequence[float]) -> list[float]:
        cluster = cluster_with(logarithms)
        models = {world: CostModel(cluster, *world) for world in worlds}
        return [log(predicted_ns(models[world_of(point)], point) / point.ns) for point in used]

    low = [log(parameter.low) for parameter in parameters]
    high = [log(parameter.high) for parameter in parameters]
    start = np.clip(
        [log(parameter.read(base)) for parameter in parameters],
        np.array(low) + 0.01,
        np.array(high) - 0.01,
    )
    solution = least_squares(
        residuals,
        start,
        bounds=(low, high),
        loss="soft_l1",
        diff_step=0.02,
        max_nfev=_MAX_EVALUATIONS,
    )
    return cluster_with(solution.x.tolist())


def _undisturbed_points(points: Sequence[MeasuredPoint]) -> list[MeasuredPoint]:
    """Collectives of groups that fill their nodes, and messages of the smallest world.

    If there are none, all points.
    """
    message_worlds = [point.ranks for point in points if OPERATIONS[point.op].kind == "p2p"]
    smallest_world = min(message_worlds, default=0)

    def is_undisturbed(point: MeasuredPoint) -> bool:
        if OPERATIONS[point.op].kind == "p2p":
            return point.ranks == smallest_world
        return point.group == point.ranks * point.nodes

    return [point for point in points if is_undisturbed(point)] or list(points)


def _parameters_to_fit(points: Sequence[MeasuredPoint], base: Cluster) -> list[_FitParameter]:
    """The parameters on which these points depend."""
    parameters = [_OVERHEAD]
    if any(point.nodes == 1 for point in points):
        parameters += [_LATENCY, _BANDWIDTH]
        if base.collectives == "flat":
            parameters.append(_REDUCE)
    if any(point.nodes > 1 for point in points):
        parameters += [_NET_LATENCY, _NET_BANDWIDTH]
    return parameters


def _crossing_slowdown(points: Sequence[MeasuredPoint], cluster: Cluster) -> float:
    """How much longer two crossing messages take than one, as a share of the time of the transfer.

    It is the median over the sizes for which the transfer takes most of the time.
    """
    crossing = [point for point in points if OPERATIONS[point.op].kind == "batch"]
    smallest_world = min((point.ranks for point in crossing), default=0)
    shares = []
    for point in crossing:
        cost = CostModel(cluster, *world_of(point))
        single_ns = cost.p2p_ns(0, 1, point.nbytes)
        transfer_ns = point.nbytes / cost.bytes_per_ns(0, 1)
        if point.ranks == smallest_world and transfer_ns > single_ns / 2:
            shares.append((point.ns - single_ns) / transfer_ns)
    if not shares:
        return cluster.crossing
    return round(min(max(float(np.median(shares)), 0.0), 2.0), 3)


def _curves(points: Sequence[MeasuredPoint]) -> tuple[MeasuredCurve, ...]:
    """Measured times by circumstance.

    They are not smoothed: some fall with the size, where another protocol takes over.
    """
    times_by_key: dict[tuple[str, int, int, int], dict[int, int]] = defaultdict(dict)
    for point in points:
        times_by_key[point[:4]][point.nbytes] = point.ns
    return tuple(_curve(key, times) for key, times in times_by_key.items())


def _curve(key: tuple[str, int, int, int], times: dict[int, int]) -> MeasuredCurve:
    op, group, ranks, nodes = key
    return MeasuredCurve.model_construct(
        op=op, group=group, ranks=ranks, nodes=nodes, times=dict(sorted(times.items()))
    )


def _held_out_errors(
    cluster: Cluster, points: Sequence[MeasuredPoint], curves: Sequence[MeasuredCurve]
) -> dict[MeasuredPoint, float]:
    """The error of predicting each size from the other sizes of its curve.

    The smallest and the largest size are omitted, because they would have to be extrapolated.
    """
    curve_of = {(curve.op, curve.group, curve.ranks, curve.nodes): curve for curve in curves}
    errors: dict[MeasuredPoint, float] = {}
    for point in points:
        curve = curve_of[point[:4]]
        if not min(curve.times) < point.nbytes < max(curve.times):
            continue
        others = {size: ns for size, ns in curve.times.items() if size != point.nbytes}
        curve_without = curve.model_copy(update={"times": others})
        errors[point] = _relative_error(
            cluster.model_copy(update={"measured": (curve_without,)}), point
        )
    return errors


def _errors(
    points: Sequence[MeasuredPoint],
    held_out: dict[MeasuredPoint, float],
    model: dict[MeasuredPoint, float],
) -> tuple[FitError, ...]:
    """Errors by operation and class of sizes."""
    groups: dict[tuple[str, str], list[MeasuredPoint]] = defaultdict(list)
    for point in points:
        groups[point.op, _size_class(point.nbytes)].append(point)
    rows = []
    for (op, sizes), same in groups.items():
        known = [held_out[point] for point in same if point in held_out]
        if not known:
            # A single size cannot be predicted from others; several sizes at the ends count as 0.
            known = [model[same[0]]] if len(same) == 1 else [0.0]
        model_errors = [model[point] for point in same]
        rows.append(
            FitError(
                op,
                sizes,
                len(same),
                float(np.median(known)),
                max(known),
                float(np.median(model_errors)),
                max(model_errors),
            )
        )
    return tuple(rows)


def _size_class(nbytes: int) -> str:
    return next(name for upper_bound, name in SIZE_CLASSES if nbytes <= upper_bound)


# --- measured and predicted times ---


class CostResidual(NamedTuple):
    """A measured time and its predicted time (``predicted_ns``).

    ``band``: factors on the predicted time between which 90 % of measured times lie; None if the
    cluster's predictions have no such range.
    """

    point: MeasuredPoint
    predicted_ns: int
    band: tuple[float, float] | None

    @property
    def ratio(self) -> float:
        """Measured over predicted time."""
        return self.point.ns / self.predicted_ns

    @property
    def is_outside_range(self) -> bool:
        """Whether the measured time is outside ``band``."""
        if self.band is None:
            return False
        low, high = self.band
        return not low <= self.ratio <= high


def cost_residuals(points: Iterable[MeasuredPoint], cluster: Cluster) -> tuple[CostResidual, ...]:
    """Every measured size with its predicted time, by operation, ranks, nodes and size.

    If a size was measured more than once, the median counts.
    """
    models: dict[tuple[int, int], CostModel] = {}
    residuals = []
    for point in sorted(pool_points(points)):
        world = world_of(point)
        cost = models.setdefault(world, CostModel(cluster, *world))
        prediction = max(predicted_ns(cost, point), 1)
        residuals.append(CostResidual(point, prediction, _prediction_range(cost, point)))
    return tuple(residuals)


def _prediction_range(cost: CostModel, point: MeasuredPoint) -> tuple[float, float] | None:
    explained = explain_cost(cost, OPERATIONS[point.op], _ranks_of(cost, point), point.nbytes)
    return None if explained is None else (explained.band.low, explained.band.high)
