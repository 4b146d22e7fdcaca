"""Lanes over time: the renderer that the timeline, the schedule, the space-time diagram and the
overlay of two runs share.

A lane is one row of the picture. It belongs to one rank, or to several ranks that do the same. Its
name is on the left; to the right of the name are bars, at a scale of time that all lanes share.
This module owns what these pictures have in common: where lanes lie, their names, the time axis,
bars, and lines between lanes. The views decide what a bar means and which fill it has.

The data-flow picture has a line for each rank as well, but its time is not to scale and its boxes
are as large as their texts (`distsim.output.pictures.drawing.sequence_diagram`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from distsim.common.units import show_ns
from distsim.output.pictures.drawing.box_diagram import clipped, text_width
from distsim.output.pictures.drawing.palette import GREY, INK, LINE_COLOUR
from distsim.output.pictures.drawing.svg import Point, SvgDrawing, TimeChart, round_ticks
from distsim.output.pictures.drawing.tracks import TrackBand
from distsim.output.trace_data.lanes import RankLane
from distsim.output.trace_data.time_spans import Ints
from distsim.trace.model import Trace

#: The fills differ in lightness too (CIE L* 80, 62, 40), for print and for colour-blind readers.
COMPUTE_FILL, BACKWARD_FILL, EXPOSED_FILL = "#A9CCE8", "#5E9BC9", "#A63C06"
#: Work of the host while its device does nothing: darker than work of the device, also in grey.
HOST_FILL = "#5F4B7A"
#: The size of words on bars, in pixels.
LABEL_SIZE = 11
#: Bars from this width on, in pixels, have a frame, a tip and, if it fits, a word.
MIN_BAR_WIDTH = 3.0
#: The left margin of the page, in pixels.
_MARGIN = 16


class ChartArea(NamedTuple):
    """Where the bars of a chart lie on the page, in pixels; their height follows from the lanes."""

    left: float
    width: float
    top: float


class LaneNameStyle(NamedTuple):
    """Sizes and places of a lane's name. Heights are in pixels from the top of the lane.

    ``sizes``: font sizes of the title, from large to small; the first one with which the title
    fits into ``room`` pixels is used, else the last one. ``note_y`` is for the line below the
    title, which says how many ranks share the lane. ``title_y_without_note`` is for titles without
    that line.
    """

    sizes: tuple[int, ...]
    room: float
    title_y: float
    note_y: float
    note_size: int = 10
    title_y_without_note: float | None = None


class WordBackdrop(NamedTuple):
    """A plain rectangle behind the word of a striped bar, so that the word stays legible."""

    fill: str
    margin_x: float
    margin_y: float


class LaneBar(NamedTuple):
    """A bar of a lane.

    ``words``: texts for the bar, from the best one on; the first that fits is written. ``fill`` is
    empty if a track already shows the bar's time: then only the frame, the tip and the word are
    drawn.
    """

    start_ns: int
    end_ns: int
    tip: str
    words: tuple[str, ...]
    ink: str = INK
    fill: str = ""
    border: str = LINE_COLOUR
    backdrop: WordBackdrop | None = None


class LaneChart(TimeChart):
    """A chart of lanes. ``tops[i]`` is the top of lane i; the last element of ``tops`` is where
    the next lane would begin.

    ``window``: the first and the last instant, in ns. ``heights``: of the lanes, without the
    ``gap`` below each. ``lead``: pixels between the top of the chart and the first lane.
    """

    def __init__(
        self,
        area: ChartArea,
        window: tuple[int, int],
        lanes: Sequence[RankLane],
        heights: Sequence[float],
        gap: float,
        lead: float = 0.0,
        on: SvgDrawing | None = None,
    ) -> None:
        super().__init__(area.left, area.width, area.top, window[1], window[0], on)
        self.lanes = lanes
        self.heights = heights
        self.tops = list(accumulate((h + gap for h in heights), initial=area.top + lead))
        self.lane_of = {rank: i for i, lane in enumerate(lanes) for rank in lane.ranks}

    def time_axis(self, bottom: float, since_ns: int, until_ns: int, named: bool = True) -> None:
        """Round instants from ``since_ns`` to ``until_ns``, counted from ``since_ns``."""
        ticks = (since_ns + tick for tick in round_ticks(until_ns - since_ns))
        self.axis(ticks, bottom, since_ns)
        if named:
            name = f"time from {show_ns(since_ns)}" if since_ns else "time"
            self.text(_MARGIN, bottom + 18, name, 11, colour=GREY)

    def lane_name(self, number: int, style: LaneNameStyle, note: str) -> None:
        """The title of a lane, and under it ``note``, which may be empty."""
        top, title = self.tops[number], self.lanes[number].title
        title_y = style.title_y
        if not note and style.title_y_without_note is not None:
            title_y = style.title_y_without_note
        fitting = (size for size in style.sizes if text_width(title, size, True) <= style.room)
        self.text(_MARGIN, top + title_y, title, next(fitting, style.sizes[-1]), bold=True)
        if note:
            self.text(_MARGIN, top + style.note_y, note, style.note_size, colour=GREY)

    def bar(self, band: TrackBand, bar: LaneBar, padding: float = 6.0) -> None:
        """Draw a bar; ``padding``: pixels that its word leaves free, left and right together."""
        x, right = self.x(bar.start_ns), self.x(bar.end_ns)
        self.rect(x, band.y, right - x, band.height, bar.fill, bar.tip, bar.border)
        word = first_fitting(bar.words, right - x - padding)
        if not word:
            return
        centre = (x + right) / 2
        if bar.backdrop is not None:
            fill, margin_x, margin_y = bar.backdrop
            width = text_width(word, LABEL_SIZE) + 2 * margin_x
            height = band.height - 2 * margin_y
            self.rect(centre - width / 2, band.y + margin_y, width, height, fill)
        baseline = band.y + band.height / 2 + 4
        self.text(centre, baseline, word, LABEL_SIZE, anchor="middle", colour=bar.ink)

    def between_lanes(
        self, tail: int, tail_ns: int, head: int, head_ns: int
    ) -> tuple[Point, Point]:
        """The ends of a line from one lane to another: on the sides that face each other."""
        leads_down = head > tail
        tail_y = self.tops[tail] + (self.heights[tail] if leads_down else 0)
        head_y = self.tops[head] + (0 if leads_down else self.heights[head])
        return (self.x(tail_ns), tail_y), (self.x(head_ns), head_y)


def first_fitting(words: Sequence[str], room: float) -> str:
    """The first text that is not empty and at most ``room`` pixels wide; empty if none fits."""
    for word in words:
        if word and text_width(word, LABEL_SIZE) <= room:
            return word
    return ""


def bars_to_frame(chart: TimeChart, trace: Trace, rows: Ints) -> Iterator[tuple[int, int, int]]:
    """Row, start and end of the calls that are wide enough in the chart to be framed.

    A call that has not finished lasts until the end of the chart.
    """
    started, finished = trace["started_ns"][rows], trace["finished_ns"][rows]
    until = np.where(finished >= 0, finished, chart.end_ns)
    scale = chart.width / (chart.end_ns - chart.start_ns)
    visible_ns = np.minimum(until, chart.end_ns) - np.maximum(started, chart.start_ns)
    wide = visible_ns * scale >= MIN_BAR_WIDTH
    return zip(rows[wide].tolist(), started[wide].tolist(), until[wide].tolist(), strict=True)


def call_name(trace: Trace, row: int, max_length: int) -> str:
    """The name that the scenario gives to a call, else its operation."""
    name = trace.text("name", int(trace["name"][row])) if "name" in trace.columns else ""
    return clipped(name or trace.text("op", int(trace["op"][row])), max_length)


def lane_count_text(lanes: Sequence[RankLane]) -> str:
    """``16 ranks in 3 lanes``; empty if every rank has a lane of its own."""
    ranks = sum(len(lane.ranks) for lane in lanes)
    if len(lanes) == ranks:
        return ""
    return f"{ranks} ranks in {len(lanes)} lane{'s' * (len(lanes) > 1)}"


def note_on_drawn_rank(lane: RankLane) -> str:
    """The note of a lane that shows its first rank only: whether its other ranks are equal."""
    if lane.about and lane.like != "equal":
        return f"same calls; rank {lane.first} shown"
    return lane.about
