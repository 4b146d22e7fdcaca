"""The timeline picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from distsim.common.errors import UsageError
from distsim.engine import SimulatedRun
from distsim.output.pictures.drawing.svg import round_ticks
from distsim.output.pictures.render import PictureInput, render_picture
from distsim.output.pictures.views.timeline import timeline_svg
from distsim.program.model import Program
from tests.support.views_made import made, recv, ring, send, wait, work

SVG = "{http://www.w3.org/2000/svg}"


def drawn(program: Program, run: SimulatedRun) -> str:
    return timeline_svg(run.trace, stuck=run.final_state.stuck)


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_timeline_is_an_svg_with_a_row_per_rank_bars_and_an_axis():
    svg = drawn(
        *made(2, {0: [work("forward", 3), send(1)], 1: [recv(0), work("backward", 2)]}, name="<b>&")
    )
    shown = words(svg)

    assert {
        "rank 0",
        "rank 1",
        "forward",
        "backward",
        "waiting",
        "critical path",
        "0",
        "1 ms",
    } <= set(shown)
    assert "<b>&: timeline" in shown
    assert 'marker-end="url(#arrow)"' in svg


def test_a_rank_that_never_returns_waits_to_the_right_edge():
    assert (
        words(drawn(*made(2, {r: [work(ms=1 + r), send(1 - r)] for r in range(2)}))).count(
            "waits forever"
        )
        == 2
    )


def test_a_run_without_duration_can_be_drawn():
    assert "ranks 0-2" in words(drawn(*ring(3)))


def test_communication_during_compute_has_its_own_colour():
    calls = {
        r: [
            {"op": "all_reduce", "numel": 10**6, "async": True, "handle": "h"},
            work("f", 50),
            wait("h"),
        ]
        for r in range(2)
    }

    assert "overlapped with compute" in drawn(*made(2, calls))


def test_concurrent_streams_have_their_own_named_tracks():
    def calls(stream: str) -> list[dict[str, object]]:
        launches = [
            {"op": "all_reduce", "numel": 10**7, "queue": q, "group": g}
            for q, g in (("reduce", "world"), (stream, "g"))
        ]
        return [*launches, work("f", 50)]

    groups = {"g": [0, 1]}
    one, two = (
        drawn(*made(2, {r: calls(stream) for r in range(2)}, backend="nccl", groups=groups))
        for stream in ("reduce", "gather")
    )

    assert not {"reduce", "gather"} & set(words(one))  # one after the other: one track
    assert words(two).count("reduce") == words(two).count("gather") == 1
    assert _height(two) > _height(one)


def _height(svg: str) -> float:
    return float(ElementTree.fromstring(svg).attrib["height"])


def test_backward_passes_have_their_own_shade_and_narrow_bars_a_letter():
    passes = [
        work(name, 1) for name in ("forward", "backward", "backward input", "backward weight")
    ]
    shown = words(drawn(*made(2, {r: [*passes, work("other", 60 + r)] for r in range(2)})))

    assert [shown.count(letter) for letter in "FBIW"] == [2, 2, 2, 2]
    assert any(
        word.startswith("backward ") and word.endswith("%") for word in shown
    )  # in the legend
    assert "backward" not in " ".join(
        words(drawn(*made(2, {r: [work("forward", 3)] for r in range(2)})))
    )


def test_hundreds_of_equal_ranks_are_one_lane_with_their_count():
    program, run = made(300, {r: [work(), {"op": "barrier"}] for r in range(300)})
    svg = drawn(program, run)

    assert {"ranks 0-299", "300 identical ranks"} <= set(words(svg))
    assert len(svg) < 10_000


def test_the_same_run_gives_the_same_bytes():
    assert drawn(*ring(3)) == drawn(*ring(3))


@pytest.mark.parametrize("fmt", ["dot", "mermaid"])
def test_a_timeline_has_no_text_form(fmt: str):
    program, run = ring(2)

    with pytest.raises(UsageError, match="svg"):
        render_picture("timeline", fmt, PictureInput(program, run))


@pytest.mark.parametrize("end", [0, 1, 9, 10, 99, 1234, 19_041_067, 10**12])
def test_the_axis_has_at_most_eleven_round_ticks(end: int):
    found = round_ticks(end)

    assert found[0] == 0
    assert len(found) <= 11
    assert all(
        str(t).rstrip("0")
        in {
            "",
            "1",
            "2",
            "3",
            "4",
            "5",
            "6",
            "7",
            "8",
            "9",
            "12",
            "14",
            "16",
            "18",
            "15",
            "25",
            "35",
            "45",
            *"0",
        }
        for t in found
    )
