"""The published nccl-tests tables of `nccl_tables.csv`, and the readings of `nccl_quoted.csv`, each
in the setting it was measured in.

Columns: `table_id`, `source` (where it was published), `system`, `gpu`, nodes and ranks, the data
sheet's bandwidths (`intra_bw_GBps` of a GPU, `inter_bw_GBps_per_node` of all cards of a node; per
direction), `nccl_version`, `launch`, `collective`, `bytes` as nccl-tests counts them, `place`,
`time_us` as printed. Times out of place are scored, but where they carry a one-time cost
(`SETUP_RATIO`) those in place; sizes of 0 are left out.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.hardware.cluster import cluster_from
from distsim.hardware.cost.nccl_context import NcclContext, NcclOperation
from distsim.real.calibrate.nccl_tests import SETUP_RATIO

HERE = Path(__file__).resolve().parent
KINDS: dict[str, NcclOperation] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "sendrecv": "send",
}
#: What NCCL counts of a data sheet's bandwidth (src/graph/topo.h): 20 of 25 GB/s a link of NVLink 2
#: and 3, 20.6 of NVLink 4; 12 of 16 GB/s on PCIe 3 (doubled with each generation); 12 of 12.5 GB/s
#: on a card of 100 Gbit/s.
NVLINK = {"volta": 0.8, "ampere": 0.8, "hopper": 0.824, "blackwell": 0.802}
PCIE, NIC = 0.75, 0.96
#: Of what is quoted, the systems that tell what no whole table does: calls of one process a GPU
#: that make an exchange of messages on NVLink, and messages over InfiniBand. All others are in no
#: fit.
FITTED = ("8 x H20 node (DeepEP issue)", "2 x 1 A40")


class Table(NamedTuple):
    """``rings``: the run was told to use rings alone. ``again``: us of the same sizes in place, NaN
    where none was printed.
    """

    id: str
    system: str
    kind: NcclOperation
    at: NcclContext
    nbytes: NDArray[np.float64]
    us: NDArray[np.float64]
    again: NDArray[np.float64]
    rings: bool = False

    @property
    def family(self) -> tuple[str, bool, str]:
        """The class of systems that a table belongs to: architecture, several nodes, the way."""
        return (
            self.at.architecture,
            self.at.nodes > 1,
            self.at.link if self.at.nodes == 1 else self.at.transport,
        )


def architecture(gpu: str) -> str:
    return (
        "blackwell"
        if gpu.startswith(("B200", "GB200"))
        else "hopper"
        if gpu.startswith("H")
        else "volta"
        if gpu.startswith("V100")
        else "ada"
        if gpu.startswith("RTX 4")
        else "ampere"
    )


def _transport(link: str) -> str:
    return next(
        (word for word, mark in (("efa", "EFA"), ("slingshot", "Slingshot")) if mark in link), "ib"
    )


def _driven(launch: str) -> int:
    return int(launch.split("-g ")[1].rstrip(")")) if "-g " in launch else 1


def reach(row: dict[str, str]) -> float:
    """The share of its links that a GPU's mates are behind. V100s whose links meet in no switch are
    DGX-1's cube mesh where their system has 8; A100 and H100 without one have 4 a node, and all
    tables are of all 4."""
    if (
        not row["gpu"].startswith("V100")
        or "NVSwitch" in row["intra_link"]
        or "NVLink" not in row["intra_link"]
    ):
        return 1.0
    cube = cluster_from({"preset": "dgx1-v100"}).intra
    return cube.reach(int(row["gpus_per_node"]))


def setting(row: dict[str, str]) -> NcclContext:
    """A row's system as NCCL sees it. A boundary that one rank crosses has one card."""
    arch, n, nodes, g = (
        architecture(row["gpu"]),
        int(row["nranks"]),
        int(row["nodes"]),
        int(row["gpus_per_node"]),
    )
    link = row["inter_link"]
    sheet = float(row["intra_bw_GBps"]) * reach(row)
    across = float(row["inter_bw_GBps_per_node"]) if nodes > 1 else 0.0
    cards = (
        1
        if nodes == 1 or g == 1
        else int(link.split("x")[0])
        if link.split("x")[0].isdigit()
        else 8
    )
    nvlink = "NVLink" in row["intra_link"]
    return NcclContext(
        arch,
        n,
        nodes,
        g,
        sheet * (NVLINK[arch] if nvlink else PCIE),
        across * NIC,
        across * NIC / max(cards, g if cards < g else 1),
        sheet,
        across or float("inf"),
        "nvlink" if nvlink else "pcie",
        "without P2P" not in row["notes"],
        "NVSwitch" in row["intra_link"],
        _transport(link),
        _driven(row["launch"]),
    )


def tables(path: Path = HERE / "nccl_tables.csv") -> list[Table]:
    """Every table, in the order of the file."""
    found: dict[str, list[dict[str, str]]] = {}
    in_place: dict[tuple[str, str], float] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if not row["time_us"] or float(row["time_us"]) <= 0 or int(row["bytes"]) <= 0:
                continue
            if row["place"] == "out":
                found.setdefault(row["table_id"], []).append(row)
            else:
                in_place[row["table_id"], row["bytes"]] = float(row["time_us"])
    return [
        _table(name, rows, [in_place.get((name, row["bytes"])) for row in rows])
        for name, rows in found.items()
    ]


def steady(out_of_place: float, in_place: float | None) -> float:
    """The time of a call among many."""
    return out_of_place if in_place is None or out_of_place < SETUP_RATIO * in_place else in_place


def quoted(fitted: bool) -> list[Table]:
    """Parts of tables, as threads quote them: those of `FITTED`, or the others."""
    return [
        table for table in tables(HERE / "nccl_quoted.csv") if (table.system in FITTED) is fitted
    ]


def _table(name: str, rows: list[dict[str, str]], in_place: list[float | None]) -> Table:
    first = rows[0]
    nbytes = np.array([float(row["bytes"]) for row in rows])
    us = np.array(
        [steady(float(row["time_us"]), other) for row, other in zip(rows, in_place, strict=True)]
    )
    again = np.array([np.nan if other is None else other for other in in_place])
    return Table(
        name,
        first["system"],
        KINDS[first["collective"]],
        setting(first),
        nbytes,
        us,
        again,
        "NCCL_ALGO=RING" in first["notes"],
    )
