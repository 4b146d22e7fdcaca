"""Transformers by their sizes, and the presets that people name.

A parameter count is a sum over the matrices a model has; for each preset it is tested against the figure that its authors publish.
"""

from __future__ import annotations

from math import prod
from typing import Final, Literal, NamedTuple


class Architecture(NamedTuple):
    """Sizes of a decoder-only transformer.

    ``kv_heads``: heads of keys and values (grouped-query attention where fewer than ``heads``). ``ffn``: width of the feed-forward
    layer (of one expert). ``mlp``: `gelu` has two matrices, `swiglu` three. ``experts`` 0: dense. ``positions``: learned position
    embeddings. ``bias``: matrices carry biases and norms are LayerNorms with one (GPT); else RMSNorms without (Llama).
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

    @property
    def kv_hidden(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def matrices(self) -> int:
        """Matrices of one feed-forward layer."""
        return 3 if self.mlp == "swiglu" else 2

    @property
    def active_experts(self) -> int:
        """Feed-forward layers that one token passes through."""
        return self.top_k if self.experts else 1

    def norm_shapes(self) -> list[tuple[int, ...]]:
        """One norm: a scale, and a shift where there are biases."""
        return [(self.hidden,)] * (2 if self.bias else 1)

    def attention_shapes(self) -> list[tuple[int, ...]]:
        """Queries, keys, values, output, in the layout of `torch.nn.Linear`: (out, in)."""
        outs = (self.hidden, self.kv_hidden, self.kv_hidden, self.hidden)
        return [shape for out in outs for shape in ((out, self.hidden), *(((out,),) if self.bias else ()))]

    def expert_shapes(self) -> list[tuple[int, ...]]:
        """One feed-forward layer: up (and gate), down."""
        up = [(self.ffn, self.hidden)] * (self.matrices - 1)
        pairs = [*((shape, (self.ffn,)) for shape in up), ((self.hidden, self.ffn), (self.hidden,))]
        return [shape for matrix, bias in pairs for shape in ((matrix, bias) if self.bias else (matrix,))]

    def layer_shapes(self) -> list[tuple[int, ...]]:
        """Parameters of one layer in the order of `module.parameters()`: norm, attention, norm, router, feed-forward layers."""
        router: list[tuple[int, ...]] = [(self.experts, self.hidden)] if self.experts else []
        experts = self.expert_shapes() * max(self.experts, 1)
        return [*self.norm_shapes(), *self.attention_shapes(), *self.norm_shapes(), *router, *experts]

    def embedding_shapes(self) -> list[tuple[int, ...]]:
        """Token embeddings, and learned positions."""
        return [(self.vocabulary, self.hidden), *([(self.positions, self.hidden)] if self.positions else [])]

    def head_shapes(self) -> list[tuple[int, ...]]:
        """The last norm, and the output projection where it is not the embeddings again."""
        return [*self.norm_shapes(), *([] if self.tied else [(self.vocabulary, self.hidden)])]

    @property
    def layer_parameters(self) -> int:
        return numel(self.layer_shapes())

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer: what expert parallelism divides. 0 where dense."""
        return numel(self.expert_shapes()) * self.experts

    @property
    def embedding_parameters(self) -> int:
        return numel(self.embedding_shapes())

    @property
    def head_parameters(self) -> int:
        return numel(self.head_shapes())

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.embedding_parameters + self.layers * self.layer_parameters + self.head_parameters

    @property
    def active_parameters(self) -> int:
        """Those that one token meets."""
        idle = (self.experts - self.top_k) * numel(self.expert_shapes()) if self.experts else 0
        return self.parameters - self.layers * idle


def numel(shapes: list[tuple[int, ...]]) -> int:
    """Elements of all tensors together."""
    return sum(prod(shape) for shape in shapes)


_LLAMA = "Llama Team, The Llama 3 Herd of Models, arXiv:2407.21783, table 3"

PRESETS: Final[dict[str, Architecture]] = {
    "gpt3-175b": Architecture(
        layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152, vocabulary=50257, sequence=2048, mlp="gelu", positions=2048,
        tied=True, bias=True, dropout=True, source="Brown et al., Language Models are Few-Shot Learners, arXiv:2005.14165, table 2.1",
    ),
    "llama3-8b": Architecture(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, sequence=8192, source=_LLAMA,
    ),
    "llama3-70b": Architecture(
        layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocabulary=128256, sequence=8192, source=_LLAMA,
    ),
    "llama3-405b": Architecture(
        layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocabulary=128256, sequence=8192, source=_LLAMA,
    ),
    "mixtral-8x7b": Architecture(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=32000, sequence=32768, experts=8, top_k=2,
        source="Jiang et al., Mixtral of Experts, arXiv:2401.04088, table 1",
    ),
}  # fmt: skip
