"""Field types of strategies: plain numbers and quantities, known when the file is read.

A number may be an expression over what is the same on every rank (vars, axis sizes, `world_size`): a strategy lays out its calls before
any rank is looked at, so that a number that differs by rank has no place here. The validation's context holds the names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema

from distsim import units
from distsim.expr import ExpressionError, parse
from distsim.names import listing, near

MOST = 2**53
_QUANTITY = re.compile(r"\s*[+-]?\d[\d_.,]*\s*(?:%|[a-zA-Zµμ][\w/]*)\s*", re.ASCII)


def number(value: Any, names: Mapping[str, Any]) -> Any:
    """A number, or an expression's value. Raises ValueError for names that are not the same on every rank."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a number or an expression, found {shown(value)}")
    if isinstance(value, str) and _QUANTITY.fullmatch(value):
        raise ValueError(f"expected a number without a unit, found {shown(value)}")
    found = parse(value)
    unknown = [name for name in sorted(found.names) if name not in names]
    if unknown:
        known = f"known here are {listing(names, 20)}{near(unknown[0], names)}"
        raise ValueError(f"{unknown[0]} is no number that is the same on every rank; {known}")
    try:
        return found.evaluate(names)
    except ExpressionError as error:
        raise ValueError(str(error)) from None


def shown(value: Any) -> str:
    """A value at the end of a message."""
    if value is None or isinstance(value, dict | list | tuple):
        return "nothing" if value is None else "a mapping" if isinstance(value, dict) else "a list"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _names(info: ValidationInfo) -> Mapping[str, Any]:
    names: Mapping[str, Any] = (info.context or {}).get("names", {})
    return names


def integer(low: int, what: str = "an integer") -> Callable[[Any, ValidationInfo], int]:
    """Validator of an integer of at least ``low``, alone or by expression."""

    def check(value: Any, info: ValidationInfo) -> int:
        found = number(value, _names(info))
        if isinstance(found, bool) or found != int(found) or not low <= found <= MOST:
            raise ValueError(f"expected {what} of at least {low}, found {shown(found)}")
        return int(found)

    return check


def _shapes(value: Any, info: ValidationInfo) -> tuple[tuple[int, ...], ...]:
    """`params`: one number, or a list of parameters, each a number or a shape."""
    one = integer(1, "a size")
    if not isinstance(value, list | tuple):
        return ((one(value, info),),)
    if not value or any(isinstance(item, list | tuple) and not item for item in value):
        raise ValueError("expected parameters, each a number of elements or a shape with at least one size, found an empty list")
    return tuple(tuple(one(n, info) for n in item) if isinstance(item, list | tuple) else (one(item, info),) for item in value)


def _sizes(value: Any, info: ValidationInfo) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"expected a list of sizes, as [8, 1024], found {shown(value) if value != [] else 'an empty list'}")
    return tuple(integer(1, "a size")(n, info) for n in value)


def _fraction(value: Any, info: ValidationInfo) -> float:
    found = number(value, _names(info))
    if isinstance(found, bool) or not 0 <= found <= 1e15:
        raise ValueError(f"expected a number of zero or more, found {shown(found)}")
    return float(found)


def _per_rank(value: Any, info: ValidationInfo) -> dict[int | str, int]:
    """`{0: 3, else: 2}`: an integer for every rank; a lone number is everybody's."""
    one = integer(0)
    if not isinstance(value, Mapping):
        return {"else": one(value, info)}
    for key in value:
        if key != "else" and (isinstance(key, bool) or not isinstance(key, int) or key < 0):
            raise ValueError(f"expected a rank or `else` as the key of a per-rank mapping, found {shown(key)}")
    return {key: one(item, info) for key, item in value.items()}


_COMPUTE = ("time", "flops", "bytes", "dtype")


