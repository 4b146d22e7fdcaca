"""A lane of the timeline: what a rank computes and waits for above, what moves below, a track for each stream that overlaps others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from distsim.trace import Trace
from distsim.units import show_bytes, show_ns
from distsim.views.doings import Doing
from distsim.views.drawing.lanes import Band, Layer, columns, density, track
from distsim.views.drawing.palette import GREY, INK, LINE, PALE, WHITE
from distsim.views.drawing.records import clipped, text_width
from distsim.views.drawing.svg import HIDDEN, WAITING, TimeChart
from distsim.views.folding import Lane
from distsim.views.spans import Ints, Spans, shares

#: Fills by lightness too (CIE L* 80, 62, 40): they differ in print and to who sees few colours.
COMPUTE, BACKWARD, EXPOSED = "#A9CCE8", "#5E9BC9", "#A63C06"
UPPER, LOWER, STRIP = 20.0, 14.0, 4.0
#: Bars from this width on have a frame, a tip and, where it fits, a word.
_BAR: Final = 3.0
_LABEL: Final = 11


class Row(NamedTuple):
    """A lane with what its ranks do: of the first one where they are equal, else of all of them."""

    lane: Lane
    doing: Doing
    stuck: bool

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self.doing.exposed)

    @property
    def height(self) -> float:
        return UPPER + len(self.streams) * LOWER + STRIP


class LanePainter:
    """Draws lanes of one trace onto one chart. ``forever_ns``: from here on whoever is stuck stays so."""

    def __init__(self, chart: TimeChart, trace: Trace, forever_ns: int, column: float = 1.0) -> None:
        self.chart, self.trace, self.forever_ns, self.column = chart, trace, forever_ns, column

    def draw(self, row: Row, y: float) -> None:
        chart, left = self.chart, self.chart.left
        chart.rect(left, y, chart.width, UPPER, PALE)
        for number, stream in enumerate(row.streams):
            at = y + UPPER + number * LOWER
            chart.rect(left, at, chart.width, LOWER, WHITE, border="#DDE1E6")
            if stream:
                chart.text(left - 6, at + 11, _short(stream), 9, anchor="end", colour=GREY)
        self._title(row, y)
        (self._alone if row.doing.many == 1 else self._mean)(row, y)

    def _title(self, row: Row, y: float) -> None:
        room = self.chart.left - 16 - (70 if row.streams[0] else 8)
        size = next((s for s in (13, 12, 11, 10) if text_width(row.lane.title, s, True) <= room), 10)
        self.chart.text(16, y + 15, row.lane.title, size, bold=True)
        if row.lane.about:
            beside = row.streams[0]  # names of streams stand to the right of it
            about = row.lane.about.replace(" equal ranks", " equal") if beside else row.lane.about
            self.chart.text(16, y + 30, about, 10, colour=GREY)

    def _mean(self, row: Row, y: float) -> None:
        """The mean of several ranks that differ, as density."""
        edges, doing = columns(self.chart, max(self.column, 2.0)), row.doing
        upper = ((COMPUTE, doing.work), (BACKWARD, doing.backward), (WAITING, doing.waiting))
        lower = ((EXPOSED, doing.exposed[""]), (HIDDEN, doing.hidden[""]))
        for at, height, parts in ((y, UPPER, upper), (y + UPPER, LOWER, lower)):
            density(self.chart, Band(at + 1, height - 2), edges, [(fill, shares(s, edges, doing.many)) for fill, s in parts])

    def _alone(self, row: Row, y: float) -> None:
        chart, doing, band = self.chart, row.doing, Band(y + 1, UPPER - 2)
        layers = (Layer(COMPUTE, doing.work), Layer(BACKWARD, doing.backward), Layer(WAITING, doing.waiting))
        track(chart, band, layers, self.column)
        for number, stream in enumerate(row.streams):
            at = Band(y + UPPER + number * LOWER + 1, LOWER - 2)
            track(chart, at, (Layer(EXPOSED, doing.exposed[stream]), Layer(HIDDEN, doing.hidden[stream])), self.column)
        self._waits(row, doing.waiting, band)
        self._bars(doing.computes, band, INK)
        queues = list(row.streams)
        for number in range(len(queues)):
            mine = doing.moves if queues == [""] else self._of_queue(doing.moves, queues, number)
            self._bars(mine, Band(y + UPPER + number * LOWER + 1, LOWER - 2), "", doing.exposed[queues[number]])

    def _of_queue(self, rows: Ints, queues: Sequence[str], number: int) -> Ints:
        texts = [*self.trace.tables["queue"], ""]
        own = np.array([queues.index(t) if t in queues else len(queues) - 1 for t in texts])
        found: Ints = rows[own[self.trace["queue"][rows]] == number]
        return found

    def _waits(self, row: Row, waiting: Spans, band: Band) -> None:
        for start, end in zip(waiting.starts.tolist(), waiting.ends.tolist(), strict=True):
            x, width = self._place(start, end)
            if width < _BAR:
                continue
            word = "waits for ever" if row.stuck and end > self.forever_ns else "waiting"
            self.chart.rect(x, band.y, width, band.height, "", f"{row.lane.title}: {word}, {show_ns(end - start)}")
            wide = text_width(word, _LABEL) + 6
            if wide <= width:
                self.chart.rect(x + (width - wide) / 2, band.y + 1.5, wide, band.height - 3, WHITE)
                self.chart.text(x + width / 2, band.y + band.height / 2 + 4, word, _LABEL, anchor="middle")

    def _place(self, start: int, end: int) -> tuple[float, float]:
        x = self.chart.x(start)
        return x, self.chart.x(end) - x

    def _bars(self, rows: Ints, band: Band, ink: str, exposed: Spans | None = None) -> None:
        """Frames, tips and words of the bars that are wide enough for them."""
        trace = self.trace
        started, finished = trace["started_ns"][rows], trace["finished_ns"][rows]
        till = np.where(finished >= 0, finished, self.chart.end_ns)
        low, high = self.chart.start_ns, self.chart.end_ns
        scale = self.chart.width / (high - low)
        wide = (np.minimum(till, high) - np.maximum(started, low)) * scale >= _BAR
        for row, start, end in zip(rows[wide].tolist(), started[wide].tolist(), till[wide].tolist(), strict=True):
            x, width = self._place(start, end)
            label, tip = self._words(row, start, end)
            plain = exposed is None or _inside(exposed, (start + end) // 2)
            hidden = ", hidden by compute" if exposed is not None and not plain else ""
            self.chart.rect(x, band.y, width, band.height, "", tip + hidden, LINE)
            word = next((w for w in (label, letter(label)) if w and text_width(w, _LABEL) + 6 <= width), None)
            if word is not None:
                colour = ink or (WHITE if plain else INK)
                if hidden:
                    half = text_width(word, _LABEL) / 2 + 2
                    self.chart.rect(x + width / 2 - half, band.y + 1, 2 * half, band.height - 2, "#E4F4EE")
                self.chart.text(x + width / 2, band.y + band.height / 2 + 4, word, _LABEL, anchor="middle", colour=colour)

    def _words(self, row: int, start: int, end: int) -> tuple[str, str]:
        trace = self.trace
        name = trace.text("name", int(trace["name"][row])) if "name" in trace.columns else ""
        nbytes = int(trace["nbytes"][row])
        label = clipped(name or trace.text("op", int(trace["op"][row])), 40)
        return label, ", ".join(t for t in (label, show_bytes(nbytes) if nbytes else "", show_ns(end - start)) if t)


def _inside(spans: Spans, instant: int) -> bool:
    i = int(np.searchsorted(spans.starts, instant, side="right")) - 1
    return i >= 0 and instant < int(spans.ends[i])


def letter(label: str) -> str:
    """A pass in the letters of pipeline schedules: forward, backward, its input's half and its weights'."""
    for word, letter in (("forward", "F"), ("backward input", "I"), ("backward weight", "W"), ("backward", "B")):
        if label.startswith(word):
            return letter
    return ""


def _short(stream: str) -> str:
    """A queue's name without the ranks that say which of several groups it is."""
    return clipped(stream.partition("[")[0], 13)
