"""Scenario files: read, checked, written. Start at `load`."""

from typing import Any

from distsim.scenario.format.models.entries import (
    Entry,
    ScenarioBlock,
    ScenarioRepeat,
    ScenarioStep,
)
from distsim.scenario.model import (
    Scenario,
    load,
    load_mapping,
    load_raw,
    load_stdin,
    loads,
    read_text,
)

__all__ = [
    "ScenarioBlock",
    "Entry",
    "ScenarioRepeat",
    "Scenario",
    "ScenarioStep",
    "json_schema",
    "load",
    "load_mapping",
    "load_stdin",
    "loads",
    "load_raw",
    "starter",
    "read_text",
]


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a scenario file, for editors."""
    from distsim.scenario.format.schema.generate import scenario_schema

    return scenario_schema()


def starter(kind: str = "plain") -> str:
    """The text of a starter scenario: plain, ring, ddp or pipeline. Raises UsageError for another
    kind.
    """
    from distsim.scenario.starters import starter as text

    return text(kind)
