"""The JSON Schema of scenario files, for editors: from the models and the table of operations."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from distsim.ops.base import Op
from distsim.ops.fields import SELECTOR
from distsim.ops.table import ALIASES, OPS
from distsim.profiles import PROFILES
from distsim.scenario.parts import Expect, FaultDecl, GroupDecl, Launch, MemoryDecl, Options, TensorDecl, World
from distsim.scenario.scalars import MAX_WORLD
from distsim.scenario.steps import MAX_TIMES
from distsim.strategies import STRATEGIES

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NAME = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}
_VALUE = {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "string"}]}
_PER_RANK = {"type": "object", "propertyNames": {"pattern": "^([0-9]+|else)$"}}
_PARTS = (World, GroupDecl, TensorDecl, MemoryDecl, Options, Launch, FaultDecl, Expect)
_ENTRIES = {"type": "array", "items": {"$ref": "#/$defs/entry"}}


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a scenario file. Names of groups, tensors, handles and variables are beyond it."""
    definitions: dict[str, Any] = {"selector": _selector()}
    parts = {model.__name__: _model(model, definitions) for model in _PARTS}
    steps = [_step(name, definitions) for name in [*OPS, *ALIASES]]
    strategies = [_entry(name, _strategy(name, definitions)) for name in STRATEGIES]
    definitions["entry"] = {"anyOf": [_bare(), _block(), _repeat(), *steps, *strategies]}
    return {
        "$schema": DIALECT,
        "title": "distsim scenario",
        "type": "object",
        "required": ["world", "program"],
        "additionalProperties": False,
        "properties": _top(parts),
        "$defs": dict(sorted(definitions.items())),
    }


def _top(parts: dict[str, Any]) -> dict[str, Any]:
    def named(value: Any) -> dict[str, Any]:
        return {"type": "object", "propertyNames": _NAME, "additionalProperties": value}

    ranks = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    return {
        "name": {"type": "string"},
        "about": {"type": "string"},
        "world": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_WORLD}, parts["World"]]},
        "backend": {"enum": [*PROFILES]},
        "cluster": {"type": ["string", "object"], "description": "A preset, a file, or a cluster written out."},
        "mesh": named({"type": "integer", "minimum": 1}),
        "vars": named(_VALUE),
        "groups": named({"anyOf": [ranks, parts["GroupDecl"]]}),
        "tensors": named(parts["TensorDecl"]),
        "memory": named(parts["MemoryDecl"]),
        "program": _ENTRIES,
        "iterations": {"type": "integer", "minimum": 1, "maximum": MAX_TIMES},
        "options": parts["Options"],
        "launch": parts["Launch"],
        "faults": {"type": "array", "items": parts["FaultDecl"]},
        "seed": {"type": "integer", "minimum": 0},
        "jitter": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        "expect": parts["Expect"],
    }


class _Generator(GenerateJsonSchema):
    """Defaults that are expressions are left out without a warning."""

    ignored_warning_kinds: ClassVar[set[JsonSchemaWarningKind]] = {"skipped-choice", "non-serializable-default"}  # type: ignore[misc]


def _model(model: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    """A model's schema; the models inside it go to the definitions."""
    found = model.model_json_schema(ref_template="#/$defs/{model}", schema_generator=_Generator)
    definitions |= found.pop("$defs", {})
    if not issubclass(model, Op):
        return found
    found.pop("title", None)
    return found


def _selector() -> dict[str, Any]:
    return {"description": "Who: a rank, a list of ranks, or a condition.", **SELECTOR}


def _bare() -> dict[str, Any]:
    """Operations that need no field."""
    return {"enum": sorted(name for name, row in OPS.items() if not any(f.is_required() for f in row.model_fields.values()))}


def _block() -> dict[str, Any]:
    properties = {"ranks": {"$ref": "#/$defs/selector"}, "steps": _ENTRIES}
    return {"type": "object", "required": ["steps"], "additionalProperties": False, "properties": properties}


def _repeat() -> dict[str, Any]:
    body = {
        "type": "object",
        "required": ["times", "steps"],
        "additionalProperties": False,
        "properties": {
            "times": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}, _PER_RANK]},
            "index": _NAME,
            "steps": _ENTRIES,
        },
    }
    return _entry("repeat", body)


def _entry(name: str, body: Any) -> dict[str, Any]:
    properties = {name: body, "ranks": {"$ref": "#/$defs/selector"}}
    return {"type": "object", "required": [name], "additionalProperties": False, "properties": properties}


def _step(name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    row = OPS[ALIASES.get(name, name)]
    key = f"fields of {row.op}"
    if key not in definitions:
        definitions[key] = _fields(row, definitions)
    return _entry(name, {"$ref": f"#/$defs/{key.replace(' ', '%20')}"})


def _strategy(name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """A training strategy's fields; models inside them go to the definitions, each under its own name."""
    row = STRATEGIES[name]
    return _ways({**_model(row, definitions), "description": row.about}, row.first_field)


def _fields(row: type[Op], definitions: dict[str, Any]) -> dict[str, Any]:
    """An operation's fields."""
    mapping = _model(row, definitions)
    if row.kind == "batch":
        mapping["properties"]["ops"] = _ENTRIES
    mapping["description"] = row.words.signature
    return _ways(mapping, row.first_field)


def _ways(mapping: dict[str, Any], first_field: str | None) -> dict[str, Any]:
    """The fields as a mapping; alone, the first field's value; nothing, where no field is needed."""
    ways: list[Any] = [mapping]
    if first_field:
        ways.append(mapping["properties"][first_field])
    if not mapping.get("required"):
        ways.append({"type": "null"})
    return {"anyOf": ways} if len(ways) > 1 else mapping


__all__ = ["DIALECT", "schema"]
