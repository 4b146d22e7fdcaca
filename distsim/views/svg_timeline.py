"""The timeline: a row per rank, time to the right, drawn to scale.

Each rank has two tracks. The upper one is what the rank itself does: compute, or waiting in a call that has not met its parties.
The lower one is its communication under way: exposed where nothing is computed meanwhile, hidden where it is. A thick line under
the tracks is the critical path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from distsim.program.records import Program
from distsim.timeline import COMPUTE_OPS, Segment, Timeline, timeline
from distsim.trace import Trace
from distsim.units import show_bytes, show_ns
from distsim.views.pictures.palette import GREY, INK, LINE, MESSAGE, PALE, WHITE
from distsim.views.pictures.records import clipped, text_width
from distsim.views.svg import Svg

#: What is drawn at most. Bars thinner than a third of a pixel are drawn as one.
MOST_RANKS, MOST_ARROWS = 48, 400
_LEFT, _WIDTH, _TOP, _RIGHT = 92.0, 1080.0, 96.0, 32.0
_UPPER, _LOWER, _GAP = 20.0, 15.0, 16.0
_ROW = _UPPER + _LOWER + _GAP
_COMPUTE, _EXPOSED, _HIDDEN, _WAITING, _PATH = "#9CCBEB", "#F2A583", "#8ED3B7", "url(#waiting)", INK
_LOCAL = (*COMPUTE_OPS, "sleep", "wait", "wait_stream", "synchronize", "exit", "fail")

_TIMES = ("posted_ns", "returned_ns", "started_ns", "finished_ns")

Span = tuple[int, int]


class _Bar(NamedTuple):
    start: int
    end: int
    label: str
    tip: str


def timeline_svg(program: Program, run: Any, measured: Timeline | None = None) -> str:
    """The timeline of a run as SVG text. ``measured``: its `timeline`, worked out here when left out."""
    found = timeline(run.trace, run.makespan_ns) if measured is None else measured
    return _Drawing(program, run, found).svg()


class _Drawing:
    def __init__(self, program: Program, run: Any, measured: Timeline) -> None:
        self.program, self.run, self.measured = program, run, measured
        self.trace: Trace = run.trace
        self.ranks = range(min(program.world_size, MOST_RANKS))
        self.stuck = set(run.standstill.stuck)
        grown = measured.makespan_ns // 6 if self.stuck else 0  # room to show that it never ends
        self.end = max(measured.makespan_ns + grown, 1)
        self.draw = Svg()

    def x(self, ns: int) -> float:
        return _LEFT + _WIDTH * min(ns, self.end) / self.end

    def y(self, rank: int) -> float:
        return _TOP + rank * _ROW

    def svg(self) -> str:
        bottom = self.y(len(self.ranks))
        self._head()
        self._axis(bottom)
        for rank in self.ranks:
            self._rank(rank)
        self._messages()
        self._critical_path()
        title = f"{clipped(self.program.name, 60)}: timeline"
        return self.draw.document(_LEFT + _WIDTH + _RIGHT, bottom + 40, title)

    # --- around the tracks ---
    def _head(self) -> None:
        self.draw.text(16, 26, f"{clipped(self.program.name, 60)}: where the time goes", 17, bold=True)
        more = self.program.world_size - len(self.ranks)
        said = f"{self.run.outcome}, {show_ns(self.measured.makespan_ns)}; {self.program.backend}"
        self.draw.text(16, 46, said + (f"; and {more} more ranks, not drawn" if more else ""), 12, colour=GREY)
        at = 16.0
        for fill, word in _LEGEND:
            self.draw.rect(at, 58, 22, 12, fill, border=LINE)
            self.draw.text(at + 28, 68, word, 12)
            at += 28 + text_width(word, 12) + 16
        self.draw.line((at, 65), (at + 22, 65), _PATH, 4)
        self.draw.text(at + 28, 68, "critical path", 12)

    def _axis(self, bottom: float) -> None:
        for ns in _ticks(self.measured.makespan_ns):
            self.draw.line((self.x(ns), _TOP - 8), (self.x(ns), bottom), "#DDE1E6")
            self.draw.text(self.x(ns), bottom + 18, show_ns(ns) if ns else "0", 11, anchor="middle", colour=GREY)
        self.draw.text(16, bottom + 18, "time", 11, colour=GREY)

    # --- a rank ---
    def _rank(self, rank: int) -> None:
        rows = np.flatnonzero((self.trace["rank"] == rank) & (self.trace["posted_ns"] >= 0)).tolist()
        y = self.y(rank)
        self.draw.text(16, y + _UPPER / 2 + 9, f"rank {rank}", 13, bold=True)
        self.draw.rect(_LEFT, y, _WIDTH, _UPPER, PALE)
        self.draw.rect(_LEFT, y + _UPPER, _WIDTH, _LOWER, WHITE, border="#DDE1E6")
        compute, moving, waiting = self._bars(rows)
        busy = _union((b.start, b.end) for b in compute)
        under_way = _union((b.start, b.end) for b in moving)
        for start, end in _without(_without(_union(waiting), busy), under_way):
            word = "waits for ever" if end == self.end and rank in self.stuck else "waiting"
            self._bar(_Bar(start, end, word, f"rank {rank}: {word}, {show_ns(end - start)}"), y, _UPPER, _WAITING)
        self._row_of_bars(compute, y, _UPPER, _COMPUTE)
        for bar in moving:
            for start, end in _without([(bar.start, bar.end)], busy):
                self._bar(_Bar(start, end, bar.label, bar.tip), y + _UPPER, _LOWER, _EXPOSED)
            for start, end in _both([(bar.start, bar.end)], busy):
                self._bar(_Bar(start, end, bar.label, f"{bar.tip}, hidden by compute"), y + _UPPER, _LOWER, _HIDDEN)

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
        return _Bar(start, end, label, ", ".join(t for t in about if t))

    def _row_of_bars(self, bars: Sequence[_Bar], y: float, height: float, fill: str) -> None:
        drawn = -1.0
        for bar in bars:
            if self.x(bar.end) - drawn >= 1 / 3:
                self._bar(bar, y, height, fill)
                drawn = self.x(bar.end)

    def _bar(self, bar: _Bar, y: float, height: float, fill: str) -> None:
        x, width = self.x(bar.start), self.x(bar.end) - self.x(bar.start)
        self.draw.rect(x, y + 1, max(width, 0.4), height - 2, fill, bar.tip, LINE if width > 3 else "")
        if text_width(bar.label, 11) + 6 <= width:
            if fill == _WAITING:
                wide = text_width(bar.label, 11) + 6
                self.draw.rect(x + (width - wide) / 2, y + 2.5, wide, height - 5, WHITE)
            self.draw.text(x + width / 2, y + height / 2 + 4, bar.label, 11, anchor="middle")

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
                y1 = self.y(a) + _UPPER + (_LOWER if down > 0 else 0)
                y2 = self.y(b) + _UPPER + (0 if down > 0 else _LOWER)
                self.draw.line((self.x(start), y1), (self.x(end), y2), MESSAGE, 1.3, arrow=True)

    def _critical_path(self) -> None:
        before: Segment | None = None
        for part in self.measured.critical_path:
            if part.rank >= len(self.ranks):
                continue
            y = self.y(part.rank) + _UPPER + _LOWER + 3
            if before is not None and before.rank != part.rank:
                x = self.x(part.start_ns)
                self.draw.line((x, self.y(before.rank) + _UPPER + _LOWER + 3), (x, y), _PATH, 1.2, dash="3 3")
            self.draw.line((self.x(part.start_ns), y), (self.x(part.end_ns), y), _PATH, 4)
            before = part


_LEGEND = ((_COMPUTE, "compute"), (_EXPOSED, "communication, exposed"), (_HIDDEN, "communication beside compute"),
           (_WAITING, "waiting"), (PALE, "idle"))  # fmt: skip


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
