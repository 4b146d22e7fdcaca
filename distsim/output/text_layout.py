"""Plain text tables and lists of ranks, for every view that writes text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextvars import ContextVar
from itertools import pairwise
from unicodedata import category, east_asian_width

#: Columns of a report that no terminal asks for; how narrow and how wide they may be.
DEFAULT_WIDTH, MIN_WIDTH, MAX_WIDTH = 80, 40, 200
_REQUESTED_WIDTH: ContextVar[int] = ContextVar("columns", default=DEFAULT_WIDTH)


def page_width() -> int:
    """Columns that there are: 80, or what `set_page_width` was told."""
    return _REQUESTED_WIDTH.get()


def set_page_width(columns: int | None) -> None:
    """Lay everything out for so many columns, from 40 to 200; None: 80."""
    _REQUESTED_WIDTH.set(
        DEFAULT_WIDTH if columns is None else max(MIN_WIDTH, min(MAX_WIDTH, columns))
    )


def display_width(text: str) -> int:
    """Columns that a text takes on a terminal: wide characters (East Asian Width W, F) two,
    combining ones none.

    Source: Unicode UAX #11; general categories Mn, Me and Cf take no column.
    """
    if text.isascii():
        return len(text)
    wide = (
        2 if east_asian_width(c) in "WF" else 0 if category(c) in ("Mn", "Me", "Cf") else 1
        for c in text
    )
    return sum(wide)


def _padded_cell(text: str, columns: int, left: bool) -> str:
    blanks = " " * (columns - display_width(text))
    return text + blanks if left else blanks + text


def table_lines(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Sequence[int] = (0,),
    indent: str = "  ",
) -> list[str]:
    """Aligned lines with two blanks between columns; the columns numbered in ``left`` are flush
    left, the others right.
    """
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
    """Ranks in few characters: runs as ``0-3``, even steps as ``0, 4 … 28``, else the first
    ``limit`` of them and ``…``.

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
    """The first and the last of each run of neighbours."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs


def wrapped_lines(text: str, indent: str = "", further: str | None = None) -> list[str]:
    """The text in lines of at most `page_width` columns, broken at blanks; ``further`` indents the
    later ones (else as the first).

    A word that is wider than a line stands on one of its own: nobody can copy half a path.
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
    """Words, each with the blanks that follow it."""
    return re.findall(r"\S+\s*|^\s+", text.expandtabs().replace("\n", " "))


def truncated(text: str, width: int) -> str:
    """The text, shortened to ``width`` columns with a final ``…`` where it is wider."""
    if display_width(text) <= width:
        return text
    while display_width(text) > width - 1:
        text = text[: min(len(text) - 1, width - 1)]
    return text + "…"
