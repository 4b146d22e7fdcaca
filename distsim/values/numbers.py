"""The numbers of tensors: how they are filled, reduced, compared and shown.

Key idea: numbers are *flat* numpy arrays in torch's dtypes, of size n, or of size 1 if all elements
are equal (uniform), or None if they are unknown. So a large uniform tensor costs nothing. Large
tensors whose elements differ are unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat

import numpy as np

from distsim.common.expressions import Expression
from distsim.operations.core.collective_results import numpy_dtype, reduce_arrays
from distsim.operations.core.field_types import PerRank
from distsim.operations.core.resolved_call import TensorBuffer
from distsim.values.lineage import Content, FlatArray, Numbers, numel_of

#: Tensors up to this many elements can have elements that differ; larger ones are uniform or
#: unknown.
LIMIT_ELEMENTS = 4096
#: Tensors up to this many elements are shown in full.
SHOWN_ELEMENTS = 16


def fill_numbers(
    value: object, env: Mapping[str, object], numel: int, dtype: str, limit: int = LIMIT_ELEMENTS
) -> Numbers:
    """The numbers of a tensor that a scenario fills with ``value`` (design §3, rule 5).

    ``value`` is None, an Expression or number, a (nested) list of them, or a PerRank of these;
    ``env`` maps names to numbers, or to flat arrays of ``numel`` elements (tensors in an `assign`).
    The result is None (unknown) if there is no value, if more than ``limit`` elements differ, or if
    a list has another length than the tensor. Raises ExpressionError.
    """
    if isinstance(value, PerRank):
        value = _value_of_rank(value, env)
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return _numbers_of_list(value, env, numel, dtype, limit)
    if isinstance(value, Expression):
        value = _evaluate(value, env, numel, limit)
    if value is None:
        return None
    return _cast(np.atleast_1d(np.asarray(value)).ravel(), dtype)


def _evaluate(value: Expression, env: Mapping[str, object], numel: int, limit: int) -> object:
    """The value of an expression, for all elements at once; None if they would be too many."""
    names = {name: env[name] for name in value.names if name in env}
    if "index" in value.names:
        if numel > limit:
            return None
        names["index"] = np.arange(numel)
    arrays = [v for v in names.values() if isinstance(v, np.ndarray)]
    if any(not array.size for array in arrays):
        return np.zeros(0)
    return value.evaluate(names)


def _numbers_of_list(
    items: Sequence[object], env: Mapping[str, object], numel: int, dtype: str, limit: int
) -> Numbers:
    """The numbers of a list with one entry per element."""
    flat = list(_flatten(items))
    if len(flat) != numel or numel > limit:
        return None
    numbers = []
    for i, item in enumerate(flat):
        if isinstance(item, PerRank):
            item = _value_of_rank(item, env)
        if isinstance(item, Expression):
            names = {name: _element(env[name], i) for name in item.names if name in env}
            item = item.evaluate({**names, "index": i})
        numbers.append(item)
    return _cast(np.array(numbers), dtype)


def _value_of_rank(value: PerRank[object], env: Mapping[str, object]) -> object:
    rank = env["rank"]
    return value.get(rank) if isinstance(rank, int) else None


def _flatten(items: Sequence[object]) -> Iterator[object]:
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _flatten(item)
        else:
            yield item


def _element(value: object, i: int) -> object:
    """Element ``i`` of an array, which may be uniform; any other value as it is."""
    if not isinstance(value, np.ndarray):
        return value
    return value[i if value.size > 1 else 0].item()


def _cast(numbers: FlatArray, dtype: str) -> FlatArray:
    with np.errstate(all="ignore"):
        return np.asarray(numbers.astype(numpy_dtype(dtype)))


def widen_numbers(numbers: FlatArray) -> object:
    """The same numbers in the dtypes of expressions: int64, float64 or bool.

    A single number becomes a Python number.
    """
    target: type[np.int64 | np.bool_ | np.float64] = np.float64
    if numbers.dtype.kind in "iu":
        target = np.int64
    elif numbers.dtype.kind == "b":
        target = np.bool_
    widened: FlatArray = numbers.astype(target)
    return widened[0].item() if widened.size == 1 else widened


def broadcast_numbers(numbers: object, buffer: TensorBuffer, target: TensorBuffer) -> object:
    """The widened numbers of a buffer, repeated until they are as many as the target has.

    None if they do not fit, by the rules of torch: `target.copy_(buffer)` would raise. Buffers of
    as many elements fit too, because a scenario may declare a matrix as a list of its elements.
    """
    if not isinstance(numbers, np.ndarray) or buffer.numel == target.numel:
        return numbers
    try:
        return np.broadcast_to(numbers.reshape(buffer.shape), target.shape).ravel()
    except ValueError:
        return None


def numbers_of_content(content: Content, dtype: str, limit: int = LIMIT_ELEMENTS) -> Numbers:
    """The numbers of a content as one flat array; of size 1 if it is uniform.

    None if any number is unknown, or if the content has more than ``limit`` elements that differ.
    """
    if any(piece.numbers is None for piece in content):
        return None
    parts = [piece.numbers for piece in content if piece.numbers is not None]
    are_uniform = bool(parts) and all(part.size == 1 for part in parts)
    # Compare bits, because 0.0 == -0.0.
    if are_uniform and len({part.tobytes() for part in parts}) == 1:
        return parts[0]
    numel = numel_of(content)
    if numel > limit:
        return None
    spread = [
        np.broadcast_to(part, piece.numel) if part.size == 1 else part
        for part, piece in zip(parts, content, strict=True)
    ]
    return np.concatenate(spread) if spread else np.zeros(0, numpy_dtype(dtype))


def reinterpret(numbers: Numbers, numel: int, dtype: str, limit: int = LIMIT_ELEMENTS) -> Numbers:
    """The bits of ``numel`` elements, read as another dtype.

    Backends that compare only byte counts do this (semantics 2.1). None if the numbers are unknown,
    too many, or do not fill a whole number of elements.
    """
    target: np.dtype[np.generic] = numpy_dtype(dtype)
    if numbers is None or numbers.dtype == target:
        return numbers
    if numbers.size == 1 and numbers.dtype.itemsize == target.itemsize:
        return numbers.view(target)
    nbytes = numel * numbers.dtype.itemsize
    if numel > limit or nbytes % target.itemsize:
        return None
    return np.ascontiguousarray(np.broadcast_to(numbers, numel)).view(target)


# --- text ---


def _has_one_text(numbers: Numbers) -> bool:
    """Whether all elements of a piece with these numbers have the same text."""
    return numbers is None or numbers.size == 1


def format_content(content: Content, shape: Sequence[int], dtype: str) -> str:
    """The short form of a content.

    ``[5, 7, 9]`` for small tensors, ``2.0 (×1048576)`` for uniform ones, ``?`` for unknown ones.
    """
    numel = numel_of(content)
    if all(piece.numbers is None for piece in content):
        return "[]" if numel == 0 and content == () else "?"
    if numel <= SHOWN_ELEMENTS:
        flat = [text for piece in content for text in _number_texts(piece.numbers, piece.numel)]
        return _nested_text(flat, shape if _shape_fits(shape, numel) else [numel])
    uniform = numbers_of_content(content, dtype, 1)
    if uniform is not None:
        return f"{_number_text(uniform[0])} (×{numel})"
    is_short = len(content) <= SHOWN_ELEMENTS // 2
    if is_short and all(_has_one_text(piece.numbers) for piece in content):
        texts = (f"{_number_texts(p.numbers, 1)[0]} (×{p.numel})" for p in content)
        return "[" + ", ".join(texts) + "]"
    first, last = content[0], content[-1]
    head = ", ".join(_number_texts(first.numbers, first.numel)[:3])
    tail = _number_texts(last.numbers, last.numel)[-1]
    return f"[{head}, …, {tail}] ({numel} elements)"


def _shape_fits(shape: Sequence[int], numel: int) -> bool:
    """Whether a text can show the shape: at most two axes, and as many elements as there are."""
    return len(shape) <= 2 and int(np.prod(shape, dtype=np.int64)) == numel


def _number_texts(numbers: Numbers, numel: int) -> list[str]:
    """One text per element; of a uniform piece only as many as can be shown."""
    if numbers is None:
        return ["?"] * min(numel, SHOWN_ELEMENTS)
    if numbers.size == 1:
        return [_number_text(numbers[0])] * min(numel, SHOWN_ELEMENTS)
    return [_number_text(n) for n in numbers]


def _number_text(number: np.generic) -> str:
    if number.dtype.kind == "b":
        return "true" if number else "false"
    text = str(number)
    # Some dtypes outside numpy (bfloat16, float8) print whole numbers without a decimal point.
    is_integer = number.dtype.kind in "iu"
    if not is_integer and text.lstrip("-").isdigit():
        return f"{text}.0"
    return text


def _nested_text(flat: Sequence[str], shape: Sequence[int]) -> str:
    """Texts of elements as nested lists, for shapes with at most two axes."""
    if not shape:
        return flat[0] if flat else "[]"
    if len(shape) == 1:
        return f"[{', '.join(flat)}]"
    width = shape[1]
    rows = (flat[i * width : (i + 1) * width] for i in range(shape[0]))
    return f"[{', '.join(_nested_text(row, [width]) for row in rows)}]"


# --- reductions, and what a scenario expects ---


def reduce_numbers(op: str, terms: Sequence[Numbers]) -> Numbers:
    """The reduction of the ranks' numbers in group order; None if any of them is unknown."""
    known = [term for term in terms if term is not None]
    return reduce_arrays(op, known) if len(known) == len(terms) else None


