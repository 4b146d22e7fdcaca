"""What each picture shows."""

from __future__ import annotations

from itertools import pairwise
from math import atan2, pi
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.findings.final_state import BlockedRank, FinalState, RankEnd, WaitDependency
from distsim.operations.registry import OPERATIONS
from distsim.output.pictures.drawing.box_diagram import BoxDiagram, text_width
from distsim.output.pictures.drawing.mermaid import sequence_text
from distsim.output.pictures.drawing.palette import PALE_FILL, PASS_FILLS, RED, RED_FILL
from distsim.output.pictures.drawing.sequence_diagram import SequenceDiagram, laid_out_diagram
from distsim.output.pictures.views.dataflow import dataflow_diagram
from distsim.output.pictures.views.groups import groups_picture
from distsim.output.pictures.views.operation import operation_diagram
from distsim.output.pictures.views.startup import startup_diagram
from distsim.output.pictures.views.wait_for import wait_for_diagram
from distsim.output.trace_data.selection import parse_selection
from distsim.program.from_calls import build_program
from distsim.program.model import RankFault
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import simulate
from tests.support.views_made import box, cell_text, made, recv, ring, send, texts, wait, work

COLLECTIVES = [name for name, row in OPERATIONS.items() if row.kind == "collective"]


# --- one operation ---
def held(picture: BoxDiagram, when: str, rank: int) -> list[str]:
    return [cell_text(cell) for row in box(picture, f"{when}{rank}").table for cell in row]


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_of_the_table_has_a_picture(name: str):
    picture = operation_diagram(OPERATIONS[name])

    assert picture.title == name
    assert {"op", "before0", "after0"} <= {node.id for node in picture.nodes}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("n", [2, 4])
def test_the_final_state_of_a_rank_is_the_effect_of_the_row(name: str, n: int):
    row, picture = OPERATIONS[name], operation_diagram(OPERATIONS[name], n)

    for rank, effect in enumerate(row.effect(n, 0)):
        if effect is not None and row.gets != "none":
            texts_held = [
                text for text in held(picture, "after", rank) if text not in ("x", "y", "")
            ]  # names of a launch's tensors
            assert [len(text.split("+")) for text in texts_held] == [
                len(part) for part in effect
            ] * (2 if row.coalesces else 1)


def test_a_coalesced_launch_shows_two_tensors_of_its_list():
    assert held(
        operation_diagram(OPERATIONS["all_gather_into_tensor_coalesced"], 2), "after", 1
    ) == [
        "x",
        "a",
        "",
        "b",
        "y",
        "a",
        "",
        "b",
    ]
    assert held(
        operation_diagram(OPERATIONS["reduce_scatter_tensor_coalesced"], 2), "after", 1
    ) == [
        "x",
        "a1+b1",
        "y",
        "a1+b1",
    ]


def test_letters_show_the_origin_of_data():
    assert held(operation_diagram(OPERATIONS["all_gather"]), "after", 2) == ["a", "b", "c", "d"]
    assert held(operation_diagram(OPERATIONS["all_to_all"]), "after", 1) == ["a1", "b1", "c1", "d1"]
    assert held(operation_diagram(OPERATIONS["reduce_scatter"]), "after", 3) == ["a3+b3+c3+d3"]
    assert held(operation_diagram(OPERATIONS["reduce"]), "after", 0) == ["a+b+c+d"]
    assert held(operation_diagram(OPERATIONS["scatter"]), "after", 2) == ["a2"]
    assert held(operation_diagram(OPERATIONS["send"]), "after", 1) == ["a"]


def test_one_colour_represents_one_rank():
    colours = {
        cell.text: cell.fill
        for r in range(4)
        for row in box(operation_diagram(OPERATIONS["all_gather"]), f"after{r}").table
        for cell in row
    }

    assert len(set(colours.values())) == len(colours) == 4


# --- groups ---
def test_a_rank_shows_its_numbers_and_its_rank_in_each_group():
    program = build_program(
        4,
        {},
        groups={"tp[0]": (0, 1), "tp[1]": (2, 3), "odd": (1, 3)},
        nodes=2,
        mesh={"dp": 2, "tp": 2},
    )
    picture = groups_picture(program)

    assert texts(box(picture, "rank3")) == [
        "RANK 3",
        "NODE_RANK",
        "1",
        "LOCAL_RANK",
        "1",
        "tp",
        "1 of 2",
        "odd",
        "1 of 2",
    ]
    assert texts(box(picture, "rank0"))[-2:] == ["odd", "–"]
    assert [cluster.nodes for cluster in picture.clusters] == [
        ("rank0", "rank1"),
        ("rank2", "rank3"),
    ]


