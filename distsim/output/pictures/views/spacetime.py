"""The space-time diagram of messages: a line per rank, time to the right, and each message as a
slanted line from its sender to its receiver.

A rank's line is thick while it computes and hatched while it waits. A diamond marks a receive from
any source that had several candidates: the message that it took is a solid line, the other
candidates are dashed. A collective is a bar on the line of each of its ranks. Lamport introduced
diagrams of this kind in "Time, Clocks, and the Ordering of Events in a Distributed System" (1978).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.common.errors import UsageError
from distsim.common.units import show_bytes, show_ns
from distsim.operations.one_sided import tag_text
from distsim.operations.registry import COMPUTE_OPS
from distsim.output.pictures.components.lane_chart import (
    COMPUTE_FILL,
    ChartArea,
    LaneChart,
    LaneNameStyle,
    lane_count_text,
    note_on_drawn_rank,
)
from distsim.output.pictures.components.view_interface import (
    GalleryExample,
    PictureView,
    draws_trace_or_run,
)
from distsim.output.pictures.drawing.box_diagram import clipped, text_width
from distsim.output.pictures.drawing.palette import GREY, LINE_COLOUR, MESSAGE_COLOUR, RED
from distsim.output.pictures.drawing.svg import WAITING_FILL, Point, number_text
from distsim.output.pictures.drawing.tracks import TrackBand, TrackLayer, draw_layers
from distsim.output.trace_data.activity import ActivityReader
from distsim.output.trace_data.lanes import (
    RankLane,
    RankRows,
    group_equal_steps,
    group_ranks_into_lanes,
    most_repeated_step,
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

#: The largest number of lanes. Up to MAX_SINGLE_RANK_LANES ranks, equal ranks are not folded.
#: If there are more than MAX_LINES messages, lines are bundled.
MAX_LANES, MAX_SINGLE_RANK_LANES, MAX_LINES = 40, 16, 2500
#: Up to this many lines have their sizes written on them.
_MAX_LABELLED_LINES = 24
_LEFT, _WIDTH, _TOP, _HALF_TRACK = 156.0, 1080.0, 112.0, 5.0
_NAME_STYLE = LaneNameStyle(
    (12, 11, 10, 9), _LEFT - 24, _HALF_TRACK, _HALF_TRACK + 11, 9, _HALF_TRACK + 4
)
#: A collective's bar is taller than the track by this, above and below.
_COLLECTIVE_MARGIN = 3.0
#: The widest bundle of messages, in pixels.
_MAX_BUNDLE_WIDTH = 256
#: A line must be at least this wide, in pixels, to have its size written on it.
_MIN_LABELLED_WIDTH = 70
_ALTERNATIVE_COLOUR, _COLLECTIVE_FILL = "#8A4B00", "#B9C0C8"
#: Invisible, but found by the pointer: gives a thin line a tip that is easy to hit.
_TIP_COLOUR, _TIP_WIDTH = "rgba(255,255,255,0.01)", 6


class _MessageBundle(NamedTuple):
    """Messages between the same two lanes that start and end in the same pixels.

    ``first_send``: the row of the first one's send.
    """

    sender_lane: int
    receiver_lane: int
    sent_ns: int
    received_ns: int
    messages: int
    nbytes: int
    first_send: int


class _PlacedLabel(NamedTuple):
    """A text on a message: the left end of its baseline."""

    x: float
    y: float
    text: str


def spacetime_svg(
    trace: Trace, part: RunSelection = WHOLE_RUN, name: str = "", stuck: Iterable[int] | None = None
) -> str:
    """Draw the messages of a run as SVG text; arguments as for `timeline_svg`.

    Raises UsageError, also if no rank sends to another one.
    """
    if stuck is None:
        stuck = [stop.rank for stop in stopped_ranks(trace) if stop.status == "blocked"]
    title = name or str(trace.header.get("name") or "run")
    return _SpacetimeDrawing(trace, part, title, set(stuck)).svg()


class _SpacetimeDrawing:
    """One picture. Each step of `svg` draws one kind of marks, from the back to the front."""

    def __init__(self, trace: Trace, part: RunSelection, name: str, stuck: set[int]) -> None:
        self.trace = trace
        self.part = part
        self.name = clipped(name, 60)
        self.stuck = stuck
        makespan = trace.makespan_ns
        room_for_endless_waits = (makespan // 6 or 1) if stuck else 0
        self.end = max(makespan + room_for_endless_waits, 1)
        self.window, self.step_note = time_window(part, trace, self.end), ""
        ranks = selected_ranks(part, trace)
        if part == WHOLE_RUN:
            self._select_one_step(ranks)
        self.messages = matched_messages(trace, self.end)
        self.unmatched = unmatched_rows(trace)
        if not len(self.messages) and not len(self.unmatched):
            raise UsageError(
                "no rank sends a message to another", "use --view timeline, which draws collectives"
            )
        self.lanes = self._lanes(ranks)
        self.pitch = _lane_pitch(len(self.lanes))
        track = 2 * _HALF_TRACK
        self.chart = LaneChart(
            ChartArea(_LEFT, _WIDTH, _TOP),
            self.window,
            self.lanes,
            [track] * len(self.lanes),
            self.pitch - track,
            lead=16 - _HALF_TRACK,
        )
        self.some_rank_computes = False
        self.some_rank_waits = False
        self.labels: list[_PlacedLabel] = []

    def _select_one_step(self, ranks: tuple[int, ...]) -> None:
        """Of a run with equal steps, draw the first of them."""
        steps = group_equal_steps(self.trace, ranks)
        step = most_repeated_step(steps)
        if step is None or step.times == 1:
            return
        self.window = (step.start_ns, step.end_ns)
        count = sum(s.times for s in steps)
        last = step.first + step.times - 1
        self.step_note = (
            f"step {step.first} of {count}; "
            f"steps {step.first} to {last} are identical (× {step.times})"
        )

    def _lanes(self, ranks: tuple[int, ...]) -> tuple[RankLane, ...]:
        """A lane for each rank if there are few; else equal ranks share one."""
        if len(ranks) <= MAX_SINGLE_RANK_LANES:
            return tuple(RankLane((rank,)) for rank in ranks)
        trace, (start, end) = self.trace, self.window
        last = np.maximum(trace["finished_ns"], trace["posted_ns"])
        in_window = (last >= start) & (trace["posted_ns"] < end)
        stuck = sorted(self.stuck)
        return group_ranks_into_lanes(trace, ranks, stuck, MAX_LANES, keep=in_window)

    def _centre(self, lane: int) -> float:
        return self.chart.tops[lane] + _HALF_TRACK

    def _lane_of_row(self, row: int, column: str = "rank") -> int | None:
        """The lane of a row's rank (or of its peer); None if it has no lane."""
        return self.chart.lane_of.get(int(self.trace[column][row]))

    # --- the page ---
    def svg(self) -> str:
        bottom = self._centre(len(self.lanes) - 1) + 26
        self.chart.time_axis(bottom, *self.window)
        self._ranks()
        has_collectives = self._collectives()
        choices = self._alternatives()
        bundle_note = self._messages()
        has_unmatched = self._unmatched_calls()
        self._mark_choices(choices)
        self._head(bundle_note)
        self._legend(has_collectives, bool(choices), has_unmatched)
        return self.chart.page(bottom, f"{self.name}: messages over time")

    def _head(self, bundle_note: str) -> None:
        not_drawn = self.trace.world_size - sum(len(lane.ranks) for lane in self.lanes)
        facts = [
            self.step_note,
            selection_text(self.part, self.trace.world_size),
            lane_count_text(self.lanes),
            bundle_note,
            f"{not_drawn} ranks are not drawn" if not_drawn else "",
        ]
        if not any(facts):
            facts = ["one line per rank, time to the right"]
        self.chart.heading(f"{self.name}: messages over time", facts)

    def _legend(self, has_collectives: bool, has_choices: bool, has_unmatched: bool) -> None:
        chart = self.chart
        all_keys = (
            (COMPUTE_FILL, "compute", self.some_rank_computes),
            (WAITING_FILL, "waiting", self.some_rank_waits),
            (_COLLECTIVE_FILL, "collective", has_collectives),
        )
        x, y = chart.legend([(fill, words) for fill, words, occurs in all_keys if occurs], 62)
        if len(self.messages):
            x = chart.line_key((x, y), MESSAGE_COLOUR, "message", arrow=True, length=24)
        if has_unmatched:
            x = chart.line_key((x, y), RED, "unmatched send or receive", dash="4 3", length=24)
        if has_choices:
            words = "receive from any source with several candidates"
            self._diamond(x + 10, y + 6)
            chart.text(x + 22, y + 10, words, 12)
            x += 22 + text_width(words, 12) + 16
            words = "another candidate"
            chart.line_key((x, y), _ALTERNATIVE_COLOUR, words, dash="6 4", length=24)

    # --- ranks ---
    def _ranks(self) -> None:
        """A line for each lane, with the activity of its first rank."""
        chart = self.chart
        activity_of, rows_of = ActivityReader(self.trace, self.end), RankRows(self.trace)
        for number, lane in enumerate(self.lanes):
            y = self._centre(number)
            chart.lane_name(number, _NAME_STYLE, note_on_drawn_rank(lane))
            chart.line((_LEFT, y), (_LEFT + _WIDTH, y), LINE_COLOUR, 1.0)
            activity = activity_of(rows_of(lane.first))
            layers = [
                TrackLayer(COMPUTE_FILL, activity.work),
                TrackLayer(COMPUTE_FILL, activity.backward),
                TrackLayer(COMPUTE_FILL, activity.host),
                TrackLayer(WAITING_FILL, activity.waiting),
            ]
            visible = [spans_within(layer.spans, *self.window).total > 0 for layer in layers]
            self.some_rank_computes |= any(visible[:3])
            self.some_rank_waits |= visible[3]
            draw_layers(chart, TrackBand(chart.tops[number], 2 * _HALF_TRACK), layers)

    def _collectives(self) -> bool:
        """A bar on the lane of each rank of a collective, and a line that connects the bars.

        Returns whether there are any. Draws none if there are too many to tell apart.
        """
        rows_of_match: dict[int, list[int]] = {}
        for row in np.flatnonzero(self._collective_rows()).tolist():
            rows_of_match.setdefault(int(self.trace["match"][row]), []).append(row)
        if len(rows_of_match) > MAX_LINES:
            return False
        for rows in rows_of_match.values():
            self._collective(rows)
        return bool(rows_of_match)

    def _collective_rows(self) -> NDArray[np.bool_]:
        """A mask of the collective calls of drawn ranks in the window."""
        trace, (start, end) = self.trace, self.window
        has_started = (trace["started_ns"] >= 0) & (trace["started_ns"] < end)
        of_drawn_rank = np.isin(trace["rank"], [lane.first for lane in self.lanes])
        in_window = has_started & (trace["finished_ns"] >= start)
        communicates = (trace["match"] >= 0) & ~trace.ops(*COMPUTE_OPS)
        chosen: NDArray[np.bool_] = communicates & in_window & of_drawn_rank
        chosen[self.messages.send] = chosen[self.messages.recv] = False
        return chosen

    def _collective(self, rows: list[int]) -> None:
        trace, chart = self.trace, self.chart
        centres = [self._centre(chart.lane_of[int(trace["rank"][row])]) for row in rows]
        x = chart.x(min(int(trace["started_ns"][row]) for row in rows))
        right = chart.x(max(int(trace["finished_ns"][row]) for row in rows))
        op = trace.text("op", int(trace["op"][rows[0]]))
        group = trace.text("group", int(trace["group"][rows[0]]))
        tip = f"{op}, group {clipped(group, 40)}"
        half_height = _HALF_TRACK + _COLLECTIVE_MARGIN
        width = max(right - x, 1.5)
        for y in centres:
            chart.rect(
                x, y - half_height, width, 2 * half_height, _COLLECTIVE_FILL, tip, LINE_COLOUR
            )
        top, bottom = min(centres), max(centres)
        if bottom > top:
            chart.line((x, top - half_height), (x, bottom + half_height), GREY, 1.0)

    # --- messages ---
    def _messages(self) -> str:
        """Draw the lines of matched messages; returns a note on lines with several messages."""
        bundles, pixels = self._bundles()
        labelled = len(bundles) <= _MAX_LABELLED_LINES
        for bundle in bundles:
            self._bundle(bundle, labelled)
        # After all lines, so that no line crosses a label.
        for x, y, text in self.labels:
            width = text_width(text, 9) + 4
            self.chart.rect(x - 2, y - 9, width, 12, "rgba(255,255,255,0.85)")
            self.chart.text(x, y, text, 9, colour=GREY)
        notes = []
        if any(len(lane.ranks) > 1 for lane in self.lanes):
            notes.append("only messages of each lane's first rank are drawn")
        largest = max((bundle.messages for bundle in bundles), default=1)
        if largest > 1:
            notes.append(
                f"messages between the same lanes that start and end within "
                f"{pixels} pixel{'s' * (pixels > 1)} share a line (up to {largest})"
            )
        return "; ".join(notes)

    def _bundles(self) -> tuple[list[_MessageBundle], int]:
        """The messages of the drawn ranks as lines, and how many pixels wide a bundle is.

        The width is doubled until there are at most MAX_LINES bundles.
        """
        messages, (start, end) = self.messages, self.window
        lane_of = np.full(self.trace.world_size, -1, dtype=np.int64)
        is_drawn = np.zeros(self.trace.world_size, dtype=bool)
        for rank, lane in self.chart.lane_of.items():
            lane_of[rank] = lane
        is_drawn[[lane.first for lane in self.lanes]] = True
        senders, receivers = lane_of[messages.source], lane_of[messages.target]
        in_window = (messages.sent_ns < end) & (messages.received_ns > start)
        chosen = (np.minimum(senders, receivers) >= 0) & in_window
        chosen &= is_drawn[messages.source] | is_drawn[messages.target]
        rows = np.flatnonzero(chosen)
        pixels_per_ns, pixels = _WIDTH / (end - start), 1
        while True:
            sent = ((messages.sent_ns[rows] - start) * pixels_per_ns / pixels).astype(np.int64)
            received = (messages.received_ns[rows] - start) * pixels_per_ns / pixels
            keys = np.stack([senders[rows], receivers[rows], sent, received.astype(np.int64)])
            order = np.lexsort(keys)
            starts = _starts_of_equal_columns(keys[:, order])
            if len(starts) <= MAX_LINES or pixels >= _MAX_BUNDLE_WIDTH:
                break
            pixels *= 2
        pieces = [piece for piece in np.split(rows[order], starts[1:]) if len(piece)]
        return [self._bundle_of(senders, receivers, piece) for piece in pieces], pixels

    def _bundle_of(self, senders: Ints, receivers: Ints, rows: Ints) -> _MessageBundle:
        messages = self.messages
        return _MessageBundle(
            sender_lane=int(senders[rows[0]]),
            receiver_lane=int(receivers[rows[0]]),
            sent_ns=int(messages.sent_ns[rows].min()),
            received_ns=int(messages.received_ns[rows].max()),
            messages=len(rows),
            nbytes=int(self.trace["nbytes"][messages.send[rows]].sum()),
            first_send=int(messages.send[rows[0]]),
        )

    def _bundle(self, bundle: _MessageBundle, labelled: bool) -> None:
        chart = self.chart
        if bundle.sender_lane == bundle.receiver_lane:
            self._line_within_lane(bundle)
            return
        tail, head = chart.between_lanes(
            bundle.sender_lane, bundle.sent_ns, bundle.receiver_lane, bundle.received_ns
        )
        others = bundle.messages - 1
        width = 1.2 + 0.5 * (others > 0) + 0.2 * others**0.5
        chart.line(tail, head, MESSAGE_COLOUR, min(width, 4.0), arrow=True)
        size = show_bytes(bundle.nbytes) if bundle.nbytes else ""
        if bundle.messages > 1:
            size = f"× {bundle.messages}, {show_bytes(bundle.nbytes)}"
        steps = f"M{_point_text(tail)}L{_point_text(head)}"
        chart.path(steps, "", self._tip(bundle, size), _TIP_COLOUR, _TIP_WIDTH)
        if labelled and size:
            self._place_label(size, tail, head)

    def _line_within_lane(self, bundle: _MessageBundle) -> None:
        """A message to an equal rank: it leaves the lane below and comes back from above."""
        chart, y = self.chart, self._centre(bundle.sender_lane)
        x, right = chart.x(bundle.sent_ns), chart.x(bundle.received_ns)
        middle, room = (x + right) / 2, self.pitch / 2 - 2
        chart.line((x, y + _HALF_TRACK), (middle, y + room), MESSAGE_COLOUR, 1.2)
        chart.line((middle, y - room), (right, y - _HALF_TRACK), MESSAGE_COLOUR, 1.2, arrow=True)

    def _place_label(self, text: str, tail: Point, head: Point) -> None:
        """Choose a place on the line near its sender, if the line is long enough and has one."""
        across, down = head[0] - tail[0], head[1] - tail[1]
        if across <= _MIN_LABELLED_WIDTH:
            return
        width = text_width(text, 9)
        centres = [self._centre(lane) for lane in range(len(self.lanes))]
        # The distance that keeps a text away from the bars and arrow heads of a lane.
        clearance = min(14.0, self.pitch / 2 - 4)
        for share in (0.3, 0.45, 0.6, 0.2):
            x = tail[0] + across * share
            y = tail[1] + down * share - 5
            if x + width >= _LEFT + _WIDTH or self._overlaps_label(x, y, width):
                continue
            if all(abs(y - 4 - centre) >= clearance for centre in centres):
                self.labels.append(_PlacedLabel(x, y, text))
                return

    def _overlaps_label(self, x: float, y: float, width: float) -> bool:
        for other in self.labels:
            same_height = abs(y - other.y) < 13
            other_end = other.x + text_width(other.text, 9) + 4
            if same_height and x < other_end and other.x < x + width + 4:
                return True
        return False

    def _tip(self, bundle: _MessageBundle, size: str) -> str:
        trace, send = self.trace, bundle.first_send
        words = (
            f"rank {int(trace['rank'][send])} to rank {int(trace['peer'][send])}",
            size,
            tag_text(int(trace["tag"][send])),
            show_ns(bundle.received_ns - bundle.sent_ns),
        )
        return ", ".join(word for word in words if word)

    def _alternatives(self) -> list[AlternativeMatch]:
        """Dashed lines: other messages that a receive from any source could have taken."""
        chart, (start, end) = self.chart, self.window
        received_ns = self._receive_times()
        drawn: list[AlternativeMatch] = []
        for choice in alternative_matches(self.trace, self.messages):
            sender, receiver = self._lane_of_row(choice.send), self._lane_of_row(choice.recv)
            if sender is None or receiver is None or sender == receiver:
                continue
            posted, received = int(self.trace["posted_ns"][choice.send]), received_ns[choice.recv]
            in_window = received > start and posted < end
            if not in_window or len(drawn) >= MAX_LINES:
                continue
            drawn.append(choice)
            ends = chart.between_lanes(sender, posted, receiver, received)
            chart.line(*ends, _ALTERNATIVE_COLOUR, 1.3, dash="6 4")
        return drawn

    def _receive_times(self) -> dict[int, int]:
        """When each receive (a row of the trace) had its message."""
        messages = self.messages
        return dict(zip(messages.recv.tolist(), messages.received_ns.tolist(), strict=True))

    def _mark_choices(self, choices: list[AlternativeMatch]) -> None:
        """A diamond at each receive that could have taken another message."""
        received_ns, (start, end) = self._receive_times(), self.window
        for receive in dict.fromkeys(choice.recv for choice in choices):
            lane, received = self._lane_of_row(receive), received_ns[receive]
            if lane is not None and start <= received <= end:
                self._diamond(self.chart.x(received), self._centre(lane))

    def _diamond(self, x: float, y: float) -> None:
        steps = f"M{_point_text((x - 7, y))}l7 -7 7 7 -7 7z"
        self.chart.path(steps, "#FFFFFF", "receive from any source", _ALTERNATIVE_COLOUR, 2.0)

    def _unmatched_calls(self) -> bool:
        """Unmatched sends and receives: a red line towards the peer, with a cross at its end.

        Returns whether there are any.
        """
        trace, (start, end) = self.trace, self.window
        some_drawn = False
        for row in self.unmatched.tolist():
            lane = self._lane_of_row(row)
            posted = int(trace["posted_ns"][row])
            if lane is None or self.lanes[lane].first != trace["rank"][row]:
                continue
            if start <= posted < end:
                self._unmatched_call(row, lane, posted)
                some_drawn = True
        return some_drawn

    def _unmatched_call(self, row: int, lane: int, posted_ns: int) -> None:
        chart, peer_lane = self.chart, self._lane_of_row(row, "peer")
        leads_up = peer_lane is not None and peer_lane < lane
        direction = -1 if leads_up else 1
        x, y = chart.x(posted_ns), self._centre(lane)
        length = min(self.pitch / 2 - 3, 24)
        end_x, end_y = min(x + 14, _LEFT + _WIDTH), y + direction * length
        chart.line((x, y + direction * _HALF_TRACK), (end_x, end_y), RED, 1.6, dash="4 3")
        op = self.trace.text("op", int(self.trace["op"][row]))
        cross = f"M{_point_text((end_x - 3, end_y - 3))}l6 6m0 -6l-6 6"
        chart.path(cross, "", f"unmatched {op}", RED, 1.8)


def _lane_pitch(count: int) -> float:
    """The distance between neighbouring lanes, in pixels: less if there are many lanes."""
    if count <= 8:
        return 56.0
    return 40.0 if count <= 16 else 26.0


def _starts_of_equal_columns(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where runs of equal neighbouring columns start."""
    if not keys.shape[1]:
        return np.empty(0, dtype=np.int64)
    differs = (np.diff(keys) != 0).any(axis=0)
    return np.flatnonzero(np.concatenate([[True], differs]))


def _point_text(point: Point) -> str:
    x, y = point
    return f"{number_text(x)} {number_text(y)}"


VIEW = PictureView(
    draws_trace_or_run(spacetime_svg),
    formats=("svg", "png", "pdf"),
    accepts_trace=True,
    examples=(
        GalleryExample(
            "pipeline_1f1b",
            "Messages over time: activations go down, their gradients come back up.",
        ),
        GalleryExample(
            "findings/ds401_wrong_sender",
            "Receives from any source: each can take one of several messages, "
            "and one order gives a wrong result.",
        ),
        GalleryExample(
            "head_to_head_receives", "Two receives that wait for each other: neither rank sends."
        ),
    ),
)