#: The relative tolerance for expected numbers: about two units in the last place of the dtype.
#: Integers must be equal.
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


def matches_expected(content: Content, dtype: str, expected: object) -> bool:
    """Whether a content has the expected numbers.

    ``expected`` is a number (for all elements), ``?`` (all unknown), or a (nested) list of both
    with one entry per element.
    """
    if not isinstance(expected, (list, tuple)):
        return all(_numbers_match(piece.numbers, expected, dtype) for piece in content)
    wanted = list(_flatten(expected))
    if len(wanted) != numel_of(content):
        return False
    pairs = zip(_elements(content), wanted, strict=True)
    return all(_numbers_match(element, entry, dtype) for element, entry in pairs)


def _elements(content: Content) -> Iterator[Numbers]:
    """The numbers of each element: an array of size 1, or None."""
    for piece in content:
        numbers = piece.numbers
        if numbers is None or numbers.size <= 1:
            yield from repeat(numbers, piece.numel)
            continue
        for i in range(piece.numel):
            yield numbers[i : i + 1]


def _numbers_match(numbers: Numbers, wanted: object, dtype: str) -> bool:
    """Whether all numbers are close to the wanted one, or unknown if ``?`` is wanted."""
    if wanted == "?" or numbers is None:
        return numbers is None and wanted == "?"
    if dtype not in TOLERANCE:
        return bool((numbers == wanted).all())
    wide = numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)
    close = np.isclose(wide, np.asarray(wanted), rtol=TOLERANCE[dtype], atol=0, equal_nan=True)
    return bool(close.all())
