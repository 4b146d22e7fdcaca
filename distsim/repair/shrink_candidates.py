"""Scenarios, as plain data, that are smaller than one by one thing: what a shrinker tries, the
largest steps first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from distsim.repair.remove_rank import without_rank

ScenarioData = dict[str, Any]

#: Keys of a file without which it is still a scenario.
_OPTIONAL_KEYS: Final = (
    "about",
    "expect",
    "memory",
    "launch",
    "jitter",
    "seed",
    "iterations",
    "faults",
    "options",
    "cluster",
    "mesh",
    "vars",
    "tensors",
    "groups",
)
#: Fields of a call without which it is the plainer call; ``async`` goes with its handle's name.
_OPTIONAL_FIELDS: Final = (
    "on",
    "tag",
    "timeout",
    "async",
    "as",
    "group",
    "op",
    "assume_src",
    "use_local_synchronization",
    "buffer",
    "value",
)
#: In a world of at most so many ranks, a condition is tried as each of them.
_FEW_RANKS: Final = 16


def smaller_scenarios(data: ScenarioData) -> Iterator[ScenarioData]:
    """Smaller by one thing each; some are no scenarios any more."""
    for key in _OPTIONAL_KEYS:
        if key in data:
            yield {k: v for k, v in data.items() if k != key}
    if not isinstance(data["world"], int):
        yield {**data, "world": world_size(data)}
    yield from _smaller_worlds(data)
    for program in _smaller_lists(data["program"], world_size(data)):
        yield {**data, "program": program}
    yield from _fewer_declarations(data)


def world_size(data: ScenarioData) -> int:
    """Ranks of a file's world."""
    world = data["world"]
    return world if isinstance(world, int) else int(world["nodes"] * world["ranks_per_node"])


