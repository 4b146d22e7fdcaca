"""The timeline picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from views_made import made, recv, ring, send, wait, work

from distsim.errors import UsageError
from distsim.views.pictures.timeline import _both, _ticks, _union, _without, timeline_svg
from distsim.views.render import Subject, render

SVG = "{http://www.w3.org/2000/svg}"


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_timeline_is_an_svg_with_a_row_per_rank_bars_and_an_axis():
    svg = timeline_svg(*made(2, {0: [work("forward", 3), send(1)], 1: [recv(0), work("backward", 2)]}, name="<b>&"))
    shown = words(svg)

    assert {"rank 0", "rank 1", "forward", "backward", "waiting", "critical path", "0", "1 ms"} <= set(shown)
    assert "<b>&: where the time goes" in shown
    assert 'marker-end="url(#arrow)"' in svg


def test_a_rank_that_never_goes_on_waits_for_ever():
    assert words(timeline_svg(*made(2, {r: [work(), send(1 - r)] for r in range(2)}))).count("waits for ever") == 2


def test_a_run_without_time_can_be_drawn():
    assert "rank 2" in words(timeline_svg(*ring(3)))


def test_communication_beside_compute_has_its_own_colour():
    calls = {r: [{"op": "all_reduce", "numel": 10**6, "async": True, "handle": "h"}, work("f", 50), wait("h")] for r in range(2)}

    assert "hidden by compute" in timeline_svg(*made(2, calls))


def test_streams_that_overlap_have_tracks_of_their_own_with_their_names():
    def calls(stream: str) -> list[dict[str, object]]:
        launches = [{"op": "all_reduce", "numel": 10**7, "queue": q, "group": g} for q, g in (("reduce", "world"), (stream, "g"))]
        return [*launches, work("f", 50)]

    groups = {"g": [0, 1]}
    one, two = (
        timeline_svg(*made(2, {r: calls(stream) for r in range(2)}, backend="nccl", groups=groups))
        for stream in ("reduce", "gather")
    )

    assert not {"reduce", "gather"} & set(words(one))  # one after the other: one track
    assert words(two).count("reduce") == words(two).count("gather") == 2
    assert _height(two) > _height(one)


def _height(svg: str) -> float:
    return float(ElementTree.fromstring(svg).attrib["height"])


def test_backward_passes_have_a_shade_of_their_own_and_narrow_bars_a_letter():
    passes = [work(name, 1) for name in ("forward", "backward", "backward input", "backward weight")]
    shown = words(timeline_svg(*made(2, {r: [*passes, work("other", 60)] for r in range(2)})))

    assert [shown.count(letter) for letter in "FBIW"] == [2, 2, 2, 2]
    assert "backward" in shown  # in the legend
    assert "backward" not in words(timeline_svg(*made(2, {r: [work("forward", 3)] for r in range(2)})))


def test_the_timeline_of_a_thousand_ranks_is_bounded():
    program, run = made(1000, {r: [work(), {"op": "barrier"}] for r in range(1000)})
    svg = timeline_svg(program, run)

    assert "and 952 more ranks, not drawn" in svg
    assert len(svg) < 200_000


def test_the_same_run_gives_the_same_bytes():
    assert timeline_svg(*ring(3)) == timeline_svg(*ring(3))


@pytest.mark.parametrize("fmt", ["png", "pdf", "dot", "mermaid"])
def test_other_formats_are_refused_by_naming_svg(fmt: str):
    program, run = ring(2)

    with pytest.raises(UsageError, match="svg"):
        render("timeline", fmt, Subject(program, run))


def test_spans_are_merged_cut_and_intersected():
    assert _union([(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)]) == [(0, 3), (5, 9)]
    assert _without([(0, 10)], [(2, 3), (5, 20)]) == [(0, 2), (3, 5)]
    assert _both([(0, 10)], [(2, 3), (5, 20)]) == [(2, 3), (5, 10)]


@pytest.mark.parametrize("end", [0, 1, 9, 10, 99, 1234, 19_041_067, 10**12])
def test_the_axis_has_at_most_eleven_round_ticks(end: int):
    ticks = _ticks(end)

    assert ticks[0] == 0
    assert len(ticks) <= 11
    assert all(str(t).rstrip("0") in {"", "1", "2", "3", "4", "5", "6", "7", "8", "9", "12", "14", "16", "18", "15", "25", "35", "45", *"0"}
               for t in ticks)  # fmt: skip
