"""What ranks hold over a step, by kind: parameters, gradients, optimizer states, activations; beside what the device has.

What a scenario states (`memory:`, or its strategies) are peaks. Activations are drawn as they come and go (`distsim.views.holding`), so
that their highest point is the stated peak; the other kinds are drawn as if they stayed.
"""

from __future__ import annotations

import numpy as np

from distsim.check.memory import held
from distsim.errors import UsageError
from distsim.program.records import Program
from distsim.scenario import Scenario
from distsim.trace import Trace
from distsim.units import show_bytes
from distsim.views.drawing.palette import GREY, LINE, PALE, RED
from distsim.views.drawing.records import clipped, text_width
from distsim.views.drawing.svg import Svg, TimeChart, number, ticks
from distsim.views.drawing.view import Example, Subject, View, given
from distsim.views.drawing.words import who
from distsim.views.holding import Filled, Share, filled, one_step
from distsim.views.part import WHOLE, Part, chosen_ranks, told, window

#: Panels at most; kinds of one peak share one.
MOST_PANELS = 8
_LEFT, _WIDTH, _HEIGHT, _TOP, _PITCH = 110.0, 980.0, 120.0, 118.0, 190.0
#: From the foot up, by lightness (CIE L* 37, 53, 73, 80, 89): they differ in print.
_FILLS = {
    "parameters": "#1F5A85", "gradients": "#C46A00", "optimizer": "#8FBF9F", "gathered": "#CFC4DE", "activations": "#F2DFA0",
}  # fmt: skip


def memory_svg(scenario: Scenario, program: Program, trace: Trace, room: int, part: Part = WHOLE) -> str:
    """The panels as SVG text; ``room``: bytes of a device. Raises UsageError where nothing is stated."""
    return _Drawing(scenario, program, trace, room, part).svg()


