"""What a check, a simulation or a run has to tell the user."""

from __future__ import annotations

from typing import Literal

from distsim.common.records import dataclass

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True, order=True)
class SourceLocation:
    """Where a call is written. ``line`` and ``column`` count from 1; 0 where nothing was
    written.
    """

    file: str
    line: int
    column: int
    op: str = ""
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about the program. ``code`` is a key of `distsim.findings.codes.CODES`.

    ``ranks`` are those affected, ``core`` the cause among them (the cycle, or who waits on one that
    left). ``message`` is one sentence or a few lines of plain text; ``help`` says what to do about
    it. ``slips``: places of calls that are themselves the mistake, as one too many in a branch:
    nothing else is to be said about them.
    """

    code: str
    severity: Severity
    message: str
    ranks: tuple[int, ...] = ()
    core: tuple[int, ...] = ()
    help: tuple[str, ...] = ()
    places: tuple[SourceLocation, ...] = ()
    slips: tuple[SourceLocation, ...] = ()
