"""Building blocks for parsers of scenario fields, and errors that carry the path to the wrong part.

A parser takes a value as YAML delivers it and returns the parsed value, or raises ValueError with a
sentence. This module combines parsers (`parse_each`, `list_of`, `one_or_list_of`, `per_rank`,
`FieldErrorCollector`). It does not define any field type: see
`distsim.operations.core.field_types`, `distsim.scenario.strategies.field_types` and
`distsim.scenario.format.models.scalars`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar, cast

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from distsim.common.expressions import Expression, parse_expression
from distsim.common.message_text import unknown_value_text, value_text
from distsim.common.records import dataclass

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
FieldParser = Callable[[object], T]
#: The JSON schema of a field.
FieldSchema = dict[str, object]


@dataclass(frozen=True, slots=True)
class PerRank(Generic[T_co]):
    """A value per rank: ``{0: …, 1: …, else: …}``.

    Keys are global ranks. ``default`` is the value of ``else``, or None if there is no ``else``.
    """

    entries: tuple[tuple[int, T_co], ...]
    default: T_co | None = None

    def get(self, rank: int) -> T_co | None:
        """The entry of the rank; else the value of ``else``; else None."""
        return dict(self.entries).get(rank, self.default)

    def written(
        self, write: Callable[[T_co], object], default_key: str = "else"
    ) -> dict[int | str, object]:
        """The mapping as a file has it; ``write`` converts each value."""
        entries: dict[int | str, object] = {rank: write(value) for rank, value in self.entries}
        return entries if self.default is None else {**entries, default_key: write(self.default)}


class ParsedFieldType:
    """Annotation of a field type: its parser, its JSON schema, and how to write a value to a file.

    Combines Pydantic's PlainValidator, PlainSerializer and WithJsonSchema, but does not build the
    core schema of the annotated type. Nothing needs that schema, and building it takes half of the
    time to define a model. ``func`` is the parser; ``takes_info`` means that the parser also takes
    Pydantic's ValidationInfo.
    """

    def __init__(
        self,
        parse: Callable[..., object],
        schema: FieldSchema,
        write: Callable[[Any], object],
        takes_info: bool = False,
    ) -> None:
        self.func, self.schema, self.write, self.takes_info = parse, schema, write, takes_info

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(self.write)
        if self.takes_info:
            return core_schema.with_info_plain_validator_function(self.func, serialization=written)
        return core_schema.no_info_plain_validator_function(self.func, serialization=written)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return dict(self.schema)


# --- descriptions of fields ---


class FieldHelp(NamedTuple):
    """The meaning of a field in one sentence, and an example value.

    ``unit`` is the unit of a number that is written without one.
    """

    about: str
    example: object
    unit: str = ""


def describe_fields(model: type[BaseModel], words: Mapping[str, FieldHelp], name: str) -> None:
    """Set the descriptions of a model's fields.

    The help for ``name.key`` has priority over the help for ``key`` alone; keys are written as in
    the file. A field with a description of its own (`Field(description=…, examples=[…])`) keeps it
    unless there is help for ``name.key``.
    """
    for key, info in model.model_fields.items():
        written = info.alias or key
        general_help = None if info.description else words.get(written)
        field_help = words.get(f"{name}.{written}") or general_help
        if field_help is None:
            continue
        info.description = field_help.about
        info.examples = [field_help.example]
        if field_help.unit:
            extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
            info.json_schema_extra = {**extra, "x-unit": field_help.unit}


# --- errors ---


class FieldError(ValueError):
    """An error of a field with its position.

    ``path`` leads from the field to the wrong part; ``offset`` is the position in that part's text
    (None: unknown).
    """

    def __init__(
        self, message: str, path: tuple[str | int, ...] = (), offset: int | None = None
    ) -> None:
        super().__init__(message, path, offset)
        self.message = message
        self.path = path
        self.offset = offset

    def __str__(self) -> str:
        return self.message

    @classmethod
    def further(cls, error: ValueError, characters: int) -> FieldError:
        """The same error, for a text that starts ``characters`` characters earlier."""
        offset = getattr(error, "offset", None)
        return cls(str(error), (), None if offset is None else offset + characters)


class FieldErrors(ValueError):
    """Several errors of one field."""

    def __init__(self, errors: tuple[FieldError, ...]) -> None:
        super().__init__(errors)
        self.errors = errors

    def __str__(self) -> str:
        return "; ".join(str(error) for error in self.errors)


def single_errors(error: ValueError) -> tuple[ValueError, ...]:
    """The single errors behind a field parser's error."""
    return error.errors if isinstance(error, FieldErrors) else (error,)


