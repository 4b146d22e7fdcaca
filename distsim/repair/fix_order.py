"""Repairs of the order of calls and of waiting: batches, requests, waits, loops, moved steps.

The calls and their arguments stay the same. Each function yields (words, changed data).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    call_name,
    fields_of,
    make_step,
    names_in,
    op_of,
    parenthesised_line,
    paths_by_list,
    ranks_of,
    step_paths,
    tensor_names,
    times_of,
    value_at,
)

#: Blocking messages, and what they are as parts of a batch or as requests.
_NONBLOCKING_OP: Final = {"send": "isend", "recv": "irecv"}
#: How far a step is moved.
_MAX_DISTANCE: Final = 8


# --- batches ---
def batch_messages(data: ScenarioData, paths: list[DataPath]) -> Iterator[tuple[str, ScenarioData]]:
    """Consecutive sends and receives are posted together: everywhere, or in one list of steps."""
    runs: list[list[DataPath]] = []
    for list_paths in paths_by_list(paths).values():
        runs += _message_runs(data, list_paths)
    if runs:
        yield "post the messages together with batch_isend_irecv", _with_batches(data, runs)
    if len(runs) > 1:
        for run in runs:
            yield (
                "post the messages of one side together with batch_isend_irecv",
                _with_batches(data, [run]),
            )


def _message_runs(data: ScenarioData, paths: list[DataPath]) -> Iterator[list[DataPath]]:
    """Two or more consecutive blocking messages on the same ranks."""
    run: list[DataPath] = []
    for path in paths:
        if op_of(value_at(data, path)) not in _NONBLOCKING_OP:
            yield from _long_enough(run)
            run = []
        elif run and not _continues(data, run[-1], path):
            yield from _long_enough(run)
            run = [path]
        else:
            run = [*run, path]
    yield from _long_enough(run)


def _long_enough(run: list[DataPath]) -> Iterator[list[DataPath]]:
    if len(run) > 1:
        yield run


def _continues(data: ScenarioData, before: DataPath, path: DataPath) -> bool:
    """Whether a step directly follows another one on the same ranks."""
    if path[-1] != int(before[-1]) + 1:
        return False
    return bool(ranks_of(value_at(data, path)) == ranks_of(value_at(data, before)))


def _with_batches(data: ScenarioData, runs: list[list[DataPath]]) -> ScenarioData:
    changed = copy.deepcopy(data)
    # From the back, so that the paths of the other runs stay valid.
    for run in sorted(runs, reverse=True):
        entries = [value_at(data, path) for path in run]
        ops = [{_NONBLOCKING_OP[op_of(entry)]: fields_of(entry)} for entry in entries]
        batch = make_step("batch_isend_irecv", {"ops": ops}, ranks_of(entries[0]))
        steps = value_at(changed, run[0][:-1])
        steps[run[0][-1] : int(run[-1][-1]) + 1] = [batch]
    return changed


# --- requests and waits ---
def make_nonblocking(
    data: ScenarioData, paths: list[DataPath], named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """Sends, or receives, become requests that are waited for at the end of their list."""
    for op, started in _NONBLOCKING_OP.items():
        everywhere = [path for path in paths if op_of(value_at(data, path)) == op]
        chosen = [path for path in named if path in everywhere]
        if not chosen:
            continue
        yield (
            f"use {started} instead of {op}, and wait at the end",
            _with_nonblocking_calls(data, everywhere),
        )
        if len(chosen) < 2:
            continue
        for path in chosen:
            yield (
                f"use {started} instead of this {op}, and wait at the end",
                _with_nonblocking_calls(data, [path]),
            )


def _with_nonblocking_calls(data: ScenarioData, paths: list[DataPath]) -> ScenarioData:
    changed = copy.deepcopy(data)
    for k, path in enumerate(sorted(paths, reverse=True)):
        entry, steps = value_at(data, path), value_at(changed, path[:-1])
        started = _NONBLOCKING_OP[op_of(entry)]
        handle = f"{started}_{len(paths) - k}"
        fields = {**fields_of(entry), "as": handle}
        steps[int(path[-1])] = make_step(started, fields, ranks_of(entry))
        steps.append(make_step("wait", {"handles": [handle]}, ranks_of(entry)))
    return changed


def move_waits_last(
    data: ScenarioData, paths: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """Every request is waited for at the end of its list."""
    changed, has_moved = copy.deepcopy(data), False
    lists = paths_by_list([path for path in paths if op_of(value_at(data, path)) == "wait"])
    # The deepest list first: until then, the lists around it keep their numbers.
    for list_path in sorted(lists, key=len, reverse=True):
        steps = value_at(changed, list_path)
        ordered = sorted(steps, key=lambda entry: op_of(entry) == "wait")
        has_moved = has_moved or ordered != steps
        steps[:] = ordered
    if has_moved:
        yield "wait for the requests at the end", changed


def wait_before_use(
    data: ScenarioData, paths: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A request is waited for before the next step of its list that uses one of its tensors."""
    for path in paths:
        entry = value_at(data, path)
        handle = fields_of(entry).get("as")
        if handle is None:
            continue
        steps, start = value_at(data, path[:-1]), int(path[-1])
        wait = _first_wait_for(handle, steps, start)
        if wait is None:
            continue
        for tensor in sorted(tensor_names(entry)):
            users = (k for k in range(start + 1, wait) if _uses(steps[k], tensor))
            user = next(users, None)
            if user is not None:
                changed = copy.deepcopy(data)
                _wait_earlier(value_at(changed, path[:-1]), handle, wait, user)
                yield f"wait for {handle} before {op_of(steps[user])} uses {tensor}", changed


