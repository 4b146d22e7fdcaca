"""Scenario files: read, checked, written. Start at `load`."""

from typing import Any

from distsim.scenario.entries import Block, Entry, Repeat, Step
from distsim.scenario.model import Scenario, load, load_mapping, load_stdin, loads, raw, text_of

__all__ = [
    "Block",
    "Entry",
    "Repeat",
    "Scenario",
    "Step",
    "json_schema",
    "load",
    "load_mapping",
    "load_stdin",
    "loads",
    "raw",
    "starter",
    "text_of",
]


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a scenario file, for editors."""
    from distsim.scenario.schema import schema

    return schema()


def starter(kind: str = "plain") -> str:
    """The text of a starter scenario: plain, ring, ddp or pipeline. Raises UsageError for another kind."""
    from distsim.scenario.templates import starter as text

    return text(kind)
