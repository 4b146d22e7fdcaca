"""Models of plain PyTorch modules, laid out as torchtitan lays Llama 3 out: tensor parallelism,
checkpointing, fully_shard.

Needs torch alone. Names of modules and plans: pytorch/torchtitan, models/llama3 (model,
infra/parallelize).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Sizes(NamedTuple):
    """``head``: width of a head where it is not hidden / heads. ``positions``: GPT's learned ones;
    0: rotary. ``patch``: columns of a patch, in place of a vocabulary's words (ViT)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    head: int = 0
    qk_norm: bool = False
    experts: int = 0
    top_k: int = 0
    positions: int = 0
    dropout: float = 0.0
    causal: bool = True
    patch: int = 0

    @property
    def head_width(self) -> int:
        return self.head or self.hidden // self.heads


MODELS = {
    "llama3-8b": Sizes(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": Sizes(80, 8192, 64, 8, 28672, 128256),
    "qwen3-8b": Sizes(36, 4096, 32, 8, 12288, 151936, head=128, qk_norm=True),
    "qwen3-32b": Sizes(64, 5120, 64, 8, 25600, 151936, head=128, qk_norm=True),
    "qwen3-30b-a3b": Sizes(
        48, 2048, 32, 4, 768, 151936, head=128, qk_norm=True, experts=128, top_k=8
    ),
    "mixtral-8x7b": Sizes(32, 4096, 32, 8, 14336, 32000, experts=8, top_k=2),
    "gpt-1.3b": Sizes(24, 2048, 16, 16, 8192, 50257, positions=2048),
    "vit-l-16": Sizes(24, 1024, 16, 16, 4096, 1000, positions=197, causal=False, patch=768),
}
TINY = {"hidden": 64, "heads": 8, "kv_heads": 8, "ffn": 128, "head": 8, "layers": 2}


class Options(NamedTuple):
    """``repeat``: keys and values are repeated for the query heads before attention. ``ep``: ranks
    that share the experts.
    """

    repeat: bool = False
    ep: int = 1
    tp: int = 1


class Attention(nn.Module):
    freqs: Tensor | None = None

    def __init__(self, sizes: Sizes, options: Options) -> None:
        super().__init__()
        wide, bias = sizes.head_width, bool(sizes.positions)
        self.sizes, self.options = sizes, options
        self.wq = nn.Linear(sizes.hidden, sizes.heads * wide, bias=bias)
        self.wk = nn.Linear(sizes.hidden, sizes.kv_heads * wide, bias=bias)
        self.wv = nn.Linear(sizes.hidden, sizes.kv_heads * wide, bias=bias)
        self.wo = nn.Linear(sizes.heads * wide, sizes.hidden, bias=bias)
        self.q_norm = nn.RMSNorm(wide) if sizes.qk_norm else None
        self.k_norm = nn.RMSNorm(wide) if sizes.qk_norm else None

    def forward(self, x: Tensor) -> Tensor:
        sizes, (batch, length, _) = self.sizes, x.shape
        q, k, v = (
            w(x).view(batch, length, -1, sizes.head_width) for w in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.freqs is not None:
            q, k = rotary(q, self.freqs), rotary(k, self.freqs)
        if self.options.repeat:
            k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        dropout = sizes.dropout if self.training else 0.0
        grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        out = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=sizes.causal, **grouped
        )
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))  # type: ignore[no-any-return]


def rotary(x: Tensor, freqs: Tensor) -> Tensor:
    """As torchtitan's apply_rotary_emb: complex numbers in float32."""
    turned = (
        torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        * freqs[None, : x.shape[1], None, :]
    )
    return torch.view_as_real(turned).flatten(3).type_as(x)


