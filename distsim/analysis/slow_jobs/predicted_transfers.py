"""The predicted time of each communication on a cluster, as a reference for recorded ones.

Recordings of other tools do not contain the nodes. A reference for recorded times places each rank
on a node of its own. So the prediction is rather too long than too short, and a slow transfer is
really slow. For a what-if, the ranks fill the nodes of the cluster in order.

Operations that distsim does not know, and those without a size, have no prediction. Transfers that
overlap do not share their links here.
"""

from __future__ import annotations

import numpy as np

from distsim.analysis.slow_jobs.peer_groups import PeerGroups
from distsim.hardware.cluster import Cluster
from distsim.hardware.cluster.presets import gpus_per_machine
from distsim.hardware.cost import CostModel
from distsim.operations.registry import OPERATIONS
from distsim.trace.recordings.event_graph import Times, sliced_lists
from distsim.trace.recordings.recording import Recording

_MESSAGES = ("send", "recv", "isend", "irecv")
#: Names of collectives in profiles of NCCL -> the operation.
_NCCL_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "reducescatter": "reduce_scatter_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all_single",
}
#: Labels of profiles whose size is that of one rank's part.
_SIZED_BY_PART = frozenset(
    {"all_gather", "gather", "scatter", "all_to_all", "allgather", "_allgather_base"}
)
#: (operation, members, bytes): equal ones cost the same.
_CostKey = tuple[str, tuple[int, ...], int]


def predicted_transfers(
    recording: Recording, groups: PeerGroups, cluster: Cluster, *, fills_nodes: bool = False
) -> Times:
    """By row, the time of its communication; infinite if it is not predicted.

    ``fills_nodes``: place as many ranks on each node as the cluster's machines have GPUs.
    """
    graph = groups.graph
    columns = graph.columns
    node_size = gpus_per_machine(cluster.name) if fills_nodes else 1
    model = CostModel(cluster, recording.world_size, min(node_size, recording.world_size))
    result = np.full(len(graph), np.inf)
    in_meeting = np.flatnonzero(~graph.is_work)
    members = sliced_lists(columns.meeting[in_meeting], in_meeting, graph.meeting_count)
    known: dict[_CostKey, float] = {}
    for meeting in range(graph.meeting_count):
        rows = members.items[members.first[meeting] : members.first[meeting + 1]]
        label = graph.labels[int(columns.label[rows[0]])]
        operation = _NCCL_OPERATIONS.get(label, label)
        partners = recording.partners.get(meeting)
        ranks = columns.rank[rows].tolist() if partners is None else partners.ranks
        group = tuple(sorted({int(rank) for rank in ranks}))
        nbytes = int(columns.nbytes[rows].max())
        if recording.is_profile and label in _SIZED_BY_PART:
            nbytes *= len(group)
        key = (operation, group if fills_nodes else tuple(range(len(group))), nbytes)
        if key not in known:
            known[key] = _price_ns(model, *key)
        result[rows] = known[key]
    return result


def _price_ns(model: CostModel, operation: str, ranks: tuple[int, ...], nbytes: int) -> float:
    if not nbytes or len(ranks) < 2 or max(ranks) >= model.world_size:
        return float("inf")
    if operation in _MESSAGES:
        return float(model.p2p_ns(ranks[0], ranks[1], nbytes))
    kind = OPERATIONS.get(operation)
    if kind is None or kind.kind != "collective":
        return float("inf")
    root = ranks[0] if kind.root_field is not None else None
    return float(model.collective_ns(kind, ranks, nbytes, root))
