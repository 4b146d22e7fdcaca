"""The timeline: a lane per rank, time to the right, drawn to scale.

Each lane has two tracks or more. The upper one is what the rank itself does: compute, or waiting in
a call that has not met its parties. Below is its communication under way: exposed where nothing is
computed meanwhile, hidden where it is. Where streams (or whatever runs it) overlap, each has a
track of its own. A frame around a bar, or a line under the lane, is the critical path.

Equal ranks share a lane. Nothing is drawn wider than it is; below a pixel the height of the fill is
the share of the time (`distsim.output.pictures.drawing.tracks`). Of a run of many steps one is
drawn again large enough to be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from distsim.analysis.critical_path import CriticalPathPiece, path_pieces
from distsim.common.units import show_ns
from distsim.output.pictures.components.lane_painter import (
    BACKWARD_FILL,
    COMPUTE_FILL,
    EXPOSED_FILL,
    LOWER_HEIGHT,
    STRIP_HEIGHT,
    UPPER_HEIGHT,
    LanePainter,
    LaneRow,
)
from distsim.output.pictures.components.view_interface import (
    GalleryExample,
    PictureView,
    draws_trace_or_run,
)
from distsim.output.pictures.drawing.box_diagram import clipped
from distsim.output.pictures.drawing.palette import GREY, INK, MESSAGE_COLOUR, PALE_FILL
from distsim.output.pictures.drawing.svg import (
    HIDDEN_FILL,
    WAITING_FILL,
    SvgDrawing,
    TimeChart,
    round_ticks,
)
from distsim.output.pictures.drawing.tracks import TrackBand, TrackLayer, draw_track
from distsim.output.trace_data.activity import ActivityReader
from distsim.output.trace_data.lanes import (
    EqualSteps,
    RankLane,
    RankRows,
    group_equal_steps,
    group_ranks_into_lanes,
)
from distsim.output.trace_data.selection import (
    WHOLE_RUN,
    RunSelection,
    group_ids_named,
    selected_ranks,
    selection_text,
    time_window,
)
from distsim.output.trace_data.time_spans import TimeSpans, merged_spans, spans_within
from distsim.trace.model import Trace
from distsim.trace.run_end import stopped_ranks

#: Lanes at most; more are folded. Arrows at most; more can't be followed.
MAX_LANES, MAX_ARROWS = 24, 60
_WIDTH, _TOP, _GAP = 1080.0, 100.0, 14.0
#: A step narrower than this, in pixels, is drawn again by itself.
_MIN_STEP_WIDTH = 160.0
#: From this width on, in pixels, a frame leaves something to see inside.
_MIN_FRAME_WIDTH = 7.0
#: Ranks that keep a lane of their own for the time they are on the critical path, at most.
_MAX_CRITICAL_RANKS = 6


class TimelinePanel(NamedTuple):
    """A stretch of the run, with the line above it."""

    start_ns: int
    end_ns: int
    title: str = ""
    since_ns: int = 0


def timeline_svg(
    trace: Trace, part: RunSelection = WHOLE_RUN, name: str = "", stuck: Iterable[int] | None = None
) -> str:
    """The timeline of a run as SVG text, of the ranks, steps, time or group that ``part`` names.

    ``name`` and ``stuck`` (ranks that wait for ever): what the trace says where left out. Raises
    UsageError.
    """
    if stuck is None:
        stuck = [stop.rank for stop in stopped_ranks(trace) if stop.status == "blocked"]
    waits = stuck
    return _TimelineDrawing(
        trace, part, name or str(trace.header.get("name") or "run"), set(waits)
    ).svg()


class _TimelineDrawing:
    def __init__(self, trace: Trace, part: RunSelection, name: str, stuck: set[int]) -> None:
        self.trace, self.part, self.name, self.stuck = trace, part, name, stuck
        self.makespan = trace.makespan_ns
        grown = self.makespan // 6 if stuck else 0  # room to show that it never ends
        self.end = max(self.makespan + grown, 1)
        self.window = time_window(part, trace, self.end)
        self.path = path_pieces(trace, self.makespan)
        self.rank_rows = RankRows(trace)
        self.lanes = self._lanes(selected_ranks(part, trace))
        self.steps = group_equal_steps(trace, self._drawn_ranks()) if part == WHOLE_RUN else ()
        groups = None if part.group is None else group_ids_named(part.group, trace)
        self.doings = ActivityReader(trace, self.end, groups)
        self.rows = [self._row(lane) for lane in self.lanes]
        self.left = 92.0 if all(len(lane.ranks) == 1 for lane in self.lanes) else 156.0
        self.svg_ = SvgDrawing()
        self.arrows_left_out = 0

    # --- lanes ---
    def _lanes(self, ranks: Sequence[int]) -> tuple[RankLane, ...]:
        start, end = self.window
        keep = None
        if (start, end) != (0, self.end):
            last = np.where(self.trace["returned_ns"] >= 0, self.trace["returned_ns"], self.end)
            keep = (np.maximum(last, self.trace["finished_ns"]) > start) & (
                self.trace["posted_ns"] < end
            )
        return group_ranks_into_lanes(self.trace, ranks, self._seen(), MAX_LANES, keep=keep)

    def _seen(self) -> list[int]:
        """Ranks that must not go under: those who left early, and who is longest on the critical
        path.
        """
        gone = [
            rank
            for rank, status, _ in self.trace.header.get("ends", ())
            if status not in ("ended", "blocked")
        ]
        on_path: dict[int, int] = {}
        for piece in self.path:
            on_path[piece.rank] = on_path.get(piece.rank, 0) + piece.end_ns - piece.start_ns
        return gone + sorted(on_path, key=lambda rank: (-on_path[rank], rank))[:_MAX_CRITICAL_RANKS]

    def _drawn_ranks(self) -> list[int]:
        ranks: list[int] = []
        for lane in self.lanes:
            ranks += lane.ranks[:1] if lane.like == "equal" else lane.ranks
        return ranks

    def _row(self, lane: RankLane) -> LaneRow:
        members = lane.ranks[:1] if lane.like == "equal" else lane.ranks
        rows = np.concatenate([self.rank_rows(rank) for rank in members])
        return LaneRow(
            lane, self.doings(rows, len(members)), any(r in self.stuck for r in lane.ranks)
        )

    # --- the page ---
    def svg(self) -> str:
        moments = self._moments()
        y = self._head()
        column = 1.0 if len(self.rows) <= 12 else 2.0
        for moment in moments:
            y = self._panel(moment, y + 8, column) + 34
        page = TimeChart(self.left, _WIDTH, _TOP, 1, on=self.svg_)
        if self.arrows_left_out:
            note = (
                f"{self.arrows_left_out} messages are not drawn as arrows: "
                "choose a part (--time, --ranks), or --view spacetime"
            )
            page.text(16, y, note, 11, colour=GREY)
        return page.page(y - 36, f"{clipped(self.name, 60)}: timeline")

    def _moments(self) -> list[TimelinePanel]:
        start, end = self.window
        whole = TimelinePanel(start, end, "", start)
        long = [s for s in self.steps if s.times > 1]
        if not long:
            return [whole]
        step: EqualSteps = max(long, key=lambda s: s.times)
        if (step.end_ns - step.start_ns) * _WIDTH / (end - start) >= _MIN_STEP_WIDTH:
            return [whole]
        last = step.first + step.times - 1
        count = sum(s.times for s in self.steps)
        said = (
            f"steps {step.first} to {last} of 0 to {count - 1} are equal (× {step.times}); "
            f"here is step {step.first}"
        )
        return [
            whole._replace(title=f"the whole run, {count} steps"),
            TimelinePanel(step.start_ns, step.end_ns, said, step.start_ns),
        ]

    def _head(self) -> float:
        draw, size = TimeChart(self.left, _WIDTH, _TOP, 1, on=self.svg_), self.trace.world_size
        draw.text(16, 26, f"{clipped(self.name, 60)}: where the time goes", 17, bold=True)
        outcome, backend = (str(self.trace.header.get(key) or "") for key in ("outcome", "backend"))
        said = [
            f"{outcome or 'recorded'}, {show_ns(self.makespan)}",
            backend,
            selection_text(self.part, size),
        ]
        shown = sum(len(lane.ranks) for lane in self.lanes)
        if len(self.lanes) < shown:
            said.append(f"{shown} ranks in {len(self.lanes)} lane{'s' * (len(self.lanes) > 1)}")
        said.append(f"{size - shown} ranks are not drawn" if shown < size else "")
        draw.text(16, 46, "; ".join(t for t in said if t), 12, colour=GREY)
        at, y = draw.legend(self._legend(), right=self.left + _WIDTH - 120)
        draw.outline(at + 1, y + 1, 20, 10, INK)
        draw.text(at + 28, y + 10, "critical path", 12)
        return y + 34

    def _legend(self) -> list[tuple[str, str]]:
        """Every fill that occurs, with its share of the time of all ranks drawn."""
        start, end = self.window
        total, sums = 0, [0] * 5
        for row in self.rows:
            many = len(row.lane.ranks) // row.doing.many
            total += len(row.lane.ranks) * (end - start)
            for number, spans in enumerate(row.doing.kinds()):
                sums[number] += many * sum(spans_within(one, start, end).total for one in spans)
        fills = (COMPUTE_FILL, BACKWARD_FILL, EXPOSED_FILL, HIDDEN_FILL, WAITING_FILL)
        words = (
            "compute",
            "backward",
            "communication, exposed",
            "communication beside compute",
            "waiting",
        )
        found = [
            (f, f"{w} {_percent_text(s, total)}")
            for f, w, s in zip(fills, words, sums, strict=True)
            if s
        ]
        idle = total - sum(sums) + sums[3]
        return found + ([(PALE_FILL, f"idle {_percent_text(idle, total)}")] if idle > 0 else [])

    # --- a panel ---
    def _panel(self, moment: TimelinePanel, y: float, column: float) -> float:
        chart = TimeChart(
            self.left,
            _WIDTH,
            y + (30 if moment.title else 12),
            moment.end_ns,
            moment.start_ns,
            self.svg_,
        )
        if moment.title:
            chart.text(16, y + 10, moment.title, 12, bold=True)
        tops = list(accumulate((row.height + _GAP for row in self.rows), initial=chart.top))
        last = min(moment.end_ns, max(self.makespan, 1))
        chart.axis(
            (moment.since_ns + t for t in round_ticks(last - moment.since_ns)),
            tops[-1] - 6,
            moment.since_ns,
        )
        chart.text(
            16,
            tops[-1] + 12,
            f"time from {show_ns(moment.since_ns)}" if moment.since_ns else "time",
            11,
            colour=GREY,
        )
        painter = LanePainter(chart, self.trace, self.makespan, column)
        for row, top in zip(self.rows, tops, strict=False):
            painter.draw(row, top)
        lane_of = {rank: i for i, row in enumerate(self.rows) for rank in row.lane.ranks}
        self._messages(chart, lane_of, tops)
        _CriticalPathPainter(chart, self.rows, tops, self.trace).draw(self.path, lane_of)
        return tops[-1]

    def _messages(self, chart: TimeChart, lane_of: dict[int, int], tops: list[float]) -> None:
        """An arrow for each message between two lanes, where there are so few that the eye can
        follow them.
        """
        trace = self.trace
        sends, recvs = (
            trace.ops("send", "isend") & (trace["match"] >= 0),
            trace.ops("recv", "irecv") & (trace["match"] >= 0),
        )
        received = dict(
            zip(trace["match"][recvs].tolist(), np.flatnonzero(recvs).tolist(), strict=True)
        )
        found: dict[tuple[int, int, int, int], None] = {}
        for send in np.flatnonzero(sends).tolist():
            recv = received.get(int(trace["match"][send]))
            if recv is None:
                continue
            a, b = (
                lane_of.get(int(trace["rank"][send]), -1),
                lane_of.get(int(trace["rank"][recv]), -1),
            )
            start, end = int(trace["started_ns"][send]), int(trace["finished_ns"][recv])
            is_known = a != b and min(a, b, start, end) >= 0
            in_window = start < chart.end_ns and end > chart.start_ns
            if is_known and in_window:
                found[a, b, start, end] = None
        if len(found) > MAX_ARROWS:
            self.arrows_left_out = max(self.arrows_left_out, len(found))
            return
        for a, b, start, end in found:
            feet = [tops[i] + self.rows[i].height - STRIP_HEIGHT for i in (a, b)]
            y1, y2 = (feet[0], tops[b]) if b > a else (tops[a], feet[1])
            chart.line((chart.x(start), y1), (chart.x(end), y2), MESSAGE_COLOUR, 1.3, arrow=True)


class _CriticalPathPainter:
    """Draws the critical path.

    A piece that is wide enough gets a frame, a narrow one a line under the lane. Dashes lead from
    lane to lane.
    """

    def __init__(
        self, chart: TimeChart, rows: Sequence[LaneRow], tops: Sequence[float], trace: Trace
    ) -> None:
        self.chart, self.rows, self.tops, self.trace = chart, rows, tops, trace
        self.scale = chart.width / (chart.end_ns - chart.start_ns)

    def _is_in_window(self, piece: CriticalPathPiece) -> bool:
        return piece.end_ns > self.chart.start_ns and piece.start_ns < self.chart.end_ns

    def draw(self, pieces: Sequence[CriticalPathPiece], lane_of: dict[int, int]) -> None:
        of_drawn_ranks = [piece for piece in pieces if piece.rank in lane_of]
        inside = [piece for piece in of_drawn_ranks if self._is_in_window(piece)]
        thin: dict[int, list[CriticalPathPiece]] = {}
        hops: list[tuple[float, int, int]] = []
        before: tuple[int, float] | None = None
        for piece in inside:
            lane, wide = lane_of[piece.rank], (piece.end_ns - piece.start_ns) * self.scale
            if wide >= _MIN_FRAME_WIDTH:
                self._frame(piece, lane)
            else:
                thin.setdefault(lane, []).append(piece)
            if before is not None and before[0] != lane:
                hops.append((self.chart.x(piece.start_ns), before[0], lane))
            before = lane, wide
        for lane, few in thin.items():
            spans = merged_spans(
                TimeSpans(np.array([p.start_ns for p in few]), np.array([p.end_ns for p in few]))
            )
            draw_track(
                self.chart,
                TrackBand(
                    self.tops[lane] + self.rows[lane].height - STRIP_HEIGHT + 1, STRIP_HEIGHT - 1
                ),
                [TrackLayer(INK, spans)],
            )
        for x, a, b in hops if len(hops) <= MAX_ARROWS else ():
            low, high = sorted((a, b))
            self.chart.line(
                (x, self.tops[low] + self.rows[low].height - STRIP_HEIGHT),
                (x, self.tops[high]),
                INK,
                1.0,
                dash="2 3",
            )

    def _frame(self, piece: CriticalPathPiece, lane: int) -> None:
        x, end = self.chart.x(piece.start_ns), self.chart.x(piece.end_ns)
        y, height = self.tops[lane], UPPER_HEIGHT
        if piece.why == "transfer":
            streams, queue = (
                self.rows[lane].streams,
                self.trace.text("queue", int(self.trace["queue"][piece.row])),
            )
            at = streams.index(queue) if queue in streams else len(streams) - 1
            y, height = y + UPPER_HEIGHT + at * LOWER_HEIGHT, LOWER_HEIGHT
        self.chart.outline(x + 1, y + 1, max(end - x - 2, 1), height - 2, INK)


def _percent_text(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.01:
        return "< 0.01 %"
    return f"{share:.0f} %" if share >= 9.5 else f"{share:.2g} %"


VIEW = PictureView(
    draws_trace_or_run(timeline_svg),
    formats=("svg", "png", "pdf"),
    accepts_trace=True,
    examples=(
        GalleryExample(
            "hybrid", "The same run to scale: what each rank does, and the path that sets the pace."
        ),
        GalleryExample(
            "ddp_by_hand",
            "The same to scale: two of the three all_reduces are hidden behind compute.",
        ),
        GalleryExample("pipeline_1f1b", "One forward, one backward: the bubble at both ends."),
        GalleryExample(
            "strategies/pipeline_zb1p",
            "A zero-bubble schedule: gradients of the weights (W), which nobody waits for, "
            "fill what was empty.",
        ),
    ),
)
