"""Times of what a training step computes, read on one GPU: products by shape, attention, kernels bound by memory, blocks, launches.

    OUT=results python benchmarks/gpu/compute.py [--device cpu --tiny] [--only SECTION]

Writes $OUT/compute.json. Random inputs, several of them in turn; the device is kept waiting until all calls are queued, so that what the
host needs to launch is not in a kernel's time; the median of several goes. Sections are apart: an error in one is recorded.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from modules import MODELS, TINY, Experts, Model, Options, checkpointed, cut, loss_of, rotary, sharded
from torch import Tensor, nn
from torch.nn import functional

Call = Callable[[], object]
Row = dict[str, Any]
_BF16 = torch.bfloat16


class Bench:
    """``tiny``: sizes for a rehearsal."""

    def __init__(self, device: str, tiny: bool) -> None:
        self.device, self.tiny, self.gpu = device, tiny, device != "cpu"

    def sync(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def random(self, *shape: int, dtype: torch.dtype = _BF16, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(dtype)

    def times(self, calls: Sequence[Call], goes: int = 5, budget_ms: float = 25.0) -> Row:
        """Device time of one call in us: median, least and most of ``goes`` batches, each of so many calls as ``budget_ms`` holds."""
        if not self.gpu:
            calls[0]()
            return {"us": 0.0, "least": 0.0, "most": 0.0}
        for call in calls:
            call()
        self.sync()
        first = self._batch(calls, len(calls), 3.0)
        count = max(len(calls), min(60, int(budget_ms * 1e3 / goes / max(first, 1.0))))
        each = sorted(self._batch(calls, count, max(4.0, 0.12 * count)) for _ in range(goes))
        return {"us": round(each[goes // 2], 2), "least": round(each[0], 2), "most": round(each[-1], 2)}

    def _batch(self, calls: Sequence[Call], count: int, wait_ms: float) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(wait_ms * 1.9e6))
        start.record()
        for index in range(count):
            calls[index % len(calls)]()
        end.record()
        self.sync()
        return float(start.elapsed_time(end)) * 1e3 / count

    def small(self, *sizes: int) -> tuple[int, ...]:
        return tuple(min(n, 64) for n in sizes) if self.tiny else sizes


# --- products ---
LAYERS = {  # (columns of the input, columns of the output), whole
    "llama3-8b": {"wq": (4096, 4096), "wk": (4096, 1024), "wo": (4096, 4096), "w1": (4096, 14336), "w2": (14336, 4096)},
    "llama3-70b": {"wq": (8192, 8192), "wk": (8192, 1024), "wo": (8192, 8192), "w1": (8192, 28672), "w2": (28672, 8192)},
    "gpt-1.3b": {"qkv": (2048, 6144), "wo": (2048, 2048), "w1": (2048, 8192), "w2": (8192, 2048)},
}
ROWS = ("wo", "w2")  # cut by rows: the inner dimension is divided


def shapes() -> Iterator[tuple[str, str, int, int, int]]:
    """Label, kind (fwd, dgrad, wgrad), M, N, K; each once."""
    seen = set()
    for model, layers in LAYERS.items():
        for name, (k, n) in layers.items():
            for tp in (1, 2, 4, 8):
                for tokens in (512, 1024, 2048, 4096, 8192, 16384):
                    if (tokens != 8192 and tp in (2, 4)) or (model == "gpt-1.3b" and tp > 2):
                        continue
                    inner, outer = (k // tp, n) if name in ROWS else (k, n // tp)
                    for kind, shape in kinds(tokens, inner, outer).items():
                        if kind != "fwd" and tokens not in (2048, 8192):
                            continue
                        if (kind, *shape) not in seen:
                            seen.add((kind, *shape))
                            yield f"{model} {name} tp {tp} tokens {tokens}", kind, *shape
    for vocabulary, hidden in ((128256, 4096), (128256 // 8, 8192), (50257, 2048), (50304, 2048)):
        for kind, shape in kinds(4096, hidden, vocabulary).items():
            yield f"head {vocabulary}", kind, *shape
    for size in (1024, 2048, 4096, 8192, 12288, 4224, 4000):
        yield "square", "fwd", size, size, size
    for n in range(1024, 5120, 256):
        yield "waves", "fwd", 4096, n, 4096


def kinds(tokens: int, k: int, n: int) -> dict[str, tuple[int, int, int]]:
    return {"fwd": (tokens, n, k), "dgrad": (tokens, k, n), "wgrad": (n, k, tokens)}


def product(bench: Bench, kind: str, m: int, n: int, k: int, dtype: torch.dtype) -> list[Call]:
    """As autograd calls them: x w^T, dy w, dy^T x."""
    item = torch.empty((), dtype=dtype).element_size()
    sets = 1 if not bench.gpu else max(1, min(4, int(256e6 / (item * (m * k + n * k + m * n))) + 1))
    made: list[Call] = []
    for _ in range(sets):
        a = bench.random(k, m, dtype=dtype).t() if kind == "wgrad" else bench.random(m, k, dtype=dtype)
        b = bench.random(n, k, dtype=dtype).t() if kind == "fwd" else bench.random(k, n, dtype=dtype)
        made.append(partial(torch.mm, a, b, out=torch.empty(m, n, dtype=dtype, device=bench.device)))
    return made


def products(bench: Bench) -> Iterator[Row]:
    for label, kind, m, n, k in shapes():
        m, n, k = bench.small(m, n, k)
        yield {"label": label, "kind": kind, "m": m, "n": n, "k": k, "dtype": "bfloat16",
               **bench.times(product(bench, kind, m, n, k, _BF16), budget_ms=20)}  # fmt: skip


OTHERS = ((8192, 8192, 8192), (8192, 14336, 4096), (8192, 4096, 14336), (8192, 4096, 4096), (8192, 1024, 4096), (2048, 4096, 4096),
          (8192, 3584, 8192), (8192, 8192, 3584), (512, 4096, 4096), (4096, 2048, 2048), (16384, 28672, 8192))  # fmt: skip


def other_dtypes(bench: Bench) -> Iterator[Row]:
    for word in ("float16", "tf32", "float32", "float8_e4m3fn"):
        torch.backends.cuda.matmul.allow_tf32 = word == "tf32"
        for m, n, k in OTHERS:
            m, n, k = bench.small(m, n, k)
            if word == "float32" and m * n * k > 2e12:
                continue
            row: Row = {"kind": "fwd", "m": m, "n": n, "k": k, "dtype": word}
            try:
                if word.startswith("float8"):
                    for fast in (True, False):
                        yield {**row, "fast": fast, **bench.times(eight(bench, m, n, k, fast))}
                else:
                    dtype = torch.float16 if word == "float16" else torch.float32
                    yield {**row, **bench.times(product(bench, "fwd", m, n, k, dtype))}
            except Exception as error:
                yield {**row, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    torch.backends.cuda.matmul.allow_tf32 = False


def eight(bench: Bench, m: int, n: int, k: int, fast: bool) -> list[Call]:
    one = torch.ones((), device=bench.device)
    made: list[Call] = []
    for _ in range(2):
        a = bench.random(m, k).to(torch.float8_e4m3fn)
        b = bench.random(n, k).to(torch.float8_e4m3fn)
        made.append(partial(torch._scaled_mm, a, b.t(), scale_a=one, scale_b=one, out_dtype=_BF16, use_fast_accum=fast))
    return made


def grouped(bench: Bench) -> Iterator[Row]:
    """Experts' products: even, and drawn at random."""
    for hidden, ffn, experts, rows in ((4096, 14336, 8, 16384), (4096, 14336, 1, 16384), (2048, 768, 128, 65536), (2048, 768, 16, 65536),
                                       (2048, 768, 16, 16384), (7168, 2048, 32, 32768), (2880, 2880, 32, 32768)):  # fmt: skip
        hidden, ffn, rows = (*bench.small(hidden, ffn), min(rows, 256) if bench.tiny else rows)
        for even in (True, False):
            counts = torch.full((experts,), rows // experts)
            if not even:
                counts = torch.multinomial(torch.rand(experts) + 0.5, rows, replacement=True).bincount(minlength=experts)
            ends = counts.cumsum(0).to(torch.int32).to(bench.device)
            sized = MODELS["llama3-8b"]._replace(hidden=hidden, ffn=ffn)
            with torch.device(bench.device):
                module = Experts(sized, experts).to(_BF16)
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.02)
            x = bench.random(rows, hidden).requires_grad_()
            row: Row = {"hidden": hidden, "ffn": ffn, "experts": experts, "rows": rows, "even": even}
            try:
                one = partial(torch._grouped_mm, x.detach(), module.w1.detach().transpose(-2, -1), offs=ends)
                yield {**row, "what": "up", **bench.times([one])}
                yield from both(bench, {**row, "what": "all"}, partial(module, ends=ends), x)
            except Exception as error:
                yield {**row, "error": f"{type(error).__name__}: {str(error)[:200]}"}


