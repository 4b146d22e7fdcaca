"""Writes a `BoxDiagram` as DOT text, and draws DOT as svg, png or pdf. pygraphviz includes
Graphviz, so no ``dot`` command is needed.

Every label is HTML-like and every text in it is escaped, so a name from a file cannot become
markup. The text is deterministic; tests compare it, never the layout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from distsim.common.errors import EnvironmentFault, raise_if_out_of_memory
from distsim.output.pictures.drawing.box_diagram import (
    NORMAL_SIZE,
    SMALL_SIZE,
    TITLE_SIZE,
    BoxDiagram,
    DiagramEdge,
    DiagramNode,
    LegendKey,
    TableCell,
    TextLine,
    plain_text,
)
from distsim.output.pictures.drawing.palette import GREY, INK, WHITE

if TYPE_CHECKING:
    from graphviz import Digraph

DOT_FONT = "Helvetica,Arial,DejaVu Sans,sans-serif"
_POINTS_PER_INCH = 72


def dot_text(picture: BoxDiagram) -> str:
    """The picture as DOT. ``dot -Tsvg`` (or any Graphviz) draws it as distsim does."""
    from graphviz import Digraph

    graph = Digraph(
        "distsim",
        graph_attr=_graph_attributes(picture),
        node_attr=_NODE_DEFAULTS,
        edge_attr=_EDGE_DEFAULTS,
    )
    inside = {name for cluster in picture.clusters for name in cluster.nodes}
    nodes = {node.id: node for node in picture.nodes}
    for number, cluster in enumerate(picture.clusters):
        with graph.subgraph(name=f"cluster_{number}") as part:
            part.attr(
                label=_html_label(_text_html(TextLine(cluster.title, bold=True))),
                style="rounded,filled",
                color=cluster.border,
                fillcolor=cluster.fill,
                margin="14",
                labeljust="l",
            )
            for name in cluster.nodes:
                _add_node(part, nodes[name])
    for node in picture.nodes:
        if node.id not in inside:
            _add_node(graph, node)
    for row in picture.rows:
        with graph.subgraph() as same:
            same.attr(rank="same")
            for name in row:
                same.node(name)
    for edge in picture.edges:
        _add_edge(graph, edge)
    return str(graph.source)


_NODE_DEFAULTS = {
    "fontname": DOT_FONT,
    "fontsize": str(NORMAL_SIZE),
    "shape": "box",
    "margin": "0.1,0.06",
    "fontcolor": INK,
}
_EDGE_DEFAULTS = {"fontname": DOT_FONT, "fontsize": "11", "arrowsize": "0.8", "fontcolor": INK}


def _graph_attributes(picture: BoxDiagram) -> dict[str, str]:
    common = {
        "bgcolor": WHITE,
        "fontname": DOT_FONT,
        "label": _header_label(picture),
        "labelloc": "t",
        "labeljust": "l",
        "pad": "0.25",
    }
    if picture.engine == "neato":
        return common | {
            "layout": "neato",
            "inputscale": str(_POINTS_PER_INCH),
            "splines": "line",
            "outputorder": "edgesfirst",
        }
    if picture.engine == "circo":
        return common | {"layout": "circo", "mindist": "1.2"}
    return common | {
        "rankdir": picture.direction,
        "nodesep": "0.35",
        "ranksep": "0.6",
        "newrank": "true",
        "compound": "true",
    }


def _header_label(picture: BoxDiagram) -> str:
    """Title, subtitle, notes and legend, left-aligned above the picture."""
    lines = [TextLine(picture.title, bold=True, size=TITLE_SIZE)]
    lines += [TextLine(line, colour=GREY) for line in (picture.subtitle, *picture.notes) if line]
    rows = [f'<TR><TD ALIGN="LEFT">{_text_html(line)}</TD></TR>' for line in lines]
    if picture.legend:
        rows.append(f'<TR><TD ALIGN="LEFT">{_legend_table(picture.legend)}</TD></TR>')
    rows.append('<TR><TD HEIGHT="6"></TD></TR>')
    return _html_label(_table_html(rows, CELLBORDER="0", CELLSPACING="0", CELLPADDING="2"))


_LEGEND_SYMBOLS = {"": "■", "solid": "━━", "dashed": "╌╌"}
_KEYS_PER_ROW = 4


def _legend_cell(key: LegendKey) -> str:
    symbol = _font_html(_LEGEND_SYMBOLS[key.line], key.colour, 14)
    label = _text_html(TextLine(key.text, size=11))
    return f'<TD ALIGN="LEFT">{symbol} {label}</TD>'


def _legend_table(keys: tuple[LegendKey, ...]) -> str:
    cells = [_legend_cell(key) for key in keys]
    rows = ["".join(cells[i : i + _KEYS_PER_ROW]) for i in range(0, len(cells), _KEYS_PER_ROW)]
    return _table_html(
        [f"<TR>{row}</TR>" for row in rows], CELLBORDER="0", CELLSPACING="4", CELLPADDING="1"
    )


def _add_node(graph: Digraph, node: DiagramNode) -> None:
    attributes = {
        "label": _html_label(_node_label(node)),
        "fillcolor": node.fill,
        "color": node.border,
    }
    attributes["penwidth"] = _number(node.width)
    styles = (
        ["filled"]
        + (["rounded"] if node.shape == "rounded" else [])
        + (["dashed"] if node.dashed else [])
    )
    attributes["style"] = ",".join(styles)
    if node.shape in ("plain", "ellipse", "point"):
        attributes["shape"] = node.shape
    if node.shape == "point":
        attributes |= {"width": "0.02", "style": "invis"}
    if node.at is not None:
        attributes["pos"] = f"{_number(node.at[0])},{_number(-node.at[1])}!"
    if node.size is not None:
        attributes |= {"width": _inches(node.size[0]), "height": _inches(node.size[1])}
    graph.node(node.id, **attributes)


def _add_edge(graph: Digraph, edge: DiagramEdge) -> None:
    if not edge.shown:
        graph.edge(edge.tail, edge.head, style="invis")
        return
    attributes = {
        "color": edge.colour,
        "penwidth": _number(edge.width),
        "style": "dashed" if edge.dashed else "solid",
    }
    if edge.label:
        attributes["label"] = _html_label(
            _text_html(TextLine(f" {edge.label} ", size=11, colour=edge.colour))
        )
    if not edge.arrow:
        attributes["arrowhead"] = "none"
    graph.edge(edge.tail, edge.head, **attributes)


def _node_label(node: DiagramNode) -> str:
    if not node.table and len(node.lines) < 2:
        return "".join(_text_html(line) for line in node.lines) or " "
    if not node.table:
        lines = [f"<TR><TD>{_text_html(line)}</TD></TR>" for line in node.lines]
        return _table_html(lines, CELLBORDER="0", CELLSPACING="0", CELLPADDING="1")
    columns = max(sum(cell.span for cell in row) for row in node.table)
    rows = [
        f'<TR><TD BORDER="0" COLSPAN="{columns}">{_text_html(line)}</TD></TR>'
        for line in node.lines
    ]
    rows += [f"<TR>{''.join(_cell_html(cell) for cell in row)}</TR>" for row in node.table]
    return _table_html(rows, CELLBORDER="1", CELLSPACING="2", CELLPADDING="4", COLOR=node.border)


def _cell_html(cell: TableCell) -> str:
    attributes = (
        {"BGCOLOR": cell.fill}
        | ({} if cell.border else {"BORDER": "0"})
        | ({"ALIGN": "LEFT"} if cell.left else {})
    )
    if cell.span > 1:
        attributes["COLSPAN"] = str(cell.span)
    if not cell.parts:
        return _td_html(
            _text_html(TextLine(cell.text, cell.bold, cell.colour, cell.size)), attributes
        )
    plus = _td_html(_text_html(TextLine("+", size=cell.size)), {"BORDER": "0"})
    pieces = plus.join(
        _td_html(
            _text_html(TextLine(p.text, p.bold, p.colour, p.size)),
            {"BGCOLOR": p.fill, "BORDER": "0"},
        )
        for p in cell.parts
    )
    inner = _table_html([f"<TR>{pieces}</TR>"], CELLBORDER="0", CELLSPACING="1", CELLPADDING="2")
    return _td_html(inner, attributes | {"CELLPADDING": "1"})


def _td_html(inside: str, attributes: dict[str, str]) -> str:
    written = "".join(f' {name}="{value}"' for name, value in attributes.items())
    return f"<TD{written}>{inside}</TD>"


def _table_html(rows: list[str], **attributes: str) -> str:
    named = "".join(f' {name}="{value}"' for name, value in attributes.items())
    return f'<TABLE BORDER="0"{named}>{"".join(rows)}</TABLE>'


def _text_html(text: TextLine) -> str:
    inside = _font_html(text.text, text.colour, text.size)
    return f"<B>{inside}</B>" if text.bold else inside


def _font_html(text: str, colour: str, size: int = NORMAL_SIZE) -> str:
    # Graphviz rejects an empty FONT element: an empty text becomes a space.
    shown = escape(plain_text(text)) or " "
    return f'<FONT COLOR="{colour}" POINT-SIZE="{max(size, SMALL_SIZE)}">{shown}</FONT>'


def _html_label(inside: str) -> str:
    return f"<{inside}>"


def _inches(points: float) -> str:
    return f"{points / _POINTS_PER_INCH:.3f}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


# --- drawn ---
#: Where Linux keeps fonts (fontconfig's defaults). Other systems always have some.
_FONT_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "~/.local/share/fonts")
_PNG_DPI = "144"


def render_dot(dot: str, fmt: str, engine: str) -> bytes:
    """The picture's bytes. ``fmt``: svg, png or pdf; ``engine``: a layout engine of Graphviz.

    Raises EnvironmentFault if pygraphviz is missing or cannot write ``fmt``, or if there is no font
    for a png.
    """
    try:
        import pygraphviz
    except (ImportError, OSError) as error:
        raise_if_out_of_memory(error)
        raise EnvironmentFault(
            f"drawing needs pygraphviz, which cannot be loaded: {error}",
            "pip install 'pygraphviz>=2', or use --format mermaid",
        ) from None
    if fmt in ("png", "pdf") and not _has_fonts():
        raise EnvironmentFault(
            f"writing {fmt} needs a font, and this system has none",
            "install a font package (fonts-dejavu-core), put a .ttf file into ~/.fonts, "
            "or use --format svg",
        )
    graph = pygraphviz.AGraph(string=dot)
    if fmt == "png":
        graph.graph_attr["dpi"] = _PNG_DPI
    try:
        with _silence_font_library():
            return bytes(graph.draw(format=fmt, prog=engine))
    except (OSError, ValueError) as error:
        raise EnvironmentFault(
            f"pygraphviz cannot write {fmt} here: {error}", "use --format svg, dot or mermaid"
        ) from None


@contextmanager
def _silence_font_library() -> Iterator[None]:
    """Suppress messages of the font library, which it writes to the file descriptor of stderr."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _has_fonts() -> bool:
    if not sys.platform.startswith("linux"):
        return True
    folders = [folder for name in _FONT_FOLDERS if (folder := Path(name).expanduser()).is_dir()]
    return any(
        path.suffix in (".ttf", ".otf", ".ttc", ".pfb")
        for folder in folders
        for path in folder.rglob("*")
    )
