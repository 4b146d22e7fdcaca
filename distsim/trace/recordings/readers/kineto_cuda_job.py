"""Joins the profiles of all ranks of a CUDA job to one event graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from distsim.trace.recordings.clock_alignment import align_clocks
from distsim.trace.recordings.event_graph import EventGraph
from distsim.trace.recordings.graph_builder import EventRow, GraphBuilder
from distsim.trace.recordings.readers.kineto_cuda import DeviceRun, DeviceStep
from distsim.trace.recordings.readers.kineto_rank import (
    RankReading,
    base_shifts,
    common_steps,
    recording_of_ranks,
)
from distsim.trace.recordings.recording import ClockAlignment, Recording

FORMAT = "PyTorch profile (CUDA)"
#: Operations whose members leave together.
_ALIGNING = (
    "allreduce",
    "allgather",
    "reduce_scatter",
    "reducescatter",
    "alltoall",
    "_allgather",
    "_reduce_scatter",
)
#: A kernel starts at least this long after its launch; less is no late start.
_LAUNCH_NS = 20e3
DeviceSteps = dict[tuple[int, int], DeviceStep]


def cuda_recording(readings: Sequence[RankReading], format: str = FORMAT) -> Recording:
    """The job of these ranks. Raises UsageError if they have no step in common."""
    numbers = common_steps(readings)
    bases = base_shifts(readings)
    steps: DeviceSteps = {}
    for reading in readings:
        for number in numbers:
            steps[reading.profile.rank, number] = _device_step(reading, number)
    clocks = align_clocks(_aligning_meetings(steps, bases), sorted(bases))
    job = _CudaJob(steps, numbers, {r: bases[r] + clocks.offsets_ns[r] for r in bases}, clocks)
    job.add_rows()
    graph = job.builder.graph(numbers, job.origins)
    return recording_of_ranks(
        readings, graph, format, clocks=clocks, unexplained_gap_ns=_unexplained_gaps(graph)
    )


def _device_step(reading: RankReading, number: int) -> DeviceStep:
    """A step of a rank; without runs for a rank that used no GPU."""
    if reading.device is not None:
        return reading.device[number]
    return DeviceStep(*reading.profile.steps[number], [], [])


def _aligning_meetings(
    steps: DeviceSteps, bases: Mapping[int, float]
) -> dict[Hashable, dict[int, tuple[float, float]]]:
    meetings: dict[Hashable, dict[int, tuple[float, float]]] = defaultdict(dict)
    for (rank, _), step in steps.items():
        for run in step.runs:
            if run.meeting is not None and run.label.startswith(_ALIGNING):
                meetings[run.meeting][rank] = (run.start + bases[rank], run.end + bases[rank])
    return meetings


def _unexplained_gaps(graph: EventGraph) -> dict[int, float]:
    """By rank, the time per step by which streams start late for no recorded reason."""
    columns = graph.columns
    late = (columns.lane > 0) & (graph.gap > _LAUNCH_NS)
    gaps = {}
    for rank in graph.ranks:
        total = float(graph.gap[late & (columns.rank == rank)].sum())
        if total > 0:
            gaps[rank] = total / len(graph.steps)
    return gaps


class _CudaJob:
    """Adds the rows of all ranks on one clock.

    ``shifts``: what is added to the times of a rank, before the origin of the job is subtracted.
    """

    def __init__(
        self,
        steps: DeviceSteps,
        numbers: list[int],
        shifts: Mapping[int, float],
        clocks: ClockAlignment,
    ) -> None:
        self.steps = steps
        self.numbers = numbers
        self.builder = GraphBuilder(clock_error_ns=clocks.worst_ns)
        starts = {cell: step.start + shifts[cell[0]] for cell, step in steps.items()}
        zero = min(starts.values())
        self.shifts = {rank: shift - zero for rank, shift in shifts.items()}
        self.origins = {rank: starts[rank, numbers[0]] - zero for rank in shifts}

    def add_rows(self) -> None:
        for rank in self.shifts:
            rows = _RankRows(self.builder, rank, self.shifts[rank])
            for index, number in enumerate(self.numbers):
                rows.add_step(index, self.steps[rank, number])


class _RankRows:
    """Adds the rows of one rank, step by step."""

    def __init__(self, builder: GraphBuilder, rank: int, shift: float) -> None:
        self.builder = builder
        self.rank = rank
        self.shift = shift
        self.host: int | None = None
        self.host_time = 0.0
        self.lanes: dict[str, int] = {}
        self.last_on_stream: dict[str, int] = {}
        self.computes: list[tuple[float, int]] = []
        self.communications: list[tuple[float, int]] = []
        self.pending: list[int] = []

    def add_step(self, index: int, step: DeviceStep) -> None:
        """Host rows in the order of launches and waits, each followed by what it launches."""
        if self.host is None:
            self.host_time = step.start
        launches = sorted(step.runs, key=lambda run: (run.launch, run.start))
        waits = list(step.waits)
        row_ends: dict[float, int] = {}
        for run in launches:
            while waits and waits[0].start <= run.launch:
                wait = waits.pop(0)
                self._add_wait(index, wait.start, wait.device_end, run.launch, row_ends)
            self._add_host(index, run.launch)
            row_ends[run.end] = self._add_run(index, run)
        for wait in waits:
            self._add_wait(index, wait.start, wait.device_end, step.end, row_ends)
        self._add_host(index, step.end)

    def _add_host(self, index: int, time: float) -> None:
        """The work of the host up to a time."""
        start, end = self.host_time, max(self.host_time, time)
        before = [] if self.host is None else [self.host]
        row = EventRow(self.rank, 0, "host", index, start + self.shift, end + self.shift)
        self.host = self.builder.add(row, [*before, *self.pending])
        self.host_time, self.pending = end, []

    def _add_wait(
        self, index: int, start: float, device_end: float, following: float, rows: dict[float, int]
    ) -> None:
        """A wait for the device, unless another thread launches something meanwhile."""
        if device_end in rows and start >= self.host_time and device_end <= following:
            self._add_host(index, start)
            self.pending.append(rows[device_end])
            self.host_time = device_end

    def _add_run(self, index: int, run: DeviceRun) -> int:
        before = [] if self.host is None else [self.host]
        if run.stream in self.last_on_stream:
            before.append(self.last_on_stream[run.stream])
        if run.meeting is not None:
            before += [row for _, row in self.computes[-1:]]
        elif run.awaits:
            before += [row for _, row in self.communications[-1:]]
        start = run.start + self.shift
        obeyed = [row for row in before if self.builder.rows[row].end <= start]
        lane = self.lanes.setdefault(run.stream, len(self.lanes) + 1)
        row = EventRow(
            self.rank,
            lane,
            run.label,
            index,
            start,
            run.end + self.shift,
            run.meeting,
            run.nbytes,
        )
        number = self.builder.add(row, obeyed)
        self.last_on_stream[run.stream] = number
        kept = self.computes if run.meeting is None else self.communications
        kept.append((run.end, number))
        return number
