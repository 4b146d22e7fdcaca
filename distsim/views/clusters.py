"""Clusters as text: a table of several, or one whole as YAML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distsim.cluster import Cluster
from distsim.units import show_ns
from distsim.views.tables import table


def cluster_table(clusters: Sequence[Cluster]) -> str:
    """One line each: the device, the way inside a node, the way between nodes (all cards of a node together)."""
    rows = [
        (
            c.name,
            c.device.name,
            f"{c.intra.kind} {c.intra.bytes_per_ns:g} GB/s",
            f"{c.nics.count} x {c.nics.bytes_per_ns:g} GB/s",
            show_ns(c.inter_latency_ns),
        )
        for c in clusters
    ]
    return "\n".join(
        table(("cluster", "device", "inside a node", "between nodes", "latency"), rows, left=(0, 1, 2, 3), indent="")
    )


def cluster_yaml(cluster: Cluster) -> str:
    """The cluster as a scenario may have it under ``cluster:``, in people's units."""
    return "\n".join(_lines(cluster.to_mapping(), ""))


def _lines(mapping: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Block-style YAML of nested mappings of plain values. A JSON scalar is a YAML scalar, so texts are quoted as in JSON."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}"
