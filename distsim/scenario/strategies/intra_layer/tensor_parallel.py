"""The strategy `tensor_parallel`: the matrices of a layer in pairs, split over the ranks.

The first matrix of a pair is split by columns, the second by rows, so that a pair needs one
reduction of its output. torch's DTensor and Megatron-LM differ in the backward pass: DTensor
reduces the input's gradient once for each matrix of columns (wq, wk, wv; w1, w3), Megatron-LM once
for the fused one. Under sequence parallelism the gathered input is kept for the backward pass, so
that it is not gathered again.

Embedding and output are split by vocabulary: sums after the embedding, and for the loss three
reductions (the largest logit, the sum of exponentials, the target's logit) instead of gathered
logits.

Sources: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3: one all_reduce per pair in the
forward pass and one in the backward pass; Korthikanti et al. (arXiv 2205.05198), section 4.2:
sequence parallelism puts an all_gather before and a reduce_scatter after each pair. torch 2.13 does
the same with ColwiseParallel, RowwiseParallel and SequenceParallel
(`torch/distributed/tensor/parallel/style.py`; the loss:
`torch/distributed/tensor/parallel/loss.py`). Recorded in tests/support/wrapped_tp.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    ValidationInfo,
    WithJsonSchema,
)

from distsim.scenario.strategies.base import (
    ZERO_COST,
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
    numbers = value if isinstance(value, list | tuple) else [value]
    return tuple(integer_at_least(1)(number, info) for number in numbers)


_COLUMNS_SCHEMA = {
    "anyOf": [{"type": "number"}, {"type": "array", "minItems": 1, "items": {"type": "number"}}]
}
ColumnMatrices = Annotated[
    tuple[int, ...], PlainValidator(_parse_columns), WithJsonSchema(_COLUMNS_SCHEMA)
]


class VocabParallelFields(BaseModel):
    """Embedding and output projection, both split by vocabulary.

    ``forward`` and ``backward`` are the costs of the output projection on one rank.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    vocabulary: PositiveInt
    #: Whether the loss is computed on split logits; otherwise they are gathered.
    loss_parallel: StrictBool = False
    forward: ComputeCostField = {"time": "0 ns"}
    backward: ComputeCostField = {"time": "0 ns"}


class TensorParallel(IntraLayerStrategy):
    """Every layer on all ranks of an axis, each with its columns and rows of the layer's
    matrices.
    """

    name: ClassVar[str] = "tensor_parallel"
    about: ClassVar[str] = (
        "Tensor parallelism as in Megatron-LM and torch.distributed.tensor.parallel. Each "
        "pair of matrices is split by columns, then by rows. Each pass all-reduces "
        "activations once per pair, or uses all_gather and reduce_scatter (sequence "
        "parallelism)."
    )

    axis: AxisOrGroup = Field(
        default="tp", description="Mesh axis of this strategy.", examples=["pp"]
    )
    pairs: PositiveInt = Field(
        default=2,
        description="Pairs of matrices per layer: attention and feed-forward.",
        examples=[2],
    )
    batch: PositiveInt = Field(
        default=1, description="Sequences per micro-batch on a rank.", examples=[8]
    )
    sequence: PositiveInt = Field(description="Tokens per sequence.", examples=[4096])
    hidden: PositiveInt = Field(description="Hidden size of the model.", examples=[4096])
    heads: NonNegativeInt = Field(
        default=0,
        description=(
            "Number of attention heads. Only checked to be divisible by the ranks. 0: not checked."
        ),
        examples=[32],
    )
    ffn: NonNegativeInt = Field(
        default=0,
        description=(
            "Width of the feed-forward layer. Only checked to be divisible by the ranks. 0: "
            "not checked."
        ),
        examples=[14336],
    )
    dtype: Dtype = Field(
        default="bfloat16",
        description="Dtype of parameters and messages.",
        examples=["bfloat16"],
    )
    sequence_parallel: StrictBool = Field(
        default=False,
        description=(
            "Use sequence parallelism: shard activations along the sequence between the matrices."
        ),
        examples=[True],
    )
    columns: ColumnMatrices = Field(
        default=(1,),
        description=(
            "Number of column-split matrices that share an input. DTensor all-reduces the input's "
            "gradient once for each of them. 1: they are fused (Megatron-LM)."
        ),
        examples=[[3, 2]],
    )
    ends: VocabParallelFields | None = Field(
        default=None,
        description=(
            "Embedding and output projection, split by vocabulary: their calls and those of "
            "the loss."
        ),
        examples=[
            {"vocabulary": 128256, "loss_parallel": True, "forward": "1 ms", "backward": "2 ms"}
        ],
    )
    between: CostOrEntriesField = Field(
        default=(),
        description="Work between the forward and the backward pass: a time, or entries.",
        examples=["1 ms"],
    )
    clip_grad_norm: StrictBool = Field(
        default=False,
        description="Clip gradients: all-reduce their norms before the optimizer step.",
        examples=[True],
    )

    def columns_of(self, pair: int) -> int:
        """Matrices of a pair whose inputs' gradients are reduced one by one."""
        return self.columns[pair % len(self.columns)]

    # --- checks of the layout ---
    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        unknown = context.unknown_group(self.axis, "axis")
        if unknown is not None:
            return [(("axis",), unknown)]
        ranks = context.size_of(self.axis)
        return [*self._refuse_sizes(ranks), *self._refuse_clip()]

    def _refuse_sizes(self, ranks: int) -> Iterator[Refusal]:
        split = ["hidden", "heads", "ffn"]
        if self.sequence_parallel:
            split.append("sequence")
        for field in split:
            size = getattr(self, field)
            if size % ranks:
                text = f"{field} {size} is not divisible by the {ranks} ranks of {self.axis}"
                yield (field,), text
        if len(self.columns) not in (1, self.pairs):
            text = (
                f"expected one number, or one for each of the {self.pairs} pairs, "
                f"found {len(self.columns)}"
            )
            yield ("columns",), text
        if self.ends is not None and self.ends.vocabulary % ranks:
            text = (
                f"vocabulary {self.ends.vocabulary} is not divisible by the {ranks} ranks "
                f"of {self.axis}"
            )
            yield ("ends", "vocabulary"), text

    def _refuse_clip(self) -> list[Refusal]:
        if not self.clip_grad_norm:
            return []
        if self.backward is None:
            return [(("clip_grad_norm",), "there are no gradients to clip without a backward pass")]
        if self.sequence_parallel:
            return []
        text = (
            "without sequence_parallel, the weights of norms are plain tensors, and "
            "clip_grad_norm_ raises (got mixed torch.Tensor and DTensor): set "
            "sequence_parallel, or clip in `fsdp` with clip_over"
        )
        return [(("clip_grad_norm",), text)]

    # --- the entries ---
    def writer(self, context: ExpansionContext) -> TensorParallelWriter:
        return TensorParallelWriter(self, context)

    def expand(self, context: ExpansionContext) -> Expansion:
        writer = self.writer(context)
        forward, backward = self.passes(writer)
        if self.ends is not None and self.forward is not None:
            forward = [*writer.embedding(), *forward, *writer.logits(self.ends)]
        if self.ends is not None and self.backward is not None:
            backward = [
                *writer.logits_backward(self.ends),
                *backward,
                *writer.embedding_backward(),
            ]
        between = [compute("between", self.between)] if self.between else []
        clip = writer.clip_gradients() if self.clip_grad_norm else []
        return Expansion([*forward, *between, *backward, *clip], writer.tensors)


