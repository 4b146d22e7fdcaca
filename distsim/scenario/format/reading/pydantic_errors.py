"""Pydantic's validation errors, reworded for a scenario file and placed in its text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from distsim.common.message_text import did_you_mean, name_list, value_text
from distsim.scenario.format.source.document import DataPath
from distsim.scenario.format.source.problems import ProblemCollector
from distsim.scenario.strategies.field_types import choice_error_text

_EXPECTED_TYPES = {
    "string_type": "a text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "invalid_key": "a text as the key",
}


def add_validation_errors(
    problems: ProblemCollector,
    errors: ValidationError,
    path: DataPath,
    model: type[BaseModel],
    paths: Mapping[str, DataPath] | None = None,
    name: str = "",
    lenient: bool = False,
) -> None:
    """Add every error of a model that was read from the mapping at ``path``.

    ``paths``: fields that are written elsewhere than under their own key. ``name``: the name of the
    mapping in messages. ``lenient``: unknown keys were removed before validation; they may be
    misspelt fields, so missing fields are not reported.
    """
    for error in errors.errors(include_url=False):
        location = tuple(error["loc"])
        if lenient and (error["type"] == "missing" or not location):
            continue
        where = (*path, *location)
        if paths and location and str(location[0]) in paths:
            where = (*paths[str(location[0])], *location[1:])
        _add_error(problems, error, _path_as_written(problems, where), model, name)


def _add_error(
    problems: ProblemCollector,
    error: ErrorDetails,
    where: DataPath,
    model: type[BaseModel],
    name: str,
) -> None:
    location, kind, found = tuple(error["loc"]), error["type"], error.get("input")
    inner_name = _inner_name(name, location)
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):  # raised by one of our own parsers
        problems.error(where, cause)
    elif kind == "missing":
        message = f"{inner_name or 'the mapping'} needs `{location[-1]}`"
        problems.add(where[:-1], message, at_key=True)
    elif kind == "extra_forbidden":
        keys = _keys_at(model, location[:-1])
        called = f" in {inner_name}" if inner_name else ""
        message = (
            f"unknown key {location[-1]}{called}; "
            f"expected {name_list(keys, 16)}{did_you_mean(location[-1], keys)}"
        )
        problems.add(where, message, at_key=True)
    elif kind == "literal_error":
        problems.add(where, choice_error_text(error["ctx"]["expected"], found))
    elif kind in ("model_type", "model_attributes_type"):
        keys = _keys_at(model, location)
        message = f"expected a mapping with {name_list(keys, 8)}, found {value_text(found)}"
        problems.add(where, message)
    elif kind in _EXPECTED_TYPES:
        problems.add(where, f"expected {_EXPECTED_TYPES[kind]}, found {value_text(found)}")
    else:
        problems.add(where, str(error["msg"]))


def _inner_name(name: str, location: tuple[int | str, ...]) -> str:
    """The name of the mapping that holds the value at ``location``: ``name`` and the keys to it."""
    if not name:
        return ""
    keys = [part for part in location[:-1] if isinstance(part, str)]
    return ".".join((name, *keys))


def _path_as_written(problems: ProblemCollector, path: DataPath) -> DataPath:
    """The path without the index of an item that is written alone, in place of a list of one."""
    value: Any = problems.document.root
    written: list[str | int] = []
    for part in path:
        if isinstance(part, int) and isinstance(value, Mapping) and part not in value:
            continue
        written.append(part)
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            value = None
    return tuple(written)


def _keys_at(model: type[BaseModel], loc: tuple[object, ...]) -> list[str]:
    """The keys of a model, or of the model that a field of it holds."""
    for part in loc:
        for name, info in model.model_fields.items():
            inner = _model_in(info.annotation)
            if part in (name, info.alias) and inner is not None:
                model = inner
    return [info.alias or name for name, info in model.model_fields.items()]


def _model_in(annotation: object) -> type[BaseModel] | None:
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
