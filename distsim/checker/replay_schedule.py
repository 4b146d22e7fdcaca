"""The order of events that leads to a standstill, as a record that can be written down and followed
again.

A schedule is a list of choices: which message an open receive takes, and (in the reading ``mixed``)
whose waiting call is buffered. A call is named by its rank, its position in the rank's program
(from 0) and its part of a batch (-1: none). Everything else that happens follows from these
choices, so whoever follows a schedule only needs the mapping `ReplaySchedule.sender_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from distsim.common.errors import UsageError
from distsim.common.records import dataclass
from distsim.findings.final_state import FinalState
from distsim.program.model import Program

if TYPE_CHECKING:
    from distsim.checker.explore.steps import SearchState, StateMachine

SCHEMA_VERSION = 1
_READING_NAMES = ("rendezvous", "early", "buffered", "mixed")


class CallId(NamedTuple):
    """A call, or a part of a batch."""

    rank: int
    position: int
    part: int = -1


class TakeChoice(NamedTuple):
    """An open receive takes a message."""

    receive: CallId
    send: CallId


class BufferChoice(NamedTuple):
    """A call that waits goes on: what it still waits for is buffered. ``call`` is the call that
    waits.
    """

    call: CallId


@dataclass(frozen=True, slots=True)
class ReplaySchedule:
    """Choices in order, under one reading of what blocks."""

    reading: str
    choices: tuple[TakeChoice | BufferChoice, ...]

    @property
    def sender_of(self) -> dict[CallId, CallId]:
        """Open receive -> the message that it takes."""
        return {
            choice.receive: choice.send for choice in self.choices if isinstance(choice, TakeChoice)
        }


def schedule_to_json(schedule: ReplaySchedule, program: Program | None = None) -> dict[str, object]:
    """Plain data for `json.dump`. With a program each call also says where it is written (``at``),
    for the reader alone.
    """

    def call(one: CallId) -> dict[str, object]:
        said: dict[str, object] = {"rank": one.rank, "position": one.position, "part": one.part}
        if program is not None:
            place = program.place(one.rank, one.position)
            said["at"] = f"{place.file}:{place.line}"
        return said

    choices = [
        {"receive": call(c.receive), "takes": call(c.send)}
        if isinstance(c, TakeChoice)
        else {"buffered": call(c.call)}
        for c in schedule.choices
    ]
    return {"schema_version": SCHEMA_VERSION, "reading": schedule.reading, "choices": choices}


def schedule_from_json(data: object) -> ReplaySchedule:
    """The schedule that `schedule_to_json` wrote. Raises UsageError where the data has another
    shape.
    """
    if (
        not isinstance(data, Mapping)
        or data.get("schema_version") != SCHEMA_VERSION
        or data.get("reading") not in _READING_NAMES
    ):
        raise UsageError(
            f"this is no schedule: expected schema_version {SCHEMA_VERSION} and a reading ({', '.join(_READING_NAMES)})",
            "write one with `distsim check FILE --format json`: it stands under `schedule`",
        )
    choices = data.get("choices")
    if not isinstance(choices, list):
        raise UsageError(
            "a schedule has `choices`, a list", "write one with `distsim check FILE --format json`"
        )
    return ReplaySchedule(
        data["reading"], tuple(_choice_from_json(i, one) for i, one in enumerate(choices))
    )


def _choice_from_json(number: int, data: object) -> TakeChoice | BufferChoice:
    if isinstance(data, Mapping) and set(data) == {"receive", "takes"}:
        return TakeChoice(
            _call_from_json(number, data["receive"]), _call_from_json(number, data["takes"])
        )
    if isinstance(data, Mapping) and set(data) == {"buffered"}:
        return BufferChoice(_call_from_json(number, data["buffered"]))
    raise UsageError(
        f"choice {number} of the schedule is neither `receive` and `takes` nor `buffered`",
        "see docs/check.md",
    )


def _call_from_json(number: int, data: object) -> CallId:
    keys = ("rank", "position", "part")
    if not isinstance(data, Mapping) or not all(type(data.get(key, -1)) is int for key in keys):
        raise UsageError(
            f"choice {number} of the schedule names a call without rank, position and part",
            "all three are integers",
        )
    return CallId(data.get("rank", -1), data.get("position", -1), data.get("part", -1))


def schedule_from_path(machine: StateMachine, path: list[int]) -> ReplaySchedule:
    """The choices of a path of the explorer, by the names of the calls."""
    state, tables = machine.initial(), machine.tables
    choices: list[TakeChoice | BufferChoice] = []
    for choice in path:
        if choice >= 0:
            choices.append(_take_choice(machine, state, choice))
            machine.take(state, choice)
        else:
            rank = -2 - choice
            choices.append(BufferChoice(CallId(rank, tables.stops[rank][state[rank]].position)))
            machine.release(state, rank)
    return ReplaySchedule(tables.reading, tuple(choices))


def _take_choice(machine: StateMachine, state: SearchState, pair: int) -> TakeChoice:
    tables, box = machine.tables, machine.box_of_pair[pair]
    receive = tables.boxes[box].any_source_receives[state[tables.served + box]]
    message = machine.messages[pair][state[tables.gone + pair]]
    return TakeChoice(
        CallId(machine.receiver[box], receive.position, receive.part),
        CallId(machine.sender_of[pair], message.position, message.part),
    )


def follow_schedule(program: Program, schedule: ReplaySchedule) -> FinalState:
    """Follow a schedule and return where it ends. What it leaves open is taken from the lowest
    sender that is there.

    Raises UsageError where a choice is not possible in this program.
    """
    from distsim.checker.explore.encoding import ProgramEncoding
    from distsim.checker.explore.persistent_sets import BranchChooser
    from distsim.checker.explore.steps import StateMachine
    from distsim.checker.explore.terminal_states import standstill_at
    from distsim.checker.matching.channel_layout import build_channel_layout

    absent = frozenset(f.rank for f in program.faults if f.kind == "absent")
    machine = StateMachine(ProgramEncoding(build_channel_layout(program), schedule.reading, absent))
    state = machine.initial()
    boxes = range(len(machine.tables.boxes))
    for number, choice in enumerate(schedule.choices):
        if isinstance(choice, BufferChoice):
            _apply_buffer_choice(machine, state, number, choice)
            continue
        pairs = [
            pair
            for box in boxes
            for pair in machine.takes(state, box)
            if _take_choice(machine, state, pair) == choice
        ]
        if not pairs:
            raise _impossible_choice(
                number,
                f"rank {choice.receive.rank} cannot take that message of rank {choice.send.rank} here",
            )
        machine.take(state, pairs[0])
    chooser = BranchChooser(machine)
    while pairs := chooser.branches(state).pairs:
        machine.take(state, pairs[0])
    return standstill_at(machine, state)


def _apply_buffer_choice(
    machine: StateMachine, state: SearchState, number: int, choice: BufferChoice
) -> None:
    rank = choice.call.rank
    if not 0 <= rank < machine.size or not machine.can_release(state, rank):
        raise _impossible_choice(number, f"rank {rank} waits for nothing that could be buffered")
    if machine.tables.stops[rank][state[rank]].position != choice.call.position:
        raise _impossible_choice(number, f"rank {rank} waits in another call")
    machine.release(state, rank)


def _impossible_choice(number: int, why: str) -> UsageError:
    return UsageError(
        f"choice {number} of the schedule does not fit this program: {why}",
        "check the file again for a new schedule",
    )
