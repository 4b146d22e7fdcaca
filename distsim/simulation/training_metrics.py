"""The figures that people look for first: tokens a second and GPU, MFU, the bubble, what a step
goes into; and a makespan's band.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distsim.analysis.timeline import Timeline
from distsim.engine.run_record import SimulatedRun
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.prediction_range import COMPUTE_RANGE, communication_range
from distsim.operations.registry import COMPUTE_OPS, OPERATIONS
from distsim.program.model import Program
from distsim.scenario.format.reading.strategy_expansion import validated_strategies
from distsim.scenario.strategies.base import ExpansionContext
from distsim.simulation.simulate_scenario import Simulation

if TYPE_CHECKING:
    from distsim.scenario.strategies.training_step.transformer import Transformer

#: How computes of a transformer begin, and what they count as.
_COMPUTE_KINDS = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("weight gradients", "backward"),
    ("scores", "attention scores"),
    ("optimizer", "optimizer"),
)
LAUNCH_KIND = "launches"


class TrainingMetrics(NamedTuple):
    """Of one step of a transformer, the mean over ranks. ``shares`` of the step add up to 1:
    computes by kind, `exposed communication` (beside which nothing computes), `bubble` (the rest:
    waiting, idle, behind the host).

    ``mfu``: model FLOPs, as PaLM counts them (arXiv:2204.02311, appendix B: three passes over every
    matrix and all scores, nothing recomputed), over what the devices' data sheets say for the
    step's dtype.
    """

    step_ns: int
    tokens: int
    tokens_s_gpu: float
    mfu: float
    shares: dict[str, float]

    @property
    def bubble(self) -> float:
        return self.shares.get("bubble", 0.0)

    @property
    def exposed(self) -> float:
        return self.shares.get("exposed communication", 0.0)


def training_metrics(simulation: Simulation) -> TrainingMetrics | None:
    """Of a scenario that is a transformer's step and completes; else None."""
    if simulation.outcome != "completes" or not simulation.makespan_ns:
        return None
    made_of = validated_strategies(simulation.scenario.written)
    if not made_of:
        return None
    from distsim.scenario.strategies.training_step.transformer import Transformer

    steps = [(made, context) for made, context in made_of if isinstance(made, Transformer)]
    if not steps:
        return None
    step_ns = simulation.iteration_ns or simulation.makespan_ns
    tokens = sum(
        _sequences_per_step(one, context) * one.one_pass(context).sequence for one, context in steps
    )
    flops = sum(_model_flops(one, context) for one, context in steps)
    device, gpus = simulation.cost.cluster.device, simulation.program.world_size
    dtype = steps[0][0].dtype
    mfu = flops / (gpus * device.peak_flop_per_ns(dtype) * step_ns)
    return TrainingMetrics(
        step_ns,
        tokens,
        tokens / (step_ns / 1e9) / gpus,
        mfu,
        time_shares(simulation.run, simulation.timeline),
    )


def _sequences_per_step(one: Transformer, context: ExpansionContext) -> int:
    """Of a step: what each pipeline or replica takes, times their number."""
    inside = (
        one.axis_size("tensor", context)
        * one.axis_size("pipeline", context)
        * one.axis_size("context", context)
    )
    return one.micro_batch * one.micro_batches * (context.world_size // inside)


def _model_flops(one: Transformer, context: ExpansionContext) -> int:
    from distsim.scenario.strategies.training_step.micro_batch_cost import (
        MicroBatchCost,
        step_flops,
    )

    model = one.model.architecture()
    return step_flops(
        MicroBatchCost(model, 1, one.sequence or model.sequence), _sequences_per_step(one, context)
    )


def time_shares(run: SimulatedRun, timeline: Timeline) -> dict[str, float]:
    """What the ranks' time goes into: shares of the makespan, the largest computes first. What the
    host launches is in the bubble.
    """
    trace = (run.section or run).trace  # of ranks that do the same, one
    alike = None if run.section is None else run.section.program.representative_of
    whole = timeline.makespan_ns * max(len(timeline.ranks), 1)
    ran = trace.ops(*COMPUTE_OPS) & (trace["started_ns"] >= 0) & (trace["finished_ns"] >= 0)
    took = np.where(ran, trace["finished_ns"] - trace["started_ns"], 0)
    if alike is not None:
        took = took * np.bincount(alike)[trace["rank"]]
    names = trace["name"][ran]
    found: dict[str, float] = {}
    if len(names):
        sums = np.bincount(names + 1, weights=took[ran].astype(np.float64))
        for number in np.flatnonzero(sums).tolist():
            word = compute_kind(str(trace.text("name", number - 1)))
            if word != LAUNCH_KIND:
                found[word] = found.get(word, 0.0) + float(sums[number]) / whole
    found = dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
    exposed = sum(rank.exposed_comm_ns for rank in timeline.ranks) / whole
    return {
        **found,
        "exposed communication": exposed,
        "bubble": max(1.0 - sum(found.values()) - exposed, 0.0),
    }


def compute_kind(name: str) -> str:
    """What a compute of this name counts as: `forward attention` as forward."""
    return next(
        (kind for start, kind in _COMPUTE_KINDS if name.startswith(start)), name or "compute"
    )


def makespan_range(cost: CostModel, program: Program, timeline: Timeline) -> tuple[int, int] | None:
    """(shortest, longest) ns if every price on the critical path is at the end of its band; None
    where there is no band.

    Compute by a given time counts as known; by FLOP and bytes it has the band of
    `COMPUTE_RANGE`.
    """
    if not cost.nccl or not timeline.critical_path or cost.cluster.measured:
        return None
    calls = communication_range(cost, program.world_size)
    priced = any(
        call.fields.get("flops") or call.fields.get("mem_bytes")
        for code in program.codes
        for call in code.calls
    )
    low, high = 0.0, 0.0
    for piece in timeline.critical_path:
        ns = piece.end_ns - piece.start_ns
        row = OPERATIONS.get(piece.op)
        moves = row is not None and row.kind in ("collective", "p2p", "batch")
        below, above = calls if moves else COMPUTE_RANGE if priced else (1.0, 1.0)
        low, high = low + ns * below, high + ns * above
    return (int(low), int(high)) if high > low else None


__all__ = ["TrainingMetrics", "training_metrics", "compute_kind", "makespan_range", "time_shares"]
