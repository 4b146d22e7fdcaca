"""Pictures as Mermaid text: a flowchart for boxes and arrows, a sequence diagram for columns with time running down."""

from __future__ import annotations

import re

from distsim.views.drawing.palette import WHITE
from distsim.views.drawing.records import Cell, Edge, Node, Picture, Text, plain_text
from distsim.views.drawing.sequence import Anchor, Arrow, Band, Item, SequenceDiagram

#: Mermaid's own marks, written as entities (https://mermaid.js.org/syntax/flowchart.html#entity-codes-to-escape-characters).
_MARKS = re.compile(r'["#;<>&%`{}|\\]')


def flowchart(picture: Picture) -> str:
    """The picture as a flowchart, laid out by whoever shows it."""
    joined = {node.id: node.part_of or node.id for node in picture.nodes}
    lines = [*_title(picture.title), f"flowchart {picture.direction}"]
    inside = {name for cluster in picture.clusters for name in cluster.nodes}
    nodes = {node.id: node for node in picture.nodes if node.shape not in ("point", "plain")}
    for number, cluster in enumerate(picture.clusters):
        lines.append(f'  subgraph c{number}["{_safe(cluster.title)}"]')
        lines += [f"    {_box(nodes[name])}" for name in cluster.nodes if name in nodes]
        lines.append("  end")
    lines += [f"  {_box(node)}" for name, node in nodes.items() if name not in inside]
    edges = [edge for edge in picture.edges if edge.shown and {joined[edge.tail], joined[edge.head]} <= set(nodes)]
    lines += [f"  {_link(edge, joined)}" for edge in edges]
    lines += [f"  style {name} fill:{node.fill},stroke:{node.border}" for name, node in nodes.items() if node.fill != WHITE]
    lines += [f"  linkStyle {i} stroke:{edge.colour}" for i, edge in enumerate(edges)]
    return "\n".join(lines) + "\n"


def sequence(diagram: SequenceDiagram) -> str:
    """Columns as participants, boxes as notes, arrows as messages, in the order of the rows."""
    lines = [*_title(diagram.title), "sequenceDiagram"]
    lines += [f"  participant L{i} as {_safe(column.short)}" for i, column in enumerate(diagram.columns)]
    items = {item.id: item for item in diagram.items}
    told = [(band.row, 0, band.columns[0], _over(band, diagram)) for band in diagram.bands]
    told += [(i.row, 1, i.column, f"Note over L{i.column}: {_lines(i.lines)}") for i in diagram.items if not i.in_arrow]
    told += [(items[a.tail].row, 2, items[a.tail].column, _message(a, items[a.tail], items)) for a in diagram.arrows]
    lines += [f"  {text}" for *_, text in sorted(told, key=lambda t: t[:3])]
    return "\n".join(lines) + "\n"


def _title(title: str) -> list[str]:
    return ["---", f'title: "{_safe(title)}"', "---"]


def _over(band: Band, diagram: SequenceDiagram) -> str:
    """A note over the columns; where the band has holes its members are named."""
    first, last = band.columns[0], band.columns[-1]
    whole = last - first + 1 == len(band.columns)
    text = _lines(band.title) + ("" if whole else f"<br/>{_safe(', '.join(diagram.columns[i].short for i in band.columns))}")
    return f"Note over L{first},L{last}: {text}" if first != last else f"Note over L{first}: {text}"


def _message(arrow: Arrow, tail: Item, items: dict[str, Item]) -> str:
    head = arrow.head.column if isinstance(arrow.head, Anchor) else items[arrow.head].column
    label = arrow.label if arrow.label not in arrow.words and arrow.label != "waits" else ""
    text = ", ".join(t for t in (arrow.words, label) if t)
    return f"L{tail.column}{'--x' if arrow.dashed else '->>'}L{head}: {_safe(text) or ' '}"


def _box(node: Node) -> str:
    rows = [" ".join(_cell(cell) for cell in row) for row in node.table]
    text = "<br/>".join([_lines(node.lines), *rows] if node.lines else rows)
    return f'{node.id}["{text or " "}"]'


def _cell(cell: Cell) -> str:
    return _safe("+".join(p.text for p in cell.parts) if cell.parts else cell.text)


def _link(edge: Edge, joined: dict[str, str]) -> str:
    line = ("-.->" if edge.dashed else "-->") if edge.arrow else ("-.-" if edge.dashed else "---")
    label = f'|"{_safe(edge.label)}"|' if edge.label else ""
    return f"{joined[edge.tail]} {line}{label} {joined[edge.head]}"


def _lines(lines: tuple[Text, ...]) -> str:
    return "<br/>".join(_safe(line.text) for line in lines)


def _safe(text: str) -> str:
    return _MARKS.sub(lambda mark: f"#{ord(mark[0])};", plain_text(text)).strip()
