"""The groups that a program's file declares, and those that its new_group steps make."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from distsim.operations.core.resolved_call import RankGroup
from distsim.program.code import CodeCall
from distsim.program.model import Program


def groups_from_file(program: Program) -> list[RankGroup]:
    """Groups that some call uses and no step makes, without the world, in the program's order.

    They are made when the world is.
    """
    used: set[int] = set()
    for code in program.codes:
        for ids in code.groups:
            used.update(np.atleast_1d(np.asarray(ids)).tolist())
    used -= group_ids_from_steps(program)
    return [group for group in program.groups[1:] if group.id in used]


def group_ids_from_steps(program: Program) -> set[int]:
    """Ids of the groups that new_group steps make."""
    made: set[tuple[str, tuple[int, ...]]] = set()
    for code in program.codes:
        for call in code.calls:
            if call.op == "new_group":
                made.update(_groups_made_by(program, code.ranks, call))
    return {group.id for group in program.groups[1:] if (group.name, group.ranks) in made}


def _groups_made_by(
    program: Program, ranks: tuple[int, ...], call: CodeCall
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and members of the group that each of ``ranks`` passes to a new_group call."""
    for rank in ranks:
        resolved = program.resolve(rank, call)
        yield resolved.name, tuple(sorted(resolved.ranks))
