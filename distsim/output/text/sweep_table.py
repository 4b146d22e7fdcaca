"""The points of a sweep as a table, the fastest first, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence

from distsim.common.units import show_ns, show_ns_range
from distsim.output.report_record import (
    Column,
    Paragraph,
    Report,
    Section,
    Table,
    TableLayout,
    paragraphs,
    text_column,
)
from distsim.output.report_text import write_text
from distsim.planning.sweep.evaluate_point import RESULT_COLUMNS
from distsim.planning.sweep.run_sweep import SweepResult, ranked_rows

SCHEMA_VERSION = 1
#: Columns whose cells stay texts in JSON.
_TEXT_COLUMNS = ("key", "status", "outcome", "verdict", "findings", "reason")
#: Columns of the table after those of the grid, from wide to narrow.
_COLUMN_SETS = (
    ("outcome", "verdict", "makespan", "range", "tok/s/GPU", "MFU", "bubble", "memory"),
    ("outcome", "verdict", "makespan", "tok/s/GPU", "MFU", "bubble", "memory"),
    ("outcome", "verdict", "makespan", "MFU", "bubble", "memory"),
    ("outcome", "verdict", "makespan", "memory"),
    ("verdict", "makespan"),
    ("makespan",),
)
_MAX_CELL_WIDTH = 30
_MAX_POINTS_OF_REASON = 3


def sweep_text(swept: SweepResult, shown: int) -> str:
    """The whole report as text."""
    return write_text(sweep_report(swept, shown))


def sweep_report(swept: SweepResult, shown: int) -> Report:
    """The fastest points in a table, and the points that failed, with their reasons."""
    rows = [row for _, row in ranked_rows(swept)]
    simulated = [row for row in rows if row["status"] == "ok"]
    failed = [row for row in rows if row["status"] != "ok"]
    # What is no column of results is a variable of the grid.
    columns = rows[0] if rows else {}
    variables = [name for name in columns if name not in (*RESULT_COLUMNS, "key")]
    points = "1 point" if len(rows) == 1 else f"{len(rows)} points"
    known = f" ({swept.known} taken from the output file)" if swept.known else ""
    head = f"{points}: {len(simulated)} simulated{known}, {len(failed)} failed"
    table = _point_table(simulated[:shown], variables)
    return Report(
        [
            Section([Paragraph(head)]),
            Section([table, Paragraph(_more_text(len(simulated) - shown), "  ")]),
            _failed_point_section(failed, variables, shown),
        ]
    )


def _more_text(hidden: int) -> str:
    return f"… {hidden} more …" if hidden > 0 else ""


def _point_table(rows: Sequence[dict[str, str]], names: Sequence[str]) -> Table:
    """The variables of the grid and the results; columns without any value are omitted."""
    cells = [{**{name: row[name] for name in names}, **_row_cells(row)} for row in rows]
    results = [key for key in _COLUMN_SETS[0] if any(row[key] for row in cells)]
    columns = [*map(text_column, names), *map(Column, results)]
    widths = dict.fromkeys(names, _MAX_CELL_WIDTH)
    layouts = [TableLayout((*names, *keys), widths) for keys in _COLUMN_SETS]
    return Table(columns, cells, layouts)


def _row_cells(row: dict[str, str]) -> dict[str, str]:
    """The cells of a point by their titles; empty for what is not known."""
    range_text = ""
    if row["low_ns"]:
        range_text = show_ns_range(int(row["low_ns"]), int(row["high_ns"]))
    return {
        "outcome": row["outcome"],
        "verdict": row["verdict"],
        "makespan": show_ns(int(row["makespan_ns"])),
        "range": range_text,
        "tok/s/GPU": f"{float(row['tokens_s_gpu']):.0f}" if row["tokens_s_gpu"] else "",
        "MFU": _percent_text(row["mfu"]),
        "bubble": _percent_text(row["bubble"]),
        "memory": _percent_text(row["memory"]),
    }


def _percent_text(text: str) -> str:
    return f"{100 * float(text):.0f} %" if text else ""


def _failed_point_section(
    rows: Sequence[dict[str, str]], names: Sequence[str], shown: int
) -> Section:
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
    more = Paragraph(_more_text(len(texts) - shown), "  ")
    return Section([*paragraphs(texts[:shown], "  ", "    "), more], "Failed points")


def sweep_json(swept: SweepResult) -> dict[str, object]:
    """The output of `distsim sweep --format json`: the rows in the order of the points."""
    return {
        "schema_version": SCHEMA_VERSION,
        "computed": swept.computed,
        "known": swept.known,
        "points": [
            {name: _cell_json(name, text) for name, text in row.items()} for row in swept.rows
        ],
    }


def _cell_json(column: str, text: str) -> object:
    """The value of a cell; a point's key stays a text if it has only digits."""
    if column in _TEXT_COLUMNS:
        return text or None
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        # JSON has no infinity and no NaN. They stay texts, as the user wrote them.
        return number if math.isfinite(number) else text
    return text or None
