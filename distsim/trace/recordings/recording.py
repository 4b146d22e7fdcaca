"""What a reader returns: an event graph, and how far its times can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from distsim.trace.recordings.event_graph import EventGraph, Numbers, Times

#: Activities of a rank's host that explain why it is slow.
GARBAGE_COLLECTION = "garbage collection"
CHECKPOINT = "checkpoint"
DATA_LOADING = "data loading"


@dataclass(frozen=True)
class ClockAlignment:
    """How the clocks of the ranks were brought together.

    ``offsets_ns``: what was added to the times of each rank. ``worst_ns``: the largest time by
    which a communication seems to end on one rank before another rank started it.
    """

    offsets_ns: Mapping[int, float] = field(default_factory=dict)
    worst_ns: float = 0.0


@dataclass(frozen=True, eq=False)
class StepOperations:
    """The operations that the host of one rank ran in one step, in the order of their borders.

    A border is the begin or the end of an operation; ``names`` are texts such as ``begin
    aten::relu``. The pause between two borders may contain work that no profiler records.
    ``waited`` is the time before each border that the host spent waiting for communication.
    """

    names: tuple[str, ...]
    times: Times
    waited: Times


@dataclass(frozen=True)
class MeetingPartners:
    """Who takes part in a communication: the group, or sender and receiver of a message.

    ``tag``: of a message. ``root``: the rank of a rooted collective.
    """

    ranks: tuple[int, ...]
    tag: int | None = None
    root: int | None = None


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorded job.

    ``missing_ranks``: ranks of the job without a file. ``missing_members``: number of a meeting ->
    those of them that took part. ``stages``: rank -> pipeline stage, where
    known. ``unexplained_gap_ns``: rank -> time on its streams with no known cause for starting
    late. ``unended_calls``: calls that never ended, not in the graph. ``operations``: (rank,
    step index) -> the operations of the host, where known. ``partners``: number of a meeting ->
    its members, where known. ``activities``: (rank, step index) -> activity -> its time in ns,
    where recorded.
    """

    graph: EventGraph
    format: str
    files: tuple[str, ...]
    world_size: int
    clocks: ClockAlignment = field(default_factory=ClockAlignment)
    missing_ranks: tuple[int, ...] = ()
    missing_members: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    stages: Mapping[int, int] = field(default_factory=dict)
    inferred_waits: int = 0
    unexplained_gap_ns: Mapping[int, float] = field(default_factory=dict)
    operations: Mapping[tuple[int, int], StepOperations] = field(default_factory=dict)
    partners: Mapping[int, MeetingPartners] = field(default_factory=dict)
    activities: Mapping[tuple[int, int], Mapping[str, float]] = field(default_factory=dict)
    operation_count: int = 0
    unended_calls: int = 0
    is_profile: bool = False
    notes: tuple[str, ...] = ()


def places_in_step(rank: Numbers, step: Numbers) -> Numbers:
    """The number of each row among the rows of its rank and step, in the order of the rows."""
    order = np.lexsort((np.arange(len(rank)), step, rank))
    changes = np.ones(len(rank), dtype=bool)
    same_rank = rank[order][1:] == rank[order][:-1]
    changes[1:] = ~(same_rank & (step[order][1:] == step[order][:-1]))
    first = np.flatnonzero(changes)
    lengths = np.diff(np.append(first, len(rank)))
    places = np.empty(len(rank), dtype=np.int64)
    places[order] = np.arange(len(rank)) - np.repeat(first, lengths)
    return places
