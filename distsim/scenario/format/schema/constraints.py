"""Constraints between keys of a mapping, as JSON Schema: one of two, not both, one with another.

The models check the same when they are read (their validators); tests compare both over mutated
files.
"""

from __future__ import annotations

from distsim.common.field_parsing import FieldSchema
from distsim.operations.core.operation_base import Operation
from distsim.operations.registry import OPERATIONS


def _requires(*keys: str) -> FieldSchema:
    return {"required": list(keys)}


def _one_of(*keys: str) -> FieldSchema:
    return {"oneOf": [_requires(key) for key in keys]}


def _not_both(one: str, other: str) -> FieldSchema:
    return {"not": _requires(one, other)}


def _all_of(*shapes: FieldSchema) -> FieldSchema:
    return shapes[0] if len(shapes) == 1 else {"allOf": list(shapes)} if shapes else {}


def _only_for_fault_kind(kind: str, key: str) -> FieldSchema:
    """``key`` belongs to one kind of fault."""
    return {"if": _requires(key), "then": {"properties": {"kind": {"const": kind}}}}


_FAULT_CONSTRAINTS = _all_of(
    _one_of("rank", "ranks", "link"),
    *(
        _only_for_fault_kind(kind, key)
        for kind, key in (("slow", "factor"), ("late", "delay"), ("exit", "code"), ("slow", "link"))
    ),
    {"if": _requires("nodes"), "then": _requires("link")},
    {"if": {"properties": {"kind": {"const": "slow"}}}, "then": _requires("factor")},
    {"if": {"properties": {"kind": {"const": "late"}}}, "then": _requires("delay")},
    {
        "if": {"properties": {"kind": {"enum": ["slow", "late", "absent"]}}},
        "then": {
            "not": {"anyOf": [_requires("iteration"), _requires("before_call"), _requires("at")]}
        },
    },
    {
        "if": _requires("at"),
        "then": {"not": {"anyOf": [_requires("iteration"), _requires("before_call")]}},
    },
)
_VALUE_IS_LIST = {"required": ["value"], "properties": {"value": {"type": "array"}}}
_CONSTRAINTS: dict[str, FieldSchema] = {
    "GroupDecl": _one_of("ranks", "axes", "by"),
    "TensorDecl": {"anyOf": [_requires("shape"), _requires("like"), _VALUE_IS_LIST]},
    "FaultDecl": _FAULT_CONSTRAINTS,
    "DurationBounds": {"anyOf": [_requires("at_least"), _requires("at_most")]},
    "compute": {
        "oneOf": [
            _requires("time"),
            {"anyOf": [_requires("flops"), _requires("bytes")]},
            _requires("work"),
        ]
    },
    "wait_stream": {"anyOf": [_requires("on"), _requires("stream")]},
}


def constraints_of(name: str) -> FieldSchema:
    """The conditions on a model or on an operation's fields."""
    if name in _CONSTRAINTS:
        return _CONSTRAINTS[name]
    return _all_of(*_operation_constraints(OPERATIONS[name])) if name in OPERATIONS else {}


def _operation_constraints(row: type[Operation]) -> list[FieldSchema]:
    found: list[FieldSchema] = []
    if row.direction == "send" or (row.kind == "remote" and row.gives == "all"):
        found.append(_one_of("dst", "group_dst"))
    elif row.kind == "remote" or row.signals:
        found.append(_one_of("src", "group_src"))
    elif row.direction == "recv":
        found += [
            _not_both("src", "group_src"),
            _not_both("assume_src", "src"),
            _not_both("assume_src", "group_src"),
        ]
    if row.root_field is not None:
        sides = (row.root_field, f"group_{row.root_field}")
        found.append(_not_both(*sides) if row.root_optional else _one_of(*sides))
    if row.kind == "collective" and "is_async" in row.model_fields:
        found.append(
            {
                "if": _requires("as"),
                "then": {"required": ["async"], "properties": {"async": {"const": True}}},
            }
        )
    return found


def entry_constraints() -> dict[str, object]:
    """One thing to do in an entry, with or without `ranks`."""
    return {
        "minProperties": 1,
        "if": _requires("ranks"),
        "then": {"minProperties": 2, "maxProperties": 2},
        "else": {"maxProperties": 1},
    }


__all__ = ["entry_constraints", "constraints_of"]
