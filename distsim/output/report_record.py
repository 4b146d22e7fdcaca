"""The content of a report without any layout: sections of paragraphs, tables and verbatim lines.

Each view builds a `Report` from a finished result. `distsim.output.report_text` lays it out for the
terminal, and `distsim.output.report_html` for notebooks: column widths, wrapping and indents are
decided there and nowhere else.

JSON is not written from this record. A report joins equal rows, rounds times and shows the first
rows only; JSON has all rows and exact nanoseconds. It is therefore written from the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

_EMPTY: Mapping[str, str] = MappingProxyType({})
_NO_WIDTHS: Mapping[str, int] = MappingProxyType({})


class Paragraph(NamedTuple):
    """A text that is wrapped at the width of the page; an empty text takes no line.

    ``indent`` begins the first line, and the others too unless ``further`` is given. It may hold
    a label.
    """

    text: str
    indent: str = ""
    further: str | None = None


class Verbatim(NamedTuple):
    """Lines that readers copy, for example commands; they are neither wrapped nor cut."""

    lines: Sequence[str]


class Column(NamedTuple):
    """A column of a table. Cells are found by ``key``, which is also the default heading.

    A heading may have several lines.
    """

    key: str
    heading: str | None = None
    is_left_aligned: bool = False

    @property
    def title(self) -> str:
        return self.key if self.heading is None else self.heading


def text_column(key: str, heading: str | None = None) -> Column:
    """A left-aligned column."""
    return Column(key, heading, is_left_aligned=True)


class TableLayout(NamedTuple):
    """One way to fit a table into the page.

    ``columns``: the keys of the columns to show; those that the table lacks are ignored.
    ``widths``: wider cells of these columns are cut.
    ``flexible``: these columns are cut further if the table is too wide, the first one first, but
    not below the given width.
    ``headings``: shorter headings.
    """

    columns: Sequence[str]
    widths: Mapping[str, int] = _NO_WIDTHS
    flexible: Mapping[str, int] = _NO_WIDTHS
    headings: Mapping[str, str] = _EMPTY


class RowLimit(NamedTuple):
    """How many rows are shown at the beginning and at the end of a longer table.

    ``text`` stands for the rows between them. All rows count for the widths of the columns.
    """

    first: int
    last: int = 0
    text: str = "… {hidden} more …"

    def shown(self, rows: list[str], gap: Callable[[str], str]) -> list[str]:
        """The written rows to show; ``gap`` writes the row that stands for the others."""
        hidden = len(rows) - self.first - self.last
        if hidden <= 0:
            return rows
        tail = rows[len(rows) - self.last :]
        return [*rows[: self.first], gap(self.text.format(hidden=hidden)), *tail]


class Table(NamedTuple):
    """Rows of cells by the keys of their columns.

    ``layouts``, from wide to narrow: the first one that fits the page is used; if none fits, the
    lines are cut. A table without layouts shows all columns and is never cut. ``hidden_note``: the
    line below a table that lacks columns of the widest layout, with `{columns}` for their keys and
    `{width}` for the width that shows them.
    """

    columns: Sequence[Column]
    rows: Sequence[Mapping[str, str]]
    layouts: Sequence[TableLayout] = ()
    limit: RowLimit | None = None
    indent: str = "  "
    has_header: bool = True
    hidden_note: str = ""


Block = Paragraph | Verbatim | Table


class Section(NamedTuple):
    """A title and what is below it; a section without blocks is not shown.

    ``is_list_item``: an empty line separates sections, but not two list items of one line each.
    """

    blocks: Sequence[Block]
    title: str = ""
    is_list_item: bool = False


class Report(NamedTuple):
    """The sections of a report, in the order of reading."""

    sections: Sequence[Section]


def paragraphs(texts: Iterable[str], indent: str = "", further: str | None = None) -> list[Block]:
    """A paragraph for each text, all with the same indents."""
    return [Paragraph(text, indent, further) for text in texts]


def table_of(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], limit: RowLimit | None = None
) -> Table:
    """A table without layouts, from rows with one cell per column."""
    keys = [column.key for column in columns]
    return Table(columns, [dict(zip(keys, row, strict=True)) for row in rows], limit=limit)
