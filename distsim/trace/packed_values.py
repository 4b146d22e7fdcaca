"""What tensors hold at the end of a run, as the header of a trace carries it: bounded in size, and
two of them compared.

``values`` is tensor -> rank -> one of

* a number: all elements are that (``inf``, ``nan`` and complex numbers as text);
* a list, nested as the shape is: tensors of up to `MAX_ELEMENTS` elements;
* ``{"shape", "runs": [[count, number], …]}``: larger ones of at most `MAX_RUNS` stretches of equal numbers;
* ``{"shape", "first": […], "digests": […]}``: all others. They are cut into `SAMPLE_PARTS` equal parts; of each part its first number and a
  digest of all its numbers;
* null, or left out: not known.

``value_dtypes`` is tensor -> dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Final, Literal, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

MAX_ELEMENTS: Final = 64
MAX_RUNS: Final = 16
SAMPLE_PARTS: Final = 16
#: Tensors of ranks that a header has values of; the others are counted (``values_left_out``).
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
#: What a header has of one tensor.
PackedTensor = TensorNumber | list["PackedTensor"] | dict[str, "PackedTensor"] | None
NumberArray = NDArray[np.generic]


class HeaderValues(TypedDict, total=False):
    """The keys of a header that carry values."""

    values: dict[str, dict[str, PackedTensor]]
    value_dtypes: dict[str, str]
    values_left_out: int


class RankTensorValue(NamedTuple):
    """A tensor of one rank. ``value``: as `packed` gives it."""

    rank: int
    label: str
    dtype: str
    value: PackedTensor


class ValueDifference(NamedTuple):
    """Where two tensors first differ. ``element``: flat number of it, -1 where no one element can
    be named; ``a``, ``b``: the numbers.

    ``where``: in words.
    """

    element: int
    a: TensorNumber | None
    b: TensorNumber | None
    where: str


# --- writing ---


def header_values(kept: Iterable[RankTensorValue]) -> HeaderValues:
    """The keys of a header that carry these values, by tensor, copy and rank."""
    known = sorted((one for one in kept if one.value is not None), key=_sort_key)
    values: dict[str, dict[str, PackedTensor]] = {}
    for one in known[:MAX_VALUES]:
        values.setdefault(one.label, {})[str(one.rank)] = one.value
    dtypes = {one.label: one.dtype for one in reversed(known[:MAX_VALUES])}
    found: HeaderValues = {
        "values": values,
        "value_dtypes": {label: dtypes[label] for label in values},
    }
    if len(known) > MAX_VALUES:
        found["values_left_out"] = len(known) - MAX_VALUES
    return found


def _sort_key(one: RankTensorValue) -> tuple[str, int, int]:
    name, _, copy = one.label.partition("@")
    return name, int(copy or 0), one.rank


def pack_tensor(array: NumberArray | None) -> PackedTensor:
    """One tensor in the form that the header has."""
    if array is None:
        return None
    if not array.size:
        return {"shape": list(array.shape), "runs": []}
    if not any(array.strides):  # one number stands for all
        return json_number(array.reshape(-1)[:1][0])
    flat = np.ascontiguousarray(array).reshape(-1)
    starts = _run_starts(flat)
    if len(starts) == 1:
        return json_number(flat[0])
    if flat.size <= MAX_ELEMENTS:
        return _nested_list(array)
    if len(starts) <= MAX_RUNS:
        counts = np.diff([*starts, flat.size]).tolist()
        return {
            "shape": list(array.shape),
            "runs": [[n, json_number(flat[at])] for n, at in zip(counts, starts, strict=True)],
        }
    cuts = _part_starts(flat.size)
    parts = [flat[a:b] for a, b in pairwise(cuts)]
    return {
        "shape": list(array.shape),
        "first": [json_number(p[0]) for p in parts],
        "digests": [_digest(p) for p in parts],
    }


def json_number(value: np.generic) -> TensorNumber:
    """A Python number; what JSON has no number for (inf, nan, complex) as text."""
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
    """Where stretches of equal numbers begin; at most one more than a header has room for."""
    same = (flat[1:] == flat[:-1]) | (
        (flat[1:] != flat[1:]) & (flat[:-1] != flat[:-1])
    )  # nan is no other than nan
    return [0, *(np.flatnonzero(~same)[:MAX_RUNS] + 1).tolist()] if not same.all() else [0]


def _part_starts(size: int) -> list[int]:
    return [size * k // SAMPLE_PARTS for k in range(SAMPLE_PARTS + 1)]


def _digest(part: NumberArray) -> str:
    """Of the numbers, whatever the sign of a zero is."""
    plain = np.where(part == 0, np.zeros(1, part.dtype), part)
    return hashlib.sha256(plain.tobytes()).hexdigest()[:16]


def _nested_list(array: NumberArray) -> PackedTensor:
    return [_nested_list(row) for row in array] if array.ndim else json_number(array.reshape(-1)[0])


# --- comparing ---


class _UnpackedTensor(NamedTuple):
    """``runs``: (count, number) of all elements, None where only samples are known. ``size`` is -1
    for any.
    """

    size: int
    runs: Sequence[tuple[int, TensorNumber]] | None
    first: Sequence[TensorNumber] = ()
    digests: Sequence[str] = ()


def compare_packed(
    a: object, b: object, tolerance: float = 0.0
) -> tuple[ValueMatch, ValueDifference | None]:
    """How two packed tensors compare: equal, close (no element differs by more than the tolerance,
    relative or absolute), or not.

    Raises ValueError for what is no packed tensor.
    """
    if a is None or b is None:
        return "unknown", None
    left, right = _unpack(a), _unpack(b)
    if left.size >= 0 and right.size >= 0 and left.size != right.size:
        return "differs", ValueDifference(-1, left.size, right.size, "the number of elements")
    if left.runs is not None and right.runs is not None:
        pairs, unsure = list(_aligned_runs(left, right)), ""
    else:
        pairs, unsure = list(_aligned_samples(left, right)), _differing_part(left, right)
    unequal = [(at, x, y) for at, x, y in pairs if x != y]
    far = next(((at, x, y) for at, x, y in unequal if not _is_close(x, y, tolerance)), None)
    if far is not None:
        return "differs", ValueDifference(*far, f"element {far[0]}")
    if not unequal and not unsure:
        return "equal", None
    if tolerance > 0:
        return "close", None
    return "differs", ValueDifference(-1, None, None, unsure)


def has_valid_values(header: Mapping[str, object]) -> bool:
    """Whether the values of a header that was read are in the form that is said above."""
    values, dtypes = header.get("values"), header.get("value_dtypes")
    if not isinstance(values, dict | None) or not isinstance(dtypes, dict | None):
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
        size, runs, first, digests = (
            prod(value["shape"]),
            *(value.get(key) for key in ("runs", "first", "digests")),
        )
        if isinstance(runs, list) and sum(count for count, _ in runs) == size:
            return _UnpackedTensor(
                size,
                list(
                    zip(
                        (count for count, _ in runs), _flat_numbers(x for _, x in runs), strict=True
                    )
                ),
            )
        if (
            isinstance(first, list)
            and isinstance(digests, list)
            and len(first) == len(digests) == SAMPLE_PARTS <= size
        ):
            return _UnpackedTensor(size, None, list(_flat_numbers(first)), digests)
    raise ValueError("expected what a tensor holds as a number, a list, runs or digests")


def _flat_numbers(items: Iterable[object]) -> Iterator[TensorNumber]:
    """The numbers of nested lists. Raises ValueError for anything else among them."""
    for item in items:
        if isinstance(item, list):
            yield from _flat_numbers(item)
        elif isinstance(item, (int, float, str)):
            yield item
        else:
            raise ValueError(f"expected a number, found {item!r}")


def _aligned_runs(
    a: _UnpackedTensor, b: _UnpackedTensor
) -> Iterator[tuple[int, TensorNumber | None, TensorNumber | None]]:
    """(element, number of a, number of b) wherever a stretch of either begins."""
    size = max(a.size, b.size, 1)
    ends: list[list[tuple[int, TensorNumber]]] = []
    for tensor in (a, b):
        at, found = 0, []
        for count, value in tensor.runs or ():
            at = size if tensor.size < 0 else at + count
            found.append((at, value))
        ends.append(found)
    i = j = at = 0
    while i < len(ends[0]) and j < len(ends[1]):
        yield at, ends[0][i][1], ends[1][j][1]
        at = min(ends[0][i][0], ends[1][j][0])
        i, j = i + (ends[0][i][0] <= at), j + (ends[1][j][0] <= at)


def _aligned_samples(
    a: _UnpackedTensor, b: _UnpackedTensor
) -> Iterator[tuple[int, TensorNumber | None, TensorNumber | None]]:
    """(element, number of a, number of b) at the beginnings of the parts."""
    size = max(a.size, b.size)
    for at in _part_starts(size)[:-1]:
        yield at, _number_at(a, at, size), _number_at(b, at, size)


def _number_at(tensor: _UnpackedTensor, element: int, size: int) -> TensorNumber | None:
    if tensor.runs is None:
        return tensor.first[_part_starts(size).index(element)]
    left = element
    for count, value in tensor.runs:
        left -= count
        if left < 0 or tensor.size < 0:
            return value
    return None


def _differing_part(a: _UnpackedTensor, b: _UnpackedTensor) -> str:
    """In which elements two tensors differ whose recorded numbers are equal; empty where they
    don't.
    """
    size = max(a.size, b.size)
    if a.runs is not None or b.runs is not None:
        return "one of them has more different numbers"
    cuts = _part_starts(size)
    unlike = next(
        (k for k, (x, y) in enumerate(zip(a.digests, b.digests, strict=False)) if x != y), None
    )
    return "" if unlike is None else f"one of the elements {cuts[unlike]} to {cuts[unlike + 1] - 1}"


def _is_close(x: TensorNumber | None, y: TensorNumber | None, tolerance: float) -> bool:
    if not tolerance or isinstance(x, bool | None) or isinstance(y, bool | None):
        return x == y
    try:
        p, q = complex(x), complex(y)
    except ValueError:
        return False
    return x == y or abs(p - q) <= tolerance * (1 + abs(q))