def work(value: Any) -> dict[str, Any]:
    """What a compute step takes as its price: a time, or flops and bytes."""
    if isinstance(value, str):
        units.parse_duration_ns(value)
        return {"time": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a duration as 3 ms, or `{{flops, bytes}}`, found {shown(value)}")
    for key in value:
        if key not in _COMPUTE:
            raise ValueError(f"unknown key {key}; expected {listing(_COMPUTE)}{near(key, _COMPUTE)}")
    if "time" in value:
        units.parse_duration_ns(value["time"])
    if ("time" in value) == ("flops" in value or "bytes" in value):
        raise ValueError("expected either `time`, or `flops` and `bytes` that the cluster's device prices")
    for key, parsed in (("flops", units.parse_flops), ("bytes", units.parse_size_bytes)):
        if isinstance(value.get(key), str):
            parsed(value[key])
    return dict(value)


def _doing(value: Any) -> Any:
    """A price, or the entries that stand in its place."""
    if not isinstance(value, list | tuple):
        return work(value)
    for item in value:
        if not isinstance(item, str | Mapping):
            raise ValueError(f"expected entries of a program, each after a dash, found {shown(item)}")
    return [dict(item) if isinstance(item, Mapping) else item for item in value]


def _dtype(value: Any) -> str:
    if not isinstance(value, str) or value not in DTYPES:
        raise ValueError(f"expected a dtype of torch ({', '.join(DTYPES)}), found {shown(value)}{near(value, DTYPES)}")
    return value


#: Bytes of an element, for the dtypes that parameters have.
DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def _size(value: Any) -> int:
    return units.parse_size_bytes(value)


def _axis(value: Any) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise ValueError(f"expected an axis of the mesh or a group's name, found {shown(value)}")
    return value


def _axes(value: Any) -> str | tuple[str, ...]:
    return tuple(_axis(item) for item in value) if isinstance(value, list | tuple) and value else _axis(value)


_NUMBER = {"anyOf": [{"type": "number"}, {"type": "string"}]}
_TEXT = {"type": "string"}
_LIST = {"type": "array"}

Count = Annotated[int, PlainValidator(integer(1)), WithJsonSchema(_NUMBER)]
Natural = Annotated[int, PlainValidator(integer(0)), WithJsonSchema(_NUMBER)]
Amount = Annotated[float, PlainValidator(_fraction), WithJsonSchema(_NUMBER)]
#: A duration as compute takes it, or its flops and bytes: the fields of a compute step.
Work = Annotated[dict[str, Any], PlainValidator(work), WithJsonSchema({"anyOf": [_TEXT, {"type": "object"}]})]
#: The same, or entries that say what is done, so that numbers can be followed.
Doing = Annotated[Any, PlainValidator(_doing), WithJsonSchema({"anyOf": [_TEXT, {"type": "object"}, _LIST]})]
#: Bytes, from a size with its unit.
Size = Annotated[int, PlainValidator(_size), WithJsonSchema(_TEXT)]
Dtype = Annotated[str, PlainValidator(_dtype), WithJsonSchema({"enum": list(DTYPES)})]
#: The shapes of a layer's parameters.
Params = Annotated[tuple[tuple[int, ...], ...], PlainValidator(_shapes), WithJsonSchema({"anyOf": [*_NUMBER["anyOf"], _LIST]})]
Shape = Annotated[tuple[int, ...], PlainValidator(_sizes), WithJsonSchema(_LIST)]
#: An integer per rank; `else` is the rest.
PerRank = Annotated[
    dict[int | str, int], PlainValidator(_per_rank), WithJsonSchema({"anyOf": [*_NUMBER["anyOf"], {"type": "object"}]})
]
#: One axis of the mesh or a group's name.
Axis = Annotated[str, PlainValidator(_axis), WithJsonSchema(_TEXT)]
#: The same, or a list of axes.
Axes = Annotated[str | tuple[str, ...], PlainValidator(_axes), WithJsonSchema({"anyOf": [_TEXT, _LIST]})]
