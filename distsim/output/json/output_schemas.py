"""JSON Schemas of what commands print with `--format json`.

The output is an interface: a key keeps its meaning while `schema_version` stays the same. A version
may gain keys, so the published schemas allow other keys; tests check real outputs against closed
schemas, which do not.
"""

from __future__ import annotations

from distsim.output.json import analysis_schemas, run_schemas
from distsim.output.json.schema_notation import OUTPUT_VERSION, json_schema_of

SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"

#: Command -> the forms of its output, one of which fits.
COMMAND_OUTPUTS: dict[str, tuple[object, ...]] = {
    "simulate": (run_schemas.SIMULATE,),
    "check": (run_schemas.CHECK,),
    "plan": (analysis_schemas.PLAN,),
    "sweep": (analysis_schemas.SWEEP,),
    "run": (run_schemas.LAUNCH_PLAN, run_schemas.REAL_RUN, run_schemas.REFUSED_RUN),
    "replay": (run_schemas.REPLAY, run_schemas.REAL_REPLAY, run_schemas.REFUSED_RUN),
    "compare": (run_schemas.COMPARE, analysis_schemas.MEASURED_TIMES),
    "doctor": (analysis_schemas.DOCTOR,),
    "slow": (analysis_schemas.SLOW,),
    "capture": (run_schemas.CAPTURE,),
    "bench": (analysis_schemas.BENCH,),
    "calibrate": (analysis_schemas.CALIBRATE,),
}


def output_schema(command: str, closed: bool = False) -> dict[str, object]:
    """The JSON Schema of what a command prints. ``closed``: no other keys."""
    forms = COMMAND_OUTPUTS[command]
    return {
        "$schema": SCHEMA_DIALECT,
        "$id": f"urn:distsim:{command}:{OUTPUT_VERSION}",
        "title": f"distsim {command} --format json",
        **json_schema_of(forms[0] if len(forms) == 1 else forms, closed),
    }


__all__ = ["COMMAND_OUTPUTS", "OUTPUT_VERSION", "output_schema"]
