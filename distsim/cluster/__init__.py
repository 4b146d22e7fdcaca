"""Clusters: see `distsim.cluster.model`."""

from distsim.cluster.model import Cluster, Curve, Device, Link, Network, Nics, cluster_from, preset
from distsim.cluster.presets import PRESETS

__all__ = ["PRESETS", "Cluster", "Curve", "Device", "Link", "Network", "Nics", "cluster_from", "preset"]
