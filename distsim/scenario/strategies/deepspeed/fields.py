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
        "DeepSpeed's ZeRO 1 to 3 with its buckets, prefetching and kept parameters, and ZeRO++."
    )

    stage: ZeroStage = Field(
        default=1,
        description=(
            "ZeRO's stage: 1 shards the optimizer's states, 2 gradients too, 3 parameters too."
        ),
        examples=[3],
    )
    #: The data-parallel ranks; default: all.
    group: AxesOrGroup | None = Field(
        default=None, description="The data-parallel ranks; left out, all.", examples=["dp"]
    )
    #: Elements of gradients that are reduced at a time.
    reduce_bucket_size: PositiveInt = Field(
        default=500_000_000,
        description="Elements of gradients that are reduced at a time.",
        examples=[500000000],
    )
    #: Gradients are reduced during the backward pass, on a stream of their own. Default: with
    #: stage 3.
    overlap_comm: StrictBool | None = Field(
        default=None,
        description="Reduce gradients beside the backward pass; left out, with stage 3.",
        examples=[True],
    )
    #: ZeRO 1 and 2: false reduces a bucket in one call, even if a gradient is larger than it.
    reduce_scatter: StrictBool = Field(
        default=True,
        description="false: a gradient larger than a bucket goes in one call (ZeRO 1 and 2).",
        examples=[False],
    )
    stage3_prefetch_bucket_size: NonNegativeInt = Field(
        default=50_000_000,
        description="Elements of parameters that are gathered ahead of their use.",
        examples=[50000000],
    )
    stage3_max_reuse_distance: NonNegativeInt = Field(
        default=1_000_000_000,
        description="Parameters used again within so many elements stay gathered.",
        examples=[1000000000],
    )
    stage3_max_live_parameters: NonNegativeInt = Field(
        default=1_000_000_000,
        description="Elements of parameters that are gathered at most, ahead of their use.",
        examples=[1000000000],
    )
    #: Parameters of at most this many elements stay gathered.
    stage3_param_persistence_threshold: NonNegativeInt = Field(
        default=100_000,
        description="Parameters of at most so many elements stay gathered.",
        examples=[100000],
    )
    #: ZeRO++ hpZ: the number of ranks that share a second copy of the parameters, for the backward
    #: pass.
    zero_hpz_partition_size: PositiveInt = Field(
        default=1,
        description="ZeRO++ hpZ: ranks that keep a second copy of the parameters among them.",
        examples=[8],
    )
    #: ZeRO++ qwZ: parameters are gathered as int8, with scales.
    zero_quantized_weights: StrictBool = Field(
        default=False,
        description="ZeRO++ qwZ: gather parameters as int8, with scales.",
        examples=[True],
    )
    #: ZeRO++ qgZ: gradients are sent with 4 bits through two all_to_alls, inside the machines, then
    #: between them.
    zero_quantized_gradients: StrictBool = Field(
        default=False,
        description=(
            "ZeRO++ qgZ: gradients as 4 bits, through all_to_alls inside and between machines."
        ),
        examples=[True],
    )
    accumulate: PositiveInt = Field(
        default=1, description="Micro-batches of an iteration.", examples=[4]
    )
    optimizer: CostOrEntriesField | None = Field(
        default=None,
        description=(
            "What the update takes: a time, `{flops, bytes}`, or the entries that stand for it."
        ),
        examples=["1 ms"],
    )
    #: Ranks that run all layers but one: {1: 0}.
    skips_layer: IntByRank = Field(
        default={}, description="Ranks that run all layers but one.", examples=[{1: 0}]
    )
    dtype: Dtype = Field(
        default="float32",
        description="What is sent, and what parameters are held in.",
        examples=["bfloat16"],
    )

    @field_validator("dtype")
    @classmethod
    def _trained(cls, value: str) -> str:
        if value not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"DeepSpeed trains in float32, bfloat16 or float16, found {value}")
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
            text = "one rank has nobody to share with: give the group more ranks"
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
            refusals.append((("skips_layer",), "the only layer can't be left out"))
        return refusals

    def _refuse_zero_plus_plus(self) -> list[Refusal]:
        """Fields of ZeRO++ that are set below stage 3."""
        fields = type(self).model_fields
        text = f"ZeRO++ belongs to stage 3, found stage: {self.stage}"
        return [
            ((field,), text)
            for field in _ZERO_PLUS_PLUS_FIELDS
            if getattr(self, field) != fields[field].default
        ]

    def _refuse_machines(self, context: ExpansionContext) -> list[Refusal]:
        """ZeRO++'s fields that group ranks by machine."""
        size = context.size_of(self.data_parallel_group)
        partition = self.zero_hpz_partition_size
        refusals: list[Refusal] = []
        if size % partition:
            text = f"{partition} does not divide the {size} ranks"
            refusals.append((("zero_hpz_partition_size",), text))
        if size == context.world_size:
            return refusals
        text = "DeepSpeed cuts all ranks into machines here: leave `group` out"
        if self.zero_quantized_gradients:
            refusals.append((("zero_quantized_gradients",), text))
        elif partition > 1:
            refusals.append((("zero_hpz_partition_size",), text))
        return refusals
