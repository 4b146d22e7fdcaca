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


def sweep_text(swept: SweepResult, shown: int) -> str:
    """The fastest points in a table; what could not be, with its reason."""
    rows = [row for _, row in ranked_rows(swept)]
    good, refused = (
        [r for r in rows if r["status"] == "ok"],
        [r for r in rows if r["status"] != "ok"],
    )
    names = [name for name in (rows[0] if rows else ()) if name not in (*RESULT_COLUMNS, "key")]
    known = f", {swept.known} known before" if swept.known else ""
    points = "1 point" if len(rows) == 1 else f"{len(rows)} points"
    head = wrapped_lines(
        f"{points}: {len(good)} simulated, {len(refused)} can't be ({swept.computed} computed{known})"
    )
    more = [f"  … {len(good) - shown} more …"] if len(good) > shown else []
    parts = [
        head,
        [*_point_table(good[:shown], names), *more] if good else [],
        _failed_point_lines(refused, names, shown),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _point_table(rows: Sequence[dict[str, str]], names: Sequence[str]) -> list[str]:
    lines = [
        {**{name: truncated(row[name], _MAX_CELL_WIDTH) for name in names}, **_row_cells(row)}
        for row in rows
    ]
    for columns in _COLUMN_SETS:
        used = [c for c in columns if any(line[c] for line in lines)]
        found = table_lines(
            [*names, *used],
            [[line[c] for c in (*names, *used)] for line in lines],
            range(len(names)),
        )
        if max(map(display_width, found)) <= page_width():
            return found
    return [truncated(line, page_width()) for line in found]


def _row_cells(row: dict[str, str]) -> dict[str, str]:
    band = f"{show_ns(int(row['low_ns']))}-{show_ns(int(row['high_ns']))}" if row["low_ns"] else ""
    found = {
        "outcome": row["outcome"],
        "verdict": row["verdict"],
        "makespan": show_ns(int(row["makespan_ns"])),
        "within": band,
    }
    found["tok/s/GPU"] = f"{float(row['tokens_s_gpu']):.0f}" if row["tokens_s_gpu"] else ""
    return {
        **found,
        **{
            word: _percent_text(row[key])
            for word, key in (("MFU", "mfu"), ("bubble", "bubble"), ("memory", "memory"))
        },
    }


def _percent_text(text: str) -> str:
    return f"{100 * float(text):.0f} %" if text else ""


def _failed_point_lines(
    rows: Sequence[dict[str, str]], names: Sequence[str], shown: int
) -> list[str]:
    if not rows:
        return []
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row["reason"], []).append(
            " ".join(f"{name}={row[name]}" for name in names)
        )
    lines = [
        f"{'; '.join(points[:3])}{f' and {len(points) - 3} more' if len(points) > 3 else ''}: {why}"
        for why, points in reasons.items()
    ]
    more = [f"  … {len(lines) - shown} more …"] if len(lines) > shown else []
    return [
        "Can't be",
        *(line for text in lines[:shown] for line in wrapped_lines(text, "  ", "    ")),
        *more,
    ]


def sweep_json(swept: SweepResult) -> dict[str, object]:
    """What `distsim sweep --format json` prints: the rows in the order of the points, numbers as
    such.
    """
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
