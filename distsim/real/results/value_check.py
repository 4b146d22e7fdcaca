"""Compares the buffers of a real run with the simulated values.

Integers must be equal bit for bit. Floats may differ by the roundings that another order of
addition causes: the tolerance grows with the number of reductions over more than two ranks, because
the sum of two numbers does not depend on their order.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.operations.core.collective_results import numpy_dtype
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.real.shared.job import unpack_record
from distsim.trace.packed_values import EPSILON, RankTensorValue, pack_tensor
from distsim.values import BufferValues

Numbers = NDArray[np.generic]


class BufferCheck(NamedTuple):
    """The comparison of one buffer.

    ``state``: equal, close (within the tolerance), differs, or unknown (not simulated).
    """

    rank: int
    label: str
    state: str
    detail: str = ""


class RankValueCheck(NamedTuple):
    """What a rank left.

    ``buffers``: its buffers compared with the simulated ones. ``known_values``: the contents of
    those that were simulated. ``overhead_ns``: the cost of recording one call.
    """

    buffers: list[BufferCheck]
    known_values: list[RankTensorValue]
    overhead_ns: int


def check_values(
    program: Program, values: BufferValues | None, rank: int, path: Path, backend: str
) -> RankValueCheck:
    """Read and check a rank's result file; empty without a file or without simulated ``values``."""
    if not path.exists():
        return RankValueCheck([], [], 0)
    record = unpack_record(path.read_bytes())
    index = json.loads(record["index"])
    overhead_ns = int(index["overhead_ns"])
    if values is None:
        return RankValueCheck([], [], overhead_ns)

    roundings = _rounding_count(program, rank)
    partial_sums = _partial_sum_buffers(program, rank) if backend == "gloo" else set()
    checks, known_values = [], []
    for label, (shape, dtype) in index["buffers"].items():
        real = _array(record[f"buffer {label}"], shape, dtype)
        if label in partial_sums:
            detail = "gloo leaves partial sums on ranks other than the root of reduce"
            check = BufferCheck(rank, label, "unknown", detail)
        else:
            check = _check(rank, label, dtype, real, values, roundings)
        checks.append(check)
        if check.state != "unknown":
            known_values.append(RankTensorValue(rank, label, dtype, pack_tensor(real)))
    return RankValueCheck(checks, known_values, overhead_ns)


def _array(data: bytes, shape: list[int], dtype: str) -> Numbers:
    """A buffer from its bytes; a single element stands for a buffer that repeats it."""
    kind = np.dtype(np.bool_) if dtype == "bool" else numpy_dtype(dtype)
    numbers = np.frombuffer(data, dtype=kind)
    if numbers.size == prod(shape):
        return numbers.reshape(shape)
    return np.broadcast_to(numbers, shape)


def _check(
    rank: int, label: str, dtype: str, real: Numbers, values: BufferValues, roundings: int
) -> BufferCheck:
    try:
        simulated = values.array(rank, label)
    except KeyError:
        simulated = None
    if simulated is None:
        return BufferCheck(rank, label, "unknown")
    if simulated.shape == real.shape:
        if _same_bits(real, simulated):
            return BufferCheck(rank, label, "equal")
        may_round = dtype in EPSILON and roundings > 0
        if may_round and _is_close(real, simulated, roundings * EPSILON[dtype]):
            return BufferCheck(rank, label, "close")
    return BufferCheck(rank, label, "differs", _difference(real, simulated))


def _same_bits(real: Numbers, simulated: Numbers) -> bool:
    # Zero strides: one element is repeated, so comparing the first one is enough.
    both_repeat = not any(real.strides) and not any(simulated.strides)
    if real.size and both_repeat:
        return bool(real.flat[0].tobytes() == simulated.flat[0].tobytes())
    return real.tobytes() == simulated.tobytes()


def _is_close(real: Numbers, simulated: Numbers, tolerance: float) -> bool:
    wide = np.complex128 if real.dtype.kind == "c" else np.float64
    close = np.isclose(
        real.astype(wide), simulated.astype(wide), rtol=tolerance, atol=tolerance, equal_nan=True
    )
    return bool(close.all())


def _difference(real: Numbers, simulated: Numbers) -> str:
    if real.shape != simulated.shape:
        return f"shape {list(real.shape)}, simulated {list(simulated.shape)}"
    unequal = np.flatnonzero((real != simulated).ravel())
    if not unequal.size:
        return "the bits of equal numbers differ (the sign of a zero, a NaN)"
    first = int(unequal[0])
    return (
        f"element {first} is {real.ravel()[first]}, simulated {simulated.ravel()[first]}; "
        f"{unequal.size} of {real.size} differ"
    )


def _rounding_count(program: Program, rank: int) -> int:
    """An upper bound on the roundings that depend on the order of addition.

    A reduction over two ranks adds two numbers and has none.
    """
    return sum(
        call.group.size
        for _, call in program.calls_of(rank)
        if OPERATIONS[call.op].reduces and call.group.size > 2
    )


def _partial_sum_buffers(program: Program, rank: int) -> set[str]:
    """Buffers in which gloo's reduce leaves partial sums on this rank (semantics 2.2)."""
    labels = set[str]()
    for _, call in program.calls_of(rank):
        if call.op == "reduce" and call.root != rank:
            labels.update(buffer.label for buffer in call.inputs)
    return labels
