"""Field types of strategies: plain numbers and quantities, known when the file is read.

A number may be an expression over values that are the same on every rank (vars, axis sizes,
`world_size`). Numbers that differ by rank are impossible, because a strategy is expanded before any
rank is considered. The validation's context has the known names (``names``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, TypeVar, cast

from pydantic import BaseModel, PlainValidator, ValidationInfo, WithJsonSchema
from pydantic_core import ErrorDetails

from distsim.common.expressions import ExpressionError, parse_expression
from distsim.common.message_text import did_you_mean, name_list, value_text
from distsim.scenario.strategies.base import ComputeCost, CostOrEntries, GroupRef
from distsim.scenario.strategies.field_quantities import duration_ns, quantity_text

T = TypeVar("T")
MAX_INTEGER = 2**53
_QUANTITY = re.compile(r"\s*[+-]?\d[\d_.,]*\s*(?:%|[a-zA-Zµμ][\w/]*)\s*", re.ASCII)


def parse_number(value: object, info: ValidationInfo) -> int | float:
    """A number, or the value of an expression, which may be a bool.

    Raises ValueError for names that are not the same on every rank.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a number or an expression, found {value_text(value)}")
    if isinstance(value, str) and _QUANTITY.fullmatch(value):
        raise ValueError(f"expected a number without a unit, found {value_text(value)}")
    names: Mapping[str, object] = (info.context or {}).get("names", {})
    expression = parse_expression(value)
    unknown = [name for name in sorted(expression.names) if name not in names]
    if unknown:
        known = f"available names: {name_list(names, 20)}{did_you_mean(unknown[0], names)}"
        raise ValueError(f"{unknown[0]} is not a number with one value for all ranks; {known}")
    try:
        number: int | float = expression.evaluate(names)
        return number
    except ExpressionError as error:
        raise ValueError(str(error)) from None


def integer_at_least(low: int, what: str = "an integer") -> Callable[[object, ValidationInfo], int]:
    """Validator of an integer of at least ``low``, given as a number or by an expression."""

    def check(value: object, info: ValidationInfo) -> int:
        number = parse_number(value, info)
        is_integer = not isinstance(number, bool) and number == int(number)
        if not is_integer or not low <= number <= MAX_INTEGER:
            raise ValueError(f"expected {what} of at least {low}, found {value_text(number)}")
        return int(number)

    return check


_parse_size = integer_at_least(1, "a size")


def _parse_param_shapes(value: object, info: ValidationInfo) -> tuple[tuple[int, ...], ...]:
    """`params`: one number, or a list of parameters, each a number or a shape."""
    if not isinstance(value, list | tuple):
        return ((_parse_size(value, info),),)
    shapes = [item if isinstance(item, list | tuple) else [item] for item in value]
    if not shapes or not all(shapes):
        raise ValueError(
            "expected parameters, each a number of elements or a shape with at least one size, "
            "found an empty list"
        )
    return tuple(tuple(_parse_size(n, info) for n in shape) for shape in shapes)


def _parse_shape(value: object, info: ValidationInfo) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value:
        found = "an empty list" if value == [] else value_text(value)
        raise ValueError(f"expected a list of sizes such as [8, 1024], found {found}")
    return tuple(_parse_size(n, info) for n in value)


def _parse_nonnegative(value: object, info: ValidationInfo) -> float:
    found = parse_number(value, info)
    if isinstance(found, bool) or not 0 <= found <= 1e15:
        raise ValueError(f"expected a number of zero or more, found {value_text(found)}")
    return float(found)


def parse_keyed(
    value: Mapping[object, object], parsed: Callable[[object], T], key: str
) -> dict[int | str, T]:
    """`{0: …, 1: …, else: …}` with every value parsed; ``key`` names the keys in messages."""
    for given in value:
        is_number = isinstance(given, int) and not isinstance(given, bool)
        if given != "else" and not (is_number and cast("int", given) >= 0):
            raise ValueError(f"expected {key}, found {value_text(given)}")
    return {given: parsed(item) for given, item in value.items() if isinstance(given, int | str)}


def parse_by_rank(value: object, parsed: Callable[[object], T]) -> dict[int | str, T]:
    """`{0: 3, else: 2}`; a lone value is for all ranks."""
    if not isinstance(value, Mapping):
        return {"else": parsed(value)}
    return parse_keyed(value, parsed, "a rank or `else` as the key of a per-rank mapping")


