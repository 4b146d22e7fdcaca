"""The edges of what values are made of: numbers and their texts, expected values, reductions,
pieces of contents.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from distsim.common.errors import UsageError
from distsim.common.expressions import parse_expression
from distsim.operations.core.collective_results import apply_effect, numpy_dtype, reduce_arrays
from distsim.operations.core.field_types import PerRank
from distsim.operations.registry import OPERATIONS
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import simulate
from distsim.values import BufferValues, compute_values
from distsim.values.lineage import (
    ContentPiece,
    LineageGraph,
    TensorContribution,
    align_contents,
    concatenate_contents,
    slice_content,
)
from distsim.values.numbers import (
    fill_numbers,
    format_content,
    matches_expected,
    numbers_of_content,
    reinterpret,
    widen_numbers,
)

F32 = "float32"


def piece(
    numel: int, *numbers: float, node: int = 0, start: int = 0, dtype: Any = np.float32
) -> ContentPiece:
    return ContentPiece(numel, node, start, np.array(numbers, dtype) if numbers else None)


def plain(numbers: Any) -> Any:
    return None if numbers is None else numbers.tolist()


# --- what a file gives a tensor ---


@pytest.mark.parametrize(
    ("numel", "limit", "expected"), [(3, 3, [0.0, 1.0, 2.0]), (4, 3, None), (0, 3, [])]
)
def test_values_by_index_are_written_in_full_up_to_the_limit(
    numel: int, limit: int, expected: list[float] | None
) -> None:
    assert plain(fill_numbers(parse_expression("index"), {}, numel, F32, limit)) == expected


@pytest.mark.parametrize(
    ("values", "numel", "limit", "expected"),
    [
        ([1, [2, 3]], 3, 3, [1.0, 2.0, 3.0]),
        ([1, 2], 3, 3, None),
        ([1, 2, 3, 4], 3, 9, None),
        ([1, 2, 3], 3, 2, None),
        (
            [PerRank(((1, 7),), 5), parse_expression("index + x"), parse_expression("rank")],
            3,
            3,
            [7.0, 11.0, 1.0],
        ),
    ],
)
def test_a_list_has_a_number_for_every_element_or_is_unknown(
    values: Any, numel: int, limit: int, expected: Any
) -> None:
    assert (
        plain(fill_numbers(values, {"rank": 1, "x": np.array([10.0])}, numel, F32, limit))
        == expected
    )


def test_a_tensor_in_an_expression_of_a_list_gives_its_own_element() -> None:
    env = {"rank": 0, "x": np.array([1.0, 2.0]), "u": np.array([5.0])}

    assert plain(
        fill_numbers([parse_expression("x * 2"), parse_expression("x + u")], env, 2, F32)
    ) == [2.0, 7.0]


def test_an_expression_over_an_empty_tensor_is_empty() -> None:
    assert plain(fill_numbers(parse_expression("x + 1"), {"x": np.zeros(0)}, 0, F32)) == []


def test_per_rank_values_apply_to_their_rank_and_to_no_other() -> None:
    by_rank = PerRank(((0, 4),), None)

    assert plain(fill_numbers(by_rank, {"rank": 0}, 5, "int64")) == [4]
    assert fill_numbers(by_rank, {"rank": 1}, 5, "int64") is None
    assert fill_numbers(None, {}, 5, "int64") is None


@pytest.mark.parametrize(
    ("dtype", "wider"),
    [("int8", int), ("uint8", int), ("bool", bool), ("float16", float), ("bfloat16", float)],
)
def test_expressions_compute_in_the_widest_type_of_a_kind(dtype: str, wider: type) -> None:
    """A single number is Python's own."""
    one = widen_numbers(np.array([1]).astype(numpy_dtype(dtype)))
    two = widen_numbers(np.array([1, 0]).astype(numpy_dtype(dtype)))

    assert type(one) is wider
    assert two.dtype == {int: np.int64, bool: np.bool_, float: np.float64}[wider]


# --- contents as one array ---


def test_a_content_is_uniform_if_all_its_pieces_are_and_unknown_if_one_is() -> None:
    assert plain(numbers_of_content((piece(3, 2), piece(9000, 2)), F32)) == [2.0]
    assert plain(numbers_of_content((piece(2, 2), piece(1, 3)), F32)) == [2.0, 2.0, 3.0]
    assert plain(numbers_of_content((piece(2, 1, 2), piece(2, 3)), F32)) == [1.0, 2.0, 3.0, 3.0]
    assert numbers_of_content((piece(2, 1, 2), piece(2)), F32) is None
    assert plain(numbers_of_content((), "int64")) == []
    assert numbers_of_content((), "int64").dtype == np.int64  # type: ignore[union-attr]


