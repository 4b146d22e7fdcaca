"""DOT, Mermaid and the layout: escaping, determinism, formats, and what happens where a picture can't be made."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from views_made import Made, made, recv, ring, send, work

from distsim.cost import CostModel
from distsim.errors import EnvironmentFault, UsageError
from distsim.profiles import default_cluster
from distsim.scenario import loads
from distsim.views.drawing import dot as drawing
from distsim.views.drawing.dot import dot, drawn
from distsim.views.drawing.mermaid import flowchart
from distsim.views.drawing.records import Cell, Cluster, Edge, Key, Node, Picture, Text
from distsim.views.render import VIEWS, Subject, render, view_of

GOLDEN = Path(__file__).parent / "golden_views"
NASTY = ['<b>x</b> & "y"', "a\\n\\l{b}|c", 'end"];evil [label="', "</TD></TR>", "--> x", "tab\tnew\nline", "\x00\x1b[31m\x07",
         "%%{init}%%", "&#0;"]  # fmt: skip


def nasty_picture(text: str) -> Picture:
    table = ((Cell(text), Cell(parts=(Cell(text), Cell(text)))),)
    nodes = (Node("a", (Text(text), Text(text, bold=True))), Node("b", (Text(text),), table))
    return Picture(
        text, text, nodes, (Edge("a", "b", text),), (Cluster("c", text, ("b",)),), legend=(Key("#FFFFFF", text),), notes=(text,)
    )


def pair() -> Made:
    return made(2, {0: [send(1)], 1: [recv(0)]}, name="pair")


@pytest.mark.parametrize("text", NASTY)
def test_a_name_from_a_file_cannot_become_markup(text: str):
    """Every text is still one text of the drawn SVG, whatever it holds."""
    svg = drawn(dot(nasty_picture(text)), "svg", "dot").decode()
    shown = [
        "".join(t.itertext()).replace("\u00a0", " ") for t in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]
    clean = "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)

    assert sum(clean.strip() == t.strip() for t in shown) >= 7
    assert "evil" not in re.sub(r">[^<]*<", "><", svg)


@pytest.mark.parametrize("text", NASTY)
def test_mermaid_text_holds_no_mark_of_mermaids(text: str):
    for line in flowchart(nasty_picture(text)).splitlines():
        label = re.fullmatch(r'\s*\w+\["(.*)"\]', line)
        if label:
            assert not re.search(r'["`{}|\\%&]', label[1].replace("<br/>", ""))


def test_the_same_picture_is_the_same_text():
    program, run = ring(4)

    for view in ("dataflow", "waitfor", "groups", "startup"):
        for fmt in ("dot", "mermaid"):
            assert render(view, fmt, Subject(program, run)) == render(view, fmt, Subject(*ring(4)))


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_comes_in_every_format_without_a_system_dot(view: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    program, run = pair()
    if view in ("schedule", "bandwidth", "memory"):  # these need passes, and a collective
        program, run = made(2, {r: [work("forward"), work("backward"), {"op": "all_reduce", "numel": 4}] for r in range(2)})
    cost = CostModel(default_cluster("gloo"), 2, 2)
    stated = loads("world: 2\nbackend: gloo\nmemory: {model: {parameters: 1 GiB}}\nprogram: [barrier]", "a.yaml", ())
    subject = Subject(program, run, op="all_gather", cost=cost, scenario=stated)
    starts = {"svg": ("<?xml", "<svg"), "png": b"\x89PNG", "pdf": b"%PDF", "dot": "digraph", "mermaid": "---"}

    assert {"svg", "png", "pdf"} <= set(view_of(view).formats)
    for fmt in view_of(view).formats:
        assert render(view, fmt, subject)[:10].startswith(starts[fmt])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("view", "options"), [("groups", {}), ("startup", {}), ("waitfor", {}), ("op", {"op": "reduce_scatter"})]
)
def test_dot_text_is_as_agreed(view: str, options: dict[str, str]):
    program, run = made(4, {r: [send((r + 1) % 4), recv((r - 1) % 4)] for r in range(4)}, name="ring", nodes=2,
                        groups={"pair[0]": (0, 1), "pair[1]": (2, 3)}, mesh={"a": 2, "b": 2})  # fmt: skip
    agreed = GOLDEN / f"{view}.dot"

    assert agreed.read_text(encoding="utf-8") == render(view, "dot", Subject(program, run, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("arguments", "said"), [
    (("dataflo", "svg"), "did you mean dataflow"),
    (("dataflow", "pgn"), "did you mean png"),
    (("op", "svg"), "none was named"),
    (("dataflow", "svg"), "needs a program"),
])  # fmt: skip
def test_a_wrong_request_is_a_usage_error(arguments: tuple[str, str], said: str):
    with pytest.raises(UsageError, match=said):
        render(*arguments, Subject())


def test_an_unknown_operation_is_a_usage_error_with_a_near_name():
    with pytest.raises(UsageError, match="did you mean all_gather"):
        render("op", "dot", Subject(op="all_gathr"))


def test_a_view_of_a_run_says_that_it_needs_one():
    with pytest.raises(UsageError, match="needs a run"):
        render("waitfor", "dot", Subject(pair()[0]))


def test_without_pygraphviz_the_fault_names_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pygraphviz", None)

    with pytest.raises(EnvironmentFault, match="pip install"):
        render("op", "png", Subject(op="send"))


def test_a_png_without_fonts_is_refused_and_an_svg_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(drawing, "_FONT_FOLDERS", (str(tmp_path),))
    monkeypatch.setattr(sys, "platform", "linux")

    with pytest.raises(EnvironmentFault, match="needs a font"):
        render("op", "png", Subject(op="send"))
    assert "<svg" in render("op", "svg", Subject(op="send"))  # type: ignore[operator]


NEW_VIEW = """
from distsim.views.drawing.records import Node, Picture, Text
from distsim.views.drawing.view import Example, Subject, View, given


def _drawn(subject: Subject) -> Picture:
    program = given(subject.program, "program")
    return Picture(program.name, nodes=(Node("n", (Text(f"{program.world_size} ranks"),)),))


VIEW = View(_drawn, examples=(Example("hybrid", "How many there are."),))
"""
USED = """
import sys
import distsim.views.pictures
distsim.views.pictures.__path__.append(sys.argv.pop(1))
import runpy
print(sum(shown.view == "headcount" for shown in runpy.run_path("viz/make.py")["PICTURES"]))
from distsim.__main__ import main
main()
"""


def test_a_new_view_is_one_file_that_the_command_and_the_gallery_find(tmp_path: Path):
    (tmp_path / "headcount.py").write_text(NEW_VIEW)

    def distsim(*arguments: str) -> str:
        words = [sys.executable, "-c", USED, str(tmp_path), *arguments]
        return subprocess.run(words, cwd=GOLDEN.parent.parent, capture_output=True, text=True, check=True).stdout

    assert "dataflow, groups, headcount, memory, op" in " ".join(distsim("render", "--help").split())
    drawn = distsim("render", "scenarios/hybrid.yaml", "--view", "headcount", "--format", "mermaid")
    assert drawn.startswith("1\n")
    assert '["4 ranks"]' in drawn
