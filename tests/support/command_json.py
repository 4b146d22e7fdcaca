"""The JSON that commands print, validated against the published schemas by python-jsonschema."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from distsim.output.json.output_schemas import output_schema


@cache
def _validator(command: str) -> Draft202012Validator:
    """Closed: a key that the schema does not name is an error."""
    schema = output_schema(command, closed=True)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def checked_json(command: str, output: str) -> Any:
    """What a command printed, as data; fails if it does not match the schema of the command."""
    data = json.loads(output)
    error = best_match(_validator(command).iter_errors(data))
    assert error is None, (
        f"distsim {command}: {error.json_path}: {error.message[:1000]}; "
        "the schemas are in distsim/output/json/run_schemas.py and analysis_schemas.py"
    )
    return data
