"""Field types of strategies: plain numbers and quantities, known when the file is read.

A number may be an expression over what is the same on every rank (vars, axis sizes, `world_size`): a strategy lays out its calls before
any rank is looked at, so that a number that differs by rank has no place here. The validation's context holds the names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, TypeVar, cast

from pydantic import BaseModel, PlainValidator, ValidationInfo, WithJsonSchema
from pydantic_core import ErrorDetails

from distsim.expr import ExpressionError, parse
from distsim.names import listing, near, shown
from distsim.strategies.amounts import duration_ns, written
from distsim.strategies.base import Cost, Group, Price

T = TypeVar("T")
MOST = 2**53
_QUANTITY = re.compile(r"\s*[+-]?\d[\d_.,]*\s*(?:%|[a-zA-Zµμ][\w/]*)\s*", re.ASCII)


def number(value: object, info: ValidationInfo) -> int | float:
    """A number, or an expression's value, which may be a truth. Raises ValueError for names that are not the same on every rank."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a number or an expression, found {shown(value)}")
    if isinstance(value, str) and _QUANTITY.fullmatch(value):
        raise ValueError(f"expected a number without a unit, found {shown(value)}")
    names: Mapping[str, object] = (info.context or {}).get("names", {})
    found = parse(value)
    unknown = [name for name in sorted(found.names) if name not in names]
    if unknown:
        known = f"known here are {listing(names, 20)}{near(unknown[0], names)}"
        raise ValueError(f"{unknown[0]} is no number that is the same on every rank; {known}")
    try:
        number: int | float = found.evaluate(names)
        return number
    except ExpressionError as error:
        raise ValueError(str(error)) from None


def integer(low: int, what: str = "an integer") -> Callable[[object, ValidationInfo], int]:
    """Validator of an integer of at least ``low``, alone or by expression."""

    def check(value: object, info: ValidationInfo) -> int:
        found = number(value, info)
        if isinstance(found, bool) or found != int(found) or not low <= found <= MOST:
            raise ValueError(f"expected {what} of at least {low}, found {shown(found)}")
        return int(found)

    return check


_size = integer(1, "a size")


def _shapes(value: object, info: ValidationInfo) -> tuple[tuple[int, ...], ...]:
    """`params`: one number, or a list of parameters, each a number or a shape."""
    if not isinstance(value, list | tuple):
        return ((_size(value, info),),)
    if not value or any(isinstance(item, list | tuple) and not item for item in value):
        raise ValueError("expected parameters, each a number of elements or a shape with at least one size, found an empty list")
    shapes = (item if isinstance(item, list | tuple) else [item] for item in value)
    return tuple(tuple(_size(n, info) for n in shape) for shape in shapes)


def _sizes(value: object, info: ValidationInfo) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"expected a list of sizes, as [8, 1024], found {shown(value) if value != [] else 'an empty list'}")
    return tuple(_size(n, info) for n in value)


def _amount(value: object, info: ValidationInfo) -> float:
    found = number(value, info)
    if isinstance(found, bool) or not 0 <= found <= 1e15:
        raise ValueError(f"expected a number of zero or more, found {shown(found)}")
    return float(found)


def keyed(value: Mapping[object, object], parsed: Callable[[object], T], key: str) -> dict[int | str, T]:
    """`{0: …, 1: …, else: …}` with every entry parsed; ``key`` is what the message calls a number that may stand as a key."""
    for found in value:
        if found != "else" and (isinstance(found, bool) or not isinstance(found, int) or found < 0):
            raise ValueError(f"expected {key}, found {shown(found)}")
    return {found: parsed(item) for found, item in value.items() if isinstance(found, int | str)}


def by_rank(value: object, parsed: Callable[[object], T]) -> dict[int | str, T]:
    """`{0: 3, else: 2}`; a lone value is everybody's."""
    if not isinstance(value, Mapping):
        return {"else": parsed(value)}
    return keyed(value, parsed, "a rank or `else` as the key of a per-rank mapping")


def _per_rank(value: object, info: ValidationInfo) -> dict[int | str, int]:
    return by_rank(value, lambda item: integer(0)(item, info))


_COMPUTE = ("time", "flops", "bytes", "dtype")


def price(value: object, info: ValidationInfo) -> Price:
    """What a compute step takes as its price: a time, or flops and bytes."""
    if isinstance(value, str):
        return {"time": cast("str", written("a duration", value, info))}
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a duration as 3 ms, or `{{flops, bytes}}`, found {shown(value)}")
    for key in value:
        if key not in _COMPUTE:
            raise ValueError(f"unknown key {key}; expected {listing(_COMPUTE)}{near(key, _COMPUTE)}")
    found = dict(value)
    if "time" in value:
        found["time"] = written("a duration", value["time"], info)
    if ("time" in value) == ("flops" in value or "bytes" in value):
        raise ValueError("expected either `time`, or `flops` and `bytes` that the cluster's device prices")
    for key, kind in (("flops", "floating-point operations"), ("bytes", "a size")):
        if isinstance(value.get(key), str):
            found[key] = written(kind, value[key], info)
    return found


def cost(value: object, info: ValidationInfo) -> Cost:
    """A price, or the entries that stand in its place."""
    if not isinstance(value, list | tuple):
        return price(value, info)
    for item in value:
        if not isinstance(item, str | Mapping):
            raise ValueError(f"expected entries of a program, each after a dash, found {shown(item)}")
    return [dict(item) if isinstance(item, Mapping) else {item: {}} for item in value]