def both(bench: Bench, row: Row, module: Callable[[Tensor], Tensor], x: Tensor, goes: int = 5) -> Iterator[Row]:
    """A module's forward pass (as autograd sees it) and its backward pass, weights and input."""
    yield {**row, "way": "forward", **bench.times([lambda: module(x)], goes)}
    out = module(x)
    grad = torch.randn_like(out)
    owned = getattr(module, "parameters", None) or getattr(getattr(module, "func", None), "parameters", None)
    leaves = [x, *(owned() if owned is not None else ())]
    leaves = [t for t in leaves if t.requires_grad]
    yield {**row, "way": "backward", **bench.times([lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)], goes)}


# --- attention ---
def attention(bench: Bench) -> Iterator[Row]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, None) if bench.gpu else (None,)
    for batch, heads, kv, length, wide, causal in (
        (1, 32, 8, 8192, 128, True), (1, 32, 8, 4096, 128, True), (4, 32, 8, 2048, 128, True), (1, 16, 4, 8192, 128, True),
        (1, 8, 2, 8192, 128, True), (1, 4, 1, 8192, 128, True), (1, 8, 1, 8192, 128, True), (1, 64, 8, 8192, 128, True),
        (4, 16, 16, 2048, 128, True), (1, 32, 32, 4096, 128, True), (8, 16, 16, 1024, 64, True), (1, 32, 8, 32768, 128, True),
        (1, 32, 8, 8192, 128, False), (32, 16, 16, 197, 64, False), (16, 12, 12, 1024, 64, True)):  # fmt: skip
        length = min(length, 64) if bench.tiny else length
        for backend in backends:
            q, k, v = (bench.random(batch, n, length, wide).requires_grad_() for n in (heads, kv, kv))
            row: Row = {"batch": batch, "heads": heads, "kv": kv, "length": length, "wide": wide, "causal": causal,
                        "backend": "default" if backend is None else backend.name}  # fmt: skip
            try:
                with sdpa_kernel([backend]) if backend is not None else sdpa_kernel(list(_ALL)):
                    one = partial(functional.scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=heads != kv)
                    yield {**row, "way": "forward", **bench.times([one])}
                    out = one()
                    back = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
                    yield {**row, "way": "backward", **bench.times([back])}
            except Exception as error:
                yield {**row, "error": f"{type(error).__name__}: {str(error)[:200]}"}


