"""The elements of a diagram: plain records that every writer (DOT, Mermaid) understands.

Lengths are points (1/72 inch), x to the right and y downwards. The writers escape all
texts, so a name from a file may contain anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from distsim.output.pictures.drawing.palette import INK, LINE_COLOUR, WHITE
from distsim.output.text_layout import truncated

#: Sizes of text, in points. No text is smaller than SMALL_SIZE.
TITLE_SIZE, NORMAL_SIZE, SMALL_SIZE = 16, 12, 10


class TextLine(NamedTuple):
    """A line of text in a box. It never wraps."""

    text: str
    bold: bool = False
    colour: str = INK
    size: int = NORMAL_SIZE


class TableCell(NamedTuple):
    """A cell of a table in a box. ``parts``: coloured pieces joined by ``+`` (a sum), instead of
    the text.
    """

    text: str = ""
    fill: str = WHITE
    bold: bool = False
    colour: str = INK
    size: int = NORMAL_SIZE
    parts: tuple[TableCell, ...] = ()
    border: bool = True
    left: bool = False
    span: int = 1


@dataclass(frozen=True, slots=True)
class DiagramNode:
    """A box: lines of text, and a table below them.

    ``at`` is its centre and ``size`` its minimum size; both are None if the layout engine places
    it. ``part_of``: a point that belongs to this box; writers without positions join its arrows to
    the box. The Mermaid writer omits boxes of the shapes "plain" and "point", which Mermaid's
    flowcharts lack.
    """

    id: str
    lines: tuple[TextLine, ...] = ()
    table: tuple[tuple[TableCell, ...], ...] = ()
    fill: str = WHITE
    border: str = LINE_COLOUR
    shape: Literal["box", "rounded", "plain", "point", "ellipse"] = "rounded"
    dashed: bool = False
    width: float = 1.0
    at: tuple[float, float] | None = None
    size: tuple[float, float] | None = None
    part_of: str = ""


@dataclass(frozen=True, slots=True)
class DiagramEdge:
    """From box to box. ``shown`` is False for one that only holds the layout together."""

    tail: str
    head: str
    label: str = ""
    colour: str = INK
    dashed: bool = False
    width: float = 1.4
    arrow: bool = True
    shown: bool = True


@dataclass(frozen=True, slots=True)
class DiagramFrame:
    """A frame around boxes, with a title."""

    id: str
    title: str
    nodes: tuple[str, ...]
    fill: str = "#F5F7FA"
    border: str = LINE_COLOUR


class LegendKey(NamedTuple):
    """A line of the legend: what a colour means. ``dashed``: a dashed line of that colour instead
    of a swatch.
    """

    colour: str
    text: str
    line: Literal["", "solid", "dashed"] = ""


@dataclass(frozen=True, slots=True)
class BoxDiagram:
    """Boxes and arrows. ``rows`` are lists of boxes that stand side by side; ``notes`` are printed
    under the title.

    ``engine``: ``dot`` lays it out, ``neato`` keeps the boxes where ``at`` says.
    """

    title: str
    subtitle: str = ""
    nodes: tuple[DiagramNode, ...] = ()
    edges: tuple[DiagramEdge, ...] = ()
    clusters: tuple[DiagramFrame, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    legend: tuple[LegendKey, ...] = ()
    notes: tuple[str, ...] = ()
    engine: Literal["dot", "neato", "circo"] = "dot"
    direction: Literal["TB", "LR"] = "TB"


def plain_text(text: object) -> str:
    """Text that is safe to draw: control characters, line breaks and half surrogates become a
    replacement mark.
    """
    return "".join(map(_printable_character, str(text)))


def _printable_character(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else "\N{REPLACEMENT CHARACTER}"


def clipped(text: object, width: int) -> str:
    """The text in at most ``width`` characters."""
    return truncated(plain_text(text), max(width, 2))


def text_width(text: str, size: int = NORMAL_SIZE, bold: bool = False) -> float:
    """About the width of a line in points, on the wide side: DejaVu Sans, the widest of the usual
    fonts, is 0.6 em a letter.
    """
    wide = sum(1.7 if ord(c) > 0x2E7F else 1.0 for c in text)
    return wide * size * (0.68 if bold else 0.61)
