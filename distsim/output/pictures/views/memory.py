"""What ranks hold over a step, by kind: parameters, gradients, optimizer states, activations;
beside what the device has.

What a scenario states (`memory:`, or its strategies) are peaks. Activations are drawn as they come
and go (`distsim.output.trace_data.memory_over_time`), so that their highest point is the stated
peak; the other kinds are drawn as if they stayed.
"""

from __future__ import annotations

import numpy as np

from distsim.checker.detectors.peak_memory import peak_memory
from distsim.common.errors import UsageError
from distsim.common.units import show_bytes
from distsim.output.pictures.components.call_labels import ranks_in_words
from distsim.output.pictures.components.view_interface import (
    GalleryExample,
    PictureInput,
    PictureView,
    require_input,
)
from distsim.output.pictures.drawing.box_diagram import clipped, text_width
from distsim.output.pictures.drawing.palette import GREY, LINE_COLOUR, PALE_FILL, RED
from distsim.output.pictures.drawing.svg import SvgDrawing, TimeChart, number_text, round_ticks
from distsim.output.trace_data.memory_over_time import (
    ActivationCurve,
    MemoryProfile,
    memory_profiles,
    representative_step,
)
from distsim.output.trace_data.selection import (
    WHOLE_RUN,
    RunSelection,
    selected_ranks,
    selection_text,
    time_window,
)
from distsim.program.model import Program
from distsim.scenario import Scenario
from distsim.trace.model import Trace

#: Panels at most; kinds of one peak share one.
MAX_PANELS = 8
_LEFT, _WIDTH, _HEIGHT, _TOP, _PITCH = 110.0, 980.0, 120.0, 118.0, 190.0
#: From the foot up, by lightness (CIE L* 37, 53, 73, 80, 89): they differ in print.
_KIND_FILLS = {
    "parameters": "#1F5A85",
    "gradients": "#C46A00",
    "optimizer": "#8FBF9F",
    "gathered": "#CFC4DE",
    "activations": "#F2DFA0",
}


def memory_svg(
    scenario: Scenario, program: Program, trace: Trace, room: int, part: RunSelection = WHOLE_RUN
) -> str:
    """The panels as SVG text; ``room``: bytes of a device. Raises UsageError where nothing is
    stated.
    """
    return _MemoryDrawing(scenario, program, trace, room, part).svg()


