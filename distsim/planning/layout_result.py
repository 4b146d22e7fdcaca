"""Evaluates one layout: the time of a step with its range and shares, and the memory.

Key idea: all costs of one kind (compute, communication) are assumed to have one relative error.
So the range of a step is the sum of the ranges of its parts, and two layouts on one cluster can be
ordered with certainty although their ranges overlap (`is_order_certain`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from distsim.common.units import show_ns
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.memory_fit import MemoryFit, memory_fit
from distsim.hardware.cost.prediction_range import COMPUTE_RANGE, communication_range
from distsim.planning.estimate import NORM, PIPELINE, EstimateCache, StepEstimator, StepTime
from distsim.planning.layouts import ParallelLayout, PlanRequest, RejectedLayout
from distsim.planning.pipeline_timer import PipelineHang
from distsim.planning.rank_timer import LAUNCH, MATRIX_PRODUCTS, MEMORY, EntryCosts

#: Mesh axes whose exposed communication has its own key in `LayoutResult.shares`. The other keys
#: are matrix products, work bound by memory bandwidth, launches of the host, waiting for other
#: stages, and `data`: exposed communication of gradients and parameters among replicas.
_MODEL_AXES = ("tp", "cp", "ep")


#: How the reason begins if a layout is much slower than the fastest one.
SLOW_REASON = "it is much slower than the fastest layouts"


class StepTimePart(NamedTuple):
    """The part of a step that depends on one kind of cost, and the range of that cost."""

    word: str
    ns: int
    low: float
    high: float


class CostRanges(NamedTuple):
    """Factors between which costs lie, as (low, high); launches count as exact."""

    compute: tuple[float, float] = (1.0, 1.0)
    communication: tuple[float, float] = (1.0, 1.0)

    def of(self, word: str) -> tuple[float, float]:
        """The range for a key of `LayoutResult.shares`."""
        if word in (MATRIX_PRODUCTS, MEMORY):
            return self.compute
        return (1.0, 1.0) if word == LAUNCH else self.communication


class LayoutResult(NamedTuple):
    """A possible layout with its predicted time and memory.

    ``shares`` of the step add up to 1; they are means over the ranks. ``parts``: the shares without
    the waiting, each increased by its share of it. ``held_nbytes``: the predicted peak of torch's
    allocator on the fullest rank; ``fit``: the range of its whole memory. ``timed``: `alone`, each
    transfer and kernel by itself, which may be a few percent too short; `exact`, by a simulation;
    `short`, like `alone`, for a layout that is too large to be simulated.
    """

    layout: ParallelLayout
    cluster: str
    step_ns: int
    parts: tuple[StepTimePart, ...]
    shares: dict[str, float]
    held_nbytes: int
    fit: MemoryFit
    tokens_s_gpu: float
    mfu: float
    timed: str = "alone"

    @property
    def band_ns(self) -> tuple[int, int]:
        """The shortest and the longest step if all costs are wrong by the same factor."""
        low_ns = sum(part.ns * part.low for part in self.parts)
        high_ns = sum(part.ns * part.high for part in self.parts)
        return round(low_ns), round(high_ns)

    def taking(self, step_ns: int) -> LayoutResult:
        """The same layout with another duration of the step; all parts grow in proportion."""
        growth = step_ns / self.step_ns
        return self._replace(
            step_ns=step_ns,
            parts=tuple(part._replace(ns=round(part.ns * growth)) for part in self.parts),
            tokens_s_gpu=self.tokens_s_gpu / growth,
            mfu=self.mfu / growth,
        )

    @property
    def memory(self) -> float:
        """The predicted memory of the fullest rank, as a share of the device's."""
        return (self.held_nbytes + self.fit.reserve_nbytes) / self.fit.capacity_nbytes

    @property
    def bubble(self) -> float:
        return self.shares.get(PIPELINE, 0.0)

    @property
    def exposed(self) -> float:
        """Communication that no compute overlaps; messages between stages belong to the bubble."""
        others = (MATRIX_PRODUCTS, MEMORY, LAUNCH, PIPELINE)
        return sum(share for word, share in self.shares.items() if word not in others)

    @property
    def bound(self) -> str:
        """The key of the largest share."""
        return max(self.shares, key=lambda word: self.shares[word])


