"""Data parallelism of a pipeline's stages: fully_shard, and what it has in common with DDP.

``StageDataParallelWriter`` is the interface that a rank's writer calls at the actions of the
schedule. Under fully_shard no backward reduces: REDUCE_GRAD does, unit by unit, while nothing of
that stage is computed. Parameters stay gathered between micro-batches
(`reshard_after_forward=False`, as torchtitan sets it for pipelines: parallelize_llama.py). DDP is
in `distsim.scenario.strategies.pipeline.stage_ddp`.

Sources, torch 2.13: `torch/distributed/pipelining/stage.py` (backward_maybe_with_nosync,
perform_reduce_grad), `schedules.py` (_PipelineScheduleRuntime: UNSHARD, RESHARD, REDUCE_GRAD;
ScheduleGPipe and Schedule1F1B reduce after their last send), and
`fsdp/_fully_shard/_fsdp_param_group.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal, NamedTuple

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

#: The condition of gradients that are used in all iterations.
ALL_ITERATIONS = None
#: Units that are gathered ahead of the one that computes, under nccl.
_GATHERS_AHEAD = 2


class StageDataParallelFields(BaseModel):
    """``{style, group, params}``: how stages are replicated (ddp) or sharded (fsdp), and over which
    ranks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    style: Literal["ddp", "fsdp"]
    group: AxesOrGroup = "dp"
    #: The parameters of one stage, first to last, each a number of elements or a shape; under fsdp
    #: each is a unit of its own.
    params: ParamShapes
    dtype: Dtype = "float32"
    #: MixedPrecisionPolicy under fsdp: the dtypes of gathered parameters and reduced gradients.
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    #: DDP's; default: 25, and 1 for the first bucket.
    bucket_cap_mb: NonNegativeFloat | None = None
    #: DDP's construction, the single bucket of the first iteration and the rebuilding; false: the
    #: buckets of later iterations from the start.
    setup: StrictBool = True


class GradientTarget(NamedTuple):
    """Tensors to which a backward adds, and the condition of the iterations in which it does."""

    tensors: tuple[str, ...]
    condition: str | None


GradientTargets = tuple[GradientTarget, ...]


class StageDataParallelWriter(EntryWriter):
    """The entries of ``chunks`` stages on a rank, each with tensors of its own.

    The methods are called at the actions of the schedule; by default they write nothing.
    """

    def __init__(
        self, fields: StageDataParallelFields, context: ExpansionContext, prefix: str, chunks: int
    ) -> None:
        super().__init__(prefix, fields.dtype, fields.group)
        self.fields = fields
        self.ranks = context.size_of(fields.group)
        self.has_streams = context.has_streams
        for chunk in range(chunks):
            self.declare_tensors(chunk)

    @property
    def sharded(self) -> bool:
        return self.fields.style == "fsdp"

    def shares(self, numels: Sequence[int], cost: ComputeCost) -> list[ComputeCost]:
        """A stage's cost, divided in proportion to numbers of elements."""
        total = sum(prod(shape) for shape in self.fields.params)
        return [scaled_cost(cost, numel / total) for numel in numels]

    def declare_tensors(self, chunk: int) -> None:
        """Declare the tensors of a chunk."""

    def setup(self) -> list[Entry]:
        """Entries before everything else."""
        return []

    def before_first_forward(self, chunk: int) -> list[Entry]:
        """Entries before the first forward of an iteration."""
        return []

    def first_forward(self, chunk: int, cost: CostOrEntries) -> CostOrEntries:
        """The first forward of an iteration, if the schedule has no UNSHARD."""
        return cost

    def gradients(self, chunk: int) -> GradientTargets:
        """The gradients to which each backward adds."""
        return ()

    def last_backward(self, chunk: int, cost: CostOrEntries, fresh: bool) -> list[Entry]:
        """The last backward of an iteration, if it reduces."""
        return []

    def unshard(self, chunk: int) -> list[Entry]:
        """UNSHARD: start gathering the parameters."""
        return []

    def wait_unshard(self, chunk: int) -> list[Entry]:
        """The wait before the stage's next computation after UNSHARD."""
        return []

    def reduce(self, chunk: int) -> list[Entry]:
        """REDUCE_GRAD."""
        return []


