"""The JSON Schema of scenario files, for editors: from the models and the table of operations.

An entry of a program is told apart by its key: each operation is a property, so that an editor speaks of that operation's fields and not
of all forms that an entry could have. Where torch calls a field otherwise, its name is a property that nothing fits, with the file's word
as the error's text (`errorMessage`, as VS Code's language services read it).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from distsim import units
from distsim.cluster import PRESETS
from distsim.fields import Schema
from distsim.ops.base import Op
from distsim.ops.fields import DTYPES, SELECTOR, TENSOR, VALUE
from distsim.ops.patterns import DEFINITIONS
from distsim.ops.table import ALIASES, OPS
from distsim.ops.words import torch_names
from distsim.scenario.cluster_form import CLUSTER_MODELS, cluster_schema
from distsim.scenario.form import IN_A_BATCH, PARTS, Block, File, Repeat
from distsim.scenario.part import Part
from distsim.scenario.parts import Bounds
from distsim.scenario.shapes import entry_shape, shape_of
from distsim.strategies import STRATEGIES
from distsim.strategies.base import Strategy

#: A part of the JSON schema, which grows.
Json = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
#: What the schema is called, wherever a copy of it lies; the number grows where a file that was valid no longer is.
ID = "urn:distsim:scenario:1"
_TEXTS = {"size": units.size_text, "duration": units.duration_text}
_NUMBERS: Schema = {
    "anyOf": [{"type": "number"}, {"type": "boolean"}, {"const": "?"}, {"type": "array", "items": {"$ref": "#/$defs/expected"}}]
}
_BY_RANK = {"type": "object", "minProperties": 1, "propertyNames": {"pattern": "^([0-9]+|else)$"}}


@cache
def _made() -> Json:
    definitions: Json = {
        "selector": SELECTOR,
        **DEFINITIONS, "tensor": TENSOR, "dtype": DTYPES, "value": VALUE, "expected": _NUMBERS,
        "numbers": {"anyOf": [{"$ref": "#/$defs/expected"}, {**_BY_RANK, "additionalProperties": {"$ref": "#/$defs/expected"}}]},
        "preset": {"enum": list(PRESETS)}, "cluster": cluster_schema(),
        **{name: cluster_schema(name) for name in CLUSTER_MODELS},
    }  # fmt: skip
    parts: list[type[Part]] = [*PARTS.values(), Bounds]
    for part in parts:
        definitions[part.__name__] = _shaped(_model(part), part.__name__)
    definitions |= {"entry": _entry(), "message": _message()}
    definitions |= {_fields_of(op): _step(row) for op, row in OPS.items()}
    definitions |= {_fields_of(name): _strategy(row, definitions) for name, row in STRATEGIES.items()}
    whole = {"$schema": DIALECT, "$id": ID, "title": "distsim scenario", **_model(File)}
    return _linked({**whole, "$defs": dict(sorted(definitions.items()))})  # type: ignore[no-any-return]


def schema() -> Json:
    """The JSON Schema (draft 2020-12) of a scenario file. Names of groups, tensors, handles and variables are beyond it."""
    return dict(_made())


class _Generator(GenerateJsonSchema):
    """Defaults that are expressions are left out without a warning."""

    ignored_warning_kinds: ClassVar[set[JsonSchemaWarningKind]] = {"skipped-choice", "non-serializable-default"}  # type: ignore[misc]


def _model(model: type[BaseModel], definitions: Json | None = None) -> Json:
    """A model's schema, with hover texts; the models inside it go to the definitions, or stand there already."""
    found = model.model_json_schema(ref_template="#/$defs/{model}", schema_generator=_Generator)
    inner = found.pop("$defs", {})
    if definitions is not None:
        definitions.update(inner)
    found.pop("title", None)
    for key, property in found.get("properties", {}).items():
        property.pop("title", None)
        if property.get("default", 0) is None:
            del property["default"]
        if type(property.get("default")) is int and property.get("x-def") in _TEXTS:
            property["default"] = _TEXTS[property["x-def"]](property["default"])
        if "description" in property:
            property["description"] = hover(key, property)
    return found


def hover(key: str, property: Mapping[str, Any]) -> str:
    """What an editor shows over a key: the sentence, the default, an example."""
    more = [f"Default: {written(property['default'])}."] if property.get("default", "") not in ("", [], {}) else []
    more += [f"Example: `{key}: {written(example)}`" for example in property.get("examples", ())[:1]]
    return "\n".join([property["description"], *more])


