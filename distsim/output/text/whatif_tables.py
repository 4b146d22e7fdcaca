"""Answers to what-if questions: differences, speed-ups, the critical path by kind, the spread of
many seeds; the metrics of a training step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distsim.common.units import show_ns
from distsim.output.report_record import Column, Paragraph, Section, table_of, text_column
from distsim.output.text_layout import truncated

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


def training_metrics_text(found: TrainingMetrics | None) -> str:
    """The most wanted metrics of a training step; empty without any."""
    if found is None:
        return ""
    shares = {kind: share for kind, share in found.shares.items() if share >= _NEGLIGIBLE}
    parts = ", ".join(f"{kind} {_percent_text(share)}" for kind, share in shares.items())
    return (
        f"{_sequences_text(found.sequences)} per step; "
        f"{found.tokens_s_gpu:.0f} tokens/s/GPU, MFU {100 * found.mfu:.1f} %; "
        f"time per rank: {parts}"
    )


def _sequences_text(sequences: Sequence[tuple[int, int]]) -> str:
    """The batch, such as `8 sequences of 8192 tokens`; of several models one after the other."""
    return " and ".join(
        f"{number} sequence{'s' if number > 1 else ''} of {tokens} tokens"
        for number, tokens in sequences
    )


def _percent_text(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


_PATH_KIND_COLUMNS = [
    text_column("kind"),
    *map(Column, ("time", "share", "segments", "slack on other ranks")),
]


def path_kind_section(rows: Sequence[CriticalPathShare]) -> Section:
    """The critical path by kind.

    The slack is how much longer work of this kind may take on ranks off the path.
    """
    cells = [
        (
            truncated(row.kind, 34),
            show_ns(row.ns),
            _percent_text(row.share),
            str(row.pieces),
            "-" if row.slack_ns is None else show_ns(row.slack_ns),
        )
        for row in rows
    ]
    return Section([table_of(_PATH_KIND_COLUMNS, cells)], "Critical path by kind")


_SPEEDUP_COLUMNS = (
    text_column("resource"),
    Column("makespan"),
    Column("change"),
    text_column("note", ""),
)


def speedup_section(rows: Sequence[ResourceSpeedup], makespan_ns: int) -> Section:
    """The makespan with each resource twice as fast, the largest gain first."""
    cells = [
        (row.resource, show_ns(row.makespan_ns), _change_text(row.change), _speed_up_note(row))
        for row in sorted(rows, key=lambda r: (r.change, r.resource))
    ]
    title = f"Makespan with one resource twice as fast (now {show_ns(makespan_ns)})"
    return Section([table_of(_SPEEDUP_COLUMNS, cells)], title)


def _speed_up_note(row: ResourceSpeedup) -> str:
    return "unchanged: overlapped or unused" if abs(row.change) < _NEGLIGIBLE else ""


def _change_text(change: float | None) -> str:
    if change is None:
        return ""
    text = f"{100 * change:+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text


_DIFFERENCE_COLUMNS = (
    text_column("metric", ""),
    Column("A"),
    Column("B"),
    Column("change"),
)


def difference_sections(rows: Sequence[MetricDifference], names: tuple[str, str]) -> list[Section]:
    """The metrics of two runs in one table. ``names``: the names of runs A and B."""
    cells = [
        (
            truncated(row.what, 40),
            _value_text(row.a, row.unit),
            _value_text(row.b, row.unit),
            _change_text(row.change),
        )
        for row in rows
    ]
    heads = [
        Paragraph(f"{letter}  {name}", "", "   ") for letter, name in zip("AB", names, strict=True)
    ]
    return [Section(heads), Section([table_of(_DIFFERENCE_COLUMNS, cells)])]


def _value_text(value: float | str | None, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if unit == "ns":
        return show_ns(round(value))
    return f"{100 * value:.1f} %" if unit == "%" else f"{value:.0f}"


def spread_text(found: MakespanDistribution, causes: str) -> str:
    """The spread of the makespan over many seeds."""
    low, high = show_ns(round(found.low_ns)), show_ns(round(found.high_ns))
    interval = f"{100 * found.level:.0f} % confidence interval {low} to {high}"
    mean = f"{show_ns(round(found.mean_ns))} ({interval})"
    rest = (
        f"median {show_ns(round(found.median_ns))}, 95th percentile {show_ns(round(found.p95_ns))}"
    )
    ends = f"range {show_ns(found.least_ns)} to {show_ns(found.most_ns)}"
    return f"{found.runs} seeds{causes}: mean {mean}, {rest}, {ends}"
