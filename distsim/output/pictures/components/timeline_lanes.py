"""The lanes of the timeline: on top what a rank computes and waits for, below what it transfers.

If transfers of several streams overlap, each stream has a track of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distsim.common.units import show_bytes, show_ns
from distsim.output.pictures.components.lane_chart import (
    BACKWARD_FILL,
    COMPUTE_FILL,
    EXPOSED_FILL,
    HOST_FILL,
    MIN_BAR_WIDTH,
    LaneBar,
    LaneChart,
    LaneNameStyle,
    WordBackdrop,
    bars_to_frame,
    call_name,
)
from distsim.output.pictures.drawing.box_diagram import clipped
from distsim.output.pictures.drawing.palette import GREY, INK, PALE_FILL, WHITE
from distsim.output.pictures.drawing.svg import HIDDEN_FILL, WAITING_FILL
from distsim.output.pictures.drawing.tracks import TrackBand, TrackLayer, draw_layers
from distsim.output.trace_data.activity import RankActivity, pass_letter
from distsim.output.trace_data.lanes import RankLane
from distsim.output.trace_data.time_spans import Ints, TimeSpans
from distsim.trace.model import Trace

#: Heights in pixels: the track of the rank itself, each track of transfers, and the strip for
#: pieces of the critical path that are too short for a frame.
UPPER_HEIGHT, LOWER_HEIGHT, STRIP_HEIGHT = 20.0, 14.0, 4.0
#: Pixels that a track leaves free above and below its fill.
_TRACK_MARGIN = 1.0
_NAME_SIZES = (13, 12, 11, 10)
_WAIT_BACKDROP = WordBackdrop(WHITE, 3, 1.5)
_HIDDEN_BACKDROP = WordBackdrop("#E4F4EE", 2, 1)


class LaneRow(NamedTuple):
    """A lane and its activity: that of its first rank if its ranks are equal, else of all ranks.

    ``stuck``: whether one of its ranks is blocked at the end of the run.
    """

    lane: RankLane
    doing: RankActivity
    stuck: bool

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams with a track of their own; a single empty name if streams do not overlap."""
        return tuple(self.doing.exposed)

    @property
    def track_height(self) -> float:
        """The height of all tracks, without the strip below them."""
        return UPPER_HEIGHT + len(self.streams) * LOWER_HEIGHT


