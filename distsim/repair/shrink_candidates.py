"""Enumerate scenarios that are smaller than a given one in one respect, the largest steps first.

Scenarios are plain data (parsed YAML). Some candidates are not valid scenarios; `shrink` skips
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from distsim.repair.remove_rank import without_rank
from distsim.repair.scenario_data import ScenarioData

#: Keys without which a file is still a scenario.
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
#: Fields of a call that may be omitted; ``async`` is omitted together with the handle's name. A
#: ``group`` is never omitted: the call would become one on the default group.
_OPTIONAL_FIELDS: Final = (
    "on",
    "tag",
    "timeout",
    "async",
    "as",
    "op",
    "assume_src",
    "use_local_synchronization",
    "buffer",
    "value",
)
#: In a world of at most this many ranks, a condition is replaced by each single rank.
_FEW_RANKS: Final = 16


def smaller_scenarios(data: ScenarioData) -> Iterator[ScenarioData]:
    """The smaller scenarios; some may be invalid."""
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
    """Fewer ranks: an axis of the mesh is shorter, or ranks are removed."""
    size, mesh = world_size(data), data.get("mesh") or {}
    for axis, length in mesh.items():
        for shorter in _smaller_numbers(length, 1):
            yield {**data, "mesh": {**mesh, axis: shorter}, "world": size // length * shorter}
    if not isinstance(data["world"], int) or mesh:
        return
    for fewer in _smaller_numbers(size, 2)[:-1]:
        reduced = data
        for rank in reversed(range(fewer, size)):
            reduced = without_rank(reduced, rank)
        yield {**reduced, "world": fewer}
    if 2 < size <= 4 * _FEW_RANKS:
        for rank in reversed(range(size)):
            yield {**without_rank(data, rank), "world": size - 1}


def _smaller_numbers(number: object, least: int) -> list[int]:
    """The least number, the number halved repeatedly, and an eighth less; ascending."""
    if not isinstance(number, int) or isinstance(number, bool) or number <= least:
        return []
    return sorted({least, *_halves(number, least), number - max(1, number // 8)})


def _halves(number: object, least: int) -> list[int]:
    """The number halved repeatedly, down to above the least; ascending."""
    if not isinstance(number, int):
        return []
    halves = [number >> k for k in range(1, 63)]
    return sorted(half for half in halves if half > least)


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
    """A declared tensor or an inline shape: one dimension, fewer elements, no values or dtype."""
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
    """The list without each of its halves, then quarters, down to single items."""
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
    """The lists of steps that may replace one entry."""
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
        for remaining in _without_chunks(ranks):
            if remaining:
                yield remaining if len(remaining) > 1 else remaining[0]
    elif not isinstance(ranks, int) and size <= _FEW_RANKS:
        yield from range(size)
        if size > 2:
            for rank in range(size):
                yield [other for other in range(size) if other != rank]


def _smaller_loops(entry: ScenarioData, size: int) -> Iterator[list[Any]]:
    repeat = entry["repeat"]
    if "ranks" in entry:
        yield [{"ranks": entry["ranks"], "steps": repeat["steps"]}]
    else:
        yield repeat["steps"]
    fewer = _smaller_numbers(repeat["times"], 1)
    if isinstance(repeat["times"], str):
        fewer = [1, 2]  # in place of an expression
    for times in fewer:
        yield [{**entry, "repeat": {**repeat, "times": times}}]
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
        if isinstance(value, list):
            for smaller in _smaller_list_fields(name, value, size):
                yield {**fields, name: smaller}
        if name != "value":
            for tensor in _smaller_tensors(value):
                yield {**fields, name: tensor}
        if isinstance(value, list) and len(value) > 1 and all(map(_has_shape, value)):
            # Inputs and outputs must have equal lengths: shorten all lists together.
            shortened = {key: items[:1] for key, items in fields.items() if isinstance(items, list)}
            yield {**fields, **shortened}


def _smaller_list_fields(name: str, value: list[Any], size: int) -> Iterator[list[Any]]:
    """A shorter list of messages or handles, or one with smaller messages."""
    if len(value) > 1 and name in ("ops", "handles"):
        yield from (remaining for remaining in _without_chunks(value) if remaining)
    if name == "ops":
        for smaller in _smaller_lists(value, size):
            if 0 < len(smaller) <= len(value):
                yield smaller


def _has_shape(value: object) -> bool:
    return isinstance(value, dict) and "shape" in value


__all__ = ["ScenarioData", "smaller_scenarios", "world_size"]
