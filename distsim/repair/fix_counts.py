"""Repairs of numbers on which ranks must agree.

Iterations of a loop, splits of an exchange, rows that divide evenly. Each function yields (words,
changed data).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, TypeGuard

from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    declared_tensor,
    fields_of,
    group_members,
    make_step,
    op_of,
    ranks_of,
    value_at,
    with_steps_replaced,
)

_MIN_OR_MAX: Final = re.compile(r"^(max|min)\((?P<first>[^(),]+), *(?P<second>[^(), ][^(),]*)\)$")

#: By operation, the field of the tensor that holds the parts of all ranks.
_WHOLE_FIELD: Final = {"all_gather_into_tensor": "output", "reduce_scatter_tensor": "input"}


def unify_counts(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """A var that is the larger, or the smaller, of two numbers becomes one of them."""
    variables = data.get("vars") or {}
    for name, value in variables.items():
        choice = _MIN_OR_MAX.match(str(value))
        if choice is None:
            continue
        for part in (choice["first"], choice["second"]):
            yield (
                f"set the var {name} to {part.strip()}",
                {**data, "vars": {**variables, name: part.strip()}},
            )


def transpose_splits(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """Each rank of the world receives the rows that the others send it.

    The output tensor gets as many rows.
    """
    declared = data.get("tensors") or {}
    for path in named:
        entry = value_at(data, path)
        fields = fields_of(entry)
        if "output_splits" not in fields or "group" in fields:
            continue
        splits, output = fields.get("input_splits"), fields.get("output")
        tensor = declared_tensor(data, output)
        if tensor is None or not _is_square(splits):
            continue
        world = range(len(splits))
        rows = {rank: sum(splits[other][rank] for other in world) for rank in world}
        shape = [rows, *(tensor.get("shape") or [0])[1:]]
        kept = {key: value for key, value in fields.items() if key != "output_splits"}
        changed = with_steps_replaced(data, path, [make_step(op_of(entry), kept, ranks_of(entry))])
        changed["tensors"] = {**declared, output: {**tensor, "shape": shape}}
        words = f"{op_of(entry)}: remove output_splits, and give the output as many rows as arrive"
        yield words, changed


def _is_square(splits: object) -> TypeGuard[dict[int, list[int]]]:
    """Whether each rank has a list of numbers, as many as there are ranks."""
    if not isinstance(splits, dict):
        return False
    size = len(splits)
    return all(_is_list_of_numbers(splits.get(rank), size) for rank in range(size))


def _is_list_of_numbers(value: object, size: int) -> bool:
    if not isinstance(value, list) or len(value) != size:
        return False
    return all(isinstance(item, int) for item in value)


def fit_whole(data: ScenarioData, named: list[DataPath]) -> Iterator[tuple[str, ScenarioData]]:
    """The tensor that holds the parts of all ranks gets as many rows as they have together."""
    declared = data.get("tensors") or {}
    for path in named:
        entry = value_at(data, path)
        fields, whole_field = fields_of(entry), _WHOLE_FIELD.get(op_of(entry))
        size = _group_size(data, fields.get("group"))
        if whole_field is None or size is None:
            continue
        part_field = "input" if whole_field == "output" else "output"
        part: Any = declared_tensor(data, fields.get(part_field))
        whole = declared_tensor(data, fields.get(whole_field))
        rows = _row_count(part)
        if not isinstance(rows, int) or whole is None:
            continue
        shape = [rows * size, *part["shape"][1:]]
        if whole.get("shape") != shape:
            name = fields[whole_field]
            yield (
                f"give the tensor {name} {rows * size} rows: {rows} of each of {size} ranks",
                {**data, "tensors": {**declared, name: {**whole, "shape": shape}}},
            )


def _group_size(data: ScenarioData, group: object) -> int | None:
    """The number of members, if the file writes it as a number."""
    members: object = data.get("world") if group is None else group_members(data, group)
    if isinstance(members, list):
        return len(members)
    return members if isinstance(members, int) else None


def pad_rows(data: ScenarioData, named: list[DataPath]) -> Iterator[tuple[str, ScenarioData]]:
    """The tensors of a call are padded to a number of rows that the ranks can share evenly."""
    declared, world = data.get("tensors") or {}, data.get("world")
    if not isinstance(world, int):
        return
    for path in named:
        padded = {}
        for name in fields_of(value_at(data, path)).values():
            tensor: Any = declared_tensor(data, name)
            rows = _row_count(tensor)
            if isinstance(rows, int) and rows % world:
                shape = [-(-rows // world) * world, *tensor["shape"][1:]]
                padded[name] = {**tensor, "shape": shape}
        if padded:
            yield (
                f"{op_of(value_at(data, path))}: pad to rows that {world} ranks can share",
                {**data, "tensors": {**declared, **padded}},
            )


def _row_count(tensor: Any) -> Any:
    """The first dimension of a tensor's declaration; None if it has none."""
    shape = tensor.get("shape") if isinstance(tensor, dict) else None
    return shape[0] if isinstance(shape, list) and shape else None
