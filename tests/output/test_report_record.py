"""One record of a report, and its writers: text of any width, and HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from distsim.output.report_html import write_html
from distsim.output.report_record import (
    Column,
    Paragraph,
    Report,
    RowLimit,
    Section,
    Table,
    TableLayout,
    Verbatim,
    table_of,
    text_column,
)
from distsim.output.report_text import write_text
from distsim.output.text_layout import display_width, page_of_width, set_page_width

COLUMNS = (text_column("operation"), Column("time", "time, ms"), Column("calls"))
ROWS = [{"operation": "all_reduce", "time": "12.5", "calls": "3"}] * 2


@pytest.fixture(autouse=True)
def _plain_width() -> Iterator[None]:
    yield
    set_page_width(None)


def _text(*blocks: Paragraph | Table | Verbatim) -> str:
    return write_text(Report([Section(blocks)]))


def test_columns_are_aligned_below_their_headings() -> None:
    assert _text(Table(COLUMNS, ROWS)).splitlines() == [
        "  operation   time, ms  calls",
        "  all_reduce      12.5      3",
        "  all_reduce      12.5      3",
    ]


def test_the_first_layout_that_fits_is_used_and_unknown_columns_are_ignored() -> None:
    layouts = (
        TableLayout(("operation", "time", "calls", "bytes")),
        TableLayout(("operation", "time"), {"operation": 5}, headings={"time": "t"}),
    )
    table = Table(COLUMNS, [{**row, "time": "9" * 30} for row in ROWS], layouts)

    assert len(_text(table).splitlines()[0].split()) == 4
    with page_of_width(45):
        assert _text(table).split()[:3] == ["operation", "t", "all_…"]


def test_flexible_columns_are_cut_before_lines_are() -> None:
    row = {"operation": "o" * 100, "time": "1", "calls": "1"}
    layout = TableLayout(("operation", "time", "calls"), flexible={"operation": 6})

    lines = _text(Table(COLUMNS, [row], (layout,))).splitlines()

    assert [display_width(line) for line in lines] == [80, 80]
    assert lines[1].endswith("…         1      1")


def test_a_table_without_layouts_is_never_cut() -> None:
    assert _text(table_of((text_column("path"),), [("p" * 90,)])).endswith("p" * 90)


def test_a_limit_hides_rows_between_the_first_and_the_last() -> None:
    rows = [(str(number),) for number in range(9)]
    table = table_of((Column("n"),), rows, RowLimit(2, 1))

    assert _text(table).split() == ["n", "0", "1", "…", "6", "more", "…", "8"]
    assert _text(table._replace(has_header=False)).split()[0] == "0"


def test_sections_without_content_are_not_shown() -> None:
    empty = [Section([], "a"), Section([Paragraph("")], "b"), Section([Table(COLUMNS, [])], "c")]

    assert write_text(Report([*empty, Section([Paragraph("end")], "d")])) == "d\nend"


def test_list_items_of_one_line_follow_each_other_without_empty_lines() -> None:
    one = Section([Paragraph("one")], is_list_item=True)
    two = Section([Paragraph("one"), Paragraph("two")], is_list_item=True)

    assert write_text(Report([one, one, two, one])) == "one\none\n\none\ntwo\n\none"


class _Texts(HTMLParser):
    """The tags and the texts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_html_escapes_every_text() -> None:
    evil = "<script>alert('\x1b')</script>"
    table = table_of((text_column("a", evil),), [(evil,)] * 3, RowLimit(1, 1, text=evil))
    blocks = [Paragraph(evil, indent=f"{evil}: "), Verbatim([evil]), table]
    parser = _Texts()
    parser.feed(write_html(Report([Section(blocks, evil)])))

    assert "script" not in parser.tags
    assert "".join(parser.texts).count("<script>") == 8
    assert "\x1b" not in "".join(parser.texts)


def test_html_shows_whole_cells_and_all_columns_of_the_widest_layout() -> None:
    rows = [{"operation": "o" * 200, "time": "1", "calls": "2"}]
    layouts = (TableLayout(("operation", "time", "calls"), {"operation": 5}),)
    page = write_html(Report([Section([Table(COLUMNS, rows, layouts)])]))

    assert "o" * 200 in page
    assert page.count("<th ") == page.count("<td ") == 3


def test_headings_of_several_lines_end_in_the_same_line() -> None:
    columns = (text_column("layout"), Column("time", "step time\nms"), Column("b", "1\n2\n3"))
    rows = [{"layout": "FSDP8", "time": "9", "b": "4"}]

    assert _text(Table(columns, rows, limit=RowLimit(1))).splitlines() == [
        "                     1",
        "          step time  2",
        "  layout         ms  3",
        "  FSDP8           9  4",
    ]
    assert "step time\nms" in write_html(Report([Section([Table(columns, rows)])]))