def written(value: object) -> str:
    """A value as a file has it, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(written, value)) + "]"
    return str(value)


def _linked(value: Any) -> Any:
    """Names of definitions and models as references."""
    if isinstance(value, list):
        return [_linked(item) for item in value]
    if not isinstance(value, dict):
        return value
    name = value.get("x-def") or value.get("x-model")
    rest = {key: _linked(item) for key, item in value.items() if key not in ("x-def", "x-model")}
    return {"$ref": f"#/$defs/{name}", **rest} if isinstance(name, str) else rest


def _shaped(found: dict[str, object], name: str) -> dict[str, object]:
    """With what its keys ask of each other."""
    return {**found, **shape_of(name)}


def _fields_of(name: str) -> str:
    return f"{name}_fields"


def _entry() -> Json:
    """An entry: a bare word, or a mapping with one operation, strategy, repeat or list of steps, and `ranks` beside it."""
    words = [*OPS, *ALIASES, *STRATEGIES]
    bare = sorted(name for name in words if not _needed(name))
    block, repeat = _model(Block), _model(Repeat)
    properties: Json = {name: {"$ref": f"#/$defs/{_fields_of(ALIASES.get(name, name))}"} for name in words}
    properties |= {"repeat": repeat, **block["properties"]}
    mapping = {"type": "object", "additionalProperties": False, "properties": properties, **entry_shape()}
    return {"if": {"type": "string"}, "then": {"enum": bare}, "else": mapping}


def _message() -> dict[str, object]:
    """An entry of a batch."""
    properties = {**{name: {"$ref": f"#/$defs/{_fields_of(name)}"} for name in IN_A_BATCH}, "ranks": {"$ref": "#/$defs/selector"}}
    return {"type": "object", "additionalProperties": False, "properties": properties, **entry_shape()}


def _needed(name: str) -> bool:
    """Does it need a field?"""
    row: type[BaseModel] = OPS[ALIASES.get(name, name)] if name not in STRATEGIES else STRATEGIES[name]
    return any(info.is_required() for info in row.model_fields.values())


def _step(row: type[Op]) -> Json:
    """An operation's fields."""
    mapping = _model(row)
    mapping["description"] = row.words.signature
    if row.kind == "batch":
        mapping["properties"]["ops"] |= {"items": {"x-def": "message"}}
    for name, field in torch_names(row.op, set(mapping["properties"])).items():
        mapping["properties"][name] = _other_word(row.op, name, field)
    return _ways(_shaped(mapping, row.op), row.first_field)


def _other_word(op: str, name: str, field: str) -> dict[str, object]:
    """A name of torch that nothing fits; editors show the file's word."""
    said = (
        f"unknown field {name} in {op}; did you mean {field}?"
        if field
        else f"torch's {name} has no counterpart in {op}; leave it out"
    )
    return {"not": {}, "errorMessage": said, "deprecationMessage": said, "doNotSuggest": True, "description": said}


def _strategy(row: type[Strategy], definitions: Json) -> Json:
    """A training strategy's fields; models inside them go to the definitions, each under its own name."""
    mapping = {**_model(row, definitions), "description": row.about}
    mapping["properties"] |= {key: _short(key, property) for key, property in mapping["properties"].items() if key in _SHORT}
    return _ways(mapping, row.first_field)


#: Fields of strategies that take something shorter in place of what the model holds.
_SHORT = ("layers", "model")


def _short(key: str, property: dict[str, object]) -> dict[str, object]:
    """One layer for a list of them, a preset's name for a model."""
    said: dict[str, object] = {word: property.pop(word) for word in ("description", "examples") if word in property}
    if property.get("type") == "array":
        return {"anyOf": [{**property, "minItems": 1}, property["items"]], **said}
    return {"anyOf": [{"type": "string"}, property], **said} if key == "model" else {**property, **said}


def _ways(mapping: Json, first_field: str | None) -> Json:
    """The fields as a mapping; alone, the first field's value; nothing, where no field is needed."""
    others: list[Any] = []
    if first_field:
        first = {key: value for key, value in mapping["properties"][first_field].items() if key not in ("default", "examples")}
        others.append(first)
    if not mapping.get("required") and not mapping.get("oneOf"):
        others.append({"type": "null"})
    by_rank = {"not": _BY_RANK} if first_field else {}
    return {"if": {"type": "object", **by_rank}, "then": mapping, "else": {"anyOf": others} if others else {"type": "object"}}


__all__ = ["DIALECT", "ID", "hover", "schema", "written"]
