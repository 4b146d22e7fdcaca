"""Pydantic's errors in the words of a scenario file, each at its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from distsim.common.message_text import did_you_mean, name_list, value_text
from distsim.scenario.format.source.document import DataPath, ProblemCollector
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

    ``paths``: fields that stand elsewhere than under their own key; ``name``: what the mapping is
    called in messages; ``lenient``: keys that are not known were left out, so what is missing may
    be meant by them.
    """
    for error in errors.errors(include_url=False):
        loc, kind = tuple(error["loc"]), error["type"]
        inner = (
            ".".join((name, *(part for part in loc[:-1] if isinstance(part, str)))) if name else ""
        )
        called = f" in {inner}" if inner else ""
        where = (
            (*paths[str(loc[0])], *loc[1:])
            if paths and loc and str(loc[0]) in paths
            else (*path, *loc)
        )
        where = _path_as_written(problems, where)
        if lenient and (kind == "missing" or not loc):
            continue
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, ValueError):
            problems.error(where, cause)
        elif kind == "missing":
            problems.add(where[:-1], f"{inner or 'the mapping'} needs `{loc[-1]}`", at_key=True)
        elif kind == "extra_forbidden":
            keys = _keys_at(model, loc[:-1])
            problems.add(
                where,
                f"unknown key {loc[-1]}{called}; expected {name_list(keys, 16)}{did_you_mean(loc[-1], keys)}",
                at_key=True,
            )
        elif kind == "literal_error":
            problems.add(where, choice_error_text(error["ctx"]["expected"], error.get("input")))
        elif kind in ("model_type", "model_attributes_type"):
            problems.add(
                where,
                f"expected a mapping with {name_list(_keys_at(model, loc), 8)}, found {value_text(error.get('input'))}",
            )
        elif kind in _EXPECTED_TYPES:
            problems.add(
                where, f"expected {_EXPECTED_TYPES[kind]}, found {value_text(error.get('input'))}"
            )
        else:
            problems.add(where, str(error["msg"]))


def _path_as_written(problems: ProblemCollector, path: DataPath) -> DataPath:
    """The path without the numbers of items that stand alone, where a list is meant and one item is
    written.
    """
    value: Any = problems.document.root
    found: list[str | int] = []
    for part in path:
        if isinstance(part, int) and isinstance(value, Mapping) and part not in value:
            continue
        found.append(part)
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            value = None
    return tuple(found)


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
