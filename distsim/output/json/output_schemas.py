"""JSON Schemas of what commands print with `--format json`: an interface, so a key keeps its
meaning while `schema_version` stays.

A version may gain further keys, so the schemas are open; a test checks real outputs against closed
ones. The notation: a type by its name, ``?`` may be null, a list of a type in brackets, ``{}`` a
mapping from names to a type.
"""

from __future__ import annotations

from distsim.findings.codes import CODES
from distsim.scenario.format.models.sections import OUTCOMES, VERDICTS

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"
OUTPUT_VERSION = 1
_JSON_TYPES = {
    "int": "integer",
    "number": "number",
    "text": "string",
    "flag": "boolean",
    "any": None,
}
_PLACE = {"file": "text?", "line": "int?", "column": "int?"}
_FINDING = {
    "code": "code",
    "severity": "severity",
    "ranks": ["int"],
    "core": ["int"],
    "message": "text",
    "help": ["text"],
    "places": [{"rank": "int?", **_PLACE, "op": "text"}],
}
_TIME_SHARES = {
    "compute_ns": "int",
    "exposed_comm_ns": "int",
    "waiting_ns": "int",
    "idle_ns": "int",
}
_SIMULATE: dict[str, object] = {
    "schema_version": "version",
    "file": "text",
    "name": "text",
    "outcome": "outcome",
    "possible": ["outcome"],
    "verdict": "verdict?",
    "complete": "flag?",
    "depends_on": "text?",
    "verdict_ranks?": ["int"],
    "core?": ["int"],
    "profile": "text",
    "world_size": "int",
    "makespan_ns": "int",
    "makespan_band_ns?": ["int"],
    "iteration_ns": "int?",
    "ranks": [{"rank": "int", **_TIME_SHARES, "finished_ns": "int?"}],
    "critical_path": [
        {
            "rank": "int",
            "op": "text",
            "name": "text",
            "why": "text",
            "start_ns": "int",
            "end_ns": "int",
            "calls": "int",
            **_PLACE,
        }
    ],
    "collectives": [
        {
            "op": "text",
            "group": "text",
            "group_size": "int",
            "nbytes": "int",
            "calls": "int",
            "duration_ns": "int",
            "algbw": "number",
            "busbw": "number",
        }
    ],
    "memory": [
        {
            "name": "text",
            "ranks": ["int"],
            "parts_nbytes": {"{}": "int"},
            "total_nbytes": "int",
            "allocated_nbytes": "int?",
            "device": "text",
            "device_nbytes": "int",
            "fits": "flag",
        }
    ],
    "values": "any",
    "findings": [_FINDING],
    "figures?": {
        "step_ns": "int",
        "tokens": "int",
        "tokens_s_gpu": "number",
        "mfu": "number",
        "shares": {"{}": "number"},
    },
    "cost_model": {"name": "text", "source": "text", "error_band": "text"},
}
_CHECKED_FILE: dict[str, object] = {
    "file": "text",
    "verdict": "verdict",
    "complete": "flag",
    "explored": "int",
    "depends_on": "text?",
    "ranks": ["int"],
    "core": ["int"],
    "readings": {"rendezvous": "text", "early": "text", "buffered": "text", "mixed": "text"},
    "stuck_sets": [["int"]],
    "schedule": "any",
    "culprits": ["int"],
    "profiles": {
        "{}": {
            "outcome": "outcome",
            "possible": ["outcome"],
            "ranks": ["int"],
            "flips_at_nbytes*": "int?",
            "variants*": {"{}": "outcome"},
        }
    },
    "findings": [_FINDING],
}
_UNREADABLE_FILE = {"file": "text", "errors": [{"line": "int", "column": "int", "message": "text"}]}
_PLAN: dict[str, object] = {
    "schema_version": "version",
    "name": "text",
    "backend": "text",
    "world_size": "int",
    "nodes": "int",
    "ranks": [{"rank": "int", "device": "text?", "env": {"{}": "any"}}],
    "commands": [{"launcher": "text", "node": "int?", "command": "text"}],
    "launcher_sets": {"{}": "text"},
    "notes": ["text"],
    "by": "text?",
    "script": ["text"],
}
_REAL: dict[str, object] = {
    "schema_version": "version",
    "file": "text",
    "name": "text",
    "outcome": "outcome?",
    "reason": "text",
    "backend": "text",
    "launcher": "text",
    "world_size": "int",
    "makespans_ns": ["int"],
    "simulated": {"outcome": "outcome", "makespan_ns": "int"},
    "agrees": "flag?",
    "differences": ["text"],
    "agreement": "text",
    "ended_by": "text?",
    "culprits": ["int"],
    "taken": [
        {
            "rank": "int",
            "position": "int",
            "part": "int",
            "line": "int",
            "source": "int",
            "simulated": "int",
        }
    ],
    "ranks": [
        {
            "rank": "int",
            "status": "text",
            "position": "int",
            "at_ns": "int",
            "message": "text",
            "op": "text?",
            "file": "text?",
            "line": "int?",
            "stack": "text?",
            "output": "text?",
        }
    ],
    "findings": [_FINDING],
    "values": [{"rank": "int", "tensor": "text", "state": "text", "detail": "text"}],
    "recording_ns_per_call": "number",
    "clock_error_ns": "number?",
    "complete": "flag",
    "notes": ["text"],
}
_CALL = {
    "position": "int",
    "part": "int",
    "op": "text",
    "line": "int",
    "iteration": "int",
    "posted_ns": "int",
    "finished_ns": "int",
    "returned_ns": "int",
}
_COMPARE: dict[str, object] = {
    "schema_version": "version",
    "a": "text",
    "b": "text",
    "same": "flag",
    "tolerance": "number",
    "makespan_ns": ["int"],
    "outcome": ["text"],
    "aligned": "int",
    "only_a": "int",
    "only_b": "int",
    "worst_ns": "int",
    "values": "any",
    "stopped": "any",
    "partings": [
        {
            "kind": "text",
            "rank": "int",
            "text": "text",
            "a?": _CALL,
            "b?": _CALL,
            "tensor*": "text",
            "element*": "int?",
            "numbers*": "any",
        }
    ],
    "causes": ["any"],
    "ops": ["any"],
    "ranks": [
        {
            "rank": "int",
            "compute_ns": ["int"],
            "exposed_ns": ["int"],
            "waiting_ns": ["int"],
            "idle_ns": ["int"],
        }
    ],
}
_NAMED_TYPES: dict[str, dict[str, object]] = {
    "version": {"const": OUTPUT_VERSION},
    "true": {"const": True},
    "outcome": {"enum": list(OUTCOMES)},
    "verdict": {"enum": list(VERDICTS)},
    "code": {"enum": list(CODES)},
    "severity": {"enum": ["error", "warning", "note"]},
}
#: `run --real` of what the simulation says will fail, without --force.
_REFUSED = {"refused": "true", **_SIMULATE}
#: Command -> what it prints; of several forms one fits.
COMMAND_OUTPUTS: dict[str, tuple[object, ...]] = {
    "simulate": (_SIMULATE,),
    "check": ({"schema_version": "version", "files": [(_CHECKED_FILE, _UNREADABLE_FILE)]},),
    "run": (_PLAN, _REAL, _REFUSED),
    "compare": (_COMPARE,),
}


