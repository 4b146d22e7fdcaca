"""A recording of another tool as a distsim trace, for the commands that read traces.

The host's work becomes computes, a communication an asynchronous call, and a dependency of later
work on it a wait. So the trace's own event graph has the same times. Recordings of which the host
is not the only worker (CUDA streams), and sampled steps that do not follow each other (operation
tables), cannot be written as calls of a host; they are refused. So are jobs of which ranks are
missing, because the other ranks would wait for them forever.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from distsim.common.errors import UsageError
from distsim.operations.registry import OPERATIONS
from distsim.trace.model import (
    COLUMN_TYPES,
    NEVER,
    NO_LOCATION,
    TEXT_COLUMNS,
    TRACE_SCHEMA_VERSION,
    Trace,
)
from distsim.trace.recordings.event_graph import NO_MEETING, EventGraph, sliced_lists
from distsim.trace.recordings.recording import MeetingPartners, Recording

_HOST_LANE = 0
_MESSAGES = {"send": "isend", "recv": "irecv"}
#: Profiles do not name the type of tensors in lists.
_DTYPE = "float32"
_DEFAULT_REDUCTION = "sum"
#: Operations whose profile shows the size of one part of a list.
_PARTS = frozenset({"all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"})
#: At most this many missing ranks are named.
_MOST_NAMED = 8


def trace_of_recording(recording: Recording, file: str) -> Trace:
    """The trace of a job. Raises UsageError if the recording cannot be written as one."""
    _check_is_representable(recording, file)
    writer = _TraceWriter(recording)
    for rank in recording.graph.ranks:
        writer.add_rank(rank)
    return writer.trace(file)


def _check_is_representable(recording: Recording, file: str) -> None:
    graph = recording.graph
    remedy = f"use `distsim slow {file}`"
    if recording.missing_ranks:
        shown = ", ".join(map(str, recording.missing_ranks[:_MOST_NAMED]))
        more = ", …" if len(recording.missing_ranks) > _MOST_NAMED else ""
        whose = (
            f"ranks {shown}{more} have" if len(recording.missing_ranks) > 1 else f"rank {shown} has"
        )
        # The notes name files that could not be read: one of them may be that of a missing rank.
        hints = [*recording.notes[:_MOST_NAMED], f"give the files of all ranks, or {remedy}"]
        raise UsageError(
            f"{file}: {whose} no readable file, so the calls of the others cannot complete",
            "; ".join(hints),
        )
    if graph.independent_steps:
        raise UsageError(
            f"{file}: the steps of an operation table do not follow each other, so they form no "
            "run of calls",
            remedy,
        )
    on_host = graph.columns.lane == _HOST_LANE
    if not (on_host | ~graph.is_work).all():
        raise UsageError(f"{file}: distsim reads profiles with GPU streams for `slow` only", remedy)
    unknown = sorted(set(_operations(graph)) - set(OPERATIONS))
    if unknown:
        raise UsageError(
            f"{file}: the operation `{unknown[0]}` of this profile has no counterpart in a trace",
            remedy,
        )


def _operations(graph: EventGraph) -> Iterable[str]:
    for label in np.unique(graph.columns.label[~graph.is_work]):
        name = graph.labels[int(label)]
        yield _MESSAGES.get(name, name)


class _TraceWriter:
    """Collects the rows of a trace. ``groups``: ranks -> number in the header."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.graph = recording.graph
        self.world = tuple(range(recording.world_size))
        self.groups: dict[tuple[int, ...], int] = {self.world: 0}
        self.texts: dict[str, dict[Any, int]] = {name: {} for name in TEXT_COLUMNS}
        self.rows: list[dict[str, int]] = []
        count = len(self.graph)
        self.before = sliced_lists(self.graph.after, self.graph.before, count)
        meetings = self.graph.columns.meeting
        self.members = sliced_lists(meetings + 1, np.arange(count), self.graph.meeting_count + 1)
        self.met_ns = self.graph.columns.end - self.graph.own

    def add_rank(self, rank: int) -> None:
        columns = self.graph.columns
        rows = np.flatnonzero(columns.rank == rank)
        position = 0
        #: Event -> (position of its request, its row in the trace).
        requests: dict[int, tuple[int, int]] = {}
        free_ns = 0.0
        for event in map(int, rows):
            start, end = float(columns.start[event]), float(columns.end[event])
            awaited = [row for row in self._awaited(event) if row in requests]
            if awaited:
                ended = [requests.pop(row) for row in awaited]
                self._add_wait(event, position, ended, (min(free_ns, start), start))
                position += 1
                free_ns = start
            if columns.meeting[event] != NO_MEETING:
                requests[event] = (position, len(self.rows))
                self._add_communication(event, position, max(free_ns, start))
                position += 1
                continue
            name = self._text("name", self._label(event))
            self._add_row(event, position, "compute", start, end, name=name)
            position += 1
            free_ns = end
        if requests:
            # Nothing in the recording waits for these requests, so the rank does so at its end.
            latest = max(float(columns.end[event]) for event in requests)
            times = (free_ns, max(free_ns, latest))
            self._add_wait(int(rows[-1]), position, list(requests.values()), times)

    def _awaited(self, event: int) -> list[int]:
        """The rows that must end before an event.

        A communication does not wait for earlier sends, because they return early.
        """
        first = self.before.first
        rows = map(int, self.before.items[first[event] : first[event + 1]])
        if self.graph.columns.meeting[event] == NO_MEETING:
            return list(rows)
        return [row for row in rows if self._label(row) != "send"]

    def _label(self, event: int) -> str:
        return self.graph.labels[int(self.graph.columns.label[event])]

    def _add_communication(self, event: int, position: int, start: float) -> None:
        """Add a call that is posted at ``start``."""
        columns = self.graph.columns
        label = self._label(event)
        operation = _MESSAGES.get(label, label)
        partners = self._partners(int(columns.meeting[event]), int(columns.rank[event]))
        is_message = label in _MESSAGES
        if is_message and len(partners.ranks) != 2:
            raise UsageError(
                f"a {label} of rank {columns.rank[event]} in this profile names no other rank",
                "use `distsim slow`",
            )
        ranks = self.world if is_message else partners.ranks
        group = self.groups.setdefault(ranks, len(self.groups))
        peer = partners.root
        if is_message:
            peer = partners.ranks[1] if label == "send" else partners.ranks[0]
        nbytes = int(columns.nbytes[event]) * (len(ranks) if operation in _PARTS else 1)
        gives_nothing = not is_message and OPERATIONS[operation].gives == "none"
        row = self._add_row(
            event,
            position,
            operation,
            start,
            start,
            group=group,
            peer=NEVER if peer is None else peer,
            tag=partners.tag or 0,
            nbytes=0 if gives_nothing else nbytes,
            dtype=NEVER if gives_nothing else self._text("dtype", _DTYPE),
            handle=position,
            match=int(columns.meeting[event]),
            started_ns=round(max(float(self.met_ns[event]), start)),
            finished_ns=round(max(float(columns.end[event]), start)),
        )
        if OPERATIONS[operation].reduces:
            row["reduce_op"] = self._text("reduce_op", _DEFAULT_REDUCTION)

    def _partners(self, meeting: int, rank: int) -> MeetingPartners:
        """The recorded partners, or the members that are in the graph."""
        known = self.recording.partners.get(meeting)
        if known is not None:
            return known
        first = self.members.first
        events = self.members.items[first[meeting + 1] : first[meeting + 2]]
        ranks = sorted({int(other) for other in self.graph.columns.rank[events]})
        return MeetingPartners(tuple(ranks) or (rank,))

    def _add_wait(
        self,
        event: int,
        position: int,
        requests: list[tuple[int, int]],
        times: tuple[float, float],
    ) -> None:
        """A wait for requests, in the step of an event. ``times``: posted and returned."""
        distances = [position - request for request, _ in requests]
        row = self._add_row(event, position, "wait", *times)
        row["handle"] = requests[0][0]
        row["args"] = self._text("args", json.dumps({"waits": distances}))
        for _, number in requests:
            self.rows[number]["ended_by"] = position
            self.rows[number]["waited_ns"] = round(times[1])

    def _add_row(
        self,
        event: int,
        position: int,
        operation: str,
        posted_ns: float,
        returned_ns: float,
        **values: int,
    ) -> dict[str, int]:
        columns = self.graph.columns
        row = dict.fromkeys(COLUMN_TYPES, NEVER)
        row |= {
            "rank": int(columns.rank[event]),
            "op": self._text("op", operation),
            "group": 0,
            "tag": 0,
            "nbytes": 0,
            "place": self._text("place", NO_LOCATION),
            "iteration": self.graph.steps[int(columns.step[event])],
            "queue": self._text("queue", "host"),
            "position": position,
            "posted_ns": round(posted_ns),
            "returned_ns": round(returned_ns),
            "started_ns": round(posted_ns),
            "finished_ns": round(returned_ns),
        }
        row |= values
        self.rows.append(row)
        return row

    def _text(self, column: str, text: Any) -> int:
        table = self.texts[column]
        return table.setdefault(text, len(table))

    def trace(self, file: str) -> Trace:
        columns = {
            name: np.array([row[name] for row in self.rows], dtype=kind)
            for name, kind in COLUMN_TYPES.items()
        }
        names = {ranks: self._group_name(ranks) for ranks in self.groups}
        tables: dict[str, list[Any]] = {name: list(table) for name, table in self.texts.items()}
        tables["group"] = list(names.values())
        size = self.recording.world_size
        header = {
            "schema_version": TRACE_SCHEMA_VERSION,
            "source": "recorded",
            "name": self.recording.format,
            "file": file,
            "world_size": size,
            "nodes": 1,
            "local_size": size,
            "backend": "gloo",
            "cluster": "",
            "outcome": "completes",
            "makespan_ns": round(float(self.graph.columns.end.max())),
            "complete": True,
            "groups": [[name, list(ranks)] for ranks, name in names.items()],
            "group_options": {},
            "mesh": {},
            "imported": {
                "format": self.recording.format,
                "files": list(self.recording.files),
                "clock_error_ns": round(self.recording.clocks.worst_ns),
                "inferred_waits": self.recording.inferred_waits,
            },
        }
        return Trace(header, tables, columns)

    def _group_name(self, ranks: tuple[int, ...]) -> str:
        return "world" if ranks == self.world else f"ranks {', '.join(map(str, ranks))}"


__all__ = ["trace_of_recording"]
