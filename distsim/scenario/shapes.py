"""What the keys of a mapping ask of each other, as JSON Schema: one of two, not both, one beside another.

The models check the same when they are read (their validators); tests compare both over mutated files.
"""

from __future__ import annotations

from distsim.fields import Schema
from distsim.ops.base import Op
from distsim.ops.table import OPS


def _has(*keys: str) -> Schema:
    return {"required": list(keys)}


def _one_of(*keys: str) -> Schema:
    return {"oneOf": [_has(key) for key in keys]}


def _not_both(one: str, other: str) -> Schema:
    return {"not": _has(one, other)}


def _all(*shapes: Schema) -> Schema:
    return shapes[0] if len(shapes) == 1 else {"allOf": list(shapes)} if shapes else {}


def _only_with(kind: str, key: str) -> Schema:
    """``key`` belongs to one kind of fault."""
    return {"if": _has(key), "then": {"properties": {"kind": {"const": kind}}}}


_FAULT = _all(
    _one_of("rank", "ranks", "link"),
    *(_only_with(kind, key) for kind, key in (("slow", "factor"), ("late", "delay"), ("exit", "code"), ("slow", "link"))),
    {"if": _has("nodes"), "then": _has("link")},
    {"if": {"properties": {"kind": {"const": "slow"}}}, "then": _has("factor")},
    {"if": {"properties": {"kind": {"const": "late"}}}, "then": _has("delay")},
    {"if": {"properties": {"kind": {"enum": ["slow", "late", "absent"]}}},
     "then": {"not": {"anyOf": [_has("iteration"), _has("before_call"), _has("at")]}}},
    {"if": _has("at"), "then": {"not": {"anyOf": [_has("iteration"), _has("before_call")]}}},
)  # fmt: skip
_LISTED = {"required": ["value"], "properties": {"value": {"type": "array"}}}
_SHAPES: dict[str, Schema] = {
    "GroupDecl": _one_of("ranks", "axes", "by"),
    "TensorDecl": {"anyOf": [_has("shape"), _has("like"), _LISTED]},
    "FaultDecl": _FAULT,
    "Bounds": {"anyOf": [_has("at_least"), _has("at_most")]},
    "compute": {"oneOf": [_has("time"), {"anyOf": [_has("flops"), _has("bytes")]}]},
    "wait_stream": {"anyOf": [_has("on"), _has("stream")]},
}


def shape_of(name: str) -> Schema:
    """The conditions on a model or on an operation's fields."""
    if name in _SHAPES:
        return _SHAPES[name]
    return _all(*_step_shapes(OPS[name])) if name in OPS else {}


def _step_shapes(row: type[Op]) -> list[Schema]:
    found: list[Schema] = []
    if row.direction == "send" or (row.kind == "remote" and row.gives == "all"):
        found.append(_one_of("dst", "group_dst"))
    elif row.kind == "remote" or row.signals:
        found.append(_one_of("src", "group_src"))
    elif row.direction == "recv":
        found += [_not_both("src", "group_src"), _not_both("assume_src", "src"), _not_both("assume_src", "group_src")]
    if row.root_field is not None:
        sides = (row.root_field, f"group_{row.root_field}")
        found.append(_not_both(*sides) if row.root_optional else _one_of(*sides))
    if row.kind == "collective" and "is_async" in row.model_fields:
        found.append({"if": _has("as"), "then": {"required": ["async"], "properties": {"async": {"const": True}}}})
    return found


def entry_shape() -> dict[str, object]:
    """One thing to do in an entry, with or without `ranks`."""
    return {
        "minProperties": 1,
        "if": _has("ranks"),
        "then": {"minProperties": 2, "maxProperties": 2},
        "else": {"maxProperties": 1},
    }


__all__ = ["entry_shape", "shape_of"]
