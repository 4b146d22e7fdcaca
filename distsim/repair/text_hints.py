"""What the texts of a scenario say about its purpose: names, comments, title and description.

Key idea: several repairs may keep all data, and only the author's words show which one is meant.
Receives into `from_left` come from the rank before; "incomplete batches are dropped" asks for fewer
iterations; "early stopping" asks that all ranks exit. A repair that contradicts such words is
ranked behind the others. Texts never create a repair, and unclear texts are no hint.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.repair.reduction_words import against_reductions
from distsim.repair.scenario_data import (
    ScenarioData,
    op_of,
    step_paths,
    times_of,
    value_at,
    value_by_rank,
)
from distsim.repair.shared_decisions import SharedDecisions

_FEWER: Final = re.compile(
    r"drop_?\s?last|\bdrop(s|ped)?\b|incomplete|\btruncat|shortest|\bdiscard|\bfewest\b"
)
_MORE: Final = re.compile(
    r"\bjoin\b|\bpad(s|ded|ding)?\b|longest|repeat(s|ed)? (samples|data|batches)"
    r"|wrap(s|ped)? around|no (sample|batch|data)\w* (is|are) (lost|dropped|skipped)"
    r"|\ball (samples|batches)\b"
)
_STOPS_TOGETHER: Final = re.compile(
    r"early[ _-]?stop|patience|\bconverge|stop_?(training|flag|early)"
    r"|(stops?|exits?|ends?|leaves?|finish(es)?) (\w+ )?(on|together)( on)? (all|every)"
    r"|(all|every) (ranks?|processe?s?|workers?) (then )?(stops?|exits?|ends?|leaves?|finish)"
)
_BEFORE: Final = re.compile(r"(?<![a-z])(left|prev|previous|predecessor|preceding)(?![a-z])")
_AFTER: Final = re.compile(r"(?<![a-z])(right|next|successor|following)(?![a-z])")
_CLAUSE_END: Final = re.compile(r"[.;,:#()]|\band\b|\n\s*\n")
_SENDING: Final = re.compile(r"\b(send|pass|forward|rotat|shift|push|travel|hand)\w*")
_RECEIVING: Final = re.compile(r"\b(receiv|take|get|fetch|comes?|arriv|read)\w*|\bfrom\b")
_SENT_NAME: Final = re.compile(r"(^|_)(to|send|edge|border|boundary)(_|$)")
_END_NAME: Final = re.compile(r"^(?:is_)?(first|last)(?:_(?:rank|stage))?$")
_SENDS: Final = ("send", "isend")
_RECEIVES: Final = ("recv", "irecv")


class TextHints:
    """The words of the file that is repaired."""

    def __init__(self, text: str, data: ScenarioData, program: Program) -> None:
        words = text.lower()
        self._data, self._program = data, program
        self._prefers_fewer = bool(_FEWER.search(words))
        self._prefers_more = bool(_MORE.search(words))
        self._stops_together = bool(_STOPS_TOGETHER.search(words))
        self._comments = {
            number: line.partition("#")[2] for number, line in enumerate(words.splitlines(), 1)
        }
        self._prose = _prose(data, words)
        self._directions = _directions_of(self._prose)
        self.decisions = SharedDecisions(words, data, program)

    def contradictions(self, data: ScenarioData, program: Program) -> int:
        """How many changes of a repair contradict the words."""
        stays = self._stops_together and _exit_count(data) < _exit_count(self._data)
        loops = self._contradicts_iterations(data, program)
        messages = self._against_direction(program) - self._against_direction(self._program)
        decisions = self.decisions.broken_in(data)
        reductions = against_reductions(self._prose, program)
        words = stays + loops + decisions + max(0, messages) + reductions
        return words + _misnamed_vars(data, program)

    def _contradicts_iterations(self, data: ScenarioData, program: Program) -> bool:
        if self._prefers_fewer == self._prefers_more:
            return False
        before = _times_by_rank(self._data, self._program)
        after = _times_by_rank(data, program)
        if len(before) != len(after):
            return False
        for old, new in zip(before, after, strict=True):
            changes = [b - a for a, b in zip(old, new, strict=False)]
            if self._prefers_fewer and any(change > 0 for change in changes):
                return True
            if self._prefers_more and any(change < 0 for change in changes):
                return True
        return False

    def _against_direction(self, program: Program) -> int:
        """How many messages to a neighbour the words describe in the other direction."""
        if program.world_size < 3:
            return 0
        return sum(
            self._direction_of(call, line) * _distance(call, program.world_size) < 0
            for call, line in _messages(program)
        )

    def _direction_of(self, call: ResolvedCall, line: int) -> int:
        """1 if the words name the next rank as the peer, -1 for the previous one, 0 if neither."""
        names = " ".join(buffer.name for buffer in (*call.inputs, *call.outputs))
        if call.op in _RECEIVES or _SENT_NAME.search(names):
            named = _named_direction(names)
            if named:
                return named
        return _named_direction(self._comments.get(line, "")) or self._directions[call.op in _SENDS]


def _misnamed_vars(data: ScenarioData, program: Program) -> int:
    """How many vars named `first` or `last` mean another rank."""
    world, found = program.world_size, 0
    for name, value in (data.get("vars") or {}).items():
        match = _END_NAME.match(str(name).lower())
        values = value_by_rank(program, value)
        if match is None or len(values) != world:
            continue
        rank = 0 if match[1] == "first" else world - 1
        is_condition = sorted(values) == [0] * (world - 1) + [1]
        found += values.index(1) != rank if is_condition else set(values) != {rank}
    return found


def _prose(data: ScenarioData, text: str) -> str:
    """The title, the description and the comments that have lines of their own."""
    parts = [str(data.get("name", "")).replace("_", " "), str(data.get("about", ""))]
    lines = (line.strip() for line in text.splitlines())
    parts += [line for line in lines if line.startswith("#")]
    return "\n\n".join(parts).lower()


def _directions_of(prose: str) -> dict[bool, int]:
    """The direction of sends (True) and of receives (False) according to a description."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for clause in _CLAUSE_END.split(prose):
        direction = _named_direction(clause)
        if direction and _SENDING.search(clause):
            found[True].add(direction)
        elif direction and _RECEIVING.search(clause):
            found[False].add(direction)
    sends, receives = (_only(found[is_send]) for is_send in (True, False))
    # Who sends to the next rank receives from the previous one.
    return {True: sends or -receives, False: receives or -sends}


