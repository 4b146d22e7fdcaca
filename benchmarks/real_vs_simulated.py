"""Simulated times compared with real ones on this machine, with Gloo.

    python benchmarks/real_vs_simulated.py [--save FILE] [--load FILE]

The cases are a hybrid step, a ring, hand-written data parallelism, and every collective. The
benchmark measures this machine with `distsim bench` and runs every case for real, alternately, so
that both see the same load. Then it calibrates a cluster, simulates every case on it, and prints
the error and the spread between runs. ``--save`` writes the measurements, ``--load`` evaluates
saved ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distsim.common.units import show_bytes, show_ns
from distsim.hardware.cluster import preset
from distsim.operations.registry import OPERATIONS
from distsim.real.bench.measurement import BENCH_OPS, BENCH_SIZES, run_bench
from distsim.real.calibrate import MeasuredPoint, calibrate_cluster, points_from_bench
from distsim.real.run import RealRunOptions, run_scenario
from distsim.scenario import Scenario, load, loads
from distsim.simulation.simulate_scenario import simulate

SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"
CASE_SIZES = (4096, 65536, 1 << 20, 16 << 20)
#: What issue and manual promise: median error, and the worst one unless it is within twice the
#: spread.
LIMITS = {2: (0.25, 0.60), 4: (0.40, float("inf"))}

_RING = """
name: ring
world: {n}
backend: gloo
tensors: {{mine: {{shape: [{numel}]}}, theirs: {{like: mine}}}}
program:
  - isend: {{tensor: mine, dst: (rank + 1) % world_size, as: sent}}
  - recv: {{tensor: theirs, src: (rank - 1) % world_size}}
  - wait: sent
"""
_COLLECTIVE = """
name: {op}
world: {n}
backend: gloo
tensors:
  whole: {{shape: [{n}, {share}]}}
  whole_too: {{like: whole}}
  part: {{shape: [{share}]}}
  flat: {{shape: [{numel}]}}
  flat_too: {{like: flat}}
program:
  - {op}: {fields}
