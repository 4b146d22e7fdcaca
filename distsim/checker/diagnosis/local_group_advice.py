"""Groups that their members make by themselves, and by whose names members do not find each other:
which rule of torch is broken.

torch 2.13: `distributed_c10d._hash_ranks_to_str`, `_process_group_name`; what each back end leaves
in the store under the name is told in `distsim.semantics.form.group_creation`.
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

#: So many members are told what they are in.
_MAX_SHOWN_MEMBERS = 3


def advise_local_group(program: Program, parts: Sequence[AwaitedCall]) -> tuple[str, ...]:
    """Why members of such a group wait for each other, and what to write instead; nothing where
    another thing is the matter.
    """
    wanted = {part.call.group.id for part in parts if not part.is_message}
    if not any(group > 0 for group in wanted):
        return ()
    found: dict[int, tuple[ResolvedCall, DivergentNewGroup]] = {}
    for (rank, position), made in divergent_new_groups(
        program, BACKEND_PROFILES[program.backend]
    ).items():
        call = program.call(rank, position)
        if call.local_sync and wanted & set(created_group_ids(program, call)):
            found.setdefault(rank, (call, made))
    if not found:
        return ()
    call, made = found[min(found)]
    return (
        _advise_reused_name(program, call, made)
        if made.again
        else _advise_different_names({rank: one for rank, (_, one) in found.items()})
    )


def _advise_different_names(found: dict[int, DivergentNewGroup]) -> tuple[str, ...]:
    """Its members have other names for it."""
    told = {rank: made.called for rank, made in sorted(found.items())}
    first = min(told)
    shown = [first, *[rank for rank in told if told[rank] != told[first]]][:_MAX_SHOWN_MEMBERS]
    if any(isinstance(name, str) for name in told.values()):
        each = ", ".join(
            f"rank {r}: {told[r] if isinstance(told[r], str) else 'none'}" for r in shown
        )
        return (
            f"its members meet in the store under its prefix, which is not the same on all ({each}): give all one prefix",
        )
    each = ", ".join(f"rank {r} in {told[r]}" for r in shown)
    return (
        f"torch names a group with use_local_synchronization by its members and by how many groups each is in by then ({each}):"
        " destroy or make other groups so that this number is equal on all members, or leave use_local_synchronization out and let"
        " all ranks of the world make the call",
    )


def _advise_reused_name(
    program: Program, call: ResolvedCall, made: DivergentNewGroup
) -> tuple[str, ...]:
    """Its name is that of one before."""
    first = min(call.ranks)
    left = (
        f"rank {first}'s NCCL id"
        if BACKEND_PROFILES[program.backend].device
        else "the others' addresses"
    )
    why = f"whoever comes before {f'rank {first}' if BACKEND_PROFILES[program.backend].device else 'the others'} finds {left} of then in the store"
    if isinstance(made.called, str):
        return (
            f"a group of these members had the prefix {made.called} before, and {why}: give each group a prefix of its own, as"
            " torchft does with the number of the quorum",
        )
    return (
        "torch names a group with use_local_synchronization by its members and by how many groups each is in by then, and one that"
        f" was destroyed had this name: {why}. Keep that group and use it again, or leave use_local_synchronization out and let all"
        " ranks of the world make the call",
    )
