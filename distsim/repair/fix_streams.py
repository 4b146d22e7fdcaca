"""Repairs of missing synchronisation between CUDA streams.

Each function yields (words, changed data).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final

from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    fields_of,
    names_in,
    op_of,
    paths_by_list,
    value_at,
)

_DEFAULT_STREAM: Final = "current"
_NAMING_FIELDS: Final = ("tensor", "input", "output", "value", "reads", "writes", "adds")


def wait_for_streams(
    data: ScenarioData, paths: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A stream waits for another one before it uses a tensor of a call on that stream."""
    declared = {str(name) for name in data.get("tensors") or {}}
    for list_path, list_paths in paths_by_list(paths).items():
        steps = value_at(data, list_path)
        positions = sorted(int(path[-1]) for path in list_paths if isinstance(path[-1], int))
        if not any(_stream_of(steps[k]) != _DEFAULT_STREAM for k in positions):
            continue
        for first in positions:
            later = [k for k in positions if k > first]
            user = _first_user_on_other_stream(steps, first, later, declared)
            if user is None:
                continue
            waited, waiting = _stream_of(steps[first]), _stream_of(steps[user])
            changed = copy.deepcopy(data)
            wait = {"wait_stream": {"stream": waited, "on": waiting}}
            value_at(changed, list_path).insert(user, wait)
            words = f"let the stream {waiting} wait for {waited} before this {op_of(steps[user])}"
            yield words, changed


def _first_user_on_other_stream(
    steps: list[Any], first: int, later: list[int], declared: set[str]
) -> int | None:
    """The next step on another stream that uses a tensor of the first one without a wait."""
    stream, tensors = _stream_of(steps[first]), _tensors_of(steps[first]) & declared
    for k in later:
        if op_of(steps[k]) == "wait_stream" and fields_of(steps[k]).get("stream") == stream:
            return None
        if _stream_of(steps[k]) != stream and not tensors.isdisjoint(_tensors_of(steps[k])):
            return k
    return None


def _stream_of(entry: Any) -> str:
    if op_of(entry) == "wait_stream":
        return _DEFAULT_STREAM
    return str(fields_of(entry).get("on", _DEFAULT_STREAM))


def _tensors_of(entry: Any) -> set[str]:
    """The names in the arguments of a step that may name tensors."""
    if op_of(entry) == "wait_stream":
        return set()
    fields = fields_of(entry).items()
    return names_in(" ".join(str(value) for key, value in fields if key in _NAMING_FIELDS))


__all__ = ["wait_for_streams"]
