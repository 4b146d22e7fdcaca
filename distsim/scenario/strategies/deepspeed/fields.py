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

from pydantic import StrictBool, field_validator

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

    stage: ZeroStage = 1
    #: The data-parallel ranks; default: all.
    group: AxesOrGroup | None = None
    #: Elements of gradients that are reduced at a time.
    reduce_bucket_size: PositiveInt = 500_000_000
    #: Gradients are reduced during the backward pass, on a stream of their own. Default: with
    #: stage 3.
    overlap_comm: StrictBool | None = None
    #: ZeRO 1 and 2: false reduces a bucket in one call, even if a gradient is larger than it.
    reduce_scatter: StrictBool = True
    stage3_prefetch_bucket_size: NonNegativeInt = 50_000_000
    stage3_max_reuse_distance: NonNegativeInt = 1_000_000_000
    stage3_max_live_parameters: NonNegativeInt = 1_000_000_000
    #: Parameters of at most this many elements stay gathered.
    stage3_param_persistence_threshold: NonNegativeInt = 100_000
    #: ZeRO++ hpZ: the number of ranks that share a second copy of the parameters, for the backward
    #: pass.
    zero_hpz_partition_size: PositiveInt = 1
    #: ZeRO++ qwZ: parameters are gathered as int8, with scales.
    zero_quantized_weights: StrictBool = False
    #: ZeRO++ qgZ: gradients are sent with 4 bits through two all_to_alls, inside the machines, then
    #: between them.
    zero_quantized_gradients: StrictBool = False
    accumulate: PositiveInt = 1
    optimizer: CostOrEntriesField | None = None
    #: Ranks that run all layers but one: {1: 0}.
    skips_layer: IntByRank = {}
    dtype: Dtype = "float32"

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
