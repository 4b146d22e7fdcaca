"""Repairs of conditions that depend on the rank and on an iteration at once.

In some iterations only some ranks make a call. Either a decision should not depend on the rank, or
two blocks that belong together have different conditions. Each function yields (words, changed
data).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

from distsim.program.model import Program
from distsim.repair.expression_text import conjuncts, negated
from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    call_name,
    depends_on_rank,
    fields_of,
    ranks_of,
    step_paths,
    value_at,
    value_by_rank,
)
from distsim.repair.shared_decisions import SharedDecisions


class _Condition(NamedTuple):
    """A selector: its conjuncts that depend on the rank, and the others."""

    on_rank: tuple[str, ...]
    on_time: tuple[str, ...]

    @property
    def text(self) -> str:
        return " and ".join((*self.on_rank, *self.on_time))


def decide_on_all_ranks(
    data: ScenarioData, decisions: SharedDecisions
) -> Iterator[tuple[str, ScenarioData]]:
    """Ranks run a block in the same iterations: the condition no longer names the rank."""
    for path in step_paths(data):
        condition = decisions.condition_of(value_at(data, path))
        if condition and ranks_of(value_at(data, path)) != condition:
            words = f"{_what(data, path)} on all ranks where {condition}"
            changed = _with_condition(data, path, condition)
            yield f"{words}, so that no rank decides alone", changed


def copy_sibling_conditions(
    data: ScenarioData, program: Program
) -> Iterator[tuple[str, ScenarioData]]:
    """A block runs in the iterations of another block; its part on the rank stays."""
    found = {path: _split(program, text) for path, text in _conditions(data)}
    timed = {path: each for path, each in found.items() if each.on_time}
    for path, own in timed.items():
        for other_path, other in timed.items():
            if path == other_path or set(own.on_time) == set(other.on_time):
                continue
            wanted = _Condition(own.on_rank, other.on_time).text
            words = f"{_what(data, path)} on the ranks where {wanted}, as the other block does"
            yield words, _with_condition(data, path, wanted)


def drop_conjuncts(data: ScenarioData, program: Program) -> Iterator[tuple[str, ScenarioData]]:
    """A condition of several parts that depend on the rank loses one of them."""
    for path, text in _conditions(data):
        own = _split(program, text)
        for part in own.on_rank if len(own.on_rank) > 1 else ():
            rest = tuple(each for each in own.on_rank if each != part)
            wanted = _Condition(rest, own.on_time).text
            words = f"{_what(data, path)} on the ranks where {wanted}, without `{part}`"
            yield words, _with_condition(data, path, wanted)


def complement_conditions(
    data: ScenarioData, program: Program
) -> Iterator[tuple[str, ScenarioData]]:
    """A barrier of all ranks is called by the ranks that do not call the other barrier.

    Some ranks wait for others this way: they call the first barrier, and the others the second one
    when their work is done.
    """
    barriers = [path for path in step_paths(data) if call_name(value_at(data, path)) == "barrier"]
    conditions = dict.fromkeys(_as_text(ranks_of(value_at(data, path))) for path in barriers)
    of_all_ranks = [path for path in barriers if ranks_of(value_at(data, path)) is None]
    for path in of_all_ranks:
        for condition in filter(None, conditions):
            opposite = negated(condition)
            if not any(value_by_rank(program, opposite)):
                continue
            changed = copy.deepcopy(data)
            step = {"barrier": fields_of(value_at(data, path)), "ranks": opposite}
            value_at(changed, path[:-1])[int(path[-1])] = step
            words = f"call barrier only on the ranks where {opposite}, for which the others wait"
            yield words, changed


def _as_text(selector: object) -> str:
    if isinstance(selector, int) and not isinstance(selector, bool):
        return f"rank == {selector}"
    return str(selector) if isinstance(selector, str) else ""


def _conditions(data: ScenarioData) -> Iterator[tuple[DataPath, str]]:
    for path in step_paths(data):
        selector = ranks_of(value_at(data, path))
        if isinstance(selector, str):
            yield path, str(selector)


def _split(program: Program, condition: str) -> _Condition:
    parts = conjuncts(condition)
    on_rank = tuple(part for part in parts if depends_on_rank(program, part))
    return _Condition(on_rank, tuple(part for part in parts if part not in on_rank))


def _what(data: ScenarioData, path: DataPath) -> str:
    name = call_name(value_at(data, path))
    return f"call {name}" if name else "run this block"


def _with_condition(data: ScenarioData, path: DataPath, condition: str) -> ScenarioData:
    changed = copy.deepcopy(data)
    value_at(changed, path)["ranks"] = condition
    return changed


__all__ = [
    "complement_conditions",
    "copy_sibling_conditions",
    "decide_on_all_ranks",
    "drop_conjuncts",
]
