"""Findings on messages that never meet a counterpart (DS304).

The counterpart may not exist in the program, an any-source receive may have taken the message, or
the peer may have dropped the request of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distsim.backends import BACKEND_PROFILES
from distsim.checker.detectors.request_leaks import is_request_lost
from distsim.checker.diagnosis.awaited_call import (
    AwaitedCall,
    AwaitedCallFinder,
    NearMiss,
    near_miss_lines,
)
from distsim.checker.diagnosis.blocked_rows import BlockedRows
from distsim.checker.diagnosis.hang_advice import (
    UNIQUE_HANDLE_ADVICE,
    advise_keep_request,
    advise_message,
)
from distsim.checker.diagnosis.wait_for_graph import WaitEdge
from distsim.checker.matching.channel_layout import WHOLE_CALL
from distsim.checker.wording import (
    MAX_SHOWN,
    aligned_columns,
    blocked_call_words,
    location_text,
    more_like_this,
    place_of_call,
    unmatched_words,
)
from distsim.findings.final_state import WaitDependency
from distsim.findings.finding_types import Finding
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program

#: Near misses, and any-source receives that took a message, that are listed.
_MAX_CANDIDATES = 3


class MissingMessageFindings:
    """Builds the DS304 findings of one hang."""

    def __init__(self, program: Program, rows: BlockedRows, finder: AwaitedCallFinder) -> None:
        self.program, self.rows, self.finder = program, rows, finder

    def no_counterpart(
        self, edges: list[WaitEdge], core: tuple[int, ...], notes: Sequence[str] = ()
    ) -> Finding:
        """Ranks that wait in calls of the same place for a message that does not exist."""
        rank, need, awaited_rank = edges[0]
        awaited = self.finder.of(rank, need, awaited_rank)
        assert awaited is not None
        near: list[NearMiss] = []
        rows = [self.rows.blocked_row(edge.rank, edge.need, "") for edge in edges[:MAX_SHOWN]]
        if need.any:
            head = f"rank {rank} waits to receive a message that nobody sends"
        else:
            taking_positions = self.finder.taken_before(rank, need)
            if taking_positions:
                return self._taken(edges, core, taking_positions, notes)
            head = unmatched_words(awaited.call, rank, awaited_rank)
            near = self.finder.near_misses(rank, awaited)
            rows.append(self.rows.state_row(awaited_rank))
        lines = [
            head,
            *aligned_columns(rows),
            *more_like_this(len(edges) - MAX_SHOWN),
            *(f"  {line}" for line in near_miss_lines(near[:_MAX_CANDIDATES])),
            *notes,
        ]
        sends = OPERATIONS[awaited.call.op].direction == "send"
        return self.rows.finding(
            "DS304", lines, core, advise_message(awaited, near, sends), _waits(edges)
        )

    def _taken(
        self,
        edges: list[WaitEdge],
        core: tuple[int, ...],
        taking_positions: list[int],
        notes: Sequence[str],
    ) -> Finding:
        """An any-source receive of the same rank has taken the message."""
        rank, need, awaited_rank = edges[0]
        head = (
            f"rank {rank} waits for a message of rank {awaited_rank} that its receive from any "
            "source has taken"
        )
        rows: list[Sequence[str]] = [
            self.rows.blocked_row(rank, need, ""),
            self.rows.state_row(awaited_rank),
        ]
        for position in taking_positions[:_MAX_CANDIDATES]:
            words = blocked_call_words(self.program, rank, position, position, WHOLE_CALL)
            location = location_text(place_of_call(self.program, rank, position))
            rows.append((f"rank {rank}", words, location, f"took rank {awaited_rank}'s message"))
        advice = (
            "name the source of that receive, or give messages of different meaning different tags",
        )
        lines = [head, *aligned_columns(rows), *notes]
        return self.rows.finding("DS304", lines, core, advice, _waits(edges))

    def is_cancelled(self, awaited: AwaitedCall) -> bool:
        """Whether the awaited rank posted its call and lost the request, which cancelled it."""
        if BACKEND_PROFILES[self.program.backend].dropped != "cancels":
            return False
        if not awaited.is_message or awaited.position is None:
            return False
        state = self.rows.blocked.get(awaited.rank)
        if state is not None and state.device:
            # The device still works on earlier calls: nothing has been cancelled yet.
            return False
        if not self.rows.has_passed(awaited):
            return False
        return is_request_lost(self.program, awaited.rank, awaited.position)

    def cancelled(
        self, edge: WaitEdge, awaited: AwaitedCall, core: tuple[int, ...], notes: Sequence[str]
    ) -> Finding:
        """The counterpart was posted and then cancelled."""
        position = awaited.position or 0
        direction = OPERATIONS[awaited.call.op].direction
        waits_to = "send" if direction == "send" else "receive"
        why, advice = "it keeps no handle of the request", advise_keep_request(awaited.rank)
        if self.program.code(awaited.rank).calls[position].handled:
            why, advice = "its handle is bound again before a wait", UNIQUE_HANDLE_ADVICE
        head = (
            f"rank {edge.rank} waits to {waits_to} a message that rank {awaited.rank} has given "
            f"up: {why}"
        )
        place = self.program.place(awaited.rank, position)
        posted = blocked_call_words(self.program, awaited.rank, position, position, WHOLE_CALL)
        rows = [
            self.rows.blocked_row(edge.rank, edge.need, ""),
            (f"rank {awaited.rank}", posted, location_text(place), "posted, never waited for"),
        ]
        lines = [head, *aligned_columns(rows), *notes]
        found = self.rows.finding("DS304", lines, core, advice, _waits([edge]))
        return replace(found, places=(place, *found.places))


def _waits(edges: list[WaitEdge]) -> list[tuple[int, WaitDependency]]:
    return [(edge.rank, edge.need) for edge in edges]
