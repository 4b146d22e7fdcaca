"""The predicted time of each communication on a cluster, as a reference for recorded ones.

Each rank is placed on a node of its own, because recordings of other tools do not contain the
nodes. So a prediction is rather too long than too short, and a slow transfer is really slow. Only
operations whose names and sizes are those of distsim have a prediction.
"""

from __future__ import annotations

import numpy as np

from distsim.analysis.slow_jobs.peer_groups import PeerGroups
from distsim.hardware.cluster import Cluster
from distsim.hardware.cost import CostModel
from distsim.operations.registry import OPERATIONS
from distsim.recordings.event_graph import Times, sliced_lists
from distsim.recordings.recording import Recording

_MESSAGES = ("send", "recv", "isend", "irecv")
#: Messages between two ranks and collectives of a kind with equal sizes cost the same.
_PriceKey = tuple[str, int, int]


def predicted_transfers(recording: Recording, groups: PeerGroups, cluster: Cluster) -> Times:
    """By row, the time of its communication; infinite if it is not predicted."""
    graph = groups.graph
    columns = graph.columns
    model = CostModel(cluster, world_size=recording.world_size, local_size=1)
    result = np.full(len(graph), np.inf)
    in_meeting = np.flatnonzero(~graph.is_work)
    members = sliced_lists(columns.meeting[in_meeting], in_meeting, graph.meeting_count)
    known: dict[_PriceKey, float] = {}
    for meeting in range(graph.meeting_count):
        rows = members.items[members.first[meeting] : members.first[meeting + 1]]
        operation = graph.labels[int(columns.label[rows[0]])]
        nbytes = int(columns.nbytes[rows].max())
        partners = recording.partners.get(meeting)
        size = len(rows) if partners is None else len(partners.ranks)
        key = (operation, size, nbytes)
        if key not in known:
            known[key] = _price_ns(model, *key)
        result[rows] = known[key]
    return result


def _price_ns(model: CostModel, operation: str, ranks: int, nbytes: int) -> float:
    if not nbytes or ranks < 2 or ranks > model.world_size:
        return float("inf")
    if operation in _MESSAGES:
        return float(model.p2p_ns(0, 1, nbytes))
    kind = OPERATIONS.get(operation)
    if kind is None or kind.kind != "collective":
        return float("inf")
    root = 0 if kind.root_field is not None else None
    return float(model.collective_ns(kind, tuple(range(ranks)), nbytes, root))
