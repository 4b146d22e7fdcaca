"""Every order of events, where receives are open to any source.

A *state* is what is left after all forced steps (`machine`). From there only two kinds of choice
make executions differ: which sender an open receive takes, and, in the reading ``mixed``, whether a
send that waits is buffered after all. So

* all deterministic steps are taken greedily. Their conditions have the form "that rank has come so far" or "so many were
  taken", which stay true once they are true; no step takes away another. Whatever order they come in, the same state is left;
* choices at different boxes commute, so one box is branched over at a time where that is safe (`persistent`);
* receives of one box are served in order and messages of one sender keep theirs, so a state counts messages taken per sender and
  forgets by which of several alike receives (the numbers of `tables`); senders that may change places are sorted (`symmetry`);
* counts that nothing can ask for any more are left out of a state's key (`_StateKey`).

A send in ``mixed`` is released at the time when it is seen to wait. That covers every way to
decide: a buffered send that returns late is only a late step of its rank, and what is not released
when nothing is left to take is not buffered. A rank whose call waits for a rooted collective is
released likewise once its least need (`buffered`) is met, so that each of the three plain readings
is one case of ``mixed``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal

from distsim.checker.explore.encoding import AnySourceBox, ProgramEncoding
from distsim.checker.explore.persistent_sets import BranchChooser
from distsim.checker.explore.potential_mismatches import PostedCall
from distsim.checker.explore.steps import MISMATCH_SEEN, RELIANCE_BROKEN, SearchState, StateMachine
from distsim.checker.explore.symmetry import SymmetryClasses, symmetric_ranks
from distsim.checker.explore.terminal_states import MismatchCollector, deadlock_core
from distsim.checker.matching.channel_layout import ChannelLayout

#: What a search looks for: everything, or, where the plain readings leave only that open, an
#: execution in which nobody is blocked or one in which all fits.
SearchGoal = Literal["all", "passes", "fits"]


@dataclass
class SearchResult:
    """What the executions of one reading end in, as far as they were followed.

    ``stuck`` maps each set of blocked ranks to the core of the first execution that ends with it;
    ``first_stuck``: the state of the first of these. ``passed``: some execution ends with nobody
    blocked. ``unfit``/``fit``: some execution has calls that met and differ / has none.
    ``broken``/``kept`` likewise for the senders that receives rely on. ``takers[box, receive
    number]``: ranks whose message the open receive takes in some execution.
    """

    stuck: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    passed: bool = False
    unfit: bool = False
    fit: bool = False
    broken: bool = False
    kept: bool = False
    takers: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    first_stuck: int = -1
    first_unfit: int = -1
    first_broken: int = -1
    first_end: int = -1


class StateSearch:
    """A depth-first search over one reading, in portions: `run` until it says that nothing is
    left.
    """

    def __init__(
        self,
        layout: ChannelLayout,
        reading: str,
        goal: SearchGoal = "all",
        absent: frozenset[int] = frozenset(),
    ) -> None:
        self.tables = ProgramEncoding(layout, reading, absent)
        self.machine, self.reading, self.goal = StateMachine(self.tables), reading, goal
        self.chooser = BranchChooser(self.machine)
        self.classes: SymmetryClasses = symmetric_ranks(self.tables)
        self.fits = MismatchCollector(self.machine)
        self.key = _StateKey(self.machine, self.classes).function()
        self.seen = SearchResult()
        first = self.machine.initial()
        self._numbers = {self.key(first): 0}
        self._parents, self._choices = [-1], [-1]
        self._stack: list[tuple[SearchState, int]] = [(first, 0)]

    @property
    def stored(self) -> int:
        """How many states are stored."""
        return len(self._parents)

    @property
    def finished(self) -> bool:
        """Nothing is left to look at."""
        return not self._stack

    def run(self, most: int) -> None:
        """Go on until the search is finished or ``most`` states are stored in all."""
        stack, machine, branches = self._stack, self.machine, self.chooser.branches
        while stack and len(self._parents) < most:
            state, number = stack.pop()
            pairs, releases = branches(state)
            if not pairs:
                self._ended(state, number)
                releases = self._further(state)
                if self._reached():
                    stack.clear()
                    return
            fresh: list[tuple[SearchState, int]] = []
            for pair in reversed(pairs):
                after = state[:]
                machine.take(after, pair)
                self._note(state, pair)
                self._store(after, number, pair, fresh)
            for rank in releases:
                after = state[:]
                machine.release(after, rank)
                self._store(after, number, -2 - rank, fresh)
            stack += reversed(fresh)

    def drain(self) -> None:
        """At the bound: see which of the states that wait to be looked at are ends of executions;
        store nothing more.
        """
        for state, number in reversed(self._stack):
            if not self.chooser.branches(state).pairs:
                self._ended(state, number)

    def _store(
        self, state: SearchState, parent: int, choice: int, fresh: list[tuple[SearchState, int]]
    ) -> None:
        key = self.key(state)
        if key not in self._numbers:
            number = self._numbers[key] = len(self._parents)
            self._parents.append(parent)
            self._choices.append(choice)
            fresh.append((state, number))

    def _note(self, state: SearchState, pair: int) -> None:
        box = self.machine.box_of_pair[pair]
        receive = (box, state[self.tables.served + box])
        takers = self.seen.takers.get(receive)
        if takers is None:
            takers = self.seen.takers[receive] = set()
        takers.add(self.machine.sender_of[pair])

    def _ended(self, state: SearchState, number: int) -> None:
        """Nothing is left to take: the end of an execution (in ``mixed``: of that in which nothing
        more is buffered).
        """
        seen, flags = self.seen, state[self.tables.flags]
        if seen.first_end < 0:
            seen.first_end = number
        if self.fits.bad(state) or flags & MISMATCH_SEEN:
            seen.unfit = True
            seen.first_unfit = number if seen.first_unfit < 0 else seen.first_unfit
        else:
            seen.fit = True
            self._stands(state, number)
        if flags & RELIANCE_BROKEN:
            seen.broken = True
            seen.first_broken = number if seen.first_broken < 0 else seen.first_broken
        else:
            seen.kept = True

    def _stands(self, state: SearchState, number: int) -> None:
        seen, blocked = self.seen, tuple(self.machine.blocked(state))
        if blocked and blocked not in seen.stuck:
            seen.first_stuck = number if seen.first_stuck < 0 else seen.first_stuck
            seen.stuck[blocked] = deadlock_core(self.machine, state, blocked)
        elif not blocked:
            seen.passed = True

    def _further(self, state: SearchState) -> list[int]:
        """Ranks that may be released where nothing is left to take. More is met by releasing, so a
        search for an execution in which all fits has no use for it."""
        if self.reading != "mixed" or self.goal == "fits":
            return []
        ranks = [rank for rank in range(self.tables.size) if self.machine.can_release(state, rank)]
        return ranks[:1] if self.goal == "passes" else ranks

    def _reached(self) -> bool:
        return (self.goal == "passes" and self.seen.passed) or (
            self.goal == "fits" and self.seen.fit
        )

    def path(self, number: int) -> list[int]:
        """The choices that lead to a state: a pair that is taken, or ``-2 - rank`` that is
        released.
        """
        found = []
        while number > 0:
            found.append(self._choices[number])
            number = self._parents[number]
        return found[::-1]

    def state(self, number: int) -> SearchState:
        """A stored state again, by taking its path."""
        state = self.machine.initial()
        for choice in self.path(number):
            if choice >= 0:
                self.machine.take(state, choice)
            else:
                self.machine.release(state, -2 - choice)
        return state

    def receives(self) -> dict[tuple[int, int], tuple[PostedCall, AnySourceBox, set[int]]]:
        """Open receives that took a message in some execution: (box, number) -> (receive, box,
        senders).
        """
        boxes = self.tables.boxes
        return {
            key: (boxes[key[0]].any_source_receives[key[1]], boxes[key[0]], takers)
            for key, takers in sorted(self.seen.takers.items())
        }


#: Stands for a count that no longer matters. No count is negative, so the state differs from every
#: one before.
_IRRELEVANT_COUNT = -1


class _StateKey:
    """What tells states apart: the key part of the state, alike ranks sorted, counts that no longer
    matter left out.

    A count of messages taken from a sender no longer matters once its box has served all receives
    it will ever have and the sender is past its last call that waits for one of them. That is only
    asked for boxes which get more messages than receives; elsewhere the count is then the same in
    all states.
    """

    def __init__(self, machine: StateMachine, classes: SymmetryClasses) -> None:
        self.machine, self.tables = machine, machine.tables
        n = machine.size
        mine = {
            rank: [rank, *(n + p for p, s in enumerate(machine.sender_of) if s == rank)]
            for c in classes
            for rank in c
        }
        self.moving = [
            [itemgetter(*(mine[rank] + mine[rank][:1])) for rank in ranks] for ranks in classes
        ]
        moved = {i for slots in mine.values() for i in slots}
        rest = [i for i in range(self.tables.key_size) if i not in moved]
        self.fixed = itemgetter(*(rest + rest[:1]))
        self.boxes_with_surplus = [
            (
                self.tables.served + b,
                len(box.any_source_receives),
                self._named(b),
                [(pair, self._last_wait(pair)) for pair in machine.pairs_of[b]],
            )
            for b, box in enumerate(self.tables.boxes)
            if sum(len(m) for m in box.messages.values())
            > len(box.any_source_receives) + sum(len(r) for r in box.named.values())
        ]

    def function(self) -> Callable[[SearchState], tuple[object, ...]]:
        """The cheapest function that does it."""
        size = self.tables.key_size
        if self.boxes_with_surplus:
            return lambda state: (
                self._sorted(self._without(state)) if self.moving else tuple(self._without(state))
            )
        return self._sorted if self.moving else lambda state: tuple(state[:size])

    def _named(self, box: int) -> list[tuple[int, int]]:
        """(number of the state that counts them, how many there are) of a box's receives by
        name.
        """
        named = self.tables.boxes[box].named.items()
        pairs = [(self.tables.pair(box, sender), len(receives)) for sender, receives in named]
        return [
            (self.tables.by_name + pair if pair >= 0 else self.tables.zero, count)
            for pair, count in pairs
        ]

    def _last_wait(self, pair: int) -> int:
        """The sender's last stop that waits for a message of the pair to be gone; -1: none."""
        rank, i = self.machine.sender_of[pair], self.tables.gone + pair
        both = zip(self.machine.hard[rank], self.machine.soft[rank], strict=True)
        return max(
            (at for at, (hard, soft) in enumerate(both) if any(j == i for j, _ in (*hard, *soft))),
            default=-1,
        )

    def _without(self, state: SearchState) -> SearchState:
        size, sender_of = self.machine.size, self.machine.sender_of
        copy = state[: self.tables.key_size]
        for served, count, named, pairs in self.boxes_with_surplus:
            if state[served] == count and all(state[i] == n for i, n in named):
                for pair, last in pairs:
                    if state[sender_of[pair]] > last:
                        copy[size + pair] = _IRRELEVANT_COUNT
        return copy

    def _sorted(self, state: SearchState) -> tuple[object, ...]:
        return (
            self.fixed(state),
            *(tuple(sorted(get(state) for get in getters)) for getters in self.moving),
        )