def test_a_uniform_piece_next_to_similar_ones_does_not_make_the_whole_uniform() -> None:
    assert plain(numbers_of_content((piece(2, 1), piece(2, 1, 2)), F32)) == [1.0, 1.0, 1.0, 2.0]


def test_at_most_4096_elements_are_written_in_full() -> None:
    assert fill_numbers(parse_expression("index"), {}, 4096, F32) is not None
    assert fill_numbers(parse_expression("index"), {}, 4097, F32) is None


@pytest.mark.parametrize(("limit", "known"), [(4, True), (3, False)])
def test_a_content_of_different_elements_is_known_up_to_the_limit(limit: int, known: bool) -> None:
    assert (numbers_of_content((piece(2, 1, 2), piece(2, 3, 4)), F32, limit) is not None) == known


def test_bits_are_reinterpreted_in_another_dtype_if_they_make_whole_elements() -> None:
    one = np.array([1.0], np.float32)

    assert reinterpret(one, 3, F32) is one
    assert reinterpret(None, 3, F32) is None
    assert plain(reinterpret(one, 5000, "int32")) == [0x3F800000]
    assert plain(reinterpret(one, 2, "int16")) == [0, 0x3F80, 0, 0x3F80]
    assert reinterpret(one, 3, "float64") is None
    assert plain(reinterpret(np.zeros(2, np.float32), 2, "float64")) == [0.0]
    assert reinterpret(one, 4, "int16", limit=3) is None
    assert plain(reinterpret(one, 3, "int16", limit=3)) == [0, 0x3F80] * 3


# --- texts ---


@pytest.mark.parametrize(
    ("content", "shape", "text"),
    [
        ((), (0,), "[]"),
        ((piece(3),), (3,), "?"),
        ((piece(1, 5),), (), "5.0"),
        ((piece(2, 1, 2), piece(1)), (3,), "[1.0, 2.0, ?]"),
        ((piece(4, 1, 2, 3, 4),), (2, 2), "[[1.0, 2.0], [3.0, 4.0]]"),
        ((piece(4, 1, 2, 3, 4),), (4, 1), "[[1.0], [2.0], [3.0], [4.0]]"),
        ((piece(4, 1, 2, 3, 4),), (1, 2, 2), "[1.0, 2.0, 3.0, 4.0]"),
        ((piece(3, 1, 2, 3),), (2, 2), "[1.0, 2.0, 3.0]"),
        ((piece(16, *range(16)),), (16,), f"[{', '.join(f'{i}.0' for i in range(16))}]"),
        ((piece(17, 3),), (17,), "3.0 (×17)"),
        ((piece(17, *range(17)),), (17,), "[0.0, 1.0, 2.0, …, 16.0] (17 elements)"),
        ((piece(20, 1), piece(5)), (25,), "[1.0 (×20), ? (×5)]"),
        (
            tuple(piece(3, i) for i in range(8)),
            (24,),
            "[" + ", ".join(f"{i}.0 (×3)" for i in range(8)) + "]",
        ),
        (tuple(piece(2, i) for i in range(9)), (18,), "[0.0, 0.0, …, 8.0] (18 elements)"),
        (tuple(piece(3, i) for i in range(9)), (27,), "[0.0, 0.0, 0.0, …, 8.0] (27 elements)"),
        ((piece(2, 1, 0, dtype=np.bool_),), (2,), "[true, false]"),
        ((piece(2, -3, 7, dtype=np.int64),), (2,), "[-3, 7]"),
        ((piece(2, -3, 0.5),), (2,), "[-3.0, 0.5]"),
        ((piece(1, 1e30),), (1,), "[1e+30]"),
        ((piece(1, -2, dtype=numpy_dtype("bfloat16")),), (1,), "[-2.0]"),
    ],
)
def test_a_content_is_shown_briefly_in_memory_order(
    content: Any, shape: tuple[int, ...], text: str
) -> None:
    assert format_content(content, shape, F32) == text


# --- expected values ---


