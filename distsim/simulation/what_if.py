"""What if: the critical path by kind, every resource twice as fast, two scenarios side by side,
many draws of chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from statistics import NormalDist, fmean, quantiles, stdev
from typing import NamedTuple

from distsim.analysis.critical_path import CriticalPathPiece, path_pieces
from distsim.common.errors import UsageError
from distsim.hardware.cluster import Cluster
from distsim.operations.registry import OPERATIONS
from distsim.scenario import Scenario
from distsim.scenario.format.models.sections import FaultDecl
from distsim.simulation.simulate_scenario import Simulation, simulate
from distsim.simulation.training_metrics import TrainingMetrics, compute_kind, training_metrics
from distsim.trace.model import Trace

#: How much faster a resource becomes.
SPEEDUP_FACTOR = 2.0


# --- the critical path by kind ---
class CriticalPathShare(NamedTuple):
    """What one kind of work has of the critical path. ``slack_ns``: the least that a rank's other
    work of this kind could take longer before the run did: what it waits or is idle; None where
    nothing of the kind is off the path."""

    kind: str
    ns: int
    pieces: int
    share: float
    slack_ns: int | None


def critical_path_by_kind(simulation: Simulation) -> tuple[CriticalPathShare, ...]:
    """Sums over the critical path by kind, steps folded, the largest first. Shares of the makespan,
    which they add up to.
    """
    trace, whole = simulation.run.trace, simulation.makespan_ns
    sums: dict[str, list[int]] = {}
    for piece in path_pieces(trace, whole):
        found = sums.setdefault(_kind_of_piece(trace, piece), [0, 0])
        found[0] += piece.end_ns - piece.start_ns
        found[1] += 1
    slack = _slack_by_kind(simulation, trace)
    rows = [
        CriticalPathShare(kind, ns, count, ns / whole, slack.get(kind))
        for kind, (ns, count) in sums.items()
        if ns
    ]
    return tuple(sorted(rows, key=lambda row: (-row.ns, row.kind)))


def _kind_of_piece(trace: Trace, piece: CriticalPathPiece) -> str:
    if piece.row < 0:
        return "nothing runs"
    op = str(trace.text("op", int(trace["op"][piece.row])))
    if piece.why == "compute":
        return compute_kind(str(trace.text("name", int(trace["name"][piece.row]))))
    if piece.why in ("wait", "sleep"):
        return "waiting" if piece.why == "wait" else "sleep"
    group = str(trace.text("group", int(trace["group"][piece.row]))).partition("[")[0]
    row = OPERATIONS.get(op)
    return (
        f"{op}, {group}" if row is not None and row.kind == "collective" and group else "messages"
    )


def _slack_by_kind(simulation: Simulation, trace: Trace) -> dict[str, int]:
    """By kind of compute: the least time that a rank off the path waits or idles, of those that do
    such work.
    """
    pieces = path_pieces(trace, simulation.makespan_ns)
    on_path = {piece.rank for piece in pieces}
    free = {r.rank: r.waiting_ns + r.idle_ns for r in simulation.timeline.ranks}
    found: dict[str, int] = {}
    rows = [k for k, one in enumerate(trace.ops("compute")) if one]
    seen = dict.fromkeys((int(trace["rank"][k]), int(trace["name"][k])) for k in rows)
    for rank, name in seen:
        if rank not in on_path:
            kind = compute_kind(str(trace.text("name", name)))
            found[kind] = min(found.get(kind, free[rank]), free[rank])
    return found


# --- every resource twice as fast ---
class ResourceSpeedup(NamedTuple):
    """A run with one resource faster. ``change``: of the makespan, negative where it is shorter."""

    resource: str
    makespan_ns: int
    change: float


def _with_faster_part(cluster: Cluster, part: str, name: str) -> Cluster:
    """A cluster with a rate of a part doubled, or a time of it halved."""
    old = getattr(cluster, part)
    value = getattr(old, name)
    better = value * SPEEDUP_FACTOR if name.endswith("per_ns") else round(value / SPEEDUP_FACTOR)
    return cluster.model_copy(update={part: old.model_copy(update={name: better})})


def _with_faster_compute(cluster: Cluster) -> Cluster:
    device = cluster.device
    return cluster.model_copy(
        update={
            "device": device.model_copy(
                update={"peak": {k: SPEEDUP_FACTOR * v for k, v in device.peak.items()}}
            )
        }
    )


def _with_less_overhead(cluster: Cluster) -> Cluster:
    return _with_faster_part(cluster, "device", "launch_ns").model_copy(
        update={"call_overhead_ns": round(cluster.call_overhead_ns / SPEEDUP_FACTOR)}
    )


#: What is made faster: words -> the cluster with it.
RESOURCES: dict[str, Callable[[Cluster], Cluster]] = {
    "compute (FLOP/s)": _with_faster_compute,
    "device memory (HBM)": lambda c: _with_faster_part(c, "device", "memory_bytes_per_ns"),
    "links inside a node": lambda c: _with_faster_part(c, "intra", "bytes_per_ns"),
    "network cards": lambda c: _with_faster_part(c, "nics", "bytes_per_ns"),
    "latencies": lambda c: _with_faster_part(
        _with_faster_part(c, "intra", "latency_ns"), "network", "latency_ns"
    ),
    "launches and calls": _with_less_overhead,
}


def resource_speedups(
    simulation: Simulation, tell: Callable[[str], None] = lambda _: None
) -> Iterator[ResourceSpeedup]:
    """The run again with each resource of its cluster twice as fast, whatever the price then comes
    to; times that were measured or are stated in the file stay as they are."""
    before = simulation.makespan_ns
    for resource, faster in RESOURCES.items():
        tell(f"{resource} twice as fast")
        cluster = faster(simulation.cost.cluster)
        found = simulate(
            simulation.scenario,
            backend=simulation.run.profile,
            cluster=cluster,
            with_verdict=False,
            with_values=False,
        )
        yield ResourceSpeedup(
            resource, found.makespan_ns, found.makespan_ns / before - 1 if before else 0.0
        )


# --- two runs ---
class MetricDifference(NamedTuple):
    """One figure of two runs; ``change`` is relative, None where the first is zero, or they are
    shares or words.
    """

    what: str
    unit: str
    a: float | str | None
    b: float | str | None

    @property
    def change(self) -> float | None:
        if (
            isinstance(self.a, str)
            or isinstance(self.b, str)
            or not self.a
            or self.b is None
            or self.unit == "%"
        ):
            return None
        return self.b / self.a - 1


def metric_differences(a: Simulation, b: Simulation) -> tuple[MetricDifference, ...]:
    """Figures of two simulations side by side; ranks' times are means."""
    rows = [MetricDifference("outcome", "", a.outcome, b.outcome)]
    verdicts = [one.verdict.verdict if one.verdict else "-" for one in (a, b)]
    rows += [
        MetricDifference("verdict", "", *verdicts),
        MetricDifference("makespan", "ns", a.makespan_ns, b.makespan_ns),
    ]
    if a.iteration_ns is not None or b.iteration_ns is not None:
        rows.append(MetricDifference("iteration", "ns", a.iteration_ns, b.iteration_ns))
    shares = ("compute", "exposed_comm", "waiting", "idle")
    for word in shares:
        means = [
            fmean([getattr(r, f"{word}_ns") for r in one.timeline.ranks] or [0]) for one in (a, b)
        ]
        rows.append(
            MetricDifference(f"{word.replace('_comm', ' communication')}, a rank", "ns", *means)
        )
    told = training_metrics(a), training_metrics(b)
    for what, unit, take in _METRICS:
        found = [None if one is None else take(one) for one in told]
        if any(value is not None for value in found):
            rows.append(MetricDifference(what, unit, *found))
    return (*rows, *_path_kind_differences(a, b))


