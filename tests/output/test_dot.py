"""DOT, Mermaid and the layout: escaping, determinism, formats, and what happens where a picture
can't be made.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from distsim.backends import default_cluster
from distsim.common.errors import EnvironmentFault, UsageError, resource_error
from distsim.hardware.cost import CostModel
from distsim.output.pictures.drawing import dot as drawing
from distsim.output.pictures.drawing.box_diagram import (
    BoxDiagram,
    DiagramEdge,
    DiagramFrame,
    DiagramNode,
    LegendKey,
    TableCell,
    TextLine,
)
from distsim.output.pictures.drawing.dot import dot_text, render_dot
from distsim.output.pictures.drawing.mermaid import flowchart_text
from distsim.output.pictures.render import VIEW_NAMES, PictureInput, load_view, render_picture
from distsim.scenario import loads
from tests.support.views_made import Made, made, recv, ring, send, work

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden_views"
NASTY = [
    '<b>x</b> & "y"',
    "a\\n\\l{b}|c",
    'end"];evil [label="',
    "</TD></TR>",
    "--> x",
    "tab\tnew\nline",
    "\x00\x1b[31m\x07",
    "%%{init}%%",
    "&#0;",
]


def nasty_picture(text: str) -> BoxDiagram:
    table = ((TableCell(text), TableCell(parts=(TableCell(text), TableCell(text)))),)
    nodes = (
        DiagramNode("a", (TextLine(text), TextLine(text, bold=True))),
        DiagramNode("b", (TextLine(text),), table),
    )
    return BoxDiagram(
        text,
        text,
        nodes,
        (DiagramEdge("a", "b", text),),
        (DiagramFrame("c", text, ("b",)),),
        legend=(LegendKey("#FFFFFF", text),),
        notes=(text,),
    )


def pair() -> Made:
    return made(2, {0: [send(1)], 1: [recv(0)]}, name="pair")


@pytest.mark.parametrize("text", NASTY)
def test_a_name_in_a_file_cannot_become_markup(text: str):
    """Every text is still one text of the drawn SVG, whatever it holds."""
    svg = render_dot(dot_text(nasty_picture(text)), "svg", "dot").decode()
    shown = [
        "".join(t.itertext()).replace("\u00a0", " ")
        for t in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]
    clean = "".join(
        c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text
    )

    assert sum(clean.strip() == t.strip() for t in shown) >= 7
    assert "evil" not in re.sub(r">[^<]*<", "><", svg)


@pytest.mark.parametrize("text", NASTY)
def test_mermaid_text_contains_no_mermaid_syntax_from_names(text: str):
    for line in flowchart_text(nasty_picture(text)).splitlines():
        label = re.fullmatch(r'\s*\w+\["(.*)"\]', line)
        if label:
            assert not re.search(r'["`{}|\\%&]', label[1].replace("<br/>", ""))


def test_drawing_twice_gives_the_same_text():
    program, run = ring(4)

    for view in ("dataflow", "wait-for", "groups", "startup"):
        for fmt in ("dot", "mermaid"):
            assert render_picture(view, fmt, PictureInput(program, run)) == render_picture(
                view, fmt, PictureInput(*ring(4))
            )


@pytest.mark.parametrize("view", VIEW_NAMES)
def test_every_view_is_available_in_every_format_without_system_graphviz(
    view: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", "")
    program, run = pair()
    if view in ("schedule", "bandwidth", "memory"):  # these need passes, and a collective
        program, run = made(
            2,
            {
                r: [work("forward"), work("backward"), {"op": "all_reduce", "numel": 4}]
                for r in range(2)
            },
        )
    cost = CostModel(default_cluster("gloo"), 2, 2)
    stated = loads(
        "world: 2\nbackend: gloo\nmemory: {model: {parameters: 1 GiB}}\nprogram: [barrier]",
        "a.yaml",
        (),
    )
    subject = PictureInput(program, run, op="all_gather", cost=cost, scenario=stated)
    starts = {
        "svg": ("<?xml", "<svg"),
        "png": b"\x89PNG",
        "pdf": b"%PDF",
        "dot": "digraph",
        "mermaid": "---",
    }

    assert {"svg", "png", "pdf"} <= set(load_view(view).formats)
    for fmt in load_view(view).formats:
        assert render_picture(view, fmt, subject)[:10].startswith(starts[fmt])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("view", "options"),
    [("groups", {}), ("startup", {}), ("wait-for", {}), ("operation", {"op": "reduce_scatter"})],
)
def test_dot_text_is_as_agreed(view: str, options: dict[str, str]):
    program, run = made(
        4,
        {r: [send((r + 1) % 4), recv((r - 1) % 4)] for r in range(4)},
        name="ring",
        nodes=2,
        groups={"pair[0]": (0, 1), "pair[1]": (2, 3)},
        mesh={"a": 2, "b": 2},
    )
    agreed = GOLDEN / f"{view}.dot"

    assert agreed.read_text(encoding="utf-8") == render_picture(
        view, "dot", PictureInput(program, run, **options)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("dataflo", "svg"), "did you mean dataflow"),
        (("dataflow", "pgn"), "did you mean png"),
        (("waitfor", "svg"), "did you mean wait-for"),
        (("op", "svg"), "did you mean operation"),
        (("rounds", "svg"), "did you mean algorithm"),
        (("operation", "svg"), "needs the name of an operation"),
        (("dataflow", "svg"), "needs a program"),
    ],
)
def test_a_wrong_request_is_a_usage_error(arguments: tuple[str, str], said: str):
    with pytest.raises(UsageError, match=said):
        render_picture(*arguments, PictureInput())


def test_an_unknown_operation_is_a_usage_error_with_a_suggestion():
    with pytest.raises(UsageError, match="did you mean all_gather"):
        render_picture("operation", "dot", PictureInput(op="all_gathr"))


def test_a_view_of_a_run_without_a_run_is_reported():
    with pytest.raises(UsageError, match="needs a run"):
        render_picture("wait-for", "dot", PictureInput(pair()[0]))


def test_without_pygraphviz_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pygraphviz", None)

    with pytest.raises(EnvironmentFault, match="pip install"):
        render_picture("operation", "png", PictureInput(op="send"))


def test_a_library_that_does_not_fit_into_memory_is_not_reported_as_missing(
    monkeypatch: pytest.MonkeyPatch,
):
    class Loader:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "pygraphviz":
                raise ImportError("libcgraph.so: failed to map segment from shared object")

    monkeypatch.delitem(sys.modules, "pygraphviz", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Loader(), *sys.meta_path])

    with pytest.raises(MemoryError) as raised:
        render_picture("operation", "png", PictureInput(op="send"))
    assert resource_error(raised.value, "").message == "not enough free memory"


def test_png_without_fonts_is_refused_and_svg_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(drawing, "_FONT_FOLDERS", (str(tmp_path),))
    monkeypatch.setattr(sys, "platform", "linux")

    with pytest.raises(EnvironmentFault, match="needs a font"):
        render_picture("operation", "png", PictureInput(op="send"))
    assert "<svg" in render_picture("operation", "svg", PictureInput(op="send"))  # type: ignore[operator]


NEW_VIEW = """
from distsim.output.pictures.drawing.box_diagram import BoxDiagram, DiagramNode, TextLine
from distsim.output.pictures.components.view_interface import GalleryExample, PictureInput, PictureView, require_input


