"""Repairs of numbers that ranks must agree on: rounds of a loop, splits of an exchange, rows that
divide evenly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, TypeGuard

from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    fields_of,
    make_step,
    op_of,
    ranks_of,
    value_at,
    with_steps_replaced,
)

_MIN_OR_MAX: Final = re.compile(r"^(max|min)\((?P<first>[^(),]+), *(?P<second>[^(),]+)\)$")


def unify_counts(data: ScenarioData) -> Iterator[tuple[str, ScenarioData]]:
    """(words, data): a var that is the larger, or the smaller, of two numbers is one of them."""
    variables = data.get("vars") or {}
    for name, value in variables.items():
        choice = _MIN_OR_MAX.match(str(value))
        for part in (choice["first"], choice["second"]) if choice else ():
            yield (
                f"the var {name} as {part.strip()}",
                {**data, "vars": {**variables, name: part.strip()}},
            )


def transpose_splits(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """(words, data): each rank of the world gets the rows that the others give it, in an output of
    so many rows.
    """
    declared = data.get("tensors") or {}
    for path in named:
        entry = value_at(data, path)
        fields = fields_of(entry)
        given, output = fields.get("input_splits"), fields.get("output")
        tensor = declared.get(output) if isinstance(output, str) else None
        if (
            "output_splits" not in fields
            or "group" in fields
            or not isinstance(tensor, dict)
            or not _is_square(given)
        ):
            continue
        size = len(given)
        rows = {rank: sum(given[other][rank] for other in range(size)) for rank in range(size)}
        shape = [rows, *(tensor.get("shape") or [0])[1:]]
        kept = {key: value for key, value in fields.items() if key != "output_splits"}
        changed = with_steps_replaced(data, path, [make_step(op_of(entry), kept, ranks_of(entry))])
        changed["tensors"] = {**declared, output: {**tensor, "shape": shape}}
        yield f"{op_of(entry)}: the output splits are the transpose of the input splits", changed


def _is_square(splits: object) -> TypeGuard[dict[int, list[int]]]:
    """A list of numbers for each rank, as many as there are ranks."""
    return isinstance(splits, dict) and all(
        rank in splits
        and isinstance(splits[rank], list)
        and len(splits[rank]) == len(splits)
        and all(isinstance(item, int) for item in splits[rank])
        for rank in range(len(splits))
    )


def pad_rows(data: ScenarioData, named: list[DataPath]) -> Iterator[tuple[str, ScenarioData]]:
    """(words, data): the tensors of a call have so many rows that the world's ranks share them
    evenly.
    """
    declared, world = data.get("tensors") or {}, data.get("world")
    if not isinstance(world, int):
        return
    for path in named:
        used = {
            name
            for name in fields_of(value_at(data, path)).values()
            if isinstance(name, str) and isinstance(declared.get(name), dict)
        }
        uneven = {
            name: rows
            for name in used
            if isinstance(rows := _row_count(declared[name]), int) and rows % world
        }
        if uneven:
            whole = {
                name: {
                    **declared[name],
                    "shape": [-(-rows // world) * world, *declared[name]["shape"][1:]],
                }
                for name, rows in uneven.items()
            }
            yield (
                f"{op_of(value_at(data, path))}: padded to rows that {world} ranks can share",
                {**data, "tensors": {**declared, **whole}},
            )


def _row_count(tensor: ScenarioData) -> Any:
    shape = tensor.get("shape")
    return shape[0] if isinstance(shape, list) and shape else None