def test_groups_of_a_large_world_are_bounded_and_the_rest_is_counted():
    picture = groups_picture(
        build_program(
            1024, {}, nodes=64, groups={f"pair[{i}]": (2 * i, 2 * i + 1) for i in range(512)}
        )
    )

    assert len(picture.nodes) <= 100
    assert len(picture.legend) <= 16
    assert any("58 more nodes" in note for note in picture.notes)
    assert any("496 more groups" in note for note in picture.notes)


# --- start-up ---
def test_the_startup_of_a_large_world_has_few_ranks_and_a_band_for_each_axis():
    groups = {f"dp[tp={i}]": tuple(range(i, 64, 8)) for i in range(8)}
    groups |= {f"tp[dp={i}]": tuple(range(8 * i, 8 * i + 8)) for i in range(8)}
    picture = startup_diagram(build_program(64, {}, nodes=8, groups=groups, backend="nccl"))
    bands = [line.text for band in picture.bands for line in band.title]

    assert [column.short for column in picture.columns] == [
        "store",
        "rank 0",
        "rank 1",
        "rank 2",
        "rank 63",
    ]
    assert {"dp: 8 groups of 8 ranks", "tp: 8 groups of 8 ranks"} <= set(bands)
    assert "60 more ranks are not drawn; they start like rank 1" in picture.notes


def startup_text(program: Any) -> str:
    return sequence_text(startup_diagram(program))


def test_at_startup_ranks_register_before_they_connect_and_groups_come_last():
    text = startup_text(build_program(3, {}, groups={"pair": (0, 2)}, backend="nccl"))
    order = [
        "opens the store",
        "registers as rank 1",
        "registers as rank 2",
        "all 3 ranks have arrived",
        "default group",
        "group pair",
        "communicators",
    ]

    assert [text.index(words) for words in order] == sorted(text.index(words) for words in order)


def test_a_rank_that_never_starts_leaves_the_others_waiting_in_red():
    columns = startup_diagram(build_program(4, {}, faults=(RankFault(2, "absent"),)))
    waiting = [item for item in columns.items if item.lines[0].text == "waits"]

    assert [item.column - 1 for item in waiting] == [0, 1, 3]
    assert {item.border for item in waiting} == {RED}
    assert [item.column for item in columns.items if item.lines[0].text == "never starts"] == [3]
    assert columns.bands == ()


def test_without_rank_0_there_is_no_store():
    columns = startup_diagram(build_program(2, {}, faults=(RankFault(0, "absent"),)))

    assert "no store" in [item.lines[0].text for item in columns.items]
    assert [arrow.label for arrow in columns.arrows] == ["no answer"]


# --- wait-for graph ---
def test_a_cycle_is_red_and_ranks_behind_it_are_grey():
    program, run = made(3, {0: [send(1), recv(1)], 1: [send(0), recv(0)], 2: [recv(0)]}, name="x")
    picture = wait_for_diagram(program, run.final_state)

    assert [box(picture, f"rank{r}").fill for r in range(3)] == [RED_FILL, RED_FILL, PALE_FILL]
    assert {(e.tail, e.head) for e in picture.edges if e.colour == RED} == {
        ("rank0", "rank1"),
        ("rank1", "rank0"),
    }
    assert ("rank2", "rank0") in {(e.tail, e.head) for e in picture.edges}
    assert "rank 0:1" in texts(box(picture, "rank0"))


def test_a_need_that_any_rank_could_satisfy_is_dashed_and_an_exited_rank_is_marked():
    program = build_program(3, {0: [recv(None)], 1: [], 2: []})
    ends = (RankEnd(0, "blocked", 0), RankEnd(1, "ended", 0), RankEnd(2, "killed", 0))
    picture = wait_for_diagram(
        program, FinalState(ends, (BlockedRank(0, 0, (WaitDependency(0, -1, (1, 2), True),)),))
    )

    assert [(e.head, e.dashed) for e in picture.edges] == [("rank1", True), ("rank2", True)]
    assert texts(box(picture, "rank2")) == ["rank 2", "was killed"]
    assert box(picture, "rank1").dashed


def test_the_core_is_taken_from_the_verdict_if_there_is_one():
    program, run = ring(4)

    assert "cause: rank 2" in wait_for_diagram(program, run.final_state, (2,)).subtitle


_STUCK = """
name: stuck
world: 1000
backend: gloo
tensors: {x: {shape: [1000000]}}
program:
  - ranks: rank < 3
    steps: [{send: {tensor: x, dst: (rank + 1) % 3}}, {recv: {tensor: x, src: (rank + 2) % 3}}]
  - all_reduce: {tensor: x}
"""


