"""What comes out of calls that met, and in which order: launches of many parts, matches of many
messages, releases, what is left over.
"""

from __future__ import annotations

import pytest

from distsim.program.lower import lower
from distsim.scenario import load, loads
from distsim.simulation.simulate_scenario import simulate
from distsim.values import BufferValues, compute_values
from distsim.values.buffer_values import LineageViolation
from distsim.values.effect_order import causal_numbers, effect_events, match_table
from distsim.values.lineage import TensorContribution
from tests.support.harness import ROOT
from tests.support.values_by_hand import ByHand

TWO = (
    "world: 2\nbackend: {backend}\ntensors: {{x: {{shape: [2], dtype: int64, value: rank * 10 + index}}, "
    "y: {{shape: [4], dtype: int64}},\n  a: {{shape: [2], dtype: int64, value: 10 * rank + index}}, "
    "b: {{shape: [4], dtype: int64, value: 10 * rank + index}}, "
    "one: {{shape: [1], dtype: int64}}, two: {{shape: [2], dtype: int64}}}}\nprogram:\n"
)


def ran(program: str, backend: str = "gloo") -> BufferValues:
    values = simulate(loads(TWO.format(backend=backend) + program)).values
    assert values is not None
    return values


# --- coalesced launches ---
def test_each_part_of_a_coalesced_launch_takes_its_own_elements() -> None:
    values = ran(
        "  - reduce_scatter_tensor_coalesced: {input: [a, b], output: [one, two]}\n", "nccl"
    )

    assert [values.text(r, "one") for r in (0, 1)] == ["[10]", "[12]"]
    assert [values.text(r, "two") for r in (0, 1)] == ["[10, 12]", "[14, 16]"]


def test_members_that_coalesce_different_lists_get_unknown_values_with_their_own_history() -> None:
    ranks = [
        [{"op": "all_reduce_coalesced", "tensor": names, "reduce_op": "sum"}]
        for names in (["x", "w"], ["w", "x"])
    ]
    case = ByHand(ranks, {"x": ((2,), "int64", "rank + 1"), "w": ((3,), "int64", "rank + 1")})
    values = compute_values(case.program, case.trace([[(0, 0), (1, 0)]]))

    assert [values.text(r, n) for r in (0, 1) for n in ("x", "w")] == ["?"] * 4
    assert values.lineage(1, "w") == {TensorContribution(1, "w (undefined)", 0): 1}
    assert values.origins(1, "w", 2) == {(TensorContribution(1, "w (undefined)", 0), 2): 1}


# --- messages ---
def test_in_a_match_with_many_messages_each_receive_takes_the_one_at_its_position() -> None:
    send = [{"op": "isend", "tensor": name, "peer": 1} for name in ("x", "w")]
    back = {"op": "irecv", "tensor": "y", "peer": 1}
    other = [{"op": "isend", "tensor": "w", "peer": 0}] + [
        {"op": "irecv", "tensor": ("y", k), "peer": 0} for k in range(3)
    ]
    case = ByHand(
        [[*send, back], other],
        {"x": ((1,), "int64", 5), "w": ((1,), "int64", "6 + rank"), "y": ((1,), "int64", None)},
    )
    every = [
        (rank, position)
        for rank, calls in enumerate(case.program.codes)
        for position in range(len(calls.calls))
    ]
    values = compute_values(case.program, case.trace([every]))

    assert values.text(0, "y") == "[7]"
    assert [values.text(1, name) for name in ("y", "y@1", "y@2")] == ["[5]", "[6]", "?"]


@pytest.mark.parametrize(
    ("sent", "room", "expected"),
    [(1, 2, "[0, 16256]"), (1, 6, "[0, 16256, 9, 9, 9, 9]"), (2, 6, "[0, 16256, 0, 16256, 9, 9]")],
)
def test_bits_of_another_dtype_fill_only_the_elements_they_have_bytes_for(
    sent: int, room: int, expected: str
) -> None:
    calls = [[{"op": "send", "tensor": "x", "peer": 1}], [{"op": "recv", "tensor": "y", "peer": 0}]]
    case = ByHand(calls, {"x": ((sent,), "float32", 1), "y": ((room,), "int16", 9)})

    assert compute_values(case.program, case.trace([[(0, 0), (1, 0)]])).text(1, "y") == expected


# --- parts of an input ---
def test_lists_of_inputs_are_one_part_per_member() -> None:
    call = {
        "op": "reduce_scatter",
        "inputs": [("x", 0), ("x", 1)],
        "outputs": "y",
        "reduce_op": "sum",
    }
    case = ByHand(
        [[call]] * 2, {"x": ((1,), "int64", "rank + 10 * copy"), "y": ((1,), "int64", None)}
    )
    values = compute_values(case.program, case.trace([[(0, 0), (1, 0)]]))

    assert [values.text(r, "y") for r in (0, 1)] == ["[1]", "[21]"]


