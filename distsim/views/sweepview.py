"""The points of a sweep as a table, the fastest first, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.sweep.evaluate import COLUMNS
from distsim.sweep.run import Swept, rows_in_order
from distsim.units import show_ns
from distsim.views.tables import cells, cut, folded, page_width, table

SCHEMA_VERSION = 1
#: Columns of the table behind those of the grid, from the most comfortable on.
_SHOWN = (
    ("outcome", "verdict", "makespan", "within", "tok/s/GPU", "MFU", "bubble", "memory"),
    ("outcome", "verdict", "makespan", "tok/s/GPU", "MFU", "bubble", "memory"),
    ("outcome", "verdict", "makespan", "MFU", "bubble", "memory"),
    ("outcome", "verdict", "makespan", "memory"), ("verdict", "makespan"), ("makespan",),
)  # fmt: skip
_WIDEST = 30


def sweep_text(swept: Swept, shown: int) -> str:
    """The fastest points in a table; what could not be, with its reason."""
    rows = [row for _, row in rows_in_order(swept)]
    good, refused = [r for r in rows if r["status"] == "ok"], [r for r in rows if r["status"] != "ok"]
    names = [name for name in (rows[0] if rows else ()) if name not in (*COLUMNS, "key")]
    known = f", {swept.known} known before" if swept.known else ""
    points = "1 point" if len(rows) == 1 else f"{len(rows)} points"
    head = folded(f"{points}: {len(good)} simulated, {len(refused)} can't be ({swept.computed} computed{known})")
    more = [f"  … {len(good) - shown} more …"] if len(good) > shown else []
    parts = [head, [*_table(good[:shown], names), *more] if good else [], _refused(refused, names, shown)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _table(rows: Sequence[dict[str, str]], names: Sequence[str]) -> list[str]:
    lines = [{**{name: cut(row[name], _WIDEST) for name in names}, **_cells(row)} for row in rows]
    for columns in _SHOWN:
        used = [c for c in columns if any(line[c] for line in lines)]
        found = table([*names, *used], [[line[c] for c in (*names, *used)] for line in lines], range(len(names)))
        if max(map(cells, found)) <= page_width():
            return found
    return [cut(line, page_width()) for line in found]


def _cells(row: dict[str, str]) -> dict[str, str]:
    band = f"{show_ns(int(row['low_ns']))}-{show_ns(int(row['high_ns']))}" if row["low_ns"] else ""
    found = {"outcome": row["outcome"], "verdict": row["verdict"], "makespan": show_ns(int(row["makespan_ns"])), "within": band}
    found["tok/s/GPU"] = f"{float(row['tokens_s_gpu']):.0f}" if row["tokens_s_gpu"] else ""
    return {**found, **{word: _percent(row[key]) for word, key in (("MFU", "mfu"), ("bubble", "bubble"), ("memory", "memory"))}}


def _percent(text: str) -> str:
    return f"{100 * float(text):.0f} %" if text else ""


def _refused(rows: Sequence[dict[str, str]], names: Sequence[str], shown: int) -> list[str]:
    if not rows:
        return []
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row["reason"], []).append(" ".join(f"{name}={row[name]}" for name in names))
    lines = [
        f"{'; '.join(points[:3])}{f' and {len(points) - 3} more' if len(points) > 3 else ''}: {why}"
        for why, points in reasons.items()
    ]
    more = [f"  … {len(lines) - shown} more …"] if len(lines) > shown else []
    return ["Can't be", *(line for text in lines[:shown] for line in folded(text, "  ", "    ")), *more]


def sweep_json(swept: Swept) -> dict[str, object]:
    """What `distsim sweep --format json` prints: the rows in the order of the points, numbers as such."""
    return {"schema_version": SCHEMA_VERSION, "computed": swept.computed, "known": swept.known,
            "points": [{name: _number(value) for name, value in row.items()} for row in swept.rows]}  # fmt: skip


def _number(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


__all__ = ["sweep_json", "sweep_text"]
