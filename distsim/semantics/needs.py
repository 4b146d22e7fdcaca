"""Whom the members of a collective wait for: all, those whom its data come from and go to, or, where they disagree on the root, those whom
each would have by its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from distsim.arrays import distinct, union
from distsim.profiles.record import Awaited
from distsim.semantics.form import PartKind
from distsim.semantics.link import IntArray, Linked


class Needs:
    """Of the collectives of a linked program under its profile."""

    def __init__(self, linked: Linked) -> None:
        self.linked = linked
        self._known: dict[tuple[str, int, int, int], tuple[int, ...] | None] = {}
        self._rows: dict[int, tuple[int, ...] | None] = {}

    def of(self, row: int) -> tuple[int, ...] | None:
        """The ranks that must have come to a collective's row before it is done; None: all members."""
        if row not in self._rows:
            self._rows[row] = self._of(row)
        return self._rows[row]

    def _of(self, row: int) -> tuple[int, ...] | None:
        linked = self.linked
        rank, members = int(linked.rank[row]), linked.whole[int(linked.instance[row])]
        if row in self.apart:
            return tuple(sorted(self.apart[row].ranks))
        me = rank if rank < len(members) and members[rank] == rank else members.index(rank)
        key = (linked.code_call(row).op, len(members), max(int(linked.root[row]), 0), me)
        if key not in self._known:
            needed = linked.profile.needs(*key)
            self._known[key] = None if needed is None else tuple(sorted(needed))
        places = self._known[key]
        if places is None:
            return None
        ranks, of = tuple(members[i] for i in places), linked.program.stands_for
        return ranks if of is None else tuple(one for one in ranks if of[one] == one)

    def in_vain(self, row: int) -> tuple[int, ...]:
        """Of these the ranks that come and still do not do what the row waits for."""
        return tuple(sorted(self.apart[row].in_vain)) if row in self.apart else ()

    @cached_property
    def apart(self) -> Mapping[int, Awaited]:
        """The rows of collectives whose members name different roots or do not bring equally much to a ring, where the profile says what
        comes of that."""
        linked = self.linked
        if linked.profile.apart is None:
            return {}
        rows = np.flatnonzero((linked.kind == PartKind.COLLECTIVE) & (linked.root >= 0) & (linked.instance >= 0))
        rings = self._rings
        unlike = union(_differing(linked, rows, linked.root), _differing(linked, rings, linked.signature))
        found = dict[int, Awaited]()
        for instance in union(unlike, linked.instance[rings[linked.nbytes[rings] == 0]]).tolist():
            of = {int(linked.rank[row]): row for row in linked.rows_of[instance].tolist()}
            awaited = linked.profile.apart([linked.call(row) for row in of.values()])
            found |= {of[rank]: one for rank, one in awaited.items()}
        return found

    @property
    def _rings(self) -> IntArray:
        """The rows of `Profile.ring`."""
        linked, found = self.linked, [np.zeros(0, dtype=np.int64)]
        for _, parts, rows in linked.parts(PartKind.COLLECTIVE):
            if linked.profile.ring(parts[0].call.op):
                found.append(rows[linked.instance[rows] >= 0])
        return np.concatenate(found)

    @cached_property
    def early(self) -> IntArray:
        """Rows of collectives of which some members may go before all have come, or wait although all have."""
        needs, known, found = self.linked.profile.needs, dict[str, bool](), [np.array(sorted(self.apart), dtype=np.int64)]
        for _, parts, rows in self.linked.parts(PartKind.COLLECTIVE):
            op = parts[0].call.op
            if op not in known:
                known[op] = any(needs(op, n, 0, me) is not None for n in (2, 3, 4) for me in range(n))
            found += [rows.reshape(-1)] if known[op] else []
        return distinct(np.concatenate(found))


def _differing(linked: Linked, rows: IntArray, said: IntArray) -> IntArray:
    """The instances of rows that do not all say the same."""
    low, high = np.full(len(linked.members), np.iinfo(np.int64).max), np.full(len(linked.members), np.iinfo(np.int64).min)
    np.minimum.at(low, linked.instance[rows], said[rows])
    np.maximum.at(high, linked.instance[rows], said[rows])
    found: IntArray = np.flatnonzero(low < high)
    return found