def test_a_thousand_waiting_ranks_fold_to_the_cycle_and_the_ranks_behind_it():
    done = simulate(loads(_STUCK), with_verdict=False)
    picture = wait_for_diagram(done.program, done.run.final_state)

    assert {node.id for node in picture.nodes} == {"rank0", "rank1", "rank2", "rank3"}
    assert texts(box(picture, "rank3"))[:2] == ["997 ranks wait for the cause", "ranks 3-999"]
    assert {(e.tail, e.head) for e in picture.edges if e.tail == "rank3"} == {
        ("rank3", f"rank{r}") for r in range(3)
    }


@pytest.mark.parametrize("n", [3, 4, 8, 12, 1024])
def test_a_cycle_is_drawn_as_a_circle_and_folded_if_it_is_long(n: int):
    """All ranks lie on it in order, none touches another, and every rank is drawn or counted."""
    program, run = ring(n)
    picture = wait_for_diagram(program, run.final_state)
    places = [node.at for node in picture.nodes]

    assert picture.engine == "neato"
    assert all(at is not None for at in places)
    turns = [atan2(at[0], -at[1]) % (2 * pi) for at in places if at is not None]
    assert [
        node.id for _, node in sorted(zip(turns, picture.nodes, strict=True), key=lambda t: t[0])
    ] == [x.id for x in picture.nodes]
    assert {(e.tail, e.head) for e in picture.edges} == set(
        pairwise([*(x.id for x in picture.nodes), "rank0"])
    )
    assert (len(picture.nodes), "1013 more" in str(picture.nodes)) == (min(n, 12), n > 12)


def test_selected_ranks_are_drawn_with_those_they_wait_for_and_the_others_are_counted():
    program, run = ring(64)
    picture = wait_for_diagram(program, run.final_state, part=parse_selection("7"))

    assert {node.id for node in picture.nodes} == {"rank7", "rank8"}
    assert "62 more blocked ranks were not selected" in picture.notes


def test_a_completed_run_shows_that_no_rank_waits():
    program, run = made(2, {0: [send(1)], 1: [recv(0)]})

    assert "no rank is blocked" in wait_for_diagram(program, run.final_state).title


# --- data flow ---
def rows_of(columns: SequenceDiagram) -> dict[str, int]:
    return {item.id: item.row for item in columns.items}


def test_a_blocking_message_is_a_level_arrow_with_bytes_tag_and_group():
    program, run = made(
        2,
        {0: [work(), send(1, tag=3, group="g")], 1: [recv(0, tag=3, group="g")]},
        groups={"g": (0, 1)},
    )
    columns = dataflow_diagram(program, run)

    assert [(a.tail, a.head, a.label) for a in columns.arrows] == [
        ("r0_1", "r1_0", "16 B, tag 3, g")
    ]
    assert rows_of(columns)["r0_1"] == rows_of(columns)["r1_0"] == 1


@pytest.mark.parametrize("order", ["send first", "receive first"])
def test_no_message_of_an_asynchronous_ring_points_upwards(order: str):
    def calls(r: int) -> list[Any]:
        both = [send((r + 1) % 5, "isend", handle="s"), recv((r - 1) % 5, "irecv", handle="r")]
        return [*(both if order == "send first" else both[::-1]), wait("s", "r")]

    columns = dataflow_diagram(*made(5, {r: calls(r) for r in range(5)}))
    rows = rows_of(columns)

    assert len(columns.arrows) == 5
    assert all(rows[a.tail] <= rows[str(a.head)] for a in columns.arrows)


def test_a_collective_is_one_band_across_its_ranks():
    calls = {r: [work()] * r + [{"op": "all_reduce", "numel": 8, "group": "g"}] for r in range(4)}
    program, run = made(4, calls, groups={"g": (0, 2, 3)})
    columns = dataflow_diagram(program, run)
    together = [band.columns for band in columns.bands]

    assert (0, 2, 3) in together
    assert columns.bands[together.index((0, 2, 3))].row >= 3


def test_unmatched_calls_are_red_and_waiting_edges_are_dashed():
    columns = dataflow_diagram(*ring(3))

    assert {item.border for item in columns.items} == {RED}
    assert [(a.dashed, a.words) for a in columns.arrows] == [
        (True, f"waits for rank {(r + 1) % 3}") for r in range(3)
    ]


def test_ranks_that_wait_in_one_collective_for_a_missing_one_share_a_band():
    columns = dataflow_diagram(*made(3, {0: [{"op": "barrier"}], 1: [{"op": "barrier"}], 2: []}))

    assert [(band.columns, band.border) for band in columns.bands] == [((0, 1), RED)]
    assert "ended" in [item.lines[0].text for item in columns.items if item.column == 2]


