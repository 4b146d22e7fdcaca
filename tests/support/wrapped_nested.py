"""Configurations of fully_shard around transformer blocks: nested units, adapters, prefetching,
checkpointing, as frameworks wrap them.
"""

from __future__ import annotations

from typing import Any

from tests.support.wrapped import Case
from tests.support.wrapped_fsdp import PRICE, steps

HIDDEN, WIDE, VOCABULARY = 16, 64, 40
#: Parameters of a block: norms, attention, feed-forward.
NORM, ATTENTION, MLP = [[HIDDEN]], [[HIDDEN, HIDDEN]] * 4, [[WIDE, HIDDEN], [HIDDEN, WIDE]]


def network(blocks: int = 2, rank: int = 0, tied: bool = False, embeds: bool = True) -> Any:
    """Embedding, blocks of attention and feed-forward with residual sums, norm, output. ``rank``:
    LoRA's, all else frozen.
    """
    import torch
    from torch import nn

    class Adapted(nn.Module):
        """A frozen Linear with LoRA's two matrices beside it (Hu et al., arXiv:2106.09685)."""

        def __init__(self, in_: int, out: int) -> None:
            super().__init__()
            self.base = nn.Linear(in_, out, bias=False).requires_grad_(False)
            self.lora_a, self.lora_b = (
                nn.Linear(in_, rank, bias=False),
                nn.Linear(rank, out, bias=False),
            )

        def forward(self, x: Any) -> Any:
            return self.base(x) + self.lora_b(self.lora_a(x))

    def linear(in_: int, out: int) -> Any:
        return Adapted(in_, out) if rank else nn.Linear(in_, out, bias=False)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (linear(HIDDEN, HIDDEN) for _ in range(4))

        def forward(self, x: Any) -> Any:
            return self.o(torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1) @ self.v(x))

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = linear(HIDDEN, WIDE), linear(WIDE, HIDDEN)

        def forward(self, x: Any) -> Any:
            return self.down(torch.relu(self.up(x)))

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(HIDDEN), requires_grad=not rank)

        def forward(self, x: Any) -> Any:
            return x * self.weight

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.attention, self.norm2, self.mlp = Norm(), Attention(), Norm(), Mlp()

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if embeds:
                self.embedding = nn.Embedding(VOCABULARY, HIDDEN).requires_grad_(not rank)
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))
            self.norm, self.output = (
                Norm(),
                nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(not rank),
            )
            if tied:
                self.output.weight = self.embedding.weight

        def forward(self, x: Any) -> Any:
            x = self.embedding((x[:, :4] * 0).long()) if embeds else x.unsqueeze(1)
            for block in self.blocks:
                x = block(x)
            return self.output(self.norm(x))

    return Net()


def wrapped(
    wrap: Any,
    iterations: int = 2,
    blocks: int = 2,
    rank: int = 0,
    tied: bool = False,
    checkpoint: bool = False,
    embeds: bool = True,
    mesh_shape: tuple[int, int] | None = None,
    **training: Any,
) -> Any:
    """``wrap(net, shard)`` wraps; ``shard(module, **options)`` is fully_shard on the mesh."""

    def body(rank_: int, size: int, log: list[dict[str, Any]]) -> None:
        from functools import partial

        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        names = ("dp",) if mesh_shape is None else ("dp_replicate", "dp")
        mesh = init_device_mesh("cpu", mesh_shape or (size,), mesh_dim_names=names)
        net = network(blocks, rank, tied, embeds)
        if checkpoint:
            for k, block in enumerate(net.blocks):
                net.blocks[k] = checkpoint_wrapper(block)
        wrap(net, partial(fully_shard, mesh=mesh))
        log.clear()
        steps(net, iterations, HIDDEN, **training)

    return body


