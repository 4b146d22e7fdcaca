"""The mesh as a grid, at sizes at which boxes are too many."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from distsim.common.errors import UsageError
from distsim.output.pictures.drawing.palette import FILLS
from distsim.output.pictures.render import PictureInput, render_picture
from distsim.output.trace_data.selection import parse_selection
from distsim.program.model import Program
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import simulate

SVG = "{http://www.w3.org/2000/svg}"


def program_of(nodes: int, mesh: str = "pp: 2, tp: 8") -> PictureInput:
    text = f"""
name: <script>alert("x")</script> 網格
world: {{nodes: {nodes}, ranks_per_node: 8}}
backend: nccl
mesh: {{{mesh}}}
tensors: {{x: {{shape: [1024]}}}}
program: [{{all_reduce: {{tensor: x, group: tp}}}}]
"""
    done = simulate(loads(text), with_verdict=False, with_values=False)
    return PictureInput(done.program, done.run)


def cells(svg: str) -> dict[str, str]:
    """The fill of every cell by what the pointer finds there, of all panels."""
    shapes = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return {
        title.text or "": shape.get("fill", "")
        for shape in shapes
        for title in shape.iter(f"{SVG}title")
    }


def test_every_rank_has_a_cell_in_every_panel_and_adjacent_groups_differ_in_colour():
    svg = str(render_picture("groups", "svg", program_of(128, "pp: 8, dp: 16, tp: 8")))
    found = cells(svg)

    for axis in ("pp", "dp", "tp"):
        assert sum(f": {axis}[" in said for said in found) == 1024
    fill = {
        (said.partition(":")[0], axis): f
        for said, f in found.items()
        for axis in ("dp", "tp")
        if f": {axis}[" in said
    }
    assert all(
        fill[f"rank {r}", "dp"] != fill[f"rank {r + 1}", "dp"] for r in range(1024) if r % 8 < 7
    )
    assert all(len({fill[f"rank {8 * m + r}", "tp"] for r in range(8)}) == 1 for m in range(128))
    assert set(fill.values()) <= set(FILLS)
    assert len(svg) < 600_000
    parted = {
        path.get("d", "").count("M") for path in ElementTree.fromstring(svg).iter(f"{SVG}path")
    } - {0, 1}
    assert (
        parted == {7 * 128}
    )  # without colours: a dark line between any two groups of pp, and of dp; each tp group has its machine alone


def test_bytes_and_placement_of_groups_are_shown_and_small_worlds_keep_their_boxes():
    shown = [
        t.text or ""
        for t in ElementTree.fromstring(
            str(render_picture("groups", "svg", program_of(4, "pp: 4, tp: 8")))
        ).iter(f"{SVG}text")
    ]

    assert "tp: 4 groups of 8, within a node" in shown
    assert "pp: 8 groups of 4, across nodes" in shown
    assert "4 KiB per rank: all_reduce 4 KiB" in shown
    assert any("<script>" in word and "網格" in word for word in shown)
    assert "RANK 0" in str(render_picture("groups", "svg", program_of(2)))


def test_one_axis_can_be_chosen_and_an_unknown_one_is_refused():
    subject = program_of(4, "pp: 4, tp: 8")

    assert "pp: 8 groups" not in str(
        render_picture("groups", "svg", subject._replace(part=parse_selection(group="tp")))
    )
    with pytest.raises(UsageError, match="did you mean tp"):
        render_picture("groups", "svg", subject._replace(part=parse_selection(group="tpp")))
    assert isinstance(subject.program, Program)


def test_no_two_cells_are_drawn_at_the_same_place():
    svg = str(render_picture("groups", "svg", program_of(128, "pp: 4, dp: 4, cp: 4, ep: 2, tp: 8")))
    places = [
        (shape.get("x"), shape.get("y"))
        for shape in ElementTree.fromstring(svg).iter(f"{SVG}rect")
        for title in shape.iter(f"{SVG}title")
        if (title.text or "").startswith("rank ")
    ]

    assert len(places) == 5 * 1024
    assert len(set(places)) == len(places)
