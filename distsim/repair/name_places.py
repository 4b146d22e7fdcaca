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
    is_block,
    op_of,
    ranks_of,
    selected_ranks,
    step_paths,
    times_of,
    value_at,
)

_ALL_RANKS = "all ranks"
#: Words that say on which ranks a call is added.
_NAMES_RANKS = re.compile(r"\b(on|of) (all ranks|ranks? \d)")


def with_place(
    words: str, before: ScenarioData, after: ScenarioData, lines: Mapping[DataPath, int]
) -> str:
    """The words of a proposal, after the line, the ranks and the group of the changed call.

    ``lines``: the lines in the user's file; 0 for calls that an earlier change added. The default
    group is not named: most calls use it.
    """
    if before["program"] == after["program"]:
        return _with_tensor_place(words, before, after, lines)
    inserted = _inserted_step(before, after)
    if inserted is not None:
        neighbour, side = inserted
        ranks = "" if _NAMES_RANKS.search(words) else f", {_ranks_text(before, neighbour)}"
        if not lines.get(neighbour):
            return f"{side} {_added_call(before, neighbour)}{ranks}: {words}"
        return f"line {lines[neighbour]}{ranks}: {side} this line, {words}"
    path = _moved_step(before, after) or _first_changed_step(before, after)
    if path is None:
        return words
    place = [f"line {lines[path]}" if lines.get(path) else _added_call(before, path)]
    # A proposal for all ranks may say so in a better place of its sentence.
    if _ALL_RANKS not in words:
        place.append(_ranks_text(before, path))
    group = _group_of(value_at(before, path))
    if group not in ("", "world"):
        place.append(f"group {group}")
    # Words such as "barrier: …" name the operation, which belongs to the place.
    separator = ", " if re.match(r"\w+: ", words) else ": "
    return f"{', '.join(place)}{separator}{words}"


def _added_call(before: ScenarioData, path: DataPath) -> str:
    """A call that an earlier change added, so that the user's file has no line for it."""
    return f"the added {op_of(value_at(before, path)) or 'block'}"


def _with_tensor_place(
    words: str, before: ScenarioData, after: ScenarioData, lines: Mapping[DataPath, int]
) -> str:
    """The words after the line of the first tensor whose declaration changes."""
    declared, changed = before.get("tensors") or {}, after.get("tensors") or {}
    names = (name for name, tensor in declared.items() if changed.get(name) != tensor)
    line = lines.get(("tensors", next(names, "")))
    if not line:
        return words
    ranks = "" if _ALL_RANKS in words else f", {_ALL_RANKS}"
    return f"line {line}{ranks}: {words}"


def _inserted_step(before: ScenarioData, after: ScenarioData) -> tuple[DataPath, str] | None:
    """The call next to the only call that is added, and its side; None for any other change."""
    lists = {path[:-1] for path in step_paths(before)}
    for list_path in sorted(lists, key=len, reverse=True):
        old, new = value_at(before, list_path), _value_or_none(after, list_path)
        if not isinstance(new, list) or len(new) != len(old) + 1:
            continue
        place = next((k for k, entry in enumerate(old) if new[k] != entry), len(old))
        if [*new[:place], *new[place + 1 :]] != old or is_block(new[place]):
            return None
        if place == 0:
            return (*list_path, 0), "before"
        return (*list_path, place - 1), "after"
    return None


def _moved_step(before: ScenarioData, after: ScenarioData) -> DataPath | None:
    """The call that the change moves within its list; None for any other change."""
    lists = {path[:-1] for path in step_paths(before)}
    for list_path in sorted(lists, key=len, reverse=True):
        old, new = value_at(before, list_path), _value_or_none(after, list_path)
        if not isinstance(new, list) or len(new) != len(old) or new == old:
            continue
        first = next(k for k, entry in enumerate(old) if new[k] != entry)
        for moved in range(first, len(old)):
            rest = [*old[:moved], *old[moved + 1 :]]
            place = next((k for k, entry in enumerate(rest) if new[k] != entry), len(rest))
            if [*rest[:place], old[moved], *rest[place:]] == new:
                return (*list_path, moved)
        return None
    return None


def _first_changed_step(before: ScenarioData, after: ScenarioData) -> DataPath | None:
    """The path of the first call that the change moves, alters or removes.

    If a call is only added, this is the call that was at its place, or the last call of the list.
    """
    for path in step_paths(before):
        entry, changed = value_at(before, path), _value_or_none(after, path)
        are_blocks = is_block(entry) and is_block(changed)
        has_other_ranks = are_blocks and ranks_of(entry) != ranks_of(changed)
        if times_of(entry) != times_of(changed) or has_other_ranks:
            return path
    own = [path for path in step_paths(before) if not is_block(value_at(before, path))]
    for path in own:
        if _value_or_none(after, path) != value_at(before, path):
            return path
    return own[-1] if own else None


def _value_or_none(data: Any, path: DataPath) -> Any:
    try:
        return value_at(data, path)
    except (KeyError, IndexError, TypeError):
        return None


def _ranks_text(data: ScenarioData, path: DataPath) -> str:
    for end in range(len(path), 1, -1):
        chosen = ranks_of(value_at(data, path[:end])) if isinstance(path[end - 1], int) else None
        if chosen is None:
            continue
        ranks = selected_ranks(chosen)
        if ranks is not None and (len(ranks) == 1 or not isinstance(chosen, str)):
            return rank_list(ranks)
        return f"ranks where {chosen}"
    return _ALL_RANKS


def _group_of(entry: Any) -> str:
    if not op_of(entry):
        return ""
    return str(fields_of(entry).get("group", "world"))


__all__ = ["with_place"]
