"""Tensor parallelism: matrices of a layer in pairs, the first cut by columns, the second by rows.

Sources: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3: one all_reduce per pair in the forward pass and one in the backward
pass; Korthikanti et al. (arXiv 2205.05198), section 4.2: sequence parallelism puts an all_gather before and a reduce_scatter after each
pair. torch 2.13 does the same with ColwiseParallel, RowwiseParallel and SequenceParallel (`torch/distributed/tensor/parallel/style.py`);
the gathered input is kept for the backward pass, so that it is not gathered again.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import StrictBool

from distsim.strategies.base import Context, Entry, Price, Refusal, compute
from distsim.strategies.fields import Axis, Count, Dtype, Natural
from distsim.strategies.layers import LayerStrategy, LayerWriter, shares


class TensorParallel(LayerStrategy):
    """Every layer on all ranks of an axis, each with its columns and rows of the layer's matrices."""

    name: ClassVar[str] = "tensor_parallel"
    about: ClassVar[str] = (
        "Matrices cut by columns, then by rows: one all_reduce of activations per pair and pass, or all_gather and reduce_scatter."
    )

    axis: Axis = "tp"
    #: Pairs of matrices in a layer: attention and feed-forward.
    pairs: Count = 2
    batch: Count = 1
    sequence: Count
    hidden: Count
    #: Checked alone: what else must divide among the ranks; 0 is not given.
    heads: Natural = 0
    ffn: Natural = 0
    dtype: Dtype = "bfloat16"
    sequence_parallel: StrictBool = False

    def refuse(self, context: Context) -> list[Refusal]:
        unknown = context.unknown_group(self.axis, "axis")
        if unknown is not None:
            return [(("axis",), unknown)]
        n = context.size_of(self.axis)
        cut = ["hidden", "heads", "ffn", *(["sequence"] if self.sequence_parallel else [])]
        return [
            ((key,), f"{key} {getattr(self, key)} does not divide among the {n} ranks of {self.axis}")
            for key in cut
            if getattr(self, key) % n
        ]

    def writer(self, context: Context) -> TensorWriter:
        return TensorWriter(self, context)


class TensorWriter(LayerWriter):
    """Entries of one layer's passes."""

    def __init__(self, fields: TensorParallel, context: Context) -> None:
        super().__init__(context.prefix(fields.name), fields.dtype, fields.axis)
        self.f, self.n = fields, context.size_of(fields.axis)
        whole = [fields.sequence, fields.batch, fields.hidden]
        part = [fields.sequence // self.n, fields.batch, fields.hidden]
        words = {"out": whole, "grad": whole}
        if fields.sequence_parallel:
            words |= {"part": part, "whole": whole, "grad_part": part, "grad_whole": whole}
        for word, shape in words.items():
            self.tensor(word, shape)

    def forward(self, price: Price) -> list[Entry]:
        """Per pair: the columns need the whole input, the rows give sums of which every rank has one part."""
        found: list[Entry] = []
        for k, share in enumerate(shares(price, self.f.pairs)):
            found += self._pair(f"forward {k}" if self.f.pairs > 1 else "forward", share, ("part", "whole", "out"))
        return found

    def backward(self, price: Price) -> list[Entry]:
        """The same the other way round: gradients of the rows' output are needed whole, those of the columns' input are sums."""
        found: list[Entry] = []
        for k, share in reversed(list(enumerate(shares(price, self.f.pairs)))):
            found += self._pair(f"backward {k}" if self.f.pairs > 1 else "backward", share, ("grad_part", "grad_whole", "grad"))
        return found

    def _pair(self, name: str, price: Price, words: tuple[str, str, str]) -> list[Entry]:
        part, whole, out = (f"{self.p}_{word}" for word in words)
        if not self.f.sequence_parallel:
            return [
                compute(name, price, writes=[out]),
                *([self.call("all_reduce", tensor=out, op="sum")] if self.n > 1 else []),
            ]
        if self.n == 1:
            return [compute(name, price, writes=[out])]
        return [
            self.call("all_gather_into_tensor", input=part, output=whole),
            compute(name, price, reads=[whole], writes=[out]),
            self.call("reduce_scatter_tensor", input=out, output=part, op="sum"),
        ]
