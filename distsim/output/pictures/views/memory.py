"""The memory of ranks over a step by kind (parameters, gradients, optimizer states, activations),
compared with the memory of the device.

A scenario states peaks (`memory:`, or its strategies). Activations grow and shrink with the passes
(`distsim.output.trace_data.memory_over_time`), and their highest point is the stated peak. The
other kinds are drawn as constant.
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
from distsim.output.pictures.drawing.svg import (
    Point,
    SvgDrawing,
    TimeChart,
    number_text,
    round_ticks,
)
from distsim.output.trace_data.lanes import representative_step
from distsim.output.trace_data.memory_over_time import (
    ActivationCurve,
    MemoryProfile,
    memory_profiles,
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

#: The largest number of panels; ranks that hold the same over time share one.
MAX_PANELS = 8
_LEFT, _WIDTH, _HEIGHT, _TOP, _PITCH = 110.0, 980.0, 120.0, 118.0, 190.0
#: The height of a panel as a multiple of the height of the highest peak.
_HEADROOM = 1.1
_CAPACITY_DASH = "6 3"
#: From the foot up, by lightness (CIE L* 37, 53, 73, 80, 89): they differ in print.
_KIND_FILLS = {
    "parameters": "#1F5A85",
    "gradients": "#C46A00",
    "optimizer": "#8FBF9F",
    "gathered": "#CFC4DE",
    "activations": "#F2DFA0",
}


def memory_svg(
    scenario: Scenario,
    program: Program,
    trace: Trace,
    capacity: int,
    part: RunSelection = WHOLE_RUN,
) -> str:
    """Draw the memory of ranks as SVG text; ``capacity``: the memory of a device, in bytes.

    Raises UsageError if the scenario states no memory.
    """
    return _MemoryDrawing(scenario, program, trace, capacity, part).svg()


class _MemoryDrawing:
    """One picture: a panel for each set of ranks that hold the same over time."""

    def __init__(
        self,
        scenario: Scenario,
        program: Program,
        trace: Trace,
        capacity: int,
        part: RunSelection,
    ) -> None:
        self.name = clipped(program.name, 60)
        self.trace = trace
        self.capacity = capacity
        self.part = part
        self.window, self.step_note = time_window(part, trace, max(trace.makespan_ns, 1)), ""
        ranks = set(selected_ranks(part, trace))
        if part.steps is None and part.time is None:
            step, self.step_note = representative_step(trace, ranks)
            self.window = step or self.window
        peaks = [peak for peak in peak_memory(scenario, program) if ranks & set(peak.ranks)]
        if not peaks:
            raise UsageError(
                "the scenario does not state any memory",
                "add `memory: {model: {parameters: 2 GiB, …}}`, or use `transformer:`",
            )
        window = self.window if part.time is None else None
        panels = memory_profiles(peaks, trace, ranks, window)
        self.panels, self.hidden_panels = panels[:MAX_PANELS], panels[MAX_PANELS:]
        self.kinds = [
            kind for kind in _KIND_FILLS if any(panel.parts.get(kind) for panel in self.panels)
        ]
        fullest = max(panel.total for panel in self.panels)
        #: The line of the device's capacity is drawn only if some rank uses half of it.
        self.shows_capacity = fullest * 2 > capacity
        #: The bytes at the top edge of every panel.
        self.scale_nbytes = _HEADROOM * max(capacity if self.shows_capacity else 0, fullest, 1)
        self.drawing = SvgDrawing()

    # --- the page ---
    def svg(self) -> str:
        subject = "a step" if self.step_note else "the run"
        self.drawing.heading(f"{self.name}: memory over {subject}", self._facts())
        self._legend()
        for number, panel in enumerate(self.panels):
            self._panel(panel, _TOP + number * _PITCH)
        bottom = _TOP + len(self.panels) * _PITCH - 20
        return self.drawing.document(_LEFT + _WIDTH + 40, bottom, f"{self.name}: memory")

    def _facts(self) -> list[str]:
        explanation = (
            "peaks from the scenario, drawn as constant: there are no forward and backward passes"
        )
        if any(panel.share is not None for panel in self.panels):
            explanation = (
                "peaks from the scenario; activations grow during forward passes and shrink during "
                "backward passes, all other memory is constant"
            )
        hidden_ranks = sum(len(panel.ranks) for panel in self.hidden_panels)
        return [
            self.step_note,
            selection_text(self.part, self.trace.world_size),
            explanation,
            f"{hidden_ranks} ranks with lower peaks are not drawn" if hidden_ranks else "",
        ]

    def _legend(self) -> None:
        chart = TimeChart(_LEFT, _WIDTH, _TOP, 1, on=self.drawing)
        x, y = chart.legend([(_KIND_FILLS[kind], clipped(kind, 30)) for kind in self.kinds])
        words = f"device memory {show_bytes(self.capacity)}"
        if self.shows_capacity:
            chart.line_key((x, y), RED, words, 2.0, dash=_CAPACITY_DASH, length=24)
        else:
            chart.text(x, y + 10, f"{words}: more than twice the peak", 12, colour=GREY)

    # --- a panel ---
    def _panel(self, panel: MemoryProfile, y: float) -> None:
        drawing, (start, end) = self.drawing, self.window
        share = (
            f"{100 * panel.total / self.capacity:.0f} % of the device memory"
            if self.capacity
            else ""
        )
        title = f"{ranks_in_words(panel.ranks, 4)}: {show_bytes(panel.total)} at the peak, {share}"
        drawing.text(16, y - 6, title, 12, bold=True)
        name_x = 16 + text_width(title, 12, True) + 12
        drawing.text(name_x, y - 6, clipped(panel.name, 50), 11, colour=GREY)
        chart = TimeChart(_LEFT, _WIDTH, y + 8, end, start, drawing)
        top, foot = y + 4, y + 4 + _HEIGHT
        chart.rect(_LEFT, top, _WIDTH, _HEIGHT, PALE_FILL)
        chart.axis((start + tick for tick in round_ticks(end - start)), foot, start)
        for share_of_peak in (0.0, 0.5, 1.0):
            self._mark_bytes(share_of_peak, foot)
        self._areas(chart, panel, foot)
        if self.shows_capacity:
            line_y = top + _HEIGHT * (1 - self.capacity / self.scale_nbytes)
            ends = (_LEFT, line_y), (_LEFT + _WIDTH, line_y)
            drawing.line(*ends, RED, 2.0, dash=_CAPACITY_DASH)

    def _mark_bytes(self, share_of_peak: float, foot: float) -> None:
        """A mark on the vertical axis."""
        y = foot - _HEIGHT * share_of_peak / _HEADROOM
        nbytes = round(self.scale_nbytes / _HEADROOM * share_of_peak)
        self.drawing.line((_LEFT - 4, y), (_LEFT, y), LINE_COLOUR)
        text = show_bytes(nbytes) if share_of_peak else "0"
        self.drawing.text(_LEFT - 8, y + 4, text, 11, anchor="end", colour=GREY)

    def _areas(self, chart: TimeChart, panel: MemoryProfile, foot: float) -> None:
        """Stack the kinds of memory on each other, activations last, as a curve over time."""
        base = 0.0
        # Only activations vary over time: they are drawn last, on top of the constant kinds.
        present = [kind for kind in self.kinds if kind in panel.parts]
        for kind in present:
            if kind == "activations":
                continue
            height = panel.parts[kind] / self.scale_nbytes * _HEIGHT
            tip = f"{clipped(kind, 40)}: {show_bytes(panel.parts[kind])}"
            y = foot - base - height
            chart.rect(_LEFT, y, _WIDTH, height, _KIND_FILLS[kind], tip, LINE_COLOUR)
            base += height
        if panel.parts.get("activations"):
            self._activations(chart, panel, foot - base)

    def _activations(self, chart: TimeChart, panel: MemoryProfile, foot: float) -> None:
        peak = panel.parts["activations"]
        constant = ActivationCurve(np.array(self.window), np.ones(2))
        curve = panel.share or constant
        height = peak / self.scale_nbytes * _HEIGHT
        instants = zip(curve.at_ns.tolist(), curve.share.tolist(), strict=True)
        points = _thinned_points([(chart.x(t), foot - share * height) for t, share in instants])
        line = "".join(f"L{number_text(x)} {number_text(y)}" for x, y in points)
        first_x, last_x, foot_y = points[0][0], points[-1][0], number_text(foot)
        steps = f"M{number_text(first_x)} {foot_y}{line}L{number_text(last_x)} {foot_y}z"
        unknown = "" if panel.share else " (constant: there are no forward and backward passes)"
        tip = f"activations: at most {show_bytes(peak)}{unknown}"
        chart.path(steps, _KIND_FILLS["activations"], tip, LINE_COLOUR, 0.8)


def _thinned_points(points: list[Point]) -> list[Point]:
    """Of the points in one pixel column, the first, the lowest, the highest and the last."""
    points_by_pixel: dict[int, list[Point]] = {}
    for point in points:
        points_by_pixel.setdefault(int(point[0]), []).append(point)
    kept: list[Point] = []
    for column in points_by_pixel.values():
        lowest, highest = min(column, key=_height_of), max(column, key=_height_of)
        kept += sorted({column[0], lowest, highest, column[-1]}, key=column.index)
    return kept


def _height_of(point: Point) -> float:
    return point[1]


def _draw(subject: PictureInput) -> str:
    if subject.scenario is None:
        raise UsageError(
            "the view memory needs a scenario: a recording does not contain memory sizes",
            "pass the scenario file",
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
            "Memory of each rank over a step: "
            "the first stages keep the activations of more micro-batches.",
        ),
    ),
)
