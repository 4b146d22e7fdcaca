"""Data parallelism of a pipeline's stages: when torch.distributed.pipelining gathers parameters and
reduces gradients.

Sources, torch 2.13: `torch/distributed/pipelining/stage.py` (backward_maybe_with_nosync,
perform_reduce_grad), `schedules.py` (_PipelineScheduleRuntime: UNSHARD, RESHARD, REDUCE_GRAD;
ScheduleGPipe and Schedule1F1B reduce after their last send), and
`fsdp/_fully_shard/_fsdp_param_group.py`. Under fully_shard no backward reduces: REDUCE_GRAD does,
unit by unit, with nothing of that stage beside it. Parameters stay gathered between micro-batches
(`reshard_after_forward=False`, as torchtitan sets it for pipelines: parallelize_llama.py). DDP is
`distsim.scenario.strategies.pipeline.stage_ddp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal

from pydantic import BaseModel, ConfigDict, StrictBool

from distsim.scenario.strategies.base import (
    ComputeCost,
    CostOrEntries,
    Entry,
    EntryWriter,
    ExpansionContext,
    compute,
    waits_for_copies,
)
from distsim.scenario.strategies.field_types import (
    AxesOrGroup,
    Dtype,
    NonNegativeFloat,
    ParamShapes,
)
from distsim.scenario.strategies.layers import scaled_cost
from distsim.scenario.strategies.pipeline.actions import PipelineSchedule, compute_actions


class StageDataParallelFields(BaseModel):
    """``{style, group, params}``: how stages are replicated (ddp) or sharded (fsdp), and over which
    ranks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    style: Literal["ddp", "fsdp"]
    group: AxesOrGroup = "dp"
    #: The parameters of one stage, first to last, each an element count or a shape; under fsdp each
    #: is a unit of its own.
    params: ParamShapes
    dtype: Dtype = "float32"
    #: MixedPrecisionPolicy under fsdp: what is gathered, what is reduced.
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    #: DDP's; left out: 25, and 1 for the first bucket.
    bucket_cap_mb: NonNegativeFloat | None = None
    #: DDP's construction, its first iteration's single bucket and the rebuilding; false: the
    #: buckets of later iterations from the start.
    setup: StrictBool = True


#: Tensors that a backward adds to, and in which iterations: a selector, or None for all.
GradientTargets = tuple[tuple[tuple[str, ...], str | None], ...]


class StageDataParallelWriter(EntryWriter):
    """What both styles have in common: ``chunks`` stages a rank, each with tensors of its own."""

    def __init__(
        self, fields: StageDataParallelFields, context: ExpansionContext, prefix: str, chunks: int
    ) -> None:
        super().__init__(prefix, fields.dtype, fields.group)
        self.f, self.n, self.free = fields, context.size_of(fields.group), context.backend == "nccl"
        for c in range(chunks):
            self.declare(c)

    @property
    def sharded(self) -> bool:
        return self.f.style == "fsdp"

    def shares(self, numels: Sequence[int], price: ComputeCost) -> list[ComputeCost]:
        """A stage's price in parts, as the elements of what each is for."""
        total = sum(prod(shape) for shape in self.f.params)
        return [scaled_cost(price, numel / total) for numel in numels]

    def declare(self, c: int) -> None:
        """The tensors of a chunk."""

    def setup(self) -> list[Entry]:
        """Before everything else."""
        return []

    def before_first_forward(self, c: int) -> list[Entry]:
        """Of an iteration."""
        return []

    def first_forward(self, c: int, cost: CostOrEntries) -> CostOrEntries:
        return cost

    def gradients(self, c: int) -> GradientTargets:
        return ()

    def last_backward(self, c: int, cost: CostOrEntries, fresh: bool) -> list[Entry]:
        return []

    def unshard(self, c: int) -> list[Entry]:
        return []

    def unsharded(self, c: int) -> list[Entry]:
        return []

    def reduce(self, c: int) -> list[Entry]:
        return []


