"""The types of a step's fields: what may stand in a file, and what it is parsed to.

Everything here is written by people and read by Pydantic; lowering evaluates it
(`distsim.program.lower`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, TypeGuard, TypeVar, cast

from distsim.common import units
from distsim.common.expressions import Expression
from distsim.common.field_parsing import (
    FieldError,
    FieldErrorCollector,
    FieldErrors,
    FieldParser,
    FieldSchema,
    ParsedFieldType,
    PerRank,
    expected_error,
    expression_field,
    list_of,
    one_of,
    one_or_list_of,
    parse_each,
    per_rank,
    single_errors,
)
from distsim.common.message_text import closest_name, unknown_value_text, value_text
from distsim.common.quantities import has_units, parse_quantity_expression
from distsim.common.records import dataclass
from distsim.operations.core.field_schemas import (
    condition_schema,
    expression_schema,
    name_schema,
    per_rank_schema,
    quantity_schema,
    reference_schema,
)
from distsim.operations.core.resolved_call import DTYPE_BYTES, REDUCE_OPS

N = TypeVar("N", int, float)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NameReference:
    """``name`` or ``name@expression``: a tensor or a handle."""

    name: str
    index: Expression | None = None

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.name}@{self.index.text}"


@dataclass(frozen=True, slots=True)
class InlineTensor:
    """``{shape: […], dtype: …}`` in place of a tensor's name: a fresh buffer of that call alone."""

    shape: tuple[Expression | PerRank[Expression], ...]
    dtype: str = "float32"


def parse_reference(value: object) -> NameReference:
    """A tensor or a handle: ``name`` or ``name@index``. Raises ValueError."""
    if isinstance(value, NameReference):
        return value
    if not isinstance(value, str) or not value.strip():
        raise expected_error("a name, or name@index", value)
    return _parse_reference_text(value)


@lru_cache(maxsize=4096)
def _parse_reference_text(value: str) -> NameReference:
    name, mark, index = value.partition("@")
    if not name.strip().isidentifier():
        raise expected_error(
            "a name made of letters, digits and _ (not starting with a digit), or name@index", value
        )
    if mark and not index.strip():
        raise expected_error("an index after @", value)
    if not mark:
        return NameReference(name.strip())
    try:
        return NameReference(name.strip(), expression_field(index.strip()))
    except ValueError as error:
        raise FieldError.further(error, len(value) - len(index.lstrip())) from None


_parse_known_dtype = one_of(DTYPE_BYTES)
#: What people write who know numpy or another side of torch.
_DTYPE_SYNONYMS = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "int": "int32",
    "long": "int64",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "boolean": "bool",
}


def parse_dtype(value: object) -> str:
    """A dtype's name; `torch.float32` is float32. Raises ValueError."""
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if isinstance(name, str) and name in _DTYPE_SYNONYMS:
        synonym = _DTYPE_SYNONYMS[name]
        raise ValueError(f"unknown value {value_text(value)}; did you mean {synonym!r}?")
    return _parse_known_dtype(name if isinstance(name, str) and name in DTYPE_BYTES else value)


def parse_shape(value: object) -> tuple[Expression | PerRank[Expression], ...]:
    """The sizes of a tensor. Raises ValueError."""
    if not isinstance(value, (list, tuple)):
        raise expected_error("a list of sizes such as [8, 1024]", value)
    return parse_each(per_rank(expression_field), value)


def parse_tensor(value: object) -> NameReference | InlineTensor:
    """A reference or an inline tensor. Raises ValueError."""
    if isinstance(value, Mapping):
        extra = set(value) - {"shape", "dtype"}
        if extra or "shape" not in value:
            raise expected_error("the name of a tensor or an inline {shape, dtype}", value)
        gather = FieldErrorCollector()
        sizes = gather.take("shape", parse_shape, value["shape"])
        kind = gather.take("dtype", parse_dtype, value.get("dtype", "float32"))
        gather.done()
        return InlineTensor(sizes, kind)
    return value if isinstance(value, InlineTensor) else parse_reference(value)


