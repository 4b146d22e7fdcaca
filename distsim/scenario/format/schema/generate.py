"""The JSON Schema of scenario files, for editors: from the models and the table of operations.

Key idea: the key of an entry decides its form, so each operation is a property with a definition of
its own. An editor then shows that operation's fields, rather than all forms of entries. torch's own
name of a field is a property that no value fits, whose error text (`errorMessage`, which VS Code's
language services read) is the name in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from distsim.common import units
from distsim.common.field_parsing import FieldSchema
from distsim.hardware.cluster import PRESETS
from distsim.operations.core.field_schemas import SCHEMA_DEFINITIONS
from distsim.operations.core.field_types import (
    DTYPE_SCHEMA,
    SELECTOR_SCHEMA,
    TENSOR_SCHEMA,
    VALUE_SCHEMA,
)
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.torch_arguments import torch_argument_names
from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS
from distsim.scenario.format.models.base_model import FormatModel
from distsim.scenario.format.models.expectations import OTHER_RANKS, DurationBounds
from distsim.scenario.format.models.top_level import (
    BATCH_OPS,
    SECTION_MODELS,
    BlockFields,
    RepeatFields,
    ScenarioFileFields,
)
from distsim.scenario.format.schema.cluster import CLUSTER_MODELS, cluster_schema
from distsim.scenario.format.schema.constraints import constraints_of, entry_constraints
from distsim.scenario.strategies import STRATEGIES
from distsim.scenario.strategies.base import Strategy

#: A part of the JSON schema, which grows.
JsonSchema = dict[str, Any]

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
#: The schema's name, independent of where a copy of it is kept. The number grows when files that
#: were valid become invalid.
SCHEMA_ID = "urn:distsim:scenario:1"
_QUANTITY_WRITERS = {"size": units.size_text, "duration": units.duration_text}
_EXPECTED_SCHEMA: FieldSchema = {
    "anyOf": [
        {"type": "number"},
        {"type": "boolean"},
        {"const": "?"},
        {"type": "array", "items": {"$ref": "#/$defs/expected"}},
    ]
}
_PER_RANK_SCHEMA = {
    "type": "object",
    "minProperties": 1,
    "propertyNames": {"pattern": "^([0-9]+|else)$"},
}


@cache
def _build_schema() -> JsonSchema:
    definitions: JsonSchema = {
        "selector": SELECTOR_SCHEMA,
        **SCHEMA_DEFINITIONS,
        "tensor": TENSOR_SCHEMA,
        "dtype": DTYPE_SCHEMA,
        "value": VALUE_SCHEMA,
        "expected": _EXPECTED_SCHEMA,
        "numbers": {
            "anyOf": [
                {"$ref": "#/$defs/expected"},
                {
                    **_PER_RANK_SCHEMA,
                    "propertyNames": {"pattern": f"^([0-9]+|{OTHER_RANKS})$"},
                    "additionalProperties": {"$ref": "#/$defs/expected"},
                },
            ]
        },
        "preset": {"enum": list(PRESETS)},
        "cluster": cluster_schema(),
        **{name: cluster_schema(name) for name in CLUSTER_MODELS},
    }
    parts: list[type[FormatModel]] = [*SECTION_MODELS.values(), DurationBounds]
    for part in parts:
        definitions[part.__name__] = _with_constraints(_model_schema(part), part.__name__)
    definitions |= {"entry": _entry_schema(), "message": _batch_entry_schema()}
    definitions |= {
        _fields_definition(op): _operation_schema(row) for op, row in OPERATIONS.items()
    }
    definitions |= {
        _fields_definition(name): _strategy_schema(row, definitions)
        for name, row in STRATEGIES.items()
    }
    whole = {
        "$schema": SCHEMA_DIALECT,
        "$id": SCHEMA_ID,
        "title": "distsim scenario",
        **_model_schema(ScenarioFileFields),
    }
    return _with_references({**whole, "$defs": dict(sorted(definitions.items()))})  # type: ignore[no-any-return]


def scenario_schema() -> JsonSchema:
    """The JSON Schema (draft 2020-12) of a scenario file.

    It cannot check names of groups, tensors, handles and variables.
    """
    return dict(_build_schema())


class _SchemaGenerator(GenerateJsonSchema):
    """Omits defaults that are expressions, without a warning."""

    ignored_warning_kinds: ClassVar[set[JsonSchemaWarningKind]] = {  # type: ignore[misc]
        "skipped-choice",
        "non-serializable-default",
    }


def _model_schema(model: type[BaseModel], definitions: JsonSchema | None = None) -> JsonSchema:
    """A model's schema, with hover texts.

    The models inside it are added to ``definitions``; without it, they must be there already.
    """
    found = model.model_json_schema(
        ref_template="#/$defs/{model}", schema_generator=_SchemaGenerator
    )
    inner = found.pop("$defs", {})
    if definitions is not None:
        definitions.update(inner)
    found.pop("title", None)
    for key, property in found.get("properties", {}).items():
        property.pop("title", None)
        _write_default(property)
        if "description" in property:
            property["description"] = hover_text(key, property)
    return found


def _write_default(property: JsonSchema) -> None:
    """The default in the form of a file: none for None, quantities with their units."""
    if "default" not in property:
        return
    default, write = property["default"], _QUANTITY_WRITERS.get(property.get("x-def", ""))
    if default is None:
        del property["default"]
    elif write is not None and type(default) is int:
        property["default"] = write(default)


def hover_text(key: str, property: Mapping[str, Any]) -> str:
    """The text that an editor shows over a key: the sentence, the default, an example."""
    lines = [property["description"]]
    if property.get("default", "") not in ("", [], {}):
        lines.append(f"Default: {inline_yaml(property['default'])}.")
    if property.get("examples"):
        lines.append(f"Example: `{key}: {inline_yaml(property['examples'][0])}`")
    return "\n".join(lines)


def inline_yaml(value: object) -> str:
    """A value in the form of a file, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {inline_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline_yaml, value)) + "]"
    return str(value)


