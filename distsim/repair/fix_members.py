"""Repairs of the member lists of declared groups that together should contain each rank once.

Key idea: groups such as `dp0` and `dp1` divide the world. If one rank is in no group and another is
in two of them, the missing rank belongs in the place of the doubled one. Each function yields
(words, changed data).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from string import ascii_lowercase, digits

from distsim.checker.wording import rank_list
from distsim.program.model import Program
from distsim.repair.scenario_data import (
    ScenarioData,
    calling_ranks,
    fields_of,
    group_members,
    is_collective,
    step_paths,
    value_at,
)


def divide_world(data: ScenarioData, program: Program) -> Iterator[tuple[str, ScenarioData]]:
    """The rank that no group of a family contains takes the place of one that two contain.

    The list whose ranks then have equal distances comes first.
    """
    for names in _families(data):
        lists = {name: list(_members(data, name)) for name in names}
        counts = Counter(rank for ranks in lists.values() for rank in ranks)
        missing = [rank for rank in program.present if rank not in counts]
        doubled = [rank for rank, count in counts.items() if count == 2]
        if len(missing) != 1 or len(doubled) != 1 or counts.total() != program.world_size:
            continue
        changes = [
            (name, [missing[0] if rank == doubled[0] else rank for rank in ranks])
            for name, ranks in lists.items()
            if doubled[0] in ranks
        ]
        changes.sort(key=lambda change: not _is_regular(change[1]))
        for name, ranks in changes:
            words = (
                f"group {name}: list rank {missing[0]}, which no group of {', '.join(names)} "
                f"contains, instead of rank {doubled[0]}"
            )
            yield words, _with_members(data, name, ranks)


def list_callers(data: ScenarioData, program: Program) -> Iterator[tuple[str, ScenarioData]]:
    """A group lists the ranks that call its collectives.

    Only if several steps have the same callers, and these are as many as the list has.
    """
    callers: dict[str, list[list[int] | None]] = {}
    for path in step_paths(data):
        if is_collective(value_at(data, path)):
            group = str(fields_of(value_at(data, path)).get("group"))
            callers.setdefault(group, []).append(calling_ranks(data, program, path))
    for name in data.get("groups") or {}:
        listed, found = _members(data, name), callers.get(str(name), [])
        ranks = found[0] if found else None
        if len(found) < 2 or ranks is None or any(each != ranks for each in found):
            continue
        if len(ranks) == len(listed) and set(ranks) != set(listed):
            words = f"group {name}: list {rank_list(ranks)}, which call its collectives"
            yield words, _with_members(data, name, ranks)


def _families(data: ScenarioData) -> Iterator[list[str]]:
    """Groups that divide the world, as their names show: `dp0` and `dp1`, `tp_a` and `tp_b`.

    The groups with other names, such as `even` and `odd`, are one family if they have equal sizes.
    """
    families: dict[str, list[str]] = {}
    for name in data.get("groups") or {}:
        if _members(data, name):
            families.setdefault(_family_name(str(name)), []).append(str(name))
    yield from (names for names in families.values() if len(names) > 1)
    others = [names[0] for names in families.values() if len(names) == 1]
    if len({len(_members(data, name)) for name in others}) == 1 and len(others) > 1:
        yield others


def _family_name(group: str) -> str:
    """A group's name without the number or the letter at its end: `dp` of `dp0` and of `dp_a`."""
    without_number = group.rstrip(digits)
    if without_number != group:
        return without_number
    ends_in_letter = group[-2:-1] == "_" and group[-1] in ascii_lowercase
    return group[:-2] if ends_in_letter else group


def _members(data: ScenarioData, name: str) -> list[int]:
    """The ranks that a group lists as numbers; empty if it is declared in another way."""
    members = group_members(data, name)
    if not isinstance(members, list) or not all(isinstance(rank, int) for rank in members):
        return []
    return members


def _is_regular(ranks: list[int]) -> bool:
    """Whether all neighbours in a list have the same distance."""
    return len({b - a for a, b in pairwise(ranks)}) <= 1


def _with_members(data: ScenarioData, name: str, ranks: list[int]) -> ScenarioData:
    changed = copy.deepcopy(data)
    declared = changed["groups"][name]
    if isinstance(declared, dict):
        declared["ranks"] = ranks
    else:
        changed["groups"][name] = ranks
    return changed


__all__ = ["divide_world", "list_callers"]
