"""Times of whole blocks, of the same work for seconds, of the host that launches it, and which
kernels run.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from modules import MODELS, TINY, Model, Options, checkpointed, cut, loss_of, sharded
from timing import ASKED, BF16, Bench, Row, both, product, watched


# --- blocks ---
def blocks(bench: Bench) -> Iterator[Row]:
    """Whole blocks on one rank; of a tensor axis its share of heads and of the feed-forward part,
    with all tokens, without messages.
    """
    for model, batch, length, shares in (
        ("llama3-8b", 1, 8192, (1, 2, 4, 8)),
        ("llama3-8b", 1, 4096, (1, 8)),
        ("llama3-8b", 2, 4096, (1,)),
        ("llama3-8b", 1, 2048, (1,)),
        ("llama3-70b", 1, 8192, (1, 4, 8)),
        ("llama3-70b", 1, 4096, (8,)),
        ("gpt-1.3b", 4, 2048, (1, 2)),
        ("qwen3-8b", 1, 4096, (1,)),
        ("mixtral-8x7b", 1, 4096, (1,)),
        ("qwen3-30b-a3b", 1, 4096, (1,)),
        ("vit-l-16", 128, 197, (1,)),
    ):
        for share in shares:
            sizes = MODELS[model]
            if bench.tiny:
                sizes, length = sizes._replace(**TINY), min(length, 32)
            part = sizes._replace(
                heads=sizes.heads // share,
                kv_heads=max(sizes.kv_heads // share, 1),
                ffn=sizes.ffn // share,
                head=sizes.head_width,
            )
            row: Row = {"model": model, "batch": batch, "length": length, "share": share}
            try:
                block = prepared(bench, part, length)
                x = bench.random(batch, length, sizes.hidden).requires_grad_()
                for name, module in (
                    ("block", block),
                    ("attention", block.attention),
                    ("mlp", block.feed_forward),
                ):
                    yield from both(bench, {**row, "what": name}, module, x, 3)
            except Exception as error:
                yield {**row, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            block = None
            gc.collect()


def prepared(bench: Bench, sizes: Any, length: int) -> Any:
    """One layer in bfloat16."""
    with torch.device(bench.device):
        model = Model(
            sizes._replace(layers=1, positions=bool(sizes.positions) * length, vocabulary=64),
            Options(),
        )
    return model.to(bench.device, BF16).filled(bench.device, length).layers[0]


def sustained(bench: Bench) -> Iterator[Row]:
    """The same work for seconds: what is left of a moment's rate at the clocks of a GPU that is
    busy throughout.
    """
    size, seconds = (64, 0.05) if bench.tiny else (8192, 4.0)
    call = product(bench, "fwd", size, size, size, BF16)[0]
    block = prepared(
        bench,
        MODELS["llama3-8b"]._replace(**(TINY if bench.tiny else {})),
        64 if bench.tiny else 8192,
    )
    x = bench.random(1, 64 if bench.tiny else 8192, block.attention.sizes.hidden).requires_grad_()
    memory = [torch.randn(64 if bench.tiny else 1 << 28, device=bench.device) for _ in range(2)]

    def trained() -> None:
        block(x).backward(x.detach())

    for name, one, each in (
        ("product", call, 20),
        ("block", trained, 4),
        ("copy", lambda: memory[0].copy_(memory[1]), 20),
    ):
        bench.sync()
        began, times, seen = time.perf_counter(), list[float](), list[str]()
        with watched(seen):
            while (now := time.perf_counter()) - began < seconds:
                for _ in range(each):
                    one()
                bench.sync()
                times.append(round((time.perf_counter() - now) * 1e6 / each, 1))
        yield {
            "what": name,
            "first_us": times[0],
            "us": statistics.median(times[len(times) // 2 :]),
            "times": times[::10],
            "asked": ASKED,
            "clocks": seen,
        }


# --- the host ---
def launches(bench: Bench) -> Iterator[Row]:
    """Host and device time of kernels that do nothing; of whole passes of layers so small that the
    host's time is all there is.
    """
    x, count = torch.zeros(1, device=bench.device), 2000
    for name, one in (
        ("add_", lambda: x.add_(1)),
        ("mm 16", partial(torch.mm, *(bench.random(16, 16) for _ in range(2)))),
    ):
        bench.sync()
        began = time.perf_counter()
        for _ in range(count):
            one()
        queued = time.perf_counter() - began
        bench.sync()
        yield {
            "what": name,
            "host_us": queued * 1e6 / count,
            "us": (time.perf_counter() - began) * 1e6 / count,
        }
        yield {"what": f"{name}, queued", **bench.times([one])}
    if bench.gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(1000):
                x.add_(1)
        yield {"what": "1000 of a graph", **bench.times([graph.replay])}
    yield from layers_of_host(bench)


def layers_of_host(bench: Bench) -> Iterator[Row]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    mesh = init_device_mesh(bench.device, (8, 8), mesh_dim_names=("dp", "tp"))
    layers = 2 if bench.tiny else 16
    for name, tp, shard, ac in (
        ("plain", False, False, "none"),
        ("full", False, False, "full"),
        ("fsdp", False, True, "none"),
        ("fsdp full", False, True, "full"),
        ("tp", True, False, "none"),
        ("tp fsdp", True, True, "none"),
        ("gpt", False, False, "none"),
    ):
        sizes = MODELS["gpt-1.3b" if name == "gpt" else "llama3-8b"]
        sizes = sizes._replace(
            hidden=256, heads=8, kv_heads=8, ffn=512, vocabulary=512, layers=layers, head=32
        )
        try:
            with torch.device("meta"):
                model = Model(sizes, Options())
            if tp:
                cut(model, mesh["tp"])
            if ac != "none":
                checkpointed(model, ac)
            if shard:
                sharded(model, mesh["dp"], None, True)
            model.to_empty(device=bench.device)
            model.filled(bench.device, 64)
            model = model if shard else model.to(BF16)
            yield {
                "what": f"layers {name}",
                "layers": layers,
                **host_time(bench, model, sizes.vocabulary, tp),
            }
        except Exception as error:
            yield {"what": f"layers {name}", "error": f"{type(error).__name__}: {str(error)[:300]}"}


def host_time(bench: Bench, model: Any, words: int, tp: bool) -> Row:
    """Wall time of passes over 64 tokens, in us a pass."""
    from contextlib import nullcontext

    from torch.distributed.tensor.parallel import loss_parallel

    ids = torch.randint(words, (2, 1, 64), device=bench.device)
    ways: dict[str, list[float]] = {"forward": [], "backward": []}
    with loss_parallel() if tp else nullcontext():
        for _ in range(2 if bench.tiny else 8):
            bench.sync()
            began = time.perf_counter()
            loss = loss_of(model(ids[0]), ids[1])
            bench.sync()
            between = time.perf_counter()
            loss.backward()
            bench.sync()
            ways["forward"].append((between - began) * 1e6)
            ways["backward"].append((time.perf_counter() - between) * 1e6)
            model.zero_grad()
    return {f"{way}_us": round(statistics.median(times[1:]), 1) for way, times in ways.items()}


def kernels(bench: Bench) -> Iterator[Row]:
    """Which kernels a block runs, and for how long."""
    from torch.profiler import ProfilerActivity, profile

    for model, length in (("llama3-8b", 8192), ("gpt-1.3b", 2048)):
        sizes, batch = MODELS[model], 1 if model == "llama3-8b" else 4
        sizes, length = (sizes._replace(**TINY), 32) if bench.tiny else (sizes, length)
        block = prepared(bench, sizes, length)
        x = bench.random(batch, length, sizes.hidden).requires_grad_()
        for _ in range(2):
            block(x).backward(x.detach())
        bench.sync()
        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]
            if bench.gpu
            else [ProfilerActivity.CPU]
        ) as seen:
            block(x).backward(x.detach())
            bench.sync()
        rows = [
            {"kernel": e.key[:120], "count": e.count, "us": getattr(e, "self_device_time_total", 0)}
            for e in seen.key_averages()
            if getattr(e, "self_device_time_total", 0) > 0
            and str(getattr(e, "device_type", "")).endswith("CUDA")
        ]
        yield {"model": model, "kernels": sorted(rows, key=lambda r: -r["us"])[:60]}
