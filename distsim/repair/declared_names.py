"""The names that a scenario declares, and those that nothing uses.

Key idea: people declare a var, a group or a tensor because the program needs it. A name without use
shows what was meant: a group of the ranks that stay, or the tag of the priorities.
"""

from __future__ import annotations

import json

from distsim.repair.scenario_data import ScenarioData, names_in

#: The sections whose keys are names.
_SECTIONS = ("vars", "groups", "tensors")


def unused_names(data: ScenarioData) -> frozenset[str]:
    """The declared vars, groups and tensors with a value that no other place of the file names.

    A tensor without a value may be named by mistake alone.
    """
    declared = {
        str(name)
        for section in _SECTIONS
        for name, content in _entries(data, section).items()
        if section != "tensors" or (isinstance(content, dict) and "value" in content)
    }
    used: set[str] = set()
    for section, content in data.items():
        if section not in (*_SECTIONS, "name", "about"):
            used |= names_in(json.dumps(content, default=str))
    for section in _SECTIONS:
        for name, content in _entries(data, section).items():
            used |= names_in(json.dumps(content, default=str)) - {str(name)}
    return frozenset(declared - used)


def _entries(data: ScenarioData, section: str) -> ScenarioData:
    found = data.get(section)
    return found if isinstance(found, dict) else {}


__all__ = ["unused_names"]