def test_the_parts_of_a_batch_are_drawn_as_messages():
    def batch(peer: int) -> dict[str, Any]:
        return {"op": "batch_isend_irecv", "ops": [send(peer, "isend"), recv(peer, "irecv")]}

    columns = dataflow_diagram(*made(2, {0: [batch(1)], 1: [batch(0)]}))

    assert {(a.tail, a.head) for a in columns.arrows} == {
        ("r0_0_0", "r1_0_1"),
        ("r1_0_0", "r0_0_1"),
    }


def test_values_are_shown_where_they_are_known():
    program, run = made(2, {0: [send(1)], 1: [recv(0)]})
    values = SimpleNamespace(
        final={(0, "x"): "[1]", (1, "y"): "[1]", (1, "z"): "?"},
        at_call={(0, 0, "in"): "[1]", (1, 0, "out"): "[1]"},
    )
    shown = {
        item.id: [line.text for line in item.lines]
        for item in dataflow_diagram(program, run, values).items
    }

    assert shown["r1_0"][-1] == "= [1]"
    assert shown["final_r1"] == ["final values", "y = [1]"]


def test_a_large_program_is_bounded_and_the_rest_is_counted():
    calls = {r: [work(), *([{"op": "barrier"}] * 200)] for r in range(64)}
    columns = dataflow_diagram(*made(64, calls))

    assert [column.short for column in columns.columns] == [f"rank {r}" for r in range(4)]
    assert len(columns.bands) < 50
    assert (
        columns.notes[0]
        == "60 ranks are not drawn because they make the same calls as a drawn rank"
    )
    assert "same calls on 60 more: 4-63" in [line.text for line in columns.columns[0].lines]
    assert "after them are not" in columns.notes[1]


def test_computes_of_one_pass_share_a_box_if_a_rank_makes_many_calls():
    passes = [work(f"forward {part}") for part in ("attention", "mlp")] * 15
    passes += [work(f"backward {part}") for part in ("mlp", "attention")] * 15
    picture = dataflow_diagram(*made(2, {0: passes, 1: passes}), most_rows=40)
    boxes = [item for item in picture.items if item.column == 0]

    assert [[line.text for line in box.lines] for box in boxes] == [
        ["forward", "30 computes, 30 ms"],
        ["backward", "30 computes, 30 ms"],
    ]
    assert [box.fill for box in boxes] == [PASS_FILLS["F"], PASS_FILLS["B"]]
    few = dataflow_diagram(*made(1, {0: passes[:4]}), most_rows=40)
    assert len(few.items) == 4


def test_hidden_calls_are_counted_under_their_rank_for_any_selection():
    """Ranks 0-7 make 60 calls, ranks 8-15 make 70."""
    calls = {r: [work(f"of {r // 8}, {i}") for i in range(60 + 10 * (r // 8))] for r in range(16)}
    columns = dataflow_diagram(*made(16, calls), most_rows=40)

    more = {item.id: item.lines[0].text for item in columns.items if item.id.startswith("more")}
    assert [column.short for column in columns.columns] == ["rank 0", "rank 1", "rank 2", "rank 8"]
    assert more == {**{f"more_r{r}": "and 20 more" for r in range(3)}, "more_r8": "and 30 more"}


def test_a_hang_after_many_calls_is_still_visible():
    calls = {r: [work()] * 200 + [send(1 - r)] for r in range(2)}
    columns = dataflow_diagram(*made(2, calls))

    assert "send → 1" in [item.lines[0].text for item in columns.items]


# --- the grid ---
def boxes(columns: SequenceDiagram) -> list[tuple[str, float, float, float, float]]:
    found = []
    for node in laid_out_diagram(columns).nodes:
        if node.at and node.size:
            found.append((node.id, node.at[0], node.at[1], *node.size))
        elif node.at and node.id.startswith("label"):
            found.append(
                (node.id, *node.at, text_width(node.lines[0].text, node.lines[0].size), 12.0)
            )
    return found


@pytest.mark.parametrize(
    "columns",
    [
        dataflow_diagram(*ring(4)),
        dataflow_diagram(*ring(4, "isend")),
        dataflow_diagram(
            *made(
                4,
                {
                    r: [work("a long name " * 4)] * r + [{"op": "all_reduce", "numel": 8}]
                    for r in range(4)
                },
            )
        ),
        startup_diagram(
            build_program(6, {}, groups={"even": (0, 2, 4), "odd": (1, 3, 5)}, backend="nccl")
        ),
    ],
    ids=["hang", "ring", "bands", "startup"],
)
def test_no_two_boxes_or_labels_overlap(columns: SequenceDiagram):
    found = boxes(columns)

    for i, (a, x, y, w, h) in enumerate(found):
        for b, u, v, p, q in found[:i]:
            assert abs(x - u) * 2 >= w + p or abs(y - v) * 2 >= h + q, (a, b)
