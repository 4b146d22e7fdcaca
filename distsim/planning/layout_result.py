"""What comes of one layout: its time, band and shares, what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from distsim.hardware.cost import CostModel
from distsim.hardware.cost.prediction_range import COMPUTE_RANGE, communication_range
from distsim.planning.estimate import NORM, PIPELINE, EstimateCache, StepEstimator, StepTime
from distsim.planning.layouts import ParallelLayout, PlanRequest, RejectedLayout
from distsim.planning.pipeline_timer import PipelineHang
from distsim.planning.rank_timer import LAUNCH, MATRIX_PRODUCTS, MEMORY, EntryPrices

#: Words of `LayoutResult.shares` for what a step's time goes into: matrix products; what memory's
#: bandwidth bounds; the host's launches; waiting for other stages; exposed communication by axis
#: (`data`: gradients and parameters among replicas).
_MODEL_AXES = ("tp", "cp", "ep")


class StepTimePart(NamedTuple):
    """What of a step goes into one kind of price, and that price's band."""

    word: str
    ns: int
    low: float
    high: float


class LayoutResult(NamedTuple):
    """A layout that was timed. ``shares`` of the step add up to 1, the mean over ranks; ``parts``
    are those without the waiting, each grown by its part of it. ``held_nbytes``: the fullest rank's
    peak. ``timed``: `alone`, each transfer and kernel by itself, which may be a few percent short;
    `exact`, as a simulation does; `short`, as the first, and too large to be simulated beside
    others."""

    layout: ParallelLayout
    cluster: str
    step_ns: int
    parts: tuple[StepTimePart, ...]
    shares: dict[str, float]
    held_nbytes: int
    memory: float  # share of the device's
    tokens_s_gpu: float
    mfu: float
    timed: str = "alone"

    @property
    def band_ns(self) -> tuple[int, int]:
        """If all prices err alike: the shortest and the longest step."""
        return round(sum(p.ns * p.low for p in self.parts)), round(
            sum(p.ns * p.high for p in self.parts)
        )

    def taking(self, step_ns: int) -> LayoutResult:
        """The same with a step of another length, of which all has its share."""
        more = step_ns / self.step_ns
        parts = tuple(part._replace(ns=round(part.ns * more)) for part in self.parts)
        return self._replace(
            step_ns=step_ns, parts=parts, tokens_s_gpu=self.tokens_s_gpu / more, mfu=self.mfu / more
        )

    @property
    def bubble(self) -> float:
        return self.shares.get(PIPELINE, 0.0)

    @property
    def exposed(self) -> float:
        """Communication beside which nothing computes; messages between stages are in the
        bubble.
        """
        return sum(
            share
            for word, share in self.shares.items()
            if word not in (MATRIX_PRODUCTS, MEMORY, LAUNCH, PIPELINE)
        )

    @property
    def bound(self) -> str:
        """What most of the step goes into."""
        return max(self.shares, key=lambda word: self.shares[word])


