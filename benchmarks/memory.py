"""Compare the predicted memory of a rank with measured peaks.

    python benchmarks/memory.py

1. Published peaks of torchtitan for Llama 3.1 on H100: the memory that the allocator reserved, the
   maximum over all ranks (torchtitan 9dec370, metrics.py: reserved_bytes.all.peak). Source:
   pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 2 and 4 to 6 (full
   recomputation, torch.compile, float8). The last column is the unexplained rest in bytes per logit.
2. Thirty layouts measured on one H100 (`gpu/memory_h100.json`): reserved memory, and the memory of
   all tensors.

The last line prints the quantiles of measured / predicted reserved memory of all 42, from which
`distsim.hardware.cost.memory_fit.MEMORY_RANGE` is taken.
"""

from __future__ import annotations

import argparse
import sys
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "gpu")]

from predicted_memory import predicted_memory, readings  # noqa: E402

from distsim.checker.detectors.peak_memory import peak_memory  # noqa: E402
from distsim.scenario import loads  # noqa: E402
from distsim.simulation.simulate_scenario import simulate  # noqa: E402


class Reading(NamedTuple):
    """``gib``: as published. ``tokens``: of a micro-batch on one rank of the context axis.
    ``shards``: of the vocabulary.
    """

    name: str
    mesh: dict[str, int]
    fields: dict[str, object]
    gib: float
    tokens: int
    shards: int


def _context(model: str, sequence: int, dp: int, cp: int, gib: float) -> Reading:
    fields: dict[str, object] = {
        "model": model,
        "sequence": sequence,
        "zero": 3,
        "recompute": "full",
    }
    return Reading(
        f"{model} dp {dp} cp {cp}, {sequence} tokens",
        {"dp": dp, "cp": cp},
        fields,
        gib,
        sequence // cp,
        1,
    )


def _tensor(how: str, gib: float) -> Reading:
    fields: dict[str, object] = {
        "model": "llama3-70b",
        "sequence": 8192,
        "micro_batch": 16,
        "zero": 3,
        "recompute": "full",
    }
    return Reading(
        f"llama3-70b dp 32 tp 8, 16 × 8192 tokens{how}",
        {"dp": 32, "tp": 8},
        fields,
        gib,
        16 * 8192,
        8,
    )


def _stages(
    sequence: int, micro_batch: int, dp: int, cp: int, gib: float, chunks: int = 1
) -> Reading:
    """Parameters and gradients whole until the last micro-batch, as fully_shard under a pipeline
    has them (`zero: 1` here). Eight micro-batches (as many as ranks of the pipeline, where the
    options say none), the layers as generate_split_points has them: the first and the last stage
    one fewer than the others (torchtitan 9dec370, parallelisms/pipelining_utils.py)."""
    most = 16 // chunks
    fields: dict[str, object] = {
        "model": "llama3-405b",
        "sequence": sequence,
        "micro_batch": micro_batch,
        "micro_batches": 8,
        "zero": 1,
        "recompute": "full",
        "schedule": "1f1b" if chunks == 1 else "interleaved_1f1b",
        "chunks": chunks,
        "layers_per_stage": [most - 1, *[most] * (8 * chunks - 2), most - 1],
    }
    mesh, name = (
        {"dp": dp, "cp": cp, "pp": 8, "tp": 8},
        f"llama3-405b dp {dp} cp {cp} pp 8 tp 8, {micro_batch} × {sequence}",
    )
    return Reading(
        name + (", 2 chunks" if chunks > 1 else ""),
        mesh,
        fields,
        gib,
        micro_batch * sequence // cp,
        8,
    )


READINGS = (
    _context("llama3-8b", 32_768, 8, 1, 83.9),
    _context("llama3-8b", 65_536, 4, 2, 84.2),
    _context("llama3-8b", 131_072, 2, 4, 84.0),
    _context("llama3-8b", 262_144, 1, 8, 84.5),
    _tensor("", 71.9),
    _tensor(", async", 67.6),
    _stages(8192, 4, 8, 1, 82.5),
    _stages(8192, 4, 8, 1, 72.7, 2),
    _stages(32_768, 1, 8, 1, 75.3),
    _stages(65_536, 1, 4, 2, 75.9),
    _stages(131_072, 1, 2, 4, 77.1),
    _stages(262_144, 1, 1, 8, 84.9),
)
_VOCABULARY = 128_256


def counted_gib(reading: Reading) -> float:
    """What distsim counts for the fullest rank."""
    mesh = ", ".join(f"{axis}: {size}" for axis, size in reading.mesh.items())
    fields = ", ".join(f"{key}: {value}" for key, value in reading.fields.items())
    world = prod(reading.mesh.values())
    text = f"name: memory\nworld: {world}\nbackend: nccl\ncluster: dgx-h100\nmesh: {{{mesh}}}\nprogram:\n  - transformer: {{{fields}}}\n"
    done = simulate(loads(text))
    return max(one.total for one in peak_memory(done.scenario, done.program)) / 2**30


def published() -> list[float]:
    """Print the first comparison; returns measured / predicted reserved memory."""
    off, ratios = [], []
    print(f"{'layout, GiB':51} {'meas.':>6} {'pred.':>6} {'ratio':>9}  unexplained B per logit")
    for one in READINGS:
        gib = counted_gib(one)
        left = (one.gib - gib) * 2**30 / (one.tokens * _VOCABULARY / one.shards)
        off.append(abs(gib / one.gib - 1))
        ratios.append(one.gib / gib)
        print(f"{one.name:51} {one.gib:6.1f} {gib:6.1f} {gib / one.gib:9.2f}  {left:.1f}")
    print(f"{sum(off) / len(off):.1%} off, mean of {len(off)}")
    return ratios


def measured() -> list[float]:
    """Print the second comparison; returns measured / predicted reserved memory."""
    measured_to_predicted = []
    off: dict[str, list[float]] = {"held": [], "reserved": []}
    print(
        f"\n{'layout, GiB':75} {'alloc.':>6} {'pred.':>6} {'ratio':>5}  {'reserved':>8} {'pred.':>6} {'ratio':>5}"
    )
    for run in readings():
        one = predicted_memory(run)
        total, read = (
            sum(one.parts.values()),
            {"held": run["allocated"], "reserved": run["reserved"]},
        )
        both = {"held": one.allocated_nbytes or total, "reserved": total}
        cells = [
            f"{read[k] / 2**30:6.2f} {both[k] / 2**30:6.2f} {both[k] / read[k]:5.2f}" for k in read
        ]
        for key, ratios in off.items():
            ratios.append(abs(both[key] / read[key] - 1))
        measured_to_predicted.append(run["reserved"] / total)
        name = (
            run["name"]
            .replace("micro_batches", "mb")
            .replace("sequence", "seq")
            .replace("reshard False", "kept")
        )
        print(f"{name:75} {cells[0]}    {cells[1]}")
    print(
        ", ".join(f"{key} {sum(ratios) / len(ratios):.1%} off" for key, ratios in off.items())
        + f", mean of {len(off['held'])}"
    )
    return measured_to_predicted


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    ratios = [*published(), *measured()]
    low, high = np.quantile(ratios, [0.05, 0.95])
    print(f"measured / predicted reserved memory: 90 % of {len(ratios)} in {low:.2f}–{high:.2f}")


if __name__ == "__main__":
    main()
