"""The JSON Schema takes what the loader takes, and refuses what an editor can see is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distsim.ops.table import OPS
from distsim.scenario import json_schema, load, loads
from distsim.scenario.dump import to_data

SCENARIOS = sorted((Path(__file__).parent.parent / "scenarios").glob("*.yaml"))
SCHEMA = json_schema()
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def fits(value: Any, schema: Any) -> bool:
    """The part of JSON Schema 2020-12 that ours uses."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return fits(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/").replace("%20", " ")])
    if "anyOf" in schema and not any(fits(value, one) for one in schema["anyOf"]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    types = schema.get("type", list(TYPES))
    types = [types] if isinstance(types, str) else types
    if not any(isinstance(value, TYPES[t]) and (not isinstance(value, bool) or t == "boolean") for t in types):
        return False
    if isinstance(value, dict):
        return fits_object(value, schema)
    if isinstance(value, list):
        return all(fits(item, schema.get("items", True)) for item in value)
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return True


def fits_object(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    properties = schema.get("properties", {})
    if not set(schema.get("required", ())) <= value.keys():
        return False
    for key, item in value.items():
        if not fits(key, schema.get("propertyNames", True)):
            return False
        if not fits(item, properties.get(key, schema.get("additionalProperties", True))):
            return False
    return True


def keys_of(schema: Any) -> set[str]:
    """Every key of the schema language that is used."""
    if isinstance(schema, list):
        return set().union(*map(keys_of, schema))
    if not isinstance(schema, dict):
        return set()
    found = set()
    for key, value in schema.items():
        names = key in ("properties", "$defs")
        found |= {key} | (set().union(*map(keys_of, value.values())) if names else keys_of(value))
    return found


def as_json(data: Any) -> Any:
    return json.loads(json.dumps(data))


def test_every_scenario_of_the_project_fits() -> None:
    assert [file.stem for file in SCENARIOS if not fits(as_json(to_data(load(file))), SCHEMA)] == []


@pytest.mark.parametrize(
    "text",
    [
        "program: [barrier]",
        "program: [{sleep: 3 ms}]",
        "program: [{barrier: null, ranks: rank == 0}]",
        "program: [{ranks: [0, 1], steps: [{repeat: {times: 3, index: i, steps: [{wait: all}]}}]}]",
        "program: []\noptions: {init: eager, timeout: 3 s}",
        "program: []\nfaults: [{rank: 1, kind: kill, at: 3 ms}]",
        "program: []\nexpect: {verdict: ok, depends_on: null, makespan: {at_most: 3 ms}}",
    ],
)
def test_what_loads_fits(text: str) -> None:
    data = loads("world: 4\n" + text)._document.root

    assert fits(as_json(data), SCHEMA)


@pytest.mark.parametrize(
    "data",
    [
        {"world": 4},
        {"world": 4, "program": [], "programm": []},
        {"world": "four", "program": []},
        {"world": 4, "program": [{"sned": {}}]},
        {"world": 4, "program": [{"send": {"tensr": "x"}}]},
        {"world": 4, "program": [{"send": {"dst": 1}}]},
        {"world": 4, "program": [{"sleep": 3}]},
        {"world": 4, "program": [{"all_reduce": {"tensor": "x", "op": "mean"}}]},
        {"world": 4, "program": [{"send": {"tensor": "x"}, "recv": {"tensor": "x"}}]},
        {"world": 4, "program": [], "expect": {"verdict": "fine"}},
        {"world": 4, "program": [], "options": {"init": "lzy"}},
    ],
)
def test_what_is_plainly_wrong_does_not_fit(data: Any) -> None:
    assert not fits(data, SCHEMA)


def test_the_schema_is_json_and_uses_only_what_this_test_knows() -> None:
    known = {
        "$ref",
        "anyOf",
        "enum",
        "const",
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "propertyNames",
        "pattern",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "title",
        "description",
        "default",
        "$defs",
        "$schema",
    }

    assert keys_of(SCHEMA) <= known
    assert as_json(SCHEMA) == SCHEMA
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_every_operation_has_its_entry() -> None:
    entries = {name for e in SCHEMA["$defs"]["entry"]["anyOf"] for name in e.get("properties", {})}

    assert [name for name in OPS if name not in entries or f"fields of {name}" not in SCHEMA["$defs"]] == []
