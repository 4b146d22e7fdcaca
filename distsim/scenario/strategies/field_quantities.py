"""Quantities in a strategy's fields: with a unit, or as an expression.

An expression may use values that are the same on every rank. It is evaluated when the file is read,
and is a plain quantity from there on: `micro * 1 ms` becomes `4 ms`. The validation's context has
the known names (``quantities``) and the kinds of those that are quantities (``kinds``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from pydantic import ValidationInfo

from distsim.common import units
from distsim.common.quantities import (
    ANY_QUANTITY,
    bounded_quantity,
    has_units,
    parse_quantity_expression,
    read_quantity,
)

_FORMATTERS: dict[str, Callable[[int | float], str]] = {
    "a duration": lambda ns: units.duration_text(round(ns)),
    "a size": lambda n: units.size_text(round(n)),
    "floating-point operations": units.flops_text,
}
_PARSERS: dict[str, Callable[[object], int | float]] = {
    "a duration": units.parse_duration_ns,
    "a size": units.parse_size_bytes,
    "floating-point operations": units.parse_flops,
}


def quantity_text(kind: str, value: object, info: ValidationInfo) -> object:
    """A quantity as plain text: unchanged if it is one, else the value of its expression.

    Raises ValueError. Sizes and operations may also be numbers without a unit, as in a compute
    step.
    """
    if not isinstance(value, str):
        _PARSERS[kind](value)
        return value
    with suppress(ValueError):
        _PARSERS[kind](value)
        return value
    context: Mapping[str, Mapping[str, object]] = info.context or {}
    names = context.get("quantities", {})
    kinds = context.get("kinds", {})
    if kind != "a duration" and not has_units(value):
        return _FORMATTERS[kind](_evaluate_expression(kind, value, names, kinds))
    return _FORMATTERS[kind](read_quantity(value, kind, names, kinds))  # type: ignore[arg-type]


def _evaluate_expression(
    kind: str, value: str, names: Mapping[str, object], kinds: Mapping[str, object]
) -> int | float:
    """The value of an expression without units: a count, or a var that is such a quantity."""
    syntax_error = ValueError(f"expected {kind}")
    with suppress(ValueError):
        expression = parse_quantity_expression(value, ANY_QUANTITY, syntax_error)
        is_count = not any(kinds.get(name) for name in expression.names)
        if is_count and expression.names <= names.keys():
            return bounded_quantity(expression.evaluate(dict(names)), kind, value)
    return read_quantity(value, kind, names, kinds)  # type: ignore[arg-type]


def duration_ns(value: object, info: ValidationInfo) -> int:
    """A duration in ns. Raises ValueError."""
    return units.parse_duration_ns(quantity_text("a duration", value, info))


def size_bytes(value: object, info: ValidationInfo) -> int:
    """A size in bytes. Raises ValueError."""
    return units.parse_size_bytes(quantity_text("a size", value, info))


__all__ = ["duration_ns", "size_bytes", "quantity_text"]
