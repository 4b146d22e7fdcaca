"""Repairs of numbers that ranks must agree on: rounds of a loop, splits of an exchange, rows that divide evenly."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, TypeGuard

from distsim.repair.steps import Data, Path, at, fields_of, op_of, ranks_of, step, with_entries

_CHOICE: Final = re.compile(r"^(max|min)\((?P<first>[^(),]+), *(?P<second>[^(),]+)\)$")


def one_count(data: Data) -> Iterator[tuple[str, Data]]:
    """(words, data): a var that is the larger, or the smaller, of two numbers is one of them."""
    variables = data.get("vars") or {}
    for name, value in variables.items():
        choice = _CHOICE.match(str(value))
        for part in (choice["first"], choice["second"]) if choice else ():
            yield f"the var {name} as {part.strip()}", {**data, "vars": {**variables, name: part.strip()}}


def transposed(data: Data, named: list[Path]) -> Iterator[tuple[str, Data]]:
    """(words, data): each rank of the world gets the rows that the others give it, in an output of so many rows."""
    declared = data.get("tensors") or {}
    for path in named:
        entry = at(data, path)
        fields = fields_of(entry)
        given, output = fields.get("input_splits"), fields.get("output")
        tensor = declared.get(output) if isinstance(output, str) else None
        if "output_splits" not in fields or "group" in fields or not isinstance(tensor, dict) or not _square(given):
            continue
        size = len(given)
        rows = {rank: sum(given[other][rank] for other in range(size)) for rank in range(size)}
        shape = [rows, *(tensor.get("shape") or [0])[1:]]
        kept = {key: value for key, value in fields.items() if key != "output_splits"}
        changed = with_entries(data, path, [step(op_of(entry), kept, ranks_of(entry))])
        changed["tensors"] = {**declared, output: {**tensor, "shape": shape}}
        yield f"{op_of(entry)}: the output splits are the transpose of the input splits", changed


def _square(splits: object) -> TypeGuard[dict[int, list[int]]]:
    """A list of numbers for each rank, as many as there are ranks."""
    return isinstance(splits, dict) and all(
        rank in splits and isinstance(splits[rank], list) and len(splits[rank]) == len(splits)
        and all(isinstance(item, int) for item in splits[rank]) for rank in range(len(splits))
    )  # fmt: skip


def padded(data: Data, named: list[Path]) -> Iterator[tuple[str, Data]]:
    """(words, data): the tensors of a call have so many rows that the world's ranks share them evenly."""
    declared, world = data.get("tensors") or {}, data.get("world")
    if not isinstance(world, int):
        return
    for path in named:
        used = {
            name for name in fields_of(at(data, path)).values() if isinstance(name, str) and isinstance(declared.get(name), dict)
        }
        uneven = {name: rows for name in used if isinstance(rows := _rows(declared[name]), int) and rows % world}
        if uneven:
            whole = {
                name: {**declared[name], "shape": [-(-rows // world) * world, *declared[name]["shape"][1:]]}
                for name, rows in uneven.items()
            }
            yield (
                f"{op_of(at(data, path))}: padded to rows that {world} ranks can share",
                {**data, "tensors": {**declared, **whole}},
            )


def _rows(tensor: Data) -> Any:
    shape = tensor.get("shape")
    return shape[0] if isinstance(shape, list) and shape else None
