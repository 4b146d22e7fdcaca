"""The types of a step's fields: what may stand in a file, and what it is parsed to.

Everything here is written by people and read by Pydantic; lowering evaluates it (`distsim.program.lower`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from distsim import units
from distsim.expr import Expression, parse
from distsim.ops.records import DTYPE_BYTES, REDUCE_OPS


@dataclass(frozen=True, slots=True)
class PerRank:
    """``{0: …, 1: …, else: …}``: keys are global ranks; ``default`` is ``else``'s value, None when it is left out."""

    entries: tuple[tuple[int, Any], ...]
    default: Any = None

    def get(self, rank: int) -> Any:
        """The entry of a rank, `else`'s value, or None when there is neither."""
        return dict(self.entries).get(rank, self.default)


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

    shape: tuple[Any, ...]  # of IntExpr values
    dtype: str = "float32"


class FieldError(ValueError):
    """A field's error that knows its way: ``path`` from the field to the culprit, ``offset`` into its text (None: not known)."""

    def __init__(self, message: str, path: tuple[str | int, ...] = (), offset: int | None = None) -> None:
        super().__init__(message, path, offset)
        self.message = message
        self.path = path
        self.offset = offset

    def __str__(self) -> str:
        return self.message

    @classmethod
    def further(cls, error: ValueError, characters: int) -> FieldError:
        """The same error, in a text that starts so many characters earlier."""
        offset = getattr(error, "offset", None)
        return cls(str(error), (), None if offset is None else offset + characters)


class FieldErrors(ValueError):
    """Several errors of one field."""

    def __init__(self, errors: tuple[FieldError, ...]) -> None:
        super().__init__(errors)
        self.errors = errors

    def __str__(self) -> str:
        return "; ".join(str(error) for error in self.errors)


def errors_of(error: ValueError) -> tuple[ValueError, ...]:
    """The single errors behind a field parser's error."""
    return error.errors if isinstance(error, FieldErrors) else (error,)


class Gather:
    """Parses the parts of a container one by one, so that one wrong part hides no other."""

    def __init__(self) -> None:
        self.errors: list[FieldError] = []

    def take(self, part: str | int, parse_one: Callable[[Any], Any], value: Any) -> Any:
        """The parsed value; None, and an error kept, where it can't be parsed."""
        try:
            return parse_one(value)
        except ValueError as error:
            for one in errors_of(error):
                self.errors.append(FieldError(str(one), (part, *getattr(one, "path", ())), getattr(one, "offset", None)))
            return None

    def done(self) -> None:
        """Raises FieldErrors if there was any."""
        if self.errors:
            raise FieldErrors(tuple(self.errors))


def each(parse_one: Callable[[Any], Any], values: Any) -> tuple[Any, ...]:
    """Every item parsed; an error knows which item."""
    gather = Gather()
    found = tuple([gather.take(k, parse_one, value) for k, value in enumerate(values)])
    gather.done()
    return found


def _wrong(expected: str, value: object) -> ValueError:
    return ValueError(f"expected {expected}, found {_show(value)}")


def _show(value: object) -> str:
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _no_rank(key: Any) -> None:
    raise _wrong("a rank or `else` as the key of a per-rank mapping", key)


