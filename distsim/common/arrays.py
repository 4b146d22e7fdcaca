"""Small things on numpy's arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

T = TypeVar("T", bound=np.generic)

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

#: Columns of a wider range are numbered first: products with a number of places still fit 63 bits.
_MAX_KEY_SPACE = 1 << 32


def sorted_unique(values: NDArray[T]) -> NDArray[T]:
    """The values of an array, each once, in rising order: `np.unique` without the masked arrays
    that it loads, a tenth of a short run.

    No NaN may be among them.
    """
    flat = values.reshape(-1)
    if len(flat) and (flat == flat[0]).all():
        return flat[:1].copy()
    flat = np.sort(flat)
    return flat[np.append(True, flat[1:] != flat[:-1])] if len(flat) > 1 else flat


def dense_row_ids(columns: Iterable[NDArray[np.int64]], size: int) -> NDArray[np.int64]:
    """For each of ``size`` places a number: equal where all columns are equal, rising as the
    columns rise, the first one foremost. `np.unique` along an axis says the same and takes twenty
    times as long."""
    found = np.zeros(size, dtype=np.int64)
    for column in columns:
        if not size or (column == column[0]).all():
            continue
        low, high = int(column.min()), int(column.max())
        steps = (
            column - low
            if high - low < _MAX_KEY_SPACE
            else np.unique(column, return_inverse=True)[1].reshape(-1)
        )
        found = np.unique(found * (int(steps.max()) + 1) + steps, return_inverse=True)[1].reshape(
            -1
        )
    return found


def sorted_union(one: ArrayLike, other: ArrayLike) -> NDArray[np.int64]:
    """The integers that are in either, each once, in rising order."""
    return sorted_unique(
        np.concatenate([np.asarray(side, dtype=np.int64).reshape(-1) for side in (one, other)])
    )


def first_equal_columns(values: IntArray) -> IntArray:
    """For each entry of a 2-d table, the first column of its row that holds the same value."""
    order = np.argsort(values, axis=1, kind="stable")
    ascending = np.take_along_axis(values, order, axis=1)
    fresh = np.ones(values.shape, dtype=np.bool_)
    fresh[:, 1:] = ascending[:, 1:] != ascending[:, :-1]
    starts = np.maximum.accumulate(np.where(fresh, np.arange(values.shape[1]), 0), axis=1)
    first = np.empty_like(values)
    np.put_along_axis(first, order, np.take_along_axis(order, starts, axis=1), axis=1)
    return first
