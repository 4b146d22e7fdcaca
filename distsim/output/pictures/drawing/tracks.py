"""Tracks to scale: spans wider than a pixel are drawn as they are, narrower ones as density.

A column of density is filled from its foot, to the share of its time that the spans cover. A track
that communicates 0.7 % of the time is therefore covered to 0.7 % of its area, whatever the number
of transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.output.pictures.drawing.svg import TimeChart, number_text
from distsim.output.trace_data.time_spans import (
    TimeSpans,
    covered_shares,
    merged_spans,
    spans_within,
)

Floats = NDArray[np.float64]

#: Spans narrower than this, in pixels, are drawn as density.
MIN_SPAN_WIDTH = 1.5


class TrackLayer(NamedTuple):
    """A fill and its spans of time. Layers of one track do not overlap."""

    fill: str
    spans: TimeSpans


class TrackBand(NamedTuple):
    """The vertical place of a track, in pixels."""

    y: float
    height: float


def draw_layers(
    chart: TimeChart,
    band: TrackBand,
    layers: Sequence[TrackLayer],
    ranks: int = 1,
    column: float = 1.0,
) -> None:
    """Draw the layers of one rank as they are, and those of several ranks as their mean density."""
    if ranks == 1:
        draw_track(chart, band, layers, column)
        return
    edges = density_edges(chart, max(column, 2.0))
    parts = [(layer.fill, covered_shares(layer.spans, edges, ranks)) for layer in layers]
    draw_density(chart, band, edges, parts)


def draw_track(
    chart: TimeChart, band: TrackBand, layers: Sequence[TrackLayer], column: float = 1.0
) -> None:
    """Draw the layers; ``column``: the width of a column of density, in pixels."""
    scale = chart.width / (chart.end_ns - chart.start_ns)
    inside = [
        merged_spans(spans_within(layer.spans, chart.start_ns, chart.end_ns)) for layer in layers
    ]
    small: list[TimeSpans] = []
    wide: list[TimeSpans] = []
    for layer, spans in zip(layers, inside, strict=True):
        large = (spans.ends - spans.starts) * scale >= MIN_SPAN_WIDTH
        for start, end in zip(
            spans.starts[large].tolist(), spans.ends[large].tolist(), strict=True
        ):
            x = chart.x(start)
            chart.rect(x, band.y, chart.x(end) - x, band.height, layer.fill)
        wide.append(TimeSpans(spans.starts[large], spans.ends[large]))
        small.append(TimeSpans(spans.starts[~large], spans.ends[~large]))
    if any(len(spans.starts) for spans in small):
        edges = _density_edges_around(chart, wide, column)
        draw_density(
            chart,
            band,
            edges,
            [
                (layer.fill, covered_shares(s, edges))
                for layer, s in zip(layers, small, strict=True)
            ],
        )


def density_edges(chart: TimeChart, column: float = 1.0) -> Floats:
    """The instants at which columns of density begin and end."""
    count = max(round(chart.width / column), 1)
    return np.linspace(chart.start_ns, chart.end_ns, count + 1)


def _density_edges_around(chart: TimeChart, wide: Sequence[TimeSpans], column: float) -> Floats:
    """The edges of columns, with the sides of wide spans added: no column crosses such a side."""
    sides = [side for spans in wide for side in spans]
    return np.unique(
        np.concatenate([density_edges(chart, column), *(side.astype(float) for side in sides)])
    )


def draw_density(
    chart: TimeChart, band: TrackBand, edges: Floats, parts: Sequence[tuple[str, Floats]]
) -> None:
    """Stack the fills in each column, each as high as its share, from the foot of the track."""
    xs = chart.left + chart.width * (edges - chart.start_ns) / (chart.end_ns - chart.start_ns)
    top = np.cumsum([share for _, share in parts], axis=0)
    for place, (fill, share) in reversed(list(enumerate(parts))):
        steps = _skyline_path(xs, top[place] * (share > 0), band) if share.any() else ""
        if steps:
            chart.path(steps, fill)


def _skyline_path(xs: Floats, share: Floats, band: TrackBand) -> str:
    """The outline of adjacent bars; equal neighbours are joined."""
    heights = np.round(np.where(np.diff(xs) > 0, share * band.height, 0.0), 3)
    change = np.flatnonzero(np.concatenate([[True], np.diff(heights) != 0]))
    starts, tall = xs[:-1][change], heights[change]
    ends = np.concatenate([starts[1:], xs[-1:]])
    foot, parts, at = band.y + band.height, [], 0.0
    for begin, end, high in zip(starts.tolist(), ends.tolist(), tall.tolist(), strict=True):
        if high <= 0:
            if at:
                parts.append("V" + number_text(foot) + "z")
            at = 0.0
            continue
        if not at:
            parts.append(f"M{number_text(begin)} {number_text(foot)}")
        parts.append(f"V{_number_3_decimals(foot - high)}H{number_text(end)}")
        at = high
    if at:
        parts.append("V" + number_text(foot) + "z")
    return "".join(parts)


def _number_3_decimals(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")
