"""Tensor parallelism: matrices of a layer in pairs, the first cut by columns, the second by rows.

Sources: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3: one all_reduce per pair in the
forward pass and one in the backward pass; Korthikanti et al. (arXiv 2205.05198), section 4.2:
sequence parallelism puts an all_gather before and a reduce_scatter after each pair. torch 2.13 does
the same with ColwiseParallel, RowwiseParallel and SequenceParallel
(`torch/distributed/tensor/parallel/style.py`); the gathered input is kept for the backward pass, so
that it is not gathered again. DTensor's backward pass reduces the input's gradient once for each
matrix of columns (wq, wk, wv; w1, w3), Megatron-LM's once for the fused one. Embedding and output
are cut by vocabulary: sums after the first, and for the loss three reductions (the largest logit,
the sum of exponentials, the target's logit: `torch/distributed/tensor/parallel/loss.py`) in the
place of gathered logits. Recorded in tests/support/wrapped_tp.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainValidator,
    StrictBool,
    ValidationInfo,
    WithJsonSchema,
)

from distsim.scenario.strategies.base import (
    ComputeCost,
    Entry,
    Expansion,
    ExpansionContext,
    Refusal,
    compute,
)
from distsim.scenario.strategies.field_types import (
    AxisOrGroup,
    ComputeCostField,
    CostOrEntriesField,
    Dtype,
    NonNegativeInt,
    PositiveInt,
    integer_at_least,
)
from distsim.scenario.strategies.layers import (
    IntraLayerStrategy,
    IntraLayerWriter,
    equal_cost_shares,
    repeat_entries,
)


def _parse_columns(value: object, info: ValidationInfo) -> tuple[int, ...]:
    """`1`, or a number for each pair, as [3, 2]."""
    return tuple(
        integer_at_least(1)(n, info)
        for n in (value if isinstance(value, list | tuple) else [value])
    )


_COLUMNS_SCHEMA = {
    "anyOf": [{"type": "number"}, {"type": "array", "minItems": 1, "items": {"type": "number"}}]
}
ColumnMatrices = Annotated[
    tuple[int, ...], PlainValidator(_parse_columns), WithJsonSchema(_COLUMNS_SCHEMA)
]


class VocabParallelFields(BaseModel):
    """Embedding and output, both cut by vocabulary. ``forward`` and ``backward`` price the output's
    product on one rank.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    vocabulary: PositiveInt
    #: The loss is computed from each rank's part of the logits; else they are gathered.
    loss_parallel: StrictBool = False
    forward: ComputeCostField = {"time": "0 ns"}
    backward: ComputeCostField = {"time": "0 ns"}


