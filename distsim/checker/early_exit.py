"""Enumerate what can happen if ranks exit, raise or are killed while requests are still open.

Whether other ranks find such a request is a race. A request that has met its partner by the time of
the exit is complete, for the exiting rank too; every other open row is *withdrawn* together with
its rank. So each open row may or may not have met its partner before the exit, as far as the rows
do not depend on one another. In a collective that releases members one by one (the root of a
broadcast gives data to each), a row may be withdrawn from some members and not from others.

An exit releases no other rank, so a partner can always arrive first. It can arrive last if the
exiting rank reaches its end without it; a trial run in which the partner is held back shows that.

Which rows are open depends on the reading: a buffered send is complete when it is posted.

Not covered: with many open rows only some combinations are tried (`MAX_OPEN_ROWS`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations, product
from math import ceil, prod

from distsim.checker.reading_run import (
    ContractProgram,
    OpenRequestFilter,
    Reading,
    ReadingRun,
    early_exit_ranks,
)
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
#: Up to this many withdrawals, every combination is tried. With more, the combinations tried are
#: those in which each partner meets a prefix of an exiting rank's rows, if there are at most
#: `MAX_COMBINATIONS` of these; otherwise only single withdrawals and all of them together. Each
#: combination costs a run. So at most `MAX_SINGLE` of them are single ones, from all over the
#: program: with one for every row, the cost would grow with the square of the program. Small
#: programs may have more, as long as all runs together have about `MAX_ROWS_OF_SINGLE` rows.
MAX_OPEN_ROWS = 6
MAX_COMBINATIONS = 128
MAX_SINGLE = 8
MAX_ROWS_OF_SINGLE = 100_000
#: The second part of a `WithdrawnRow` that is withdrawn from all partners.
ALL_PARTNERS = -1
#: Looked up once, because Python 3.11 takes long to find a member of an enumeration.
_COLLECTIVE, _WORK = int(PartKind.COLLECTIVE), int(PartKind.WORK)
#: `RunProgress.posted` of a row that was not posted.
_NOT_POSTED = -1


def early_exit_runs(contract: ContractProgram, reading: Reading) -> Iterator[ReadingRun]:
    """A run for each way to withdraw open rows, after the run in which all rows meet."""
    linked = contract.under(reading)
    complete_run = run_local_clocks(linked, CompletionConditions(linked, None))
    yield ReadingRun(contract, complete_run, reading)

    requests = _OpenRequests(linked, complete_run)
    feasibility = _Feasibility(requests)
    for withdrawn in _candidate_sets(requests):
        if not feasibility.allows(withdrawn):
            continue
        conditions = CompletionConditions(linked, None, withdrawn=withdrawn)
        progress = run_local_clocks(linked, conditions)
        for row in requests.fully_withdrawn(withdrawn):
            if linked.instance[row] >= 0:
                # The exited member posted the row, but for its collective it is missing again.
                progress.posted[row] = _NOT_POSTED
        yield ReadingRun(contract, progress, reading, withdrawn)


class _OpenRequests:
    """The rows that exiting ranks leave open, and the partners that may or may not meet them."""

    def __init__(self, linked: LinkedProgram, complete_run: RunProgress) -> None:
        self.linked, self.complete_run = linked, complete_run
        self.conditions = CompletionConditions(linked, None)
        self.request_filter = OpenRequestFilter(linked)

    @cached_property
    def withdrawals(self) -> list[WithdrawnRow]:
        """Every (open row, partner from which it may be withdrawn).

        An open row of a collective that releases members one by one counts once for each member
        that proceeds with its data, unless that makes too many.
        """
        found: list[WithdrawnRow] = []
        for row in self._open_rows:
            members = self._members_that_need(row) or [ALL_PARTNERS]
            found += [(row, member) for member in members]
        if len(found) > MAX_COMBINATIONS:
            return [(row, ALL_PARTNERS) for row in self._open_rows]
        return found

    @cached_property
    def _open_rows(self) -> list[int]:
        """The rows that an exiting rank has posted, never waited for, and whose partners arrive."""
        found = []
        for rank in early_exit_ranks(self.linked):
            # A rank that hangs even if all its rows meet never reaches its exit.
            if self.complete_run.hosts[rank].ended:
                found += self._open_rows_of(rank)
        return found

    def _open_rows_of(self, rank: int) -> list[int]:
        posted: list[int] = []
        waited_for: set[int] = set()
        for instruction in self.linked.unit_of[rank].instructions:
            if isinstance(instruction, PostLaunch):
                posted += [part.row for part in instruction.launch.parts]
            elif isinstance(instruction, WaitForRows):
                waited_for.update(instruction.rows)
        base = self.linked.base[rank]
        rows = [base + row for row in posted if row not in waited_for]
        return [row for row in rows if self._is_open(row)]

    def _is_open(self, row: int) -> bool:
        """Whether a row is incomplete until a partner arrives, and one arrives."""
        kind = self.linked.kind[row]
        if kind == _WORK or not self.request_filter.can_matter(row):
            return False
        if kind == _COLLECTIVE:
            needs_others = self.conditions.partial_waits.get(row) != ()
        else:
            needs_others = int(self.conditions.need[row]) >= 0
        return needs_others and len(self._arriving_partners(row)) > 0

    def rank_of(self, row: int) -> int:
        return int(self.linked.rank[row])

    def partners_of(self, withdrawal: WithdrawnRow) -> list[int]:
        """The rows that arrive to meet a withdrawn row."""
        row, partner = withdrawal
        return self._arriving_partners(row) if partner == ALL_PARTNERS else [partner]

    def _arriving_partners(self, row: int) -> list[int]:
        linked = self.linked
        if linked.kind[row] == _COLLECTIVE:
            members: list[int] = linked.rows_of[int(linked.instance[row])].tolist()
            partners = [member for member in members if member != row]
        else:
            partners = [int(linked.mate[row])]
        posted = self.complete_run.posted
        return [partner for partner in partners if partner >= 0 and posted[partner] >= 0]

    def _members_that_need(self, row: int) -> list[int]:
        """In a collective that releases members one by one, the rows that need this row."""
        if self.linked.kind[row] != _COLLECTIVE:
            return []
        partial_waits = self.conditions.partial_waits
        members = self._arriving_partners(row)
        return [member for member in members if row in partial_waits.get(member, ())]

    def fully_withdrawn(self, withdrawn: Sequence[WithdrawnRow]) -> set[int]:
        """The rows that are withdrawn from all their partners."""
        given = set(withdrawn)
        met = {withdrawal[0] for withdrawal in self.withdrawals if withdrawal not in given}
        return {row for row, _ in withdrawn if row not in met}


def _candidate_sets(requests: _OpenRequests) -> Iterator[tuple[WithdrawnRow, ...]]:
    """The sets of withdrawals to try."""
    withdrawals = requests.withdrawals
    count = len(withdrawals)
    if count <= MAX_OPEN_ROWS:
        for size in range(1, count + 1):
            yield from combinations(withdrawals, size)
        return
    by_partner = _withdrawals_by_partner(requests)
    if prod(len(in_order) + 1 for in_order in by_partner) <= MAX_COMBINATIONS:
        yield from _suffix_sets(by_partner)
        return
    most = max(MAX_SINGLE, MAX_ROWS_OF_SINGLE // requests.linked.rows)
    for withdrawal in withdrawals[:: ceil(count / most)]:
        yield (withdrawal,)
    yield tuple(withdrawals)


def _withdrawals_by_partner(requests: _OpenRequests) -> list[list[WithdrawnRow]]:
    """For each exiting rank and partner rank, the withdrawals in the partner's program order.

    A withdrawal with several partners forms a list of its own.
    """
    found: dict[tuple[int, ...], list[tuple[int, WithdrawnRow]]] = defaultdict(list)
    for withdrawal in requests.withdrawals:
        row, partners = withdrawal[0], requests.partners_of(withdrawal)
        key: tuple[int, ...] = (row,)
        if len(partners) == 1:
            key = (requests.rank_of(row), requests.rank_of(partners[0]))
        found[key].append((partners[0], withdrawal))
    return [[withdrawal for _, withdrawal in sorted(pairs)] for pairs in found.values()]


def _suffix_sets(by_partner: list[list[WithdrawnRow]]) -> list[tuple[WithdrawnRow, ...]]:
    """All choices of one suffix per list, except the empty set, the smallest first.

    A partner that is too late for one row is too late for every later row as well.
    """
    suffixes = [
        [tuple(in_order[start:]) for start in range(len(in_order) + 1)] for in_order in by_partner
    ]
    found: list[tuple[WithdrawnRow, ...]] = []
    for choice in product(*suffixes):
        chosen = [withdrawal for suffix in choice for withdrawal in suffix]
        if chosen:
            found.append(tuple(sorted(chosen)))
    return sorted(found, key=lambda withdrawn: (len(withdrawn), withdrawn))


class _Feasibility:
    """Decides by trial runs which sets of withdrawals can happen."""

    def __init__(self, requests: _OpenRequests) -> None:
        self.requests = requests
        self.steps = threads_by_unit(requests.linked)

    def allows(self, withdrawn: Sequence[WithdrawnRow]) -> bool:
        """Whether the owners of ``withdrawn`` can exit while a partner of each is held back.

        Every other open row of a rank that has exited must have met one of its partners.
        """
        held_back = self._partners_to_hold_back(withdrawn)
        if held_back is None:
            return False
        progress = self._run_with(held_back)
        given = set(withdrawn)
        return all(
            self._is_met(withdrawal, progress)
            for withdrawal in self.requests.withdrawals
            if withdrawal not in given and self._owner_has_ended(withdrawal[0], progress)
        )

    def _partners_to_hold_back(self, withdrawn: Sequence[WithdrawnRow]) -> list[int] | None:
        """For each withdrawal the first partner without which the owners still exit.

        Usually that is the first partner of each, which one run shows. Otherwise the choice is
        greedy: a partner that was chosen for an earlier withdrawal is never reconsidered. Large
        sets would take too many runs then, and count as impossible.
        """
        rows = [row for row, _ in withdrawn]
        first = [self.requests.partners_of(withdrawal)[0] for withdrawal in withdrawn]
        if self._owners_end(rows, self._run_with(first)):
            return first
        if len(withdrawn) > MAX_SINGLE:
            return None
        held_back: list[int] = []
        for withdrawal in withdrawn:
            partner = self._partner_to_hold_back(withdrawal, rows, held_back)
            if partner is None:
                return None
            held_back.append(partner)
        return held_back

    def _partner_to_hold_back(
        self, withdrawal: WithdrawnRow, rows: Sequence[int], held_back: Sequence[int]
    ) -> int | None:
        for partner in self.requests.partners_of(withdrawal):
            if self._owners_end(rows, self._run_with([*held_back, partner])):
                return partner
        return None

    def _owners_end(self, rows: Sequence[int], progress: RunProgress) -> bool:
        return all(self._owner_has_ended(row, progress) for row in rows)

    def _run_with(self, held_back: Sequence[int]) -> RunProgress:
        """Run the program with the ranks of these rows stopped just before they post them."""
        linked = self.requests.linked
        inputs = local_run_inputs(linked, self.requests.conditions, steps=self.steps)
        for row in held_back:
            host = inputs.hosts[self.requests.rank_of(row)]
            own_row = row - host.base
            position = _position_of_post(host.steps, own_row)
            if position is not None:  # None: the rank already stops at an earlier row
                # A new list, because ranks with the same code and later trial runs share the old
                # one.
                host.steps = [*host.steps[:position], (STEP_NEVER, own_row, ())]
        return LocalClocks(inputs).run()

    def _owner_has_ended(self, row: int, progress: RunProgress) -> bool:
        return progress.hosts[self.requests.rank_of(row)].ended

    def _is_met(self, withdrawal: WithdrawnRow, progress: RunProgress) -> bool:
        partners = self.requests.partners_of(withdrawal)
        return any(progress.posted[partner] >= 0 for partner in partners)


def _position_of_post(steps: Sequence[tuple[int, int, object]], row: int) -> int | None:
    """The position of the step that posts a row."""
    for position, (step, step_row, _) in enumerate(steps):
        if step in POSTING_STEPS and step_row == row:
            return position
    return None
