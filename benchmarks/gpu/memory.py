"""Peak memory of one rank of a layout, read on one GPU: its messages go to a process group that
sends nothing.

    OUT=results python benchmarks/gpu/memory.py [--device cpu --tiny] [--only WORDS] [--seconds 280]

Writes $OUT/memory.json. Each layout runs in a process of its own: three iterations, the allocator's
peak in each phase, and in the last what was held at the peak, by the line that made it. Not in it:
what NCCL holds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from modules import MODELS, TINY, Model, Options, checkpointed, cut, loss_of, sharded
from torch import Tensor, nn
from torch.distributed import fsdp as _fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel as _parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

_ = _fsdp, _parallel  # imported once, before processes fork


class Run(NamedTuple):
    """``wrap``: fsdp, ddp, or zero1 (ddp with ZeroRedundancyOptimizer). ``ac``: what is
    checkpointed: none, op, full. ``reshard``: whether parameters are let go after the forward pass.
    ``stage``: first, middle or last of a pipeline, which holds ``held`` micro-batches of
    ``micro_batches``. ``layers``: of the stage. ``gib``: about what it takes, to find what can run
    beside."""

    model: str
    wrap: str = "fsdp"
    dp: int = 8
    tp: int = 1
    ep: int = 1
    batch: int = 1
    sequence: int = 8192
    ac: str = "none"
    reshard: bool = True
    optimizer: str = "fused"
    repeat: bool = False
    stage: str = ""
    held: int = 1
    micro_batches: int = 1
    layers: int = 0
    dropout: float = 0.0
    compile: bool = False

    @property
    def name(self) -> str:
        """What differs from the defaults."""
        more = [
            f"{key} {value}"
            for key, value in self._asdict().items()
            if value != Run._field_defaults.get(key) and key != "model"
        ]
        return ", ".join([self.model, *more])


RUNS = (
    Run("llama3-8b", ac="full"),
    Run("llama3-8b", dp=64),
    Run("llama3-8b", tp=2),
    Run("llama3-8b", tp=4),
    Run("llama3-8b", tp=8),
    Run("llama3-70b", dp=8, tp=8, ac="full"),
    Run("llama3-70b", dp=32, tp=8),
    Run("llama3-8b", sequence=2048),
    Run("llama3-8b", sequence=4096, dp=64, reshard=False),
    Run("gpt-1.3b", wrap="ddp", sequence=2048, batch=4),
    Run("gpt-1.3b", wrap="zero1", sequence=2048, batch=4),
    Run(
        "llama3-70b",
        dp=8,
        tp=8,
        stage="first",
        layers=20,
        held=4,
        micro_batches=8,
        sequence=4096,
        reshard=False,
    ),
    Run(
        "llama3-70b",
        dp=8,
        tp=8,
        stage="middle",
        layers=20,
        held=3,
        micro_batches=8,
        sequence=4096,
        reshard=False,
    ),
    Run(
        "llama3-70b",
        dp=8,
        tp=8,
        stage="last",
        layers=20,
        held=1,
        micro_batches=8,
        sequence=4096,
        reshard=False,
    ),
    Run("mixtral-8x7b", dp=32, ep=8, sequence=4096, ac="full"),
    Run("mixtral-8x7b", dp=64, ep=8, sequence=2048),
    Run("qwen3-30b-a3b", dp=32, ep=8, sequence=4096, ac="full"),
    Run("qwen3-30b-a3b", dp=32, ep=8, sequence=2048),
    Run("qwen3-8b", sequence=4096),
    Run("qwen3-32b", dp=16, tp=8, ac="full", batch=2),
    Run("llama3-8b", ac="op"),
    Run("llama3-8b", dp=64, ac="full", batch=2),
    Run("llama3-8b", tp=8, ac="full", batch=4),
    Run("llama3-70b", dp=32, tp=8, ac="full", batch=4),
    Run("llama3-8b", sequence=4096, repeat=True),
    Run("llama3-8b", sequence=2048, optimizer="foreach"),
    Run("gpt-1.3b", wrap="ddp", sequence=2048, batch=4, dropout=0.1),
    Run("vit-l-16", wrap="ddp", sequence=197, batch=128),
    Run("llama3-8b", sequence=4096),
    Run("llama3-8b", ac="full", compile=True),
)


class Meter:
    """The allocator's figures, by phase."""

    def __init__(self, device: str) -> None:
        self.device, self.rows = device, list[dict[str, Any]]()

    def phase(self, name: str, does: Callable[[], object]) -> object:
        if self.device == "cpu":
            return does()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        found = does()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        self.rows.append(
            {
                "phase": name,
                "ms": round((time.perf_counter() - began) * 1e3, 2),
                "held": torch.cuda.memory_allocated(),
                "peak": torch.cuda.max_memory_allocated(),
                "requested": stats.get("requested_bytes.all.peak", 0),
                "reserved": torch.cuda.max_memory_reserved(),
                "device": total - free,
            }
        )
        return found


