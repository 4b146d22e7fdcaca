"""Repairs of ranks that skip collectives which other ranks make.

Each function yields (words, changed data).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, Final

from distsim.checker.wording import rank_list
from distsim.operations.registry import OPERATIONS
from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    fields_of,
    op_of,
    owner_ranks,
    ranks_of,
    step_paths,
    value_at,
)

#: Fields that say how a call is waited for, not what it does.
_REQUEST_FIELDS: Final = ("async", "as")


def extend_to_all_ranks(
    data: ScenarioData, paths: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A call that only some ranks make is made by all."""
    for path in paths:
        entry = value_at(data, path)
        if ranks_of(entry) is not None and OPERATIONS[op_of(entry)].kind != "p2p":
            found = copy.deepcopy(data)
            del value_at(found, path)["ranks"]
            yield f"call {op_of(entry)} on all ranks", found


def copy_to_other_ranks(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A collective in one list of steps is copied into another list."""
    lists = [path[:-1] for path in step_paths(data)]
    for path in named:
        entry = value_at(data, path)
        if OPERATIONS[op_of(entry)].kind == "p2p":
            continue
        for list_path in dict.fromkeys(lists):
            if list_path == path[:-1]:
                continue
            for k in reversed(range(len(value_at(data, list_path)) + 1)):
                found = copy.deepcopy(data)
                value_at(found, list_path).insert(k, copy.deepcopy(entry))
                yield f"call {op_of(entry)} on the other ranks as well", found


def complete_early_exits(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """Ranks that exit early make the collectives that others make after that.

    These are added at the end of the program.
    """
    made = _collectives_by_rank(data)
    tails: dict[str, list[int]] = {}
    for rank in made:
        longest = max((_missing_tail(data, made, rank, other) for other in made), key=len)
        if longest:
            tails.setdefault(json.dumps(longest), []).append(rank)
    if tails:
        found = copy.deepcopy(data)
        found["program"] += [
            {"ranks": ranks, "steps": json.loads(tail)} for tail, ranks in tails.items()
        ]
        who = sorted(rank for ranks in tails.values() for rank in ranks)
        yield (
            f"call the remaining collectives of the other ranks on {rank_list(who)} too",
            found,
        )


def _collectives_by_rank(data: ScenarioData) -> dict[int, list[ScenarioData]]:
    """Each rank's collectives outside of loops, if the file writes ranks as numbers."""
    world = data.get("world")
    made: dict[int, list[ScenarioData]] = (
        {rank: [] for rank in range(world)} if isinstance(world, int) else {}
    )
    for path in step_paths(data):
        entry = value_at(data, path)
        if op_of(entry) and OPERATIONS[op_of(entry)].kind == "collective" and "repeat" not in path:
            fields = {
                key: value for key, value in fields_of(entry).items() if key not in _REQUEST_FIELDS
            }
            for rank in owner_ranks(data, path) or made:
                if rank in made:
                    made[rank].append({op_of(entry): fields})
    return made


def _missing_tail(
    data: ScenarioData, made: dict[int, list[ScenarioData]], rank: int, other: int
) -> list[ScenarioData]:
    """The collectives on shared groups that another rank makes after all those of the rank.

    Empty if their collectives differ before that.
    """
    own = _shared_collectives(data, made[rank], rank, other)
    theirs = _shared_collectives(data, made[other], rank, other)
    return theirs[len(own) :] if theirs[: len(own)] == own else []


def _shared_collectives(
    data: ScenarioData, calls: list[ScenarioData], rank: int, other: int
) -> list[ScenarioData]:
    """The calls on groups that contain both ranks."""
    found = []
    for call in calls:
        name = next(iter(call.values())).get("group")
        members: Any = (data.get("groups") or {}).get(name)
        if isinstance(members, dict):
            members = members.get("ranks")
        elif name is None:
            members = (rank, other)
        if isinstance(members, list | tuple) and rank in members and other in members:
            found.append(call)
    return found


__all__ = ["copy_to_other_ranks", "extend_to_all_ranks", "complete_early_exits"]
