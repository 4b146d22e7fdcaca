"""What one micro-batch costs in a transformer: floating-point operations, activation bytes,
messages; per rank of a layout.

Letters as in the papers: b micro-batch, s sequence, h hidden, a heads, f width of the feed-forward
layer, V vocabulary, t tensor parallel size. Sources: Narayanan et al., Efficient Large-Scale
Language Model Training on GPU Clusters, arXiv:2104.04473 (FLOPs); Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models, arXiv:2205.05198 (activations). Their formulas
hold for GPT; what grouped queries, gated feed-forward layers, experts and fused attention change is
counted term by term the same way.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from distsim.scenario.strategies.training_step.presets import Architecture

RecomputePolicy = Literal["none", "selective", "op", "full"]


class MicroBatchCost(NamedTuple):
    """How a micro-batch goes through the model on one rank.

    ``tensor``: ranks that share a layer's matrices; with ``sequence_parallel`` they also share what
    lies between the matrices. ``context``: ranks that share a sequence. ``experts``: ranks that
    share the experts; each keeps its own tokens but for the time they spend with an expert
    elsewhere. ``flash``: fused: attention never writes its scores to memory. ``causal``: only the
    half of the scores that is used is computed; the papers count them all. ``gathered``: PyTorch's
    own modules: what sequence-parallel ranks gather before a block is kept for its backward pass,
    as DTensor keeps it; else gathered again. ``whole_logits``: all on each rank for the loss.
    ``autocast``: weights and what lies between layers are float32, and each product casts what it
    reads to ``itemsize`` bytes, an input once for each matrix that reads it (torch.autocast keeps
    casts of weights alone; counted on CPU, tests/support/autocast_memory.py).
    """

    model: Architecture
    micro_batch: int = 1
    sequence: int = 2048
    itemsize: int = 2
    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    experts: int = 1
    recompute: RecomputePolicy = "none"
    flash: bool = False
    causal: bool = False
    gathered: bool = False
    whole_logits: bool = False
    autocast: bool = False

    @property
    def between(self) -> int:
        """Bytes of an element that lies between two layers."""
        return 4 if self.autocast else self.itemsize

    @property
    def casts(self) -> int:
        """How often a layer's two norms are cast for the matrices that read them."""
        return 3 + self.model.matrices - 1 if self.autocast else 0

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that a rank sees."""
        return self.micro_batch * self.sequence // self.context

    # --- floating-point operations, a multiply-add counted as two ---
    @property
    def scores_flops(self) -> int:
        """Scores and their product with the values: 4 b s^2 h (2 b s^2 times all queries' and
        values' columns), divided among heads (t) and sequence parts."""
        full = (
            2
            * self.tokens
            * self.sequence
            * (self.model.q_hidden + self.model.o_hidden)
            // self.tensor
        )
        return full // 2 if self.causal else full

    @property
    def idle_flops(self) -> int:
        """What fused attention could compute forward while its last tiles end: a tile is 128 rows
        of a head over all keys, half of which most of 128 multiprocessors miss (A100 has 108, H100
        132, B200 148). Few heads feel it: on an H100 the time of 4 to 64 heads over 8192 tokens is
        a line that starts at 70 us, 172 backward (benchmarks/gpu/compute_h100.json); this is 81 and
        203."""
        columns = (self.model.q_hidden + self.model.o_hidden) // self.model.heads
        return 128 * min(128, self.sequence) * self.sequence * columns if self.flash else 0

    @property
    def attention_flops(self) -> int:
        """One layer's attention, forward: 2 per token and weight of the projections, and the
        scores.
        """
        return 2 * self.tokens * self.model.attention_weights // self.tensor + self.scores_flops

    @property
    def output_flops(self) -> int:
        """Of that the output projection's, forward."""
        return 2 * self.tokens * self.model.o_hidden * self.model.hidden // self.tensor

    @property
    def mlp_flops(self) -> int:
        """One layer's feed-forward part: 2 per token and weight, for each expert that a token
        passes; the router is not divided.
        """
        model = self.model
        weights = model.matrices * model.hidden * model.active_ffn
        return (
            2 * self.tokens * weights // self.tensor
            + 2 * self.tokens * model.hidden * model.experts
        )

    @property
    def misaligned(self) -> bool:
        """Rows of a head's queries and keys are no multiple of 16 bytes: unfused attention's
        products then miss the tensor cores (NVIDIA, Matrix Multiplication Background User's Guide,
        "Requirements to use Tensor Cores")."""
        return not self.flash and self.model.head_width * self.itemsize % 16 != 0

    @property
    def layer_flops(self) -> int:
        return self.attention_flops + self.mlp_flops

    @property
    def head_flops(self) -> int:
        """The logits: 2 b s h V."""
        return 2 * self.tokens * self.model.hidden * self.model.vocabulary // self.tensor

    @property
    def recompute_flops(self) -> int:
        """What recomputation adds to one layer's backward pass."""
        if self.recompute == "full":
            return self.layer_flops
        if self.recompute == "op":
            grouped = (
                2
                * self.tokens
                * self.model.matrices
                * self.model.hidden
                * self.model.ffn
                * self.model.top_k
            )
            return sum(self._products_again) + (grouped // self.tensor if self.model.experts else 0)
        return self.scores_flops if self.recompute == "selective" and not self.flash else 0

    @property
    def flash_flops(self) -> int:
        """Fused attention computes one of its two products again in the backward pass (Dao,
        arXiv:2307.08691: 2.5 times the forward).
        """
        return self.scores_flops // 2 if self.flash else 0

    # --- bytes that what is no matrix product moves through memory ---
    @property
    def layer_traffic(self) -> int:
        """One layer's forward pass: every such operation reads its inputs and writes its output
        once.

        Two norms (read, write) and two residual sums with their dropout (two reads, one write, a
        mask); the non-linearity; softmax and its dropout where attention is not fused (read and
        write twice, a mask). Counted by us; the backward pass takes it twice. Under autocast a norm
        reads and writes float32, a sum reads one input of each kind, and each cast reads 4 bytes
        and writes 2. Rotary embeddings of queries and keys: fused, or in PyTorch's modules
        (`gathered`) cast to float32, multiplied as complex numbers, and cast back, 20 bytes an
        element (23 on an H100, benchmarks/gpu/compute_h100.json).
        """
        model, wide = self.model, 3 if self.model.mlp == "swiglu" else 2
        masks = 2 if model.dropout else 0
        each = (
            8 * self.between + (2 + self.casts) * self.itemsize + self.casts * self.between + masks
        )
        between = (
            self.tokens * model.hidden * each // (self.tensor if self.sequence_parallel else 1)
        )
        inner = self.itemsize * self.tokens * wide * model.active_ffn // self.tensor
        each = (4 * self.itemsize + 1) if model.dropout else 2 * self.itemsize
        inner += (
            self.tokens
            * (20 if self.gathered else 2 * self.itemsize)
            * model.rotary_columns
            // self.tensor
        )
        return (
            between
            + inner
            + (0 if self.flash else self.tokens * model.heads * self.sequence * each // self.tensor)
        )

    @property
    def _inputs(self) -> int:
        """Columns that one layer's matrix products read for each token: of projections, output,
        feed-forward layers.
        """
        model, copies = self.model, self.model.active_experts + bool(self.model.shared)
        return (1 + copies) * model.hidden + (model.o_hidden + model.active_ffn) // self.tensor

    @property
    def _outputs(self) -> int:
        """Columns that they write for each token."""
        model, copies = self.model, self.model.active_experts + bool(self.model.shared)
        apart = model.q_hidden + 2 * model.kv_hidden + (model.matrices - 1) * model.active_ffn
        return (1 + copies) * model.hidden + apart // self.tensor

    @property
    def products_traffic(self) -> tuple[int, int]:
        """Bytes that one layer's matrix products write, forward and backward (gradients of their
        inputs and of the weights): a tile's accumulators are written when its tensor cores have
        nothing left to do (cutlass, media/docs/efficient_gemm.md, "Epilogue")."""
        model = self.model
        experts = max(model.experts // self.experts, 1) * model.ffn + model.shared
        weights = model.attention_weights + model.matrices * model.hidden * experts
        return self.itemsize * self.tokens * self._outputs, self.itemsize * (
            self.tokens * self._inputs + weights // self.tensor
        )

    @property
    def sums_traffic(self) -> int:
        """Bytes that whole gradients of inputs cost where queries, keys, values, gate and up are
        matrices of their own, as in PyTorch's modules: each but one of the two blocks' writes its
        own, and a sum reads two and writes one. No tensor rank has less of it."""
        if not self.gathered:
            return 0
        model = self.model
        apart = (0 if model.latent else 2) + (model.matrices - 2) * (
            model.active_experts + bool(model.shared)
        )
        return 4 * self.itemsize * self.tokens * model.hidden * apart

    @property
    def casts_traffic(self) -> tuple[int, int]:
        """Bytes that products in 8 bits add: their inputs, and backward their outputs'
        gradients, by rows and by columns; what makes them writes them so (Transformer Engine's
        fused casts)."""
        return 2 * self.tokens * self._inputs, 2 * self.tokens * self._outputs

    @property
    def routing_traffic(self) -> int:
        """Bytes of one pass's tokens on their way through experts, each step read and written: into
        the order of experts and back; where ranks share the experts, also into and from the order
        of what each of them has (Megatron-LM, core/transformer/moe/token_dispatcher.py)."""
        return (
            self.itemsize * self.routed_numel * (8 if self.experts > 1 else 4)
            if self.model.experts
            else 0
        )

    @property
    def padding_flops(self) -> int:
        """What experts' last tiles compute in vain, half of 128 rows each (grouped products,
        cutlass' default tile).
        """
        model = self.model
        each = 2 * 64 * model.matrices * model.hidden * model.ffn // self.tensor
        return each * (model.experts // self.experts) if model.experts else 0

    @property
    def logits_traffic(self) -> tuple[int, int]:
        """Bytes of the logits and their loss, forward and backward, in float32 as in PyTorch's
        cross_entropy: written by the product, cast, read twice and written by log_softmax; its
        gradient, log_softmax's from two, cast back."""
        logits = self.tokens * self.model.vocabulary // self.tensor
        return logits * (2 * self.itemsize + 16), logits * (self.itemsize + 20)

    # --- bytes kept from the forward pass for the backward pass ---
    @property
    def activation_bytes(self) -> int:
        """One layer's activations of one micro-batch: s b h (34 + 5 a s / h) for GPT on one rank
        (Korthikanti, equations 1 to 6).
        """
        row = self.tokens * self.model.hidden
        spread = self.tensor if self.sequence_parallel else 1
        if self.recompute == "full":
            return self.between * row // spread
        if self.recompute == "op":
            return self._op_bytes
        again = 2 * self.itemsize * (row - row // spread) if self.gathered else 0
        return (
            again
            + self._between_bytes // spread
            + (self._inner_bytes + self._scores_bytes) // self.tensor
        )

    @property
    def _products(self) -> list[tuple[int, int, bool]]:
        """Columns in, columns out, and whether the output is cut among tensor ranks, of what
        PyTorch's modules multiply one after the other; without the router and the experts, whose
        products are grouped."""
        model, latent = self.model, self.model.latent
        kv = (model.hidden, model.kv_hidden, True)
        first = [(model.hidden, model.q_hidden, True), kv, kv]
        if latent is not None:
            first = [(model.hidden, latent.queries, False), (latent.queries, model.q_hidden, True)]
            first += [
                (model.hidden, latent.keys + latent.rotary, False),
                (latent.keys, 2 * model.kv_hidden, True),
            ]
        wide = model.shared if model.experts else model.ffn
        up = [(model.hidden, wide, True)] * (model.matrices - 1)
        return [
            *first,
            (model.o_hidden, model.hidden, False),
            *([*up, (wide, model.hidden, False)] if wide else []),
        ]

    @property
    def _products_again(self) -> list[int]:
        """FLOPs of every second one; with biases torch calls addmm, and keeps all."""
        again = [] if self.model.bias or self.model.biased else self._products[1::2]
        return [2 * self.tokens * into * out // self.tensor for into, out, _ in again]

    @property
    def _op_bytes(self) -> int:
        """What torchtitan's per-operation policy keeps (distributed/activation_checkpoint.py,
        SelectiveAC, August 2026): a layer's input, what attention and every other one of the
        products give, whole where ranks' sums are still to be added, and what was scattered or came
        from experts. What was gathered is gathered again."""
        model, spread = self.model, self.tensor if self.sequence_parallel else 1
        kept = self._products if model.bias or model.biased else self._products[::2]
        columns = (
            sum(out // (self.tensor if cut else 1) for _, out, cut in kept)
            + model.o_hidden // self.tensor
        )
        scores = (
            self.tokens
            * model.heads
            * (4 if self.flash else self.sequence * self.itemsize)
            // self.tensor
        )
        between = model.hidden * (3 if self.sequence_parallel else 1) // spread
        sent = 2 * self.routed_numel if self.experts > 1 else 0
        return self.itemsize * (self.tokens * (columns + between) + sent) + scores

    @property
    def _between_bytes(self) -> int:
        """Inputs of the two norms, of attention and of the feed-forward part, and two dropout
        masks: 10 s b h for GPT.
        """
        masks = 2 if self.model.dropout else 0
        return (
            self.tokens
            * self.model.hidden
            * (2 * self.between + (self.casts or 2) * self.itemsize + masks)
        )

    @property
    def _inner_bytes(self) -> int:
        """Queries, keys, values, the output projection's input; queries and keys also before a norm
        of theirs; the feed-forward layers'.

        24 s b h for GPT: 2 f wide (before and after the non-linearity). Gated: gate, up, product,
        and the gate's non-linearity unless it is fused, as Megatron-LM's is
        (core/fusions/fused_bias_swiglu.py); eager PyTorch keeps all four. Experts: once for each
        that a token passes, and their input again, in the experts' order; PyTorch's modules also
        before it is multiplied by its scores (torchtitan, models/moe). Both read on an H100
        (benchmarks/gpu/memory_h100.json).
        """
        model = self.model
        attention = model.q_hidden + model.o_hidden + 2 * model.kv_hidden
        attention += model.q_hidden + model.kv_hidden if model.qk_norm else 0
        ffn = self._kept_ffn_activations * model.active_ffn
        sorted_input = 0
        if model.experts:
            sorted_input = model.hidden * model.active_experts * self.tensor * (1 + self.gathered)
        return self.itemsize * self.tokens * (attention + ffn + sorted_input)

    @property
    def _kept_ffn_activations(self) -> int:
        """Activations of the feed-forward layer's width that are kept for the backward pass."""
        if self.model.mlp == "gelu":
            return 2
        fuses_gate = self.flash and not self.gathered
        return 3 if fuses_gate else 4

    @property
    def _scores_bytes(self) -> int:
        """Softmax, its dropout mask and the result: 5 a s^2 b; fused attention keeps one float32
        per row of scores instead.
        """
        rows = self.tokens * self.model.heads
        if self.flash:
            return 4 * rows
        if self.recompute == "selective":
            return 0
        return (
            rows * self.sequence * (2 * self.itemsize + 1 if self.model.dropout else self.itemsize)
        )

    @property
    def peak_layer_bytes(self) -> int:
        """What one layer holds while its backward pass runs: recomputed activations come back for
        one layer at a time.
        """
        return self._replace(recompute="none").activation_bytes

    @property
    def head_bytes(self) -> int:
        """The last norm's and the projection's input, and float32 logits: 4 s b h (1 + V / h) / t
        (Korthikanti, section 4.3); DTensor keeps the projection's input whole."""
        row, spread = self.tokens * self.model.hidden, self.tensor if self.sequence_parallel else 1
        return (
            self.between * row // spread
            + self.itemsize * row // (1 if self.gathered else spread)
            + 4 * self.logits
        )

    @property
    def logits(self) -> int:
        """Elements of a rank's logits in the loss."""
        return self.tokens * self.model.vocabulary // (1 if self.whole_logits else self.tensor)

    @property
    def loss_bytes(self) -> int:
        """What the loss holds beside that while its backward pass runs.

        PyTorch's cross_entropy: the logits as the product left them, the gradient of nll_loss and
        that of log_softmax, both float32 (aten's nll_loss_backward and _log_softmax_backward_data
        make a tensor each). On cut logits torch's loss_parallel has three there: zeros with -1 at
        the targets, the exponentials and their sum (torch 2.13,
        distributed/tensor/parallel/loss.py, _nll_loss_and_log_softmax_backward; counted on CPU: 18
        bytes a logit with the 4 kept, 14 uncut). Megatron's works in place
        (tensor_parallel/cross_entropy.py): the gradient of the logits, in their dtype.
        """
        if not self.gathered:
            return self.logits * self.itemsize
        return self.logits * (
            self.itemsize + (12 if self.tensor > 1 and not self.whole_logits else 8)
        )

    # --- messages ---
    @property
    def hidden_numel(self) -> int:
        """Elements that lie between two layers, all of the sequence: what tensor parallel ranks
        gather or reduce.
        """
        return self.tokens * self.model.hidden

    @property
    def boundary_numel(self) -> int:
        """Elements that a stage of a pipeline hands on: with sequence parallelism each rank its own
        part.
        """
        return self.hidden_numel // (self.tensor if self.sequence_parallel else 1)

    @property
    def kv_numel(self) -> int:
        """Keys and values of a rank's part of the sequence: what context parallel ranks send
        round.
        """
        return 2 * self.tokens * self.model.kv_hidden // self.tensor

    @property
    def routed_numel(self) -> int:
        """Elements that a rank sends to experts (and gets back) when tokens are spread evenly:
        top_k rows per token.
        """
        return self.boundary_numel * self.model.active_experts


def step_flops(one: MicroBatchCost, batch: int) -> int:
    """Model FLOPs of one training step over ``batch`` sequences: forward once, backward twice,
    recomputation as the pass says.

    With full recomputation and plain attention this is 96 B s l h^2 (1 + s/6h + V/16lh) for GPT
    (Narayanan, equation 3), which counts the logits with three passes, as here.
    """
    whole = one._replace(tensor=1, context=1, micro_batch=batch)
    return one.model.layers * (3 * whole.layer_flops + whole.recompute_flops) + 3 * whole.head_flops