def _drawn(subject: PictureInput) -> BoxDiagram:
    program = require_input(subject.program, "program")
    return BoxDiagram(program.name, nodes=(DiagramNode("n", (TextLine(f"{program.world_size} ranks"),)),))


VIEW = PictureView(_drawn, examples=(GalleryExample("hybrid", "How many there are."),))
"""
USED = """
import sys
import distsim.output.pictures.views
distsim.output.pictures.views.__path__.append(sys.argv.pop(1))
import runpy
print(sum(shown.view == "headcount" for shown in runpy.run_path("viz/make.py")["PICTURES"]))
from distsim.__main__ import main
main()
"""


def test_a_new_view_is_one_file_found_by_command_and_gallery(tmp_path: Path):
    (tmp_path / "headcount.py").write_text(NEW_VIEW)

    def distsim(*arguments: str) -> str:
        words = [sys.executable, "-c", USED, str(tmp_path), *arguments]
        return subprocess.run(
            words, cwd=GOLDEN.parents[2], capture_output=True, text=True, check=True
        ).stdout

    assert "dataflow, groups, headcount, memory, op" in " ".join(
        distsim("render", "--help").split()
    )
    drawn = distsim("render", "scenarios/hybrid.yaml", "--view", "headcount", "--format", "mermaid")
    assert drawn.startswith("1\n")
    assert '["4 ranks"]' in drawn
