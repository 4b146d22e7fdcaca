"""The coarsest partition of a program's ranks into equivalence classes.

The members of a class make the same calls with equivalent partners at the same distance.

Key idea: matches are fixed before any clock runs. So classes can be found on the lowered program,
for all ranks at once, before any call is examined individually. Members of a class have

- the same code, the same numbers in its calls, the same speed and the same start;
- for each of their endpoints, the same class of peer, the same endpoint of the peer that leads
  back, and the same kind of link;
- for each of their groups, the same set of (class, group slot of its member), and the same cost.

Then they do the same at the same time. Proof by induction on the rounds of the fixed point of all
times: in each round, a time of one member is known if and only if those of the others are. The
times have the same value, because each is the maximum of the times that it needs, plus a cost.

The partition is found by refinement of colours: ranks start with a colour for what they are by
themselves; each round splits colours by the colours of peers and group members.

Sources: this is the lifting lemma of anonymous networks (D. Angluin, Local and global properties in
networks of processors, STOC 1980) with port numbers (M. Yamashita, T. Kameda, Computing on
anonymous networks, IEEE TPDS 7, 1996).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from distsim.backends.profile import BackendProfile
from distsim.common.arrays import IntArray, sorted_unique
from distsim.hardware.cost import CostModel
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall, SharedCode, resolve_call
from distsim.program.model import Program
from distsim.semantics.classes.rank_keys import RankVectors, row_numbers

#: After so many rounds a program counts as one that does not fold: a chain loses only a few ranks
#: in each.
MAX_PARTITION_ROUNDS = 64
#: Operations that end a process.
_EXIT_OPS = ("exit", "fail")
#: Fields that, if they differ by rank, make the ranks different in a way that no column describes.
_DISTINGUISHING_FIELDS = ("code", "message", "assume_src")
#: The slot of a group member that makes no call on the group.
_NO_SLOT = -1


class EndpointTable(NamedTuple):
    """The endpoints of all ranks, one entry for each rank and endpoint.

    ``rank``: whose it is; ``endpoint``: its number in the rank's code; ``peer``: where it leads.
    """

    rank: IntArray
    endpoint: IntArray
    peer: IntArray


class MembershipTable(NamedTuple):
    """The members of groups, one entry for each group and slot in a member's code.

    ``group`` is an index of ``ids``; ``slot`` is `_NO_SLOT` for a member without calls.
    """

    rank: IntArray
    group: IntArray
    slot: IntArray
    ids: list[int]


class RankPartition(NamedTuple):
    """``of[r]``: the class of rank r. Classes are numbered by their first ranks."""

    of: IntArray
    ends: EndpointTable
    slots: MembershipTable


def partition_ranks(
    program: Program,
    costs: Sequence[CostModel],
    profiles: Sequence[BackendProfile],
    rounds: int = MAX_PARTITION_ROUNDS,
    *,
    shared: bool = False,
) -> RankPartition | None:
    """The classes of a program's ranks under some profiles; None if classes cannot describe it.

    ``costs``: the cost models under which members must have equal costs. ``rounds`` limits the
    refinement. ``shared``: members must also put equal bytes on equal links, so that transfers that
    share these are equally slow.
    """
    if not _can_use_classes(program):
        return None
    return _PartitionRefinement(program, costs, profiles, shared).run(rounds)


def _can_use_classes(program: Program) -> bool:
    """Whether nothing in the program depends on rank numbers or on the order of arrival."""
    if any(fault.kind not in ("slow", "late") for fault in program.faults):
        return False
    if program.jitter or program.startup is not None:
        return False
    for code in program.codes:
        if any(np.any(np.asarray(endpoint.peer) < 0) for endpoint in code.endpoints):
            return False  # an any-source receive
        if any(_needs_rank_number(program, code, call) for call in code.distinct_calls()):
            return False
    return True


def _needs_rank_number(program: Program, code: SharedCode, call: CodeCall) -> bool:
    if call.invalid is not None or call.op in _EXIT_OPS:
        return True
    if OPERATIONS[call.op].kind in ("group", "remote"):
        return True
    if any(isinstance(call.fields.get(name), np.ndarray) for name in _DISTINGUISHING_FIELDS):
        return True
    return _agreement_depends_on_group_rank(program, code, call)


def _agreement_depends_on_group_rank(program: Program, code: SharedCode, call: CodeCall) -> bool:
    """Whether members agree depends on their group ranks.

    In a pairwise operation, what i sends to j must be what j expects from i.
    """
    operation = OPERATIONS[call.op]
    if not operation.pairwise:
        return False
    if isinstance(call.signature, np.ndarray):
        return True
    return "numel" not in operation.agreement(resolve_call(code, program.groups, 0, call))


class _PartitionRefinement:
    """Splits colours until no round splits any. A colour is a number per rank.

    Columns that differ by endpoint have one entry for each entry of ``ends``, in the order
    of codes, endpoints and ranks.
    """

    def __init__(
        self,
        program: Program,
        costs: Sequence[CostModel],
        profiles: Sequence[BackendProfile],
        shared: bool,
    ) -> None:
        self.program, self.costs, self.profiles, self.shared = program, costs, profiles, shared
        self._members_on_node: dict[tuple[int, int], Counter[int]] = {}
        self.codes = [RankVectors(code) for code in program.codes]
        self.size = program.world_size
        self.ends = self._all_ends()
        self.slots = self._all_slots()
        self.group_costs = self._number_group_costs()

    def run(self, rounds: int) -> RankPartition | None:
        colour = self._initial_colours()
        for _ in range(rounds):
            finer = self._refine(colour)
            if finer.max() == colour.max():
                return RankPartition(_numbered_by_first_rank(finer), self.ends, self.slots)
            colour = finer
        return None

    # --- endpoints ---
    def _all_ends(self) -> EndpointTable:
        ranks, endpoints, peers = ([np.zeros(0, np.int64)] for _ in range(3))
        for code in self.codes:
            count = len(code.endpoints)
            ranks.append(np.tile(code.ranks, count))
            endpoints.append(np.repeat(np.arange(count), len(code.ranks)))
            peers += [endpoint.peers for endpoint in code.endpoints]
        return EndpointTable(
            np.concatenate(ranks), np.concatenate(endpoints), np.concatenate(peers)
        )

    def _endpoints_back(self, more: Sequence[IntArray]) -> IntArray:
        """By entry, the first endpoint of its peer that leads back to it; -1 if there is none.

        ``more``: columns that must be equal on both sides.
        """
        forward = np.stack([self.ends.rank, self.ends.peer, *more], axis=1)
        backward = np.stack([self.ends.peer, self.ends.rank, *more], axis=1)
        number = row_numbers(np.concatenate([forward, backward]))
        own, wanted = number[: len(forward)], number[len(forward) :]
        first_endpoint = np.full(int(number.max(initial=-1)) + 1, -1, dtype=np.int64)
        first_endpoint[own[::-1]] = self.ends.endpoint[::-1]
        return np.asarray(first_endpoint[wanted])

    def _endpoint_columns(self) -> list[IntArray]:
        """By entry: the endpoints that lead back, and the distance."""
        endpoints = [endpoint for code in self.codes for endpoint in code.endpoints]
        groups = np.concatenate(
            [np.zeros(0, np.int64), *(endpoint.groups for endpoint in endpoints)]
        )
        columns = [self._endpoints_back([]), self._endpoints_back([groups])]
        columns += [self._distance(cost) for cost in self.costs]
        if any(code.tagged for code in self.codes):
            tags = np.concatenate(
                [np.zeros(0, np.int64), *(endpoint.tags for endpoint in endpoints)]
            )
            columns += [self._endpoints_back([tags]), self._endpoints_back([groups, tags])]
        return columns

    def _distance(self, cost: CostModel) -> IntArray:
        """By entry, a number for the cost of its messages."""
        ends = (self.ends.rank, self.ends.peer)
        nodes = np.stack([end // cost.local_size for end in ends], axis=1)
        if not cost.link_faults:
            return np.asarray(nodes[:, 0] != nodes[:, 1], dtype=np.int64)
        pairs, pair_of = np.unique(nodes, axis=0, return_inverse=True)
        known: dict[Hashable, int] = {}
        numbers = []
        for node, other in pairs.tolist():
            # Any two different ranks of the two nodes.
            src = node * cost.local_size
            dst = other * cost.local_size + (node == other)
            rate = (cost.link_class(src, dst), cost.bytes_per_ns(src, dst))
            numbers.append(known.setdefault(rate, len(known)))
        if not numbers:
            return nodes[:, 0]
        return np.array(numbers, dtype=np.int64)[pair_of.reshape(-1)]

    # --- groups ---
    def _all_slots(self) -> MembershipTable:
        ids: set[int] = set()
        for code in self.codes:
            for groups in code.groups:
                ids.update(sorted_unique(groups).tolist())
        used = sorted(ids)
        index = np.full(len(self.program.groups), -1, dtype=np.int64)
        index[used] = np.arange(len(used))
        ranks, groups_, slots = ([np.zeros(0, np.int64)] for _ in range(3))
        for code in self.codes:
            for slot, groups in enumerate(code.groups):
                ranks.append(code.ranks)
                groups_.append(index[groups])
                slots.append(np.full(len(groups), slot, dtype=np.int64))
        rank, group, slot_of = (np.concatenate(column) for column in (ranks, groups_, slots))
        # Members that make no call on a group.
        members = [np.array(self.program.groups[g].ranks, dtype=np.int64) for g in used]
        member = np.concatenate([np.zeros(0, np.int64), *members])
        member_group = np.repeat(np.arange(len(used)), [len(ranks) for ranks in members])
        has_slot = np.isin(member_group * self.size + member, group * self.size + rank)
        silent = ~has_slot
        return MembershipTable(
            np.concatenate([rank, member[silent]]),
            np.concatenate([group, member_group[silent]]),
            np.concatenate([slot_of, np.full(int(silent.sum()), _NO_SLOT)]),
            used,
        )

    def _number_group_costs(self) -> IntArray:
        """By group in use, a number for its cost and its options."""
        known: dict[Hashable, int] = {}
        numbers = []
        for group in (self.program.groups[g] for g in self.slots.ids):
            placements = tuple(id(cost.placement(group.ranks)) for cost in self.costs)
            key = (*placements, group.size, group.timeout_ns, group.backend, group.id == 0)
            numbers.append(known.setdefault(key, len(known)))
        return np.array(numbers, dtype=np.int64)

    # --- colours ---
    def _initial_colours(self) -> IntArray:
        """Colours by what ranks are by themselves.

        They have no gaps: `run` knows a round that splits none by the largest colour.
        """
        faults = self._number_faults()
        endpoint_columns, start = self._endpoint_columns(), 0
        colour, offset = np.zeros(self.size, dtype=np.int64), 0
        for number, code in enumerate(self.codes):
            ranks = len(code.ranks)
            end = start + ranks * len(code.endpoints)
            table = [np.full((1, ranks), number, dtype=np.int64), faults[None, code.ranks]]
            table += code.columns(self.program)
            table += [column[start:end].reshape(-1, ranks) for column in endpoint_columns]
            if code.by_place(self.profiles):
                table.append(self._group_ranks(code))
            if self.shared:
                table += [self._members_nearby(code, cost.local_size) for cost in self.costs]
            numbers = row_numbers(np.concatenate(table).T)
            colour[code.ranks] = numbers + offset
            offset += int(numbers.max(initial=-1)) + 1
            start = end
        unique_ranks = self._ranks_awaited_individually()
        colour[unique_ranks] = offset + np.arange(len(unique_ranks))
        return _numbered_by_first_rank(colour)

    def _ranks_awaited_individually(self) -> IntArray:
        """Ranks that get a colour of their own.

        Some members of their groups wait for them in particular, by their group rank or as the
        root, although they may never call the operation.
        """
        none = np.zeros(0, np.int64)
        is_placed = np.zeros(self.size, dtype=np.bool_)
        depends_on_place = np.zeros(len(self.program.groups), dtype=np.bool_)
        roots, arriving = [none], [none]
        for code in self.codes:
            groups = code.by_place(self.profiles)
            is_placed[code.ranks] = bool(groups)
            depends_on_place[np.concatenate([none, *groups])] = True
            for ids, root in code.rooted():
                roots.append(ids * self.size + root)
                arriving.append(ids * self.size + code.ranks)
        slots = self.slots
        # Ranks with calls that depend on group ranks already differ by their group ranks.
        unplaced = (slots.slot == _NO_SLOT) | ~is_placed[slots.rank]
        awaited_by_place = depends_on_place[np.array(slots.ids, dtype=np.int64)][slots.group]
        found = np.zeros(self.size, dtype=np.bool_)
        found[slots.rank[awaited_by_place & unplaced]] = True
        awaited_roots = sorted_unique(np.concatenate(roots))
        never_arrives = ~np.isin(awaited_roots, np.concatenate(arriving))
        found[awaited_roots[never_arrives] % self.size] = True
        return np.flatnonzero(found)

    def _number_faults(self) -> IntArray:
        """By rank, a number for its speed and its start."""
        faults_of: dict[int, list[tuple[str, float, int]]] = {}
        for fault in self.program.faults:
            faults_of.setdefault(fault.rank, []).append((fault.kind, fault.factor, fault.delay_ns))
        known: dict[Hashable, int] = {}
        numbers = np.zeros(self.size, dtype=np.int64)
        for rank, faults in faults_of.items():
            numbers[rank] = known.setdefault(tuple(faults), len(known) + 1)
        return numbers

    def _group_ranks(self, code: RankVectors) -> IntArray:
        """By group slot and rank, the rank's group rank."""
        table = []
        ranks = code.ranks.tolist()
        for groups in code.groups:
            group_rank: dict[int, dict[int, int]] = {}
            for g in sorted_unique(groups).tolist():
                members = self.program.groups[g].ranks
                group_rank[g] = {rank: i for i, rank in enumerate(members)}
            pairs = zip(groups.tolist(), ranks, strict=True)
            table.append([group_rank[g].get(rank, -1) for g, rank in pairs])
        return np.array(table, dtype=np.int64).reshape(-1, len(ranks))

    def _members_nearby(self, code: RankVectors, node_size: int) -> IntArray:
        """By group slot and rank, the members of the group on the rank's node.

        The load of the node's links by a collective depends on their number.
        """
        table, known = [], self._members_on_node
        ranks = code.ranks.tolist()
        for groups in code.groups:
            for g in sorted_unique(groups).tolist():
                if (g, node_size) not in known:
                    members = self.program.groups[g].ranks
                    known[g, node_size] = Counter(rank // node_size for rank in members)
            pairs = zip(groups.tolist(), ranks, strict=True)
            table.append([known[g, node_size][rank // node_size] for g, rank in pairs])
        return np.array(table, dtype=np.int64).reshape(-1, len(ranks))

    def _refine(self, colour: IntArray) -> IntArray:
        """Finer colours: by those of the peers, and of the members of groups."""
        group_kinds, peer_colours, start = self._group_kinds(colour), colour[self.ends.peer], 0
        finer, offset = np.zeros(self.size, dtype=np.int64), 0
        index = np.full(len(self.program.groups), -1, dtype=np.int64)
        index[self.slots.ids] = np.arange(len(self.slots.ids))
        for code in self.codes:
            ranks = len(code.ranks)
            end = start + ranks * len(code.endpoints)
            own = peer_colours[start:end].reshape(-1, ranks)
            groups = [group_kinds[index[ids]][None, :] for ids in code.groups]
            numbers = row_numbers(np.concatenate([colour[None, code.ranks], own, *groups]).T)
            finer[code.ranks] = numbers + offset
            offset += int(numbers.max(initial=-1)) + 1
            start = end
        return finer

    def _group_kinds(self, colour: IntArray) -> IntArray:
        """By group in use, a number for its set of (colour, slot) and its cost."""
        slot_space = int(self.slots.slot.max(initial=-1)) + 2
        code = colour[self.slots.rank] * slot_space + self.slots.slot + 1
        order = np.lexsort((code, self.slots.group))
        group, code = self.slots.group[order], code[order]
        is_first = np.ones(len(code), dtype=np.bool_)
        is_first[1:] = (np.diff(code) != 0) | (np.diff(group) != 0)
        group, code = group[is_first], code[is_first]
        bounds = np.searchsorted(group, np.arange(len(self.slots.ids) + 1)).tolist()
        known: dict[tuple[bytes, int], int] = {}
        numbers = []
        for (start, end), cost in zip(pairwise(bounds), self.group_costs.tolist(), strict=True):
            numbers.append(known.setdefault((code[start:end].tobytes(), cost), len(known)))
        return np.array(numbers, dtype=np.int64)


def _numbered_by_first_rank(colour: IntArray) -> IntArray:
    """The same partition, with colours numbered by the first rank of each."""
    _, first, colour_of = np.unique(colour, return_index=True, return_inverse=True)
    number = np.empty(len(first), dtype=np.int64)
    number[np.argsort(first, kind="stable")] = np.arange(len(first))
    return np.asarray(number[colour_of.reshape(-1)])
