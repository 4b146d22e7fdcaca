"""Repairs of numbers on which ranks must agree.

Iterations of a loop, splits of an exchange, rows that divide evenly. Each function yields (words,
changed data).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, TypeGuard

from distsim.program.model import Program
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
    value_by_rank,
    with_steps_replaced,
)
from distsim.repair.written_numbers import written_number

_MIN_OR_MAX: Final = re.compile(r"^(max|min)\((?P<first>[^(),]+), *(?P<second>[^(), ][^(),]*)\)$")

#: By operation, the field of the tensor that holds the parts of all ranks.
_WHOLE_FIELD: Final = {
    "all_gather": "output",
    "all_gather_into_tensor": "output",
    "gather": "output",
    "reduce_scatter": "input",
    "reduce_scatter_tensor": "input",
    "scatter": "input",
}
#: Of these, those whose whole has a dimension for the ranks.
_STACKED: Final = ("all_gather", "gather", "reduce_scatter", "scatter")


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


def exchange_splits(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """The splits of an exchange change their roles, as on the way back of a dispatch."""
    for path in named:
        entry = value_at(data, path)
        fields = fields_of(entry)
        sent, received = fields.get("input_splits"), fields.get("output_splits")
        if sent is None or received is None or sent == received:
            continue
        changed = {**fields, "input_splits": received, "output_splits": sent}
        step = make_step(op_of(entry), changed, ranks_of(entry))
        words = f"{op_of(entry)}: exchange the values of input_splits and output_splits"
        yield words, with_steps_replaced(data, path, [step])


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


def inputs_as_received(
    data: ScenarioData, program: Program, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """Each rank of the world sends the rows that the others expect from it.

    Only if the expected rows are all rows of the input.
    """
    for path in named:
        entry = value_at(data, path)
        fields = fields_of(entry)
        received = fields.get("output_splits")
        rows = declared_tensor(data, fields.get("input"))
        if "group" in fields or not _is_square(received) or _row_count(rows) is None:
            continue
        world = range(len(received))
        sent = {rank: [received[other][rank] for other in world] for rank in world}
        has_rows = value_by_rank(program, _row_count(rows))
        if has_rows != [sum(sent[rank]) for rank in world] or len(world) != program.world_size:
            continue
        lists = list(sent.values())
        splits: object = lists[0] if all(each == lists[0] for each in lists) else sent
        step = make_step(op_of(entry), {**fields, "input_splits": splits}, ranks_of(entry))
        words = f"{op_of(entry)}: set input_splits to the rows that the other ranks expect"
        yield words, with_steps_replaced(data, path, [step])


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


def fit_parts(
    data: ScenarioData, program: Program, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """The tensor with the parts of all ranks gets as many elements as they have, or vice versa."""
    for path in named:
        entry = value_at(data, path)
        fields, whole_field = fields_of(entry), _WHOLE_FIELD.get(op_of(entry))
        size = group_size(data, program, fields.get("group"))
        if whole_field is None or size is None:
            continue
        part_field = "input" if whole_field == "output" else "output"
        part, whole = fields.get(part_field), fields.get(whole_field)
        part_shape, whole_shape = _shape(data, program, part), _shape(data, program, whole)
        if not part_shape or not whole_shape:
            continue
        is_stacked = op_of(entry) in _STACKED or len(whole_shape) == len(part_shape) + 1
        if is_stacked:
            wanted = [size, *part_shape]
        else:
            wanted = [part_shape[0] * size, *part_shape[1:]]
        likely = [f"{fields.get('group', 'world')}_size", *(data.get("vars") or {})]
        yield from _with_shape(data, program, whole, wanted, likely)
        is_divided = len(whole_shape) == len(part_shape) + 1
        rows = whole_shape[1:] if is_divided else [whole_shape[0] // size, *whole_shape[1:]]
        if all(rows):
            yield from _with_shape(data, program, part, rows, likely)


def group_size(data: ScenarioData, program: Program, group: object) -> int | None:
    """The members of a group; None if they are not the same number everywhere."""
    if group in (None, "world"):
        return program.world_size
    members = group_members(data, group)
    if isinstance(members, list):
        return len(members)
    sizes = {len(each.ranks) for each in program.groups if each.name.partition("[")[0] == group}
    return sizes.pop() if len(sizes) == 1 else None


def _shape(data: ScenarioData, program: Program, name: object) -> list[int]:
    """The declared shape of a tensor; empty if it is not the same on all ranks."""
    tensor = declared_tensor(data, str(name).partition("@")[0])
    shape = None if tensor is None else tensor.get("shape")
    if not isinstance(shape, list):
        return []
    values = [value_by_rank(program, item) for item in shape]
    if any(len(set(by_rank)) != 1 for by_rank in values):
        return []
    return [by_rank[0] for by_rank in values]


def _with_shape(
    data: ScenarioData, program: Program, name: object, wanted: list[int], likely: list[str]
) -> Iterator[tuple[str, ScenarioData]]:
    """A tensor gets a shape, whose unchanged numbers stay as they are written.

    ``likely``: names that a changed number may be written with.
    """
    before = _shape(data, program, name)
    if before == wanted:
        return
    declared, tensor_name = data.get("tensors") or {}, str(name).partition("@")[0]
    tensor = declared[tensor_name]
    shape = [
        written if old == new else written_number(data, program, new, written, likely)
        for written, old, new in zip(tensor["shape"], before, wanted, strict=False)
    ]
    if len(before) != len(wanted):
        shape = [*wanted]
    text = ", ".join(map(str, shape))
    changed = {**declared, tensor_name: {**tensor, "shape": shape}}
    yield f"give the tensor {tensor_name} the shape [{text}]", {**data, "tensors": changed}


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
