"""What each rank costs: one what-if per rank, all in one pass.

The cost of a rank is the step time minus the step time with the rank's work replaced by that of its
peers, both with steady work. The slowdown S_w is the opposite what-if: everything is ideal except
for the rank. Costs of two ranks do not add up, because without one straggler the next one shows.
"""

from __future__ import annotations

import numpy as np

from distsim.analysis.slow_jobs.peer_groups import PeerGroups
from distsim.analysis.slow_jobs.slow_job import RankCost
from distsim.analysis.slow_jobs.step_work import peer_work, work_by_label
from distsim.trace.recordings.event_graph import Flags, Times


class RankWhatIfs:
    """The own times from which the what-ifs are made."""

    def __init__(
        self, groups: PeerGroups, gap: Times, own: Times, steady: Times, even: Times, ideal: Times
    ) -> None:
        self.groups = groups
        self.gap = gap
        self.own = own
        self.steady = steady
        self.even = even
        self.ideal = ideal

    def removal_costs(self, counted: Flags) -> Times:
        """By rank, how much shorter a mean step is if the rank works like its peers."""
        columns = [self._mixed(self.steady, self.even, rank) for rank in self._positions()]
        times = self._mean_steps([self.steady, *columns], counted)
        return np.asarray(np.maximum(times[0] - times[1:], 0))

    def slowdowns(self, counted: Flags) -> Times:
        """By rank, the slowdown S_w that the rank alone causes."""
        columns = [self._mixed(self.ideal, self.own, rank) for rank in self._positions()]
        times = self._mean_steps([self.ideal, *columns], counted)
        return np.asarray(times[1:] / max(times[0], 1.0))

    def cost_of(self, ranks: list[int], counted: Flags) -> float:
        """The cost of several ranks together."""
        positions = [self.groups.ranks.index(rank) for rank in ranks]
        rows = np.isin(self.groups.rank_index, positions)
        mixed = np.where(rows, self.even, self.steady)
        times = self._mean_steps([self.steady, mixed], counted)
        return float(times[0] - times[1])

    def _positions(self) -> range:
        return range(len(self.groups.ranks))

    def _mixed(self, base: Times, other: Times, position: int) -> Times:
        return np.where(self.groups.rank_index == position, other, base)

    def _mean_steps(self, columns: list[Times], counted: Flags) -> Times:
        times = self.groups.graph.step_times(np.stack(columns, axis=1), self.gap)
        return np.asarray(times[counted].mean(axis=0))


def rank_costs(what_ifs: RankWhatIfs, counted: Flags, step_ns: float) -> tuple[RankCost, ...]:
    """The costs of all ranks, in the order of the ranks."""
    groups = what_ifs.groups
    costs, slowdowns = what_ifs.removal_costs(counted), what_ifs.slowdowns(counted)
    work = work_by_label(groups, what_ifs.own)[:, counted]
    totals = work.sum(axis=2)
    excess = totals - peer_work(groups, totals)
    by_label = work.mean(axis=1)
    result = []
    for position, rank in enumerate(groups.ranks):
        peers = groups.peers_of(position)
        result.append(
            RankCost(
                rank,
                float(costs[position]),
                float(costs[position] / step_ns),
                float(slowdowns[position]),
                tuple(excess[position].tolist()) if peers else (),
                phase_excess(groups, position, by_label),
                tuple(groups.ranks[peer] for peer in peers),
            )
        )
    return tuple(result)


def phase_excess(groups: PeerGroups, position: int, work: Times) -> dict[str, tuple[float, float]]:
    """By label, the excess of a rank over its peers and the ratio; ``work`` by rank and label."""
    if not groups.peers_of(position):
        return {}
    mine, peers = work[position], peer_work(groups, work)[position]
    return {
        label: (float(mine[i] - peers[i]), float(mine[i] / max(peers[i], 1.0)))
        for i, label in enumerate(groups.graph.labels)
        if mine[i] > 0
    }
