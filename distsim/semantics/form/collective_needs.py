"""Which ranks the members of a collective wait for.

Key idea: the answer depends on the profile, the operation, the root and the group rank, so it is
looked up once per combination. Only calls of one instance that disagree are looked at together
(`CollectiveNeeds.per_rank_needs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from distsim.backends.profile import MemberNeeds
from distsim.common.arrays import IntArray, sorted_union, sorted_unique
from distsim.semantics.form.instructions import PartKind
from distsim.semantics.form.linked_program import LinkedProgram

#: Group sizes for which a profile is asked whether an operation lets members finish early.
_PROBED_SIZES = (2, 3, 4)


class CollectiveNeeds:
    """The ranks that members of collectives wait for, in a linked program under its profile."""

    def __init__(self, linked: LinkedProgram) -> None:
        self.linked = linked
        self._by_key: dict[tuple[str, int, int, int], tuple[int, ...] | None] = {}
        self._by_row: dict[int, tuple[int, ...] | None] = {}
        self._awaiting: dict[int, dict[int, list[int]]] = {}

    def of(self, row: int) -> tuple[int, ...] | None:
        """The ranks that must have arrived before a collective's row is done; None: all members."""
        if row not in self._by_row:
            self._by_row[row] = self._find(row)
        return self._by_row[row]

    def _find(self, row: int) -> tuple[int, ...] | None:
        linked = self.linked
        rank, members = int(linked.rank[row]), linked.whole[int(linked.instance[row])]
        if row in self.per_rank_needs:
            awaited = self.per_rank_needs[row].ranks
            return None if len(awaited) == len(members) else tuple(sorted(awaited))
        is_world = rank < len(members) and members[rank] == rank
        if not is_world and rank not in members:
            return None  # the rank is lost in new_group (`DivergentNewGroup`) and never gets here
        me = rank if is_world else members.index(rank)
        key = (linked.code_call(row).op, len(members), max(int(linked.root[row]), 0), me)
        if key not in self._by_key:
            needed = linked.profile.needs(*key)
            self._by_key[key] = None if needed is None else tuple(sorted(needed))
        group_ranks = self._by_key[key]
        if group_ranks is None:
            return None
        ranks = tuple(members[i] for i in group_ranks)
        representative_of = linked.program.representative_of
        if representative_of is None:
            return ranks
        return tuple(one for one in ranks if representative_of[one] == one)

    def awaiting(self, rank: int, instance: int) -> Sequence[int]:
        """The rows of a collective that need this rank, but not all members."""
        if instance not in self._awaiting:
            rows_by_rank: dict[int, list[int]] = {}
            for row in self.linked.rows_of[instance].tolist():
                for needed in self.of(row) or ():
                    rows_by_rank.setdefault(needed, []).append(row)
            self._awaiting[instance] = rows_by_rank
        return self._awaiting[instance].get(rank, ())

    def in_vain(self, row: int) -> tuple[int, ...]:
        """The ranks that arrive but do something else than the row waits for."""
        if row not in self.per_rank_needs:
            return ()
        return tuple(sorted(self.per_rank_needs[row].in_vain))

    @cached_property
    def per_rank_needs(self) -> Mapping[int, MemberNeeds]:
        """Needs of rows whose collective's members disagree, where the profile defines them.

        Members may name different roots, or contribute different amounts to a ring.
        """
        linked = self.linked
        if linked.profile.per_rank_needs is None:
            return {}
        is_rooted = (linked.kind == PartKind.COLLECTIVE) & (linked.root >= 0)
        rooted = np.flatnonzero(is_rooted & (linked.instance >= 0))
        rings = self._ring_rows
        roots_differ = _instances_that_differ(linked, rooted, linked.root)
        amounts_differ = _instances_that_differ(linked, rings, linked.signature)
        has_empty = linked.instance[rings[linked.nbytes[rings] == 0]]
        instances = sorted_union(sorted_union(roots_differ, amounts_differ), has_empty)
        needs: dict[int, MemberNeeds] = {}
        for instance in instances.tolist():
            row_of = {int(linked.rank[row]): row for row in linked.rows_of[instance].tolist()}
            calls = [linked.call(row) for row in row_of.values()]
            for rank, rank_needs in linked.profile.per_rank_needs(calls).items():
                needs[row_of[rank]] = rank_needs
        return needs

    @property
    def _ring_rows(self) -> IntArray:
        """The rows of operations that the backend sends around a ring (`skips_empty`)."""
        linked, ring_rows = self.linked, [np.zeros(0, dtype=np.int64)]
        for _, parts, rows in linked.parts(PartKind.COLLECTIVE):
            if linked.profile.skips_empty(parts[0].call.op):
                ring_rows.append(rows[linked.instance[rows] >= 0])
        return np.concatenate(ring_rows)

    @cached_property
    def partial_wait_rows(self) -> IntArray:
        """Rows of collectives in which a member may not wait for just all members.

        Some may finish before all have arrived, or wait although all have.
        """
        finishes_early: dict[str, bool] = {}
        found = [np.array(sorted(self.per_rank_needs), dtype=np.int64)]
        for _, parts, rows in self.linked.parts(PartKind.COLLECTIVE):
            op = parts[0].call.op
            if op not in finishes_early:
                finishes_early[op] = self._may_finish_early(op)
            if finishes_early[op]:
                found.append(rows.reshape(-1))
        return sorted_unique(np.concatenate(found))

    def _may_finish_early(self, op: str) -> bool:
        members = ((size, me) for size in _PROBED_SIZES for me in range(size))
        return any(self.linked.profile.needs(op, size, 0, me) is not None for size, me in members)


def _instances_that_differ(linked: LinkedProgram, rows: IntArray, column: IntArray) -> IntArray:
    """The instances of ``rows`` in which a column has different values."""
    count = len(linked.members)
    lowest = np.full(count, np.iinfo(np.int64).max)
    highest = np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(lowest, linked.instance[rows], column[rows])
    np.maximum.at(highest, linked.instance[rows], column[rows])
    differing: IntArray = np.flatnonzero(lowest < highest)
    return differing