_METRICS: tuple[tuple[str, str, Callable[[TrainingMetrics], float]], ...] = (
    ("tokens/s/GPU", "", lambda f: f.tokens_s_gpu),
    ("MFU", "%", lambda f: f.mfu),
    ("bubble", "%", lambda f: f.bubble),
)


def _path_kind_differences(a: Simulation, b: Simulation) -> Iterator[MetricDifference]:
    """The critical paths by kind."""
    paths = [{row.kind: row.ns for row in critical_path_by_kind(one)} for one in (a, b)]
    for kind in dict.fromkeys([*paths[0], *paths[1]]):
        yield MetricDifference(
            f"on the critical path: {kind}", "ns", paths[0].get(kind, 0), paths[1].get(kind, 0)
        )


# --- chance ---
class StragglerModel(NamedTuple):
    """Each rank is slow by chance: ``share`` of them, ``factor`` times as long."""

    share: float
    factor: float


class MakespanDistribution(NamedTuple):
    """Makespans over many draws, in ns: their mean with its confidence interval (two-sided,
    ``level``), and quantiles.
    """

    runs: int
    mean_ns: float
    low_ns: float
    high_ns: float
    median_ns: float
    p95_ns: float
    least_ns: int
    most_ns: int
    level: float = 0.95


def parse_stragglers(text: str) -> StragglerModel:
    """`1%x1.3`: one rank in a hundred takes 1.3 times as long. Raises UsageError."""
    share, _, factor = text.replace("×", "x").partition("x")
    try:
        found = StragglerModel(
            float(share.strip().removesuffix("%")) / (100 if share.strip().endswith("%") else 1),
            float(factor),
        )
    except ValueError:
        found = StragglerModel(-1.0, 0.0)
    if not 0 <= found.share <= 1 or not 1 <= found.factor <= 1e6:
        raise UsageError(
            f"--stragglers {text}: expected a share of the ranks and how much longer they take",
            "as --stragglers 1%x1.3",
        )
    return found


