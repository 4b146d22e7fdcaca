"""What the ranks that share a layer's matrices send each other in a transformer's step: blocks,
embedding, logits and loss.

DTensor (torch 2.13, `torch/distributed/tensor/parallel/style.py`, `loss.py`; recorded in
tests/support/wrapped_tp.py): without sequence parallelism the gradient of a block's input is
reduced once for each matrix cut by columns (wq, wk, wv; w1, w3), each where it arises; with it the
gathered input is kept, and its gradient scattered once. Nothing is computed beside. Experts are one
module, whose input is gathered or replicated as a whole (torchtitan, models/moe,
`apply_moe_ep_tp`); so is latent attention here.

Megatron-LM (core/tensor_parallel/layers.py, core/transformer/attention.py): queries, keys and
values are one matrix, and so are gate and up; the input is gathered again in the backward pass, and
its gradient travels while the weights' is computed.

Both: embeddings cut by vocabulary are sums, of which each rank has a part; the loss of cut logits
takes three reductions, of the largest logit, and of two sums (`loss_parallel`; Megatron-LM
core/tensor_parallel/cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from distsim.common import units
from distsim.scenario.strategies.base import (
    Entry,
    EntryWriter,
    ExpansionContext,
    GroupRef,
    compute,
    step,
    tensor_declaration,
    wait,
)
from distsim.scenario.strategies.training_step.transformer_fields import TransformerFields


def async_fields(handle: str | None) -> dict[str, object]:
    """Fields of a call that is waited for later, by a handle."""
    return {} if handle is None else {"async_": True, "as_": handle}


class TransformerTensorWriter(EntryWriter):
    """Writes the entries of everything that is split over the tensor axis.

    Messages use new buffers, declared inline.
    """

    def __init__(self, train: TransformerFields, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix("transformer"), train.dtype)
        self.train, self.context = train, context
        self.one = train.one_pass(context)
        self.model = self.one.model
        self.products: str = train.matmul_dtype or train.dtype
        self.tensor_axis = train.axis("tensor", context)

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether several ranks share the matrices."""
        return self.tensor_axis is not None and self.one.tensor > 1

    @property
    def splits_vocabulary(self) -> bool:
        """Whether embedding and logits are split by vocabulary."""
        return self.is_tensor_parallel and self.model.vocabulary > 0

    def matmul(self, name: str, flops: int) -> Entry:
        """Matrix products in the dtype of the products; the logits stay in ``dtype``."""
        dtype = self.train.dtype if name.endswith(" head") else self.products
        return compute(name, {"flops": units.flops_text(float(flops)), "dtype": dtype})

    # --- messages ---
    @property
    def weights_dtype(self) -> str:
        """The dtype in which parameters are kept and sent."""
        return "float32" if self.train.autocast else self.train.dtype

    def buffer(self, elements: int, dtype: str | None = None) -> Entry:
        return tensor_declaration(elements, dtype or self.dtype)

    def gather_input(self) -> list[Entry]:
        return [self.gather()] if self.one.sequence_parallel else []

    def reduce_output(self) -> list[Entry]:
        if self.one.sequence_parallel:
            return [self.scatter()]
        return [self.all_reduce_hidden()] if self.one.tensor > 1 else []

    def gather(self, handle: str | None = None) -> Entry:
        return self.all_gather(self.one.hidden_numel // self.one.tensor, self.tensor_axis, handle)

    def scatter(self, handle: str | None = None) -> Entry:
        return self.reduce_scatter(
            self.one.hidden_numel // self.one.tensor, self.tensor_axis, handle
        )

    def all_reduce_hidden(self, handle: str | None = None) -> Entry:
        return step(
            "all_reduce",
            tensor=self.buffer(self.one.hidden_numel),
            group=self.tensor_axis,
            **async_fields(handle),
        )

    def all_gather(
        self, part: int, group: GroupRef | None, handle: str | None = None, dtype: str | None = None
    ) -> Entry:
        shard, full = (
            self.buffer(part, dtype),
            self.buffer(part * self.context.size_of(group), dtype),
        )
        return step(
            "all_gather_into_tensor", input=shard, output=full, group=group, **async_fields(handle)
        )

    def reduce_scatter(self, part: int, group: GroupRef | None, handle: str | None = None) -> Entry:
        shard, full = self.buffer(part), self.buffer(part * self.context.size_of(group))
        return step(
            "reduce_scatter_tensor", input=full, output=shard, group=group, **async_fields(handle)
        )

    # --- embedding, logits, loss ---
    def embedding_forward(self) -> list[Entry]:
        """Each rank looks up the tokens of its part of the vocabulary; the results are summed."""
        return self.reduce_output() if self.splits_vocabulary else []

    def embedding_backward(self) -> list[Entry]:
        return self.gather_input() if self.splits_vocabulary else []

    def head_forward(self) -> list[Entry]:
        product = self.matmul("forward head", self.one.head_flops)
        traffic = self.logits("forward")
        if not self.splits_vocabulary:
            return [product, traffic]
        return [*self.gather_input(), product, *self.loss(), traffic]

    def logits(self, word: Literal["forward", "backward"]) -> Entry:
        """The memory traffic of the loss: of split logits a part, unless they were gathered."""
        whole = self.one.tensor if self.splits_vocabulary and not self.train.loss_parallel else 1
        return compute(
            f"{word} loss",
            {"bytes": units.size_text(whole * self.one.logits_traffic[word == "backward"])},
        )

    def loss(self) -> list[Entry]:
        """The reductions of a loss of split logits, or the gather of the logits."""
        if not self.train.loss_parallel:
            return [
                self.all_gather(
                    self.one.tokens * -(-self.model.vocabulary // self.one.tensor), self.tensor_axis
                )
            ]
        row = tensor_declaration(self.one.tokens, "float32")
        return [
            step("all_reduce", tensor=row, group=self.tensor_axis, op=op)
            for op in ("max", "sum", "sum")
        ]

    def head_backward(self) -> list[Entry]:
        flops, moved = self.one.head_flops, self.logits("backward")
        if not self.splits_vocabulary:
            return [moved, self.matmul("backward head", 2 * flops)]
        if self.train.tensor_calls == "megatron":
            return [moved, *self.overlapped_backward("head", 2 * flops, flops, [], [], rows=False)]
        return [moved, self.matmul("backward head", 2 * flops), *self.reduce_output()]

    # --- a block's backward pass ---
    def block_backward(
        self, word: str, flops: int, columns: Sequence[int], first: list[Entry], last: list[Entry]
    ) -> list[Entry]:
        """A block's backward pass, with the work ``first`` before it and ``last`` after it.

        ``columns`` are the FLOPs of the forward product of each matrix that is split by columns;
        its gradient, and that of its input, cost the same.
        """
        if not self.is_tensor_parallel:
            return [*first, self.matmul(f"backward {word}", flops), *last]
        if self.train.tensor_calls == "megatron":
            return self.overlapped_backward(word, flops, sum(columns), first, last)
        if rows := self.hidden_rows(word):
            return self.pieces(f"backward {word}", flops, rows, sum(columns), [*first, *last])
        if self.one.sequence_parallel or len(columns) == 1:
            return [
                *self.gather_input(),
                *first,
                self.matmul(f"backward {word}", flops),
                *last,
                *self.reduce_output(),
            ]
        found = [*first, self.matmul(f"backward {word}", flops - 2 * sum(columns)), *last]
        for k, each in enumerate(columns):
            found += [
                self.matmul(f"backward {word}, matrix {k}", 2 * each),
                self.all_reduce_hidden(),
            ]
        return found

    def hidden_rows(self, word: str) -> int:
        """FLOPs of the product by rows that ends a block, forward.

        0 if no communication overlaps it (`tensor_overlap`; with experts there is none).
        """
        overlaps = (
            self.train.tensor_overlap and self.is_tensor_parallel and self.one.sequence_parallel
        )
        if not overlaps:
            return 0
        if word != "mlp":
            return self.one.output_flops
        return 0 if self.model.experts else self.one.mlp_flops // self.model.matrices

    def pieces(
        self, word: str, flops: int, first: int, last: int, inner: list[Entry] | None = None
    ) -> list[Entry]:
        """A block between a gather before its first product and a scatter after its last, of so
        many FLOP, both in pieces: while one travels the one before is multiplied, or made
        (Transformer Engine, PyTorch's async TP). Only the last product of the first and the last
        piece of the second wait. ``inner``: what comes between.
        """
        t, handle = self.one.tensor, f"{self.prefix}_{word.replace(' ', '_')}"
        early, late, part = (
            first - first // t,
            last - last // t,
            self.one.hidden_numel // self.one.tensor,
        )
        begin = [
            self.gather(f"{handle}_in"),
            self.matmul(f"{word}, pieces", early),
            wait(f"{handle}_in"),
        ]
        return [
            *begin,
            *(inner or []),
            self.matmul(word, flops - early - late),
            *self.sent_pieces(word, handle, late, part),
        ]

    def sent_pieces(self, word: str, handle: str, flops: int, part: int) -> list[Entry]:
        """A scatter of which all but the last piece travels beside products."""
        left = max(part // self.one.tensor, 1)
        axis = self.tensor_axis
        if left == part:
            return [self.matmul(f"{word}, pieces", flops), self.reduce_scatter(part, axis)]
        ahead = [
            self.reduce_scatter(part - left, axis, f"{handle}_out"),
            self.matmul(f"{word}, pieces", flops),
            wait(f"{handle}_out"),
        ]
        return [*ahead, self.reduce_scatter(left, axis)]

    def overlapped_backward(
        self,
        word: str,
        flops: int,
        columns: int,
        first: list[Entry],
        last: list[Entry],
        rows: bool = True,
    ) -> list[Entry]:
        """The input's gradient is sent while the weights' gradients are computed (Megatron-LM).

        ``rows``: the block ends in a matrix that is split by rows.
        """
        handle = f"{self.prefix}_{word}"
        again = self.one.sequence_parallel
        gathered = [self.gather(f"{handle}_input")] if again else []
        waited: list[Entry] = [wait(f"{handle}_input")] if again else []
        sent = self.scatter(f"{handle}_grad") if again else self.all_reduce_hidden(f"{handle}_grad")
        begin, done = [*([self.gather()] if again and rows else []), *gathered], 0
        if hidden := self.hidden_rows(word) if rows else 0:
            done = hidden - hidden // self.one.tensor
            pieces = [
                self.gather(f"{handle}_out"),
                self.matmul(f"backward {word}, pieces", done),
                wait(f"{handle}_out"),
            ]
            begin = [*pieces, *gathered]
        end = [self.matmul(f"weight gradients {word}", columns), wait(f"{handle}_grad")]
        return [
            *begin,
            *first,
            self.matmul(f"backward {word}", flops - columns - done),
            *last,
            *waited,
            sent,
            *end,
        ]
