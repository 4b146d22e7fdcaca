"""The record of one cause that the analysis found for a hang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from distsim.hang_doctor.model.evidence_records import (
    UNKNOWN_NUMBER,
    CauseGrade,
    StackFrame,
)


class CauseLine(NamedTuple):
    """A source line that a cause refers to, and what the ranks do there."""

    ranks: tuple[int, ...]
    what: str
    frame: StackFrame | None


@dataclass
class HangCause:
    """Why nothing moves.

    ``culprits`` are the ranks that the records prove responsible; often there are none. They are
    empty unless ``grade`` is "proved". ``ranks`` are all ranks that the cause concerns. ``group``
    and ``number`` identify the call that it concerns, if any. ``of_library``: for a crash, the
    error was raised in a library.
    """

    kind: str
    grade: CauseGrade
    title: str
    culprits: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    lines: Sequence[CauseLine] = ()
    details: list[str] = field(default_factory=list)
    group: str = ""
    number: int = UNKNOWN_NUMBER
    of_library: bool = False
