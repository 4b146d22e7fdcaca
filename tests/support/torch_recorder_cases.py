"""The small programs whose calls are recorded, as real PyTorch. tests/strategies/test_same_calls.py
has the strategies beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

#: Layers of the small model: (out, in) of a Linear with bias each.
WIDTHS = ((96, 64), (64, 96), (32, 64))
BATCH = 4


class Case(NamedTuple):
    """``body(rank, size, log)`` is the program; calls of its set-up can be cleared from the log."""

    about: str
    ranks: int
    body: Callable[[int, int, list[dict[str, Any]]], None]


def model(shapes: Any = WIDTHS) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(in_, out) for out, in_ in shapes))


def train(
    net: Any,
    iterations: int,
    width: int,
    accumulate: int = 1,
    no_sync: bool = False,
    first: bool = True,
) -> None:
    """``first``: nothing comes before the model, so that nobody wants the gradient of its input."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(iterations):
        for k in range(accumulate):
            if no_sync and k < accumulate - 1:
                with net.no_sync():
                    net(torch.randn(BATCH, width)).sum().backward()
            else:
                net(torch.randn(BATCH, width, requires_grad=not first)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# --- DistributedDataParallel ---
def ddp(
    iterations: int,
    shapes: Any = WIDTHS,
    accumulate: int = 1,
    buffers: bool = False,
    **options: Any,
) -> Any:
    def body(rank: int, size: int, log: list[dict[str, Any]]) -> None:
        net = model(shapes)
        if buffers:
            net.register_buffer("seen", torch.zeros(10))
        wrapped = nn.parallel.DistributedDataParallel(net, **options)
        train(wrapped, iterations, shapes[0][1], accumulate, no_sync=accumulate > 1)

    return body


# --- fully_shard ---
def fsdp(
    iterations: int,
    replicate: int = 1,
    mixed: bool = False,
    clip: bool = False,
    root: bool = True,
    **options: Any,
) -> Any:
    def body(rank: int, size: int, log: list[dict[str, Any]]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        shape, names = (
            ((replicate, size // replicate), ("dp_replicate", "dp"))
            if replicate > 1
            else ((size,), ("dp",))
        )
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        log.clear()
        net = model()
        policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if mixed else {}
        for layer in net:
            fully_shard(layer, mesh=mesh, **policy, **options)
        if root:
            fully_shard(net, mesh=mesh, **policy)
        train(net, iterations, WIDTHS[0][1])

    return body


class Block(nn.Module):
    """A feed-forward pair: up and down."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(hidden, wide, bias=False),
            nn.Linear(wide, hidden, bias=False),
        )

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


def fsdp_tp(iterations: int, tensor: int, data: bool = True, sequence: bool = False) -> Any:
    def body(rank: int, size: int, log: list[dict[str, Any]]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (size // tensor, tensor), mesh_dim_names=("dp", "tp"))
        net = nn.Sequential(Block(16, 64), Block(16, 64))
        for block in net:
            up = ColwiseParallel(input_layouts=Shard(0)) if sequence else ColwiseParallel()
            down = RowwiseParallel(output_layouts=Shard(0)) if sequence else RowwiseParallel()
            parallelize_module(block, mesh["tp"], {"up": up, "down": down})
        log.clear()  # the matrices' own way to the ranks is a scatter each
        for module in (*net, net) if data else ():
            fully_shard(module, mesh=mesh["dp"])
        train(net, iterations, 16, first=False)

    return body


# --- torch.distributed.pipelining ---
PIPELINES = (("GPipe", 4, 1), ("1F1B", 4, 1), ("Interleaved1F1B", 2, 2))


def pipeline(name: str, chunks: int, micro_batches: int = 4, iterations: int = 2) -> Any:
    """``chunks`` stages per rank, shapes not told beforehand."""

    def body(rank: int, size: int, log: list[dict[str, Any]]) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        count = size * chunks
        mine = range(rank, count, size)
        stages = [PipelineStage(nn.Linear(16, 16), s, count, torch.device("cpu")) for s in mine]
        schedule = get_schedule_class(name)(
            stages if chunks > 1 else stages[0], micro_batches, loss_fn=nn.functional.mse_loss
        )
        for _ in range(iterations):
            x, target = torch.randn(8, 16), torch.randn(8, 16)
            inputs, targets = (
                ((x,) if rank == 0 else ()),
                ({"target": target} if rank == size - 1 else {}),
            )
            schedule.step(*inputs, **targets)

    return body


def pipeline_data(
    name: str, chunks: int, style: str, micro_batches: int = 4, iterations: int = 2
) -> Any:
    """Stages of two Linears on two ranks of a pipeline, each stage replicated (ddp) or sharded
    (fsdp) over two more.
    """

    def body(rank: int, size: int, log: list[dict[str, Any]]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "dp"))
        log.clear()
        count, here = 2 * chunks, mesh["pp"].get_local_rank()
        stages = []
        for s in range(here, count, 2):
            net: Any = model(((16, 16), (16, 16)))
            if style == "fsdp":
                for layer in net:
                    fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
                fully_shard(net, mesh=mesh["dp"], reshard_after_forward=False)
            else:
                net = nn.parallel.DistributedDataParallel(
                    net, process_group=mesh["dp"].get_group(), bucket_cap_mb=1 / 1024
                )
            example = torch.randn(2, 16, requires_grad=True)
            shapes = {
                "input_args": (example,),
                "output_args": (example,),
                "group": mesh["pp"].get_group(),
            }
            stages.append(PipelineStage(net, s, count, torch.device("cpu"), **shapes))
        schedule = get_schedule_class(name)(
            stages if chunks > 1 else stages[0], micro_batches, loss_fn=nn.functional.mse_loss
        )
        for _ in range(iterations):
            x, target = torch.randn(8, 16), torch.randn(8, 16)
            inputs, targets = ((x,) if here == 0 else ()), ({"target": target} if here == 1 else {})
            schedule.step(*inputs, **targets)

    return body


BIG = ((1024, 512), (512, 1024), (256, 512))

CASES: dict[str, Case] = {
    "ddp": Case("DDP, buckets of 16 KiB", 4, ddp(3, bucket_cap_mb=1 / 64)),
    "ddp_default": Case("DDP as it is, 1.2 million parameters", 2, ddp(3, BIG)),
    "ddp_unused": Case(
        "DDP, find_unused_parameters", 2, ddp(3, bucket_cap_mb=1 / 64, find_unused_parameters=True)
    ),
    "ddp_accumulate": Case(
        "DDP, two micro-batches, no_sync", 2, ddp(3, bucket_cap_mb=1 / 64, accumulate=2)
    ),
    "ddp_buffers": Case("DDP with buffers", 2, ddp(3, bucket_cap_mb=1 / 64, buffers=True)),
    "fsdp": Case("fully_shard per layer and for the rest", 4, fsdp(2)),
    "fsdp_kept": Case(
        "fully_shard, reshard_after_forward=False", 2, fsdp(2, reshard_after_forward=False)
    ),
    "fsdp_mixed": Case(
        "fully_shard, bfloat16 parameters, float32 gradients", 2, fsdp(2, mixed=True)
    ),
    "fsdp_hybrid": Case("fully_shard on a mesh of replicas and shards", 4, fsdp(2, replicate=2)),
    "tensor_parallel": Case("column and row pairs", 2, fsdp_tp(2, 2, data=False)),
    "tensor_sequence": Case(
        "column and row pairs, the sequence spread between them",
        2,
        fsdp_tp(2, 2, data=False, sequence=True),
    ),
    "fsdp_tp": Case("fully_shard over column and row pairs", 4, fsdp_tp(2, 2)),
    "pipeline_fsdp_1F1B": Case(
        "pipelining, 1F1B over fully_shard", 4, pipeline_data("1F1B", 1, "fsdp")
    ),
    "pipeline_fsdp_Interleaved1F1B": Case(
        "pipelining, interleaved over fully_shard", 4, pipeline_data("Interleaved1F1B", 2, "fsdp")
    ),
    "pipeline_fsdp_zero": Case(
        "pipelining, zero bubble over fully_shard",
        4,
        pipeline_data("InterleavedZeroBubble", 2, "fsdp"),
    ),
    "pipeline_ddp_1F1B": Case(
        "pipelining, 1F1B over DDP", 4, pipeline_data("1F1B", 1, "ddp", iterations=3)
    ),
    "pipeline_ddp_Interleaved1F1B": Case(
        "pipelining, interleaved over DDP",
        4,
        pipeline_data("Interleaved1F1B", 2, "ddp", iterations=3),
    ),
    **{
        f"pipeline_{name}": Case(f"pipelining, {name}", size, pipeline(name, chunks))
        for name, size, chunks in PIPELINES
    },
}
