"""Small things on numpy's arrays, held to what Python says of the same numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distsim.common.arrays import dense_row_ids, sorted_unique

NUMBERS = st.integers(-3, 3) | st.integers(-(2**62), 2**62)


@given(st.lists(NUMBERS, max_size=8) | st.builds(lambda n, k: [n] * k, NUMBERS, st.integers(1, 8)))
def test_distinct_values_are_unique_and_sorted(values: list[int]) -> None:
    assert sorted_unique(np.array(values, dtype=np.int64)).tolist() == sorted(set(values))


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 2), NUMBERS), max_size=8))
def test_rows_are_numbered_in_sorted_order_and_equal_rows_share_a_number(
    rows: list[tuple[int, int, int]],
) -> None:
    columns = [np.array([row[k] for row in rows], dtype=np.int64) for k in range(3)]
    order = sorted(set(rows))
    assert dense_row_ids(columns, len(rows)).tolist() == [order.index(row) for row in rows]
