"""A `Picture` as DOT text, and DOT drawn: svg, png, pdf. pygraphviz brings Graphviz along; no ``dot`` need be installed.

Every label is HTML-like and every text in it escaped, so a name from a file can't become markup. The text is
deterministic; goldens compare it, never the layout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from distsim.errors import EnvironmentFault
from distsim.views.drawing.palette import GREY, INK, WHITE
from distsim.views.drawing.records import NORMAL, SMALL, TITLE, Cell, Edge, Key, Node, Picture, Text, plain_text

if TYPE_CHECKING:
    from graphviz import Digraph

FONT = "Helvetica,Arial,DejaVu Sans,sans-serif"
_POINTS_PER_INCH = 72


def dot(picture: Picture) -> str:
    """The picture as DOT. ``dot -Tsvg`` (or any Graphviz) draws it as distsim does."""
    from graphviz import Digraph

    graph = Digraph("distsim", graph_attr=_graph_attributes(picture), node_attr=_NODES, edge_attr=_EDGES)
    inside = {name for cluster in picture.clusters for name in cluster.nodes}
    nodes = {node.id: node for node in picture.nodes}
    for number, cluster in enumerate(picture.clusters):
        with graph.subgraph(name=f"cluster_{number}") as part:
            part.attr(label=_html(_text(Text(cluster.title, bold=True))), style="rounded,filled", color=cluster.border,
                      fillcolor=cluster.fill, margin="14", labeljust="l")  # fmt: skip
            for name in cluster.nodes:
                _node(part, nodes[name])
    for node in picture.nodes:
        if node.id not in inside:
            _node(graph, node)
    for row in picture.rows:
        with graph.subgraph() as same:
            same.attr(rank="same")
            for name in row:
                same.node(name)
    for edge in picture.edges:
        _edge(graph, edge)
    return str(graph.source)


_NODES = {"fontname": FONT, "fontsize": str(NORMAL), "shape": "box", "margin": "0.1,0.06", "fontcolor": INK}
_EDGES = {"fontname": FONT, "fontsize": "11", "arrowsize": "0.8", "fontcolor": INK}


def _graph_attributes(picture: Picture) -> dict[str, str]:
    common = {"bgcolor": WHITE, "fontname": FONT, "label": _head(picture), "labelloc": "t", "labeljust": "l", "pad": "0.25"}
    if picture.engine == "neato":
        return common | {"layout": "neato", "inputscale": str(_POINTS_PER_INCH), "splines": "line", "outputorder": "edgesfirst"}
    if picture.engine == "circo":
        return common | {"layout": "circo", "mindist": "1.2"}
    return common | {"rankdir": picture.direction, "nodesep": "0.35", "ranksep": "0.6", "newrank": "true", "compound": "true"}


def _head(picture: Picture) -> str:
    """Title, subtitle, notes and legend, left-aligned above the picture."""
    lines = [Text(picture.title, bold=True, size=TITLE)]
    lines += [Text(line, colour=GREY) for line in (picture.subtitle, *picture.notes) if line]
    rows = [f'<TR><TD ALIGN="LEFT">{_text(line)}</TD></TR>' for line in lines]
    if picture.legend:
        rows.append(f'<TR><TD ALIGN="LEFT">{_legend(picture.legend)}</TD></TR>')
    rows.append('<TR><TD HEIGHT="6"></TD></TR>')
    return _html(_table(rows, CELLBORDER="0", CELLSPACING="0", CELLPADDING="2"))


_SWATCH = {"": "■", "solid": "━━", "dashed": "╌╌"}
_KEYS_PER_ROW = 4


def _legend(keys: tuple[Key, ...]) -> str:
    cells = [f'<TD ALIGN="LEFT">{_font(_SWATCH[k.line], k.colour, 14)} {_text(Text(k.text, size=11))}</TD>' for k in keys]
    rows = ["".join(cells[i : i + _KEYS_PER_ROW]) for i in range(0, len(cells), _KEYS_PER_ROW)]
    return _table([f"<TR>{row}</TR>" for row in rows], CELLBORDER="0", CELLSPACING="4", CELLPADDING="1")


def _node(graph: Digraph, node: Node) -> None:
    attributes = {"label": _html(_node_label(node)), "fillcolor": node.fill, "color": node.border}
    attributes["penwidth"] = _number(node.width)
    styles = ["filled"] + (["rounded"] if node.shape == "rounded" else []) + (["dashed"] if node.dashed else [])
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


def _edge(graph: Digraph, edge: Edge) -> None:
    if not edge.shown:
        graph.edge(edge.tail, edge.head, style="invis")
        return
    attributes = {"color": edge.colour, "penwidth": _number(edge.width), "style": "dashed" if edge.dashed else "solid"}
    if edge.label:
        attributes["label"] = _html(_text(Text(f" {edge.label} ", size=11, colour=edge.colour)))
    if not edge.arrow:
        attributes["arrowhead"] = "none"
    graph.edge(edge.tail, edge.head, **attributes)


def _node_label(node: Node) -> str:
    if not node.table and len(node.lines) < 2:
        return "".join(_text(line) for line in node.lines) or " "
    if not node.table:
        lines = [f"<TR><TD>{_text(line)}</TD></TR>" for line in node.lines]
        return _table(lines, CELLBORDER="0", CELLSPACING="0", CELLPADDING="1")
    columns = max(sum(cell.span for cell in row) for row in node.table)
    rows = [f'<TR><TD BORDER="0" COLSPAN="{columns}">{_text(line)}</TD></TR>' for line in node.lines]
    rows += [f"<TR>{''.join(_cell(cell) for cell in row)}</TR>" for row in node.table]
    return _table(rows, CELLBORDER="1", CELLSPACING="2", CELLPADDING="4", COLOR=node.border)


def _cell(cell: Cell) -> str:
    attributes = {"BGCOLOR": cell.fill} | ({} if cell.border else {"BORDER": "0"}) | ({"ALIGN": "LEFT"} if cell.left else {})
    if cell.span > 1:
        attributes["COLSPAN"] = str(cell.span)
    if not cell.parts:
        return _td(_text(Text(cell.text, cell.bold, cell.colour, cell.size)), attributes)
    plus = _td(_text(Text("+", size=cell.size)), {"BORDER": "0"})
    pieces = plus.join(_td(_text(Text(p.text, p.bold, p.colour, p.size)), {"BGCOLOR": p.fill, "BORDER": "0"}) for p in cell.parts)
    inner = _table([f"<TR>{pieces}</TR>"], CELLBORDER="0", CELLSPACING="1", CELLPADDING="2")
    return _td(inner, attributes | {"CELLPADDING": "1"})


def _td(inside: str, attributes: dict[str, str]) -> str:
    return f"<TD{''.join(f' {name}={chr(34)}{value}{chr(34)}' for name, value in attributes.items())}>{inside}</TD>"


def _table(rows: list[str], **attributes: str) -> str:
    named = "".join(f' {name}="{value}"' for name, value in attributes.items())
    return f'<TABLE BORDER="0"{named}>{"".join(rows)}</TABLE>'


def _text(text: Text) -> str:
    inside = _font(text.text, text.colour, text.size)
    return f"<B>{inside}</B>" if text.bold else inside


def _font(text: str, colour: str, size: int = NORMAL) -> str:
    return f'<FONT COLOR="{colour}" POINT-SIZE="{max(size, SMALL)}">{escape(plain_text(text)) or " "}</FONT>'


def _html(inside: str) -> str:
    return f"<{inside}>"


def _inches(points: float) -> str:
    return f"{points / _POINTS_PER_INCH:.3f}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


# --- drawn ---
#: Where Linux keeps fonts (fontconfig's defaults). Other systems always have some.
_FONT_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "~/.local/share/fonts")
_PNG_DPI = "144"


def drawn(dot: str, fmt: str, engine: str) -> bytes:
    """The picture's bytes. ``fmt``: svg, png or pdf; ``engine``: a layout engine of Graphviz.

    Raises EnvironmentFault where pygraphviz is missing, where it can't write ``fmt``, or where a png would have no letters.
    """
    try:
        import pygraphviz
    except (ImportError, OSError) as error:
        raise EnvironmentFault(
            f"pictures need pygraphviz, which can't be loaded: {error}",
            "pip install 'pygraphviz>=2'; --format mermaid does without",
        ) from None
    if fmt in ("png", "pdf") and not _has_fonts():
        raise EnvironmentFault(
            f"a {fmt} needs a font and this machine has none: all letters would be empty boxes",
            "put a .ttf file into ~/.fonts, install a font package (fonts-dejavu-core), or ask for --format svg",
        )
    graph = pygraphviz.AGraph(string=dot)
    if fmt == "png":
        graph.graph_attr["dpi"] = _PNG_DPI
    try:
        with _quiet():
            return bytes(graph.draw(format=fmt, prog=engine))
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"pygraphviz can't draw {fmt} here: {error}", "ask for --format svg, dot or mermaid") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the font library has to say of the machine's fonts off the standard error, below Python."""
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
    return any(path.suffix in (".ttf", ".otf", ".ttc", ".pfb") for folder in folders for path in folder.rglob("*"))
