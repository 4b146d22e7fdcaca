"""Answer what-if questions about a simulation.

The critical path by kind of work, the effect of each resource at twice the speed, a comparison of
two simulations, and the distribution of makespans over random draws.
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

#: How much faster `resource_speedups` makes a resource.
SPEEDUP_FACTOR = 2.0


# --- the critical path by kind ---
class CriticalPathShare(NamedTuple):
    """The share of one kind of work in the critical path.

    ``slack_ns``: how much longer the other work of this kind could take without delaying the run:
    the least time that a rank with such work waits or idles. None if no such work is off the path.
    """

    kind: str
    ns: int
    pieces: int
    share: float
    slack_ns: int | None


def critical_path_by_kind(simulation: Simulation) -> tuple[CriticalPathShare, ...]:
    """The critical path by kind of work, the largest share first.

    Repeated steps are summed; the shares add up to the makespan.
    """
    trace, whole = simulation.run.trace, simulation.makespan_ns
    sums: dict[str, list[int]] = {}
    for piece in path_pieces(trace, whole):
        found = sums.setdefault(_kind_of_piece(trace, piece), [0, 0])
        found[0] += piece.end_ns - piece.start_ns
        found[1] += 1
    slack = _slack_by_kind(simulation, trace)
    rows = []
    for kind, (ns, pieces) in sums.items():
        if ns:
            rows.append(CriticalPathShare(kind, ns, pieces, ns / whole, slack.get(kind)))
    return tuple(sorted(rows, key=lambda row: (-row.ns, row.kind)))


def _kind_of_piece(trace: Trace, piece: CriticalPathPiece) -> str:
    if piece.why == "late start":
        return piece.why
    if piece.row < 0:
        return "nothing runs"
    op = str(trace.text("op", int(trace["op"][piece.row])))
    if piece.why == "compute":
        return compute_kind(str(trace.text("name", int(trace["name"][piece.row]))))
    if piece.why in ("wait", "sleep"):
        return "waiting" if piece.why == "wait" else "sleep"
    group = str(trace.text("group", int(trace["group"][piece.row]))).partition("[")[0]
    operation = OPERATIONS.get(op)
    if operation is None or operation.kind != "collective" or not group:
        return "messages"
    return f"{op}, {group}"


def _slack_by_kind(simulation: Simulation, trace: Trace) -> dict[str, int]:
    """By kind of compute: the least time that a rank off the path with such work waits or idles."""
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
    """A run with one faster resource; ``change`` of the makespan is negative if it is shorter."""

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
    peak = {dtype: SPEEDUP_FACTOR * rate for dtype, rate in device.peak.items()}
    return cluster.model_copy(update={"device": device.model_copy(update={"peak": peak})})


def _with_less_overhead(cluster: Cluster) -> Cluster:
    return _with_faster_part(cluster, "device", "launch_ns").model_copy(
        update={"call_overhead_ns": round(cluster.call_overhead_ns / SPEEDUP_FACTOR)}
    )


#: Resource -> function that returns a cluster in which it is faster.
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
    """Repeat the run with each resource of its cluster twice as fast.

    Times that were measured, or that the scenario states, stay as they are.
    """
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
        change = found.makespan_ns / before - 1 if before else 0.0
        yield ResourceSpeedup(resource, found.makespan_ns, change)


# --- two runs ---
class MetricDifference(NamedTuple):
    """One figure of two runs."""

    what: str
    unit: str
    a: float | str | None
    b: float | str | None

    @property
    def change(self) -> float | None:
        """The relative change; None if the first figure is zero, or for shares and words."""
        if isinstance(self.a, str) or isinstance(self.b, str) or self.unit == "%":
            return None
        if not self.a or self.b is None:
            return None
        return self.b / self.a - 1


def metric_differences(a: Simulation, b: Simulation) -> tuple[MetricDifference, ...]:
    """The figures of two simulations; times of ranks are means."""
    rows = [MetricDifference("outcome", "", a.outcome, b.outcome)]
    verdicts = [one.verdict.verdict if one.verdict else "-" for one in (a, b)]
    rows += [
        MetricDifference("verdict", "", *verdicts),
        MetricDifference("makespan", "ns", a.makespan_ns, b.makespan_ns),
    ]
    if a.iteration_ns is not None or b.iteration_ns is not None:
        rows.append(MetricDifference("iteration", "ns", a.iteration_ns, b.iteration_ns))
    shares = ("compute", "exposed_comm", "waiting", "idle")
    for share in shares:
        means = [_mean_of_ranks(each, f"{share}_ns") for each in (a, b)]
        what = f"{share.replace('_comm', ' communication')} per rank"
        rows.append(MetricDifference(what, "ns", *means))
    metrics = training_metrics(a), training_metrics(b)
    for what, unit, value_of in _METRICS:
        found = [None if each is None else value_of(each) for each in metrics]
        if any(value is not None for value in found):
            rows.append(MetricDifference(what, unit, *found))
    return (*rows, *_path_kind_differences(a, b))


def _mean_of_ranks(simulation: Simulation, column: str) -> float:
    return fmean([getattr(times, column) for times in simulation.timeline.ranks] or [0])


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
            f"critical path: {kind}", "ns", paths[0].get(kind, 0), paths[1].get(kind, 0)
        )


# --- chance ---
class StragglerModel(NamedTuple):
    """A random ``share`` of the ranks takes ``factor`` times as long."""

    share: float
    factor: float


class MakespanDistribution(NamedTuple):
    """Makespans of many draws: mean with its two-sided confidence interval, and quantiles."""

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
    """Parse, for example, `1%x1.3`: one rank in a hundred takes 1.3 times as long.

    Raises UsageError.
    """
    share, _, factor = text.replace("×", "x").partition("x")
    share = share.strip()
    divisor = 100 if share.endswith("%") else 1
    try:
        found = StragglerModel(float(share.removesuffix("%")) / divisor, float(factor))
    except ValueError:
        found = StragglerModel(-1.0, 0.0)
    if not 0 <= found.share <= 1 or not 1 <= found.factor <= 1e6:
        raise UsageError(
            f"--stragglers {text}: expected a share of the ranks and a slowdown factor",
            "for example --stragglers 1%x1.3",
        )
    return found


def random_scenarios(
    scenario: Scenario, count: int, stragglers: StragglerModel | None
) -> Iterator[Scenario]:
    """The scenario with consecutive seeds, starting at its own, each with its own slow ranks.

    The draws depend on the seeds only, so the same scenario always gives the same ones.
    """
    for k in range(count):
        seed = scenario.seed + k
        faults = list(scenario.faults)
        if stragglers is not None:
            draw = random.Random(f"stragglers {seed}")
            draws = [draw.random() for _ in range(scenario.world.size)]
            slow = [rank for rank, value in enumerate(draws) if value < stragglers.share]
            if slow:
                faults.append(FaultDecl(kind="slow", ranks=slow, factor=stragglers.factor))
        yield scenario.model_copy(update={"seed": seed, "faults": tuple(faults)})


def makespan_distribution(times: Sequence[int], level: float = 0.95) -> MakespanDistribution:
    """The distribution of at least two makespans.

    The interval of the mean is Student's, computed by Hill's expansion (CACM 13, 1970, algorithm
    396).
    """
    n, mean = len(times), fmean(times)
    half = _student_t_quantile(n - 1, level) * stdev(times) / sqrt(n)
    cuts = quantiles(times, n=20, method="inclusive")
    return MakespanDistribution(
        n, mean, mean - half, mean + half, cuts[9], cuts[18], min(times), max(times), level
    )


def _student_t_quantile(freedom: int, level: float) -> float:
    """The two-sided quantile of Student's t.

    By Cornish and Fisher's expansion; exact for one and two degrees of freedom.
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