def _backends() -> Iterator[Any]:
    from torch.nn.attention import SDPBackend

    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        yield getattr(SDPBackend, name)


_ALL = tuple(_backends())


# --- kernels bound by memory; "bytes": each input read once, each output written once ---
def moved(bench: Bench) -> Iterator[Row]:
    tokens, hidden, ffn, vocabulary = (64, 64, 128, 256) if bench.tiny else (8192, 4096, 14336, 128256)
    n = tokens * hidden
    x, y = bench.random(tokens, hidden).requires_grad_(), bench.random(tokens, hidden).requires_grad_()
    for name, norm in (("rmsnorm", nn.RMSNorm(hidden)), ("layernorm", nn.LayerNorm(hidden))):
        yield from both(bench, {"what": name, "elements": n, "bytes": 4 * n}, norm.to(bench.device, _BF16), x)
    yield {"what": "add", "elements": n, "bytes": 6 * n, **bench.times([lambda: x.detach() + y.detach()])}
    gate, up = (bench.random(tokens, ffn).requires_grad_() for _ in range(2))
    wide = tokens * ffn
    yield from both(bench, {"what": "swiglu", "elements": wide, "bytes": 10 * wide}, lambda g, u=up: functional.silu(g) * u, gate)
    yield from both(
        bench, {"what": "gelu", "elements": wide, "bytes": 4 * wide}, partial(functional.gelu, approximate="tanh"), gate
    )
    q = bench.random(1, tokens, hidden // 64, 64).requires_grad_()
    freqs = torch.polar(torch.ones(tokens, 32, device=bench.device), torch.rand(tokens, 32, device=bench.device))
    yield from both(bench, {"what": "rotary", "elements": n, "bytes": 4 * n}, partial(rotary, freqs=freqs), q)
    del gate, up, q
    for words in (vocabulary, vocabulary // 8):
        logits = bench.random(tokens, words).requires_grad_()
        labels = torch.randint(words, (tokens,), device=bench.device)
        yield from both(bench, {"what": "loss", "elements": tokens * words}, lambda t, r=labels: loss_of(t, r), logits)
        del logits
    table = bench.random(vocabulary, hidden).requires_grad_()
    ids = torch.randint(vocabulary, (tokens,), device=bench.device)
    yield {"what": "embedding", "way": "forward", "elements": n, **bench.times([partial(functional.embedding, ids, table)])}
    out, grad = functional.embedding(ids, table), bench.random(tokens, hidden)
    yield {"what": "embedding", "way": "backward", "elements": table.numel(),
           **bench.times([partial(torch.autograd.grad, out, table, grad, retain_graph=True)])}  # fmt: skip
    del table, out
    order = torch.randperm(tokens, device=bench.device)
    yield {"what": "permute", "elements": n, "bytes": 4 * n, **bench.times([lambda: x.detach()[order]])}
    yield from copies(bench)
    yield from optimizers(bench)


def copies(bench: Bench) -> Iterator[Row]:
    for n in (1024,) if bench.tiny else (1 << 30, 1 << 28, 1 << 26, 1 << 24, 1 << 20):
        a, b = (torch.randn(n // 4, device=bench.device) for _ in range(2))
        yield {"what": "copy", "bytes": 2 * n, **bench.times([partial(b.copy_, a)])}
    n = 4096 if bench.tiny else 1 << 28
    a, c = torch.randn(n, device=bench.device), torch.empty(n, device=bench.device, dtype=_BF16)
    yield {"what": "cast", "bytes": 6 * n, **bench.times([partial(c.copy_, a)])}
    yield {"what": "fill", "bytes": 4 * n, **bench.times([a.zero_])}


def optimizers(bench: Bench) -> Iterator[Row]:
    for kind in ("fused", "foreach"):
        each, count = (64, 4) if bench.tiny else (4096 * 4096, 32)
        weights = [nn.Parameter(torch.randn(each, device=bench.device)) for _ in range(count)]
        for w in weights:
            w.grad = torch.randn_like(w)
        optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=kind == "fused", foreach=kind == "foreach")
        optimizer.step()
        yield {"what": "adamw " + kind, "elements": each * count, "bytes": 28 * each * count, **bench.times([optimizer.step], 3)}
        yield {"what": "norm", "elements": each * count, **bench.times([partial(nn.utils.clip_grad_norm_, weights, 1.0)], 3)}
        del optimizer, weights


# --- blocks ---
def blocks(bench: Bench) -> Iterator[Row]:
    """Whole blocks on one rank; of a tensor axis its share of heads and of the feed-forward part, with all tokens, without messages."""
    for model, batch, length, shares in (("llama3-8b", 1, 8192, (1, 2, 4, 8)), ("llama3-8b", 1, 4096, (1, 8)), ("llama3-8b", 2, 4096, (1,)),
                                         ("llama3-8b", 1, 2048, (1,)), ("llama3-70b", 1, 8192, (1, 4, 8)), ("llama3-70b", 1, 4096, (8,)),
                                         ("gpt-1.3b", 4, 2048, (1, 2)), ("qwen3-8b", 1, 4096, (1,)), ("mixtral-8x7b", 1, 4096, (1,)),
                                         ("qwen3-30b-a3b", 1, 4096, (1,)), ("vit-l-16", 128, 197, (1,))):  # fmt: skip
        for share in shares:
            sizes = MODELS[model]
            if bench.tiny:
                sizes, length = sizes._replace(**TINY), min(length, 32)
            part = sizes._replace(heads=sizes.heads // share, kv_heads=max(sizes.kv_heads // share, 1), ffn=sizes.ffn // share,
                                  head=sizes.head_width)  # fmt: skip
            row: Row = {"model": model, "batch": batch, "length": length, "share": share}
            try:
                block = prepared(bench, part, length)
                x = bench.random(batch, length, sizes.hidden).requires_grad_()
                for name, module in (("block", block), ("attention", block.attention), ("mlp", block.feed_forward)):
                    yield from both(bench, {**row, "what": name}, module, x, 3)
            except Exception as error:
                yield {**row, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            block = None
            gc.collect()


def prepared(bench: Bench, sizes: Any, length: int) -> Any:
    """One layer in bfloat16."""
    with torch.device(bench.device):
        model = Model(sizes._replace(layers=1, positions=bool(sizes.positions) * length, vocabulary=64), Options())
    return model.to(bench.device, _BF16).filled(bench.device, length).layers[0]


_ASKED = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_SMI = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits"]


def clocks() -> Row:
    try:
        found = subprocess.run(_SMI, capture_output=True, text=True, timeout=10, check=True).stdout
        return dict(zip(_ASKED, found.strip().split(", "), strict=False))
    except Exception as error:
        return {"error": str(error)[:100]}


@contextmanager
def watched(rows: list[str]) -> Iterator[None]:
    """Clocks, power and temperature, five times a second."""
    try:
        process = subprocess.Popen([*_SMI, "-lms", "200"], stdout=subprocess.PIPE, text=True)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        process.terminate()
        rows += (process.communicate(timeout=10)[0] or "").splitlines()


def sustained(bench: Bench) -> Iterator[Row]:
    """The same work for seconds: what is left of a moment's rate at the clocks of a GPU that is busy throughout."""
    size, seconds = (64, 0.05) if bench.tiny else (8192, 4.0)
    call = product(bench, "fwd", size, size, size, _BF16)[0]
    block = prepared(bench, MODELS["llama3-8b"]._replace(**(TINY if bench.tiny else {})), 64 if bench.tiny else 8192)
    x = bench.random(1, 64 if bench.tiny else 8192, block.attention.sizes.hidden).requires_grad_()
    memory = [torch.randn(64 if bench.tiny else 1 << 28, device=bench.device) for _ in range(2)]

    def trained() -> None:
        block(x).backward(x.detach())

    for name, one, each in (("product", call, 20), ("block", trained, 4), ("copy", lambda: memory[0].copy_(memory[1]), 20)):
        bench.sync()
        began, times, seen = time.perf_counter(), list[float](), list[str]()
        with watched(seen):
            while (now := time.perf_counter()) - began < seconds:
                for _ in range(each):
                    one()
                bench.sync()
                times.append(round((time.perf_counter() - now) * 1e6 / each, 1))
        yield {"what": name, "first_us": times[0], "us": statistics.median(times[len(times) // 2 :]), "times": times[::10],
               "asked": _ASKED, "clocks": seen}  # fmt: skip


# --- the host ---
def launches(bench: Bench) -> Iterator[Row]:
    """Host and device time of kernels that do nothing; of whole passes of layers so small that the host's time is all there is."""
    x, count = torch.zeros(1, device=bench.device), 2000
    for name, one in (("add_", lambda: x.add_(1)), ("mm 16", partial(torch.mm, *(bench.random(16, 16) for _ in range(2))))):
        bench.sync()
        began = time.perf_counter()
        for _ in range(count):
            one()
        queued = time.perf_counter() - began
        bench.sync()
        yield {"what": name, "host_us": queued * 1e6 / count, "us": (time.perf_counter() - began) * 1e6 / count}
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
    for name, tp, shard, ac in (("plain", False, False, "none"), ("full", False, False, "full"), ("fsdp", False, True, "none"),
                                ("fsdp full", False, True, "full"), ("tp", True, False, "none"), ("tp fsdp", True, True, "none"),
                                ("gpt", False, False, "none")):  # fmt: skip
        sizes = MODELS["gpt-1.3b" if name == "gpt" else "llama3-8b"]
        sizes = sizes._replace(hidden=256, heads=8, kv_heads=8, ffn=512, vocabulary=512, layers=layers, head=32)
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
            model = model if shard else model.to(_BF16)
            yield {"what": f"layers {name}", "layers": layers, **host_time(bench, model, sizes.vocabulary, tp)}
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
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] if bench.gpu else [ProfilerActivity.CPU]) as seen:
            block(x).backward(x.detach())
            bench.sync()
        rows = [{"kernel": e.key[:120], "count": e.count, "us": getattr(e, "self_device_time_total", 0)} for e in seen.key_averages()
                if getattr(e, "self_device_time_total", 0) > 0 and str(getattr(e, "device_type", "")).endswith("CUDA")]  # fmt: skip
        yield {"model": model, "kernels": sorted(rows, key=lambda r: -r["us"])[:60]}


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "launches": launches, "products": products, "blocks": blocks, "attention": attention, "moved": moved, "kernels": kernels,
    "other_dtypes": other_dtypes, "grouped": grouped, "sustained": sustained,
}  # fmt: skip


def machine(bench: Bench) -> Row:
    found: Row = {"torch": torch.__version__, "device": "cpu"}
    if bench.gpu:
        one = torch.cuda.get_device_properties(0)
        found |= {
            "device": one.name,
            "sms": one.multi_processor_count,
            "memory": one.total_memory,
            "cuda": torch.version.cuda,
            **clocks(),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=170.0, help="no row is measured after so long")
    args = parser.parse_args()
    torch.manual_seed(0)
    bench, out = Bench(args.device, args.tiny), Path(os.environ.get("OUT", "."))
    out.mkdir(parents=True, exist_ok=True)
    began, found = time.perf_counter(), {"machine": machine(bench)}
    for name, section in SECTIONS.items():
        if args.only and name != args.only:
            continue
        rows, start = list[Row](), time.perf_counter()
        try:
            for row in section(bench):
                rows.append(row)
                if time.perf_counter() - began > args.seconds:
                    break
        except Exception as error:
            rows.append({"error": f"{type(error).__name__}: {str(error)[:400]}", "trace": traceback.format_exc()[-1200:]})
        found[name] = rows  # type: ignore[assignment]
        (out / "compute.json").write_text(json.dumps(found))
        wrong = [row["error"] for row in rows if "error" in row]
        print(
            f"{name:14} {len(rows):4} rows {time.perf_counter() - start:6.1f} s  {len(wrong)} errors {wrong[:2]}"[:300],
            flush=True,
        )
        gc.collect()
        if bench.gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