class _MemoryDrawing:
    def __init__(
        self, scenario: Scenario, program: Program, trace: Trace, room: int, part: RunSelection
    ) -> None:
        self.name, self.trace, self.room, self.part = program.name, trace, room, part
        self.window, self.note = time_window(part, trace, max(trace.makespan_ns, 1)), ""
        chosen = set(selected_ranks(part, trace))
        if part.steps is None and part.time is None:
            step, self.note = representative_step(trace, chosen)
            self.window = step or self.window
        stated = [one for one in peak_memory(scenario, program) if chosen & set(one.ranks)]
        if not stated:
            raise UsageError(
                "the file says nothing of memory",
                "add `memory: {model: {parameters: 2 GiB, …}}`, or let `transformer:` make it",
            )
        panels = memory_profiles(stated, trace, chosen, self.window if part.time is None else None)
        self.panels, self.left_out = panels[:MAX_PANELS], panels[MAX_PANELS:]
        self.kinds = [
            kind for kind in _KIND_FILLS if any(panel.parts.get(kind) for panel in self.panels)
        ]
        self.draw = SvgDrawing()

    # --- the page ---
    def svg(self) -> str:
        draw, top = (
            self.draw,
            1.1 * max(self.room if self._near() else 0, *(panel.total for panel in self.panels), 1),
        )
        draw.text(
            16,
            26,
            f"{clipped(self.name, 60)}: memory over {'a step' if self.note else 'the run'}",
            17,
            bold=True,
        )
        moves = any(panel.share is not None for panel in self.panels)
        said = [self.note, selection_text(self.part, self.trace.world_size)]
        grow = (
            "activations grow with forward and shrink with backward passes, "
            "all else stays at its peak"
        )
        said += [
            f"peaks as stated; {grow}"
            if moves
            else "peaks as stated, drawn as if they stayed: no passes tell when they come and go"
        ]
        said += (
            [f"{sum(len(p.ranks) for p in self.left_out)} ranks with less are not drawn"]
            if self.left_out
            else []
        )
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
        at, y = chart.legend([(_KIND_FILLS[kind], clipped(kind, 30)) for kind in self.kinds])
        words = f"the device has {show_bytes(self.room)}"
        if self._near():
            chart.line((at, y + 6), (at + 24, y + 6), RED, 2.0, dash="6 3")
            chart.text(at + 30, y + 10, words, 12)
        else:
            chart.text(at, y + 10, f"{words}: more than twice as much", 12, colour=GREY)

    def _panel(self, panel: MemoryProfile, y: float, top: float) -> None:
        draw, (start, end) = self.draw, self.window
        full = f"{100 * panel.total / self.room:.0f} % of the device" if self.room else ""
        title = f"{ranks_in_words(panel.ranks, 4)}: {show_bytes(panel.total)} at the peak, {full}"
        draw.text(16, y - 6, title, 12, bold=True)
        draw.text(
            16 + text_width(title, 12, True) + 12, y - 6, clipped(panel.name, 50), 11, colour=GREY
        )
        chart = TimeChart(_LEFT, _WIDTH, y + 8, end, start, draw)
        chart.rect(_LEFT, y + 4, _WIDTH, _HEIGHT, PALE_FILL)
        chart.axis((start + t for t in round_ticks(end - start)), y + 4 + _HEIGHT, start)
        for share in (0.0, 0.5, 1.0):
            at = y + 4 + _HEIGHT * (1 - share / 1.1)
            draw.line((_LEFT - 4, at), (_LEFT, at), LINE_COLOUR)
            draw.text(
                _LEFT - 8,
                at + 4,
                show_bytes(round(top / 1.1 * share)) if share else "0",
                11,
                anchor="end",
                colour=GREY,
            )
        self._areas(chart, panel, y + 4 + _HEIGHT, top)
        if self._near():
            at = y + 4 + _HEIGHT * (1 - self.room / top)
            draw.line((_LEFT, at), (_LEFT + _WIDTH, at), RED, 2.0, dash="6 3")

    def _areas(self, chart: TimeChart, panel: MemoryProfile, foot: float, top: float) -> None:
        """Stack the kinds of memory on each other, activations last, as a curve over time."""
        base = 0.0
        # Only activations vary over time: they are drawn last, on top of the constant kinds.
        present = [kind for kind in self.kinds if kind in panel.parts]
        for kind in present:
            if kind == "activations":
                continue
            high = panel.parts[kind] / top * _HEIGHT
            tip = f"{clipped(kind, 40)}: {show_bytes(panel.parts[kind])}"
            chart.rect(_LEFT, foot - base - high, _WIDTH, high, _KIND_FILLS[kind], tip, LINE_COLOUR)
            base += high
        most = panel.parts.get("activations", 0)
        if not most:
            return
        share = panel.share or ActivationCurve(np.array(self.window), np.ones(2))
        high = most / top * _HEIGHT
        points = [
            (chart.x(t), foot - base - s * high)
            for t, s in zip(share.at_ns.tolist(), share.share.tolist(), strict=True)
        ]
        points = _thinned_points(points)
        line = "".join(f"L{number_text(x)} {number_text(y)}" for x, y in points)
        first, last = points[0][0], points[-1][0]
        level = number_text(foot - base)
        steps = f"M{number_text(first)} {level}{line}L{number_text(last)} {level}z"
        tip = f"activations: at most {show_bytes(most)}" + (
            "" if panel.share else ", as stated: no passes tell when"
        )
        chart.path(steps, _KIND_FILLS["activations"], tip, LINE_COLOUR, 0.8)


def _thinned_points(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most the lowest and the highest point of a pixel."""
    found: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        found.setdefault(int(point[0]), []).append(point)
    kept = []
    for some in found.values():
        kept += sorted(
            {some[0], min(some, key=lambda p: p[1]), max(some, key=lambda p: p[1]), some[-1]},
            key=some.index,
        )
    return kept


def _draw(subject: PictureInput) -> str:
    if subject.scenario is None:
        raise UsageError(
            "the view memory draws what a scenario states, and a recording states nothing",
            "name a scenario",
        )
    run, cost = require_input(subject.run, "run"), require_input(subject.cost, "cost")
    return memory_svg(
        subject.scenario, run.program, run.trace, cost.cluster.device.memory_nbytes, subject.part
    )


VIEW = PictureView(
    _draw,
    formats=("svg", "png", "pdf"),
    examples=(
        GalleryExample(
            "strategies/gpt3_175b",
            "What ranks hold over a step: "
            "the first stages keep the activations of more micro-batches.",
        ),
    ),
)
