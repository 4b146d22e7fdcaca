"""What the readers of one log share: the evidence, and what they have found so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.evidence_records import ToolReport


@dataclass
class LogContext:
    """One log. ``rank``: the rank that the file belongs to by its name, None for several ranks."""

    evidence: Evidence
    source: str
    rank: int | None = None
    #: The kinds of lines that were recognised.
    found: set[str] = field(default_factory=set)
    #: The ranks that the lines are about.
    ranks: set[int] = field(default_factory=set)

    def add_report(self, tool: str, ranks: Iterable[int], text: str) -> None:
        """Enter a conclusion of another tool, unless it was entered before."""
        self.found.add(tool)
        report = ToolReport(tool, tuple(sorted(set(ranks))), text, self.source)
        if report not in self.evidence.tool_reports:
            self.evidence.tool_reports.append(report)


def local_seconds(month: int, day: int, hour: int, minute: int, second: int) -> float | None:
    """A local time in seconds since the start of the year; None for an impossible time.

    The lines of torch's logs have no year and no time zone, so all times are compared without.
    """
    try:
        return datetime(2000, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    except ValueError:
        return None
