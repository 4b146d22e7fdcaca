"""A scenario, as plain data, without one of its ranks: those after it are called one less."""

from __future__ import annotations

from typing import Any, Final

ScenarioData = dict[str, Any]

#: Fields of a call that name a global rank.
_RANK_FIELDS: Final = ("src", "dst", "peer", "root", "assume_src")


def without_rank(data: ScenarioData, rank: int) -> ScenarioData:
    """The file without a rank, its own calls and the messages that name it by number. Expressions
    are left as they are.
    """
    found = dict(data)
    if isinstance(data.get("groups"), dict):
        found["groups"] = {
            name: _group_without(group, rank) for name, group in data["groups"].items()
        }
    if isinstance(data.get("faults"), list):
        found["faults"] = [
            f for f in (_fault_without(fault, rank) for fault in data["faults"]) if f is not None
        ]
    found["program"] = _steps_without(data["program"], rank)
    return found


def _renumbered(value: object, rank: int) -> object:
    return (
        value - 1
        if isinstance(value, int) and not isinstance(value, bool) and value > rank
        else value
    )


def _selector_without(value: object, rank: int) -> object:
    """A selector without the rank; None where nobody is left."""
    if isinstance(value, list):
        left = [_renumbered(r, rank) for r in value if r != rank]
        return (left if len(left) > 1 else left[0]) if left else None
    return None if value == rank else _renumbered(value, rank)


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
    return [e for e in (_step_without(entry, rank) for entry in entries) if e is not None]


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
            if any(
                value.get(peer) == rank
                for peer in _RANK_FIELDS
                if not isinstance(value.get(peer), bool)
            ):
                return None
            found[key] = _fields_without(value, rank)
    return found


def _fields_without(fields: ScenarioData, rank: int) -> ScenarioData:
    found = {}
    for name, value in fields.items():
        if name in _RANK_FIELDS:
            named = _values_without(value, rank) if isinstance(value, dict) else value
            found[name] = (
                {k: _renumbered(v, rank) for k, v in named.items()}
                if isinstance(named, dict)
                else _renumbered(named, rank)
            )
        elif name == "ops" and isinstance(value, list):
            found[name] = _steps_without(value, rank)
        elif name in ("ranks", "members") and isinstance(value, list):
            found[name] = [_renumbered(r, rank) for r in value if r != rank]
        else:
            found[name] = (
                _values_without(value, rank)
                if isinstance(value, dict) and "shape" not in value
                else value
            )
    return found


def _values_without(values: dict[object, object], rank: int) -> dict[object, object]:
    """What a field says rank by rank, `{0: …, 1: …}`."""
    if not any(isinstance(key, int) for key in values):
        return values
    return {_renumbered(key, rank): value for key, value in values.items() if key != rank}


__all__ = ["without_rank"]
