"""What might make a failing program right: changes of its data, the least intrusive kinds first. None is right before it is checked."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from distsim.ops.table import OPS

Data = dict[str, Any]
Path = tuple[str | int, ...]

#: Blocking messages and what they are as parts of a batch.
_STARTED: Final = {"send": "isend", "recv": "irecv"}
#: What both sides, or all members, must say alike.
_ALIKE: Final = ("tag", "group", "op", "src", "dst", "group_src", "group_dst", "tensor", "input", "output")
#: The kind of a proposal that leaves out a call; no repair has two of them.
LEAVES_OUT: Final = 3
#: In a program of at most so many steps all of them are changed, those that the findings name first.
_FEW: Final = 24
#: How far a step is moved.
_FAR: Final = 8


class Proposal(NamedTuple):
    """``kind``: 0 order and waiting, 1 arguments, 2 calls that are missing, 3 calls left out. ``words``: what it does."""

    kind: int
    words: str
    data: Data


def proposals(data: Data, lines: dict[Path, int], places: frozenset[int]) -> Iterator[Proposal]:
    """``lines``: of each step, by its path. ``places``: the lines that the findings name; the steps there are changed."""
    paths = [path for path in lines if _op(_at(data, path))]
    named = [path for path in paths if lines[path] in places]
    if len(paths) <= _FEW or not named:
        named += [path for path in paths if path not in named][:_FEW]
    yield from _batches(data, paths)
    yield from _later(data, paths, named)
    yield from _waits_last(data, paths)
    yield from _moves(data, named)
    yield from _arguments(data, named)
    yield from _declared(data, named)
    yield from _for_all(data, paths)
    yield from _missing(data, named)
    for path in named:
        yield Proposal(LEAVES_OUT, f"leave out {_op(_at(data, path))}, line {lines[path]}", _with(data, path, []))


def steps_of(data: Data) -> list[Path]:
    """The path of every entry of the program, at any depth."""
    found: list[Path] = []

    def walk(entries: Any, path: Path) -> None:
        for k, entry in enumerate(entries if isinstance(entries, list) else ()):
            here = (*path, k)
            found.append(here)
            if isinstance(entry, dict):
                walk(entry.get("steps"), (*here, "steps"))
                if isinstance(entry.get("repeat"), dict):
                    walk(entry["repeat"].get("steps"), (*here, "repeat", "steps"))

    walk(data.get("program"), ("program",))
    return found


def _at(data: Any, path: Path) -> Any:
    for part in path:
        data = data[part]
    return data


def _op(entry: Any) -> str:
    """The operation of a step; empty for blocks, loops and what else is no call."""
    if isinstance(entry, str):
        return entry if entry in OPS else ""
    return next((key for key in entry if key in OPS), "") if isinstance(entry, dict) else ""


def _fields(entry: Any) -> Data:
    """A step's arguments, of the short form too."""
    op = _op(entry)
    given = entry.get(op) if isinstance(entry, dict) else None
    if isinstance(given, dict):
        return dict(given)
    return {} if given is None or OPS[op].first_field is None else {str(OPS[op].first_field): given}


def _ranks(entry: Any) -> Any:
    return entry.get("ranks") if isinstance(entry, dict) else None


def _step(op: str, fields: Data, ranks: Any) -> Data:
    return {op: fields} if ranks is None else {op: fields, "ranks": ranks}


def _with(data: Data, path: Path, entries: list[Any]) -> Data:
    """The data with these entries in place of one; a block that is left empty goes too."""
    found = copy.deepcopy(data)
    within = _at(found, path[:-1])
    within[path[-1] : int(path[-1]) + 1] = entries
    if not within and len(path) > 2:
        block = path[:-2] if path[-2] == "steps" and path[-3] != "repeat" else path[:-3]
        return _with(found, block, [])
    return found


def _in_lists(paths: list[Path]) -> dict[Path, list[Path]]:
    found: dict[Path, list[Path]] = {}
    for path in paths:
        found.setdefault(path[:-1], []).append(path)
    return found


def _batches(data: Data, paths: list[Path]) -> Iterator[Proposal]:
    """Sends and receives that follow each other are posted together: everywhere, or in one list of steps."""
    runs = [run for mine in _in_lists(paths).values() for run in _runs(data, mine)]
    if runs:
        yield Proposal(0, "post the messages together with batch_isend_irecv", _batched(data, runs))
    if len(runs) > 1:
        for run in runs:
            yield Proposal(0, "post the messages of one side together with batch_isend_irecv", _batched(data, [run]))


def _runs(data: Data, paths: list[Path]) -> Iterator[list[Path]]:
    """Two or more blocking messages in a row on the same ranks."""
    run: list[Path] = []
    for path in [*paths, None]:
        entry = None if path is None else _at(data, path)
        fits = path is not None and _op(entry) in _STARTED
        if (
            fits
            and path is not None
            and (not run or (path[-1] == int(run[-1][-1]) + 1 and _ranks(entry) == _ranks(_at(data, run[-1]))))
        ):
            run.append(path)
            continue
        if len(run) > 1:
            yield run
        run = [path] if fits and path is not None else []


def _batched(data: Data, runs: list[list[Path]]) -> Data:
    found = copy.deepcopy(data)
    for run in sorted(runs, reverse=True):
        entries = [_at(data, path) for path in run]
        ops = [{_STARTED[_op(entry)]: _fields(entry)} for entry in entries]
        within = _at(found, run[0][:-1])
        within[run[0][-1] : int(run[-1][-1]) + 1] = [_step("batch_isend_irecv", {"ops": ops}, _ranks(entries[0]))]
    return found


