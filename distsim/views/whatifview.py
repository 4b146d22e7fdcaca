"""Answers to what if, as text: differences, speed-ups, the critical path by kind, the spread of many draws; the figures of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distsim.units import show_ns
from distsim.views.tables import cut, folded, table

if TYPE_CHECKING:
    from distsim.figures import Figures
    from distsim.whatif import Difference, KindOnPath, SpeedUp, Spread

#: Less than this share of a change is none.
_LITTLE = 0.0005


def figures_lines(found: Figures | None) -> list[str]:
    """What people look for first, in two lines."""
    if found is None:
        return []
    parts = ", ".join(f"{kind} {_percent(share)}" for kind, share in found.shares.items() if share >= _LITTLE)
    return folded(f"{found.tokens_s_gpu:.0f} tokens/s/GPU, MFU {100 * found.mfu:.1f} %; of a rank's time: {parts}")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def path_lines(rows: Sequence[KindOnPath]) -> list[str]:
    """The critical path by kind. ``slack``: how much longer such work may take on ranks off the path."""
    if not rows:
        return []
    lines = [
        (
            cut(row.kind, 34),
            show_ns(row.ns),
            _percent(row.share),
            str(row.pieces),
            "-" if row.slack_ns is None else show_ns(row.slack_ns),
        )
        for row in rows
    ]
    return ["Critical path by kind", *table(("kind", "takes", "share", "pieces", "slack elsewhere"), lines)]


def speed_lines(rows: Sequence[SpeedUp], makespan_ns: int) -> list[str]:
    """Resources by how much twice the speed would bring, the most first."""
    lines = [
        (row.resource, show_ns(row.makespan_ns), _change(row.change), _why(row))
        for row in sorted(rows, key=lambda r: (r.change, r.resource))
    ]
    head = f"Twice as fast, one at a time (now {show_ns(makespan_ns)})"
    return [head, *table(("resource", "makespan", "change", ""), lines, left=(0, 3))]


def _why(row: SpeedUp) -> str:
    return "hidden or not used" if abs(row.change) < _LITTLE else ""


def _change(change: float | None) -> str:
    return "" if change is None else f"{100 * change:+.1f} %"


def difference_lines(rows: Sequence[Difference], names: tuple[str, str]) -> list[str]:
    """One table of what two runs come to. ``names``: what is called A, the second of each row, and B, the first."""
    lines = [(cut(row.what, 40), _value(row.a, row.unit), _value(row.b, row.unit), _change(row.change)) for row in rows]
    heads = [line for letter, name in zip("AB", names, strict=True) for line in folded(f"{letter}  {name}", "", "   ")]
    return [*heads, "", *table(("", "B", "A", "change"), lines)]


def _value(value: float | str | None, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return show_ns(round(value)) if unit == "ns" else f"{100 * value:.1f} %" if unit == "%" else f"{value:.0f}"


def spread_lines(found: Spread, told: str) -> list[str]:
    """The spread of the makespan over many draws."""
    low, high = show_ns(round(found.low_ns)), show_ns(round(found.high_ns))
    mean = f"{show_ns(round(found.mean_ns))} ({100 * found.level:.0f} % sure: {low} to {high})"
    rest = f"median {show_ns(round(found.median_ns))}, 95 of 100 within {show_ns(round(found.p95_ns))}"
    ends = f"from {show_ns(found.least_ns)} to {show_ns(found.most_ns)}"
    return folded(f"{found.runs} draws{told}: mean {mean}, {rest}, {ends}")


__all__ = ["difference_lines", "figures_lines", "path_lines", "speed_lines", "spread_lines"]
