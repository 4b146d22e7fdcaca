"""Numbers: what every buffer holds after a run."""

from __future__ import annotations

import numpy as np
import pytest

from distsim.common.expressions import parse_expression
from distsim.operations.core.field_types import PerRank
from distsim.values import compute_values, fill_numbers
from distsim.values.numbers import reduce_numbers
from tests.support.harness import work
from tests.support.values_by_hand import ByHand

WORLD4 = range(4)


def everybody(*positions: int, ranks: range = WORLD4) -> list[list[tuple[int, int]]]:
    """One match of all ranks at each position."""
    return [[(rank, position) for rank in ranks] for position in positions]


def collective(op: str, **more: object) -> dict[str, object]:
    return {"op": op, "inputs": "x", "outputs": "y", **more}


def test_all_reduce_of_ranks_sums_up_to_six() -> None:
    case = ByHand(
        [[{"op": "all_reduce", "tensor": "x", "reduce_op": "sum"}]] * 4,
        {"x": ((1,), "int64", "rank")},
    )
    values = compute_values(case.program, case.trace(everybody(0)))

    assert {(r, "x"): "[6]" for r in WORLD4} == values.final


def test_vectors_are_summed_only_within_their_group() -> None:
    call = {"op": "all_reduce", "tensor": "x", "reduce_op": "sum", "group": 1}
    case = ByHand(
        [[call], [], [call]], {"x": ((3,), "int64", "3 * rank // 2 + 1 + index")}, groups=[[0, 2]]
    )
    values = compute_values(case.program, case.trace([[(0, 0), (2, 0)]]))

    assert values.text(0, "x") == values.text(2, "x") == "[5, 7, 9]"
    assert values.text(1, "x") == "[2, 3, 4]"


@pytest.mark.parametrize(
    ("op", "shapes", "more", "expected"),
    [
        ("all_gather", ((2,), (4, 2)), {}, {1: "[[0, 1], [10, 11], [20, 21], [30, 31]]"}),
        ("all_gather_into_tensor", ((1,), (4,)), {}, {3: "[0, 10, 20, 30]"}),
        ("gather", ((1,), (4,)), {"root": 2}, {2: "[0, 10, 20, 30]", 0: "?"}),
        ("scatter", ((4,), (1,)), {"root": 1}, {0: "[10]", 3: "[13]"}),
        ("reduce_scatter", ((4, 1), (1,)), {"reduce_op": "max"}, {0: "[30]", 2: "[32]"}),
        ("reduce_scatter_tensor", ((4,), (1,)), {"reduce_op": "sum"}, {0: "[60]", 3: "[72]"}),
        ("all_to_all", ((4, 1), (4, 1)), {}, {1: "[[1], [11], [21], [31]]"}),
        ("all_to_all_single", ((4,), (4,)), {}, {2: "[2, 12, 22, 32]"}),
    ],
)
def test_each_collective_moves_numbers_as_its_row_declares(op, shapes, more, expected) -> None:
    case = ByHand(
        [[collective(op, **more)]] * 4,
        {"x": (shapes[0], "int64", "10 * rank + index"), "y": (shapes[1], "int64", None)},
    )
    values = compute_values(case.program, case.trace(everybody(0)))

    assert expected == {rank: values.text(rank, "y") for rank in expected}


def test_broadcast_copies_the_root_and_reduce_does_not_change_other_ranks() -> None:
    calls = [
        {"op": "broadcast", "tensor": "x", "root": 2},
        {"op": "reduce", "tensor": "x", "root": 1, "reduce_op": "product"},
    ]
    case = ByHand([calls] * 4, {"x": ((2,), "int64", "rank + index")})
    values = compute_values(case.program, case.trace(everybody(0, 1)))

    assert [values.text(r, "x") for r in WORLD4] == ["[2, 3]", "[16, 81]", "[2, 3]", "[2, 3]"]


def test_uneven_all_to_all_follows_its_splits() -> None:
    ranks = [[collective("all_to_all_single", input_splits=s)] for s in ((2, 3), (4, 1))]
    case = ByHand(ranks, {"x": ((5,), "int64", "10 * rank + index"), "y": ((6,), "int64", 0)})
    values = compute_values(case.program, case.trace(everybody(0, ranks=range(2))))

    assert [values.text(r, "y") for r in (0, 1)] == [
        "[0, 1, 10, 11, 12, 13]",
        "[2, 3, 4, 14, 0, 0]",
    ]


