"""Small helper functions for numpy arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

T = TypeVar("T", bound=np.generic)

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

#: A column with a wider range of values is first replaced by dense numbers, so that its product
#: with the number of rows fits 63 bits.
_MAX_KEY_SPACE = 1 << 32


def sorted_unique(values: NDArray[T]) -> NDArray[T]:
    """The distinct values of an array in ascending order.

    This is `np.unique` without the import of masked arrays, which takes a tenth of a short run. The
    values must not contain NaN.
    """
    flat = values.reshape(-1)
    if len(flat) and (flat == flat[0]).all():
        return flat[:1].copy()
    flat = np.sort(flat)
    return flat[np.append(True, flat[1:] != flat[:-1])] if len(flat) > 1 else flat


def dense_row_ids(columns: Iterable[NDArray[np.int64]], size: int) -> NDArray[np.int64]:
    """A number for each of ``size`` rows of the columns: equal rows have equal numbers.

    Numbers follow the lexicographic order of the rows, with the first column first. `np.unique`
    along an axis gives the same result and takes twenty times as long.
    """
    ids = np.zeros(size, dtype=np.int64)
    for column in columns:
        if not size or (column == column[0]).all():
            continue
        low, high = int(column.min()), int(column.max())
        if high - low < _MAX_KEY_SPACE:
            digits = column - low
        else:
            digits = np.unique(column, return_inverse=True)[1].reshape(-1)
        # Append the column as one more digit, then make the numbers dense again.
        keys = ids * (int(digits.max()) + 1) + digits
        ids = np.unique(keys, return_inverse=True)[1].reshape(-1)
    return ids


def sorted_union(one: ArrayLike, other: ArrayLike) -> NDArray[np.int64]:
    """The distinct integers of both inputs in ascending order."""
    return sorted_unique(
        np.concatenate([np.asarray(side, dtype=np.int64).reshape(-1) for side in (one, other)])
    )


def first_equal_columns(values: IntArray) -> IntArray:
    """For each entry of a 2-d table, the first column of its row with the same value."""
    order = np.argsort(values, axis=1, kind="stable")
    ascending = np.take_along_axis(values, order, axis=1)
    is_new = np.ones(values.shape, dtype=np.bool_)
    is_new[:, 1:] = ascending[:, 1:] != ascending[:, :-1]
    # The sort is stable, so the start of a run of equal values is their first column.
    starts = np.maximum.accumulate(np.where(is_new, np.arange(values.shape[1]), 0), axis=1)
    first = np.empty_like(values)
    np.put_along_axis(first, order, np.take_along_axis(order, starts, axis=1), axis=1)
    return first
