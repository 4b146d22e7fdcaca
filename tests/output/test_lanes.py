"""Pictures tell the truth at any size: ranks and steps are folded, and areas are shares of time."""

from __future__ import annotations

import re
import struct
import zlib
from time import process_time
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray

from distsim.common.errors import UsageError
from distsim.findings.finding_types import SourceLocation
from distsim.output.pictures.components.lane_chart import EXPOSED_FILL
from distsim.output.pictures.components.timeline_lanes import LOWER_HEIGHT
from distsim.output.pictures.drawing.svg_conversion import convert_svg
from distsim.output.pictures.views.timeline import timeline_svg
from distsim.output.trace_data.activity import ActivityReader
from distsim.output.trace_data.lanes import RankRows, group_equal_steps, group_ranks_into_lanes
from distsim.output.trace_data.selection import (
    RunSelection,
    parse_number_ranges,
    parse_selection,
    selected_ranks,
    time_window,
)
from distsim.output.trace_data.time_spans import (
    TimeSpans,
    covered_shares,
    exclusive_layers,
    merged_spans,
    spans_without,
)
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import simulate
from distsim.simulation.training_metrics import training_metrics
from distsim.trace.model import COLUMN_TYPES, Trace
from tests.support.views_made import TWO_STAGE_TRAINING, made, work

SVG = "{http://www.w3.org/2000/svg}"
COMPUTE_NS, MOVE_NS = 993_000, 7_000


def steps_trace(
    ranks: int, steps: int, move_ns: NDArray[np.int64] | int = MOVE_NS, slow: int = -1
) -> Trace:
    """Every rank computes and reduces, over and over; ``slow`` takes twice as long to reduce in the
    last step.
    """
    shape = (ranks, steps, 2)
    columns = {name: np.full(shape, -1, dtype=kind) for name, kind in COLUMN_TYPES.items()}
    columns["rank"][:] = np.arange(ranks)[:, None, None]
    columns["iteration"][:] = np.arange(steps)[:, None]
    columns["op"][:] = columns["name"][:] = columns["queue"][:] = (0, 1)
    columns["group"][:], columns["place"][:], columns["nbytes"][:] = 0, 0, (0, 4096)
    columns["match"][..., 1] = np.arange(steps)
    columns["position"][:] = np.arange(2 * steps).reshape(steps, 2)
    begin = np.arange(steps) * (COMPUTE_NS + np.max(move_ns))
    columns["posted_ns"][..., 0] = columns["started_ns"][..., 0] = begin
    columns["finished_ns"][..., 0] = columns["posted_ns"][..., 1] = columns["started_ns"][
        ..., 1
    ] = begin + COMPUTE_NS
    columns["finished_ns"][..., 1] = (begin + COMPUTE_NS) + np.broadcast_to(move_ns, (ranks, 1))
    if slow >= 0:
        columns["finished_ns"][slow, -1, 1] += MOVE_NS
    columns["returned_ns"] = columns["finished_ns"].copy()
    tables = {
        "op": ["compute", "all_reduce"],
        "group": ["world"],
        "dtype": [],
        "reduce_op": [],
        "queue": ["current", "world"],
        "place": [SourceLocation("f.yaml", 1, 1)],
        "name": ["work", ""],
        "args": [],
    }
    header = {
        "name": "steps",
        "world_size": ranks,
        "backend": "gloo",
        "outcome": "completes",
        "groups": [["world", list(range(ranks))]],
    }
    return Trace(header, tables, {name: column.ravel() for name, column in columns.items()})


def area(svg: str, fill: str, below: float) -> float:
    """What the rectangles and skylines of a fill cover, in square pixels, above a height of the
    page; the legend is not counted.
    """
    found = 0.0
    for shape in ElementTree.fromstring(svg).iter():
        if shape.get("fill") != fill:
            continue
        if (
            shape.tag == f"{SVG}rect"
            and float(shape.get("y", 0)) > 90
            and float(shape.get("y", 0)) < below
        ):
            found += float(shape.get("width", 0)) * float(shape.get("height", 0))
        elif (
            shape.tag == f"{SVG}path"
            and float(re.findall(r"M\S+ ([\d.]+)", shape.get("d", ""))[0]) < below
        ):
            for piece in shape.get("d", "").strip("z").split("z"):
                x, foot = (float(n) for n in re.match(r"M(\S+) ([\d.]+)", piece).groups())  # type: ignore[union-attr]
                for top, to in re.findall(r"V([\d.]+)H([\d.]+)", piece):
                    found += (foot - float(top)) * (float(to) - x)
                    x = float(to)
    return found


def second_panel(svg: str) -> float:
    return min(
        (
            float(t.get("y", 0))
            for t in ElementTree.fromstring(svg).iter(f"{SVG}text")
            if "are identical" in (t.text or "")
        ),
        default=1e9,
    )


