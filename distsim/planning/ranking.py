"""Ranks evaluated layouts: the fastest first, those that may run out of memory last.

`distsim.planning.evaluate_layouts` makes the results that are ranked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distsim.hardware.cluster import Cluster
from distsim.planning.frameworks import FRAMEWORKS
from distsim.planning.layout_result import LayoutResult, is_order_certain
from distsim.planning.layouts import ParallelLayout, PlanRequest, RejectedLayout


class RankedLayout(NamedTuple):
    """A layout in the ranking.

    ``tied``: within the range of costs it may be as fast as the first one. ``front``:
    Pareto-optimal in time, memory and number of GPUs, among the layouts that fit for certain.
    """

    outcome: LayoutResult
    tied: bool
    front: bool


@dataclass(frozen=True)
class LayoutPlan:
    """The layouts of one or several requests: the possible ones, ranked, and the rejected ones.

    ``ranked`` starts with the layouts that fit into memory for certain, the fastest first. Those
    that may run out of memory follow.
    """

    requests: tuple[PlanRequest, ...]
    ranked: tuple[RankedLayout, ...]
    rejected: tuple[RejectedLayout, ...]

    @property
    def best(self) -> LayoutResult | None:
        return self.ranked[0].outcome if self.ranked else None

    def best_for(self, framework: str) -> LayoutResult | None:
        """The fastest layout that a framework can run; None if it can run none of them."""
        supported = FRAMEWORKS[framework]
        for ranked in self.ranked:
            layout = ranked.outcome.layout
            if supported.can_run(layout.schedule, layout.recompute):
                return ranked.outcome
        return None

    @property
    def certain(self) -> tuple[RankedLayout, ...]:
        """The layouts that fit into memory for certain."""
        return tuple(ranked for ranked in self.ranked if not ranked.outcome.fit.may_run_out)

    @property
    def risky(self) -> tuple[RankedLayout, ...]:
        """The layouts that may run out of memory."""
        return tuple(ranked for ranked in self.ranked if ranked.outcome.fit.may_run_out)

    def request_of(self, outcome: LayoutResult) -> PlanRequest:
        """The request of an outcome."""
        return next(
            request
            for request in self.requests
            if (request.gpus, request.cluster.name) == (outcome.layout.gpus, outcome.cluster)
        )


def rank_layouts(outcomes: Sequence[LayoutResult]) -> tuple[RankedLayout, ...]:
    """Layouts that fit for certain before those that may run out of memory; each fastest first.

    Of equally fast ones, the one with less memory comes first.
    """
    order = sorted(outcomes, key=rank_key)
    certain = [result for result in order if not result.fit.may_run_out]
    # By identity: comparing two results compares all their parts.
    front = {id(result) for result in pareto_front(certain)}
    ranked = []
    for position, result in enumerate(order):
        is_tied = position == 0 or not is_order_certain(order[0], result)
        ranked.append(RankedLayout(result, is_tied, id(result) in front))
    return tuple(ranked)


def rank_key(result: LayoutResult) -> tuple[bool, int, int, ParallelLayout, str]:
    """The order of the ranking. The last two only make the order of equal layouts certain."""
    return (
        result.fit.may_run_out,
        result.step_ns,
        result.held_nbytes,
        result.layout,
        result.cluster,
    )


def pareto_front(outcomes: Sequence[LayoutResult]) -> list[LayoutResult]:
    """The layouts that no other beats in time, memory or GPUs without being worse in another.

    Of equal layouts the first one is kept.
    """
    front: list[LayoutResult] = []
    by_time = sorted(
        outcomes, key=lambda result: (result.step_ns, result.held_nbytes, result.layout.gpus)
    )
    for result in by_time:
        # Those in front are at least as fast, so only memory and GPUs remain to be compared.
        is_dominated = any(
            better.held_nbytes <= result.held_nbytes and better.layout.gpus <= result.layout.gpus
            for better in front
        )
        if not is_dominated:
            front.append(result)
    return front


def distinct_clusters(requests: Sequence[PlanRequest]) -> list[Cluster]:
    """The clusters of the requests, each once."""
    return list({request.cluster.name: request.cluster for request in requests}.values())