class TensorParallel(IntraLayerStrategy):
    """Every layer on all ranks of an axis, each with its columns and rows of the layer's
    matrices.
    """

    name: ClassVar[str] = "tensor_parallel"
    about: ClassVar[str] = (
        "Matrices cut by columns, then by rows: one all_reduce of activations per pair and pass, or all_gather and reduce_scatter."
    )

    axis: AxisOrGroup = "tp"
    #: Pairs of matrices in a layer: attention and feed-forward.
    pairs: PositiveInt = 2
    batch: PositiveInt = 1
    sequence: PositiveInt
    hidden: PositiveInt
    #: Checked alone: what else must divide among the ranks; 0 is not given.
    heads: NonNegativeInt = 0
    ffn: NonNegativeInt = 0
    dtype: Dtype = "bfloat16"
    sequence_parallel: StrictBool = False
    #: Matrices by columns in each pair whose input's gradients are reduced one by one (DTensor); 1:
    #: fused, or summed before (Megatron).
    columns: ColumnMatrices = (1,)
    ends: VocabParallelFields | None = None
    #: What is done between the forward and the backward pass.
    between: CostOrEntriesField = ()
    #: clip_grad_norm_ in the end. Norms of layers are DTensors under sequence parallelism alone,
    #: else torch raises.
    clip_grad_norm: StrictBool = False

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        unknown = context.unknown_group(self.axis, "axis")
        if unknown is not None:
            return [(("axis",), unknown)]
        n = context.size_of(self.axis)
        cut = ["hidden", "heads", "ffn", *(["sequence"] if self.sequence_parallel else [])]
        found: list[Refusal] = [
            (
                (key,),
                f"{key} {getattr(self, key)} does not divide among the {n} ranks of {self.axis}",
            )
            for key in cut
            if getattr(self, key) % n
        ]
        if len(self.columns) not in (1, self.pairs):
            found.append(
                (
                    ("columns",),
                    f"expected one number, or one for each of the {self.pairs} pairs, found {len(self.columns)}",
                )
            )
        if self.ends is not None and self.ends.vocabulary % n:
            found.append(
                (
                    ("ends", "vocabulary"),
                    f"vocabulary {self.ends.vocabulary} does not divide among the {n} ranks of {self.axis}",
                )
            )
        return found + (self._refused_clip() if self.clip_grad_norm else [])

    def _refused_clip(self) -> list[Refusal]:
        if self.backward is None:
            return [(("clip_grad_norm",), "there are no gradients to clip in forward passes alone")]
        mixed = "without sequence_parallel the norms' weights are plain tensors beside DTensors, and clip_grad_norm_ raises (got mixed"
        sentence = f"{mixed} torch.Tensor and DTensor): set sequence_parallel, or clip in `fsdp` with clip_over"
        return [] if self.sequence_parallel else [(("clip_grad_norm",), sentence)]

    def writer(self, context: ExpansionContext) -> TensorParallelWriter:
        return TensorParallelWriter(self, context)

    def expand(self, context: ExpansionContext) -> Expansion:
        writer = self.writer(context)
        there, back = self.passes(writer)
        if self.ends is not None and self.forward is not None:
            there = [*writer.embedded(), *there, *writer.logits(self.ends)]
        if self.ends is not None and self.backward is not None:
            back = [*writer.logits_backward(self.ends), *back, *writer.embedded_backward()]
        between = [compute("between", self.between)] if self.between else []
        clip = writer.clipped() if self.clip_grad_norm else []
        return Expansion([*there, *between, *back, *clip], writer.tensors)


