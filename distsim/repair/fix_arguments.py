"""Repairs of the arguments of one call or tensor.

A root counted in the wrong list of ranks, a shape that differs on one rank, messages that should be
a batch. Each function yields (words, changed data).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from distsim.program.model import Program
from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    declared_tensor,
    fields_of,
    make_step,
    names_in,
    op_of,
    paths_by_list,
    ranks_of,
    step_paths,
    value_at,
    value_by_rank,
    with_steps_replaced,
)

_BATCH_OP: Final = {"isend": "isend", "irecv": "irecv", "send": "isend", "recv": "irecv"}


def use_group_ranks(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A root or peer of a call on a group becomes a group rank."""
    for path in named:
        fields = fields_of(value_at(data, path))
        for key in ("src", "dst"):
            if key in fields and "group" in fields:
                changed = {
                    (f"group_{key}" if name == key else name): value
                    for name, value in fields.items()
                }
                entry = make_step(
                    op_of(value_at(data, path)), changed, ranks_of(value_at(data, path))
                )
                yield (
                    f"{op_of(entry)}: use group_{key}, which counts inside the group, "
                    f"instead of {key}",
                    with_steps_replaced(data, path, [entry]),
                )


def name_expected_sources(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """Receives from any source that expect one sender name it."""
    changed, sources = copy.deepcopy(data), []
    for path in step_paths(data):
        entry = value_at(data, path)
        fields = fields_of(entry)
        if "assume_src" in fields:
            sources.append(fields.pop("assume_src"))
            named = make_step(op_of(entry), {**fields, "src": sources[-1]}, ranks_of(entry))
            value_at(changed, path[:-1])[int(path[-1])] = named
    if sources:
        values = " and ".join(map(str, dict.fromkeys(sources)))
        yield f"set src to {values}, the sender that the program relies on", changed


def drop_invalid_tags(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A message with a negative tag gets the default tag."""
    for path in named:
        entry = value_at(data, path)
        fields = fields_of(entry)
        tag = fields.pop("tag", 0)
        if isinstance(tag, int) and tag < 0:
            step = make_step(op_of(entry), fields, ranks_of(entry))
            yield f"{op_of(entry)}: remove tag {tag}", with_steps_replaced(data, path, [step])


def unify_shapes(data: ScenarioData, program: Program) -> Iterator[tuple[str, ScenarioData]]:
    """A tensor gets one shape on all ranks: the most common one."""
    declared = data.get("tensors") or {}
    for name, tensor in declared.items():
        shape = tensor.get("shape") if isinstance(tensor, dict) else None
        common = _common_shape(shape, program)
        if shape is not None and common != shape:
            yield (
                f"give the tensor {name} the same shape on all ranks",
                {**data, "tensors": {**declared, name: {**tensor, "shape": common}}},
            )


def use_unused_tensors(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A call takes a declared tensor that no step uses, such as the padded copy of its tensor."""
    declared = data.get("tensors") or {}
    used = names_in(repr(data["program"]))
    unused = [
        name
        for name, tensor in declared.items()
        if isinstance(tensor, dict) and "value" in tensor and name not in used
    ]
    for path in named:
        entry = value_at(data, path)
        fields = fields_of(entry)
        for key in ("input", "tensor"):
            tensor = declared_tensor(data, fields.get(key)) or {}
            for other in unused if tensor else ():
                if tensor.get("dtype") != declared[other].get("dtype"):
                    continue
                step = make_step(op_of(entry), {**fields, key: other}, ranks_of(entry))
                words = f"{op_of(entry)}: set {key} to {other}, which no call uses yet"
                yield words, with_steps_replaced(data, path, [step])


def _common_shape(shape: object, program: Program) -> object:
    if isinstance(shape, list):
        return [_common_shape(item, program) for item in shape]
    if isinstance(shape, str):
        values = value_by_rank(program, shape)
        return Counter(values).most_common(1)[0][0] if len(set(values)) > 1 else shape
    if not isinstance(shape, dict) or not all(_is_rank_key(key) for key in shape):
        return shape
    if "else" in shape:
        return shape["else"]
    most, _ = Counter(map(repr, shape.values())).most_common(1)[0]
    return next(value for value in shape.values() if repr(value) == most)


def _is_rank_key(key: object) -> bool:
    return str(key).isdigit() or key == "else"


def batch_requests(data: ScenarioData, paths: list[DataPath]) -> Iterator[tuple[str, ScenarioData]]:
    """Consecutive messages, some of them requests, and the waits for them become one batch.

    The change is made everywhere at once.
    """
    changed, has_batches = copy.deepcopy(data), False
    # The deepest list first, and each list from its end, so that positions stay valid.
    by_depth = sorted(paths_by_list(paths).items(), key=lambda item: len(item[0]), reverse=True)
    for list_path, list_paths in by_depth:
        steps = value_at(changed, list_path)
        positions = sorted(int(path[-1]) for path in list_paths)
        for first, end in reversed(list(_batchable_ranges(steps, positions))):
            steps[first:end] = [_batch_of(steps[first:end])]
            has_batches = True
    if has_batches:
        yield "post the messages together with batch_isend_irecv", changed


def _batch_of(entries: list[Any]) -> ScenarioData:
    """The batch of the messages among some steps; their waits become superfluous."""
    messages = [entry for entry in entries if op_of(entry) in _BATCH_OP]
    ops = []
    for entry in messages:
        fields = {name: value for name, value in fields_of(entry).items() if name != "as"}
        ops.append({_BATCH_OP[op_of(entry)]: fields})
    return make_step("batch_isend_irecv", {"ops": ops}, ranks_of(messages[0]))


def _batchable_ranges(steps: list[Any], positions: list[int]) -> Iterator[tuple[int, int]]:
    """(first, end) of messages of the same ranks, followed by waits for all their requests."""
    next_free = 0
    for first in positions:
        if first < next_free:
            continue
        end = first
        open_handles: set[str] = set()
        has_waits = False
        while end in positions and ranks_of(steps[end]) == ranks_of(steps[first]):
            entry = steps[end]
            if op_of(entry) == "wait":
                has_waits = True
                open_handles -= _awaited_handles(entry)
            elif op_of(entry) in _BATCH_OP and not has_waits:
                open_handles |= {str(fields_of(entry).get("as", ""))} - {""}
            else:
                break
            end += 1
        entries = steps[first:end]
        messages = sum(op_of(entry) in _BATCH_OP for entry in entries)
        has_requests = any("as" in fields_of(entry) for entry in entries)
        if messages > 1 and has_requests and not open_handles:
            yield first, end
        next_free = max(end, first + 1)


def _awaited_handles(entry: object) -> set[str]:
    handles = fields_of(entry).get("handles")
    return {str(handle) for handle in (handles if isinstance(handles, list) else [handles])}


def copy_of_composite_calls(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """A call that expands into several operations gets the arguments of its like elsewhere.

    For example `broadcast_object_list`, which broadcasts the lengths and then the objects.
    """
    composite = [path for path in step_paths(data) if _composite_name(value_at(data, path))]
    for path in composite:
        entry = value_at(data, path)
        name = _composite_name(entry)
        for other in composite:
            other_entry = value_at(data, other)
            if _composite_name(other_entry) == name and other_entry[name] != entry[name]:
                copied = {**entry, name: other_entry[name]}
                words = f"{name}: use the same arguments as the other call"
                yield words, with_steps_replaced(data, path, [copied])


def _composite_name(entry: object) -> str:
    """The name of a call that is no single operation; empty for all other entries."""
    if not isinstance(entry, dict) or op_of(entry):
        return ""
    names = [key for key in entry if key not in ("ranks", "steps", "repeat")]
    return names[0] if len(names) == 1 else ""