def per_rank(parse_one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let ``parse_one`` also take a mapping of ranks to values."""

    def parse_any(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value if isinstance(value, PerRank) else parse_one(value)
        gather = Gather()
        entries, default = [], None
        for key, item in value.items():
            if key == "else":
                default = gather.take(key, parse_one, item)
            elif isinstance(key, int) and not isinstance(key, bool) and key >= 0:
                entries.append((key, gather.take(key, parse_one, item)))
            else:
                gather.take(key, _no_rank, key)
        gather.done()
        if not entries and default is None:
            raise ValueError("expected at least one rank or `else` in a per-rank mapping, found none")
        return PerRank(tuple(entries), default)

    return parse_any


def expression(value: Any) -> Expression:
    if isinstance(value, Expression):
        return value
    if isinstance(value, (bool, int, float, str)):
        return parse(value)
    raise _wrong("a number or an expression", value)


def ref(value: Any) -> Ref:
    if isinstance(value, Ref):
        return value
    if not isinstance(value, str) or not value.strip():
        raise _wrong("a name, or name@index", value)
    name, mark, index = value.partition("@")
    if not name.strip().isidentifier():
        raise _wrong("a name made of letters, digits and _ (not starting with a digit), or name@index", value)
    if mark and not index.strip():
        raise _wrong("an index after @", value)
    if not mark:
        return Ref(name.strip())
    try:
        return Ref(name.strip(), expression(index.strip()))
    except ValueError as error:
        raise FieldError.further(error, len(value) - len(index.lstrip())) from None


def dtype(value: Any) -> str:
    if not isinstance(value, str) or value not in DTYPE_BYTES:
        from distsim.names import near

        raise ValueError(f"expected a dtype of torch ({', '.join(DTYPE_BYTES)}), found {_show(value)}" + near(value, DTYPE_BYTES))
    return str(value)


def shape(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise _wrong("a list of sizes, as [8, 1024]", value)
    return each(per_rank(expression), value)


def tensor(value: Any) -> Ref | Inline:
    if isinstance(value, Mapping):
        extra = set(value) - {"shape", "dtype"}
        if extra or "shape" not in value:
            raise _wrong("a tensor's name or an inline {shape, dtype}", value)
        gather = Gather()
        sizes = gather.take("shape", shape, value["shape"])
        kind = gather.take("dtype", dtype, value.get("dtype", "float32"))
        gather.done()
        return Inline(sizes, kind)
    return value if isinstance(value, Inline) else ref(value)


def many(parse_one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One value, or a list of them."""

    def parse_any(value: Any) -> Any:
        return each(parse_one, value) if isinstance(value, (list, tuple)) else parse_one(value)

    return parse_any


def _listed(parse_one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def parse_any(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _wrong("a list", value)
        return each(parse_one, value)

    return parse_any


def plain(value: Any) -> Any:
    """Back to what a file would say: the inverse of the parsers above (for `to_yaml` and JSON)."""
    if isinstance(value, Expression):
        return value.source
    if isinstance(value, Ref):
        return str(value)
    if isinstance(value, Inline):
        return {"shape": [plain(n) for n in value.shape], "dtype": value.dtype}
    if isinstance(value, PerRank):
        entries = {rank: plain(v) for rank, v in value.entries}
        return entries if value.default is None else {**entries, "else": plain(value.default)}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


NUMBER_OR_EXPRESSION: dict[str, Any] = {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "string"}]}


def _with_per_rank(one: dict[str, Any]) -> dict[str, Any]:
    entries = {"type": "object", "propertyNames": {"pattern": "^([0-9]+|else)$"}, "additionalProperties": one}
    return {"anyOf": [one, entries]}


def _field(parse_one: Callable[[Any], Any], schema: dict[str, Any], write: Callable[[Any], Any] = plain) -> Any:
    return (PlainValidator(parse_one), PlainSerializer(write), WithJsonSchema(schema))


def _quantity(parse_one: Callable[[Any], Any], text: Callable[[Any], str]) -> tuple[Any, Any]:
    """Validator and serializer of a number with a unit, alone or per rank. Numbers that are parsed already pass."""

    def write(value: Any) -> Any:
        if isinstance(value, PerRank):
            entries = {rank: text(v) for rank, v in value.entries}
            return entries if value.default is None else {**entries, "else": text(value.default)}
        return text(value)

    return per_rank(parse_one), write


_TENSOR = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "required": ["shape"],
            "additionalProperties": False,
            "properties": {"shape": {"type": "array"}, "dtype": {"enum": list(DTYPE_BYTES)}},
        },
    ]
}
_TEXT = {"type": "string"}
_duration, _write_duration = _quantity(units.parse_duration_ns, units.duration_text)
_size, _write_size = _quantity(units.parse_size_bytes, units.size_text)

#: An integer, boolean or number by expression, alone or per rank: Expression | PerRank of Expression.
Expr = Annotated[Any, *_field(per_rank(expression), _with_per_rank(NUMBER_OR_EXPRESSION))]
#: A list of expressions, alone or per rank: tuple of Expression | PerRank of tuples.
ExprList = Annotated[Any, *_field(per_rank(_listed(expression)), _with_per_rank({"type": "array"}))]
#: Ref | Inline.
TensorField = Annotated[Any, *_field(tensor, _TENSOR)]
#: Ref | Inline, or a tuple of them: a list argument of torch, part by part.
TensorList = Annotated[Any, *_field(many(tensor), {"anyOf": [_TENSOR, {"type": "array", "items": _TENSOR}]})]
#: A tuple of Refs.
RefList = Annotated[Any, *_field(_listed(ref), {"type": "array", "items": _TEXT})]
#: Ref of a handle to bind.
HandleField = Annotated[Any, *_field(ref, _TEXT)]
#: Ref, or a tuple of Refs; ``all`` is Ref("all").
WaitField = Annotated[Any, *_field(many(ref), {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]})]
#: int nanoseconds | PerRank of them.
DurationField = Annotated[Any, *_field(_duration, _with_per_rank(_TEXT), _write_duration)]
_timeout, _ = _quantity(units.parse_timeout_ns, units.duration_text)
#: The same, and not zero.
TimeoutField = Annotated[Any, *_field(_timeout, _with_per_rank(_TEXT), _write_duration)]
#: int bytes | PerRank of them.
SizeField = Annotated[Any, *_field(_size, _with_per_rank(_TEXT), _write_size)]