@pytest.mark.parametrize(
    ("dtype", "off"),
    [
        ("float64", 1e-12),
        ("float32", 3e-7),
        ("float16", 2e-3),
        ("bfloat16", 2e-2),
        ("float8_e4m3fn", 0.25),
        ("float8_e5m2", 0.5),
    ],
)
def test_an_expected_number_may_differ_by_at_most_two_units(dtype: str, off: float) -> None:
    """Relative, so that zero is exact. The number held is 1 in the dtype; what is expected
    moves.
    """
    held = (ContentPiece(2, 0, 0, np.array([1.0]).astype(numpy_dtype(dtype))),)
    zero = (ContentPiece(2, 0, 0, np.array([0.0]).astype(numpy_dtype(dtype))),)

    assert matches_expected(held, dtype, 1 + 0.9 * off)
    assert not matches_expected(held, dtype, 1 + 3 * off)
    assert matches_expected(zero, dtype, 0)
    assert not matches_expected(zero, dtype, 1e-30)


@pytest.mark.parametrize(
    ("dtype", "off", "there"),
    [
        ("complex64", 2e-7, True),
        ("complex64", 1e-6, False),
        ("complex128", 1e-11, False),
        ("complex128", 9e-13, True),
    ],
)
def test_complex_numbers_are_compared_in_both_parts(dtype: str, off: float, there: bool) -> None:
    held = (ContentPiece(1, 0, 0, np.array([3j], dtype)),)

    assert matches_expected(held, dtype, 3j * (1 + off)) == there
    assert not matches_expected(held, dtype, 3)


def test_integers_and_booleans_are_compared_exactly() -> None:
    assert matches_expected((piece(2, 7, dtype=np.int64),), "int64", 7)
    assert not matches_expected((piece(2, 7, 8, dtype=np.int64),), "int64", 7)
    assert not matches_expected((piece(1, 10**15, dtype=np.int64),), "int64", 10**15 + 1)
    assert matches_expected((piece(1, 1, dtype=np.bool_),), "bool", True)


def test_unknown_values_match_only_a_question_mark() -> None:
    known, unknown = (piece(2, 7),), (piece(2),)

    assert matches_expected(unknown, F32, "?")
    assert not matches_expected(unknown, F32, 7)
    assert not matches_expected(known, F32, "?")
    assert matches_expected((*known, *unknown), F32, [7, 7, "?", "?"])
    assert not matches_expected((*known, *unknown), F32, 7)
    assert matches_expected((piece(1, float("nan")),), F32, float("nan"))


def test_a_list_has_an_entry_for_every_element() -> None:
    content = (piece(2, 1, 2), piece(2, 3))

    assert matches_expected(content, F32, [[1, 2], [3, 3]])
    assert not matches_expected(content, F32, [1, 2, 3])
    assert not matches_expected(content, F32, [1, 2, 3, 4])
    assert not matches_expected(content, F32, [1, 2, 3, 3, 3])


# --- reductions ---


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", 8),
        ("avg", 2),
        ("product", 12),
        ("min", 1),
        ("max", 4),
        ("band", 0),
        ("bor", 7),
        ("bxor", 6),
    ],
)
def test_reductions_of_integers_combine_all_ranks(op: str, expected: int) -> None:
    assert reduce_arrays(op, [np.array([n]) for n in (1, 3, 4)]).tolist() == [expected]


@pytest.mark.parametrize(
    ("terms", "average"), [((-7, 0), [-3]), ((7, 0), [3]), ((-8, 0), [-4]), ((-7, 0, 0), [-2])]
)
def test_the_average_of_integers_is_truncated_towards_zero(
    terms: tuple[int, ...], average: list[int]
) -> None:
    found = reduce_arrays("avg", [np.array([n], np.int8) for n in terms])

    assert (found.tolist(), found.dtype) == (average, np.int8)


def test_averages_and_sums_stay_in_the_dtype() -> None:
    assert reduce_arrays("avg", [np.array([n], np.float16) for n in (1, 2)]).dtype == np.float16
    assert reduce_arrays("sum", [np.array([True]), np.array([True])]).dtype == np.bool_
    assert reduce_arrays("sum", [np.array([200], np.uint8)] * 2).tolist() == [144]


