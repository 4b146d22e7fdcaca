"""Repairs of requests that no call waits for.

Each function yields (words, changed data).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final

from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    fields_of,
    make_step,
    names_in,
    op_of,
    ranks_of,
    step_paths,
    tensor_names,
    value_at,
)

#: Calls after which no message arrives.
_CLOSING_OPS: Final = ("destroy_process_group", "exit", "fail")
_BLOCKING_OP: Final = {"isend": "send", "irecv": "recv"}


def wait_for_requests(
    data: ScenarioData, paths: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A request gets a handle and a wait, or the call blocks.

    The wait stands before the next step of the list that names one of the call's tensors or closes
    connections, or at the end of the list.
    """
    for path in paths:
        entry = value_at(data, path)
        op, fields = op_of(entry), fields_of(entry)
        if not _starts_request(op, fields):
            continue
        if "as" not in fields:
            handle = _unused_handle(data)
            yield (
                f"keep the request of {op} and wait for it",
                _with_wait(data, path, {**fields, "as": handle}, handle),
            )
        elif not _has_wait(data["program"], str(fields["as"])):
            handle = str(fields["as"])
            yield f"wait for {handle}", _with_wait(data, path, fields, handle)
        elif "repeat" in path and "@" not in str(fields["as"]):
            yield from _waits_in_loop(data, path)
        elif "repeat" in path:
            handle = str(fields["as"])
            changed = _with_wait(data, path, fields, handle)
            yield f"wait for {handle} in the same iteration", changed
        blocking = {name: value for name, value in fields.items() if name not in ("as", "async")}
        if "as" not in fields:
            changed = copy.deepcopy(data)
            step = make_step(_BLOCKING_OP.get(op, op), blocking, ranks_of(entry))
            value_at(changed, path[:-1])[int(path[-1])] = step
            yield f"let {op} block", changed


