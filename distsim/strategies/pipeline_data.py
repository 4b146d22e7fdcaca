"""Data parallelism of a pipeline's stages: when torch.distributed.pipelining gathers parameters and reduces gradients.

Sources, torch 2.13: `torch/distributed/pipelining/stage.py` (backward_maybe_with_nosync, perform_reduce_grad), `schedules.py`
(_PipelineScheduleRuntime: UNSHARD, RESHARD, REDUCE_GRAD; ScheduleGPipe and Schedule1F1B reduce after their last send), and
`fsdp/_fully_shard/_fsdp_param_group.py`. Under fully_shard no backward reduces: REDUCE_GRAD does, unit by unit, with nothing of that
stage beside it. Parameters stay gathered between micro-batches (`reshard_after_forward=False`, as torchtitan sets it for pipelines:
parallelize_llama.py). DDP is `distsim.strategies.pipeline_ddp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, StrictBool

from distsim.strategies.base import Context, Entry, compute, step
from distsim.strategies.fields import Amount, Axes, Dtype, Params
from distsim.strategies.pipeline_actions import Schedule, computes
from distsim.strategies.prices import scaled


class DataFields(BaseModel):
    """``{style, group, params}``: how stages are replicated (ddp) or sharded (fsdp), and over which ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    style: Literal["ddp", "fsdp"]
    group: Axes = "dp"
    #: The parameters of one stage, first to last, each an element count or a shape; under fsdp each is a unit of its own.
    params: Params
    dtype: Dtype = "float32"
    #: MixedPrecisionPolicy under fsdp: what is gathered, what is reduced.
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    #: DDP's; left out: 25, and 1 for the first bucket.
    bucket_cap_mb: Amount | None = None
    #: DDP's construction, its first iteration's single bucket and the rebuilding; false: the buckets of later iterations from the start.
    setup: StrictBool = True


#: Tensors that a backward adds to, and in which iterations: a selector, or None for all.
Sums = tuple[tuple[tuple[str, ...], str | None], ...]


class DataWriter:
    """What both styles have in common: ``chunks`` stages a rank, each with tensors of its own."""

    def __init__(self, fields: DataFields, context: Context, prefix: str, chunks: int) -> None:
        self.f, self.p = fields, prefix
        self.n, self.free = context.size_of(fields.group), context.backend == "nccl"
        self.group = list(fields.group) if isinstance(fields.group, tuple) else fields.group
        self.tensors = {name: spec for c in range(chunks) for name, spec in self.declared(c).items()}

    @property
    def sharded(self) -> bool:
        return self.f.style == "fsdp"

    def shares(self, numels: Sequence[int], price: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A stage's price in parts, as the elements of what each is for."""
        total = sum(prod(shape) for shape in self.f.params)
        return [scaled(price, numel / total) for numel in numels]

    def declared(self, c: int) -> dict[str, Any]:
        return {}

    def setup(self, chunks: int) -> list[Entry]:
        """Before everything else."""
        return []

    def before_first_forward(self, c: int) -> list[Entry]:
        """Of an iteration."""
        return []

    def first_forward(self, c: int, price: Any) -> Any:
        return price

    def gradients(self, c: int) -> Sums:
        return ()

    def last_backward(self, c: int, price: Any, fresh: bool) -> list[Entry]:
        return []

    def unshard(self, c: int) -> list[Entry]:
        return []

    def unsharded(self, c: int) -> list[Entry]:
        return []

    def reduce(self, c: int) -> list[Entry]:
        return []


class ShardedStages(DataWriter):
    """Stages under fully_shard. Chunk c of a rank has `<prefix>_grad_<c>_<unit>` and the like."""

    def units(self) -> list[tuple[int, int]]:
        """Each parameter: its elements, and with those that pad its first axis."""
        return [(prod(shape), -(-shape[0] // self.n) * self.n * prod(shape[1:])) for shape in self.f.params]

    def declared(self, c: int) -> dict[str, Any]:
        gathered = self.f.param_dtype or self.f.dtype
        reduced = self.f.reduce_dtype or gathered
        found: dict[str, Any] = {}
        for k, (_, padded) in enumerate(self.units()):
            found |= {
                f"{self.p}_grad_{c}_{k}": {"shape": [padded], "dtype": reduced},
                f"{self.p}_shard_grad_{c}_{k}": {"shape": [padded // self.n], "dtype": reduced},
                f"{self.p}_shard_{c}_{k}": {"shape": [padded // self.n], "dtype": gathered},
                f"{self.p}_full_{c}_{k}": {"shape": [padded], "dtype": gathered},
            }
        return found

    def gradients(self, c: int) -> Sums:
        return ((tuple(f"{self.p}_grad_{c}_{k}" for k in range(len(self.f.params))), None),)

    # --- what the schedule's actions do ---
    def gather(self, c: int, k: int, waits: bool = False) -> Entry:
        fields = {"input": f"{self.p}_shard_{c}_{k}", "output": f"{self.p}_full_{c}_{k}", "group": self.group}
        handle = {} if waits else {"async_": True, "as_": f"{self.p}_gathered_{c}@{k}"}
        return step("all_gather_into_tensor", None, **fields, **handle)

    def gathered(self, c: int, k: int) -> Entry:
        return {"wait": f"{self.p}_gathered_{c}@{k}"}

    def unshard(self, c: int) -> list[Entry]:
        """UNSHARD: every unit at once, `unshard(async_op=True)`."""
        return [self.gather(c, k) for k in range(len(self.f.params))]

    def unsharded(self, c: int) -> list[Entry]:
        """The wait before the stage's next compute."""
        return [self.gathered(c, k) for k in range(len(self.f.params))]

    def first_forward(self, c: int, price: Any) -> Any:
        """A schedule without UNSHARD: units are gathered by their own hooks, under nccl two ahead of the one that computes (see
        `distsim.strategies.fsdp_steps`), else each when it is needed."""
        count = len(self.f.params)
        found = [self.gather(c, k) for k in range(min(2, count))] if self.free else []
        parts = self.shares([numel for numel, _ in self.units()], price) if isinstance(price, Mapping) else None
        for k in range(count):
            found.append(self.gathered(c, k) if self.free else self.gather(c, k, waits=True))
            found += [self.gather(c, k + 2)] if self.free and k + 2 < count else []
            if parts is not None:
                found.append(compute(f"forward of unit {k}", parts[k], reads=[f"{self.p}_full_{c}_{k}"]))
        return found if parts is not None else [*found, *price]

    def reduce(self, c: int) -> list[Entry]:
        """REDUCE_GRAD under fully_shard: every unit's post_backward, then the compute stream waits (_root_post_backward_final_callback)."""
        return [
            step(
                "reduce_scatter_tensor",
                input=f"{self.p}_grad_{c}_{k}",
                output=f"{self.p}_shard_grad_{c}_{k}",
                op="avg",
                group=self.group,
            )
            for k in range(len(self.f.params))
        ]


def last_of(schedule: Schedule, rank: int, stage: int) -> int:
    """The micro-batch of a stage's last backward, the one that PyTorch counts as the last (backward_counter)."""
    return [a.micro_batch for a in computes(schedule.rows[rank]) if a.stage == stage and a.kind in "BW"][-1]


__all__ = ["DataFields", "DataWriter", "ShardedStages", "Sums", "last_of"]
