"""Plain text tables, wrapped lines and lists of ranks, for everything that writes text.

The width of the page is set once, by the command line, and read wherever text is laid out. Widths
are columns of a terminal, not characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from unicodedata import category, east_asian_width

#: Columns without a terminal, and bounds of the columns on a terminal.
DEFAULT_WIDTH, MIN_WIDTH, MAX_WIDTH = 80, 40, 200
_REQUESTED_WIDTH: ContextVar[int] = ContextVar("columns", default=DEFAULT_WIDTH)


def page_width() -> int:
    """The width of reports in columns: 80, or that of `set_page_width`."""
    return _REQUESTED_WIDTH.get()


def set_page_width(columns: int | None) -> None:
    """Lay out all text for this width, limited to 40 to 200 columns; None: 80."""
    _REQUESTED_WIDTH.set(
        DEFAULT_WIDTH if columns is None else max(MIN_WIDTH, min(MAX_WIDTH, columns))
    )


@contextmanager
def page_of_width(columns: int) -> Iterator[None]:
    """Lay out the text of the block for this width, limited to 40 to 200 columns."""
    token = _REQUESTED_WIDTH.set(max(MIN_WIDTH, min(MAX_WIDTH, columns)))
    try:
        yield
    finally:
        _REQUESTED_WIDTH.reset(token)


def display_width(text: str) -> int:
    """The columns that a text takes on a terminal.

    Source: Unicode UAX #11 (East Asian Width); general categories Mn, Me and Cf take no column.
    """
    if text.isascii():
        return len(text)
    return sum(map(_character_width, text))


def _character_width(character: str) -> int:
    if east_asian_width(character) in "WF":
        return 2
    return 0 if category(character) in ("Mn", "Me", "Cf") else 1


def _padded_cell(text: str, columns: int, left: bool) -> str:
    blanks = " " * (columns - display_width(text))
    return text + blanks if left else blanks + text


def table_lines(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Sequence[int] = (0,),
    indent: str = "  ",
) -> list[str]:
    """Aligned lines; the columns numbered in ``left`` are aligned left, the others right."""
    lines = [header, *rows]
    widths = [max(display_width(line[i]) for line in lines) for i in range(len(header))]
    padded = [
        [
            _padded_cell(text, w, i in left)
            for i, (text, w) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return [(indent + "  ".join(line)).rstrip() for line in padded]


def rank_list(ranks: Sequence[int], limit: int = 4) -> str:
    """Ranks in few characters: ranges, even steps, or the first ``limit`` ranges and ``…``.

    >>> ranks_text([0, 1, 2, 3]), ranks_text([0, 4, 8, 12, 16]), ranks_text([1, 3])
    ('0-3', '0, 4 … 16', '1, 3')
    """
    if len(ranks) < 3:
        return ", ".join(map(str, ranks))
    steps = {b - a for a, b in pairwise(ranks)}
    if steps == {1}:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= limit:
        return ", ".join(map(str, ranks))
    if len(steps) == 1:
        return f"{ranks[0]}, {ranks[1]} … {ranks[-1]}"
    runs = consecutive_ranges(ranks)
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:limit]]
    return ", ".join(shown) + (" …" if len(runs) > limit else "")


def ranks_label(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0-3``."""
    return f"rank{'s' * (len(ranks) > 1)} {rank_list(ranks)}"


def consecutive_ranges(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last rank of each range of consecutive ranks."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs


def wrapped_lines(text: str, indent: str = "", further: str | None = None) -> list[str]:
    """The text in lines of at most `page_width` columns, broken at blanks.

    ``further``: the indent of the lines after the first one. A word that is wider than the page
    is not broken: half a path cannot be copied.
    """
    later = indent if further is None else further
    lines: list[str] = []
    now = indent
    for word in _words_with_blanks(text):
        if display_width(now) + display_width(word.rstrip()) > page_width() and now.strip():
            lines.append(now.rstrip())
            now = later + word.lstrip()
        else:
            now += word
    return [*lines, now.rstrip()] if now.strip() else lines


def _words_with_blanks(text: str) -> list[str]:
    """Words, each with the blanks after it."""
    return re.findall(r"\S+\s*|^\s+", text.expandtabs().replace("\n", " "))


def truncated(text: str, width: int) -> str:
    """The text, shortened to ``width`` columns with a final ``…`` if it is wider."""
    if display_width(text) <= width:
        return text
    while display_width(text) > width - 1:
        text = text[: min(len(text) - 1, width - 1)]
    return text + "…"
