"""Collects the rows of an event graph one at a time, for readers that walk through events."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from distsim.trace.recordings.event_graph import (
    NO_MEETING,
    EventColumns,
    EventGraph,
    Flags,
    Numbers,
    Times,
)
from distsim.trace.recordings.recording import places_in_step


class EventRow(NamedTuple):
    """One row. ``meeting``: a key that all members share, None for work.

    ``may_wait``: False for a one-sided operation, which returns whatever its partner does.
    ``source``: the row of the trace that it comes from.
    """

    rank: int
    lane: int
    label: str
    step: int
    start: float
    end: float
    meeting: Hashable = None
    nbytes: int = 0
    provides: bool = True
    may_wait: bool = True
    source: int = -1


@dataclass
class GraphBuilder:
    """Rows and edges so far; ``add`` returns the number of the new row.

    ``clock_error_ns``: a member that seems to end at most this long before another one started did
    wait for it.
    """

    rows: list[EventRow] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    clock_error_ns: float = 0.0

    def add(self, row: EventRow, predecessors: Iterable[int] = ()) -> int:
        number = len(self.rows)
        self.rows.append(row)
        for predecessor in predecessors:
            self.before.append(predecessor)
            self.after.append(number)
        return number

    def meeting_numbers(self) -> dict[Hashable, int]:
        """The keys of all meetings, numbered in the order of their first rows."""
        numbers: dict[Hashable, int] = {}
        for row in self.rows:
            if row.meeting is not None:
                numbers.setdefault(row.meeting, len(numbers))
        return numbers

    def graph(self, steps: Sequence[int], origins: dict[int, float]) -> EventGraph:
        """The graph of all rows.

        ``origins``: rank -> the time from which the gap of a first row counts, by default 0.
        """
        fields = list(zip(*self.rows, strict=True)) if self.rows else [()] * len(EventRow._fields)
        by_name = dict(zip(EventRow._fields, fields, strict=True))
        labels: dict[str, int] = {}
        label = [labels.setdefault(name, len(labels)) for name in by_name["label"]]
        meetings = self.meeting_numbers()
        meeting = [NO_MEETING if key is None else meetings[key] for key in by_name["meeting"]]
        rank, step = _numbers(by_name["rank"]), _numbers(by_name["step"])
        start, end = _times(by_name["start"]), _times(by_name["end"])
        provides: Flags = np.array(by_name["provides"], dtype=bool)
        meeting_column = _numbers(meeting)
        columns = EventColumns(
            rank=rank,
            lane=_numbers(by_name["lane"]),
            label=_numbers(label),
            step=step,
            place=places_in_step(rank, step),
            start=start,
            end=end,
            meeting=meeting_column,
            provides=provides,
            waits=_waiting_members(start, end + self.clock_error_ns, meeting_column, provides),
            nbytes=_numbers(by_name["nbytes"]),
            origin=_times([origins.get(int(r), 0.0) for r in rank]),
            source=_numbers(by_name["source"]),
        )
        columns.waits[~np.array(by_name["may_wait"], dtype=bool)] = False
        return EventGraph(columns, _numbers(self.before), _numbers(self.after), list(labels), steps)


def _waiting_members(start: Times, end: Times, meeting: Numbers, provides: Flags) -> Flags:
    """Which members waited for those that provide: all that did not end before the last start.

    A small send returns before its receive is posted, and a rank returns early from a collective
    with a root. Such a row depends on nothing but itself.
    """
    in_meeting = meeting != NO_MEETING
    latest = np.full(int(meeting.max(initial=NO_MEETING)) + 2, -np.inf)
    counted = in_meeting & provides
    np.maximum.at(latest, meeting[counted], start[counted])
    return np.asarray(in_meeting & (end >= latest[meeting]))


def _numbers(values: Sequence[int]) -> Numbers:
    return np.array(values, dtype=np.int64)


def _times(values: Sequence[float]) -> Times:
    return np.array(values, dtype=np.float64)
