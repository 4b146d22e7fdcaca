"""Repairs of timeouts that are shorter than the work of a late rank.

Each function yields (words, changed data).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Final

from distsim.backends import BACKEND_PROFILES
from distsim.common.units import duration_text, parse_duration_ns
from distsim.program.model import Program
from distsim.repair.scenario_data import DataPath, ScenarioData, fields_of, step_paths, value_at

#: Timeouts to try, the shortest first.
_TIMEOUTS: Final = ("1 min", "10 min", "30 min", "2 h")


def raise_timeout(data: ScenarioData, program: Program) -> Iterator[tuple[str, ScenarioData]]:
    """A timeout becomes longer: that of init_process_group, of a group or of a call."""
    options = data.get("options") or {}
    default = duration_text(BACKEND_PROFILES[program.backend].timeout_ns)
    given = options.get("timeout", default)
    # The argument of a call is changed where it is written.
    is_argument = any("init_process_group" in path for path in _paths_with_timeout(data))
    for timeout in [] if is_argument else _longer_than(given):
        words = f"set timeout under options to {timeout} instead of {given}"
        yield words, {**data, "options": {**options, "timeout": timeout}}
    for path in _paths_with_timeout(data):
        given = value_at(data, path)
        for timeout in _longer_than(given):
            changed = copy.deepcopy(data)
            value_at(changed, path[:-1])["timeout"] = timeout
            yield f"set timeout to {timeout} instead of {given}", changed


def _longer_than(given: object) -> list[str]:
    try:
        shortest = parse_duration_ns(given)
    except ValueError:
        return []
    return [timeout for timeout in _TIMEOUTS if parse_duration_ns(timeout) > shortest]


def _paths_with_timeout(data: ScenarioData) -> Iterator[DataPath]:
    """The timeouts of declared groups and of calls."""
    for name, group in (data.get("groups") or {}).items():
        if isinstance(group, dict) and "timeout" in group:
            yield "groups", name, "timeout"
    for path in step_paths(data):
        entry = value_at(data, path)
        op = next((key for key in entry if key != "ranks"), "") if isinstance(entry, dict) else ""
        if "timeout" in fields_of(entry) and isinstance(entry[op], dict):
            yield *path, op, "timeout"


__all__ = ["raise_timeout"]
