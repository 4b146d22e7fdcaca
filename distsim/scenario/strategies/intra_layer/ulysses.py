"""The strategy `ulysses`: attention over heads, the rest of a layer over the sequence.

An all_to_all before and after the attention changes from parts of the sequence to parts of the
heads and back.

Sources: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509); DeepSpeed 0.17,
`deepspeed/sequence/layer.py` (DistributedAttention: an all_to_all_single each for queries, keys and
values, one back for the context; _SeqAllToAll: the backward pass makes them in the other direction
and in the opposite order).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from distsim.scenario.strategies.base import (
    ZERO_COST,
    ComputeCost,
    Entry,
    ExpansionContext,
    Refusal,
    compute,
)
from distsim.scenario.strategies.field_types import AxisOrGroup, Dtype, NonNegativeInt, PositiveInt
from distsim.scenario.strategies.layers import IntraLayerStrategy, IntraLayerWriter


class Ulysses(IntraLayerStrategy):
    """Every rank has a part of the sequence with all heads, and for attention the whole sequence
    with some heads.
    """

    name: ClassVar[str] = "ulysses"
    about: ClassVar[str] = (
        "DeepSpeed-Ulysses sequence parallelism. An all_to_all turns parts of the sequence "
        "with all heads into whole sequences with some heads, and back after attention."
    )

    axis: AxisOrGroup = Field(
        default="cp", description="Mesh axis of this strategy.", examples=["pp"]
    )
    batch: PositiveInt = Field(
        default=1, description="Sequences per micro-batch on a rank.", examples=[8]
    )
    sequence: PositiveInt = Field(
        description="Tokens of the whole sequence. Must be divisible by the number of ranks.",
        examples=[32768],
    )
    heads: PositiveInt = Field(
        description="Number of attention heads. Must be divisible by the number of ranks.",
        examples=[32],
    )
    kv_heads: NonNegativeInt = Field(
        default=0,
        description=(
            "Number of key and value heads (grouped-query attention). 0: as many as query heads."
        ),
        examples=[8],
    )
    head_dim: PositiveInt = Field(description="Size of a head.", examples=[128])
    dtype: Dtype = Field(
        default="bfloat16",
        description="Dtype of parameters and messages.",
        examples=["bfloat16"],
    )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        unknown = context.unknown_group(self.axis, "axis")
        if unknown is not None or self.axis not in context.mesh:
            return [(("axis",), unknown or f"the mesh has no axis {self.axis}")]
        n = context.size_of(self.axis)
        remedies = {
            "sequence": "",
            "heads": "",
            "kv_heads": ": repeat them, or combine this strategy with context_parallel",
        }
        return [
            (
                (field,),
                (
                    f"{field} {getattr(self, field)} is not divisible by the {n} ranks of "
                    f"{self.axis}{remedy}"
                ),
            )
            for field, remedy in remedies.items()
            if getattr(self, field) % n
        ]

    def writer(self, context: ExpansionContext) -> UlyssesWriter:
        return UlyssesWriter(self, context)


class UlyssesWriter(IntraLayerWriter):
    """Entries of one layer's attention; the cost is that of one rank's heads.

    A tensor's name ends in `mine` (the rank's part of the sequence) or `heads` (the whole sequence
    of some heads).
    """

    def __init__(self, fields: Ulysses, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype, fields.axis)
        n = context.size_of(fields.axis)
        kv_heads = fields.kv_heads or fields.heads
        heads = {"q": fields.heads, "k": kv_heads, "v": kv_heads, "out": fields.heads}
        suffixes = ("", "_grad") if fields.backward is not None else ("",)
        for suffix in suffixes:
            for word, count in heads.items():
                # The layout of an all_to_all, in both directions: a part per rank.
                shape = [n, fields.sequence // n, fields.batch, count // n, fields.head_dim]
                self.tensor(f"{word}{suffix}_mine", shape)
                self.tensor(f"{word}{suffix}_heads", shape)

    def forward(self, cost: ComputeCost) -> list[Entry]:
        return self.attention("attention", cost, inputs=("q", "k", "v"), outputs=("out",))

    def backward(self, cost: ComputeCost) -> list[Entry]:
        return self.attention(
            "attention backward",
            cost,
            inputs=("out_grad",),
            outputs=("v_grad", "k_grad", "q_grad"),
        )

    def attention(
        self, name: str, cost: ComputeCost, inputs: tuple[str, ...], outputs: tuple[str, ...]
    ) -> list[Entry]:
        """The inputs to parts of the heads, the attention, the outputs back to the sequence."""
        produce_inputs = compute(
            f"{name}: {', '.join(inputs)}",
            ZERO_COST,
            writes=[f"{self.prefix}_{word}_mine" for word in inputs],
        )
        attention = compute(
            name,
            cost,
            reads=[f"{self.prefix}_{word}_heads" for word in inputs],
            writes=[f"{self.prefix}_{word}_heads" for word in outputs],
        )
        return [
            produce_inputs,
            *(self.exchange(word, "mine", "heads") for word in inputs),
            attention,
            *(self.exchange(word, "heads", "mine") for word in outputs),
        ]

    def exchange(self, word: str, source: str, target: str) -> Entry:
        return self.call(
            "all_to_all_single",
            input=f"{self.prefix}_{word}_{source}",
            output=f"{self.prefix}_{word}_{target}",
        )
