"""Compute the usual figures of a training step: tokens/s/GPU, MFU, bubble, time shares.

Also the range of a predicted makespan.
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

#: How the names of a transformer's computes begin, and the kind that they count as.
_COMPUTE_KINDS = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("weight gradients", "backward"),
    ("scores", "attention scores"),
    ("optimizer", "optimizer"),
)
LAUNCH_KIND = "launches"


class TrainingMetrics(NamedTuple):
    """The figures of one step of a transformer, as means over the ranks.

    ``shares`` of the step add up to 1: computes by kind, `exposed communication` (during which
    nothing computes), and `bubble` (the rest: waiting, idle, launch-bound).

    ``mfu``: model FLOPs divided by the peak FLOPs of the devices' data sheets for the step's dtype.
    Model FLOPs are counted as by PaLM (arXiv:2204.02311, appendix B): three passes over every
    matrix and all attention scores, without recomputation.

    ``sequences`` are the sequences of a step, as (number, tokens of each).
    """

    step_ns: int
    sequences: tuple[tuple[int, int], ...]
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
    """The figures of a scenario that is a transformer's step and completes; otherwise None."""
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
    sequences = tuple(
        (_sequences_per_step(one, context), one.micro_batch_cost(context).sequence)
        for one, context in steps
    )
    tokens = sum(number * length for number, length in sequences)
    flops = sum(_model_flops(one, context) for one, context in steps)
    device, gpus = simulation.cost.cluster.device, simulation.program.world_size
    dtype = steps[0][0].dtype
    mfu = flops / (gpus * device.peak_flop_per_ns(dtype) * step_ns)
    return TrainingMetrics(
        step_ns,
        sequences,
        tokens,
        tokens / (step_ns / 1e9) / gpus,
        mfu,
        time_shares(simulation.run, simulation.timeline),
    )


def _sequences_per_step(one: Transformer, context: ExpansionContext) -> int:
    """The sequences of a step: those of each pipeline or replica, times their number."""
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
    """How the ranks spend the makespan, as shares; the largest computes first.

    Launches by the host count as bubble.
    """
    trace = (run.section or run).trace  # after folding, that of the representative ranks
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
    """The kind of a compute with this name; `forward attention` counts as forward, for example."""
    return next(
        (kind for start, kind in _COMPUTE_KINDS if name.startswith(start)), name or "compute"
    )


def makespan_range(cost: CostModel, program: Program, timeline: Timeline) -> tuple[int, int] | None:
    """(shortest, longest) ns if every cost on the critical path is at the end of its range.

    None if there is no range. Compute with a given duration counts as exact; compute given by FLOP
    and bytes has the range `COMPUTE_RANGE`.
    """
    if not cost.nccl or not timeline.critical_path or cost.cluster.measured:
        return None
    communication = communication_range(cost, program.world_size)
    compute = COMPUTE_RANGE if has_estimated_compute(program) else (1.0, 1.0)
    low, high = 0.0, 0.0
    for piece in timeline.critical_path:
        ns = piece.end_ns - piece.start_ns
        operation = OPERATIONS.get(piece.op)
        moves_data = operation is not None and operation.kind in ("collective", "p2p", "batch")
        below, above = communication if moves_data else compute
        low += ns * below
        high += ns * above
    return (int(low), int(high)) if high > low else None


def has_estimated_compute(program: Program) -> bool:
    """Whether some compute is given by FLOP or bytes instead of a duration."""
    for code in program.codes:
        for call in code.calls:
            if any(call.fields.get(name) for name in ("flops", "mem_bytes", "work")):
                return True
    return False


__all__ = [
    "TrainingMetrics",
    "compute_kind",
    "has_estimated_compute",
    "makespan_range",
    "time_shares",
    "training_metrics",
]
