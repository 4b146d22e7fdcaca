"""The events that the transition rules report form a consistent history: no event is reported
twice, too early or not at all. The programs are random and use every feature.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from distsim.backends import BACKEND_PROFILES, CONTRACT_READINGS
from distsim.semantics.form.instructions import PartKind
from distsim.semantics.ordered.state import (
    CLOSED,
    QUEUED,
    RankEnded,
    RowCancelled,
    RowDone,
    RowDue,
    RowsMatched,
    RowsMismatched,
    RowStarted,
    RunState,
    TransitionEvent,
    TransitionRecorder,
)
from distsim.semantics.ordered.transitions import TransitionRules
from tests.support.generator import program_of, scenario
from tests.support.harness import draws

SEEDS, CHUNK = draws(100), 10


class RecorderWithoutStarts(TransitionRecorder):
    """A recorder that does not ask for `RowStarted` events."""

    quiet = True


def run_first_enabled(rules: TransitionRules, out: TransitionRecorder) -> RunState:
    """Make the first enabled transition until none is enabled; return the final state."""
    state = rules.initial()
    while choices := rules.enabled(state):
        rules.make(state, choices[0], out)
    return state


class History:
    """Collects every inconsistency of the reported events in `wrong`, as text."""

    def __init__(self, rules: TransitionRules, events: Sequence[TransitionEvent]) -> None:
        self.rules, self.wrong = rules, list[str]()
        self.of: dict[type[TransitionEvent], dict[int, int]] = {
            kind: {} for kind in (RowStarted, RowDue, RowDone, RowCancelled)
        }  # kind -> row -> when
        self.met: dict[int, int] = {}
        self.gone: dict[int, int] = {}
        self.exiting: set[int] = set()  # ranks that have ended but whose connections are still open
        self.pairs: dict[int, list[tuple[int, int]]] = {}  # by channel
        for when, event in enumerate(events):
            self.add(when, event)

    def add(self, when: int, event: TransitionEvent) -> None:
        if isinstance(event, (RowStarted, RowDue, RowDone, RowCancelled)):
            self.check_row_event(when, event)
        elif isinstance(event, RowsMatched):
            self.check_match(when, event)
        elif isinstance(event, RowsMismatched) and not all(
            row in self.of[RowStarted] for row in event.rows
        ):
            self.wrong.append(f"{event}: a row has not started")
        elif isinstance(event, RankEnded):
            self.end_of_rank(when, event)

    def end_of_rank(self, when: int, event: RankEnded) -> None:
        """A process that exits slowly reports its end twice: before and after its connections
        close.
        """
        is_exit_completed = event.gone and event.rank in self.exiting
        if event.rank in self.gone and not is_exit_completed:
            self.wrong.append(f"rank {event.rank} ends twice")
        if event.gone:
            self.exiting.discard(event.rank)
        else:
            self.exiting.add(event.rank)
        self.gone[event.rank] = when

    def check_row_event(
        self, when: int, event: RowStarted | RowDue | RowDone | RowCancelled
    ) -> None:
        row, seen = event.row, self.of[type(event)]
        is_part = (
            self.rules.part_of[row] is not None
        )  # not a batch as one launch, which has no work of its own
        before: dict[type[TransitionEvent], tuple[type[TransitionEvent], ...]] = {
            RowDue: (RowStarted,),
            RowDone: (RowStarted, RowDue) if is_part else (RowStarted,),
        }
        if isinstance(event, RowDue) and is_part and self.rules.kind[row] == PartKind.COLLECTIVE:
            self.wrong += [
                f"{event} before rank {rank} arrived" for rank in self.missing_ranks(row)
            ]
        never: dict[type[TransitionEvent], tuple[type[TransitionEvent], ...]] = {
            RowStarted: (RowDue, RowDone, RowCancelled),
            RowDue: (RowDone, RowCancelled),
            RowDone: (RowCancelled,),
        }
        if row in seen:
            self.wrong.append(f"{event} again")
        self.wrong += [
            f"{event} without {kind.__name__}"
            for kind in before.get(type(event), ())
            if row not in self.of[kind]
        ]
        self.wrong += [
            f"{event} after {kind.__name__}"
            for kind in never.get(type(event), ())
            if row in self.of[kind]
        ]
        seen[row] = when

    def missing_ranks(self, row: int) -> list[int]:
        """The ranks that the collective of this row needs and that have not arrived."""
        arrived = {
            self.rules.rank_of[other]
            for other in self.rules.linked.rows_of[self.rules.instance[row]]
            if other in self.of[RowStarted]
        }
        return [rank for rank in self.rules.needs(row) if rank not in arrived]

    def check_match(self, when: int, event: RowsMatched) -> None:
        rules, began = self.rules, [self.of[RowStarted].get(row, when) for row in event.rows]
        if when in began or any(row in self.met for row in event.rows):
            self.wrong.append(f"{event}: a row has not started, or has already matched")
        self.met |= dict.fromkeys(event.rows, when)
        if event.instance < 0:
            send, receive = event.rows
            self.pairs.setdefault(rules.channel[send], []).append((send, receive))
            fits = (rules.kind[send], rules.kind[receive]) == (
                PartKind.SEND,
                PartKind.RECEIVE,
            ) and rules.box[send] == rules.box[receive]
        else:
            ranks = sorted(rules.rank_of[row] for row in event.rows)
            fits = ranks == sorted(rules.members[event.instance]) and {
                rules.instance[row] for row in event.rows
            } == {event.instance}
            fits = fits and began == sorted(began)
        if not fits:
            self.wrong.append(f"{event}: these rows do not match")

    def check_against(self, state: RunState) -> list[str]:
        """Compare the reported events with the final phase of every row; return all errors."""
        ended = self.of[RowDone].keys() | self.of[RowCancelled].keys()
        for row, phase in enumerate(state.phase):
            kind = self.rules.kind[row] if self.rules.part_of[row] is not None else None
            began, done = row in self.of[RowStarted], row in self.of[RowDone]
            if (
                ((phase == CLOSED) != (row in ended) or phase == QUEUED)
                if began
                else phase not in (CLOSED, QUEUED)
            ):
                self.wrong.append(
                    f"row {row} is in phase {phase}; reported started: {began}, ended: {row in ended}"
                )
            if done and kind == PartKind.RECEIVE and row not in self.met:
                self.wrong.append(f"receive {row} is done but matched no send")
        return self.wrong + self.unreported_matches()

    def unreported_matches(self) -> list[str]:
        """Collectives and messages that are still open although all their ranks have arrived."""
        rules, open_rows = (
            self.rules,
            [
                r
                for r in self.of[RowStarted]
                if r not in self.of[RowCancelled] and r not in self.met
            ],
        )
        open_ends: dict[int, set[int]] = {}
        for row in open_rows:
            if (
                rules.part_of[row] is not None
                and rules.kind[row] <= PartKind.RECEIVE
                and rules.box[row] not in rules.open_boxes
            ):
                open_ends.setdefault(rules.channel[row], set()).add(rules.kind[row])
        arrivals = Counter(
            rules.instance[row] for row in open_rows if rules.kind[row] == PartKind.COLLECTIVE
        )
        return [
            *(
                f"instance {one} has matched, but no event reports it"
                for one, count in arrivals.items()
                if count == len(rules.members[one])
            ),
            *(
                f"channel {one} has a send and a receive that have not been matched"
                for one, kinds in open_ends.items()
                if len(kinds) > 1
            ),
            *self.out_of_order(),
        ]

    def out_of_order(self) -> list[str]:
        """The k-th send of a channel must match the k-th receive of that channel."""
        wrong = []
        for channel, pairs in self.pairs.items():
            ordered = sorted(pairs, key=lambda pair: self.of[RowStarted][pair[0]])
            receives = [self.of[RowStarted][receive] for _, receive in ordered]
            if receives != sorted(receives):
                wrong.append(f"channel {channel}: out of order")
        return wrong


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_row_starts_matches_is_due_and_completes_once_in_this_order(first: int) -> None:
    """Each program runs with its own backend and with one assumption about sends. A match is
    reported before the matched rows are due.
    """
    found = {}
    for seed in range(first, first + CHUNK):
        program = program_of(scenario(seed))
        for profile in (
            BACKEND_PROFILES[program.backend],
            [*CONTRACT_READINGS.values()][seed % len(CONTRACT_READINGS)],
        ):
            rules, out = TransitionRules(program, profile), TransitionRecorder()
            state = run_first_enabled(rules, out)
            if wrong := History(rules, out.events).check_against(state):
                found[seed, profile.name] = wrong[:3]

    assert found == {}


def test_a_listener_that_ignores_starts_gets_all_other_events() -> None:
    """Starts of batches that are one launch are still reported; the final state is the same."""
    for seed in range(draws(40)):
        program = program_of(scenario(seed))
        rules, full, quiet = (
            TransitionRules(program, BACKEND_PROFILES[program.backend]),
            TransitionRecorder(),
            RecorderWithoutStarts(),
        )
        ends = [run_first_enabled(rules, out).key() for out in (full, quiet)]

        batches = {
            e.row for e in full.events if isinstance(e, RowStarted) and rules.part_of[e.row] is None
        }
        kept = [e for e in full.events if not isinstance(e, RowStarted) or e.row in batches]
        reported = [e for e in quiet.events if not isinstance(e, RowStarted) or e.row in batches]

        assert ends[0] == ends[1]
        assert [(type(e), e) for e in reported] == [(type(e), e) for e in kept]
