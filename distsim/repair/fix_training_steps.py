"""Repairs of the settings of a training step, such as `ddp`.

Key idea: the ranks of a training step make the same calls, so a setting that differs by rank is
the likely fault. It gets the value of most ranks. A rank that does not use a layer is no such
fault: the model may branch on its data, and DDP has a setting for it.

Each function yields (words, changed data).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    step_paths,
    value_at,
    with_steps_replaced,
)
from distsim.scenario.strategies import STRATEGIES

#: Settings by rank that describe the model. They are no mistakes.
_OF_MODEL: Final = ("unused",)


def same_settings_on_all_ranks(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """A setting that differs by rank gets the value of most ranks, on all ranks."""
    world_size = data.get("world")
    if not isinstance(world_size, int):
        return
    for path, name, settings in _training_steps(data):
        for key, given in settings.items():
            if key in _OF_MODEL or not _is_by_rank(given):
                continue
            rest = {other: value for other, value in settings.items() if other != key}
            is_absent, common = _most_common_value(given, world_size)
            if is_absent:
                words = f"{name}: remove {key}, which only some ranks have"
                yield words, _with_settings(data, path, name, rest)
            else:
                words = f"{name}: set {key} to {_setting_text(common)} on all ranks"
                yield words, _with_settings(data, path, name, {**settings, key: common})


def find_unused_parameters(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """A model whose ranks skip layers searches for their parameters in each pass."""
    for path, name, settings in _training_steps(data):
        if settings.get("unused") and not settings.get("find_unused_parameters"):
            words = f"{name}: set find_unused_parameters to true, because ranks skip layers"
            changed = {**settings, "find_unused_parameters": True}
            yield words, _with_settings(data, path, name, changed)


def _training_steps(data: ScenarioData) -> Iterator[tuple[DataPath, str, ScenarioData]]:
    """The path, name and settings of every entry that is a training strategy."""
    for path in step_paths(data):
        entry = value_at(data, path)
        for name in entry if isinstance(entry, dict) else ():
            if name in STRATEGIES and isinstance(entry[name], dict):
                yield path, name, entry[name]


def _with_settings(
    data: ScenarioData, path: DataPath, name: str, settings: ScenarioData
) -> ScenarioData:
    return with_steps_replaced(data, path, [{**value_at(data, path), name: settings}])


def _is_by_rank(given: object) -> bool:
    """Whether a setting is a mapping such as `{0: 3, else: 2}`."""
    if not isinstance(given, dict) or not given:
        return False
    return all(isinstance(key, int) or key == "else" for key in given)


def _most_common_value(given: ScenarioData, world_size: int) -> tuple[bool, object]:
    """Whether most ranks have no value, and the value of most ranks.

    Of values that equally many ranks have, the one of the lowest rank.
    """
    missing = object()
    rest = given.get("else", missing)
    values = [given.get(rank, rest) for rank in range(world_size)]  # type: ignore[call-overload]
    count_by_text = Counter(map(repr, values))
    common = max(values, key=lambda value: count_by_text[repr(value)])
    return common is missing, common


def _setting_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


__all__ = ["find_unused_parameters", "same_settings_on_all_ranks"]
