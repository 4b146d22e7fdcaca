"""Configurations of fully_shard, as torchtitan, accelerate and TRL wrap models."""

from __future__ import annotations

from typing import Any

from tests.support.wrapped import Case

#: Layers of the small model: (out, in) of a Linear with bias each.
WIDTHS = ((96, 64), (64, 96), (48, 64), (32, 48))
PRICE = {"forward": "1 ms", "backward": "2 ms"}


def linears(widths: Any = WIDTHS, **fields: dict[int, Any]) -> list[dict[str, Any]]:
    """`layers:` for Linears; ``fields``: values by layer, as ``frozen={0: True}``."""
    found: list[dict[str, Any]] = [{"params": [[out, in_], [out]], **PRICE} for out, in_ in widths]
    for key, by_layer in fields.items():
        for k, value in by_layer.items():
            found[k][key] = value
            if key == "frozen" and value is True:
                found[k]["frozen"] = found[k].pop("params")
    return found


def sharded(
    iterations: int = 2,
    widths: Any = WIDTHS,
    replicate: int = 1,
    frozen: tuple[int, ...] = (),
    reshard: dict[int, Any] | None = None,
    every: Any = None,
    root: Any = "net",
    accumulate: int = 1,
    setting: Any = None,
    clip: bool = False,
    mixed: bool = False,
    group: tuple[int, ...] = (),
    inputs_grad: bool = False,
    evaluate: bool = False,
) -> Any:
    """``reshard``: reshard_after_forward by layer; ``every``: of all; ``setting(net, k, last)``
    before micro-batch k.
    """

    def body(rank: int, size: int, log: list[dict[str, Any]]) -> None:
        import torch
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        shape, names = (
            ((replicate, size // replicate), ("dp_replicate", "dp"))
            if replicate > 1
            else ((size,), ("dp",))
        )
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        net = nn.Sequential(*(nn.Linear(in_, out) for out, in_ in widths))
        for k in frozen:
            net[k].requires_grad_(False)
        policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if mixed else {}
        for k, layer in enumerate(net):
            option = (reshard or {}).get(k, every)
            if root == "last" and k == len(widths) - 1:
                continue
            if root == "ends" and k in (0, len(widths) - 1):
                continue
            if k not in group:
                fully_shard(layer, mesh=mesh, reshard_after_forward=option, **policy)
        if group:
            fully_shard([net[k] for k in group], mesh=mesh, reshard_after_forward=every, **policy)
        fully_shard(net, mesh=mesh, reshard_after_forward=(reshard or {}).get("root"), **policy)
        log.clear()
        steps(net, iterations, widths[0][1], accumulate, setting, clip, inputs_grad, evaluate)

    return body


def steps(
    net: Any,
    iterations: int,
    width: int,
    accumulate: int = 1,
    setting: Any = None,
    clip: bool = False,
    inputs_grad: bool = False,
    evaluate: bool = False,
) -> None:
    import torch

    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for _ in range(iterations):
        for k in range(accumulate):
            if setting is not None:
                setting(net, k, k == accumulate - 1)
            if evaluate:
                with torch.no_grad():
                    net(torch.randn(4, width))
            else:
                net(torch.randn(4, width, requires_grad=inputs_grad)).sum().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def twin(
    iterations: int = 2, mesh: dict[str, int] | None = None, layers: Any = None, **fields: Any
) -> dict[str, Any]:
    return {
        "mesh": mesh or {"dp": 4},
        "iterations": iterations,
        "program": [{"fsdp": {"layers": layers or linears(), **fields}}],
    }


HSDP = {"dp_replicate": 2, "dp": 2}
LAST = {"params": [[32, 48], [32]], **PRICE}

CASES: dict[str, Case] = {
    "auto": Case(
        "every layer and the root, reshard_after_forward by default", 4, sharded(), twin()
    ),
    "keep_all": Case(
        "reshard_after_forward=False everywhere",
        4,
        sharded(every=False),
        twin(reshard_after_forward=False),
    ),
    "last_kept": Case(
        "the last unit kept after the forward pass, as torchtitan keeps norm and output",
        4,
        sharded(reshard={3: False}),
        twin(layers=linears(reshard_after_forward={3: False})),
    ),
    "part": Case(
        "reshard_after_forward=2 of 4 ranks", 4, sharded(every=2), twin(reshard_after_forward=2)
    ),
    "part_whole": Case(
        "reshard_after_forward=4 of 4 ranks", 4, sharded(every=4), twin(reshard_after_forward=4)
    ),
    "part_last_kept": Case(
        "2 of 4 ranks, the last unit kept",
        4,
        sharded(every=2, reshard={3: False}),
        twin(layers=linears(reshard_after_forward={3: False}), reshard_after_forward=2),
    ),
    "root_last": Case(
        "the root holds the last layer",
        4,
        sharded(root="last"),
        twin(layers=linears(WIDTHS[:3]), root=LAST),
    ),
    "root_ends": Case(
        "the root holds the first and the last layer (only the blocks are wrapped)",
        4,
        sharded(root="ends"),
        twin(
            layers=linears(WIDTHS[1:3]),
            root={"params": [[96, 64], [96], [32, 48], [32]], "at": "both", **PRICE},
        ),
    ),
    "root_resharded": Case(
        "the root with reshard_after_forward=True",
        4,
        sharded(root="last", reshard={"root": True}),
        twin(layers=linears(WIDTHS[:3]), root={**LAST, "reshard_after_forward": True}),
    ),
    "input_grad": Case(
        "the model's input requires a gradient (an earlier module is trained)",
        4,
        sharded(inputs_grad=True),
        twin(input_grad=True),
    ),
    "frozen_first": Case(
        "the first two layers frozen",
        4,
        sharded(frozen=(0, 1)),
        twin(layers=linears(frozen={0: True, 1: True})),
    ),
    "frozen_middle": Case(
        "a layer in the middle frozen",
        4,
        sharded(frozen=(1,)),
        twin(layers=linears(frozen={1: True})),
    ),
    "frozen_last": Case(
        "the head frozen", 4, sharded(frozen=(3,)), twin(layers=linears(frozen={3: True}))
    ),
    "grouped": Case(
        "the last two layers as one unit, fully_shard([norm, output])",
        4,
        sharded(group=(2, 3)),
        twin(layers=[*linears(WIDTHS[:2]), {"params": [[48, 64], [48], [32, 48], [32]], **PRICE}]),
    ),
    "clip": Case(
        "clip_grad_norm_", 4, sharded(clip=True), twin(clip_grad_norm=True), ("all_reduce",)
    ),
    "clip_hybrid": Case(
        "HSDP with clip_grad_norm_",
        4,
        sharded(clip=True, replicate=2),
        twin(mesh=HSDP, shard="dp", replicate="dp_replicate", clip_grad_norm=True),
        ("all_reduce",),
    ),
    "accumulate": Case(
        "two micro-batches, each reduced", 4, sharded(accumulate=2), twin(accumulate=2)
    ),
    "accumulate_late": Case(
        "set_requires_gradient_sync(False) before the last micro-batch",
        4,
        sharded(accumulate=2, setting=lambda net, k, last: net.set_requires_gradient_sync(last)),
        twin(accumulate=2, no_sync=True),
    ),
    "kept_after_backward": Case(
        "set_reshard_after_backward(False) before the last micro-batch",
        4,
        sharded(accumulate=3, setting=lambda net, k, last: net.set_reshard_after_backward(last)),
        twin(accumulate=3, reshard_after_backward=False),
    ),
    "late_and_kept": Case(
        "no gradient sync and no resharding before the last micro-batch, as ZeRO 2 accumulates",
        4,
        sharded(
            accumulate=2,
            setting=lambda net, k, last: (
                net.set_requires_gradient_sync(last),
                net.set_reshard_after_backward(last),
            ),
        ),
        twin(accumulate=2, no_sync=True, reshard_after_backward=False),
    ),
    "all_reduce_late": Case(
        "HSDP, set_requires_all_reduce(False) before the last micro-batch",
        4,
        sharded(
            accumulate=2,
            replicate=2,
            setting=lambda net, k, last: net.set_requires_all_reduce(last),
        ),
        twin(mesh=HSDP, shard="dp", replicate="dp_replicate", accumulate=2, all_reduce_late=True),
    ),
    "hybrid_mixed": Case(
        "HSDP with MixedPrecisionPolicy(bfloat16, float32)",
        4,
        sharded(replicate=2, mixed=True),
        twin(
            mesh=HSDP,
            shard="dp",
            replicate="dp_replicate",
            param_dtype="bfloat16",
            reduce_dtype="float32",
        ),
    ),
    "evaluate": Case(
        "only forward passes, under no_grad", 4, sharded(evaluate=True), twin(evaluate=True)
    ),
}
