"""Ulysses: attention over heads, the rest of a layer over the sequence; all_to_all between the two.

Sources: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509); DeepSpeed 0.17,
`deepspeed/sequence/layer.py` (DistributedAttention: an all_to_all_single each for queries, keys and
values, one back for the context; _SeqAllToAll: the backward pass makes them the other way round, in
the opposite order).
"""

from __future__ import annotations

from typing import ClassVar

from distsim.scenario.strategies.base import ComputeCost, Entry, ExpansionContext, Refusal, compute
from distsim.scenario.strategies.field_types import AxisOrGroup, Dtype, NonNegativeInt, PositiveInt
from distsim.scenario.strategies.layers import IntraLayerStrategy, IntraLayerWriter


class Ulysses(IntraLayerStrategy):
    """Every rank has a part of the sequence with all heads, and for attention the whole sequence
    with some heads.
    """

    name: ClassVar[str] = "ulysses"
    about: ClassVar[str] = (
        "Sequence parallel attention: queries, keys, values by all_to_all to whole sequences of some heads, and back."
    )

    axis: AxisOrGroup = "cp"
    batch: PositiveInt = 1
    sequence: PositiveInt
    heads: PositiveInt
    #: Heads of keys and values; 0: as many as of queries.
    kv_heads: NonNegativeInt = 0
    head_dim: PositiveInt
    dtype: Dtype = "bfloat16"

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        unknown = context.unknown_group(self.axis, "axis")
        if unknown is not None or self.axis not in context.mesh:
            return [(("axis",), unknown or f"{self.axis} is no axis of the mesh")]
        n = context.size_of(self.axis)
        found: list[Refusal] = [
            (
                (key,),
                f"{key} {getattr(self, key)} does not divide among the {n} ranks of {self.axis}{remedy}",
            )
            for key, remedy in (
                ("sequence", ""),
                ("heads", ""),
                ("kv_heads", ": repeat them, or use context_parallel beside it"),
            )
            if getattr(self, key) % n
        ]
        return found

    def writer(self, context: ExpansionContext) -> UlyssesWriter:
        return UlyssesWriter(self, context)


class UlyssesWriter(IntraLayerWriter):
    """Entries of one layer's attention; a price is that of one rank's heads."""

    def __init__(self, fields: Ulysses, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype, fields.axis)
        n = context.size_of(fields.axis)
        heads = {
            "q": fields.heads,
            "k": fields.kv_heads or fields.heads,
            "v": fields.kv_heads or fields.heads,
            "out": fields.heads,
        }
        for grad in ("", "_grad") if fields.backward is not None else ("",):
            for word, count in heads.items():
                for side in ("mine", "heads"):
                    shape = [n, fields.sequence // n, fields.batch, count // n, fields.head_dim]
                    self.tensor(f"{word}{grad}_{side}", shape)

    def forward(self, price: ComputeCost) -> list[Entry]:
        """By heads, attention, and back by sequence."""
        return self.passed("attention", price, ("q", "k", "v"), ("out",))

    def backward(self, price: ComputeCost) -> list[Entry]:
        return self.passed(
            "attention backward", price, ("out_grad",), ("v_grad", "k_grad", "q_grad")
        )

    def passed(
        self, name: str, price: ComputeCost, gone: tuple[str, ...], come: tuple[str, ...]
    ) -> list[Entry]:
        there, back = (
            [self.exchanged(word, *ways) for word in words]
            for words, ways in ((gone, ("mine", "heads")), (come, ("heads", "mine")))
        )
        reads, writes = (
            [f"{self.prefix}_{word}_heads" for word in words] for words in (gone, come)
        )
        before = compute(
            f"{name}: {', '.join(gone)}",
            {"time": "0 ns"},
            writes=[f"{self.prefix}_{word}_mine" for word in gone],
        )
        return [before, *there, compute(name, price, reads=reads, writes=writes), *back]

    def exchanged(self, word: str, source: str, target: str) -> Entry:
        return self.call(
            "all_to_all_single",
            input=f"{self.prefix}_{word}_{source}",
            output=f"{self.prefix}_{word}_{target}",
        )
