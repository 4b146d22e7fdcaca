"""Find a rank that calls a collective on another group than the ranks that wait for it.

Two kinds of evidence:

- Another rank waits for the same call of this rank on another group, where the rank never makes it.
- In a captured run, calls that a blocked rank would make later are not known. There, the ranks that
  make the call at the same line count. If most use groups of one form, for example neighbours, and
  this rank uses another form, the rank has the wrong group.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from distsim.checker.diagnosis.awaited_call import AwaitedCall, AwaitedCallFinder
from distsim.checker.diagnosis.blocked_rows import BlockedRows
from distsim.checker.matching.call_mismatch import NO_SEQUENCE
from distsim.checker.wording import rank_list
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program

#: Calls of the whole world, which have advice of their own.
_WORLD_CALLS: Final = ("new_group", "init_process_group")
#: The name of a group that the script did not name.
_UNNAMED_GROUP: Final = re.compile(r"group \d+")

#: Groups of a majority that are listed.
_MAX_SHOWN_GROUPS: Final = 3

#: The form of a group: its ranks, counted from the first.
_GroupForm = tuple[int, ...]


class WrongGroupCall(NamedTuple):
    """A call on another group than the one where the rank is awaited.

    ``awaited``: the call of a rank that waits; ``place``: its place. ``majority``: the calls of
    other ranks at the same line, each on its group of the right form.
    """

    call: ResolvedCall
    awaited: ResolvedCall
    place: SourceLocation | None
    majority: tuple[ResolvedCall, ...] = ()

    @property
    def advice(self) -> tuple[str, ...]:
        """The group that the others use; an axis is named without its coordinates."""
        call, awaited = self.call, self.awaited
        axis = _group_text(awaited).replace(awaited.group.name, _axis(awaited), 1)
        return (
            f"on rank {call.rank}, call {call.op} on {axis} instead of {_group_text(call)}: "
            f"rank {awaited.rank} waits for it on {awaited.group.name}",
        )

    def with_cause_first(self, finding: Finding) -> Finding:
        """Put the mistake first, and what ranks wait for below it."""
        call = self.call
        head = (
            f"rank {call.rank} calls {call.op} on {_group_text(call)}, "
            f"but rank {self.awaited.rank} waits for it on {_group_text(self.awaited)}"
        )
        own_place = () if self.place is None else (self.place,)
        places = tuple(dict.fromkeys((*finding.places, *own_place)))
        lines = [head, *self._majority_line(), f"  {finding.message}"]
        return replace(finding, message="\n".join(lines), places=places, slips=places)

    def _majority_line(self) -> Iterator[str]:
        if self.majority:
            use = "uses" if len(self.majority) == 1 else "use"
            names = list(dict.fromkeys(call.group.name for call in self.majority))
            groups = " or ".join(names[:_MAX_SHOWN_GROUPS])
            if len(names) > _MAX_SHOWN_GROUPS:
                groups += f", or {len(names) - _MAX_SHOWN_GROUPS} groups of the same form"
            yield f"  at this line, {rank_list(call.rank for call in self.majority)} {use} {groups}"


def _axis(call: ResolvedCall) -> str:
    return call.group.name.partition("[")[0]


def _group_text(call: ResolvedCall) -> str:
    """The name of a group, with its members if the script did not name it."""
    name = call.group.name
    if not _UNNAMED_GROUP.fullmatch(name):
        return name
    return f"{name} ({rank_list(call.group.ranks)})"


class WrongGroupFinder:
    """Finds the calls on a wrong group in one hang."""

    def __init__(self, program: Program, rows: BlockedRows, finder: AwaitedCallFinder) -> None:
        self.program, self.rows, self.finder = program, rows, finder

    def find(self, awaited: Sequence[AwaitedCall]) -> WrongGroupCall | None:
        """The first call with a wrong group among calls that wait in vain."""
        for part in awaited:
            if part.is_message or part.call.op in _WORLD_CALLS:
                continue
            elsewhere = None
            if part.position is None:
                elsewhere = self._awaited_elsewhere(part)
            if elsewhere is not None:
                place = self.rows.place_of_waiting_call(elsewhere)
                return WrongGroupCall(part.call, elsewhere.call, place)
        if not self.program.is_partial:
            return None
        waiting = dict.fromkeys(part.call.rank for part in awaited if not part.is_message)
        found = (self._unlike_majority(rank) for rank in (*waiting, *self.rows.blocked))
        return next((each for each in found if each is not None), None)

    # --- never called on the other group ---
    def _awaited_elsewhere(self, part: AwaitedCall) -> AwaitedCall | None:
        """What a rank waits for that the rank of a call should have joined on another group.

        It is the same operation, which the rank never makes on that group.
        """
        for found in self._waits_for(part.call.rank):
            if found.position is None and found.sequence not in (NO_SEQUENCE, part.sequence):
                is_other_group = found.call.group.name != part.call.group.name
                is_same_call = _is_same_operation(found.call, part.call)
                return found if is_other_group and is_same_call else None
        return None

    def _waits_for(self, rank: int) -> Iterator[AwaitedCall]:
        """What blocked ranks wait for on this rank."""
        is_member: dict[int, bool] = {}  # by the identity of the tuple of ranks
        for waiting, state in self.rows.blocked.items():
            for need in state.needs:
                key = id(need.ranks)
                if key not in is_member:
                    is_member[key] = rank in need.ranks
                if need.any or not is_member[key]:
                    continue
                found = self.finder.of(waiting, need, rank)
                if found is not None:
                    yield found

    # --- another form than most ranks at the line ---
    def _unlike_majority(self, rank: int) -> WrongGroupCall | None:
        position = self.rows.blocked[rank].needs[0].position
        calls = self._calls_at_same_line(rank, position)
        if rank not in calls:
            return None
        forms = Counter(_form(call) for call in calls.values())
        usual, count = forms.most_common(1)[0]
        if 2 * count <= len(calls) or _form(calls[rank]) == usual:
            return None
        majority = tuple(call for call in calls.values() if _form(call) == usual)
        for found in self._waits_for(rank):
            is_usual = not found.is_message and _form(found.call) == usual
            if is_usual and _is_same_operation(found.call, calls[rank]):
                place = self.rows.place_of_waiting_call(found)
                return WrongGroupCall(calls[rank], found.call, place, majority)
        return None

    def _calls_at_same_line(self, rank: int, position: int) -> Mapping[int, ResolvedCall]:
        """By rank: the collective that it makes at this line as often as this rank has made it."""
        calls = self.program.code(rank).calls
        if position >= len(calls) or OPERATIONS[calls[position].op].kind != "collective":
            return {}
        site = calls[position].site
        if not self.program.sites[site].line:
            return {}
        number = sum(call.site == site for call in calls[:position])
        found = {}
        for other in range(self.program.world_size):
            at_line = [k for k, c in enumerate(self.program.code(other).calls) if c.site == site]
            if len(at_line) > number:
                found[other] = self.program.call(other, at_line[number])
        return found


def _form(call: ResolvedCall) -> _GroupForm:
    ranks = call.group.ranks
    return tuple(rank - ranks[0] for rank in ranks)


def _is_same_operation(one: ResolvedCall, other: ResolvedCall) -> bool:
    """Whether two calls could have met, had they been made on one group.

    They have the same operation and as many elements.
    """
    sizes = [buffer.numel for buffer in one.inputs]
    return one.op == other.op and sizes == [buffer.numel for buffer in other.inputs]


__all__ = ["WrongGroupCall", "WrongGroupFinder"]
