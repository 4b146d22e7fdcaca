"""The base class of all sections of a scenario file, and parsers of mappings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from distsim.common.field_parsing import FieldErrorCollector, FieldParser, expected_error

T = TypeVar("T")


class FormatModel(BaseModel):
    """A mapping of the file. Frozen; unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        defer_build=True,
        arbitrary_types_allowed=True,
        populate_by_name=True,
    )

    def plain(self) -> dict[str, object]:
        """What a file would say: the keys that were given."""
        return self.model_dump(by_alias=True, exclude_unset=True)


def parse_name_key(value: object) -> str:
    """A key that must be a name. Raises ValueError."""
    if not isinstance(value, str):
        raise expected_error("a name", value)
    return value


def parse_mapping(value: object, what: str, parse: FieldParser[T]) -> Mapping[str, T]:
    """A mapping of names, with each value parsed by ``parse``.

    ``what``: the expected mapping, as messages word it.
    """
    if not isinstance(value, Mapping):
        raise expected_error(what, value)
    gather = FieldErrorCollector()
    for name in value:
        gather.take(name, parse_name_key, name)
    found = {name: gather.take(name, parse, given) for name, given in value.items()}
    gather.done()
    return found