def to_plain_data(value: object) -> object:
    """Back to what a file would say: the inverse of the parsers above (for `to_yaml` and JSON)."""
    if isinstance(value, Expression):
        return value.source
    if isinstance(value, NameReference):
        return str(value)
    if isinstance(value, InlineTensor):
        return {"shape": [to_plain_data(n) for n in value.shape], "dtype": value.dtype}
    if isinstance(value, PerRank):
        return value.written(to_plain_data)
    if isinstance(value, (list, tuple)):
        return [to_plain_data(v) for v in value]
    return value


def _parsed_field(
    parse_one: FieldParser[object],
    schema: FieldSchema,
    write: Callable[[object], object] = to_plain_data,
) -> tuple[ParsedFieldType]:
    return (ParsedFieldType(parse_one, schema, write),)


def unit_serializer(text: Callable[[T], str]) -> Callable[[object], object]:
    """Serializer of a number with a unit, alone or per rank, or of an expression in its place."""

    def write(value: object) -> object:
        if isinstance(value, PerRank):
            return value.written(write)
        return value.source if isinstance(value, Expression) else text(cast("T", value))

    return write


DTYPE_SCHEMA: FieldSchema = {
    "anyOf": [{"enum": list(DTYPE_BYTES)}, {"enum": [f"torch.{name}" for name in DTYPE_BYTES]}]
}
_SHAPE_SCHEMA: FieldSchema = {"type": "array", "items": per_rank_schema(expression_schema())}
_REFERENCE_SCHEMA = reference_schema()
TENSOR_SCHEMA: FieldSchema = {
    "anyOf": [
        _REFERENCE_SCHEMA,
        {
            "type": "object",
            "required": ["shape"],
            "additionalProperties": False,
            "properties": {"shape": _SHAPE_SCHEMA, "dtype": {"x-def": "dtype"}},
        },
    ]
}
ScalarExpression = Expression | PerRank[Expression] | None
SplitExpressions = tuple[Expression, ...] | PerRank[tuple[Expression, ...]]

#: An integer, boolean or number by expression, alone or per rank: Expression | PerRank of
#: Expression.
ExpressionField = Annotated[
    ScalarExpression,
    *_parsed_field(per_rank(expression_field), per_rank_schema(expression_schema())),
]
#: A list of expressions, alone or per rank: tuple of Expression | PerRank of tuples.
ExpressionListField = Annotated[
    SplitExpressions | None,
    *_parsed_field(
        per_rank(list_of(expression_field)),
        per_rank_schema({"type": "array", "items": expression_schema()}),
    ),
]
#: Ref | Inline.
TensorField = Annotated[
    NameReference | InlineTensor, *_parsed_field(parse_tensor, {"x-def": "tensor"})
]
#: Ref | Inline, or a tuple of them: a list argument of torch, part by part.
TensorListField = Annotated[
    NameReference | InlineTensor | tuple[NameReference | InlineTensor, ...] | None,
    *_parsed_field(
        one_or_list_of(parse_tensor),
        {"anyOf": [{"x-def": "tensor"}, {"type": "array", "items": {"x-def": "tensor"}}]},
    ),
]
#: A tuple of Refs.
ReferenceListField = Annotated[
    tuple[NameReference, ...],
    *_parsed_field(list_of(parse_reference), {"type": "array", "items": _REFERENCE_SCHEMA}),
]
#: Ref of a handle to bind.
HandleField = Annotated[NameReference | None, *_parsed_field(parse_reference, _REFERENCE_SCHEMA)]
#: Ref, or a tuple of Refs; ``all`` is Ref("all").
WaitField = Annotated[
    NameReference | tuple[NameReference, ...],
    *_parsed_field(
        one_or_list_of(parse_reference),
        {"anyOf": [_REFERENCE_SCHEMA, {"type": "array", "items": _REFERENCE_SCHEMA}]},
    ),
]


def _duration_parser(parse_one: Callable[[object], int]) -> FieldParser[int | Expression]:
    """A duration with its unit, or an expression with units, as `(rank + 1) * 1 ms`."""

    def parse_any(value: object) -> int | Expression:
        if isinstance(value, Expression):
            return value
        try:
            return parse_one(value)
        except ValueError as error:
            if not isinstance(value, str):
                raise
            return parse_quantity_expression(value, "a duration", error)

    return parse_any


def _parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise expected_error("a text", value)
    return value


