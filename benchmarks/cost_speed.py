"""CPU time of cost predictions: a million collectives, and sharing two hundred links among a thousand
transfers.

    python benchmarks/cost_speed.py

The output shows CPU time, the best of five rounds.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable

import numpy as np

from distsim.hardware.cluster import cluster_from
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.max_min_fairness import PortDemand, fair_rates
from distsim.operations.registry import OPERATIONS

CALLS, FLOWS, LINKS, ROUNDS = 1_000_000, 1_000, 200, 5


def best_s(work: Callable[[], object]) -> float:
    """CPU seconds of the fastest round."""
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    cost = CostModel(cluster_from("dgx-h100"), 64, 8)
    sizes = np.random.default_rng(1).integers(1, 1 << 30, CALLS)
    ranks = tuple(range(64))
    priced = best_s(lambda: cost.collectives_ns(OPERATIONS["all_reduce"], ranks, sizes))
    chance = random.Random(1)
    flows = [
        PortDemand(tuple(chance.sample(range(LINKS), 2)), (1.0, 1.0), 50.0) for _ in range(FLOWS)
    ]
    shared = best_s(lambda: fair_rates(flows, np.full(LINKS, 50.0)))
    sys.stdout.write(f"{CALLS:,} collectives predicted in {priced:.2f} s\n")
    sys.stdout.write(f"{FLOWS:,} transfers on {LINKS} links: shared in {1000 * shared:.1f} ms\n")


if __name__ == "__main__":
    main()
