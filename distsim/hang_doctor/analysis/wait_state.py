"""What the records say about the state of every rank: its waits, its position, and its progress.

``JobWaitState`` is the basis of the whole analysis. ``wait_graph`` builds it from the evidence; the
other modules of this package only query it. Nothing here decides what caused the hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from distsim.hang_doctor.analysis.stack_position import StackPosition, user_frame
from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.evidence_records import (
    UNKNOWN_NUMBER,
    EvidenceCall,
    ProcessEnd,
    RankEvidence,
    StackFrame,
)


class EvidenceWait(NamedTuple):
    """A rank is in a call.

    ``missing``: members whose records show that they are not in the call. ``silent``: members about
    which no file was given.
    """

    rank: int
    call: EvidenceCall
    missing: tuple[int, ...]
    silent: tuple[int, ...]
    frame: StackFrame | None
    #: The peer, or the members of the group, are unknown.
    open_ended: bool = False
    #: The missing ranks may have made the call: their recordings have lost the calls that would
    #: show it.
    doubtful: bool = False

    @property
    def leads_to_unavailable_rank(self) -> bool:
        """Whether a rank that the call needs is missing or unknown."""
        return bool(self.missing or self.silent) or self.open_ended


@dataclass
class RankWaitState:
    """The last known state of a rank."""

    rank: int
    waits: tuple[EvidenceWait, ...] = ()
    position: StackPosition | None = None
    end: ProcessEnd | None = None

    @property
    def frame(self) -> StackFrame | None:
        """The line of the user's code that the rank is at."""
        if self.position is not None and self.position.frame is not None:
            return self.position.frame
        return next((wait.frame for wait in self.waits if wait.frame is not None), None)

    @property
    def reported_frame(self) -> StackFrame | None:
        """The line that a report shows for the rank.

        For an error this is the line that raised it, even if the process is elsewhere by now.
        """
        frame_of_error = user_frame(self.end.frames) if self.end is not None else None
        return frame_of_error or self.frame


class RankProgress:
    """The progress of a rank, indexed for fast queries (a job may have thousands of ranks)."""

    def __init__(self, records: RankEvidence) -> None:
        #: The number of the last collective that the rank has made, by group.
        self.last_call: dict[str, int] = {}
        #: The number of the last collective that the rank has finished, by group.
        self.last_finished: dict[str, int] = {}
        self.collectives: dict[tuple[str, int], EvidenceCall] = {}
        self.waiting = [call for call in records.calls if call.state == "waiting"]
        # A complete recording without calls on a group means that there were none.
        is_complete = records.recorded and not records.lost_oldest_calls
        #: The last call on a group that is not mentioned.
        self.last_call_if_absent = 0 if is_complete else None

        for group, status in records.status.items():
            if status.enqueued >= 0:
                self.last_call[group] = status.enqueued
            self.last_finished[group] = status.completed
        for call in records.calls:
            if not call.p2p:
                self._add_collective(call)

    def _add_collective(self, call: EvidenceCall) -> None:
        group, number = call.group, call.number
        self.collectives.setdefault((group, number), call)
        self.last_call[group] = max(self.last_call.get(group, number), number)
        if call.state == "done":
            finished = self.last_finished.get(group, UNKNOWN_NUMBER)
            self.last_finished[group] = max(finished, number)

    def is_queued(self, call: EvidenceCall) -> bool:
        """Whether the device is at an earlier call, after which this one runs."""
        return any(
            earlier.order < call.order and _run_in_order(earlier, call) for earlier in self.waiting
        )


def _run_in_order(one: EvidenceCall, other: EvidenceCall) -> bool:
    """Whether two calls of a rank use the same NCCL communicator, which runs one call at a time.

    Collectives and batches of messages use the communicator of the group. Single messages use one
    communicator for each pair of ranks.
    """
    one_is_single = one.p2p and not one.batched
    other_is_single = other.p2p and not other.batched
    if one.group != other.group or one_is_single != other_is_single:
        return False
    if one_is_single:
        return one.peer == other.peer
    # Messages of one batch have the same number and run together.
    return (one.p2p, one.number) != (other.p2p, other.number)


@dataclass
class JobWaitState:
    """The state of all ranks that the evidence mentions.

    ``ranks`` has the same keys as ``evidence.ranks``, in ascending order.
    """

    evidence: Evidence
    ranks: dict[int, RankWaitState] = field(default_factory=dict)
    #: Ends that came after the hang. They are no part of the state of a rank.
    later_ends: dict[int, ProcessEnd] = field(default_factory=dict)
    _progress: dict[int, RankProgress] = field(default_factory=dict)
    _members: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def all_waits(self) -> Iterator[EvidenceWait]:
        """The waits of all ranks, in order of ranks."""
        for state in self.ranks.values():
            yield from state.waits

    def progress_of(self, rank: int) -> RankProgress:
        """The progress of a rank that the evidence mentions."""
        if rank not in self._progress:
            self._progress[rank] = RankProgress(self.evidence.ranks[rank])
        return self._progress[rank]

    def last_call(self, rank: int, group: str) -> int | None:
        """The number of the last collective that a rank has made on a group.

        0 if a complete recording has none, None if the records do not say.
        """
        if rank not in self.evidence.ranks:
            return None
        progress = self.progress_of(rank)
        return progress.last_call.get(group, progress.last_call_if_absent)

    def is_before(self, rank: int, group: str, number: int) -> bool:
        """Whether the records show that a rank has not yet made this call on a group."""
        last = self.last_call(rank, group)
        return last is not None and last < number

    def last_finished(self, rank: int, group: str) -> int:
        """The number of the last collective that a rank is known to have finished on a group."""
        if rank not in self.evidence.ranks:
            return UNKNOWN_NUMBER
        return self.progress_of(rank).last_finished.get(group, UNKNOWN_NUMBER)

    def members_of(self, group: str) -> tuple[int, ...]:
        """The members of a group, or, if no file lists them, the ranks seen using it."""
        known = self.evidence.groups.get(group)
        if known is not None and known.members is not None:
            return known.members
        if group not in self._members:
            users = [rank for rank, records in self.evidence.ranks.items() if _uses(records, group)]
            self._members[group] = tuple(sorted(users))
        return self._members[group]


def _uses(records: RankEvidence, group: str) -> bool:
    return group in records.status or any(call.group == group for call in records.calls)
