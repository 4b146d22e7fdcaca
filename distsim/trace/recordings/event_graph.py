"""The events of all ranks with their dependencies: exact replay, and many what-ifs in one pass.

A row is a piece of work on one rank, or one rank's part in a communication. Edges connect rows of
the same rank: the previous row of a lane, a launch, a wait. Rows of one *meeting* belong to the
same communication. From the recorded times follow

- ``own``: the duration without waiting. Work: end - start. Communication: end - the latest start
  of the row itself and of the members that it waits for.
- ``gap``: start - the latest end of its predecessors, or the origin for a row without any.
- ``waited``: how long a member waited for the last member to start.

A replay computes ``start = latest end of predecessors + gap`` and ``end = start + own``, where a
communication first waits for its members. Times are whole nanoseconds in float64, which is exact
up to 2^53 ns (104 days), so a replay of the recorded values reproduces every time. A graph with a
wrong edge does so, too, by a negative gap; therefore `negative_gaps` must be empty.

The graph knows no rules of a backend. The recording already obeyed them.

Method: Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis",
arXiv 2505.05713. Unlike there, one graph holds all ranks, and a pass evaluates many what-ifs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.common.errors import UsageError

Times = NDArray[np.float64]
Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: The meeting of rows that are no communication.
NO_MEETING = -1
#: A communication that ended this long before its last member started has wrong clocks.
CLOCK_FAULT_NS = 10e6
#: What-ifs are evaluated in blocks that need at most this much memory.
_BLOCK_BYTES = 256 << 20


class CyclicDependencies(UsageError):
    """The edges and meetings of a graph form a cycle, so that some rows can never start."""


@dataclass(frozen=True, eq=False)
class EventColumns:
    """The columns of an event graph, one entry per row.

    ``lane`` 0 is the host; other lanes are streams or communications. ``label`` indexes
    ``EventGraph.labels``. ``place`` is the same number for rows that do the same work in other
    steps and on other ranks. ``provides``: the other members of its meeting wait for this row's
    start. ``waits``: this row waits for the members that provide. ``origin`` is the time from
    which the gap of a row without predecessors counts. ``source``: the row of the trace that an
    event comes from, -1 for none.
    """

    rank: Numbers
    lane: Numbers
    label: Numbers
    step: Numbers
    place: Numbers
    start: Times
    end: Times
    meeting: Numbers
    provides: Flags
    waits: Flags
    nbytes: Numbers
    origin: Times
    source: Numbers | None = None


class ReplayLevel(NamedTuple):
    """Rows and meetings that a replay evaluates together.

    The ``*_first`` arrays are offsets for `numpy.maximum.reduceat`.
    """

    rows: Numbers
    predecessors: Numbers
    predecessors_first: Numbers
    meetings: Numbers
    providers: Numbers
    providers_first: Numbers
    ending: Numbers


class SlicedLists(NamedTuple):
    """Lists of different lengths in one array: list i is ``items[first[i]:first[i + 1]]``."""

    items: Numbers
    first: Numbers

    def gather(self, wanted: Numbers) -> tuple[Numbers, Numbers]:
        """The items of some lists, one after the other, and where each list begins."""
        counts = self.first[wanted + 1] - self.first[wanted]
        begins = np.cumsum(counts) - counts
        offsets = np.arange(int(counts.sum())) - np.repeat(begins, counts)
        return self.items[np.repeat(self.first[wanted], counts) + offsets], begins


def sliced_lists(keys: Numbers, items: Numbers, count: int) -> SlicedLists:
    """Group ``items`` by ``keys``, which are below ``count``."""
    order = np.argsort(keys, kind="stable")
    first = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(keys, minlength=count), out=first[1:])
    return SlicedLists(items[order], first)


@dataclass(frozen=True, eq=False)
class EventGraph:
    """Rows, edges ``before -> after`` within a rank, and the names of labels and steps.

    ``independent_steps``: every step starts at its origin, whatever happened in the step before,
    as in tables of sampled steps. Otherwise one step continues the previous one. ``late_start``
    marks rows whose gap is a late start that a what-if may remove.
    """

    columns: EventColumns
    before: Numbers
    after: Numbers
    labels: Sequence[str]
    steps: Sequence[int]
    independent_steps: bool = False
    late_start: Flags | None = None

    def __len__(self) -> int:
        return len(self.columns.rank)

    @property
    def is_work(self) -> Flags:
        return np.asarray(self.columns.meeting == NO_MEETING)

    @cached_property
    def ranks(self) -> list[int]:
        return [int(rank) for rank in np.unique(self.columns.rank)]

    @cached_property
    def meeting_count(self) -> int:
        return int(self.columns.meeting.max(initial=NO_MEETING)) + 1

    # --- recorded values ---

    @cached_property
    def latest_start(self) -> Times:
        """By meeting, the latest start of the members that the others wait for."""
        columns = self.columns
        latest = np.full(self.meeting_count + 1, -np.inf)
        counted = columns.provides & ~self.is_work
        np.maximum.at(latest, columns.meeting[counted], columns.start[counted])
        return latest

    @cached_property
    def own(self) -> Times:
        """The recorded duration of each row without waiting; 0 where the clocks are wrong."""
        columns = self.columns
        own = columns.end - np.maximum(columns.start, self.latest_start[self._awaited])
        own[~self.is_work & (own <= -CLOCK_FAULT_NS)] = 0
        return own

    @cached_property
    def waited(self) -> Times:
        """How long each row waited for the last member of its meeting to start."""
        waited = self.latest_start[self._awaited] - self.columns.start
        return np.maximum(waited, 0)

    @cached_property
    def gap(self) -> Times:
        ends = np.concatenate([self.columns.end, self._origins[0]])
        predecessors, first = self._predecessors.gather(np.arange(len(self)))
        return self.columns.start - np.maximum.reduceat(ends[predecessors], first)

    def negative_gaps(self) -> Numbers:
        """Rows that start before a predecessor ends: edges that contradict the recording."""
        return np.flatnonzero(self.gap < 0)

    # --- replay ---

    def replay(self, own: Times | None = None, gap: Times | None = None) -> tuple[Times, Times]:
        """The start and end of every row with these durations; the recorded ones by default.

        ``own`` has one column per what-if: shape (rows, k), or (rows,) for a single one.
        """
        own = self.own if own is None else own
        gap = self.gap if gap is None else gap
        columns = own if own.ndim == 2 else own[:, None]
        shape = (len(self), columns.shape[1])
        origins = np.repeat(self._origins[0][:, None], shape[1], axis=1)
        end = np.concatenate([np.zeros(shape), origins])
        start = np.zeros(shape)
        complete = np.full((self.meeting_count + 1, shape[1]), -np.inf)
        awaited = self._awaited
        for level in self.levels:
            ready = np.maximum.reduceat(end[level.predecessors], level.predecessors_first, axis=0)
            start[level.rows] = ready + gap[level.rows, None]
            if len(level.meetings):
                arrivals = start[level.providers]
                complete[level.meetings] = np.maximum.reduceat(
                    arrivals, level.providers_first, axis=0
                )
            ending = level.ending
            met = np.maximum(start[ending], complete[awaited[ending]])
            end[ending] = met + columns[ending]
        if own.ndim == 1:
            return start[:, 0], end[: len(self), 0]
        return start, end[: len(self)]

    def step_times(self, own: Times | None = None, gap: Times | None = None) -> Times:
        """The duration of each step in each what-if: shape (steps,) or (steps, k).

        Consecutive steps are cut at the time when the last rank finishes a step, so the durations
        add up to the total time.
        """
        own = self.own if own is None else own
        if own.ndim == 1:
            return self._step_times(self.replay(own, gap)[1][:, None])[:, 0]
        per_column = len(self) * 8 * 5
        block = max(1, int(_BLOCK_BYTES // max(per_column, 1)))
        parts = [
            self._step_times(self.replay(own[:, first : first + block], gap)[1])
            for first in range(0, own.shape[1], block)
        ]
        return np.concatenate(parts, axis=1)

    def _step_times(self, end: Times) -> Times:
        order, first = self._rows_by_step
        last_end = np.maximum.reduceat(end[order], first, axis=0)
        if self.independent_steps:
            origins = np.minimum.reduceat(self.columns.origin[order], first)
            return np.asarray(last_end - origins[:, None])
        borders = np.maximum.accumulate(last_end, axis=0)
        origin = np.full((1, end.shape[1]), self.columns.origin.min())
        return np.diff(np.concatenate([origin, borders]), axis=0)

    @cached_property
    def _rows_by_step(self) -> tuple[Numbers, Numbers]:
        counted = np.flatnonzero(self.columns.step >= 0)
        lists = sliced_lists(self.columns.step[counted], counted, len(self.steps))
        return lists.items, lists.first[:-1]

    # --- the order of evaluation, computed once ---

    @cached_property
    def _awaited(self) -> Numbers:
        """The meeting that a row waits for; an extra one that is always complete if none."""
        columns = self.columns
        waits = columns.waits & ~self.is_work
        return np.where(waits, columns.meeting, self.meeting_count)

    @cached_property
    def _origins(self) -> tuple[Times, Numbers]:
        """The distinct origins, and the number of each row's origin."""
        return np.unique(self.columns.origin, return_inverse=True)

    @cached_property
    def _predecessors(self) -> SlicedLists:
        """By row, its predecessors. Origins are further predecessors with numbers after the rows.

        The origin is a predecessor only of rows without another one.
        """
        count = len(self)
        is_first = np.ones(count, dtype=bool)
        is_first[self.after] = False
        first_rows = np.flatnonzero(is_first)
        origins = count + self._origins[1][first_rows]
        after = np.concatenate([self.after, first_rows])
        before = np.concatenate([self.before, origins])
        return sliced_lists(after, before, count)

    @cached_property
    def levels(self) -> list[ReplayLevel]:
        """Groups of rows in an order in which each group depends only on earlier ones."""
        columns, count = self.columns, len(self)
        successors = sliced_lists(self.before, self.after, count)
        missing = np.bincount(self.after, minlength=count)
        in_meeting = np.flatnonzero(~self.is_work)
        providers_rows = in_meeting[columns.provides[in_meeting]]
        providers = sliced_lists(
            columns.meeting[providers_rows], providers_rows, self.meeting_count
        )
        waiting_rows = np.flatnonzero(self._awaited < self.meeting_count)
        waiting = sliced_lists(columns.meeting[waiting_rows], waiting_rows, self.meeting_count)
        absent = np.bincount(columns.meeting[providers_rows], minlength=self.meeting_count + 1)
        started = np.zeros(count, dtype=bool)
        levels: list[ReplayLevel] = []
        ended = 0
        rows = np.flatnonzero(missing == 0)
        while len(rows):
            started[rows] = True
            arrived = rows[columns.provides[rows] & (columns.meeting[rows] >= 0)]
            arrived_at = columns.meeting[arrived]
            np.subtract.at(absent, arrived_at, 1)
            meetings = np.unique(arrived_at)
            meetings = meetings[absent[meetings] == 0]
            # A row ends now if its meeting is complete already, or becomes complete in this level.
            ending = [rows[absent[self._awaited[rows]] == 0]]
            if len(meetings):
                members = waiting.gather(meetings)[0]
                ending.append(members[started[members]])
            ends = np.unique(np.concatenate(ending))
            levels.append(self._level(rows, meetings, providers, ends))
            ended += len(ends)
            following = successors.gather(ends)[0]
            np.subtract.at(missing, following, 1)
            candidates = np.unique(following)
            rows = candidates[missing[candidates] == 0]
        if ended < count:
            raise CyclicDependencies(
                f"the dependencies of this recording form a cycle: {count - ended} of {count} "
                "events can never start",
                "check that the files belong to one run",
            )
        return levels

    def _level(
        self, rows: Numbers, meetings: Numbers, providers: SlicedLists, ending: Numbers
    ) -> ReplayLevel:
        predecessors, predecessors_first = self._predecessors.gather(rows)
        members, members_first = providers.gather(meetings)
        return ReplayLevel(
            rows, predecessors, predecessors_first, meetings, members, members_first, ending
        )