#: A text, alone or per rank.
TextField = Annotated[
    str | PerRank[str] | None,
    *_parsed_field(per_rank(_parse_text), per_rank_schema({"type": "string"})),
]


def _quantity_parser(
    parse_one: Callable[[str], N], kind: str, expected: str
) -> FieldParser[N | Expression | PerRank[N | Expression]]:
    """A quantity with its unit, or an expression: with units, or one that counts; a bare number is
    refused.
    """

    def parse_any(value: object) -> N | Expression:
        if isinstance(value, Expression):
            return value
        if isinstance(value, str):
            try:
                return parse_one(value)
            except ValueError as wrong_unit:
                if has_units(value):
                    return parse_quantity_expression(value, kind, wrong_unit)
                try:
                    found = expression_field(value)
                except ValueError:
                    raise wrong_unit from None
            if not _is_number(value):
                return found
        raise expected_error(expected, value)

    return per_rank(parse_any)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


parse_flop_count = _quantity_parser(
    units.parse_flops,
    "floating-point operations",
    "a count with its unit, such as `2 TFLOP`, or an expression, such as `2 * width * width`",
)
parse_byte_count = _quantity_parser(
    units.parse_size_bytes,
    "a size",
    "a size with its unit, such as `4 MiB`, or an expression, such as `4 B * width`",
)
_DURATION_SCHEMA = per_rank_schema(quantity_schema("a duration"))
#: int nanoseconds | Expression (ns) | PerRank of them.
DurationField = Annotated[
    int | Expression | PerRank[int | Expression] | None,
    *_parsed_field(
        per_rank(_duration_parser(units.parse_duration_ns)),
        _DURATION_SCHEMA,
        unit_serializer(units.duration_text),
    ),
]
#: The same, and not zero.
TimeoutField = Annotated[
    int | Expression | PerRank[int | Expression] | None,
    *_parsed_field(
        per_rank(_duration_parser(units.parse_timeout_ns)),
        _DURATION_SCHEMA,
        unit_serializer(units.duration_text),
    ),
]
#: float FLOP | Expression (a count of FLOP) | PerRank of them.
FlopsField = Annotated[
    float | Expression | PerRank[float | Expression] | None,
    *_parsed_field(
        parse_flop_count,
        per_rank_schema(quantity_schema("floating-point operations", bare=True)),
        unit_serializer(units.flops_text),
    ),
]
#: int bytes | Expression (a count of bytes) | PerRank of them.
ByteCountField = Annotated[
    int | Expression | PerRank[int | Expression] | None,
    *_parsed_field(
        parse_byte_count,
        per_rank_schema(quantity_schema("a size", bare=True)),
        unit_serializer(units.size_text),
    ),
]


#: Numbers of a tensor: one that fills it, or a nested list of them.
TensorValue = Expression | tuple[object, ...]


def _parse_value(value: object) -> TensorValue:
    """A number or expression, or a (nested) list of them."""
    return (
        parse_each(_parse_value, value)
        if isinstance(value, (list, tuple))
        else expression_field(value)
    )


#: Alone or per rank.
ValueField = Annotated[
    TensorValue | PerRank[TensorValue] | None,
    *_parsed_field(per_rank(_parse_value), per_rank_schema({"x-def": "value"})),
]
#: What the schema's definition `value` is: a number, an expression, or nested lists of them.
VALUE_SCHEMA: FieldSchema = {
    "anyOf": [expression_schema(), {"type": "array", "items": {"x-def": "value"}}]
}


