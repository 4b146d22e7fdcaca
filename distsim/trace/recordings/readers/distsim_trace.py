"""distsim's own traces, simulated or recorded by `distsim run --real --trace`.

Rows of the trace already are meetings, waits and computations. Edges within a rank follow from the
order of its calls, and from ``handle`` and ``ended_by`` for requests. Two cases:

- On the host (gloo, mpi), a call starts its communication when it is posted. The host goes on when
  the call returns, or at once for an asynchronous call, until its wait.
- On streams (nccl), a call is a launch. Work runs on its stream in order. Communication starts
  after the computations that were launched before it, and later computations wait for it. A trace
  does not hold waits between streams; only those edges are kept which the recording obeyed.

Calls without an end (of a run that failed) are omitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from distsim.common.errors import UsageError
from distsim.trace.jsonl import TRACE_SUFFIXES, read_trace
from distsim.trace.model import NEVER, Trace, TraceCall
from distsim.trace.recordings.event_graph import NO_MEETING
from distsim.trace.recordings.graph_builder import EventRow, GraphBuilder
from distsim.trace.recordings.recording import Recording

FORMAT = "distsim trace"
HOST_LANE = 0
_COMMUNICATION_LANE = 16
#: Rooted collectives in which the others wait for the root only.
_ROOT_PROVIDES = ("broadcast", "scatter", "broadcast_object_list", "scatter_object_list")


def is_distsim_trace(path: Path) -> bool:
    """Whether the file's name is that of a trace."""
    return path.name.endswith(TRACE_SUFFIXES)


def read_distsim_trace(path: Path) -> Recording:
    """Read one trace with all ranks. Raises UsageError if it is damaged or empty."""
    return recording_of_trace(read_trace(path), str(path))


def recording_of_trace(trace: Trace, file: str) -> Recording:
    """The event graph of a trace in memory."""
    if not len(trace):
        raise UsageError(f"{file} contains no calls", "record a run with at least one iteration")
    builder = GraphBuilder()
    iterations = sorted({int(number) for number in trace["iteration"]})
    steps = {number: i for i, number in enumerate(iterations)}
    on_streams = trace.header.get("backend") == "nccl"
    omitted = 0
    first_row = 0
    for rank, rank_calls in groupby(trace.rows(), key=lambda call: call.rank):
        calls = list(rank_calls)
        of_rank = _RankRows(builder, rank, steps, calls, first_row)
        first_row += len(calls)
        omitted += of_rank.add_stream_calls() if on_streams else of_rank.add_host_calls()
    if not builder.rows:
        raise UsageError(
            f"{file}: no call of this run has ended: the job hangs", f"use `distsim doctor {file}`"
        )
    graph = builder.graph(iterations, {})
    verb = "call that never ended was" if omitted == 1 else "calls that never ended were"
    notes = (f"{omitted} {verb} omitted",) if omitted else ()
    return Recording(
        graph,
        FORMAT,
        (file,),
        world_size=trace.world_size,
        operation_count=len(trace),
        unended_calls=omitted,
        notes=notes,
    )


