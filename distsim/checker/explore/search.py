"""Search all event orders of a program with any-source receives.

A *state* is what remains after all forced steps (`steps`). From a state, only two kinds of choice
make executions differ: which sender an any-source receive takes and, in the reading ``mixed``,
whether a call that waits is buffered after all. Four reductions keep the search small:

* All deterministic steps are taken greedily. Their conditions have the form "that rank has reached
  its stop s" or "k messages were taken". Such a condition stays true, and no step disables another,
  so every order of these steps leads to the same state.
* Choices at different boxes commute, so the search branches over one box at a time where that is
  safe (`persistent_sets`).
* The receives of a box are served in order, and the messages of one sender keep their order. So a
  state counts the messages taken per sender and forgets which of several equal receives took them
  (`encoding`). Interchangeable senders are sorted (`symmetry`).
* Counts that can no longer influence anything are omitted from a state's key (`_StateKey`).

In ``mixed``, a call is released (treated as buffered) when it is seen to wait. That covers both
cases. A buffered send that returns late is only a late step of its rank. A send that still waits
when nothing is left to take was not buffered. A rank that waits in a rooted collective is released
the same way once the least need (that of ``buffered``) is met. So each of the three plain readings
is a special case of ``mixed``.

The search reports what it has seen, as numbers; `all_readings` turns it into records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal, NamedTuple

from distsim.checker.explore.encoding import NO_PAIR, AnySourceBox, ProgramEncoding
from distsim.checker.explore.persistent_sets import BranchChooser
from distsim.checker.explore.potential_mismatches import PostedCall
from distsim.checker.explore.steps import (
    MISMATCH_SEEN,
    RELIANCE_BROKEN,
    SearchState,
    StateMachine,
    holds,
    release_choice,
)
from distsim.checker.explore.symmetry import SymmetryClasses, symmetric_ranks
from distsim.checker.explore.terminal_states import MismatchCollector, deadlock_core
from distsim.checker.matching.channel_layout import ChannelLayout

#: What a search looks for: everything; or, if the plain readings leave only that open, an execution
#: in which every rank ends, or one without a mismatch.
SearchGoal = Literal["all", "completes", "no_mismatch"]

#: The initial state has this number, and no parent and no choice.
_INITIAL = 0
_NONE = -1


@dataclass
class SearchResult:
    """How the executions of one reading end, as far as the search has followed them.

    ``blocked_sets`` maps each set of blocked ranks to the core of the first execution that ends
    with it. The flags say that some execution has the property: all ranks end
    (``has_completing_run``), calls mismatch or none do, a receive takes another sender than it
    relies on or none does. The ``first_…`` fields number the first state of each kind.
    ``takers[box, receive number]`` are the ranks whose message the any-source receive takes in some
    execution.
    """

    blocked_sets: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    has_completing_run: bool = False
    has_matching_run: bool = False
    has_reliable_run: bool = False
    takers: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    first_blocked: int | None = None
    first_mismatch: int | None = None
    first_broken_reliance: int | None = None
    first_end: int | None = None


class TakingReceive(NamedTuple):
    """An any-source receive that took a message in some execution, and the senders it took from."""

    receive: PostedCall
    box: AnySourceBox
    senders: set[int]


class StateSearch:
    """A depth-first search over one reading, in portions: call `run` until it is `finished`.

    States are numbered in the order in which they are found. Only a state's key, its parent and the
    choice that led to it are stored; `state` reconstructs it by executing its `path` again.
    """

    def __init__(
        self,
        layout: ChannelLayout,
        reading: str,
        goal: SearchGoal = "all",
        absent: frozenset[int] = frozenset(),
    ) -> None:
        self.encoding = ProgramEncoding(layout, reading, absent)
        self.machine = StateMachine(self.encoding)
        self.reading, self.goal = reading, goal
        self.chooser = BranchChooser(self.machine)
        self.classes: SymmetryClasses = symmetric_ranks(self.encoding)
        self.mismatch_collector = MismatchCollector(self.machine)
        self.key = _StateKey(self.machine, self.classes).function()
        self.seen = SearchResult()
        first = self.machine.initial()
        self._numbers = {self.key(first): _INITIAL}
        self._parents, self._choices = [_NONE], [_NONE]
        self._stack: list[tuple[SearchState, int]] = [(first, _INITIAL)]

    @property
    def stored(self) -> int:
        """How many states are stored."""
        return len(self._parents)

    @property
    def finished(self) -> bool:
        """Whether no state is left to examine."""
        return not self._stack

    def run(self, max_states: int) -> None:
        """Continue until the search is finished or ``max_states`` states are stored in total."""
        stack, machine, branches = self._stack, self.machine, self.chooser.branches
        while stack and len(self._parents) < max_states:
            state, number = stack.pop()
            pairs, releases = branches(state)
            if not pairs:
                self._record_end(state, number)
                releases = self._releases_at_end(state)
                if self._goal_reached():
                    stack.clear()
                    return
            fresh: list[tuple[SearchState, int]] = []
            for pair in reversed(pairs):
                successor = state[:]
                machine.take(successor, pair)
                self._record_taker(state, pair)
                self._store(successor, number, pair, fresh)
            for rank in releases:
                successor = state[:]
                machine.release(successor, rank)
                self._store(successor, number, release_choice(rank), fresh)
            stack += reversed(fresh)

    def record_pending_ends(self) -> None:
        """Examine the states that wait on the stack, when the bound stops the search.

        Some of them are ends of executions. Nothing more is stored.
        """
        for state, number in reversed(self._stack):
            if not self.chooser.branches(state).pairs:
                self._record_end(state, number)

    def _store(
        self, state: SearchState, parent: int, choice: int, fresh: list[tuple[SearchState, int]]
    ) -> None:
        key = self.key(state)
        if key not in self._numbers:
            number = self._numbers[key] = len(self._parents)
            self._parents.append(parent)
            self._choices.append(choice)
            fresh.append((state, number))

    def _record_taker(self, state: SearchState, pair: int) -> None:
        box = self.machine.box_of_pair[pair]
        receive = (box, state[self.encoding.served + box])
        takers = self.seen.takers.get(receive)
        if takers is None:
            takers = self.seen.takers[receive] = set()
        takers.add(self.machine.sender_of[pair])

    def _record_end(self, state: SearchState, number: int) -> None:
        """Record the end of an execution: no receive can take a message.

        In ``mixed`` it is the end of the execution in which nothing more is buffered.
        """
        seen, flags = self.seen, state[self.encoding.flags]
        if seen.first_end is None:
            seen.first_end = number
        # The collector must always run: it also records what differs.
        if self.mismatch_collector.has_mismatch(state) or flags & MISMATCH_SEEN:
            if seen.first_mismatch is None:
                seen.first_mismatch = number
        else:
            seen.has_matching_run = True
            self._record_blocked(state, number)
        if not flags & RELIANCE_BROKEN:
            seen.has_reliable_run = True
        elif seen.first_broken_reliance is None:
            seen.first_broken_reliance = number

    def _record_blocked(self, state: SearchState, number: int) -> None:
        seen, blocked = self.seen, tuple(self.machine.blocked(state))
        if not blocked:
            seen.has_completing_run = True
            return
        if blocked not in seen.blocked_sets:
            seen.blocked_sets[blocked] = deadlock_core(self.machine, state, blocked)
            if seen.first_blocked is None:
                seen.first_blocked = number

    def _releases_at_end(self, state: SearchState) -> list[int]:
        """The ranks to release when no receive can take a message.

        Releasing a rank only lets more calls meet, so it is of no use to a search for an execution
        without a mismatch. A search for an execution that completes needs only one release at a
        time, because releases do not exclude one another.
        """
        if self.reading != "mixed" or self.goal == "no_mismatch":
            return []
        machine = self.machine
        ranks = [rank for rank in range(machine.size) if machine.can_release(state, rank)]
        return ranks[:1] if self.goal == "completes" else ranks

    def _goal_reached(self) -> bool:
        if self.goal == "completes":
            return self.seen.has_completing_run
        return self.goal == "no_mismatch" and self.seen.has_matching_run

    def path(self, number: int) -> list[int]:
        """The choices that lead to a state, as `StateMachine.apply` takes them."""
        choices = []
        while number != _INITIAL:
            choices.append(self._choices[number])
            number = self._parents[number]
        return choices[::-1]

    def state(self, number: int) -> SearchState:
        """Reconstruct a stored state."""
        state = self.machine.initial()
        for choice in self.path(number):
            self.machine.apply(state, choice)
        return state

    def taking_receives(self) -> list[TakingReceive]:
        """The any-source receives that took a message in some execution."""
        found = []
        for (box_number, receive_number), senders in sorted(self.seen.takers.items()):
            box = self.encoding.boxes[box_number]
            found.append(TakingReceive(box.any_source_receives[receive_number], box, senders))
        return found


#: Replaces a count that no longer matters. No count is negative, so the key differs from the keys
#: of all states in which the count still matters.
_IRRELEVANT_COUNT = -1
#: `_last_wait` of a pair for which its sender never waits.
_NEVER_WAITS = -1

_KeyFunction = Callable[[SearchState], tuple[object, ...]]


class _SurplusBox(NamedTuple):
    """A box that gets more messages than it has receives.

    It has served all its receives once the numbers of the state at the indices in ``totals`` have
    reached their totals. ``last_waits``: for each pair, the sender's last stop that waits for one
    of its messages to be taken.
    """

    totals: list[tuple[int, int]]
    last_waits: list[tuple[int, int]]


class _StateKey:
    """Computes what distinguishes states: their key numbers, up to symmetry and dead counts.

    The numbers of interchangeable ranks are sorted. The count of messages taken from a sender stops
    to matter under two conditions: the box has served all receives that it will ever have, and the
    sender has passed its last call that waits for one of the messages. Only boxes that get more
    messages than receives are examined; elsewhere the count is then the same in all states.
    """

    def __init__(self, machine: StateMachine, classes: SymmetryClasses) -> None:
        self.machine, self.encoding = machine, machine.encoding
        own_indices = {rank: self._indices_of(rank) for ranks in classes for rank in ranks}
        self.symmetric_getters = [
            [_tuple_getter(own_indices[rank]) for rank in ranks] for ranks in classes
        ]
        symmetric = {index for indices in own_indices.values() for index in indices}
        key_indices = range(self.encoding.key_size)
        self.fixed_getter = _tuple_getter([i for i in key_indices if i not in symmetric])
        self.surplus_boxes = [
            self._surplus_box(number, box)
            for number, box in enumerate(self.encoding.boxes)
            if box.has_surplus
        ]

    def function(self) -> _KeyFunction:
        """The cheapest function that computes the key."""
        size = self.encoding.key_size
        if not self.surplus_boxes:
            return self._sorted if self.symmetric_getters else lambda state: tuple(state[:size])
        if self.symmetric_getters:
            return lambda state: self._sorted(self._without_dead_counts(state))
        return lambda state: tuple(self._without_dead_counts(state))

    def _indices_of(self, rank: int) -> list[int]:
        """The indices of a rank's own numbers: its stop, and the messages taken from it."""
        pairs = [pair for pair, sender in enumerate(self.machine.sender_of) if sender == rank]
        return [rank, *(self.machine.size + pair for pair in pairs)]

    def _surplus_box(self, number: int, box: AnySourceBox) -> _SurplusBox:
        totals = [(self.encoding.served + number, len(box.any_source_receives))]
        for sender, receives in box.named.items():
            pair = self.encoding.pair(number, sender)
            # A receive from a rank that sends nothing is never served: its number stays 0.
            index = self.encoding.zero if pair == NO_PAIR else self.encoding.named_served + pair
            totals.append((index, len(receives)))
        last_waits = [(pair, self._last_wait(pair)) for pair in self.machine.pairs_of[number]]
        return _SurplusBox(totals, last_waits)

    def _last_wait(self, pair: int) -> int:
        """The sender's last stop that waits for a message of the pair, or `_NEVER_WAITS`."""
        rank, consumed = self.machine.sender_of[pair], self.encoding.consumed + pair
        last = _NEVER_WAITS
        for stop in range(self.machine.ends[rank]):
            tests = (*self.machine.hard[rank][stop], *self.machine.soft[rank][stop])
            if any(index == consumed for index, _ in tests):
                last = stop
        return last

    def _without_dead_counts(self, state: SearchState) -> SearchState:
        size, sender_of = self.machine.size, self.machine.sender_of
        copy = state[: self.encoding.key_size]
        for totals, last_waits in self.surplus_boxes:
            # Counts never exceed their totals, so "has reached" means "is equal".
            if not holds(state, totals):
                continue
            for pair, last in last_waits:
                if state[sender_of[pair]] > last:
                    copy[size + pair] = _IRRELEVANT_COUNT
        return copy

    def _sorted(self, state: SearchState) -> tuple[object, ...]:
        symmetric = [
            tuple(sorted(get(state) for get in getters)) for getters in self.symmetric_getters
        ]
        return (self.fixed_getter(state), *symmetric)


def _tuple_getter(indices: list[int]) -> Callable[[SearchState], tuple[int, ...]]:
    """A getter of several numbers.

    The first index is repeated, because `itemgetter` with a single index returns no tuple.
    """
    return itemgetter(*indices, *indices[:1])
