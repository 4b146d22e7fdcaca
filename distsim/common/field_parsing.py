"""Parsers of what may stand in a file's fields, and the errors that know their way into it.

A parser takes what YAML gives and returns what is meant, or raises ValueError with a sentence. They
are put together here (`each`, `listed`, `many`, `per_rank`, `FieldErrorCollector`); which fields
there are say `distsim.operations.core.field_types`, `distsim.scenario.strategies.field_types` and
`distsim.scenario.format.models.scalars`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar, cast

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from distsim.common.expressions import Expression, parse_expression
from distsim.common.message_text import did_you_mean
from distsim.common.records import dataclass

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
FieldParser = Callable[[object], T]
#: A JSON schema, as far as fields have one.
FieldSchema = dict[str, object]


@dataclass(frozen=True, slots=True)
class PerRank(Generic[T_co]):
    """``{0: …, 1: …, else: …}``: keys are global ranks; ``default`` is ``else``'s value, None when
    it is left out.
    """

    entries: tuple[tuple[int, T_co], ...]
    default: T_co | None = None

    def get(self, rank: int) -> T_co | None:
        """The entry of a rank, `else`'s value, or None when there is neither."""
        return dict(self.entries).get(rank, self.default)

    def written(self, write: Callable[[T_co], object]) -> dict[int | str, object]:
        """Back to what a file would say, each value by ``write``."""
        entries: dict[int | str, object] = {rank: write(value) for rank, value in self.entries}
        return entries if self.default is None else {**entries, "else": write(self.default)}


class ParsedFieldType:
    """What Annotated needs behind a field's type: its parser, its JSON schema, and how a file would
    say a value.

    As Pydantic's PlainValidator, PlainSerializer and WithJsonSchema together, but it makes no
    schema of the type, which nobody asks for: half of what a model costs. ``func`` is the parser;
    ``told``: it also takes the validation's info.
    """

    def __init__(
        self,
        parse: Callable[..., object],
        schema: FieldSchema,
        write: Callable[[Any], object],
        told: bool = False,
    ) -> None:
        self.func, self.schema, self.write, self.told = parse, schema, write, told

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(self.write)
        if self.told:
            return core_schema.with_info_plain_validator_function(self.func, serialization=written)
        return core_schema.no_info_plain_validator_function(self.func, serialization=written)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return dict(self.schema)


# --- what fields mean ---


class FieldHelp(NamedTuple):
    """What a field means, in a sentence, and a value that it may have. ``unit``: of a bare
    number.
    """

    about: str
    example: object
    unit: str = ""


def describe_fields(model: type[BaseModel], words: Mapping[str, FieldHelp], name: str) -> None:
    """Give the fields of a model their descriptions: those of ``name.key``, else of the key alone,
    as the file has it.

    A field that says it itself (`Field(description=…, examples=[…])`) keeps that, unless its parent
    said it.
    """
    for key, info in model.model_fields.items():
        written = info.alias or key
        told = words.get(f"{name}.{written}") or (None if info.description else words.get(written))
        if told is None:
            continue
        info.description, info.examples = told.about, [told.example]
        if told.unit:
            extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
            info.json_schema_extra = {**extra, "x-unit": told.unit}


# --- errors ---


class FieldError(ValueError):
    """A field's error that knows its way: ``path`` from the field to the culprit, ``offset`` into
    its text (None: not known).
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


def single_errors(error: ValueError) -> tuple[ValueError, ...]:
    """The single errors behind a field parser's error."""
    return error.errors if isinstance(error, FieldErrors) else (error,)


def value_text(value: object) -> str:
    """A value at the end of a message, never long."""
    text = (
        "nothing"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else repr(value)
    )
    return text if len(text) <= 60 else text[:57] + "..."


def expected_error(expected: str, value: object) -> ValueError:
    return ValueError(f"expected {expected}, found {value_text(value)}")


# --- parsers out of parsers ---


class FieldErrorCollector:
    """Parses the parts of a container one by one, so that one wrong part hides no other."""

    def __init__(self) -> None:
        self.errors: list[FieldError] = []

    def take(self, part: str | int, parse_one: FieldParser[T], value: object) -> T:
        """The parsed value. Where it can't be parsed the error is kept, and `done` raises before
        anybody looks at what came back.
        """
        try:
            return parse_one(value)
        except ValueError as error:
            for one in single_errors(error):
                self.errors.append(
                    FieldError(
                        str(one), (part, *getattr(one, "path", ())), getattr(one, "offset", None)
                    )
                )
            return cast("T", None)

    def done(self) -> None:
        """Raises FieldErrors if there was any."""
        if self.errors:
            raise FieldErrors(tuple(self.errors))


def parse_each(parse_one: FieldParser[T], values: Iterable[object]) -> tuple[T, ...]:
    """Every item parsed; an error knows which item."""
    gather = FieldErrorCollector()
    found = tuple([gather.take(k, parse_one, value) for k, value in enumerate(values)])
    gather.done()
    return found


def list_of(parse_one: FieldParser[T]) -> FieldParser[tuple[T, ...]]:
    """A list of such values."""

    def parse_any(value: object) -> tuple[T, ...]:
        if not isinstance(value, (list, tuple)):
            raise expected_error("a list", value)
        return parse_each(parse_one, value)

    return parse_any


def one_or_list_of(parse_one: FieldParser[T]) -> FieldParser[T | tuple[T, ...]]:
    """One value, or a list of them."""

    def parse_any(value: object) -> T | tuple[T, ...]:
        return (
            parse_each(parse_one, value) if isinstance(value, (list, tuple)) else parse_one(value)
        )

    return parse_any


def _invalid_rank_key(key: object) -> None:
    raise expected_error("a rank or `else` as the key of a per-rank mapping", key)


def per_rank(parse_one: FieldParser[T]) -> FieldParser[T | PerRank[T]]:
    """Let ``parse_one`` also take a mapping of ranks to values."""

    def parse_any(value: object) -> T | PerRank[T]:
        if not isinstance(value, Mapping):
            return value if isinstance(value, PerRank) else parse_one(value)
        gather, default = FieldErrorCollector(), None
        entries: list[tuple[int, T]] = []
        for key, item in value.items():
            if key == "else":
                default = gather.take(key, parse_one, item)
            elif isinstance(key, int) and not isinstance(key, bool) and key >= 0:
                entries.append((key, gather.take(key, parse_one, item)))
            else:
                gather.take(key, _invalid_rank_key, key)
        gather.done()
        if not entries and default is None:
            raise ValueError(
                "expected at least one rank or `else` in a per-rank mapping, found none"
            )
        return PerRank(tuple(entries), default)

    return parse_any


def one_of(expected: str, words: Iterable[str]) -> FieldParser[str]:
    """One word out of a few."""
    known = tuple(words)

    def parse_word(value: object) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError(
                f"expected {expected} ({', '.join(known)}), found {value_text(value)}{did_you_mean(value, known)}"
            )
        return value

    return parse_word


def expression_field(value: object) -> Expression:
    if isinstance(value, Expression):
        return value
    if isinstance(value, (bool, int, float, str)):
        return parse_expression(value)
    raise expected_error("a number or an expression", value)