def test_lists_of_tensors_are_parts() -> None:
    call = {"op": "all_gather", "inputs": "x", "outputs": [("y", 0), ("y", 1)]}
    case = ByHand([[call]] * 2, {"x": ((1,), "int64", "rank + 5"), "y": ((1,), "int64", None)})
    values = compute_values(case.program, case.trace(everybody(0, ranks=range(2))))

    assert (values.text(0, "y"), values.text(0, "y@1")) == ("[5]", "[6]")


def test_ring_all_gather_by_hand_fills_every_rank() -> None:
    """Four ranks pass on what they got last; nothing takes any time, so only cause orders the
    calls.
    """
    ranks, matches = [], []
    for rank in WORLD4:
        calls = []
        for step in range(3):
            calls += [
                {"op": "isend", "tensor": ("part", (rank - step) % 4), "peer": (rank + 1) % 4},
                {"op": "recv", "tensor": ("part", (rank - step - 1) % 4), "peer": (rank - 1) % 4},
                {"op": "wait", "waits": [2]},
            ]
            matches.append([(rank, 3 * step), ((rank + 1) % 4, 3 * step + 1)])
        ranks.append([{"op": "assign", "tensor": ("part", rank), "value": "10 * rank"}, *calls])
    matches = [[(r, p + 1) for r, p in match] for match in matches]
    case = ByHand(ranks, {"part": ((1,), "int64", None)})
    values = compute_values(case.program, case.trace(matches))

    for rank in WORLD4:
        assert [values.text(rank, f"part@{i}" if i else "part") for i in WORLD4] == [
            "[0]",
            "[10]",
            "[20]",
            "[30]",
        ]


def test_writing_a_send_buffer_after_the_start_does_not_change_the_message() -> None:
    sender = [
        {"op": "isend", "tensor": "x", "peer": 1},
        {"op": "assign", "tensor": "x", "value": 9},
        {"op": "wait", "waits": [2]},
    ]
    case = ByHand([sender, [{"op": "recv", "tensor": "x", "peer": 0}]], {"x": ((1,), "int64", 1)})
    met = [[(0, 0), (1, 0)]]
    early = case.trace(met, {(0, 0): (5, 20), (1, 0): (5, 20), (0, 1): (10, 10)})
    late = case.trace(met, {(0, 0): (15, 20), (1, 0): (15, 20), (0, 1): (10, 10)})

    assert compute_values(case.program, early).text(1, "x") == "[1]"
    assert compute_values(case.program, late).text(1, "x") == "[9]"


def test_a_blocking_send_reads_before_the_next_call_writes_even_at_the_same_time() -> None:
    sender = [{"op": "send", "tensor": "x", "peer": 1}, {"op": "assign", "tensor": "x", "value": 9}]
    case = ByHand([sender, [{"op": "recv", "tensor": "x", "peer": 0}]], {"x": ((1,), "int64", 1)})

    assert compute_values(case.program, case.trace([[(0, 0), (1, 0)]])).text(1, "x") == "[1]"


def test_buffered_sends_to_each_other_still_deliver() -> None:
    ranks = [
        [{"op": "send", "tensor": "x", "peer": 1 - r}, {"op": "recv", "tensor": "y", "peer": 1 - r}]
        for r in (0, 1)
    ]
    case = ByHand(ranks, {"x": ((1,), "int64", "rank"), "y": ((1,), "int64", None)})
    values = compute_values(case.program, case.trace([[(0, 0), (1, 1)], [(1, 0), (0, 1)]]))

    assert [values.text(r, "y") for r in (0, 1)] == ["[1]", "[0]"]


def test_batches_exchange_part_by_part() -> None:
    ranks = [
        [
            {
                "op": "batch_isend_irecv",
                "parts": [
                    {"op": "isend", "tensor": "x", "peer": 1 - r},
                    {"op": "irecv", "tensor": "y", "peer": 1 - r},
                ],
            }
        ]
        for r in (0, 1)
    ]
    case = ByHand(ranks, {"x": ((1,), "int64", "rank"), "y": ((1,), "int64", None)})
    values = compute_values(
        case.program, case.trace([[(0, 0, 0), (1, 0, 1)], [(1, 0, 0), (0, 0, 1)]]), at_calls=True
    )

    assert [values.text(r, "y") for r in (0, 1)] == ["[1]", "[0]"]
    assert values.at_part[0, 0, 1, "out"] == "[1]"


def test_unmatched_and_unfinished_calls_change_nothing() -> None:
    ranks = [[{"op": "recv", "tensor": "x", "peer": 1}], [{"op": "send", "tensor": "x", "peer": 0}]]
    case = ByHand(ranks, {"x": ((1,), "int64", "rank")})

    assert compute_values(case.program, case.trace()).final == {}
    unfinished = case.trace([[(0, 0), (1, 0)]], {(0, 0): (0, -1)})
    assert compute_values(case.program, unfinished).text(0, "x") == "[0]"


