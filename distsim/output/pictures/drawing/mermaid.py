"""Pictures as Mermaid text: a flowchart for boxes and arrows, a sequence diagram for columns with
time running down.
"""

from __future__ import annotations

import re

from distsim.output.pictures.drawing.box_diagram import (
    BoxDiagram,
    DiagramEdge,
    DiagramNode,
    TableCell,
    TextLine,
    plain_text,
)
from distsim.output.pictures.drawing.palette import WHITE
from distsim.output.pictures.drawing.sequence_diagram import (
    LifelinePoint,
    SequenceArrow,
    SequenceBand,
    SequenceBox,
    SequenceDiagram,
)

#: Mermaid's own marks, written as entities
#: (https://mermaid.js.org/syntax/flowchart.html#entity-codes-to-escape-characters).
_UNSAFE_CHARACTERS = re.compile(r'["#;<>&%`{}|\\]')

#: (dashed, with an arrowhead) -> Mermaid's link.
_STROKES = {
    (False, True): "-->",
    (True, True): "-.->",
    (False, False): "---",
    (True, False): "-.-",
}


def flowchart_text(picture: BoxDiagram) -> str:
    """The picture as a flowchart, laid out by whoever shows it."""
    joined = {node.id: node.part_of or node.id for node in picture.nodes}
    lines = [*_title_lines(picture.title), f"flowchart {picture.direction}"]
    inside = {name for cluster in picture.clusters for name in cluster.nodes}
    nodes = {node.id: node for node in picture.nodes if node.shape not in ("point", "plain")}
    for number, cluster in enumerate(picture.clusters):
        lines.append(f'  subgraph c{number}["{_escaped_text(cluster.title)}"]')
        lines += [f"    {_note_text(nodes[name])}" for name in cluster.nodes if name in nodes]
        lines.append("  end")
    lines += [f"  {_note_text(node)}" for name, node in nodes.items() if name not in inside]
    edges = [edge for edge in picture.edges if _is_drawn(edge, joined, nodes)]
    lines += [f"  {_link_line(edge, joined)}" for edge in edges]
    lines += [
        f"  style {name} fill:{node.fill},stroke:{node.border}"
        for name, node in nodes.items()
        if node.fill != WHITE
    ]
    lines += [f"  linkStyle {i} stroke:{edge.colour}" for i, edge in enumerate(edges)]
    return "\n".join(lines) + "\n"


def sequence_text(diagram: SequenceDiagram) -> str:
    """Columns as participants, boxes as notes, arrows as messages, in the order of the rows."""
    lines = [*_title_lines(diagram.title), "sequenceDiagram"]
    lines += [
        f"  participant L{i} as {_escaped_text(column.short)}"
        for i, column in enumerate(diagram.columns)
    ]
    items = {item.id: item for item in diagram.items}
    notes = [(band.row, 0, band.columns[0], _band_note(band, diagram)) for band in diagram.bands]
    notes += [
        (i.row, 1, i.column, f"Note over L{i.column}: {_joined_lines(i.lines)}")
        for i in diagram.items
        if not i.in_arrow
    ]
    notes += [
        (items[a.tail].row, 2, items[a.tail].column, _message_line(a, items[a.tail], items))
        for a in diagram.arrows
    ]
    lines += [f"  {text}" for *_, text in sorted(notes, key=lambda t: t[:3])]
    return "\n".join(lines) + "\n"


def _is_drawn(edge: DiagramEdge, joined: dict[str, str], nodes: dict[str, DiagramNode]) -> bool:
    return edge.shown and joined[edge.tail] in nodes and joined[edge.head] in nodes


def _title_lines(title: str) -> list[str]:
    return ["---", f'title: "{_escaped_text(title)}"', "---"]


def _band_note(band: SequenceBand, diagram: SequenceDiagram) -> str:
    """A note over the columns; where the band has holes its members are named."""
    first, last = band.columns[0], band.columns[-1]
    whole = last - first + 1 == len(band.columns)
    text = _joined_lines(band.title) + (
        ""
        if whole
        else f"<br/>{_escaped_text(', '.join(diagram.columns[i].short for i in band.columns))}"
    )
    return f"Note over L{first},L{last}: {text}" if first != last else f"Note over L{first}: {text}"


def _message_line(arrow: SequenceArrow, tail: SequenceBox, items: dict[str, SequenceBox]) -> str:
    head = arrow.head.column if isinstance(arrow.head, LifelinePoint) else items[arrow.head].column
    label = arrow.label if arrow.label not in arrow.words and arrow.label != "waits" else ""
    text = ", ".join(t for t in (arrow.words, label) if t)
    return f"L{tail.column}{'--x' if arrow.dashed else '->>'}L{head}: {_escaped_text(text) or ' '}"


def _note_text(node: DiagramNode) -> str:
    rows = [" ".join(_cell_text(cell) for cell in row) for row in node.table]
    text = "<br/>".join([_joined_lines(node.lines), *rows] if node.lines else rows)
    return f'{node.id}["{text or " "}"]'


def _cell_text(cell: TableCell) -> str:
    return _escaped_text("+".join(p.text for p in cell.parts) if cell.parts else cell.text)


def _link_line(edge: DiagramEdge, joined: dict[str, str]) -> str:
    line = _STROKES[bool(edge.dashed), bool(edge.arrow)]
    label = f'|"{_escaped_text(edge.label)}"|' if edge.label else ""
    return f"{joined[edge.tail]} {line}{label} {joined[edge.head]}"


def _joined_lines(lines: tuple[TextLine, ...]) -> str:
    return "<br/>".join(_escaped_text(line.text) for line in lines)


def _escaped_text(text: str) -> str:
    return _UNSAFE_CHARACTERS.sub(lambda mark: f"#{ord(mark[0])};", plain_text(text)).strip()
