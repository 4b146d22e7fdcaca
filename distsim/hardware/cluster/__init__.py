"""Descriptions of clusters; see `distsim.hardware.cluster.description`."""

from distsim.hardware.cluster.description import (
    Cluster,
    ComputeDevice,
    IntraNodeLink,
    MeasuredCurve,
    Network,
    NetworkCards,
    cluster_from,
    preset,
)
from distsim.hardware.cluster.presets import PRESETS

__all__ = [
    "PRESETS",
    "Cluster",
    "MeasuredCurve",
    "ComputeDevice",
    "IntraNodeLink",
    "Network",
    "NetworkCards",
    "cluster_from",
    "preset",
]
