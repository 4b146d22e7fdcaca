"""Plain text tables and lists of ranks, for every view that writes text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from textwrap import wrap

#: Columns of every report.
WIDTH = 80


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,), indent: str = "  ") -> list[str]:
    """Aligned lines with two blanks between columns; the columns numbered in ``left`` are flush left, the others right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    cells = [
        [text.ljust(w) if i in left else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]
    return [(indent + "  ".join(line)).rstrip() for line in cells]


def ranks_text(ranks: Sequence[int], limit: int = 4) -> str:
    """Ranks in few characters: runs as ``0-3``, even steps as ``0, 4 … 28``, else the first ``limit`` of them and ``…``.

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
    runs = runs_of(ranks)
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:limit]]
    return ", ".join(shown) + (" …" if len(runs) > limit else "")


def ranks_words(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0-3``."""
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"


def runs_of(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of neighbours."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs


def folded(text: str, indent: str = "", further: str | None = None) -> list[str]:
    """The text in lines of at most 80 columns, broken at blanks alone; ``further`` indents the later ones (else as the first)."""
    later = indent if further is None else further
    return wrap(text, WIDTH, initial_indent=indent, subsequent_indent=later, break_on_hyphens=False, break_long_words=False)


def cut(text: str, width: int) -> str:
    """The text, shortened to ``width`` characters with a final ``…`` where it is longer."""
    return text if len(text) <= width else text[: width - 1] + "…"