def _parse_ints_by_rank(value: object, info: ValidationInfo) -> dict[int | str, int]:
    return parse_by_rank(value, lambda item: integer_at_least(0)(item, info))


_COMPUTE_COST_KEYS = ("time", "flops", "bytes", "dtype")


def parse_compute_cost(value: object, info: ValidationInfo) -> ComputeCost:
    """The cost of a compute step: a time, or flops and bytes."""
    if isinstance(value, str):
        return {"time": cast("str", quantity_text("a duration", value, info))}
    if not isinstance(value, Mapping):
        raise ValueError(
            f"expected a duration such as 3 ms, or `{{flops, bytes}}`, found {value_text(value)}"
        )
    for key in value:
        if key not in _COMPUTE_COST_KEYS:
            advice = did_you_mean(key, _COMPUTE_COST_KEYS)
            raise ValueError(f"unknown key {key}; expected {name_list(_COMPUTE_COST_KEYS)}{advice}")
    found = dict(value)
    if "time" in value:
        found["time"] = quantity_text("a duration", value["time"], info)
    if ("time" in value) == ("flops" in value or "bytes" in value):
        raise ValueError(
            "expected either `time`, or `flops` and `bytes`, whose time the cost model computes"
        )
    for key, kind in (("flops", "floating-point operations"), ("bytes", "a size")):
        if isinstance(value.get(key), str):
            found[key] = quantity_text(kind, value[key], info)
    return found


def parse_cost_or_entries(value: object, info: ValidationInfo) -> CostOrEntries:
    """A cost, or entries that replace the compute step."""
    if not isinstance(value, list | tuple):
        return parse_compute_cost(value, info)
    for item in value:
        if not isinstance(item, str | Mapping):
            raise ValueError(
                f"expected entries of a program, each after a dash, found {value_text(item)}"
            )
    return [dict(item) if isinstance(item, Mapping) else {item: {}} for item in value]


def _parse_dtype(value: object) -> str:
    if not isinstance(value, str) or value not in FLOAT_DTYPE_BYTES:
        raise ValueError(
            f"expected a dtype of torch ({', '.join(FLOAT_DTYPE_BYTES)}), "
            f"found {value_text(value)}{did_you_mean(value, FLOAT_DTYPE_BYTES)}"
        )
    return value


#: Bytes per element of the dtypes that parameters can have.
FLOAT_DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


def _parse_axis(value: object) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise ValueError(
            f"expected an axis of the mesh or a group's name, found {value_text(value)}"
        )
    return value


def _parse_group(value: object) -> GroupRef:
    if isinstance(value, list | tuple) and value:
        return tuple(_parse_axis(item) for item in value)
    return _parse_axis(value)


_EXPRESSION_SCHEMA: dict[str, object] = {"x-def": "formula"}
_NUMBER_SCHEMA: dict[str, object] = {"anyOf": [{"type": "number"}, _EXPRESSION_SCHEMA]}
_SHAPE_SCHEMA: dict[str, object] = {"type": "array", "minItems": 1, "items": _NUMBER_SCHEMA}
_FLOPS_OR_BYTES_SCHEMA = {"anyOf": [{"required": ["flops"]}, {"required": ["bytes"]}]}
_COMPUTE_COST_SCHEMA: dict[str, object] = {
    "type": "object",
    "additionalProperties": False,
    "oneOf": [{"required": ["time"]}, _FLOPS_OR_BYTES_SCHEMA],
    "properties": {
        "time": {"x-def": "duration"},
        "flops": {"x-def": "flops_count"},
        "bytes": {"x-def": "size_count"},
        "dtype": {"x-def": "dtype"},
    },
}
COST_OR_ENTRIES_SCHEMA = {
    "anyOf": [
        {"x-def": "duration"},
        _COMPUTE_COST_SCHEMA,
        {"type": "array", "items": {"x-def": "entry"}},
    ]
}


def _integer_schema(low: int) -> dict[str, object]:
    return {
        "anyOf": [{"type": "integer", "minimum": low, "maximum": MAX_INTEGER}, _EXPRESSION_SCHEMA]
    }


