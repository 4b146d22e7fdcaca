"""What each rank holds before and after an operation, as plain text.

The contents are those of the picture `distsim render --view op`.
"""

from __future__ import annotations

from collections.abc import Sequence

from distsim.operations.core.operation_base import Operation
from distsim.output.pictures.drawing.box_diagram import BoxDiagram, DiagramNode, TableCell
from distsim.output.pictures.views.operation import operation_diagram
from distsim.output.text_layout import page_width

_INDENT = "  "
_TITLE_WIDTH = len("before") + 2
_GAP = "  "
_RANK_COUNTS = (4, 3, 2)


def buffer_lines(row: type[Operation]) -> list[str]:
    """A table with one column per rank: for as many ranks as fit on a line, at most four."""
    lines: list[str] = []
    for count in _RANK_COUNTS:
        lines = _table_of(operation_diagram(row, count))
        if max(map(len, lines)) <= page_width():
            break
    return lines


def buffer_legend(row: type[Operation], lines: Sequence[str]) -> str:
    """The meaning of the letters in a table; empty for an operation that moves no data."""
    if not any(row.effect(_RANK_COUNTS[0], 0)):
        return ""
    text = "\n".join(lines)
    sentences = ["a is the data of rank 0, b that of rank 1, and so on."]
    if "a1" in text:
        sentences.append("a1 is part 1 of a.")
    if "+" in text:
        sentences.append("a+b is the reduction of a and b.")
    if row.coalesces:
        sentences.append("x and y are two tensors of the list.")
    return " ".join(sentences)


def _table_of(picture: BoxDiagram) -> list[str]:
    before = _nodes_named(picture, "before")
    after = _nodes_named(picture, "after")
    heads = [_head_text(node) for node in before]
    blocks = [("", [[head] for head in heads])]
    blocks += [
        ("before", [_cell_texts(node) for node in before]),
        ("after", [_cell_texts(node) for node in after]),
    ]
    widths = [
        max(len(text) for _, columns in blocks for text in columns[index])
        for index in range(len(heads))
    ]
    lines: list[str] = []
    for title, columns in blocks:
        lines += _block_lines(title, columns, widths)
    return lines


def _nodes_named(picture: BoxDiagram, name: str) -> list[DiagramNode]:
    """The boxes of the ranks, in the order of the ranks."""
    return [
        node
        for node in picture.nodes
        if node.id.startswith(name) and node.id[len(name) :].isdigit()
    ]


def _head_text(node: DiagramNode) -> str:
    """The name of a rank, with its role in parentheses."""
    name, *roles = (line.text.strip() for line in node.lines)
    role = ", ".join(filter(None, roles))
    return f"{name} ({role})" if role else name


def _cell_texts(node: DiagramNode) -> list[str]:
    return [" ".join(map(_cell_text, cells)).strip() for cells in node.table]


def _cell_text(cell: TableCell) -> str:
    return "+".join(part.text for part in cell.parts) or cell.text


def _block_lines(title: str, columns: list[list[str]], widths: list[int]) -> list[str]:
    """The lines of one row of the table; columns with fewer lines end in blanks."""
    lines = []
    for index in range(max(map(len, columns))):
        cells = [
            (column[index] if index < len(column) else "").ljust(width)
            for column, width in zip(columns, widths, strict=True)
        ]
        head = (title if index == 0 else "").ljust(_TITLE_WIDTH)
        lines.append(f"{_INDENT}{head}{_GAP.join(cells)}".rstrip())
    return lines
