"""What tensors hold, as a trace's header carries it: bounded, and two of them compared."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.analysis.run_comparison import compare_runs
from distsim.common.errors import UsageError
from distsim.operations.core.collective_results import numpy_dtype
from distsim.output.text.comparison import compare_json, compare_text
from distsim.trace.jsonl import parse_trace, trace_lines
from distsim.trace.model import Trace
from distsim.trace.packed_values import (
    EPSILON,
    MAX_ELEMENTS,
    MAX_RUNS,
    MAX_VALUES,
    SAMPLE_PARTS,
    RankTensorValue,
    ValueDifference,
    compare_packed,
    header_values,
    pack_tensor,
)
from tests.analysis.test_compare import NAMES, step, trace
from tests.support.harness import draws

STEPS = np.repeat(np.arange(8, dtype=np.int32), 100)
COUNT = np.arange(5000, dtype=np.float32).reshape(50, 100)


@pytest.mark.parametrize(
    ("array", "form"),
    [
        (np.broadcast_to(np.float32(2.5), (1024, 1024)), 2.5),
        (np.full(9, True), True),
        (np.array(7), 7),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([np.inf, np.nan, -np.inf]), ["inf", "nan", "-inf"]),
        (np.array([1 + 2j, 3]), ["(1+2j)", "(3+0j)"]),
        (np.array([0.5, 2.0]).astype(numpy_dtype("bfloat16")), [0.5, 2.0]),
        (STEPS, {"shape": [800], "runs": [[100, k] for k in range(8)]}),
        (np.zeros((0, 4)), {"shape": [0, 4], "runs": []}),
        (None, None),
    ],
    ids=str,
)
def test_small_and_uniform_tensors_are_written_in_full_and_larger_ones_by_ranges(
    array: Any, form: Any
) -> None:
    assert pack_tensor(array) == form
    assert json.loads(json.dumps(form)) == form


def test_a_large_tensor_is_recorded_by_one_number_and_a_digest_per_part() -> None:
    found = pack_tensor(COUNT)

    assert (found["shape"], len(found["first"]), len(found["digests"])) == (
        [50, 100],
        SAMPLE_PARTS,
        SAMPLE_PARTS,
    )
    assert found["first"][:2] == [0.0, 312.0]
    assert len(json.dumps(pack_tensor(np.arange(1 << 20)))) < 1000


def test_a_header_is_bounded_and_counts_its_omissions() -> None:
    found = header_values(
        RankTensorValue(rank, "x", "int32", rank) for rank in range(MAX_VALUES + 3)
    )

    assert (len(found["values"]["x"]), found["values_left_out"]) == (MAX_VALUES, 3)


def test_tensors_with_unknown_values_are_omitted_and_the_others_sorted() -> None:
    kept = [
        RankTensorValue(1, "x@10", "int8", 1),
        RankTensorValue(0, "y", "bool", None),
        RankTensorValue(0, "x@2", "int8", 3),
        RankTensorValue(0, "x@10", "int8", 2),
    ]

    assert header_values(kept) == {
        "values": {"x@2": {"0": 3}, "x@10": {"0": 2, "1": 1}},
        "value_dtypes": {"x@2": "int8", "x@10": "int8"},
    }


RUNS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=30)


def arrays() -> Any:
    return st.one_of(
        st.lists(st.integers(0, 3), min_size=1, max_size=8),
        st.builds(lambda runs: [n for count, n in runs for _ in range(count)], RUNS),
        st.builds(
            lambda n, seed: np.random.default_rng(seed).integers(0, 50, n).tolist(),
            st.integers(65, 400),
            st.integers(0, 9),
        ),
    )


@given(arrays(), st.data())
@settings(max_examples=draws(150), deadline=None)
def test_tensors_compare_like_their_numbers_and_the_first_difference_is_named(
    numbers: list[int], data: Any
) -> None:
    """Whatever forms the two have; where only digests tell, the part that differs is the one that
    does.
    """
    changed = list(numbers)
    for _ in range(data.draw(st.integers(0, 3))):
        changed[data.draw(st.integers(0, len(numbers) - 1))] = data.draw(st.integers(0, 60))
    a, b = pack_tensor(np.array(numbers)), pack_tensor(np.array(changed))
    first = next((k for k, (x, y) in enumerate(zip(numbers, changed, strict=True)) if x != y), None)

    state, where = compare_packed(a, b)

    assert (state == "equal") == (first is None)
    if where is not None and where.element >= 0:
        assert (where.a, where.b) == (numbers[where.element], changed[where.element])
        exact = "digests" not in str(a) and "digests" not in str(b)
        assert where.element == first if exact else where.element >= first


def test_tensors_of_different_sizes_differ_in_no_element_but_in_their_number() -> None:
    assert compare_packed([1.0, 2.0], [1.0, 2.0, 3.0]) == (
        "differs",
        ValueDifference(-1, 2, 3, "the number of elements"),
    )
    assert compare_packed(None, [1.0]) == compare_packed(2.0, None) == ("unknown", None)
    assert compare_packed([1.0, 1.0], 1.0) == ("equal", None)


def test_a_difference_visible_only_in_a_digest_is_reported_by_part() -> None:
    other = COUNT.copy()
    other[3, 14] = 7  # element 314, in the second part, not its first

    state, where = compare_packed(pack_tensor(COUNT), pack_tensor(other))

    assert (state, where.element, where.where) == ("differs", -1, "one of the elements 312 to 624")


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "state"),
    [
        (1.0, 1.0 + 2**-20, 2**-19, "close"),
        (1.0, 1.0 + 2**-18, 2**-20, "differs"),
        ([1.0, 2.0], [1.0, 2.0000001], 1e-6, "close"),
        ([True], [False], 1.0, "differs"),
        ("nan", "nan", 0.0, "equal"),
        ("nan", 1.0, 0.5, "differs"),
        (3, [3, 3], 0.0, "equal"),
        (3, [3, 4], 0.0, "differs"),
        ([1, 2], [1, 2, 3], 0.0, "differs"),
        (None, 3, 0.0, "unknown"),
        (0.0, -0.0, 0.0, "equal"),
    ],
)
def test_numbers_may_differ_by_at_most_the_tolerance(
    a: Any, b: Any, tolerance: float, state: str
) -> None:
    assert compare_packed(a, b, tolerance)[0] == state
    assert compare_packed(b, a, tolerance)[0] == state


def test_large_floats_with_different_digests_are_close_if_their_recorded_numbers_are() -> None:
    nudged = COUNT * np.float32(1 + 2**-22)

    assert (
        compare_packed(pack_tensor(COUNT), pack_tensor(nudged), 4 * EPSILON["float32"])[0]
        == "close"
    )
    assert compare_packed(pack_tensor(COUNT), pack_tensor(nudged))[0] == "differs"
    assert (
        compare_packed(pack_tensor(COUNT), pack_tensor(COUNT * 2), 4 * EPSILON["float32"])[
            1
        ].element
        == 312
    )


# --- two traces ---


def with_values(base: Trace, values: Any, dtype: str = "int32", **more: Any) -> Trace:
    return Trace(
        {**base.header, "values": {"x": values}, "value_dtypes": {"x": dtype}, **more},
        base.tables,
        base.columns,
    )


def test_a_comparison_names_tensor_rank_element_and_both_numbers() -> None:
    one = trace({0: step(), 1: step()})
    a, b = with_values(one, {"0": [5, 6, 7], "1": 1}), with_values(one, {"0": [5, 6, 8], "1": 1})

    found = compare_runs(a, b)
    data = compare_json(found, NAMES)

    assert not found.same
    assert (found.values.equal, found.values.differ) == (1, 1)
    assert data["divergences"][0] == {
        "kind": "value",
        "rank": 0,
        "text": "x, element 2: 7 in A, 8 in B",
        "a": None,
        "b": None,
        "tensor": "x",
        "element": 2,
        "numbers": [7, 8],
    }
    assert data["values"] == {"equal": 1, "close": 0, "differ": 1, "one_sided": 0, "lacking": ""}
    assert "rank 0: x, element 2: 7 in A, 8 in B" in compare_text(found, NAMES)


@pytest.mark.parametrize(
    ("ranks", "source", "dtype", "state"),
    [
        (3, "recorded", "float32", "close"),
        (3, "recorded", "int32", "differ"),
        (3, "simulated", "float32", "differ"),
        (2, "recorded", "float32", "differ"),
    ],
)
def test_only_recorded_floats_summed_from_more_than_two_ranks_may_differ_by_rounding(
    ranks: int, source: str, dtype: str, state: str
) -> None:
    one = trace({rank: step() for rank in range(ranks)})
    a, b = (
        with_values(one, {"0": 1.0}, dtype),
        with_values(one, {"0": 1.0 + 2**-23}, dtype, source=source),
    )

    found = compare_runs(a, b)

    assert getattr(found.values, state) == 1
    assert found.same == (state == "close")


@pytest.mark.parametrize(
    ("which", "text"),
    [("A", "A did not record"), ("B", "B did not record"), ("AB", "neither run recorded")],
)
def test_a_run_without_values_is_reported_as_such(which: str, text: str) -> None:
    one = trace({0: step(), 1: step()})
    sides = [one if side in which else with_values(one, {"0": 1}) for side in "AB"]

    found = compare_runs(*sides)

    assert found.same
    assert (found.values.lacking, text in compare_text(found, NAMES)) == (which, True)


@pytest.mark.parametrize(
    "values",
    [
        3,
        {"x": 3},
        {"x": {"zero": 3}},
        {"x": {"0": {"shape": [9], "runs": [[1, 2]]}}},
        {"x": {"0": {}}},
        {"x": {"0": {"shape": "a"}}},
    ],
    ids=str,
)
def test_values_not_written_by_distsim_are_refused(values: Any) -> None:
    lines = list(trace_lines(trace({0: step(), 1: step()})))
    header = {**json.loads(lines[0]), "values": values}

    with pytest.raises(UsageError, match="`values` in the header"):
        parse_trace([json.dumps(header) + "\n", *"".join(lines[1:]).splitlines(True)])


def test_values_survive_writing_and_reading() -> None:
    kept = [
        RankTensorValue(0, "x", "int32", pack_tensor(STEPS)),
        RankTensorValue(1, "x", "int32", pack_tensor(np.arange(MAX_ELEMENTS))),
        RankTensorValue(0, "y", "float32", pack_tensor(COUNT)),
    ]
    one = trace({0: step(), 1: step()})
    full = Trace({**one.header, **header_values(kept)}, one.tables, one.columns)

    again = parse_trace("".join(trace_lines(full)).splitlines(True))

    assert again.header["values"] == full.header["values"]
    assert compare_runs(full, again).values == (3, 0, 0, 0, "")
    assert MAX_RUNS < MAX_ELEMENTS


def test_json_omits_numbers_known_only_by_digest() -> None:
    other = COUNT.copy()
    other[3, 14] = 7
    one = trace({0: step(), 1: step()})
    a, b = (with_values(one, {"0": pack_tensor(array)}, "float32") for array in (COUNT, other))

    data = compare_json(compare_runs(a, b), NAMES)["divergences"][0]

    assert (data["tensor"], data["element"], data["numbers"]) == ("x", None, None)
    assert data["text"] == "x differs in one of the elements 312 to 624, by digest"