class _Drawing:
    def __init__(self, scenario: Scenario, program: Program, trace: Trace, room: int, part: Part) -> None:
        self.name, self.trace, self.room, self.part = program.name, trace, room, part
        self.window, self.note = window(part, trace, max(trace.makespan_ns, 1)), ""
        chosen = set(chosen_ranks(part, trace))
        if part.steps is None and part.time is None:
            step, self.note = one_step(trace, chosen)
            self.window = step or self.window
        stated = [one for one in held(scenario, program) if chosen & set(one.ranks)]
        if not stated:
            raise UsageError(
                "the file says nothing of memory", "add `memory: {model: {parameters: 2 GiB, …}}`, or let `transformer:` make it"
            )
        panels = filled(stated, trace, chosen, self.window if part.time is None else None)
        self.panels, self.left_out = panels[:MOST_PANELS], panels[MOST_PANELS:]
        self.kinds = [kind for kind in _FILLS if any(panel.parts.get(kind) for panel in self.panels)]
        self.draw = Svg()

    # --- the page ---
    def svg(self) -> str:
        draw, top = self.draw, 1.1 * max(self.room if self._near() else 0, *(panel.total for panel in self.panels), 1)
        draw.text(16, 26, f"{clipped(self.name, 60)}: memory over {'a step' if self.note else 'the run'}", 17, bold=True)
        moves = any(panel.share is not None for panel in self.panels)
        said = [self.note, told(self.part, self.trace.world_size)]
        grow = "activations grow with forward and shrink with backward passes, all else stays at its peak"
        said += [
            f"peaks as stated; {grow}"
            if moves
            else "peaks as stated, drawn as if they stayed: no passes tell when they come and go"
        ]
        said += [f"{sum(len(p.ranks) for p in self.left_out)} ranks with less are not drawn"] if self.left_out else []
        draw.text(16, 46, "; ".join(t for t in said if t), 12, colour=GREY)
        self._legend()
        for place, panel in enumerate(self.panels):
            self._panel(panel, _TOP + place * _PITCH, top)
        bottom = _TOP + len(self.panels) * _PITCH - 20
        return draw.document(_LEFT + _WIDTH + 40, bottom, f"{clipped(self.name, 60)}: memory")

    def _near(self) -> bool:
        """The device's line is drawn where something comes near it."""
        return max(panel.total for panel in self.panels) * 2 > self.room

    def _legend(self) -> None:
        chart = TimeChart(_LEFT, _WIDTH, _TOP, 1, on=self.draw)
        at, y = chart.legend([(_FILLS[kind], clipped(kind, 30)) for kind in self.kinds])
        words = f"the device has {show_bytes(self.room)}"
        if self._near():
            chart.line((at, y + 6), (at + 24, y + 6), RED, 2.0, dash="6 3")
            chart.text(at + 30, y + 10, words, 12)
        else:
            chart.text(at, y + 10, f"{words}: more than twice as much", 12, colour=GREY)

    def _panel(self, panel: Filled, y: float, top: float) -> None:
        draw, (start, end) = self.draw, self.window
        full = f"{100 * panel.total / self.room:.0f} % of the device" if self.room else ""
        title = f"{who(panel.ranks, 4)}: {show_bytes(panel.total)} at the peak, {full}"
        draw.text(16, y - 6, title, 12, bold=True)
        draw.text(16 + text_width(title, 12, True) + 12, y - 6, clipped(panel.name, 50), 11, colour=GREY)
        chart = TimeChart(_LEFT, _WIDTH, y + 8, end, start, draw)
        chart.rect(_LEFT, y + 4, _WIDTH, _HEIGHT, PALE)
        chart.axis((start + t for t in ticks(end - start)), y + 4 + _HEIGHT, start)
        for share in (0.0, 0.5, 1.0):
            at = y + 4 + _HEIGHT * (1 - share / 1.1)
            draw.line((_LEFT - 4, at), (_LEFT, at), LINE)
            draw.text(_LEFT - 8, at + 4, show_bytes(round(top / 1.1 * share)) if share else "0", 11, anchor="end", colour=GREY)
        self._areas(chart, panel, y + 4 + _HEIGHT, top)
        if self._near():
            at = y + 4 + _HEIGHT * (1 - self.room / top)
            draw.line((_LEFT, at), (_LEFT + _WIDTH, at), RED, 2.0, dash="6 3")

    def _areas(self, chart: TimeChart, panel: Filled, foot: float, top: float) -> None:
        """One upon the other, activations as a skyline at last."""
        base = 0.0
        for kind in (k for k in self.kinds if k in panel.parts and k != "activations"):
            high = panel.parts[kind] / top * _HEIGHT
            tip = f"{clipped(kind, 40)}: {show_bytes(panel.parts[kind])}"
            chart.rect(_LEFT, foot - base - high, _WIDTH, high, _FILLS[kind], tip, LINE)
            base += high
        most = panel.parts.get("activations", 0)
        if not most:
            return
        share = panel.share or Share(np.array(self.window), np.ones(2))
        high = most / top * _HEIGHT
        points = [(chart.x(t), foot - base - s * high) for t, s in zip(share.at_ns.tolist(), share.share.tolist(), strict=True)]
        points = _thinned(points)
        line = "".join(f"L{number(x)} {number(y)}" for x, y in points)
        first, last = points[0][0], points[-1][0]
        steps = f"M{number(first)} {number(foot - base)}{line}L{number(last)} {number(foot - base)}z"
        tip = f"activations: at most {show_bytes(most)}" + ("" if panel.share else ", as stated: no passes tell when")
        chart.path(steps, _FILLS["activations"], tip, LINE, 0.8)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most the lowest and the highest point of a pixel."""
    found: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        found.setdefault(int(point[0]), []).append(point)
    kept = []
    for some in found.values():
        kept += sorted({some[0], min(some, key=lambda p: p[1]), max(some, key=lambda p: p[1]), some[-1]}, key=some.index)
    return kept


def _drawn(subject: Subject) -> str:
    if subject.scenario is None:
        raise UsageError("the view memory draws what a scenario states, and a recording states nothing", "name a scenario")
    run, cost = given(subject.run, "run"), given(subject.cost, "cost")
    return memory_svg(subject.scenario, run.program, run.trace, cost.cluster.device.memory_nbytes, subject.part)


VIEW = View(_drawn, formats=("svg", "png", "pdf"), examples=(
    Example("strategies/gpt3_175b", "What ranks hold over a step: the first stages keep the activations of more micro-batches."),
))  # fmt: skip
