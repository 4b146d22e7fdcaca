"""Findings on messages that never meet a counterpart (DS304).

The counterpart may not exist in the program, an any-source receive may have taken the message, or
the peer may have dropped the request of it. The three need different changes of the program, so
each has its own headline and advice.

Key idea: the headline names the edge of the wait-for graph that nothing in the program would ever
satisfy. The rest is evidence: near misses (a message with another tag or group) suggest the typo.

Which rank waits for which is decided by `hang_findings`; this module only words it.
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
    COMMUNICATOR_CREATION,
    JOIN_COMMUNICATOR_ADVICE,
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
    parenthesised,
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
        # Ask this first: a batch that creates a communicator waits for ranks to which it sends
        # nothing, so looking for "its message" to them would find a near miss that means nothing.
        if self._creates_communicator(rank, need, awaited_rank):
            return self._communicator_creation(edges, core, notes)
        at_line = parenthesised(location_text(self.rows.place(rank, need)))
        near: list[NearMiss] = []
        shown = ""
        rows = [self.rows.blocked_row(edge.rank, edge.need, "") for edge in edges[:MAX_SHOWN]]
        if need.any:
            # Every rank is a candidate here, so a list of near misses would only be noise.
            head = f"rank {rank} waits for a message from any rank{at_line}, but no rank sends one"
        else:
            # The message may exist, and an earlier receive of the same rank may have consumed it.
            # "No rank sends it" would then be false.
            taking_positions = self.finder.taken_before(rank, need)
            if taking_positions:
                return self._taken(edges, core, taking_positions, notes)
            head = unmatched_words(awaited.call, rank, awaited_rank, at_line)
            near = self.finder.near_misses(rank, awaited)
            rows.append(self.rows.state_row(awaited_rank))
            shown = " ".join(rows[-1])
        lines = [
            head,
            *aligned_columns(rows),
            *more_like_this(len(edges) - MAX_SHOWN),
            *(f"  {line}" for line in near_miss_lines(near[:_MAX_CANDIDATES], shown)),
            *notes,
        ]
        sends = OPERATIONS[awaited.call.op].direction == "send"
        is_request = self.rows.blocked[rank].position != need.position
        started = location_text(self.program.place(rank, need.position)) if is_request else ""
        advice = advise_message(awaited, near, sends, started)
        found = self.rows.finding("DS304", lines, core, advice, _waits(edges))
        # The call that would match meets a later message instead, which may not fit.
        slips = tuple(miss.place for miss in near if miss.place is not None)
        places = tuple(dict.fromkeys((*found.places, *slips[:_MAX_CANDIDATES])))
        return replace(found, places=places, slips=slips)

    def _creates_communicator(self, rank: int, need: WaitDependency, awaited_rank: int) -> bool:
        """Whether a batch waits for a rank to which it has no message (semantics N8)."""
        parts = self.program.call(rank, need.position).parts
        return bool(parts) and not need.any and awaited_rank not in [part.peer for part in parts]

    def _communicator_creation(
        self, edges: list[WaitEdge], core: tuple[int, ...], notes: Sequence[str]
    ) -> Finding:
        """A batch is the first communication on its group, and a member does not take part."""
        rank, need, awaited_rank = edges[0]
        call = self.program.call(rank, need.position)
        at_line = parenthesised(location_text(self.rows.place(rank, need)))
        head = (
            f"{call.op}{at_line} is the first communication on `{call.parts[0].group.name}`, so "
            f"{COMMUNICATOR_CREATION} there and needs every rank; rank {awaited_rank} does not "
            "join"
        )
        rows = [self.rows.blocked_row(edge.rank, edge.need, "") for edge in edges[:MAX_SHOWN]]
        rows.append(self.rows.state_row(awaited_rank))
        more = more_like_this(len(edges) - MAX_SHOWN)
        lines = [head, *aligned_columns(rows), *more, *notes]
        return self.rows.finding("DS304", lines, core, JOIN_COMMUNICATOR_ADVICE, _waits(edges))

    def _taken(
        self,
        edges: list[WaitEdge],
        core: tuple[int, ...],
        taking_positions: list[int],
        notes: Sequence[str],
    ) -> Finding:
        """An any-source receive of the same rank has taken the message."""
        rank, need, awaited_rank = edges[0]
        taking_places = [place_of_call(self.program, rank, each) for each in taking_positions]
        own_place = parenthesised(location_text(self.rows.place(rank, need)))
        taking_place = parenthesised(location_text(taking_places[0]))
        head = (
            f"rank {rank} waits for a message from rank {awaited_rank}{own_place}, but rank {rank} "
            f"already received this message with a recv from any source{taking_place}"
        )
        rows: list[Sequence[str]] = [
            self.rows.blocked_row(rank, need, ""),
            self.rows.state_row(awaited_rank),
        ]
        takers = list(zip(taking_positions, taking_places, strict=True))
        for position, place in takers[:_MAX_CANDIDATES]:
            words = blocked_call_words(self.program, rank, position, position, WHOLE_CALL)
            taken = f"took rank {awaited_rank}'s message"
            rows.append((f"rank {rank}", words, location_text(place), taken))
        advice = (
            f"set `src` in the recv of rank {rank}{taking_place}, or use different tags for "
            "different kinds of messages",
        )
        lines = [head, *aligned_columns(rows), *notes]
        return self.rows.finding("DS304", lines, core, advice, _waits(edges))

    def is_cancelled(self, awaited: AwaitedCall) -> bool:
        """Whether the awaited rank posted its call and lost the request, which cancelled it.

        Gloo cancels an open message when Python frees its `Work` object (semantics G4). The
        counterpart then waits for a message that was posted, which is hard to see in the script.
        """
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
        waits_for = "send a message to" if direction == "send" else "receive a message from"
        place = self.program.place(awaited.rank, position)
        at_line = parenthesised(location_text(place))
        why, advice = "did not keep its request", advise_keep_request(awaited.rank)
        if self.program.code(awaited.rank).calls[position].handled:
            why, advice = "overwrote its handle before the wait", UNIQUE_HANDLE_ADVICE
        own_place = parenthesised(location_text(self.rows.place(edge.rank, edge.need)))
        head = (
            f"rank {edge.rank} waits to {waits_for} rank {awaited.rank}{own_place}, but rank "
            f"{awaited.rank} {why}{at_line}, so the message was cancelled"
        )
        posted = blocked_call_words(self.program, awaited.rank, position, position, WHOLE_CALL)
        rows = [
            self.rows.blocked_row(edge.rank, edge.need, ""),
            (f"rank {awaited.rank}", posted, location_text(place), "posted without a wait"),
        ]
        lines = [head, *aligned_columns(rows), *notes]
        found = self.rows.finding("DS304", lines, core, advice, _waits([edge]))
        # The line to change is that of the dropped request, so it comes before the waiting line.
        return replace(found, places=(place, *found.places), slips=(place,))


def _waits(edges: list[WaitEdge]) -> list[tuple[int, WaitDependency]]:
    return [(edge.rank, edge.need) for edge in edges]
