"""A `Report` as plain text, laid out for the width of the page.

All decisions about columns, wrapping and empty lines are made here; views only build the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distsim.output.report_record import Paragraph, Report, Section, Table, TableLayout, Verbatim
from distsim.output.text_layout import (
    display_width,
    page_width,
    table_lines,
    truncated,
    wrapped_lines,
)


def write_text(report: Report) -> str:
    """The sections, separated by empty lines."""
    text = ""
    last_was_one_line_item = False
    for section in report.sections:
        lines = _section_lines(section)
        if not lines:
            continue
        is_one_line_item = section.is_list_item and len(lines) == 1
        if text:
            text += "\n" if is_one_line_item and last_was_one_line_item else "\n\n"
        text += "\n".join(lines)
        last_was_one_line_item = is_one_line_item
    return text


def _section_lines(section: Section) -> list[str]:
    lines: list[str] = []
    for block in section.blocks:
        if isinstance(block, Paragraph):
            lines += wrapped_lines(block.text, block.indent, block.further)
        elif isinstance(block, Verbatim):
            lines += block.lines
        else:
            lines += _table_block_lines(block)
    return [*wrapped_lines(section.title), *lines] if lines else []


# --- tables ---


def _table_block_lines(table: Table) -> list[str]:
    """The lines of a table in the first layout that fits the page; none without rows."""
    if not table.rows:
        return []
    if not table.layouts:
        all_columns = TableLayout([column.key for column in table.columns])
        return _finished_lines(table, _laid_out_lines(table, all_columns))
    for layout in table.layouts:
        lines = _laid_out_lines(table, layout)
        if _excess_width(lines.all) <= 0:
            return [*_finished_lines(table, lines), *_hidden_note_lines(table, layout)]
    cut = [truncated(line, page_width()) for line in _finished_lines(table, lines)]
    return [*cut, *_hidden_note_lines(table, table.layouts[-1])]


def _hidden_note_lines(table: Table, layout: TableLayout) -> list[str]:
    """The note about the columns that a layout lacks; none if it has all of them."""
    widest = table.layouts[0]
    hidden = [key for key in widest.columns if key not in layout.columns]
    if not table.hidden_note or not hidden:
        return []
    width = page_width() + _excess_width(_laid_out_lines(table, widest).all)
    return wrapped_lines(table.hidden_note.format(columns=", ".join(hidden), width=width), "  ")


class _TableLines(NamedTuple):
    """The lines of a table; a heading may take several."""

    header: list[str]
    rows: list[str]

    @property
    def all(self) -> list[str]:
        return [*self.header, *self.rows]


def _laid_out_lines(table: Table, layout: TableLayout) -> _TableLines:
    """The header and all rows, with flexible columns cut as far as needed and allowed."""
    by_key = {column.key: column for column in table.columns}
    columns = [by_key[key] for key in layout.columns if key in by_key]
    headings = [layout.headings.get(column.key, column.title) for column in columns]
    header = _header_rows(headings) if table.has_header else []
    left_aligned = [i for i, column in enumerate(columns) if column.is_left_aligned]
    rows = [[_cell(row[c.key], layout.widths.get(c.key)) for c in columns] for row in table.rows]
    lines = _aligned_lines(header, rows, left_aligned, table.indent)
    keys = [column.key for column in columns]
    for key, least_width in layout.flexible.items():
        excess = _excess_width(lines.all)
        if excess <= 0 or key not in keys:
            continue
        place = keys.index(key)
        present_width = max(display_width(row[place]) for row in rows)
        heading_width = max((display_width(line[place]) for line in header), default=0)
        width = max(present_width - excess, heading_width, least_width)
        rows = [[*row[:place], truncated(row[place], width), *row[place + 1 :]] for row in rows]
        lines = _aligned_lines(header, rows, left_aligned, table.indent)
    return lines


def _header_rows(headings: Sequence[str]) -> list[list[str]]:
    """The lines of the headings, from top to bottom; shorter headings end in the last line."""
    parts = [heading.split("\n") for heading in headings]
    height = max(map(len, parts))
    padded = [[""] * (height - len(part)) + part for part in parts]
    return [list(line) for line in zip(*padded, strict=True)]


def _aligned_lines(
    header: list[list[str]], rows: list[list[str]], left_aligned: Sequence[int], indent: str
) -> _TableLines:
    first, *others = [*header, *rows]
    lines = table_lines(first, others, left_aligned, indent)
    return _TableLines(lines[: len(header)], lines[len(header) :])


def _cell(text: str, most_columns: int | None) -> str:
    return text if most_columns is None else truncated(text, most_columns)


def _excess_width(lines: Sequence[str]) -> int:
    return max(map(display_width, lines)) - page_width()


def _finished_lines(table: Table, lines: _TableLines) -> list[str]:
    """The header and the rows that the limit allows."""
    if table.limit is None:
        return lines.all
    return [*lines.header, *table.limit.shown(lines.rows, lambda text: table.indent + text)]
