"""A lane of the timeline: what a rank computes and waits for above, what moves below, a track for
each stream that overlaps others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from distsim.common.units import show_bytes, show_ns
from distsim.output.pictures.drawing.box_diagram import clipped, text_width
from distsim.output.pictures.drawing.palette import GREY, INK, LINE_COLOUR, PALE_FILL, WHITE
from distsim.output.pictures.drawing.svg import HIDDEN_FILL, WAITING_FILL, TimeChart
from distsim.output.pictures.drawing.tracks import (
    TrackBand,
    TrackLayer,
    density_edges,
    draw_density,
    draw_track,
)
from distsim.output.trace_data.activity import RankActivity, pass_letter
from distsim.output.trace_data.lanes import RankLane
from distsim.output.trace_data.time_spans import Ints, TimeSpans, covered_shares
from distsim.trace.model import Trace

#: The fills differ in lightness too (CIE L* 80, 62, 40), for print and for colour-blind readers.
COMPUTE_FILL, BACKWARD_FILL, EXPOSED_FILL = "#A9CCE8", "#5E9BC9", "#A63C06"
UPPER_HEIGHT, LOWER_HEIGHT, STRIP_HEIGHT = 20.0, 14.0, 4.0
#: Bars from this width on have a frame, a tip and, where it fits, a word.
_MIN_BAR_WIDTH: Final = 3.0
_LABEL_SIZE: Final = 11


class LaneRow(NamedTuple):
    """A lane and its activity: of its first rank if its ranks are equal, else of all its ranks."""

    lane: RankLane
    doing: RankActivity
    stuck: bool

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self.doing.exposed)

    @property
    def height(self) -> float:
        return UPPER_HEIGHT + len(self.streams) * LOWER_HEIGHT + STRIP_HEIGHT


class LanePainter:
    """Draws lanes of one trace onto one chart.

    ``forever_ns``: the time from which on blocked ranks stay blocked for ever.
    """

    def __init__(
        self, chart: TimeChart, trace: Trace, forever_ns: int, column: float = 1.0
    ) -> None:
        self.chart, self.trace, self.forever_ns, self.column = chart, trace, forever_ns, column

    def draw(self, row: LaneRow, y: float) -> None:
        chart, left = self.chart, self.chart.left
        chart.rect(left, y, chart.width, UPPER_HEIGHT, PALE_FILL)
        for number, stream in enumerate(row.streams):
            at = y + UPPER_HEIGHT + number * LOWER_HEIGHT
            chart.rect(left, at, chart.width, LOWER_HEIGHT, WHITE, border="#DDE1E6")
            if stream:
                chart.text(
                    left - 6, at + 11, _short_stream_name(stream), 9, anchor="end", colour=GREY
                )
        self._title(row, y)
        (self._alone if row.doing.many == 1 else self._mean)(row, y)

    def _title(self, row: LaneRow, y: float) -> None:
        room = self.chart.left - 16 - (70 if row.streams[0] else 8)
        size = next(
            (s for s in (13, 12, 11, 10) if text_width(row.lane.title, s, True) <= room), 10
        )
        self.chart.text(16, y + 15, row.lane.title, size, bold=True)
        if row.lane.about:
            beside = row.streams[0]  # names of streams stand to the right of it
            about = row.lane.about.replace(" equal ranks", " equal") if beside else row.lane.about
            self.chart.text(16, y + 30, about, 10, colour=GREY)

    def _mean(self, row: LaneRow, y: float) -> None:
        """The mean of several ranks that differ, as density."""
        edges, doing = density_edges(self.chart, max(self.column, 2.0)), row.doing
        upper = (
            (COMPUTE_FILL, doing.work),
            (BACKWARD_FILL, doing.backward),
            (WAITING_FILL, doing.waiting),
        )
        lower = ((EXPOSED_FILL, doing.exposed[""]), (HIDDEN_FILL, doing.hidden[""]))
        for at, height, parts in (
            (y, UPPER_HEIGHT, upper),
            (y + UPPER_HEIGHT, LOWER_HEIGHT, lower),
        ):
            draw_density(
                self.chart,
                TrackBand(at + 1, height - 2),
                edges,
                [(fill, covered_shares(s, edges, doing.many)) for fill, s in parts],
            )

    def _alone(self, row: LaneRow, y: float) -> None:
        chart, doing, band = self.chart, row.doing, TrackBand(y + 1, UPPER_HEIGHT - 2)
        layers = (
            TrackLayer(COMPUTE_FILL, doing.work),
            TrackLayer(BACKWARD_FILL, doing.backward),
            TrackLayer(WAITING_FILL, doing.waiting),
        )
        draw_track(chart, band, layers, self.column)
        for number, stream in enumerate(row.streams):
            at = TrackBand(y + UPPER_HEIGHT + number * LOWER_HEIGHT + 1, LOWER_HEIGHT - 2)
            draw_track(
                chart,
                at,
                (
                    TrackLayer(EXPOSED_FILL, doing.exposed[stream]),
                    TrackLayer(HIDDEN_FILL, doing.hidden[stream]),
                ),
                self.column,
            )
        self._waits(row, doing.waiting, band)
        self._bars(doing.computes, band, INK)
        queues = list(row.streams)
        for number in range(len(queues)):
            mine = doing.moves if queues == [""] else self._of_queue(doing.moves, queues, number)
            self._bars(
                mine,
                TrackBand(y + UPPER_HEIGHT + number * LOWER_HEIGHT + 1, LOWER_HEIGHT - 2),
                "",
                doing.exposed[queues[number]],
            )

    def _of_queue(self, rows: Ints, queues: Sequence[str], number: int) -> Ints:
        texts = [*self.trace.tables["queue"], ""]
        own = np.array([queues.index(t) if t in queues else len(queues) - 1 for t in texts])
        found: Ints = rows[own[self.trace["queue"][rows]] == number]
        return found

    def _waits(self, row: LaneRow, waiting: TimeSpans, band: TrackBand) -> None:
        for start, end in zip(waiting.starts.tolist(), waiting.ends.tolist(), strict=True):
            x, width = self._place(start, end)
            if width < _MIN_BAR_WIDTH:
                continue
            word = "waits for ever" if row.stuck and end > self.forever_ns else "waiting"
            self.chart.rect(
                x,
                band.y,
                width,
                band.height,
                "",
                f"{row.lane.title}: {word}, {show_ns(end - start)}",
            )
            wide = text_width(word, _LABEL_SIZE) + 6
            if wide <= width:
                self.chart.rect(x + (width - wide) / 2, band.y + 1.5, wide, band.height - 3, WHITE)
                self.chart.text(
                    x + width / 2, band.y + band.height / 2 + 4, word, _LABEL_SIZE, anchor="middle"
                )

    def _place(self, start: int, end: int) -> tuple[float, float]:
        x = self.chart.x(start)
        return x, self.chart.x(end) - x

    def _bars(
        self, rows: Ints, band: TrackBand, ink: str, exposed: TimeSpans | None = None
    ) -> None:
        """Frames, tips and words of the bars that are wide enough for them."""
        trace = self.trace
        started, finished = trace["started_ns"][rows], trace["finished_ns"][rows]
        till = np.where(finished >= 0, finished, self.chart.end_ns)
        low, high = self.chart.start_ns, self.chart.end_ns
        scale = self.chart.width / (high - low)
        wide = (np.minimum(till, high) - np.maximum(started, low)) * scale >= _MIN_BAR_WIDTH
        for row, start, end in zip(
            rows[wide].tolist(), started[wide].tolist(), till[wide].tolist(), strict=True
        ):
            x, width = self._place(start, end)
            label, tip = self._words(row, start, end)
            plain = exposed is None or _covers_instant(exposed, (start + end) // 2)
            hidden = ", hidden by compute" if exposed is not None and not plain else ""
            self.chart.rect(x, band.y, width, band.height, "", tip + hidden, LINE_COLOUR)
            word = fitting_label(label, width, _LABEL_SIZE)
            if word:
                colour = ink or (WHITE if plain else INK)
                if hidden:
                    half = text_width(word, _LABEL_SIZE) / 2 + 2
                    self.chart.rect(
                        x + width / 2 - half, band.y + 1, 2 * half, band.height - 2, "#E4F4EE"
                    )
                self.chart.text(
                    x + width / 2,
                    band.y + band.height / 2 + 4,
                    word,
                    _LABEL_SIZE,
                    anchor="middle",
                    colour=colour,
                )

    def _words(self, row: int, start: int, end: int) -> tuple[str, str]:
        trace = self.trace
        name = trace.text("name", int(trace["name"][row])) if "name" in trace.columns else ""
        nbytes = int(trace["nbytes"][row])
        label = clipped(name or trace.text("op", int(trace["op"][row])), 40)
        return label, ", ".join(
            filter(None, (label, show_bytes(nbytes) if nbytes else "", show_ns(end - start)))
        )


def _covers_instant(spans: TimeSpans, instant: int) -> bool:
    i = int(np.searchsorted(spans.starts, instant, side="right")) - 1
    return i >= 0 and instant < int(spans.ends[i])


def fitting_label(label: str, width: float, size: int) -> str:
    """The label, else the letter of its pass, else nothing: the first that fits into a bar."""
    for text in (label, pass_letter(label)):
        if text and text_width(text, size) + 6 <= width:
            return text
    return ""


def _short_stream_name(stream: str) -> str:
    """A queue's name without the ranks that say which of several groups it is."""
    return clipped(stream.partition("[")[0], 13)
