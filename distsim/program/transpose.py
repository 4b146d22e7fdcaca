"""Output splits that the file leaves out: the transpose of the input splits (design §3, rule 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from distsim.ops.fields import PerRank, Splits
from distsim.program.names import Marked, Names


def transposed(
    names: Names, ranks: Sequence[int], groups: Sequence[int], value: Splits, indices: Mapping[str, int], place: Marked
) -> list[list[int] | None]:
    """For each of ``ranks``, in the group of ``groups``: what each group rank's ``value`` (its input splits) gives to it.

    None for a rank where some group rank has no list, or one of another length than the group's size: that is a fault of its own.
    """
    matrices = {g: _matrix(names, g, value, indices, place) for g in sorted(set(groups))}
    found: list[list[int] | None] = []
    for rank, group in zip(ranks, groups, strict=True):
        matrix, members = matrices[group], names.shelf.groups[group].ranks
        found.append(None if matrix is None or rank not in members else [row[members.index(rank)] for row in matrix])
    return found


def _matrix(names: Names, group: int, value: Splits, indices: Mapping[str, int], place: Marked) -> list[list[int]] | None:
    """Row i: how many rows of its input group rank i sends to each group rank."""
    members = names.shelf.groups[group].ranks
    rows = []
    for number, member in enumerate(members):
        items = value.get(member) if isinstance(value, PerRank) else value
        if items is None or len(items) != len(members):
            return None
        env = {name: v[member].item() if isinstance(v, np.ndarray) else v for name, v in names.world.items()}
        env |= {**indices, "group_rank": number, "group_size": len(members)}
        rows.append([int(names.evaluate(item, env, place, names.ranks[member : member + 1])) for item in items])
    return rows