class TimelineLanePainter:
    """Draws lanes of one trace onto one chart.

    ``makespan_ns``: a wait that lasts longer never ends. ``column``: how many pixels of time one
    column of density covers.
    """

    def __init__(
        self, chart: LaneChart, trace: Trace, makespan_ns: int, column: float = 1.0
    ) -> None:
        self.chart = chart
        self.trace = trace
        self.makespan_ns = makespan_ns
        self.column = column

    def draw(self, number: int, row: LaneRow) -> None:
        """Draw lane ``number`` of the chart."""
        chart, top = self.chart, self.chart.tops[number]
        chart.rect(chart.left, top, chart.width, UPPER_HEIGHT, PALE_FILL)
        for stream_number, stream in enumerate(row.streams):
            y = top + UPPER_HEIGHT + stream_number * LOWER_HEIGHT
            chart.rect(chart.left, y, chart.width, LOWER_HEIGHT, WHITE, border="#DDE1E6")
            if stream:
                name = _short_stream_name(stream)
                chart.text(chart.left - 6, y + 11, name, 9, anchor="end", colour=GREY)
        self._name(number, row)
        self._tracks(row, top)
        if row.doing.many == 1:
            self._bars_of_one_rank(row, top)

    def _name(self, number: int, row: LaneRow) -> None:
        # Names of streams stand between the lane's name and its tracks, and need room.
        has_stream_names = bool(row.streams[0])
        room = self.chart.left - 16 - (70 if has_stream_names else 8)
        note = row.lane.about
        if has_stream_names:
            note = note.replace(" identical ranks", " identical")
        self.chart.lane_name(number, LaneNameStyle(_NAME_SIZES, room, 15, 30), note)

    def _tracks(self, row: LaneRow, top: float) -> None:
        doing = row.doing
        upper = (
            TrackLayer(COMPUTE_FILL, doing.work),
            TrackLayer(BACKWARD_FILL, doing.backward),
            TrackLayer(HOST_FILL, doing.host),
            TrackLayer(WAITING_FILL, doing.waiting),
        )
        draw_layers(self.chart, _upper_band(top), upper, doing.many, self.column)
        for number, stream in enumerate(row.streams):
            lower = (
                TrackLayer(EXPOSED_FILL, doing.exposed[stream]),
                TrackLayer(HIDDEN_FILL, doing.hidden[stream]),
            )
            draw_layers(self.chart, _lower_band(top, number), lower, doing.many, self.column)

    def _bars_of_one_rank(self, row: LaneRow, top: float) -> None:
        doing = row.doing
        self._waits(row, _upper_band(top))
        for call, start, end in bars_to_frame(self.chart, self.trace, doing.computes):
            words, tip = self._words(call, start, end)
            self.chart.bar(_upper_band(top), LaneBar(start, end, tip, words))
        for number, stream in enumerate(row.streams):
            transfers = doing.moves
            if row.streams != ("",):
                transfers = self._transfers_of_stream(doing.moves, row.streams, number)
            self._transfers(transfers, _lower_band(top, number), doing.exposed[stream])

    def _transfers_of_stream(self, rows: Ints, streams: Sequence[str], number: int) -> Ints:
        """The rows of one stream. The last stream takes the rows of all streams without a track."""
        queues = [*self.trace.tables["queue"], ""]
        last = len(streams) - 1
        stream_of_queue = np.array([streams.index(q) if q in streams else last for q in queues])
        found: Ints = rows[stream_of_queue[self.trace["queue"][rows]] == number]
        return found

    def _waits(self, row: LaneRow, band: TrackBand) -> None:
        waiting = row.doing.waiting
        for start, end in zip(waiting.starts.tolist(), waiting.ends.tolist(), strict=True):
            if self.chart.x(end) - self.chart.x(start) < MIN_BAR_WIDTH:
                continue
            never_ends = row.stuck and end > self.makespan_ns
            word = "waits forever" if never_ends else "waiting"
            tip = f"{row.lane.title}: {word}, {show_ns(end - start)}"
            bar = LaneBar(start, end, tip, (word,), border="", backdrop=_WAIT_BACKDROP)
            self.chart.bar(band, bar)

    def _transfers(self, rows: Ints, band: TrackBand, exposed: TimeSpans) -> None:
        for row, start, end in bars_to_frame(self.chart, self.trace, rows):
            words, tip = self._words(row, start, end)
            bar = LaneBar(start, end, tip, words, WHITE)
            if not _covers_instant(exposed, (start + end) // 2):
                tip = f"{tip}, overlapped with compute"
                bar = LaneBar(start, end, tip, words, INK, backdrop=_HIDDEN_BACKDROP)
            self.chart.bar(band, bar)

    def _words(self, row: int, start: int, end: int) -> tuple[tuple[str, str], str]:
        """The words for the bar of a call, and its tip."""
        name = call_name(self.trace, row, 40)
        nbytes = int(self.trace["nbytes"][row])
        facts = (name, show_bytes(nbytes) if nbytes else "", show_ns(end - start))
        return (name, pass_letter(name)), ", ".join(fact for fact in facts if fact)


def _upper_band(top: float) -> TrackBand:
    return TrackBand(top + _TRACK_MARGIN, UPPER_HEIGHT - 2 * _TRACK_MARGIN)


def _lower_band(top: float, number: int) -> TrackBand:
    y = top + UPPER_HEIGHT + number * LOWER_HEIGHT
    return TrackBand(y + _TRACK_MARGIN, LOWER_HEIGHT - 2 * _TRACK_MARGIN)


def _covers_instant(spans: TimeSpans, instant: int) -> bool:
    i = int(np.searchsorted(spans.starts, instant, side="right")) - 1
    return i >= 0 and instant < int(spans.ends[i])


def _short_stream_name(stream: str) -> str:
    """A queue's name without the ranks that tell several groups apart."""
    return clipped(stream.partition("[")[0], 13)
