"""What tensors hold at the end of a run, as the header of a trace carries it: bounded in size, and two of them compared.

``values`` is tensor -> rank -> one of

* a number: all elements are that (``inf``, ``nan`` and complex numbers as text);
* a list, nested as the shape is: tensors of up to `MOST_ELEMENTS` elements;
* ``{"shape", "runs": [[count, number], …]}``: larger ones of at most `MOST_RUNS` stretches of equal numbers;
* ``{"shape", "first": […], "digests": […]}``: all others. They are cut into `CUTS` equal parts; of each part its first number and a
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

MOST_ELEMENTS: Final = 64
MOST_RUNS: Final = 16
CUTS: Final = 16
#: Tensors of ranks that a header has values of; the others are counted (``values_left_out``).
MOST_VALUES: Final = 1024

#: The spacing of numbers at 1 (half of it is the largest rounding error of one operation): IEEE 754, bfloat16, OCP OFP8.
EPSILON: Final = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7,
                  "float8_e4m3fn": 2.0**-3, "float8_e5m2": 2.0**-2, "complex64": 2.0**-23, "complex128": 2.0**-52}  # fmt: skip

State = Literal["equal", "close", "differs", "unknown"]
Number = bool | int | float | str
#: What a header has of one tensor.
Packed = Number | list["Packed"] | dict[str, "Packed"] | None
Numbers = NDArray[np.generic]


class HeaderValues(TypedDict, total=False):
    """The keys of a header that carry values."""

    values: dict[str, dict[str, Packed]]
    value_dtypes: dict[str, str]
    values_left_out: int


class Kept(NamedTuple):
    """A tensor of one rank. ``value``: as `packed` gives it."""

    rank: int
    label: str
    dtype: str
    value: Packed


class Difference(NamedTuple):
    """Where two tensors first differ. ``element``: flat number of it, -1 where no one element can be named; ``a``, ``b``: the numbers.

    ``where``: in words.
    """

    element: int
    a: Number | None
    b: Number | None
    where: str


# --- writing ---


def header_values(kept: Iterable[Kept]) -> HeaderValues:
    """The keys of a header that carry these values, by tensor, copy and rank."""
    known = sorted((one for one in kept if one.value is not None), key=_order)
    values: dict[str, dict[str, Packed]] = {}
    for one in known[:MOST_VALUES]:
        values.setdefault(one.label, {})[str(one.rank)] = one.value
    dtypes = {one.label: one.dtype for one in reversed(known[:MOST_VALUES])}
    found: HeaderValues = {"values": values, "value_dtypes": {label: dtypes[label] for label in values}}
    if len(known) > MOST_VALUES:
        found["values_left_out"] = len(known) - MOST_VALUES
    return found


def _order(one: Kept) -> tuple[str, int, int]:
    name, _, copy = one.label.partition("@")
    return name, int(copy or 0), one.rank


def packed(array: Numbers | None) -> Packed:
    """One tensor in the form that the header has."""
    if array is None:
        return None
    if not array.size:
        return {"shape": list(array.shape), "runs": []}
    if not any(array.strides):  # one number stands for all
        return number(array.reshape(-1)[:1][0])
    flat = np.ascontiguousarray(array).reshape(-1)
    starts = _starts(flat)
    if len(starts) == 1:
        return number(flat[0])
    if flat.size <= MOST_ELEMENTS:
        return _nested(array)
    if len(starts) <= MOST_RUNS:
        counts = np.diff([*starts, flat.size]).tolist()
        return {"shape": list(array.shape), "runs": [[n, number(flat[at])] for n, at in zip(counts, starts, strict=True)]}
    cuts = _cuts(flat.size)
    parts = [flat[a:b] for a, b in pairwise(cuts)]
    return {"shape": list(array.shape), "first": [number(p[0]) for p in parts], "digests": [_digest(p) for p in parts]}


def number(value: np.generic) -> Number:
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


def _starts(flat: Numbers) -> list[int]:
    """Where stretches of equal numbers begin; at most one more than a header has room for."""
    same = (flat[1:] == flat[:-1]) | ((flat[1:] != flat[1:]) & (flat[:-1] != flat[:-1]))  # nan is no other than nan
    return [0, *(np.flatnonzero(~same)[:MOST_RUNS] + 1).tolist()] if not same.all() else [0]


def _cuts(size: int) -> list[int]:
    return [size * k // CUTS for k in range(CUTS + 1)]


def _digest(part: Numbers) -> str:
    """Of the numbers, whatever the sign of a zero is."""
    plain = np.where(part == 0, np.zeros(1, part.dtype), part)
    return hashlib.sha256(plain.tobytes()).hexdigest()[:16]


def _nested(array: Numbers) -> Packed:
    return [_nested(row) for row in array] if array.ndim else number(array.reshape(-1)[0])


# --- comparing ---


class _Tensor(NamedTuple):
    """``runs``: (count, number) of all elements, None where only samples are known. ``size`` is -1 for any."""

    size: int
    runs: Sequence[tuple[int, Number]] | None
    first: Sequence[Number] = ()
    digests: Sequence[str] = ()


def differs(a: object, b: object, tolerance: float = 0.0) -> tuple[State, Difference | None]:
    """How two packed tensors compare: equal, close (no element differs by more than the tolerance, relative or absolute), or not.

    Raises ValueError for what is no packed tensor.
    """
    if a is None or b is None:
        return "unknown", None
    left, right = _unpacked(a), _unpacked(b)
    if left.size >= 0 and right.size >= 0 and left.size != right.size:
        return "differs", Difference(-1, left.size, right.size, "the number of elements")
    if left.runs is not None and right.runs is not None:
        pairs, unsure = list(_runs_beside(left, right)), ""
    else:
        pairs, unsure = list(_samples_beside(left, right)), _unlike_part(left, right)
    unequal = [(at, x, y) for at, x, y in pairs if x != y]
    far = next(((at, x, y) for at, x, y in unequal if not _near(x, y, tolerance)), None)
    if far is not None:
        return "differs", Difference(*far, f"element {far[0]}")
    if not unequal and not unsure:
        return "equal", None
    if tolerance > 0:
        return "close", None
    return "differs", Difference(-1, None, None, unsure)


def readable(header: Mapping[str, object]) -> bool:
    """Whether the values of a header that was read are in the form that is said above."""
    values, dtypes = header.get("values"), header.get("value_dtypes")
    if not isinstance(values, dict | None) or not isinstance(dtypes, dict | None):
        return False
    try:
        for ranks in (values or {}).values():
            for rank, value in ranks.items():
                int(rank)
                differs(value, value)
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError):
        return False
    return True


def _unpacked(value: object) -> _Tensor:
    if isinstance(value, (int, float, str)):
        return _Tensor(-1, [(1, value)])
    if isinstance(value, list):
        flat = [(1, x) for x in _flat(value)]
        return _Tensor(len(flat), flat)
    if isinstance(value, Mapping) and isinstance(value.get("shape"), list):
        size, runs, first, digests = prod(value["shape"]), *(value.get(key) for key in ("runs", "first", "digests"))
        if isinstance(runs, list) and sum(count for count, _ in runs) == size:
            return _Tensor(size, list(zip((count for count, _ in runs), _flat(x for _, x in runs), strict=True)))
        if isinstance(first, list) and isinstance(digests, list) and len(first) == len(digests) == CUTS <= size:
            return _Tensor(size, None, list(_flat(first)), digests)
    raise ValueError("expected what a tensor holds as a number, a list, runs or digests")


def _flat(items: Iterable[object]) -> Iterator[Number]:
    """The numbers of nested lists. Raises ValueError for anything else among them."""
    for item in items:
        if isinstance(item, list):
            yield from _flat(item)
        elif isinstance(item, (int, float, str)):
            yield item
        else:
            raise ValueError(f"expected a number, found {item!r}")


def _runs_beside(a: _Tensor, b: _Tensor) -> Iterator[tuple[int, Number | None, Number | None]]:
    """(element, number of a, number of b) wherever a stretch of either begins."""
    size = max(a.size, b.size, 1)
    ends: list[list[tuple[int, Number]]] = []
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


def _samples_beside(a: _Tensor, b: _Tensor) -> Iterator[tuple[int, Number | None, Number | None]]:
    """(element, number of a, number of b) at the beginnings of the parts."""
    size = max(a.size, b.size)
    for at in _cuts(size)[:-1]:
        yield at, _at(a, at, size), _at(b, at, size)


def _at(tensor: _Tensor, element: int, size: int) -> Number | None:
    if tensor.runs is None:
        return tensor.first[_cuts(size).index(element)]
    left = element
    for count, value in tensor.runs:
        left -= count
        if left < 0 or tensor.size < 0:
            return value
    return None


def _unlike_part(a: _Tensor, b: _Tensor) -> str:
    """In which elements two tensors differ whose recorded numbers are equal; empty where they don't."""
    size = max(a.size, b.size)
    if a.runs is not None or b.runs is not None:
        return "one of them has more different numbers"
    cuts = _cuts(size)
    unlike = next((k for k, (x, y) in enumerate(zip(a.digests, b.digests, strict=False)) if x != y), None)
    return "" if unlike is None else f"one of the elements {cuts[unlike]} to {cuts[unlike + 1] - 1}"


def _near(x: Number | None, y: Number | None, tolerance: float) -> bool:
    if not tolerance or isinstance(x, bool | None) or isinstance(y, bool | None):
        return x == y
    try:
        p, q = complex(x), complex(y)
    except ValueError:
        return False
    return x == y or abs(p - q) <= tolerance * (1 + abs(q))
