"""Two runs in one picture: for each rank a track of run A above a track of run B, at one scale of
time.

Ranks that are equal in both runs share a lane. A track shows compute, exposed communication and
waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distsim.analysis.run_comparison import RunComparison
from distsim.common.units import show_bytes, show_ns
from distsim.operations.registry import COMPUTE_OPS
from distsim.output.pictures.components.lane_chart import (
    BACKWARD_FILL,
    COMPUTE_FILL,
    EXPOSED_FILL,
    ChartArea,
    LaneBar,
    LaneChart,
    LaneNameStyle,
    bars_to_frame,
    call_name,
    lane_count_text,
)
from distsim.output.pictures.drawing.box_diagram import clipped
from distsim.output.pictures.drawing.palette import GREY, INK, PALE_FILL, RED, WHITE
from distsim.output.pictures.drawing.svg import WAITING_FILL
from distsim.output.pictures.drawing.tracks import TrackBand, TrackLayer, draw_layers
from distsim.output.trace_data.activity import ActivityReader, RankActivity, pass_letter
from distsim.output.trace_data.lanes import RankLane, RankRows, group_ranks_into_lanes
from distsim.output.trace_data.time_spans import TimeSpans
from distsim.trace.model import Trace

#: The largest number of lanes; more are folded.
MAX_LANES = 20
_LEFT, _WIDTH, _TOP = 172.0, 1064.0, 100.0
_TRACK, _GAP = 20.0, 12.0
_NAME_STYLE = LaneNameStyle((13, 10), _LEFT - 50, 17, 33)
_MAX_NAME_LENGTH = 32


class _OverlaidRun(NamedTuple):
    """One of the two runs; ``letter`` is A or B."""

    letter: str
    trace: Trace
    rows_of: RankRows
    activity_of: ActivityReader


def overlay_svg(found: RunComparison, names: tuple[str, str]) -> str:
    """The picture of two compared runs as SVG text; ``names`` are the titles of the runs."""
    return _OverlayDrawing(found, names).svg()


class _OverlayDrawing:
    """One picture of two runs, with one lane for both runs of a rank."""

    def __init__(self, found: RunComparison, names: tuple[str, str]) -> None:
        self.names = names
        self.makespans_ns = found.makespans_ns
        self.end = max(*found.makespans_ns, 1)
        self.runs = [
            _OverlaidRun(letter, trace, RankRows(trace), ActivityReader(trace, self.end))
            for letter, trace in (("A", found.a), ("B", found.b))
        ]
        larger, smaller = found.a, found.b
        if found.b.world_size >= found.a.world_size:
            larger, smaller = found.b, found.a
        self.world_size = larger.world_size
        ranks = range(self.world_size)
        self.lanes = group_ranks_into_lanes(larger, ranks, (), MAX_LANES, beside=smaller)
        heights = [2 * _TRACK] * len(self.lanes)
        area = ChartArea(_LEFT, _WIDTH, _TOP)
        self.chart = LaneChart(area, (0, self.end), self.lanes, heights, _GAP)

    def svg(self) -> str:
        chart = self.chart
        bottom = chart.tops[-1]
        self._head()
        chart.time_axis(bottom - 6, 0, self.end, named=False)
        for number, lane in enumerate(self.lanes):
            chart.lane_name(number, _NAME_STYLE, lane.about)
            for run_number, run in enumerate(self.runs):
                self._track(run, lane, chart.tops[number] + run_number * _TRACK)
        self._ends(bottom - 6)
        return chart.page(bottom, " and ".join(clipped(name, 40) for name in self.names))

    def _head(self) -> None:
        chart = self.chart
        for run, name, makespan_ns, title_y in zip(
            self.runs, self.names, self.makespans_ns, (26, 46), strict=True
        ):
            title = f"{run.letter}: {clipped(name, 48)}, {show_ns(makespan_ns)}"
            chart.text(16, title_y, title, 15, bold=True)
        keys = (
            (COMPUTE_FILL, "compute"),
            (BACKWARD_FILL, "backward"),
            (EXPOSED_FILL, "communication (exposed)"),
            (WAITING_FILL, "waiting"),
            (PALE_FILL, "idle"),
        )
        x, y = chart.legend(keys)
        x = chart.line_key((x, y), INK, "end of A")
        x = chart.line_key((x, y), RED, "end of B", dash="4 3")
        if len(self.lanes) < self.world_size:
            chart.text(x, y + 10, lane_count_text(self.lanes), 12, colour=GREY)

    def _track(self, run: _OverlaidRun, lane: RankLane, y: float) -> None:
        chart = self.chart
        chart.text(_LEFT - 14, y + 13, run.letter, 11, colour=GREY)
        chart.rect(_LEFT, y, _WIDTH, _TRACK - 2, PALE_FILL)
        present = [rank for rank in lane.ranks if rank < run.trace.world_size]
        members = present[:1] if lane.like == "equal" else present
        if not members:
            chart.text(_LEFT + 8, y + 13, "not in this run", 11, colour=GREY)
            return
        rows = np.concatenate([run.rows_of(rank) for rank in members])
        activity = run.activity_of(rows, len(members))
        layers = [
            TrackLayer(COMPUTE_FILL, activity.work),
            TrackLayer(BACKWARD_FILL, activity.backward),
            TrackLayer(COMPUTE_FILL, activity.host),
            TrackLayer(EXPOSED_FILL, _concatenated_spans(tuple(activity.exposed.values()))),
            TrackLayer(WAITING_FILL, activity.waiting),
        ]
        band = TrackBand(y + 1, _TRACK - 4)
        draw_layers(chart, band, layers, activity.many)
        if activity.many == 1:
            self._bars(run, activity, lane, band)

    def _bars(
        self, run: _OverlaidRun, activity: RankActivity, lane: RankLane, band: TrackBand
    ) -> None:
        trace = run.trace
        computes = trace.ops(*COMPUTE_OPS)
        rows = np.concatenate([activity.computes, activity.moves])
        compute_rows = rows[computes[rows]]
        compute_starts = trace["started_ns"][compute_rows]
        compute_ends = np.where(
            trace["finished_ns"][compute_rows] >= 0, trace["finished_ns"][compute_rows], self.end
        )
        for row, start, end in bars_to_frame(self.chart, trace, rows):
            label = _call_label(trace, row)
            words: tuple[str, ...] = (label, pass_letter(label))
            overlaps_compute = bool(((compute_starts < end) & (compute_ends > start)).any())
            if overlaps_compute and not computes[row]:
                words = ()  # the compute has its own word at the same height
            tip = f"{lane.title}, {run.letter}: {label}, {show_ns(end - start)}"
            self.chart.bar(band, LaneBar(start, end, tip, words, INK if computes[row] else WHITE))

    def _ends(self, bottom: float) -> None:
        """A line at the end of each run, to make the difference visible."""
        chart = self.chart
        for end_ns, colour, dash in zip(self.makespans_ns, (INK, RED), ("", "4 3"), strict=True):
            x = chart.x(end_ns)
            chart.line((x, _TOP - 8), (x, bottom), colour, 1.6, dash=dash)


def _concatenated_spans(parts: Sequence[TimeSpans]) -> TimeSpans:
    """The spans of several ranks, unmerged: spans of different ranks may overlap."""
    starts = np.concatenate([part.starts for part in parts])
    ends = np.concatenate([part.ends for part in parts])
    return TimeSpans(starts, ends)


def _call_label(trace: Trace, row: int) -> str:
    nbytes = int(trace["nbytes"][row])
    size = f" {show_bytes(nbytes)}" if nbytes else ""
    return call_name(trace, row, _MAX_NAME_LENGTH) + size
