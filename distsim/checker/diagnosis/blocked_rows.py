"""The table rows of a hang's findings: rank, call, place, and the call that the rank waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from distsim.checker.diagnosis.awaited_call import AwaitedCall
from distsim.checker.diagnosis.exit_advice import exit_words
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.wording import (
    MAX_SHOWN,
    blocked_call_words,
    blocked_device_words,
    location_text,
    parenthesised,
    partner_words,
    place_of_call,
    plural,
)
from distsim.findings.final_state import BlockedRank, FinalState, WaitDependency
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.program.model import Program


class FindingRow(NamedTuple):
    """A row of a finding: rank, call, place, reason."""

    rank: str
    call: str
    place: str
    reason: str


class BlockedRows:
    """The rows of one hang. ``blocked`` and ``ends`` are by rank."""

    def __init__(self, program: Program, final_state: FinalState, call_index: CallIndex) -> None:
        self.program, self.call_index = program, call_index
        self.blocked: dict[int, BlockedRank] = {state.rank: state for state in final_state.blocked}
        self.ends = {end.rank: end for end in final_state.ends}

    # --- rows ---
    def blocked_row(self, rank: int, need: WaitDependency, reason: str) -> FindingRow:
        """A blocked rank with the call in which it is blocked."""
        if self.waits_at_start_up(rank, need):
            return FindingRow(f"rank {rank}", "init_process_group()", "", "")
        state = self.blocked[rank]
        if _host_ran_ahead(state, need):
            words = blocked_device_words(self.program, state, need)
        else:
            words = blocked_call_words(self.program, rank, state.position, need.position, need.part)
        return FindingRow(f"rank {rank}", words, location_text(self.place(rank, need)), reason)

    def state_row(self, rank: int) -> FindingRow:
        """Any rank, with the call in which it is blocked or at which it ended."""
        if rank in self.blocked:
            return self.blocked_row(rank, self.blocked[rank].needs[0], "")
        return self.end_row(rank)

    def end_row(self, rank: int) -> FindingRow:
        """A rank that has exited, with its last call."""
        end = self.ends[rank]
        at_end = end.position >= len(self.program.code(rank).calls)
        last = end.position - 1 if end.status == "ended" and at_end else end.position
        place = None
        if last >= 0 and end.status != "absent":
            place = place_of_call(self.program, rank, last)
        reason = ""
        if place:
            reason = {
                "ended": "its last line",
                "raised": "raised here",
                "killed": "killed before this line",
            }.get(end.status, "")
        words = exit_words(self.program, [end])
        return FindingRow(f"rank {rank}", words, location_text(place), reason)

    # --- the awaited call ---
    def awaited_call_words(self, awaited: AwaitedCall | None) -> str:
        """Where the awaited rank has the call that would end the wait."""
        if awaited is None:
            return ""
        if awaited.position is None and awaited.is_message:
            return f"waits for rank {awaited.rank}"
        if awaited.position is None:
            calls = "only " + plural(awaited.has, "call") if awaited.has else "no call"
            is_new_group = awaited.call.op == "new_group"
            where = "of new_group" if is_new_group else f"on {awaited.call.group.name}"
            return f"rank {awaited.rank} makes {calls} {where}"
        place = place_of_call(self.program, awaited.rank, awaited.position)
        own = place_of_call(self.program, awaited.call.rank, 0)
        in_same_file = place and own and place.file == own.file
        location = f"line {place.line}" if place and in_same_file else location_text(place)
        verb, past = "joins", "joined"
        if awaited.is_message:
            verb, past = partner_words(awaited.call)
        if self.is_posted(awaited):
            return f"rank {awaited.rank} has {past} it{parenthesised(location)}"
        if location.startswith("line "):
            return f"rank {awaited.rank} {verb} it at {location}"
        return f"rank {awaited.rank} {verb} it later{parenthesised(location)}"

    def missing_call_words(self, awaited: AwaitedCall | None) -> str:
        """Which call a rank that has exited does not make."""
        if awaited is None:
            return ""
        if not awaited.is_message:
            number = f"call {awaited.number + 1} on {awaited.call.group.name}"
            return f"{number}{self._calls_made_words(awaited)}"
        return self.awaited_call_words(awaited) if awaited.position is not None else ""

    def _calls_made_words(self, awaited: AwaitedCall) -> str:
        """How many calls of the sequence a rank makes, or made before something ended it."""
        rank, end = awaited.rank, self.ends[awaited.rank]
        is_blocked = rank in self.blocked
        stopped_early = end.position < len(self.program.code(rank).calls)
        was_cut = stopped_early or end.status not in ("ended", "blocked")
        if awaited.position is None and (is_blocked or not was_cut):
            return f"; rank {rank} makes {f'only {awaited.has}' if awaited.has else 'none'}"
        if is_blocked or end.status == "absent" or self.has_passed(awaited):
            return ""
        positions = self.call_index.joins(rank, awaited.sequence)
        made = sum(position < end.position for position in positions)
        return f"; rank {rank} made {f'only {made}' if made else 'none'}"

    def is_posted(self, awaited: AwaitedCall) -> bool:
        """Whether the awaited rank has made the call.

        Its host has passed the call, or is blocked in it and waits for a request of that call.
        """
        if self.has_passed(awaited):
            return True
        state = self.blocked.get(awaited.rank)
        if awaited.position is None or state is None or awaited.position != state.position:
            return False
        return any(need.position == awaited.position for need in state.needs)

    def has_passed(self, awaited: AwaitedCall) -> bool:
        """Whether the awaited rank's host has passed the call.

        If the rank still hangs, its device or a request of its own holds it up.
        """
        end = self.ends[awaited.rank]
        return awaited.position is not None and awaited.position < end.position

    # --- headlines ---
    def common_call_words(self, waits: Sequence[tuple[int, WaitDependency]]) -> str:
        """` in barrier (ring.yaml:7)`, without what differs between the blocked ranks."""
        calls = [self._op_and_place(rank, need) for rank, need in waits]
        op, location = calls[0]
        if not op or any(each[0] != op for each in calls):
            return ""
        is_one_place = len(set(calls)) == 1
        return f" in {op}{parenthesised(location) if is_one_place else ''}"

    def _op_and_place(self, rank: int, need: WaitDependency) -> tuple[str, str]:
        """The operation in which a rank, or its device, is blocked, and its place."""
        if self.waits_at_start_up(rank, need):
            return "init_process_group", ""
        position = self._position(rank, need)
        calls = self.program.code(rank).calls
        if position >= len(calls):
            return "", ""
        return calls[position].op, location_text(place_of_call(self.program, rank, position))

    # --- places ---
    def place_of_waiting_call(self, awaited: AwaitedCall) -> SourceLocation | None:
        """The place of the call that waits."""
        rank = awaited.call.rank
        if rank not in self.blocked:
            return None
        return place_of_call(self.program, rank, self.blocked[rank].position)

    def place(self, rank: int, need: WaitDependency) -> SourceLocation | None:
        """The place of the call in which a rank, or its device, is blocked."""
        return place_of_call(self.program, rank, self._position(rank, need))

    def _position(self, rank: int, need: WaitDependency) -> int:
        state = self.blocked[rank]
        return need.position if _host_ran_ahead(state, need) else state.position

    def finding(
        self,
        code: str,
        lines: Sequence[str],
        core: tuple[int, ...],
        help_lines: Iterable[str],
        waits: Sequence[tuple[int, WaitDependency]],
    ) -> Finding:
        """A finding with the places of the first of the blocked calls, given as (rank, need)."""
        places = [self.place(rank, need) for rank, need in waits[:MAX_SHOWN]]
        known = tuple(dict.fromkeys(place for place in places if place is not None))
        return Finding(code, "error", "\n".join(lines), core, core, tuple(help_lines), known)

    def waits_at_start_up(self, rank: int, need: WaitDependency) -> bool:
        """Whether the rank waits in an init_process_group that the scenario does not write.

        It waits there, before its first call, for ranks that never start.
        """
        if self.blocked[rank].position != 0:
            return False
        if any(self.ends[other].status != "absent" for other in need.ranks):
            return False
        calls = self.program.code(rank).calls
        return not calls or calls[0].op != "init_process_group"


def _host_ran_ahead(state: BlockedRank, need: WaitDependency) -> bool:
    """Whether the host has continued while its device is blocked in an earlier call."""
    return state.device and need.position < state.position
