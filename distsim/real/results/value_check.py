"""Are the values of a real run those of the simulation? Integers bit for bit; floats too where the
order of addition allows it.
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


class BufferCheck(NamedTuple):
    """One buffer. ``state``: equal, close (within the tolerance), differs, unknown (the simulation
    has no numbers of it).
    """

    rank: int
    label: str
    state: str
    detail: str = ""


class RankValueCheck(NamedTuple):
    """What a rank left: its buffers beside the simulated ones, what those hold that are known, what
    recording one call cost in ns.
    """

    buffers: list[BufferCheck]
    kept: list[RankTensorValue]
    overhead_ns: int


def check_values(
    program: Program, values: BufferValues | None, rank: int, path: Path, backend: str
) -> RankValueCheck:
    """Read a rank's result. Empty where it left none; without ``values`` there are no buffers to
    speak of.
    """
    if not path.exists():
        return RankValueCheck([], [], 0)
    left = unpack_record(path.read_bytes())
    index = json.loads(left["index"])
    if values is None:
        return RankValueCheck([], [], int(index["overhead_ns"]))
    rounds, partial = (
        _rounding_count(program, rank),
        _partial_sum_buffers(program, rank) if backend == "gloo" else set(),
    )
    found, kept = [], []
    for label, (shape, dtype) in index["buffers"].items():
        kind = np.dtype(np.bool_) if dtype == "bool" else numpy_dtype(dtype)
        numbers = np.frombuffer(left[f"buffer {label}"], dtype=kind)
        here = (
            numbers.reshape(shape)
            if numbers.size == prod(shape)
            else np.broadcast_to(numbers, shape)
        )  # one stands for all
        if label in partial:
            found.append(
                BufferCheck(
                    rank, label, "unknown", "gloo leaves partial sums away from the root of reduce"
                )
            )
        else:
            found.append(_check(rank, label, dtype, here, values, rounds))
        if found[-1].state != "unknown":
            kept.append(RankTensorValue(rank, label, dtype, pack_tensor(here)))
    return RankValueCheck(found, kept, int(index["overhead_ns"]))


def _check(
    rank: int, label: str, dtype: str, here: NDArray[np.generic], values: BufferValues, rounds: int
) -> BufferCheck:
    try:
        there = values.array(rank, label)
    except KeyError:
        there = None
    if there is None:
        return BufferCheck(rank, label, "unknown")
    if there.shape == here.shape and _same_bits(here, there):
        return BufferCheck(rank, label, "equal")
    if (
        there.shape == here.shape
        and dtype in EPSILON
        and rounds
        and _close(here, there, rounds * EPSILON[dtype])
    ):
        return BufferCheck(rank, label, "close")
    return BufferCheck(rank, label, "differs", _difference(here, there))


def _same_bits(here: NDArray[np.generic], there: NDArray[np.generic]) -> bool:
    if (
        here.size and not any(here.strides) and not any(there.strides)
    ):  # both one element over and over
        return bool(here.flat[0].tobytes() == there.flat[0].tobytes())
    return here.tobytes() == there.tobytes()


def _close(here: NDArray[np.generic], there: NDArray[np.generic], tolerance: float) -> bool:
    wide = np.complex128 if here.dtype.kind == "c" else np.float64
    return bool(
        np.isclose(
            here.astype(wide), there.astype(wide), rtol=tolerance, atol=tolerance, equal_nan=True
        ).all()
    )


def _difference(here: NDArray[np.generic], there: NDArray[np.generic]) -> str:
    if here.shape != there.shape:
        return f"shape {list(here.shape)}, simulated {list(there.shape)}"
    unlike = np.flatnonzero((here != there).ravel())
    if not unlike.size:
        return "the bits of equal numbers differ (the sign of a zero, a NaN)"
    first = int(unlike[0])
    return f"element {first} is {here.ravel()[first]}, simulated {there.ravel()[first]}; {unlike.size} of {here.size} differ"


def _rounding_count(program: Program, rank: int) -> int:
    """How many roundings the order of addition may change: nothing where at most two numbers are
    added at a time.
    """
    return sum(
        c.group.size
        for _, c in program.calls_of(rank)
        if OPERATIONS[c.op].reduces and c.group.size > 2
    )


def _partial_sum_buffers(program: Program, rank: int) -> set[str]:
    """Buffers that gloo's reduce spoils on this rank (semantics 2.2)."""
    return {
        b.label
        for _, c in program.calls_of(rank)
        if c.op == "reduce" and c.root != rank
        for b in c.inputs
    }
