"""Simulated step times of described models on preset clusters, compared with published step times.

    python benchmarks/training_steps.py [--table F.csv] [--every N] [--rows]

Each row of the table (`training_steps.csv`) is a published run with its configuration and source;
an empty field was not published. The row becomes a `transformer:` step on the preset of its GPU.
Nothing is fitted to these rows. One family has 473 rows; the table contains every tenth of them.

Steps without a pipeline are simulated call by call, in reduced form: replicas beyond two nodes are
omitted, and a step with many micro-batches is extrapolated from steps with one and with two.
`distsim plan` times whole steps with a pipeline; simulating a program that is too large to resolve
which transfers share links gives the same times.

These rows are skipped: GPUs without a preset, 4-bit matrix products, latent attention, and rows
without the number of replicas (``dp``). If a row does not give them, micro-batches have one
sequence and the schedule has no chunks.

Three columns describe choices that differ between runs. If they are missing or empty, the default
of current software applies: fused attention, gradients overlapped, no tensor overlap.

- ``attention``: ``flash-2``, ``flash-1``, or ``plain`` (the scores are written to memory).
- ``grad_reduce``: ``beside`` (gradients are reduced during the last backward pass) or ``after``
  (Megatron-LM of 2021 and its forks).
- ``tensor_overlap``: ``yes`` if messages between tensor ranks overlap products, in pieces.

For Megatron-Bridge's rows with tp, ``tensor_overlap`` and ``seq_parallel`` come from its recipes
(scripts/performance of v0.2.0, src/megatron/bridge/perf_recipes of 067f987df03b). For NeMo's rows
of 24.12, they come from its launcher (conf/training/gpt3/20b.yaml, llama/llama2_70b.yaml).
torchtitan marks its row with async TP.

``memory_bw_GBps`` is the bandwidth of the row's GPU if it differs from the preset: 1555 for the A100
with 40 GB (data sheet), 2400 for torchtitan's H100 (its page: 96 GB of HBM2e, and 500 W, which lowers
the clocks by an unpublished amount).
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distsim.common.errors import DistsimError, UsageError
from distsim.hardware.cluster import cluster_from
from distsim.hardware.cluster.presets import PRESETS
from distsim.hardware.cost import CostModel
from distsim.planning.estimate import StepEstimator
from distsim.planning.rank_timer import EntryCosts
from distsim.scenario import Scenario
from distsim.scenario.strategies.base import ExpansionContext
from distsim.scenario.strategies.training_step.transformer import Transformer
from distsim.simulation.simulate_scenario import simulate

CLUSTERS = {"A100": "dgx-a100", "H100": "dgx-h100", "B200": "dgx-b200", "GB200": "gb200-nvl72"}
#: What fused attention reaches of the data sheet's rate, forward and backward together, of which
#: matrix products reach `compute_efficiency`: FlashAttention-2's 50 to 73 and 44 to 63 % on A100
#: (arXiv:2307.08691), its 30 to 34 and 29 to 33 % on H100 (causal, and not, heads of 128;
#: arXiv:2407.08608); the first FlashAttention's 25 to 40 % on A100, and on H100, whose new
#: instructions neither of the two uses, 1.5 times as many FLOP/s, as the second has there (225 and
#: 335 TFLOP/s, arXiv:2307.08691). MosaicML's rows on H100 ran the first: llm-foundry v0.0.4, by its
#: benchmarking/sweep.sh, is older than the second.
ATTENTION = {
    ("A100", "flash-2"): 0.55,
    ("H100", "flash-2"): 0.31,
    ("A100", "flash-1"): 0.325,
    ("H100", "flash-1"): 0.154,
}
#: Of published times so many are to lie in the band of a step
#: (`distsim.hardware.cost.prediction_range.COMPUTE_RANGE`): a little more than it is to hold of
#: sources that it was not made of, which are off by what is their own as well.
SHARE = 0.87
#: Of a longer table's rows of this family --every takes some.
MANY = "vTrain"


class Outcome(NamedTuple):
    """A row and its times in seconds."""

    row: dict[str, str]
    published_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        return self.simulated_s / self.published_s - 1


def gpu_of(row: dict[str, str]) -> str | None:
    """A row's GPU; None where no preset has it, the arithmetic is 4-bit, or attention's keys are
    compressed.
    """
    gpu, dtype = row["gpu"].split("-")[0], row["dtype"].lower()
    return gpu if gpu in CLUSTERS and "fp4" not in dtype and row["kv_heads"] != "MLA" else None


def products_of(row: dict[str, str]) -> dict[str, str]:
    """What the row's matrix products were in, where it was 8 bits."""
    return {"matmul_dtype": "float8_e4m3fn"} if "fp8" in row["dtype"].lower() else {}


