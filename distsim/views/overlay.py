"""Two runs in one picture: for each rank a track of A above a track of B, both drawn to one scale of time."""

from __future__ import annotations

from typing import NamedTuple

from distsim.compare import Comparison
from distsim.timeline import COMPUTE_OPS
from distsim.trace import Trace, TraceCall
from distsim.units import show_bytes, show_ns
from distsim.views.drawing.palette import GREY, INK, LINE, PALE, RED
from distsim.views.drawing.records import clipped, text_width
from distsim.views.drawing.svg import TimeChart

#: What is drawn at most; bars thinner than a third of a pixel are drawn as one.
MOST_RANKS = 32
_LEFT, _WIDTH, _TOP = 108.0, 1064.0, 92.0
_TRACK, _GAP = 18.0, 14.0
_PITCH = 2 * _TRACK + _GAP
_COMPUTE, _MOVING, _WAITING = "#9CCBEB", "#F2A583", "url(#waiting)"
_QUIET = ("sleep", "wait", "wait_stream", "synchronize", "exit", "fail")


class _Bar(NamedTuple):
    start: int
    end: int
    fill: str
    label: str


def overlay_svg(found: Comparison, names: tuple[str, str]) -> str:
    """The picture as SVG text."""
    return _Overlay(found, names).svg()


class _Overlay:
    def __init__(self, found: Comparison, names: tuple[str, str]) -> None:
        self.found, self.names = found, names
        self.end = max(*found.makespans_ns, 1)
        self.ranks = range(min(max(found.a.world_size, found.b.world_size), MOST_RANKS))
        self.draw = TimeChart(_LEFT, _WIDTH, _TOP, self.end)

    def y(self, rank: int, side: int) -> float:
        return _TOP + rank * _PITCH + side * _TRACK

    def svg(self) -> str:
        bottom = self.y(len(self.ranks), 0)
        self._head()
        self.draw.axis((self.end * k // 5 for k in range(6)), bottom)
        for side, trace in enumerate((self.found.a, self.found.b)):
            bars = self._bars(trace)
            for rank in self.ranks:
                self._track(rank, side, bars.get(rank, []))
        self._ends(bottom)
        return self.draw.page(bottom, f"{clipped(self.names[0], 40)} and {clipped(self.names[1], 40)}")

    def _head(self) -> None:
        a, b = (clipped(name, 48) for name in self.names)
        a_ns, b_ns = self.found.makespans_ns
        self.draw.text(16, 26, f"A: {a}, {show_ns(a_ns)}", 15, bold=True)
        self.draw.text(16, 46, f"B: {b}, {show_ns(b_ns)}", 15, bold=True)
        at = self.draw.legend(((_COMPUTE, "compute"), (_MOVING, "communication"), (_WAITING, "waiting"), (PALE, "idle")))
        more = max(self.found.a.world_size, self.found.b.world_size) - len(self.ranks)
        if more:
            self.draw.text(at, 68, f"and {more} more ranks, not drawn", 12, colour=GREY)

    def _track(self, rank: int, side: int, bars: list[_Bar]) -> None:
        y = self.y(rank, side)
        if side == 0:
            self.draw.text(16, y + _TRACK + 5, f"rank {rank}", 13, bold=True)
        self.draw.text(_LEFT - 18, y + 13, "AB"[side], 11, colour=GREY)
        self.draw.rect(_LEFT, y, _WIDTH, _TRACK - 2, PALE)
        drawn: dict[str, float] = {}
        for bar in bars:
            x, end = self.draw.x(bar.start), self.draw.x(bar.end)
            if end - drawn.get(bar.fill, -1.0) < 1 / 3:
                continue
            drawn[bar.fill] = end
            tip = f"rank {rank}, {'AB'[side]}: {bar.label}, {show_ns(bar.end - bar.start)}"
            self.draw.rect(x, y + 1, max(end - x, 0.4), _TRACK - 4, bar.fill, tip, LINE if end - x > 3 else "")
            if text_width(bar.label, 11) + 6 <= end - x and bar.fill != _WAITING:
                self.draw.text((x + end) / 2, y + 12, bar.label, 11, anchor="middle")

    def _ends(self, bottom: float) -> None:
        """Where each run ends, so that the difference shows."""
        for ns, colour in zip(self.found.makespans_ns, (INK, RED), strict=True):
            self.draw.line((self.draw.x(ns), _TOP - 8), (self.draw.x(ns), bottom), colour, 1.4, dash="4 3")

    def _bars(self, trace: Trace) -> dict[int, list[_Bar]]:
        """Of every rank: waiting below, communication over it, compute on top."""
        tracks: dict[int, tuple[list[_Bar], list[_Bar], list[_Bar]]] = {}
        for call in trace.rows():
            if call.posted_ns < 0 or call.rank >= len(self.ranks) or call.op == "sleep":
                continue
            waiting, moving, computing = tracks.setdefault(call.rank, ([], [], []))
            till = call.finished_ns if call.finished_ns >= 0 else self.end
            if call.op in COMPUTE_OPS:
                computing.append(_Bar(call.started_ns, till, _COMPUTE, _label(call)))
                continue
            back = call.returned_ns if call.returned_ns >= 0 else self.end
            if back > call.posted_ns:
                waiting.append(_Bar(call.posted_ns, back, _WAITING, f"waits in {call.op}"))
            if call.op not in _QUIET and min(call.started_ns, call.finished_ns, call.match) >= 0:
                moving.append(_Bar(call.started_ns, till, _MOVING, _label(call)))
        return {rank: [bar for layer in layers for bar in sorted(layer)] for rank, layers in tracks.items()}


def _label(call: TraceCall) -> str:
    size = f" {show_bytes(call.nbytes)}" if call.nbytes else ""
    return clipped(call.name or call.op, 32) + size
