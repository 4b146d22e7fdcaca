"""new_group under a back end whose members find each other by the group's name (gloo), and what
becomes of it when calls differ.

Without use_local_synchronization the name is a count: the rank's how-manieth new_group this is,
whether it is a member or not. Each member leaves its address under (name, group rank) and takes
that of every other group rank. So ranks whose sequences of new_group differ reach for the same
places (semantics 2.3, observed):

* who skips a call is behind by one from then on (`group.members_only_call`);
* two groups made in another order mix: "ranks 1 and 2 ended in one group and summed happily" (`group.order_differs`);
* where sizes differ, who finds all its places taken goes on, who misses one waits (`group.ranks_differ`).

With use_local_synchronization it is a hash of the members and of how many groups the rank is in at
the time, the world among them (torch's `_hash_ranks_to_str`). Members that are in different numbers
of groups wait for each other under different names (run on gloo). A group that was destroyed and is
made again in the same number of groups has the same name, and the addresses of before are still
there (under nccl: the id that rank 0 of the group left, `broadcastUniqueNCCLID`). Who comes before
the others takes theirs of before; the side with the higher address connects, so whether that one
hangs is luck of ports. Run on gloo, torch 2.13, 6 times each: of 2, 3 and 4 members at one time 6,
5 and 3 got through, with the first 0.2 s late 1, 0 and 0. A group with a store of its own (`store`)
has no such past, unless that prefix was used before.
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


class DivergentNewGroup(NamedTuple):
    """One rank's new_group call that the ranks do not agree on.

    ``holders``: who really stands at each group rank, global ranks; ``lost``: this rank never gets
    its connections; ``contended``: several ranks claim one place under this name; ``again``: the
    name is that of a group that was destroyed, and who comes first finds addresses of before;
    ``taken``: a group that is still there has it, and torch raises; ``called``: of a group that its
    members make alone, what tells its name from others of these members.
    """

    name: int
    holders: tuple[int, ...]
    lost: bool
    contended: bool = False
    again: bool = False
    called: int | str = 0
    taken: bool = False


def divergent_new_groups(
    program: Program, profile: BackendProfile
) -> dict[tuple[int, int], DivergentNewGroup]:
    """By (rank, position): the new_group calls of members whose name stands for different groups on
    different ranks.
    """
    names: dict[int, dict[int, tuple[int, tuple[int, ...]]]] = {}
    if not any(call.op == "new_group" for code in program.codes for call in code.calls):
        return {}
    for rank in range(program.world_size):
        count = 0
        for position, call in program.calls_of(rank):
            if call.op == "new_group" and not call.local_sync:
                if not _is_refused(program, rank, position):
                    names.setdefault(count, {})[rank] = (position, tuple(sorted(call.ranks)))
                count += 1
    found = {
        key: made
        for name, calls in names.items()
        for key, made in _divergent_under_one_name(name, calls).items()
    }
    return found | _divergent_local_groups(program, len(names))


def _divergent_local_groups(
    program: Program, first: int
) -> dict[tuple[int, int], DivergentNewGroup]:
    """By (rank, position): the calls of members alone that have different names for the group, or a
    name that was there before. Of a recorded program the groups that met are known."""
    calls: dict[tuple[tuple[int, ...], int], dict[int, _LocalNewGroup]] = {}
    if program.from_file and any(
        call.op == "new_group" and call.fields.get("local_sync")
        for code in program.codes
        for call in code.calls
    ):
        at_start = Counter(rank for group in groups_from_file(program) for rank in group.ranks)
        for rank in range(program.world_size):
            for one in _local_new_groups(program, rank, at_start[rank]):
                calls.setdefault((one.members, one.number), {})[rank] = one
    found, names = {}, dict[Hashable, int]()
    for key, those in calls.items():
        apart = len({one.name for one in those.values()}) > 1
        if apart or (len(those) == len(key[0]) > 1 and any(one.again for one in those.values())):
            for rank, one in those.items():
                name = names.setdefault((key, one.name), first + len(names))
                found[rank, one.position] = DivergentNewGroup(
                    name, key[0], True, not apart, not apart, one.name, one.taken
                )
    return found


class _LocalNewGroup(NamedTuple):
    """A call of the members alone. ``number``: which of these members it is; ``name``: what tells
    it from others of these members: the groups held, or the prefix of its store; ``again``: a group
    of this rank had that name before, ``taken``: and is still there."""

    number: int
    members: tuple[int, ...]
    position: int
    name: int | str
    again: bool
    taken: bool


def _local_new_groups(program: Program, rank: int, at_start: int) -> Iterator[_LocalNewGroup]:
    """A rank's calls with use_local_synchronization, or with a store of their own."""
    held, seen, used = (
        1 + at_start,
        Counter[tuple[int, ...]](),
        set[tuple[tuple[int, ...], int | str]](),
    )
    there: dict[str, tuple[tuple[int, ...], int | str]] = {}
    for position, call in program.calls_of(rank):
        if call.op == "destroy_process_group" and call.group.id:
            held -= rank in call.group.ranks
            there.pop(call.group.name, None)
        elif call.op == "destroy_process_group":
            held = 1 + at_start
            used.clear()
            there.clear()
        elif call.op == "new_group" and not _is_refused(program, rank, position):
            members = tuple(sorted(call.ranks))
            if call.local_sync:
                name = call.store or held
                yield _LocalNewGroup(
                    seen[members],
                    members,
                    position,
                    name,
                    (members, name) in used,
                    (members, name) in there.values(),
                )
                seen[members] += 1
                used.add((members, name))
                there[call.name] = members, name
            held += rank in members


