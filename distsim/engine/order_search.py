"""Searches all orders of events that a backend allows, and returns the possible ends.

Key idea: without any-source receives every order has the same end. So everything without an
alternative is run at once (`TransitionRules.settle`), and only the choice of a sender branches.
Under gloo one more order matters: a receive that names its sender goes before an older any-source
receive, if it is posted before that one has taken the message (`MessageMatcher.specific_first`). So
a host that is about to post such a receive is a choice too.

If a process ends with an error, or while requests are open, these are lost, and it matters what
other ranks did before: a mismatched message ends the rank in another way, if it arrives in time.
Then every step of every rank is a choice. The same holds if a program drops a request that gloo
cancels unless it has matched by then (G4); the caller passes ``every_step`` in this case.

Times play no role here. The search is bounded by a number of states, and reports whether the bound
was reached.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from distsim.backends.message_matching import ANY_SENDER
from distsim.findings.final_state import FinalState
from distsim.semantics.form.instructions import PartKind
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.order_dependence import exits_with_open_requests
from distsim.semantics.ordered.blocked_state import blocked_state_at
from distsim.semantics.ordered.machine_tables import OP_POST
from distsim.semantics.ordered.state import (
    CHOICE_STEP,
    RankEnded,
    RowCancelled,
    RowsMismatched,
    RunState,
    SchedulerChoice,
    TransitionEvent,
)
from distsim.semantics.ordered.transitions import TransitionRules


class MismatchNote(NamedTuple):
    """Calls that matched although they differ: the outcome under the profile, the differing fields,
    and the ranks.
    """

    outcome: str
    fields: tuple[str, ...]
    ranks: tuple[int, ...]


class ProgramEnd(NamedTuple):
    """One possible end of a program: the state of its ranks, and the mismatches on the way."""

    final_state: FinalState
    notes: frozenset[MismatchNote]


class OrderSearchResult(NamedTuple):
    """The ends that were found. ``complete``: the bound was not reached, so these are all."""

    ends: tuple[ProgramEnd, ...]
    complete: bool


def search_event_orders(
    linked: LinkedProgram, max_states: int, every_step: bool = False
) -> OrderSearchResult:
    """The possible ends of a program.

    The search branches where an any-source receive has several senders, or at every step of every
    rank (``every_step``).
    """
    return _OrderSearch(TransitionRules(linked), max_states, every_step).run()


class _SearchNode(NamedTuple):
    """A state to continue from, and the mismatches on the way to it."""

    state: RunState
    notes: frozenset[MismatchNote]


class _OrderSearch:
    """A depth-first search over states. States with equal keys and mismatches are visited once.

    ``has_early_exit``: in some order, a process ended so that others may have lost something.
    ``ends`` has the ends in the order in which they were found.
    """

    def __init__(self, rules: TransitionRules, max_states: int, every_step: bool) -> None:
        self.rules = rules
        self.max_states = max_states
        self.every_step = every_step
        self.exits_with_open_requests = exits_with_open_requests(rules.linked)
        self.has_early_exit = False
        self.ends: dict[ProgramEnd, None] = {}

    def run(self) -> OrderSearchResult:
        """Search over the choices of senders; if a rank exits early, search over every step too."""
        complete = self._search()
        if self.has_early_exit and not self.every_step:
            self.every_step = True
            complete = self._search()
        return OrderSearchResult(tuple(self.ends), complete)

    def _search(self) -> bool:
        """Collect the ends; whether the search was complete within the bound."""
        seen: set[tuple[Hashable, frozenset[MismatchNote]]] = set()
        todo = [_SearchNode(self.rules.initial(), frozenset())]
        while todo and len(seen) < self.max_states:
            state, notes = todo.pop()
            notes = self._settle(state, notes)
            key = (state.key(), notes)
            if key in seen:
                continue
            seen.add(key)
            choices = [c for c in self.rules.enabled(state) if self._branches_at(state, c)]
            self.has_early_exit |= bool(self.rules.exits_with_open_messages(state))
            if not choices:
                self.ends[ProgramEnd(blocked_state_at(self.rules, state), notes)] = None
            # Reversed: the last of the list is continued first.
            todo += [self._after(state, notes, choice) for choice in reversed(choices)]
        return not todo

    def _branches_at(self, state: RunState, choice: SchedulerChoice) -> bool:
        """Whether the search must follow a choice: it has an alternative."""
        if self.every_step or choice.kind != CHOICE_STEP:
            return True
        return self._may_overtake_any_source(state, choice.a)

    def _after(
        self, state: RunState, notes: frozenset[MismatchNote], choice: SchedulerChoice
    ) -> _SearchNode:
        """The node that a choice leads to. The given state is not changed."""
        after = state.copy()
        events = self.rules.advance(after, choice)
        return _SearchNode(after, self._with_mismatches(after, events, notes))

    def _settle(self, state: RunState, notes: frozenset[MismatchNote]) -> frozenset[MismatchNote]:
        """Run everything that has no alternative, in place; return the mismatches up to there."""
        if self.every_step:
            return notes
        hold = self._may_overtake_any_source if self.rules.profile.specific_first else None
        events = self.rules.settle(state, hold)
        return self._with_mismatches(state, events, notes)

    def _with_mismatches(
        self, state: RunState, events: list[TransitionEvent], notes: frozenset[MismatchNote]
    ) -> frozenset[MismatchNote]:
        """``notes`` and the mismatches among the events that led to a state.

        Also detects exits whose order matters.
        """
        for event in events:
            if isinstance(event, RowCancelled) or self._may_lose_requests(state, event):
                self.has_early_exit = True
            if isinstance(event, RowsMismatched):
                ranks = tuple(sorted(self.rules.rank_of[row] for row in event.rows))
                notes |= {MismatchNote(event.outcome, event.fields, ranks)}
        return notes

    def _may_lose_requests(self, state: RunState, event: TransitionEvent) -> bool:
        """Whether a rank ends with an error, or its process ends with requests that are open in
        this order or another one.
        """
        if not isinstance(event, RankEnded):
            return False
        end = state.ends[event.rank]
        if end is not None and end.status != "ended":
            return True
        return event.gone and self.exits_with_open_requests

    def _may_overtake_any_source(self, state: RunState, rank: int) -> bool:
        """Whether a rank is about to post a receive that overtakes an older any-source receive.

        The new receive names its sender, and takes a message that the older one could take.
        """
        rules = self.rules
        op, _, task, *_ = rules.steps[rank][state.pc[rank]]
        if op != OP_POST or task is None or not rules.open_boxes:
            return False
        rows = (rules.base[rank] + part for part in task.parts)
        return any(self._overtakes_any_source(state, row) for row in rows)

    def _overtakes_any_source(self, state: RunState, row: int) -> bool:
        """Whether a row, if it is posted now, takes a message from an any-source receive."""
        rules = self.rules
        sender = rules.peer[row]
        if rules.kind[row] != PartKind.RECEIVE or sender == ANY_SENDER:
            return False
        box = state.matcher.boxes.get(rules.box[row])
        if box is None:
            return False
        return bool(box.receives.get(ANY_SENDER) and box.sends.get(sender))
