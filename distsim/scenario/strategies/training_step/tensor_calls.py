"""The calls of tensor parallelism in a transformer's step: blocks, embedding, logits and loss.

The ranks of the tensor axis share the matrices of each layer. A block is attention or the
feed-forward part (`mlp`); each starts with matrices that are split by columns and ends with one
that is split by rows. Two libraries make different calls for it:

- DTensor (torch 2.13, `torch/distributed/tensor/parallel/style.py`, `loss.py`; recorded in
  tests/support/wrapped_tp.py). Without sequence parallelism, the gradient of a block's input is
  reduced once per matrix that is split by columns (wq, wk, wv; w1, w3), each right after its own
  product. With sequence parallelism, the gathered input is kept and its gradient is scattered once.
  No communication overlaps with compute. Experts are one module, whose input is gathered or
  replicated as a whole (torchtitan, models/moe, `apply_moe_ep_tp`); latent attention is treated in
  the same way here.
- Megatron-LM (core/tensor_parallel/layers.py, core/transformer/attention.py). Queries, keys and
  values are one matrix, and so are gate and up. The input is gathered again in the backward pass,
  and the input's gradient is sent while the weights' gradients are computed.

Both libraries split embeddings by vocabulary, so that each rank looks up a part and the parts are
summed. The loss on split logits takes three reductions: the largest logit and two sums
(`loss_parallel`; Megatron-LM core/tensor_parallel/cross_entropy.py).
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
    """The fields that make a call asynchronous; none if there is no handle to wait for."""
    return {} if handle is None else {"async_": True, "as_": handle}


class TransformerTensorWriter(EntryWriter):
    """Writes the entries of everything that is split over the tensor axis.

    Messages use new buffers, declared inline. ``cost`` is the cost of one micro-batch on a rank.
    """

    def __init__(self, train: TransformerFields, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix("transformer"), train.dtype)
        self.train = train
        self.context = context
        self.cost = train.micro_batch_cost(context)
        self.model = self.cost.model
        self.product_dtype: str = train.matmul_dtype or train.dtype
        self.tensor_axis = train.axis("tensor", context)

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether several ranks share the matrices."""
        return self.tensor_axis is not None and self.cost.tensor_ranks > 1

    @property
    def splits_vocabulary(self) -> bool:
        """Whether embedding and logits are split by vocabulary."""
        return self.is_tensor_parallel and self.model.vocabulary > 0

    @property
    def parameter_dtype(self) -> str:
        """The dtype in which parameters are kept and sent."""
        return "float32" if self.train.autocast else self.train.dtype

    def matmul(self, name: str, flops: int) -> Entry:
        """Matrix products in `product_dtype`; those of the logits stay in the model's dtype."""
        dtype = self.train.dtype if name.endswith(" head") else self.product_dtype
        return compute(name, {"flops": units.flops_text(float(flops)), "dtype": dtype})

    # --- messages ---
    def buffer(self, numel: int, dtype: str | None = None) -> Entry:
        return tensor_declaration(numel, dtype or self.dtype)

    def all_gather(
        self,
        part_numel: int,
        group: GroupRef | None,
        handle: str | None = None,
        dtype: str | None = None,
    ) -> Entry:
        full_numel = part_numel * self.context.size_of(group)
        return step(
            "all_gather_into_tensor",
            input=self.buffer(part_numel, dtype),
            output=self.buffer(full_numel, dtype),
            group=group,
            **async_fields(handle),
        )

    def reduce_scatter(
        self, part_numel: int, group: GroupRef | None, handle: str | None = None
    ) -> Entry:
        full_numel = part_numel * self.context.size_of(group)
        return step(
            "reduce_scatter_tensor",
            input=self.buffer(full_numel),
            output=self.buffer(part_numel),
            group=group,
            **async_fields(handle),
        )

    @property
    def hidden_part_numel(self) -> int:
        """Elements of a tensor rank's part of the activation between two blocks."""
        return self.cost.hidden_numel // self.cost.tensor_ranks

    def gather_hidden(self, handle: str | None = None) -> Entry:
        """Sequence parallelism: gather the activation before a block."""
        return self.all_gather(self.hidden_part_numel, self.tensor_axis, handle)

    def scatter_hidden(self, handle: str | None = None) -> Entry:
        """Sequence parallelism: sum a block's output and scatter it along the sequence."""
        return self.reduce_scatter(self.hidden_part_numel, self.tensor_axis, handle)

    def all_reduce_hidden(self, handle: str | None = None) -> Entry:
        """Without sequence parallelism: sum a block's output."""
        return step(
            "all_reduce",
            tensor=self.buffer(self.cost.hidden_numel),
            group=self.tensor_axis,
            **async_fields(handle),
        )

    def gather_input(self) -> list[Entry]:
        """The call before a block, if any."""
        return [self.gather_hidden()] if self.cost.sequence_parallel else []

    def reduce_output(self) -> list[Entry]:
        """The call after a block, if any."""
        if self.cost.sequence_parallel:
            return [self.scatter_hidden()]
        return [self.all_reduce_hidden()] if self.cost.tensor_ranks > 1 else []

    # --- embedding, logits, loss ---
    def embedding_forward(self) -> list[Entry]:
        """Each rank looks up the tokens of its part of the vocabulary; the results are summed."""
        return self.reduce_output() if self.splits_vocabulary else []

    def embedding_backward(self) -> list[Entry]:
        return self.gather_input() if self.splits_vocabulary else []

    def head_forward(self) -> list[Entry]:
        """The output projection and the loss."""
        product = self.matmul("forward head", self.cost.head_flops)
        traffic = self.loss_traffic("forward")
        if not self.splits_vocabulary:
            return [product, traffic]
        return [*self.gather_input(), product, *self.loss_calls(), traffic]

    def head_backward(self) -> list[Entry]:
        flops = self.cost.head_flops
        traffic = self.loss_traffic("backward")
        if self.splits_vocabulary and self.train.tensor_calls == "megatron":
            overlapped = self.overlapped_backward(
                "head", 2 * flops, flops, [], [], ends_in_row_matrix=False
            )
            return [traffic, *overlapped]
        product = self.matmul("backward head", 2 * flops)
        if not self.splits_vocabulary:
            return [traffic, product]
        return [traffic, product, *self.reduce_output()]

    def loss_traffic(self, word: Literal["forward", "backward"]) -> Entry:
        """The memory traffic of the loss: of a part of the logits, unless they were gathered."""
        is_gathered = self.splits_vocabulary and not self.train.loss_parallel
        parts = self.cost.tensor_ranks if is_gathered else 1
        part_bytes = self.cost.logits_traffic.of(word)
        return compute(f"{word} loss", {"bytes": units.size_text(parts * part_bytes)})

    def loss_calls(self) -> list[Entry]:
        """The reductions of a loss on split logits, or the gather of the logits."""
        if not self.train.loss_parallel:
            vocabulary_part = -(-self.model.vocabulary // self.cost.tensor_ranks)
            return [self.all_gather(self.cost.tokens * vocabulary_part, self.tensor_axis)]
        number_per_token = tensor_declaration(self.cost.tokens, "float32")
        return [
            step("all_reduce", tensor=number_per_token, group=self.tensor_axis, op=op)
            for op in ("max", "sum", "sum")
        ]

    # --- a block's backward pass ---
    def block_backward(
        self,
        word: str,
        flops: int,
        column_flops: Sequence[int],
        before: list[Entry],
        after: list[Entry],
    ) -> list[Entry]:
        """A block's backward pass, with the entries ``before`` and ``after`` its products.

        ``column_flops`` are the FLOPs of the forward product of each matrix that is split by
        columns. The products for its gradient and for its input's gradient cost the same.
        """
        product = self.matmul(f"backward {word}", flops)
        if not self.is_tensor_parallel:
            return [*before, product, *after]
        if self.train.tensor_calls == "megatron":
            return self.overlapped_backward(word, flops, sum(column_flops), before, after)
        row_flops = self.overlapped_row_flops(word)
        if row_flops:
            # The backward pass starts with the matrix that is split by rows.
            return self.block_in_pieces(
                f"backward {word}", flops, row_flops, sum(column_flops), [*before, *after]
            )
        if self.cost.sequence_parallel or len(column_flops) == 1:
            return [*self.gather_input(), *before, product, *after, *self.reduce_output()]

        # DTensor without sequence parallelism: one all_reduce per matrix that is split by columns.
        other_flops = flops - 2 * sum(column_flops)
        entries = [*before, self.matmul(f"backward {word}", other_flops), *after]
        for k, matrix_flops in enumerate(column_flops):
            entries.append(self.matmul(f"backward {word}, matrix {k}", 2 * matrix_flops))
            entries.append(self.all_reduce_hidden())
        return entries

    def overlapped_row_flops(self, word: str) -> int:
        """Forward FLOPs of the row-split matrix that ends a block, if communication overlaps it.

        0 without `tensor_overlap`, and for experts, whose communication does not overlap.
        """
        overlaps = (
            self.train.tensor_overlap and self.is_tensor_parallel and self.cost.sequence_parallel
        )
        if not overlaps:
            return 0
        if word != "mlp":
            return self.cost.output_flops
        return 0 if self.model.experts else self.cost.mlp_flops // self.model.matrices

    def block_in_pieces(
        self,
        word: str,
        flops: int,
        first_flops: int,
        last_flops: int,
        inner: list[Entry] | None = None,
    ) -> list[Entry]:
        """A block whose gather and scatter overlap with its products, piece by piece.

        While one piece of the input arrives, the piece before it is multiplied; while one piece of
        the output is sent, the next one is computed (Transformer Engine's userbuffers, PyTorch's
        async TP). Only one piece of the first product has to follow the gather, and only one piece
        of the scatter the last product. ``first_flops`` and ``last_flops`` are the FLOPs of these
        two products, ``inner`` the entries between them.
        """
        ranks = self.cost.tensor_ranks
        handle = f"{self.prefix}_{word.replace(' ', '_')}"
        during_gather = first_flops - first_flops // ranks
        during_scatter = last_flops - last_flops // ranks
        return [
            self.gather_hidden(f"{handle}_in"),
            self.matmul(f"{word}, pieces", during_gather),
            wait(f"{handle}_in"),
            *(inner or []),
            self.matmul(word, flops - during_gather - during_scatter),
            *self.scatter_in_pieces(word, handle, during_scatter),
        ]

    def scatter_in_pieces(self, word: str, handle: str, flops: int) -> list[Entry]:
        """A reduce_scatter that overlaps with products, except for its last piece."""
        part = self.hidden_part_numel
        last_piece = max(part // self.cost.tensor_ranks, 1)
        axis = self.tensor_axis
        product = self.matmul(f"{word}, pieces", flops)
        if last_piece == part:
            return [product, self.reduce_scatter(part, axis)]
        return [
            self.reduce_scatter(part - last_piece, axis, f"{handle}_out"),
            product,
            wait(f"{handle}_out"),
            self.reduce_scatter(last_piece, axis),
        ]

    def overlapped_backward(
        self,
        word: str,
        flops: int,
        column_flops: int,
        before: list[Entry],
        after: list[Entry],
        ends_in_row_matrix: bool = True,
    ) -> list[Entry]:
        """Megatron-LM: the input's gradient is sent while the weights' gradients are computed.

        With sequence parallelism the output's gradient is gathered first, if the block ends in a
        matrix that is split by rows; and the input is gathered again during the backward products,
        because only the rank's part of it was kept.
        """
        handle = f"{self.prefix}_{word}"
        gathers_again = self.cost.sequence_parallel
        start_gather_input = [self.gather_hidden(f"{handle}_input")] if gathers_again else []
        wait_for_input: list[Entry] = [wait(f"{handle}_input")] if gathers_again else []

        row_flops = self.overlapped_row_flops(word) if ends_in_row_matrix else 0
        during_gather = row_flops - row_flops // self.cost.tensor_ranks
        gather_output_gradient: list[Entry] = []
        if row_flops:
            gather_output_gradient = [
                self.gather_hidden(f"{handle}_out"),
                self.matmul(f"backward {word}, pieces", during_gather),
                wait(f"{handle}_out"),
            ]
        elif gathers_again and ends_in_row_matrix:
            gather_output_gradient = [self.gather_hidden()]

        if gathers_again:
            send_input_gradient = self.scatter_hidden(f"{handle}_grad")
        else:
            send_input_gradient = self.all_reduce_hidden(f"{handle}_grad")
        return [
            *gather_output_gradient,
            *start_gather_input,
            *before,
            self.matmul(f"backward {word}", flops - column_flops - during_gather),
            *after,
            *wait_for_input,
            send_input_gradient,
            self.matmul(f"weight gradients {word}", column_flops),
            wait(f"{handle}_grad"),
        ]