def _later(data: Data, paths: list[Path], named: list[Path]) -> Iterator[Proposal]:
    """Sends, or receives, are started here and waited for at the end of their list."""
    for op, started in _STARTED.items():
        everywhere = [path for path in paths if _op(_at(data, path)) == op]
        chosen = [path for path in named if path in everywhere]
        if not chosen:
            continue
        yield Proposal(0, f"{started} in place of {op}, waited for at the end", _started(data, everywhere))
        for path in chosen if len(chosen) > 1 else ():
            yield Proposal(0, f"{started} in place of one {op}, waited for at the end", _started(data, [path]))


def _started(data: Data, paths: list[Path]) -> Data:
    found = copy.deepcopy(data)
    for k, path in enumerate(sorted(paths, reverse=True)):
        entry, within = _at(data, path), _at(found, path[:-1])
        handle = f"{_STARTED[_op(entry)]}_{len(paths) - k}"
        within[int(path[-1])] = _step(_STARTED[_op(entry)], {**_fields(entry), "as": handle}, _ranks(entry))
        within.append(_step("wait", {"handles": [handle]}, _ranks(entry)))
    return found


def _waits_last(data: Data, paths: list[Path]) -> Iterator[Proposal]:
    """Every request is waited for at the end of its list."""
    found, moved = copy.deepcopy(data), False
    for where in _in_lists([path for path in paths if _op(_at(data, path)) == "wait"]):
        within = _at(found, where)
        ordered = sorted(within, key=lambda entry: _op(entry) == "wait")
        moved = moved or ordered != within
        within[:] = ordered
    if moved:
        yield Proposal(0, "wait for the requests at the end", found)


def _moves(data: Data, named: list[Path]) -> Iterator[Proposal]:
    """A step goes to another place of its list, near ones first."""
    for far in range(1, _FAR + 1):
        for path in named:
            within, k = _at(data, path[:-1]), int(path[-1])
            for to in (k - far, k + far):
                if 0 <= to < len(within):
                    found = copy.deepcopy(data)
                    there = _at(found, path[:-1])
                    there.insert(to, there.pop(k))
                    yield Proposal(0, f"{_op(within[k])} {'before' if to < k else 'after'} {_title(within[to])}", found)


def _title(entry: Any) -> str:
    return _op(entry) or "the steps beside it"


def _arguments(data: Data, named: list[Path]) -> Iterator[Proposal]:
    """A step says what another one says: tag, group, root, reduction, tensor."""
    for path in named:
        mine = _fields(_at(data, path))
        for other in named:
            theirs = _fields(_at(data, other))
            for key in _ALIKE if other != path else ():
                if mine.get(key) != theirs.get(key):
                    fields = {k: v for k, v in mine.items() if k != key} | ({key: theirs[key]} if key in theirs else {})
                    changed = _step(_op(_at(data, path)), fields, _ranks(_at(data, path)))
                    yield Proposal(1, f"{_op(_at(data, path))}: the same {key} as the other call", _with(data, path, [changed]))
        for key in ("src", "dst") if OPS[_op(_at(data, path))].root_field else ():
            if isinstance(mine.get(key), str | dict):
                changed = _step(_op(_at(data, path)), {**mine, key: 0}, _ranks(_at(data, path)))
                yield Proposal(1, f"{_op(_at(data, path))}: one root for all", _with(data, path, [changed]))


def _declared(data: Data, named: list[Path]) -> Iterator[Proposal]:
    """A tensor is declared with the shape and type of one that it meets."""
    declared = data.get("tensors") or {}
    used = [n for path in named for n in _fields(_at(data, path)).values() if isinstance(n, str) and n in declared]
    for one in dict.fromkeys(used):
        for key in ("shape", "dtype"):
            for other in dict.fromkeys(used):
                mine, theirs = declared[one], declared[other]
                if isinstance(mine, dict) and isinstance(theirs, dict) and mine.get(key) != theirs.get(key):
                    tensor = {k: v for k, v in mine.items() if k != key} | ({key: theirs[key]} if key in theirs else {})
                    changed = {**data, "tensors": {**declared, one: tensor}}
                    yield Proposal(1, f"the tensor {one} with the {key} of {other}", changed)


def _for_all(data: Data, paths: list[Path]) -> Iterator[Proposal]:
    """A call that some ranks alone make is made by all."""
    for path in paths:
        entry = _at(data, path)
        if _ranks(entry) is not None and OPS[_op(entry)].kind != "p2p":
            changed = {key: value for key, value in entry.items() if key != "ranks"}
            yield Proposal(2, f"{_op(entry)} on all ranks", _with(data, path, [changed]))


def _missing(data: Data, named: list[Path]) -> Iterator[Proposal]:
    """A collective that one list has stands in another list of steps too."""
    lists = [path[:-1] for path in steps_of(data)]
    for path in named:
        entry = _at(data, path)
        if OPS[_op(entry)].kind == "p2p":
            continue
        for where in dict.fromkeys(lists):
            for k in reversed(range(len(_at(data, where)) + 1)) if where != path[:-1] else ():
                found = copy.deepcopy(data)
                _at(found, where).insert(k, copy.deepcopy(entry))
                yield Proposal(2, f"{_op(entry)} on the other ranks as well", found)


__all__ = ["LEAVES_OUT", "Path", "Proposal", "proposals", "steps_of"]
