"""The cost of one micro-batch of a transformer on one rank: FLOPs, memory traffic, activation bytes
and message sizes.

Each formula counts the terms of one layer and divides each term by the ranks that share it. The
published formulas hold for GPT; the changes by grouped queries, gated feed-forward layers, experts
and fused attention are counted term by term in the same way.

Letters as in the papers: b micro-batch, s sequence, h hidden, a heads, f width of the feed-forward
layer, V vocabulary, t tensor parallel size, l layers, B sequences of a step. Integer divisions
round down; their order is part of the result.

This module has no times (the cost model has), no parameters (`architecture`) and no calls.

Sources: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters,
arXiv:2104.04473 (FLOPs); Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models, arXiv:2205.05198 (activations).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from distsim.scenario.strategies.training_step.presets import Architecture

RecomputePolicy = Literal["none", "selective", "modules", "op", "full"]

#: Rows of a tile of fused attention, and a typical number of multiprocessors (`idle_flops`).
_ATTENTION_TILE_ROWS = 128
_MULTIPROCESSORS = 128
#: Rows of a tile of a matrix product: cutlass' default.
_PRODUCT_TILE_ROWS = 128


class _MatrixProduct(NamedTuple):
    """One matrix product of a layer.

    ``is_split``: the output's columns are split among the tensor ranks. Otherwise each rank has all
    columns, as a sum or a copy.
    """

    columns_in: int
    columns_out: int
    is_split: bool


class PassTraffic(NamedTuple):
    """Bytes that the forward pass moves, and the backward pass."""

    forward: int
    backward: int

    def of(self, word: Literal["forward", "backward"]) -> int:
        """Bytes of one of the passes."""
        return self.forward if word == "forward" else self.backward


class MicroBatchCost(NamedTuple):
    """The layout of one rank, and the cost of a micro-batch on it.

    ``tensor_ranks`` share a layer's matrices. With ``sequence_parallel`` they also share the
    activations between the matrices. ``context_ranks`` share a sequence. ``expert_ranks`` share the
    experts; each rank keeps its own tokens, except while an expert on another rank processes them.

    ``flash``: attention is fused and never writes its scores to memory. ``causal``: only the used
    half of the scores is computed; the papers count all scores. ``whole_logits``: each rank has all
    logits for the loss.

    ``pytorch_modules``: the modules are PyTorch's own, eager, with DTensor. DTensor keeps the input
    that sequence-parallel ranks gather before a block for the backward pass. Otherwise the modules
    are Megatron-LM's, whose kernels are fused, and the input is gathered again.

    ``autocast``: weights and the activations between layers are float32, and each product casts its
    inputs to ``itemsize`` bytes. An activation is cast once for each matrix that reads it, because
    torch.autocast caches only casts of weights (counted on CPU, tests/support/autocast_memory.py).

    ``keeps_8_bit_inputs``: the backward pass keeps the inputs of matrix products in 8 bits, as
    Transformer Engine does and DeepSeek-V3 (arXiv:2412.19437, section 3.3.3); torchao keeps them in
    16 bits.
    """

    model: Architecture
    micro_batch: int = 1
    sequence: int = 2048
    itemsize: int = 2
    tensor_ranks: int = 1
    sequence_parallel: bool = False
    context_ranks: int = 1
    expert_ranks: int = 1
    recompute: RecomputePolicy = "none"
    flash: bool = False
    causal: bool = False
    pytorch_modules: bool = False
    whole_logits: bool = False
    autocast: bool = False
    keeps_8_bit_inputs: bool = False

    @property
    def between_itemsize(self) -> int:
        """Bytes of one element of an activation between two layers."""
        return 4 if self.autocast else self.itemsize

    @property
    def casts_of_norms(self) -> int:
        """How often the outputs of a layer's two norms are cast for the matrices that read them.

        Queries, keys and values are three matrices; the feed-forward layer's last matrix reads no
        norm.
        """
        return 3 + self.model.matrices - 1 if self.autocast else 0

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * self.sequence // self.context_ranks

    @property
    def _sequence_ranks(self) -> int:
        """Tensor ranks that share the activations between the matrices."""
        return self.tensor_ranks if self.sequence_parallel else 1

    @property
    def _is_logits_split(self) -> bool:
        """Whether the loss works on logits that are split among tensor ranks."""
        return self.tensor_ranks > 1 and not self.whole_logits

    # --- floating-point operations, a multiply-add counted as two ---
    @property
    def scores_flops(self) -> int:
        """Forward FLOPs of the scores and of their product with the values.

        4 b s^2 h: 2 b s^2 times the columns of all queries and values, divided among the heads (t)
        and the sequence parts.
        """
        columns = self.model.q_hidden + self.model.o_hidden
        full = 2 * self.tokens * self.sequence * columns // self.tensor_ranks
        return full // 2 if self.causal else full

    @property
    def idle_flops(self) -> int:
        """FLOPs that fused attention could compute forward while its last tiles end.

        A tile has 128 rows of a head over all keys. On average half of a tile's time is lost on
        most of 128 multiprocessors (A100 has 108, H100 132, B200 148). This matters only with few
        heads: on an H100 the time of 4 to 64 heads over 8192 tokens is a straight line that starts
        at 70 us, 172 us backward (benchmarks/gpu/compute_h100.json); this formula gives 81 and 203.
        """
        if not self.flash:
            return 0
        columns = (self.model.q_hidden + self.model.o_hidden) // self.model.heads
        rows = min(_ATTENTION_TILE_ROWS, self.sequence)
        return _MULTIPROCESSORS * rows * self.sequence * columns

    @property
    def attention_flops(self) -> int:
        """Forward FLOPs of one layer's attention: 2 per token and weight, and the scores."""
        projections = 2 * self.tokens * self.model.attention_weights // self.tensor_ranks
        return projections + self.scores_flops

    @property
    def output_flops(self) -> int:
        """Forward FLOPs of attention's output projection, which `attention_flops` includes."""
        return 2 * self.tokens * self.model.o_hidden * self.model.hidden // self.tensor_ranks

    @property
    def mlp_flops(self) -> int:
        """Forward FLOPs of one layer's feed-forward part.

        2 per token and weight, for each expert that processes the token. Every tensor rank computes
        the whole router.
        """
        model = self.model
        weights = model.matrices * model.hidden * model.active_ffn
        router = 2 * self.tokens * model.hidden * model.experts
        return 2 * self.tokens * weights // self.tensor_ranks + router

    @property
    def scores_miss_tensor_cores(self) -> bool:
        """Whether the products of unfused attention miss the tensor cores.

        They do if a row of a head's queries or keys is no multiple of 16 bytes (NVIDIA, Matrix
        Multiplication Background User's Guide, "Requirements to use Tensor Cores").
        """
        return not self.flash and self.model.head_width * self.itemsize % 16 != 0

    @property
    def layer_flops(self) -> int:
        return self.attention_flops + self.mlp_flops

    @property
    def head_flops(self) -> int:
        """Forward FLOPs of the logits: 2 b s h V."""
        return 2 * self.tokens * self.model.hidden * self.model.vocabulary // self.tensor_ranks

    @property
    def recompute_flops(self) -> int:
        """FLOPs that recomputation adds to one layer's backward pass."""
        if self.recompute == "full":
            return self.layer_flops
        if self.recompute == "op":
            return self._op_recompute_flops
        if self.recompute == "modules":
            return self._latent_expansion_flops
        # Fused attention always recomputes; `flash_flops` counts that.
        recomputes_scores = self.recompute == "selective" and not self.flash
        return self.scores_flops if recomputes_scores else 0

    @property
    def _latent_expansion_flops(self) -> int:
        """Forward FLOPs of the products that expand latent queries, keys and values; else 0."""
        latent = self.model.latent
        if latent is None:
            return 0
        weights = latent.queries * self.model.q_hidden + latent.keys * 2 * self.model.kv_hidden
        return 2 * self.tokens * weights // self.tensor_ranks

    @property
    def modules_recompute_traffic(self) -> int:
        """Bytes that `modules` moves again: both norms (read, write) and the non-linearity."""
        norms = 4 * self.itemsize * self.tokens * self.model.hidden // self._sequence_ranks
        return norms + self._nonlinearity_traffic

    @property
    def _op_recompute_flops(self) -> int:
        """FLOPs that the per-operation policy recomputes, with all grouped products of experts."""
        flops = sum(self._recomputed_product_flops)
        model = self.model
        if model.experts:
            weights = model.matrices * model.hidden * model.ffn * model.top_k
            flops += 2 * self.tokens * weights // self.tensor_ranks
        return flops

    @property
    def flash_flops(self) -> int:
        """FLOPs of the product that fused attention computes again in the backward pass.

        One of its two products is repeated, so that the backward pass takes 2.5 times the forward
        pass (Dao, arXiv:2307.08691).
        """
        return self.scores_flops // 2 if self.flash else 0

    # --- memory traffic of all operations that are no matrix products ---
    @property
    def layer_traffic(self) -> int:
        """Bytes that one layer's forward pass moves: each operation reads and writes once.

        Two norms (read, write) and two residual sums with their dropout (two reads, one write, a
        mask); the non-linearity; rotary embeddings; softmax and its dropout unless attention is
        fused. These terms are our own count. The backward pass moves twice as much.
        """
        traffic = self._between_traffic + self._nonlinearity_traffic + self._rotary_traffic
        return traffic if self.flash else traffic + self._softmax_traffic

    @property
    def _between_traffic(self) -> int:
        """Bytes of the norms and the residual sums.

        Under autocast a norm reads and writes float32, a sum reads one input of each dtype, and
        each cast reads 4 bytes and writes 2.
        """
        mask_bytes = 2 if self.model.dropout else 0
        # Eight of ten reads and writes have the dtype between layers, two that of the products.
        token_bytes = 8 * self.between_itemsize + 2 * self.itemsize + mask_bytes
        token_bytes += self.casts_of_norms * (self.between_itemsize + self.itemsize)
        return self.tokens * self.model.hidden * token_bytes // self._sequence_ranks

    @property
    def _nonlinearity_traffic(self) -> int:
        """Bytes of the feed-forward layer's non-linearity; a gated one also reads the gate."""
        accesses = 3 if self.model.mlp == "swiglu" else 2
        return self.itemsize * self.tokens * accesses * self.model.active_ffn // self.tensor_ranks

    @property
    def _rotary_traffic(self) -> int:
        """Bytes of the rotary embeddings of queries and keys.

        Fused, each element is read and written once. PyTorch's modules cast to
        float32, multiply as complex numbers and cast back: 20 bytes an element (23 on an H100,
        benchmarks/gpu/compute_h100.json).
        """
        element_bytes = 20 if self.pytorch_modules else 2 * self.itemsize
        return self.tokens * element_bytes * self.model.rotary_columns // self.tensor_ranks

    @property
    def _softmax_traffic(self) -> int:
        """Bytes of an unfused softmax; its dropout reads and writes again, and writes a mask."""
        score_bytes = 4 * self.itemsize + 1 if self.model.dropout else 2 * self.itemsize
        return self.tokens * self.model.heads * self.sequence * score_bytes // self.tensor_ranks

    @property
    def _product_columns_in(self) -> int:
        """Columns that one layer's matrix products read for each token.

        These are the inputs of the projections, of attention's output and of the feed-forward
        layers.
        """
        model = self.model
        split = (model.o_hidden + model.active_ffn) // self.tensor_ranks
        return (1 + self._feed_forward_inputs) * model.hidden + split

    @property
    def _product_columns_out(self) -> int:
        """Columns that one layer's matrix products write for each token."""
        model = self.model
        split = model.q_hidden + 2 * model.kv_hidden + (model.matrices - 1) * model.active_ffn
        return (1 + self._feed_forward_inputs) * model.hidden + split // self.tensor_ranks

    @property
    def _feed_forward_inputs(self) -> int:
        """Feed-forward layers that read one token: its experts, and the shared one if any."""
        return self.model.active_experts + bool(self.model.shared)

    @property
    def products_traffic(self) -> PassTraffic:
        """Bytes that one layer's matrix products write, forward and backward.

        Backward these are the gradients of inputs and weights. Only writes count, because a tile's
        accumulators are written when its tensor cores have nothing left to do (cutlass,
        media/docs/efficient_gemm.md, "Epilogue").
        """
        model = self.model
        expert_width = max(model.experts // self.expert_ranks, 1) * model.ffn + model.shared
        weights = model.attention_weights + model.matrices * model.hidden * expert_width
        forward = self.itemsize * self.tokens * self._product_columns_out
        input_gradients = self.tokens * self._product_columns_in
        backward = self.itemsize * (input_gradients + weights // self.tensor_ranks)
        return PassTraffic(forward, backward)

    @property
    def sums_traffic(self) -> int:
        """Bytes of the sums of input gradients in PyTorch's modules; 0 with fused matrices.

        Queries, keys, values, gate and up are matrices of their own there. Each of them, except one
        of each block, writes a whole gradient of the block's input, and a sum reads two and writes
        one. No tensor rank moves less of it.
        """
        if not self.pytorch_modules:
            return 0
        model = self.model
        attention_sums = 0 if model.latent else 2
        mlp_sums = (model.matrices - 2) * self._feed_forward_inputs
        sums = attention_sums + mlp_sums
        return 4 * self.itemsize * self.tokens * model.hidden * sums

    @property
    def casts_traffic(self) -> PassTraffic:
        """Bytes that 8-bit matrix products add, forward and backward.

        Forward the inputs are written in 8 bits, backward the gradients of the outputs; each by
        rows and by columns. The operation that produces a tensor also casts it (Transformer
        Engine's fused casts), so there are no reads.
        """
        return PassTraffic(
            forward=2 * self.tokens * self._product_columns_in,
            backward=2 * self.tokens * self._product_columns_out,
        )

    @property
    def routing_traffic(self) -> int:
        """Bytes that sorting one pass's tokens by experts moves; each step reads and writes.

        Tokens are sorted into the order of the experts and back. Where ranks share the experts,
        tokens are also sorted into and from the order of each rank's experts (Megatron-LM,
        core/transformer/moe/token_dispatcher.py).
        """
        if not self.model.experts:
            return 0
        accesses = 8 if self.expert_ranks > 1 else 4
        return self.itemsize * self.routed_numel * accesses

    @property
    def padding_flops(self) -> int:
        """FLOPs that the padding of the experts' last tiles wastes.

        On average half of the last tile of each expert is padding (grouped products).
        """
        model = self.model
        if not model.experts:
            return 0
        padding_rows = _PRODUCT_TILE_ROWS // 2
        expert_flops = (
            2 * padding_rows * model.matrices * model.hidden * model.ffn // self.tensor_ranks
        )
        return expert_flops * (model.experts // self.expert_ranks)

    @property
    def logits_traffic(self) -> PassTraffic:
        """Bytes that the logits and their loss move, forward and backward.

        The loss works in float32, as PyTorch's cross_entropy does.
        """
        logits = self.tokens * self.model.vocabulary // self.tensor_ranks
        float32 = 4
        # Forward, in the dtype of the product: written, and read by the cast. In float32: written
        # by the cast, and two reads and a write of log_softmax.
        forward_bytes = 2 * self.itemsize + 4 * float32
        # Backward, in float32: the gradient of the loss is written; log_softmax reads it and its
        # own output, and writes; the cast reads. The cast writes in the dtype of the product.
        backward_bytes = 5 * float32 + self.itemsize
        return PassTraffic(logits * forward_bytes, logits * backward_bytes)

    # --- activations that the forward pass keeps for the backward pass ---
    @property
    def activation_bytes(self) -> int:
        """Bytes of one layer's activations of one micro-batch.

        s b h (34 + 5 a s / h) for GPT on one rank (Korthikanti, equations 1 to 6).
        """
        if self.recompute == "full":
            return self.between_itemsize * self.hidden_numel // self._sequence_ranks
        if self.recompute == "op":
            return self._op_bytes
        split_bytes = (self._inner_bytes + self._scores_bytes) // self.tensor_ranks
        between_bytes = self._between_bytes // self._sequence_ranks
        return self._kept_gathers_bytes + between_bytes + split_bytes

    @property
    def _kept_gathers_bytes(self) -> int:
        """The parts of other ranks in the gathered inputs of the two blocks, where they are kept.

        `_between_bytes` has the rank's own part.
        """
        if not self.pytorch_modules:
            return 0
        own_numel = self.hidden_numel // self._sequence_ranks
        return 2 * self.itemsize * (self.hidden_numel - own_numel)

    @property
    def _products(self) -> list[_MatrixProduct]:
        """The matrix products of PyTorch's modules in their order.

        The router and the experts are not included: the experts' products are grouped.
        """
        model = self.model
        if model.latent is None:
            keys_or_values = _MatrixProduct(model.hidden, model.kv_hidden, True)
            products = [
                _MatrixProduct(model.hidden, model.q_hidden, True),
                keys_or_values,
                keys_or_values,
            ]
        else:
            latent = model.latent
            # Each rank computes the whole compressed form; its expansion is split by heads.
            products = [
                _MatrixProduct(model.hidden, latent.queries, False),
                _MatrixProduct(latent.queries, model.q_hidden, True),
                _MatrixProduct(model.hidden, latent.keys + latent.rotary, False),
                _MatrixProduct(latent.keys, 2 * model.kv_hidden, True),
            ]
        products.append(_MatrixProduct(model.o_hidden, model.hidden, False))
        width = model.shared if model.experts else model.ffn
        if width:
            products += [_MatrixProduct(model.hidden, width, True)] * (model.matrices - 1)
            products.append(_MatrixProduct(width, model.hidden, False))
        return products

    @property
    def _keeps_all_products(self) -> bool:
        """With biases torch calls addmm, which the per-operation policy does not recompute."""
        return self.model.bias or self.model.biased

    @property
    def _recomputed_product_flops(self) -> list[int]:
        """FLOPs of each product that the per-operation policy recomputes: every second one."""
        if self._keeps_all_products:
            return []
        return [
            2 * self.tokens * product.columns_in * product.columns_out // self.tensor_ranks
            for product in self._products[1::2]
        ]

    @property
    def _op_bytes(self) -> int:
        """Bytes of the activations that torchtitan's per-operation policy keeps.

        The policy keeps a layer's input, the outputs of attention and of every second product, and
        the outputs of reduce_scatter and of the experts' all_to_all. An output whose parts are not
        yet summed over the ranks is kept whole. Gathered inputs are gathered again
        (distributed/activation_checkpoint.py, SelectiveAC, August 2026).
        """
        model = self.model
        kept = self._products if self._keeps_all_products else self._products[::2]
        columns = model.o_hidden // self.tensor_ranks
        for product in kept:
            columns += product.columns_out // (self.tensor_ranks if product.is_split else 1)
        # With sequence parallelism also the scattered outputs of the two blocks.
        kept_between = 3 if self.sequence_parallel else 1
        columns += model.hidden * kept_between // self._sequence_ranks
        routed = 2 * self.routed_numel if self.expert_ranks > 1 else 0
        # Fused attention keeps one float32 per row of scores.
        row_bytes = 4 if self.flash else self.sequence * self.itemsize
        scores_bytes = self.tokens * model.heads * row_bytes // self.tensor_ranks
        return self.itemsize * (self.tokens * columns + routed) + scores_bytes

    @property
    def _input_itemsize(self) -> int:
        """Bytes of an element of a product's input that is kept."""
        return 1 if self.keeps_8_bit_inputs else self.itemsize

    @property
    def _between_bytes(self) -> int:
        """Inputs of the norms, of attention and of the feed-forward part, and dropout masks.

        10 s b h for GPT. There are two norms and two masks. Under autocast each cast of a norm's
        output is kept instead of the output. The policy `modules` recomputes the outputs of norms.
        """
        mask_bytes = 2 if self.model.dropout else 0
        norm_outputs = self.casts_of_norms or 2
        if self.recompute == "modules":
            norm_outputs = 0
        element_bytes = 2 * self.between_itemsize + norm_outputs * self._input_itemsize + mask_bytes
        return self.hidden_numel * element_bytes

    @property
    def _inner_bytes(self) -> int:
        """Activations inside attention and the feed-forward layer, without the scores.

        Attention keeps queries, keys, values and the output projection's input, and with norms of
        queries and keys also the inputs of these norms. 24 s b h for GPT: the feed-forward layer
        keeps 2 f (before and after the non-linearity).

        Experts keep this once for each expert that processes a token, and their input again in the
        experts' order; PyTorch's modules also keep the input before it is multiplied by the scores
        (torchtitan, models/moe). Both were read on an H100 (benchmarks/gpu/memory_h100.json).
        """
        model = self.model
        attention = self._kept_attention_columns
        # One of the feed-forward layer's activations is the input of its last product.
        ffn = (self._kept_ffn_activations - 1) * model.active_ffn
        inputs = 0 if self.recompute == "modules" else model.active_ffn
        if self.keeps_8_bit_inputs:
            # Attention's output is kept for attention and, in 8 bits, for the projection after it.
            inputs += model.o_hidden
        if model.experts:
            # The caller divides by the tensor ranks, but each of them has the whole input.
            inputs += (
                model.hidden * model.active_experts * self.tensor_ranks * (1 + self.pytorch_modules)
            )
        token_bytes = self.itemsize * attention + self._input_itemsize * inputs
        # With `modules`, inputs of activation functions are kept in 8 bits too (DeepSeek-V3,
        # section 3.3.3; Megatron-LM's --activation-func-fp8-input-store).
        keeps_8_bit_gates = self.recompute == "modules" and self.keeps_8_bit_inputs
        token_bytes += ffn if keeps_8_bit_gates else self.itemsize * ffn
        return self.tokens * token_bytes

    @property
    def _kept_attention_columns(self) -> int:
        """Columns of queries, keys, values and attention's output that are kept.

        The policy `modules` keeps latent queries, keys and values in their compressed form, which
        the caller's division by the tensor ranks must not split.
        """
        model = self.model
        if self.recompute == "modules" and model.latent is not None:
            latent = model.latent
            compressed = latent.queries + latent.keys + latent.rotary
            return model.o_hidden + compressed * self.tensor_ranks
        columns = model.q_hidden + model.o_hidden + 2 * model.kv_hidden
        return columns + (model.q_hidden + model.kv_hidden if model.qk_norm else 0)

    @property
    def _kept_ffn_activations(self) -> int:
        """Activations of the feed-forward layer's width that are kept for the backward pass.

        A gated layer keeps gate, up, their product, and the gate's non-linearity unless it is
        fused, as in Megatron-LM (core/fusions/fused_bias_swiglu.py). Eager PyTorch keeps all four.
        """
        if self.model.mlp == "gelu":
            return 2
        fuses_gate = self.flash and not self.pytorch_modules
        return 3 if fuses_gate else 4

    @property
    def _scores_bytes(self) -> int:
        """Softmax, its dropout mask and the result: 5 a s^2 b.

        Fused attention keeps one float32 per row of scores instead.
        """
        rows = self.tokens * self.model.heads
        if self.flash:
            return 4 * rows
        if self.recompute == "selective":
            return 0
        score_bytes = 2 * self.itemsize + 1 if self.model.dropout else self.itemsize
        return rows * self.sequence * score_bytes

    @property
    def peak_layer_bytes(self) -> int:
        """Bytes of one layer's activations during its backward pass.

        Recomputed activations exist for one layer at a time.
        """
        return self._replace(recompute="none").activation_bytes

    @property
    def head_bytes(self) -> int:
        """Inputs of the last norm and of the output projection, and float32 logits.

        4 s b h (1 + V / h) / t (Korthikanti, section 4.3). DTensor keeps the projection's input
        whole.
        """
        norm_input = self.between_itemsize * self.hidden_numel // self._sequence_ranks
        projection_ranks = 1 if self.pytorch_modules else self._sequence_ranks
        projection_input = self.itemsize * self.hidden_numel // projection_ranks
        return norm_input + projection_input + 4 * self.logits

    @property
    def logits(self) -> int:
        """Elements of a rank's logits in the loss."""
        return (
            self.tokens * self.model.vocabulary // (1 if self.whole_logits else self.tensor_ranks)
        )

    @property
    def loss_bytes(self) -> int:
        """Bytes that the loss holds during its backward pass, in addition to `head_bytes`.

        PyTorch's cross_entropy: the logits as the product left them, the gradient of nll_loss and
        that of log_softmax, both float32 (aten's nll_loss_backward and _log_softmax_backward_data
        make a tensor each). On split logits torch's loss_parallel has three float32 tensors there:
        zeros with -1 at the targets, the exponentials and their sum (torch 2.13,
        distributed/tensor/parallel/loss.py, _nll_loss_and_log_softmax_backward; counted on CPU: 18
        bytes a logit with the 4 kept, 14 not split). Megatron's loss works in place
        (tensor_parallel/cross_entropy.py): only the gradient of the logits, in their dtype.
        """
        if not self.pytorch_modules:
            return self.logits * self.itemsize
        float32_bytes = 12 if self._is_logits_split else 8
        return self.logits * (self.itemsize + float32_bytes)

    # --- messages ---
    @property
    def hidden_numel(self) -> int:
        """Elements of the activation between two layers, for the rank's whole context part.

        Tensor parallel ranks gather or reduce this many.
        """
        return self.tokens * self.model.hidden

    @property
    def boundary_numel(self) -> int:
        """Elements that a pipeline stage sends to the next.

        With sequence parallelism each tensor rank sends its own part.
        """
        return self.hidden_numel // self._sequence_ranks

    @property
    def kv_numel(self) -> int:
        """Elements of the keys and values of a rank's part of the sequence.

        Context parallel ranks exchange these.
        """
        return 2 * self.tokens * self.model.kv_hidden // self.tensor_ranks

    @property
    def routed_numel(self) -> int:
        """Elements that a rank sends to experts (and gets back), with evenly spread tokens.

        top_k rows per token.
        """
        return self.boundary_numel * self.model.active_experts


def step_flops(cost: MicroBatchCost, batch: int) -> int:
    """Model FLOPs of one training step over ``batch`` sequences, on all ranks together.

    Forward once, backward twice, and the recomputation of ``cost``. For GPT with full recomputation
    and plain attention, this is 96 B s l h^2 (1 + s/6h + V/16lh) (Narayanan, equation 3). Both
    count the logits with three passes.
    """
    whole = cost._replace(tensor_ranks=1, context_ranks=1, micro_batch=batch)
    layer_flops = 3 * whole.layer_flops + whole.recompute_flops
    return cost.model.layers * layer_flops + 3 * whole.head_flops
