"""Configurations of DistributedDataParallel, as torch, Lightning, TRL and accelerate wrap
models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.wrapped import Case
from tests.support.wrapped_fsdp import PRICE, WIDTHS, linears

#: What C++ asks for with the flag's default, true, and waits for at once; the functional calls too.
SOFT = ("all_gather", "broadcast")
KIB = 1 / 64


def replicated(
    iterations: int = 3,
    widths: Any = WIDTHS,
    frozen: tuple[int, ...] = (),
    dtypes: dict[int, str] | None = None,
    buffers: Any = None,
    hook: Callable[[Any], None] | None = None,
    accumulate: int = 1,
    synced: Callable[[int, int], bool] | None = None,
    unused: dict[int, tuple[int, ...]] | None = None,
    zero: bool = False,
    join: dict[int, int] | None = None,
    evaluate: bool = False,
    clip: bool = False,
    **options: Any,
) -> Any:
    """``synced(rank, k)``: whether a rank reduces in micro-batch k; ``unused``: layers that a rank
    leaves out; ``join``: its batches.
    """

    def body(rank: int, size: int, log: list[dict[str, Any]]) -> None:
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(in_, out) for out, in_ in widths)
                for name, value in (buffers or {}).items():
                    self.register_buffer(
                        name, torch.zeros(value[0], dtype=getattr(torch, value[1]))
                    )

            def forward(self, x: Any) -> Any:
                for k, layer in enumerate(self.layers):
                    x = x.to(layer.weight.dtype)
                    x = (
                        torch.zeros(x.shape[0], widths[k][0], dtype=x.dtype) + x.sum()
                        if k in skipped
                        else layer(x)
                    )
                return x

        skipped = (unused or {}).get(rank, ())
        net = Net()
        for k in frozen:
            net.layers[k].requires_grad_(False)
        for k, dtype in (dtypes or {}).items():
            net.layers[k].to(getattr(torch, dtype))
        wrapped = nn.parallel.DistributedDataParallel(net, **{"bucket_cap_mb": KIB, **options})
        if hook is not None:
            hook(wrapped)
        train(
            wrapped, rank, iterations, widths[0][1], accumulate, synced, zero, join, evaluate, clip
        )

    return body


def train(
    net: Any,
    rank: int,
    iterations: int,
    width: int,
    accumulate: int,
    synced: Any,
    zero: bool,
    join: Any,
    evaluate: bool,
    clip: bool,
) -> None:
    from contextlib import nullcontext

    import torch
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    learning = [p for p in net.parameters() if p.requires_grad]
    make = (
        (lambda ps: ZeroRedundancyOptimizer(ps, torch.optim.SGD, lr=0.1))
        if zero
        else (lambda ps: torch.optim.SGD(ps, lr=0.1))
    )
    optimizer = make(learning)
    with Join([net, *([optimizer] if zero else [])]) if join else nullcontext():
        for _ in range(join[rank] if join else iterations):
            for k in range(accumulate):
                here = k == accumulate - 1 if synced is None else synced(rank, k)
                with (
                    nullcontext() if here else net.no_sync(),
                    torch.no_grad() if evaluate else nullcontext(),
                ):
                    out = net(torch.randn(4, width)).float().sum()
                    if not evaluate:
                        out.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            if not evaluate:
                optimizer.step()
                optimizer.zero_grad()


def powersgd(**options: Any) -> Callable[[Any], None]:
    def register(net: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        state = powersgd.PowerSGDState(None, **options)
        net.register_comm_hook(state, powersgd.powerSGD_hook)

    return register


def compress(name: str) -> Callable[[Any], None]:
    def register(net: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        plain = getattr(
            default_hooks, f"{name}_compress_hook" if name != "allreduce" else "allreduce_hook"
        )
        net.register_comm_hook(
            None, lambda state, bucket: plain(state, bucket)
        )  # by its own name bf16's is refused without NCCL

    return register


def twin(iterations: int = 3, layers: Any = None, **fields: Any) -> dict[str, Any]:
    return {
        "iterations": iterations,
        "program": [{"ddp": {"layers": layers or linears(), "bucket_cap_mb": KIB, **fields}}],
    }


NORMS = {"mean": ((48,), "float32"), "var": ((48,), "float32"), "batches": ((), "int64")}
TOLD = {"float32": 96, "int64": 1}
HALF = {0: "float16", 1: "float16"}

CASES: dict[str, Case] = {
    "plain": Case("DDP, buckets of 16 KiB", 2, replicated(), twin(), SOFT),
    "plain_4": Case("the same on 4 ranks, 5 iterations", 4, replicated(5), twin(5), SOFT),
    "default_cap": Case(
        "bucket_cap_mb by default",
        2,
        replicated(bucket_cap_mb=None),
        twin(bucket_cap_mb=None),
        SOFT,
    ),
    "one_bucket": Case(
        "one bucket for all parameters",
        2,
        replicated(bucket_cap_mb=100),
        twin(bucket_cap_mb=100),
        SOFT,
    ),
    "frozen_first": Case(
        "the first two layers frozen",
        2,
        replicated(frozen=(0, 1)),
        twin(layers=linears(frozen={0: True, 1: True})),
        SOFT,
    ),
    "frozen_middle": Case(
        "a layer in the middle frozen",
        2,
        replicated(frozen=(1,)),
        twin(layers=linears(frozen={1: True})),
        SOFT,
    ),
    "frozen_last": Case(
        "the head frozen", 4, replicated(frozen=(3,)), twin(layers=linears(frozen={3: True})), SOFT
    ),
    "frozen_unused": Case(
        "frozen layers with find_unused_parameters",
        2,
        replicated(frozen=(0,), find_unused_parameters=True),
        twin(layers=linears(frozen={0: True}), find_unused_parameters=True),
        SOFT,
    ),
    "batchnorm": Case(
        "BatchNorm's buffers: float32, and an int64 counter",
        2,
        replicated(buffers=NORMS),
        twin(buffers=TOLD),
        SOFT,
    ),
    "batchnorm_4": Case(
        "the same on 4 ranks with two micro-batches",
        4,
        replicated(buffers=NORMS, accumulate=2),
        twin(buffers=TOLD, accumulate=2),
        SOFT,
    ),
    "counter_first": Case(
        "an int64 buffer before a float32 one",
        2,
        replicated(buffers={"n": ((3,), "int64"), "x": ((8,), "float32")}),
        twin(buffers={"int64": 3, "float32": 8}),
        SOFT,
    ),
    "buffers_not_synced": Case(
        "forward_sync_buffers=False",
        2,
        replicated(buffers=NORMS, forward_sync_buffers=False),
        twin(buffers=TOLD, forward_sync_buffers=False),
        SOFT,
    ),
    "batchnorm_unused": Case(
        "buffers with find_unused_parameters",
        2,
        replicated(buffers=NORMS, find_unused_parameters=True),
        twin(buffers=TOLD, find_unused_parameters=True),
        SOFT,
    ),
    "half_first": Case(
        "the first two layers in float16",
        2,
        replicated(dtypes=HALF),
        twin(layers=linears(dtype=HALF)),
        SOFT,
    ),
    "half_last": Case(
        "the last two layers in bfloat16",
        2,
        replicated(dtypes={2: "bfloat16", 3: "bfloat16"}),
        twin(layers=linears(dtype={2: "bfloat16", 3: "bfloat16"})),
        SOFT,
    ),
    "half_one_bucket": Case(
        "the same in one bucket of each dtype",
        2,
        replicated(dtypes=HALF, bucket_cap_mb=100),
        twin(layers=linears(dtype=HALF), bucket_cap_mb=100),
        SOFT,
    ),
    "half_buffers": Case(
        "mixed dtypes with BatchNorm's buffers",
        2,
        replicated(dtypes=HALF, buffers=NORMS),
        twin(layers=linears(dtype=HALF), buffers=TOLD),
        SOFT,
    ),
    "half_unused": Case(
        "mixed dtypes with find_unused_parameters",
        2,
        replicated(dtypes=HALF, find_unused_parameters=True),
        twin(layers=linears(dtype=HALF), find_unused_parameters=True),
        SOFT,
    ),
    "static": Case(
        "static_graph", 2, replicated(4, static_graph=True), twin(4, static_graph=True), SOFT
    ),
    "static_default": Case(
        "static_graph, bucket_cap_mb by default",
        2,
        replicated(4, static_graph=True, bucket_cap_mb=None),
        twin(4, static_graph=True, bucket_cap_mb=None),
        SOFT,
    ),
    "static_unused": Case(
        "static_graph with find_unused_parameters",
        2,
        replicated(4, static_graph=True, find_unused_parameters=True),
        twin(4, static_graph=True, find_unused_parameters=True),
        SOFT,
    ),
    "static_accumulate": Case(
        "static_graph, two micro-batches, each reduced",
        2,
        replicated(3, static_graph=True, accumulate=2, synced=lambda r, k: True),
        twin(3, static_graph=True, accumulate=2, no_sync=False),
        SOFT,
    ),
    "unused_skips": Case(
        "find_unused_parameters, rank 1 skips a layer",
        2,
        replicated(find_unused_parameters=True, unused={1: (2,)}),
        twin(find_unused_parameters=True, unused={1: [2]}),
        SOFT,
    ),
    "bucket_view": Case(
        "gradient_as_bucket_view", 2, replicated(gradient_as_bucket_view=True), twin(), SOFT
    ),
    "hook_allreduce": Case(
        "allreduce_hook",
        2,
        replicated(hook=compress("allreduce")),
        twin(comm_hook="allreduce"),
        SOFT,
    ),
    "hook_fp16": Case(
        "fp16_compress_hook",
        2,
        replicated(hook=compress("fp16")),
        twin(comm_hook="fp16_compress"),
        SOFT,
    ),
    "hook_bf16": Case(
        "bf16_compress_hook",
        4,
        replicated(hook=compress("bf16")),
        twin(comm_hook="bf16_compress"),
        SOFT,
    ),
    "hook_bf16_accumulate": Case(
        "bf16_compress_hook, two micro-batches",
        2,
        replicated(hook=compress("bf16"), accumulate=2),
        twin(comm_hook="bf16_compress", accumulate=2),
        SOFT,
    ),
    "powersgd": Case(
        "PowerSGD of rank 1 from iteration 2 on",
        2,
        replicated(
            5, bucket_cap_mb=100, hook=powersgd(matrix_approximation_rank=1, start_powerSGD_iter=2)
        ),
        twin(5, bucket_cap_mb=100, comm_hook={"powersgd": 1, "start": 2}),
        SOFT,
    ),
    "powersgd_4": Case(
        "PowerSGD of rank 4, warm start, from iteration 3 on",
        4,
        replicated(
            6, bucket_cap_mb=100, hook=powersgd(matrix_approximation_rank=4, start_powerSGD_iter=3)
        ),
        twin(6, bucket_cap_mb=100, comm_hook={"powersgd": 4, "start": 3}),
        SOFT,
    ),
    "accumulate": Case(
        "two micro-batches under no_sync", 2, replicated(accumulate=2), twin(accumulate=2), SOFT
    ),
    "accumulate_every": Case(
        "two micro-batches, each reduced",
        2,
        replicated(accumulate=2, synced=lambda r, k: True),
        twin(accumulate=2, no_sync=False),
        SOFT,
    ),
    "evaluate": Case(
        "only forward passes, under no_grad",
        2,
        replicated(evaluate=True, buffers=NORMS),
        twin(evaluate=True, buffers=TOLD),
        SOFT,
    ),
    "clip": Case("clip_grad_norm_ (makes no collective)", 2, replicated(clip=True), twin(), SOFT),
    "zero_optimizer": Case(
        "ZeroRedundancyOptimizer",
        2,
        replicated(zero=True),
        twin(zero_redundancy_optimizer=True),
        SOFT,
    ),
    "zero_optimizer_4": Case(
        "the same on 4 ranks, more layers",
        4,
        replicated(zero=True, widths=(*WIDTHS, (16, 32))),
        twin(layers=linears((*WIDTHS, (16, 32))), zero_redundancy_optimizer=True),
        SOFT,
    ),
    "zero_optimizer_frozen": Case(
        "ZeroRedundancyOptimizer with a frozen layer",
        2,
        replicated(zero=True, frozen=(0,)),
        twin(layers=linears(frozen={0: True}), zero_redundancy_optimizer=True),
        SOFT,
    ),
    "join": Case(
        "Join: 3 batches on rank 0, 2 on rank 1",
        2,
        replicated(join={0: 3, 1: 2}),
        twin(1, inputs={0: 3, "else": 2}, join=True),
        (*SOFT, "all_reduce"),
    ),
    "join_buffers": Case(
        "Join with BatchNorm's buffers",
        3,
        replicated(join={0: 3, 1: 1, 2: 2}, buffers=NORMS),
        twin(1, inputs={0: 3, 1: 1, 2: 2}, join=True, buffers=TOLD),
        (*SOFT, "all_reduce"),
    ),
    "join_none": Case(
        "Join where rank 1 has no batch at all",
        2,
        replicated(join={0: 2, 1: 0}),
        twin(1, inputs={0: 2, 1: 0}, join=True),
        (*SOFT, "all_reduce"),
    ),
    "join_last": Case(
        "Join where the last rank has the most batches batches",
        3,
        replicated(join={0: 1, 1: 1, 2: 3}),
        twin(1, inputs={0: 1, 1: 1, 2: 3}, join=True),
        (*SOFT, "all_reduce"),
    ),
    "join_unused": Case(
        "Join with find_unused_parameters",
        2,
        replicated(join={0: 3, 1: 1}, find_unused_parameters=True),
        twin(1, inputs={0: 3, 1: 1}, join=True, find_unused_parameters=True),
        (*SOFT, "all_reduce"),
    ),
    "join_zero": Case(
        "Join with ZeroRedundancyOptimizer",
        2,
        replicated(join={0: 3, 1: 2}, zero=True),
        twin(1, inputs={0: 3, 1: 2}, join=True, zero_redundancy_optimizer=True),
        (*SOFT, "all_reduce"),
    ),
}
_ = PRICE
