"""The timeline: a row per rank, time to the right, drawn to scale.

Each rank has two tracks or more. The upper one is what the rank itself does: compute, or waiting in a call that has not met its
parties. Below is its communication under way: exposed where nothing is computed meanwhile, hidden where it is. Where streams (or
whatever runs it) overlap, each has a track of its own. A thick line under the tracks is the critical path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distsim.program.records import Program
from distsim.timeline import COMPUTE_OPS, Segment, Timeline, timeline
from distsim.trace import Trace
from distsim.units import show_bytes, show_ns
from distsim.views.drawing.palette import GREY, INK, LINE, MESSAGE, PALE, WHITE
from distsim.views.drawing.records import clipped, text_width
from distsim.views.drawing.svg import TimeChart
from distsim.views.drawing.view import Example, Subject, View, given

if TYPE_CHECKING:
    from distsim.engine.record import Run

#: What is drawn at most. Bars thinner than a third of a pixel are drawn as one.
MOST_RANKS, MOST_ARROWS = 48, 400
_LEFT, _WIDTH, _TOP = 92.0, 1080.0, 96.0
_UPPER, _LOWER, _GAP = 20.0, 15.0, 16.0
#: Tracks of streams that a rank has at most; the last one holds what is left.
_MOST_TRACKS = 4
_COMPUTE, _BACKWARD, _EXPOSED, _HIDDEN, _WAITING, _PATH = "#9CCBEB", "#6FA9DB", "#F2A583", "#8ED3B7", "url(#waiting)", INK
_LOCAL = (*COMPUTE_OPS, "sleep", "wait", "wait_stream", "synchronize", "exit", "fail")

_TIMES = ("posted_ns", "returned_ns", "started_ns", "finished_ns")

Span = tuple[int, int]


class _Bar(NamedTuple):
    start: int
    end: int
    label: str
    tip: str
    queue: str = ""


class _Tracks(NamedTuple):
    """What is drawn for one rank; ``streams`` are the queues that have a track of their own, none where one track does."""

    compute: list[_Bar]
    moving: list[_Bar]
    waiting: list[Span]
    streams: list[str]

    @property
    def height(self) -> float:
        return _UPPER + max(len(self.streams), 1) * _LOWER

    def track(self, queue: str) -> int:
        return self.streams.index(queue) if queue in self.streams else max(len(self.streams) - 1, 0)


def timeline_svg(program: Program, run: Run, measured: Timeline | None = None) -> str:
    """The timeline of a run as SVG text. ``measured``: its `timeline`, worked out here when left out."""
    found = timeline(run.trace, run.makespan_ns) if measured is None else measured
    return _Drawing(program, run, found).svg()


class _Drawing:
    def __init__(self, program: Program, run: Run, measured: Timeline) -> None:
        self.program, self.run, self.measured = program, run, measured
        self.trace: Trace = run.trace
        self.ranks = range(min(program.world_size, MOST_RANKS))
        self.stuck = set(run.standstill.stuck)
        grown = measured.makespan_ns // 6 if self.stuck else 0  # room to show that it never ends
        self.end = max(measured.makespan_ns + grown, 1)
        self.rows = [self._row(rank) for rank in self.ranks]
        self.tops = list(accumulate((row.height + _GAP for row in self.rows), initial=_TOP))
        self.draw = TimeChart(_LEFT, _WIDTH, _TOP, self.end)

    def y(self, rank: int) -> float:
        return self.tops[rank]

    def foot(self, rank: int) -> float:
        return self.y(rank) + self.rows[rank].height

    def svg(self) -> str:
        bottom = self.tops[-1]
        self._head()
        self.draw.axis(_ticks(self.measured.makespan_ns), bottom)
        self.draw.text(16, bottom + 18, "time", 11, colour=GREY)
        for rank in self.ranks:
            self._rank(rank)
        self._messages()
        self._critical_path()
        title = f"{clipped(self.program.name, 60)}: timeline"
        return self.draw.page(bottom, title)

    # --- around the tracks ---
    def _head(self) -> None:
        self.draw.text(16, 26, f"{clipped(self.program.name, 60)}: where the time goes", 17, bold=True)
        more = self.program.world_size - len(self.ranks)
        said = f"{self.run.outcome}, {show_ns(self.measured.makespan_ns)}; {self.program.backend}"
        self.draw.text(16, 46, said + (f"; and {more} more ranks, not drawn" if more else ""), 12, colour=GREY)
        shaded = any(_fill(bar) == _BACKWARD for row in self.rows for bar in row.compute)
        at = self.draw.legend(_LEGEND[:1] + ((_BACKWARD, "backward"),) * shaded + _LEGEND[1:])
        self.draw.line((at, 65), (at + 22, 65), _PATH, 4)
        self.draw.text(at + 28, 68, "critical path", 12)

    # --- a rank ---
    def _row(self, rank: int) -> _Tracks:
        rows = np.flatnonzero((self.trace["rank"] == rank) & (self.trace["posted_ns"] >= 0)).tolist()
        compute, moving, waiting = self._bars(rows)
        streams = list(dict.fromkeys(bar.queue for bar in moving)) if _overlap(moving) else []
        return _Tracks(compute, moving, waiting, streams[:_MOST_TRACKS])

    def _rank(self, rank: int) -> None:
        row, y = self.rows[rank], self.y(rank)
        self.draw.text(16, y + _UPPER / 2 + (9 if not row.streams else 4), f"rank {rank}", 13, bold=True)
        self.draw.rect(_LEFT, y, _WIDTH, _UPPER, PALE)
        for track in range(max(len(row.streams), 1)):
            self.draw.rect(_LEFT, y + _UPPER + track * _LOWER, _WIDTH, _LOWER, WHITE, border="#DDE1E6")
        for track, stream in enumerate(row.streams):
            self.draw.text(_LEFT - 6, y + _UPPER + track * _LOWER + 11, _short(stream), 9, anchor="end", colour=GREY)
        busy = _union((b.start, b.end) for b in row.compute)
        under_way = _union((b.start, b.end) for b in row.moving)
        for start, end in _without(_without(_union(row.waiting), busy), under_way):
            word = "waits for ever" if end == self.end and rank in self.stuck else "waiting"
            self._bar(_Bar(start, end, word, f"rank {rank}: {word}, {show_ns(end - start)}"), y, _UPPER, _WAITING)
        self._row_of_bars(row.compute, y, _UPPER)
        for bar in row.moving:
            at = y + _UPPER + row.track(bar.queue) * _LOWER
            for start, end in _without([(bar.start, bar.end)], busy):
                self._bar(_Bar(start, end, bar.label, bar.tip), at, _LOWER, _EXPOSED)
            for start, end in _both([(bar.start, bar.end)], busy):
                self._bar(_Bar(start, end, bar.label, f"{bar.tip}, hidden by compute"), at, _LOWER, _HIDDEN)

    def _bars(self, rows: Sequence[int]) -> tuple[list[_Bar], list[_Bar], list[Span]]:
        """Compute, communication under way, and when the rank is in a call that may wait."""
        compute, moving, waiting = [], [], []
        ahead = self.trace.header.get("backend") == "nccl"
        for row in rows:
            op = self.trace.text("op", int(self.trace["op"][row]))
            posted, returned, started, finished = (int(self.trace[name][row]) for name in _TIMES)
            till = finished if finished >= 0 else self.end
            if op in COMPUTE_OPS:
                if started >= 0:
                    compute.append(self._named(row, op, started, till))
                continue
            if op == "sleep":
                continue
            if started >= 0 and finished >= 0 and op not in _LOCAL and self.trace["match"][row] >= 0:
                moving.append(self._named(row, op, started, finished))
            waiting.append((posted, returned if returned >= 0 else self.end))
            if ahead and op not in ("wait", "wait_stream", "synchronize"):
                waiting.append((posted, started if started >= 0 and finished >= 0 else self.end))
        return compute, moving, waiting

    def _named(self, row: int, op: str, start: int, end: int) -> _Bar:
        name = self.trace.text("name", int(self.trace["name"][row])) if "name" in self.trace.columns else ""
        nbytes = int(self.trace["nbytes"][row])
        label = clipped(name or op, 40)
        about = (label, show_bytes(nbytes) if nbytes else "", show_ns(end - start))
        queue = self.trace.text("queue", int(self.trace["queue"][row]))
        return _Bar(start, end, label, ", ".join(t for t in about if t), queue)

    def _row_of_bars(self, bars: Sequence[_Bar], y: float, height: float) -> None:
        drawn = -1.0
        for bar in bars:
            if self.draw.x(bar.end) - drawn >= 1 / 3:
                self._bar(bar, y, height, _fill(bar))
                drawn = self.draw.x(bar.end)

    def _bar(self, bar: _Bar, y: float, height: float, fill: str) -> None:
        x, width = self.draw.x(bar.start), self.draw.x(bar.end) - self.draw.x(bar.start)
        self.draw.rect(x, y + 1, max(width, 0.4), height - 2, fill, bar.tip, LINE if width > 3 else "")
        label = next((word for word in (bar.label, _letter(bar.label)) if word and text_width(word, 11) + 6 <= width), None)
        if label is not None:
            if fill == _WAITING:
                wide = text_width(label, 11) + 6
                self.draw.rect(x + (width - wide) / 2, y + 2.5, wide, height - 5, WHITE)
            self.draw.text(x + width / 2, y + height / 2 + 4, label, 11, anchor="middle")

    # --- between ranks ---
    def _messages(self) -> None:
        """An arrow for each message, from where it starts to where it ends."""
        trace = self.trace
        sends = np.flatnonzero(trace.ops("send", "isend") & (trace["match"] >= 0)).tolist()
        recvs = {int(trace["match"][r]): r for r in np.flatnonzero(trace.ops("recv", "irecv") & (trace["match"] >= 0)).tolist()}
        for send in sends[:MOST_ARROWS]:
            recv = recvs.get(int(trace["match"][send]))
            if recv is None:
                continue
            a, b = int(trace["rank"][send]), int(trace["rank"][recv])
            start, end = int(trace["started_ns"][send]), int(trace["finished_ns"][recv])
            if max(a, b) < len(self.ranks) and min(start, end) >= 0:
                down = 1 if b > a else -1
                y1 = self.foot(a) if down > 0 else self.y(a) + _UPPER
                y2 = self.y(b) + _UPPER if down > 0 else self.foot(b)
                self.draw.line((self.draw.x(start), y1), (self.draw.x(end), y2), MESSAGE, 1.3, arrow=True)

    def _critical_path(self) -> None:
        before: Segment | None = None
        for part in self.measured.critical_path:
            if part.rank >= len(self.ranks):
                continue
            y = self.foot(part.rank) + 3
            if before is not None and before.rank != part.rank:
                x = self.draw.x(part.start_ns)
                self.draw.line((x, self.foot(before.rank) + 3), (x, y), _PATH, 1.2, dash="3 3")
            self.draw.line((self.draw.x(part.start_ns), y), (self.draw.x(part.end_ns), y), _PATH, 4)
            before = part


_LEGEND = ((_COMPUTE, "compute"), (_EXPOSED, "communication, exposed"), (_HIDDEN, "communication beside compute"),
           (_WAITING, "waiting"), (PALE, "idle"))  # fmt: skip


def _fill(bar: _Bar) -> str:
    return _BACKWARD if bar.label.startswith("backward") else _COMPUTE


def _letter(label: str) -> str:
    """A pass in the letters of pipeline schedules: forward, backward, its input's half and its weights'."""
    for word, letter in (("forward", "F"), ("backward input", "I"), ("backward weight", "W"), ("backward", "B")):
        if label.startswith(word):
            return letter
    return ""


def _short(stream: str) -> str:
    """A queue's name without the ranks that say which of several groups it is."""
    return clipped(stream.partition("[")[0], 15)