def _unsent(bucket: Any) -> torch.futures.Future[Tensor]:
    """What DDP's own all_reduce would hand back; the group that sends nothing hands back no
    tensor.
    """
    found: torch.futures.Future[Tensor] = torch.futures.Future()
    found.set_result(bucket.buffer())
    return found


class Rank:
    """One rank of a layout and what it does in an iteration."""

    def __init__(self, run: Run, device: str, tiny: bool) -> None:
        sizes = MODELS[run.model]._replace(dropout=run.dropout)
        self.sizes = sizes = sizes._replace(**{"layers": run.layers} if run.layers else {})
        if tiny:
            small = {**TINY, "kv_heads": 8 if run.tp > 1 else 4}
            self.sizes = sizes = sizes._replace(**small)
            run = run._replace(sequence=min(run.sequence, 197 if sizes.patch else 64))
        self.run, self.device = run, device
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=run.dp * run.tp)
        self.meter = Meter(device)
        self.meter.phase("init", self.build)

    def build(self) -> None:
        run, device = self.run, self.device
        options = Options(run.repeat, run.ep, run.tp)
        with torch.device("meta"):
            model = Model(
                self.sizes, options, run.stage in ("", "first"), run.stage in ("", "last")
            )
        if run.wrap == "fsdp":
            self.laid_out(model)
            model.to_empty(device=device)
            self.model: nn.Module = model.filled(device, run.sequence)
        else:
            model.to_empty(device=device)
            ddp = nn.parallel.DistributedDataParallel(model.filled(device, run.sequence))
            ddp.register_comm_hook(None, lambda state, bucket: _unsent(bucket))
            self.model = ddp
        self.optimizer = self.optimizer_of()

    def laid_out(self, model: Model) -> None:
        run, experts = self.run, None
        mesh = init_device_mesh(self.device, (run.dp, run.tp), mesh_dim_names=("dp", "tp"))
        if run.ep > 1:
            apart = init_device_mesh(
                self.device, (run.dp // run.ep, run.ep), mesh_dim_names=("edp", "ep")
            )
            experts = apart["edp"]
            for block in model.layers:
                block.feed_forward.group = apart["ep"].get_group()
        if run.tp > 1:
            cut(model, mesh["tp"])
        if run.ac != "none":
            checkpointed(model, run.ac)
        if run.compile:
            for block in model.layers:
                block.compile(fullgraph=True)
        sharded(model, mesh["dp"], experts, run.reshard)

    def optimizer_of(self) -> Any:
        how: dict[str, Any] = {
            "lr": 1e-4,
            "fused": self.run.optimizer == "fused",
            "foreach": self.run.optimizer == "foreach",
        }
        if self.run.wrap == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, **how)
        return torch.optim.AdamW(self.model.parameters(), **how)

    # --- an iteration ---
    def tokens(self) -> tuple[Tensor, Tensor]:
        run, sizes = self.run, self.sizes
        shape = (run.batch, run.sequence)
        if sizes.patch:
            labels = torch.randint(sizes.vocabulary, (run.batch,), device=self.device)
            return torch.randn(*shape, sizes.patch, device=self.device), labels
        both = torch.randint(sizes.vocabulary, (2, *shape), device=self.device)
        return both[0], both[1]

    def iteration(self, word: str) -> None:
        inputs, labels = self.tokens()
        if self.run.stage:
            self.pipelined(word, inputs, labels)
        else:
            self.plain(word, inputs, labels)
        self.meter.phase(f"{word} step", self.step)
        self.optimizer.zero_grad(set_to_none=True)

    def plain(self, word: str, inputs: Tensor, labels: Tensor) -> None:
        loss: list[Tensor] = []
        with self.kernels(), self.loss_parallel():
            self.meter.phase(f"{word} forward", lambda: loss.append(self.forward(inputs, labels)))
            self.meter.phase(f"{word} backward", lambda: loss.pop().backward())

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        half = (
            torch.autocast(self.device, torch.bfloat16)
            if self.run.wrap != "fsdp"
            else nullcontext()
        )
        with half:
            logits = self.model(inputs)
        return loss_of(logits, labels)

    def kernels(self) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return (
            nullcontext()
            if self.device == "cpu"
            else sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
        )

    def loss_parallel(self) -> Any:
        return _parallel.loss_parallel() if self.run.tp > 1 else nullcontext()

    def pipelined(self, word: str, inputs: Tensor, labels: Tensor) -> None:
        """1F1B, as torch.distributed.pipelining has it: gradients gathered whole in float32 until
        the last backward pass.
        """
        run, under_way = self.run, list[tuple[Tensor, Tensor]]()
        model: Any = self.model
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
        shape = (run.batch, run.sequence // run.tp, self.sizes.hidden)

        def forward() -> None:
            given = (
                inputs
                if run.stage == "first"
                else torch.randn(shape, device=self.device, dtype=torch.bfloat16).requires_grad_()
            )
            out = self.model(given)
            under_way.append((given, loss_of(out, labels) if run.stage == "last" else out))

        def backward() -> None:
            _, out = under_way.pop(0)
            out.backward() if run.stage == "last" else out.backward(torch.randn_like(out))

        def last() -> None:
            model.set_is_last_backward(True)
            model.set_reshard_after_backward(True)
            model.set_requires_gradient_sync(True)
            backward()

        with self.kernels(), self.loss_parallel():
            self.meter.phase(f"{word} fill", lambda: [forward() for _ in range(run.held - 1)])
            self.meter.phase(
                f"{word} steady",
                lambda: [(forward(), backward()) for _ in range(run.micro_batches - run.held)],
            )
            self.meter.phase(
                f"{word} drain",
                lambda: (forward(), [backward() for _ in range(run.held - 1)], last()),
            )

    def step(self) -> None:
        if self.run.wrap == "fsdp" and self.run.ep == 1:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


# --- what was held at the peak ---
def held_at_peak(before: int) -> dict[str, Any]:
    """Allocations alive at the recorded peak, by the lines that made them; ``before``: bytes that
    were there already.
    """
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    alive: dict[int, tuple[int, str]] = {}
    held, most, groups = before, 0, Counter[tuple[str, int]]()
    points = _peak_of(events, before)
    for event in events[: points[0] + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"], _line(event.get("frames", []))
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    held, most = sum(size for size, _ in alive.values()), points[1]
    groups.update((line, size) for size, line in alive.values())
    top = sorted(groups.items(), key=lambda item: -item[0][1] * item[1])[:40]
    rows = [{"line": line, "size": size, "count": count} for (line, size), count in top]
    return {"peak": most, "before": before, "made": held, "groups": rows}


def _peak_of(events: list[dict[str, Any]], before: int) -> tuple[int, int]:
    held = most = before
    where, sizes = 0, dict[int, int]()
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            held += event["size"]
        elif event["action"] == "free_completed":
            held -= sizes.pop(event["addr"], event["size"])
        if held > most:
            where, most = index, held
    return where, most


def _line(frames: list[dict[str, Any]]) -> str:
    """The innermost frame, and the innermost of ours."""
    plain = [f for f in frames if f["filename"].endswith(".py")]
    if not plain:
        return "autograd"
    ours = next((f for f in plain if f["filename"].endswith(("modules.py", "memory.py"))), None)
    here = f"{Path(plain[0]['filename']).name}:{plain[0]['name']}"
    return (
        here
        if ours is None
        else f"{here} < {Path(ours['filename']).name}:{ours['line']}:{ours['name']}"
    )


# --- processes ---
def child(run: Run, device: str, tiny: bool, pipe: Any) -> None:
    found: dict[str, Any] = {"name": run.name, **run._asdict()}
    rank = None
    try:
        began = time.perf_counter()
        torch.manual_seed(0)
        rank = Rank(run, device, tiny)
        for index in range(3):
            record = index == 2 and device != "cpu"
            before = torch.cuda.memory_allocated() if record else 0
            if record:
                torch.cuda.memory._record_memory_history(
                    context="alloc", stacks="python", max_entries=400_000
                )
            rank.iteration(str(index))
            if record:
                found["at_peak"] = held_at_peak(before)
                torch.cuda.memory._record_memory_history(enabled=None)
        found["seconds"] = round(time.perf_counter() - began, 2)
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {str(error)[:600]}"
        found["trace"] = traceback.format_exc()[-1500:]
    found["phases"] = [] if rank is None else rank.meter.rows
    pipe.send(found)
    pipe.close()
    os._exit(0)


def measured(run: Run, device: str, tiny: bool, limit_s: float) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(run, device, tiny, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = (
            mine.recv()
            if mine.poll(limit_s)
            else {"name": run.name, **run._asdict(), "error": "too long"}
        )
    except EOFError:
        found = {"name": run.name, **run._asdict(), "error": "ended without an answer"}
    process.join(2)
    if process.is_alive():
        process.kill()
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal")
    parser.add_argument("--only", default="", help="layouts whose name has these words")
    parser.add_argument(
        "--seconds", type=float, default=280.0, help="no layout begins after so long"
    )
    args = parser.parse_args()
    out = Path(os.environ.get("OUT", "."))
    out.mkdir(parents=True, exist_ok=True)
    began, rows = time.perf_counter(), list[dict[str, Any]]()
    print(f"{'layout':100} {'peak':>7} {'reserv':>7} {'device':>7} GiB, s", flush=True)
    for run in RUNS:
        left = args.seconds - (time.perf_counter() - began)
        if args.only not in run.name or left <= 0:
            continue
        rows.append(measured(run, args.device, args.tiny, min(75.0, left + 20)))
        (out / "memory.json").write_text(
            json.dumps({"torch": torch.__version__, "runs": rows}, indent=1)
        )
        phases = rows[-1].get("phases") or [{"peak": 0, "reserved": 0, "device": 0}]
        figures = [max(p[key] for p in phases) / 2**30 for key in ("peak", "reserved", "device")]
        ends = f"{rows[-1].get('seconds', '')} {rows[-1].get('error', '')}"
        print(f"{run.name:100} {' '.join(f'{f:7.2f}' for f in figures)} {ends}"[:260], flush=True)


if __name__ == "__main__":
    main()