"""
_FIELDS = {
    "broadcast": "{tensor: flat, src: 0}",
    "all_reduce": "{tensor: flat}",
    "reduce": "{tensor: flat, dst: 0}",
    "all_gather": "{input: part, output: whole}",
    "all_gather_into_tensor": "{input: part, output: flat}",
    "gather": "{input: part, output: whole, dst: 0}",
    "scatter": "{input: whole, output: part, src: 0}",
    "reduce_scatter": "{input: whole, output: part}",
    "reduce_scatter_tensor": "{input: flat, output: part}",
    "all_to_all": "{input: whole, output: whole_too}",
    "all_to_all_single": "{input: flat, output: flat_too}",
    "barrier": "{}",
    "monitored_barrier": "{}",
}


class Case(NamedTuple):
    name: str
    n: int
    nbytes: int

    @property
    def key(self) -> str:
        return f"{self.name} {self.n} {self.nbytes}"


def scenario_of(case: Case) -> Scenario:
    n, numel = case.n, case.nbytes // 4
    if case.name == "hybrid":
        half = [f"mesh={{replica: {n // 2}, stage: 2}}", f"world={n}"]
        return load(
            SCENARIOS / "hybrid.yaml",
            [*half, f"tensors.activation.shape=[{2 * numel}]", f"tensors.grad.shape=[{numel}]"],
        )
    if case.name == "ddp_by_hand":
        return load(SCENARIOS / "ddp_by_hand.yaml", [f"world={n}", f"tensors.grad.shape=[{numel}]"])
    if case.name == "ring":
        return loads(_RING.format(n=n, numel=numel), "ring.yaml")
    return loads(
        _COLLECTIVE.format(
            op=case.name, n=n, share=numel // n, numel=numel, fields=_FIELDS[case.name]
        ),
        f"{case.name}.yaml",
    )


def cases(ranks: list[int], sizes: list[int]) -> list[Case]:
    found = []
    for n in ranks:
        for name in ("hybrid", "ring", "ddp_by_hand", *_FIELDS):
            found += [
                Case(name, n, s)
                for s in (sizes if name not in ("barrier", "monitored_barrier") else sizes[:1])
            ]
    return found


def measure(
    ranks: list[int], sizes: list[int], turns: int, repeat: int, rounds: int
) -> dict[str, Any]:
    """Bench and real runs in turns. Everything as plain numbers."""
    points: list[list[Any]] = []
    real: dict[str, list[int]] = defaultdict(list)
    for turn in range(turns):
        began = time.monotonic()
        points += [
            list(p)
            for p in points_from_bench(
                run_bench(ranks, BENCH_SIZES, BENCH_OPS, rounds=rounds, timeout_s=600)
            )
        ]
        print(
            f"turn {turn + 1} of {turns}: bench took {time.monotonic() - began:.0f} s",
            file=sys.stderr,
        )
        for case in cases(ranks, sizes):
            run, _ = run_scenario(
                scenario_of(case),
                RealRunOptions(
                    backend="gloo", launcher="fork", repeat=repeat, timeout_ns=20_000_000_000
                ),
            )
            if run is not None:
                real[case.key] += run.makespans_ns
        print(f"turn {turn + 1} of {turns}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return {"points": points, "real": dict(real)}


def judge(data: dict[str, Any]) -> bool:
    """Print the table; True when every limit holds."""
    found = calibrate_cluster(
        [MeasuredPoint(*p) for p in data["points"]],
        preset("cpu-10gbe"),
        "here",
        "real_vs_simulated.py",
    )
    print(f"calibrated: {found.cluster.error_band}\n")
    print(
        f"{'case':24} {'ranks':>5} {'bytes':>8} {'simulated':>11} {'real':>11} {'error':>7} {'spread':>7}"
    )
    errors: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for key, times in data["real"].items():
        name, n, nbytes = key.split()
        case = Case(name, int(n), int(nbytes))
        ns = simulate(
            scenario_of(case),
            backend="gloo",
            cluster=found.cluster,
            with_verdict=False,
            with_values=False,
        ).makespan_ns
        low, median, high = np.percentile(times, (25, 50, 75))
        error, spread = ns / median - 1, (high - low) / median
        errors[case.n].append((abs(error), spread))
        size = (
            show_bytes(case.nbytes)
            if OPERATIONS.get(name) is None or OPERATIONS[name].busbw_factor(2)
            else "-"
        )
        print(
            f"{name:24} {n:>5} {size:>8} {show_ns(ns):>11} {show_ns(int(median)):>11} {error:>+7.0%} {spread:>7.0%}"
        )
    good = True
    for n, pairs in errors.items():
        middle, worst = float(np.median([e for e, _ in pairs])), max(e for e, _ in pairs)
        limit, most = LIMITS.get(n, (0.4, float("inf")))
        beyond = sum(e > max(most, 2 * spread) for e, spread in pairs)
        good = good and middle <= limit and not beyond
        spread = float(np.median([s for _, s in pairs]))
        print(
            f"\n{n} ranks: median error {middle:.0%} (limit {limit:.0%}), worst {worst:.0%}, {beyond} of {len(pairs)} beyond "
            f"{most:.0%} and twice the spread; median spread {spread:.0%}"
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--sizes", default=",".join(map(str, CASE_SIZES)))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    given = parser.parse_args()
    if given.load is not None:
        data = json.loads(given.load.read_text())
    else:
        ranks, sizes = (
            [int(word) for word in text.split(",")] for text in (given.ranks, given.sizes)
        )
        data = measure(ranks, sizes, given.turns, given.repeat, given.rounds)
    if given.save is not None:
        given.save.write_text(json.dumps(data))
    return 0 if judge(data) else 1


if __name__ == "__main__":
    sys.exit(main())
