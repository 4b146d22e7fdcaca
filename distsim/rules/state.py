"""The state of a run: small, explicit, copyable, hashable. And what can happen to it: choices and events."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from distsim.match import Matcher
from distsim.rules.code import Leave


class Phase(IntEnum):
    """Where an open row stands. A row that is not open has finished, was cancelled, or was never posted."""

    QUEUED = 0  # posted; its queue has not come to it
    RUNNING = 1  # it has begun, and waits for others
    DUE = 2  # all it needs is there; finishing is a matter of time
    JAMMED = 3  # it met what does not fit, and never ends


class Choice(NamedTuple):
    """One thing that may happen next.

    ``step``: rank ``a`` runs its next host instruction. ``finish``: row ``a``, which is due, finishes. ``take``: the any-source
    receive ``a`` takes the message ``b`` (both rows).
    """

    kind: str
    a: int
    b: int = -1


STEP, FINISH, TAKE = "step", "finish", "take"


# --- events: what a choice brought about, in order ---


class Started(NamedTuple):
    """A row left its queue: it is there for others."""

    row: int


class Met(NamedTuple):
    """These rows met: (send, receive), or all that came to a collective, by order of arrival."""

    rows: tuple[int, ...]
    key: Hashable


class Due(NamedTuple):
    """All that the row needs is there."""

    row: int


class Done(NamedTuple):
    row: int


class Cancelled(NamedTuple):
    """The row will never finish: its request was dropped, or its rank is gone."""

    row: int


class Mismatched(NamedTuple):
    """Rows that met differ in ``fields``. ``outcome`` is the profile's word for what follows, ``crash`` the ranks that it kills."""

    rows: tuple[int, ...]
    fields: tuple[str, ...]
    outcome: str
    key: Hashable
    crash: tuple[int, ...] = ()


class Released(NamedTuple):
    """A rank's host, blocked in a `Meet`, may go on."""

    rank: int


class Ended(NamedTuple):
    """A rank came to its end; ``gone``: its process died or left early."""

    rank: int
    gone: bool


Event = Started | Met | Due | Done | Cancelled | Mismatched | Released | Ended


@dataclass(slots=True)
class State:
    """``pc``: next instruction of each rank; ``ends``: how it ended, None while it lives; ``open``: its open launches.

    ``phase``: every open row. ``workers``: rows of a queue with workers, in order. ``meets``: who has come where a communicator
    is made. ``ahead``: bytes sent without a receive, by (box, sender). ``jams``: whom a jammed row waits for in vain. ``mates``:
    the other row of a message that is due. ``closed``: (rank, group) whose connections the rank's own timeout closed.
    """

    pc: list[int]
    ends: list[Leave | None]
    open: list[int]
    phase: dict[int, Phase]
    workers: dict[Hashable, list[int]]
    meets: dict[Hashable, list[int]]
    ahead: dict[Hashable, int]
    jams: dict[int, tuple[int, ...]]
    mates: dict[int, int]
    closed: dict[tuple[int, int], bool]
    matcher: Matcher

    def copy(self) -> State:
        return State(
            list(self.pc), list(self.ends), list(self.open), dict(self.phase), {k: list(v) for k, v in self.workers.items()},
            {k: list(v) for k, v in self.meets.items()}, dict(self.ahead), dict(self.jams), dict(self.mates), dict(self.closed),
            self.matcher.copy(),
        )  # fmt: skip

    def key(self) -> Hashable:
        """Equal for states with the same future. (``open``, ``ahead`` and ``workers`` follow from the rest.)"""
        meets = frozenset((k, frozenset(v)) for k, v in self.meets.items())
        rows = frozenset(self.phase.items()), frozenset(self.jams.items())
        return tuple(self.pc), tuple(self.ends), rows, meets, frozenset(self.closed), self.matcher.key()

    def __hash__(self) -> int:
        return hash(self.key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self.key() == other.key()
