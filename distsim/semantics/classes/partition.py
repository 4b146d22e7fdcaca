"""The coarsest partition of a program's ranks whose members do the same with partners who do the
same, at the same distance.

Who meets whom is fixed before any clock runs, so it is worked out on the lowered program, for all
ranks at once, before a call of theirs is looked at one by one. Members of a class have

- the same code, the same numbers in its calls, the same speed and the same start;
- for each of their ports the same class of peer, the same port of the peer that leads back, and the same kind of link;
- for each of their groups the same set of (class, group of its member), and the same price.

Then they do the same at the same time: by induction on the round, an event of one is known in a
round of the fixed point of all times if and only if those of the others are, and at the same value,
because each is the largest of those that it needs plus a price. This is the lifting lemma of
anonymous networks (D. Angluin, Local and global properties in networks of processors, STOC 1980)
with port numbers (M. Yamashita, T. Kameda, Computing on anonymous networks, IEEE TPDS 7, 1996).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from distsim.backends.profile import BackendProfile
from distsim.common.arrays import IntArray, sorted_unique
from distsim.hardware.cost import CostModel
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall, SharedCode, resolve_call
from distsim.program.model import Program
from distsim.semantics.classes.rank_keys import RankVectors, row_numbers

#: Rounds after which a program counts as one that does not fold: a chain loses a few ranks in each.
MAX_PARTITION_ROUNDS = 64
#: Operations that end a process.
_EXIT_OPS = ("exit", "fail")


class PortTable(NamedTuple):
    """Ports of all ranks, one entry for each rank and port: whose it is, its number in the rank's
    code, and whom it leads to.
    """

    rank: IntArray
    port: IntArray
    peer: IntArray


class MembershipTable(NamedTuple):
    """Members of groups, one entry for each group and place in a member's code (``slot``; -1: the
    member makes no call on it).

    ``group`` counts in ``ids``.
    """

    rank: IntArray
    group: IntArray
    slot: IntArray
    ids: list[int]


class RankPartition(NamedTuple):
    """``of[r]``: the class of rank r, numbered by their first ranks."""

    of: IntArray
    ends: PortTable
    slots: MembershipTable


def partition_ranks(
    program: Program,
    costs: Sequence[CostModel],
    profiles: Sequence[BackendProfile],
    rounds: int = MAX_PARTITION_ROUNDS,
    *,
    shared: bool = False,
) -> RankPartition | None:
    """The classes of a program's ranks under some profiles; None where something in it cannot be
    told by classes.

    ``costs``: whose prices must be equal. ``rounds`` bounds the refinement. ``shared``: members put
    equal bytes on equal links as well, so that what shares them is as slow.
    """
    return (
        _PartitionRefinement(program, costs, profiles, shared).run(rounds)
        if _can_use_classes(program)
        else None
    )


def _can_use_classes(program: Program) -> bool:
    """Nothing in the program goes by the numbers of ranks, or by who comes first."""
    plain = (
        all(fault.kind in ("slow", "late") for fault in program.faults)
        and not program.jitter
        and program.startup is None
    )
    if not plain:
        return False
    for code in program.codes:
        if any(np.any(np.asarray(port.peer) < 0) for port in code.ports):
            return False
        for call in code.distinct_calls():
            named = any(
                isinstance(call.fields.get(name), np.ndarray)
                for name in ("code", "message", "assume_src")
            )
            if (
                call.invalid is not None
                or OPERATIONS[call.op].kind in ("group", "remote")
                or call.op in _EXIT_OPS
                or named
                or _agreement_depends_on_group_rank(program, code, call)
            ):
                return False
    return True


def _agreement_depends_on_group_rank(program: Program, code: SharedCode, call: CodeCall) -> bool:
    """Whether its members fit one another is decided by where they stand: what i sends to j must be
    what j expects from i.
    """
    if not OPERATIONS[call.op].pairwise:
        return False
    return isinstance(call.signature, np.ndarray) or "numel" not in OPERATIONS[call.op].agreement(
        resolve_call(code, program.groups, 0, call)
    )


class _PartitionRefinement:
    def __init__(
        self,
        program: Program,
        costs: Sequence[CostModel],
        profiles: Sequence[BackendProfile],
        shared: bool,
    ) -> None:
        self.program, self.costs, self.profiles, self.shared = program, costs, profiles, shared
        self._on_node: dict[tuple[int, int], Counter[int]] = {}
        self.codes = [RankVectors(code) for code in program.codes]
        self.size = program.world_size
        self.ends = self._all_ends()
        self.slots = self._all_slots()
        self.placed = self._placed()

    def run(self, rounds: int) -> RankPartition | None:
        colour = self._first()
        for _ in range(rounds):
            finer = self._round(colour)
            if finer.max() == colour.max():
                return RankPartition(_numbered_by_first_rank(finer), self.ends, self.slots)
            colour = finer
        return None

    # --- ports ---
    def _all_ends(self) -> PortTable:
        """Entries by code, port and rank, in this order."""
        rank, port, peer = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for look in self.codes:
            count = len(look.ports)
            rank.append(np.tile(look.ranks, count))
            port.append(np.repeat(np.arange(count), len(look.ranks)))
            peer += [p for p, _, _ in look.ports]
        return PortTable(np.concatenate(rank), np.concatenate(port), np.concatenate(peer))

    def _backs(self, more: Sequence[IntArray]) -> IntArray:
        """For each entry the first port of its peer that leads back to it, -1 where none does.
        ``more``: what must be equal besides.
        """
        here = np.stack([self.ends.rank, self.ends.peer, *more], axis=1)
        there = np.stack([self.ends.peer, self.ends.rank, *more], axis=1)
        number = row_numbers(np.concatenate([here, there]))
        mine, others = number[: len(here)], number[len(here) :]
        first = np.full(int(number.max(initial=-1)) + 1, -1, dtype=np.int64)
        first[mine[::-1]] = self.ends.port[::-1]
        return np.asarray(first[others])

    def _port_facts(self) -> list[IntArray]:
        """Of each entry: the ports that lead back, and how far it is."""
        groups = np.concatenate(
            [np.zeros(0, np.int64), *(g for look in self.codes for _, g, _ in look.ports)]
        )
        tags = np.concatenate(
            [np.zeros(0, np.int64), *(t for look in self.codes for _, _, t in look.ports)]
        )
        found = [self._backs([]), self._backs([groups]), *map(self._distance, self.costs)]
        return (
            [*found, self._backs([tags]), self._backs([groups, tags])]
            if any(look.tagged for look in self.codes)
            else found
        )

    def _distance(self, cost: CostModel) -> IntArray:
        """By entry a number for what its messages cost."""
        nodes = np.stack(
            [end // cost.local_size for end in (self.ends.rank, self.ends.peer)], axis=1
        )
        if not cost.link_faults:
            return np.asarray(nodes[:, 0] != nodes[:, 1], dtype=np.int64)
        pairs, which = np.unique(nodes, axis=0, return_inverse=True)
        ranks = [(a * cost.local_size, b * cost.local_size + (a == b)) for a, b in pairs.tolist()]
        rates = [(cost.link_class(a, b), cost.bytes_per_ns(a, b)) for a, b in ranks]
        known: dict[Hashable, int] = {}
        numbers = [known.setdefault(rate, len(known)) for rate in rates]
        return np.array(numbers, dtype=np.int64)[which.reshape(-1)] if numbers else nodes[:, 0]

    # --- groups ---
    def _all_slots(self) -> MembershipTable:
        used = sorted(
            {
                int(g)
                for look in self.codes
                for ids in look.groups
                for g in sorted_unique(ids).tolist()
            }
        )
        index = {g: i for i, g in enumerate(used)}
        number = np.full(len(self.program.groups), -1, dtype=np.int64)
        number[used] = np.arange(len(used))
        entries = [
            (look.ranks, number[ids], np.full(len(ids), slot, dtype=np.int64))
            for look in self.codes
            for slot, ids in enumerate(look.groups)
        ]
        rank, group, slot = (
            (
                np.concatenate([np.zeros(0, np.int64), *column])
                for column in zip(*entries, strict=True)
            )
            if entries
            else (np.zeros(0, np.int64),) * 3
        )
        members = [np.array(self.program.groups[g].ranks, dtype=np.int64) for g in used]
        who = np.concatenate([np.zeros(0, np.int64), *members])
        where = np.repeat(
            np.array([index[g] for g in used], dtype=np.int64), [len(m) for m in members]
        )
        silent = ~np.isin(where * self.size + who, group * self.size + rank)
        return MembershipTable(
            np.concatenate([rank, who[silent]]),
            np.concatenate([group, where[silent]]),
            np.concatenate([slot, np.full(int(silent.sum()), -1)]),
            used,
        )

    def _placed(self) -> IntArray:
        """By group in use a number for what it costs and allows."""
        known: dict[Hashable, int] = {}
        groups = [self.program.groups[g] for g in self.slots.ids]
        keys = [
            (
                *(id(cost.placement(g.ranks)) for cost in self.costs),
                g.size,
                g.timeout_ns,
                g.backend,
                g.id == 0,
            )
            for g in groups
        ]
        return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)

    # --- colours ---
    def _first(self) -> IntArray:
        """Colours by what ranks are for themselves, without gaps: a round that splits none is known
        by the largest.
        """
        own = self._of_faults()
        facts, start = self._port_facts(), 0
        columns: list[IntArray] = []
        for number, look in enumerate(self.codes):
            size = len(look.ranks) * len(look.ports)
            mine = [fact[start : start + size].reshape(-1, len(look.ranks)) for fact in facts]
            start += size
            places = [self._places(look)] if look.by_place(self.profiles) else []
            places += (
                [self._mates(look, cost.local_size) for cost in self.costs] if self.shared else []
            )
            code = np.full((1, len(look.ranks)), number, dtype=np.int64)
            table = np.concatenate(
                [code, own[None, look.ranks], *look.facts(self.program), *mine, *places]
            )
            columns.append(row_numbers(table.T))
        colour, offset = np.zeros(self.size, dtype=np.int64), 0
        for look, numbers in zip(self.codes, columns, strict=True):
            colour[look.ranks] = numbers + offset
            offset += int(numbers.max(initial=-1)) + 1
        missed = self._missed()
        colour[missed] = offset + np.arange(len(missed))
        return _numbered_by_first_rank(colour)

    def _missed(self) -> IntArray:
        """Ranks of whom some members of their groups wait for in particular, by places or as the
        root, although they may not come: each is another."""
        placed, asked = (
            np.zeros(self.size, dtype=np.bool_),
            np.zeros(len(self.program.groups), dtype=np.bool_),
        )
        nobody = np.zeros(0, np.int64)
        roots, come = [nobody], [nobody]
        for look in self.codes:
            groups = look.by_place(self.profiles)
            placed[look.ranks] = bool(groups)
            asked[np.concatenate([nobody, *groups])] = True
            for ids, root in look.rooted():
                roots.append(ids * self.size + root)
                come.append(ids * self.size + look.ranks)
        slots, found = self.slots, np.zeros(self.size, dtype=np.bool_)
        unplaced = (slots.slot < 0) | ~placed[
            slots.rank
        ]  # the others are told apart by their places
        found[slots.rank[asked[np.array(slots.ids, dtype=np.int64)][slots.group] & unplaced]] = True
        awaited = sorted_unique(np.concatenate(roots))
        found[awaited[~np.isin(awaited, np.concatenate(come))] % self.size] = True
        return np.flatnonzero(found)

    def _of_faults(self) -> IntArray:
        """By rank a number for its speed and its start."""
        said: dict[int, list[tuple[str, float, int]]] = {}
        for fault in self.program.faults:
            said.setdefault(fault.rank, []).append((fault.kind, fault.factor, fault.delay_ns))
        known: dict[Hashable, int] = {}
        found = np.zeros(self.size, dtype=np.int64)
        for rank, faults in said.items():
            found[rank] = known.setdefault(tuple(faults), len(known) + 1)
        return found

    def _places(self, look: RankVectors) -> IntArray:
        """Group ranks, where an operation goes by them."""
        table = []
        for ids in look.groups:
            index = {
                g: {rank: i for i, rank in enumerate(self.program.groups[g].ranks)}
                for g in sorted_unique(ids).tolist()
            }
            table.append(
                [
                    index[g].get(rank, -1)
                    for g, rank in zip(ids.tolist(), look.ranks.tolist(), strict=True)
                ]
            )
        return np.array(table, dtype=np.int64).reshape(-1, len(look.ranks))

    def _mates(self, look: RankVectors, size: int) -> IntArray:
        """Members of a rank's groups on its own node: what its links carry of a collective goes by
        their number.
        """
        table, known = [], self._on_node
        for ids in look.groups:
            for g in sorted_unique(ids).tolist():
                if (g, size) not in known:
                    known[g, size] = Counter(rank // size for rank in self.program.groups[g].ranks)
            table.append(
                [
                    known[g, size][rank // size]
                    for g, rank in zip(ids.tolist(), look.ranks.tolist(), strict=True)
                ]
            )
        return np.array(table, dtype=np.int64).reshape(-1, len(look.ranks))

    def _round(self, colour: IntArray) -> IntArray:
        """Finer colours: by those of the peers, and of the members of groups."""
        kinds, peers, start = self._kinds(colour), colour[self.ends.peer], 0
        fresh, offset = np.zeros(self.size, dtype=np.int64), 0
        number = {g: i for i, g in enumerate(self.slots.ids)}
        lookup = np.full(len(self.program.groups), -1, dtype=np.int64)
        lookup[list(number)] = list(number.values())
        for look in self.codes:
            size = len(look.ranks) * len(look.ports)
            mine = peers[start : start + size].reshape(-1, len(look.ranks))
            start += size
            groups = [kinds[lookup[ids]][None, :] for ids in look.groups]
            numbers = row_numbers(np.concatenate([colour[None, look.ranks], mine, *groups]).T)
            fresh[look.ranks] = numbers + offset
            offset += int(numbers.max(initial=-1)) + 1
        return fresh

    def _kinds(self, colour: IntArray) -> IntArray:
        """By group in use the number of its kind: equal ones have the same places of the same
        classes.
        """
        wide = int(self.slots.slot.max(initial=-1)) + 2
        code = colour[self.slots.rank] * wide + self.slots.slot + 1
        order = np.lexsort((code, self.slots.group))
        group, code = self.slots.group[order], code[order]
        fresh = np.ones(len(code), dtype=np.bool_)
        fresh[1:] = (np.diff(code) != 0) | (np.diff(group) != 0)
        group, code = group[fresh], code[fresh]
        starts = np.searchsorted(group, np.arange(len(self.slots.ids) + 1)).tolist()
        known: dict[tuple[bytes, int], int] = {}
        keys = (
            (code[a:b].tobytes(), placed)
            for a, b, placed in zip(starts[:-1], starts[1:], self.placed.tolist(), strict=True)
        )
        return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)


def _numbered_by_first_rank(colour: IntArray) -> IntArray:
    """Numbers by the first rank of each colour."""
    _, first, which = np.unique(colour, return_index=True, return_inverse=True)
    place = np.empty(len(first), dtype=np.int64)
    place[np.argsort(first, kind="stable")] = np.arange(len(first))
    return np.asarray(place[which.reshape(-1)])
