"""Which groups a program has from its file, and which its steps make."""

from __future__ import annotations

from distsim.operations.core.resolved_call import RankGroup
from distsim.program.code import Program


def groups_from_file(program: Program) -> list[RankGroup]:
    """Groups that some call names and no step makes, the world left out, in the program's order:
    made where the world begins.
    """
    used: set[int] = set()
    for code in program.codes:
        for ids in code.groups:
            used |= {int(i) for i in ids.tolist()} if hasattr(ids, "tolist") else {int(ids)}
    by_steps = group_ids_from_steps(program)
    return [group for group in program.groups[1:] if group.id in used and group.id not in by_steps]


def group_ids_from_steps(program: Program) -> set[int]:
    """Ids of the groups that new_group steps make."""
    said = set()
    for code in program.codes:
        for call in code.calls:
            if call.op == "new_group":
                for rank in code.ranks:
                    resolved = program.resolve(rank, call)
                    said.add((resolved.name, tuple(sorted(resolved.ranks))))
    return {group.id for group in program.groups[1:] if (group.name, group.ranks) in said}