class TensorParallelWriter(IntraLayerWriter):
    """Entries of one layer's passes.

    Tensors: `out` is the output of a pair, `part` a rank's part of it along the sequence, `whole`
    the gathered input; the same with `grad` for gradients.
    """

    def __init__(self, fields: TensorParallel, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype, fields.axis)
        self.fields = fields
        self.ranks = context.size_of(fields.axis)
        #: With a single rank nothing is sent.
        self.communicates = self.ranks > 1
        whole = [fields.sequence, fields.batch, fields.hidden]
        part = [fields.sequence // self.ranks, fields.batch, fields.hidden]
        self.tensor("out", whole)
        self.tensor("grad", whole)
        if fields.sequence_parallel:
            self.tensor("part", part)
            self.tensor("whole", whole)
            self.tensor("grad_part", part)
            self.tensor("grad_whole", whole)
        else:
            for k in range(1, max(fields.columns)):
                self.tensor(f"grad_{k}", whole)

    def name(self, word: str) -> str:
        return f"{self.prefix}_{word}"

    # --- layers ---
    def forward(self, cost: ComputeCost) -> list[Entry]:
        """Per pair: the columns need the whole input, and the output of the rows is a sum."""
        steps: list[Entry] = []
        for k, share in enumerate(equal_cost_shares(cost, self.fields.pairs)):
            steps += self._pair(self.pair_name("forward", k), share, prefix="")
        return steps

    def backward(self, cost: ComputeCost) -> list[Entry]:
        """The same in reverse.

        The rows need the whole gradient of their output, and the gradient of the columns' input is
        a sum.
        """
        steps: list[Entry] = []
        shares = equal_cost_shares(cost, self.fields.pairs)
        for k in reversed(range(self.fields.pairs)):
            name = self.pair_name("backward", k)
            columns = self.fields.columns_of(k)
            if columns == 1 or self.fields.sequence_parallel:
                steps += self._pair(name, shares[k], prefix="grad_")
                continue
            for c, share in enumerate(equal_cost_shares(shares[k], columns)):
                grad = self.name(f"grad_{c}" if c else "grad")
                steps += self.partial_sum(f"{name}, matrix {c}", share, grad)
        return steps

    def pair_name(self, word: str, k: int) -> str:
        return f"{word} {k}" if self.fields.pairs > 1 else word

    def _pair(self, name: str, cost: ComputeCost, prefix: str) -> list[Entry]:
        """One pair of matrices; ``prefix`` begins the tensors of the backward pass."""
        out = self.name("grad" if prefix else "out")
        if not self.fields.sequence_parallel:
            return self.partial_sum(name, cost, out)
        if not self.communicates:
            return [compute(name, cost, writes=[out])]
        part = self.name(f"{prefix}part")
        whole = self.name(f"{prefix}whole")
        return [
            self.call("all_gather_into_tensor", input=part, output=whole),
            compute(name, cost, reads=[whole], writes=[out]),
            self.call("reduce_scatter_tensor", input=out, output=part, op="sum"),
        ]

    def partial_sum(self, name: str, cost: ComputeCost, tensor: str) -> list[Entry]:
        """A product of which every rank has a summand, and the sum."""
        product = compute(name, cost, writes=[tensor])
        if not self.communicates:
            return [product]
        return [product, self.call("all_reduce", tensor=tensor, op="sum")]

    def sum_over_ranks(self, tensor: str, part: str) -> list[Entry]:
        """Sum a tensor; under sequence parallelism each rank gets only its ``part``."""
        if not self.communicates:
            return []
        if self.fields.sequence_parallel:
            return [self.call("reduce_scatter_tensor", input=tensor, output=part, op="sum")]
        return [self.call("all_reduce", tensor=tensor, op="sum")]

    # --- embedding, output, loss ---
    def embedding(self) -> list[Entry]:
        """Each rank looks up the tokens of its part of the vocabulary; the rest are zeros."""
        out = self.name("out")
        lookup = compute("embedding", ZERO_COST, writes=[out])
        return [lookup, *self.sum_over_ranks(out, self.name("part"))]

    def embedding_backward(self) -> list[Entry]:
        """The gradient of the whole sequence, for the rows that each rank has."""
        if not self.communicates or not self.fields.sequence_parallel:
            return []
        part = self.name("grad_part")
        return [self.call("all_gather_into_tensor", input=part, output=self.name("grad_whole"))]

    def logits(self, ends: VocabParallelFields) -> list[Entry]:
        """The output's product, and the loss or the gathered logits."""
        fields = self.fields
        shape = [fields.sequence, fields.batch, ends.vocabulary // self.ranks]
        logits = self.tensor("logits", shape)
        output = compute("output", ends.forward, reads=[self.name("out")], writes=[logits])
        if not self.communicates:
            return [output]
        steps: list[Entry] = []
        if fields.sequence_parallel:
            part = self.name("part")
            steps.append(self.call("all_gather_into_tensor", input=part, output=self.name("whole")))
        steps.append(output)
        if ends.loss_parallel:
            return [*steps, *self.parallel_loss(logits)]
        all_logits = self.tensor("all_logits", [self.ranks, *shape])
        return [*steps, self.call("all_gather_into_tensor", input=logits, output=all_logits)]

    def parallel_loss(self, logits: str) -> list[Entry]:
        """The loss from each rank's part of the logits, by three reductions."""
        tokens = self.fields.batch * self.fields.sequence
        largest = self.tensor("loss_largest", tokens, "float32")
        exponentials = self.tensor("loss_exponentials", tokens, "float32")
        target = self.tensor("loss_target", tokens, "float32")
        results = [largest, exponentials, target]
        return [
            compute("loss", ZERO_COST, reads=[logits], writes=results),
            self.call("all_reduce", tensor=largest, op="max"),
            self.call("all_reduce", tensor=exponentials, op="sum"),
            self.call("all_reduce", tensor=target, op="sum"),
        ]

    def logits_backward(self, ends: VocabParallelFields) -> list[Entry]:
        grad = self.name("grad")
        product = compute("output backward", ends.backward, writes=[grad])
        return [product, *self.sum_over_ranks(grad, self.name("grad_part"))]

    # --- gradient clipping ---
    def clip_gradients(self) -> list[Entry]:
        """torch/nn/utils/clip_grad.py on DTensors.

        A layer norm's gradient is a sum over the ranks' parts of the sequence; each is reduced
        first, by itself. Then the norms of all parameters are summed, an element each.
        """
        if not self.communicates:
            return []
        fields = self.fields
        layer_norms = fields.pairs * fields.layers
        # A pair has its matrices of columns and one of rows.
        matrices = fields.layers * sum(fields.columns_of(k) + 1 for k in range(fields.pairs))
        if fields.ends is not None:
            layer_norms += 1
            matrices += 2
        norm_grad = self.tensor("norm_grad", fields.hidden)
        norms = self.tensor("norms", layer_norms + matrices)
        return [
            *repeat_entries(layer_norms, [self.call("all_reduce", tensor=norm_grad, op="sum")]),
            compute("norms", ZERO_COST, writes=[norms]),
            self.call("all_reduce", tensor=norms, op="sum"),
        ]
