"""What the tensors hold at the end of a run, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distsim.output.report_record import RowLimit, Table, TableLayout, text_column
from distsim.output.text_layout import ranks_label

if TYPE_CHECKING:
    from distsim.values.buffer_values import BufferValues

_COLUMNS = (text_column("tensor"), text_column("value"))
_LAYOUTS = (TableLayout(("tensor", "value"), {"tensor": 24}),)
_MOST_ROWS = RowLimit(24, text="… and {hidden} more; --format json has all")


def values_table(values: BufferValues | None) -> Table:
    """A row for each tensor and each set of ranks with equal values.

    Tensors whose numbers are unknown on all ranks are omitted.
    """
    by_label: dict[str, dict[str, list[int]]] = {}
    final = {} if values is None else values.final
    for (rank, label), text in final.items():
        by_label.setdefault(label, {}).setdefault(text, []).append(rank)
    rows = []
    for label, ranks_by_text in by_label.items():
        if set(ranks_by_text) == {"?"}:
            continue
        # The label is printed once, in the first row of its tensor.
        cell = label
        for text, ranks in ranks_by_text.items():
            rows.append({"tensor": cell, "value": f"{text}  ({ranks_label(ranks)})"})
            cell = ""
    return Table(_COLUMNS, rows, _LAYOUTS, _MOST_ROWS, has_header=False)