def _dtype(value: object) -> str:
    if not isinstance(value, str) or value not in DTYPES:
        raise ValueError(f"expected a dtype of torch ({', '.join(DTYPES)}), found {shown(value)}{near(value, DTYPES)}")
    return value


#: Bytes of an element, for the dtypes that parameters have.
DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def _axis(value: object) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise ValueError(f"expected an axis of the mesh or a group's name, found {shown(value)}")
    return value


def _group(value: object) -> Group:
    return tuple(_axis(item) for item in value) if isinstance(value, list | tuple) and value else _axis(value)


_FORMULA: dict[str, object] = {"x-def": "formula"}
_NUMBER: dict[str, object] = {"anyOf": [{"type": "number"}, _FORMULA]}
_SIZES: dict[str, object] = {"type": "array", "minItems": 1, "items": _NUMBER}
_PRICED = {"anyOf": [{"required": ["flops"]}, {"required": ["bytes"]}]}
_PRICE: dict[str, object] = {
    "type": "object", "additionalProperties": False, "oneOf": [{"required": ["time"]}, _PRICED],
    "properties": {
        "time": {"x-def": "duration"}, "flops": {"x-def": "flops_count"}, "bytes": {"x-def": "size_count"}, "dtype": {"x-def": "dtype"},
    },
}  # fmt: skip
COST = {"anyOf": [{"x-def": "duration"}, _PRICE, {"type": "array", "items": {"x-def": "entry"}}]}


def _counted(low: int) -> dict[str, object]:
    return {"anyOf": [{"type": "integer", "minimum": low, "maximum": MOST}, _FORMULA]}


Count = Annotated[int, PlainValidator(integer(1)), WithJsonSchema(_counted(1))]
Natural = Annotated[int, PlainValidator(integer(0)), WithJsonSchema(_counted(0))]
Amount = Annotated[
    float, PlainValidator(_amount), WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0, "maximum": 1e15}, _FORMULA]})
]
#: ns, from a duration with its unit.
Duration = Annotated[int, PlainValidator(duration_ns), WithJsonSchema({"x-def": "duration"})]
PriceField = Annotated[Price, PlainValidator(price), WithJsonSchema({"anyOf": [{"x-def": "duration"}, _PRICE]})]
CostField = Annotated[Cost, PlainValidator(cost), WithJsonSchema(COST)]
Dtype = Annotated[str, PlainValidator(_dtype), WithJsonSchema({"enum": list(DTYPES)})]
#: The shapes of a layer's parameters.
Params = Annotated[
    tuple[tuple[int, ...], ...],
    PlainValidator(_shapes),
    WithJsonSchema({"anyOf": [_counted(1), {"type": "array", "minItems": 1, "items": {"anyOf": [_counted(1), _SIZES]}}]}),
]
Shape = Annotated[tuple[int, ...], PlainValidator(_sizes), WithJsonSchema(_SIZES)]


def _stage(value: object, info: ValidationInfo) -> int:
    found = integer(1, "ZeRO's stage, 1, 2 or 3, an integer")(value, info)
    if found > 3:
        raise ValueError(f"expected ZeRO's stage, 1, 2 or 3, found {found}")
    return found


#: How much of a model ZeRO shards.
ZeroStage = Annotated[int, PlainValidator(_stage), WithJsonSchema({"enum": [1, 2, 3]})]
#: An integer per rank; `else` is the rest.
PerRank = Annotated[
    dict[int | str, int],
    PlainValidator(_per_rank),
    WithJsonSchema(
        {
            "anyOf": [
                _counted(0),
                {"type": "object", "propertyNames": {"pattern": "^([0-9]+|else)$"}, "additionalProperties": _counted(0)},
            ]
        }
    ),
]
_AXIS: dict[str, object] = {"x-def": "name"}
#: One axis of the mesh or a group's name.
Axis = Annotated[str, PlainValidator(_axis), WithJsonSchema(_AXIS)]
#: The same, or a list of axes.
Axes = Annotated[
    Group, PlainValidator(_group), WithJsonSchema({"anyOf": [_AXIS, {"type": "array", "minItems": 1, "items": _AXIS}]})
]


# --- Pydantic's errors in the words of a scenario file, for fields that a strategy validates itself ---
def sentence(error: ErrorDetails, model: type[BaseModel], name: str) -> str:
    """What one error of `ValidationError.errors()` says about a field of ``model``, which the file calls ``name``."""
    loc, kind = error["loc"], error["type"]
    if kind == "missing":
        return f"{name} needs `{loc[-1]}`"
    if kind == "extra_forbidden" and len(loc) == 1:
        known = model.model_fields
        return f"unknown key {loc[0]} in {name}; expected {listing(known, 16)}{near(str(loc[0]), known)}"
    if kind == "literal_error":
        return choice(error["ctx"]["expected"], error.get("input"))
    return str(error["msg"]).removeprefix("Value error, ")


def choice(expected: str, found: object) -> str:
    """Of a value that is none of some words; ``expected`` is `'none', 'selective' or 'full'`, as pydantic has it."""
    words = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    return f"expected {expected.replace(chr(39), '')}, found {shown(found)}{near(str(found), words)}"
