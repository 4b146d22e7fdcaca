"""Columns of boxes with time running downwards, for the data-flow and start-up pictures.

`SequenceDiagram` states the column and row of every box; `laid_out_diagram` turns it into a
`BoxDiagram` with exact positions, and `distsim.output.pictures.drawing.mermaid` turns it into a
sequence diagram.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from distsim.output.pictures.drawing.box_diagram import (
    BoxDiagram,
    DiagramEdge,
    DiagramNode,
    LegendKey,
    TextLine,
    plain_text,
    text_width,
)
from distsim.output.pictures.drawing.palette import INK, LINE_COLOUR, WHITE

_PAD_X, _PAD_Y, _GAP_X, _GAP_Y = 20.0, 12.0, 36.0, 16.0
_MIN_COLUMN_WIDTH, _LINE_HEIGHT, _LINE_GAP, _LABEL_SIZE = 90.0, 1.2, 2.0, 11


@dataclass(frozen=True, slots=True)
class SequenceParticipant:
    """A column. ``short`` is its name in a sentence."""

    lines: tuple[TextLine, ...]
    short: str
    fill: str = WHITE
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class SequenceBox:
    """A box in one column. ``in_arrow``: an arrow has the same content, so a Mermaid sequence
    diagram omits the box.
    """

    id: str
    column: int
    row: int
    lines: tuple[TextLine, ...]
    fill: str = WHITE
    border: str = LINE_COLOUR
    dashed: bool = False
    in_arrow: bool = False


@dataclass(frozen=True, slots=True)
class SequenceBand:
    """A call that several columns make together. ``cells``: lines under the title, by column."""

    id: str
    columns: tuple[int, ...]
    row: int
    title: tuple[TextLine, ...]
    cells: dict[int, tuple[TextLine, ...]] = field(default_factory=dict)
    fill: str = WHITE
    border: str = LINE_COLOUR
    dashed: bool = False


Point = tuple[float, float]


class LifelinePoint(NamedTuple):
    """A point on the line below a column."""

    column: int
    row: int


@dataclass(frozen=True, slots=True)
class SequenceArrow:
    """From a box to a box, or to a point of a column's line. ``words``: the text of a Mermaid
    sequence diagram, instead of the label.
    """

    tail: str
    head: str | LifelinePoint
    label: str = ""
    colour: str = INK
    dashed: bool = False
    words: str = ""


@dataclass(frozen=True, slots=True)
class SequenceDiagram:
    """Columns with boxes, bands and arrows, without positions in points."""

    title: str
    subtitle: str
    columns: tuple[SequenceParticipant, ...]
    items: tuple[SequenceBox, ...] = ()
    bands: tuple[SequenceBand, ...] = ()
    arrows: tuple[SequenceArrow, ...] = ()
    legend: tuple[LegendKey, ...] = ()
    notes: tuple[str, ...] = ()


class _PlacedBox(NamedTuple):
    """A box that takes up space: its centre and its size."""

    x: float
    y: float
    width: float
    height: float

    def meets(self, other: _PlacedBox) -> bool:
        return (
            abs(self.x - other.x) * 2 < self.width + other.width
            and abs(self.y - other.y) * 2 < self.height + other.height
        )


def lines_width(lines: tuple[TextLine, ...]) -> float:
    """The width of the widest line."""
    return max((text_width(t.text, t.size, t.bold) for t in lines), default=0.0)


def lines_height(lines: tuple[TextLine, ...]) -> float:
    """The height of all lines together."""
    return sum(t.size * _LINE_HEIGHT + _LINE_GAP for t in lines)


def laid_out_diagram(diagram: SequenceDiagram) -> BoxDiagram:
    """The picture with every box at its place: columns as wide as their widest box, rows as high as
    their highest.
    """
    return _SequenceLayout(diagram).picture()


class _SequenceLayout:
    """Computes the position of every element of a sequence diagram."""

    def __init__(self, diagram: SequenceDiagram) -> None:
        self.diagram = diagram
        self.at = {item.id: (item.column, item.row) for item in diagram.items}
        self.widths = self._widths()
        self.xs = self._columns()
        self.heights, self.ys = self._rows()
        self.nodes: list[DiagramNode] = []
        self.edges: list[DiagramEdge] = []
        self.taken: list[_PlacedBox] = []

    def picture(self) -> BoxDiagram:
        self._headers()
        for band in self.diagram.bands:
            self._band(band)
        for item in self.diagram.items:
            size = (self.widths[item.column], lines_height(item.lines) + _PAD_Y)
            at = (self.xs[item.column], self.ys[item.row])
            self.taken.append(_PlacedBox(*at, *size))
            self.nodes.append(
                DiagramNode(
                    item.id,
                    item.lines,
                    fill=item.fill,
                    border=item.border,
                    dashed=item.dashed,
                    at=at,
                    size=size,
                    width=2.0 if item.border != LINE_COLOUR else 1.0,
                )
            )
        for number, arrow in enumerate(self.diagram.arrows):
            self._arrow(number, arrow)
        head = (self.diagram.title, self.diagram.subtitle)
        drawn = (tuple(self.nodes), tuple(self.edges))
        return BoxDiagram(
            *head, *drawn, legend=self.diagram.legend, notes=self.diagram.notes, engine="neato"
        )

    # --- the grid ---
    def _widths(self) -> list[float]:
        widths = [
            max(_MIN_COLUMN_WIDTH, lines_width(column.lines) + _PAD_X)
            for column in self.diagram.columns
        ]
        for item in self.diagram.items:
            widths[item.column] = max(widths[item.column], lines_width(item.lines) + _PAD_X)
        for band in self.diagram.bands:
            for column, lines in band.cells.items():
                widths[column] = max(widths[column], lines_width(lines) + _PAD_X)
            pieces = 1 if _is_contiguous(band) else len(band.columns)
            for column in band.columns:
                widths[column] = max(
                    widths[column], (lines_width(band.title) + _PAD_X) * pieces / len(band.columns)
                )
        return widths

    def _columns(self) -> list[float]:
        """The centre of each column. A gap is wide enough for the labels of the arrows that leave
        into it.
        """
        gaps = [_GAP_X] * len(self.widths)
        for arrow in self.diagram.arrows:
            tail, head = self.at[arrow.tail][0], self._head(arrow)[0]
            if tail != head:
                gap = tail if head > tail else tail - 1
                gaps[gap] = max(gaps[gap], text_width(arrow.label, _LABEL_SIZE) + _GAP_X)
        lefts = accumulate((w + g for w, g in zip(self.widths, gaps, strict=True)), initial=0.0)
        return [left + width / 2 for left, width in zip(lefts, self.widths, strict=False)]

    def _rows(self) -> tuple[list[float], list[float]]:
        placed = [i.row for i in self.diagram.items] + [b.row for b in self.diagram.bands]
        placed += [self._head(arrow)[1] for arrow in self.diagram.arrows]
        heights = [_GAP_Y] * (max(placed, default=-1) + 1)
        for item in self.diagram.items:
            heights[item.row] = max(heights[item.row], lines_height(item.lines) + _PAD_Y)
        for band in self.diagram.bands:
            cells = max((lines_height(c) for c in band.cells.values()), default=0.0)
            heights[band.row] = max(heights[band.row], lines_height(band.title) + cells + _PAD_Y)
        start = max(lines_height(column.lines) for column in self.diagram.columns) + _PAD_Y
        tops = list(accumulate((h + _GAP_Y for h in heights), initial=start / 2 + _GAP_Y))
        return heights, [top + height / 2 for top, height in zip(tops, heights, strict=False)]

    def _head(self, arrow: SequenceArrow) -> tuple[int, int]:
        return (
            (arrow.head.column, arrow.head.row)
            if isinstance(arrow.head, LifelinePoint)
            else self.at[arrow.head]
        )

    # --- what is drawn ---
    def _headers(self) -> None:
        bottom = self.ys[-1] + self.heights[-1] / 2 + _GAP_Y if self.ys else 60.0
        height = max(lines_height(column.lines) for column in self.diagram.columns) + _PAD_Y
        for number, column in enumerate(self.diagram.columns):
            at, size = (self.xs[number], 0.0), (self.widths[number], height)
            self.nodes.append(
                DiagramNode(
                    f"lane{number}",
                    column.lines,
                    fill=column.fill,
                    at=at,
                    dashed=column.dashed,
                    size=size,
                )
            )
            self.nodes.append(
                DiagramNode(f"end{number}", shape="point", at=(self.xs[number], bottom))
            )
            self.edges.append(
                DiagramEdge(
                    f"lane{number}",
                    f"end{number}",
                    colour=LINE_COLOUR,
                    dashed=True,
                    width=1.0,
                    arrow=False,
                )
            )

    def _band(self, band: SequenceBand) -> None:
        pieces = [band.columns] if _is_contiguous(band) else [(column,) for column in band.columns]
        names = [f"{band.id}_{part[0]}" for part in pieces]
        for name, part in zip(names, pieces, strict=True):
            self._band_piece(name, band, part)
        for a, b in pairwise(names):
            self.edges.append(
                DiagramEdge(a, b, colour=band.border, width=5.0, arrow=False, dashed=band.dashed)
            )

    def _band_piece(self, name: str, band: SequenceBand, part: tuple[int, ...]) -> None:
        left, right = (
            self.xs[part[0]] - self.widths[part[0]] / 2,
            self.xs[part[-1]] + self.widths[part[-1]] / 2,
        )
        cells = max((lines_height(c) for c in band.cells.values()), default=0.0)
        title = lines_height(band.title)
        height, centre = title + cells + _PAD_Y, (left + right) / 2
        y = self.ys[band.row]
        self.taken.append(_PlacedBox(centre, y, right - left, height))
        frame = DiagramNode(
            name,
            () if cells else band.title,
            fill=band.fill,
            border=band.border,
            dashed=band.dashed,
            at=(centre, y),
            size=(right - left, height),
            width=1.6,
        )
        self.nodes.append(frame)
        if not cells:
            return
        self.nodes.append(
            DiagramNode(
                f"{name}_title",
                band.title,
                fill=band.fill,
                shape="plain",
                at=(centre, y - cells / 2),
            )
        )
        for column in part:
            lines, at = band.cells.get(column, ()), (self.xs[column], y + title / 2)
            if lines:
                self.nodes.append(
                    DiagramNode(f"{name}_cell{column}", lines, fill=band.fill, shape="plain", at=at)
                )

    def _arrow(self, number: int, arrow: SequenceArrow) -> None:
        """From the side of a box to the side of a box, so that between neighbours nothing lies in
        the way.
        """
        (column, row), (to_column, to_row) = self.at[arrow.tail], self._head(arrow)
        if column == to_column:
            return
        step = 1 if to_column > column else -1
        free = isinstance(arrow.head, LifelinePoint)
        tail = (self.xs[column] + step * self.widths[column] / 2, self.ys[row])
        head = (
            self.xs[to_column] - (0 if free else step * self.widths[to_column] / 2),
            self.ys[to_row],
        )
        self.nodes.append(DiagramNode(f"tail{number}", shape="point", at=tail, part_of=arrow.tail))
        end = "" if isinstance(arrow.head, LifelinePoint) else arrow.head
        self.nodes.append(DiagramNode(f"head{number}", shape="point", at=head, part_of=end))
        self.edges.append(
            DiagramEdge(
                f"tail{number}",
                f"head{number}",
                colour=arrow.colour,
                dashed=arrow.dashed,
                width=1.8,
            )
        )
        if arrow.label:
            self._label(number, arrow, tail, head, column + step)

    def _label(
        self, number: int, arrow: SequenceArrow, tail: Point, head: Point, beside: int
    ) -> None:
        """Put the label on the arrow, in the gap next to its tail, at a free place."""
        (x0, y0), (x1, y1) = tail, head
        step = 1 if x1 > x0 else -1
        near, far = x0, self.xs[beside] - step * self.widths[beside] / 2
        size = (text_width(arrow.label, _LABEL_SIZE) + 6, _LABEL_SIZE * 1.5)
        boxes = []
        for lift in (0.0, -size[1], size[1], -2 * size[1], 2 * size[1]):
            for share in (0.5, 0.42, 0.58):
                x = near + (far - near) * share
                boxes.append(_PlacedBox(x, y0 + (y1 - y0) * (x - x0) / (x1 - x0) + lift, *size))
        box = next(filter(self._is_free, boxes), boxes[0])
        self.taken.append(box)
        text = TextLine(plain_text(arrow.label), colour=arrow.colour, size=_LABEL_SIZE)
        self.nodes.append(DiagramNode(f"label{number}", (text,), shape="plain", at=(box.x, box.y)))

    def _is_free(self, box: _PlacedBox) -> bool:
        return not any(box.meets(other) for other in self.taken)


def _is_contiguous(band: SequenceBand) -> bool:
    return band.columns[-1] - band.columns[0] + 1 == len(band.columns)
