"""Repairs of ranks that leave calls out: collectives that others make, where they stand on the
others.
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

#: What says how a call is waited for, not what it is.
_REQUEST_FIELDS: Final = ("async", "as")


def extend_to_all_ranks(
    data: ScenarioData, paths: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """(words, data): a call that some ranks alone make is made by all."""
    for path in paths:
        entry = value_at(data, path)
        if ranks_of(entry) is not None and OPERATIONS[op_of(entry)].kind != "p2p":
            found = copy.deepcopy(data)
            del value_at(found, path)["ranks"]
            yield f"{op_of(entry)} on all ranks", found


def copy_to_other_ranks(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """(words, data): a collective that one list has stands in another list of steps too."""
    lists = [path[:-1] for path in step_paths(data)]
    for path in named:
        entry = value_at(data, path)
        if OPERATIONS[op_of(entry)].kind == "p2p":
            continue
        for where in dict.fromkeys(lists):
            for k in reversed(range(len(value_at(data, where)) + 1)) if where != path[:-1] else ():
                found = copy.deepcopy(data)
                value_at(found, where).insert(k, copy.deepcopy(entry))
                yield f"{op_of(entry)} on the other ranks as well", found


def complete_early_exits(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """(words, data): ranks that leave early make the collectives that others make after that, at
    the end of the program.
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
            f"{rank_list(who)}: the collectives that the others make after that",
            found,
        )


def _collectives_by_rank(data: ScenarioData) -> dict[int, list[ScenarioData]]:
    """Each rank's collectives outside loops, where files say the ranks in numbers."""
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
    """What the other makes of groups with both, after all that the rank makes of them; empty where
    they differ before.
    """
    both = [_shared_collectives(data, made[who], rank, other) for who in (rank, other)]
    return both[1][len(both[0]) :] if both[1][: len(both[0])] == both[0] else []


def _shared_collectives(
    data: ScenarioData, calls: list[ScenarioData], rank: int, other: int
) -> list[ScenarioData]:
    def members(call: ScenarioData) -> Any:
        name = next(iter(call.values())).get("group")
        group = (data.get("groups") or {}).get(name)
        return (
            group.get("ranks")
            if isinstance(group, dict)
            else group
            if name is not None
            else (rank, other)
        )

    return [
        call
        for call in calls
        if {rank, other} <= set(m if isinstance(m := members(call), list | tuple) else ())
    ]


__all__ = ["copy_to_other_ranks", "extend_to_all_ranks", "complete_early_exits"]