class FsdpStageWriter(StageDataParallelWriter):
    """Stages under fully_shard. Chunk c of a rank has `<prefix>_grad_<c>_<unit>` and the like."""

    def units(self) -> list[tuple[int, int]]:
        """Each parameter: its elements, and with those that pad its first axis."""
        return [
            (prod(shape), -(-shape[0] // self.n) * self.n * prod(shape[1:]))
            for shape in self.f.params
        ]

    def declare(self, c: int) -> None:
        gathered = self.f.param_dtype or self.f.dtype
        reduced = self.f.reduce_dtype or gathered
        for k, (_, padded) in enumerate(self.units()):
            part = padded // self.n
            for word, numel, dtype in (
                ("grad", padded, reduced),
                ("shard_grad", part, reduced),
                ("shard", part, gathered),
                ("full", padded, gathered),
            ):
                self.tensor(f"{word}_{c}_{k}", numel, dtype)

    def gradients(self, c: int) -> GradientTargets:
        return ((tuple(f"{self.prefix}_grad_{c}_{k}" for k in range(len(self.f.params))), None),)

    # --- what the schedule's actions do ---
    def gather(self, c: int, k: int, waited: bool = False) -> Entry:
        handle = {} if waited else {"async_": True, "as_": f"{self.prefix}_gathered_{c}@{k}"}
        return self.call(
            "all_gather_into_tensor",
            input=f"{self.prefix}_shard_{c}_{k}",
            output=f"{self.prefix}_full_{c}_{k}",
            **handle,
        )

    def unshard(self, c: int) -> list[Entry]:
        """UNSHARD: every unit at once, `unshard(async_op=True)`."""
        return [self.gather(c, k) for k in range(len(self.f.params))]

    def unsharded(self, c: int) -> list[Entry]:
        """The wait before the stage's next compute."""
        return waits_for_copies(f"{self.prefix}_gathered_{c}", range(len(self.f.params)))

    def first_forward(self, c: int, cost: CostOrEntries) -> CostOrEntries:
        """A schedule without UNSHARD: units are gathered by their own hooks, under nccl two ahead
        of the one that computes (see `distsim.scenario.strategies.fsdp.hook_events`), else each
        when it is needed."""
        count = len(self.f.params)
        found = [self.gather(c, k) for k in range(min(2, count))] if self.free else []
        parts = (
            self.shares([numel for numel, _ in self.units()], cost)
            if isinstance(cost, Mapping)
            else None
        )
        for k in range(count):
            found += (
                waits_for_copies(f"{self.prefix}_gathered_{c}", [k])
                if self.free
                else [self.gather(c, k, waited=True)]
            )
            found += [self.gather(c, k + 2)] if self.free and k + 2 < count else []
            if parts is not None:
                found.append(
                    compute(f"forward of unit {k}", parts[k], reads=[f"{self.prefix}_full_{c}_{k}"])
                )
        return found if isinstance(cost, Mapping) else [*found, *cost]

    def reduce(self, c: int) -> list[Entry]:
        """REDUCE_GRAD under fully_shard: every unit's post_backward, then the compute stream waits
        (_root_post_backward_final_callback).
        """
        units = [
            (f"{self.prefix}_grad_{c}_{k}", f"{self.prefix}_shard_grad_{c}_{k}")
            for k in range(len(self.f.params))
        ]
        return [
            self.call("reduce_scatter_tensor", input=whole, output=part, op="avg")
            for whole, part in units
        ]


def last_backward_micro_batches(schedule: PipelineSchedule, rank: int) -> dict[int, int]:
    """The micro-batch of each stage's last backward, the one that PyTorch counts as the last
    (backward_counter).
    """
    return {a.stage: a.micro_batch for a in compute_actions(schedule.rows[rank]) if a.kind in "BW"}
