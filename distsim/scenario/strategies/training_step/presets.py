"""Well-known transformers with their published sizes.

A parameter count is the sum over the matrices of a model. For each preset, a test compares it with
the number that the authors publish.
"""

from __future__ import annotations

from typing import Final

from distsim.scenario.strategies.training_step.architecture import (
    Architecture,
    LatentAttention,
    total_numel,
)

__all__ = ["PRESETS", "Architecture", "total_numel"]

_LLAMA3_SOURCE = "Llama Team, The Llama 3 Herd of Models, arXiv:2407.21783, table 3"

_LLAMA31_SOURCE = (
    "Llama model cards, github.com/meta-llama/llama-models, models/llama3_1 and llama3_3"
)
_LLAMA4_SOURCE = "Meta, Llama-4-{} config.json, huggingface.co/meta-llama"
_QWEN_SOURCE = (
    "Qwen Team, Qwen3 Technical Report, arXiv:2505.09388, tables 1 and 2, and the published "
    "config.json"
)
_GEMMA_SOURCE = (
    "Gemma Team, Gemma 3 Technical Report, arXiv:2503.19786, table 1, and the published config.json"
)
_GPT_OSS_SOURCE = (
    "OpenAI, gpt-oss model card, arXiv:2508.10925, table 1, and the published config.json"
)


def _llama3(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    sequence: int = 8192,
    source: str = _LLAMA3_SOURCE,
) -> Architecture:
    return Architecture(layers, hidden, heads, 8, ffn, 128256, sequence, source=source)


def _qwen3(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, experts: int = 0
) -> Architecture:
    return Architecture(
        layers,
        hidden,
        heads,
        kv_heads,
        ffn,
        151936,
        32768,
        experts=experts,
        top_k=8 if experts else 0,
        head=128,
        qk_norm=True,
        source=_QWEN_SOURCE,
    )


def _gemma3(
    layers: int, hidden: int, heads: int, kv_heads: int, head: int, ffn: int
) -> Architecture:
    """The text part of the model."""
    return Architecture(
        layers,
        hidden,
        heads,
        kv_heads,
        ffn,
        262208,
        131072,
        tied=True,
        head=head,
        norms=4,
        qk_norm=True,
        source=_GEMMA_SOURCE,
    )


def _gpt_oss(layers: int, experts: int) -> Architecture:
    return Architecture(
        layers,
        2880,
        64,
        8,
        2880,
        201088,
        131072,
        experts=experts,
        top_k=4,
        head=64,
        biased=True,
        sinks=True,
        source=_GPT_OSS_SOURCE,
    )


def _llama4(name: str, experts: int, dense: int) -> Architecture:
    """The text part of the model."""
    return Architecture(
        48,
        5120,
        40,
        8,
        8192,
        202048,
        262144,
        experts=experts,
        top_k=1,
        shared=8192,
        dense=dense,
        dense_ffn=16384,
        source=_LLAMA4_SOURCE.format(name),
    )


def _vit(layers: int, hidden: int, heads: int, patch: int) -> Architecture:
    """A vision transformer for images of 224 × 224 pixels and 1000 classes."""
    count = (224 // patch) ** 2 + 1
    return Architecture(
        layers,
        hidden,
        heads,
        heads,
        4 * hidden,
        0,
        count,
        mlp="gelu",
        bias=True,
        inputs=((hidden, 3 * patch * patch), (hidden,), (hidden,), (count, hidden)),
        outputs=((1000, hidden), (1000,)),
        source="Dosovitskiy et al., An Image is Worth 16x16 Words, arXiv:2010.11929, table 1",
    )


PRESETS: Final[dict[str, Architecture]] = {
    "gpt3-175b": Architecture(
        layers=96,
        hidden=12288,
        heads=96,
        kv_heads=96,
        ffn=49152,
        vocabulary=50257,
        sequence=2048,
        mlp="gelu",
        positions=2048,
        tied=True,
        bias=True,
        dropout=True,
        source="Brown et al., Language Models are Few-Shot Learners, arXiv:2005.14165, table 2.1",
    ),
    "llama3-8b": Architecture(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        vocabulary=128256,
        sequence=8192,
        source=_LLAMA3_SOURCE,
    ),
    "llama3-70b": Architecture(
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        ffn=28672,
        vocabulary=128256,
        sequence=8192,
        source=_LLAMA3_SOURCE,
    ),
    "llama3-405b": Architecture(
        layers=126,
        hidden=16384,
        heads=128,
        kv_heads=8,
        ffn=53248,
        vocabulary=128256,
        sequence=8192,
        source=_LLAMA3_SOURCE,
    ),
    "mixtral-8x7b": Architecture(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        vocabulary=32000,
        sequence=32768,
        experts=8,
        top_k=2,
        source="Jiang et al., Mixtral of Experts, arXiv:2401.04088, table 1",
    ),
    "llama3.1-8b": _llama3(32, 4096, 32, 14336, 131072, _LLAMA31_SOURCE),
    "llama3.1-70b": _llama3(80, 8192, 64, 28672, 131072, _LLAMA31_SOURCE),
    "llama3.1-405b": _llama3(126, 16384, 128, 53248, 131072, _LLAMA31_SOURCE),
    "llama3.3-70b": _llama3(80, 8192, 64, 28672, 131072, _LLAMA31_SOURCE),
    "llama4-scout": _llama4("Scout-17B-16E", 16, 0),
    "llama4-maverick": _llama4("Maverick-17B-128E", 128, 24),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 768, 128),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 4, 1536, 128),
    "deepseek-v3": Architecture(
        61,
        7168,
        128,
        128,
        2048,
        129280,
        4096,
        experts=256,
        top_k=8,
        latent=LatentAttention(1536, 512, 128, 64, 128),
        shared=2048,
        dense=3,
        dense_ffn=18432,
        router_nodes=4,
        source="DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437, section 4.2",
    ),
    "mixtral-8x22b": Architecture(
        56,
        6144,
        48,
        8,
        16384,
        32768,
        65536,
        experts=8,
        top_k=2,
        source="Mistral AI, mistral.ai/news/mixtral-8x22b, and the published config.json",
    ),
    "gemma3-4b": _gemma3(34, 2560, 8, 4, 256, 10240),
    "gemma3-12b": _gemma3(48, 3840, 16, 8, 256, 15360),
    "gemma3-27b": _gemma3(62, 5376, 32, 16, 128, 21504),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "vit-l-16": _vit(24, 1024, 16, 16),
    "vit-h-14": _vit(32, 1280, 16, 14),
    "dit-xl-2": Architecture(
        28,
        1152,
        16,
        16,
        4608,
        0,
        256,
        mlp="gelu",
        norms=0,
        biased=True,
        modulated=6,
        inputs=((1152, 16), (1152,), (1152, 256), (1152,), (1152, 1152), (1152,), (1001, 1152)),
        outputs=((2304, 1152), (2304,), (32, 1152), (32,)),
        source=(
            "Peebles and Xie, Scalable Diffusion Models with Transformers, arXiv:2212.09748, "
            "table 1"
        ),
    ),
}
