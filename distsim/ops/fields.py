"""The types of a step's fields: what may stand in a file, and what it is parsed to.

Everything here is written by people and read by Pydantic; lowering evaluates it (`distsim.program.lower`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, TypeVar, cast

from distsim import units
from distsim.expr import Expression
from distsim.fields import (
    FieldError,
    FieldErrors,
    Gather,
    Parsed,
    Parser,
    PerRank,
    Schema,
    each,
    errors_of,
    expression,
    listed,
    many,
    one_of,
    per_rank,
    shown,
    wrong,
)
from distsim.names import near
from distsim.ops.patterns import (
    expression_schema,
    name_schema,
    per_rank_schema,
    quantity_schema,
    reference_schema,
    text_expression,
)
from distsim.ops.records import DTYPE_BYTES, REDUCE_OPS
from distsim.quantities import expression_of, has_units
from distsim.records import dataclass

N = TypeVar("N", int, float)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ref:
    """``name`` or ``name@expression``: a tensor or a handle."""

    name: str
    index: Expression | None = None

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.name}@{self.index.text}"


@dataclass(frozen=True, slots=True)
class Inline:
    """``{shape: […], dtype: …}`` in place of a tensor's name: a fresh buffer of that call alone."""

    shape: tuple[Expression | PerRank[Expression], ...]
    dtype: str = "float32"


def ref(value: object) -> Ref:
    if isinstance(value, Ref):
        return value
    if not isinstance(value, str) or not value.strip():
        raise wrong("a name, or name@index", value)
    return _ref(value)


@lru_cache(maxsize=4096)
def _ref(value: str) -> Ref:
    name, mark, index = value.partition("@")
    if not name.strip().isidentifier():
        raise wrong("a name made of letters, digits and _ (not starting with a digit), or name@index", value)
    if mark and not index.strip():
        raise wrong("an index after @", value)
    if not mark:
        return Ref(name.strip())
    try:
        return Ref(name.strip(), expression(index.strip()))
    except ValueError as error:
        raise FieldError.further(error, len(value) - len(index.lstrip())) from None


_dtype = one_of("a dtype of torch", DTYPE_BYTES)
#: What people write who know numpy or another side of torch.
_OTHERDTYPES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32", "long": "int64", "bf16": "bfloat16",
                 "fp16": "float16", "fp32": "float32", "fp64": "float64", "boolean": "bool"}  # fmt: skip


def dtype(value: object) -> str:
    """A dtype's name; `torch.float32` is float32. Raises ValueError."""
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if isinstance(name, str) and name in _OTHERDTYPES:
        known = ", ".join(DTYPE_BYTES)
        raise ValueError(f"expected a dtype of torch ({known}), found {shown(value)}; did you mean {_OTHERDTYPES[name]}?")
    return _dtype(name if isinstance(name, str) and name in DTYPE_BYTES else value)


def shape(value: object) -> tuple[Expression | PerRank[Expression], ...]:
    if not isinstance(value, (list, tuple)):
        raise wrong("a list of sizes, as [8, 1024]", value)
    return each(per_rank(expression), value)


def tensor(value: object) -> Ref | Inline:
    if isinstance(value, Mapping):
        extra = set(value) - {"shape", "dtype"}
        if extra or "shape" not in value:
            raise wrong("a tensor's name or an inline {shape, dtype}", value)
        gather = Gather()
        sizes = gather.take("shape", shape, value["shape"])
        kind = gather.take("dtype", dtype, value.get("dtype", "float32"))
        gather.done()
        return Inline(sizes, kind)
    return value if isinstance(value, Inline) else ref(value)


def plain(value: object) -> object:
    """Back to what a file would say: the inverse of the parsers above (for `to_yaml` and JSON)."""
    if isinstance(value, Expression):
        return value.source
    if isinstance(value, Ref):
        return str(value)
    if isinstance(value, Inline):
        return {"shape": [plain(n) for n in value.shape], "dtype": value.dtype}
    if isinstance(value, PerRank):
        return value.written(plain)
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def _field(parse_one: Parser[object], schema: Schema, write: Callable[[object], object] = plain) -> tuple[Parsed]:
    return (Parsed(parse_one, schema, write),)


def _written(text: Callable[[T], str]) -> Callable[[object], object]:
    """Serializer of a number with a unit, alone or per rank, or of an expression in its place."""

    def write(value: object) -> object:
        if isinstance(value, PerRank):
            return value.written(write)
        return value.source if isinstance(value, Expression) else text(cast("T", value))

    return write


