"""Searches all orders of events that a backend allows, and returns the ends that are possible.

Key idea: without any-source receives every order has the same end. So everything without an
alternative is run at once (`TransitionRules.settle`), and only the choice of a sender branches.
Under gloo one more order matters: a receive that names its sender goes before an older any-source
receive, if it is posted before that one has taken the message (`MessageMatcher.specific_first`). So
a host that is about to post such a receive is a choice too.

If a rank exits early (it raises, crashes or exits), its open requests are lost, and it matters what
others did before: a mismatched message ends it in another way, if it arrives in time. Then every
step of every rank is a choice. The same holds if a request is dropped that gloo cancels unless it
has matched by then (G4).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from distsim.backends.message_matching import ANY_SENDER
from distsim.findings.final_state import FinalState
from distsim.semantics.form.instructions import PartKind
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.ordered.blocked_state import blocked_state_at
from distsim.semantics.ordered.machine_tables import OP_POST
from distsim.semantics.ordered.state import (
    CHOICE_STEP,
    RankEnded,
    RowsMismatched,
    RunState,
    SchedulerChoice,
    TransitionEvent,
)
from distsim.semantics.ordered.transitions import TransitionRules


class MismatchNote(NamedTuple):
    """Calls that met and did not fit: the profile's word for what follows, what differed, on which
    ranks.
    """

    outcome: str
    fields: tuple[str, ...]
    ranks: tuple[int, ...]


class ProgramEnd(NamedTuple):
    """One way in which a program ends: how its ranks did, and what met and did not fit."""

    final_state: FinalState
    notes: frozenset[MismatchNote]


class OrderSearchResult(NamedTuple):
    """All ways found; ``complete``: there is no other."""

    ends: tuple[ProgramEnd, ...]
    complete: bool


def search_event_orders(
    linked: LinkedProgram, max_states: int, every_step: bool = False
) -> OrderSearchResult:
    """The ends of a program over every order of events: of senders that receives from any source
    take, or of every step.
    """
    return _OrderSearch(TransitionRules(linked), max_states, every_step).run()


class _OrderSearch:
    def __init__(self, rules: TransitionRules, max_states: int, every_step: bool) -> None:
        self.rules, self.max_states = rules, max_states
        self.every_step, self.left_early = every_step, False
        self.ends: dict[ProgramEnd, None] = {}

    def run(self) -> OrderSearchResult:
        """All ends: over the choices of senders, and, where a rank was seen to leave early, over
        every step.
        """
        complete = self._search()
        if self.left_early and not self.every_step:
            self.every_step = True
            complete = self._search()
        return OrderSearchResult(tuple(self.ends), complete)

    def _search(self) -> bool:
        """Whether the search came to its end within the bound."""
        seen: set[tuple[Hashable, frozenset[MismatchNote]]] = set()
        todo: list[tuple[RunState, frozenset[MismatchNote]]] = [(self.rules.initial(), frozenset())]
        while todo and len(seen) < self.max_states:
            state, notes = todo.pop()
            notes = self._settle(state, notes)
            key = (state.key(), notes)
            if key in seen:
                continue
            seen.add(key)
            choices = [c for c in self.rules.enabled(state) if self._branches_at(state, c)]
            if not choices:
                self.ends[ProgramEnd(blocked_state_at(self.rules, state), notes)] = None
            todo += [self._after(state, notes, choice) for choice in reversed(choices)]
        return not todo

    def _branches_at(self, state: RunState, choice: SchedulerChoice) -> bool:
        """Whether the search must follow a choice: it has an alternative."""
        if self.every_step or choice.kind != CHOICE_STEP:
            return True
        return self._may_overtake_any_source(state, choice.a)

    def _after(
        self, state: RunState, notes: frozenset[MismatchNote], choice: SchedulerChoice
    ) -> tuple[RunState, frozenset[MismatchNote]]:
        after = state.copy()
        return after, self._note(self.rules.advance(after, choice), notes)

    def _settle(self, state: RunState, notes: frozenset[MismatchNote]) -> frozenset[MismatchNote]:
        if self.every_step:
            return notes
        hold = self._may_overtake_any_source if self.rules.profile.specific_first else None
        return self._note(self.rules.settle(state, hold), notes)

    def _note(
        self, events: list[TransitionEvent], notes: frozenset[MismatchNote]
    ) -> frozenset[MismatchNote]:
        for event in events:
            if isinstance(event, RankEnded) and event.gone:
                self.left_early = True
            if isinstance(event, RowsMismatched):
                notes |= {
                    MismatchNote(
                        event.outcome,
                        event.fields,
                        tuple(sorted(self.rules.rank_of[row] for row in event.rows)),
                    )
                }
        return notes

    def _may_overtake_any_source(self, state: RunState, rank: int) -> bool:
        """The rank is about to post a receive that takes a message from under an open receive from
        any source.
        """
        rules = self.rules
        op, _, task, *_ = rules.steps[rank][state.pc[rank]]
        if op != OP_POST or task is None or not rules.open_boxes:
            return False
        for row in (rules.base[rank] + part for part in task.parts):
            box = (
                state.matcher.boxes.get(rules.box[row])
                if rules.kind[row] == PartKind.RECEIVE and rules.peer[row] != ANY_SENDER
                else None
            )
            if box is not None and box.receives.get(ANY_SENDER) and box.sends.get(rules.peer[row]):
                return True
        return False
