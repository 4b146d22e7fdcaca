"""DOT text laid out and drawn: svg, png, pdf. pygraphviz brings Graphviz along; no ``dot`` need be installed."""

from __future__ import annotations

import sys
from pathlib import Path

from distsim.errors import EnvironmentFault

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
        return bytes(graph.draw(format=fmt, prog=engine))
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"pygraphviz can't draw {fmt} here: {error}", "ask for --format svg, dot or mermaid") from None


def _has_fonts() -> bool:
    if not sys.platform.startswith("linux"):
        return True
    folders = [folder for name in _FONT_FOLDERS if (folder := Path(name).expanduser()).is_dir()]
    return any(path.suffix in (".ttf", ".otf", ".ttc", ".pfb") for folder in folders for path in folder.rglob("*"))
