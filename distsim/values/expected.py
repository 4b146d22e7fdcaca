"""Does a buffer hold what a scenario's `expect` says? (design §3, rule 14)"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from distsim.values.lineage import Content, numel_of

#: How far a number may be from the one expected, relative: about two units in the last place of the dtype. Integers are exact.
TOLERANCE = {
    "float64": 1e-12,
    "float32": 3e-7,
    "float16": 2e-3,
    "bfloat16": 2e-2,
    "float8_e4m3fn": 0.25,
    "float8_e5m2": 0.5,
    "complex64": 3e-7,
    "complex128": 1e-12,
}


def agrees(content: Content, dtype: str, expected: Any) -> bool:
    """``expected`` is a number (all elements), ``?`` (all unknown), or a (nested) list of both with one entry per element."""
    if isinstance(expected, (list, tuple)):
        wanted = list(_flat(expected))
        return len(wanted) == numel_of(content) and all(
            _same(h, w, dtype) for h, w in zip(_elements(content), wanted, strict=True)
        )
    return all(_same(piece.numbers, expected, dtype) for piece in content)


def _elements(content: Content) -> Iterator[Any]:
    for piece in content:
        for i in range(piece.numel):
            yield None if piece.numbers is None else piece.numbers[i : i + 1] if piece.numbers.size > 1 else piece.numbers


def _same(numbers: Any, wanted: Any, dtype: str) -> bool:
    if wanted == "?" or numbers is None:
        return numbers is None and wanted == "?"
    if dtype not in TOLERANCE:
        return bool((numbers == wanted).all())
    wide = numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)
    return bool(np.isclose(wide, wanted, rtol=TOLERANCE[dtype], atol=0, equal_nan=True).all())


def _flat(items: Sequence[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item
