"""The JSON Schema of a cluster in a file, from the models of `distsim.hardware.cluster`.

The models count in ns and bytes; a file has quantities with units.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from distsim.common.field_parsing import FieldSchema
from distsim.hardware.cluster import (
    PRESETS,
    Cluster,
    ComputeDevice,
    IntraNodeLink,
    MeasuredCurve,
    Network,
    NetworkCards,
)
from distsim.operations.core.field_schemas import quantity_schema
from distsim.scenario.format.models.cluster_quantities import quantity_codec_of

#: The models inside a cluster, by the name of their definition. All their keys are optional there,
#: because a mapping may change single keys of a preset.
CLUSTER_MODELS: dict[str, type[BaseModel]] = {
    "Device": ComputeDevice,
    "Link": IntraNodeLink,
    "Nics": NetworkCards,
    "Network": Network,
    "Curve": MeasuredCurve,
}
#: The name of each model's definition in the schema.
DEFINITION_NAMES: dict[type[BaseModel], str] = {
    model: name for name, model in CLUSTER_MODELS.items()
}
_TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number"}
#: Attributes of Pydantic's constraints, and the keywords of JSON Schema.
_BOUND_KEYWORDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}
_PRESET_HELP = "Preset that provides the omitted keys."


def cluster_schema(name: str = "Cluster") -> dict[str, object]:
    """A cluster, or one model inside it. A cluster without `preset` needs all required keys."""
    model = CLUSTER_MODELS.get(name, Cluster)
    properties = {
        info.alias or key: _property_schema(info) for key, info in model.model_fields.items()
    }
    found: dict[str, object] = {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }
    if model is not Cluster:
        return found
    found["properties"] = {
        "preset": {"enum": list(PRESETS), "description": _PRESET_HELP},
        **properties,
    }
    return {**found, "if": {"required": ["preset"]}, "else": _required_keys(model)}


def _required_keys(model: type[BaseModel]) -> dict[str, object]:
    """The keys that a cluster without preset needs, at every depth."""
    required: list[str] = []
    nested: dict[str, object] = {}
    for key, info in model.model_fields.items():
        if info.is_required():
            required.append(info.alias or key)
        inner = _nested_model(info)
        if inner is not None:
            nested[key] = _required_keys(inner)
    found: dict[str, object] = {"required": required}
    if nested:
        found["properties"] = nested
    return found


def _nested_model(info: FieldInfo) -> type[BaseModel] | None:
    annotation = info.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _property_schema(info: FieldInfo) -> dict[str, object]:
    inner = _nested_model(info)
    help_keys: dict[str, object] = {
        "description": info.description or "",
        "examples": list(info.examples or ()),
    }
    if not info.is_required() and isinstance(info.default, str | bool):
        help_keys["default"] = info.default
    if inner is not None:
        return {"x-def": DEFINITION_NAMES[inner], **help_keys}
    return {**_value_schema(info.annotation, info.metadata), **help_keys}


def _value_schema(annotation: Any, metadata: list[Any]) -> FieldSchema:
    """The schema of a field's value, by its validators and its annotation."""
    codec = quantity_codec_of(metadata)
    if codec is not None:
        return quantity_schema(codec.kind)
    arguments: tuple[Any, ...] = getattr(annotation, "__args__", ())
    name = getattr(annotation, "__name__", "")
    if name == "dict":
        return {"type": "object", "additionalProperties": _annotated_schema(arguments[1])}
    if name == "tuple":
        return {"type": "array", "items": {"x-def": DEFINITION_NAMES[arguments[0]]}}
    if type(None) in arguments:
        return {"anyOf": [_annotated_schema(arguments[0]), {"type": "null"}]}
    if name == "Literal":
        return {"enum": list(arguments)}
    found: FieldSchema = {"type": _TYPE_NAMES[annotation]}
    for constraint in metadata:
        for attribute, keyword in _BOUND_KEYWORDS.items():
            if hasattr(constraint, attribute):
                found[keyword] = getattr(constraint, attribute)
    return found


def _annotated_schema(annotation: object) -> FieldSchema:
    plain = getattr(annotation, "__origin__", annotation)
    return _value_schema(plain, _flat_constraints(getattr(annotation, "__metadata__", ())))


def _flat_constraints(metadata: tuple[object, ...]) -> list[object]:
    """Constraints, including those inside `Field(…)`."""
    found: list[object] = []
    for item in metadata:
        found += item.metadata if isinstance(item, FieldInfo) else [item]
    return found
