"""The sizes of a transformer, and the parameters that follow from them.

Well-known models are in `distsim.scenario.strategies.training_step.presets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple

ParameterShapes = tuple[tuple[int, ...], ...]


class LatentAttention(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    ``queries`` and ``keys`` are the dimensions of the compressed queries, and of the compressed
    keys and values. The others are widths of a head's parts: ``plain`` without position embedding,
    ``rotary`` with rotary embedding, ``values``.
    """

    queries: int
    keys: int
    plain: int
    rotary: int
    values: int


class Architecture(NamedTuple):
    """Sizes of a transformer.

    ``kv_heads``: heads of keys and values; fewer than ``heads`` with grouped-query attention.
    ``ffn``: width of the feed-forward layer, or of one expert. ``mlp``: `gelu` has two matrices,
    `swiglu` three. ``experts``: 0 for a dense model. ``positions``: number of learned position
    embeddings. ``bias``: matrices have biases and norms are LayerNorms with a bias (GPT); otherwise
    norms are RMSNorms without one (Llama).

    ``head``: width of a head; 0: hidden / heads. ``norms``: number of norms of a layer.
    ``qk_norm``: there are norms of a head's queries and keys. ``biased``: matrices have biases, but
    norms do not. ``sinks``: there is a learned number for each head. ``shared``: width of the
    shared expert, which processes all tokens. ``dense``: number of first layers without experts;
    ``dense_ffn``: their width. ``router_nodes``: the largest number of nodes that have experts of
    one token; 0: any. ``modulated``: number of hidden × hidden matrices that scale and shift a
    layer (DiT). ``inputs``, ``outputs``: parameters before and after the layers, if they are not
    word embeddings.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    sequence: int
    mlp: Literal["gelu", "swiglu"] = "swiglu"
    experts: int = 0
    top_k: int = 0
    positions: int = 0
    tied: bool = False
    bias: bool = False
    dropout: bool = False
    source: str = ""
    head: int = 0
    norms: int = 2
    qk_norm: bool = False
    biased: bool = False
    sinks: bool = False
    latent: LatentAttention | None = None
    shared: int = 0
    dense: int = 0
    dense_ffn: int = 0
    router_nodes: int = 0
    modulated: int = 0
    inputs: ParameterShapes = ()
    outputs: ParameterShapes = ()

    @property
    def head_width(self) -> int:
        """Elements of one head's queries and keys, and of its values without latent attention."""
        if self.latent is not None:
            return self.latent.plain + self.latent.rotary
        return self.head or self.hidden // self.heads

    @property
    def q_hidden(self) -> int:
        """Columns of the query projection."""
        return self.head_width * self.heads

    @property
    def kv_hidden(self) -> int:
        """Columns of the key projection and of the value projection.

        With latent attention these differ, and this is their mean.
        """
        if self.latent is not None:
            return self.heads * (self.head_width + self.latent.values) // 2
        return self.head_width * self.kv_heads

    @property
    def o_hidden(self) -> int:
        """Rows of the output projection's input: all heads' values."""
        return self.heads * (self.head_width if self.latent is None else self.latent.values)

    @property
    def rotary_columns(self) -> int:
        """Columns of queries and keys with rotary embedding.

        None with learned positions (GPT). With latent attention, the rotary parts of all query
        heads and of the single key.
        """
        if self.latent is not None:
            return (self.heads + 1) * self.latent.rotary
        return 0 if self.bias else self.q_hidden + self.kv_hidden

    @property
    def matrices(self) -> int:
        """Matrices of one feed-forward layer."""
        return 3 if self.mlp == "swiglu" else 2

    @property
    def active_experts(self) -> int:
        """Feed-forward layers that one token passes through."""
        return self.top_k if self.experts else 1

    @property
    def active_ffn(self) -> int:
        """Total width of the feed-forward layers that one token passes through."""
        return self.ffn * self.active_experts + self.shared

    def norm_shapes(self) -> list[tuple[int, ...]]:
        """One norm: a scale, and a shift if there are biases."""
        return [(self.hidden,)] * (2 if self.bias else 1)

    def attention_shapes(self) -> list[tuple[int, ...]]:
        """Queries, keys, values, output, in the layout of `torch.nn.Linear`: (out, in)."""
        if self.latent is not None:
            return self._latent_shapes(self.latent)
        matrices = [
            (self.q_hidden, self.hidden),
            (self.kv_hidden, self.hidden),
            (self.kv_hidden, self.hidden),
            (self.hidden, self.o_hidden),
        ]
        shapes = self._with_biases(matrices)
        if self.qk_norm:
            shapes += [(self.head_width,)] * 2
        if self.sinks:
            shapes.append((self.heads,))
        return shapes

    def _with_biases(self, matrices: list[tuple[int, int]]) -> list[tuple[int, ...]]:
        """The shapes of some matrices, each followed by its bias if the layers have biases."""
        shapes: list[tuple[int, ...]] = []
        for out, in_ in matrices:
            shapes.append((out, in_))
            if self.bias or self.biased:
                shapes.append((out,))
        return shapes

    def _latent_shapes(self, latent: LatentAttention) -> list[tuple[int, ...]]:
        return [
            (latent.queries, self.hidden),
            (latent.queries,),
            (self.q_hidden, latent.queries),
            (latent.keys + latent.rotary, self.hidden),
            (latent.keys,),
            (self.heads * (latent.plain + latent.values), latent.keys),
            (self.hidden, self.o_hidden),
        ]

    @property
    def attention_weights(self) -> int:
        """Elements of the attention's matrices."""
        return total_numel([shape for shape in self.attention_shapes() if len(shape) > 1])

    def expert_shapes(self, ffn: int | None = None) -> list[tuple[int, ...]]:
        """One feed-forward layer: up (and gate), down."""
        width = self.ffn if ffn is None else ffn
        up = [(width, self.hidden)] * (self.matrices - 1)
        return self._with_biases([*up, (self.hidden, width)])

    def around_shapes(self) -> list[tuple[int, ...]]:
        """A layer without its feed-forward part: norms, attention, and their modulation."""
        shapes = [*self.norm_shapes() * self.norms, *self.attention_shapes()]
        if self.modulated:
            width = self.modulated * self.hidden
            shapes += [(width, self.hidden), (width,)]
        return shapes

    def layer_shapes(self) -> list[tuple[int, ...]]:
        """Parameters of one layer: norms, attention, router, feed-forward layers (all experts)."""
        router: list[tuple[int, ...]] = []
        if self.experts:
            router.append((self.experts, self.hidden))
            if self.biased or self.latent is not None:
                router.append((self.experts,))
        shared = self.expert_shapes(self.shared) if self.shared else []
        return [
            *self.around_shapes(),
            *router,
            *shared,
            *self.expert_shapes() * max(self.experts, 1),
        ]

    def embedding_shapes(self) -> list[tuple[int, ...]]:
        """Token embeddings and learned positions, or other parameters before the layers."""
        if self.inputs:
            return list(self.inputs)
        shapes: list[tuple[int, ...]] = [(self.vocabulary, self.hidden)]
        if self.positions:
            shapes.append((self.positions, self.hidden))
        return shapes

    def head_shapes(self) -> list[tuple[int, ...]]:
        """The last norm, and the output projection unless it is tied to the embeddings."""
        shapes = self.norm_shapes() if self.norms else []
        if self.outputs:
            return [*shapes, *self.outputs]
        if not self.tied:
            shapes.append((self.vocabulary, self.hidden))
        return shapes

    @property
    def layer_parameters(self) -> int:
        return total_numel(self.layer_shapes())

    @property
    def dense_parameters(self) -> int:
        """Parameters of a layer without experts in a model that also has layers with experts."""
        if not self.dense:
            return 0
        return total_numel([*self.around_shapes(), *self.expert_shapes(self.dense_ffn)])

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer, which expert parallelism divides."""
        return total_numel(self.expert_shapes()) * self.experts

    @property
    def embedding_parameters(self) -> int:
        return total_numel(self.embedding_shapes())

    @property
    def head_parameters(self) -> int:
        return total_numel(self.head_shapes())

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        expert_layers = (self.layers - self.dense) * self.layer_parameters
        dense_layers = self.dense * self.dense_parameters
        return self.embedding_parameters + expert_layers + dense_layers + self.head_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that process one token."""
        if not self.experts:
            return self.parameters
        idle_experts = self.experts - self.top_k
        idle_per_layer = idle_experts * total_numel(self.expert_shapes())
        return self.parameters - (self.layers - self.dense) * idle_per_layer


def total_numel(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements of all tensors together."""
    return sum(prod(shape) for shape in shapes)
