"""The record of one cause that the analysis found for a hang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from distsim.hang_doctor.model.evidence_records import (
    UNKNOWN_NUMBER,
    CauseGrade,
    StackFrame,
)

#: What kind of cause it is. ``behind``: ranks have not made a call that others wait in.
#: ``diverged``: a rank makes a call that the others do not make, or skips one.
#: ``communication``: all required ranks have arrived, but the call does not complete.
#: ``connection``: two ranks set up different NCCL connections. ``finished_elsewhere``: a rank is
#: in a call that another has finished. ``missing_files``: no file was given for awaited ranks.
#: ``unknown_members``: the group of the call, or its members, are unknown. ``consequence``: ranks
#: failed because of another rank. ``tool_report``: the conclusion of another tool.
#: ``blocked``: ranks wait, and the cause is not found. ``undecided``: the files show no wait, and
#: no end of the job either. ``killed_from_outside``: somebody ended a job that already hung.
#: ``stopped``, ``data_loader``, ``kernel_wait``: what the state of a live process shows.
CauseKind = Literal[
    "crash",
    "mismatch",
    "diverged",
    "wait_for_cycle",
    "tag_mismatch",
    "behind",
    "communication",
    "connection",
    "finished_elsewhere",
    "missing_files",
    "unknown_members",
    "consequence",
    "tool_report",
    "stacks_only",
    "blocked",
    "undecided",
    "killed_from_outside",
    "stopped",
    "data_loader",
    "kernel_wait",
]


class CauseLine(NamedTuple):
    """A source line that a cause refers to, and what the ranks do there."""

    ranks: tuple[int, ...]
    what: str
    frame: StackFrame | None


@dataclass
class HangCause:
    """Why the job hangs.

    ``culprits`` are the ranks that the records prove responsible; often there are none. They are
    empty unless ``grade`` is "proved". ``ranks`` are all ranks that the cause concerns. ``group``
    and ``number`` identify the call that it concerns, if any. ``of_library``: for a crash, the
    error was raised in a library. ``details`` are the evidence and the remedy, as sentences.
    """

    kind: CauseKind
    grade: CauseGrade
    title: str
    culprits: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    lines: Sequence[CauseLine] = ()
    details: list[str] = field(default_factory=list)
    group: str = ""
    number: int = UNKNOWN_NUMBER
    of_library: bool = False
