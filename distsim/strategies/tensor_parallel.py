"""Tensor parallelism: matrices of a layer in pairs, the first cut by columns, the second by rows.

Sources: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3: one all_reduce per pair in the forward pass and one in the backward
pass; Korthikanti et al. (arXiv 2205.05198), section 4.2: sequence parallelism puts an all_gather before and a reduce_scatter after each
pair. torch 2.13 does the same with ColwiseParallel, RowwiseParallel and SequenceParallel (`torch/distributed/tensor/parallel/style.py`);
the gathered input is kept for the backward pass, so that it is not gathered again.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import StrictBool

from distsim.strategies.base import Context, Entry, Expansion, Refusal, compute, step
from distsim.strategies.fields import Axis, Count, Dtype, Natural
from distsim.strategies.passes import Passes
from distsim.strategies.prices import shares


class TensorParallel(Passes):
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

    def expand(self, context: Context) -> Expansion:
        writer = TensorWriter(self, context)
        return Expansion([*self.there(writer), *self.back(writer)], writer.tensors)


class TensorWriter:
    """Entries of one layer's passes; other strategies put them in place of a compute step."""

    def __init__(self, fields: TensorParallel, context: Context) -> None:
        self.f, self.p, self.n = fields, context.prefix(fields.name), context.size_of(fields.axis)
        whole = [fields.sequence, fields.batch, fields.hidden]
        part = [fields.sequence // self.n, fields.batch, fields.hidden] if fields.sequence_parallel else whole
        self.tensors = {f"{self.p}_{word}": {"shape": shape, "dtype": fields.dtype} for word, shape in self._shapes(whole, part)}

    def _shapes(self, whole: list[int], part: list[int]) -> list[tuple[str, list[int]]]:
        words = [("out", whole), ("grad", whole)]
        if self.f.sequence_parallel:
            words += [("part", part), ("whole", whole), ("grad_part", part), ("grad_whole", whole)]
        return words

    def forward(self, price: Any) -> list[Entry]:
        """Per pair: the columns need the whole input, the rows give sums of which every rank has one part."""
        found: list[Entry] = []
        for k, share in enumerate(shares(price, self.f.pairs)):
            found += self._pair(f"forward {k}" if self.f.pairs > 1 else "forward", share, ("part", "whole", "out"))
        return found

    def backward(self, price: Any) -> list[Entry]:
        """The same the other way round: gradients of the rows' output are needed whole, those of the columns' input are sums."""
        found: list[Entry] = []
        for k, share in reversed(list(enumerate(shares(price, self.f.pairs)))):
            found += self._pair(f"backward {k}" if self.f.pairs > 1 else "backward", share, ("grad_part", "grad_whole", "grad"))
        return found

    def _pair(self, name: str, price: dict[str, Any], words: tuple[str, str, str]) -> list[Entry]:
        part, whole, out = (f"{self.p}_{word}" for word in words)
        axis = self.f.axis
        if not self.f.sequence_parallel:
            return [
                compute(name, price, writes=[out]),
                *([step("all_reduce", tensor=out, op="sum", group=axis)] if self.n > 1 else []),
            ]
        if self.n == 1:
            return [compute(name, price, writes=[out])]
        return [
            step("all_gather_into_tensor", input=part, output=whole, group=axis),
            compute(name, price, reads=[whole], writes=[out]),
            step("reduce_scatter_tensor", input=out, output=part, op="sum", group=axis),
        ]
