"""Ranks that leave before their end (they exit, raise or are killed) with requests open: what
others find is a race.

What has met by then is done, for the leaver too; every other open row is withdrawn with its rank.
So each open row may have been met before the rank left, or not, as far as one does not need the
other; of a collective that lets members go one by one (the root of a broadcast gives to each), by
some members and not by others. Leaving lets nobody go on, so a partner can always come first; it
can come last where the leaver gets to its end without it, which a run shows in which the partner is
held back. What is open under a reading is what that reading has not let go: a buffered send is done
when it is posted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import chain, combinations, product
from math import prod

from distsim.checker.reading_run import ContractProgram, Reading, ReadingRun, early_exit_ranks
from distsim.semantics.form.completion import CompletionConditions, WithdrawnRow
from distsim.semantics.form.instructions import PartKind, PostLaunch, WaitForRows
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.local.rank_clocks import (
    LocalClocks,
    RunProgress,
    local_run_inputs,
    threads_by_unit,
)
from distsim.semantics.local.run import run_local_clocks
from distsim.semantics.local.thread_steps import (
    STEP_COLLECTIVE,
    STEP_JOIN,
    STEP_MESSAGE,
    STEP_NEVER,
    STEP_POST,
)

#: Steps that post a row.
POSTING_STEPS = (STEP_POST, STEP_MESSAGE, STEP_JOIN, STEP_COLLECTIVE)
#: Open rows of which every combination is looked at. Of more those in which each partner comes to
#: the first few of a leaver's rows, if these are not too many; else all, none and each alone.
MAX_OPEN_ROWS = 6
MAX_COMBINATIONS = 128


def early_exit_runs(contract: ContractProgram, reading: Reading) -> Iterator[ReadingRun]:
    """A run for each way in which open rows may be withdrawn; first the one in which all are
    met.
    """
    linked = contract.under(reading)
    whole = run_local_clocks(linked, CompletionConditions(linked, None))
    yield ReadingRun(contract, whole, reading)
    held = _WithdrawableRows(linked, whole)
    for those in held.combinations():
        if held.is_possible(those):
            left = run_local_clocks(linked, CompletionConditions(linked, None, withdrawn=those))
            for row in held.unmet(those):
                if linked.instance[row] >= 0:
                    left.posted[row] = -1  # its rank is missing again
            yield ReadingRun(contract, left, reading, those)


class _WithdrawableRows:
    """Which open rows may be withdrawn, and from whom."""

    def __init__(self, linked: LinkedProgram, whole: RunProgress) -> None:
        self.linked, self.whole, self.leavers = linked, whole, early_exit_ranks(linked)
        self.conditions, self.steps = CompletionConditions(linked, None), threads_by_unit(linked)

    @cached_property
    def open_rows(self) -> list[int]:
        """What a leaver has posted and never saw finished, and whose partners come."""
        found = []
        for rank in (r for r in self.leavers if self.whole.hosts[r].ended):
            waited = {
                row
                for i in self.linked.unit_of[rank].instructions
                if isinstance(i, WaitForRows)
                for row in i.rows
            }
            posted = [
                p.row
                for i in self.linked.unit_of[rank].instructions
                if isinstance(i, PostLaunch)
                for p in i.launch.parts
            ]
            base = self.linked.base[rank]
            found += [
                base + row for row in posted if row not in waited and self._is_open(base + row)
            ]
        return found

    @cached_property
    def open_ends(self) -> list[WithdrawnRow]:
        """The open rows, one by one for each member that goes on by what it gets of it; together
        where that are too many.
        """
        found = [(row, other) for row in self.open_rows for other in self._served(row) or (-1,)]
        return found if len(found) <= MAX_COMBINATIONS else [(row, -1) for row in self.open_rows]

    def unmet(self, those: tuple[WithdrawnRow, ...]) -> set[int]:
        """The rows that are withdrawn from everybody."""
        met = {end[0] for end in self.open_ends if end not in those}
        return {row for row, _ in those if row not in met}

    def combinations(self) -> Iterator[tuple[WithdrawnRow, ...]]:
        """What may be withdrawn together; who is held back before one row comes to no later one
        either.
        """
        ends, lasts = self.open_ends, self._lasts()
        if len(ends) > MAX_OPEN_ROWS and prod(len(one) + 1 for one in lasts) <= MAX_COMBINATIONS:
            tails = product(*([tuple(one[k:]) for k in range(len(one) + 1)] for one in lasts))
            yield from sorted(
                (tuple(sorted(chain(*one))) for one in tails if any(one)),
                key=lambda found: (len(found), found),
            )
            return
        for count in range(1, len(ends) + 1) if len(ends) <= MAX_OPEN_ROWS else (1, len(ends)):
            yield from combinations(ends, count)

    def _lasts(self) -> list[list[WithdrawnRow]]:
        """What of each leaver's one partner comes to, in that partner's order."""
        found: dict[tuple[int, ...], list[tuple[int, WithdrawnRow]]] = {}
        for end in self.open_ends:
            partners, row = self._others(end), end[0]
            alone = len(partners) == 1
            key = (
                (int(self.linked.rank[row]), int(self.linked.rank[partners[0]]))
                if alone
                else (row,)
            )
            found.setdefault(key, []).append((partners[0], end))
        return [[end for _, end in sorted(pairs)] for pairs in found.values()]

    def _others(self, end: WithdrawnRow) -> list[int]:
        """The rows that come to meet one."""
        return [end[1]] if end[1] >= 0 else self._partners(end[0])

    def _served(self, row: int) -> list[int]:
        """Of a collective that lets members go one by one, the rows that need this one."""
        return [
            other for other in self._partners(row) if row in self.conditions.early.get(other, ())
        ]

    def _is_open(self, row: int) -> bool:
        if self.linked.kind[row] == PartKind.WORK:
            return False
        if self.linked.kind[row] == PartKind.COLLECTIVE:
            return self.conditions.early.get(row) != () and len(self._partners(row)) > 0
        return int(self.conditions.need[row]) >= 0 and len(self._partners(row)) > 0

    def _partners(self, row: int) -> list[int]:
        """The rows that come to meet a row."""
        linked = self.linked
        if linked.kind[row] != PartKind.COLLECTIVE:
            mates = [int(linked.mate[row])]
        else:
            mates = [
                other
                for other in linked.rows_of[int(linked.instance[row])].tolist()
                if other != row
            ]
        return [other for other in mates if other >= 0 and self.whole.posted[other] >= 0]

    def is_possible(self, those: tuple[WithdrawnRow, ...]) -> bool:
        """Their leavers get to their end while somebody is held back from each of these; what else
        is open of who has left is met by then."""
        others = [end for end in self.open_ends if end not in those]
        rows, held = [row for row, _ in those], list[int]()
        for end in those:
            partners = self._others(end)
            held += next(([p] for p in partners if self._reaches(rows, [*held, p], [])), [])
            if not any(p in held for p in partners):
                return False
        return self._reaches(rows, held, others)

    def _reaches(self, rows: list[int], held: list[int], others: list[WithdrawnRow]) -> bool:
        course = local_run_inputs(self.linked, self.conditions, steps=self.steps)
        for row in held:
            host = course.hosts[int(self.linked.rank[row])]
            at = next(
                (
                    k
                    for k, (step, r, _) in enumerate(host.steps)
                    if step in POSTING_STEPS and r == row - host.base
                ),
                None,
            )
            if at is not None:  # else it is held back before
                host.steps = [*host.steps[:at], (STEP_NEVER, row - host.base, ())]
        left = LocalClocks(course).run()
        rank = self.linked.rank
        met = all(
            any(left.posted[p] >= 0 for p in self._others(end))
            for end in others
            if left.hosts[int(rank[end[0]])].ended
        )
        return met and all(left.hosts[int(rank[row])].ended for row in rows)
