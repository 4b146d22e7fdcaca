"""Makes a scenario small that shows something: leaves out whatever it can do without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from distsim.errors import DistsimError

Mapping = dict[str, Any]


def shrink(mapping: Mapping, shows: Callable[[Mapping], bool], most: int = 600) -> Mapping:
    """A smaller scenario that still ``shows`` it. At most so many are tried."""
    tried, smaller = 0, True
    while smaller and tried < most:
        smaller = False
        for candidate in _candidates(mapping):
            tried += 1
            if tried < most and _holds(candidate, shows):
                mapping, smaller = candidate, True
                break
    return mapping


def _holds(mapping: Mapping, shows: Callable[[Mapping], bool]) -> bool:
    try:
        return shows(mapping)
    except DistsimError:  # no scenario any more
        return False


def _candidates(mapping: Mapping) -> Iterator[Mapping]:
    """Smaller by one thing, the largest steps first."""
    for key in ("faults", "options", "cluster", "tensors", "groups"):
        if key in mapping:
            yield {k: v for k, v in mapping.items() if k != key}
    for key in ("options", "groups", "tensors"):
        for name in mapping.get(key, ()):
            yield {**mapping, key: {k: v for k, v in mapping[key].items() if k != name}}
    for k in range(len(mapping.get("faults", ()))):
        yield {**mapping, "faults": [f for i, f in enumerate(mapping["faults"]) if i != k]}
    if not isinstance(mapping["world"], int):
        yield {**mapping, "world": mapping["world"]["nodes"] * mapping["world"]["ranks_per_node"]}
    for program in _programs(mapping["program"], _size(mapping)):
        yield {**mapping, "program": program}
    if isinstance(mapping["world"], int) and mapping["world"] > 2:
        yield {**mapping, "world": mapping["world"] - 1}


def _size(mapping: Mapping) -> int:
    world = mapping["world"]
    return world if isinstance(world, int) else int(world["nodes"] * world["ranks_per_node"])


def _programs(entries: list[Mapping], size: int) -> Iterator[list[Mapping]]:
    for k in range(len(entries)):
        yield entries[:k] + entries[k + 1 :]
    for k, entry in enumerate(entries):
        for smaller in _entries(entry, size):
            yield [*entries[:k], *smaller, *entries[k + 1 :]]


def _entries(entry: Mapping, size: int) -> Iterator[list[Mapping]]:
    """What may stand in place of one entry."""
    ranks = entry.get("ranks", list(range(size)))
    if isinstance(ranks, list):
        for rank in ranks:
            left = [r for r in ranks if r != rank]
            yield [{**entry, "ranks": left if len(left) > 1 else left[0]}] if left else []
    if "repeat" in entry:
        repeat = entry["repeat"]
        yield repeat["steps"]
        if repeat["times"] > 1:
            yield [{**entry, "repeat": {**repeat, "times": repeat["times"] - 1}}]
        yield from ([{**entry, "repeat": {**repeat, "steps": steps}}] for steps in _programs(repeat["steps"], size) if steps)
        return
    op = next(key for key in entry if key != "ranks")
    for fields in _fields(entry[op] or {}):
        yield [{**entry, op: fields}]


def _fields(fields: Any) -> Iterator[Any]:
    """Fewer fields, a shorter batch, a plain tensor, a smaller one."""
    if not isinstance(fields, dict):
        return
    for name in fields:
        if name in ("on", "tag", "timeout", "async", "as", "group", "op", "assume_src", "use_local_synchronization"):
            dropped = ("async", "as") if name == "async" else (name,)
            yield {k: v for k, v in fields.items() if k not in dropped}
    if len(fields.get("ops", ())) > 1:
        for k in range(len(fields["ops"])):
            yield {**fields, "ops": fields["ops"][:k] + fields["ops"][k + 1 :]}
    if isinstance(fields.get("handles"), list) and len(fields["handles"]) > 1:
        for k in range(len(fields["handles"])):
            yield {**fields, "handles": fields["handles"][:k] + fields["handles"][k + 1 :]}
    yield from _smaller(fields)


def _smaller(fields: Mapping) -> Iterator[Mapping]:
    for name, value in fields.items():
        if (
            isinstance(value, dict)
            and value.get("shape") not in (None, [4])
            and len(value["shape"]) == 1
            and value["shape"][0] > 4
        ):
            small = copy.deepcopy(fields)
            small[name]["shape"] = [4]
            yield small
        if isinstance(value, list) and len(value) > 1 and all(isinstance(v, dict) and "shape" in v for v in value):
            both = {k: v[:1] for k, v in fields.items() if isinstance(v, list)}
            yield {**fields, **both}
            return


__all__ = ["shrink"]
