"""The space-time diagram of messages: ranks down, time right, each message a slanted line from its
sender to its receiver.

A rank's line is thick where it computes and hatched where it waits. A receive from any source is a
diamond: the message it took is solid, one that it could have taken instead is dashed. Collectives
are bars from the first to the last of their ranks. Diagrams of this kind: Lamport, "Time, Clocks,
and the Ordering of Events in a Distributed System" (1978).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from distsim.common.errors import UsageError
from distsim.common.units import show_bytes, show_ns
from distsim.operations.one_sided import tag_text
from distsim.operations.registry import COMPUTE_OPS
from distsim.output.pictures.components.lane_painter import COMPUTE_FILL
from distsim.output.pictures.components.view_interface import (
    GalleryExample,
    PictureView,
    draws_trace_or_run,
)
from distsim.output.pictures.drawing.box_diagram import clipped, text_width
from distsim.output.pictures.drawing.palette import GREY, LINE_COLOUR, MESSAGE_COLOUR, RED
from distsim.output.pictures.drawing.svg import WAITING_FILL, TimeChart, number_text, round_ticks
from distsim.output.pictures.drawing.tracks import TrackBand, TrackLayer, draw_track
from distsim.output.trace_data.activity import ActivityReader
from distsim.output.trace_data.lanes import (
    RankLane,
    RankRows,
    group_equal_steps,
    group_ranks_into_lanes,
)
from distsim.output.trace_data.messages import (
    AlternativeMatch,
    Ints,
    alternative_matches,
    matched_messages,
    unmatched_rows,
)
from distsim.output.trace_data.selection import (
    WHOLE_RUN,
    RunSelection,
    selected_ranks,
    selection_text,
    time_window,
)
from distsim.output.trace_data.time_spans import spans_within
from distsim.trace.model import Trace
from distsim.trace.run_end import stopped_ranks

#: Lanes at most; from so many ranks on equal ones are folded. Lines at most: more are bundled.
MAX_LANES, MAX_SINGLE_RANK_LANES, MAX_LINES = 40, 16, 2500
#: Names of messages are written where there are no more than this.
_MAX_LABELLED_LINES = 24
_LEFT, _WIDTH, _TOP, _HALF_TRACK = 156.0, 1080.0, 112.0, 5.0
_ALTERNATIVE_COLOUR, _COLLECTIVE_FILL = "#8A4B00", "#B9C0C8"


class _MessageBundle(NamedTuple):
    """Messages that start and end in the same pixels, between the same lanes."""

    a: int
    b: int
    sent_ns: int
    received_ns: int
    messages: int
    nbytes: int
    send: int


def spacetime_svg(
    trace: Trace, part: RunSelection = WHOLE_RUN, name: str = "", stuck: Iterable[int] | None = None
) -> str:
    """The diagram as SVG text; arguments as of `timeline_svg`. Raises UsageError, where no rank
    sends to another too.
    """
    if stuck is None:
        stuck = [stop.rank for stop in stopped_ranks(trace) if stop.status == "blocked"]
    waits = stuck
    return _SpacetimeDrawing(
        trace, part, name or str(trace.header.get("name") or "run"), set(waits)
    ).svg()


class _SpacetimeDrawing:
    def __init__(self, trace: Trace, part: RunSelection, name: str, stuck: set[int]) -> None:
        self.trace, self.part, self.name, self.stuck = trace, part, name, stuck
        makespan = trace.makespan_ns
        self.end = max(makespan + (makespan // 6 or 1 if stuck else 0), 1)
        self.window, self.note = time_window(part, trace, self.end), ""
        ranks = selected_ranks(part, trace)
        if part == WHOLE_RUN:
            self._one_step(ranks)
        self.found, self.open = matched_messages(trace, self.end), unmatched_rows(trace)
        if not len(self.found) and not len(self.open):
            raise UsageError(
                "no rank sends to another", "ask for --view timeline: it shows collectives to scale"
            )
        self.lanes = self._lanes(ranks)
        self.lane_of = {rank: i for i, lane in enumerate(self.lanes) for rank in lane.ranks}
        self.pitch = 56.0 if len(self.lanes) <= 8 else 40.0 if len(self.lanes) <= 16 else 26.0
        self.chart = TimeChart(_LEFT, _WIDTH, _TOP, self.window[1], self.window[0])
        self.does = [False, False]  # whether some rank computes, and waits
        self.taken: list[
            tuple[float, float, str]
        ] = []  # where words on messages stand, and what they say

    def _one_step(self, ranks: tuple[int, ...]) -> None:
        """Select one of many equal steps."""
        steps = group_equal_steps(self.trace, ranks)
        step = max(steps, key=lambda s: (s.times, -s.first), default=None)
        if step is not None and step.times > 1:
            self.window = (step.start_ns, step.end_ns)
            count = sum(s.times for s in steps)
            last = step.first + step.times - 1
            self.note = (
                f"step {step.first} of {count}; "
                f"steps {step.first} to {last} are equal (× {step.times})"
            )

    def _lanes(self, ranks: tuple[int, ...]) -> tuple[RankLane, ...]:
        """A lane for each rank where there is room, else equal ranks share one."""
        if len(ranks) <= MAX_SINGLE_RANK_LANES:
            return tuple(RankLane((rank,)) for rank in ranks)
        trace, (start, end) = self.trace, self.window
        keep = (np.maximum(trace["finished_ns"], trace["posted_ns"]) >= start) & (
            trace["posted_ns"] < end
        )
        return group_ranks_into_lanes(trace, ranks, sorted(self.stuck), MAX_LANES, keep=keep)

    def _y(self, lane: int) -> float:
        return _TOP + 16 + lane * self.pitch

    # --- the page ---
    def svg(self) -> str:
        chart, (start, end) = self.chart, self.window
        bottom = self._y(len(self.lanes) - 1) + 26
        chart.axis((start + t for t in round_ticks(end - start)), bottom, start)
        chart.text(
            16, bottom + 18, f"time from {show_ns(start)}" if start else "time", 11, colour=GREY
        )
        self._ranks()
        together = self._collectives()
        chosen = self._choices()
        bundled = self._messages()
        lost = self._lost()
        self._marks(chosen)
        self._head(together, bool(chosen), bundled, lost)
        return chart.page(bottom, f"{clipped(self.name, 60)}: messages in space and time")

    def _head(self, together: bool, choice: bool, bundled: str, lost: bool) -> None:
        chart, shown = self.chart, sum(len(lane.ranks) for lane in self.lanes)
        chart.text(16, 26, f"{clipped(self.name, 60)}: messages in space and time", 17, bold=True)
        said = [
            self.note,
            selection_text(self.part, self.trace.world_size),
            f"{shown} ranks in {len(self.lanes)} lanes" if len(self.lanes) < shown else "",
            bundled,
        ]
        left_out = self.trace.world_size - shown
        said += [f"{left_out} ranks are not drawn"] if left_out else []
        chart.text(
            16,
            46,
            "; ".join(t for t in said if t) or "ranks down, time to the right",
            12,
            colour=GREY,
        )
        all_keys = (
            (COMPUTE_FILL, "computes", self.does[0]),
            (WAITING_FILL, "waits", self.does[1]),
            (_COLLECTIVE_FILL, "collective", together),
        )
        keys = [(fill, word) for fill, word, occurs in all_keys if occurs]
        at, y = chart.legend(keys, 62)
        at = self._key(at, y, MESSAGE_COLOUR, "", "message") if len(self.found) else at
        if lost:
            at = self._key(at, y, RED, "4 3", "meets nobody")
        if choice:
            self._diamond(at + 10, y + 6)
            chart.text(at + 22, y + 10, "receive from any source: a choice", 12)
            at += 22 + text_width("receive from any source: a choice", 12) + 16
            self._key(at, y, _ALTERNATIVE_COLOUR, "6 4", "could have been taken")

    def _key(self, at: float, y: float, colour: str, dash: str, words: str) -> float:
        self.chart.line((at, y + 6), (at + 24, y + 6), colour, 1.6, dash=dash, arrow=not dash)
        self.chart.text(at + 30, y + 10, words, 12)
        return at + 30 + text_width(words, 12) + 16

    # --- ranks ---
    def _ranks(self) -> None:
        """A line for each lane, with what its first rank does."""
        doings, rows = ActivityReader(self.trace, self.end), RankRows(self.trace)
        for lane_number, lane in enumerate(self.lanes):
            chart, y = self.chart, self._y(lane_number)
            size = next(
                (s for s in (12, 11, 10) if text_width(lane.title, s, True) <= _LEFT - 24), 9
            )
            chart.text(16, y + (0 if lane.about else 4), lane.title, size, bold=True)
            if lane.about:
                about = lane.about if lane.like == "equal" else f"alike; rank {lane.first} is drawn"
                chart.text(16, y + 11, about, 9, colour=GREY)
            chart.line((_LEFT, y), (_LEFT + _WIDTH, y), LINE_COLOUR, 1.0)
            doing = doings(rows(lane.first))
            for kind, spans in enumerate(((doing.work, doing.backward), (doing.waiting,))):
                self.does[kind] |= any(spans_within(one, *self.window).total > 0 for one in spans)
            layers = [
                TrackLayer(COMPUTE_FILL, doing.work),
                TrackLayer(COMPUTE_FILL, doing.backward),
                TrackLayer(WAITING_FILL, doing.waiting),
            ]
            draw_track(chart, TrackBand(y - _HALF_TRACK, 2 * _HALF_TRACK), layers)

    def _collectives(self) -> bool:
        """A bar over the lanes of each collective's ranks, from its start to its end."""
        trace, (start, end) = self.trace, self.window
        first = {lane.first for lane in self.lanes}
        mine = (
            (trace["match"] >= 0)
            & ~trace.ops(*COMPUTE_OPS)
            & (trace["started_ns"] >= 0)
            & (trace["started_ns"] < end)
        )
        mine &= np.isin(trace["rank"], list(first)) & (trace["finished_ns"] >= start)
        mine[self.found.send] = mine[self.found.recv] = False
        met: dict[int, list[int]] = {}
        for row in np.flatnonzero(mine).tolist():
            met.setdefault(int(trace["match"][row]), []).append(row)
        if len(met) > MAX_LINES:
            return False
        for rows in met.values():
            lanes = [self._y(self.lane_of[int(trace["rank"][row])]) for row in rows]
            begun, over = (
                min(int(trace["started_ns"][r]) for r in rows),
                max(int(trace["finished_ns"][r]) for r in rows),
            )
            x = self.chart.x(begun)
            op = trace.text("op", int(trace["op"][rows[0]]))
            group = trace.text("group", int(trace["group"][rows[0]]))
            tip = f"{op}, group {clipped(group, 40)}"
            for y in lanes:
                self.chart.rect(
                    x,
                    y - _HALF_TRACK - 3,
                    max(self.chart.x(over) - x, 1.5),
                    2 * _HALF_TRACK + 6,
                    _COLLECTIVE_FILL,
                    tip,
                    LINE_COLOUR,
                )
            if max(lanes) > min(lanes):
                self.chart.line(
                    (x, min(lanes) - _HALF_TRACK - 3), (x, max(lanes) + _HALF_TRACK + 3), GREY, 1.0
                )
        return bool(met)

    # --- messages ---
    def _messages(self) -> str:
        """The lines; what to say where several messages share one."""
        lines, step = self._bundles()
        named = len(lines) <= _MAX_LABELLED_LINES
        most = max((line.messages for line in lines), default=1)
        for line in lines:
            self._draw(line, named)
        for x, y, said in self.taken:  # at last, so that no line crosses them
            self.chart.rect(x - 2, y - 9, text_width(said, 9) + 4, 12, "rgba(255,255,255,0.85)")
            self.chart.text(x, y, said, 9, colour=GREY)
        one = (
            "drawn are the messages of each lane's first rank"
            if any(len(lane.ranks) > 1 for lane in self.lanes)
            else ""
        )
        if most == 1:
            return one
        within = f" start and end within {step} pixel{'s' * (step > 1)} and" if step else ""
        return "; ".join(
            t
            for t in (
                one,
                f"messages that{within} go between the same lanes are one line, up to {most}",
            )
            if t
        )

    def _bundles(self) -> tuple[list[_MessageBundle], int]:
        """Messages of the first ranks of the lanes, bundled by as many pixels as leaves few enough
        lines.
        """
        found, (start, end) = self.found, self.window
        lane = np.full(self.trace.world_size, -1, dtype=np.int64)
        first = np.zeros(self.trace.world_size, dtype=bool)
        for rank, lane_number in self.lane_of.items():
            lane[rank] = lane_number
        first[[one.first for one in self.lanes]] = True
        a, b = lane[found.source], lane[found.target]
        mine = (np.minimum(a, b) >= 0) & (found.sent_ns < end) & (found.received_ns > start)
        mine &= first[found.source] | first[found.target]
        rows = np.flatnonzero(mine)
        scale, step = _WIDTH / (end - start), 1
        while True:
            keys = np.stack(
                [
                    a[rows],
                    b[rows],
                    *(((t[rows] - start) * scale / step).astype(np.int64) for t in found[2:4]),
                ]
            )
            order = np.lexsort(keys)
            edges = (
                np.flatnonzero(np.concatenate([[True], (np.diff(keys[:, order]) != 0).any(axis=0)]))
                if len(rows)
                else order
            )
            if len(edges) <= MAX_LINES or step >= 256:
                break
            step *= 2
        return [
            self._line(a, b, some) for some in np.split(rows[order], edges[1:]) if len(some)
        ], step

    def _line(self, a: Ints, b: Ints, rows: Ints) -> _MessageBundle:
        found = self.found
        nbytes = int(self.trace["nbytes"][found.send[rows]].sum())
        left, came = int(found.sent_ns[rows].min()), int(found.received_ns[rows].max())
        return _MessageBundle(
            int(a[rows[0]]),
            int(b[rows[0]]),
            left,
            came,
            len(rows),
            nbytes,
            int(found.send[rows[0]]),
        )

    def _draw(self, line: _MessageBundle, named: bool) -> None:
        chart, x1, x2 = self.chart, self.chart.x(line.sent_ns), self.chart.x(line.received_ns)
        down = line.b > line.a
        y1, y2 = self._y(line.a), self._y(line.b)
        if line.a == line.b:  # to an equal rank: it leaves below and comes in from above
            room = self.pitch / 2 - 2
            chart.line((x1, y1 + _HALF_TRACK), ((x1 + x2) / 2, y1 + room), MESSAGE_COLOUR, 1.2)
            chart.line(
                ((x1 + x2) / 2, y1 - room), (x2, y1 - _HALF_TRACK), MESSAGE_COLOUR, 1.2, arrow=True
            )
            return
        y1, y2 = (
            (y1 + _HALF_TRACK, y2 - _HALF_TRACK) if down else (y1 - _HALF_TRACK, y2 + _HALF_TRACK)
        )
        chart.line(
            (x1, y1),
            (x2, y2),
            MESSAGE_COLOUR,
            min(1.2 + 0.5 * (line.messages > 1) + 0.2 * (line.messages - 1) ** 0.5, 4.0),
            arrow=True,
        )
        said = (
            f"× {line.messages}, {show_bytes(line.nbytes)}"
            if line.messages > 1
            else show_bytes(line.nbytes)
            if line.nbytes
            else ""
        )
        chart.path(
            f"M{number_text(x1)} {number_text(y1)}L{number_text(x2)} {number_text(y2)}",
            "",
            self._tip(line, said),
            "rgba(255,255,255,0.01)",
            6,
        )
        if named and said:
            self._named(said, (x1, y1), (x2, y2))

    def _named(self, said: str, a: tuple[float, float], b: tuple[float, float]) -> None:
        """Write on the line near its sender, if the line is long enough and the place is free."""
        if b[0] - a[0] <= 70:
            return
        width = text_width(said, 9)
        lanes = [self._y(lane) for lane in range(len(self.lanes))]
        # The distance that keeps a text away from the bars and arrow heads of a lane.
        clearance = min(14.0, self.pitch / 2 - 4)
        for share in (0.3, 0.45, 0.6, 0.2):
            x = a[0] + (b[0] - a[0]) * share
            y = a[1] + (b[1] - a[1]) * share - 5
            if x + width >= _LEFT + _WIDTH or self._overlaps_text(x, y, width):
                continue
            if all(abs(y - 4 - lane) >= clearance for lane in lanes):
                self.taken.append((x, y, said))
                return

    def _overlaps_text(self, x: float, y: float, width: float) -> bool:
        for other_x, other_y, text in self.taken:
            same_height = abs(y - other_y) < 13
            other_end = other_x + text_width(text, 9) + 4
            if same_height and x < other_end and other_x < x + width + 4:
                return True
        return False

    def _tip(self, line: _MessageBundle, said: str) -> str:
        trace, send = self.trace, line.send
        tag = int(trace["tag"][send])
        words = [
            f"rank {int(trace['rank'][send])} to rank {int(trace['peer'][send])}",
            said,
            tag_text(tag),
        ]
        return ", ".join(w for w in [*words, f"{show_ns(line.received_ns - line.sent_ns)}"] if w)

    def _choices(self) -> list[AlternativeMatch]:
        """Dashed lines: other messages that a receive from any source could have taken."""
        trace, (start, end) = self.trace, self.window
        came = dict(zip(self.found.recv.tolist(), self.found.received_ns.tolist(), strict=True))
        drawn: list[AlternativeMatch] = []
        for choice in alternative_matches(trace, self.found):
            a, b = (
                self.lane_of.get(int(trace["rank"][row]), -1) for row in (choice.send, choice.recv)
            )
            left = int(trace["posted_ns"][choice.send])
            between_two_shown = min(a, b) >= 0 and a != b
            in_window = came[choice.recv] > start and left < end
            if not between_two_shown or not in_window or len(drawn) >= MAX_LINES:
                continue
            drawn.append(choice)
            y1, y2 = (
                self._y(a) + _HALF_TRACK * (1 if b > a else -1),
                self._y(b) + _HALF_TRACK * (-1 if b > a else 1),
            )
            self.chart.line(
                (self.chart.x(left), y1),
                (self.chart.x(came[choice.recv]), y2),
                _ALTERNATIVE_COLOUR,
                1.3,
                dash="6 4",
            )
        return drawn

    def _marks(self, chosen: list[AlternativeMatch]) -> None:
        """A diamond at each receive that had a choice."""
        came = dict(zip(self.found.recv.tolist(), self.found.received_ns.tolist(), strict=True))
        for recv in dict.fromkeys(choice.recv for choice in chosen):
            if self.window[0] <= came[recv] <= self.window[1]:
                self._diamond(
                    self.chart.x(came[recv]), self._y(self.lane_of[int(self.trace["rank"][recv])])
                )

    def _diamond(self, x: float, y: float) -> None:
        self.chart.path(
            f"M{number_text(x - 7)} {number_text(y)}l7 -7 7 7 -7 7z",
            "#FFFFFF",
            "a receive from any source",
            _ALTERNATIVE_COLOUR,
            2.0,
        )

    def _lost(self) -> bool:
        """Unmatched sends and receives: a red line half of the way to the peer."""
        drawn, trace = False, self.trace
        for row in self.open.tolist():
            a, b = (
                self.lane_of.get(int(trace["rank"][row]), -1),
                self.lane_of.get(int(trace["peer"][row]), -1),
            )
            posted = int(trace["posted_ns"][row])
            if (
                a < 0
                or self.lanes[a].first != trace["rank"][row]
                or not self.window[0] <= posted < self.window[1]
            ):
                continue
            leads_up = b >= 0 and b < a
            way = -1 if leads_up else 1
            x, y, drawn = self.chart.x(posted), self._y(a), True
            end = (min(x + 14, _LEFT + _WIDTH), y + way * min(self.pitch / 2 - 3, 24))
            self.chart.line((x, y + way * _HALF_TRACK), end, RED, 1.6, dash="4 3")
            op = trace.text("op", int(trace["op"][row]))
            self.chart.path(
                f"M{number_text(end[0] - 3)} {number_text(end[1] - 3)}l6 6m0 -6l-6 6",
                "",
                f"{op} that meets nobody",
                RED,
                1.8,
            )
        return drawn


VIEW = PictureView(
    draws_trace_or_run(spacetime_svg),
    formats=("svg", "png", "pdf"),
    accepts_trace=True,
    examples=(
        GalleryExample(
            "pipeline_1f1b",
            "Messages in space and time: activations go down, their gradients come back up.",
        ),
        GalleryExample(
            "findings/ds401_wrong_sender",
            "Receives from any source: which message each takes is a choice, "
            "and one of them is wrong.",
        ),
        GalleryExample(
            "head_to_head_receives", "Two receives that wait for each other: nobody sends."
        ),
    ),
)
