"""The rows of a standstill's findings: rank, call, place, and where the call is that the rank waits for."""

from __future__ import annotations

from distsim.check.call_index import CallIndex
from distsim.check.counterpart import Counterpart
from distsim.check.left import gone_words
from distsim.check.wording import device_standing, meeting_words, place_of, plural, standing, where_text
from distsim.findings.record import Place
from distsim.program.records import Program
from distsim.standstill import Blocked, Need, Standstill

#: Rank, call, place, reason.
Row = tuple[str, str, str, str]


class BlockedRows:
    """Of one standstill. ``blocked`` and ``ends``: by rank."""

    def __init__(self, program: Program, standstill: Standstill, where: CallIndex) -> None:
        self.program, self.where = program, where
        self.blocked: dict[int, Blocked] = {b.rank: b for b in standstill.blocked}
        self.ends = {end.rank: end for end in standstill.ends}

    def row(self, rank: int, need: Need, reason: str) -> Row:
        """A blocked rank in the call that it stands in."""
        if self.starts(rank, need):
            return (f"rank {rank}", "init_process_group()", "", "")
        state = self.blocked[rank]
        if self._ran_ahead(state, need):
            words = device_standing(self.program, state, need)
        else:
            words = standing(self.program, rank, state.position, need.position, need.part)
        return (f"rank {rank}", words, where_text(self.place(rank, need)), reason)

    def state_row(self, rank: int) -> Row:
        """Any rank: where it stands, or where it ended."""
        if rank in self.blocked:
            return self.row(rank, self.blocked[rank].needs[0], "")
        return self.end_row(rank)

    def end_row(self, rank: int) -> Row:
        """A rank that has left, at its last call."""
        end = self.ends[rank]
        last = end.position - 1 if end.status == "ended" and end.position >= len(self.program.code(rank).calls) else end.position
        place = place_of(self.program, rank, last) if last >= 0 and end.status != "absent" else None
        after = {"ended": "its last call", "raised": "raised here", "killed": "killed before this call"}.get(end.status, "")
        return (f"rank {rank}", gone_words(self.program, [end]), where_text(place), after if place else "")

    def meets(self, part: Counterpart | None) -> str:
        """Where the awaited rank has the call that would end the wait."""
        if part is None:
            return ""
        if part.position is None:
            made = "only " + plural(part.has, "call") if part.has else "no call"
            return f"waits for rank {part.rank}" if part.is_message else f"rank {part.rank} makes {made} there"
        place = place_of(self.program, part.rank, part.position)
        own = place_of(self.program, part.call.rank, 0)
        spot = f"line {place.line}" if place and own and place.file == own.file else where_text(place)
        verb, past = meeting_words(part.call) if part.is_message else ("joins", "joined")
        if self.posted(part):
            return f"rank {part.rank} has {past} it, {spot}"
        return f"rank {part.rank} {verb} it later, {spot}"

    def posted(self, part: Counterpart) -> bool:
        """The awaited rank has made the call: its host is past it, or stands in it and waits for what it asked for there."""
        state = self.blocked.get(part.rank)
        return self.passed(part) or (part.position is not None and state is not None and part.position == state.position
                                      and any(need.position == part.position for need in state.needs))  # fmt: skip

    def passed(self, part: Counterpart) -> bool:
        """The awaited rank's host is already past its part: its device, or a request of its own, holds it up."""
        return part.position is not None and part.position < self.ends[part.rank].position

    def lacks(self, part: Counterpart | None) -> str:
        if part is None:
            return ""
        if not part.is_message:
            return f"call {part.number + 1} of {part.call.group.name}{self._made(part)}"
        return self.meets(part) if part.position is not None else ""

    def _made(self, part: Counterpart) -> str:
        """How many calls of a collective's sequence an awaited rank makes, or made before something ended it."""
        end = self.ends[part.rank]
        cut = end.status not in ("ended", "blocked") or end.position < len(self.program.code(part.rank).calls)
        if part.position is None and (part.rank in self.blocked or not cut):
            return f"; rank {part.rank} makes {f'only {part.has}' if part.has else 'none'}"
        if part.rank in self.blocked or end.status == "absent" or (part.position is not None and part.position < end.position):
            return ""
        made = sum(position < end.position for position in self.where.joins(part.rank, part.sequence))
        return f"; rank {part.rank} made {f'only {made}' if made else 'none'}"

    # --- places ---
    def caller_place(self, part: Counterpart) -> Place | None:
        """Where the call that waits is written."""
        rank = part.call.rank
        return place_of(self.program, rank, self.blocked[rank].position) if rank in self.blocked else None

    def place(self, rank: int, need: Need) -> Place | None:
        """Where the call is written that a rank, or its device, stands in."""
        state = self.blocked[rank]
        return place_of(self.program, rank, need.position if self._ran_ahead(state, need) else state.position)

    def _ran_ahead(self, state: Blocked, need: Need) -> bool:
        """The host has gone on, and its device stands in an earlier call."""
        return state.device and need.position < state.position

    def starts(self, rank: int, need: Need) -> bool:
        """The rank waits in an init_process_group that the file does not write: for those who never start, before its first call."""
        if self.blocked[rank].position != 0 or any(self.ends[r].status != "absent" for r in need.ranks):
            return False
        calls = self.program.code(rank).calls
        return not calls or calls[0].op != "init_process_group"
