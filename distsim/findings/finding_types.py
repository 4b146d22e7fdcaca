"""The records of findings: what a check, a simulation or a run reports to the user."""

from __future__ import annotations

from typing import Literal

from distsim.common.records import dataclass

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True, order=True)
class SourceLocation:
    """The place of a call in a file.

    ``line`` and ``column`` count from 1; 0 if the call is not written in the file.
    """

    file: str
    line: int
    column: int
    op: str = ""
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about the program. ``code`` is a key of `distsim.findings.codes.CODES`.

    ``ranks`` are the affected ranks. ``core`` is the cause among them: the ranks of a wait-for
    cycle, or those that wait directly for a rank that has exited. ``message`` is one sentence or a
    few lines of plain text; ``help`` says what to do. ``slips``: places of calls that are themselves
    the mistake, for example an extra call in a branch. They need no further finding. ``awaited``:
    the exited ranks for which ``core`` waits; how they ended needs no further finding either.
    """

    code: str
    severity: Severity
    message: str
    ranks: tuple[int, ...] = ()
    core: tuple[int, ...] = ()
    help: tuple[str, ...] = ()
    places: tuple[SourceLocation, ...] = ()
    slips: tuple[SourceLocation, ...] = ()
    awaited: tuple[int, ...] = ()