def test_a_receive_longer_than_its_message_keeps_its_tail() -> None:
    case = ByHand(
        [[{"op": "send", "tensor": "x", "peer": 1}], [{"op": "recv", "tensor": "y", "peer": 0}]],
        {"x": ((2,), "int64", 7), "y": ((4,), "int64", "index")},
    )

    assert (
        compute_values(case.program, case.trace([[(0, 0), (1, 0)]])).text(1, "y") == "[7, 7, 2, 3]"
    )


def test_another_dtype_with_equal_bytes_reinterprets_the_bits() -> None:
    case = ByHand(
        [[{"op": "send", "tensor": "x", "peer": 1}], [{"op": "recv", "tensor": "y", "peer": 0}]],
        {"x": ((2,), "float32", [1, -2]), "y": ((2,), "int32", 0)},
    )
    values = compute_values(case.program, case.trace([[(0, 0), (1, 0)]]))

    assert np.array_equal(values.array(1, "y"), np.array([1, -2], np.float32).view(np.int32))


def test_a_uniform_tensor_of_a_gibibyte_costs_no_memory() -> None:
    numel = 2**28
    case = ByHand(
        [[{"op": "all_reduce", "tensor": "x", "reduce_op": "avg"}]] * 4,
        {"x": ((numel,), "float32", "rank + 1")},
    )
    values = compute_values(case.program, case.trace(everybody(0)))

    assert values.text(3, "x") == f"2.5 (×{numel})"
    assert values.array(3, "x").strides == (0,)


def test_large_tensors_with_different_elements_are_unknown() -> None:
    assert fill_numbers(parse_expression("index"), {"rank": 0}, 5000, "float32") is None
    assert fill_numbers(parse_expression("index"), {"rank": 0}, 5, "float32").tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_values_may_be_scalars_lists_per_rank_and_use_copy() -> None:
    assert fill_numbers(
        PerRank(((0, (parse_expression(1), parse_expression("rank + 2"))),), parse_expression(7)),
        {"rank": 0},
        2,
        "int64",
    ).tolist() == [1, 2]
    assert fill_numbers(
        PerRank(((0, parse_expression(1)),), parse_expression(7)), {"rank": 3}, 2, "int64"
    ).tolist() == [7]
    assert fill_numbers(
        (((parse_expression(1),), (parse_expression(2),)),), {}, 2, "int8"
    ).tolist() == [1, 2]
    assert fill_numbers(parse_expression("copy * 2"), {"copy": 4}, 9, "float16").tolist() == [8.0]
    assert fill_numbers(None, {}, 2, "int64") is None


def test_bfloat16_sums_round_as_bfloat16_does() -> None:
    case = ByHand(
        [[{"op": "all_reduce", "tensor": "x", "reduce_op": "sum"}]] * 2,
        {"x": ((1,), "bfloat16", "256 if rank == 0 else 1")},
    )
    values = compute_values(case.program, case.trace(everybody(0, ranks=range(2))))

    assert values.text(0, "x") == "[256.0]"  # 257 needs nine bits of mantissa


@pytest.mark.parametrize(
    ("op", "dtype", "terms", "expected"),
    [
        ("avg", "int64", [3, -6], -1),
        ("avg", "float32", [1, 2], 1.5),
        ("product", "int32", [3, 4], 12),
        ("min", "float16", [3, 4], 3),
        ("band", "uint8", [6, 3], 2),
        ("bor", "uint8", [6, 3], 7),
        ("bxor", "uint8", [6, 3], 5),
        ("sum", "bool", [True, True], True),
        ("sum", "uint8", [200, 100], 44),
    ],
)
def test_reductions_follow_the_dtype(op, dtype, terms, expected) -> None:
    result = reduce_numbers(op, [np.array([t], dtype) for t in terms])

    assert result.dtype == dtype
    assert result.tolist() == [expected]


def test_compute_makes_numbers_unknown_and_assign_sets_them() -> None:
    calls = [
        {"op": "compute", "writes": "x"},
        {"op": "assign", "tensor": "y", "value": "2 * y + index"},
        {"op": "assign", "tensor": "z", "value": "x"},
    ]
    case = ByHand(
        [calls], {"x": ((2,), "int64", 1), "y": ((2,), "int64", 5), "z": ((2,), "int64", 0)}
    )
    values = compute_values(case.program, case.trace())

    assert [values.text(0, name) for name in "xyz"] == ["?", "[10, 11]", "?"]


