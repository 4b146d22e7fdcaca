"""The timeline: a lane per rank, time to the right, drawn to scale.

Each lane has at least two tracks. The upper track shows the rank itself: compute, or waiting in a
call. The lower track shows its transfers: exposed while the rank computes nothing, overlapped while
it computes. If transfers of several streams overlap, each stream has a track. A frame around a bar,
or a line under the lane, marks the critical path.

Identical ranks share a lane. Nothing is drawn wider than it is: below one pixel, the height of the
fill is the share of the time (`distsim.output.pictures.drawing.tracks`). If a run has many steps,
one step is drawn a second time, enlarged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from distsim.analysis.critical_path import CriticalPathPiece, path_pieces
from distsim.common.units import show_ns
from distsim.output.pictures.components.lane_chart import (
    BACKWARD_FILL,
    COMPUTE_FILL,
    EXPOSED_FILL,
    HOST_FILL,
    ChartArea,
    LaneChart,
    lane_count_text,
)
from distsim.output.pictures.components.timeline_lanes import (
    LOWER_HEIGHT,
    STRIP_HEIGHT,
    UPPER_HEIGHT,
    LaneRow,
    TimelineLanePainter,
)
from distsim.output.pictures.components.view_interface import (
    GalleryExample,
    PictureView,
    draws_trace_or_run,
)
from distsim.output.pictures.drawing.box_diagram import clipped
from distsim.output.pictures.drawing.palette import GREY, INK, MESSAGE_COLOUR, PALE_FILL
from distsim.output.pictures.drawing.svg import HIDDEN_FILL, WAITING_FILL, SvgDrawing, TimeChart
from distsim.output.pictures.drawing.tracks import TrackBand, TrackLayer, draw_track
from distsim.output.trace_data.activity import ActivityReader
from distsim.output.trace_data.lanes import (
    RankLane,
    RankRows,
    group_equal_steps,
    group_ranks_into_lanes,
    most_repeated_step,
)
from distsim.output.trace_data.messages import messages_between_lanes
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

#: The largest number of lanes; more are folded. More arrows than this would hide each other.
MAX_LANES, MAX_ARROWS = 24, 60
_WIDTH, _TOP, _GAP = 1080.0, 100.0, 14.0
#: A step narrower than this, in pixels, is drawn a second time, at a larger scale.
_MIN_STEP_WIDTH = 160.0
#: A frame of at least this width, in pixels, does not hide the bar inside it.
_MIN_FRAME_WIDTH = 7.0
#: The largest number of ranks that keep a lane of their own because of the critical path.
_MAX_CRITICAL_RANKS = 6


class TimelinePanel(NamedTuple):
    """A stretch of the run, with a title above it. The axis counts time from ``since_ns``."""

    start_ns: int
    end_ns: int
    title: str = ""
    since_ns: int = 0


def timeline_svg(
    trace: Trace, part: RunSelection = WHOLE_RUN, name: str = "", stuck: Iterable[int] | None = None
) -> str:
    """Draw the part of a run that ``part`` selects, as SVG text.

    ``name`` and ``stuck`` (ranks that are blocked for ever) default to what the trace records.
    Raises UsageError.
    """
    if stuck is None:
        stuck = [stop.rank for stop in stopped_ranks(trace) if stop.status == "blocked"]
    title = name or str(trace.header.get("name") or "run")
    return _TimelineDrawing(trace, part, title, set(stuck)).svg()


class _TimelineDrawing:
    """One picture: a heading, and one or two panels with the same lanes."""

    def __init__(self, trace: Trace, part: RunSelection, name: str, stuck: set[int]) -> None:
        self.trace = trace
        self.part = part
        self.name = name
        self.stuck = stuck
        self.makespan = trace.makespan_ns
        room_for_endless_waits = self.makespan // 6 if stuck else 0
        self.end = max(self.makespan + room_for_endless_waits, 1)
        self.window = time_window(part, trace, self.end)
        self.path = path_pieces(trace, self.makespan)
        self.rank_rows = RankRows(trace)
        self.lanes = self._lanes(selected_ranks(part, trace))
        self.steps = group_equal_steps(trace, self._drawn_ranks()) if part == WHOLE_RUN else ()
        groups = None if part.group is None else group_ids_named(part.group, trace)
        self.activity_of = ActivityReader(trace, self.end, groups)
        self.rows = [self._row(lane) for lane in self.lanes]
        self.left = 92.0 if all(len(lane.ranks) == 1 for lane in self.lanes) else 156.0
        self.drawing = SvgDrawing()
        self.hidden_arrows = 0

    # --- lanes ---
    def _lanes(self, ranks: Sequence[int]) -> tuple[RankLane, ...]:
        trace, (start, end) = self.trace, self.window
        rows_in_window = None
        if (start, end) != (0, self.end):
            returned = np.where(trace["returned_ns"] >= 0, trace["returned_ns"], self.end)
            last = np.maximum(returned, trace["finished_ns"])
            rows_in_window = (last > start) & (trace["posted_ns"] < end)
        important = self._ranks_not_to_fold()
        return group_ranks_into_lanes(trace, ranks, important, MAX_LANES, keep=rows_in_window)

    def _ranks_not_to_fold(self) -> list[int]:
        """Ranks that ended early, and those that are on the critical path for the longest time."""
        ends = self.trace.header.get("ends", ())
        ended_early = [rank for rank, status, _ in ends if status not in ("ended", "blocked")]
        path_ns: dict[int, int] = {}
        for piece in self.path:
            path_ns[piece.rank] = path_ns.get(piece.rank, 0) + piece.end_ns - piece.start_ns
        by_time_on_path = sorted(path_ns, key=lambda rank: (-path_ns[rank], rank))
        return ended_early + by_time_on_path[:_MAX_CRITICAL_RANKS]

    def _drawn_ranks(self) -> list[int]:
        return [rank for lane in self.lanes for rank in lane.drawn_ranks]

    def _row(self, lane: RankLane) -> LaneRow:
        members = lane.drawn_ranks
        rows = np.concatenate([self.rank_rows(rank) for rank in members])
        is_stuck = any(rank in self.stuck for rank in lane.ranks)
        return LaneRow(lane, self.activity_of(rows, len(members)), is_stuck)

    # --- the page ---
    def svg(self) -> str:
        page = TimeChart(self.left, _WIDTH, _TOP, 1, on=self.drawing)
        y = self._head(page)
        column = 1.0 if len(self.rows) <= 12 else 2.0
        for panel in self._panels():
            y = self._panel(panel, y + 8, column) + 34
        if self.hidden_arrows:
            note = (
                f"{self.hidden_arrows} messages are not drawn as arrows; "
                "select a part with --time or --ranks, or use --view spacetime"
            )
            page.text(16, y, note, 11, colour=GREY)
        return page.page(y - 36, f"{clipped(self.name, 60)}: timeline")

    def _panels(self) -> list[TimelinePanel]:
        """The whole window, and one of many equal steps if steps are too narrow in the window."""
        start, end = self.window
        whole = TimelinePanel(start, end, "", start)
        step = most_repeated_step(self.steps)
        if step is None or step.times == 1:
            return [whole]
        if (step.end_ns - step.start_ns) * _WIDTH / (end - start) >= _MIN_STEP_WIDTH:
            return [whole]
        last = step.first + step.times - 1
        count = sum(s.times for s in self.steps)
        title = (
            f"step {step.first}, enlarged; "
            f"steps {step.first} to {last} of 0 to {count - 1} are identical (× {step.times})"
        )
        return [
            whole._replace(title=f"the whole run, {count} steps"),
            TimelinePanel(step.start_ns, step.end_ns, title, step.start_ns),
        ]

    def _head(self, page: TimeChart) -> float:
        header, world_size = self.trace.header, self.trace.world_size
        shown = sum(len(lane.ranks) for lane in self.lanes)
        facts = [
            f"{header.get('outcome') or 'recorded'}, {show_ns(self.makespan)}",
            str(header.get("backend") or ""),
            selection_text(self.part, world_size),
            lane_count_text(self.lanes),
            f"{world_size - shown} ranks are not drawn" if shown < world_size else "",
        ]
        page.heading(f"{clipped(self.name, 60)}: timeline", facts)
        x, y = page.legend(self._legend(), right=self.left + _WIDTH - 120)
        page.outline(x + 1, y + 1, 20, 10, INK)
        page.text(x + 28, y + 10, "critical path", 12)
        return y + 34

    def _legend(self) -> list[tuple[str, str]]:
        """Every fill that occurs, with its share of the time of all drawn ranks."""
        start, end = self.window
        total_ns, kind_ns = 0, [0] * 6
        for row in self.rows:
            # Of equal ranks, the activity of one is known: it counts once for each of them.
            times = len(row.lane.ranks) // row.doing.many
            total_ns += len(row.lane.ranks) * (end - start)
            for number, kind_spans in enumerate(row.doing.kinds()):
                visible_ns = sum(spans_within(spans, start, end).total for spans in kind_spans)
                kind_ns[number] += times * visible_ns
        fills = (
            COMPUTE_FILL,
            BACKWARD_FILL,
            EXPOSED_FILL,
            HIDDEN_FILL,
            WAITING_FILL,
            HOST_FILL,
        )
        words = (
            "compute",
            "backward",
            "communication (exposed)",
            "communication (overlapped)",
            "waiting",
            "host work, device idle",
        )
        keys = [
            (fill, f"{word} {_percent_text(ns, total_ns)}")
            for fill, word, ns in zip(fills, words, kind_ns, strict=True)
            if ns
        ]
        # Hidden communication happens during compute, so it must not be subtracted as well.
        hidden_ns = kind_ns[3]
        idle_ns = total_ns - (sum(kind_ns) - hidden_ns)
        if idle_ns > 0:
            keys.append((PALE_FILL, f"idle {_percent_text(idle_ns, total_ns)}"))
        return keys

    # --- a panel ---
    def _panel(self, panel: TimelinePanel, y: float, column: float) -> float:
        """Draw a panel below ``y``; returns its bottom."""
        top = y + (30 if panel.title else 12)
        window = (panel.start_ns, panel.end_ns)
        heights = [row.track_height for row in self.rows]
        area, gap = ChartArea(self.left, _WIDTH, top), STRIP_HEIGHT + _GAP
        chart = LaneChart(area, window, self.lanes, heights, gap, on=self.drawing)
        if panel.title:
            chart.text(16, y + 10, panel.title, 12, bold=True)
        end_of_axis = min(panel.end_ns, max(self.makespan, 1))
        bottom = chart.tops[-1]
        chart.time_axis(bottom - 6, panel.since_ns, end_of_axis)
        painter = TimelineLanePainter(chart, self.trace, self.makespan, column)
        for number, row in enumerate(self.rows):
            painter.draw(number, row)
        self._messages(chart)
        _CriticalPathPainter(chart, self.rows, self.trace).draw(self.path)
        return bottom

    def _messages(self, chart: LaneChart) -> None:
        """An arrow for each message between two lanes, if there are few enough to follow."""
        trace = self.trace
        # Messages of equal ranks coincide: the dictionary keeps one of them, in order.
        arrows: dict[tuple[int, int, int, int], None] = {}
        for message in messages_between_lanes(trace, chart.lane_of):
            start = int(trace["started_ns"][message.send])
            end = int(trace["finished_ns"][message.receive])
            is_complete = min(start, end) >= 0
            if is_complete and start < chart.end_ns and end > chart.start_ns:
                arrows[message.sender_lane, start, message.receiver_lane, end] = None
        if len(arrows) > MAX_ARROWS:
            self.hidden_arrows = max(self.hidden_arrows, len(arrows))
            return
        for arrow in arrows:
            chart.line(*chart.between_lanes(*arrow), MESSAGE_COLOUR, 1.3, arrow=True)


class _CriticalPathPainter:
    """Draws the critical path: a frame around a wide piece, a line under the lane for a narrow one.

    Dashed lines connect pieces on different lanes.
    """

    def __init__(self, chart: LaneChart, rows: Sequence[LaneRow], trace: Trace) -> None:
        self.chart = chart
        self.rows = rows
        self.trace = trace
        self.scale = chart.width / (chart.end_ns - chart.start_ns)

    def draw(self, pieces: Sequence[CriticalPathPiece]) -> None:
        """Draw the pieces that are on lanes and within the time of the chart."""
        narrow: dict[int, list[CriticalPathPiece]] = {}
        hops: list[tuple[int, int, int]] = []
        previous_lane: int | None = None
        for piece in filter(self._is_visible, pieces):
            lane = self.chart.lane_of[piece.rank]
            if (piece.end_ns - piece.start_ns) * self.scale >= _MIN_FRAME_WIDTH:
                self._frame(piece, lane)
            else:
                narrow.setdefault(lane, []).append(piece)
            if previous_lane is not None and previous_lane != lane:
                hops.append((piece.start_ns, previous_lane, lane))
            previous_lane = lane
        for lane, lane_pieces in narrow.items():
            self._strip(lane, lane_pieces)
        if len(hops) <= MAX_ARROWS:
            for instant, one_lane, other_lane in hops:
                upper, lower = sorted((one_lane, other_lane))
                ends = self.chart.between_lanes(upper, instant, lower, instant)
                self.chart.line(*ends, INK, 1.0, dash="2 3")

    def _is_visible(self, piece: CriticalPathPiece) -> bool:
        chart = self.chart
        is_in_window = piece.end_ns > chart.start_ns and piece.start_ns < chart.end_ns
        return is_in_window and piece.rank in chart.lane_of

    def _strip(self, lane: int, pieces: Sequence[CriticalPathPiece]) -> None:
        starts = np.array([piece.start_ns for piece in pieces])
        ends = np.array([piece.end_ns for piece in pieces])
        y = self.chart.tops[lane] + self.rows[lane].track_height
        band = TrackBand(y + 1, STRIP_HEIGHT - 1)
        draw_track(self.chart, band, [TrackLayer(INK, merged_spans(TimeSpans(starts, ends)))])

    def _frame(self, piece: CriticalPathPiece, lane: int) -> None:
        x, right = self.chart.x(piece.start_ns), self.chart.x(piece.end_ns)
        y, height = self.chart.tops[lane], UPPER_HEIGHT
        if piece.why == "transfer":
            streams = self.rows[lane].streams
            queue = self.trace.text("queue", int(self.trace["queue"][piece.row]))
            stream = streams.index(queue) if queue in streams else len(streams) - 1
            y, height = y + UPPER_HEIGHT + stream * LOWER_HEIGHT, LOWER_HEIGHT
        self.chart.outline(x + 1, y + 1, max(right - x - 2, 1), height - 2, INK)


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
            "hybrid", "The same run to scale: the activity of each rank, and the critical path."
        ),
        GalleryExample(
            "ddp_by_hand",
            "The same run to scale: two of the three all_reduces overlap with compute.",
        ),
        GalleryExample(
            "pipeline_1f1b", "1F1B (one forward, one backward): the bubble is at both ends."
        ),
        GalleryExample(
            "strategies/pipeline_zb1p",
            "A zero-bubble schedule: weight gradients (W), which no rank waits for, "
            "fill the bubble.",
        ),
    ),
)
