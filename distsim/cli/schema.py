"""`distsim schema`: the JSON Schema of a scenario file."""

from __future__ import annotations

from distsim.cli import console


def command() -> None:
    """Print the JSON Schema of scenario files, for editors.

    \b
    Example: distsim schema > distsim.schema.json
    """
    from distsim.scenario import json_schema

    console.out(console.to_json(json_schema()))