def _is_refused(program: Program, rank: int, position: int) -> bool:
    invalid = program.code_call(rank, position).invalid
    return invalid is not None and bool(invalid[0][program.row_of[rank]])


def _divergent_under_one_name(
    name: int, calls: Mapping[int, tuple[int, tuple[int, ...]]]
) -> dict[tuple[int, int], DivergentNewGroup]:
    """Who finds whom under one name; nothing where all members call and mean the same group."""
    members = {rank: ranks for rank, (_, ranks) in calls.items() if rank in ranks}
    if len(set(members.values())) <= 1 and all(
        set(ranks) <= set(members) for ranks in members.values()
    ):
        return {}
    places: dict[int, list[int]] = {}
    for rank, ranks in members.items():
        places.setdefault(ranks.index(rank), []).append(rank)
    # Which of several keeps a place is a race; both times it was observed, the last kept place 0
    # and the first any other.
    holder = {place: max(ranks) if place == 0 else min(ranks) for place, ranks in places.items()}
    found = {}
    for rank, ranks in members.items():
        mine = ranks.index(rank)
        holders = tuple(holder.get(place, -1) for place in range(len(ranks)))
        meets = holder[mine] == rank and all(h >= 0 and len(members[h]) > mine for h in holders)
        found[rank, calls[rank][0]] = DivergentNewGroup(
            name, holders, not meets, any(len(those) > 1 for those in places.values())
        )
    return found


def new_group_error(
    call: ResolvedCall, made: DivergentNewGroup | None, profile: BackendProfile
) -> str | None:
    """The error of a new_group that torch does not make; a reading of the contract makes all."""
    if (
        (never := profile_for_call(profile, call).local_groups)
        and call.local_sync
        and call.store is None
    ):
        return never
    if profile.support is not None and made is not None and made.taken:
        return "ValueError: The specified group name has already been created, please use a different group name"
    return None


def created_group_ids(program: Program, call: ResolvedCall) -> tuple[int, ...]:
    """The ids of the groups that a new_group call may have made: those of its name and ranks, never
    none (0, the world, if unused).
    """
    ranks = tuple(sorted(call.ranks))
    return tuple(g.id for g in program.groups[1:] if g.name == call.name and g.ranks == ranks) or (
        0,
    )