class FsdpStageWriter(StageDataParallelWriter):
    """Stages under fully_shard. Tensors of chunk c are named as `<prefix>_grad_<c>_<unit>`."""

    def padded_numel(self, shape: tuple[int, ...]) -> int:
        """Elements of a parameter, with the padding of its first dimension."""
        rows = -(-shape[0] // self.ranks) * self.ranks
        return rows * prod(shape[1:])

    def declare_tensors(self, chunk: int) -> None:
        gathered = self.fields.param_dtype or self.fields.dtype
        reduced = self.fields.reduce_dtype or gathered
        for k, shape in enumerate(self.fields.params):
            padded = self.padded_numel(shape)
            part = padded // self.ranks
            self.tensor(f"grad_{chunk}_{k}", padded, reduced)
            self.tensor(f"shard_grad_{chunk}_{k}", part, reduced)
            self.tensor(f"shard_{chunk}_{k}", part, gathered)
            self.tensor(f"full_{chunk}_{k}", padded, gathered)

    def gradients(self, chunk: int) -> GradientTargets:
        names = tuple(f"{self.prefix}_grad_{chunk}_{k}" for k in range(len(self.fields.params)))
        return (GradientTarget(names, ALL_ITERATIONS),)

    # --- gathering ---
    def gather(self, chunk: int, k: int, blocking: bool = False) -> Entry:
        handle: dict[str, object] = {}
        if not blocking:
            handle = {"async_": True, "as_": f"{self.prefix}_gathered_{chunk}@{k}"}
        return self.call(
            "all_gather_into_tensor",
            input=f"{self.prefix}_shard_{chunk}_{k}",
            output=f"{self.prefix}_full_{chunk}_{k}",
            **handle,
        )

    def wait_gather(self, chunk: int, k: int) -> list[Entry]:
        return waits_for_copies(f"{self.prefix}_gathered_{chunk}", [k])

    def unshard(self, chunk: int) -> list[Entry]:
        """UNSHARD: every unit at once, `unshard(async_op=True)`."""
        return [self.gather(chunk, k) for k in range(len(self.fields.params))]

    def wait_unshard(self, chunk: int) -> list[Entry]:
        return waits_for_copies(f"{self.prefix}_gathered_{chunk}", range(len(self.fields.params)))

    def first_forward(self, chunk: int, cost: CostOrEntries) -> CostOrEntries:
        """A schedule without UNSHARD: units are gathered by their own hooks.

        Under nccl they are gathered two ahead of the one that computes (see
        `distsim.scenario.strategies.fsdp.hook_events`), otherwise each when it is needed.
        """
        count = len(self.fields.params)
        steps: list[Entry] = []
        if self.has_streams:
            steps += [self.gather(chunk, k) for k in range(min(_GATHERS_AHEAD, count))]
        for k in range(count):
            if self.has_streams:
                steps += self.wait_gather(chunk, k)
                if k + _GATHERS_AHEAD < count:
                    steps.append(self.gather(chunk, k + _GATHERS_AHEAD))
            else:
                steps.append(self.gather(chunk, k, blocking=True))
            if isinstance(cost, Mapping):
                steps.append(self.unit_forward(chunk, k, cost))
        return steps if isinstance(cost, Mapping) else [*steps, *cost]

    def unit_forward(self, chunk: int, k: int, cost: ComputeCost) -> Entry:
        (share,) = self.shares([prod(self.fields.params[k])], cost)
        return compute(f"forward of unit {k}", share, reads=[f"{self.prefix}_full_{chunk}_{k}"])

    # --- reduction ---
    def reduce(self, chunk: int) -> list[Entry]:
        """REDUCE_GRAD under fully_shard: every unit's post_backward.

        Then the compute stream waits (_root_post_backward_final_callback).
        """
        return [
            self.call(
                "reduce_scatter_tensor",
                input=f"{self.prefix}_grad_{chunk}_{k}",
                output=f"{self.prefix}_shard_grad_{chunk}_{k}",
                op="avg",
            )
            for k in range(len(self.fields.params))
        ]


def last_backward_micro_batches(schedule: PipelineSchedule, rank: int) -> dict[int, int]:
    """The micro-batch of each stage's last backward.

    It is the one that PyTorch counts as the last (backward_counter).
    """
    return {a.stage: a.micro_batch for a in compute_actions(schedule.rows[rank]) if a.kind in "BW"}
