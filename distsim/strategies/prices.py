"""Prices of compute steps, cut and scaled: a time, or flops and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distsim import units


def scaled(price: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The price of ``factor`` times the work. Quantities that are expressions, without a unit, are multiplied as such."""
    return {key: value if key == "dtype" or factor == 1 else _times(key, value, factor) for key, value in price.items()}


def _times(key: str, value: Any, factor: float) -> Any:
    if key == "time":
        return units.duration_text(round(units.parse_duration_ns(value) * factor))
    try:
        if key == "flops":
            return units.flops_text(units.parse_flops(value) * factor)
        return units.size_text(round(units.parse_size_bytes(value) * factor))
    except ValueError:
        return f"({value}) * {factor!r}"


def shares(price: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
    """The price in equal parts that add up to it; a time's remainder goes to the first ones, a nanosecond each."""
    if "time" not in price or parts == 1:
        return [scaled(price, 1 / parts)] * parts
    whole, rest = divmod(units.parse_duration_ns(price["time"]), parts)
    others = {key: value for key, value in price.items() if key != "time"}
    return [{"time": units.duration_text(whole + (k < rest)), **others} for k in range(parts)]
