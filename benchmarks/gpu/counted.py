"""What the `transformer` strategy counts of one layer, and what an H100 took for it
(`compute_h100.json`, which `compute.py` made).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from distsim.hardware.cluster import cluster_from
from distsim.scenario.strategies.training_step.layer_calls import KERNELS_PER_LAYER
from distsim.scenario.strategies.training_step.micro_batch_cost import MicroBatchCost
from distsim.scenario.strategies.training_step.presets import PRESETS, Architecture

_GPT = Architecture(24, 2048, 16, 16, 8192, 50257, 2048, mlp="gelu", bias=True)
DEVICE = cluster_from("dgx-h100").device


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (Path(__file__).resolve().parent / "compute_h100.json").read_text()
    )
    return found


def read_us(found: dict[str, Any]) -> dict[tuple[str, int, int, int], float]:
    """us of a block, forward and backward, by model, batch, length and tensor ranks."""
    times: Counter[tuple[str, int, int, int]] = Counter()
    for row in found["blocks"]:
        if row["what"] == "block":
            times[row["model"], row["batch"], row["length"], row["share"]] += row["us"]
    return times


def counted_us(model: str, batch: int, length: int, share: int) -> tuple[float, float]:
    """Forward and backward pass by the `transformer` strategy's counts, in us."""
    one = MicroBatchCost(
        {**PRESETS, "gpt-1.3b": _GPT}[model],
        batch,
        length,
        2,
        share,
        flash=True,
        causal=model != "vit-l-16",
        pytorch_modules=True,
    )
    rate, memory = (
        DEVICE.flop_per_ns("bfloat16") * 1e3,
        DEVICE.memory_bytes_per_ns * DEVICE.memory_efficiency * 1e3,
    )
    products, lag = (
        one.layer_flops + one.padding_flops,
        (one.scores_flops + one.idle_flops) / 0.8 - one.scores_flops,
    )
    starts = [(many + 2) * DEVICE.launch_ns / 1e3 for many in KERNELS_PER_LAYER["dtensor"]]
    forward = (products + lag) / rate + (
        one.layer_traffic + one.products_traffic.forward + one.routing_traffic
    ) / memory
    backward = 2 * products + one.flash_flops + 2.5 * lag
    moved = (
        2 * one.layer_traffic
        + one.products_traffic.backward
        + one.routing_traffic
        + one.sums_traffic
    )
    return forward + starts[0], backward / rate + moved / memory + starts[1]
