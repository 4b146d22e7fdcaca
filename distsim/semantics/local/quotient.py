"""Ranks that do the same and whose partners do the same go through one class of ranks: its order of
steps holds for all of them.

Who meets whom is linked before any clock runs, so a class is *stable* when each row of its ranks
needs rows of one class that stand at one place of their programs, and each collective is made by
the same places of the same classes. Then one rank of each class tells in which order all go on and
where they stop; their times, which may differ, are worked out afterwards for a whole class at once
(`distsim.semantics.local.class_clocks`). This is the lifting lemma of anonymous networks: D.
Angluin, Local and global properties in networks of processors, STOC 1980.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from distsim.common.records import dataclass
from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.instructions import CompilationUnit
from distsim.semantics.form.linked_program import IntArray, LinkedProgram
from distsim.semantics.local.rank_clocks import MIN_RANKS_PER_CLASS

#: Rounds of refinement after which a program counts as one that does not fold; and rounds in a row
#: in which the largest class loses a few ranks at most, as a chain does in which each rank needs
#: the next.
MAX_QUOTIENT_ROUNDS, CHAIN_ROUNDS = 8, 3


@dataclass(eq=False)
class QuotientClass:
    """Ranks that go through one representative, the first of them. ``base``: their first rows."""

    number: int
    unit: CompilationUnit
    ranks: IntArray
    base: IntArray


@dataclass(eq=False)
class QuotientProgram:
    """A program's stable classes, and of every rank the class that it is in."""

    classes: list[QuotientClass]
    of: IntArray
    #: By instance: the number of the kind that it is of; equal numbers are made by the same places
    #: of the same classes.
    kinds: IntArray
    #: By kind: how many places come, and whether all members do.
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
    return _QuotientRefinement(linked, conditions, len(linked.program.present) // worth).run(rounds)


def _is_chain(largest: list[int]) -> bool:
    """Sizes of the largest class, round by round: has it crumbled at the edge only?"""
    last = largest[-CHAIN_ROUNDS - 1 :]
    return len(last) > CHAIN_ROUNDS and all(0 < a - b <= a // 16 for a, b in pairwise(last))


class _QuotientRefinement:
    def __init__(self, linked: LinkedProgram, conditions: CompletionConditions, most: int) -> None:
        self.linked, self.conditions, self.most = linked, conditions, most
        self.base = np.array(linked.base, dtype=np.int64)
        self.width = (
            int(np.max(np.diff(self.base), initial=0)) + 1
        )  # rows of a rank, and as many meets
        self.local = np.arange(linked.rows) - self.base[linked.rank]
        self.of = np.zeros(linked.program.world_size, dtype=np.int64)
        self.codes = self.local  # by row: the class of its rank, and its place there
        self.parts: dict[int, IntArray] = {}
        self._members()

    def run(self, rounds: int) -> QuotientProgram | None:
        members = [np.array(unit.ranks, dtype=np.int64) for unit in self.linked.units]
        units = list(self.linked.units)
        largest = [len(self.of)]
        for _ in range(rounds):
            if len(members) > self.most or (rounds <= MAX_QUOTIENT_ROUNDS and _is_chain(largest)):
                return None
            for number, ranks in enumerate(members):
                self.of[ranks] = number
            self.codes = self.of[self.linked.rank] * (2 * self.width) + self.local
            kinds = self._kinds()
            split = [
                piece
                for unit, ranks in zip(units, members, strict=True)
                for piece in self._split(unit, ranks, kinds[0])
            ]
            if len(split) == len(members):
                classes = [
                    QuotientClass(i, u, r, self.base[r])
                    for i, (u, r) in enumerate(zip(units, members, strict=True))
                ]
                return QuotientProgram(classes, self.of, *kinds)
            units, members = [unit for unit, _ in split], [ranks for _, ranks in split]
            largest.append(max(map(len, members)))
        return None

    # --- collectives ---
    def _members(self) -> None:
        """Who comes to each instance: (instance, rank, place), a meet's place behind all rows."""
        linked = self.linked
        rows = np.flatnonzero(linked.instance >= 0)
        meets = [
            (instance, rank, self.width + n)
            for rank, those in enumerate(linked.meets)
            for n, instance in enumerate(those)
        ]
        met = np.array(meets, dtype=np.int64).reshape(-1, 3)
        self.instances = np.concatenate([linked.instance[rows], met[:, 0]])
        self.arriving_ranks = np.concatenate([linked.rank[rows], met[:, 1]])
        self.places = np.concatenate([self.local[rows], met[:, 2]])
        self.sizes = np.array([len(members) for members in linked.members], dtype=np.int64)
        self.came = np.bincount(self.instances, minlength=len(self.sizes))

    def _kinds(self) -> tuple[IntArray, list[int], list[bool]]:
        """For each instance the number of its kind; by kind its places, and whether all come."""
        code = self.of[self.arriving_ranks] * (2 * self.width) + self.places
        order = np.lexsort((code, self.instances))
        instances, code = self.instances[order], code[order]
        fresh = np.ones(len(code), dtype=np.bool_)
        fresh[1:] = (np.diff(code) != 0) | (np.diff(instances) != 0)
        instances, code = instances[fresh], code[fresh]
        starts = np.searchsorted(instances, np.arange(len(self.sizes) + 1))
        known: dict[tuple[bytes, bool], int] = {}
        kinds = np.zeros(len(self.sizes), dtype=np.int64)
        complete = self.came == self.sizes
        complete[self.conditions.never] = False
        for instance, (a, b) in enumerate(
            zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        ):
            kinds[instance] = known.setdefault(
                (code[a:b].tobytes(), bool(complete[instance])), len(known)
            )
        return kinds, [len(code) // 8 for code, _ in known], [whole for _, whole in known]

    # --- classes ---
    def _split(
        self, unit: CompilationUnit, ranks: IntArray, kinds: IntArray
    ) -> list[tuple[CompilationUnit, IntArray]]:
        """The ranks of a class whose rows need the same places of the same classes."""
        if len(ranks) == 1:
            return [(unit, ranks)]
        if id(unit) not in self.parts:
            self.parts[id(unit)] = np.array(
                [p.row for launch in unit.launches for p in launch.parts], dtype=np.int64
            )
        index = self.parts[id(unit)][:, None] + self.base[ranks][None, :]
        table = np.concatenate([*self._columns(index, kinds), self._meets(ranks, kinds)])
        if (table == table[:, :1]).all():
            return [(unit, ranks)]
        pieces: dict[bytes, list[int]] = {}  # in the order of their first ranks
        for k, column in enumerate(np.ascontiguousarray(table.T)):
            pieces.setdefault(column.tobytes(), []).append(k)
        return [(unit, ranks[those]) for those in pieces.values()]

    def _columns(self, index: IntArray, kinds: IntArray) -> list[IntArray]:
        """What must be equal within a class, by part and rank."""
        found, instance = self.conditions, self.linked.instance[index]
        columns = [self._code(found.need[index]), found.ahead[index].astype(np.int64)]
        if (instance >= 0).any():
            columns.append(np.where(instance >= 0, kinds[instance], -1))
        if (found.room != -1).any():
            columns.append(self._code(found.room[index]))
        if found.early:
            columns.append(self._early(index))
        return columns

    def _code(self, rows: IntArray) -> IntArray:
        """Class and place of rows; negative numbers stay."""
        return np.where(rows >= 0, self.codes[rows], rows)

    def _early(self, index: IntArray) -> IntArray:
        known: dict[tuple[int, ...] | None, int] = {}
        early = self.conditions.early
        codes = [early.get(row) for row in index.reshape(-1).tolist()]
        said = [
            None
            if rows is None
            else tuple(sorted(set(self._code(np.array(rows, dtype=np.int64)).tolist())))
            for rows in codes
        ]
        return np.array(
            [known.setdefault(one, len(known)) for one in said], dtype=np.int64
        ).reshape(index.shape)

    def _meets(self, ranks: IntArray, kinds: IntArray) -> IntArray:
        meets = [self.linked.meets[rank] for rank in ranks.tolist()]
        return kinds[np.array(meets, dtype=np.int64).T.reshape(-1, len(ranks))]
