"""The points of a sweep as curves: time over the swept value, with perfect scaling for comparison;
and time over memory with the Pareto front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from typing import NamedTuple

from distsim.common.message_text import name_list
from distsim.common.units import show_ns
from distsim.output.pictures.drawing.box_diagram import clipped, text_width
from distsim.output.pictures.drawing.palette import (
    GREY,
    INK,
    LINE_COLOUR,
    PALE_FILL,
    STROKES,
    WHITE,
)
from distsim.output.pictures.drawing.svg import SvgDrawing, number_text
from distsim.planning.sweep.evaluate_point import RESULT_COLUMNS
from distsim.planning.sweep.result_table import KEY_COLUMN
from distsim.planning.sweep.run_sweep import SweepResult

#: The largest number of curves.
MAX_CURVES = 8
_WIDTH, _HEIGHT, _LEFT, _TOP, _PITCH = 430.0, 300.0, 84.0, 96.0, 590.0
#: Curves also differ in dashes and markers.
_DASHES = ("", "7 4", "2 3", "10 3 2 3", "4 4", "12 4", "1 4", "8 2 2 2")
#: Keys whose values set the number of ranks.
_WORLD_SIZE_KEYS = ("world", "mesh", "nodes", "ranks_per_node", "dp", "gpus", "ranks")

SweepRow = Mapping[str, str]


class _PlotAxis(NamedTuple):
    """A scale from ``low`` to ``high`` on ``length`` pixels; ``log``: equal factors are equally
    long.
    """

    low: float
    high: float
    length: float
    log: bool

    def at(self, value: float) -> float:
        if self.high <= self.low:
            return self.length / 2
        if self.log:
            return self.length * log10(value / self.low) / log10(self.high / self.low)
        return self.length * (value - self.low) / (self.high - self.low)


def sweep_svg(swept: SweepResult, name: str = "") -> str:
    """The plot as SVG text: time over the swept number that has most values, a curve for each
    choice of the others.
    """
    rows = [row for row in swept.rows if row["outcome"] == "completes"]
    draw, title = SvgDrawing(), f"{clipped(name or 'sweep', 60)}: time of each point"
    draw.text(16, 26, title, 17, bold=True)
    refused = len(swept.rows) - len(rows)
    draw.text(
        16,
        46,
        f"{len(rows)} points complete"
        + (f"; {refused} do not and are not drawn" if refused else ""),
        12,
        colour=GREY,
    )
    if not rows:
        return draw.document(text_width(title, 17, True) + 40, 70, title)
    names = [name for name in rows[0] if name not in (*RESULT_COLUMNS, KEY_COLUMN)]
    over = _main_swept_key(rows, names)
    right, bottom = _LEFT + _WIDTH + 30, _TOP + _HEIGHT + 60
    if over:
        bottom = max(bottom, _SweepCurves(draw, rows, over, [n for n in names if n != over]).draw())
    else:
        bottom = max(bottom, _draw_bars(draw, rows, names))
    if any(row["memory"] for row in rows):
        _draw_pareto_plot(draw, [row for row in rows if row["memory"]], names)
        right = _LEFT + _PITCH + _WIDTH + 30
    return draw.document(max(right, text_width(title, 17, True) + 40), bottom, title)


def _main_swept_key(rows: Sequence[SweepRow], names: Sequence[str]) -> str:
    """The numeric key with the most distinct values, or an empty string if there is none.

    Only keys whose values are all positive numbers count. Of keys with equally many values, a key
    that sets the world size is preferred.
    """
    counts: dict[str, int] = {}
    for name in names:
        values = {row[name] for row in rows}
        if all(_is_positive_number(value) for value in values):
            counts[name] = len(values)
    best = max(counts, key=lambda name: (counts[name], name in _WORLD_SIZE_KEYS), default="")
    return best if counts.get(best, 0) > 1 else ""


def _is_positive_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _time_ns(row: SweepRow) -> int:
    """The time of an iteration if there are several, else of the run."""
    return int(row["iteration_ns"] or row["makespan_ns"])


def _draw_frame(draw: SvgDrawing, left: float, y: _PlotAxis, words: tuple[str, str]) -> None:
    draw.rect(left, _TOP, _WIDTH, _HEIGHT, PALE_FILL)
    draw.text(left + _WIDTH / 2, _TOP + _HEIGHT + 38, words[0], 12, anchor="middle", colour=GREY)
    draw.text(left, _TOP - 10, words[1], 12, bold=True)
    for value in _round_values(y.low, y.high):
        at = _TOP + _HEIGHT - y.at(value)
        draw.line((left, at), (left + _WIDTH, at), "#DDE1E6")
        draw.text(left - 6, at + 4, show_ns(round(value)), 11, anchor="end", colour=GREY)


def _round_values(low: float, high: float) -> list[float]:
    """A few round numbers between two."""
    factors = (1, 2, 5) if high / low < 50 else (1,)
    found: list[float] = []
    for power in range(int(log10(low)) - 1, int(log10(high)) + 2):
        values = [factor * 10.0**power for factor in factors]
        found += [value for value in values if low <= value <= high]
    return found if len(found) > 1 else [low, high]


class _SweepCurves:
    """The plot of time over the key ``over``: a curve for each combination of the other keys."""

    def __init__(
        self, draw: SvgDrawing, rows: Sequence[SweepRow], over: str, others: Sequence[str]
    ) -> None:
        self.canvas, self.over = draw, over
        curves: dict[str, list[SweepRow]] = {}
        for row in rows:
            curves.setdefault(", ".join(f"{name} {row[name]}" for name in others), []).append(row)
        best = sorted(curves.items(), key=lambda pair: min(_time_ns(row) for row in pair[1]))
        self.curves = [
            (name, sorted(some, key=lambda row: float(row[over])))
            for name, some in best[:MAX_CURVES]
        ]
        self.left_out = len(best) - len(self.curves)
        values = [float(row[over]) for _, some in self.curves for row in some]
        times = [_time_ns(row) for _, some in self.curves for row in some]
        self.sized = over.partition(".")[0] in _WORLD_SIZE_KEYS or over in _WORLD_SIZE_KEYS
        self.values = sorted(set(values))
        least = min(times) if not self.sized else min(*times, times[0] * values[0] / max(values))
        self.x = _PlotAxis(min(values), max(values), _WIDTH - 40, max(values) / min(values) >= 8)
        self.y = _PlotAxis(least * 0.85, max(times) * 1.15, _HEIGHT, True)

    def at(self, value: float, ns: float) -> tuple[float, float]:
        return _LEFT + 20 + self.x.at(value), _TOP + _HEIGHT - self.y.at(ns)

    def draw(self) -> float:
        """Draw everything; returns the bottom edge."""
        draw = self.canvas
        has_iterations = any(row["iteration_ns"] for _, some in self.curves for row in some)
        _draw_frame(
            draw,
            _LEFT,
            self.y,
            (self.over, "time of an iteration" if has_iterations else "time of the run"),
        )
        free = -100.0
        for value in self.values:
            x, word = self.at(value, self.y.low)[0], f"{value:g}"
            if x - text_width(word, 11) / 2 > free:
                draw.text(x, _TOP + _HEIGHT + 18, word, 11, anchor="middle", colour=GREY)
                free = x + text_width(word, 11) / 2 + 6
        for place, (_, some) in enumerate(self.curves):
            self._band(some, place)
        if self.sized:
            self._ideals()
        for place, (name, some) in enumerate(self.curves):
            self._curve(name, some, place)
        return self._legend()

    def _band(self, some: Sequence[SweepRow], place: int) -> None:
        """The range of the predicted times: all costs at the low or at the high end of their range.

        More than three bands would hide each other.
        """
        has_ranges = all(row["low_ns"] and row["high_ns"] for row in some)
        if not has_ranges or len(self.curves) > 3:
            return
        upper, lower = [], []
        for row in some:
            # The range is known for the whole run; scale it to the time that the curve shows.
            scale = _time_ns(row) / int(row["makespan_ns"])
            value = float(row[self.over])
            upper.append(self.at(value, min(int(row["high_ns"]) * scale, self.y.high)))
            lower.append(self.at(value, max(int(row["low_ns"]) * scale, self.y.low)))
        outline = _path_through([*upper, *reversed(lower)]) + "z"
        self.canvas.path(outline, STROKES[place % len(STROKES)] + "2E")

    def _ideals(self) -> None:
        """Perfect strong and weak scaling, from the first point of the best curve."""
        first, last = self.curves[0][1][0], self.values[-1]
        begin, ns = float(first[self.over]), _time_ns(first)
        self.canvas.line(self.at(begin, ns), self.at(last, ns), GREY, 1.4, dash="3 3")
        points = [self.at(v, max(ns * begin / v, self.y.low)) for v in self.values if v >= begin]
        self.canvas.path(_path_through(points), "", "", GREY, 1.4, "8 4")

    def _curve(self, name: str, some: Sequence[SweepRow], place: int) -> None:
        colour = STROKES[place % len(STROKES)]
        points = [self.at(float(row[self.over]), _time_ns(row)) for row in some]
        self.canvas.path(
            _path_through(points), "", name, colour, 2.2, _DASHES[place % len(_DASHES)]
        )
        for (x, y), row in zip(points, some, strict=True):
            curve = f", {name}" if name else ""
            tip = f"{self.over} {row[self.over]}{curve}: {show_ns(_time_ns(row))}"
            _draw_marker(self.canvas, x, y, place, colour, tip)

    def _legend(self) -> float:
        draw, y = self.canvas, _TOP + _HEIGHT + 62
        for place, (name, _) in enumerate(self.curves if len(self.curves) > 1 else ()):
            colour = STROKES[place % len(STROKES)]
            draw.line((16, y), (46, y), colour, 2.2, dash=_DASHES[place % len(_DASHES)])
            _draw_marker(draw, 31, y, place, colour, "")
            draw.text(54, y + 4, clipped(name, 70), 12)
            y += 20
        if self.left_out:
            draw.text(
                16, y + 4, f"{self.left_out} slower configurations are not drawn", 12, colour=GREY
            )
            y += 20
        for dash, words in (
            ("8 4", "perfect strong scaling: the same total work"),
            ("3 3", "perfect weak scaling: the same work per rank"),
        ):
            if self.sized:
                draw.line((16, y), (46, y), GREY, 1.4, dash=dash)
                draw.text(54, y + 4, words, 12, colour=GREY)
                y += 20
        return y + 8


def _path_through(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{number_text(x)} {number_text(y)}" for x, y in points)


def _draw_marker(draw: SvgDrawing, x: float, y: float, place: int, colour: str, tip: str) -> None:
    """A marker of a curve; its shape depends on the number of the curve."""
    if place % 4 == 0:
        draw.circle(x, y, 4, colour, tip, WHITE)
    elif place % 4 == 1:
        draw.rect(x - 4, y - 4, 8, 8, colour, tip, WHITE)
    else:
        turn = 1 if place % 4 == 2 else -1
        draw.path(
            f"M{number_text(x - 5)} {number_text(y + 4 * turn)}l10 0 -5 {number_text(-9 * turn)}z",
            colour,
            tip,
            WHITE,
        )


def _draw_bars(draw: SvgDrawing, rows: Sequence[SweepRow], names: Sequence[str]) -> float:
    """If no swept value is a number: a bar for each point, fastest first."""
    order = sorted(rows, key=_time_ns)[:16]
    most = max(_time_ns(row) for row in order)
    draw.text(_LEFT, _TOP - 10, "time, fastest first", 12, bold=True)
    y = _TOP
    for row in order:
        words = clipped(", ".join(f"{name} {row[name]}" for name in names), 60)
        draw.text(16, y + 12, f"{show_ns(_time_ns(row))}  {words}", 12)
        draw.rect(
            16,
            y + 18,
            _WIDTH * _time_ns(row) / most,
            10,
            STROKES[0],
            f"{words}: {show_ns(_time_ns(row))}",
        )
        y += 38
    if len(rows) > len(order):
        draw.text(
            16, y + 12, f"{len(rows) - len(order)} slower points are not drawn", 12, colour=GREY
        )
        y += 20
    return y + 8


def _draw_pareto_plot(draw: SvgDrawing, rows: Sequence[SweepRow], names: Sequence[str]) -> None:
    """Time over memory; the Pareto front, where no other point is faster and holds less, is
    joined.
    """
    left = _LEFT + _PITCH
    room = max(float(row["memory"]) for row in rows)
    times = [_time_ns(row) for row in rows]
    x, y = (
        _PlotAxis(0.0, max(room, 1.0), _WIDTH - 20, False),
        _PlotAxis(min(times) * 0.85, max(times) * 1.15, _HEIGHT, True),
    )
    _draw_frame(
        draw,
        left,
        y,
        (
            "peak memory of the fullest rank, % of its device",
            "time over memory; line: Pareto-optimal points",
        ),
    )
    for share in (0, 25, 50, 75, 100):
        at = left + 10 + x.at(share / 100)
        draw.line((at, _TOP), (at, _TOP + _HEIGHT), "#DDE1E6")
        draw.text(at, _TOP + _HEIGHT + 18, str(share), 11, anchor="middle", colour=GREY)
    best = pareto_front([(float(row["memory"]), _time_ns(row)) for row in rows])
    points = {
        i: (left + 10 + x.at(float(row["memory"])), _TOP + _HEIGHT - y.at(_time_ns(row)))
        for i, row in enumerate(rows)
    }
    draw.path(_path_through([points[i] for i in best]), "", "", INK, 1.8)
    for i, row in enumerate(rows):
        point = name_list([f"{name} {row[name]}" for name in names], 6)
        tip = f"{point}: {show_ns(_time_ns(row))}, {100 * float(row['memory']):.0f} %"
        if i in best:
            draw.circle(*points[i], 5, STROKES[1], tip, INK)
        else:
            draw.circle(*points[i], 3.5, "#B8C4D0", tip, LINE_COLOUR)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the Pareto-optimal points: no other point is smaller in both values.

    They are sorted by the first value. Of equal points, only the first is included.
    """
    found: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i], i)):
        if not found or points[i][1] < points[found[-1]][1]:
            found.append(i)
    return found


__all__ = ["MAX_CURVES", "pareto_front", "sweep_svg"]