def random_scenarios(
    scenario: Scenario, count: int, stragglers: StragglerModel | None
) -> Iterator[Scenario]:
    """The scenario with seeds from its own on, each with its own slow ranks: the same scenario, the
    same draws.
    """
    for k in range(count):
        seed = scenario.seed + k
        chance = random.Random(f"stragglers {seed}")
        slow = [
            r
            for r in range(scenario.world.size)
            if stragglers is not None and chance.random() < stragglers.share
        ]
        faults = (
            [FaultDecl(kind="slow", ranks=slow, factor=stragglers.factor)]
            if stragglers is not None and slow
            else []
        )
        yield scenario.model_copy(update={"seed": seed, "faults": (*scenario.faults, *faults)})


def makespan_distribution(times: Sequence[int], level: float = 0.95) -> MakespanDistribution:
    """Of at least two makespans. The interval of the mean is Student's for few draws by Hill's
    expansion (CACM 13, 1970, algorithm 396).
    """
    n, mean = len(times), fmean(times)
    half = _student_t_quantile(n - 1, level) * stdev(times) / sqrt(n)
    cuts = quantiles(times, n=20, method="inclusive")
    return MakespanDistribution(
        n, mean, mean - half, mean + half, cuts[9], cuts[18], min(times), max(times), level
    )


def _student_t_quantile(freedom: int, level: float) -> float:
    """The quantile of Student's t, two-sided; Cornish and Fisher's expansion, exact for one and two
    degrees of freedom.
    """
    from math import pi, tan

    if freedom == 1:
        return tan(pi * level / 2)
    if freedom == 2:
        return level * sqrt(2 / (1 - level**2))
    z = NormalDist().inv_cdf((1 + level) / 2)
    terms: tuple[float, ...] = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(z + sum(term / freedom**k for k, term in enumerate(terms, 1)))


__all__ = [
    "RESOURCES",
    "MetricDifference",
    "CriticalPathShare",
    "ResourceSpeedup",
    "MakespanDistribution",
    "StragglerModel",
    "metric_differences",
    "random_scenarios",
    "parse_stragglers",
    "critical_path_by_kind",
    "resource_speedups",
    "makespan_distribution",
]