DTYPES: Schema = {"anyOf": [{"enum": list(DTYPE_BYTES)}, {"enum": [f"torch.{name}" for name in DTYPE_BYTES]}]}
_SIZES: Schema = {"type": "array", "items": per_rank_schema(expression_schema())}
_REF = reference_schema()
TENSOR: Schema = {
    "anyOf": [
        _REF,
        {
            "type": "object",
            "required": ["shape"],
            "additionalProperties": False,
            "properties": {"shape": _SIZES, "dtype": {"x-def": "dtype"}},
        },
    ]
}
Scalar = Expression | PerRank[Expression] | None
Splits = tuple[Expression, ...] | PerRank[tuple[Expression, ...]]

#: An integer, boolean or number by expression, alone or per rank: Expression | PerRank of Expression.
Expr = Annotated[Scalar, *_field(per_rank(expression), per_rank_schema(expression_schema()))]
#: A list of expressions, alone or per rank: tuple of Expression | PerRank of tuples.
ExprList = Annotated[
    Splits | None,
    *_field(per_rank(listed(expression)), per_rank_schema({"type": "array", "items": expression_schema()})),
]
#: Ref | Inline.
TensorField = Annotated[Ref | Inline, *_field(tensor, {"x-def": "tensor"})]
#: Ref | Inline, or a tuple of them: a list argument of torch, part by part.
TensorList = Annotated[
    Ref | Inline | tuple[Ref | Inline, ...] | None,
    *_field(many(tensor), {"anyOf": [{"x-def": "tensor"}, {"type": "array", "items": {"x-def": "tensor"}}]}),
]
#: A tuple of Refs.
RefList = Annotated[tuple[Ref, ...], *_field(listed(ref), {"type": "array", "items": _REF})]
#: Ref of a handle to bind.
HandleField = Annotated[Ref | None, *_field(ref, _REF)]
#: Ref, or a tuple of Refs; ``all`` is Ref("all").
WaitField = Annotated[Ref | tuple[Ref, ...], *_field(many(ref), {"anyOf": [_REF, {"type": "array", "items": _REF}]})]


def _timed(parse_one: Callable[[object], int]) -> Parser[int | Expression]:
    """A duration with its unit, or an expression with units, as `(rank + 1) * 1 ms`."""

    def parse_any(value: object) -> int | Expression:
        if isinstance(value, Expression):
            return value
        try:
            return parse_one(value)
        except ValueError as error:
            if not isinstance(value, str):
                raise
            return expression_of(value, "a duration", error)

    return parse_any


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise wrong("a text", value)
    return value


#: A text, alone or per rank.
TextField = Annotated[str | PerRank[str] | None, *_field(per_rank(_text), per_rank_schema({"type": "string"}))]


def _amount(parse_one: Callable[[str], N], kind: str, expected: str) -> Parser[N | Expression | PerRank[N | Expression]]:
    """A quantity with its unit, or an expression: with units, or one that counts; a bare number is refused."""

    def parse_any(value: object) -> N | Expression:
        if isinstance(value, Expression):
            return value
        if isinstance(value, str):
            try:
                return parse_one(value)
            except ValueError as wrong_unit:
                if has_units(value):
                    return expression_of(value, kind, wrong_unit)
                try:
                    found = expression(value)
                except ValueError:
                    raise wrong_unit from None
            if not _is_number(value):
                return found
        raise wrong(expected, value)

    return per_rank(parse_any)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_flops = _amount(
    units.parse_flops,
    "floating-point operations",
    "a count with its unit, as `2 TFLOP`, or an expression, as `2 * width * width`",
)
_bytes = _amount(units.parse_size_bytes, "a size", "a size with its unit, as `4 MiB`, or an expression, as `4 B * width`")
_DURATION = per_rank_schema(quantity_schema("a duration"))
#: int nanoseconds | Expression (ns) | PerRank of them.
DurationField = Annotated[
    int | Expression | PerRank[int | Expression] | None,
    *_field(per_rank(_timed(units.parse_duration_ns)), _DURATION, _written(units.duration_text)),
]
#: The same, and not zero.
TimeoutField = Annotated[
    int | Expression | PerRank[int | Expression] | None,
    *_field(per_rank(_timed(units.parse_timeout_ns)), _DURATION, _written(units.duration_text)),
]
#: float FLOP | Expression (a count of FLOP) | PerRank of them.
FlopsField = Annotated[
    float | Expression | PerRank[float | Expression] | None,
    *_field(_flops, per_rank_schema(quantity_schema("floating-point operations", bare=True)), _written(units.flops_text)),
]
#: int bytes | Expression (a count of bytes) | PerRank of them.
AmountField = Annotated[
    int | Expression | PerRank[int | Expression] | None,
    *_field(_bytes, per_rank_schema(quantity_schema("a size", bare=True)), _written(units.size_text)),
]


