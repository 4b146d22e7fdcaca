"""Does `distsim plan` find layouts that practitioners chose? Ranks eight published best layouts
among all layouts of the same job.

    python benchmarks/published_layouts.py [NAME…] [--jobs N]

A layout passes if it is among the first three, or if its predicted time is within the predicted
range of the fastest layout. Precision is fixed to that of the publication, because it is a choice
about numerics; so are attention, and the framework where its limits matter. Nothing is fitted to
these layouts. The search of all eight takes long: each tries hundreds to thousands of layouts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distsim.hardware.cluster import cluster_from
from distsim.planning.evaluate_layouts import PlanOptions, plan_layouts
from distsim.planning.layout_result import LayoutEvaluator, LayoutResult
from distsim.planning.layouts import ParallelLayout, PlanRequest, RejectedLayout
from distsim.planning.plan_request import checked_plan_request, for_framework

_GPT = {"mlp": "gelu", "vocabulary": 51200}


class PublishedLayout(NamedTuple):
    """A published job and the layout that its authors chose. ``step_s``: the measured step time."""

    source: str
    model: str | Mapping[str, Any]
    cluster: str
    batch: int
    sequence: int
    layout: ParallelLayout
    step_s: float | None
    framework: str | None = None
    step: Mapping[str, Any] = {}


PUBLISHED: dict[str, PublishedLayout] = {
    "torchtitan-8b": PublishedLayout(
        "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1, compiled",
        "llama3.1-8b",
        "dgx-h100",
        16,
        8192,
        ParallelLayout(8, zero=3, recompute="op", micro_batch=2),
        2.4575,
        "torchtitan",
    ),
    "nemo-8b": PublishedLayout(
        "NVIDIA-NeMo/Megatron-Bridge, performance summary (archive), 25.11, DGX-H100",
        "llama3-8b",
        "dgx-h100",
        128,
        8192,
        ParallelLayout(8, zero=3, precision="fp8"),
        9.0701,
        "megatron",
    ),
    "nemo-70b": PublishedLayout(
        "NVIDIA-NeMo/Megatron-Bridge, performance summary (archive), 25.11, DGX-H100",
        "llama3-70b",
        "dgx-h100",
        128,
        8192,
        ParallelLayout(64, tp=4, pp=8, chunks=5, precision="fp8"),
        10.2272,
        "megatron",
        {"tensor_overlap": True},
    ),
    "bigscience-200b": PublishedLayout(
        "BigScience, bigscience-workshop/bigscience, experiments/gpt2-200B, 48 nodes; the best of "
        "its table",
        {**_GPT, "layers": 72, "hidden": 14336, "heads": 64, "ffn": 57344},
        "dgx-a100",
        2048,
        2048,
        ParallelLayout(384, tp=8, pp=6, recompute="full", micro_batch=4),
        121.48,
        "megatron",
        {"attention": "plain", "overlap_grad_reduce": False, "dtype": "float16"},
    ),
    "megatron-146b": PublishedLayout(
        "Narayanan et al., arXiv:2104.04473, table 1",
        {**_GPT, "layers": 80, "hidden": 12288, "heads": 96, "ffn": 49152},
        "dgx-a100",
        2304,
        2048,
        ParallelLayout(1536, tp=8, pp=8, recompute="full"),
        24.8174,
        "megatron",
        {"attention": "plain", "overlap_grad_reduce": False, "dtype": "float16"},
    ),
    "megascale-175b": PublishedLayout(
        "Jiang et al., MegaScale, arXiv:2402.15627, table 2, Megatron-LM on 1024 GPUs",
        {**_GPT, "layers": 96, "hidden": 12288, "heads": 128, "ffn": 49152},
        "dgx-a100",
        768,
        2048,
        ParallelLayout(1024, tp=8, pp=8, chunks=6, zero=2),
        11.9,
        "megatron",
    ),
    "llama3-405b": PublishedLayout(
        "Llama 3, arXiv:2407.21783, table 4, 8192 GPUs (neither step time nor stages per rank)",
        "llama3-405b",
        "dgx-h100",
        2048,
        8192,
        ParallelLayout(8192, tp=8, pp=16, zero=2),
        None,
    ),
    "deepseek-v3": PublishedLayout(
        "DeepSeek-V3, arXiv:2412.19437, section 3.2 and table 1 (180 000 H800 hours per 10^12 "
        "tokens)",
        "deepseek-v3",
        "dgx-h800",
        15360,
        4096,
        ParallelLayout(
            2048, pp=16, ep=64, schedule="dualpipe", precision="fp8", recompute="modules"
        ),
        19.9,
    ),
}


class Ranking(NamedTuple):
    """The place of a published layout. ``result`` is a rejection if the plan rejects it."""

    place: int
    result: LayoutResult | RejectedLayout
    fastest: LayoutResult
    layouts: int

    @property
    def passes(self) -> bool:
        if isinstance(self.result, RejectedLayout):
            return False
        return self.place <= 3 or self.result.step_ns <= self.fastest.band_ns[1]


def request_of(published: PublishedLayout, choices: Mapping[str, Any] | None = None) -> PlanRequest:
    """The plan's request for a published job."""
    request = checked_plan_request(
        published.model,
        published.layout.gpus,
        cluster_from(published.cluster),
        published.batch,
        sequence=published.sequence,
        step=published.step,
        choices={"precision": [published.layout.precision], **(choices or {})},
    )
    if published.framework is None:
        return request
    return for_framework(request, published.framework)


def ranking_of(
    published: PublishedLayout,
    jobs: int | None = None,
    choices: Mapping[str, Any] | None = None,
) -> Ranking:
    """Rank a published layout among all of its job. ``choices`` restrict the others."""
    request = request_of(published, choices)
    plan = plan_layouts([request], PlanOptions(jobs=jobs))
    own = LayoutEvaluator(request).outcome(published.layout)
    fastest = plan.best
    assert fastest is not None
    faster = 0
    if isinstance(own, LayoutResult):
        ranked = [r.outcome for r in plan.ranked if r.outcome.layout != published.layout]
        if not own.fit.may_run_out:
            ranked = [result for result in ranked if not result.fit.may_run_out]
        faster = sum(result.step_ns < own.step_ns for result in ranked)
    return Ranking(faster + 1, own, fastest, len(plan.ranked))


def line(name: str, published: PublishedLayout, found: Ranking) -> str:
    low, high = (ns / 1e9 for ns in found.fastest.band_ns)
    measured = "-" if published.step_s is None else f"{published.step_s:.2f}"
    if isinstance(found.result, RejectedLayout):
        own = found.result.reason
    else:
        risk = ", may run out of memory" if found.result.fit.may_run_out else ""
        own = f"number {found.place} of {found.layouts}, {found.result.step_ns / 1e9:.2f} s{risk}"
    verdict = "passes" if found.passes else "FAILS"
    return (
        f"{name}: {verdict}: {published.layout.label()}: {own}; measured {measured} s; fastest "
        f"{found.fastest.layout.label()}, {found.fastest.step_ns / 1e9:.2f} s "
        f"({low:.2f} to {high:.2f})\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PUBLISHED))
    parser.add_argument("--jobs", type=int)
    asked = parser.parse_args()
    passed = 0
    names = asked.names or list(PUBLISHED)
    for name in names:
        found = ranking_of(PUBLISHED[name], asked.jobs)
        passed += found.passes
        sys.stdout.write(line(name, PUBLISHED[name], found))
        sys.stdout.flush()
    sys.stdout.write(f"{passed} of {len(names)} pass\n")


if __name__ == "__main__":
    main()
