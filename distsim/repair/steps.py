"""The calls of a scenario's data: where they stand, what they say, and the data with others in their place."""

from __future__ import annotations

import copy
from typing import Any

from distsim.ops.table import OPS

Data = dict[str, Any]
Path = tuple[str | int, ...]


def steps_of(data: Data) -> list[Path]:
    """The path of every entry of the program, at any depth."""
    found: list[Path] = []

    def walk(entries: object, path: Path) -> None:
        for k, entry in enumerate(entries if isinstance(entries, list) else ()):
            here = (*path, k)
            found.append(here)
            if isinstance(entry, dict):
                walk(entry.get("steps"), (*here, "steps"))
                if isinstance(entry.get("repeat"), dict):
                    walk(entry["repeat"].get("steps"), (*here, "repeat", "steps"))

    walk(data.get("program"), ("program",))
    return found


def at(data: Any, path: Path) -> Any:
    for part in path:
        data = data[part]
    return data


def op_of(entry: object) -> str:
    """The operation of a step; empty for blocks, loops and what else is no call."""
    if isinstance(entry, str):
        return entry if entry in OPS else ""
    return next((key for key in entry if key in OPS), "") if isinstance(entry, dict) else ""


def fields_of(entry: Any) -> Data:
    """A step's arguments, of the short form too."""
    op = op_of(entry)
    given = entry.get(op) if isinstance(entry, dict) else None
    if isinstance(given, dict):
        return dict(given)
    return {} if given is None or OPS[op].first_field is None else {str(OPS[op].first_field): given}


def ranks_of(entry: object) -> object:
    return entry.get("ranks") if isinstance(entry, dict) else None


def step(op: str, fields: Data, ranks: Any) -> Data:
    return {op: fields} if ranks is None else {op: fields, "ranks": ranks}


def with_entries(data: Data, path: Path, entries: list[Any]) -> Data:
    """The data with these entries in place of one; a block that is left empty goes too."""
    found = copy.deepcopy(data)
    within = at(found, path[:-1])
    within[path[-1] : int(path[-1]) + 1] = entries
    if not within and len(path) > 2:
        block = path[:-2] if path[-2] == "steps" and path[-3] != "repeat" else path[:-3]
        return with_entries(found, block, [])
    return found


def in_lists(paths: list[Path]) -> dict[Path, list[Path]]:
    found: dict[Path, list[Path]] = {}
    for path in paths:
        found.setdefault(path[:-1], []).append(path)
    return found


def parts_of(data: Data, paths: list[Path]) -> list[Path]:
    """The messages of every batch."""
    found: list[Path] = []
    for path in paths:
        entry = at(data, path)
        if op_of(entry) == "batch_isend_irecv" and isinstance(ops := fields_of(entry).get("ops"), list):
            found += [(*path, "batch_isend_irecv", "ops", k) for k in range(len(ops))]
    return found


def owners(data: Data, path: Path) -> tuple[int, ...]:
    """The ranks, where they are written as numbers, that the entry or the block around it is for; empty where they are not."""
    for end in range(len(path), 1, -1):
        chosen = ranks_of(at(data, path[:end])) if isinstance(path[end - 1], int) else None
        if isinstance(chosen, int) and not isinstance(chosen, bool):
            return (chosen,)
        if isinstance(chosen, list):
            return tuple(r for r in chosen if isinstance(r, int))
    return ()


def list_of(data: Data, rank: int) -> Path | None:
    """The list of steps that one rank alone has; the longest, if there are several."""
    blocks = [p for p in steps_of(data) if ranks_of(at(data, p)) == rank and isinstance(at(data, p).get("steps"), list)]
    return max(((*p, "steps") for p in blocks), key=lambda p: len(at(data, p)), default=None)
