"""DeepSpeed's ZeRO 1, 2 and 3 and ZeRO++: fields of `deepspeed:`, by the names of its
configuration, and what they refuse.

Source: DeepSpeed 0.19.8, `runtime/zero/config.py` (defaults), `stage_1_and_2.py`, `stage3.py`,
`partition_parameters.py`, `partitioned_param_coordinator.py`; recorded in
tests/support/wrapped_deepspeed.py. ZeRO++: Wang et al., arXiv:2306.10209.

Gradients of ZeRO 1 and 2 are all_reduced, not scattered, however they are owned
(use_multi_rank_bucket_allreduce), and allgather_bucket_size has no effect where torch has
all_gather_into_tensor: ZeRO 2 saves memory, not messages.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import StrictBool, field_validator

from distsim.scenario.strategies.base import Expansion, ExpansionContext, GroupRef, Refusal, block
from distsim.scenario.strategies.deepspeed.calls import ZeroStage12Writer
from distsim.scenario.strategies.deepspeed.stage3_calls import ZeroStage3Writer
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


class DeepSpeed(LayeredModelStrategy):
    """Layers are the modules that hold parameters, in the order of the forward pass, inside a root
    that holds none.
    """

    name: ClassVar[str] = "deepspeed"
    about: ClassVar[str] = (
        "DeepSpeed's ZeRO 1 to 3 with its buckets, prefetching and kept parameters, and ZeRO++."
    )

    stage: ZeroStage = 1
    #: The data-parallel ranks; left out, all.
    group: AxesOrGroup | None = None
    #: Elements of gradients that are reduced at a time.
    reduce_bucket_size: PositiveInt = 500_000_000
    #: Gradients are reduced beside the backward pass, on a stream of their own. Left out: with
    #: stage 3.
    overlap_comm: StrictBool | None = None
    #: ZeRO 1 and 2: false reduces a bucket in one call, also where a gradient is larger than it.
    reduce_scatter: StrictBool = True
    stage3_prefetch_bucket_size: NonNegativeInt = 50_000_000
    stage3_max_reuse_distance: NonNegativeInt = 1_000_000_000
    stage3_max_live_parameters: NonNegativeInt = 1_000_000_000
    #: Parameters of at most so many elements stay gathered.
    stage3_param_persistence_threshold: NonNegativeInt = 100_000
    #: ZeRO++ hpZ: ranks that keep a second copy of the parameters among them, for the backward
    #: pass.
    zero_hpz_partition_size: PositiveInt = 1
    #: ZeRO++ qwZ: parameters are gathered as int8, with scales.
    zero_quantized_weights: StrictBool = False
    #: ZeRO++ qgZ: gradients go as 4 bits through two all_to_alls, inside the machines, then between
    #: them.
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
        return self.stage == 3 if self.overlap_comm is None else self.overlap_comm

    def over(self, context: ExpansionContext) -> GroupRef | None:
        """The group of the data-parallel ranks."""
        return (
            self.group if self.group is None or isinstance(self.group, str) else tuple(self.group)
        )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        found = context.refuse_groups(group=self.group)
        if found:
            return found
        ranks, layers = range(context.world_size), range(len(self.model))
        strange = [
            rank
            for rank, layer in self.skips_layer.items()
            if rank not in ranks or layer not in layers
        ]
        if strange:
            found.append(
                (
                    ("skips_layer", strange[0]),
                    f"layers are 0 to {len(self.model) - 1}, ranks 0 to {context.world_size - 1}",
                )
            )
        if self.skips_layer and len(self.model) == 1:
            found.append((("skips_layer",), "the only layer can't be left out"))
        n, third = context.size_of(self.over(context)), "ZeRO++ belongs to stage 3"
        if n == 1:
            found.append(
                (("group",), "one rank has nobody to share with: give the group more ranks")
            )
        if self.stage < 3:
            words = "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"
            plus = [
                word
                for word in words
                if getattr(self, word) != type(self).model_fields[word].default
            ]
            return [*found, *(((word,), f"{third}, found stage: {self.stage}") for word in plus)]
        if n % self.zero_hpz_partition_size:
            found.append(
                (
                    ("zero_hpz_partition_size",),
                    f"{self.zero_hpz_partition_size} does not divide the {n} ranks",
                )
            )
        whole = n == context.world_size
        if not whole and (self.zero_hpz_partition_size > 1 or self.zero_quantized_gradients):
            word = (
                "zero_quantized_gradients"
                if self.zero_quantized_gradients
                else "zero_hpz_partition_size"
            )
            found.append(
                ((word,), "DeepSpeed cuts all ranks into machines here: leave `group` out")
            )
        return found

    def expand(self, context: ExpansionContext) -> Expansion:
        kind = ZeroStage3Writer if self.stage == 3 else ZeroStage12Writer
        found = kind(self, context).expansion()
        if not self.skips_layer:
            return found
        others = " and ".join(f"rank != {rank}" for rank in self.skips_layer)
        steps = [block(found.steps, others)]
        for rank, layer in self.skips_layer.items():
            one = kind(self, context, layer).expansion()
            steps.append(block(one.steps, f"rank == {rank}"))
            found = found._replace(
                tensors={**found.tensors, **one.tensors}, groups={**found.groups, **one.groups}
            )
        return found._replace(steps=steps)
