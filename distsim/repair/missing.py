"""Repairs of ranks that leave calls out: collectives that others make, where they stand on the others."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, Final

from distsim.check.wording import some_ranks
from distsim.ops.table import OPS
from distsim.repair.steps import Data, Path, at, fields_of, op_of, owners, ranks_of, steps_of

#: What says how a call is waited for, not what it is.
_REQUEST: Final = ("async", "as")


def for_all(data: Data, paths: list[Path]) -> Iterator[tuple[str, Data]]:
    """(words, data): a call that some ranks alone make is made by all."""
    for path in paths:
        entry = at(data, path)
        if ranks_of(entry) is not None and OPS[op_of(entry)].kind != "p2p":
            found = copy.deepcopy(data)
            del at(found, path)["ranks"]
            yield f"{op_of(entry)} on all ranks", found


def elsewhere(data: Data, named: list[Path]) -> Iterator[tuple[str, Data]]:
    """(words, data): a collective that one list has stands in another list of steps too."""
    lists = [path[:-1] for path in steps_of(data)]
    for path in named:
        entry = at(data, path)
        if OPS[op_of(entry)].kind == "p2p":
            continue
        for where in dict.fromkeys(lists):
            for k in reversed(range(len(at(data, where)) + 1)) if where != path[:-1] else ():
                found = copy.deepcopy(data)
                at(found, where).insert(k, copy.deepcopy(entry))
                yield f"{op_of(entry)} on the other ranks as well", found


def goes_on(data: Data) -> Iterator[tuple[str, Data]]:
    """(words, data): ranks that leave early make the collectives that others make after that, at the end of the program."""
    made = _collectives(data)
    tails: dict[str, list[int]] = {}
    for rank in made:
        longest = max((_tail(data, made, rank, other) for other in made), key=len)
        if longest:
            tails.setdefault(json.dumps(longest), []).append(rank)
    if tails:
        found = copy.deepcopy(data)
        found["program"] += [{"ranks": ranks, "steps": json.loads(tail)} for tail, ranks in tails.items()]
        who = sorted(rank for ranks in tails.values() for rank in ranks)
        yield (
            f"{some_ranks(who)}: the collectives that the others make after that",
            found,
        )


def _collectives(data: Data) -> dict[int, list[Data]]:
    """Each rank's collectives outside loops, where files say the ranks in numbers."""
    world = data.get("world")
    made: dict[int, list[Data]] = {rank: [] for rank in range(world)} if isinstance(world, int) else {}
    for path in steps_of(data):
        entry = at(data, path)
        if op_of(entry) and OPS[op_of(entry)].kind == "collective" and "repeat" not in path:
            fields = {key: value for key, value in fields_of(entry).items() if key not in _REQUEST}
            for rank in owners(data, path) or made:
                if rank in made:
                    made[rank].append({op_of(entry): fields})
    return made


def _tail(data: Data, made: dict[int, list[Data]], rank: int, other: int) -> list[Data]:
    """What the other makes of groups with both, after all that the rank makes of them; empty where they differ before."""
    both = [_of_both(data, made[who], rank, other) for who in (rank, other)]
    return both[1][len(both[0]) :] if both[1][: len(both[0])] == both[0] else []


def _of_both(data: Data, calls: list[Data], rank: int, other: int) -> list[Data]:
    def members(call: Data) -> Any:
        name = next(iter(call.values())).get("group")
        group = (data.get("groups") or {}).get(name)
        return group.get("ranks") if isinstance(group, dict) else group if name is not None else (rank, other)

    return [call for call in calls if {rank, other} <= set(m if isinstance(m := members(call), list | tuple) else ())]


__all__ = ["elsewhere", "for_all", "goes_on"]
