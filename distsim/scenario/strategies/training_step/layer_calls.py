"""The calls of one layer of a transformer, of a stage's layers, and of their parameters.

Sources: Shoeybi et al., Megatron-LM, arXiv:1909.08053 (the two all_reduces of a tensor-parallel
layer); Korthikanti et al., arXiv:2205.05198, section 4.2.2 (sequence parallelism: all_gather before
each block, reduce_scatter after it); `distsim.scenario.strategies.training_step.tensor_calls` (the
backward pass); Llama 3, arXiv:2407.21783, section 3.3.2 (context parallelism by all_gather of keys
and values); PyTorch's fully_shard (ZeRO 3).
"""

from __future__ import annotations

from functools import cached_property
from math import prod
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
from distsim.scenario.strategies.intra_layer.hierarchical_all_to_all import hit_probability
from distsim.scenario.strategies.layers import repeat_entries
from distsim.scenario.strategies.training_step.presets import total_numel
from distsim.scenario.strategies.training_step.tensor_calls import (
    TransformerTensorWriter,
    async_fields,
)
from distsim.scenario.strategies.training_step.transformer_fields import TransformerFields

#: Kernels of a layer's forward and backward pass, except for two or more that the entries of its
#: matrix products count. PyTorch's modules in eager mode: 65 on an H100 (torch's profiler,
#: benchmarks/gpu/compute_h100.json), less one per matrix for the product and one for its gradient.
#: Transformer Engine's fused layer: 12 forward and twice as many backward (counted in its modules:
#: norms, products, rotary embeddings, attention, sums).
KERNELS_PER_LAYER = {"dtensor": (20, 41), "megatron": (10, 22)}

#: Operations that the host launches for a layer's forward pass in eager PyTorch, counted in
#: Megatron-LM's transformer layer (norms, projections, views, softmax, dropout, residual sums).
#: The backward pass launches two for each of them.
_LAUNCHES_PER_LAYER = 50

#: FLOPs of the scores in the backward pass, relative to the forward pass: 2 for the gradients of
#: both products; half a pass more with fused attention, which repeats one product (Dao,
#: arXiv:2307.08691); a whole pass more with selective recomputation.
_FLASH_BACKWARD_PASSES = 2.5
_PLAIN_BACKWARD_PASSES = 2
_RECOMPUTED_BACKWARD_PASSES = 3


class ParameterCounts(NamedTuple):
    """Parameters on one rank: those outside of experts, and those of the rank's experts."""

    dense: int = 0
    expert: int = 0


class ParameterKind(NamedTuple):
    """A kind of parameters (`dense` or `expert`), their number, and the ranks that replicate them.

    ``group`` is None if no other rank has the same parameters.
    """

    name: str
    numel: int
    group: GroupRef | None


