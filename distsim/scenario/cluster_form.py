"""The form of a cluster in a file, as JSON Schema: from `distsim.cluster`'s models, in people's units."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from distsim.cluster import PRESETS, Cluster, Curve, Device, Link, Network, Nics
from distsim.fields import Schema, tell
from distsim.ops.patterns import quantity_schema
from distsim.scenario.cluster_quantities import measure
from distsim.scenario.words import WORDS

#: The models of a cluster file, by the name of their definition; those of a preset's changes need no key.
CLUSTER_MODELS: dict[str, type[BaseModel]] = {model.__name__: model for model in (Device, Link, Nics, Network, Curve)}
tell(Cluster, WORDS, "Cluster")
for _name, _model in CLUSTER_MODELS.items():
    tell(_model, WORDS, _name)


def cluster_schema(name: str = "Cluster") -> dict[str, object]:
    """A cluster, or one part of it. Whole, it needs all its parts; with `preset` none."""
    model = CLUSTER_MODELS.get(name, Cluster)
    properties = {info.alias or key: _property(info) for key, info in model.model_fields.items()}
    found: dict[str, object] = {"type": "object", "additionalProperties": False, "properties": properties}
    if model is not Cluster:
        return found
    found["properties"] = {"preset": {"enum": list(PRESETS), "description": WORDS["Cluster.preset"].about}, **properties}
    return {**found, "if": {"required": ["preset"]}, "else": _whole(model)}


def _whole(model: type[BaseModel]) -> dict[str, object]:
    """What a cluster that names no preset needs, at every depth."""
    needed = [info.alias or key for key, info in model.model_fields.items() if info.is_required()]
    parts = {key: inner for key, info in model.model_fields.items() if (inner := _part(info)) is not None}
    return {"required": needed} | ({"properties": {key: _whole(part) for key, part in parts.items()}} if parts else {})


def _part(info: FieldInfo) -> type[BaseModel] | None:
    return info.annotation if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel) else None


def _property(info: FieldInfo) -> dict[str, object]:
    part = _part(info)
    said: dict[str, object] = {"description": info.description or "", "examples": list(info.examples or ())}
    if not info.is_required() and isinstance(info.default, str | bool):
        said["default"] = info.default
    if part is not None:
        return {"x-def": part.__name__, **said}
    return {**_value(info.annotation, info.metadata), **said}


def _value(annotation: Any, metadata: list[Any]) -> Schema:
    """The schema of a field's value, by its validators and its annotation."""
    measured = measure(metadata)
    if measured is not None:
        return quantity_schema(measured.kind)
    arguments: tuple[Any, ...] = getattr(annotation, "__args__", ())
    name = getattr(annotation, "__name__", "")
    if name == "dict":
        return {"type": "object", "additionalProperties": _nested(arguments[1])}
    if name == "tuple":
        return {"type": "array", "items": {"x-def": arguments[0].__name__}}
    if type(None) in arguments:
        return {"anyOf": [_nested(arguments[0]), {"type": "null"}]}
    if name == "Literal":
        return {"enum": list(arguments)}
    bounds = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}
    found: Schema = {"type": {str: "string", bool: "boolean", int: "integer", float: "number"}[annotation]}
    return found | {word: getattr(m, key) for m in metadata for key, word in bounds.items() if hasattr(m, key)}


def _nested(annotation: object) -> Schema:
    return _value(getattr(annotation, "__origin__", annotation), [*_flat(getattr(annotation, "__metadata__", ()))])


def _flat(metadata: tuple[object, ...]) -> list[object]:
    """Constraints that stand inside `Field(…)` as well."""
    return [item for m in metadata for item in (m.metadata if isinstance(m, FieldInfo) else (m,))]


__all__ = ["CLUSTER_MODELS", "cluster_schema"]
