"""Every order of events that a back end allows where receives are open to any source: which ends are possible.

Without such receives every order ends alike, so all that has no alternative is run at once (`Rules.settle`) and only the choice of a
sender branches. Under gloo one more order matters: a receive that names its sender goes before an older one from any source, if it is
posted before that one has taken the message (`Matcher.specific_first`); so a host about to post such a receive is a choice too.

Where a rank leaves before its end (it raises, crashes or exits), what it had open is lost, and it matters what others did before: a
message that doesn't fit ends it in another way, if it comes in time. Then every step of every rank is a choice. So it is where a
request is dropped that gloo cancels if it has not met by then (G4).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from distsim.match import ANY
from distsim.semantics.form import PartKind
from distsim.semantics.link import Linked
from distsim.semantics.moves import Rules
from distsim.semantics.standing import standstill
from distsim.semantics.state import STEP, Choice, Ended, Event, Mismatched, State
from distsim.semantics.tasks import POST
from distsim.standstill import Standstill


class Note(NamedTuple):
    """Calls that met and did not fit: the profile's word for what follows, what differed, on which ranks."""

    outcome: str
    fields: tuple[str, ...]
    ranks: tuple[int, ...]


class End(NamedTuple):
    """One way in which a program ends: how its ranks did, and what met and did not fit."""

    standstill: Standstill
    notes: frozenset[Note]


class Ends(NamedTuple):
    """All ways found; ``complete``: there is no other."""

    ends: tuple[End, ...]
    complete: bool


def ends_of_orders(linked: Linked, max_states: int, every_step: bool = False) -> Ends:
    """The ends of a program over every order of events: of senders that receives from any source take, or of every step."""
    return _Orders(Rules(linked), max_states, every_step).run()


class _Orders:
    def __init__(self, rules: Rules, max_states: int, every_step: bool) -> None:
        self.rules, self.max_states = rules, max_states
        self.every_step, self.left_early = every_step, False
        self.ends: dict[End, None] = {}

    def run(self) -> Ends:
        """All ends: over the choices of senders, and, where a rank was seen to leave early, over every step."""
        complete = self._search()
        if self.left_early and not self.every_step:
            self.every_step = True
            complete = self._search()
        return Ends(tuple(self.ends), complete)

    def _search(self) -> bool:
        """Whether the search came to its end within the bound."""
        seen: set[tuple[Hashable, frozenset[Note]]] = set()
        todo: list[tuple[State, frozenset[Note]]] = [(self.rules.initial(), frozenset())]
        while todo and len(seen) < self.max_states:
            state, notes = todo.pop()
            notes = self._settle(state, notes)
            key = (state.key(), notes)
            if key in seen:
                continue
            seen.add(key)
            choices = [c for c in self.rules.enabled(state) if self.every_step or c.kind != STEP or self._grabs(state, c.a)]
            if not choices:
                self.ends[End(standstill(self.rules, state), notes)] = None
            todo += [self._after(state, notes, choice) for choice in reversed(choices)]
        return not todo

    def _after(self, state: State, notes: frozenset[Note], choice: Choice) -> tuple[State, frozenset[Note]]:
        after = state.copy()
        return after, self._note(self.rules.advance(after, choice), notes)

    def _settle(self, state: State, notes: frozenset[Note]) -> frozenset[Note]:
        if self.every_step:
            return notes
        hold = self._grabs if self.rules.profile.specific_first else None
        return self._note(self.rules.settle(state, hold), notes)

    def _note(self, events: list[Event], notes: frozenset[Note]) -> frozenset[Note]:
        for event in events:
            if isinstance(event, Ended) and event.gone:
                self.left_early = True
            if isinstance(event, Mismatched):
                notes |= {Note(event.outcome, event.fields, tuple(sorted(self.rules.rank_of[row] for row in event.rows)))}
        return notes

    def _grabs(self, state: State, rank: int) -> bool:
        """The rank is about to post a receive that takes a message from under an open receive from any source."""
        rules = self.rules
        op, _, task, *_ = rules.steps[rank][state.pc[rank]]
        if op != POST or task is None or not rules.open_boxes:
            return False
        for row in (rules.base[rank] + part for part in task.parts):
            box = (
                state.matcher.boxes.get(rules.box[row])
                if rules.kind[row] == PartKind.RECEIVE and rules.peer[row] != ANY
                else None
            )
            if box is not None and box.receives.get(ANY) and box.sends.get(rules.peer[row]):
                return True
        return False