def _first_wait_for(handle: object, steps: list[Any], start: int) -> int | None:
    """The position of the first later step that waits for this request."""
    waits = (k for k in range(start + 1, len(steps)) if handle in _awaited_handles(steps[k]))
    return next(waits, None)


def _wait_earlier(steps: list[Any], handle: object, wait: int, target: int) -> None:
    """Wait for a request at an earlier position; a wait for others as well keeps the others."""
    entry = steps.pop(wait)
    others = [each for each in _awaited_handles(entry) if each != handle]
    if others:
        steps.insert(wait, make_step("wait", {"handles": others}, ranks_of(entry)))
        entry = make_step("wait", {"handles": handle}, ranks_of(entry))
    steps.insert(target, entry)


def _awaited_handles(entry: object) -> list[object]:
    """The handles that a step waits for by name; empty if it is no wait."""
    if op_of(entry) != "wait":
        return []
    handles = fields_of(entry).get("handles")
    return list(handles) if isinstance(handles, list) else [handles]


def _uses(entry: object, tensor: str) -> bool:
    """Whether a step names a tensor, alone, in a list or in an expression."""
    if not op_of(entry) or op_of(entry) == "wait":
        return False
    for key, value in fields_of(entry).items():
        items = value if isinstance(value, list) else [value]
        if key != "name" and any(isinstance(x, str) and tensor in names_in(x) for x in items):
            return True
    return False


# --- loops ---
def reverse_loops(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """A loop that counts down counts up, or the other way round."""
    for path in step_paths(data):
        repeat = value_at(data, path).get("repeat") if times_of(value_at(data, path)) else None
        if not isinstance(repeat, dict) or "index" not in repeat:
            continue
        index, times = str(repeat["index"]), repeat["times"]
        down = f"{times} - 1 - {index}"
        counts_down = down in repr(repeat["steps"])
        changed = copy.deepcopy(data)
        steps = value_at(changed, path)["repeat"]["steps"]
        if counts_down:
            written = re.escape(down)
            steps[:] = _with_texts_replaced(steps, rf"\({written}\)|{written}", index)
            yield f"use {index} in place of {down} in this loop", changed
        elif re.search(rf"\b{re.escape(index)}\b", repr(repeat["steps"])):
            steps[:] = _with_texts_replaced(steps, rf"\b{re.escape(index)}\b", f"({down})")
            yield f"use {down} in place of {index} in this loop", changed


def _with_texts_replaced(value: Any, pattern: str, replacement: str) -> Any:
    """A value in which all texts that match a pattern are replaced, except in selectors."""
    if isinstance(value, dict):
        return {
            key: item if key == "ranks" else _with_texts_replaced(item, pattern, replacement)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_with_texts_replaced(item, pattern, replacement) for item in value]
    return re.sub(pattern, replacement, value) if isinstance(value, str) else value


# --- moves ---
def move_steps(
    data: ScenarioData, named: list[DataPath], lines: Mapping[DataPath, int]
) -> Iterator[tuple[str, ScenarioData]]:
    """A step moves to another place of its list; near places first."""
    for distance in range(1, _MAX_DISTANCE + 1):
        for path in named:
            position = int(path[-1])
            for target in (position - distance, position + distance):
                if 0 <= target < len(value_at(data, path[:-1])):
                    yield _moved(data, path, target, lines)


def _moved(
    data: ScenarioData, path: DataPath, target: int, lines: Mapping[DataPath, int]
) -> tuple[str, ScenarioData]:
    steps, position = value_at(data, path[:-1]), int(path[-1])
    changed = copy.deepcopy(data)
    changed_steps = value_at(changed, path[:-1])
    changed_steps.insert(target, changed_steps.pop(position))
    side = "before" if target < position else "after"
    moved = call_name(steps[position]) or "block"
    neighbour = call_name(steps[target]) or "block"
    place = parenthesised_line(lines, (*path[:-1], target))
    return f"move this {moved} {side} the {neighbour}{place}", changed