class LayoutEvaluator:
    """Evaluates layouts of one request; they share the costs and schedules."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.cost = CostModel(request.cluster, request.gpus, request.node)
        self.cache: EstimateCache = {}
        self.schedules: EstimateCache = {}
        self.ranges = CostRanges()
        if self.cost.nccl and not request.cluster.measured:
            communication = communication_range(self.cost, request.gpus)
            self.ranges = CostRanges(COMPUTE_RANGE, communication)
        self._steps: dict[object, StepTime] = {}

    def outcome(
        self, layout: ParallelLayout, limit_ns: int | None = None
    ) -> LayoutResult | RejectedLayout:
        """The evaluated layout, or the reason why it is rejected: memory, a hang, or the limit."""
        request = self.request
        estimator = self.timed(layout)
        needed = max(estimator.peak_bytes())
        fit = memory_fit(needed, request.memory_reserve(layout), request.cluster.device)
        if fit.is_too_large:
            percent = -(-100 * fit.low_nbytes // fit.capacity_nbytes)
            return RejectedLayout(
                layout, f"it does not fit: a rank needs at least {percent} % of the device's memory"
            )
        if limit_ns is not None and estimator.least_step_ns() > limit_ns:
            return RejectedLayout(layout, f"{SLOW_REASON}: more than {show_ns(limit_ns)}")
        try:
            step = self.step(layout, estimator)
        except PipelineHang as hang:
            stages = ", ".join(map(str, hang.ranks))
            return RejectedLayout(layout, f"it hangs: stages {stages} wait for each other")
        step_ns = step.makespan_ns
        shares = _time_shares(step)
        peak_flop_per_ns = request.cluster.device.peak_flop_per_ns(request.base.dtype)
        tokens_per_s = request.global_batch * request.tokens / (step_ns / 1e9)
        return LayoutResult(
            layout,
            request.cluster.name,
            step_ns,
            step_time_parts(step_ns, shares, self.ranges),
            shares,
            needed,
            fit,
            tokens_s_gpu=tokens_per_s / layout.gpus,
            mfu=request.flops / (layout.gpus * peak_flop_per_ns * step_ns),
        )

    def timed(
        self, layout: ParallelLayout, factors: tuple[float, float] = (1.0, 1.0)
    ) -> StepEstimator:
        """The estimator of a layout. ``factors``: on the costs of compute and communication."""
        # The cache holds times at unchanged costs.
        cache = self.cache if factors == (1.0, 1.0) else {}
        return StepEstimator(
            self.request.fields(layout),
            self.request.context(layout),
            EntryCosts(self.cost, layout.mesh, factors),
            cache,
            self.schedules,
        )

    def step(self, layout: ParallelLayout, estimator: StepEstimator) -> StepTime:
        """The time of a step; layouts that differ only in memory (ZeRO 1 and 2) share it."""
        key = layout._replace(zero=1) if layout.zero == 2 else layout
        if key not in self._steps:
            self._steps[key] = estimator.step()
        return self._steps[key]


def step_time_parts(
    step_ns: int, shares: Mapping[str, float], ranges: CostRanges
) -> tuple[StepTimePart, ...]:
    """The parts of a step, each with the range of its cost.

    The time for which ranks wait for other stages is distributed over the other parts, because the
    other stages spend it on these.
    """
    scale = step_ns / max(1.0 - shares.get(PIPELINE, 0.0), 1e-9)
    return tuple(
        StepTimePart(word, round(scale * share), *ranges.of(word))
        for word, share in shares.items()
        if word != PIPELINE
    )


def is_order_certain(a: LayoutResult, b: LayoutResult) -> bool:
    """Whether one of two layouts is the faster one, whatever the true costs in their ranges are.

    On one cluster the costs of a kind are wrong by the same factor for both layouts, so only the
    difference of their parts counts. On two clusters the errors are independent.
    """
    if a.cluster != b.cluster:
        return a.band_ns[1] < b.band_ns[0] or b.band_ns[1] < a.band_ns[0]
    ranges = {part.word: (part.low, part.high) for part in (*a.parts, *b.parts)}
    parts_a = {part.word: part.ns for part in a.parts}
    parts_b = {part.word: part.ns for part in b.parts}
    differences = {word: parts_a.get(word, 0) - parts_b.get(word, 0) for word in ranges}
    largest = sum(max(ns * factor for factor in ranges[word]) for word, ns in differences.items())
    smallest = sum(min(ns * factor for factor in ranges[word]) for word, ns in differences.items())
    return largest < 0 or smallest > 0


def _time_shares(step: StepTime) -> dict[str, float]:
    """The shares of a step, the largest first."""
    shares: dict[str, float] = defaultdict(float)
    for kind, ns in step.spent.items():
        shares[_share_key(kind)] += ns / step.makespan_ns
    present = [(word, share) for word, share in shares.items() if share]
    return dict(sorted(present, key=lambda item: (-item[1], item[0])))


def _share_key(kind: str) -> str:
    """The key of `LayoutResult.shares` for a category of time."""
    if kind in (MATRIX_PRODUCTS, MEMORY, LAUNCH, PIPELINE, *_MODEL_AXES):
        return kind
    return "norm" if kind in (NORM, "world") else "data"


__all__ = [
    "SLOW_REASON",
    "LayoutEvaluator",
    "LayoutResult",
    "StepTimePart",
    "is_order_certain",
    "step_time_parts",
]