def _overlap(bars: Sequence[_Bar]) -> bool:
    """Two of different queues are under way at one time."""
    ends: dict[str, int] = {}
    for bar in sorted(bars):
        if any(end > bar.start for queue, end in ends.items() if queue != bar.queue):
            return True
        ends[bar.queue] = max(ends.get(bar.queue, 0), bar.end)
    return False


def _union(spans: Iterable[Span]) -> list[Span]:
    """Merged and sorted."""
    merged: list[Span] = []
    for start, end in sorted(s for s in spans if s[0] < s[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _both(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What lies in both; ``others`` sorted and disjoint."""
    return [(max(a, c), min(b, d)) for a, b in spans for c, d in others if max(a, c) < min(b, d)]


def _without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What of the spans lies in none of the others (sorted and disjoint)."""
    left = []
    for start, end in spans:
        for a, b in others:
            if a >= end:
                break
            if b > start:
                if start < a:
                    left.append((start, a))
                start = max(start, b)
        if start < end:
            left.append((start, end))
    return left


def _ticks(end: int) -> list[int]:
    """Round times, five to ten of them, from 0."""
    step, grow = 1, 0
    while end / step > 10:
        step = step * 5 // 2 if grow % 3 == 1 else step * 2  # 1, 2, 5, 10, 20, …
        grow += 1
    return list(range(0, end + 1, step))


def _drawn(subject: Subject) -> str:
    return timeline_svg(given(subject.program, "program"), given(subject.run, "run"))


VIEW = View(_drawn, formats=("svg",), examples=(
    Example("hybrid", "The same run to scale: what each rank does, and the path that sets the pace."),
    Example("ddp_by_hand", "The same to scale: two of the three all_reduces are hidden behind compute."),
    Example("pipeline_1f1b", "One forward, one backward: the bubble at both ends."),
    Example("strategies/pipeline_zb1p",
            "A zero-bubble schedule: gradients of the weights (W), which nobody waits for, fill what was empty."),
))  # fmt: skip
