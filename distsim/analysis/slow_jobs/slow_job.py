"""The answer: what a slow job loses, to which rank, stage or phase, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from distsim.analysis.slow_jobs.peer_groups import PeerGroups
from distsim.trace.recordings.event_graph import Flags, Times
from distsim.trace.recordings.recording import Recording

FindingKind = Literal[
    "straggler", "intermittent", "missing rank", "uneven", "long stage", "slow communication"
]
#: The verdict is the kind of the costliest finding, or one of these.
NOT_SURE = "not sure"
NONE = "none"


@dataclass(frozen=True)
class BreakdownRow:
    """A part of the mean step time; all rows add up to it."""

    name: str
    cost_ns: float
    share: float


@dataclass(frozen=True)
class SlowPlace:
    """The pause that makes a rank slow: between two borders of operations.

    ``excess_ns``: how much longer it is than on the peers, on average over ``steps`` steps.
    """

    after: str
    before: str
    excess_ns: float
    peer_ns: float
    steps: int

    @property
    def operation(self) -> str | None:
        """The operation that contains the whole pause, if there is one."""
        name = self.after.removeprefix("begin ")
        is_inside = self.after.startswith("begin ") and self.before == f"end {name}"
        return name if is_inside else None


@dataclass(frozen=True)
class RankCost:
    """What one rank costs the job.

    ``cost_ns``: by how much a mean step would be shorter if its work took as long as on its peers.
    ``slowdown``: the step time if only this rank is as recorded, relative to the ideal step (S_w of
    arXiv 2505.05713). ``excess_ns``: its work beyond that of its peers, by step; empty without
    peers. ``phases``: label -> (mean excess in ns, ratio to the peers).
    """

    rank: int
    cost_ns: float
    share: float
    slowdown: float
    excess_ns: tuple[float, ...]
    phases: Mapping[str, tuple[float, float]]
    peers: tuple[int, ...]


@dataclass(frozen=True)
class SlowFinding:
    """One cause of slowness. ``steps``: in how many of ``counted_steps`` it occurs.

    ``hints`` are sentences that name a likely cause, each with its evidence.
    """

    kind: FindingKind
    ranks: tuple[int, ...]
    cost_ns: float
    share: float
    steps: int
    counted_steps: int
    phase: str = ""
    ratio: float = 0.0
    place: SlowPlace | None = None
    hints: tuple[str, ...] = ()
    slow_steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class WaitForRank:
    """How long others wait for a rank: by waiting rank, the mean time per step."""

    operation: str
    nbytes: int
    waited_ns: Mapping[int, float]


@dataclass(frozen=True)
class WhatIfStep:
    """The mean step of a job with changes, which ``changes`` lists as they were given.

    ``unpredicted``: how many communications keep their recorded time, although a cluster was given.
    """

    step_ns: float
    unpredicted: int = 0
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class SlowJob:
    """The analysis of a recording; times are means over the counted steps.

    ``counted``: the selected steps in which all ranks run their usual operations.
    """

    recording: Recording
    groups: PeerGroups
    selected: Flags
    counted: Flags
    step_ns: float
    ideal_ns: float
    ideal: str
    layers_ns: Mapping[str, float]
    breakdown: tuple[BreakdownRow, ...]
    ranks: tuple[RankCost, ...]
    findings: tuple[SlowFinding, ...]
    verdict: str
    impact: WaitForRank | None
    replay_error_ns: float
    recorded_steps_ns: Times
    ideal_own: Times
    ideal_gap: Times
    #: Why the ranks cannot be compared; then there are no findings.
    not_comparable: str = ""
    what_if: WhatIfStep | None = None

    @property
    def hangs(self) -> bool:
        """Whether the recording contains calls that never ended."""
        return self.recording.unended_calls > 0

    @property
    def slowest(self) -> RankCost | None:
        """The rank with the highest cost."""
        return max(self.ranks, key=lambda rank: rank.cost_ns, default=None)

    @property
    def finding_share(self) -> float:
        """The share of the costliest finding, 0 without any."""
        return max((finding.share for finding in self.findings), default=0.0)

    @property
    def counted_steps(self) -> int:
        return int(self.counted.sum())
