"""Averages of weights, checkpoints, weights for a rollout, and attention over heads, as torch, TRL
and DeepSpeed make the calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import prod
from typing import Any

from tests.support.wrapped import Case
from tests.support.wrapped_fsdp import PRICE, WIDTHS, linears

LAYERS = linears(WIDTHS)
SHAPES = [shape for out, in_ in WIDTHS for shape in ([out, in_], [out])]
PARAMS = sum(prod(shape) for shape in SHAPES)
#: full_tensor starts without waiting; what reads the tensor waits.
SOFT = ("all_gather_into_tensor",)
Log = list[dict[str, Any]]


def model(mesh: Any = None) -> Any:
    import torch
    from torch.distributed.fsdp import fully_shard

    net = torch.nn.Sequential(*(torch.nn.Linear(in_, out) for out, in_ in WIDTHS))
    if mesh is not None:
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


# --- averages ---
def averaged(iterations: int, make: Callable[[Any], Any]) -> Any:
    """Steps of every rank alone, and torch's averager after each."""

    def body(rank: int, size: int, log: Log) -> None:
        import torch

        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        averager = make(torch.distributed)
        log.clear()
        for _ in range(iterations):
            net(torch.randn(2, WIDTHS[0][1])).sum().backward()
            optimizer.step()
            averager.average_parameters(net.parameters())

    return body


def periodic(**options: Any) -> Callable[[Any], Any]:
    def make(dist: Any) -> Any:
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        return PeriodicModelAverager(**options)

    return make


def hierarchical(levels: list[tuple[int, int]], **options: Any) -> Callable[[Any], Any]:
    def make(dist: Any) -> Any:
        from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
            HierarchicalModelAverager,
        )

        return HierarchicalModelAverager(OrderedDict(levels), **options)

    return make


def torchft_like(iterations: int, every: int, diloco: bool) -> Any:
    """One all_reduce per parameter after ``every`` steps, as torchft's LocalSGD and DiLoCo make
    them of the manager's group.
    """

    def body(rank: int, size: int, log: Log) -> None:
        import torch
        import torch.distributed as dist

        net = model()
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        before = [p.detach().clone() for p in net.parameters()]
        for k in range(iterations):
            net(torch.randn(2, WIDTHS[0][1])).sum().backward()
            inner.step()
            inner.zero_grad()
            if (k + 1) % every:
                continue
            changes = [
                b - p.data if diloco else p.data
                for b, p in zip(before, net.parameters(), strict=True)
            ]
            flat = [torch.cat([c.reshape(-1) for c in changes])] if diloco else changes
            works = [dist.all_reduce(c, async_op=True) for c in flat]
            for work in works:
                work.wait()
            if diloco:
                outer.step()
            before = [p.detach().clone() for p in net.parameters()]

    return body


def local(**fields: Any) -> list[dict[str, Any]]:
    return [{"local_sgd": {"layers": LAYERS, **fields}}]


MEAN = {"layers": LAYERS}
GRID = {"mesh": {"machine": 2, "gpu": 2}}


# --- checkpoints: real torch.distributed.checkpoint ---
def checkpointed(
    load: bool = False, sharded: bool = True, asynchronous: bool = False, times: int = 1
) -> Any:
    def body(rank: int, size: int, log: Log) -> None:
        import os
        import tempfile

        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh

        net = model(init_device_mesh("cpu", (size,)) if sharded else None)
        state = {"model": net.state_dict(), "step": 3}
        names = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(names)
        os.chdir(str(names[0]))
        if load:
            dcp.save(state, checkpoint_id="kept")
        log.clear()
        torch.manual_seed(0)
        for k in range(times):
            if load:
                dcp.load(state, checkpoint_id="kept")
            elif asynchronous:
                type(dist.group.WORLD)._device_types = [
                    torch.device("cpu")
                ]  # a group of cpu:gloo has it by itself
                dcp.async_save(state, checkpoint_id=f"kept_{k}").result()
            else:
                dcp.save(state, checkpoint_id=f"kept_{k}")

    return body


# --- weights for a rollout ---
def synchronised(
    trainers: int, sharded: bool = True, barriers: bool = False, packed: int = 1
) -> Any:
    """full_tensor of each parameter on every trainer, then the first one's broadcast in a group
    with the others.
    """

    def body(rank: int, size: int, log: Log) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor

        mine = dist.new_group(list(range(trainers)))
        update = dist.new_group([0, *range(trainers, size)])
        if rank < trainers:
            net = model(DeviceMesh.from_group(mine, "cpu") if sharded else None)
            log.clear()
            waiting = []
            for p in net.parameters():
                waiting.append((p.full_tensor() if isinstance(p, DTensor) else p).detach())
                if rank == 0 and (len(waiting) == packed):
                    send(dist, torch.cat([w.reshape(-1) for w in waiting]), update, barriers)
                    waiting = []
            if rank == 0 and waiting:
                send(dist, torch.cat([w.reshape(-1) for w in waiting]), update, barriers)
        else:
            log.clear()
            sizes = [prod(shape) for shape in SHAPES]
            for k in range(0, len(sizes), packed):
                send(dist, torch.empty(sum(sizes[k : k + packed])), update, barriers)

    def send(dist: Any, tensor: Any, group: Any, barrier: bool) -> None:
        dist.broadcast(tensor, src=0, group=group)
        if barrier:
            dist.barrier(group=group)

    return body


def sync(trainers: list[int], rollouts: list[int], **fields: Any) -> dict[str, Any]:
    given = {"trainers": trainers, "rollouts": rollouts, "params": SHAPES, "dtype": "float32"}
    return {"program": [{"weight_sync": {**given, **fields}}]}