def wait_for_other_request(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """The second wait for a request waits for one that no wait names."""
    for list_path in dict.fromkeys(path[:-1] for path in step_paths(data)):
        steps = value_at(data, list_path)
        started = {str(fields_of(entry).get("as")): k for k, entry in enumerate(steps)}
        unnamed = [name for name in started if not _has_wait(data["program"], name)]
        seen: set[str] = set()
        for k, entry in enumerate(steps):
            handles = _handles_of(fields_of(entry)) if op_of(entry) == "wait" else []
            for name in unnamed if seen.intersection(handles) and len(handles) == 1 else ():
                if name == "None" or started[name] > k:
                    continue
                changed = copy.deepcopy(data)
                value_at(changed, list_path)[k]["wait"] = name
                words = f"wait for {name}; a wait for {handles[0]} stands before"
                yield words, changed
            seen.update(handles)


def wait_for_all_before_use(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """A step waits for all requests of its list whose tensors it reads and that are still open."""
    for list_path in dict.fromkeys(path[:-1] for path in step_paths(data)):
        steps = value_at(data, list_path)
        open_requests: dict[str, set[str]] = {}
        for k, entry in enumerate(steps):
            fields = fields_of(entry) if op_of(entry) else {}
            if op_of(entry) == "wait":
                awaited = _handles_of(fields)
                open_requests = {} if "all" in awaited else _without(open_requests, awaited)
                continue
            read = [name for name, used in open_requests.items() if _names_any(entry, used)]
            if len(read) > 1 and ranks_of(entry) is None:
                changed = copy.deepcopy(data)
                _wait_before(value_at(changed, list_path), k, read)
                what = op_of(entry) or "the block"
                yield f"wait for {' and '.join(read)} before {what} uses their tensors", changed
                open_requests = _without(open_requests, read)
            handle = fields.get("as")
            is_numbered = "@" in str(handle)
            if _starts_request(op_of(entry), fields) and handle is not None and not is_numbered:
                open_requests[str(handle)] = tensor_names(entry)


def _without(requests: dict[str, set[str]], names: list[str]) -> dict[str, set[str]]:
    return {name: tensors for name, tensors in requests.items() if name not in names}


def _handles_of(fields: ScenarioData) -> list[str]:
    handles = fields.get("handles")
    return [str(each) for each in (handles if isinstance(handles, list) else [handles])]


def _wait_before(steps: list[Any], position: int, handles: list[str]) -> None:
    """Insert a wait before a step, or extend the wait that stands there."""
    before = steps[position - 1]
    if op_of(before) == "wait" and ranks_of(before) is None:
        handles = [*_handles_of(fields_of(before)), *handles]
        steps[position - 1] = make_step("wait", {"handles": handles}, None)
        return
    steps.insert(position, make_step("wait", {"handles": handles}, None))


def _has_wait(steps: list[Any], handle: str) -> bool:
    """Whether some step, at any depth, waits for a handle or for all."""
    for entry in steps:
        if op_of(entry) == "wait":
            handles = fields_of(entry).get("handles")
            named = handles if isinstance(handles, list) else [handles]
            if handle in named or "all" in named:
                return True
        elif isinstance(entry, dict) and _has_wait(_inner_steps(entry), handle):
            return True
    return False


def _inner_steps(entry: ScenarioData) -> list[Any]:
    """The steps of a block or of a loop; none for a call."""
    return entry.get("steps") or (entry.get("repeat") or {}).get("steps") or []


def _starts_request(op: str, fields: ScenarioData) -> bool:
    return op in _BLOCKING_OP or bool(fields.get("async"))


def _unused_handle(data: ScenarioData) -> str:
    text = repr(data["program"])
    names = ("h", *(f"h{number}" for number in range(2, 100)))
    return next(name for name in names if f"'{name}'" not in text)


def _with_wait(
    data: ScenarioData, path: DataPath, fields: ScenarioData, handle: str
) -> ScenarioData:
    changed = copy.deepcopy(data)
    steps, position = value_at(changed, path[:-1]), int(path[-1])
    entry = steps[position]
    op, ranks = op_of(entry), ranks_of(entry)
    steps[position] = make_step(op, fields, ranks)
    tensors = tensor_names(entry)
    limits = (
        k
        for k in range(position + 1, len(steps))
        if op_of(steps[k]) in _CLOSING_OPS or _names_any(steps[k], tensors)
    )
    place = next(limits, len(steps))
    if ranks is not None:
        # Steps of other ranks may lie between them, so the wait follows at once.
        place = position + 1
    steps.insert(place, make_step("wait", {"handles": handle}, ranks))
    return changed


def _names_any(entry: Any, tensors: set[str]) -> bool:
    """Whether a step, or a step within it, names one of the tensors."""
    if isinstance(entry, dict):
        return any(_names_any(value, tensors) for value in entry.values())
    if isinstance(entry, list):
        return any(_names_any(value, tensors) for value in entry)
    return isinstance(entry, str) and not tensors.isdisjoint(names_in(entry))


def _waits_in_loop(data: ScenarioData, path: DataPath) -> Iterator[tuple[str, ScenarioData]]:
    """A handle that each iteration binds again: wait in the iteration, or number the handles."""
    entry = value_at(data, path)
    fields = fields_of(entry)
    handle, op = str(fields["as"]), op_of(entry)
    loop_path = path[: len(path) - 2 - path[::-1].index("repeat") + 1]
    index = value_at(data, (*loop_path, "repeat")).get("index")
    if index is not None:
        numbered = copy.deepcopy(data)
        step = make_step(op, {**fields, "as": f"{handle}@{index}"}, ranks_of(entry))
        value_at(numbered, path[:-1])[int(path[-1])] = step
        if _replace_waits(numbered["program"], handle, "all"):
            yield f"give each request of {op} its own handle, and wait for all", numbered
    waited = copy.deepcopy(data)
    _replace_waits(waited["program"], handle, None)
    yield f"wait for {handle} in each iteration", _with_wait(waited, path, fields, handle)


def _replace_waits(steps: list[Any], handle: str, handles: str | None) -> int:
    """Replace the handles of the waits for a handle, or remove them if ``handles`` is None."""
    count = 0
    for k in reversed(range(len(steps))):
        entry = steps[k]
        if op_of(entry) == "wait" and fields_of(entry).get("handles") in (handle, [handle]):
            count += 1
            if handles is None:
                del steps[k]
            else:
                steps[k] = make_step("wait", {"handles": handles}, ranks_of(entry))
        elif isinstance(entry, dict):
            count += _replace_waits(_inner_steps(entry), handle, handles)
    return count


__all__ = ["wait_for_all_before_use", "wait_for_other_request", "wait_for_requests"]
