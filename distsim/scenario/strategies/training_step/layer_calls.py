"""The calls of one layer of a transformer, and of its weights; of a stage's layers.

Sources: Shoeybi et al., Megatron-LM, arXiv:1909.08053 (the two all_reduces of a tensor-parallel
layer); Korthikanti et al., arXiv:2205.05198, section 4.2.2 (sequence parallelism: gathered
before, reduce-scattered after each block); `train_tensor` (the backward pass); Llama 3,
arXiv:2407.21783, section 3.3.2 (context parallelism by all_gather of keys and values); PyTorch
fully_shard (ZeRO 3).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from distsim.common import units
from distsim.scenario.strategies.base import (
    Entry,
    ExpansionContext,
    GroupRef,
    compute,
    step,
    tensor_declaration,
)
from distsim.scenario.strategies.field_types import FLOAT_DTYPE_BYTES
from distsim.scenario.strategies.layers import repeat_entries
from distsim.scenario.strategies.training_step.presets import total_numel
from distsim.scenario.strategies.training_step.tensor_calls import (
    TransformerTensorWriter,
    async_fields,
)
from distsim.scenario.strategies.training_step.transformer_fields import TransformerFields

#: Kernels of a layer forward and backward, but for two or more that its products' entries count.
#: PyTorch's modules in eager mode: 65 on an H100 (torch's profiler,
#: benchmarks/gpu/compute_h100.json), as many a product and a gradient as there are matrices;
#: Transformer Engine's fused layer: 12 forward and twice as many backward (counted in its modules:
#: norms, products, rotary, attention, sums).
KERNELS_PER_LAYER = {"dtensor": (20, 41), "megatron": (10, 22)}


class ParameterCounts(NamedTuple):
    """Parameters of a stage on one rank: those that all experts share, and the rank's experts'."""

    dense: int = 0
    expert: int = 0


class TransformerLayerWriter(TransformerTensorWriter):
    """Writes a layer's entries."""

    def __init__(self, train: TransformerFields, context: ExpansionContext) -> None:
        super().__init__(train, context)
        self.split, self.stages = train.split(context), train.stages(context)
        self.cp = train.axis("context", context)
        self.ep = train.axis("experts", context) if self.one.experts > 1 else None
        data = train.data_axes(context)
        self.shared = self.joint(data)
        self.apart = self.joint(tuple(axis for axis in data if axis != self.ep))
        #: Ranks of each of the two groups.
        self.ranks = {
            group: 1 if group is None else context.size_of(group)
            for group in (self.shared, self.apart)
        }

    def joint(self, axes: tuple[str, ...]) -> GroupRef | None:
        """Axes of more than one rank, as one group; None where there is none."""
        real = tuple(axis for axis in axes if self.context.mesh[axis] > 1)
        return None if not real else real[0] if len(real) == 1 else real

    # --- a stage's micro-batch ---
    def stage_forward(self, stage: int) -> list[Entry]:
        first = self.embedding_forward() if stage == 0 else []
        return [
            *first,
            *self.times(self.split[stage], self.layer_forward()),
            *self.last_forward(stage),
        ]

    def stage_backward(self, stage: int) -> list[Entry]:
        layers = self.times(self.split[stage], self.layer_backward())
        return [*self.last_backward(stage), *layers, *self.first_backward(stage)]

    def last_forward(self, stage: int) -> list[Entry]:
        """The head, on the last stage."""
        return self.head_forward() if stage == self.stages - 1 else []

    def last_backward(self, stage: int) -> list[Entry]:
        return self.head_backward() if stage == self.stages - 1 else []

    def first_backward(self, stage: int) -> list[Entry]:
        """The embedding, on the first stage."""
        return self.embedding_backward() if stage == 0 else []

    def times(self, count: int, steps: list[Entry]) -> list[Entry]:
        """Layers one after the other."""
        return steps if count == 1 else repeat_entries(count, steps) if count else []

    # --- a layer ---
    def layer_forward(self) -> list[Entry]:
        one = self.one
        if self.tensor_axis is None and self.cp is None and self.ep is None:
            whole = self.matmul("forward", one.layer_flops + one.padding_flops + self.lag(1))
            return [*self.launched(1), whole, *self.scores(1), self.memory_traffic("forward")]
        attention = self.block_forward(
            "attention", one.attention_flops + self.lag(1), self.keys(), self.scores(1)
        )
        experts = self.block_forward(
            "mlp", one.mlp_flops + one.padding_flops, self.routed(), self.routed()
        )
        return [*self.launched(1), *attention, *experts, self.memory_traffic("forward")]

    def block_forward(
        self, word: str, flops: int, first: list[Entry], last: list[Entry]
    ) -> list[Entry]:
        """A block between its messages, or beside them."""
        if rows := self.hidden_rows(word):
            columns = self.mlp_columns() if word == "mlp" else self.attention_columns()
            return self.pieces(f"forward {word}", flops, sum(columns), rows, [*first, *last])
        return [
            *self.gather_input(),
            *first,
            self.matmul(f"forward {word}", flops),
            *last,
            *self.reduce_output(),
        ]

    def lag(self, passes: float) -> int:
        """The floating-point operations that would take as long as attention takes beyond its own
        at the products' rate: fused it is slower, and stays in ``dtype`` where they are in 8 bits,
        at twice the rate of 16; less those that `scores` prices."""
        if self.one.misaligned:
            return -round(passes * self.one.scores_flops)
        slower = 1 / self.train.attention_efficiency if self.one.flash else 1.0
        wider = FLOAT_DTYPE_BYTES[self.train.dtype] / FLOAT_DTYPE_BYTES[self.products]
        return round(
            passes
            * (
                (self.one.scores_flops + self.one.idle_flops) * slower * wider
                - self.one.scores_flops
            )
        )

    def scores(self, passes: float) -> list[Entry]:
        """Scores that miss the tensor cores, at float32's rate."""
        if not self.one.misaligned:
            return []
        return [
            compute(
                "scores",
                {"flops": units.flops_text(passes * self.one.scores_flops), "dtype": "float32"},
            )
        ]

    def launched(self, passes: int) -> list[Entry]:
        """The host's time to launch a layer's operations: some 50 in eager PyTorch forward, two for
        each of them backward (counted in Megatron-LM's transformer layer: norms, projections,
        views, softmax, dropout, residual sums)."""
        launch_ns = self.train.launch * 50 * passes
        return (
            [compute("launches", {"time": units.duration_text(launch_ns)}, on="host")]
            if launch_ns
            else []
        )

    def layer_backward(self) -> list[Entry]:
        one = self.one
        again = (
            self.layer_forward()
            if one.recompute == "full"
            else self.op_recompute()
            if one.recompute == "op"
            else []
        )
        extra = one.flash_flops + (one.recompute_flops if one.recompute == "selective" else 0)
        passes = 2.5 if one.flash else 3 if one.recompute == "selective" else 2
        extra += self.lag(passes)
        again = [*again, *self.launched(2), *self.scores(passes)]
        if self.tensor_axis is None and self.cp is None and self.ep is None:
            whole = self.matmul("backward", 2 * (one.layer_flops + one.padding_flops) + extra)
            return [*again, whole, self.memory_traffic("backward")]
        columns = self.attention_columns()
        mlp_flops = 2 * (one.mlp_flops + one.padding_flops)
        mlp = self.block_backward(
            "mlp", mlp_flops, self.mlp_columns(), self.routed(), self.routed()
        )
        keys = [*self.keys(), *self.key_gradients()]
        return [
            *again,
            self.memory_traffic("backward"),
            *mlp,
            *self.block_backward("attention", 2 * one.attention_flops + extra, columns, keys, []),
        ]

    def op_recompute(self) -> list[Entry]:
        """What a policy by operation computes again: products that are not kept, and all that is
        none; inputs are gathered again.
        """
        again = [*self.gather_input(), *self.gather_input()] if self.one.sequence_parallel else []
        products = self.one.recompute_flops
        return [
            *self.launched(1),
            *again,
            *([self.matmul("forward, again", products)] if products else []),
            self.memory_traffic("forward"),
        ]

    def attention_columns(self) -> list[int]:
        """FLOPs of queries, keys and values; latent attention as one."""
        wide = [self.model.q_hidden, self.model.kv_hidden, self.model.kv_hidden]
        each = [
            2 * self.one.tokens * self.model.hidden * columns // self.one.tensor for columns in wide
        ]
        return each if self.model.latent is None else [sum(each)]

    def mlp_columns(self) -> list[int]:
        """FLOPs of gate and up; experts as one."""
        each, count = self.one.mlp_flops // self.model.matrices, self.model.matrices - 1
        return [each * count] if self.model.experts else [each] * count

    # --- its messages ---
    def keys(self) -> list[Entry]:
        """Keys and values of the whole sequence."""
        return [] if self.one.context == 1 else [self.all_gather(self.one.kv_numel, self.cp)]

    def key_gradients(self) -> list[Entry]:
        return [] if self.one.context == 1 else [self.reduce_scatter(self.one.kv_numel, self.cp)]

    def routed(self) -> list[Entry]:
        """Tokens to their experts, or back; spread evenly."""
        if self.ep is None:
            return []
        size = -(-self.one.routed_numel // self.one.experts) * self.one.experts
        return [
            step(
                "all_to_all_single",
                input=self.buffer(size),
                output=self.buffer(size),
                group=self.ep,
            )
        ]

    def memory_traffic(self, word: Literal["forward", "backward"]) -> Entry:
        """The work that is bound by memory.

        These are norms, sums, dropout, non-linearities, the routing to experts, and the results
        that matrix products write.
        """
        one = self.one
        is_backward = word == "backward"
        total = (1 + is_backward) * one.layer_traffic
        total += one.products_traffic[is_backward] + one.routing_traffic
        if self.products.startswith("float8"):
            total += one.casts_traffic[is_backward]
        if is_backward:
            total += one.sums_traffic
        if one.autocast:
            # Weights are cast, and their gradients are cast back.
            total += (4 + FLOAT_DTYPE_BYTES[self.train.dtype]) * sum(self.layer_weights())
        return compute(
            f"{word}, memory",
            {"bytes": units.size_text(total)},
            kernels=KERNELS_PER_LAYER[self.train.tensor_calls][is_backward],
        )

    # --- weights ---
    def layer_weights(self) -> ParameterCounts:
        """Matrices are split over the tensor ranks, experts also over the expert ranks.

        Norms and the router are whole on each rank.
        """
        model, t = self.model, self.one.tensor
        whole = model.norms * total_numel(model.norm_shapes()) + model.experts * model.hidden
        matrices = model.layer_parameters - model.expert_parameters - whole
        return ParameterCounts(
            whole + matrices // t, model.expert_parameters // (t * self.one.experts)
        )

    def ends_weights(self, stage: int) -> ParameterCounts:
        """Embeddings on the first stage, the head on the last (tied embeddings are on both)."""
        model, t = self.model, self.one.tensor
        first = model.embedding_parameters // t if stage == 0 else 0
        again = model.vocabulary * model.hidden if model.tied and self.stages > 1 else 0
        last = (model.head_parameters + again) // t if stage == self.stages - 1 else 0
        return ParameterCounts(first + last)

    def stage_weights(self, stage: int) -> ParameterCounts:
        ends, layer, layers = self.ends_weights(stage), self.layer_weights(), self.split[stage]
        first = sum(self.split[:stage])
        plain = max(
            0, min(self.model.dense, first + layers) - first
        )  # those without experts come first
        dense = (
            ends.dense
            + (layers - plain) * layer.dense
            + plain * self.model.dense_parameters // self.one.tensor
        )
        return ParameterCounts(dense, ends.expert + (layers - plain) * layer.expert)

    # --- on their way ---
    def kinds(self, weights: ParameterCounts) -> tuple[tuple[str, int, GroupRef | None], ...]:
        """Word, number of elements, and the ranks that have the same of them."""
        return ("dense", weights.dense, self.shared), ("expert", weights.expert, self.apart)

    def reduce(
        self, weights: ParameterCounts, handle: str | None = None, index: str = ""
    ) -> list[Entry]:
        """Gradients of so many parameters: all_reduce, or with ZeRO a reduce_scatter, padded to
        equal shards.
        """
        found: list[Entry] = []
        for word, elements, group in self.kinds(weights):
            if group is None or not elements:
                continue
            fields = {
                "op": "avg",
                "group": group,
                **async_fields(None if handle is None else f"{handle}_{word}@{index}"),
            }
            part = -(-elements // self.ranks[group])
            dtype = self.train.gradient_dtype
            # With autocast, ZeRO is ZeroRedundancyOptimizer, which works on top of DDP.
            if self.train.zero == 0 or self.train.autocast:
                found.append(
                    step("all_reduce", tensor=tensor_declaration(elements, dtype), **fields)
                )
            else:
                full = tensor_declaration(part * self.ranks[group], dtype)
                shard = tensor_declaration(part, dtype)
                found.append(step("reduce_scatter_tensor", input=full, output=shard, **fields))
        return found

    def gather_weights(
        self, weights: ParameterCounts, handle: str | None = None, index: str = ""
    ) -> list[Entry]:
        """Gather the parameters of all ranks.

        ZeroRedundancyOptimizer broadcasts each rank's part; here that is one call.
        """
        gathers: list[Entry] = []
        for word, elements, group in self.kinds(weights):
            if group is None or not elements:
                continue
            part = -(-elements // self.ranks[group])
            name = None if handle is None else f"{handle}_{word}@{index}"
            gathers.append(self.all_gather(part, group, name, self.weights_dtype))
        return gathers
