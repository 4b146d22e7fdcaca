"""The schedule grid of a pipeline: a lane per rank, a box per pass with the number of its
micro-batch, time to the right.

Forward, backward, and the halves of a backward pass (its input's and its weights' gradients) differ
in lightness and pattern, the chunks of a rank in their shade. Messages run from the pass that makes
them to the pass that needs them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from distsim.common.errors import UsageError
from distsim.common.units import show_ns
from distsim.operations.registry import COMPUTE_OPS
from distsim.output.pictures.components.view_interface import (
    GalleryExample,
    PictureInput,
    PictureView,
    require_input,
)
from distsim.output.pictures.drawing.box_diagram import clipped, text_width
from distsim.output.pictures.drawing.palette import (
    GREY,
    INK,
    LINE_COLOUR,
    MESSAGE_COLOUR,
    PALE_FILL,
    lightened,
)
from distsim.output.pictures.drawing.svg import TimeChart, round_ticks
from distsim.output.trace_data.activity import pass_letter
from distsim.output.trace_data.lanes import (
    RankLane,
    RankRows,
    group_equal_steps,
    group_ranks_into_lanes,
)
from distsim.output.trace_data.selection import (
    RunSelection,
    selected_ranks,
    selection_text,
    time_window,
)
from distsim.program.model import Program
from distsim.trace.model import Trace

#: Lanes and arrows at most; more lanes are folded, more arrows can't be followed.
MAX_LANES, MAX_ARROWS = 48, 260
_LEFT, _TOP, _HEIGHT, _GAP = 156.0, 104.0, 24.0, 10.0
#: The chart is so wide that a pass of middling length has room for its number, within these bounds,
#: in pixels.
_NUMBER_WIDTH, _MIN_WIDTH, _MAX_WIDTH = 22.0, 900.0, 3200.0
#: CIE L* 83, 66, 66, 89: what differs in print, too.
_PASS_FILLS = {"F": "#B4D3EA", "B": "#6DAE8E", "I": "#6DAE8E", "W": "#F3DFA2"}
_PASS_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
#: Passes whose letter the legend adds: it is not the first letter of their name.
_LETTERED_PASSES = ("I", "W")
_CHUNK_PATTERN = re.compile(r"of chunk (\d+)")


class PipelinePass(NamedTuple):
    """A box: the pass of a micro-batch through a chunk, and the pass's row in the trace."""

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

    The number of a micro-batch is the number of the copy of its tensors; without a program, passes
    of one kind through one chunk are counted. A pass of several computes (attention, mlp, …) has a
    box for each, with the same number: there are as many micro-batches as copies, or as computes of
    the rarest name.
    """
    computes, found = trace.ops(*COMPUTE_OPS), []
    for row in rows:
        name = trace.text("name", int(trace["name"][row]))
        kind = pass_letter(name) if computes[row] else ""
        if kind and trace["started_ns"][row] >= 0:
            chunk, end = _CHUNK_PATTERN.search(name), int(trace["finished_ns"][row])
            start = int(trace["started_ns"][row])
            found.append(
                PipelinePass(
                    kind, -1, int(chunk[1]) if chunk else 0, start, end if end >= 0 else end_ns, row
                )
            )
    copies = [_tensor_copy(trace, one.row, program) for one in found]
    places: dict[tuple[str, int], list[int]] = {}
    for i, one in enumerate(found):
        places.setdefault((one.kind, one.chunk), []).append(i)
    for mine in places.values():
        given = [copies[i] for i in mine]
        distinct = sorted(set(given))
        each = _computes_per_pass(trace, [found[i].row for i in mine], given)
        for number, i in enumerate(mine):
            micro = distinct.index(copies[i]) if len(distinct) == len(mine) else number // each
            found[i] = found[i]._replace(micro=micro)
    return found


def _computes_per_pass(trace: Trace, rows: list[int], copies: list[int]) -> int:
    """How many of these neighbouring computes are one pass; 1 where they don't go up evenly."""
    rarest = min(Counter(trace["name"][rows].tolist()).values())
    passes = max(len({copy for copy in copies if copy >= 0}), rarest)
    return len(rows) // passes if len(rows) % passes == 0 else 1


def _tensor_copy(trace: Trace, row: int, program: Program | None) -> int:
    """The copy that a pass works on: the highest number among its tensors."""
    if program is None:
        return -1
    call = program.call(int(trace["rank"][row]), int(trace["position"][row]))
    return max((buffer.index for buffer in (*call.reads, *call.writes)), default=-1)


def schedule_svg(
    trace: Trace, program: Program | None = None, part: RunSelection | None = None
) -> str:
    """The grid as SVG text. ``program`` gives the micro-batches their numbers. Raises UsageError
    where there are no passes.
    """
    return _ScheduleGrid(trace, program, part or RunSelection()).svg()


