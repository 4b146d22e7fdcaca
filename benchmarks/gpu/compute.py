"""Times of what a training step computes, read on one GPU: products by shape, attention, kernels
bound by memory, blocks, launches.

    OUT=results python benchmarks/gpu/compute.py [--device cpu --tiny] [--only SECTION]

Writes $OUT/compute.json. Random inputs, several of them in turn; the device is kept waiting until
all calls are queued, so that what the host needs to launch is not in a kernel's time; the median of
several goes. Sections are apart: an error in one is recorded.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from modules import MODELS, Experts, loss_of, rotary
from timing import BF16, Bench, Call, Row, both, clocks, product
from torch import nn
from torch.nn import functional
from whole import blocks, kernels, launches, sustained

# --- products ---
LAYERS = {  # (columns of the input, columns of the output), whole
    "llama3-8b": {
        "wq": (4096, 4096),
        "wk": (4096, 1024),
        "wo": (4096, 4096),
        "w1": (4096, 14336),
        "w2": (14336, 4096),
    },
    "llama3-70b": {
        "wq": (8192, 8192),
        "wk": (8192, 1024),
        "wo": (8192, 8192),
        "w1": (8192, 28672),
        "w2": (28672, 8192),
    },
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


def products(bench: Bench) -> Iterator[Row]:
    for label, kind, m, n, k in shapes():
        m, n, k = bench.small(m, n, k)
        yield {
            "label": label,
            "kind": kind,
            "m": m,
            "n": n,
            "k": k,
            "dtype": "bfloat16",
            **bench.times(product(bench, kind, m, n, k, BF16), budget_ms=20),
        }


OTHERS = (
    (8192, 8192, 8192),
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (8192, 4096, 4096),
    (8192, 1024, 4096),
    (2048, 4096, 4096),
    (8192, 3584, 8192),
    (8192, 8192, 3584),
    (512, 4096, 4096),
    (4096, 2048, 2048),
    (16384, 28672, 8192),
)


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
        made.append(
            partial(
                torch._scaled_mm,
                a,
                b.t(),
                scale_a=one,
                scale_b=one,
                out_dtype=BF16,
                use_fast_accum=fast,
            )
        )
    return made


def grouped(bench: Bench) -> Iterator[Row]:
    """Experts' products: even, and drawn at random."""
    for hidden, ffn, experts, rows in (
        (4096, 14336, 8, 16384),
        (4096, 14336, 1, 16384),
        (2048, 768, 128, 65536),
        (2048, 768, 16, 65536),
        (2048, 768, 16, 16384),
        (7168, 2048, 32, 32768),
        (2880, 2880, 32, 32768),
    ):
        hidden, ffn, rows = (*bench.small(hidden, ffn), min(rows, 256) if bench.tiny else rows)
        for even in (True, False):
            counts = torch.full((experts,), rows // experts)
            if not even:
                counts = torch.multinomial(
                    torch.rand(experts) + 0.5, rows, replacement=True
                ).bincount(minlength=experts)
            ends = counts.cumsum(0).to(torch.int32).to(bench.device)
            sized = MODELS["llama3-8b"]._replace(hidden=hidden, ffn=ffn)
            with torch.device(bench.device):
                module = Experts(sized, experts).to(BF16)
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.02)
            x = bench.random(rows, hidden).requires_grad_()
            row: Row = {
                "hidden": hidden,
                "ffn": ffn,
                "experts": experts,
                "rows": rows,
                "even": even,
            }
            try:
                one = partial(
                    torch._grouped_mm, x.detach(), module.w1.detach().transpose(-2, -1), offs=ends
                )
                yield {**row, "what": "up", **bench.times([one])}
                yield from both(bench, {**row, "what": "all"}, partial(module, ends=ends), x)
            except Exception as error:
                yield {**row, "error": f"{type(error).__name__}: {str(error)[:200]}"}