class LayoutEvaluator:
    """Prices on one cluster, shared by the layouts of a question."""

    def __init__(self, question: PlanRequest) -> None:
        self.question = question
        self.cost = CostModel(question.cluster, question.gpus, question.node)
        self.cache: EstimateCache = {}
        self.schedules: EstimateCache = {}
        banded = self.cost.nccl and not question.cluster.measured
        self.bands = (
            (COMPUTE_RANGE, communication_range(self.cost, question.gpus))
            if banded
            else ((1.0, 1.0), (1.0, 1.0))
        )
        self._steps: dict[object, StepTime] = {}

    def outcome(self, layout: ParallelLayout) -> LayoutResult | RejectedLayout:
        """A layout timed, or why it is left out: what it holds does not fit, or it hangs."""
        question, room = self.question, self.question.cluster.device.memory_nbytes
        timed = self.timed(layout)
        held = max(timed.held())
        if held > room:
            return RejectedLayout(
                layout,
                f"it does not fit: a rank holds {-(-100 * held // room)} % of the device's memory",
            )
        try:
            step = self.step(layout, timed)
        except PipelineHang as stuck:
            return RejectedLayout(
                layout, f"it hangs: stages {', '.join(map(str, stuck.ranks))} wait for each other"
            )
        seconds, shares = step.makespan_ns / 1e9, _time_shares(step)
        peak = question.cluster.device.peak_flop_per_ns(question.base.dtype)
        return LayoutResult(
            layout,
            question.cluster.name,
            step.makespan_ns,
            step_time_parts(step.makespan_ns, shares, self.bands),
            shares,
            held,
            held / room,
            question.global_batch * question.tokens / seconds / layout.gpus,
            question.flops / (layout.gpus * peak * step.makespan_ns),
        )

    def timed(
        self, layout: ParallelLayout, factors: tuple[float, float] = (1.0, 1.0)
    ) -> StepEstimator:
        prices, plain = EntryPrices(self.cost, layout.mesh, factors), factors == (1.0, 1.0)
        cache = self.cache if plain else {}
        return StepEstimator(
            self.question.fields(layout),
            self.question.context(layout),
            prices,
            cache,
            self.schedules,
        )

    def step(self, layout: ParallelLayout, timed: StepEstimator) -> StepTime:
        """The step; layouts that differ only in what they hold (ZeRO 1 and 2) share it."""
        key = layout._replace(zero=1) if layout.zero == 2 else layout
        if key not in self._steps:
            self._steps[key] = timed.step()
        return self._steps[key]


def step_time_parts(
    step_ns: int,
    shares: Mapping[str, float],
    bands: tuple[tuple[float, float], tuple[float, float]],
) -> tuple[StepTimePart, ...]:
    """A step as what it goes into, each with the band of its price. ``bands``: of what computes,
    and of what communicates.

    What a rank waits for other stages is dealt out over the others: they do the same.
    """
    scale = step_ns / max(1.0 - shares.get(PIPELINE, 0.0), 1e-9)
    found = []
    for word, share in shares.items():
        if word != PIPELINE:
            band = (
                bands[0]
                if word in (MATRIX_PRODUCTS, MEMORY)
                else (1.0, 1.0)
                if word == LAUNCH
                else bands[1]
            )
            found.append(StepTimePart(word, round(scale * share), *band))
    return tuple(found)


def is_order_certain(a: LayoutResult, b: LayoutResult) -> bool:
    """Does one of two layouts stay the faster, wherever in their bands the prices are?

    On one cluster a price errs alike for both, and each kind of price by itself; on two, both err
    by themselves.
    """
    if a.cluster != b.cluster:
        return a.band_ns[1] < b.band_ns[0] or b.band_ns[1] < a.band_ns[0]
    bands = {part.word: (part.low, part.high) for part in (*a.parts, *b.parts)}
    ours, theirs = ({part.word: part.ns for part in one.parts} for one in (a, b))
    more = {word: ours.get(word, 0) - theirs.get(word, 0) for word in bands}
    most = sum(max(n * factor for factor in bands[word]) for word, n in more.items())
    least = sum(min(n * factor for factor in bands[word]) for word, n in more.items())
    return most < 0 or least > 0


def _time_shares(step: StepTime) -> dict[str, float]:
    """Shares of a step by what they go into, the largest first."""
    found: dict[str, float] = {}
    for kind, ns in step.spent.items():
        word = (
            kind
            if kind in (MATRIX_PRODUCTS, MEMORY, LAUNCH, PIPELINE, *_MODEL_AXES)
            else "norm"
            if kind in (NORM, "world")
            else "data"
        )
        found[word] = found.get(word, 0.0) + ns / step.makespan_ns
    return dict(
        sorted(((w, s) for w, s in found.items() if s), key=lambda item: (-item[1], item[0]))
    )


__all__ = ["LayoutResult", "LayoutEvaluator", "StepTimePart", "is_order_certain", "step_time_parts"]