def _is_identifier(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value.isidentifier()


def _parse_group(value: object) -> str | tuple[str, ...]:
    if _is_identifier(value):
        return value
    if isinstance(value, (list, tuple)) and value:
        axes = tuple(value)
        if all(_is_identifier(axis) for axis in axes):
            return axes
    raise expected_error("the name of a group, an axis of the mesh, or a list of axes", value)


#: A group's or axis' name, or a tuple of axes (the flattened sub-mesh).
GroupField = Annotated[
    str | tuple[str, ...] | None,
    *_parsed_field(
        _parse_group,
        {"anyOf": [name_schema(), {"type": "array", "minItems": 1, "items": name_schema()}]},
    ),
]


def parse_selector(value: object) -> tuple[int, ...] | Expression:
    """A selector: an integer or a list names ranks, a string is an expression that must be true or
    false.
    """
    if isinstance(value, bool):
        raise expected_error("a rank, a list of ranks, or a condition in quotes", value)
    if isinstance(value, int):
        return (_nonnegative_rank(value),)
    if isinstance(value, (list, tuple)):
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise expected_error("a list of ranks (integers)", value)
        return tuple(_nonnegative_rank(rank) for rank in value)
    if isinstance(value, str):
        return expression_field(value)
    if isinstance(value, Expression):
        return value
    raise expected_error("a rank, a list of ranks, or a condition such as `stage == 0`", value)


_RANK_SCHEMA: FieldSchema = {"type": "integer", "minimum": 0}


def _nonnegative_rank(value: int) -> int:
    if value < 0:
        raise expected_error("a rank of zero or more", value)
    return value


SELECTOR_SCHEMA: FieldSchema = {
    "description": "A rank, a list of ranks, or a condition.",
    "anyOf": [_RANK_SCHEMA, {"type": "array", "items": _RANK_SCHEMA}, condition_schema()],
}
#: Selector: a tuple of ranks | Expression; None (the default) selects all ranks.
SelectorField = Annotated[
    tuple[int, ...] | Expression | None, *_parsed_field(parse_selector, {"x-def": "selector"})
]


_REDUCE_OP_SPELLINGS = {name: name for name in REDUCE_OPS} | {
    f"{p}{n.upper()}": n for n in REDUCE_OPS for p in ("", "ReduceOp.", "dist.ReduceOp.")
}


def _parse_reduce_op(value: object) -> str:
    if isinstance(value, str) and value in _REDUCE_OP_SPELLINGS:
        return _REDUCE_OP_SPELLINGS[value]
    name = "avg" if value in ("mean", "average") else closest_name(_last_word(value), REDUCE_OPS)
    if name is not None:
        raise ValueError(f"unknown value {value_text(value)}; did you mean {name!r}?")
    raise ValueError(unknown_value_text(value, REDUCE_OPS))


def _last_word(value: object) -> object:
    """``ReduceOp.SUMM`` as ``summ``, for the nearest name."""
    return value.rpartition(".")[2].lower() if isinstance(value, str) else value


#: A name of torch.distributed.ReduceOp, lower case; a file may also say `ReduceOp.SUM`.
ReduceOpField = Annotated[
    str,
    *_parsed_field(
        _parse_reduce_op,
        {
            "anyOf": [
                {"enum": list(REDUCE_OPS)},
                {"enum": [n for n in _REDUCE_OP_SPELLINGS if n not in REDUCE_OPS]},
            ]
        },
    ),
]
#: A name of torch, which may stand behind `torch.`.
DtypeField = Annotated[str, *_parsed_field(parse_dtype, {"x-def": "dtype"})]


def parse_stream(value: object) -> str:
    """A stream's name; "" for the default stream, which a file calls `current`."""
    if isinstance(value, str) and value != "host" and value.isidentifier():
        return "" if value == "current" else value
    raise ValueError(f"expected a stream's name (`current`: the default one), found {value!r}")


#: A stream's name; "" is the default stream, which a file may also call `current`.
StreamField = Annotated[
    str, ParsedFieldType(parse_stream, {"type": "string"}, lambda name: name or "current")
]


__all__ = [
    "SELECTOR_SCHEMA",
    "ScalarExpression",
    "SplitExpressions",
    "ByteCountField",
    "DtypeField",
    "DurationField",
    "ExpressionField",
    "ExpressionListField",
    "FieldError",
    "FieldErrors",
    "FlopsField",
    "FieldErrorCollector",
    "GroupField",
    "HandleField",
    "InlineTensor",
    "PerRank",
    "ReduceOpField",
    "NameReference",
    "ReferenceListField",
    "SelectorField",
    "TensorField",
    "TensorListField",
    "TextField",
    "ValueField",
    "WaitField",
    "parse_byte_count",
    "parse_dtype",
    "parse_flop_count",
    "unit_serializer",
    "parse_each",
    "single_errors",
    "expression_field",
    "per_rank",
    "to_plain_data",
    "parse_reference",
    "parse_selector",
    "parse_shape",
    "parse_stream",
    "parse_tensor",
]
