"""What might make a failing program right: changes of its data, the least intrusive kinds first.
None is right before it is checked.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain, islice
from typing import Final, NamedTuple

from distsim.operations.registry import OPERATIONS
from distsim.repair.fix_arguments import batch_requests, unify_shapes, use_group_ranks
from distsim.repair.fix_counts import pad_rows, transpose_splits, unify_counts
from distsim.repair.fix_messages import add_counterparts, align_with_counterparts, change_peers
from distsim.repair.fix_missing import (
    complete_early_exits,
    copy_to_other_ranks,
    extend_to_all_ranks,
)
from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    batch_part_paths,
    fields_of,
    make_step,
    op_of,
    owner_ranks,
    paths_by_list,
    ranks_of,
    step_paths,
    value_at,
    with_steps_replaced,
)

#: Blocking messages and what they are as parts of a batch.
_NONBLOCKING_OP: Final = {"send": "isend", "recv": "irecv"}
#: What both sides, or all members, must say alike.
_SHARED_FIELDS: Final = (
    "tag",
    "group",
    "op",
    "src",
    "dst",
    "group_src",
    "group_dst",
    "tensor",
    "input",
    "output",
)
#: The kind of a proposal that leaves out a call; no repair has two of them.
ADDS_CALLS: Final = 2
REMOVES_CALLS: Final = 3
#: In a program of at most so many steps all of them are changed, those that the findings name
#: first.
_FEW_STEPS: Final = 24
#: Changes of one kind that are proposed.
_MAX_CHANGES: Final = 150
#: How far a step is moved.
_MAX_DISTANCE: Final = 8


class RepairProposal(NamedTuple):
    """``kind``: 0 order and waiting, 1 arguments, 2 calls that are missing, 3 calls left out.
    ``words``: what it does.
    """

    kind: int
    words: str
    data: ScenarioData


class FailureHints(NamedTuple):
    """``lines``: of each call, by its path. ``places``: the lines that the findings name; the calls
    there are changed. ``odd``: ranks that differ from the others, whose calls are changed first.
    ``mismatch``: what calls say differs, or no call may say it, so that is looked at before their
    order."""

    lines: dict[DataPath, int]
    places: frozenset[int]
    odd: frozenset[int] = frozenset()
    mismatch: bool = False


def propose_repairs(data: ScenarioData, fault: FailureHints) -> Iterator[RepairProposal]:
    """What may be tried, in this order."""
    lines, places = fault.lines, fault.places
    paths = [path for path in step_paths(data) if op_of(value_at(data, path))]
    named = [path for path in paths if lines[path] in places]
    named += [path for path in _calls_awaited_by(data, paths, named) if path not in named]
    if len(paths) <= _FEW_STEPS or not named:
        named += [path for path in paths if path not in named][:_FEW_STEPS]
    parts = batch_part_paths(data, paths)
    calls = named + [
        part for part in parts if lines.get(part, 0) in places or len(paths) <= _FEW_STEPS
    ]
    if fault.odd:
        named.sort(key=lambda path: fault.odd.isdisjoint(owner_ranks(data, path)))
        calls.sort(key=lambda path: fault.odd.isdisjoint(owner_ranks(data, path)))
    order = (
        _batch_messages(data, paths),
        _with_kind(0, batch_requests(data, paths)),
        _make_nonblocking(data, paths, named),
        _move_waits_last(data, paths),
    )
    said = (
        _with_kind(1, align_with_counterparts(data, calls, paths + parts)),
        islice(_copy_arguments(data, named), _MAX_CHANGES),
    )
    declared = (
        _with_kind(
            1,
            chain(
                use_group_ranks(data, named),
                unify_shapes(data),
                transpose_splits(data, named),
                pad_rows(data, named),
            ),
        ),
        _copy_declarations(data, named),
    )
    yield from chain(*said, *declared, *order) if fault.mismatch else chain(*order, said[0])
    yield from _with_kind(1, unify_counts(data))
    yield from islice(_move_steps(data, named), _MAX_CHANGES)
    yield from islice(_move_steps(data, [part for part in calls if part in parts]), _MAX_CHANGES)
    yield from () if fault.mismatch else chain(*said[1:])
    yield from _with_kind(1, change_peers(data, calls))
    for changes in (
        complete_early_exits(data),
        extend_to_all_ranks(data, paths),
        copy_to_other_ranks(data, named),
        add_counterparts(data, calls),
    ):
        yield from _with_kind(2, changes)
    for path in calls:
        where = f"line {lines[path]}" if path in lines else "of the batch"
        yield RepairProposal(
            REMOVES_CALLS,
            f"leave out {op_of(value_at(data, path))}, {where}",
            with_steps_replaced(data, path, []),
        )


def _with_kind(kind: int, changes: Iterator[tuple[str, ScenarioData]]) -> Iterator[RepairProposal]:
    return (
        RepairProposal(kind, words, changed) for words, changed in islice(changes, _MAX_CHANGES)
    )


def _calls_awaited_by(
    data: ScenarioData, paths: list[DataPath], named: list[DataPath]
) -> list[DataPath]:
    """The calls whose requests the named waits wait for."""
    waited: set[tuple[DataPath, str]] = set()
    for path in named:
        handles = (
            fields_of(value_at(data, path)).get("handles")
            if op_of(value_at(data, path)) == "wait"
            else None
        )
        waited |= {
            (path[:-1], str(h)) for h in (handles if isinstance(handles, list) else [handles])
        }
    return [
        path
        for path in paths
        if (path[:-1], str(fields_of(value_at(data, path)).get("as", ""))) in waited
    ]


def _batch_messages(data: ScenarioData, paths: list[DataPath]) -> Iterator[RepairProposal]:
    """Sends and receives that follow each other are posted together: everywhere, or in one list of
    steps.
    """
    runs = [run for mine in paths_by_list(paths).values() for run in _message_runs(data, mine)]
    if runs:
        yield RepairProposal(
            0, "post the messages together with batch_isend_irecv", _with_batches(data, runs)
        )
    if len(runs) > 1:
        for run in runs:
            yield RepairProposal(
                0,
                "post the messages of one side together with batch_isend_irecv",
                _with_batches(data, [run]),
            )


def _message_runs(data: ScenarioData, paths: list[DataPath]) -> Iterator[list[DataPath]]:
    """Two or more blocking messages in a row on the same ranks."""
    run: list[DataPath] = []
    for path in [*paths, None]:
        entry = None if path is None else value_at(data, path)
        fits = path is not None and op_of(entry) in _NONBLOCKING_OP
        if (
            fits
            and path is not None
            and (
                not run
                or (
                    path[-1] == int(run[-1][-1]) + 1
                    and ranks_of(entry) == ranks_of(value_at(data, run[-1]))
                )
            )
        ):
            run.append(path)
            continue
        if len(run) > 1:
            yield run
        run = [path] if fits and path is not None else []


def _with_batches(data: ScenarioData, runs: list[list[DataPath]]) -> ScenarioData:
    found = copy.deepcopy(data)
    for run in sorted(runs, reverse=True):
        entries = [value_at(data, path) for path in run]
        ops = [{_NONBLOCKING_OP[op_of(entry)]: fields_of(entry)} for entry in entries]
        within = value_at(found, run[0][:-1])
        within[run[0][-1] : int(run[-1][-1]) + 1] = [
            make_step("batch_isend_irecv", {"ops": ops}, ranks_of(entries[0]))
        ]
    return found


def _make_nonblocking(
    data: ScenarioData, paths: list[DataPath], named: list[DataPath]
) -> Iterator[RepairProposal]:
    """Sends, or receives, are started here and waited for at the end of their list."""
    for op, started in _NONBLOCKING_OP.items():
        everywhere = [path for path in paths if op_of(value_at(data, path)) == op]
        chosen = [path for path in named if path in everywhere]
        if not chosen:
            continue
        yield RepairProposal(
            0,
            f"{started} in place of {op}, waited for at the end",
            _with_nonblocking_calls(data, everywhere),
        )
        for path in chosen if len(chosen) > 1 else ():
            yield RepairProposal(
                0,
                f"{started} in place of one {op}, waited for at the end",
                _with_nonblocking_calls(data, [path]),
            )


def _with_nonblocking_calls(data: ScenarioData, paths: list[DataPath]) -> ScenarioData:
    found = copy.deepcopy(data)
    for k, path in enumerate(sorted(paths, reverse=True)):
        entry, within = value_at(data, path), value_at(found, path[:-1])
        handle = f"{_NONBLOCKING_OP[op_of(entry)]}_{len(paths) - k}"
        within[int(path[-1])] = make_step(
            _NONBLOCKING_OP[op_of(entry)], {**fields_of(entry), "as": handle}, ranks_of(entry)
        )
        within.append(make_step("wait", {"handles": [handle]}, ranks_of(entry)))
    return found


def _move_waits_last(data: ScenarioData, paths: list[DataPath]) -> Iterator[RepairProposal]:
    """Every request is waited for at the end of its list."""
    found, moved = copy.deepcopy(data), False
    lists = paths_by_list([path for path in paths if op_of(value_at(data, path)) == "wait"])
    for where in sorted(
        lists, key=len, reverse=True
    ):  # what lies deepest first: the lists around it keep their numbers until then
        within = value_at(found, where)
        ordered = sorted(within, key=lambda entry: op_of(entry) == "wait")
        moved = moved or ordered != within
        within[:] = ordered
    if moved:
        yield RepairProposal(0, "wait for the requests at the end", found)


def _move_steps(data: ScenarioData, named: list[DataPath]) -> Iterator[RepairProposal]:
    """A step goes to another place of its list, near ones first."""
    for far in range(1, _MAX_DISTANCE + 1):
        for path in named:
            within, k = value_at(data, path[:-1]), int(path[-1])
            for to in (k - far, k + far):
                if 0 <= to < len(within):
                    found = copy.deepcopy(data)
                    there = value_at(found, path[:-1])
                    there.insert(to, there.pop(k))
                    yield RepairProposal(
                        0,
                        f"{op_of(within[k])} {'before' if to < k else 'after'} {_step_title(within[to])}",
                        found,
                    )


def _step_title(entry: object) -> str:
    return op_of(entry) or "the steps beside it"


def _copy_arguments(data: ScenarioData, named: list[DataPath]) -> Iterator[RepairProposal]:
    """A step says what another one says: tag, group, root, reduction, tensor."""
    for path in named:
        mine = fields_of(value_at(data, path))
        for other in named:
            theirs = fields_of(value_at(data, other))
            for key in _SHARED_FIELDS if other != path else ():
                if mine.get(key) != theirs.get(key):
                    fields = {k: v for k, v in mine.items() if k != key} | (
                        {key: theirs[key]} if key in theirs else {}
                    )
                    changed = make_step(
                        op_of(value_at(data, path)), fields, ranks_of(value_at(data, path))
                    )
                    yield RepairProposal(
                        1,
                        f"{op_of(value_at(data, path))}: the same {key} as the other call",
                        with_steps_replaced(data, path, [changed]),
                    )
        for key in ("src", "dst") if OPERATIONS[op_of(value_at(data, path))].root_field else ():
            if isinstance(mine.get(key), str | dict):
                changed = make_step(
                    op_of(value_at(data, path)), {**mine, key: 0}, ranks_of(value_at(data, path))
                )
                yield RepairProposal(
                    1,
                    f"{op_of(value_at(data, path))}: one root for all",
                    with_steps_replaced(data, path, [changed]),
                )


def _copy_declarations(data: ScenarioData, named: list[DataPath]) -> Iterator[RepairProposal]:
    """A tensor is declared with the shape and type of one that it meets."""
    declared = data.get("tensors") or {}
    used = [
        n
        for path in named
        for n in fields_of(value_at(data, path)).values()
        if isinstance(n, str) and n in declared
    ]
    for one in dict.fromkeys(used):
        for key in ("shape", "dtype"):
            for other in dict.fromkeys(used):
                mine, theirs = declared[one], declared[other]
                if (
                    isinstance(mine, dict)
                    and isinstance(theirs, dict)
                    and mine.get(key) != theirs.get(key)
                ):
                    tensor = {k: v for k, v in mine.items() if k != key} | (
                        {key: theirs[key]} if key in theirs else {}
                    )
                    changed = {**data, "tensors": {**declared, one: tensor}}
                    yield RepairProposal(1, f"the tensor {one} with the {key} of {other}", changed)


__all__ = ["ADDS_CALLS", "REMOVES_CALLS", "FailureHints", "RepairProposal", "propose_repairs"]
