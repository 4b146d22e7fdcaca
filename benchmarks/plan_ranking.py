"""Does distsim rank layouts in the measured order? Compares published runs of one model, batch and
machine that differ only in their layout.

    python benchmarks/plan_ranking.py

Rows of `training_steps.csv` form a group if they agree in everything except the layout. For each
pair of a group, the simulated order is compared with the published order. `distsim plan` computes
the simulated times, for the layouts as `training_steps.py` describes them.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.training_steps import cluster_of, gpu_of, number, scenario_of
from distsim.hardware.cluster import cluster_from
from distsim.hardware.cost import CostModel
from distsim.planning.estimate import StepEstimator
from distsim.planning.rank_timer import EntryCosts
from distsim.scenario.format.reading.strategy_expansion import validated_strategies
from distsim.scenario.strategies.training_step.transformer import Transformer

#: Columns that say which job it is; the others say how it is laid out.
_JOB = (
    "source",
    "gpu",
    "layers",
    "hidden",
    "heads",
    "ffn_hidden",
    "experts",
    "seq_len",
    "dtype",
    "global_batch_seqs",
)


def gpus(row: dict[str, str]) -> int:
    return number(row, "tp") * number(row, "pp") * number(row, "cp") * number(row, "dp")


def step_s(row: dict[str, str]) -> float:
    """Seconds of the row's step as a plan times it."""
    count = max(
        round(number(row, "global_batch_seqs") / (number(row, "dp") * number(row, "micro_batch"))),
        1,
    )
    one, context = validated_strategies(scenario_of(row, count).written)[0]
    assert isinstance(one, Transformer)
    cost = CostModel(cluster_from(cluster_of(row)), context.world_size, context.ranks_per_node)
    return StepEstimator(one, context, EntryCosts(cost, context.mesh), {}).step().makespan_ns / 1e9


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with open(Path(__file__).with_name("training_steps.csv"), encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["step_time_s"] and gpu_of(row)]
    groups: dict[tuple[object, ...], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        groups[(*(row[name] for name in _JOB), gpus(row))].append(row)
    right = pairs = clear = clear_right = 0
    for key, group in groups.items():
        if len(group) < 2:
            continue
        times = {}
        for row in group:
            times[row["run_id"]] = (float(row["step_time_s"]), step_s(row))
        ok = whole = 0
        for (a, x), (b, y) in itertools.combinations(times.values(), 2):
            if x == y:  # the same layout with other software
                continue
            same = (a < b) == (x < y)
            whole, ok = whole + 1, ok + same
            if abs(a / b - 1) > 0.05:
                clear, clear_right = clear + 1, clear_right + same
        print(
            f"{ok:4} of {whole:4} pairs  {len(group):3} layouts  {key[-1]} GPUs  {str(key[0])[:60]}"
        )
        right, pairs = right + ok, pairs + whole
    print(f"{right} of {pairs} pairs in the published order ({right / max(pairs, 1):.0%});")
    print(
        f"of those that differ by more than 5 %: {clear_right} of {clear} ({clear_right / max(clear, 1):.0%})"
    )


if __name__ == "__main__":
    main()
