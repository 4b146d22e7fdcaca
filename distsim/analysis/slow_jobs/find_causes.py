"""From costs to findings, with thresholds that noise does not reach.

A **straggler** costs more than 3 % of the step. It works longer than its peers in every step (in 90
% of 20 steps and more). Its median excess stands out from its own variation (3 × 1.48 MAD /
√steps), and is three times the usual excess of the other ranks. With one or two steps it must cost
more than 15 %.

A rank is **intermittent** if its excess exceeds 15 % of a step in a quarter of at least ten steps.
A pause of 10 % of a step that repeats at one place in as many steps counts as well.

A rank that costs more than 1 % and misses a condition is "not sure".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from distsim.analysis.slow_jobs.activity_hints import activity_hint, uneven_activity_hint
from distsim.analysis.slow_jobs.cause_hints import (
    length_correlation,
    slow_phase,
    straggler_hints,
)
from distsim.analysis.slow_jobs.peer_groups import PeerGroups
from distsim.analysis.slow_jobs.rank_costs import RankWhatIfs, phase_excess
from distsim.analysis.slow_jobs.slow_job import BreakdownRow, FindingKind, RankCost, SlowFinding
from distsim.analysis.slow_jobs.slow_places import find_slow_place, repeated_pause_steps
from distsim.analysis.slow_jobs.step_work import excess_over_others, work_by_label
from distsim.trace.recordings.event_graph import Flags, Times
from distsim.trace.recordings.recording import Recording

LEAST_SHARE = 0.03
NOT_SURE_SHARE = 0.01
_MANY_STEPS = 20
_SHARE_OF_MANY_STEPS = 0.9
_FEWEST_STEADY_STEPS = 3
_INTERMITTENT_STEPS = 10
_INTERMITTENT_SHARE = 0.25
_INTERMITTENT_EXCESS = 0.15
#: Noise does not repeat a pause of this share of a step at one place.
_REPEATED_PAUSE = 0.10
_OF_USUAL_EXCESS = 3.0
_CORRELATED_RANKS = 0.75


def is_steady_excess(excess: Times) -> bool:
    """Whether an excess, by step, is positive and stands out from its own variation."""
    needed = _SHARE_OF_MANY_STEPS if len(excess) >= _MANY_STEPS else 1.0
    if not len(excess) or (excess > 0).mean() < needed:
        return False
    median = float(np.median(excess))
    deviation = float(np.median(np.abs(excess - median)))
    return median > 3 * 1.48 * deviation / math.sqrt(len(excess))


def slow_steps(rank: RankCost, ranks: tuple[RankCost, ...], step_ns: float) -> list[int]:
    """The counted steps in which a rank is far slower than its peers."""
    usual = _usual_excess(rank, ranks)
    limit = max(_INTERMITTENT_EXCESS * step_ns, 3 * usual)
    return [i for i, excess in enumerate(rank.excess_ns) if excess > limit]


def _usual_excess(rank: RankCost, ranks: tuple[RankCost, ...]) -> float:
    """The median of the positive excess of the other ranks, over all steps."""
    others = [other.excess_ns for other in ranks if other.rank != rank.rank]
    positive = [value for excess in others for value in excess if value > 0]
    return float(np.median(positive)) if positive else 0.0


@dataclass(frozen=True, eq=False)
class CauseFinder:
    """Applies the thresholds to one recording. ``counted``: the numbers of the counted steps."""

    recording: Recording
    what_ifs: RankWhatIfs
    ranks: tuple[RankCost, ...]
    rows: tuple[BreakdownRow, ...]
    counted: list[int]
    step_ns: float

    @property
    def groups(self) -> PeerGroups:
        return self.what_ifs.groups

    def findings(self) -> list[SlowFinding]:
        """All findings about ranks and work, the costliest first."""
        found = [self._slow_rank(rank) for rank in self.ranks]
        found += [self._uneven_work(), self._long_stage()]
        present = [finding for finding in found if finding is not None]
        return sorted(present, key=lambda finding: -finding.cost_ns)

    def is_unsure(self) -> bool:
        """Whether some rank costs more than noise does, without being a straggler for sure."""
        return any(rank.share > NOT_SURE_SHARE and rank.excess_ns for rank in self.ranks)

    def _is_straggler(self, rank: RankCost) -> bool:
        if rank.share <= LEAST_SHARE or not rank.excess_ns:
            return False
        excess = np.array(rank.excess_ns)
        # One or two steps show no variation, so they need the excess of an intermittent rank.
        if len(excess) < _FEWEST_STEADY_STEPS and rank.share <= _INTERMITTENT_EXCESS:
            return False
        usual = _usual_excess(rank, self.ranks)
        return is_steady_excess(excess) and float(np.median(excess)) > _OF_USUAL_EXCESS * usual

    def _is_intermittent(self, rank: RankCost) -> bool:
        count = len(rank.excess_ns)
        if count < _INTERMITTENT_STEPS or rank.share <= NOT_SURE_SHARE:
            return False
        return len(slow_steps(rank, self.ranks, self.step_ns)) >= _INTERMITTENT_SHARE * count

    def _slow_rank(self, rank: RankCost) -> SlowFinding | None:
        if self._is_straggler(rank):
            positive = [i for i, excess in enumerate(rank.excess_ns) if excess > 0]
            return self._slow_rank_finding("straggler", rank, positive)
        if self._is_intermittent(rank):
            slow = slow_steps(rank, self.ranks, self.step_ns)
            finding = self._slow_rank_finding("intermittent", rank, slow)
            if finding.place is not None or finding.phase == "data" or not self._has_places():
                return finding
        if len(self.counted) >= _INTERMITTENT_STEPS and rank.share > NOT_SURE_SHARE:
            limit = _REPEATED_PAUSE * self.step_ns
            slow = repeated_pause_steps(self.recording, rank.rank, rank.peers, self.counted, limit)
            if len(slow) >= _INTERMITTENT_SHARE * len(self.counted):
                return self._slow_rank_finding("intermittent", rank, slow)
        return None

    def _slow_rank_finding(
        self, kind: FindingKind, rank: RankCost, steps: list[int]
    ) -> SlowFinding:
        excess = float(np.mean([rank.excess_ns[i] for i in steps]))
        numbers = [self.counted[i] for i in steps]
        place = find_slow_place(self.recording, rank.rank, rank.peers, numbers, excess)
        rank = replace(rank, phases=self._phases_in(rank, steps))
        phase = slow_phase(rank)
        names = tuple(self.groups.graph.steps[i] for i in numbers)
        activity = activity_hint(self.recording, rank.rank, rank.peers, numbers, excess)
        return SlowFinding(
            kind=kind,
            ranks=(rank.rank,),
            cost_ns=rank.cost_ns,
            share=rank.share,
            steps=len(steps),
            counted_steps=len(rank.excess_ns),
            phase=phase,
            ratio=rank.phases[phase][1],
            place=place,
            hints=(activity,) if activity else straggler_hints(rank, place),
            slow_steps=names if kind == "intermittent" else (),
        )

    def _has_places(self) -> bool:
        """Whether the recording shows operations. Then slowness without a place may be noise."""
        return bool(self.recording.operations)

    def _phases_in(self, rank: RankCost, steps: list[int]) -> Mapping[str, tuple[float, float]]:
        """The phases of a rank compared with its peers, in some of the counted steps."""
        work = work_by_label(self.groups, self.what_ifs.own)[:, self.counted][:, steps]
        return phase_excess(self.groups, self.groups.ranks.index(rank.rank), work.mean(axis=1))

    def _row(self, name: str) -> BreakdownRow:
        return next(row for row in self.rows if row.name == name)

    def _uneven_work(self) -> SlowFinding | None:
        """Garbage collection, or micro-batches of unequal length.

        Without such evidence, uneven work may be noise.
        """
        row = self._row("uneven work")
        if row.share <= LEAST_SHARE:
            return None
        ranks = self.groups.ranks
        hint = uneven_activity_hint(self.recording, ranks, self.counted, row.cost_ns)
        if hint:
            return self._uneven_finding(row, hint)
        lengths = length_correlation(self.groups, self.what_ifs.own)
        if lengths is None or lengths.share < _CORRELATED_RANKS:
            return None
        hint = (
            f"Forward time varies by {lengths.variation:.0%} between micro-batches, and backward "
            f"time varies with it (r = {lengths.median:.2f}): sequences of unequal length. Sort or "
            "pack them by attention cost."
        )
        return self._uneven_finding(row, hint)

    def _uneven_finding(self, row: BreakdownRow, hint: str) -> SlowFinding:
        steps = len(self.counted)
        ranks = tuple(self.groups.ranks)
        return SlowFinding(
            "uneven", ranks, row.cost_ns, row.share, steps, steps, "forward", 0.0, None, (hint,)
        )

    def _long_stage(self) -> SlowFinding | None:
        """A stage that works longer than the others in every step."""
        row = self._row("unequal stages")
        if row.share <= LEAST_SHARE:
            return None
        work = work_by_label(self.groups, self.what_ifs.even)[:, self.counted]
        common: Flags = np.asarray((work > 0).all(axis=(0, 1)))
        totals = work[:, :, common].sum(axis=2)
        roles = [
            [int(i) for i in np.flatnonzero(self.groups.role_of == role)]
            for role in np.unique(self.groups.role_of)
        ]
        longest = max(roles, key=lambda members: float(totals[members].mean()))
        recorded = work_by_label(self.groups, self.what_ifs.own)[:, self.counted]
        excess = excess_over_others(recorded[:, :, common].sum(axis=2), longest)
        if not is_steady_excess(excess):
            return None
        return self._long_stage_finding(row, longest, work.mean(axis=1), common)

    def _long_stage_finding(
        self, row: BreakdownRow, members: list[int], work: Times, common: Flags
    ) -> SlowFinding:
        others = [i for i in range(len(work)) if i not in members]
        ratios = work[members].mean(axis=0) / np.maximum(work[others].mean(axis=0), 1.0)
        excess = (work[members].mean(axis=0) - work[others].mean(axis=0)) * common
        label = int(excess.argmax())
        ranks = tuple(self.groups.ranks[i] for i in members)
        hints: tuple[str, ...] = ()
        if self._is_last_stage(ranks):
            hints = (
                "It is the last stage, where the loss and the vocabulary layer run: move "
                "transformer layers to earlier stages.",
            )
        steps = len(self.counted)
        name = self.groups.graph.labels[label]
        return SlowFinding(
            "long stage",
            ranks,
            row.cost_ns,
            row.share,
            steps,
            steps,
            name,
            float(ratios[label]),
            None,
            hints,
        )

    def _is_last_stage(self, ranks: tuple[int, ...]) -> bool:
        stages = self.recording.stages
        if stages:
            return stages.get(ranks[0]) == max(stages.values())
        return max(ranks) == max(self.groups.ranks)