class TensorParallelWriter(IntraLayerWriter):
    """Entries of one layer's passes."""

    def __init__(self, fields: TensorParallel, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype, fields.axis)
        self.f, self.n = fields, context.size_of(fields.axis)
        whole = [fields.sequence, fields.batch, fields.hidden]
        part = [fields.sequence // self.n, fields.batch, fields.hidden]
        words = {"out": whole, "grad": whole}
        if fields.sequence_parallel:
            words |= {"part": part, "whole": whole, "grad_part": part, "grad_whole": whole}
        for word, shape in words.items():
            self.tensor(word, shape)
        for k in range(1, 1 if fields.sequence_parallel else max(fields.columns)):
            self.tensor(f"grad_{k}", whole)

    def forward(self, price: ComputeCost) -> list[Entry]:
        """Per pair: the columns need the whole input, the rows give sums of which every rank has
        one part.
        """
        found: list[Entry] = []
        for k, share in enumerate(equal_cost_shares(price, self.f.pairs)):
            found += self._pair(
                f"forward {k}" if self.f.pairs > 1 else "forward", share, ("part", "whole", "out")
            )
        return found

    def backward(self, price: ComputeCost) -> list[Entry]:
        """The same the other way round: gradients of the rows' output are needed whole, those of
        the columns' input are sums.
        """
        found: list[Entry] = []
        for k, share in reversed(list(enumerate(equal_cost_shares(price, self.f.pairs)))):
            name, columns = (
                f"backward {k}" if self.f.pairs > 1 else "backward",
                self.f.columns[k % len(self.f.columns)],
            )
            if columns == 1 or self.f.sequence_parallel:
                found += self._pair(name, share, ("grad_part", "grad_whole", "grad"))
                continue
            for c, part in enumerate(equal_cost_shares(share, columns)):
                found += self.summed(
                    f"{name}, matrix {c}",
                    part,
                    f"{self.prefix}_grad_{c}" if c else f"{self.prefix}_grad",
                )
        return found

    def summed(self, name: str, price: ComputeCost, tensor: str) -> list[Entry]:
        """A product of which every rank has one part of the sum."""
        reduced = [self.call("all_reduce", tensor=tensor, op="sum")] if self.n > 1 else []
        return [compute(name, price, writes=[tensor]), *reduced]

    def clipped(self) -> list[Entry]:
        """torch/nn/utils/clip_grad.py on DTensors: a layer norm's gradient is a sum over the ranks'
        parts of the sequence and is reduced first, each by itself; then the norms of all
        parameters, an element each."""
        if self.n == 1:
            return []
        f = self.f
        norms = f.pairs * f.layers + (f.ends is not None)
        matrices = f.layers * sum(f.columns[k % len(f.columns)] + 1 for k in range(f.pairs)) + 2 * (
            f.ends is not None
        )
        whole, each = self.tensor("norm_grad", f.hidden), self.tensor("norms", norms + matrices)
        return [
            *repeat_entries(norms, [self.call("all_reduce", tensor=whole, op="sum")]),
            compute("norms", {"time": "0 ns"}, writes=[each]),
            self.call("all_reduce", tensor=each, op="sum"),
        ]

    # --- embedding, output, loss ---
    def embedded(self) -> list[Entry]:
        """Each rank looks up the tokens of its part of the vocabulary; the rest are zeros."""
        out, part = f"{self.prefix}_out", f"{self.prefix}_part"
        found: list[Entry] = [compute("embedding", {"time": "0 ns"}, writes=[out])]
        if self.n > 1 and self.f.sequence_parallel:
            return [*found, self.call("reduce_scatter_tensor", input=out, output=part, op="sum")]
        return found + ([self.call("all_reduce", tensor=out, op="sum")] if self.n > 1 else [])

    def embedded_backward(self) -> list[Entry]:
        """The gradient of the whole sequence, for the rows that each rank has."""
        if self.n == 1 or not self.f.sequence_parallel:
            return []
        return [
            self.call(
                "all_gather_into_tensor",
                input=f"{self.prefix}_grad_part",
                output=f"{self.prefix}_grad_whole",
            )
        ]

    def logits(self, ends: VocabParallelFields) -> list[Entry]:
        f, tokens = self.f, self.f.batch * self.f.sequence
        part = self.tensor("logits", [f.sequence, f.batch, ends.vocabulary // self.n])
        found: list[Entry] = []
        if self.n > 1 and f.sequence_parallel:
            found.append(
                self.call(
                    "all_gather_into_tensor",
                    input=f"{self.prefix}_part",
                    output=f"{self.prefix}_whole",
                )
            )
        found.append(compute("output", ends.forward, reads=[f"{self.prefix}_out"], writes=[part]))
        if self.n == 1:
            return found
        if not ends.loss_parallel:
            whole = self.tensor(
                "all_logits", [self.n, f.sequence, f.batch, ends.vocabulary // self.n]
            )
            return [*found, self.call("all_gather_into_tensor", input=part, output=whole)]
        names = [
            self.tensor(f"loss_{word}", tokens, "float32")
            for word in ("largest", "exponentials", "target")
        ]
        found.append(compute("loss", {"time": "0 ns"}, reads=[part], writes=names))
        return found + [
            self.call("all_reduce", tensor=name, op="sum" if k else "max")
            for k, name in enumerate(names)
        ]

    def logits_backward(self, ends: VocabParallelFields) -> list[Entry]:
        grad, part = f"{self.prefix}_grad", f"{self.prefix}_grad_part"
        found: list[Entry] = [compute("output backward", ends.backward, writes=[grad])]
        if self.n > 1 and self.f.sequence_parallel:
            return [*found, self.call("reduce_scatter_tensor", input=grad, output=part, op="sum")]
        return found + ([self.call("all_reduce", tensor=grad, op="sum")] if self.n > 1 else [])

    def _pair(self, name: str, price: ComputeCost, words: tuple[str, str, str]) -> list[Entry]:
        part, whole, out = (f"{self.prefix}_{word}" for word in words)
        if not self.f.sequence_parallel:
            return self.summed(name, price, out)
        if self.n == 1:
            return [compute(name, price, writes=[out])]
        return [
            self.call("all_gather_into_tensor", input=part, output=whole),
            compute(name, price, reads=[whole], writes=[out]),
            self.call("reduce_scatter_tensor", input=out, output=part, op="sum"),
        ]