def _only(directions: set[int]) -> int:
    return next(iter(directions)) if len(directions) == 1 else 0


def _named_direction(words: str) -> int:
    is_after, is_before = bool(_AFTER.search(words)), bool(_BEFORE.search(words))
    return is_after - is_before


def _distance(call: ResolvedCall, world_size: int) -> int:
    """1 if the peer is the next rank, -1 if it is the previous one; 0 for all others."""
    distance = (int(call.peer or 0) - call.rank) % world_size
    return {1: 1, world_size - 1: -1}.get(distance, 0)


def _messages(program: Program) -> Iterator[tuple[ResolvedCall, int]]:
    for rank in program.present:
        for position, call in program.calls_of(rank):
            for part in call.parts or (call,):
                if part.op in (*_SENDS, *_RECEIVES) and part.peer is not None:
                    yield part, program.place(rank, position).line


def _exit_count(data: ScenarioData) -> int:
    return sum(op_of(value_at(data, path)) == "exit" for path in step_paths(data))


def _times_by_rank(data: ScenarioData, program: Program) -> list[list[int]]:
    times = (times_of(value_at(data, path)) for path in step_paths(data))
    return [value_by_rank(program, each) for each in times if each is not None]


class _Subject(NamedTuple):
    """What a call exchanges or creates.

    ``place``: of the tensor among the declared ones; -1 for a group.
    """

    place: int
    name: str


def unusual_orders(program: Program) -> tuple[int, int]:
    """How often ranks make two calls in the less common order, and against the declared order.

    Most ranks, and the order in which a file declares its tensors, show which order is meant.
    """
    orders: Counter[tuple[_Subject, _Subject]] = Counter()
    declared = {name: place for place, name in enumerate(program.tensors)}
    for rank in program.present:
        found = (_subject_of(call, declared) for _, call in program.calls_of(rank))
        subjects = pairwise(subject for subject in found if subject is not None)
        orders.update((a, b) for a, b in subjects if (a.place < 0) == (b.place < 0))
    conflicts = sum(min(count, orders[b, a]) for (a, b), count in orders.items() if a < b)
    against = sum(count for (a, b), count in orders.items() if a > b)
    return conflicts, against


def _subject_of(call: ResolvedCall, declared: dict[str, int]) -> _Subject | None:
    """What a call exchanges or creates; None for local work, waits and batches."""
    if call.op == "new_group":
        return _Subject(-1, call.name)
    buffers = call.inputs or call.outputs
    if OPERATIONS[call.op].kind not in ("collective", "p2p") or not buffers:
        return None
    return _Subject(declared.get(buffers[0].name, 0), buffers[0].name)


__all__ = ["TextHints", "unusual_orders"]