#: Numbers of a tensor: one that fills it, or a nested list of them.
Value = Expression | tuple[object, ...]


def _value(value: object) -> Value:
    """A number or expression, or a (nested) list of them."""
    return each(_value, value) if isinstance(value, (list, tuple)) else expression(value)


#: Alone or per rank.
ValueField = Annotated[Value | PerRank[Value] | None, *_field(per_rank(_value), per_rank_schema({"x-def": "value"}))]
#: What the schema's definition `value` is: a number, an expression, or nested lists of them.
VALUE: Schema = {"anyOf": [expression_schema(), {"type": "array", "items": {"x-def": "value"}}]}


def _group(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str) and value.isidentifier():
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, str) and v.isidentifier() for v in value):
        return tuple(value)
    raise wrong("a group's name, a mesh axis, or a list of axes", value)


#: A group's or axis' name, or a tuple of axes (the flattened sub-mesh).
GroupField = Annotated[
    str | tuple[str, ...] | None,
    *_field(_group, {"anyOf": [name_schema(), {"type": "array", "minItems": 1, "items": name_schema()}]}),
]


def selector(value: object) -> tuple[int, ...] | Expression:
    """A selector: an integer or a list names ranks, a string is an expression that must be true or false."""
    if isinstance(value, bool):
        raise wrong("a rank, a list of ranks, or a condition in quotes", value)
    if isinstance(value, int):
        return (_rank(value),)
    if isinstance(value, (list, tuple)):
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise wrong("a list of ranks (integers)", value)
        return tuple(_rank(rank) for rank in value)
    if isinstance(value, str):
        return expression(value)
    if isinstance(value, Expression):
        return value
    raise wrong("a rank, a list of ranks, or a condition as `stage == 0`", value)


_RANK: Schema = {"type": "integer", "minimum": 0}


def _rank(value: int) -> int:
    if value < 0:
        raise wrong("a rank of zero or more", value)
    return value


SELECTOR: Schema = {
    "description": "Who: a rank, a list of ranks, or a condition.",
    "anyOf": [_RANK, {"type": "array", "items": _RANK}, text_expression()],
}
#: Selector: a tuple of ranks | Expression; None (left out) selects all.
SelectorField = Annotated[tuple[int, ...] | Expression | None, *_field(selector, {"x-def": "selector"})]


_OPS = {name: name for name in REDUCE_OPS} | {
    f"{p}{n.upper()}": n for n in REDUCE_OPS for p in ("", "ReduceOp.", "dist.ReduceOp.")
}


def _reduce_op(value: object) -> str:
    if isinstance(value, str) and value in _OPS:
        return _OPS[value]
    hint = "; torch calls it avg" if value in ("mean", "average") else near(_last(value), REDUCE_OPS)
    raise ValueError(f"expected a reduce op ({', '.join(REDUCE_OPS)}), found {shown(value)}{hint}")


def _last(value: object) -> object:
    """``ReduceOp.SUMM`` as ``summ``, for the nearest name."""
    return value.rpartition(".")[2].lower() if isinstance(value, str) else value


#: A name of torch.distributed.ReduceOp, lower case; a file may also say `ReduceOp.SUM`.
ReduceOpField = Annotated[
    str, *_field(_reduce_op, {"anyOf": [{"enum": list(REDUCE_OPS)}, {"enum": [n for n in _OPS if n not in REDUCE_OPS]}]})
]
#: A name of torch, which may stand behind `torch.`.
DtypeField = Annotated[str, *_field(dtype, {"x-def": "dtype"})]


def _stream(value: object) -> str:
    if isinstance(value, str) and value != "host" and value.isidentifier():
        return "" if value == "current" else value
    raise ValueError(f"expected a stream's name (`current`: the default one), found {value!r}")


#: A stream's name; "" is the default stream, which a file may also call `current`.
StreamField = Annotated[str, Parsed(_stream, {"type": "string"}, lambda name: name or "current")]


__all__ = [
    "SELECTOR", "Scalar", "Splits", "AmountField", "DtypeField", "DurationField", "Expr", "ExprList", "FieldError",
    "FieldErrors", "FlopsField", "Gather", "GroupField", "HandleField", "Inline", "PerRank", "ReduceOpField", "Ref",
    "RefList", "SelectorField", "TensorField", "TensorList", "TextField", "ValueField", "WaitField", "dtype", "each",
    "errors_of", "expression", "per_rank", "plain", "ref", "selector", "shape", "tensor",
]  # fmt: skip
