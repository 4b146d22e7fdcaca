"""The form of a cluster in a file, as JSON Schema: from `distsim.hardware.cluster`'s models, in
people's units.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from distsim.common.field_parsing import FieldSchema, describe_fields
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
from distsim.scenario.format.models.field_help import FIELD_HELP

#: The models of a cluster file, by the name of their definition; those of a preset's changes need
#: no key.
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
describe_fields(Cluster, FIELD_HELP, "Cluster")
for _name, _model in CLUSTER_MODELS.items():
    describe_fields(_model, FIELD_HELP, _name)


def cluster_schema(name: str = "Cluster") -> dict[str, object]:
    """A cluster, or one part of it. Whole, it needs all its parts; with `preset` none."""
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
        "preset": {"enum": list(PRESETS), "description": FIELD_HELP["Cluster.preset"].about},
        **properties,
    }
    return {**found, "if": {"required": ["preset"]}, "else": _required_keys(model)}


def _required_keys(model: type[BaseModel]) -> dict[str, object]:
    """What a cluster that names no preset needs, at every depth."""
    needed = [info.alias or key for key, info in model.model_fields.items() if info.is_required()]
    parts = {
        key: inner
        for key, info in model.model_fields.items()
        if (inner := _nested_model(info)) is not None
    }
    return {"required": needed} | (
        {"properties": {key: _required_keys(part) for key, part in parts.items()}} if parts else {}
    )


def _nested_model(info: FieldInfo) -> type[BaseModel] | None:
    return (
        info.annotation
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
        else None
    )


def _property_schema(info: FieldInfo) -> dict[str, object]:
    part = _nested_model(info)
    said: dict[str, object] = {
        "description": info.description or "",
        "examples": list(info.examples or ()),
    }
    if not info.is_required() and isinstance(info.default, str | bool):
        said["default"] = info.default
    if part is not None:
        return {"x-def": DEFINITION_NAMES[part], **said}
    return {**_value_schema(info.annotation, info.metadata), **said}


def _value_schema(annotation: Any, metadata: list[Any]) -> FieldSchema:
    """The schema of a field's value, by its validators and its annotation."""
    measured = quantity_codec_of(metadata)
    if measured is not None:
        return quantity_schema(measured.kind)
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
    bounds = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}
    found: FieldSchema = {
        "type": {str: "string", bool: "boolean", int: "integer", float: "number"}[annotation]
    }
    return found | {
        word: getattr(m, key) for m in metadata for key, word in bounds.items() if hasattr(m, key)
    }


def _annotated_schema(annotation: object) -> FieldSchema:
    return _value_schema(
        getattr(annotation, "__origin__", annotation),
        [*_flat_constraints(getattr(annotation, "__metadata__", ()))],
    )


def _flat_constraints(metadata: tuple[object, ...]) -> list[object]:
    """Constraints that stand inside `Field(…)` as well."""
    return [item for m in metadata for item in (m.metadata if isinstance(m, FieldInfo) else (m,))]


__all__ = ["CLUSTER_MODELS", "DEFINITION_NAMES", "cluster_schema"]
