"""A short notation for JSON Schemas of command output.

A type is a word (``int``, ``text``, ``outcome``); after ``?`` the value may be null. ``=word``
is the text ``word``. A list in brackets has elements of one type. A tuple lists alternatives. A
dictionary is an object: its keys end in ``?`` if the value may be null, and in ``*`` if the key may
be omitted. The key ``{}`` stands for keys that the data chooses.
"""

from __future__ import annotations

from typing import Any, get_type_hints

from distsim.findings.codes import CODES
from distsim.scenario.format.models.expectations import OUTCOMES, VERDICTS

OUTPUT_VERSION = 1

_WORDS: dict[str, dict[str, object]] = {
    "int": {"type": "integer"},
    "number": {"type": "number"},
    "text": {"type": "string"},
    "flag": {"type": "boolean"},
    "any": {},
    "version": {"const": OUTPUT_VERSION},
    "true": {"const": True},
    "outcome": {"enum": list(OUTCOMES)},
    "verdict": {"enum": list(VERDICTS)},
    "code": {"enum": list(CODES)},
    "severity": {"enum": ["error", "warning", "note"]},
}
_WORD_OF_PYTHON_TYPE = {int: "int", float: "number", bool: "flag"}
#: The key of an object for all keys that are not listed.
_OTHER_KEYS = "{}"


def record_fields(record: type[Any]) -> dict[str, object]:
    """The object that ``_asdict()`` makes of a NamedTuple of numbers, texts and flags."""
    types = get_type_hints(record)
    return {name: _WORD_OF_PYTHON_TYPE.get(types[name], "text") for name in record._fields}


def json_schema_of(notation: object, closed: bool) -> dict[str, object]:
    """The JSON Schema of a type in this notation. ``closed``: objects have no other keys."""
    if isinstance(notation, tuple):
        return {"anyOf": [json_schema_of(form, closed) for form in notation]}
    if isinstance(notation, list):
        return {"type": "array", "items": json_schema_of(notation[0], closed)}
    if isinstance(notation, dict):
        return _object_schema(notation, closed)
    assert isinstance(notation, str)
    if notation.startswith("="):
        return {"const": notation[1:]}
    schema = dict(_WORDS[notation.removesuffix("?")])
    return _or_null(schema) if notation.endswith("?") else schema


def _object_schema(keys: dict[str, object], closed: bool) -> dict[str, object]:
    named = {key: value for key, value in keys.items() if key != _OTHER_KEYS}
    schema: dict[str, object] = {"type": "object"}
    if named:
        schema["required"] = [key.rstrip("?") for key in named if not key.endswith("*")]
        schema["properties"] = {
            key.rstrip("?*"): _value_schema(key, value, closed) for key, value in named.items()
        }
    if _OTHER_KEYS in keys:
        schema["additionalProperties"] = json_schema_of(keys[_OTHER_KEYS], closed)
    elif closed:
        schema["additionalProperties"] = False
    return schema


def _value_schema(key: str, value: object, closed: bool) -> dict[str, object]:
    schema = json_schema_of(value, closed)
    return _or_null(schema) if key.endswith("?") else schema


def _or_null(schema: dict[str, object]) -> dict[str, object]:
    return {"anyOf": [schema, {"type": "null"}]}