def test_different_collectives_that_match_leave_their_outputs_unknown() -> None:
    ranks = [
        [{"op": "all_reduce", "tensor": "x", "reduce_op": "sum"}],
        [{"op": "all_reduce", "tensor": "x", "reduce_op": "max"}],
    ]
    case = ByHand(ranks, {"x": ((1,), "int64", "rank")})

    assert (
        compute_values(case.program, case.trace(everybody(0, ranks=range(2)))).text(0, "x") == "?"
    )


def test_texts_are_short_for_any_size() -> None:
    tensors = {
        "few": ((2, 2), "float32", "index"),
        "many": ((100,), "int64", "index"),
        "bits": ((2,), "bool", [True, False]),
    }
    case = ByHand([[{"op": "assign", "tensor": n, "value": n} for n in tensors]], tensors)
    values = compute_values(case.program, case.trace())

    assert values.text(0, "few") == "[[0.0, 1.0], [2.0, 3.0]]"
    assert values.text(0, "many") == "[0, 1, 2, …, 99] (100 elements)"
    assert values.text(0, "bits") == "[true, false]"


def test_untouched_tensors_are_known_and_unknown_names_are_refused() -> None:
    case = ByHand([[]], {"x": ((1,), "int64", "copy")})
    values = compute_values(case.program, case.trace())

    assert values.text(0, "x@3") == "[3]"
    with pytest.raises(KeyError):
        values.text(0, "nothing")


def test_reads_and_writes_of_calls_are_kept_on_request() -> None:
    case = ByHand(
        [[{"op": "all_reduce", "tensor": "x", "reduce_op": "sum"}]] * 4,
        {"x": ((1,), "int64", "rank")},
    )
    values = compute_values(case.program, case.trace(everybody(0)), at_calls=True)

    assert (values.at_call[2, 0, "in"], values.at_call[2, 0, "out"]) == ("[2]", "[6]")
    assert compute_values(case.program, case.trace(everybody(0))).at_call == {}


def test_work_is_proportional_to_the_number_of_calls() -> None:
    """Four times the calls take less than five times the work: no step looks at all others."""

    def work_of(rounds: int) -> int:
        case = ByHand(
            [[{"op": "all_reduce", "tensor": "x", "reduce_op": "max"}] * rounds] * 8,
            {"x": ((1,), "int64", "rank")},
        )
        trace = case.trace(everybody(*range(rounds), ranks=range(8)))
        return work(lambda: compute_values(case.program, trace))

    assert work_of(800) < 5 * work_of(200)


def test_expected_values_are_compared_in_the_dtype_of_the_tensor() -> None:
    tensors = {
        "x": ((2,), "float32", 0.1),
        "y": ((2,), "int64", "index"),
        "z": ((2,), "bfloat16", None),
    }
    values = compute_values(ByHand([[]], tensors).program, ByHand([[]], tensors).trace())

    assert values.agrees(0, "x", 0.1)
    assert values.agrees(0, "x", [0.1, 0.1])
    assert values.agrees(0, "y", [[0], [1]])
    assert values.agrees(0, "z", "?")
    assert values.agrees(0, "z", ["?", "?"])
    wrong = [("x", 0.2), ("x", [0.1]), ("y", 0), ("y", [0, "?"]), ("z", 0)]
    assert [values.agrees(0, name, expected) for name, expected in wrong] == [False] * 5


def test_only_declared_values_and_assigns_introduce_numbers() -> None:
    assert "numbers" in ByHand([[]], {"x": ((1,), "int64", 0)}).program.features
    assert (
        "numbers"
        in ByHand(
            [[{"op": "assign", "tensor": "x", "value": 1}]], {"x": ((1,), "int64", None)}
        ).program.features
    )
    assert (
        "numbers"
        not in ByHand(
            [[{"op": "compute", "writes": "x"}]], {"x": ((1,), "int64", None)}
        ).program.features
    )


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2,), "[[10, 11], [10, 11]]"),  # repeated for each row
        ((2, 1), "[[10, 10], [11, 11]]"),
        ((4,), "[[10, 11], [12, 13]]"),  # as many elements, in another shape
        ((3,), "?"),  # does not fit: torch raises
    ],
)
def test_a_tensor_in_an_assigned_value_is_broadcast_to_the_target(shape, expected) -> None:
    case = ByHand(
        [[{"op": "assign", "tensor": "x", "value": "10 + y"}]],
        {"x": ((2, 2), "int64", None), "y": (shape, "int64", "index")},
    )
    values = compute_values(case.program, case.trace([]))

    assert values.text(0, "x") == expected