class FeedForward(nn.Module):
    """Gated; GPT's and ViT's two matrices where there are positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        bias = bool(sizes.positions)
        self.w1 = nn.Linear(sizes.hidden, sizes.ffn, bias=bias)
        self.w2 = nn.Linear(sizes.ffn, sizes.hidden, bias=bias)
        self.w3 = None if bias else nn.Linear(sizes.hidden, sizes.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.w3 is None:
            return self.w2(functional.gelu(self.w1(x), approximate="tanh"))  # type: ignore[no-any-return]
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A rank's experts, by grouped products."""

    def __init__(self, sizes: Sizes, count: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(count, sizes.ffn, sizes.hidden))
        self.w2 = nn.Parameter(torch.empty(count, sizes.hidden, sizes.ffn))
        self.w3 = nn.Parameter(torch.empty(count, sizes.ffn, sizes.hidden))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        up = functional.silu(torch._grouped_mm(x, self.w1.transpose(-2, -1), offs=ends))
        up = up * torch._grouped_mm(x, self.w3.transpose(-2, -1), offs=ends)
        return torch._grouped_mm(up, self.w2.transpose(-2, -1), offs=ends)


class Routed(nn.Module):
    """Experts behind a router that is made to spread tokens evenly; all_to_all where ranks share
    them (torchtitan, models/moe).
    """

    group: Any = None

    def __init__(self, sizes: Sizes, options: Options) -> None:
        super().__init__()
        self.sizes, self.ranks = sizes, options.ep
        self.router = nn.Linear(sizes.hidden, sizes.experts, bias=False)
        self.experts = Experts(sizes, sizes.experts // options.ep)

    def forward(self, x: Tensor) -> Tensor:
        sizes, flat = self.sizes, x.reshape(-1, x.shape[-1])
        count = flat.shape[0] * sizes.top_k
        scores = functional.softmax(self.router(flat).float(), dim=-1)
        chosen = (torch.arange(count, device=x.device) % sizes.experts).view(-1, sizes.top_k)
        weight = scores.gather(1, chosen)
        order = torch.argsort(chosen.view(-1), stable=True)
        sent = flat[order // sizes.top_k] * weight.view(-1)[order, None].to(flat.dtype)
        back = self.exchanged(self.experts_of(self.exchanged(sent)))
        index = (order // sizes.top_k)[:, None].expand(-1, flat.shape[1])
        return torch.zeros_like(flat).scatter_add(0, index, back).view_as(x)

    def exchanged(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        each = [x.shape[0] // self.ranks] * self.ranks
        return all_to_all_single_autograd(x, each, each, self.group)

    def experts_of(self, x: Tensor) -> Tensor:
        """From the order of ranks into that of experts, and back."""
        here = self.sizes.experts // self.ranks
        rows = x.shape[0] // (here * self.ranks)
        index = (
            torch.arange(x.shape[0], device=x.device)
            .view(self.ranks, here, rows)
            .transpose(0, 1)
            .reshape(-1)
        )
        ends = torch.arange(1, here + 1, device=x.device, dtype=torch.int32) * (rows * self.ranks)
        found = self.experts(x[index], ends)
        return torch.empty_like(found).index_copy(0, index, found)


class Block(nn.Module):
    def __init__(self, sizes: Sizes, options: Options) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm if sizes.positions else nn.RMSNorm, sizes.hidden, eps=1e-5)
        self.attention_norm, self.ffn_norm = norm(), norm()
        self.attention = Attention(sizes, options)
        self.feed_forward = Routed(sizes, options) if sizes.experts else FeedForward(sizes)
        self.dropout = nn.Dropout(sizes.dropout) if sizes.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.ffn_norm(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    """``first``, ``last``: whether embedding and head stand on this stage."""

    def __init__(
        self, sizes: Sizes, options: Options, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.sizes = sizes
        embed = (
            partial(nn.Linear, sizes.patch)
            if sizes.patch
            else partial(nn.Embedding, sizes.vocabulary)
        )
        self.tok_embeddings = embed(sizes.hidden) if first else None
        self.positions = (
            nn.Embedding(sizes.positions, sizes.hidden) if sizes.positions and first else None
        )
        self.layers = nn.ModuleList(Block(sizes, options) for _ in range(sizes.layers))
        norm = nn.LayerNorm if sizes.positions else nn.RMSNorm
        self.norm = norm(sizes.hidden, eps=1e-5) if last else None
        self.output = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        if self.positions is not None:
            x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        if self.norm is None or self.output is None:
            return x
        x = self.norm(x)
        return self.output(x.mean(1) if self.sizes.patch else x)  # type: ignore[no-any-return]

    def filled(self, device: str, length: int) -> Model:
        """Weights drawn, rotary frequencies made."""
        for name, parameter in self.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            with torch.no_grad():
                local.fill_(1) if "norm" in name and name.endswith("weight") else local.normal_(
                    0, 0.02
                )
        if not self.sizes.positions:
            wide = self.sizes.head_width
            turns = 1.0 / 500000 ** (torch.arange(0, wide, 2, device=device).float() / wide)
            angles = torch.outer(torch.arange(length, device=device).float(), turns)
            freqs = torch.polar(torch.ones_like(angles), angles)
            for module in self.modules():
                if isinstance(module, Attention):
                    module.freqs = freqs
        return self


# --- layouts ---
def cut(model: Model, mesh: Any) -> None:
    """Tensor parallelism with sequence parallelism, the loss from each rank's part of the
    logits.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    def gathered() -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))

    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(
        model, mesh, {name: how for name, how in ends.items() if getattr(model, name) is not None}
    )
    for block in model.layers:
        plan: dict[str, Any] = {
            "attention_norm": SequenceParallel(),
            "ffn_norm": SequenceParallel(),
        }
        plan |= {"attention": gathered(), "feed_forward": gathered()}
        plan |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
        plan |= {
            name: RowwiseParallel(output_layouts=Shard(1))
            for name in ("attention.wo", "feed_forward.w2")
        }
        if block.attention.q_norm is not None:
            plan |= {
                f"attention.{name}": SequenceParallel(sequence_dim=2, use_local_output=True)
                for name in ("q_norm", "k_norm")
            }
        parallelize_module(block, mesh, plan)


def checkpointed(model: Model, how: str) -> None:
    """``full``: a layer is computed again from its input. ``op``: torchtitan's per-operation
    policy: attention, messages and every second product are kept."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    more: dict[str, Any] = {"context_fn": _contexts} if how == "op" else {}
    for index, block in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(block, preserve_rng_state=False, **more)


def _contexts() -> Any:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten, functional = torch.ops.aten, torch.ops._c10d_functional
    kept = {
        aten.mm.default,
        aten._scaled_dot_product_flash_attention.default,
        functional.reduce_scatter_tensor.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten.max.default,
    }
    count = {False: 0, True: 0}

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        again = bool(context.is_recompute)
        if func == aten.mm.default:
            count[again] += 1
        save = func in kept and not (func == aten.mm.default and count[again] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def sharded(model: Model, mesh: Any, experts: Any, reshard: bool) -> None:
    """fully_shard in torchtitan's units: embedding, each block (its experts over another mesh),
    norm with output, the rest.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    how: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    if model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, mesh=mesh, reshard_after_forward=reshard, **how)
    for block in model.layers:
        part = getattr(block.feed_forward, "experts", None)
        if part is not None and experts is not None:
            fully_shard(
                part,
                mesh=experts,
                reshard_after_forward=reshard,
                shard_placement_fn=lambda p: Shard(1),
                **how,
            )
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, **how)
    if model.norm is not None:
        fully_shard([model.norm, model.output], mesh=mesh, reshard_after_forward=False, **how)
    fully_shard(model, mesh=mesh, **how)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """In float32, as torchtitan's."""
    if logits.dim() == 2:
        return functional.cross_entropy(logits.float(), labels)
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