def cluster_of(row: dict[str, str]) -> dict[str, Any]:
    """The preset of the GPU, with the network and the memory that the row states."""
    preset: dict[str, Any] = dict(PRESETS[CLUSTERS[row["gpu"].split("-")[0]]])
    per_node = row["inter_bw_GBps_per_node"]
    if per_node:
        count = (
            int(row["inter_link"].split("x")[0]) if row["inter_link"].split("x")[0].isdigit() else 8
        )
        preset["nics"] = {
            **preset["nics"],
            "count": count,
            "bandwidth": f"{float(per_node) / count:g} GB/s",
        }
    if row.get("memory_bw_GBps"):
        preset["device"] = {**preset["device"], "memory_bandwidth": f"{row['memory_bw_GBps']} GB/s"}
    return preset


def number(row: dict[str, str], key: str, default: int = 1) -> int:
    """A column's number; words after it (`2880 expert`) are left."""
    return int(float(row[key].split()[0])) if row[key] else default


def recompute_of(row: dict[str, str]) -> str:
    """``every other op`` is torchtitan's selective checkpoint."""
    if "every other op" in row["recompute"]:
        return "op"
    return next(
        (word for word in ("full", "selective") if row["recompute"].startswith(word)), "none"
    )


def attention_of(row: dict[str, str]) -> dict[str, Any]:
    """How fast the row's attention was, where it says which it was; else it is today's."""
    gpu = str(gpu_of(row))
    reached = ATTENTION.get((gpu, row.get("attention", "")))
    large = cluster_from(CLUSTERS[gpu]).device.compute_efficiency
    return {} if reached is None else {"attention_efficiency": reached / large}


def zero_of(row: dict[str, str]) -> int:
    """The stage of ZeRO; with a pipeline, parameters stay gathered."""
    sharding = row["sharding"]
    if "FSDP" in sharding:
        return 2 if number(row, "pp") > 1 else 3
    return next((stage for stage in (1, 2, 3) if f"ZeRO-{stage}" in sharding), 0)


def model_of(row: dict[str, str]) -> dict[str, Any]:
    names = {
        "layers": "layers",
        "hidden": "hidden",
        "heads": "heads",
        "kv_heads": "kv_heads",
        "ffn": "ffn_hidden",
        "vocabulary": "vocab",
    }
    found: dict[str, Any] = {
        key: number(row, column) for key, column in names.items() if row[column]
    }
    found["mlp"] = row["mlp"]
    return found | (
        {"experts": number(row, "experts"), "top_k": number(row, "top_k")} if row["experts"] else {}
    )


def step_of(row: dict[str, str], micro_batches: int) -> dict[str, Any]:
    """The row as the fields of `transformer:`."""
    pp, cp, dp = (number(row, key) for key in ("pp", "cp", "dp"))
    attention = "plain" if row.get("attention") == "plain" else "flash"
    step: dict[str, Any] = {
        "model": model_of(row),
        "sequence": number(row, "seq_len"),
        "micro_batch": number(row, "micro_batch"),
        "micro_batches": micro_batches,
        "dtype": "float16" if row["dtype"].lower().startswith("fp16") else "bfloat16",
        "recompute": recompute_of(row),
        "attention": attention,
        "zero": zero_of(row),
        "data_ranks": max(dp * cp, 1),
        "sequence_parallel": row["seq_parallel"] == "yes",
        "overlap_grad_reduce": row.get("grad_reduce") != "after",
        "tensor_calls": "dtensor" if "FSDP" in row["sharding"] else "megatron",
        **attention_of(row),
        **products_of(row),
    }
    chunks = number(row, "vpp")
    if row.get("tensor_overlap") == "yes":
        step["tensor_overlap"] = True
    if pp > 1:
        step |= (
            {"schedule": "interleaved_1f1b", "chunks": chunks}
            if chunks > 1
            else {"schedule": "1f1b"}
        )
    return step