def experts(inner_first: bool = True, **training: Any) -> Any:
    """torchtitan, models/llama4/infra/parallelize.py (apply_fsdp): feed-forward parts that are
    spread over ``ep`` are sharded over the rest of the data-parallel ranks, all else over all of
    them."""

    def body(rank_: int, size: int, log: list[dict[str, Any]]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp_mod_ep", "ep"))
        whole = mesh[("dp_mod_ep", "ep")]._flatten("dp")
        net = network()
        for block in net.blocks:
            fully_shard(block.mlp, mesh=mesh["dp_mod_ep"])
            fully_shard(block, mesh=whole)
        fully_shard(net, mesh=whole)
        log.clear()
        steps(net, 2, HIDDEN, **training)

    return body


def torchtitan(net: Any, shard: Any) -> None:
    """torchtitan, models/llama3/infra/parallelize.py (apply_fsdp): embedding, blocks, norm with
    output, root.
    """
    shard(net.embedding, reshard_after_forward=True)
    for block in net.blocks:
        shard(block, reshard_after_forward=True)
    shard([net.norm, net.output], reshard_after_forward=False)
    shard(net)


def blocks_alone(net: Any, shard: Any) -> None:
    """accelerate and TRL: TRANSFORMER_BASED_WRAP wraps the blocks, then the model."""
    for block in net.blocks:
        shard(block)
    shard(net)


def nested(net: Any, shard: Any) -> None:
    for block in net.blocks:
        shard(block.attention)
        shard(block.mlp)
        shard(block)
    shard(net)


def whole(net: Any, shard: Any) -> None:
    shard(net)


def prefetched(forward: int, backward: int) -> Any:
    def wrap(net: Any, shard: Any) -> None:
        blocks_alone(net, shard)
        blocks = list(net.blocks)
        for k, block in enumerate(blocks):
            if forward:
                block.set_modules_to_forward_prefetch(blocks[k + 1 : k + 1 + forward])
            if backward:
                block.set_modules_to_backward_prefetch(blocks[max(0, k - backward) : k][::-1])

    return wrap


def unit(params: Any, **fields: Any) -> dict[str, Any]:
    return {"params": params, **PRICE, **fields}


def twin(layers: Any, iterations: int = 2, mesh: Any = None, **fields: Any) -> dict[str, Any]:
    return {
        "mesh": mesh or {"dp": 4},
        "iterations": iterations,
        "program": [{"fsdp": {"layers": layers, **fields}}],
    }


EMBEDDING, OUTPUT = [[VOCABULARY, HIDDEN]], [[HIDDEN], [VOCABULARY, HIDDEN]]
BLOCK = [*NORM, *ATTENTION, *NORM, *MLP]
ENDS = unit([*EMBEDDING, *OUTPUT], at="both")
NESTED = unit([*NORM, *NORM], inner=[unit(ATTENTION), unit(MLP)])
EXPERTS: dict[str, Any] = {
    "layers": [unit([*NORM, *ATTENTION, *NORM], inner=[unit(MLP, shard="dp_mod_ep")], count=2)],
    "mesh": {"dp_mod_ep": 2, "ep": 2},
    "shard": ["dp_mod_ep", "ep"],
    "root": ENDS,
}
HSDP = {"dp_replicate": 2, "dp": 2}


def adapted(rank: int, shapes: Any) -> dict[str, Any]:
    """LoRA: the matrices frozen, two thin ones beside each."""
    return {
        "params": [thin for out, in_ in shapes for thin in ([rank, in_], [out, rank])],
        "frozen": list(shapes),
    }


LORA_BLOCK = {**PRICE, "params": adapted(8, [*ATTENTION, *MLP])["params"], "frozen": BLOCK}
LORA_NESTED = {
    "frozen": [*NORM, *NORM],
    **PRICE,
    "inner": [{**PRICE, **adapted(8, ATTENTION)}, {**PRICE, **adapted(8, MLP)}],
}
FROZEN_ENDS = {"frozen": [*EMBEDDING, *OUTPUT], "at": "both", **PRICE}
TITAN = [unit(EMBEDDING), unit(BLOCK, count=2), unit(OUTPUT, reshard_after_forward=False)]

CASES: dict[str, Case] = {
    "torchtitan": Case(
        "torchtitan's Llama: embedding, blocks, norm with output (kept), root",
        4,
        wrapped(torchtitan),
        twin(TITAN),
    ),
    "torchtitan_clip": Case(
        "the same with clip_grad_norm_",
        4,
        wrapped(torchtitan, clip=True),
        twin(TITAN, clip_grad_norm=True),
        ("all_reduce",),
    ),
    "torchtitan_checkpoint": Case(
        "the same with activation checkpointing of blocks",
        4,
        wrapped(torchtitan, checkpoint=True),
        twin(TITAN),
    ),
    "torchtitan_hybrid": Case(
        "the same on 2 × 2 ranks (HSDP)",
        4,
        wrapped(torchtitan, mesh_shape=(2, 2)),
        twin(TITAN, mesh=HSDP, shard="dp", replicate="dp_replicate"),
    ),
    "torchtitan_late": Case(
        "the same, two micro-batches, gradient sync in the last",
        4,
        wrapped(
            torchtitan,
            accumulate=2,
            setting=lambda net, k, last: net.set_requires_gradient_sync(last),
        ),
        twin(TITAN, accumulate=2, no_sync=True),
    ),
    "experts": Case(
        "blocks over 4 ranks, their experts over 2 of them, as torchtitan wraps a mixture of experts",
        4,
        experts(),
        twin(**EXPERTS),
    ),
    "experts_accumulated": Case(
        "the same, two micro-batches", 4, experts(accumulate=2), twin(**EXPERTS, accumulate=2)
    ),
    "accelerate": Case(
        "accelerate's TRANSFORMER_BASED_WRAP: blocks, then the model",
        4,
        wrapped(blocks_alone),
        twin([unit(BLOCK, count=2)], root=ENDS),
    ),
    "accelerate_checkpoint": Case(
        "the same with activation checkpointing",
        4,
        wrapped(blocks_alone, checkpoint=True),
        twin([unit(BLOCK, count=2)], root=ENDS),
    ),
    "accelerate_tied": Case(
        "the same with tied embeddings in the root",
        4,
        wrapped(blocks_alone, tied=True),
        twin([unit(BLOCK, count=2)], root=unit([*EMBEDDING, *NORM], at="both")),
    ),
    "accelerate_3": Case(
        "the same, three blocks, three iterations",
        2,
        wrapped(blocks_alone, iterations=3, blocks=3),
        twin([unit(BLOCK, count=3)], 3, {"dp": 2}, root=ENDS),
    ),
    "nested": Case(
        "attention, mlp and the block are one unit each",
        4,
        wrapped(nested),
        twin([NESTED, NESTED], root=ENDS),
    ),
    "nested_data": Case(
        "the same, but the first block's input requires no gradient",
        4,
        wrapped(nested, embeds=False),
        twin([NESTED, NESTED], root=unit(OUTPUT)),
    ),
    "nested_checkpoint": Case(
        "the same with activation checkpointing of blocks",
        4,
        wrapped(nested, checkpoint=True),
        twin([NESTED, NESTED], root=ENDS),
    ),
    "whole": Case(
        "one unit for the whole model",
        4,
        wrapped(whole),
        twin([unit([*EMBEDDING, *BLOCK, *BLOCK, *OUTPUT])], reshard_after_forward=False),
    ),
    "forward_prefetch": Case(
        "set_modules_to_forward_prefetch, one ahead",
        4,
        wrapped(prefetched(1, 0), blocks=3),
        twin([unit(BLOCK, count=3)], root=ENDS, forward_prefetch=1),
    ),
    "forward_prefetch_2": Case(
        "two ahead",
        4,
        wrapped(prefetched(2, 0), blocks=4),
        twin([unit(BLOCK, count=4)], root=ENDS, forward_prefetch=2),
    ),
    "backward_prefetch_2": Case(
        "set_modules_to_backward_prefetch, two ahead",
        4,
        wrapped(prefetched(0, 2), blocks=4),
        twin([unit(BLOCK, count=4)], root=ENDS, backward_prefetch=2),
    ),
    "both_prefetch": Case(
        "one ahead in both passes",
        4,
        wrapped(prefetched(1, 1), blocks=3),
        twin([unit(BLOCK, count=3)], root=ENDS, forward_prefetch=1, backward_prefetch=1),
    ),
    "lora": Case(
        "LoRA (rank 8) on every matrix, blocks wrapped",
        4,
        wrapped(blocks_alone, rank=8),
        twin([{**LORA_BLOCK, "count": 2}], root=FROZEN_ENDS),
    ),
    "lora_nested": Case(
        "LoRA, attention and mlp are separate units",
        4,
        wrapped(nested, rank=8),
        twin([LORA_NESTED, LORA_NESTED], root=FROZEN_ENDS),
    ),
    "lora_torchtitan": Case(
        "LoRA, wrapped as torchtitan wraps",
        4,
        wrapped(torchtitan, rank=8),
        twin(
            [
                {"frozen": EMBEDDING, **PRICE},
                {**LORA_BLOCK, "count": 2},
                {"frozen": OUTPUT, **PRICE, "reshard_after_forward": False},
            ]
        ),
    ),
    "lora_late": Case(
        "LoRA, two micro-batches, gradient sync in the last",
        4,
        wrapped(
            blocks_alone,
            rank=8,
            accumulate=2,
            setting=lambda net, k, last: net.set_requires_gradient_sync(last),
        ),
        twin([{**LORA_BLOCK, "count": 2}], root=FROZEN_ENDS, accumulate=2, no_sync=True),
    ),
    "lora_clip": Case(
        "LoRA with clip_grad_norm_",
        4,
        wrapped(blocks_alone, rank=8, clip=True),
        twin([{**LORA_BLOCK, "count": 2}], root=FROZEN_ENDS, clip_grad_norm=True),
        ("all_reduce",),
    ),
    "lora_hybrid": Case(
        "LoRA on 2 × 2 ranks (HSDP)",
        4,
        wrapped(blocks_alone, rank=8, mesh_shape=(2, 2)),
        twin(
            [{**LORA_BLOCK, "count": 2}],
            mesh=HSDP,
            shard="dp",
            replicate="dp_replicate",
            root=FROZEN_ENDS,
        ),
    ),
    "lora_evaluate": Case(
        "LoRA, only forward passes",
        4,
        wrapped(blocks_alone, rank=8, evaluate=True),
        twin([{**LORA_BLOCK, "count": 2}], root=FROZEN_ENDS, evaluate=True),
    ),
}
