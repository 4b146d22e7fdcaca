"""Arguments that a file may omit: shapes of outputs (`shape: auto`) and output splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from distsim.operations.core.field_types import PerRank, SplitExpressions
from distsim.operations.core.operation_base import Operation
from distsim.program.code import BufferVector, CallFields, Vec
from distsim.program.symbol_table import HasPath, SymbolTable, bindings_at


def auto_shape(row: type[Operation], fields: CallFields, group_size: Vec) -> tuple[Vec, ...] | None:
    """Shape of the one output (`shape: auto`), from the input's shape and the group's size.

    None if it cannot be inferred.
    """
    inputs: Sequence[BufferVector] = fields.get("inputs") or ()
    if len(inputs) != 1:
        return None
    shape: tuple[Vec, ...] = inputs[0].shape
    one_input, one_output = row.input_parts == "one", row.output_parts == "one"
    if one_input and one_output:
        return shape
    if one_input:
        return _gathered_shape(row, shape, group_size)
    if one_output:
        return _scattered_shape(row, shape, group_size)
    splits = fields.get("output_splits")
    return shape if splits is None else (_total(splits), *shape[1:])


def _gathered_shape(
    row: type[Operation], shape: tuple[Vec, ...], group_size: Vec
) -> tuple[Vec, ...]:
    """The output holds the inputs of all ranks: one after the other (flat), or stacked."""
    if not row.flat:
        return (group_size, *shape)
    first = shape[0] * group_size if shape else group_size
    return (first, *shape[1:])


def _scattered_shape(
    row: type[Operation], shape: tuple[Vec, ...], group_size: Vec
) -> tuple[Vec, ...]:
    """The output is one rank's part of the input."""
    if not row.flat:
        return shape[1:]
    first = shape[0]
    if isinstance(group_size, np.ndarray):
        return (np.asarray(first) // group_size, *shape[1:])
    return (first // group_size, *shape[1:])


def _total(splits: Sequence[Vec]) -> Vec:
    total: Vec = 0
    for split in splits:
        total = total + split
    return total


def transposed_splits(
    names: SymbolTable,
    ranks: Sequence[int],
    groups: Sequence[int],
    value: SplitExpressions,
    indices: Mapping[str, int],
    place: HasPath,
) -> list[list[int] | None]:
    """Output splits that the file omits: the transpose of the input splits (design §3, rule 8).

    For each of ``ranks``, in its group of ``groups``: the rows that each group rank sends to it,
    from that group rank's input splits (``value``).

    None for a rank whose group has a member without a list, or with a list of another length than
    the group's size: the operation reports such a list itself.
    """
    matrices = {g: _split_matrix(names, g, value, indices, place) for g in sorted(set(groups))}
    found: list[list[int] | None] = []
    for rank, group in zip(ranks, groups, strict=True):
        matrix = matrices[group]
        members = names.tables.groups[group].ranks
        if matrix is None or rank not in members:
            found.append(None)
        else:
            column = members.index(rank)
            found.append([row[column] for row in matrix])
    return found


def _split_matrix(
    names: SymbolTable,
    group: int,
    value: SplitExpressions,
    indices: Mapping[str, int],
    place: HasPath,
) -> list[list[int]] | None:
    """Row i: how many rows of its input group rank i sends to each group rank."""
    members = names.tables.groups[group].ranks
    matrix = []
    for group_rank, rank in enumerate(members):
        items = value.get(rank) if isinstance(value, PerRank) else value
        if items is None or len(items) != len(members):
            return None
        bindings = bindings_at(names.world, rank)
        bindings |= {**indices, "group_rank": group_rank, "group_size": len(members)}
        own_rank = names.ranks[rank : rank + 1]
        row = [int(names.evaluate(item, bindings, place, own_rank)) for item in items]
        matrix.append(row)
    return matrix
