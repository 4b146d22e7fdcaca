"""The state of a run that an ordered driver moves step by step, and what can happen to it.

Key idea: the state is small, explicit and copyable. An explorer copies it before each choice, and
two runs whose states have equal keys have the same future. A driver makes a `SchedulerChoice`; a
`TransitionListener` receives what the choice brought about.

Rows, channels, boxes and instances are the integers of
`distsim.semantics.form.linked_program.LinkedProgram`. This module holds no rules: those are in
`arrival_rules`, `queue_rules` and `transitions`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol, TypeVar

from distsim.backends.message_matching import MessageMatcher
from distsim.common.records import dataclass
from distsim.semantics.form.instructions import ExitRank

_Key = TypeVar("_Key")
_Member = TypeVar("_Member")
_Value = TypeVar("_Value")

#: Phases of a row. The rules test them for truth and compare them, so the order matters.
#:
#: CLOSED: it has finished, was cancelled, or was never posted. A message without a match is CLOSED
#: if it was buffered (``credit``) or dropped (``dropped`` is "cancels"); the phase does not tell
#: which, so `BackendProfile.dropped` excludes one of the two.
#: QUEUED: its launch waits in a queue.
#: RUNNING: it has started and waits for its partners.
#: DUE: all it needs has arrived; only time passes until it finishes.
#: HUNG: it met a call that it does not match, and never finishes.
CLOSED, QUEUED, RUNNING, DUE, HUNG = range(5)


class SchedulerChoice(NamedTuple):
    """One thing that may happen next.

    - ``step``: rank ``a`` runs its next host instruction.
    - ``finish``: row ``a``, which is due, finishes.
    - ``take``: the any-source receive ``a`` takes the message ``b`` (both are rows).
    - ``close``: the process of rank ``a``, which has ended its program, closes its sockets, or
      those of some groups.
    """

    kind: str
    a: int
    b: int = -1


CHOICE_STEP, CHOICE_FINISH, CHOICE_TAKE, CHOICE_CLOSE = "step", "finish", "take", "close"


class TransitionListener(Protocol):
    """Receives what a choice brings about, in order, while it happens.

    - ``started``: a row left its queue.
    - ``met``: these rows matched: (send, receive) with instance -1, or all rows of a collective's
      instance in order of arrival.
    - ``due``: everything that the row needs has arrived.
    - ``done``: the row has finished.
    - ``cancelled``: the row will never finish.
    - ``mismatched``: rows that matched differ; see `RowsMismatched`.
    - ``released``: a host that was blocked at a rendezvous may continue.
    - ``ended``: a rank reached its end; ``gone``: its process has ended. A process that exits
      slowly reports its end twice, first without ``gone``.
    - ``groups_closed``: a process that exits has closed the connections of some groups.
    - ``touched``: the content of a box with any-source receives has changed.

    ``quiet`` listeners need no ``started`` events, except for batches that are one launch.
    """

    quiet: bool

    def started(self, row: int, /) -> None:
        """A row left its queue."""

    def met(self, rows: tuple[int, ...], instance: int, /) -> None:
        """Rows of an instance have been matched."""

    def due(self, row: int, /) -> None:
        """Everything that a row needs has arrived."""

    def done(self, row: int, /) -> None:
        """A row has finished."""

    def cancelled(self, row: int, /) -> None:
        """A row will never finish."""

    def mismatched(self, event: RowsMismatched, /) -> None:
        """Matched rows differ."""

    def released(self, rank: int, /) -> None:
        """A host can continue."""

    def ended(self, rank: int, gone: bool, /) -> None:
        """A rank has ended; ``gone``: its process has ended as well."""

    def groups_closed(self, rank: int, /) -> None:
        """A process that exits has closed the connections of some groups."""

    def touched(self, box: int, /) -> None:
        """The content of a box with any-source receives has changed."""


# --- events: one record for each method of a listener ---


class RowStarted(NamedTuple):
    """A row left its queue."""

    row: int


class RowsMatched(NamedTuple):
    """Rows of an instance have been matched."""

    rows: tuple[int, ...]
    instance: int


class RowDue(NamedTuple):
    """Everything that a row needs has arrived."""

    row: int


class RowDone(NamedTuple):
    """A row has finished."""

    row: int


class RowCancelled(NamedTuple):
    """A row will never finish."""

    row: int


class RowsMismatched(NamedTuple):
    """Matched rows that differ in ``fields``.

    ``outcome`` is the profile's word for the consequence; ``crash`` are the ranks that it kills.
    """

    rows: tuple[int, ...]
    fields: tuple[str, ...]
    outcome: str
    instance: int
    crash: tuple[int, ...] = ()


class HostReleased(NamedTuple):
    """A host can continue."""

    rank: int


class RankEnded(NamedTuple):
    """A rank has ended; ``gone``: its process has ended as well."""

    rank: int
    gone: bool


class GroupsClosed(NamedTuple):
    """A process that exits has closed the connections of some groups."""

    rank: int


TransitionEvent = (
    RowStarted
    | RowsMatched
    | RowDue
    | RowDone
    | RowCancelled
    | RowsMismatched
    | HostReleased
    | RankEnded
    | GroupsClosed
)


class TransitionRecorder:
    """A listener that records every event."""

    quiet = False

    def __init__(self) -> None:
        self.events: list[TransitionEvent] = []

    def started(self, row: int, /) -> None:
        """Record the event."""
        self.events.append(RowStarted(row))

    def met(self, rows: tuple[int, ...], instance: int, /) -> None:
        """Record the event."""
        self.events.append(RowsMatched(rows, instance))

    def due(self, row: int, /) -> None:
        """Record the event."""
        self.events.append(RowDue(row))

    def done(self, row: int, /) -> None:
        """Record the event."""
        self.events.append(RowDone(row))

    def cancelled(self, row: int, /) -> None:
        """Record the event."""
        self.events.append(RowCancelled(row))

    def mismatched(self, event: RowsMismatched, /) -> None:
        """Record the event."""
        self.events.append(event)

    def released(self, rank: int, /) -> None:
        """Record the event."""
        self.events.append(HostReleased(rank))

    def ended(self, rank: int, gone: bool, /) -> None:
        """Record the event."""
        self.events.append(RankEnded(rank, gone))

    def groups_closed(self, rank: int, /) -> None:
        """Record the event."""
        self.events.append(GroupsClosed(rank))

    def touched(self, box: int, /) -> None:
        """Ignored: only an engine needs to know where to look again."""


class SilencedPair(NamedTuple):
    """One direction between two ranks of a group in which nothing arrives any more (rule G4).

    ``data_withheld``: the sending side withholds its data; otherwise the data still leave, but the
    receiver never reads them. ``noticed``: receives of the sending rank whose notice had reached
    the other side before the pair became silent.
    """

    data_withheld: bool
    noticed: frozenset[int]


#: Operation, signature and bytes of a collective's call: calls of one kind never mismatch.
CallKind = tuple[str, int, int]


@dataclass(slots=True, eq=False)
class RunState:
    """Everything about a run that changes. The tables of `MachineTables` do not.

    By rank:

    - ``pc``: the next host instruction.
    - ``ends``: how the rank ended; None while it runs.
    - ``open_launches``: the number of launches that were posted and have not ended.
    - ``exiting``: ranks that have ended, and whose process has not; ``joining``: those of them that
      had open collectives.
    - ``lost_ranks``: ranks whose process has ended, or that have closed a group.
    - ``closed_groups``: (rank, group) whose connections the rank's own timeout or its exit closed.
    - ``dropped``: by rank, messages whose handle was dropped before they matched.

    By row:

    - ``phase``: of every row.
    - ``receive_of``: the receive of each send that is due.
    - ``hung_on``: the ranks that a hung row waits for in vain; empty: everyone who calls its
      collective.

    Queues and matching:

    - ``queues``: rows in each queue with workers, in order.
    - ``at_rendezvous``: by instance, the ranks that have arrived where a communicator is created.
    - ``sends``, ``receives``: unmatched messages by channel, oldest first. Those of boxes with
      any-source receives are in ``matcher`` instead.
    - ``arrived``: by instance of a collective, rank -> row in order of arrival.
    - ``arrived_by_kind``: the same rows by kind of call, where calls may differ.
    - ``buffered_bytes``: by channel, bytes sent without a receive.
    - ``silenced``: by (group, sender, receiver), see `SilencedPair`.
    """

    pc: list[int]
    ends: list[ExitRank | None]
    exiting: dict[int, None]
    joining: dict[int, None]
    open_launches: list[int]
    phase: bytearray
    queues: dict[int, list[int]]
    at_rendezvous: dict[int, dict[int, None]]
    sends: dict[int, list[int]]
    receives: dict[int, list[int]]
    arrived: dict[int, dict[int, int]]
    buffered_bytes: dict[int, int]
    hung_on: dict[int, tuple[int, ...]]
    receive_of: dict[int, int]
    closed_groups: dict[tuple[int, int], bool]
    dropped: dict[int, list[int]]
    matcher: MessageMatcher
    lost_ranks: dict[int, None]
    silenced: dict[tuple[int, int, int], SilencedPair]
    arrived_by_kind: dict[int, dict[CallKind, dict[int, None]]]

    def copy(self) -> RunState:
        """An independent copy of the state."""
        return RunState(
            self.pc[:],
            self.ends[:],
            self.exiting.copy(),
            self.joining.copy(),
            self.open_launches[:],
            self.phase[:],
            _copy_lists(self.queues),
            _copy_dicts(self.at_rendezvous),
            _copy_lists(self.sends),
            _copy_lists(self.receives),
            _copy_dicts(self.arrived),
            self.buffered_bytes.copy(),
            self.hung_on.copy(),
            self.receive_of.copy(),
            self.closed_groups.copy(),
            _copy_lists(self.dropped),
            self.matcher.copy(),
            self.lost_ranks.copy(),
            self.silenced.copy(),
            {instance: _copy_dicts(kinds) for instance, kinds in self.arrived_by_kind.items()},
        )

    def key(self) -> Hashable:
        """Equal for states with the same future.

        ``exiting``, ``joining``, ``open_launches``, ``buffered_bytes``, ``receive_of``, ``queues``,
        ``lost_ranks``, ``dropped`` and ``arrived_by_kind`` follow from the rest. Where several
        ranks have arrived, their order is no part of the key.
        """
        at_rendezvous = frozenset((i, frozenset(ranks)) for i, ranks in self.at_rendezvous.items())
        sends = frozenset((channel, tuple(rows)) for channel, rows in self.sends.items())
        receives = frozenset((channel, tuple(rows)) for channel, rows in self.receives.items())
        arrived = frozenset((i, frozenset(rows.values())) for i, rows in self.arrived.items())
        return (
            tuple(self.pc),
            tuple(self.ends),
            bytes(self.phase),
            frozenset(self.hung_on.items()),
            at_rendezvous,
            frozenset(self.closed_groups),
            sends,
            receives,
            arrived,
            self.matcher.key(),
            frozenset(self.silenced.items()),
        )


def _copy_lists(lists: dict[int, list[int]]) -> dict[int, list[int]]:
    return {key: rows[:] for key, rows in lists.items()}


def _copy_dicts(dicts: dict[_Key, dict[_Member, _Value]]) -> dict[_Key, dict[_Member, _Value]]:
    return {key: entries.copy() for key, entries in dicts.items()}