def test_an_element_of_a_sum_comes_from_that_element_of_every_member() -> None:
    case = ByHand(
        [[{"op": "all_reduce", "tensor": "x", "reduce_op": "sum"}]] * 2,
        {"x": ((3,), "int64", "rank")},
    )
    values = compute_values(case.program, case.trace([[(0, 0), (1, 0)]]))

    assert values.origins(0, "x", 0) == {(TensorContribution(r, "x", 0), 0): 1 for r in (0, 1)}
    assert values.origins(0, "x", 2) == {(TensorContribution(r, "x", 0), 2): 1 for r in (0, 1)}


# --- one-sided ---
def test_a_put_writes_local_data_remotely_and_a_get_writes_remote_data_locally() -> None:
    for op, where, held in (
        ("put: {tensor: x, dst: 1}", 1, "[0, 1]"),
        ("get: {tensor: x, src: 1}", 0, "[10, 11]"),
    ):
        values = ran(f"  - {op}\n    ranks: 0\n  - barrier:\n", "nccl")

        assert (values.text(where, "x"), values.text(1 - where, "x")) == (held, held)


def test_a_put_reads_and_does_not_write_its_local_buffer() -> None:
    done = simulate(
        loads(
            TWO.format(backend="nccl")
            + "  - put: {tensor: x, dst: 1}\n    ranks: 0\n  - barrier:\n"
        )
    )
    values = compute_values(done.program, done.run.trace, at_calls=True)

    assert {key: text for key, text in values.at_call.items() if key[:2] == (0, 0)} == {
        (0, 0, "in"): "[0, 1]"
    }


# --- order ---
def test_an_assign_without_a_time_happens_when_posted_unless_a_device_runs_it() -> None:
    calls = [
        [{"op": "isend", "tensor": "x", "peer": 1}, {"op": "assign", "tensor": "x", "value": 9}],
        [{"op": "recv", "tensor": "x", "peer": 0}],
    ]
    case = ByHand(calls, {"x": ((1,), "int64", 1)})
    found = []
    for backend, at in (("gloo", 5), ("gloo", 0), ("nccl", 5)):
        trace = case.trace([[(0, 0), (1, 0)]], {(0, 0): (7, 20), (1, 0): (7, 20), (0, 1): (-1, -1)})
        trace.header["backend"] = backend
        trace["posted_ns"][trace["position"] == 1] = at
        found.append([compute_values(case.program, trace).text(r, "x") for r in (0, 1)])

    assert found == [["[9]", "[9]"], ["[9]", "[9]"], ["[1]", "[1]"]]


def test_if_all_ranks_wait_a_sender_is_first_and_its_message_has_its_current_content() -> None:
    """Two sends head to head that were buffered, and one that receives what comes of them: were it
    let go first, it had nothing.
    """
    recv, send = ({"op": op, "tensor": tensor} for op, tensor in (("recv", "y"), ("send", "x")))
    ranks = [
        [{**recv, "peer": 2}, {"op": "assign", "tensor": "x", "value": "y"}, {**send, "peer": 1}],
        [
            {**send, "peer": 2},
            {"op": "assign", "tensor": "x", "value": 100},
            {**recv, "peer": 2},
            {"op": "recv", "tensor": "z", "peer": 0},
        ],
        [
            {**send, "peer": 1},
            {**recv, "peer": 1},
            {"op": "assign", "tensor": "x", "value": "y + 10"},
            {**send, "peer": 0},
        ],
    ]
    case = ByHand(
        ranks,
        {"x": ((1,), "int64", "rank"), "y": ((1,), "int64", None), "z": ((1,), "int64", None)},
    )
    values = compute_values(
        case.program,
        case.trace([[(1, 0), (2, 1)], [(2, 0), (1, 2)], [(2, 3), (0, 0)], [(0, 2), (1, 3)]]),
    )

    assert [values.text(r, n) for r, n in ((2, "y"), (1, "y"), (0, "y"), (1, "z"), (1, "x"))] == [
        "[1]",
        "[2]",
        "[11]",
        "[11]",
        "[100]",
    ]


def test_calls_after_a_batch_without_a_handle_see_its_received_data() -> None:
    """At the same ns: the batch is over, and the assignment after it takes no time."""
    parts = "{isend: {tensor: a, dst: 1 - rank}}, {irecv: {tensor: x, src: 1 - rank}}"
    values = ran(
        f"  - batch_isend_irecv: {{ops: [{parts}]}}\n  - assign: {{tensor: two, value: x + 100}}\n"
    )

    assert [values.text(rank, "two") for rank in (0, 1)] == ["[110, 111]", "[100, 101]"]


