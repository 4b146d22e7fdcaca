"""The record of an event order that leads to a failure; it can be saved and followed again.

A schedule is a list of choices: which message an any-source receive takes, and (in the reading
``mixed``) whose waiting call is buffered. Everything else that happens follows from these choices,
so a program that follows a schedule only needs the mapping `ReplaySchedule.sender_of`.

A call is named by its rank, its position in the rank's program (from 0) and its part of a batch.
This module knows nothing of the explorer; see `explore.schedule_paths` for the conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from distsim.common.errors import UsageError
from distsim.common.records import dataclass
from distsim.program.model import Program

SCHEMA_VERSION = 1
#: The four readings, from the strictest on; ``mixed`` may buffer each call or not.
READING_ORDER = ("rendezvous", "early", "buffered", "mixed")


class CallId(NamedTuple):
    """A call, or a part of a batch (``part`` is -1 for a whole call)."""

    rank: int
    position: int
    part: int = -1


class TakeChoice(NamedTuple):
    """An any-source receive takes a message."""

    receive: CallId
    send: CallId


class BufferChoice(NamedTuple):
    """A waiting call returns, because everything it still waits for is buffered."""

    call: CallId


@dataclass(frozen=True, slots=True)
class ReplaySchedule:
    """Choices in order, under one reading."""

    reading: str
    choices: tuple[TakeChoice | BufferChoice, ...]

    @property
    def sender_of(self) -> dict[CallId, CallId]:
        """Any-source receive -> the message that it takes."""
        takes = [choice for choice in self.choices if isinstance(choice, TakeChoice)]
        return {choice.receive: choice.send for choice in takes}


def schedule_to_json(schedule: ReplaySchedule, program: Program | None = None) -> dict[str, object]:
    """Plain data for `json.dump`.

    With a program, each call also gets its source location (``at``). It is for human readers;
    `schedule_from_json` ignores it.
    """
    choices = [_choice_to_json(choice, program) for choice in schedule.choices]
    return {"schema_version": SCHEMA_VERSION, "reading": schedule.reading, "choices": choices}


def _choice_to_json(
    choice: TakeChoice | BufferChoice, program: Program | None
) -> dict[str, object]:
    if isinstance(choice, BufferChoice):
        return {"buffered": _call_to_json(choice.call, program)}
    return {
        "receive": _call_to_json(choice.receive, program),
        "takes": _call_to_json(choice.send, program),
    }


def _call_to_json(call: CallId, program: Program | None) -> dict[str, object]:
    data: dict[str, object] = {"rank": call.rank, "position": call.position, "part": call.part}
    if program is not None:
        place = program.place(call.rank, call.position)
        data["at"] = f"{place.file}:{place.line}"
    return data


def schedule_from_json(data: object) -> ReplaySchedule:
    """The schedule that `schedule_to_json` wrote.

    Raises UsageError if the data has another shape.
    """
    if not isinstance(data, Mapping) or not _has_known_header(data):
        raise UsageError(
            f"this is no schedule: expected schema_version {SCHEMA_VERSION} and a reading "
            f"({', '.join(READING_ORDER)})",
            "write one with `distsim check FILE --format json`: it stands under `schedule`",
        )
    choices = data.get("choices")
    if not isinstance(choices, list):
        raise UsageError(
            "a schedule has `choices`, a list", "write one with `distsim check FILE --format json`"
        )
    return ReplaySchedule(
        data["reading"],
        tuple(_choice_from_json(number, choice) for number, choice in enumerate(choices)),
    )


def _has_known_header(data: Mapping[str, object]) -> bool:
    return data.get("schema_version") == SCHEMA_VERSION and data.get("reading") in READING_ORDER


def _choice_from_json(number: int, data: object) -> TakeChoice | BufferChoice:
    if isinstance(data, Mapping) and set(data) == {"receive", "takes"}:
        return TakeChoice(
            _call_from_json(number, data["receive"]), _call_from_json(number, data["takes"])
        )
    if isinstance(data, Mapping) and set(data) == {"buffered"}:
        return BufferChoice(_call_from_json(number, data["buffered"]))
    raise UsageError(
        f"choice {number} of the schedule is neither `receive` and `takes` nor `buffered`",
        "see docs/explanation/verdicts.md",
    )


def _call_from_json(number: int, data: object) -> CallId:
    keys = ("rank", "position", "part")
    if not isinstance(data, Mapping) or not all(type(data.get(key, -1)) is int for key in keys):
        raise UsageError(
            f"choice {number} of the schedule names a call without rank, position and part",
            "all three are integers",
        )
    return CallId(data.get("rank", -1), data.get("position", -1), data.get("part", -1))
