"""Configurations of tensor parallelism by DTensor, as torchtitan and PyTorch's tutorial lay a Llama
out.
"""

from __future__ import annotations

from typing import Any

from tests.support.wrapped import Case

HIDDEN, WIDE, VOCABULARY, BATCH, SEQUENCE = 16, 64, 32, 2, 8
PRICE = {"forward": "1 ms", "backward": "2 ms"}
#: DTensor's functional collectives start without waiting; the next operation on the result waits.
SOFT = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def network(blocks: int, fused: bool, ends: bool) -> Any:
    import torch
    from torch import nn

    class Norm(nn.RMSNorm):
        def __init__(self) -> None:
            super().__init__(HIDDEN)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused = fused
            if fused:
                self.wqkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
            else:
                self.wq, self.wk, self.wv = (
                    nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3)
                )
            self.wo = nn.Linear(HIDDEN, HIDDEN, bias=False)

        def forward(self, x: Any) -> Any:
            q, k, v = (
                self.wqkv(x).chunk(3, -1) if self.fused else (self.wq(x), self.wk(x), self.wv(x))
            )
            return self.wo(torch.sigmoid(q * k) * v)

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w3 = (nn.Linear(HIDDEN, WIDE, bias=False) for _ in range(2))
            self.w2 = nn.Linear(WIDE, HIDDEN, bias=False)

        def forward(self, x: Any) -> Any:
            return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.attention, self.ffn_norm, self.feed_forward = (
                Norm(),
                Attention(),
                Norm(),
                Mlp(),
            )

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.attention_norm(x))
            return x + self.feed_forward(self.ffn_norm(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ends = ends
            if ends:
                self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
                self.norm, self.output = Norm(), nn.Linear(HIDDEN, VOCABULARY, bias=False)
            self.layers = nn.ModuleList(Block() for _ in range(blocks))

        def forward(self, x: Any) -> Any:
            x = self.embedding(x) if self.ends else x
            for layer in self.layers:
                x = layer(x)
            return self.output(self.norm(x)) if self.ends else x

    return Net()


def parallel(
    plan: Any,
    iterations: int = 2,
    blocks: int = 2,
    fused: bool = False,
    ends: bool = False,
    loss: str = "sum",
    tensor: int = 2,
    shard: bool = False,
    clip: bool = False,
    evaluate: bool = False,
) -> Any:
    """``plan(net)``: what parallelize_module takes, for the ends and for a block. ``loss``: sum,
    plain or parallel.
    """

    def body(rank: int, size: int, log: list[dict[str, Any]]) -> None:
        from contextlib import nullcontext

        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

        mesh = init_device_mesh("cpu", (size // tensor, tensor), mesh_dim_names=("dp", "tp"))
        net = network(blocks, fused, ends)
        outer, inner = plan(fused)
        if ends:
            parallelize_module(net, mesh["tp"], outer)
        for layer in net.layers:
            parallelize_module(layer, mesh["tp"], inner)
            if shard:
                fully_shard(layer, mesh=mesh["dp"])
        if shard:
            fully_shard(net, mesh=mesh["dp"])
        log.clear()
        for _ in range(iterations):
            x = (
                torch.randint(VOCABULARY, (BATCH, SEQUENCE))
                if ends
                else torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True)
            )
            with (
                torch.no_grad() if evaluate else nullcontext(),
                loss_parallel() if loss == "parallel" else nullcontext(),
            ):
                out = net(x)
                if evaluate:
                    continue
                target = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
                found = (
                    out.sum()
                    if loss == "sum"
                    else torch.nn.functional.cross_entropy(out.flatten(0, 1), target.flatten(0, 1))
                )
                found.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            for p in net.parameters():
                p.grad = None

    return body


def plain(fused: bool) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    columns = ("wqkv",) if fused else ("wq", "wk", "wv")
    inner = {
        **{f"attention.{w}": ColwiseParallel() for w in columns},
        "attention.wo": RowwiseParallel(),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(),
    }
    outer = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    _ = Shard
    return outer, inner


def plain_loss(fused: bool) -> Any:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel

    outer, inner = plain(fused)
    return {
        **outer,
        "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }, inner


def sequence(fused: bool, loss: bool = True) -> Any:
    """torchtitan, models/llama3/infra/parallelize.py (apply_non_moe_tp)."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    columns = ("wqkv",) if fused else ("wq", "wk", "wv")
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    inner = {
        "attention_norm": SequenceParallel(),
        "attention": gathered,
        **{f"attention.{w}": ColwiseParallel() for w in columns},
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": gathered,
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    outer = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss else Replicate(),
            use_local_output=not loss,
        ),
    }
    return outer, inner


def sequence_whole(fused: bool) -> Any:
    return sequence(fused, loss=False)


def twin(iterations: int = 2, mesh: Any = None, **fields: Any) -> dict[str, Any]:
    base = {
        "layers": 2,
        "pairs": 2,
        "columns": [3, 2],
        "batch": BATCH,
        "sequence": SEQUENCE,
        "hidden": HIDDEN,
        "dtype": "float32",
        **PRICE,
    }
    return {
        "mesh": mesh or {"dp": 1, "tp": 2},
        "iterations": iterations,
        "program": [
            {"tensor_parallel": {k: v for k, v in {**base, **fields}.items() if v is not None}}
        ],
    }


def _over(op: str, numel: int, reduce_op: str = "sum") -> dict[str, Any]:
    """A call over tp of so many elements on a rank, its part or its whole."""
    part, whole = ({"shape": [n], "dtype": "float32"} for n in (numel, 2 * numel))
    if op == "all_reduce":
        return {op: {"tensor": part, "group": "tp", "op": reduce_op}}
    names = (
        {"input": part, "output": whole}
        if op == "all_gather_into_tensor"
        else {"input": whole, "output": part}
    )
    return {op: {**names, "group": "tp"}}


GATHER, SCATTER, NORM = (
    _over("all_gather_into_tensor", 128),
    _over("reduce_scatter_tensor", 128),
    _over("all_reduce", 16),
)
#: A block's matrices, cut over tp: norms, wq, wk, wv, wo, w1, w3, w2.
CUT = [[16], [16], [8, 16], [8, 16], [8, 16], [16, 8], [32, 16], [32, 16], [16, 32]]
TWO_D = {
    "mesh": {"dp": 2, "tp": 2},
    "iterations": 2,
    "program": [
        {
            "fsdp": {
                "layers": {
                    "params": CUT,
                    "count": 2,
                    "forward": [GATHER, SCATTER] * 2,
                    "backward": [*[GATHER, SCATTER] * 2, NORM, NORM],
                },
                "root": {
                    "params": [[16, 16], [16], [16, 16]],
                    "at": "both",
                    "first_forward": [SCATTER],
                    "first_backward": [GATHER, NORM],
                    "forward": [GATHER, _over("all_reduce", 16, "max"), NORM, NORM],
                    "backward": [SCATTER],
                },
                "clip_grad_norm": True,
                "clip_over": "tp",
            }
        }
    ],
}


CASES: dict[str, Case] = {
    "plain": Case(
        "wq, wk, wv, w1, w3 by columns, wo, w2 by rows", 2, parallel(plain), twin(), SOFT
    ),
    "plain_4": Case(
        "the same on 4 ranks", 4, parallel(plain, tensor=4), twin(mesh={"dp": 1, "tp": 4}), SOFT
    ),
    "fused": Case(
        "the same with wq, wk, wv fused", 2, parallel(plain, fused=True), twin(columns=[1, 2]), SOFT
    ),
    "plain_evaluate": Case(
        "only forward passes", 2, parallel(plain, evaluate=True), twin(backward=None), SOFT
    ),
    "embedded": Case(
        "embedding and output sharded by vocabulary, logits gathered",
        2,
        parallel(plain, ends=True, loss="plain"),
        twin(ends={"vocabulary": VOCABULARY}),
        SOFT,
    ),
    "loss": Case(
        "the same with loss_parallel",
        2,
        parallel(plain_loss, ends=True, loss="parallel"),
        twin(ends={"vocabulary": VOCABULARY, "loss_parallel": True}),
        SOFT,
    ),
    "embedded_evaluate": Case(
        "embedding and output, only forward passes",
        2,
        parallel(plain, ends=True, evaluate=True),
        twin(ends={"vocabulary": VOCABULARY}, backward=None),
        SOFT,
    ),
    "sequence": Case(
        "torchtitan's plan, the blocks alone",
        2,
        parallel(sequence),
        twin(sequence_parallel=True, sequence=2 * SEQUENCE),
        SOFT,
    ),
    "sequence_fused": Case(
        "the same with wq, wk, wv fused",
        2,
        parallel(sequence, fused=True),
        twin(sequence_parallel=True, sequence=2 * SEQUENCE, columns=[1, 2]),
        SOFT,
    ),
    "sequence_whole": Case(
        "torchtitan's plan with embedding and output, logits gathered",
        2,
        parallel(sequence_whole, ends=True, loss="plain"),
        twin(sequence_parallel=True, ends={"vocabulary": VOCABULARY}),
        SOFT,
    ),
    "sequence_loss": Case(
        "torchtitan's plan whole, loss_parallel",
        2,
        parallel(sequence, ends=True, loss="parallel"),
        twin(sequence_parallel=True, ends={"vocabulary": VOCABULARY, "loss_parallel": True}),
        SOFT,
    ),
    "sequence_loss_4": Case(
        "the same on 4 ranks",
        4,
        parallel(sequence, ends=True, loss="parallel", tensor=4),
        twin(
            mesh={"dp": 1, "tp": 4},
            sequence_parallel=True,
            ends={"vocabulary": VOCABULARY, "loss_parallel": True},
        ),
        SOFT,
    ),
    "sequence_clip": Case(
        "the blocks of torchtitan's plan, clip_grad_norm_",
        2,
        parallel(sequence, clip=True),
        twin(sequence_parallel=True, sequence=2 * SEQUENCE, clip_grad_norm=True),
        SOFT,
    ),
    "sequence_fused_clip": Case(
        "the same with wq, wk, wv fused",
        2,
        parallel(sequence, fused=True, clip=True),
        twin(sequence_parallel=True, sequence=2 * SEQUENCE, columns=[1, 2], clip_grad_norm=True),
        SOFT,
    ),
    "sequence_loss_clip": Case(
        "torchtitan's plan whole on 4 ranks, clip_grad_norm_",
        4,
        parallel(sequence, ends=True, loss="parallel", tensor=4, clip=True),
        twin(
            mesh={"dp": 1, "tp": 4},
            sequence_parallel=True,
            ends={"vocabulary": VOCABULARY, "loss_parallel": True},
            clip_grad_norm=True,
        ),
        SOFT,
    ),
    "fsdp": Case(
        "torchtitan's plan under fully_shard, clip_grad_norm_ over both axes",
        4,
        parallel(sequence, ends=True, loss="parallel", shard=True, clip=True),
        TWO_D,
        SOFT,
    ),
}
