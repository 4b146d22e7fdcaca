"""The state of a run on the one form: small, explicit, copyable. And what can happen to it: choices
and events.

Rows, channels, boxes and instances are the integers of `Linked`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol

from distsim.backends.message_matching import MessageMatcher
from distsim.common.records import dataclass
from distsim.semantics.form.instructions import ExitRank

#: Where a row stands. Closed: it has finished, was cancelled, or was never posted. Queued: its
#: queue has not come to it. Running: it has begun, and waits for others. Due: all it needs is
#: there, and finishing is a matter of time. Jammed: it met what does not fit.
CLOSED, QUEUED, RUNNING, DUE, HUNG = range(5)


class SchedulerChoice(NamedTuple):
    """One thing that may happen next.

    ``step``: rank ``a`` runs its next host instruction. ``finish``: row ``a``, which is due,
    finishes. ``take``: the any-source receive ``a`` takes the message ``b`` (both rows).
    """

    kind: str
    a: int
    b: int = -1


CHOICE_STEP, CHOICE_FINISH, CHOICE_TAKE = "step", "finish", "take"


class TransitionListener(Protocol):
    """Who is told what a choice brought about, in order, while it does.

    ``started``: a row left its queue. ``met``: these rows met, (send, receive) and no instance
    (-1), or all that came to an instance, by order of arrival. ``due``: all that the row needs is
    there. ``cancelled``: the row will never finish. ``mismatched``: rows that met differ in
    ``fields``; ``outcome`` is the profile's word for what follows, ``crash`` the ranks that it
    kills. ``released``: a rank's host, blocked in a `Meet`, may go on. ``ended``: a rank came to
    its end; ``gone``: its process died or left early. ``touched``: what a box that is open to any
    source holds has changed. ``quiet``: it need not be told of starts, but for batches that are one
    launch.
    """

    quiet: bool

    def started(self, row: int, /) -> None: ...
    def met(self, rows: tuple[int, ...], instance: int, /) -> None: ...
    def due(self, row: int, /) -> None: ...
    def done(self, row: int, /) -> None: ...
    def cancelled(self, row: int, /) -> None: ...
    def mismatched(self, event: RowsMismatched, /) -> None: ...
    def released(self, rank: int, /) -> None: ...
    def ended(self, rank: int, gone: bool, /) -> None: ...
    def touched(self, box: int, /) -> None: ...


# --- events: what a listener is told, written down ---


class RowStarted(NamedTuple):
    row: int


class RowsMatched(NamedTuple):
    rows: tuple[int, ...]
    instance: int


class RowDue(NamedTuple):
    row: int


class RowDone(NamedTuple):
    row: int


class RowCancelled(NamedTuple):
    row: int


class RowsMismatched(NamedTuple):
    rows: tuple[int, ...]
    fields: tuple[str, ...]
    outcome: str
    instance: int
    crash: tuple[int, ...] = ()


class HostReleased(NamedTuple):
    rank: int


class RankEnded(NamedTuple):
    rank: int
    gone: bool


TransitionEvent = (
    RowStarted
    | RowsMatched
    | RowDue
    | RowDone
    | RowCancelled
    | RowsMismatched
    | HostReleased
    | RankEnded
)


class TransitionRecorder:
    """A listener that writes everything down."""

    quiet = False

    def __init__(self) -> None:
        self.events: list[TransitionEvent] = []

    def started(self, row: int, /) -> None:
        self.events.append(RowStarted(row))

    def met(self, rows: tuple[int, ...], instance: int, /) -> None:
        self.events.append(RowsMatched(rows, instance))

    def due(self, row: int, /) -> None:
        self.events.append(RowDue(row))

    def done(self, row: int, /) -> None:
        self.events.append(RowDone(row))

    def cancelled(self, row: int, /) -> None:
        self.events.append(RowCancelled(row))

    def mismatched(self, event: RowsMismatched, /) -> None:
        self.events.append(event)

    def released(self, rank: int, /) -> None:
        self.events.append(HostReleased(rank))

    def ended(self, rank: int, gone: bool, /) -> None:
        self.events.append(RankEnded(rank, gone))

    def touched(self, box: int, /) -> None:
        """Nothing that a run's history has."""


@dataclass(slots=True, eq=False)
class RunState:
    """``pc``: next instruction of each rank; ``ends``: how it ended, None while it lives; ``open``:
    its open launches.

    ``phase``: of every row. ``queues``: rows of a queue with workers, in order. ``meets``: who has
    come where a communicator is made. ``sends``, ``receives``: open messages by channel, oldest
    first; those of boxes that are open to any source are in ``matcher``. ``there``: who has come to
    a collective (rank -> row, by order of arrival). ``kinds``: where calls may differ, the rows of
    each kind that have come. ``ahead``: bytes of a channel sent without a receive. ``silent``: of a
    pair of ranks on a group between whom nothing arrives any more, in one direction (group, giver,
    getter): whether it is the giver that keeps it back, and the giver's receives whose notice had
    got there before (G4). ``jams``: whom a jammed row waits for in vain, nobody named for whoever
    comes to its collective. ``mates``: of a send that is due, its receive. ``closed``: (rank,
    group) whose connections the rank's own timeout closed. ``losses``: ranks that are gone, or have
    closed a group.
    """

    pc: list[int]
    ends: list[ExitRank | None]
    open: list[int]
    phase: bytearray
    queues: dict[int, list[int]]
    meets: dict[int, dict[int, None]]
    sends: dict[int, list[int]]
    receives: dict[int, list[int]]
    there: dict[int, dict[int, int]]
    ahead: dict[int, int]
    hung_on: dict[int, tuple[int, ...]]
    mates: dict[int, int]
    closed: dict[tuple[int, int], bool]
    matcher: MessageMatcher
    lost_ranks: dict[int, None]
    silent: dict[tuple[int, int, int], tuple[bool, frozenset[int]]]
    kinds: dict[int, dict[tuple[str, int, int], dict[int, None]]]

    def copy(self) -> RunState:
        return RunState(
            self.pc[:],
            self.ends[:],
            self.open[:],
            self.phase[:],
            _copy_lists(self.queues),
            {k: v.copy() for k, v in self.meets.items()},
            _copy_lists(self.sends),
            _copy_lists(self.receives),
            {k: v.copy() for k, v in self.there.items()},
            self.ahead.copy(),
            self.hung_on.copy(),
            self.mates.copy(),
            self.closed.copy(),
            self.matcher.copy(),
            self.lost_ranks.copy(),
            self.silent.copy(),
            {k: {kind: rows.copy() for kind, rows in v.items()} for k, v in self.kinds.items()},
        )

    def key(self) -> Hashable:
        """Equal for states with the same future.

        ``open``, ``ahead``, ``mates``, ``queues``, ``losses`` and ``kinds`` follow from the
        rest."""
        return (
            tuple(self.pc),
            tuple(self.ends),
            bytes(self.phase),
            frozenset(self.hung_on.items()),
            frozenset((k, frozenset(v)) for k, v in self.meets.items()),
            frozenset(self.closed),
            frozenset((k, tuple(v)) for k, v in self.sends.items()),
            frozenset((k, tuple(v)) for k, v in self.receives.items()),
            frozenset((k, frozenset(v.values())) for k, v in self.there.items()),
            self.matcher.key(),
            frozenset(self.silent.items()),
        )


def _copy_lists(lists: dict[int, list[int]]) -> dict[int, list[int]]:
    return {key: rows[:] for key, rows in lists.items()}
