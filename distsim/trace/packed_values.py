"""The final values of tensors as a trace's header stores them: bounded in size, and comparable.

Key idea: two traces must be comparable although large tensors are not stored. So a large tensor is
stored as its first numbers and digests of equal parts; unequal digests prove a difference.

``values`` is tensor -> rank -> one of

* a number: all elements have this value (``inf``, ``nan`` and complex numbers as text);
* a list, nested like the shape: tensors of up to `MAX_ELEMENTS` elements;
* ``{"shape", "runs": [[count, number], …]}``: larger tensors of at most `MAX_RUNS` runs of equal
  numbers;
* ``{"shape", "first": […], "digests": […]}``: all others. They are cut into `SAMPLE_PARTS` equal
  parts, and each part has its first number and a digest of all its numbers;
* null, or omitted: unknown.

``value_dtypes`` is tensor -> dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Final, Literal, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

MAX_ELEMENTS: Final = 64
MAX_RUNS: Final = 16
SAMPLE_PARTS: Final = 16
#: How many values a header stores at most; the others are counted (``values_left_out``).
MAX_VALUES: Final = 1024

#: The spacing of numbers at 1 (half of it is the largest rounding error of one operation): IEEE
#: 754, bfloat16, OCP OFP8.
EPSILON: Final = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
}

ValueMatch = Literal["equal", "close", "differs", "unknown"]
TensorNumber = bool | int | float | str
#: The stored form of one tensor.
PackedTensor = TensorNumber | list["PackedTensor"] | dict[str, "PackedTensor"] | None
NumberArray = NDArray[np.generic]


class HeaderValues(TypedDict, total=False):
    """The keys of a header that store values."""

    values: dict[str, dict[str, PackedTensor]]
    value_dtypes: dict[str, str]
    values_left_out: int


class RankTensorValue(NamedTuple):
    """A tensor of one rank. ``value``: as `pack_tensor` returns it."""

    rank: int
    label: str
    dtype: str
    value: PackedTensor


class ValueDifference(NamedTuple):
    """Where two tensors first differ.

    ``element``: its flat index, -1 if no single element can be named. ``a``, ``b``: the numbers.
    ``where``: the place in words.
    """

    element: int
    a: TensorNumber | None
    b: TensorNumber | None
    where: str


# --- writing ---


def header_values(known_values: Iterable[RankTensorValue]) -> HeaderValues:
    """The keys of a header that store these values, ordered by tensor, copy and rank."""
    ordered = sorted((entry for entry in known_values if entry.value is not None), key=_sort_key)
    stored = ordered[:MAX_VALUES]
    values: dict[str, dict[str, PackedTensor]] = {}
    dtypes: dict[str, str] = {}
    for entry in stored:
        values.setdefault(entry.label, {})[str(entry.rank)] = entry.value
        dtypes.setdefault(entry.label, entry.dtype)
    header: HeaderValues = {"values": values, "value_dtypes": dtypes}
    if len(ordered) > MAX_VALUES:
        header["values_left_out"] = len(ordered) - MAX_VALUES
    return header


def _sort_key(entry: RankTensorValue) -> tuple[str, int, int]:
    name, _, copy = entry.label.partition("@")
    return name, int(copy or 0), entry.rank


def pack_tensor(array: NumberArray | None) -> PackedTensor:
    """The stored form of one tensor."""
    if array is None:
        return None
    if not array.size:
        return {"shape": list(array.shape), "runs": []}
    if not any(array.strides):  # broadcast from a single number
        return json_number(array.reshape(-1)[:1][0])
    flat = np.ascontiguousarray(array).reshape(-1)
    starts = _run_starts(flat)
    if len(starts) == 1:
        return json_number(flat[0])
    if flat.size <= MAX_ELEMENTS:
        return _nested_list(array)
    shape = list(array.shape)
    if len(starts) <= MAX_RUNS:
        counts = np.diff([*starts, flat.size]).tolist()
        runs: list[PackedTensor] = [
            [count, json_number(flat[at])] for count, at in zip(counts, starts, strict=True)
        ]
        return {"shape": shape, "runs": runs}
    parts = [flat[start:end] for start, end in pairwise(_part_boundaries(flat.size))]
    return {
        "shape": shape,
        "first": [json_number(part[0]) for part in parts],
        "digests": [_digest(part) for part in parts],
    }


def json_number(value: np.generic) -> TensorNumber:
    """A Python number; text for numbers that JSON lacks (inf, nan, complex)."""
    kind = value.dtype.kind
    if kind == "b":
        return bool(value)
    if kind in "iu":
        return int(value)
    if kind == "c":
        return str(complex(value))
    found = float(value)
    return found if np.isfinite(found) else str(found)


def _run_starts(flat: NumberArray) -> list[int]:
    """Where runs of equal numbers begin; at most one more than a header has room for."""
    current, previous = flat[1:], flat[:-1]
    both_nan = (current != current) & (previous != previous)
    is_same = (current == previous) | both_nan
    return [0, *(np.flatnonzero(~is_same)[:MAX_RUNS] + 1).tolist()]


def _part_boundaries(size: int) -> list[int]:
    """The beginnings of the parts, and the end of the last one."""
    return [size * part // SAMPLE_PARTS for part in range(SAMPLE_PARTS + 1)]


def _digest(part: NumberArray) -> str:
    """A digest of the numbers that ignores the signs of zeros."""
    unsigned = np.where(part == 0, np.zeros(1, part.dtype), part)
    return hashlib.sha256(unsigned.tobytes()).hexdigest()[:16]


def _nested_list(array: NumberArray) -> PackedTensor:
    if array.ndim:
        return [_nested_list(row) for row in array]
    return json_number(array.reshape(-1)[0])


# --- comparing ---


#: The size of a stored number that stands for any number of elements.
_ANY_SIZE: Final = -1


class _UnpackedTensor(NamedTuple):
    """A stored tensor.

    ``runs``: (count, number) of all elements, None if only ``first`` and ``digests`` are stored.
    ``size`` may be `_ANY_SIZE`.
    """

    size: int
    runs: Sequence[tuple[int, TensorNumber]] | None
    first: Sequence[TensorNumber] = ()
    digests: Sequence[str] = ()


class _ElementPair(NamedTuple):
    """The numbers of two tensors at one element."""

    element: int
    a: TensorNumber | None
    b: TensorNumber | None


def compare_packed(
    a: object, b: object, tolerance: float = 0.0
) -> tuple[ValueMatch, ValueDifference | None]:
    """Compare two stored tensors.

    They are close if no element differs by more than the tolerance, relative or absolute. Raises
    ValueError for anything that is no stored tensor.
    """
    if a is None or b is None:
        return "unknown", None
    left, right = _unpack(a), _unpack(b)
    have_sizes = left.size != _ANY_SIZE and right.size != _ANY_SIZE
    if have_sizes and left.size != right.size:
        return "differs", ValueDifference(-1, left.size, right.size, "the number of elements")
    if left.runs is not None and right.runs is not None:
        pairs, differing_part = list(_aligned_runs(left, right)), ""
    else:
        pairs, differing_part = list(_aligned_samples(left, right)), _differing_part(left, right)
    unequal = [pair for pair in pairs if pair.a != pair.b]
    for pair in unequal:
        if not _is_close(pair.a, pair.b, tolerance):
            return "differs", ValueDifference(*pair, f"element {pair.element}")
    if not unequal and not differing_part:
        return "equal", None
    # Digests cannot tell how far numbers differ, so with a tolerance they get the benefit of doubt.
    if tolerance > 0:
        return "close", None
    return "differs", ValueDifference(-1, None, None, differing_part)


def has_valid_values(header: Mapping[str, object]) -> bool:
    """Whether the values of a header have the form that this module describes."""
    values, dtypes = header.get("values"), header.get("value_dtypes")
    if not isinstance(values, dict | None) or not isinstance(dtypes, dict | None):
        return False
    if not all(isinstance(dtype, str) for dtype in (dtypes or {}).values()):
        return False
    try:
        for ranks in (values or {}).values():
            for rank, value in ranks.items():
                int(rank)
                compare_packed(value, value)
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError):
        return False
    return True


def _unpack(value: object) -> _UnpackedTensor:
    if isinstance(value, (int, float, str)):
        return _UnpackedTensor(-1, [(1, value)])
    if isinstance(value, list):
        flat = [(1, x) for x in _flat_numbers(value)]
        return _UnpackedTensor(len(flat), flat)
    if isinstance(value, Mapping) and isinstance(value.get("shape"), list):
        unpacked = _unpack_large(prod(value["shape"]), value)
        if unpacked is not None:
            return unpacked
    raise ValueError("expected what a tensor holds as a number, a list, runs or digests")


def _unpack_large(size: int, value: Mapping[str, Any]) -> _UnpackedTensor | None:
    """A tensor stored as runs or as samples; None if it has neither."""
    runs, first, digests = value.get("runs"), value.get("first"), value.get("digests")
    if isinstance(runs, list) and sum(count for count, _ in runs) == size:
        counts = [count for count, _ in runs]
        numbers = _flat_numbers(number for _, number in runs)
        return _UnpackedTensor(size, list(zip(counts, numbers, strict=True)))
    if not isinstance(first, list) or not isinstance(digests, list):
        return None
    if not len(first) == len(digests) == SAMPLE_PARTS <= size:
        return None
    return _UnpackedTensor(size, None, list(_flat_numbers(first)), digests)


def _flat_numbers(items: Iterable[object]) -> Iterator[TensorNumber]:
    """The numbers of nested lists. Raises ValueError for anything else among them."""
    for item in items:
        if isinstance(item, list):
            yield from _flat_numbers(item)
        elif isinstance(item, (int, float, str)):
            yield item
        else:
            raise ValueError(f"expected a number, found {item!r}")


def _aligned_runs(a: _UnpackedTensor, b: _UnpackedTensor) -> Iterator[_ElementPair]:
    """The pairs of numbers wherever a run of either tensor begins."""
    size = max(a.size, b.size, 1)
    runs_a, runs_b = _run_ends(a, size), _run_ends(b, size)
    i = j = element = 0
    while i < len(runs_a) and j < len(runs_b):
        (end_a, number_a), (end_b, number_b) = runs_a[i], runs_b[j]
        yield _ElementPair(element, number_a, number_b)
        element = min(end_a, end_b)
        i += end_a <= element
        j += end_b <= element


def _run_ends(tensor: _UnpackedTensor, size: int) -> list[tuple[int, TensorNumber]]:
    """(end, number) of each run. A number of any size is one run of all elements."""
    ends = []
    end = 0
    for count, number in tensor.runs or ():
        end = size if tensor.size == _ANY_SIZE else end + count
        ends.append((end, number))
    return ends


def _aligned_samples(a: _UnpackedTensor, b: _UnpackedTensor) -> Iterator[_ElementPair]:
    """The pairs of numbers at the beginnings of the parts."""
    size = max(a.size, b.size)
    for element in _part_boundaries(size)[:-1]:
        yield _ElementPair(element, _number_at(a, element, size), _number_at(b, element, size))


def _number_at(tensor: _UnpackedTensor, element: int, size: int) -> TensorNumber | None:
    if tensor.runs is None:
        return tensor.first[_part_boundaries(size).index(element)]
    end = 0
    for count, number in tensor.runs:
        end += count
        if element < end or tensor.size == _ANY_SIZE:
            return number
    return None


def _differing_part(a: _UnpackedTensor, b: _UnpackedTensor) -> str:
    """Where two tensors with equal samples differ, by their digests; empty if they are equal."""
    if a.runs is not None or b.runs is not None:
        return "one of them has more different numbers"
    boundaries = _part_boundaries(max(a.size, b.size))
    for part, (digest_a, digest_b) in enumerate(zip(a.digests, b.digests, strict=False)):
        if digest_a != digest_b:
            return f"one of the elements {boundaries[part]} to {boundaries[part + 1] - 1}"
    return ""


def _is_close(x: TensorNumber | None, y: TensorNumber | None, tolerance: float) -> bool:
    if not tolerance or isinstance(x, bool | None) or isinstance(y, bool | None):
        return x == y
    try:
        p, q = complex(x), complex(y)
    except ValueError:
        return False
    return x == y or abs(p - q) <= tolerance * (1 + abs(q))
