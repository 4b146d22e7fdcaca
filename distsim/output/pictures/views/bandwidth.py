"""Bandwidth by message size: the prediction for each collective of a scenario with its range, the
calls of the run, and measured times.

algbw is the buffer size divided by the time; busbw multiplies it by the factor of nccl-tests
(doc/PERFORMANCE.md). 90 % of measured times are in the range
(`distsim.hardware.cost.prediction_range`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import ceil, log10
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.analysis.timeline import collective_times
from distsim.common.errors import UsageError
from distsim.common.units import show_bytes, show_ns
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.nccl_placement import context_of_group
from distsim.hardware.cost.prediction_range import PredictionRange, range_of_prediction
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.resolved_call import RankGroup
from distsim.operations.registry import OPERATIONS
from distsim.output.pictures.components.view_interface import (
    GalleryExample,
    OperationMeasurement,
    PictureInput,
    PictureView,
    require_input,
)
from distsim.output.pictures.drawing.box_diagram import clipped, text_width
from distsim.output.pictures.drawing.palette import GREY, INK, LINE_COLOUR, PALE_FILL
from distsim.output.pictures.drawing.svg import SvgDrawing, number_text
from distsim.output.trace_data.selection import group_ids_named
from distsim.trace.model import Trace

#: The largest number of panels.
MAX_PANELS = 6
_WIDTH, _HEIGHT, _LEFT, _PITCH_X, _PITCH_Y, _TOP = 430.0, 230.0, 70.0, 560.0, 330.0, 112.0
_BUSBW_COLOUR, _ALGBW_COLOUR, _RANGE_FILL, _DOT_COLOUR = "#0B4F79", "#C2500A", "#CFE3F1", INK
_MIN_SIZE_LOG2 = 10


class _BandwidthCurve(NamedTuple):
    """The content of a panel: one collective in groups of one placement. Rates are in GB/s.

    Groups with the same number of ranks on the same number of nodes in the same order have one
    placement: the links that they use, and therefore their bandwidth, are the same.
    """

    op: str
    group: RankGroup
    nodes: int
    sizes: NDArray[np.int64]
    alg: NDArray[np.float64]
    bands: tuple[PredictionRange, ...]
    used: tuple[tuple[int, float], ...]  # (bytes, algbw) of the calls of the run
    measured: tuple[tuple[int, float], ...]

    @property
    def row(self) -> type[Operation]:
        return OPERATIONS[self.op]

    @property
    def factor(self) -> float:
        return self.row.busbw_factor(self.group.size)


def bandwidth_svg(
    name: str,
    cost: CostModel,
    trace: Trace,
    groups: Sequence[RankGroup],
    measured: Sequence[OperationMeasurement] = (),
) -> str:
    """Draw the panels as SVG text. Raises UsageError if no collective of the run moves data."""
    curves = _bandwidth_curves(cost, trace, groups, measured)
    if not curves:
        raise UsageError(
            "no collective of this run moves data",
            "use --view timeline, which draws messages",
        )
    draw, shown = SvgDrawing(), curves[:MAX_PANELS]
    draw.text(16, 26, f"{clipped(name, 60)}: bandwidth by message size", 17, bold=True)
    more = (
        f"; {len(curves) - len(shown)} more collectives are not drawn; select with --group"
        if len(curves) > len(shown)
        else ""
    )
    draw.text(
        16, 46, f"predicted by the cost model {clipped(cost.name, 40)}{more}", 12, colour=GREY
    )
    right = _draw_legend(draw, shown)
    columns = min(len(shown), 2)
    for place, curve in enumerate(shown):
        _BandwidthPanel(
            draw, curve, _LEFT + place % columns * _PITCH_X, _TOP + place // columns * _PITCH_Y
        ).draw()
    wide = _LEFT + (columns - 1) * _PITCH_X + _WIDTH + 60
    bottom = _TOP + (ceil(len(shown) / columns) - 1) * _PITCH_Y + _HEIGHT + 60
    return draw.document(max(wide, right), bottom, f"{clipped(name, 60)}: bandwidth")


def _draw_legend(draw: SvgDrawing, curves: Sequence[_BandwidthCurve]) -> float:
    at, has_bus = 16.0, any(c.factor not in (0.0, 1.0) for c in curves)
    for colour, dash, words in ((_BUSBW_COLOUR, "", "busbw"), (_ALGBW_COLOUR, "6 3", "algbw")):
        if words == "algbw" or has_bus:
            draw.line((at, 68), (at + 24, 68), colour, 2.4, dash=dash)
            draw.text(at + 30, 72, words, 12)
            at += 30 + text_width(words, 12) + 18
    if any(c.bands for c in curves):
        draw.rect(at, 62, 24, 12, _RANGE_FILL, border=LINE_COLOUR)
        words = "range of 90 % of measured times"
        draw.text(at + 30, 72, words, 12)
        at += 30 + text_width(words, 12) + 18
    for kind, words in (("used", "calls of this run"), ("measured", "measured")):
        if any(getattr(c, kind) for c in curves):
            _draw_marker(draw, at + 8, 68, kind)
            draw.text(at + 20, 72, words, 12)
            at += 20 + text_width(words, 12) + 18
    return at


def _draw_marker(draw: SvgDrawing, x: float, y: float, kind: str, tip: str = "") -> None:
    """A dot for a call of the run, a cross for a measurement."""
    if kind == "used":
        draw.circle(x, y, 4, _DOT_COLOUR, tip, "#FFFFFF")
    else:
        draw.path(
            f"M{number_text(x - 4)} {number_text(y - 4)}l8 8m0 -8l-8 8", "", tip, _DOT_COLOUR, 1.8
        )


def _bandwidth_curves(
    cost: CostModel,
    trace: Trace,
    groups: Sequence[RankGroup],
    measured: Sequence[OperationMeasurement],
) -> list[_BandwidthCurve]:
    """One for each collective and placement of its group, in the order in which they first
    start.
    """
    by_name = {group.name: group for group in groups}
    used: dict[tuple[str, int, Hashable], list[tuple[int, float, RankGroup]]] = {}
    for found in collective_times(trace):
        group = by_name.get(found.group)
        if group is not None and found.nbytes and found.n > 1:
            key = (found.op, found.n, cost.placement(group.ranks))
            used.setdefault(key, []).append((found.nbytes, found.algbw, group))
    curves = []
    for (op, n, _), calls in used.items():
        group = calls[0][2]
        comparable = [m for m in measured if (m.op, m.group) == (op, n)]
        points = [(m.nbytes, m.nbytes / m.ns) for m in comparable if m.ns > 0 < m.nbytes]
        sent = [nbytes for nbytes, *_ in calls] + [nbytes for nbytes, _ in points]
        top = max(30, *(int(nbytes).bit_length() for nbytes in sent))
        sizes = 2 ** np.arange(_MIN_SIZE_LOG2, min(top, 40) + 1, dtype=np.int64)
        times = cost.collectives_ns(OPERATIONS[op], group.ranks, sizes)
        at = context_of_group(cost.cluster, cost.placement(group.ranks)) if cost.nccl else None
        bands: tuple[PredictionRange, ...] = ()
        if at is not None and not cost.cluster.measured:
            bands = tuple(range_of_prediction(at, int(size)) for size in sizes)
        dots = tuple(dict.fromkeys((nbytes, rate) for nbytes, rate, _ in calls if rate > 0))
        curves.append(
            _BandwidthCurve(
                op,
                group,
                len({cost.node(rank) for rank in group.ranks}),
                sizes,
                sizes / np.maximum(times, 1),
                bands,
                dots,
                tuple(points),
            )
        )
    return curves


class _BandwidthPanel:
    """One collective: size to the right in powers, GB/s upwards."""

    def __init__(self, draw: SvgDrawing, curve: _BandwidthCurve, left: float, top: float) -> None:
        self.draw_, self.curve, self.left, self.top = draw, curve, left, top
        rates = [float(curve.alg.max()), *(rate for _, rate in (*curve.used, *curve.measured))]
        widest = 1 / min((band.low for band in curve.bands), default=1.0)
        self.most = _round_up(max(rates) * max(curve.factor, 1.0) * min(widest, 1.6))

    def x(self, nbytes: float) -> float:
        low, high = np.log2(self.curve.sizes[0]), np.log2(self.curve.sizes[-1])
        return self.left + _WIDTH * float(
            (np.log2(max(nbytes, 2**_MIN_SIZE_LOG2)) - low) / (high - low)
        )

    def y(self, rate: float) -> float:
        return self.top + _HEIGHT * (1 - min(rate / self.most, 1.0))

    def draw(self) -> None:
        curve, draw = self.curve, self.draw_
        nodes = "1 node" if curve.nodes == 1 else f"{curve.nodes} nodes"
        where = f"{curve.op}, {curve.group.size} ranks on {nodes}: {clipped(curve.group.name, 22)}"
        draw.text(self.left, self.top - 12, where, 13, bold=True)
        draw.rect(self.left, self.top, _WIDTH, _HEIGHT, PALE_FILL)
        self._axes()
        scale = curve.factor or 1.0
        if curve.bands:
            high = [
                self._at(s, scale * a / b.low)
                for s, a, b in zip(curve.sizes, curve.alg, curve.bands, strict=True)
            ]
            low = [
                self._at(s, scale * a / b.high)
                for s, a, b in zip(curve.sizes, curve.alg, curve.bands, strict=True)
            ]
            draw.path("M" + "L".join([*high, *reversed(low)]) + "z", _RANGE_FILL)
        if scale != 1.0:
            draw.path(
                "M"
                + "L".join(
                    self._at(s, scale * a) for s, a in zip(curve.sizes, curve.alg, strict=True)
                ),
                "",
                "",
                _BUSBW_COLOUR,
                2.4,
            )
        draw.path(
            "M" + "L".join(self._at(s, a) for s, a in zip(curve.sizes, curve.alg, strict=True)),
            "",
            "",
            _ALGBW_COLOUR,
            2.0,
            "6 3",
        )
        for kind, dots in (("measured", curve.measured), ("used", curve.used)):
            for nbytes, rate in dots:
                rates = f"algbw {rate:.3g} GB/s, busbw {rate * scale:.3g} GB/s"
                tip = f"{show_bytes(nbytes)}: {rates}, {show_ns(round(nbytes / rate))}"
                _draw_marker(draw, self.x(nbytes), self.y(rate * scale), kind, tip)

    def _at(self, nbytes: float, rate: float) -> str:
        return f"{number_text(self.x(nbytes))} {number_text(self.y(rate))}"

    def _axes(self) -> None:
        draw, bottom = self.draw_, self.top + _HEIGHT
        for k in range(6):
            rate = self.most * k / 5
            draw.line((self.left, self.y(rate)), (self.left + _WIDTH, self.y(rate)), "#DDE1E6")
            draw.text(self.left - 6, self.y(rate) + 4, f"{rate:.3g}", 11, anchor="end", colour=GREY)
        draw.text(self.left - 6, self.top - 12, "GB/s", 11, anchor="end", colour=GREY)
        for size in self.curve.sizes.tolist()[::5]:
            draw.line((self.x(size), self.top), (self.x(size), bottom), "#DDE1E6")
            draw.text(self.x(size), bottom + 18, show_bytes(size), 11, anchor="middle", colour=GREY)


def _round_up(rate: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    if rate <= 0:
        return 1.0
    power = 10.0 ** np.floor(log10(rate))
    return float(
        next(power * step for step in (1.0, 2.0, 2.5, 5.0, 10.0) if power * step >= rate * 0.999)
    )


def _draw(subject: PictureInput) -> str:
    program, run, cost = (
        require_input(subject.program, "program"),
        require_input(subject.run, "run"),
        require_input(subject.cost, "cost"),
    )
    groups = list(program.groups)
    if subject.part.group is not None:
        chosen = group_ids_named(subject.part.group, run.trace)
        groups = [group for group in groups if group.id in chosen]
    return bandwidth_svg(program.name, cost, run.trace, groups, subject.measured)


VIEW = PictureView(
    _draw,
    uses=("cost",),
    formats=("svg", "png", "pdf"),
    examples=(
        GalleryExample(
            "strategies/gpt3_175b",
            "Predicted bandwidth of all_reduce by message size, within a node and across nodes, "
            "with the calls of the run.",
        ),
    ),
)