def test_unmatched_calls_have_no_number_and_match_numbers_increase() -> None:
    recv, send = {"op": "recv", "tensor": "x"}, {"op": "send", "tensor": "x"}
    case = ByHand(
        [[{**recv, "peer": 1}, {**recv, "peer": 1}], [{**send, "peer": 0}]],
        {"x": ((1,), "int64", "rank")},
    )
    trace = case.trace([[(0, 0), (1, 0)]])
    first, second, third = causal_numbers(case.program, trace, match_table(trace))

    assert first == third
    assert 0 < first[0] < first[1]
    assert second == (-1, -1)


# --- what is kept ---
def test_a_buffer_counts_its_writes_from_zero_and_names_the_last() -> None:
    values = ran("  - compute: {name: c, time: 1 us, writes: [y]}\n    ranks: 0\n  - barrier:\n")

    assert (values.state(1, "y").version, values.state(1, "y").row) == (0, -1)
    assert values.state(0, "y").version == 1
    assert values.lineage(0, "y") == {TensorContribution(0, "y", 1): 1}
    assert values.at_call == {}


def test_lineage_errors_name_their_elements_and_the_last_write_if_a_contribution_is_missing() -> (
    None
):
    """Of a gathered tensor each half lacks the other rank's numbers; of one never written all is
    missing.
    """
    values = ran("  - all_gather_into_tensor: {input: x, output: y}\n")
    both = [TensorContribution(r, "x", 0) for r in (0, 1)]
    row = values.state(0, "y").row

    assert values.breaches(0, "y", both) == (
        LineageViolation(0, "y", 0, 2, both[1], 0, row),
        LineageViolation(0, "y", 2, 4, both[0], 0, row),
    )
    assert values.breaches(0, "two", [both[0]]) == (
        LineageViolation(0, "two", 0, 2, both[0], 0, -1),
    )


def test_a_sum_is_exact_only_if_all_ranks_and_elements_have_it() -> None:
    values = ran("  - all_reduce: {tensor: x}\n")
    both = [TensorContribution(r, "x", 0) for r in (0, 1)]

    assert values.exactly_once("x", (0, 1), both)
    assert not values.exactly_once("a", (0, 1), [TensorContribution(0, "a", 0)])


def test_buffers_are_distinguished_by_name_copy_and_rank() -> None:
    calls = [{"op": "assign", "tensor": ("x", k), "value": k} for k in (10, 2, 0, 1)]
    case = ByHand([calls, calls[:3]], {"x": ((1,), "int64", None)})

    assert list(compute_values(case.program, case.trace()).final) == [
        (0, "x"),
        (1, "x"),
        (0, "x@1"),
        (0, "x@2"),
        (1, "x@2"),
        (0, "x@10"),
        (1, "x@10"),
    ]


def test_a_call_that_a_killed_rank_posted_but_never_started_has_no_effect() -> None:
    scenario = loads(
        "world: 1\nbackend: nccl\nfaults: [{rank: 0, kind: kill, at: 1 ms}]\n"
        "program: [compute: {time: 5 ms}, compute: {time: 5 ms}]\n"
    )
    trace = simulate(scenario, with_verdict=False).run.trace

    assert trace["posted_ns"].tolist() == [0, 0]
    assert trace["started_ns"].tolist() == [0, -1]
    assert [event.row for event in effect_events(lower(scenario), trace, match_table(trace))] == [0]


@pytest.mark.parametrize(
    "name",
    [
        "ddp_by_hand",
        "ring_of_four",
        "killed_at_iteration_3",
        "pipeline_wrong_order",
        "any_source_ring",
        "isend_irecv_wait",
        "two_groups",
    ],
)
def test_causal_numbers_respect_calls_matches_and_hangs(name: str) -> None:
    """Only what happened has a number, matched calls end together, and each rank goes forward."""
    scenario = load(str(ROOT / "scenarios" / f"{name}.yaml"))
    done = simulate(scenario, with_verdict=False, with_values=False)
    trace, matches = done.run.trace, match_table(done.run.trace)
    numbers = list(causal_numbers(done.program, trace, matches))

    assert any(end > 0 for _, end in numbers) or name == "ring_of_four"
    for row, (start, end) in enumerate(numbers):
        if trace["posted_ns"][row] < 0:
            assert (start, end) == (-1, -1)
        if end >= 0:
            assert 0 < start < end
        if trace["finished_ns"][row] >= 0 and matches.match_of[row] >= 0:
            assert end > 0
    for rows in matches.members.values():
        assert len({numbers[row][1] for row in rows}) == 1
        assert max(numbers[row][0] for row in rows) < max(numbers[row][1] for row in rows) or (
            numbers[rows[0]][1] < 0
        )
    last = dict.fromkeys(range(trace.world_size), 0)
    for row, (start, end) in enumerate(numbers):
        rank, call = (
            int(trace["rank"][row]),
            done.program.code_call(int(trace["rank"][row]), int(trace["position"][row])),
        )
        is_blocking = call.op in ("all_reduce", "send", "recv", "compute") and not call.is_async
        if is_blocking and end >= 0:
            assert start > last[rank]
            last[rank] = end
