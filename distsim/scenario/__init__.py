"""Scenarios: the `Scenario` class, the functions that load one, starter files and lessons.

The file format is in `distsim.scenario.format`, init_process_group in `distsim.scenario.startup`,
frameworks in `distsim.scenario.strategies`. Start at `load`.

The names below are loaded when they are first used: importing a strategy or a start-up record
imports this package too, and must not load the whole file format with it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it
if TYPE_CHECKING:
    from typing import Any

    from distsim.scenario.format.models.entries import (
        Entry,
        ScenarioBlock,
        ScenarioRepeat,
        ScenarioStep,
    )
    from distsim.scenario.loading import (
        load,
        load_mapping,
        load_raw,
        load_stdin,
        loads,
        read_text,
    )
    from distsim.scenario.model import Scenario

#: Public name -> the module that defines it.
_HOME = {
    "Entry": "distsim.scenario.format.models.entries",
    "Scenario": "distsim.scenario.model",
    "ScenarioBlock": "distsim.scenario.format.models.entries",
    "ScenarioRepeat": "distsim.scenario.format.models.entries",
    "ScenarioStep": "distsim.scenario.format.models.entries",
    "load": "distsim.scenario.loading",
    "load_mapping": "distsim.scenario.loading",
    "load_raw": "distsim.scenario.loading",
    "load_stdin": "distsim.scenario.loading",
    "loads": "distsim.scenario.loading",
    "read_text": "distsim.scenario.loading",
}

__all__ = [
    "Entry",
    "Scenario",
    "ScenarioBlock",
    "ScenarioRepeat",
    "ScenarioStep",
    "json_schema",
    "load",
    "load_mapping",
    "load_raw",
    "load_stdin",
    "loads",
    "read_text",
    "starter",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'distsim.scenario' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a scenario file, for editors."""
    from distsim.scenario.format.schema.generate import scenario_schema

    return scenario_schema()


def starter(kind: str = "plain") -> str:
    """The text of a starter scenario: plain, ring, ddp or pipeline.

    Raises UsageError for another kind.
    """
    from distsim.scenario.starters import starter as text

    return text(kind)