def output_schema(command: str, closed: bool = False) -> dict[str, object]:
    """The JSON Schema of what a command prints. ``closed``: no other keys."""
    forms = COMMAND_OUTPUTS[command]
    body = _schema(forms[0] if len(forms) == 1 else tuple(forms), closed)
    title = f"distsim {command} --format json"
    return {
        "$schema": SCHEMA_DIALECT,
        "$id": f"urn:distsim:{command}:{OUTPUT_VERSION}",
        "title": title,
        **body,
    }


def _schema(one: object, closed: bool) -> dict[str, object]:
    if isinstance(one, tuple):
        return {"anyOf": [_schema(form, closed) for form in one]}
    if isinstance(one, list):
        return {"type": "array", "items": _schema(one[0], closed)}
    if isinstance(one, dict):
        return _object_schema(one, closed)
    assert isinstance(one, str)
    word, null = one.removesuffix("?"), one.endswith("?")
    found = _NAMED_TYPES.get(word) or ({"type": _JSON_TYPES[word]} if _JSON_TYPES[word] else {})
    return {"anyOf": [found, {"type": "null"}]} if null else dict(found)


def _object_schema(one: dict[str, object], closed: bool) -> dict[str, object]:
    """Keys that end in ``?`` may be null, in ``*`` may be omitted."""
    if "{}" in one:
        return {"type": "object", "additionalProperties": _schema(one["{}"], closed)}
    properties: dict[str, object] = {}
    for key, value in one.items():
        inner = _schema(value, closed)
        properties[key.rstrip("?*")] = (
            {"anyOf": [inner, {"type": "null"}]} if key.endswith("?") else inner
        )
    found: dict[str, object] = {
        "type": "object",
        "required": [key.rstrip("?") for key in one if not key.endswith("*")],
    }
    return {
        **found,
        "properties": properties,
        **({"additionalProperties": False} if closed else {}),
    }


__all__ = ["COMMAND_OUTPUTS", "OUTPUT_VERSION", "output_schema"]