def expected_error(expected: str, value: object) -> ValueError:
    """The error for a value of the wrong kind: what was expected, and what was found."""
    return ValueError(f"expected {expected}, found {value_text(value)}")


# --- combinations of parsers ---


class FieldErrorCollector:
    """Parses the parts of a container one by one, so that one wrong part hides no other."""

    def __init__(self) -> None:
        self.errors: list[FieldError] = []

    def take(self, part: str | int, parse_one: FieldParser[T], value: object) -> T:
        """The parsed value of one part.

        On failure the errors are collected and the result is None; `done` raises before any caller
        uses that result.
        """
        try:
            return parse_one(value)
        except ValueError as error:
            for single in single_errors(error):
                path = (part, *getattr(single, "path", ()))
                offset = getattr(single, "offset", None)
                self.errors.append(FieldError(str(single), path, offset))
            return cast("T", None)

    def done(self) -> None:
        """Raise FieldErrors if there was any error."""
        if self.errors:
            raise FieldErrors(tuple(self.errors))


def parse_each(parse_one: FieldParser[T], values: Iterable[object]) -> tuple[T, ...]:
    """All items parsed; the path of an error starts with the item's index."""
    collector = FieldErrorCollector()
    parsed = tuple([collector.take(k, parse_one, value) for k, value in enumerate(values)])
    collector.done()
    return parsed


def list_of(parse_one: FieldParser[T]) -> FieldParser[tuple[T, ...]]:
    """A parser of lists of values that ``parse_one`` accepts."""

    def parse_any(value: object) -> tuple[T, ...]:
        if not isinstance(value, (list, tuple)):
            raise expected_error("a list", value)
        return parse_each(parse_one, value)

    return parse_any


def one_or_list_of(parse_one: FieldParser[T]) -> FieldParser[T | tuple[T, ...]]:
    """A parser of one value or a list of values."""

    def parse_any(value: object) -> T | tuple[T, ...]:
        if isinstance(value, (list, tuple)):
            return parse_each(parse_one, value)
        return parse_one(value)

    return parse_any


def per_rank(parse_one: FieldParser[T], default_key: str = "else") -> FieldParser[T | PerRank[T]]:
    """A parser that accepts what ``parse_one`` does, and also a mapping from ranks to values.

    ``default_key`` is the key for the value of all other ranks.
    """

    def refuse_key(key: object) -> None:
        if key == "else":
            raise ValueError(f"the key `else` has a new name: write `{default_key}`")
        raise expected_error(f"a rank or `{default_key}` as the key of a per-rank mapping", key)

    def parse_any(value: object) -> T | PerRank[T]:
        if not isinstance(value, Mapping):
            return value if isinstance(value, PerRank) else parse_one(value)
        gather, default = FieldErrorCollector(), None
        entries: list[tuple[int, T]] = []
        for key, item in value.items():
            if key == default_key:
                default = gather.take(key, parse_one, item)
            elif isinstance(key, int) and not isinstance(key, bool) and key >= 0:
                entries.append((key, gather.take(key, parse_one, item)))
            else:
                gather.take(key, refuse_key, key)
        gather.done()
        if not entries and default is None:
            raise ValueError(
                f"expected at least one rank or `{default_key}` in a per-rank mapping, found none"
            )
        return PerRank(tuple(entries), default)

    return parse_any


def one_of(words: Iterable[str]) -> FieldParser[str]:
    """A parser that accepts exactly these words."""
    known = tuple(words)

    def parse_word(value: object) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError(unknown_value_text(value, known))
        return value

    return parse_word


def expression_field(value: object) -> Expression:
    """The expression in a field: a number or a text. Raises ValueError."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, (bool, int, float, str)):
        return parse_expression(value)
    raise expected_error("a number or an expression", value)
