"""Two runs in one picture: for each rank a track of A above a track of B, both drawn to one scale
of time.

Ranks that are equal in both runs share a lane. A track shows compute, what moves alone, and
waiting.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from distsim.analysis.run_comparison import RunComparison
from distsim.common.units import show_bytes, show_ns
from distsim.operations.registry import COMPUTE_OPS
from distsim.output.pictures.components.lane_painter import (
    BACKWARD_FILL,
    COMPUTE_FILL,
    EXPOSED_FILL,
    fitting_label,
)
from distsim.output.pictures.drawing.box_diagram import clipped, text_width
from distsim.output.pictures.drawing.palette import GREY, INK, LINE_COLOUR, PALE_FILL, RED, WHITE
from distsim.output.pictures.drawing.svg import WAITING_FILL, TimeChart, round_ticks
from distsim.output.pictures.drawing.tracks import (
    TrackBand,
    TrackLayer,
    density_edges,
    draw_density,
    draw_track,
)
from distsim.output.trace_data.activity import ActivityReader
from distsim.output.trace_data.lanes import RankLane, RankRows, group_ranks_into_lanes
from distsim.output.trace_data.time_spans import Ints, TimeSpans, covered_shares
from distsim.trace.model import Trace

#: Lanes at most; more are folded.
MAX_LANES = 20
_LEFT, _WIDTH, _TOP = 172.0, 1064.0, 100.0
_TRACK, _GAP = 20.0, 12.0
_PITCH = 2 * _TRACK + _GAP


class _OverlaidRun(NamedTuple):
    """One of the two runs."""

    trace: Trace
    rows: RankRows
    doings: ActivityReader


def overlay_svg(found: RunComparison, names: tuple[str, str]) -> str:
    """The picture as SVG text."""
    return _OverlayDrawing(found, names).svg()


class _OverlayDrawing:
    def __init__(self, found: RunComparison, names: tuple[str, str]) -> None:
        self.found, self.names = found, names
        self.end = max(*found.makespans_ns, 1)
        traces = (found.a, found.b)
        self.sides = [_OverlaidRun(t, RankRows(t), ActivityReader(t, self.end)) for t in traces]
        self.size = max(trace.world_size for trace in traces)
        more = found.b if found.b.world_size >= found.a.world_size else found.a
        less = found.a if more is found.b else found.b
        self.lanes = group_ranks_into_lanes(more, range(self.size), (), MAX_LANES, beside=less)
        self.draw = TimeChart(_LEFT, _WIDTH, _TOP, self.end)

    def svg(self) -> str:
        tops = list(accumulate((_PITCH for _ in self.lanes), initial=_TOP))
        self._head()
        self.draw.axis(round_ticks(self.end), tops[-1] - 6)
        for lane, top in zip(self.lanes, tops, strict=False):
            self.draw.text(
                16,
                top + 17,
                lane.title,
                13 if text_width(lane.title, 13, True) < _LEFT - 50 else 10,
                bold=True,
            )
            if lane.about:
                self.draw.text(16, top + 33, lane.about, 10, colour=GREY)
            for number, side in enumerate(self.sides):
                self._track(side, number, lane, top + number * _TRACK)
        self._ends(tops[-1] - 6)
        return self.draw.page(
            tops[-1], f"{clipped(self.names[0], 40)} and {clipped(self.names[1], 40)}"
        )

    def _head(self) -> None:
        a, b = (clipped(name, 48) for name in self.names)
        a_ns, b_ns = self.found.makespans_ns
        self.draw.text(16, 26, f"A: {a}, {show_ns(a_ns)}", 15, bold=True)
        self.draw.text(16, 46, f"B: {b}, {show_ns(b_ns)}", 15, bold=True)
        keys = (
            (COMPUTE_FILL, "compute"),
            (BACKWARD_FILL, "backward"),
            (EXPOSED_FILL, "communication, exposed"),
            (WAITING_FILL, "waiting"),
            (PALE_FILL, "idle"),
        )
        at, y = self.draw.legend(keys)
        for dash, word, colour in (("", "end of A", INK), ("4 3", "end of B", RED)):
            self.draw.line((at, y + 6), (at + 22, y + 6), colour, 1.6, dash=dash)
            self.draw.text(at + 28, y + 10, word, 12)
            at += 28 + text_width(word, 12) + 16
        if len(self.lanes) < self.size:
            self.draw.text(
                at,
                y + 10,
                f"{self.size} ranks in {len(self.lanes)} lane{'s' * (len(self.lanes) > 1)}",
                12,
                colour=GREY,
            )

    def _track(self, side: _OverlaidRun, number: int, lane: RankLane, y: float) -> None:
        self.draw.text(_LEFT - 14, y + 13, "AB"[number], 11, colour=GREY)
        self.draw.rect(_LEFT, y, _WIDTH, _TRACK - 2, PALE_FILL)
        here = [rank for rank in lane.ranks if rank < side.trace.world_size]
        members = here[:1] if lane.like == "equal" else here
        if not members:
            self.draw.text(_LEFT + 8, y + 13, "takes no part", 11, colour=GREY)
            return
        rows = np.concatenate([side.rows(rank) for rank in members])
        doing, band = side.doings(rows, len(members)), TrackBand(y + 1, _TRACK - 4)
        moving = _concatenated_spans(tuple(doing.exposed.values()))
        layers = [
            TrackLayer(COMPUTE_FILL, doing.work),
            TrackLayer(BACKWARD_FILL, doing.backward),
            TrackLayer(EXPOSED_FILL, moving),
            TrackLayer(WAITING_FILL, doing.waiting),
        ]
        if doing.many > 1:
            edges = density_edges(self.draw, 2.0)
            draw_density(
                self.draw,
                band,
                edges,
                [(one.fill, covered_shares(one.spans, edges, doing.many)) for one in layers],
            )
            return
        draw_track(self.draw, band, layers)
        self._bars(
            side.trace, np.concatenate([doing.computes, doing.moves]), lane, "AB"[number], band
        )

    def _bars(self, trace: Trace, rows: Ints, lane: RankLane, run: str, band: TrackBand) -> None:
        """Frames, tips and words of the bars that are wide enough for them; a word where nothing
        lies beneath.
        """
        started, finished = trace["started_ns"][rows], trace["finished_ns"][rows]
        till = np.where(finished >= 0, finished, self.end)
        wide = (till - started) * _WIDTH / self.end >= 3
        computes = trace.ops(*COMPUTE_OPS)
        for row, start, end in zip(
            rows[wide].tolist(), started[wide].tolist(), till[wide].tolist(), strict=True
        ):
            x, right, label = self.draw.x(start), self.draw.x(end), _call_label(trace, row)
            self.draw.rect(
                x,
                band.y,
                right - x,
                band.height,
                "",
                f"{lane.title}, {run}: {label}, {show_ns(end - start)}",
                LINE_COLOUR,
            )
            covers_compute = False
            if not computes[row]:
                overlapping = (started < end) & (till > start)
                covers_compute = bool((overlapping & computes[rows]).any())
            word = fitting_label(label, right - x, 11)
            if word and not covers_compute:
                colour = INK if computes[row] else WHITE
                self.draw.text(
                    (x + right) / 2, band.y + 12, word, 11, anchor="middle", colour=colour
                )

    def _ends(self, bottom: float) -> None:
        """Where each run ends, so that the difference shows."""
        for ns, colour, dash in zip(self.found.makespans_ns, (INK, RED), ("", "4 3"), strict=True):
            self.draw.line(
                (self.draw.x(ns), _TOP - 8), (self.draw.x(ns), bottom), colour, 1.6, dash=dash
            )


def _concatenated_spans(parts: tuple[TimeSpans, ...]) -> TimeSpans:
    """The spans of several ranks, unmerged: spans of different ranks may overlap."""
    return TimeSpans(
        np.concatenate([p.starts for p in parts]), np.concatenate([p.ends for p in parts])
    )


def _call_label(trace: Trace, row: int) -> str:
    nbytes = int(trace["nbytes"][row])
    name = trace.text("name", int(trace["name"][row])) if "name" in trace.columns else ""
    return clipped(name or trace.text("op", int(trace["op"][row])), 32) + (
        f" {show_bytes(nbytes)}" if nbytes else ""
    )
