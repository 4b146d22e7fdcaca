"""The pictures of `distsim slow`: ranks × steps, the breakdown, and one step recorded and ideal.

In the heat map, the colour of a cell is the excess of a rank over its peers, as a share of the
step. A straggler is a red row; uneven work is speckled. The breakdown is a bar whose parts add up
to the step. Below, the lanes of one step show work in grey, waiting hatched, and transfers in blue.
"""

from __future__ import annotations

import numpy as np

from distsim.analysis.slow_jobs.slow_job import SlowJob
from distsim.common.units import show_ns
from distsim.output.pictures.drawing.palette import (
    BLUE,
    GREY,
    INK,
    LINE_COLOUR,
    PALE_FILL,
    WHITE,
    fill_colour,
)
from distsim.output.pictures.drawing.svg import SvgDrawing
from distsim.trace.recordings.event_graph import Numbers, Times

_LEFT, _WIDTH = 90.0, 860.0
#: Larger jobs show the ranks that cost most.
_MOST_RANKS = 32
_FULL_COLOUR_SHARE = 0.3
_ROW = 16.0
_RED_RGB = (192, 57, 43)


def slow_svg(job: SlowJob) -> str:
    """All pictures, one below the other, as SVG text."""
    draw = SvgDrawing()
    title = f"{job.verdict}: a step takes {show_ns(int(job.step_ns))}"
    facts = [job.recording.format, f"{len(job.ranks)} ranks", f"{job.counted_steps} steps"]
    draw.heading(f"distsim slow, {title}", facts)
    below = _draw_heat_map(draw, job, 80.0)
    below = _draw_breakdown(draw, job, below + 40)
    below = _draw_step(draw, job, below + 40)
    return draw.document(_LEFT + _WIDTH + 30, below + 20, title)


def _shown_positions(job: SlowJob) -> list[int]:
    """The positions of the ranks to show: all, or those that cost most."""
    by_cost = sorted(range(len(job.ranks)), key=lambda i: -job.ranks[i].cost_ns)
    return sorted(by_cost[:_MOST_RANKS])


# --- ranks × steps ---


def _draw_heat_map(draw: SvgDrawing, job: SlowJob, top: float) -> float:
    shown = _shown_positions(job)
    more = len(job.ranks) - len(shown)
    hidden = f"; {more} cheaper ranks omitted" if more else ""
    head = f"Excess over the peers, as a share of the step{hidden}"
    draw.text(16, top, head, 13, bold=True)
    steps = [name for name, used in zip(job.groups.graph.steps, job.counted, strict=True) if used]
    width = _WIDTH / max(len(steps), 1)
    for line, position in enumerate(shown):
        rank = job.ranks[position]
        y = top + 12 + line * _ROW
        draw.text(_LEFT - 8, y + 12, f"rank {rank.rank}", 11, anchor="end")
        for i, name in enumerate(steps):
            excess = rank.excess_ns[i] / job.step_ns if rank.excess_ns else 0.0
            tip = f"rank {rank.rank}, step {name}: {excess:+.1%} of a step"
            draw.rect(_LEFT + i * width, y, width, _ROW, _heat(excess), tip, WHITE)
    bottom = top + 12 + len(shown) * _ROW
    draw.text(_LEFT, bottom + 14, f"step {steps[0]}", 11, colour=GREY)
    draw.text(_LEFT + _WIDTH, bottom + 14, f"step {steps[-1]}", 11, anchor="end", colour=GREY)
    return bottom + 14


def _heat(share: float) -> str:
    """White for no excess, red from 30 % of the step on."""
    strength = min(max(share, 0.0) / _FULL_COLOUR_SHARE, 1.0)
    parts = [round(245 + (part - 245) * strength) for part in _RED_RGB]
    return "#" + "".join(f"{part:02X}" for part in parts)


# --- the breakdown ---


def _draw_breakdown(draw: SvgDrawing, job: SlowJob, top: float) -> float:
    draw.text(16, top, "Step breakdown", 13, bold=True)
    positive = [row for row in job.breakdown if row.cost_ns > 0]
    total = sum(row.cost_ns for row in positive)
    x = _LEFT
    for i, row in enumerate(positive):
        width = _WIDTH * row.cost_ns / total
        tip = f"{row.name}: {show_ns(int(row.cost_ns))} ({row.share:.0%})"
        draw.rect(x, top + 12, width, 26, fill_colour(i + 7), tip, WHITE)
        x += width
    for i, row in enumerate(positive):
        y = top + 56 + i * 16
        draw.rect(_LEFT, y - 9, 10, 10, fill_colour(i + 7))
        text = f"{row.name}: {show_ns(int(row.cost_ns))} ({row.share:.0%})"
        draw.text(_LEFT + 16, y, text, 12)
    return top + 56 + len(positive) * 16


# --- one step ---


def _draw_step(draw: SvgDrawing, job: SlowJob, top: float) -> float:
    """The counted step of median length, as recorded and without the losses."""
    step = _median_step(job)
    graph = job.groups.graph
    in_step = np.flatnonzero(graph.columns.step == step)
    ideal_start, ideal_end = graph.replay(job.ideal_own, job.ideal_gap)
    recorded = (graph.columns.start, graph.columns.end)
    name = graph.steps[step]
    length = float(np.ptp(np.concatenate([recorded[0][in_step], recorded[1][in_step]])))
    below = _draw_lanes(draw, job, in_step, recorded, length, (f"Step {name}, recorded", top))
    ideal = (f"Step {name}, ideal, on the same scale", below + 30)
    return _draw_lanes(draw, job, in_step, (ideal_start, ideal_end), length, ideal)


def _median_step(job: SlowJob) -> int:
    counted = np.flatnonzero(job.counted)
    times = job.recorded_steps_ns[counted]
    return int(counted[np.argsort(times)[(len(times) - 1) // 2]])


def _draw_lanes(
    draw: SvgDrawing,
    job: SlowJob,
    rows: Numbers,
    times: tuple[Times, Times],
    length: float,
    heading: tuple[str, float],
) -> float:
    title, top = heading
    graph = job.groups.graph
    columns = graph.columns
    start, end = times
    origin = float(start[rows].min())
    draw.text(16, top, title, 13, bold=True)
    shown = _shown_positions(job)
    for line, position in enumerate(shown):
        y = top + 12 + line * _ROW
        rank = job.groups.ranks[position]
        draw.rect(_LEFT, y, _WIDTH, _ROW - 3, PALE_FILL)
        draw.text(_LEFT - 8, y + 11, f"rank {rank}", 11, anchor="end")
        mine = rows[job.groups.rank_index[rows] == position]
        for row in mine[np.argsort(-columns.lane[mine], kind="stable")]:
            x = _LEFT + _WIDTH * (start[row] - origin) / length
            width = _WIDTH * (end[row] - start[row]) / length
            is_work = columns.meeting[row] < 0
            label = graph.labels[columns.label[row]]
            tip = f"rank {rank}, {label}: {show_ns(int(end[row] - start[row]))}"
            colour = LINE_COLOUR if is_work else BLUE
            height = _ROW - 3 if is_work else 4
            draw.rect(x, y, max(width, 0.3), height, colour, tip)
    bottom = top + 12 + len(shown) * _ROW
    key = "grey: work; blue: communication with waiting; light: idle"
    draw.text(_LEFT, bottom + 12, key, 11, colour=INK)
    return bottom + 12
