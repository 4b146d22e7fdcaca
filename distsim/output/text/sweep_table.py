"""The points of a sweep as a table, the fastest first, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.common.units import show_ns
from distsim.output.text_layout import (
    display_width,
    page_width,
    table_lines,
    truncated,
    wrapped_lines,
)
from distsim.planning.sweep.evaluate_point import RESULT_COLUMNS
from distsim.planning.sweep.run_sweep import SweepResult, ranked_rows

SCHEMA_VERSION = 1
#: Columns of the table behind those of the grid, from the most comfortable on.
_COLUMN_SETS = (
    ("outcome", "verdict", "makespan", "within", "tok/s/GPU", "MFU", "bubble", "memory"),
    ("outcome", "verdict", "makespan", "tok/s/GPU", "MFU", "bubble", "memory"),
    ("outcome", "verdict", "makespan", "MFU", "bubble", "memory"),
    ("outcome", "verdict", "makespan", "memory"),
    ("verdict", "makespan"),
    ("makespan",),
)
_MAX_CELL_WIDTH = 30
_MAX_POINTS_OF_REASON = 3


def sweep_text(swept: SweepResult, shown: int) -> str:
    """The fastest points in a table, and the points that failed, with their reasons."""
    rows = [row for _, row in ranked_rows(swept)]
    simulated = [row for row in rows if row["status"] == "ok"]
    failed = [row for row in rows if row["status"] != "ok"]
    # What is no column of results is a variable of the grid.
    columns = rows[0] if rows else {}
    variables = [name for name in columns if name not in (*RESULT_COLUMNS, "key")]
    points = "1 point" if len(rows) == 1 else f"{len(rows)} points"
    known = f", {swept.known} known before" if swept.known else ""
    sections = [
        wrapped_lines(
            f"{points}: {len(simulated)} simulated, {len(failed)} can't be "
            f"({swept.computed} computed{known})"
        )
    ]
    if simulated:
        table = _point_table(simulated[:shown], variables)
        if len(simulated) > shown:
            table.append(f"  … {len(simulated) - shown} more …")
        sections.append(table)
    if failed:
        sections.append(_failed_point_lines(failed, variables, shown))
    return "\n\n".join("\n".join(lines) for lines in sections)


def _point_table(rows: Sequence[dict[str, str]], names: Sequence[str]) -> list[str]:
    """The widest table that fits the page; columns without any value are omitted."""
    lines = []
    for row in rows:
        variables = {name: truncated(row[name], _MAX_CELL_WIDTH) for name in names}
        lines.append({**variables, **_row_cells(row)})
    for columns in _COLUMN_SETS:
        used = [c for c in columns if any(line[c] for line in lines)]
        header = [*names, *used]
        body = [[line[c] for c in header] for line in lines]
        table = table_lines(header, body, range(len(names)))
        if max(map(display_width, table)) <= page_width():
            return table
    return [truncated(line, page_width()) for line in table]


def _row_cells(row: dict[str, str]) -> dict[str, str]:
    """The cells of a point by their titles; empty for what is not known."""
    range_text = ""
    if row["low_ns"]:
        range_text = f"{show_ns(int(row['low_ns']))}-{show_ns(int(row['high_ns']))}"
    return {
        "outcome": row["outcome"],
        "verdict": row["verdict"],
        "makespan": show_ns(int(row["makespan_ns"])),
        "within": range_text,
        "tok/s/GPU": f"{float(row['tokens_s_gpu']):.0f}" if row["tokens_s_gpu"] else "",
        "MFU": _percent_text(row["mfu"]),
        "bubble": _percent_text(row["bubble"]),
        "memory": _percent_text(row["memory"]),
    }


def _percent_text(text: str) -> str:
    return f"{100 * float(text):.0f} %" if text else ""


def _failed_point_lines(
    rows: Sequence[dict[str, str]], names: Sequence[str], shown: int
) -> list[str]:
    """Each reason once, with the first points that failed for it."""
    points_by_reason: dict[str, list[str]] = {}
    for row in rows:
        point = " ".join(f"{name}={row[name]}" for name in names)
        points_by_reason.setdefault(row["reason"], []).append(point)
    texts = []
    for reason, points in points_by_reason.items():
        text = "; ".join(points[:_MAX_POINTS_OF_REASON])
        hidden = len(points) - _MAX_POINTS_OF_REASON
        if hidden > 0:
            text += f" and {hidden} more"
        texts.append(f"{text}: {reason}")
    lines = ["Can't be"]
    for text in texts[:shown]:
        lines += wrapped_lines(text, "  ", "    ")
    if len(texts) > shown:
        lines.append(f"  … {len(texts) - shown} more …")
    return lines


def sweep_json(swept: SweepResult) -> dict[str, object]:
    """The output of `distsim sweep --format json`: the rows in the order of the points."""
    return {
        "schema_version": SCHEMA_VERSION,
        "computed": swept.computed,
        "known": swept.known,
        "points": [
            {name: _parsed_value(value) for name, value in row.items()} for row in swept.rows
        ],
    }


def _parsed_value(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


__all__ = ["sweep_json", "sweep_text"]
