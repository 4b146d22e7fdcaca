"""The current predicted times of collectives and messages on every preset. `python -m
tests.support.price_table` regenerates tests/data/prices.json.

The table does not say that a time is right: tests/hardware/test_cost_nccl.py and benchmarks/
compare times with measurements. The table shows which times a change affects. A row is an operation among some
ranks, a column a size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from distsim.hardware.cluster import cluster_from  # noqa: E402
from distsim.hardware.cluster.presets import PRESETS  # noqa: E402
from distsim.hardware.cost import CostModel  # noqa: E402
from distsim.hardware.cost.explain import explain_cost  # noqa: E402
from distsim.operations.registry import OPERATIONS  # noqa: E402

DATA = ROOT / "tests" / "data" / "prices.json"
SIZES = (0, 1, 1000, 10_000, 100_000, 1_000_000, 1 << 24, 1 << 28)
#: By name: ranks of 32 on machines of eight. One NVLink domain, pairs, odd numbers, some of each
#: machine, in order and not.
GROUPS = {
    "pair": (0, 1),
    "far pair": (3, 12),
    "machine": tuple(range(8)),
    "five": tuple(range(5)),
    "two machines": tuple(range(16)),
    "one of each": (0, 8, 16, 24),
    "two of each": (0, 1, 8, 9, 16, 17, 24, 25),
    "uneven": tuple(range(11)),
    "all": tuple(range(32)),
    "strided": tuple(sorted(range(16), key=lambda rank: (rank % 4, rank))),
}
#: Prices of these are kept term by term too, among these.
TOLD, TOLD_AMONG = (
    ("all_reduce", "all_gather_into_tensor", "send"),
    ("machine", "one of each", "two of each", "uneven"),
)
ROWS = {
    name: row
    for name, row in OPERATIONS.items()
    if row.kind == "collective" and row.coalesces is None
}


class Case(NamedTuple):
    """A cluster as a file says it, and ranks a machine."""

    cluster: dict[str, object]
    local_size: int = 8


def cases() -> Iterator[tuple[str, Case]]:
    """Every preset, and what a file may change of one."""
    for name in PRESETS:
        yield name, Case({"preset": name})
    for local in (1, 4):
        yield f"dgx-a100, {local} a machine", Case({"preset": "dgx-a100"}, local)
    yield "dgx-h100, two cards", Case({"preset": "dgx-h100", "nics": {"count": 2}})
    yield "dgx-a100, one process a machine", Case({"preset": "dgx-a100", "gpus_per_process": 8})
    yield "dgx-a100, slingshot", Case({"preset": "dgx-a100", "network": {"transport": "slingshot"}})
    yield (
        "dgx-h100, tcp that reduces",
        Case({"preset": "dgx-h100", "network": {"transport": "tcp", "reduces": True}}),
    )
    yield (
        "dgx-h100, leaves",
        Case(
            {"preset": "dgx-h100", "network": {"leaf": 2, "oversubscription": 4, "reduces": True}}
        ),
    )
    yield (
        "l40s-pcie, staged",
        Case({"preset": "l40s-pcie", "intra": {"peer_access": False, "per_switch": 2}}),
    )


def prices(case: Case) -> dict[str, list[object]]:
    """ns by operation and ranks, one for each size; of messages too."""
    cost = CostModel(cluster_from(case.cluster), 32, case.local_size)
    found: dict[str, list[object]] = {
        f"send, {name}": [cost.p2p_ns(g[0], g[-1], n) for n in SIZES]
        for name, g in GROUPS.items()
        if len(g) < 5
    }
    for name, group in GROUPS.items():
        for op, row in ROWS.items():
            found[f"{op}, {name}"] = [cost.collective_ns(row, group, n, group[0]) for n in SIZES]
        for op in TOLD if name in TOLD_AMONG else ():
            if kept := as_told(cost, op, group):
                found[f"told {op}, {name}"] = kept
    return found


def as_told(cost: CostModel, op: str, group: tuple[int, ...]) -> list[object]:
    """A price of 1 MB as `distsim explain` tells it: every form with its time and NCCL's own
    bandwidth, and the ways it must pass.
    """
    shown = explain_cost(cost, OPERATIONS[op], group, 1_000_000, ways=True)
    if shown is None:
        return []
    forms = [
        [c.algorithm, c.protocol, round(c.us, 3), round(c.counted_gbs, 3)] for c in shown.candidates
    ]
    ways = [[way.name, way.nbytes, round(way.gbs, 3), way.ns] for way in shown.ways]
    return [
        shown.ns,
        shown.bound_ns,
        round(shown.busbw, 3),
        *shown.band,
        round(shown.issue_us, 3),
        forms,
        ways,
    ]


def table() -> dict[str, dict[str, list[object]]]:
    return {name: prices(case) for name, case in cases()}


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    lines = (
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items())
        + "}"
        for name, rows in table().items()
    )
    DATA.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