class _ScheduleGrid:
    def __init__(self, trace: Trace, program: Program | None, part: RunSelection) -> None:
        self.trace, self.program, self.part = trace, program, part
        self.end = max(trace.makespan_ns, 1)
        ranks = selected_ranks(part, trace)
        self.note, self.window = "", time_window(part, trace, self.end)
        if part.steps is None and part.time is None:
            self._one_step(ranks)
        rows = RankRows(trace)
        self.lanes: list[RankLane] = []
        self.passes: list[list[PipelinePass]] = []
        keep = (trace["finished_ns"] > self.window[0]) & (trace["started_ns"] < self.window[1])
        for lane in group_ranks_into_lanes(trace, ranks, (), MAX_LANES, keep=keep):
            found = pipeline_passes(
                trace, [r for r in rows(lane.first).tolist() if keep[r]], program, self.end
            )
            if found:
                self.lanes.append(lane)
                self.passes.append(found)
        if not self.lanes:
            raise UsageError(
                "no rank makes a pass whose name begins with forward or backward",
                "name the computes of a pipeline so (`name: forward`), or ask for --view timeline",
            )
        self.chart = TimeChart(_LEFT, self._width(), _TOP, self.window[1], self.window[0])
        self.tops = list(accumulate((_HEIGHT + _GAP for _ in self.lanes), initial=_TOP))

    def _one_step(self, ranks: Sequence[int]) -> None:
        """Of many steps one is drawn: the first of those that are equal."""
        steps = group_equal_steps(self.trace, ranks)
        if steps:
            step = max(steps, key=lambda s: (s.times, -s.first))
            self.window, count = (step.start_ns, step.end_ns), sum(s.times for s in steps)
            same = f", × {step.times} equal" if step.times > 1 else ""
            self.note = f"step {step.first} of {count}{same}"

    def _width(self) -> float:
        """Wide enough that the numbers of most passes fit into their boxes, within limits."""
        durations = [p.end_ns - p.start_ns for row in self.passes for p in row]
        positive = sorted(duration for duration in durations if duration > 0)
        short = positive[len(positive) // 4] if positive else 1
        wanted = (self.window[1] - self.window[0]) / short * _NUMBER_WIDTH
        return min(max(wanted, _MIN_WIDTH), _MAX_WIDTH)

    def svg(self) -> str:
        self._head()
        self.chart.axis(
            (self.window[0] + t for t in round_ticks(self.window[1] - self.window[0])),
            self.tops[-1] - 4,
            self.window[0],
        )
        for lane, top in zip(self.lanes, self.tops, strict=False):
            self.chart.rect(_LEFT, top, self.chart.width, _HEIGHT, PALE_FILL)
            self.chart.text(16, top + (11 if lane.about else 16), lane.title, 12, bold=True)
            if lane.about:
                about = lane.about if lane.like == "equal" else f"alike; rank {lane.first} is drawn"
                self.chart.text(16, top + 23, about, 10, colour=GREY)
        chunks = 1 + max(p.chunk for row in self.passes for p in row)
        left_out = self._messages()  # first, so that none crosses a box
        for row, top in zip(self.passes, self.tops, strict=False):
            for one in row:
                self._box(one, top, chunks)
        bottom = self.tops[-1]
        if left_out:
            self.chart.text(
                16,
                bottom + 38,
                f"{left_out} messages are not drawn: choose a part with --time or --ranks",
                11,
                colour=GREY,
            )
            bottom += 20
        return self.chart.page(bottom, f"{self._name()}: schedule")

    def _name(self) -> str:
        return clipped(self.trace.header.get("name") or "run", 60)

    def _head(self) -> None:
        chart, length = self.chart, self.window[1] - self.window[0]
        chart.text(16, 26, f"{self._name()}: the schedule of the pipeline", 17, bold=True)
        ranks = sum(len(lane.ranks) for lane in self.lanes)
        busy = sum(
            len(lane.ranks) * (p.end_ns - p.start_ns)
            for lane, row in zip(self.lanes, self.passes, strict=True)
            for p in row
        )
        said = [
            self.note,
            selection_text(self.part, self.trace.world_size),
            show_ns(length),
            f"{100 - 100 * busy / (ranks * length):.0f} % bubble and communication",
        ]
        said += [f"{ranks} ranks in {len(self.lanes)} lanes"] if ranks > len(self.lanes) else []
        chart.text(16, 46, "; ".join(t for t in said if t), 12, colour=GREY)
        kinds = dict.fromkeys(p.kind for row in self.passes for p in row)
        chunks = sorted({p.chunk for row in self.passes for p in row})
        keys = [
            (_pass_fill(kind, 0, 1), _pass_legend(kind)) for kind in _PASS_NAMES if kind in kinds
        ]
        keys += (
            [(_pass_fill("F", chunk, len(chunks)), f"chunk {chunk}") for chunk in chunks]
            if len(chunks) > 1
            else []
        )
        at, y = chart.legend([*keys, (PALE_FILL, "nothing computes")])
        chart.line((at, y + 6), (at + 22, y + 6), MESSAGE_COLOUR, 1.0, arrow=True)
        chart.text(at + 28, y + 10, "message; the number is the micro-batch", 12)

    def _box(self, one: PipelinePass, top: float, chunks: int) -> None:
        chart, x, end = self.chart, self.chart.x(one.start_ns), self.chart.x(one.end_ns)
        through = f" through chunk {one.chunk}" if chunks > 1 else ""
        duration = show_ns(one.end_ns - one.start_ns)
        tip = f"{_PASS_NAMES[one.kind]} of micro-batch {one.micro}{through}, {duration}"
        chart.rect(
            x,
            top + 1,
            end - x,
            _HEIGHT - 2,
            _pass_fill(one.kind, one.chunk, chunks),
            tip,
            LINE_COLOUR if end - x > 2 else "",
        )
        label = f"{one.micro}{one.kind if one.kind in 'IW' else ''}"
        word = next((w for w in (label, str(one.micro)) if text_width(w, 11) + 3 <= end - x), None)
        if word:
            chart.text((x + end) / 2, top + 16, word, 11, anchor="middle", colour=INK)

    # --- between ranks ---
    def _messages(self) -> int:
        """Draw the messages; if there are too many, draw none and return their number."""
        trace = self.trace
        lane_of = {rank: i for i, lane in enumerate(self.lanes) for rank in lane.ranks}
        sends = np.flatnonzero(trace.ops("send", "isend") & (trace["match"] >= 0))
        recvs = np.flatnonzero(trace.ops("recv", "irecv") & (trace["match"] >= 0))
        received = dict(zip(trace["match"][recvs].tolist(), recvs.tolist(), strict=True))
        found: dict[tuple[int, int, int, int], None] = {}
        for send in sends.tolist():
            recv = received.get(int(trace["match"][send]), -1)
            if recv < 0:
                continue
            a = lane_of.get(int(trace["rank"][send]), -1)
            b = lane_of.get(int(trace["rank"][recv]), -1)
            is_between_lanes = a != b and min(a, b) >= 0
            if not is_between_lanes or not self._is_first(a, send):
                continue
            found[a, b, int(trace["posted_ns"][send]), int(trace["finished_ns"][recv])] = None
        inside = [m for m in found if self.window[0] <= m[2] and m[3] <= self.window[1]]
        if len(inside) > MAX_ARROWS:
            return len(inside)
        for a, b, _, end in inside:
            start = self._made(a, end)
            y1, y2 = (
                (self.tops[a] + _HEIGHT, self.tops[b])
                if b > a
                else (self.tops[a], self.tops[b] + _HEIGHT)
            )
            self.chart.line(
                (self.chart.x(start), y1), (self.chart.x(end), y2), MESSAGE_COLOUR, 1.0, arrow=True
            )
        return 0

    def _is_first(self, lane: int, row: int) -> bool:
        return int(self.trace["rank"][row]) == self.lanes[lane].first

    def _made(self, lane: int, by_ns: int) -> int:
        """The end of the last pass of a lane that ended before the message arrived."""
        ends = [p.end_ns for p in self.passes[lane] if p.end_ns <= by_ns]
        return max(ends, default=by_ns)


def _pass_fill(kind: str, chunk: int, chunks: int) -> str:
    """The fill of a pass: of later chunks lighter."""
    return (
        lightened(_PASS_FILLS[kind], 1.0 - 0.6 * chunk / chunks)
        if chunks > 1
        else _PASS_FILLS[kind]
    )


def _draw(subject: PictureInput) -> str:
    trace = subject.trace if subject.trace is not None else require_input(subject.run, "run").trace
    return schedule_svg(trace, None if subject.trace is not None else subject.program, subject.part)


def _gallery_examples() -> Iterable[GalleryExample]:
    yield GalleryExample(
        "pipeline_1f1b",
        "One forward, one backward, as a grid: micro-batches by number, the bubble at both ends.",
    )
    yield GalleryExample(
        "strategies/pipeline_interleaved",
        "Two chunks a rank: micro-batches pass every rank twice, the bubble is half as long.",
    )
    yield GalleryExample(
        "strategies/pipeline_zb1p",
        "Zero bubble: gradients of the weights (W), which nobody waits for, fill what was empty.",
    )


def _pass_legend(kind: str) -> str:
    name = _PASS_NAMES[kind]
    return f"{name} ({kind})" if kind in _LETTERED_PASSES else name


VIEW = PictureView(
    _draw, formats=("svg", "png", "pdf"), accepts_trace=True, examples=tuple(_gallery_examples())
)
