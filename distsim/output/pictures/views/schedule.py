"""The schedule of a pipeline: a lane per rank, a box per pass with the number of its micro-batch,
time to the right.

Forward passes, backward passes and the halves of a backward pass (input gradients and weight
gradients) differ in lightness. Later chunks of a rank have lighter fills. An arrow leads from the
pass that produces a message to its receiver. A box covers the computes of its pass and the gaps
between them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from distsim.common.errors import UsageError
from distsim.common.units import show_ns
from distsim.operations.registry import COMPUTE_OPS
from distsim.output.pictures.components.lane_chart import (
    ChartArea,
    LaneBar,
    LaneChart,
    LaneNameStyle,
    lane_count_text,
    note_on_drawn_rank,
)
from distsim.output.pictures.components.view_interface import (
    GalleryExample,
    PictureInput,
    PictureView,
    require_input,
)
from distsim.output.pictures.drawing.box_diagram import clipped
from distsim.output.pictures.drawing.palette import (
    GREY,
    LINE_COLOUR,
    MESSAGE_COLOUR,
    PALE_FILL,
    PASS_FILLS,
    lightened,
)
from distsim.output.pictures.drawing.tracks import TrackBand
from distsim.output.trace_data.activity import pass_letter
from distsim.output.trace_data.lanes import (
    RankLane,
    RankRows,
    group_equal_steps,
    group_ranks_into_lanes,
    most_repeated_step,
    representative_step,
)
from distsim.output.trace_data.messages import messages_between_lanes
from distsim.output.trace_data.selection import (
    RunSelection,
    selected_ranks,
    selection_text,
    time_window,
)
from distsim.program.model import Program
from distsim.trace.model import Trace

#: The largest number of lanes; more are folded. More arrows than this would hide each other.
MAX_LANES, MAX_ARROWS = 48, 260
_LEFT, _TOP, _HEIGHT, _GAP = 156.0, 104.0, 24.0, 10.0
_NAME_STYLE = LaneNameStyle((12,), _LEFT - 24, 11, 23, title_y_without_note=16)
#: A short pass is this wide, in pixels, so that it has room for its number; limits of the chart.
_NUMBER_WIDTH, _MIN_WIDTH, _MAX_WIDTH = 22.0, 900.0, 1500.0
#: Narrower boxes have no border, because the border would hide their fill. In pixels.
_MIN_BORDER_WIDTH = 2.0
_PASS_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward, input gradients",
    "W": "backward, weight gradients",
}
#: Passes whose letter the legend adds: it is not the first letter of their name.
_LETTERED_PASSES = ("I", "W")
_CHUNK_PATTERN = re.compile(r"of chunk (\d+)")


class PipelinePass(NamedTuple):
    """A box: one pass of micro-batch ``micro`` through a chunk, and its row in the trace.

    ``kind`` is a letter of `distsim.output.trace_data.activity.pass_letter`.
    """

    kind: str
    micro: int
    chunk: int
    start_ns: int
    end_ns: int
    row: int


def pipeline_passes(
    trace: Trace, rows: Sequence[int], program: Program | None, end_ns: int
) -> list[PipelinePass]:
    """The passes among the rows of one rank and one step, in order.

    The number of a micro-batch is the number of the copy of its tensors. Without a program, passes
    of one kind through one chunk are counted instead. A pass of several computes (attention, mlp,
    …) has a box for each, with the same number: there are as many micro-batches as copies, or as
    computes of the rarest name.
    """
    passes = _unnumbered_passes(trace, rows, end_ns)
    copies = [_tensor_copy(trace, one.row, program) for one in passes]
    indices_by_kind: dict[tuple[str, int], list[int]] = {}
    for index, one in enumerate(passes):
        indices_by_kind.setdefault((one.kind, one.chunk), []).append(index)
    for indices in indices_by_kind.values():
        kind_copies = [copies[index] for index in indices]
        distinct_copies = sorted(set(kind_copies))
        has_copy_each = len(distinct_copies) == len(indices)
        size = _computes_per_pass(trace, [passes[index].row for index in indices], kind_copies)
        for number, index in enumerate(indices):
            micro = distinct_copies.index(copies[index]) if has_copy_each else number // size
            passes[index] = passes[index]._replace(micro=micro)
    return passes


def _unnumbered_passes(trace: Trace, rows: Sequence[int], end_ns: int) -> list[PipelinePass]:
    computes = trace.ops(*COMPUTE_OPS)
    passes = []
    for row in rows:
        name = trace.text("name", int(trace["name"][row]))
        kind = pass_letter(name) if computes[row] else ""
        start, end = int(trace["started_ns"][row]), int(trace["finished_ns"][row])
        if not kind or start < 0:
            continue
        chunk = _CHUNK_PATTERN.search(name)
        chunk_number = int(chunk[1]) if chunk else 0
        passes.append(PipelinePass(kind, -1, chunk_number, start, end if end >= 0 else end_ns, row))
    return passes


def _whole_passes(computes: Sequence[PipelinePass]) -> list[PipelinePass]:
    """Consecutive computes of one pass as one box, from the first start to the last end.

    A layer of a transformer has several computes. With a box for each, the boxes are too narrow
    for a number, and the picture becomes a long strip.
    """
    found: list[PipelinePass] = []
    for one in computes:
        last = found[-1] if found else None
        if last is not None and last[:3] == one[:3]:
            found[-1] = last._replace(end_ns=max(last.end_ns, one.end_ns))
        else:
            found.append(one)
    return found


def _computes_per_pass(trace: Trace, rows: list[int], copies: list[int]) -> int:
    """The number of neighbouring computes that form one pass; 1 if they do not divide evenly."""
    rarest = min(Counter(trace["name"][rows].tolist()).values())
    passes = max(len({copy for copy in copies if copy >= 0}), rarest)
    return len(rows) // passes if len(rows) % passes == 0 else 1


def _tensor_copy(trace: Trace, row: int, program: Program | None) -> int:
    """The copy that a pass works on: the highest number among its tensors; -1 if unknown."""
    if program is None:
        return -1
    call = program.call(int(trace["rank"][row]), int(trace["position"][row]))
    return max((buffer.index for buffer in (*call.reads, *call.writes)), default=-1)


def schedule_svg(
    trace: Trace, program: Program | None = None, part: RunSelection | None = None
) -> str:
    """Draw the passes of a pipeline as SVG text.

    ``program`` gives the micro-batches their numbers. Raises UsageError if there are no passes.
    """
    return _ScheduleGrid(trace, program, part or RunSelection()).svg()


class _ScheduleGrid:
    """One picture. ``passes[i]`` are the passes of lane i."""

    def __init__(self, trace: Trace, program: Program | None, part: RunSelection) -> None:
        self.trace = trace
        self.program = program
        self.part = part
        self.end = max(trace.makespan_ns, 1)
        self.name = clipped(trace.header.get("name") or "run", 60)
        ranks = selected_ranks(part, trace)
        self.window, self.step_note = time_window(part, trace, self.end), ""
        #: The number of the drawn step; None if the picture is not of one step.
        self.step: int | None = None
        if part.steps is None and part.time is None:
            window, self.step_note = representative_step(trace, ranks)
            self.window = window or self.window
            step = most_repeated_step(group_equal_steps(trace, sorted(ranks)))
            self.step = None if step is None else step.first
        #: Time in computes of passes, of all ranks of all lanes.
        self.busy_ns = 0
        lanes, self.passes = self._lanes_with_passes(ranks)
        if not lanes:
            raise UsageError(
                "no compute has a name that begins with forward or backward",
                "give the computes names such as `name: forward`, or use --view timeline",
            )
        self.lanes = lanes
        self.chunks = sorted({one.chunk for passes in self.passes for one in passes})
        area = ChartArea(_LEFT, self._width(), _TOP)
        self.chart = LaneChart(area, self.window, lanes, [_HEIGHT] * len(lanes), _GAP)

    def _lanes_with_passes(
        self, ranks: Sequence[int]
    ) -> tuple[list[RankLane], list[list[PipelinePass]]]:
        trace, (start, end) = self.trace, self.window
        in_window = (trace["finished_ns"] > start) & (trace["started_ns"] < end)
        if self.step is not None:
            # A rank may begin the next step before the last rank has finished this one.
            in_window &= trace["iteration"] == self.step
        rows_of = RankRows(trace)
        lanes, passes_of_lanes = [], []
        for lane in group_ranks_into_lanes(trace, ranks, (), MAX_LANES, keep=in_window):
            rows = [row for row in rows_of(lane.first).tolist() if in_window[row]]
            passes = pipeline_passes(trace, rows, self.program, self.end)
            if passes:
                lanes.append(lane)
                self.busy_ns += len(lane.ranks) * sum(one.end_ns - one.start_ns for one in passes)
                passes_of_lanes.append(_whole_passes(passes))
        return lanes, passes_of_lanes

    def _width(self) -> float:
        """Wide enough that the numbers of most passes fit into their boxes, within limits."""
        durations = [one.end_ns - one.start_ns for passes in self.passes for one in passes]
        positive = sorted(duration for duration in durations if duration > 0)
        short = positive[len(positive) // 4] if positive else 1
        wanted = (self.window[1] - self.window[0]) / short * _NUMBER_WIDTH
        return min(max(wanted, _MIN_WIDTH), _MAX_WIDTH)

    def svg(self) -> str:
        chart, (start, end) = self.chart, self.window
        self._head()
        bottom = chart.tops[-1]
        chart.time_axis(bottom - 4, start, end, named=False)
        for number, lane in enumerate(self.lanes):
            chart.rect(_LEFT, chart.tops[number], chart.width, _HEIGHT, PALE_FILL)
            chart.lane_name(number, _NAME_STYLE, note_on_drawn_rank(lane))
        # Messages come before the boxes, so that no line crosses a box.
        hidden_messages = self._messages()
        for number, passes in enumerate(self.passes):
            for one in passes:
                self._box(number, one)
        if hidden_messages:
            note = f"{hidden_messages} messages are not drawn; select a part with --time or --ranks"
            chart.text(16, bottom + 38, note, 11, colour=GREY)
            bottom += 20
        return chart.page(bottom, f"{self.name}: schedule")

    def _head(self) -> None:
        chart = self.chart
        length_ns = self.window[1] - self.window[0]
        ranks = sum(len(lane.ranks) for lane in self.lanes)
        facts = [
            self.step_note,
            selection_text(self.part, self.trace.world_size),
            show_ns(length_ns),
            f"{100 - 100 * self.busy_ns / (ranks * length_ns):.0f} % bubble and communication",
            lane_count_text(self.lanes),
        ]
        chart.heading(f"{self.name}: pipeline schedule", facts)
        kinds = {one.kind for passes in self.passes for one in passes}
        present = [kind for kind in _PASS_NAMES if kind in kinds]
        keys = [(_pass_fill(kind, 0, 1), _pass_legend(kind)) for kind in present]
        if len(self.chunks) > 1:
            count = len(self.chunks)
            keys += [(_pass_fill("F", chunk, count), f"chunk {chunk}") for chunk in self.chunks]
        at = chart.legend([*keys, (PALE_FILL, "no compute")])
        words = "message (numbers in boxes are micro-batches)"
        chart.line_key(at, MESSAGE_COLOUR, words, 1.0, arrow=True)

    def _box(self, lane: int, one: PipelinePass) -> None:
        chart = self.chart
        chunk_count = 1 + self.chunks[-1]
        through = f" through chunk {one.chunk}" if chunk_count > 1 else ""
        duration = show_ns(one.end_ns - one.start_ns)
        tip = f"{_PASS_NAMES[one.kind]} of micro-batch {one.micro}{through}, {duration}"
        letter = one.kind if one.kind in _LETTERED_PASSES else ""
        words = (f"{one.micro}{letter}", str(one.micro))
        width = chart.x(one.end_ns) - chart.x(one.start_ns)
        border = LINE_COLOUR if width > _MIN_BORDER_WIDTH else ""
        fill = _pass_fill(one.kind, one.chunk, chunk_count)
        bar = LaneBar(one.start_ns, one.end_ns, tip, words, fill=fill, border=border)
        chart.bar(TrackBand(chart.tops[lane] + 1, _HEIGHT - 2), bar, padding=3.0)

    # --- between ranks ---
    def _messages(self) -> int:
        """Draw the messages; if there are too many, draw none and return their number."""
        trace, (start, end) = self.trace, self.window
        arrows: dict[tuple[int, int, int, int], None] = {}
        for message in messages_between_lanes(trace, self.chart.lane_of):
            posted = int(trace["posted_ns"][message.send])
            received = int(trace["finished_ns"][message.receive])
            # A lane shows its first rank: only that rank's messages start at drawn passes.
            sender = self.lanes[message.sender_lane].first
            is_drawn = int(trace["rank"][message.send]) == sender
            if is_drawn and start <= posted and received <= end:
                arrows[message.sender_lane, message.receiver_lane, posted, received] = None
        if len(arrows) > MAX_ARROWS:
            return len(arrows)
        for sender_lane, receiver_lane, _, received in arrows:
            made = self._end_of_pass_before(sender_lane, received)
            ends = self.chart.between_lanes(sender_lane, made, receiver_lane, received)
            self.chart.line(*ends, MESSAGE_COLOUR, 1.0, arrow=True)
        return 0

    def _end_of_pass_before(self, lane: int, instant_ns: int) -> int:
        """The end of the last pass of a lane that ended before a message arrived."""
        ends = [one.end_ns for one in self.passes[lane] if one.end_ns <= instant_ns]
        return max(ends, default=instant_ns)


def _pass_fill(kind: str, chunk: int, chunks: int) -> str:
    """The fill of a pass: of later chunks lighter."""
    return (
        lightened(PASS_FILLS[kind], 1.0 - 0.6 * chunk / chunks) if chunks > 1 else PASS_FILLS[kind]
    )


def _draw(subject: PictureInput) -> str:
    trace = subject.trace if subject.trace is not None else require_input(subject.run, "run").trace
    return schedule_svg(trace, None if subject.trace is not None else subject.program, subject.part)


def _gallery_examples() -> Iterable[GalleryExample]:
    yield GalleryExample(
        "pipeline_1f1b",
        "1F1B: one forward, one backward. Numbers are micro-batches; the bubble is at both ends.",
    )
    yield GalleryExample(
        "strategies/pipeline_interleaved",
        "Two chunks per rank: micro-batches pass every rank twice, and the bubble is half as long.",
    )
    yield GalleryExample(
        "strategies/pipeline_zb1p",
        "Zero bubble: weight gradients (W), which no rank waits for, fill the bubble.",
    )


def _pass_legend(kind: str) -> str:
    name = _PASS_NAMES[kind]
    return f"{name} ({kind})" if kind in _LETTERED_PASSES else name


VIEW = PictureView(
    _draw, formats=("svg", "png", "pdf"), accepts_trace=True, examples=tuple(_gallery_examples())
)
