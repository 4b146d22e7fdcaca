"""new_group under a back end whose members find each other by the group's name (gloo), and what becomes of it when calls differ.

Without use_local_synchronization the name is a count: the rank's how-manieth new_group this is, whether it is a member or not. Each
member leaves its address under (name, group rank) and takes that of every other group rank. So ranks whose sequences of new_group
differ reach for the same places (semantics 2.3, observed):

* who skips a call is behind by one from then on (`group.members_only_call`);
* two groups made in another order mix: "ranks 1 and 2 ended in one group and summed happily" (`group.order_differs`);
* where sizes differ, who finds all its places taken goes on, who misses one waits (`group.ranks_differ`).

With use_local_synchronization it is a hash of the members and of how many groups the rank is in at the time, the world among them
(torch's `_hash_ranks_to_str`). Members that are in different numbers of groups wait for each other under different names (run on gloo).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

from distsim.ops.records import Call
from distsim.profiles.record import Profile
from distsim.program.groups import file_groups
from distsim.program.records import Program


class Made(NamedTuple):
    """One rank's new_group call that the ranks do not agree on.

    ``holders``: who really stands at each group rank, global ranks; ``lost``: this rank never gets its connections; ``contended``:
    several ranks claim one place under this name.
    """

    name: int
    holders: tuple[int, ...]
    lost: bool
    contended: bool = False


def unlike_groups(program: Program, profile: Profile) -> dict[tuple[int, int], Made]:
    """By (rank, position): the new_group calls of members whose name stands for different groups on different ranks."""
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
    found = {key: made for name, calls in names.items() for key, made in _meet(name, calls).items()}
    return found | _hashed_apart(program, len(names))


def _hashed_apart(program: Program, first: int) -> dict[tuple[int, int], Made]:
    """By (rank, position): the calls with use_local_synchronization whose members have different names for the group. Of a recorded
    program the groups that met are known."""
    calls: dict[tuple[tuple[int, ...], int], dict[int, tuple[int, int]]] = {}
    if program.from_file and any(
        call.op == "new_group" and call.fields.get("local_sync") for code in program.codes for call in code.calls
    ):
        at_start = Counter(rank for group in file_groups(program) for rank in group.ranks)
        for rank in range(program.world_size):
            for again, members, position, held in _hashed(program, rank, at_start[rank]):
                calls.setdefault((members, again), {})[rank] = (position, held)
    found, names = {}, dict[Hashable, int]()
    for key, those in calls.items():
        if len({held for _, held in those.values()}) > 1:
            for rank, (position, held) in those.items():
                found[rank, position] = Made(names.setdefault((key, held), first + len(names)), key[0], True)
    return found


def _hashed(program: Program, rank: int, at_start: int) -> Iterator[tuple[int, tuple[int, ...], int, int]]:
    """Of a rank's calls with use_local_synchronization: which of these members it is, the members, the position, groups held."""
    held, seen = 1 + at_start, Counter[tuple[int, ...]]()
    for position, call in program.calls_of(rank):
        if call.op == "destroy_process_group" and call.group.id:
            held -= rank in call.group.ranks
        elif call.op == "destroy_process_group":
            held = 1 + at_start
        elif call.op == "new_group" and not _is_refused(program, rank, position):
            members = tuple(sorted(call.ranks))
            if call.local_sync:
                yield seen[members], members, position, held
                seen[members] += 1
            held += rank in members


def _is_refused(program: Program, rank: int, position: int) -> bool:
    invalid = program.code_call(rank, position).invalid
    return invalid is not None and bool(invalid[0][program.row_of[rank]])


def _meet(name: int, calls: Mapping[int, tuple[int, tuple[int, ...]]]) -> dict[tuple[int, int], Made]:
    """Who finds whom under one name; nothing where all members call and mean the same group."""
    members = {rank: ranks for rank, (_, ranks) in calls.items() if rank in ranks}
    if len(set(members.values())) <= 1 and all(set(ranks) <= set(members) for ranks in members.values()):
        return {}
    places: dict[int, list[int]] = {}
    for rank, ranks in members.items():
        places.setdefault(ranks.index(rank), []).append(rank)
    # Which of several keeps a place is a race; both times it was observed, the last kept place 0 and the first any other.
    holder = {place: max(ranks) if place == 0 else min(ranks) for place, ranks in places.items()}
    found = {}
    for rank, ranks in members.items():
        mine = ranks.index(rank)
        holders = tuple(holder.get(place, -1) for place in range(len(ranks)))
        meets = holder[mine] == rank and all(h >= 0 and len(members[h]) > mine for h in holders)
        found[rank, calls[rank][0]] = Made(name, holders, not meets, any(len(those) > 1 for those in places.values()))
    return found


def made_groups(program: Program, call: Call) -> tuple[int, ...]:
    """The ids of the groups that a new_group call may have made: those of its name and ranks, never none (0, the world, if unused)."""
    ranks = tuple(sorted(call.ranks))
    return tuple(g.id for g in program.groups[1:] if g.name == call.name and g.ranks == ranks) or (0,)
