"""The shape that an operation gives to an output declared with `shape: auto`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distsim.ops.base import Op
from distsim.program.records import BufferVec, Fields, Vec


def auto_shape(row: type[Op], fields: Fields, n: Vec) -> tuple[Vec, ...] | None:
    """Shape of the one output, from the input's shape and the group's size ``n``; None where it can't be told."""
    inputs: Sequence[BufferVec] = fields.get("inputs") or ()
    if len(inputs) != 1:
        return None
    shape: tuple[Vec, ...] = inputs[0].shape
    one_in, one_out = row.input_parts == "one", row.output_parts == "one"
    if not one_in and not one_out:
        splits = fields.get("output_splits")
        return shape if splits is None else (_total(splits), *shape[1:])
    if one_in and not one_out:
        return ((shape[0] * n if shape else n), *shape[1:]) if row.flat else (n, *shape)
    if not one_in:
        return (np.asarray(shape[0]) // n if isinstance(n, np.ndarray) else shape[0] // n, *shape[1:]) if row.flat else shape[1:]
    return shape


def _total(splits: Sequence[Vec]) -> Vec:
    total: Vec = 0
    for split in splits:
        total = total + split
    return total
