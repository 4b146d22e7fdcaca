"""new_group under a backend whose members find each other by the group's name (gloo), and what
happens if calls differ.

Without use_local_synchronization, the name is a count: the number of the call among the rank's
new_group calls, whether the rank is a member or not. Each member stores its address under (name,
group rank) and reads that of every other group rank. So ranks whose sequences of new_group differ
reach for the same places (semantics 2.3, observed):

* A rank that skips a call is behind by one from then on (`group.members_only_call`).
* Two groups created in different orders mix: "ranks 1 and 2 ended in one group and summed happily"
  (`group.order_differs`).
* Where sizes differ, a rank that finds all its places claimed continues; one that misses a place
  waits (`group.ranks_differ`).

With use_local_synchronization, the name is a hash of the members and of the number of groups that
the rank is in at the time, including the world (torch's `_hash_ranks_to_str`). Members that are in
different numbers of groups wait for each other under different names (run on gloo). A group that
was destroyed and is created again in the same number of groups has the same name, and the earlier
addresses are still in the store (under nccl: the id that rank 0 of the group stored,
`broadcastUniqueNCCLID`). A rank that arrives before the others reads their earlier addresses. The
side with the higher address connects, so whether that rank hangs depends on the ports. Run on gloo,
torch 2.13, 6 times each: of 2, 3 and 4 members that arrived at the same time, 6, 5 and 3 runs
succeeded; with the first member 0.2 s late, 1, 0 and 0. A group with a store of its own (`store`)
has no such earlier addresses, unless its prefix was used before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

from distsim.backends import profile_for_call
from distsim.backends.profile import BackendProfile
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.program.groups import groups_from_file
from distsim.program.model import Program

#: A group rank that no rank claims.
_NO_HOLDER = -1


class DivergentNewGroup(NamedTuple):
    """One rank's new_group call that the ranks do not agree on.

    - ``holders``: by group rank, the global rank that really claims it.
    - ``lost``: this rank never gets its connections.
    - ``contended``: several ranks claim one group rank under this name.
    - ``may_connect``: only one of the groups under this name has several members, so these may
      connect after all. Runs of `[0, 2]` with `[1]` on gloo, torch 2.13, 3 each: all completed
      with all ranks at the same time or rank 1 1 s late; with ranks 0 and 2 1 s late, 2 completed
      and 1 hung in new_group. Another series of 10 runs also had errors.
    - ``again``: a group that was destroyed had this name; the first rank to arrive finds its
      addresses.
    - ``taken``: a group that still exists has this name, and torch raises.
    - ``called``: for a group that its members create alone, what distinguishes its name from those
      of other groups of these members.
    """

    name: int
    holders: tuple[int, ...]
    lost: bool
    contended: bool = False
    again: bool = False
    called: int | str = 0
    taken: bool = False
    may_connect: bool = False


#: By (rank, position).
_DivergentCalls = dict[tuple[int, int], DivergentNewGroup]


class _MemberCall(NamedTuple):
    """The position of a rank's new_group call, and its ranks in ascending order."""

    position: int
    ranks: tuple[int, ...]


def divergent_new_groups(program: Program, profile: BackendProfile) -> _DivergentCalls:
    """The new_group calls whose name means different groups on different ranks."""
    if not any(call.op == "new_group" for code in program.codes for call in code.calls):
        return {}
    calls_by_name: dict[int, dict[int, _MemberCall]] = {}
    for rank in range(program.world_size):
        name = 0  # the number of the call among the rank's new_group calls
        for position, call in program.calls_of(rank):
            if call.op != "new_group" or call.local_sync:
                continue
            if not _is_refused(program, rank, position):
                member_call = _MemberCall(position, tuple(sorted(call.ranks)))
                calls_by_name.setdefault(name, {})[rank] = member_call
            name += 1
    divergent: _DivergentCalls = {}
    for name, calls in calls_by_name.items():
        divergent |= _divergent_under_one_name(name, calls)
    return divergent | _divergent_local_groups(program, len(calls_by_name))


def _divergent_local_groups(program: Program, first_name: int) -> _DivergentCalls:
    """The calls with local synchronization whose members have different names for the group, or a
    name that was used before.

    In a recorded program the groups that the ranks created are known.
    """
    calls_by_group: dict[tuple[tuple[int, ...], int], dict[int, _LocalNewGroup]] = {}
    if program.from_file and _creates_local_groups(program):
        at_start = Counter(rank for group in groups_from_file(program) for rank in group.ranks)
        for rank in range(program.world_size):
            for call in _local_new_groups(program, rank, at_start[rank]):
                calls_by_group.setdefault((call.members, call.number), {})[rank] = call
    divergent: _DivergentCalls = {}
    names: dict[Hashable, int] = {}
    for key, calls in calls_by_group.items():
        members = key[0]
        names_differ = len({call.name for call in calls.values()}) > 1
        all_call = len(calls) == len(members) > 1
        name_was_used = any(call.again for call in calls.values())
        if not names_differ and not (all_call and name_was_used):
            continue
        for rank, call in calls.items():
            name = names.setdefault((key, call.name), first_name + len(names))
            divergent[rank, call.position] = DivergentNewGroup(
                name,
                members,
                lost=True,
                contended=not names_differ,
                again=not names_differ,
                called=call.name,
                taken=call.taken,
            )
    return divergent


