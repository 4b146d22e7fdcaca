"""What-ifs on a recorded job: a rank like its peers, other compute times, another cluster.

Work and communication change independently: work keeps its recorded time unless a change names its
rank, and communication unless a cluster is given. So recorded compute can be combined with the
communication of another cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from distsim.analysis.slow_jobs.ideal_times import even_times, steady_times
from distsim.analysis.slow_jobs.peer_groups import PeerGroups
from distsim.analysis.slow_jobs.predicted_transfers import predicted_transfers
from distsim.analysis.slow_jobs.slow_job import SlowJob, WhatIfStep
from distsim.common.errors import UsageError
from distsim.hardware.cluster import Cluster
from distsim.trace.recordings.event_graph import Flags, Times


@dataclass(frozen=True)
class JobChanges:
    """``like_peers``: ranks whose work takes as long as that of their peers.

    ``factors``: rank -> factor on the time of its work. ``cluster``: name of the hardware model
    that predicts communication, empty to keep it as recorded.
    """

    like_peers: tuple[int, ...] = ()
    factors: Mapping[int, float] = field(default_factory=dict)
    cluster: str = ""

    def __bool__(self) -> bool:
        return bool(self.like_peers or self.factors or self.cluster)


def changed_work(
    groups: PeerGroups, own: Times, changes: JobChanges, counted_as_work: Flags | None = None
) -> Times:
    """The own times with the changes of work.

    ``counted_as_work``: the rows to which factors apply, by default all work. Raises UsageError for
    a rank that is not in the recording or has no peers.
    """
    _check_ranks(groups, changes)
    graph = groups.graph
    result = own.copy()
    ranks = graph.columns.rank
    if changes.like_peers:
        even = even_times(groups, steady_times(groups, own))
        rows = graph.is_work & groups.usual_rows & np.isin(ranks, changes.like_peers)
        result[rows] = even[rows]
    is_work = graph.is_work if counted_as_work is None else counted_as_work
    for rank, factor in changes.factors.items():
        result[is_work & (ranks == rank)] *= factor
    return result


def _check_ranks(groups: PeerGroups, changes: JobChanges) -> None:
    for rank in (*changes.like_peers, *changes.factors):
        if rank not in groups.ranks:
            known = f"0-{len(groups.ranks) - 1}"
            if groups.ranks != list(range(len(groups.ranks))):
                known = ", ".join(map(str, groups.ranks[:8]))
            raise UsageError(
                f"what-if: rank {rank} is not in this recording", f"it has ranks {known}"
            )
    for rank in changes.like_peers:
        if not groups.peers_of(groups.ranks.index(rank)):
            raise UsageError(
                f"what-if: no other rank does the same work as rank {rank}",
                f"scale its work instead: compute@{rank}=0.8",
            )


def what_if_step(job: SlowJob, changes: JobChanges, cluster: Cluster | None) -> WhatIfStep:
    """The mean step with these changes.

    As for the costs of ranks, work is steady in both runs that are compared. So late starts and
    uneven work stay in the result.
    """
    groups, graph = job.groups, job.groups.graph
    steady = steady_times(groups, graph.own)
    changed = changed_work(groups, steady, changes)
    unpredicted = 0
    if cluster is not None:
        predicted = predicted_transfers(job.recording, groups, cluster, fills_nodes=True)
        is_known = np.isfinite(predicted) & ~graph.is_work
        changed = np.where(is_known, predicted, changed)
        unpredicted = int((~is_known & ~graph.is_work).sum())
    times = graph.step_times(np.stack([steady, changed], axis=1), job.ideal_gap)
    before, after = times[job.counted].mean(axis=0)
    return WhatIfStep(float(job.step_ns - before + after), unpredicted)
