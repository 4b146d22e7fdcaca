"""Two runs in one picture: for each rank a track of A above a track of B, both drawn to one scale of time.

Ranks that are equal in both runs share a lane. A track shows compute, what moves alone, and waiting.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from distsim.compare import Comparison
from distsim.ops.table import COMPUTE_OPS
from distsim.trace import Trace
from distsim.units import show_bytes, show_ns
from distsim.views.doings import Doings
from distsim.views.drawing.lanes import Band, Layer, columns, density, track
from distsim.views.drawing.palette import GREY, INK, LINE, PALE, RED, WHITE
from distsim.views.drawing.ranklane import BACKWARD, COMPUTE, EXPOSED, letter
from distsim.views.drawing.records import clipped, text_width
from distsim.views.drawing.svg import WAITING, TimeChart, ticks
from distsim.views.folding import Lane, RankRows, fold_ranks
from distsim.views.spans import Ints, Spans, shares

#: Lanes at most; more are folded.
MOST_LANES = 20
_LEFT, _WIDTH, _TOP = 172.0, 1064.0, 100.0
_TRACK, _GAP = 20.0, 12.0
_PITCH = 2 * _TRACK + _GAP


class _Side(NamedTuple):
    """One of the two runs."""

    trace: Trace
    rows: RankRows
    doings: Doings


def overlay_svg(found: Comparison, names: tuple[str, str]) -> str:
    """The picture as SVG text."""
    return _Overlay(found, names).svg()


class _Overlay:
    def __init__(self, found: Comparison, names: tuple[str, str]) -> None:
        self.found, self.names = found, names
        self.end = max(*found.makespans_ns, 1)
        traces = (found.a, found.b)
        self.sides = [_Side(t, RankRows(t), Doings(t, self.end)) for t in traces]
        self.size = max(trace.world_size for trace in traces)
        more = found.b if found.b.world_size >= found.a.world_size else found.a
        less = found.a if more is found.b else found.b
        self.lanes = fold_ranks(more, range(self.size), (), MOST_LANES, beside=less)
        self.draw = TimeChart(_LEFT, _WIDTH, _TOP, self.end)

    def svg(self) -> str:
        tops = list(accumulate((_PITCH for _ in self.lanes), initial=_TOP))
        self._head()
        self.draw.axis(ticks(self.end), tops[-1] - 6)
        for lane, top in zip(self.lanes, tops, strict=False):
            self.draw.text(16, top + 17, lane.title, 13 if text_width(lane.title, 13, True) < _LEFT - 50 else 10, bold=True)
            if lane.about:
                self.draw.text(16, top + 33, lane.about, 10, colour=GREY)
            for number, side in enumerate(self.sides):
                self._track(side, number, lane, top + number * _TRACK)
        self._ends(tops[-1] - 6)
        return self.draw.page(tops[-1], f"{clipped(self.names[0], 40)} and {clipped(self.names[1], 40)}")

    def _head(self) -> None:
        a, b = (clipped(name, 48) for name in self.names)
        a_ns, b_ns = self.found.makespans_ns
        self.draw.text(16, 26, f"A: {a}, {show_ns(a_ns)}", 15, bold=True)
        self.draw.text(16, 46, f"B: {b}, {show_ns(b_ns)}", 15, bold=True)
        keys = (
            (COMPUTE, "compute"),
            (BACKWARD, "backward"),
            (EXPOSED, "communication, exposed"),
            (WAITING, "waiting"),
            (PALE, "idle"),
        )
        at, y = self.draw.legend(keys)
        for dash, word, colour in (("", "end of A", INK), ("4 3", "end of B", RED)):
            self.draw.line((at, y + 6), (at + 22, y + 6), colour, 1.6, dash=dash)
            self.draw.text(at + 28, y + 10, word, 12)
            at += 28 + text_width(word, 12) + 16
        if len(self.lanes) < self.size:
            self.draw.text(
                at, y + 10, f"{self.size} ranks in {len(self.lanes)} lane{'s' * (len(self.lanes) > 1)}", 12, colour=GREY
            )

    def _track(self, side: _Side, number: int, lane: Lane, y: float) -> None:
        self.draw.text(_LEFT - 14, y + 13, "AB"[number], 11, colour=GREY)
        self.draw.rect(_LEFT, y, _WIDTH, _TRACK - 2, PALE)
        here = [rank for rank in lane.ranks if rank < side.trace.world_size]
        members = here[:1] if lane.like == "equal" else here
        if not members:
            self.draw.text(_LEFT + 8, y + 13, "takes no part", 11, colour=GREY)
            return
        rows = np.concatenate([side.rows(rank) for rank in members])
        doing, band = side.doings(rows, len(members)), Band(y + 1, _TRACK - 4)
        moving = _together(tuple(doing.exposed.values()))
        layers = [
            Layer(COMPUTE, doing.work),
            Layer(BACKWARD, doing.backward),
            Layer(EXPOSED, moving),
            Layer(WAITING, doing.waiting),
        ]
        if doing.many > 1:
            edges = columns(self.draw, 2.0)
            density(self.draw, band, edges, [(one.fill, shares(one.spans, edges, doing.many)) for one in layers])
            return
        track(self.draw, band, layers)
        self._bars(side.trace, np.concatenate([doing.computes, doing.moves]), lane, "AB"[number], band)

    def _bars(self, trace: Trace, rows: Ints, lane: Lane, run: str, band: Band) -> None:
        """Frames, tips and words of the bars that are wide enough for them; a word where nothing lies beneath."""
        started, finished = trace["started_ns"][rows], trace["finished_ns"][rows]
        till = np.where(finished >= 0, finished, self.end)
        wide = (till - started) * _WIDTH / self.end >= 3
        computes = trace.ops(*COMPUTE_OPS)
        for row, start, end in zip(rows[wide].tolist(), started[wide].tolist(), till[wide].tolist(), strict=True):
            x, right, label = self.draw.x(start), self.draw.x(end), _label(trace, row)
            self.draw.rect(x, band.y, right - x, band.height, "", f"{lane.title}, {run}: {label}, {show_ns(end - start)}", LINE)
            beside = not computes[row] and bool(((started < end) & (till > start) & computes[rows]).any())
            word = next((w for w in (label, letter(label)) if w and text_width(w, 11) + 6 <= right - x), "")
            if word and not beside:
                colour = INK if computes[row] else WHITE
                self.draw.text((x + right) / 2, band.y + 12, word, 11, anchor="middle", colour=colour)

    def _ends(self, bottom: float) -> None:
        """Where each run ends, so that the difference shows."""
        for ns, colour, dash in zip(self.found.makespans_ns, (INK, RED), ("", "4 3"), strict=True):
            self.draw.line((self.draw.x(ns), _TOP - 8), (self.draw.x(ns), bottom), colour, 1.6, dash=dash)


def _together(parts: tuple[Spans, ...]) -> Spans:
    """As they are: of several ranks they overlap."""
    return Spans(np.concatenate([p.starts for p in parts]), np.concatenate([p.ends for p in parts]))


def _label(trace: Trace, row: int) -> str:
    nbytes = int(trace["nbytes"][row])
    name = trace.text("name", int(trace["name"][row])) if "name" in trace.columns else ""
    return clipped(name or trace.text("op", int(trace["op"][row])), 32) + (f" {show_bytes(nbytes)}" if nbytes else "")