# --- attention over heads ---
def by_heads(layers: int, heads: int, kv_heads: int) -> Any:
    """DistributedAttention: an all_to_all_single each for queries, keys, values and the context;
    autograd makes the backward pass's.
    """

    def body(rank: int, size: int, log: Log) -> None:
        import torch
        import torch.distributed as dist

        class Exchanged(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Any) -> Any:
                out = torch.empty_like(x)
                dist.all_to_all_single(out, x.contiguous())
                return out

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                return Exchanged.apply(grad)

        sequence, dim = 16 // size, 4
        weights = [torch.randn(dim, dim, requires_grad=True) for _ in range(layers)]
        x = torch.randn(size, sequence, 1, heads // size, dim, requires_grad=True)
        log.clear()
        y = x
        for weight in weights:
            q = Exchanged.apply(y @ weight)
            k = Exchanged.apply(y[..., : kv_heads // size, :] @ weight)
            v = Exchanged.apply(y[..., : kv_heads // size, :] @ weight)
            y = Exchanged.apply(q * k.mean(3, keepdim=True) * v.mean(3, keepdim=True))
        y.sum().backward()

    return body


def heads_of(ranks: int, **fields: Any) -> dict[str, Any]:
    given = {
        "layers": 2,
        "sequence": 16,
        "heads": 8,
        "head_dim": 4,
        "dtype": "float32",
        **PRICE,
        **fields,
    }
    return {"mesh": {"cp": ranks}, "program": [{"ulysses": given}]}


def saved(plan: int, given: int, results: int, metadata: int) -> dict[str, Any]:
    """Sizes of pickled objects are those of torch 2.13."""
    sizes = {"plan": plan, "global_plan": given, "results": results, "metadata": metadata}
    return {"program": [{"dcp_save": {key: f"{size} B" for key, size in sizes.items()}}]}


LOADED = {"program": [{"dcp_load": {"plan": "1470 B"}}]}

CASES: dict[str, Case] = {
    "periodic": Case(
        "PeriodicModelAverager(period=2)",
        2,
        averaged(5, periodic(period=2)),
        {"iterations": 5, "program": local(every=2)},
    ),
    "periodic_warm": Case(
        "PeriodicModelAverager(period=3, warmup_steps=2)",
        4,
        averaged(8, periodic(period=3, warmup_steps=2)),
        {"iterations": 8, "program": local(every=3, warmup=2)},
    ),
    "periodic_one": Case(
        "PeriodicModelAverager(period=1)",
        2,
        averaged(2, periodic(period=1)),
        {"iterations": 2, "program": local(every=1)},
    ),
    "hierarchical": Case(
        "HierarchicalModelAverager: every 2 steps inside a node, every 4 steps over all ranks",
        4,
        averaged(6, hierarchical([(2, 2), (4, 4)])),
        {**GRID, "iterations": 6, "program": local(levels={2: "gpu", 4: "world"})},
    ),
    "hierarchical_warm": Case(
        "the same after 3 steps",
        4,
        averaged(9, hierarchical([(2, 2), (4, 4)], warmup_steps=3)),
        {**GRID, "iterations": 9, "program": local(levels={2: "gpu", 4: "world"}, warmup=3)},
    ),
    "local_sgd": Case(
        "LocalSGD as in torchft: each parameter, every 2 steps",
        2,
        torchft_like(4, 2, diloco=False),
        {"iterations": 4, "program": local(every=2, per_parameter=True)},
    ),
    "diloco": Case(
        "DiLoCo: the change of all parameters, every 3 steps",
        4,
        torchft_like(6, 3, diloco=True),
        {"iterations": 6, "program": [{"diloco": {"layers": LAYERS, "every": 3}}]},
    ),
    "sync": Case(
        "full_tensor on 2 trainers, broadcasts to 2 others",
        4,
        synchronised(2),
        sync([0, 1], [2, 3]),
        SOFT,
    ),
    "sync_barriers": Case(
        "the same with a barrier after each broadcast, as in TRL's client",
        4,
        synchronised(2, barriers=True),
        sync([0, 1], [2, 3], barriers=True),
        SOFT,
    ),
    "sync_packed": Case(
        "three parameters in a broadcast",
        4,
        synchronised(3, packed=3),
        sync([0, 1, 2], [3], packed=3),
        SOFT,
    ),
    "sync_whole": Case(
        "trainers that hold whole copies",
        3,
        synchronised(1, sharded=False),
        sync([0], [1, 2], sharded=False),
        SOFT,
    ),
    "ulysses": Case(
        "DistributedAttention (Ulysses), two layers", 4, by_heads(2, 8, 8), heads_of(4)
    ),
    "ulysses_grouped": Case(
        "the same with half as many heads of keys and values",
        2,
        by_heads(2, 8, 4),
        heads_of(2, kv_heads=4),
    ),
    "save": Case("dcp.save of a sharded model", 2, checkpointed(), saved(1843, 1934, 1043, 3648)),
    "save_whole": Case(
        "dcp.save where every rank has the whole model",
        2,
        checkpointed(sharded=False),
        saved(1843, 1534, 777, 2302),
    ),
    "save_twice": Case(
        "dcp.save twice on 4 ranks",
        4,
        checkpointed(times=2),
        {"iterations": 2, **saved(1843, 1934, 1043, 5804)},
    ),
    "save_async": Case(
        "dcp.async_save: the calls of its thread",
        2,
        checkpointed(asynchronous=True),
        saved(1843, 1934, 1043, 3648),
    ),
    "load": Case("dcp.load of a sharded model", 2, checkpointed(load=True), LOADED),
    "load_four": Case("the same on 4 ranks", 4, checkpointed(load=True), LOADED),
}