# --- attention ---
def attention(bench: Bench) -> Iterator[Row]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = (
        (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, None) if bench.gpu else (None,)
    )
    for batch, heads, kv, length, wide, causal in (
        (1, 32, 8, 8192, 128, True),
        (1, 32, 8, 4096, 128, True),
        (4, 32, 8, 2048, 128, True),
        (1, 16, 4, 8192, 128, True),
        (1, 8, 2, 8192, 128, True),
        (1, 4, 1, 8192, 128, True),
        (1, 8, 1, 8192, 128, True),
        (1, 64, 8, 8192, 128, True),
        (4, 16, 16, 2048, 128, True),
        (1, 32, 32, 4096, 128, True),
        (8, 16, 16, 1024, 64, True),
        (1, 32, 8, 32768, 128, True),
        (1, 32, 8, 8192, 128, False),
        (32, 16, 16, 197, 64, False),
        (16, 12, 12, 1024, 64, True),
    ):
        length = min(length, 64) if bench.tiny else length
        for backend in backends:
            q, k, v = (
                bench.random(batch, n, length, wide).requires_grad_() for n in (heads, kv, kv)
            )
            row: Row = {
                "batch": batch,
                "heads": heads,
                "kv": kv,
                "length": length,
                "wide": wide,
                "causal": causal,
                "backend": "default" if backend is None else backend.name,
            }
            try:
                with sdpa_kernel([backend]) if backend is not None else sdpa_kernel(list(_ALL)):
                    one = partial(
                        functional.scaled_dot_product_attention,
                        q,
                        k,
                        v,
                        is_causal=causal,
                        enable_gqa=heads != kv,
                    )
                    yield {**row, "way": "forward", **bench.times([one])}
                    out = one()
                    back = partial(
                        torch.autograd.grad,
                        out,
                        (q, k, v),
                        torch.randn_like(out),
                        retain_graph=True,
                    )
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
    tokens, hidden, ffn, vocabulary = (
        (64, 64, 128, 256) if bench.tiny else (8192, 4096, 14336, 128256)
    )
    n = tokens * hidden
    x, y = (
        bench.random(tokens, hidden).requires_grad_(),
        bench.random(tokens, hidden).requires_grad_(),
    )
    for name, norm in (("rmsnorm", nn.RMSNorm(hidden)), ("layernorm", nn.LayerNorm(hidden))):
        yield from both(
            bench, {"what": name, "elements": n, "bytes": 4 * n}, norm.to(bench.device, BF16), x
        )
    yield {
        "what": "add",
        "elements": n,
        "bytes": 6 * n,
        **bench.times([lambda: x.detach() + y.detach()]),
    }
    gate, up = (bench.random(tokens, ffn).requires_grad_() for _ in range(2))
    wide = tokens * ffn
    yield from both(
        bench,
        {"what": "swiglu", "elements": wide, "bytes": 10 * wide},
        lambda g, u=up: functional.silu(g) * u,
        gate,
    )
    yield from both(
        bench,
        {"what": "gelu", "elements": wide, "bytes": 4 * wide},
        partial(functional.gelu, approximate="tanh"),
        gate,
    )
    q = bench.random(1, tokens, hidden // 64, 64).requires_grad_()
    freqs = torch.polar(
        torch.ones(tokens, 32, device=bench.device), torch.rand(tokens, 32, device=bench.device)
    )
    yield from both(
        bench, {"what": "rotary", "elements": n, "bytes": 4 * n}, partial(rotary, freqs=freqs), q
    )
    del gate, up, q
    for words in (vocabulary, vocabulary // 8):
        logits = bench.random(tokens, words).requires_grad_()
        labels = torch.randint(words, (tokens,), device=bench.device)
        yield from both(
            bench,
            {"what": "loss", "elements": tokens * words},
            lambda t, r=labels: loss_of(t, r),
            logits,
        )
        del logits
    table = bench.random(vocabulary, hidden).requires_grad_()
    ids = torch.randint(vocabulary, (tokens,), device=bench.device)
    yield {
        "what": "embedding",
        "way": "forward",
        "elements": n,
        **bench.times([partial(functional.embedding, ids, table)]),
    }
    out, grad = functional.embedding(ids, table), bench.random(tokens, hidden)
    yield {
        "what": "embedding",
        "way": "backward",
        "elements": table.numel(),
        **bench.times([partial(torch.autograd.grad, out, table, grad, retain_graph=True)]),
    }
    del table, out
    order = torch.randperm(tokens, device=bench.device)
    yield {
        "what": "permute",
        "elements": n,
        "bytes": 4 * n,
        **bench.times([lambda: x.detach()[order]]),
    }
    yield from copies(bench)
    yield from optimizers(bench)


def copies(bench: Bench) -> Iterator[Row]:
    for n in (1024,) if bench.tiny else (1 << 30, 1 << 28, 1 << 26, 1 << 24, 1 << 20):
        a, b = (torch.randn(n // 4, device=bench.device) for _ in range(2))
        yield {"what": "copy", "bytes": 2 * n, **bench.times([partial(b.copy_, a)])}
    n = 4096 if bench.tiny else 1 << 28
    a, c = torch.randn(n, device=bench.device), torch.empty(n, device=bench.device, dtype=BF16)
    yield {"what": "cast", "bytes": 6 * n, **bench.times([partial(c.copy_, a)])}
    yield {"what": "fill", "bytes": 4 * n, **bench.times([a.zero_])}


def optimizers(bench: Bench) -> Iterator[Row]:
    for kind in ("fused", "foreach"):
        each, count = (64, 4) if bench.tiny else (4096 * 4096, 32)
        weights = [nn.Parameter(torch.randn(each, device=bench.device)) for _ in range(count)]
        for w in weights:
            w.grad = torch.randn_like(w)
        optimizer = torch.optim.AdamW(
            weights, lr=1e-4, fused=kind == "fused", foreach=kind == "foreach"
        )
        optimizer.step()
        yield {
            "what": "adamw " + kind,
            "elements": each * count,
            "bytes": 28 * each * count,
            **bench.times([optimizer.step], 3),
        }
        yield {
            "what": "norm",
            "elements": each * count,
            **bench.times([partial(nn.utils.clip_grad_norm_, weights, 1.0)], 3),
        }
        del optimizer, weights


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "launches": launches,
    "products": products,
    "blocks": blocks,
    "attention": attention,
    "moved": moved,
    "kernels": kernels,
    "other_dtypes": other_dtypes,
    "grouped": grouped,
    "sustained": sustained,
}


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
    parser.add_argument(
        "--seconds", type=float, default=170.0, help="no row is measured after so long"
    )
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
            rows.append(
                {
                    "error": f"{type(error).__name__}: {str(error)[:400]}",
                    "trace": traceback.format_exc()[-1200:],
                }
            )
        found[name] = rows  # type: ignore[assignment]
        (out / "compute.json").write_text(json.dumps(found))
        wrong = [row["error"] for row in rows if "error" in row]
        print(
            f"{name:14} {len(rows):4} rows {time.perf_counter() - start:6.1f} s  {len(wrong)} errors {wrong[:2]}"[
                :300
            ],
            flush=True,
        )
        gc.collect()
        if bench.gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