def test_an_effect_keeps_ranks_that_receive_nothing_and_sums_by_default() -> None:
    given = [[np.array([n])] for n in (1, 2, 4)]

    reduced = apply_effect(OPERATIONS["reduce"], 3, 1, None, given)
    copied = apply_effect(OPERATIONS["broadcast"], 3, 2, None, given)

    assert [None if parts is None else parts[0].tolist() for parts in reduced] == [None, [7], None]
    assert [parts[0].tolist() for parts in copied if parts is not None] == [[4], [4], [4]]
    assert all(parts is None or parts[0] is not given[2][0] for parts in copied)


# --- pieces ---


def test_a_slice_keeps_the_history_and_numbers_of_its_range() -> None:
    content = (piece(3, 1, 2, 3, node=5, start=10), piece(4, 9, node=6))

    assert [(p.numel, p.node, p.start, plain(p.numbers)) for p in slice_content(content, 2, 5)] == [
        (1, 5, 12, [3.0]),
        (2, 6, 0, [9.0]),
    ]
    assert [(p.numel, p.start) for p in slice_content(content, 4, 99)] == [(3, 1)]
    assert slice_content(content, 3, 3) == ()
    assert [p.numel for p in slice_content(content[:1], 0, 3)] == [3]
    assert [p.numel for p in slice_content(content[:1], 0, 2)] == [2]
    assert [(p.numel, p.start) for p in slice_content(content[:1], 1, 3)] == [(2, 11)]
    assert [(p.numel, p.numbers) for p in slice_content((piece(4),), 1, 3)] == [(2, None)]


def joined(*pieces: ContentPiece) -> list[tuple[int, int, int]]:
    return [(p.numel, p.node, p.start) for p in concatenate_contents([pieces[:1], pieces[1:]])]


def test_adjacent_pieces_with_equal_history_and_number_are_merged() -> None:
    assert joined(piece(2, 1), piece(3, 1, start=2)) == [(5, 0, 0)]
    assert joined(piece(2), piece(3, start=2)) == [(5, 0, 0)]
    assert joined(piece(2), piece(3, start=2), piece(2, start=5)) == [(7, 0, 0)]


@pytest.mark.parametrize(
    "second",
    [
        piece(3, 1, start=3),
        piece(3, 1, node=1, start=2),
        piece(3, 2, start=2),
        piece(3, start=2),
        piece(3, 1, 1, 1, start=2),
        piece(1, 1, start=2),
    ],
    ids=["a gap", "another write", "another number", "unknown", "written out", "a single element"],
)
def test_different_pieces_stay_separate(second: ContentPiece) -> None:
    assert len(joined(piece(2, 1), second)) == 2


def test_contents_are_split_at_each_others_borders_up_to_the_shortest() -> None:
    one, two = (piece(2, 1), piece(4, 2)), (piece(3, 3), piece(9, 4))

    assert [tuple(p.numel for p in column) for column in align_contents([one, two])] == [
        (2, 2),
        (1, 1),
        (3, 3),
    ]
    assert [tuple(p.start for p in column) for column in align_contents([one, two])] == [
        (0, 0),
        (0, 2),
        (1, 0),
    ]
    assert [
        tuple(p.numel for p in column)
        for column in align_contents([(piece(2, 1),), (piece(2, 5),)])
    ] == [(2, 2)]
    assert [
        tuple(p.numel for p in column)
        for column in align_contents([(piece(2, 1),), (piece(3, 5),)])
    ] == [(2, 2)]


def test_equal_combinations_share_a_node_and_contributions_add_up_over_all_paths() -> None:
    graph, a, b = LineageGraph(), TensorContribution(0, "x", 0), TensorContribution(1, "x", 0)
    one, two = graph.leaf("start", a, -1), graph.leaf("start", b, -1)
    both = graph.combine("sum", ((one, 0), (two, 0)), 3)
    twice = graph.combine("sum", ((both, 0), (one, 4)), 4)

    assert graph.combine("sum", ((one, 0), (two, 0)), 9) == both
    assert graph.combine("max", ((one, 0), (two, 0)), 9) == twice + 1
    assert graph.counts(twice) == Counter({a: 2, b: 1})
    assert graph.origins(twice, 2) == Counter({(a, 2): 1, (b, 2): 1, (a, 6): 1})
    assert graph.first_with(graph.combine("sum", ((twice, 0), (two, 0)), 5), a) == twice
    other = graph.combine("max", ((one, 0), (two, 0)), 6)
    assert graph.origins(graph.combine("sum", ((both, 0), (other, 0)), 7), 2) == Counter(
        {(a, 2): 2, (b, 2): 2}
    )