class TransformerLayerWriter(TransformerTensorWriter):
    """Writes the entries of layers and of their parameters.

    ``dense_group`` are the ranks that replicate the parameters outside of experts, ``expert_group``
    those that replicate the same experts; None if there is only one such rank.
    """

    def __init__(self, train: TransformerFields, context: ExpansionContext) -> None:
        super().__init__(train, context)
        self.layers_of_stage = train.layers_of_stages(context)
        self.stages = train.stages(context)
        self.context_axis = train.axis("context", context)
        self.expert_axis = train.axis("experts", context) if self.cost.expert_ranks > 1 else None
        data_axes = train.data_axes(context)
        self.dense_group = self.joint_group(data_axes)
        self.expert_group = self.joint_group(
            tuple(axis for axis in data_axes if axis != self.expert_axis)
        )
        self.group_size = {
            group: 1 if group is None else context.size_of(group)
            for group in (self.dense_group, self.expert_group)
        }

    def joint_group(self, axes: tuple[str, ...]) -> GroupRef | None:
        """The axes as one group, without axes of a single rank; None if none is left."""
        larger_axes = tuple(axis for axis in axes if self.context.mesh[axis] > 1)
        if not larger_axes:
            return None
        return larger_axes[0] if len(larger_axes) == 1 else larger_axes

    # --- the micro-batch of a stage ---
    def stage_forward(self, stage: int) -> list[Entry]:
        embedding = self.embedding_forward() if stage == 0 else []
        layers = self.repeated(self.layers_of_stage[stage], self.layer_forward())
        return [*embedding, *layers, *self.head_forward_of(stage)]

    def stage_backward(self, stage: int) -> list[Entry]:
        layers = self.repeated(self.layers_of_stage[stage], self.layer_backward())
        return [
            *self.head_backward_of(stage),
            *layers,
            *self.embedding_backward_of(stage),
        ]

    def head_forward_of(self, stage: int) -> list[Entry]:
        """The head's forward pass on the last stage, nothing on the others."""
        return self.head_forward() if stage == self.stages - 1 else []

    def head_backward_of(self, stage: int) -> list[Entry]:
        """The head's backward pass on the last stage, nothing on the others."""
        return self.head_backward() if stage == self.stages - 1 else []

    def embedding_backward_of(self, stage: int) -> list[Entry]:
        """The embedding's backward pass on the first stage, nothing on the others."""
        return self.embedding_backward() if stage == 0 else []

    def repeated(self, count: int, steps: list[Entry]) -> list[Entry]:
        """Entries ``count`` times, as a loop if that is more than once."""
        if count == 0:
            return []
        return steps if count == 1 else repeat_entries(count, steps)

    # --- a layer ---
    @property
    def is_layer_local(self) -> bool:
        """Whether no rank shares a layer with another one: no tensor, context or expert axis."""
        return self.tensor_axis is None and self.context_axis is None and self.expert_axis is None

    def layer_forward(self) -> list[Entry]:
        cost = self.cost
        launches = self.kernel_launches(1)
        traffic = self.memory_traffic("forward")
        attention_extra = self.attention_extra_flops(1)
        if self.is_layer_local:
            flops = cost.layer_flops + cost.padding_flops + attention_extra
            product = self.matmul("forward", flops)
            return [*launches, product, *self.scores_without_tensor_cores(1), traffic]
        attention = self.block_forward(
            "attention",
            cost.attention_flops + attention_extra,
            self.gather_keys(),
            self.scores_without_tensor_cores(1),
        )
        mlp = self.block_forward(
            "mlp",
            cost.mlp_flops + cost.padding_flops,
            self.dispatch_tokens(),
            self.combine_tokens(),
        )
        return [*launches, *attention, *mlp, traffic]

    def layer_backward(self) -> list[Entry]:
        cost = self.cost
        before = [
            *self.recomputation(),
            *self.kernel_launches(2),
            *self.scores_without_tensor_cores(self.score_backward_passes()),
        ]
        traffic = self.memory_traffic("backward")
        mlp_flops = 2 * (cost.mlp_flops + cost.padding_flops)
        attention_flops = self.attention_backward_flops()
        if self.is_layer_local:
            return [*before, self.matmul("backward", attention_flops + mlp_flops), traffic]
        mlp = self.block_backward(
            "mlp",
            mlp_flops,
            self.mlp_column_flops(),
            self.dispatch_tokens(),
            self.combine_tokens(),
        )
        attention = self.block_backward(
            "attention",
            attention_flops,
            self.attention_column_flops(),
            [*self.gather_keys(), *self.scatter_key_gradients()],
            [],
        )
        return [*before, traffic, *mlp, *attention]

    def attention_backward_flops(self) -> int:
        """FLOPs of attention's backward pass, with the scores that it computes again."""
        cost = self.cost
        extra_flops = cost.flash_flops
        if cost.recompute == "selective":
            extra_flops += cost.recompute_flops
        extra_flops += self.attention_extra_flops(self.score_backward_passes())
        return 2 * cost.attention_flops + extra_flops

    def score_backward_passes(self) -> float:
        """How often the backward pass computes what the forward pass computes for the scores."""
        if self.cost.flash:
            return _FLASH_BACKWARD_PASSES
        if self.cost.recompute == "selective":
            return _RECOMPUTED_BACKWARD_PASSES
        return _PLAIN_BACKWARD_PASSES

    def block_forward(
        self, word: str, flops: int, before: list[Entry], after: list[Entry]
    ) -> list[Entry]:
        """A block's forward pass, with the entries ``before`` and ``after`` its products."""
        row_flops = self.overlapped_row_flops(word)
        if row_flops:
            if word == "mlp":
                column_flops = self.mlp_column_flops()
            else:
                column_flops = self.attention_column_flops()
            return self.block_in_pieces(
                f"forward {word}", flops, sum(column_flops), row_flops, [*before, *after]
            )
        return [
            *self.gather_input(),
            *before,
            self.matmul(f"forward {word}", flops),
            *after,
            *self.reduce_output(),
        ]

    def attention_extra_flops(self, passes: float) -> int:
        """The FLOPs by which attention is slower than its own FLOPs at the products' rate.

        Fused attention reaches only a share of that rate (`attention_efficiency`). It also stays in
        the model's dtype if the products are in 8 bits, at twice the rate of 16 bits. The result is
        negative if the scores have an entry of their own (`scores_without_tensor_cores`).
        """
        scores_flops = self.cost.scores_flops
        if self.cost.scores_miss_tensor_cores:
            return -round(passes * scores_flops)
        slowdown = 1 / self.train.attention_efficiency if self.cost.flash else 1.0
        dtype_ratio = FLOAT_DTYPE_BYTES[self.train.dtype] / FLOAT_DTYPE_BYTES[self.product_dtype]
        equivalent = (scores_flops + self.cost.idle_flops) * slowdown * dtype_ratio
        return round(passes * (equivalent - scores_flops))

    def scores_without_tensor_cores(self, passes: float) -> list[Entry]:
        """Scores that cannot use the tensor cores, at the rate of float32."""
        if not self.cost.scores_miss_tensor_cores:
            return []
        flops = units.flops_text(passes * self.cost.scores_flops)
        return [compute("scores", {"flops": flops, "dtype": "float32"})]

    def kernel_launches(self, passes: int) -> list[Entry]:
        """The host's time to launch a layer's operations."""
        launch_ns = self.train.launch * _LAUNCHES_PER_LAYER * passes
        if not launch_ns:
            return []
        return [compute("launches", {"time": units.duration_text(launch_ns)}, on="host")]

    def recomputation(self) -> list[Entry]:
        """The part of the forward pass that activation checkpointing repeats before the backward
        pass, without the selective recomputation of scores (`layer_backward`).
        """
        if self.cost.recompute == "full":
            return self.layer_forward()
        if self.cost.recompute == "op":
            return self._recomputation_by_operation()
        if self.cost.recompute == "modules":
            return self._recomputation_of_modules()
        return []

    def _recomputation_of_modules(self) -> list[Entry]:
        """Norms, non-linearities and the expansion of latent attention, without any messages."""
        flops = self.cost.recompute_flops
        products = [self.matmul("forward, again", flops)] if flops else []
        traffic = {"bytes": units.size_text(self.cost.modules_recompute_traffic)}
        return [*products, compute("forward, again, memory", traffic)]

    def _recomputation_by_operation(self) -> list[Entry]:
        """torchtitan's per-operation policy: products that were not kept, and all other operations.

        With sequence parallelism the inputs of both blocks are gathered again.
        """
        gathers: list[Entry] = []
        if self.cost.sequence_parallel:
            gathers = [*self.gather_input(), *self.gather_input()]
        flops = self.cost.recompute_flops
        products = [self.matmul("forward, again", flops)] if flops else []
        return [*self.kernel_launches(1), *gathers, *products, self.memory_traffic("forward")]

    def attention_column_flops(self) -> list[int]:
        """FLOPs of the projections of queries, keys and values; of latent attention as one."""
        model = self.model
        per_matrix = [
            2 * self.cost.tokens * model.hidden * columns // self.cost.tensor_ranks
            for columns in (model.q_hidden, model.kv_hidden, model.kv_hidden)
        ]
        return per_matrix if model.latent is None else [sum(per_matrix)]

    def mlp_column_flops(self) -> list[int]:
        """FLOPs of gate and up; of experts as one."""
        matrix_flops = self.cost.mlp_flops // self.model.matrices
        count = self.model.matrices - 1
        return [matrix_flops * count] if self.model.experts else [matrix_flops] * count

    def memory_traffic(self, word: Literal["forward", "backward"]) -> Entry:
        """The memory-bound work of a layer.

        These are norms, sums, dropout, non-linearities, the routing to experts, and the results
        that matrix products write.
        """
        cost = self.cost
        is_backward = word == "backward"
        total = (1 + is_backward) * cost.layer_traffic
        total += cost.products_traffic.of(word) + cost.routing_traffic
        if self.product_dtype.startswith("float8"):
            total += cost.casts_traffic.of(word)
        if is_backward:
            total += cost.sums_traffic
        if cost.autocast:
            # Weights are cast, and their gradients are cast back.
            cast_bytes = 4 + FLOAT_DTYPE_BYTES[self.train.dtype]
            total += cast_bytes * sum(self.layer_parameters())
        return compute(
            f"{word}, memory-bound",
            {"bytes": units.size_text(total)},
            kernels=KERNELS_PER_LAYER[self.train.tensor_calls][is_backward],
        )

    # --- messages of a layer ---
    def gather_keys(self) -> list[Entry]:
        """Context parallelism: gather the keys and values of the whole sequence."""
        if self.cost.context_ranks == 1:
            return []
        return [self.all_gather(self.cost.kv_numel, self.context_axis)]

    def scatter_key_gradients(self) -> list[Entry]:
        """Context parallelism: sum and scatter the gradients of keys and values."""
        if self.cost.context_ranks == 1:
            return []
        return [self.reduce_scatter(self.cost.kv_numel, self.context_axis)]

    def dispatch_tokens(self, handle: str | None = None) -> list[Entry]:
        """Send tokens, or the gradients of the experts' outputs, to the experts."""
        is_8_bit = self.train.expert_dispatch == "deepep" and self.train.has_8_bit_products
        return self._exchange_tokens(self.product_dtype if is_8_bit else self.dtype, handle)

    def combine_tokens(self, handle: str | None = None) -> list[Entry]:
        """Send the experts' outputs, or the gradients of their inputs, back."""
        return self._exchange_tokens(self.dtype, handle)

    def _exchange_tokens(self, dtype: str, handle: str | None) -> list[Entry]:
        """An exchange among the ranks of the experts, with evenly spread tokens."""
        if self.expert_axis is None:
            return []
        ranks = self.cost.expert_ranks
        numel = -(-round(self.cost.boundary_numel * self._copies_per_token) // ranks) * ranks
        return [
            step(
                "all_to_all_single",
                input=self.buffer(numel, dtype),
                output=self.buffer(numel, dtype),
                group=self.expert_axis,
                **async_fields(handle),
            )
        ]

    @property
    def _copies_per_token(self) -> float:
        """Copies of a token that an exchange sends.

        One for each expert. With DeepEP, which sends one to each node that has some of them, NVLink
        distributes these copies while the next ones arrive, so only the former count.
        """
        model = self.model
        nodes = self.expert_nodes
        if self.train.expert_dispatch != "deepep" or nodes == 1:
            return model.active_experts
        reached = nodes * hit_probability(model.experts, model.experts // nodes, model.top_k)
        return min(reached, model.router_nodes or nodes)

    @property
    def expert_nodes(self) -> int:
        """The number of nodes over which the experts of a layer are distributed."""
        axes = list(self.context.mesh)
        inside = axes[axes.index(self.expert_axis) :] if self.expert_axis else []
        ranks = prod(self.context.mesh[axis] for axis in inside)
        return max(ranks // self.context.ranks_per_node, 1)

    # --- numbers of parameters ---
    def layer_parameters(self) -> ParameterCounts:
        """Parameters of one layer on a rank."""
        return self._layer_parameters

    @cached_property
    def _layer_parameters(self) -> ParameterCounts:
        """Matrices are split over the tensor ranks, experts also over the expert ranks.

        Each rank has all norms and the whole router.
        """
        model = self.model
        tensor_ranks = self.cost.tensor_ranks
        norms = model.norms * total_numel(model.norm_shapes())
        router = model.experts * model.hidden
        unsplit = norms + router
        matrices = model.layer_parameters - model.expert_parameters - unsplit
        return ParameterCounts(
            dense=unsplit + matrices // tensor_ranks,
            expert=model.expert_parameters // (tensor_ranks * self.cost.expert_ranks),
        )

    def end_parameters(self, stage: int) -> ParameterCounts:
        """Embeddings on the first stage, the head on the last (tied embeddings are on both)."""
        model = self.model
        numel = 0
        if stage == 0:
            numel += model.embedding_parameters // self.cost.tensor_ranks
        if stage == self.stages - 1:
            has_second_copy = model.tied and self.stages > 1
            tied = model.vocabulary * model.hidden if has_second_copy else 0
            numel += (model.head_parameters + tied) // self.cost.tensor_ranks
        return ParameterCounts(numel)

    def model_stage(self, stage: int) -> int:
        """The model's stage of a stage of the schedule, which may be a second copy (DualPipe)."""
        return stage % self.stages

    def stage_parameters(self, stage: int) -> ParameterCounts:
        stage = self.model_stage(stage)
        ends = self.end_parameters(stage)
        layer = self.layer_parameters()
        layers = self.layers_of_stage[stage]
        first_layer = sum(self.layers_of_stage[:stage])
        # A model's layers without experts are its first ones (DeepSeek-V3).
        end_of_dense = min(self.model.dense, first_layer + layers)
        dense_layers = max(0, end_of_dense - first_layer)
        expert_layers = layers - dense_layers
        dense_layer_numel = dense_layers * self.model.dense_parameters // self.cost.tensor_ranks
        return ParameterCounts(
            dense=ends.dense + expert_layers * layer.dense + dense_layer_numel,
            expert=ends.expert + expert_layers * layer.expert,
        )

    def parameter_kinds(self, counts: ParameterCounts) -> tuple[ParameterKind, ParameterKind]:
        return (
            ParameterKind("dense", counts.dense, self.dense_group),
            ParameterKind("expert", counts.expert, self.expert_group),
        )

    def replicated_kinds(self, counts: ParameterCounts) -> list[ParameterKind]:
        """The kinds of parameters that exist, and that other ranks have as well."""
        kinds = self.parameter_kinds(counts)
        return [kind for kind in kinds if kind.group is not None and kind.numel]

    # --- messages of parameters and gradients ---
    def reduce_gradients(
        self, counts: ParameterCounts, handle: str | None = None, index: str = ""
    ) -> list[Entry]:
        """Average the gradients of some parameters over the ranks that replicate these.

        An all_reduce, or with ZeRO a reduce_scatter that is padded to equal shards.
        """
        entries: list[Entry] = []
        dtype = self.train.gradient_dtype
        # With autocast, ZeRO is ZeroRedundancyOptimizer, which works on top of DDP.
        uses_all_reduce = self.train.zero == 0 or self.train.autocast
        for kind in self.replicated_kinds(counts):
            name = None if handle is None else f"{handle}_{kind.name}@{index}"
            fields = {"op": "avg", "group": kind.group, **async_fields(name)}
            if uses_all_reduce:
                tensor = tensor_declaration(kind.numel, dtype)
                entries.append(step("all_reduce", tensor=tensor, **fields))
                continue
            ranks = self.group_size[kind.group]
            part = -(-kind.numel // ranks)
            full = tensor_declaration(part * ranks, dtype)
            shard = tensor_declaration(part, dtype)
            entries.append(step("reduce_scatter_tensor", input=full, output=shard, **fields))
        return entries

    def gather_parameters(
        self, counts: ParameterCounts, handle: str | None = None, index: str = ""
    ) -> list[Entry]:
        """Gather some parameters from all ranks that hold a shard of them.

        ZeroRedundancyOptimizer broadcasts each rank's part; here that is one call.
        """
        entries: list[Entry] = []
        for kind in self.replicated_kinds(counts):
            part = -(-kind.numel // self.group_size[kind.group])
            name = None if handle is None else f"{handle}_{kind.name}@{index}"
            entries.append(self.all_gather(part, kind.group, name, self.parameter_dtype))
        return entries
