"""Remove a rank from the data of a scenario and renumber the ranks after it.

Only ranks written as numbers are renumbered; expressions stay as they are.
"""

from __future__ import annotations

from typing import Any, Final

from distsim.repair.scenario_data import ScenarioData

#: Fields of a call that name a global rank.
_RANK_FIELDS: Final = ("src", "dst", "peer", "root", "assume_src")


def without_rank(data: ScenarioData, rank: int) -> ScenarioData:
    """The data without a rank, its own calls, and the messages that name it by number."""
    found = dict(data)
    if isinstance(data.get("groups"), dict):
        found["groups"] = {
            name: _group_without(group, rank) for name, group in data["groups"].items()
        }
    if isinstance(data.get("faults"), list):
        faults = [_fault_without(fault, rank) for fault in data["faults"]]
        found["faults"] = [fault for fault in faults if fault is not None]
    found["program"] = _steps_without(data["program"], rank)
    return found


def _renumbered(value: object, rank: int) -> object:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    return value - 1 if value > rank else value


def _selector_without(value: object, rank: int) -> object:
    """A selector without the rank; None if it selects no other rank."""
    if not isinstance(value, list):
        return None if value == rank else _renumbered(value, rank)
    remaining = [_renumbered(each, rank) for each in value if each != rank]
    if not remaining:
        return None
    return remaining if len(remaining) > 1 else remaining[0]


def _group_without(group: Any, rank: int) -> Any:
    if isinstance(group, list):
        return [_renumbered(r, rank) for r in group if r != rank]
    if isinstance(group, dict) and isinstance(group.get("ranks"), list):
        return {**group, "ranks": [_renumbered(r, rank) for r in group["ranks"] if r != rank]}
    return group


def _fault_without(fault: ScenarioData, rank: int) -> ScenarioData | None:
    found = dict(fault)
    for key in ("rank", "ranks"):
        if key in fault:
            left = _selector_without(fault[key], rank)
            if left is None:
                return None
            found[key] = left
    return found


def _steps_without(entries: list[Any], rank: int) -> list[Any]:
    changed = [_step_without(entry, rank) for entry in entries]
    return [entry for entry in changed if entry is not None]


def _step_without(entry: object, rank: int) -> object:
    if not isinstance(entry, dict):
        return entry
    found = dict(entry)
    if "ranks" in entry:
        left = _selector_without(entry["ranks"], rank)
        if left is None:
            return None
        found["ranks"] = left
    for key, value in entry.items():
        if key == "steps":
            found[key] = _steps_without(value, rank)
        elif key == "repeat":
            found[key] = {**value, "steps": _steps_without(value["steps"], rank)}
        elif key != "ranks" and isinstance(value, dict):
            if any(_is_rank(value.get(name), rank) for name in _RANK_FIELDS):
                return None
            found[key] = _fields_without(value, rank)
    return found


def _is_rank(value: object, rank: int) -> bool:
    # True and False equal 1 and 0, and are no ranks.
    return value == rank and not isinstance(value, bool)


def _fields_without(fields: ScenarioData, rank: int) -> ScenarioData:
    found: ScenarioData = {}
    for name, value in fields.items():
        if name in _RANK_FIELDS and isinstance(value, dict):
            by_rank = _values_without(value, rank)
            found[name] = {key: _renumbered(named, rank) for key, named in by_rank.items()}
        elif name in _RANK_FIELDS:
            found[name] = _renumbered(value, rank)
        elif name == "ops" and isinstance(value, list):
            found[name] = _steps_without(value, rank)
        elif name in ("ranks", "members") and isinstance(value, list):
            found[name] = [_renumbered(r, rank) for r in value if r != rank]
        elif isinstance(value, dict) and "shape" not in value:
            found[name] = _values_without(value, rank)
        else:
            found[name] = value
    return found


def _values_without(values: dict[object, object], rank: int) -> dict[object, object]:
    """A field with a value per rank, `{0: …, 1: …}`, without the rank."""
    if not any(isinstance(key, int) for key in values):
        return values
    return {_renumbered(key, rank): value for key, value in values.items() if key != rank}


__all__ = ["without_rank"]