# --- a whole run ---

HEAD = "world: 2\nbackend: gloo\ntensors: {x: {shape: [4], value: index + 10 * rank}, y: {shape: [4]}}\nprogram:\n"


def values_of(text: str) -> BufferValues:
    found = simulate(loads(text)).values
    assert found is not None
    return found


def test_each_element_up_to_the_last_has_its_own_origin() -> None:
    """Two halves from two ranks; beyond the end there is nothing to ask for."""
    values = values_of(
        "world: 2\ntensors: {x: {shape: [2], value: rank}, y: {shape: [2, 2]}}\nprogram: [all_gather: {input: x, output: y}]\n"
    )

    assert [next(iter(values.origins(0, "y", k))) for k in range(4)] == [
        (TensorContribution(rank, "x", 0), element) for rank in (0, 1) for element in (0, 1)
    ]
    with pytest.raises(IndexError, match="y on rank 0 has no element 4"):
        values.origins(0, "y", 4)


def test_a_missing_contribution_names_the_last_write_and_a_surplus_one_its_call() -> None:
    values = values_of(HEAD + "  - all_reduce: {tensor: x}\n  - all_reduce: {tensor: x}\n")
    (twice,) = values.breaches(0, "x", [TensorContribution(0, "x", 0)])
    (missing,) = values.breaches(0, "x", [TensorContribution(0, "y", 0)])

    assert (twice.times, twice.start, twice.stop, twice.row) == (2, 0, 4, values.state(0, "x").row)
    assert (missing.times, missing.row) == (0, values.state(0, "x").row)
    assert values.state(0, "y").row == -1


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        (
            "{shape: [4], dtype: int16, value: index}",
            "{shape: [2], dtype: int32}",
            "[65536, 196610]",
        ),
        ("{shape: [2], dtype: int32, value: index}", "{shape: [4], dtype: int16}", "[0, 0, 1, 0]"),
    ],
)
def test_bits_received_in_another_dtype_fill_as_many_elements_as_their_bytes_allow(
    source: str, target: str, text: str
) -> None:
    values = values_of(
        f"world: 2\ntensors: {{a: {source}, b: {target}}}\nprogram:\n"
        "  - {send: {tensor: a, dst: 1}, ranks: rank == 0}\n  - {recv: {tensor: b, src: 0}, ranks: rank == 1}\n"
    )

    assert values.text(1, "b") == text


def test_a_value_that_cannot_be_computed_is_refused_with_a_remedy() -> None:
    with pytest.raises(UsageError, match="--no-values"):
        values_of(
            "world: 2\ntensors: {x: {shape: [1], value: 1 // rank}}\nprogram: [all_reduce: {tensor: x}]\n"
        )


def test_the_first_part_of_a_batch_is_kept_like_the_others() -> None:
    text = (
        HEAD
        + "  - batch_isend_irecv: {as: h, ops: [isend: {tensor: x, dst: 1 - rank}, irecv: {tensor: y, src: 1 - rank}]}\n  - wait: h\n"
    )
    done = simulate(loads(text))
    values = compute_values(done.program, done.run.trace, at_calls=True)

    assert values.at_part[0, 0, 0, "in"] == "[0.0, 1.0, 2.0, 3.0]"
    assert values.at_part[0, 0, 1, "out"] == "[10.0, 11.0, 12.0, 13.0]"


def test_zeros_of_both_signs_are_no_uniform_tensor() -> None:
    """0.0 == -0.0, and still their bits differ: three ranks' zeros stay as each sent them (run on
    gloo).
    """
    assert np.signbit(numbers_of_content((piece(1, -0.0), piece(1, 0.0)), F32)).tolist() == [
        True,
        False,
    ]  # type: ignore[arg-type]
    scenario = loads("""
        world: 3
        tensors: {mine: {shape: [3], value: "-0.5 * rank * (rank - 2) * (index - 1)"}, got: {shape: [3], value: 1}}
        program: [all_to_all_single: {input: mine, output: got}]
    """)
    got = simulate(scenario).values
    assert got is not None
    for rank in range(3):
        mine = [-0.5 * r * (r - 2) * (rank - 1) for r in range(3)]
        assert np.signbit(got.array(rank, "got")).tolist() == np.signbit(np.array(mine)).tolist(), (
            rank
        )  # type: ignore[arg-type]