def _with_references(value: Any) -> Any:
    """The schema with `x-def` and `x-model`, the names of definitions, replaced by references."""
    if isinstance(value, list):
        return [_with_references(item) for item in value]
    if not isinstance(value, dict):
        return value
    name = value.get("x-def") or value.get("x-model")
    rest = {
        key: _with_references(item)
        for key, item in value.items()
        if key not in ("x-def", "x-model")
    }
    return {"$ref": f"#/$defs/{name}", **rest} if isinstance(name, str) else rest


def _with_constraints(found: dict[str, object], name: str) -> dict[str, object]:
    """The schema with the constraints between its keys."""
    return {**found, **constraints_of(name)}


def _fields_definition(name: str) -> str:
    return f"{name}_fields"


def _entry_schema() -> JsonSchema:
    """An entry: a bare name, or a mapping.

    A mapping has one operation, strategy, repeat or list of steps, and optionally `ranks`.
    """
    words = [*OPERATIONS, *OPERATION_ALIASES, *STRATEGIES]
    bare = sorted(name for name in words if not _has_required_field(name))
    block, repeat = _model_schema(BlockFields), _model_schema(RepeatFields)
    properties: JsonSchema = {
        name: {"$ref": f"#/$defs/{_fields_definition(OPERATION_ALIASES.get(name, name))}"}
        for name in words
    }
    properties |= {"repeat": repeat, **block["properties"]}
    mapping = {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        **entry_constraints(),
    }
    return {"if": {"type": "string"}, "then": {"enum": bare}, "else": mapping}


def _batch_entry_schema() -> dict[str, object]:
    """An entry of a batch."""
    properties = {
        **{name: {"$ref": f"#/$defs/{_fields_definition(name)}"} for name in BATCH_OPS},
        "ranks": {"$ref": "#/$defs/selector"},
    }
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        **entry_constraints(),
    }


def _has_required_field(name: str) -> bool:
    """Whether an operation or a strategy cannot be written without fields."""
    row: type[BaseModel]
    if name in STRATEGIES:
        row = STRATEGIES[name]
    else:
        row = OPERATIONS[OPERATION_ALIASES.get(name, name)]
    return any(info.is_required() for info in row.model_fields.values())


def _operation_schema(row: type[Operation]) -> JsonSchema:
    """An operation's fields."""
    mapping = _model_schema(row)
    mapping["description"] = row.words.signature
    if row.kind == "batch":
        mapping["properties"]["ops"] |= {"items": {"x-def": "message"}}
    for name, field in torch_argument_names(row.op, set(mapping["properties"])).items():
        mapping["properties"][name] = _torch_name_schema(row.op, name, field)
    return _with_alternatives(_with_constraints(mapping, row.op), row.first_field)


def _torch_name_schema(op: str, name: str, field: str) -> dict[str, object]:
    """A name of torch that no value fits; editors show ``field``, the name in a file."""
    if field:
        message = f"unknown field {name} in {op}; did you mean {field}?"
    else:
        message = f"torch's {name} has no counterpart in {op}; remove it"
    return {
        "not": {},
        "errorMessage": message,
        "deprecationMessage": message,
        "doNotSuggest": True,
        "description": message,
    }


def _strategy_schema(row: type[Strategy], definitions: JsonSchema) -> JsonSchema:
    """A training strategy's fields; models inside them are added to the definitions."""
    mapping = {**_model_schema(row, definitions), "description": row.about}
    mapping["properties"] |= {
        key: _with_short_form(key, property)
        for key, property in mapping["properties"].items()
        if key in _FIELDS_WITH_SHORT_FORM
    }
    return _with_alternatives(mapping, row.first_field)


#: Fields of strategies that have a short form.
_FIELDS_WITH_SHORT_FORM = ("layers", "model")


def _with_short_form(key: str, property: dict[str, object]) -> dict[str, object]:
    """One layer in place of a list of them, a preset's name in place of a model."""
    help_keys: dict[str, object] = {
        word: property.pop(word) for word in ("description", "examples") if word in property
    }
    if property.get("type") == "array":
        return {"anyOf": [{**property, "minItems": 1}, property["items"]], **help_keys}
    if key == "model":
        return {"anyOf": [{"type": "string"}, property], **help_keys}
    return {**property, **help_keys}


def _with_alternatives(mapping: JsonSchema, first_field: str | None) -> JsonSchema:
    """The forms of a step: its fields as a mapping, the first field's value alone, or nothing.

    Nothing is allowed only if no field is required.
    """
    others: list[Any] = []
    if first_field:
        first = {
            key: value
            for key, value in mapping["properties"][first_field].items()
            if key not in ("default", "examples")
        }
        others.append(first)
    if not mapping.get("required") and not mapping.get("oneOf"):
        others.append({"type": "null"})
    by_rank = {"not": _PER_RANK_SCHEMA} if first_field else {}
    return {
        "if": {"type": "object", **by_rank},
        "then": mapping,
        "else": {"anyOf": others} if others else {"type": "object"},
    }


__all__ = ["SCHEMA_DIALECT", "SCHEMA_ID", "hover_text", "scenario_schema", "inline_yaml"]
