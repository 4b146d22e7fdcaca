"""What a rank's program becomes under a profile: host instructions and launches. Static; the state only points into it.

A *row* numbers everything that can be waited for: one per call, and for a batch one more per part, rank by rank. It is the index
of a trace's rows, and the name of a request here.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum
from typing import NamedTuple

from distsim.profiles.record import Workers
from distsim.standstill import RankStatus

#: The signature of a call that breaks the contract and that the back end takes all the same: wrong data comes of it.
ODD = -2


class PartKind(IntEnum):
    SEND = 0
    RECEIVE = 1
    COLLECTIVE = 2
    WORK = 3  # compute, sleep, assign: local, nobody is met


class Part(NamedTuple):
    """One transfer or piece of work of a launch.

    ``box``: where a message's receive is looked for (`distsim.match`); of a collective, the key under which its members meet.
    ``peer``: global rank of the other side, -1 for any source or none. ``members``: who may come, global ranks by group rank.
    ``root``: group rank. ``group``: the group's id. ``signature``: equal numbers agree. ``tag``: as the call says it, obeyed or not.
    """

    row: int
    rank: int
    position: int
    part: int
    kind: PartKind
    op: str
    box: Hashable = None
    peer: int = -1
    members: tuple[int, ...] = ()
    root: int = 0
    group: int = 0
    nbytes: int = 0
    signature: int = -1
    tag: int = 0


class Launch(NamedTuple):
    """What a queue runs as one. Its row is its part's, or the batch's where the batch is one unit.

    It starts when all rows in ``after`` have finished and, if it has ``workers``, one of them is free.
    """

    row: int
    rank: int
    parts: tuple[Part, ...]
    after: tuple[int, ...] = ()
    workers: Workers | None = None
    queue: str = ""

    @property
    def is_unit(self) -> bool:
        """Several parts that end together."""
        return self.parts[0].row != self.row


# --- host instructions. ``position`` is the call they belong to; every call has at least one ---


class Post(NamedTuple):
    """Hand a launch to its queue and go on."""

    position: int
    launch: Launch


class Wait(NamedTuple):
    """Block the host until ``rows`` have finished. ``waited`` are the requests that this call waits for, on the host or not."""

    position: int
    rows: tuple[int, ...] = ()
    waited: tuple[int, ...] = ()


class Sync(NamedTuple):
    """Block the host until everything that it has launched has finished."""

    position: int


class Meet(NamedTuple):
    """Block the host until all members have come: a communicator or the process group is made. ``group``: its id.

    ``uneven``: members differ by rank; who is ``lost`` comes, but is never let go.
    """

    position: int
    key: Hashable
    members: tuple[int, ...]
    group: int = 0
    uneven: bool = False
    lost: bool = False


class Stuck(NamedTuple):
    """Block the host for ever: the call waits for what cannot come. ``ranks``: who it is about, if anybody; ``undefined``: the back
    end may do otherwise."""

    position: int
    ranks: tuple[int, ...]
    text: str
    undefined: bool = False


class Lock(NamedTuple):
    """Take the process's one lock, held until the `Wait` that follows is over (mpi)."""

    position: int


class Drop(NamedTuple):
    """The last handle of a message's request is gone."""

    position: int
    row: int


class Leave(NamedTuple):
    """The rank's end. ``gone``: its process died or left early, so that what it had open is lost."""

    position: int
    status: RankStatus
    message: str = ""
    gone: bool = True


Instruction = Post | Wait | Sync | Meet | Stuck | Lock | Drop | Leave