def _smaller_worlds(data: ScenarioData) -> Iterator[ScenarioData]:
    """Fewer ranks: an axis of the mesh is shorter, a rank is gone and those after it are called one
    less.
    """
    size, mesh = world_size(data), data.get("mesh") or {}
    for axis, length in mesh.items():
        for shorter in _smaller_numbers(length, 1):
            yield {**data, "mesh": {**mesh, axis: shorter}, "world": size // length * shorter}
    if not isinstance(data["world"], int) or mesh:
        return
    for fewer in _smaller_numbers(size, 2)[:-1]:
        gone = data
        for rank in reversed(range(fewer, size)):
            gone = without_rank(gone, rank)
        yield {**gone, "world": fewer}
    for rank in reversed(range(size)) if 2 < size <= 4 * _FEW_RANKS else ():
        yield {**without_rank(data, rank), "world": size - 1}


def _smaller_numbers(number: object, least: int) -> list[int]:
    """The least, then halves upwards, and an eighth less."""
    if not isinstance(number, int) or isinstance(number, bool) or number <= least:
        return []
    return sorted({least, *_halves(number, least), number - max(1, number // 8)})


def _halves(number: object, least: int) -> list[int]:
    """Down to the least, the smallest first."""
    return (
        sorted(n for k in range(1, 63) if (n := number >> k) > least)
        if isinstance(number, int)
        else []
    )


def _fewer_declarations(data: ScenarioData) -> Iterator[ScenarioData]:
    for key in ("options", "groups", "tensors", "vars", "memory"):
        for name in data.get(key, ()):
            yield {**data, key: {k: v for k, v in data[key].items() if k != name}}
    for faults in _without_chunks(data.get("faults", ())):
        yield {**data, "faults": faults}
    for name, number in data.get("vars", {}).items():
        for less in _smaller_numbers(number, 1):
            yield {**data, "vars": {**data["vars"], name: less}}
    for less in _smaller_numbers(data.get("iterations"), 1):
        yield {**data, "iterations": less}
    for name, tensor in data.get("tensors", {}).items():
        for smaller in _smaller_tensors(tensor):
            yield {**data, "tensors": {**data["tensors"], name: smaller}}


def _smaller_tensors(tensor: object) -> Iterator[object]:
    """A declared tensor or a shape in place: of one dimension, with fewer elements, without numbers
    or type.
    """
    if not isinstance(tensor, dict):
        return
    shape = tensor.get("shape")
    if isinstance(shape, list) and shape and shape != [1]:
        yield {**tensor, "shape": [1]}
        if len(shape) > 1:
            yield {**tensor, "shape": [4]}
        for k, length in enumerate(shape):
            for less in _halves(length, 1):
                yield {**tensor, "shape": [*shape[:k], less, *shape[k + 1 :]]}
    for key in ("value", "dtype"):
        if key in tensor:
            yield {k: v for k, v in tensor.items() if k != key}


def _without_chunks(items: Sequence[object]) -> Iterator[list[object]]:
    """The list without halves of it, then quarters, down to single items."""
    length = len(items)
    while length >= 1:
        for start in range(0, len(items), length):
            yield [*items[:start], *items[start + length :]]
        length //= 2


def _smaller_lists(entries: list[Any], size: int) -> Iterator[list[Any]]:
    yield from _without_chunks(entries)
    for k, entry in enumerate(entries):
        for smaller in _smaller_entries(entry, size):
            yield [*entries[:k], *smaller, *entries[k + 1 :]]


def _smaller_entries(entry: object, size: int) -> Iterator[list[object]]:
    """What may stand in place of one entry."""
    if not isinstance(entry, dict):
        return
    for selector in _smaller_selectors(entry.get("ranks"), size):
        yield [{**entry, "ranks": selector}]
    if "repeat" in entry:
        yield from _smaller_loops(entry, size)
    elif "steps" in entry:
        if "ranks" in entry and len(entry["steps"]) == 1 and "ranks" not in entry["steps"][0]:
            yield [{**entry["steps"][0], "ranks": entry["ranks"]}]
        for steps in _smaller_lists(entry["steps"], size):
            yield [{**entry, "steps": steps}] if steps else []
    else:
        op = next(key for key in entry if key != "ranks")
        for fields in _smaller_fields(entry[op], size):
            yield [{**entry, op: fields}]


def _smaller_selectors(ranks: object, size: int) -> Iterator[object]:
    """Fewer ranks; a condition, or all ranks, as each single one."""
    if isinstance(ranks, list):
        for left in _without_chunks(ranks):
            if left:
                yield left if len(left) > 1 else left[0]
    elif not isinstance(ranks, int) and size <= _FEW_RANKS:
        yield from range(size)
        for rank in range(size) if size > 2 else ():
            yield [r for r in range(size) if r != rank]


def _smaller_loops(entry: ScenarioData, size: int) -> Iterator[list[Any]]:
    repeat = entry["repeat"]
    if "ranks" in entry:
        yield [{"ranks": entry["ranks"], "steps": repeat["steps"]}]
    else:
        yield repeat["steps"]
    for less in _smaller_numbers(repeat["times"], 1) or (
        [1, 2] if isinstance(repeat["times"], str) else []
    ):
        yield [{**entry, "repeat": {**repeat, "times": less}}]
    for steps in _smaller_lists(repeat["steps"], size):
        if steps:
            yield [{**entry, "repeat": {**repeat, "steps": steps}}]


def _smaller_fields(fields: object, size: int) -> Iterator[object]:
    """Fewer fields, a shorter batch, fewer handles, smaller tensors."""
    if not isinstance(fields, dict):
        return
    for name in fields:
        if name in _OPTIONAL_FIELDS:
            dropped = ("async", "as") if name == "async" else (name,)
            yield {k: v for k, v in fields.items() if k not in dropped}
    for name, value in fields.items():
        if isinstance(value, list) and len(value) > 1 and name in ("ops", "handles"):
            yield from ({**fields, name: left} for left in _without_chunks(value) if left)
        if name == "ops" and isinstance(value, list):
            yield from (
                {**fields, name: left}
                for left in _smaller_lists(value, size)
                if 0 < len(left) <= len(value)
            )
        for smaller in _smaller_tensors(value) if name != "value" else ():
            yield {**fields, name: smaller}
        if (
            isinstance(value, list)
            and len(value) > 1
            and all(isinstance(v, dict) and "shape" in v for v in value)
        ):
            yield {**fields, **{k: v[:1] for k, v in fields.items() if isinstance(v, list)}}


__all__ = ["ScenarioData", "smaller_scenarios", "world_size"]