def mesh_of(row: dict[str, str], most: int | None = None) -> dict[str, int]:
    """Megatron's order of axes: tensor innermost, pipeline outermost. ``most``: omit
    replicas beyond this number of ranks.
    """
    tp, pp, cp, dp = (number(row, key) for key in ("tp", "pp", "cp", "dp"))
    ep = number(row, "ep") if row["experts"] else 1
    replicas = max(dp if most is None else min(dp, max(most // (tp * cp), 1)), min(ep, dp))
    return {"pp": pp, "dp": max(replicas // ep, 1), "ep": ep, "cp": cp, "tp": tp}


def scenario_of(row: dict[str, str], micro_batches: int) -> Scenario:
    """The row as a scenario with so many micro-batches."""
    mesh = mesh_of(row, 16)
    world = prod(mesh.values())
    per_node = min(number(row, "gpus_per_node", 8), world)
    return Scenario(
        name=row["run_id"],
        world={"nodes": -(-world // per_node), "ranks_per_node": per_node},
        backend="nccl",
        cluster=cluster_of(row),
        mesh=mesh,
        program=[{"transformer": step_of(row, micro_batches)}],
    )


def step_s(row: dict[str, str]) -> float:
    """Seconds of the simulated step."""
    micro_batches = max(
        round(number(row, "global_batch_seqs") / (number(row, "dp") * number(row, "micro_batch"))),
        1,
    )
    if number(row, "pp") > 1:
        return _timed_s(row, micro_batches)
    if micro_batches <= 2:
        return _makespan_s(row, micro_batches)
    first, second = _makespan_s(row, 1), _makespan_s(row, 2)
    return first + (micro_batches - 1) * (second - first)


def _timed_s(row: dict[str, str], micro_batches: int) -> float:
    """The whole step of all replicas, as `distsim plan` times it."""
    mesh = mesh_of(row)
    world = prod(mesh.values())
    cost = CostModel(
        cluster_from(cluster_of(row)), world, min(number(row, "gpus_per_node", 8), world)
    )
    context = ExpansionContext(world, cost.machine_size, mesh, "nccl", 1, {}, frozenset())
    train = Transformer.model_validate(step_of(row, micro_batches))
    refused = train.refuse(context)
    if refused:
        raise UsageError(refused[0][1])
    return StepEstimator(train, context, EntryCosts(cost, mesh), {}).step().makespan_ns / 1e9


def _makespan_s(row: dict[str, str], micro_batches: int) -> float:
    found = simulate(scenario_of(row, micro_batches), with_verdict=False, with_values=False)
    if found.outcome != "completes":
        raise RuntimeError(f"{row['run_id']}: {found.outcome}")
    return found.makespan_ns / 1e9


def outcomes(rows: list[dict[str, str]]) -> Iterator[Outcome]:
    for row in rows:
        try:
            yield Outcome(row, float(row["step_time_s"]), step_s(row))
        except DistsimError as error:
            sys.stdout.write(
                f"{row['run_id']}: skipped: layout not supported: {str(error).splitlines()[0]}\n"
            )


def chosen(path: str, every: int) -> list[dict[str, str]]:
    with open(path, encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["step_time_s"] and gpu_of(row)]
    for row in (row for row in rows if not row["dp"]):
        sys.stdout.write(f"{row['run_id']}: skipped: number of replicas (dp) unknown\n")
    rows = [row for row in rows if row["dp"]]
    many = [row for row in rows if MANY in row["source"]]
    return [row for row in rows if MANY not in row["source"]] + many[::every]


def left_out(sources: dict[str, list[Outcome]]) -> float:
    """Mean error over sources when every source's times are scaled by what the others would have
    them scaled by: the median over sources of the median of published / simulated. Little gained by
    it: what is wrong is no constant factor."""
    ratios = {
        source: statistics.median(o.published_s / o.simulated_s for o in group)
        for source, group in sources.items()
    }
    means = []
    for source, group in sources.items():
        factor = statistics.median(ratio for other, ratio in ratios.items() if other != source)
        means.append(
            statistics.mean(abs(o.simulated_s * factor / o.published_s - 1) for o in group)
        )
    return statistics.mean(means)


def quantiles(groups: Iterable[list[float]], share: float) -> tuple[float, float]:
    """The range that holds this share of published / simulated times; groups have equal weight."""
    every = sorted((ratio, 1 / len(group)) for group in groups for ratio in group)
    whole, passed, places = sum(weight for _, weight in every), 0.0, []
    for _, weight in every:
        places.append((passed + weight / 2) / whole)
        passed += weight
    ratios = [ratio for ratio, _ in every]
    low, high = np.interp([(1 - share) / 2, (1 + share) / 2], places, ratios)
    return float(low), float(high)


def covered(sources: Mapping[str, list[float]], share: float = SHARE) -> tuple[float, float]:
    """(mean over sources, share of rows) of what a band of the other sources holds of each."""
    held = {}
    for source, group in sources.items():
        low, high = quantiles([other for name, other in sources.items() if name != source], share)
        held[source] = statistics.mean(low <= ratio <= high for ratio in group)
    rows = sum(held[source] * len(group) for source, group in sources.items()) / sum(
        map(len, sources.values())
    )
    return statistics.mean(held.values()), rows


def by_source(
    rows: Iterable[dict[str, str]], simulated: Mapping[str, float]
) -> dict[str, list[float]]:
    """Published over simulated times of the rows that were simulated."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["run_id"] in simulated:
            found[row["source"].partition("#")[0]].append(
                float(row["step_time_s"]) / simulated[row["run_id"]]
            )
    return found


def line(name: str, group: Sequence[Outcome], bias: float | None = None) -> str:
    errors = [abs(o.error) for o in group]
    bias = statistics.median(o.error for o in group) if bias is None else bias
    return f"{len(group):5} {statistics.mean(errors):7.1%} {statistics.median(errors):7.1%} {bias:+7.1%}  {name[:90]}\n"


def families(sources: Mapping[str, list[Outcome]]) -> Iterator[str]:
    """A line for each GPU, whose bias is the mean over its sources, and one for mixtures of
    experts.
    """
    every = [o for group in sources.values() for o in group]
    for gpu in CLUSTERS:
        groups = [
            own for group in sources.values() if (own := [o for o in group if gpu_of(o.row) == gpu])
        ]
        if groups:
            biases = [statistics.median(o.error for o in own) for own in groups]
            yield line(gpu, [o for own in groups for o in own], statistics.mean(biases))
    experts = [o for o in every if o.row["experts"]]
    if experts:
        yield line("mixtures of experts", experts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", default=str(Path(__file__).with_suffix(".csv")))
    parser.add_argument(
        "--every", type=int, default=1, help=f"Use every Nth row of {MANY}. [default: 1]"
    )
    parser.add_argument("--rows", action="store_true", help="Print every row.")
    parser.add_argument("--write", metavar="F.csv", help="Write the simulated time of every row.")
    asked = parser.parse_args()
    start = time.perf_counter()
    sources: dict[str, list[Outcome]] = {}
    for found in outcomes(chosen(asked.table, asked.every)):
        sources.setdefault(found.row["source"].partition("#")[0], []).append(found)
        if asked.rows:
            sys.stdout.write(
                f"{found.row['run_id']}: {found.published_s:.3f} s, {found.simulated_s:.3f} s, {found.error:+.1%}\n"
            )
    if asked.write:
        text = [
            f"{o.row['run_id']},{o.simulated_s:.5g}\n" for group in sources.values() for o in group
        ]
        Path(asked.write).write_text("run_id,simulated_s\n" + "".join(text), encoding="utf-8")
    sys.stdout.write(f"{'rows':>5} {'mean':>7} {'median':>7} {'bias':>7}  source\n")
    sys.stdout.writelines(line(source, group) for source, group in sources.items())
    sys.stdout.writelines(families(sources))
    means = [statistics.mean(abs(o.error) for o in group) for group in sources.values()]
    sys.stdout.write(
        f"mean over {len(means)} sources {statistics.mean(means):.1%}, in {time.perf_counter() - start:.0f} s\n"
    )
    sys.stdout.write(f"scaled by what the other sources say {left_out(sources):.1%}\n")
    ratios = {source: [1 / (1 + o.error) for o in group] for source, group in sources.items()}
    (low, high), (held, rows) = quantiles(ratios.values(), SHARE), covered(ratios)
    sys.stdout.write(
        f"band of {SHARE:.0%}: {low:.2f} to {high:.2f} of the simulated time; of a source left out it holds {held:.0%}"
    )
    sys.stdout.write(f" (mean over sources; {rows:.0%} of rows)\n")


if __name__ == "__main__":
    main()
