"""The fields of `deepspeed:`, by the names of DeepSpeed's configuration, and their checks.

Gradients of ZeRO 1 and 2 are all_reduced, not scattered, regardless of their owners
(use_multi_rank_bucket_allreduce), and allgather_bucket_size has no effect where torch has
all_gather_into_tensor: ZeRO 2 saves memory, not messages.

``DeepSpeedFields`` does not expand; see `distsim.scenario.strategies.deepspeed.strategy`.

Sources: DeepSpeed 0.19.8, `runtime/zero/config.py` (defaults), `stage_1_and_2.py`, `stage3.py`,
`partition_parameters.py`, `partitioned_param_coordinator.py`; recorded in
tests/support/wrapped_deepspeed.py. ZeRO++: Wang et al., arXiv:2306.10209.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, StrictBool, field_validator

from distsim.scenario.strategies.base import ExpansionContext, GroupRef, Refusal
from distsim.scenario.strategies.field_types import (
    AxesOrGroup,
    CostOrEntriesField,
    Dtype,
    IntByRank,
    NonNegativeInt,
    PositiveInt,
    ZeroStage,
)
from distsim.scenario.strategies.layers import LayeredModelStrategy

_ZERO_PLUS_PLUS_FIELDS = (
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
)


class DeepSpeedFields(LayeredModelStrategy):
    """The fields of `deepspeed:` and the checks of their layout."""

    name: ClassVar[str] = "deepspeed"
    about: ClassVar[str] = (
        "DeepSpeed ZeRO-1, ZeRO-2 and ZeRO-3 with gradient buckets and parameter "
        "prefetching, and ZeRO++."
    )

    stage: ZeroStage = Field(
        default=1,
        description=("ZeRO stage. 1 shards optimizer states, 2 also gradients, 3 also parameters."),
        examples=[3],
    )
    group: AxesOrGroup | None = Field(
        default=None, description="Data-parallel ranks [default: all ranks].", examples=["dp"]
    )
    reduce_bucket_size: PositiveInt = Field(
        default=500_000_000,
        description="Number of gradient elements to reduce at a time.",
        examples=[500000000],
    )
    overlap_comm: StrictBool | None = Field(
        default=None,
        description=(
            "Reduce gradients during the backward pass, on a separate stream [default: true "
            "with stage 3]."
        ),
        examples=[True],
    )
    reduce_scatter: StrictBool = Field(
        default=True,
        description=(
            "ZeRO 1 and 2: false reduces a gradient that is larger than a bucket in one call."
        ),
        examples=[False],
    )
    stage3_prefetch_bucket_size: NonNegativeInt = Field(
        default=50_000_000,
        description="Number of parameter elements to prefetch.",
        examples=[50000000],
    )
    stage3_max_reuse_distance: NonNegativeInt = Field(
        default=1_000_000_000,
        description="Keep a parameter gathered if it is used again within this many elements.",
        examples=[1000000000],
    )
    stage3_max_live_parameters: NonNegativeInt = Field(
        default=1_000_000_000,
        description="Maximum number of gathered parameter elements; limits the prefetch.",
        examples=[1000000000],
    )
    stage3_param_persistence_threshold: NonNegativeInt = Field(
        default=100_000,
        description="Keep parameters of at most this many elements gathered.",
        examples=[100000],
    )
    zero_hpz_partition_size: PositiveInt = Field(
        default=1,
        description=(
            "ZeRO++ hpZ: number of ranks that share a second copy of the parameters, for the "
            "backward pass."
        ),
        examples=[8],
    )
    zero_quantized_weights: StrictBool = Field(
        default=False,
        description="ZeRO++ qwZ: gather parameters as int8, with scales.",
        examples=[True],
    )
    zero_quantized_gradients: StrictBool = Field(
        default=False,
        description=(
            "ZeRO++ qgZ: send gradients with 4 bits, in two all_to_alls: within nodes, then "
            "between nodes."
        ),
        examples=[True],
    )
    accumulate: PositiveInt = Field(
        default=1, description="Gradient accumulation: micro-batches per iteration.", examples=[4]
    )
    optimizer: CostOrEntriesField | None = Field(
        default=None,
        description=(
            "Cost of the optimizer step: a time, `{flops, bytes}`, or entries that replace it."
        ),
        examples=["1 ms"],
    )
    skips_layer: IntByRank = Field(
        default={}, description="Ranks that skip one layer: `{RANK: LAYER}`.", examples=[{1: 0}]
    )
    dtype: Dtype = Field(
        default="float32",
        description="Dtype of parameters and messages.",
        examples=["bfloat16"],
    )

    @field_validator("dtype")
    @classmethod
    def _trained(cls, value: str) -> str:
        if value not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"DeepSpeed supports float32, bfloat16 and float16, found {value}")
        return value

    @property
    def overlaps(self) -> bool:
        """Whether gradients are reduced during the backward pass."""
        return self.stage == 3 if self.overlap_comm is None else self.overlap_comm

    @property
    def data_parallel_group(self) -> GroupRef | None:
        if self.group is None or isinstance(self.group, str):
            return self.group
        return tuple(self.group)

    # --- checks of the layout ---
    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        refusals = context.refuse_groups(group=self.group)
        if refusals:
            return refusals
        refusals = self._refuse_skips_layer(context)
        if context.size_of(self.data_parallel_group) == 1:
            text = "the group has a single rank: use a group with more ranks"
            refusals.append((("group",), text))
        if self.stage < 3:
            return [*refusals, *self._refuse_zero_plus_plus()]
        return [*refusals, *self._refuse_machines(context)]

    def _refuse_skips_layer(self, context: ExpansionContext) -> list[Refusal]:
        """Ranks and layers in `skips_layer` that do not exist."""
        ranks = range(context.world_size)
        layers = range(len(self.model))
        unknown = [
            rank
            for rank, layer in self.skips_layer.items()
            if rank not in ranks or layer not in layers
        ]
        refusals: list[Refusal] = []
        if unknown:
            text = f"layers are 0 to {len(self.model) - 1}, ranks 0 to {context.world_size - 1}"
            refusals.append((("skips_layer", unknown[0]), text))
        if self.skips_layer and len(self.model) == 1:
            refusals.append((("skips_layer",), "the only layer cannot be skipped"))
        return refusals

    def _refuse_zero_plus_plus(self) -> list[Refusal]:
        """Fields of ZeRO++ that are set below stage 3."""
        fields = type(self).model_fields
        text = f"ZeRO++ needs stage 3, found stage: {self.stage}"
        return [
            ((field,), text)
            for field in _ZERO_PLUS_PLUS_FIELDS
            if getattr(self, field) != fields[field].default
        ]

    def _refuse_machines(self, context: ExpansionContext) -> list[Refusal]:
        """ZeRO++'s fields that group ranks by node."""
        size = context.size_of(self.data_parallel_group)
        partition = self.zero_hpz_partition_size
        refusals: list[Refusal] = []
        if size % partition:
            text = f"the {size} ranks are not divisible by {partition}"
            refusals.append((("zero_hpz_partition_size",), text))
        if size == context.world_size:
            return refusals
        text = "DeepSpeed divides all ranks into nodes here: remove `group`"
        if self.zero_quantized_gradients:
            refusals.append((("zero_quantized_gradients",), text))
        elif partition > 1:
            refusals.append((("zero_hpz_partition_size",), text))
        return refusals