def pixels(png: bytes, rows: int) -> NDArray[np.int64]:
    """The first rows of red, green and blue of a png of 8 bits without interlace
    (https://www.w3.org/TR/png-3/).
    """
    width, _, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert (depth, kind) in ((8, 2), (8, 6))
    at, data, many = 8, b"", 3 if kind == 2 else 4
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        data += png[at + 8 : at + 8 + length] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + length
    raw, stride = zlib.decompress(data), 1 + width * many
    found, above = [], [0] * (width * many)
    for y in range(rows):
        above = _unfiltered(
            raw[y * stride], list(raw[y * stride + 1 : (y + 1) * stride]), above, many
        )
        found.append(above)
    return np.array(found).reshape(rows, width, many)[..., :3]


def _unfiltered(how: int, line: list[int], above: list[int], many: int) -> list[int]:
    for x, value in enumerate(line):
        left, corner = (line[x - many], above[x - many]) if x >= many else (0, 0)
        near = (
            sorted((left, above[x], corner), key=lambda one: abs(left + above[x] - corner - one))[0]
            if how == 4
            else 0
        )
        line[x] = (value + (0, left, above[x], (left + above[x]) // 2, near)[how]) % 256
    return line


# --- the timeline ---


@pytest.mark.parametrize("ranks", [16, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_thousand_steps_are_drawn_quickly_compactly_and_to_scale(ranks: int):
    """0.7 % of the time goes into communication, a thousand times 7 us: so much of the track is
    covered, and no more.
    """
    trace = steps_trace(ranks, 1000)
    begun = process_time()
    svg = timeline_svg(trace)
    took = process_time() - begun

    share = area(svg, EXPOSED_FILL, second_panel(svg)) / (1080 * (LOWER_HEIGHT - 2))
    assert share == pytest.approx(MOVE_NS / (MOVE_NS + COMPUTE_NS), rel=0.02)
    assert len(svg) <= 2_000_000
    assert "communication (exposed) 0.7 %" in svg
    assert "(× 1000)" in svg
    assert took <= 5


def test_hundreds_of_different_ranks_become_a_few_lanes_with_correct_coverage():
    svg = timeline_svg(steps_trace(256, 40, np.arange(256)[:, None] * 10))
    shown = [t.text or "" for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]

    assert "256 ranks in 2 lanes" in " ".join(shown)
    assert {"rank 255", "ranks 0-254", "255 similar ranks, mean"} <= set(
        shown
    )  # the first holds the critical path
    assert len(svg) <= 2_000_000


def test_the_pixel_share_of_communication_is_its_time_share():
    """Looked at as a png, where the smallest strokes are a shade: the shade is as dark as the
    stroke is wide.
    """
    pytest.importorskip("typst")
    svg = timeline_svg(steps_trace(1, 1000, 40_000))
    scale = 1.0
    lane = next(
        r
        for r in ElementTree.fromstring(svg).iter(f"{SVG}rect")
        if r.get("height") == str(int(LOWER_HEIGHT))
    )
    x, y = (float(lane.get(side, 0)) for side in "xy")
    image = pixels(convert_svg(svg, "png", 96 * scale), int((y + LOWER_HEIGHT) * scale))
    inside = image[
        int((y + 1) * scale) : int((y + LOWER_HEIGHT - 1) * scale),
        int((x + 2) * scale) : int((x + 1078) * scale),
    ]
    dark = np.array([int(EXPOSED_FILL[i : i + 2], 16) for i in (1, 3, 5)])
    share = float(((255 - inside) @ (255 - dark)).mean() / ((255 - dark) @ (255 - dark)))

    assert share == pytest.approx(40_000 / (40_000 + COMPUTE_NS), rel=0.02)


# --- folding ---


def test_equal_ranks_share_a_lane_and_a_different_rank_has_its_own():
    lanes = group_ranks_into_lanes(steps_trace(64, 3, slow=17), range(64))

    assert [(len(lane.ranks), lane.like) for lane in lanes] == [(63, "equal"), (1, "equal")]
    assert lanes[1].ranks == (17,)


def test_every_rank_is_drawn_exactly_once_in_any_space():
    trace = steps_trace(100, 2, np.arange(100)[:, None])

    for most in (1, 3, 8, 200):
        lanes = group_ranks_into_lanes(trace, range(100), (99, 50), most)
        assert sorted(r for lane in lanes for r in lane.ranks) == list(range(100))
        assert len(lanes) <= max(most, 2) or most == 200
    assert {(99,), (50,)} <= {
        lane.ranks for lane in group_ranks_into_lanes(trace, range(100), (99, 50), 8)
    }


def test_equal_steps_are_merged_and_a_different_step_stays_separate():
    steps = group_equal_steps(steps_trace(4, 10), range(4))
    other = group_equal_steps(steps_trace(4, 10, slow=2), range(4))

    assert [(s.first, s.times) for s in steps] == [(0, 10)]
    assert [(s.first, s.times) for s in other] == [(0, 9), (9, 1)]
    assert group_equal_steps(steps_trace(4, 1), range(4)) == ()


# --- a part of it ---


def test_a_selection_is_written_as_lists_ranges_and_names():
    trace = steps_trace(8, 5)

    assert parse_number_ranges("0-2, 7", "ranks") == (0, 1, 2, 7)
    assert parse_selection(time="1 ms..2.5 ms").time == (10**6, 2_500_000)
    assert selected_ranks(RunSelection(ranks=(1, 99)), trace) == (1,)
    assert time_window(RunSelection(steps=(1, 2)), trace, trace.makespan_ns) == (
        1_000_000,
        3_000_000,
    )
    svg = timeline_svg(trace, parse_selection("1", "2"))
    assert "7 ranks are not drawn" in svg
    assert ">rank 1<" in svg


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": "x"},
        {"ranks": "3-1"},
        {"ranks": ""},
        {"ranks": "0-99999999"},
        {"ranks": "9"},
        {"steps": "-1"},
        {"steps": "7"},
        {"time": "3 ms"},
        {"time": "2 ms..1 ms"},
        {"time": "1..2"},
        {"time": "1 h..2 h"},
        {"group": "<script>"},
    ],
)
def test_an_invalid_selection_is_refused_with_a_reason(wrong: dict[str, str]):
    with pytest.raises(UsageError) as caught:
        timeline_svg(steps_trace(4, 2), parse_selection(**wrong))
    assert caught.value.remedy


# --- spans ---


def spans(*pairs: tuple[int, int]) -> TimeSpans:
    return TimeSpans(
        np.array([a for a, _ in pairs], dtype=np.int64),
        np.array([b for _, b in pairs], dtype=np.int64),
    )


def plain(found: TimeSpans) -> list[tuple[int, int]]:
    return list(zip(found.starts.tolist(), found.ends.tolist(), strict=True))


def test_spans_are_merged_cut_and_intersected():
    assert plain(merged_spans(spans((5, 7), (0, 2), (2, 3), (6, 9), (4, 4)))) == [(0, 3), (5, 9)]
    assert plain(spans_without(spans((0, 10)), spans((2, 3), (5, 20)))) == [(0, 2), (3, 5)]
    assert plain(spans_without(spans((0, 10)), spans())) == [(0, 10)]
    assert [plain(one) for one in exclusive_layers([spans((2, 4)), spans((0, 3), (3, 6))])] == [
        [(2, 4)],
        [(0, 2), (4, 6)],
    ]
    assert covered_shares(spans((0, 5), (7, 8)), np.array([0.0, 4.0, 8.0, 8.0])).tolist() == [
        1.0,
        0.5,
        0.0,
    ]


def test_a_rank_has_one_kind_of_activity_at_every_instant():
    """Compute, what moves meanwhile or alone, and waiting cover a rank's time as `rank_times`
    counts it.
    """
    from distsim.analysis.timeline import rank_times

    trace = steps_trace(2, 3)
    doing, times = (
        ActivityReader(trace, trace.makespan_ns)(RankRows(trace)(1)),
        rank_times(trace, trace.makespan_ns)[1],
    )

    assert (
        tuple(
            sum(one.total for one in kind)
            for kind in (doing.kinds()[0], doing.kinds()[2], doing.kinds()[4])
        )
        == times[1:4]
    )


def test_shares_in_the_timelines_legend_are_those_of_the_text_report():
    """Launches by the host overlap the work of the device; they take nothing from its share."""
    simulation = simulate(loads(TWO_STAGE_TRAINING, "a.yaml", ()))
    metrics = training_metrics(simulation)
    assert metrics is not None
    svg = timeline_svg(simulation.run.trace)
    legend = dict(re.findall(r">([^<>]*?) (?:&lt; )?([\d.]+) %<", svg))
    shares = {name: 100 * share for name, share in metrics.shares.items()}

    assert float(legend["backward"]) == pytest.approx(shares["backward"], abs=0.5)
    assert float(legend["compute"]) == pytest.approx(
        shares["forward"] + shares["optimizer"], abs=0.5
    )
    assert float(legend["communication (exposed)"]) == pytest.approx(
        shares["exposed communication"], abs=0.05
    )
    idle = sum(float(legend[name]) for name in ("waiting", "host work, device idle", "idle"))
    assert idle == pytest.approx(shares["bubble"], abs=1)


def test_a_call_that_ends_at_time_zero_takes_no_time():
    trace = made(1, {0: [work("nothing", ms=0), work("step", ms=1)]})[1].trace
    busy = ActivityReader(trace, trace.makespan_ns)(np.array([0])).kinds()[0]

    assert sum(one.total for one in busy) == 0