PositiveInt = Annotated[
    int, PlainValidator(integer_at_least(1)), WithJsonSchema(_integer_schema(1))
]
NonNegativeInt = Annotated[
    int, PlainValidator(integer_at_least(0)), WithJsonSchema(_integer_schema(0))
]
NonNegativeFloat = Annotated[
    float,
    PlainValidator(_parse_nonnegative),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1e15}, _EXPRESSION_SCHEMA]}
    ),
]
#: ns, from a duration with its unit.
DurationNs = Annotated[int, PlainValidator(duration_ns), WithJsonSchema({"x-def": "duration"})]
ComputeCostField = Annotated[
    ComputeCost,
    PlainValidator(parse_compute_cost),
    WithJsonSchema({"anyOf": [{"x-def": "duration"}, _COMPUTE_COST_SCHEMA]}),
]
CostOrEntriesField = Annotated[
    CostOrEntries, PlainValidator(parse_cost_or_entries), WithJsonSchema(COST_OR_ENTRIES_SCHEMA)
]
Dtype = Annotated[
    str, PlainValidator(_parse_dtype), WithJsonSchema({"enum": list(FLOAT_DTYPE_BYTES)})
]
#: The shapes of a layer's parameters.
ParamShapes = Annotated[
    tuple[tuple[int, ...], ...],
    PlainValidator(_parse_param_shapes),
    WithJsonSchema(
        {
            "anyOf": [
                _integer_schema(1),
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"anyOf": [_integer_schema(1), _SHAPE_SCHEMA]},
                },
            ]
        }
    ),
]
Shape = Annotated[tuple[int, ...], PlainValidator(_parse_shape), WithJsonSchema(_SHAPE_SCHEMA)]


def _parse_zero_stage(value: object, info: ValidationInfo) -> int:
    found = integer_at_least(1, "the ZeRO stage, 1, 2 or 3, an integer")(value, info)
    if found > 3:
        raise ValueError(f"expected ZeRO stage 1, 2 or 3, found {found}")
    return found


#: The stage of ZeRO: how much of a model is sharded.
ZeroStage = Annotated[int, PlainValidator(_parse_zero_stage), WithJsonSchema({"enum": [1, 2, 3]})]
#: An integer per rank; `else` is the rest.
IntByRank = Annotated[
    dict[int | str, int],
    PlainValidator(_parse_ints_by_rank),
    WithJsonSchema(
        {
            "anyOf": [
                _integer_schema(0),
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^([0-9]+|else)$"},
                    "additionalProperties": _integer_schema(0),
                },
            ]
        }
    ),
]
_NAME_SCHEMA: dict[str, object] = {"x-def": "name"}
#: One axis of the mesh or a group's name.
AxisOrGroup = Annotated[str, PlainValidator(_parse_axis), WithJsonSchema(_NAME_SCHEMA)]
#: The same, or a list of axes.
AxesOrGroup = Annotated[
    GroupRef,
    PlainValidator(_parse_group),
    WithJsonSchema(
        {"anyOf": [_NAME_SCHEMA, {"type": "array", "minItems": 1, "items": _NAME_SCHEMA}]}
    ),
]


# --- texts of Pydantic's errors, for fields that a strategy validates itself ---
def field_error_text(error: ErrorDetails, model: type[BaseModel], name: str) -> str:
    """The message for one error of `ValidationError.errors()`.

    ``model`` has the fields; the scenario file calls it ``name``.
    """
    loc = error["loc"]
    kind = error["type"]
    if kind == "missing":
        return f"{name} needs `{loc[-1]}`"
    if kind == "extra_forbidden" and len(loc) == 1:
        known = model.model_fields
        advice = did_you_mean(str(loc[0]), known)
        return f"unknown key {loc[0]} in {name}; expected {name_list(known, 16)}{advice}"
    if kind == "literal_error":
        return choice_error_text(error["ctx"]["expected"], error.get("input"))
    return str(error["msg"]).removeprefix("Value error, ")


def choice_error_text(expected: str, found: object) -> str:
    """The message for a value that is none of some words.

    ``expected`` is pydantic's text, such as `'none', 'selective' or 'full'`.
    """
    words = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    unquoted = expected.replace("'", "")
    return f"expected {unquoted}, found {value_text(found)}{did_you_mean(str(found), words)}"