def _creates_local_groups(program: Program) -> bool:
    calls = (call for code in program.codes for call in code.calls)
    return any(call.op == "new_group" and call.fields.get("local_sync") for call in calls)


class _LocalNewGroup(NamedTuple):
    """A rank's new_group call with local synchronization.

    - ``number``: of the call among the rank's calls with these members.
    - ``name``: what distinguishes its name from those of other groups of these members: the number
      of groups that the rank is in, or the prefix of its store.
    - ``again``: a group of this rank had that name before; ``taken``: and still exists.
    """

    number: int
    members: tuple[int, ...]
    position: int
    name: int | str
    again: bool
    taken: bool


def _local_new_groups(program: Program, rank: int, at_start: int) -> Iterator[_LocalNewGroup]:
    """A rank's calls with use_local_synchronization, or with a store of their own."""
    group_count = 1 + at_start  # the groups that the rank is in, with the world
    seen = Counter[tuple[int, ...]]()
    used: set[tuple[tuple[int, ...], int | str]] = set()
    existing: dict[str, tuple[tuple[int, ...], int | str]] = {}
    for position, call in program.calls_of(rank):
        if call.op == "destroy_process_group" and call.group.id:
            group_count -= rank in call.group.ranks
            existing.pop(call.group.name, None)
        elif call.op == "destroy_process_group":  # of the world: of everything
            group_count = 1 + at_start
            used.clear()
            existing.clear()
        elif call.op == "new_group" and not _is_refused(program, rank, position):
            members = tuple(sorted(call.ranks))
            if call.local_sync:
                name = call.store or group_count
                full_name = (members, name)
                yield _LocalNewGroup(
                    seen[members],
                    members,
                    position,
                    name,
                    again=full_name in used,
                    taken=full_name in existing.values(),
                )
                seen[members] += 1
                used.add(full_name)
                existing[call.name] = full_name
            group_count += rank in members


def _is_refused(program: Program, rank: int, position: int) -> bool:
    invalid = program.code_call(rank, position).invalid
    return invalid is not None and bool(invalid.rows[program.row_of[rank]])


def _divergent_under_one_name(name: int, calls: Mapping[int, _MemberCall]) -> _DivergentCalls:
    """Which rank finds which under one name; empty if all members call and mean the same group."""
    groups = {rank: call.ranks for rank, call in calls.items() if rank in call.ranks}
    all_agree = len(set(groups.values())) <= 1
    all_call = all(set(ranks) <= set(groups) for ranks in groups.values())
    if all_agree and all_call:
        return {}
    claims: dict[int, list[int]] = {}
    for rank, ranks in groups.items():
        claims.setdefault(ranks.index(rank), []).append(rank)
    is_contended = any(len(claimants) > 1 for claimants in claims.values())
    several = {ranks for ranks in groups.values() if len(ranks) > 1}
    may_connect = is_contended and all_call and len(several) == 1
    # Which of several ranks gets a group rank is a race. Both times it was observed, the last one
    # kept group rank 0 and the first one any other.
    holder = {place: max(ranks) if place == 0 else min(ranks) for place, ranks in claims.items()}
    divergent: _DivergentCalls = {}
    for rank, ranks in groups.items():
        own_place = ranks.index(rank)
        holders = tuple(holder.get(place, _NO_HOLDER) for place in range(len(ranks)))
        # A connection needs both sides: each holder must also look for this rank's place.
        looked_for_by_all = all(h >= 0 and len(groups[h]) > own_place for h in holders)
        connects = holder[own_place] == rank and looked_for_by_all
        position = calls[rank].position
        divergent[rank, position] = DivergentNewGroup(
            name, holders, not connects, is_contended, may_connect=may_connect
        )
    return divergent


def new_group_error(
    call: ResolvedCall, divergent: DivergentNewGroup | None, profile: BackendProfile
) -> str | None:
    """The error of a new_group call that torch rejects; a reading of the contract accepts all."""
    refusal = profile_for_call(profile, call).local_groups
    if refusal and call.local_sync and call.store is None:
        return refusal
    if profile.support is not None and divergent is not None and divergent.taken:
        return (
            "ValueError: The specified group name has already been created, "
            "please use a different group name"
        )
    return None


def created_group_ids(program: Program, call: ResolvedCall) -> tuple[int, ...]:
    """The ids of the groups that a new_group call may create: those of its name and ranks.

    Never empty: (0,), the world, if the program never uses the group.
    """
    ranks = tuple(sorted(call.ranks))
    named = (group for group in program.groups[1:] if group.name == call.name)
    return tuple(group.id for group in named if group.ranks == ranks) or (0,)
