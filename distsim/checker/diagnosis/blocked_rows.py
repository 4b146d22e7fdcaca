"""The rows of a standstill's findings: rank, call, place, and where the call is that the rank waits
for.
"""

from __future__ import annotations

from distsim.checker.diagnosis.awaited_call import AwaitedCall
from distsim.checker.diagnosis.exit_advice import exit_words
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.wording import (
    blocked_call_words,
    blocked_device_words,
    location_text,
    partner_words,
    place_of_call,
    plural,
)
from distsim.findings.final_state import BlockedRank, FinalState, WaitDependency
from distsim.findings.finding_types import SourceLocation
from distsim.program.model import Program

#: Rank, call, place, reason.
FindingRow = tuple[str, str, str, str]


class BlockedRows:
    """Of one standstill. ``blocked`` and ``ends``: by rank."""

    def __init__(self, program: Program, final_state: FinalState, where: CallIndex) -> None:
        self.program, self.where = program, where
        self.blocked: dict[int, BlockedRank] = {b.rank: b for b in final_state.blocked}
        self.ends = {end.rank: end for end in final_state.ends}

    def row(self, rank: int, need: WaitDependency, reason: str) -> FindingRow:
        """A blocked rank in the call that it stands in."""
        if self.starts(rank, need):
            return (f"rank {rank}", "init_process_group()", "", "")
        state = self.blocked[rank]
        if self._ran_ahead(state, need):
            words = blocked_device_words(self.program, state, need)
        else:
            words = blocked_call_words(self.program, rank, state.position, need.position, need.part)
        return (f"rank {rank}", words, location_text(self.place(rank, need)), reason)

    def state_row(self, rank: int) -> FindingRow:
        """Any rank: where it stands, or where it ended."""
        if rank in self.blocked:
            return self.row(rank, self.blocked[rank].needs[0], "")
        return self.end_row(rank)

    def end_row(self, rank: int) -> FindingRow:
        """A rank that has left, at its last call."""
        end = self.ends[rank]
        last = (
            end.position - 1
            if end.status == "ended" and end.position >= len(self.program.code(rank).calls)
            else end.position
        )
        place = (
            place_of_call(self.program, rank, last)
            if last >= 0 and end.status != "absent"
            else None
        )
        after = {
            "ended": "its last call",
            "raised": "raised here",
            "killed": "killed before this call",
        }.get(end.status, "")
        return (
            f"rank {rank}",
            exit_words(self.program, [end]),
            location_text(place),
            after if place else "",
        )

    def meets(self, part: AwaitedCall | None) -> str:
        """Where the awaited rank has the call that would end the wait."""
        if part is None:
            return ""
        if part.position is None:
            made = "only " + plural(part.has, "call") if part.has else "no call"
            return (
                f"waits for rank {part.rank}"
                if part.is_message
                else f"rank {part.rank} makes {made} there"
            )
        place = place_of_call(self.program, part.rank, part.position)
        own = place_of_call(self.program, part.call.rank, 0)
        spot = (
            f"line {place.line}"
            if place and own and place.file == own.file
            else location_text(place)
        )
        verb, past = partner_words(part.call) if part.is_message else ("joins", "joined")
        if self.posted(part):
            return f"rank {part.rank} has {past} it, {spot}"
        return f"rank {part.rank} {verb} it later, {spot}"

    def posted(self, part: AwaitedCall) -> bool:
        """The awaited rank has made the call: its host is past it, or stands in it and waits for
        what it asked for there.
        """
        state = self.blocked.get(part.rank)
        return self.passed(part) or (
            part.position is not None
            and state is not None
            and part.position == state.position
            and any(need.position == part.position for need in state.needs)
        )

    def passed(self, part: AwaitedCall) -> bool:
        """The awaited rank's host is already past its part: its device, or a request of its own,
        holds it up.
        """
        return part.position is not None and part.position < self.ends[part.rank].position

    def lacks(self, part: AwaitedCall | None) -> str:
        if part is None:
            return ""
        if not part.is_message:
            return f"call {part.number + 1} of {part.call.group.name}{self._made(part)}"
        return self.meets(part) if part.position is not None else ""

    def _made(self, part: AwaitedCall) -> str:
        """How many calls of a collective's sequence an awaited rank makes, or made before something
        ended it.
        """
        end = self.ends[part.rank]
        cut = end.status not in ("ended", "blocked") or end.position < len(
            self.program.code(part.rank).calls
        )
        if part.position is None and (part.rank in self.blocked or not cut):
            return f"; rank {part.rank} makes {f'only {part.has}' if part.has else 'none'}"
        if (
            part.rank in self.blocked
            or end.status == "absent"
            or (part.position is not None and part.position < end.position)
        ):
            return ""
        made = sum(
            position < end.position for position in self.where.joins(part.rank, part.sequence)
        )
        return f"; rank {part.rank} made {f'only {made}' if made else 'none'}"

    # --- places ---
    def place_of_waiting_call(self, part: AwaitedCall) -> SourceLocation | None:
        """Where the call that waits is written."""
        rank = part.call.rank
        return (
            place_of_call(self.program, rank, self.blocked[rank].position)
            if rank in self.blocked
            else None
        )

    def place(self, rank: int, need: WaitDependency) -> SourceLocation | None:
        """Where the call is written that a rank, or its device, stands in."""
        state = self.blocked[rank]
        return place_of_call(
            self.program, rank, need.position if self._ran_ahead(state, need) else state.position
        )

    def _ran_ahead(self, state: BlockedRank, need: WaitDependency) -> bool:
        """The host has gone on, and its device stands in an earlier call."""
        return state.device and need.position < state.position

    def starts(self, rank: int, need: WaitDependency) -> bool:
        """The rank waits in an init_process_group that the file does not write: for those who never
        start, before its first call.
        """
        if self.blocked[rank].position != 0 or any(
            self.ends[r].status != "absent" for r in need.ranks
        ):
            return False
        calls = self.program.code(rank).calls
        return not calls or calls[0].op != "init_process_group"
