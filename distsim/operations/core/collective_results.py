"""The effect column applied to numbers: what each group rank's output holds after a collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distsim.operations.core.operation_base import Operation

Array = NDArray[Any]

_REDUCE_FUNCTIONS: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    """numpy's dtype of a torch dtype; bfloat16 and float8 are ml_dtypes'."""
    if dtype == "bfloat16" or dtype.startswith("float8"):
        import ml_dtypes

        found: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, dtype))
        return found
    return np.dtype(dtype)


def reduce_arrays(reduce_op: str, arrays: Sequence[Array]) -> Array:
    """Combine arrays of one dtype in group order, element by element, as torch's ReduceOp does.

    Every step stays in the dtype: integers wrap, half precision rounds each time. A sum of booleans
    is an or. ``avg`` is the sum divided by their number; integers are cut off towards zero, as nccl
    does (gloo refuses them; semantics of torch.distributed.ReduceOp and NCCL's post-division in
    enqueue.cc).
    """
    total, combine = arrays[0], _REDUCE_FUNCTIONS[reduce_op]
    with np.errstate(all="ignore"):
        for array in arrays[1:]:
            total = combine(total, array).astype(arrays[0].dtype, copy=False)
        return _divide_sum(total, len(arrays)) if reduce_op == "avg" else total


def _divide_sum(total: Array, n: int) -> Array:
    if total.dtype.kind in "iu":
        wide = total.astype(np.int64)
        cut: Array = (wide - np.fmod(wide, n)) // n
        return cut.astype(total.dtype)
    quotient: Array = total / total.dtype.type(n)
    return quotient.astype(total.dtype)


def apply_effect(
    row: type[Operation],
    n: int,
    root: int,
    reduce_op: str | None,
    inputs: Sequence[Sequence[Array]],
) -> list[list[Array] | None]:
    """Per group rank the parts of its output, or None where the operation leaves it as it was.

    ``inputs[r][k]`` is part k of the input of group rank r (flat or with the shape of the output);
    the list may be empty where a rank gives nothing. ``root`` is a group rank.
    """
    return [
        None
        if parts is None
        else [
            _combined_part([inputs[s.rank][s.part] for s in sources], reduce_op)
            for sources in parts
        ]
        for parts in row.effect(n, root)
    ]


def _combined_part(arrays: list[Array], reduce_op: str | None) -> Array:
    return arrays[0].copy() if len(arrays) == 1 else reduce_arrays(reduce_op or "sum", arrays)