class _RankRows:
    """Adds the rows of one rank. ``host``: the last row of the host.

    ``first_row``: the number of its first call among the rows of the trace.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        rank: int,
        steps: dict[int, int],
        calls: list[TraceCall],
        first_row: int,
    ) -> None:
        self.builder = builder
        self.rank = rank
        self.steps = steps
        self.calls = calls
        self.host: int | None = None
        #: Position of the call that ends requests -> (rows of these requests).
        self.ended_at: dict[int, list[int]] = {}
        self.row_of = {
            (call.position, call.part): row for row, call in enumerate(calls, start=first_row)
        }
        self.returned = {call.position: call.returned_ns for call in calls if call.part < 0}

    def add_host_calls(self) -> int:
        """Add the rows of a rank whose host does all work. Returns the number of omitted calls."""
        omitted = 0
        for _, at_position in groupby(self.calls, key=lambda call: call.position):
            call, *parts = at_position
            if parts:
                omitted += self._add_host_batch(call, parts)
            elif call.match == NO_MEETING:
                omitted += not self._add_host_work(call, call.posted_ns)
            else:
                omitted += not self._add_host_communication(call, call)
        return omitted

    def _add_host_batch(self, batch: TraceCall, parts: list[TraceCall]) -> int:
        """The messages of a batch start together; a blocking batch returns after the last one."""
        if batch.posted_ns == NEVER:
            return 1 + len(parts)
        posted = float(batch.posted_ns)
        start = self._row(batch, HOST_LANE, posted, posted)
        self.host = self.builder.add(start, self._after_host())
        omitted = sum(not self._add_host_communication(part, batch) for part in parts)
        return omitted + (not self._add_host_work(batch, batch.posted_ns))

    def _add_host_work(self, call: TraceCall, posted_ns: int) -> bool:
        """A computation, a wait, or another call without partners."""
        if posted_ns == NEVER or call.returned_ns == NEVER:
            return False
        awaited = self._requests_ended_at(call.position, call.returned_ns)
        ready = max([self.builder.rows[row].end for row in awaited], default=0.0)
        start = max(float(posted_ns), ready)
        row = self._row(call, HOST_LANE, start, float(call.returned_ns))
        self.host = self.builder.add(row, [*self._after_host(), *awaited])
        return True

    def _add_host_communication(self, call: TraceCall, posted_by: TraceCall) -> bool:
        """A collective or a message that ``posted_by`` starts: the call itself, or its batch."""
        if posted_by.posted_ns == NEVER or call.finished_ns == NEVER:
            return False
        is_blocking = call.ended_by == NEVER and call.handle == NEVER
        ender = call.position if is_blocking else call.ended_by
        # A callback stamps the end, sometimes after the host has gone on already.
        limit = self.returned.get(ender, NEVER)
        end = call.finished_ns if limit == NEVER else min(call.finished_ns, limit)
        start = float(min(posted_by.posted_ns, end))
        is_part = posted_by is not call
        lane = HOST_LANE if is_blocking and not is_part else _COMMUNICATION_LANE
        row = self._row(call, lane, start, float(end), meeting=call.match)
        awaited = [] if is_part else self._requests_ended_at(call.position, int(start))
        number = self.builder.add(row, [*self._after_host(), *awaited])
        if is_blocking and not is_part:
            self.host = number
        elif ender != NEVER:
            self.ended_at.setdefault(ender, []).append(number)
        return True

    def _requests_ended_at(self, position: int, latest_ns: int) -> list[int]:
        """The rows of requests that a call ends, except those stamped after it went on."""
        rows = self.ended_at.pop(position, [])
        return [row for row in rows if self.builder.rows[row].end <= latest_ns]

    # --- streams ---

    def add_stream_calls(self) -> int:
        """Add the rows of a rank that launches its work on streams."""
        omitted = 0
        last_on_queue: dict[str, list[int]] = {}
        #: (position of a batch, queue) -> what its parts follow. They run next to each other.
        before_batch: dict[tuple[int, str], list[int]] = {}
        batches = {call.position for call in self.calls if call.part >= 0}
        last_compute: int | None = None
        pending: list[int] = []
        for call in self.calls:
            if call.posted_ns == NEVER or call.returned_ns == NEVER:
                omitted += 1
                continue
            launch = self._row(call, HOST_LANE, float(call.posted_ns), float(call.returned_ns))
            on_stream = call.queue != "host" and call.started_ns != NEVER
            if call.part < 0:
                name = "launch" if on_stream else launch.label
                self.host = self.builder.add(launch._replace(label=name), self._after_host())
            is_batch = call.part < 0 and call.position in batches
            if is_batch or not on_stream:
                continue
            if call.finished_ns == NEVER or call.started_ns == NEVER:
                omitted += 1
                continue
            before = list(last_on_queue.get(call.queue, ()))
            if call.part >= 0:
                before = list(before_batch.setdefault((call.position, call.queue), before))
            if call.match == NO_MEETING:
                before += pending
                number = self._add_stream_work(call, before)
                pending, last_compute = [], number
            else:
                before += [] if last_compute is None else [last_compute]
                number = self._add_stream_communication(call, before)
                pending.append(number)
            if call.part >= 1:
                last_on_queue.setdefault(call.queue, []).append(number)
            else:
                last_on_queue[call.queue] = [number]
        return omitted

    def _add_stream_work(self, call: TraceCall, before: list[int]) -> int:
        start = float(max(call.started_ns, call.posted_ns))
        row = self._row(call, self._lane(call.queue), start, float(max(call.finished_ns, start)))
        return self.builder.add(row, self._obeyed(before, row.start))

    def _add_stream_communication(self, call: TraceCall, before: list[int]) -> int:
        """A member arrives when its launch and the work before it are done.

        The trace holds only the time when the last member arrived.
        """
        before = self._obeyed(before, float(call.started_ns))
        ends = [self.builder.rows[row].end for row in before]
        start = min(max([float(call.posted_ns), *ends]), float(call.finished_ns))
        lane = self._lane(call.queue)
        row = self._row(call, lane, start, float(call.finished_ns), meeting=call.match)
        return self.builder.add(row, self._obeyed(before, start))

    def _obeyed(self, before: list[int], start: float) -> list[int]:
        return [row for row in before if self.builder.rows[row].end <= start]

    def _lane(self, queue: str) -> int:
        names = sorted({call.queue for call in self.calls})
        return 1 + names.index(queue)

    # --- both ---

    def _after_host(self) -> Iterator[int]:
        if self.host is not None:
            yield self.host

    def _row(
        self, call: TraceCall, lane: int, start: float, end: float, meeting: int | None = None
    ) -> EventRow:
        is_receiver = call.op in _ROOT_PROVIDES and call.peer not in (None, call.rank)
        return EventRow(
            self.rank,
            lane,
            call.name or call.op,
            self.steps[call.iteration],
            start,
            max(start, end),
            meeting,
            max(call.nbytes, 0),
            provides=not is_receiver,
            may_wait=call.op != "put_signal",
            source=self.row_of[call.position, call.part],
        )
