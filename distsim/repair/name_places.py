"""The place of a proposed change in words: line, ranks and group of the first changed step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from distsim.checker.wording import rank_list
from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    fields_of,
    op_of,
    ranks_of,
    step_paths,
    times_of,
    value_at,
)

_ALL_RANKS = "all ranks"


def with_place(
    words: str, before: ScenarioData, after: ScenarioData, lines: Mapping[DataPath, int]
) -> str:
    """The words of a proposal, after the line, the ranks and the group of the changed call.

    The default group is not named: most calls use it.
    """
    path = _first_changed_step(before, after)
    if path is None or before["program"] == after["program"]:
        return words
    place = [f"line {lines[path]}"] if lines.get(path) else []
    # A proposal for all ranks may say so in a better place of its sentence.
    if _ALL_RANKS not in words:
        place.append(_ranks_text(before, path))
    group = _group_of(value_at(before, path))
    if group not in ("", "world"):
        place.append(f"group {group}")
    if not place:
        return words
    # Words such as "barrier: …" name the operation, which belongs to the place.
    separator = ", " if re.match(r"\w+: ", words) else ": "
    return f"{', '.join(place)}{separator}{words}"


def _first_changed_step(before: ScenarioData, after: ScenarioData) -> DataPath | None:
    """The path of the first call that the change moves, alters or removes.

    If a call is only added, this is the call that was at its place, or the last call of the list.
    """
    for path in step_paths(before):
        if times_of(value_at(before, path)) != times_of(_value_or_none(after, path)):
            return path
    own = [path for path in step_paths(before) if not _is_block(value_at(before, path))]
    for path in own:
        if _value_or_none(after, path) != value_at(before, path):
            return path
    return own[-1] if own else None


def _is_block(entry: object) -> bool:
    return isinstance(entry, dict) and ("steps" in entry or "repeat" in entry)


def _value_or_none(data: Any, path: DataPath) -> Any:
    try:
        return value_at(data, path)
    except (KeyError, IndexError, TypeError):
        return None


def _ranks_text(data: ScenarioData, path: DataPath) -> str:
    for end in range(len(path), 1, -1):
        chosen = ranks_of(value_at(data, path[:end])) if isinstance(path[end - 1], int) else None
        if isinstance(chosen, list) and all(isinstance(rank, int) for rank in chosen):
            return rank_list(chosen)
        if isinstance(chosen, int):
            return rank_list([chosen])
        if chosen is not None:
            return f"ranks where {chosen}"
    return _ALL_RANKS


def _group_of(entry: Any) -> str:
    if not op_of(entry):
        return ""
    return str(fields_of(entry).get("group", "world"))


__all__ = ["with_place"]
