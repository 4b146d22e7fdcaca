"""What might make a failing program right: changes of its data, the least intrusive kinds first. None is right before it is checked."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain, islice
from typing import Final, NamedTuple

from distsim.ops.table import OPS
from distsim.repair.counts import one_count, padded, transposed
from distsim.repair.messages import other_sides, pairs, peers
from distsim.repair.missing import elsewhere, for_all, goes_on
from distsim.repair.slips import batched_requests, group_ranks, one_shape
from distsim.repair.steps import (
    Data,
    Path,
    at,
    fields_of,
    in_lists,
    op_of,
    owners,
    parts_of,
    ranks_of,
    step,
    steps_of,
    with_entries,
)  # fmt: skip

#: Blocking messages and what they are as parts of a batch.
_STARTED: Final = {"send": "isend", "recv": "irecv"}
#: What both sides, or all members, must say alike.
_ALIKE: Final = ("tag", "group", "op", "src", "dst", "group_src", "group_dst", "tensor", "input", "output")
#: The kind of a proposal that leaves out a call; no repair has two of them.
ADDS_CALLS: Final = 2
LEAVES_OUT: Final = 3
#: In a program of at most so many steps all of them are changed, those that the findings name first.
_FEW: Final = 24
#: Changes of one kind that are proposed.
_MOST: Final = 150
#: How far a step is moved.
_FAR: Final = 8


class Proposal(NamedTuple):
    """``kind``: 0 order and waiting, 1 arguments, 2 calls that are missing, 3 calls left out. ``words``: what it does."""

    kind: int
    words: str
    data: Data


class Fault(NamedTuple):
    """``lines``: of each call, by its path. ``places``: the lines that the findings name; the calls there are changed. ``odd``: ranks that
    differ from the others, whose calls are changed first. ``mismatch``: what calls say differs, or no call may say it, so that is
    looked at before their order."""

    lines: dict[Path, int]
    places: frozenset[int]
    odd: frozenset[int] = frozenset()
    mismatch: bool = False


def proposals(data: Data, fault: Fault) -> Iterator[Proposal]:
    """What may be tried, in this order."""
    lines, places = fault.lines, fault.places
    paths = [path for path in steps_of(data) if op_of(at(data, path))]
    named = [path for path in paths if lines[path] in places]
    named += [path for path in _started_by(data, paths, named) if path not in named]
    if len(paths) <= _FEW or not named:
        named += [path for path in paths if path not in named][:_FEW]
    parts = parts_of(data, paths)
    calls = named + [part for part in parts if lines.get(part, 0) in places or len(paths) <= _FEW]
    if fault.odd:
        named.sort(key=lambda path: fault.odd.isdisjoint(owners(data, path)))
        calls.sort(key=lambda path: fault.odd.isdisjoint(owners(data, path)))
    order = (_batches(data, paths), _of(0, batched_requests(data, paths)), _later(data, paths, named), _waits_last(data, paths))
    said = (_of(1, pairs(data, calls, paths + parts)), islice(_arguments(data, named), _MOST))
    declared = (_of(1, chain(group_ranks(data, named), one_shape(data), transposed(data, named), padded(data, named))),
                _declared(data, named))  # fmt: skip
    yield from chain(*said, *declared, *order) if fault.mismatch else chain(*order, said[0])
    yield from _of(1, one_count(data))
    yield from islice(_moves(data, named), _MOST)
    yield from islice(_moves(data, [part for part in calls if part in parts]), _MOST)
    yield from () if fault.mismatch else chain(*said[1:])
    yield from _of(1, peers(data, calls))
    for changes in (goes_on(data), for_all(data, paths), elsewhere(data, named), other_sides(data, calls)):
        yield from _of(2, changes)
    for path in calls:
        where = f"line {lines[path]}" if path in lines else "of the batch"
        yield Proposal(LEAVES_OUT, f"leave out {op_of(at(data, path))}, {where}", with_entries(data, path, []))


def _of(kind: int, changes: Iterator[tuple[str, Data]]) -> Iterator[Proposal]:
    return (Proposal(kind, words, changed) for words, changed in islice(changes, _MOST))


def _started_by(data: Data, paths: list[Path], named: list[Path]) -> list[Path]:
    """The calls whose requests the named waits wait for."""
    waited: set[tuple[Path, str]] = set()
    for path in named:
        handles = fields_of(at(data, path)).get("handles") if op_of(at(data, path)) == "wait" else None
        waited |= {(path[:-1], str(h)) for h in (handles if isinstance(handles, list) else [handles])}
    return [path for path in paths if (path[:-1], str(fields_of(at(data, path)).get("as", ""))) in waited]


def _batches(data: Data, paths: list[Path]) -> Iterator[Proposal]:
    """Sends and receives that follow each other are posted together: everywhere, or in one list of steps."""
    runs = [run for mine in in_lists(paths).values() for run in _runs(data, mine)]
    if runs:
        yield Proposal(0, "post the messages together with batch_isend_irecv", _batched(data, runs))
    if len(runs) > 1:
        for run in runs:
            yield Proposal(0, "post the messages of one side together with batch_isend_irecv", _batched(data, [run]))


def _runs(data: Data, paths: list[Path]) -> Iterator[list[Path]]:
    """Two or more blocking messages in a row on the same ranks."""
    run: list[Path] = []
    for path in [*paths, None]:
        entry = None if path is None else at(data, path)
        fits = path is not None and op_of(entry) in _STARTED
        if (
            fits
            and path is not None
            and (not run or (path[-1] == int(run[-1][-1]) + 1 and ranks_of(entry) == ranks_of(at(data, run[-1]))))
        ):
            run.append(path)
            continue
        if len(run) > 1:
            yield run
        run = [path] if fits and path is not None else []


def _batched(data: Data, runs: list[list[Path]]) -> Data:
    found = copy.deepcopy(data)
    for run in sorted(runs, reverse=True):
        entries = [at(data, path) for path in run]
        ops = [{_STARTED[op_of(entry)]: fields_of(entry)} for entry in entries]
        within = at(found, run[0][:-1])
        within[run[0][-1] : int(run[-1][-1]) + 1] = [step("batch_isend_irecv", {"ops": ops}, ranks_of(entries[0]))]
    return found


def _later(data: Data, paths: list[Path], named: list[Path]) -> Iterator[Proposal]:
    """Sends, or receives, are started here and waited for at the end of their list."""
    for op, started in _STARTED.items():
        everywhere = [path for path in paths if op_of(at(data, path)) == op]
        chosen = [path for path in named if path in everywhere]
        if not chosen:
            continue
        yield Proposal(0, f"{started} in place of {op}, waited for at the end", _started(data, everywhere))
        for path in chosen if len(chosen) > 1 else ():
            yield Proposal(0, f"{started} in place of one {op}, waited for at the end", _started(data, [path]))


def _started(data: Data, paths: list[Path]) -> Data:
    found = copy.deepcopy(data)
    for k, path in enumerate(sorted(paths, reverse=True)):
        entry, within = at(data, path), at(found, path[:-1])
        handle = f"{_STARTED[op_of(entry)]}_{len(paths) - k}"
        within[int(path[-1])] = step(_STARTED[op_of(entry)], {**fields_of(entry), "as": handle}, ranks_of(entry))
        within.append(step("wait", {"handles": [handle]}, ranks_of(entry)))
    return found


def _waits_last(data: Data, paths: list[Path]) -> Iterator[Proposal]:
    """Every request is waited for at the end of its list."""
    found, moved = copy.deepcopy(data), False
    lists = in_lists([path for path in paths if op_of(at(data, path)) == "wait"])
    for where in sorted(
        lists, key=len, reverse=True
    ):  # what lies deepest first: the lists around it keep their numbers until then
        within = at(found, where)
        ordered = sorted(within, key=lambda entry: op_of(entry) == "wait")
        moved = moved or ordered != within
        within[:] = ordered
    if moved:
        yield Proposal(0, "wait for the requests at the end", found)


def _moves(data: Data, named: list[Path]) -> Iterator[Proposal]:
    """A step goes to another place of its list, near ones first."""
    for far in range(1, _FAR + 1):
        for path in named:
            within, k = at(data, path[:-1]), int(path[-1])
            for to in (k - far, k + far):
                if 0 <= to < len(within):
                    found = copy.deepcopy(data)
                    there = at(found, path[:-1])
                    there.insert(to, there.pop(k))
                    yield Proposal(0, f"{op_of(within[k])} {'before' if to < k else 'after'} {_title(within[to])}", found)


def _title(entry: object) -> str:
    return op_of(entry) or "the steps beside it"


def _arguments(data: Data, named: list[Path]) -> Iterator[Proposal]:
    """A step says what another one says: tag, group, root, reduction, tensor."""
    for path in named:
        mine = fields_of(at(data, path))
        for other in named:
            theirs = fields_of(at(data, other))
            for key in _ALIKE if other != path else ():
                if mine.get(key) != theirs.get(key):
                    fields = {k: v for k, v in mine.items() if k != key} | ({key: theirs[key]} if key in theirs else {})
                    changed = step(op_of(at(data, path)), fields, ranks_of(at(data, path)))
                    yield Proposal(
                        1, f"{op_of(at(data, path))}: the same {key} as the other call", with_entries(data, path, [changed])
                    )
        for key in ("src", "dst") if OPS[op_of(at(data, path))].root_field else ():
            if isinstance(mine.get(key), str | dict):
                changed = step(op_of(at(data, path)), {**mine, key: 0}, ranks_of(at(data, path)))
                yield Proposal(1, f"{op_of(at(data, path))}: one root for all", with_entries(data, path, [changed]))


def _declared(data: Data, named: list[Path]) -> Iterator[Proposal]:
    """A tensor is declared with the shape and type of one that it meets."""
    declared = data.get("tensors") or {}
    used = [n for path in named for n in fields_of(at(data, path)).values() if isinstance(n, str) and n in declared]
    for one in dict.fromkeys(used):
        for key in ("shape", "dtype"):
            for other in dict.fromkeys(used):
                mine, theirs = declared[one], declared[other]
                if isinstance(mine, dict) and isinstance(theirs, dict) and mine.get(key) != theirs.get(key):
                    tensor = {k: v for k, v in mine.items() if k != key} | ({key: theirs[key]} if key in theirs else {})
                    changed = {**data, "tensors": {**declared, one: tensor}}
                    yield Proposal(1, f"the tensor {one} with the {key} of {other}", changed)


__all__ = ["ADDS_CALLS", "LEAVES_OUT", "Fault", "Proposal", "proposals"]
