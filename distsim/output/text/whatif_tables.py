"""Answers to what if, as text: differences, speed-ups, the critical path by kind, the spread of
many draws; the figures of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distsim.common.units import show_ns
from distsim.output.text_layout import table_lines, truncated, wrapped_lines

if TYPE_CHECKING:
    from distsim.simulation.training_metrics import TrainingMetrics
    from distsim.simulation.what_if import (
        CriticalPathShare,
        MakespanDistribution,
        MetricDifference,
        ResourceSpeedup,
    )

#: Less than this share of a change is none.
_NEGLIGIBLE = 0.0005


def figures_lines(found: TrainingMetrics | None) -> list[str]:
    """The most wanted metrics of a training step, in two lines."""
    if found is None:
        return []
    shares = {kind: share for kind, share in found.shares.items() if share >= _NEGLIGIBLE}
    parts = ", ".join(f"{kind} {_percent_text(share)}" for kind, share in shares.items())
    return wrapped_lines(
        f"{found.tokens_s_gpu:.0f} tokens/s/GPU, MFU {100 * found.mfu:.1f} %; "
        f"of a rank's time: {parts}"
    )


def _percent_text(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def path_kind_lines(rows: Sequence[CriticalPathShare]) -> list[str]:
    """The critical path by kind. ``slack``: how much longer such work may take on ranks off the
    path.
    """
    if not rows:
        return []
    lines = [
        (
            truncated(row.kind, 34),
            show_ns(row.ns),
            _percent_text(row.share),
            str(row.pieces),
            "-" if row.slack_ns is None else show_ns(row.slack_ns),
        )
        for row in rows
    ]
    return [
        "Critical path by kind",
        *table_lines(("kind", "takes", "share", "pieces", "slack elsewhere"), lines),
    ]


def speed_up_lines(rows: Sequence[ResourceSpeedup], makespan_ns: int) -> list[str]:
    """Resources by how much twice the speed would bring, the most first."""
    lines = [
        (row.resource, show_ns(row.makespan_ns), _change_text(row.change), _speed_up_note(row))
        for row in sorted(rows, key=lambda r: (r.change, r.resource))
    ]
    head = f"Twice as fast, one at a time (now {show_ns(makespan_ns)})"
    return [head, *table_lines(("resource", "makespan", "change", ""), lines, left=(0, 3))]


def _speed_up_note(row: ResourceSpeedup) -> str:
    return "hidden or not used" if abs(row.change) < _NEGLIGIBLE else ""


def _change_text(change: float | None) -> str:
    return "" if change is None else f"{100 * change:+.1f} %"


def difference_lines(rows: Sequence[MetricDifference], names: tuple[str, str]) -> list[str]:
    """One table of what two runs come to. ``names``: what is called A, the second of each row, and
    B, the first.
    """
    lines = [
        (
            truncated(row.what, 40),
            _value_text(row.a, row.unit),
            _value_text(row.b, row.unit),
            _change_text(row.change),
        )
        for row in rows
    ]
    heads = [
        line
        for letter, name in zip("AB", names, strict=True)
        for line in wrapped_lines(f"{letter}  {name}", "", "   ")
    ]
    return [*heads, "", *table_lines(("", "B", "A", "change"), lines)]


def _value_text(value: float | str | None, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return (
        show_ns(round(value))
        if unit == "ns"
        else f"{100 * value:.1f} %"
        if unit == "%"
        else f"{value:.0f}"
    )


def spread_lines(found: MakespanDistribution, told: str) -> list[str]:
    """The spread of the makespan over many draws."""
    low, high = show_ns(round(found.low_ns)), show_ns(round(found.high_ns))
    mean = f"{show_ns(round(found.mean_ns))} ({100 * found.level:.0f} % sure: {low} to {high})"
    rest = (
        f"median {show_ns(round(found.median_ns))}, 95 of 100 within {show_ns(round(found.p95_ns))}"
    )
    ends = f"from {show_ns(found.least_ns)} to {show_ns(found.most_ns)}"
    return wrapped_lines(f"{found.runs} draws{told}: mean {mean}, {rest}, {ends}")


__all__ = ["difference_lines", "figures_lines", "path_kind_lines", "speed_up_lines", "spread_lines"]