def _amount(parse_one: Callable[[str], Any], expected: str) -> Callable[[Any], Any]:
    """A quantity with its unit, or an expression that counts; a bare number is refused."""

    def parse_any(value: Any) -> Any:
        if isinstance(value, Expression):
            return value
        if isinstance(value, str):
            try:
                return parse_one(value)
            except ValueError as wrong_unit:
                try:
                    found = expression(value)
                except ValueError:
                    raise wrong_unit from None
            if not _is_number(value):
                return found
        raise _wrong(expected, value)

    return per_rank(parse_any)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _write_amount(text: Callable[[Any], str]) -> Callable[[Any], Any]:
    def write(value: Any) -> Any:
        if isinstance(value, PerRank):
            entries = {rank: write(v) for rank, v in value.entries}
            return entries if value.default is None else {**entries, "else": write(value.default)}
        return plain(value) if isinstance(value, Expression) else text(value)

    return write


_flops = _amount(units.parse_flops, "a count with its unit, as `2 TFLOP`, or an expression, as `2 * width * width`")
_bytes = _amount(units.parse_size_bytes, "a size with its unit, as `4 MiB`, or an expression, as `4 * width`")
#: float FLOP | Expression (a count of FLOP) | PerRank of them.
FlopsField = Annotated[Any, *_field(_flops, _with_per_rank(_TEXT), _write_amount(units.flops_text))]
#: int bytes | Expression (a count of bytes) | PerRank of them.
AmountField = Annotated[Any, *_field(_bytes, _with_per_rank(_TEXT), _write_amount(units.size_text))]


def _value(value: Any) -> Any:
    """A number or expression, or a (nested) list of them."""
    return each(_value, value) if isinstance(value, (list, tuple)) else expression(value)


#: Expression | nested tuple of Expressions | PerRank of either: the numbers of a tensor.
ValueField = Annotated[Any, *_field(per_rank(_value), {})]


def _group(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value.isidentifier():
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, str) and v.isidentifier() for v in value):
        return tuple(value)
    raise _wrong("a group's name, a mesh axis, or a list of axes", value)


#: A group's or axis' name, or a tuple of axes (the flattened sub-mesh).
GroupField = Annotated[Any, *_field(_group, {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]})]


def _ranks(value: Any) -> Any:
    """A selector: an integer or a list names ranks, a string is an expression that must be true or false."""
    if isinstance(value, bool):
        raise _wrong("a rank, a list of ranks, or a condition in quotes", value)
    if isinstance(value, int):
        return (value,)
    if isinstance(value, (list, tuple)):
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise _wrong("a list of ranks (integers)", value)
        return tuple(value)
    if isinstance(value, str):
        return expression(value)
    if isinstance(value, Expression):
        return value
    raise _wrong("a rank, a list of ranks, or a condition as `stage == 0`", value)


_SELECTOR = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}, _TEXT]}
#: Selector: a tuple of ranks | Expression; None (left out) selects all.
SelectorField = Annotated[Any, *_field(_ranks, _SELECTOR)]


def _reduce_op(value: Any) -> str:
    if value in REDUCE_OPS:
        return str(value)
    from distsim.names import near

    hint = "; torch calls it avg" if value in ("mean", "average") else near(value, REDUCE_OPS)
    raise ValueError(f"expected a reduce op ({', '.join(REDUCE_OPS)}), found {_show(value)}{hint}")


#: A name of torch.distributed.ReduceOp, lower case.
ReduceOpField = Annotated[str, *_field(_reduce_op, {"enum": list(REDUCE_OPS)})]
DtypeField = Annotated[str, *_field(dtype, {"enum": list(DTYPE_BYTES)})]
