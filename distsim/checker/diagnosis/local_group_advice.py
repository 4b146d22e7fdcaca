"""Advice on groups made by their members alone (use_local_synchronization) that never form.

The members look for each other under the group's name in the store. If they derive different
names, or the name of an earlier group, they do not find each other.

Source: torch 2.13, `distributed_c10d._hash_ranks_to_str` and `_process_group_name`. What each
backend leaves in the store is described in `distsim.semantics.form.group_creation`.
"""

from __future__ import annotations

from collections.abc import Sequence

from distsim.backends import BACKEND_PROFILES
from distsim.checker.diagnosis.awaited_call import AwaitedCall
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.program.model import Program
from distsim.semantics.form.group_creation import (
    DivergentNewGroup,
    created_group_ids,
    divergent_new_groups,
)

#: Members whose names are listed.
_MAX_SHOWN_MEMBERS = 3


def advise_local_group(program: Program, awaited: Sequence[AwaitedCall]) -> tuple[str, ...]:
    """Why members of such a group wait for each other, and what to write instead.

    Empty if the calls wait for something else.
    """
    group_ids = {part.call.group.id for part in awaited if not part.is_message}
    if not any(group_id > 0 for group_id in group_ids):
        return ()
    divergent = divergent_new_groups(program, BACKEND_PROFILES[program.backend])
    call_of: dict[int, ResolvedCall] = {}
    group_of: dict[int, DivergentNewGroup] = {}
    for (rank, position), new_group in divergent.items():
        call = program.call(rank, position)
        if rank in call_of or not call.local_sync:
            continue
        if not group_ids.isdisjoint(created_group_ids(program, call)):
            call_of[rank], group_of[rank] = call, new_group
    if not call_of:
        return ()
    if _is_cycle_of_creations(awaited):
        names = ", ".join(sorted({part.call.group.name for part in awaited}))
        return (
            "remove use_local_synchronization and create the groups in one order on all ranks of "
            f"the world, for example {names}: now each rank waits in its first new_group for a "
            "rank that creates another group first",
        )
    first = min(call_of)
    if group_of[first].again:
        return _advise_reused_name(program, call_of[first], group_of[first])
    return _advise_different_names(group_of)


def _is_cycle_of_creations(awaited: Sequence[AwaitedCall]) -> bool:
    """Whether ranks wait in new_group calls of several groups for ranks that call them later.

    With local synchronization, another order alone may not help: torch derives each group's name
    from the number of groups that the rank is in, which then differs between the members.
    """
    names = {part.call.group.name for part in awaited}
    return len(names) > 1 and all(
        part.call.op == "new_group" and part.position is not None for part in awaited
    )


def _advise_different_names(group_of: dict[int, DivergentNewGroup]) -> tuple[str, ...]:
    """The members have different names for the group."""
    name_of = {rank: group.called for rank, group in sorted(group_of.items())}
    first = min(name_of)
    others = [rank for rank, name in name_of.items() if name != name_of[first]]
    shown = [first, *others][:_MAX_SHOWN_MEMBERS]
    if any(isinstance(name, str) for name in name_of.values()):
        prefixes = []
        for rank in shown:
            name = name_of[rank]
            prefixes.append(f"rank {rank}: {name if isinstance(name, str) else 'none'}")
        return (
            "use the same prefix on all members: they find each other in the store under it, and "
            f"it differs ({', '.join(prefixes)})",
        )
    counts = ", ".join(f"rank {rank} in {name_of[rank]}" for rank in shown)
    return (
        "remove use_local_synchronization and call new_group on all ranks of the world, or give "
        "all members the same number of groups before the call: torch derives the group's name "
        f"from its members and this number, which differs ({counts})",
    )


def _advise_reused_name(
    program: Program, call: ResolvedCall, new_group: DivergentNewGroup
) -> tuple[str, ...]:
    """The name of the group is that of an earlier group."""
    first = min(call.ranks)
    before, found = "the others", "the others' old addresses"
    if BACKEND_PROFILES[program.backend].device:
        before, found = f"rank {first}", f"rank {first}'s old NCCL id"
    why = f"a rank that arrives before {before} finds {found} in the store"
    if isinstance(new_group.called, str):
        return (
            "give each group its own prefix, as torchft does with the number of the quorum: an "
            f"earlier group of these members had the prefix {new_group.called}, so {why}",
        )
    return (
        "keep the earlier group and use it again, or remove use_local_synchronization and call "
        "new_group on all ranks of the world: torch derives the group's name from its members and "
        f"from the number of groups of each, and a destroyed group had the same name, so {why}",
    )
