"""A `Report` as a fragment of HTML for notebooks.

The fragment has no script and loads nothing. All texts are escaped: they may come from untrusted
files. Tables show all columns of their widest layout, and no cell is cut.
"""

from __future__ import annotations

from html import escape

from distsim.common.file_io import escape_control_characters
from distsim.output.report_record import Column, Paragraph, Report, Section, Table, Verbatim


def write_html(report: Report) -> str:
    """The sections of a report in one ``<div>``."""
    return f'<div class="distsim">{"".join(map(_section_html, report.sections))}</div>'


def _section_html(section: Section) -> str:
    parts = []
    for block in section.blocks:
        if isinstance(block, Paragraph):
            parts.append(f"<div{_margin(block)}>{_escaped(block.indent.strip(), block.text)}</div>")
        elif isinstance(block, Verbatim):
            parts.append(f"<pre>{_escaped(*block.lines, separator=chr(10))}</pre>")
        elif block.rows:
            parts.append(_table_html(block))
    if not parts:
        return ""
    title = f"<h4>{_escaped(section.title)}</h4>" if section.title else ""
    return f"<section>{title}{''.join(parts)}</section>\n"


def _margin(paragraph: Paragraph) -> str:
    """An indent of blanks becomes a margin; a label in the indent stays a text."""
    columns = len(paragraph.indent) if not paragraph.indent.strip() else 0
    return f' style="margin-left:{columns}ch"' if columns else ""


def _escaped(*texts: str, separator: str = " ") -> str:
    return escape(escape_control_characters(separator.join(text for text in texts if text)))


# --- tables ---


def _table_html(table: Table) -> str:
    columns = list(table.columns)
    if table.layouts:
        shown = table.layouts[0].columns
        columns = [column for column in columns if column.key in shown]
    rows = [
        "".join(_cell_html("td", column, row[column.key]) for column in columns)
        for row in table.rows
    ]
    if table.limit is not None:
        rows = table.limit.shown(
            rows, lambda text: f'<td colspan="{len(columns)}">{_escaped(text)}</td>'
        )
    head = ""
    if table.has_header:
        cells = "".join(_cell_html("th", column, column.title) for column in columns)
        head = f"<thead><tr>{cells}</tr></thead>"
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table>{head}<tbody>{body}</tbody></table>"


def _cell_html(tag: str, column: Column, text: str) -> str:
    alignment = "left" if column.is_left_aligned else "right"
    return f'<{tag} style="text-align:{alignment}">{_escaped(text)}</{tag}>'
