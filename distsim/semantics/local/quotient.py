"""Equivalence classes of the ranks of a linked program: same calls, equivalent partners.

Key idea: matches are fixed before any clock runs. A class is *stable* under two conditions. Each
row of its ranks needs rows that have the same position in the programs of one class. Each of its
collectives is called at the same positions of the same classes. Then one representative of each
class shows in which order all its ranks proceed and where they stop. Their times may differ; they
are computed afterwards for a whole class at once (`distsim.semantics.local.class_clocks`).

Classes start as the units, and are split round by round until all are stable.

Source: this is the lifting lemma of anonymous networks (D. Angluin, Local and global properties in
networks of processors, STOC 1980).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from distsim.common.arrays import IntArray
from distsim.common.records import dataclass
from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.instructions import CompilationUnit
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.local.rank_clocks import MIN_RANKS_PER_CLASS

#: After so many rounds of refinement, a program counts as one that does not fold.
MAX_QUOTIENT_ROUNDS = 8
#: It also does not fold if in so many consecutive rounds the largest class loses only a few ranks,
#: as in a chain, in which each rank needs the next one.
CHAIN_ROUNDS = 3


@dataclass(eq=False)
class QuotientClass:
    """Ranks that one representative stands for, the first of them. ``base``: their first rows."""

    number: int
    unit: CompilationUnit
    ranks: IntArray
    base: IntArray


@dataclass(eq=False)
class QuotientProgram:
    """The stable classes of a program.

    ``of``: by rank, its class. Instances whose members are the same positions of the same classes
    are of one *kind*: ``kinds`` by instance; ``places``: by kind, how many distinct positions there
    are; ``complete``: by kind, whether all members arrive.
    """

    classes: list[QuotientClass]
    of: IntArray
    kinds: IntArray
    places: list[int]
    complete: list[bool]


class _InstanceKinds(NamedTuple):
    """See `QuotientProgram`."""

    kinds: IntArray
    places: list[int]
    complete: list[bool]


def coarsest_quotient(
    linked: LinkedProgram,
    conditions: CompletionConditions,
    *,
    worth: int = MIN_RANKS_PER_CLASS,
    rounds: int = MAX_QUOTIENT_ROUNDS,
) -> QuotientProgram | None:
    """The coarsest stable classes that refine the units; None where folding does not pay."""
    max_classes = len(linked.program.present) // worth
    return _QuotientRefinement(linked, conditions, max_classes).run(rounds)


def _is_chain(largest: list[int]) -> bool:
    """Whether the largest class, whose size is given by round, loses only ranks at its edge."""
    last = largest[-CHAIN_ROUNDS - 1 :]
    if len(last) <= CHAIN_ROUNDS:
        return False
    return all(0 < before - after <= before // 16 for before, after in pairwise(last))


class _QuotientRefinement:
    """Splits classes until they are stable.

    ``of``: the class of each rank in the current round; ``codes``: by row, one number for the class
    of its rank and the row's position in it.
    """

    def __init__(
        self, linked: LinkedProgram, conditions: CompletionConditions, max_classes: int
    ) -> None:
        self.linked, self.conditions, self.max_classes = linked, conditions, max_classes
        self.base = np.array(linked.base, dtype=np.int64)
        #: Upper bound of the rows of a rank, and of its rendezvous.
        self.width = int(np.max(np.diff(self.base), initial=0)) + 1
        self.local = np.arange(linked.rows) - self.base[linked.rank]
        self.of = np.zeros(linked.program.world_size, dtype=np.int64)
        self.codes = self.local
        self.part_rows: dict[int, IntArray] = {}  # by unit
        self._collect_arrivals()

    def run(self, rounds: int) -> QuotientProgram | None:
        units = list(self.linked.units)
        members = [np.array(unit.ranks, dtype=np.int64) for unit in units]
        largest = [len(self.of)]
        for _ in range(rounds):
            if len(members) > self.max_classes:
                return None
            if rounds <= MAX_QUOTIENT_ROUNDS and _is_chain(largest):
                return None
            for number, ranks in enumerate(members):
                self.of[ranks] = number
            self.codes = self.of[self.linked.rank] * (2 * self.width) + self.local
            kinds = self._instance_kinds()
            pieces: list[tuple[CompilationUnit, IntArray]] = []
            for unit, ranks in zip(units, members, strict=True):
                pieces += self._split(unit, ranks, kinds.kinds)
            if len(pieces) == len(members):
                return self._quotient(units, members, kinds)
            units = [unit for unit, _ in pieces]
            members = [ranks for _, ranks in pieces]
            largest.append(max(map(len, members)))
        return None

    def _quotient(
        self, units: list[CompilationUnit], members: list[IntArray], kinds: _InstanceKinds
    ) -> QuotientProgram:
        classes = [
            QuotientClass(number, unit, ranks, self.base[ranks])
            for number, (unit, ranks) in enumerate(zip(units, members, strict=True))
        ]
        return QuotientProgram(classes, self.of, *kinds)

    # --- collectives ---
    def _collect_arrivals(self) -> None:
        """Which rank arrives at which instance, and at which position of its program.

        The positions of rendezvous follow behind those of all rows.
        """
        linked = self.linked
        rows = np.flatnonzero(linked.instance >= 0)
        rendezvous = [
            (instance, rank, self.width + number)
            for rank, instances in enumerate(linked.rendezvous_of)
            for number, instance in enumerate(instances)
        ]
        instances, ranks, places = np.array(rendezvous, dtype=np.int64).reshape(-1, 3).T
        self.instances = np.concatenate([linked.instance[rows], instances])
        self.arriving_ranks = np.concatenate([linked.rank[rows], ranks])
        self.places = np.concatenate([self.local[rows], places])
        self.sizes = np.array([len(members) for members in linked.members], dtype=np.int64)
        self.arrivals = np.bincount(self.instances, minlength=len(self.sizes))

    def _instance_kinds(self) -> _InstanceKinds:
        """The kinds of all instances under the classes of this round."""
        code = self.of[self.arriving_ranks] * (2 * self.width) + self.places
        order = np.lexsort((code, self.instances))
        instances, code = self.instances[order], code[order]
        is_first = np.ones(len(code), dtype=np.bool_)
        is_first[1:] = (np.diff(code) != 0) | (np.diff(instances) != 0)
        instances, code = instances[is_first], code[is_first]
        bounds = np.searchsorted(instances, np.arange(len(self.sizes) + 1)).tolist()
        complete = self.arrivals == self.sizes
        complete[self.conditions.never] = False
        known: dict[tuple[bytes, bool], int] = {}
        kinds = np.zeros(len(self.sizes), dtype=np.int64)
        for instance, (start, end) in enumerate(pairwise(bounds)):
            key = (code[start:end].tobytes(), bool(complete[instance]))
            kinds[instance] = known.setdefault(key, len(known))
        places = [len(codes) // code.itemsize for codes, _ in known]
        return _InstanceKinds(kinds, places, [is_complete for _, is_complete in known])

    # --- classes ---
    def _split(
        self, unit: CompilationUnit, ranks: IntArray, kinds: IntArray
    ) -> list[tuple[CompilationUnit, IntArray]]:
        """Split a class by the positions and classes that the rows of its ranks need."""
        if len(ranks) == 1:
            return [(unit, ranks)]
        if id(unit) not in self.part_rows:
            rows = [part.row for launch in unit.launches for part in launch.parts]
            self.part_rows[id(unit)] = np.array(rows, dtype=np.int64)
        index = self.part_rows[id(unit)][:, None] + self.base[ranks][None, :]
        table = np.concatenate([*self._columns(index, kinds), self._rendezvous(ranks, kinds)])
        if (table == table[:, :1]).all():
            return [(unit, ranks)]
        pieces: dict[bytes, list[int]] = {}  # in the order of their first ranks
        for number, column in enumerate(np.ascontiguousarray(table.T)):
            pieces.setdefault(column.tobytes(), []).append(number)
        return [(unit, ranks[piece]) for piece in pieces.values()]

    def _columns(self, index: IntArray, kinds: IntArray) -> list[IntArray]:
        """What must be equal within a class; each of shape (parts, ranks)."""
        conditions, instance = self.conditions, self.linked.instance[index]
        columns = [self._code(conditions.need[index]), conditions.buffered[index].astype(np.int64)]
        if (instance >= 0).any():
            columns.append(np.where(instance >= 0, kinds[instance], -1))
        if (conditions.freed_by != -1).any():
            columns.append(self._code(conditions.freed_by[index]))
        if conditions.partial_waits:
            columns.append(self._rows_waited_for(index))
        return columns

    def _code(self, rows: IntArray) -> IntArray:
        """Class and position of rows; negative numbers, which are no rows, stay."""
        return np.where(rows >= 0, self.codes[rows], rows)

    def _rows_waited_for(self, index: IntArray) -> IntArray:
        """A number for the set of positions that each row of an early collective needs."""
        known: dict[tuple[int, ...] | None, int] = {}
        numbers = []
        for row in index.reshape(-1).tolist():
            needs = self.conditions.partial_waits.get(row)
            key = None
            if needs is not None:
                codes = self._code(np.array(needs, dtype=np.int64))
                key = tuple(sorted(set(codes.tolist())))
            numbers.append(known.setdefault(key, len(known)))
        return np.array(numbers, dtype=np.int64).reshape(index.shape)

    def _rendezvous(self, ranks: IntArray, kinds: IntArray) -> IntArray:
        instances = [self.linked.rendezvous_of[rank] for rank in ranks.tolist()]
        return kinds[np.array(instances, dtype=np.int64).T.reshape(-1, len(ranks))]
