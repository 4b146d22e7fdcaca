"""Where the calls of a data-flow picture stand: true of any program."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.output.pictures.drawing.sequence_diagram import laid_out_diagram
from distsim.output.pictures.views.dataflow import dataflow_diagram
from tests.support.harness import draws
from tests.support.views_made import made, recv, send, wait, work


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, dict[int, list[Any]]]:
    """Messages, collectives and compute in one global order, blocking or not: most end, those with
    an omitted call hang.
    """
    n = draw(st.integers(2, 4))
    calls: dict[int, list[Any]] = {r: [] for r in range(n)}
    for i in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["message", "async", "collective", "work"]))
        if kind == "collective":
            for r in range(n):
                calls[r].append({"op": "all_reduce", "numel": 4})
        elif kind == "work":
            calls[draw(st.integers(0, n - 1))].append(work())
        else:
            a, b = draw(st.permutations(range(n)))[:2]
            asynchronous = kind == "async"
            calls[a].append(send(b, "isend", handle=f"s{i}") if asynchronous else send(b))
            calls[b].append(recv(a, "irecv", handle=f"r{i}") if asynchronous else recv(a))
            if asynchronous:
                calls[a].append(wait(f"s{i}"))
                calls[b].append(wait(f"r{i}"))
    if draw(st.booleans()):
        victim = draw(st.sampled_from([r for r in calls if calls[r]] or [0]))
        calls[victim] = [c for c in calls[victim][:-1] if c["op"] != "wait"]
    return n, calls


@settings(max_examples=draws(60), deadline=None)
@given(programs())
def test_calls_are_in_program_order_one_per_place_and_arrows_never_point_up(
    case: tuple[int, dict[int, list[Any]]],
):
    program, run = made(case[0], case[1])
    columns = dataflow_diagram(program, run)
    rows = {item.id: item.row for item in columns.items}
    places = [(item.column, item.row) for item in columns.items] + [
        (column, band.row) for band in columns.bands for column in band.columns
    ]

    assert len(set(places)) == len(places)
    for rank in range(case[0]):
        own = [rows[f"r{rank}_{k}"] for k in range(len(case[1][rank])) if f"r{rank}_{k}" in rows]
        assert own == sorted(own)
    assert all(rows[a.tail] <= rows[a.head] for a in columns.arrows if isinstance(a.head, str))
    assert len({node.id for node in laid_out_diagram(columns).nodes}) == len(
        laid_out_diagram(columns).nodes
    )


def test_a_wait_is_at_or_below_the_send_that_completes_its_receive() -> None:
    """Both ranks begin with a receive, so one receive is drawn before its send is reached."""
    calls = {
        0: [recv(1, "irecv", handle="r"), send(1), wait("r")],
        1: [recv(0, "irecv", handle="r"), work(), work(), send(0), wait("r")],
    }
    rows = {item.id: item.row for item in dataflow_diagram(*made(2, calls)).items}

    assert rows["r0_0"] == 0
    assert rows["r0_2"] >= rows["r1_3"]
