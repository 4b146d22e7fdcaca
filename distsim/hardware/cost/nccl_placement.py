"""Translates a cluster and a group on it into the inputs of NCCL's choice (`NcclContext`)."""

from __future__ import annotations

from typing import get_args

from distsim.hardware.cluster.description import Cluster
from distsim.hardware.cost.link_loads import CostedOperation, GroupPlacement, implemented_collective
from distsim.hardware.cost.nccl_context import NcclContext, NcclOperation


def merge_nvlink_domains(cluster: Cluster, machine_size: int) -> tuple[Cluster, int]:
    """(cluster, ranks per node), with machines that NVLink connects merged into one node (NVL72).

    The merged node has the network cards of all its machines.
    """
    machines = (cluster.intra.domain or 0) // machine_size
    if machines < 2:
        return cluster, machine_size
    nics = cluster.nics.model_copy(update={"count": cluster.nics.count * machines})
    return cluster.model_copy(update={"nics": nics}), machines * machine_size


def nccl_operation_of(row: type[CostedOperation]) -> NcclOperation | None:
    """The operation that NCCL runs for a row of the operation table, or None.

    A barrier is an all_reduce of one element (torch's ProcessGroupNCCL).
    """
    name = implemented_collective(row)
    if name == "barrier":
        return "all_reduce"
    return name if name in get_args(NcclOperation) else None  # type: ignore[return-value]


def context_of_message(cluster: Cluster, place: GroupPlacement) -> NcclContext:
    """The context of a message, sent by all GPUs of a process at once (as sendrecv_perf does)."""
    return context_of_group(cluster, place)._replace(driven=cluster.gpus_per_process)


def context_of_group(cluster: Cluster, place: GroupPlacement) -> NcclContext:
    """The context of a group, cached in its placement.

    A node contributes as many network cards as its ranks can use, one per rank. Two ranks that
    share a card share its bandwidth.
    """
    known = place.setting
    if not isinstance(known, NcclContext):
        known = place.setting = _new_context(cluster, place)
    return known


def _new_context(cluster: Cluster, place: GroupPlacement) -> NcclContext:
    intra, nics, network = cluster.intra, cluster.nics, cluster.network
    cards = min(nics.count, place.least)
    reach = intra.reach(place.most)
    architecture = cluster.device.architecture or "ampere"
    inter_gbs, nic_gbs, sheet_inter = 0.0, 0.0, float("inf")
    if place.nodes > 1:
        attained = cluster.rank_inter_bytes_per_ns / place.worst_inter
        inter_gbs = attained * cards
        nic_gbs = attained * min(1.0, nics.count / place.most)
        sheet_inter = nics.bytes_per_ns / network.single_card_divisor / place.worst_inter * cards
    return NcclContext(
        architecture=architecture,
        n=place.n,
        nodes=place.nodes,
        per_node=place.most,
        intra_gbs=reach * intra.attained_bytes_per_ns / place.worst_intra,
        inter_gbs=inter_gbs,
        nic_gbs=nic_gbs,
        sheet_intra=reach * intra.bytes_per_ns / place.worst_intra,
        sheet_inter=sheet_inter,
        intra="pcie" if intra.kind == "pcie" else "nvlink",
        peer_access=intra.peer_access,
        switch=intra.switch,
        transport=network.transport,
        driven=min(cluster.gpus_per_process, place.most),
        cpu="amd" if cluster.host == "amd" else "intel",
        reducing=network.reduces,
    )
