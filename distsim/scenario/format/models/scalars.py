"""Plain field types of all sections of a scenario but its steps.

Each accepts what a person may mean (4.0 for 4), and refuses everything else in plain words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import ValidationInfo

from distsim.backends import BACKEND_PROFILES
from distsim.common import units
from distsim.common.field_parsing import ParsedFieldType, expected_error, one_of
from distsim.common.message_text import value_text
from distsim.common.quantities import read_quantity
from distsim.operations.core.field_schemas import quantity_schema
from distsim.operations.core.field_types import parse_each, to_plain_data


def integer(low: int, high: int, what: str = "an integer") -> Callable[[Any], int]:
    """Parser of an integer within bounds; 4.0 is 4, true is not an integer."""

    def parse(value: object) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            bounds = f" from {low} to {high}" if high < 2**53 else f" of at least {low}"
            raise expected_error(what + bounds, value)
        return value

    return parse


def number(value: Any) -> float:
    """A finite number of zero or more."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e15:
        raise expected_error("a number of zero or more", value)
    return value


def fraction(value: object) -> float:
    """A number from 0 to below 1. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise expected_error("a number from 0 to below 1, such as 0.1 for 10 %", value)
    return value


def text(value: Any) -> str:
    """A string. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(
            f"expected a string, found {value_text(value)}"
            + ("; quote it" if isinstance(value, int | float) else "")
        )
    return value


def flag(value: object) -> bool:
    """A boolean. Raises ValueError."""
    if not isinstance(value, bool):
        hint = "; YAML 1.2 uses true and false" if value in ("yes", "no", "on", "off") else ""
        raise ValueError(f"expected true or false, found {value_text(value)}{hint}")
    return value


def choice(*words: str) -> Callable[[object], str]:
    """Parser of one word out of a few."""
    return one_of(words)


def list_parser(
    parse_one: Callable[[object], object], what: str = "a list"
) -> Callable[[object], tuple[object, ...]]:
    """Parser of a list; an item's error knows which item."""

    def parse(value: object) -> tuple[object, ...]:
        if not isinstance(value, list | tuple):
            raise expected_error(what, value)
        return parse_each(parse_one, value)

    return parse


def parsed_by(
    parse: Callable[[Any], Any], schema: dict[str, Any], write: Callable[[Any], Any] = to_plain_data
) -> Any:
    """What Annotated needs after the type."""

    def lenient(value: object) -> object:
        return None if value is None else write(value)

    return (ParsedFieldType(parse, schema, lenient),)


_TEXT = {"type": "string"}
MAX_WORLD = 1_000_000

Text = Annotated[str, *parsed_by(text, _TEXT)]
Flag = Annotated[bool, *parsed_by(flag, {"type": "boolean"})]
Number = Annotated[float, *parsed_by(number, {"type": "number", "minimum": 0})]
Fraction = Annotated[
    float, *parsed_by(fraction, {"type": "number", "minimum": 0, "exclusiveMaximum": 1})
]
Count = Annotated[
    int, *parsed_by(integer(1, 10**6), {"type": "integer", "minimum": 1, "maximum": 10**6})
]
Natural = Annotated[int, *parsed_by(integer(0, 2**53), {"type": "integer", "minimum": 0})]
Rank = Annotated[
    int,
    *parsed_by(
        integer(0, MAX_WORLD, "a rank, an integer"),
        {"type": "integer", "minimum": 0, "maximum": MAX_WORLD},
    ),
]
Ranks = Annotated[
    tuple[int, ...],
    *parsed_by(
        list_parser(integer(0, MAX_WORLD, "a rank, an integer"), "a list of ranks"),
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_WORLD}},
    ),
]
Names = Annotated[
    tuple[str, ...],
    *parsed_by(list_parser(text, "a list of names"), {"type": "array", "items": _TEXT}),
]
Backend = Annotated[str, *parsed_by(choice(*BACKEND_PROFILES), {"enum": [*BACKEND_PROFILES]})]


def quantity_field(kind: str, least: int = 0) -> object:
    """The arguments of Annotated, after the type, for a quantity with one value for all ranks.

    It is written with its unit, or as an expression. The context of the validation has the known
    names (``names``), and what the quantities among them measure (``kinds``).
    """

    def parse(value: object, info: ValidationInfo) -> int:
        context = info.context or {}
        found = round(
            read_quantity(value, kind, context.get("names", {}), context.get("kinds", {}))
        )
        if found < least:
            raise ValueError(
                f"expected a timeout above zero, such as `10 s`, found {value_text(value)}"
            )
        return found

    write = units.size_text if kind == "a size" else units.duration_text
    return (
        ParsedFieldType(
            parse, quantity_schema(kind), lambda n: None if n is None else write(n), takes_info=True
        ),
    )


Duration = Annotated[int, *quantity_field("a duration")]
Timeout = Annotated[int, *quantity_field("a duration", least=1)]
Size = Annotated[int, *quantity_field("a size")]
