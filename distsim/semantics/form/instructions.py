"""The instructions that every driver runs: a rank's program, compiled under a backend's rules.

Key idea: a *row* numbers everything that can be waited for: one row per call, and for a batch one
more per part. Rows count from the rank's first row (`LinkedProgram.base`), so ranks that do the
same share their instructions (`CompilationUnit`). The rows are also the rows of a trace.

What matches what, sizes and costs are not part of the instructions: they are columns by row, in
`distsim.semantics.form.linked_program` and `distsim.semantics.form.completion`. No instruction
names a backend.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from distsim.common.records import dataclass
from distsim.findings.final_state import RankEndStatus
from distsim.operations.core.resolved_call import RankGroup
from distsim.program.code import CodeCall, Vec

#: The signature of a call that breaks the contract but that the backend accepts: it produces wrong
#: data.
INVALID_SIGNATURE = -2


class PartKind(IntEnum):
    """What a row is.

    A column holds -1 for rows that are none of these: a wait, a batch as a whole, a call that the
    rank never makes.
    """

    SEND = 0
    RECEIVE = 1
    COLLECTIVE = 2
    WORK = 3  # compute, sleep, assign: local, without partners


#: The kinds as plain names: looking one up in its class takes five times as long, and comparing it
#: with a number of numpy a hundred times.
KIND_SEND, KIND_RECEIVE, KIND_COLLECTIVE, KIND_WORK = PartKind


class KeyedRendezvous(NamedTuple):
    """Members that find each other by a key: to create the process group, a new group, or a
    communicator.

    ``key`` and ``members`` are those of one rank, so a unit with such a rendezvous has only one
    rank. The exception is the world's: its ``members`` are empty and mean all ranks.
    """

    key: Hashable
    members: tuple[int, ...] = ()


class LaunchPart(NamedTuple):
    """One transfer or piece of work of a launch.

    - ``call``: the call, or one part of a batch.
    - ``number``: for a collective, how many the rank has called on its group before.
    - ``batched``: the message travels with its batch.
    - ``breaks_contract``: its signature is `INVALID_SIGNATURE`.
    - ``keyed``: the rendezvous by which its members find each other, instead of a number.
    - ``real_group``: the group that its group is really connected to, if the ranks disagree.
    """

    row: int
    position: int
    part: int
    kind: PartKind
    call: CodeCall
    number: int = 0
    batched: bool = False
    breaks_contract: bool = False
    keyed: KeyedRendezvous | None = None
    real_group: RankGroup | None = None


class ExecutionQueue(NamedTuple):
    """Where launches of a rank run.

    Either on a stream, which runs them in the order given by ``after``; or on ``width`` workers,
    first in first out (0: all launches run concurrently).

    ``key`` identifies the queue within a rank. ``endpoint`` and ``group`` are indices of the code;
    they give the name in a trace if the queue belongs to a communicator.
    """

    key: Hashable
    width: int = 0
    group: int = -1
    endpoint: int = -1
    name: str = ""
    is_stream: bool = False


class OperationLaunch(NamedTuple):
    """What a queue runs as one. Its row is its part's row, or the batch's if the batch is one unit.

    It starts when all rows in ``after`` have finished and, if its queue has workers, one of them is
    free.
    """

    row: int
    parts: tuple[LaunchPart, ...]
    after: tuple[int, ...] = ()
    queue: ExecutionQueue | None = None

    @property
    def is_unit(self) -> bool:
        """Whether it has several parts that end together."""
        return self.parts[0].row != self.row

    @property
    def pooled(self) -> bool:
        """Whether it occupies a worker of its queue."""
        return self.queue is not None and self.queue.width > 0

    @property
    def on_stream(self) -> bool:
        """Whether the host only enqueues it, and a stream runs it."""
        return self.queue is not None and self.queue.is_stream


# --- host instructions. ``position`` is the call they belong to; every call has at least one ---


class PostLaunch(NamedTuple):
    """Hand a launch to its queue and continue."""

    position: int
    launch: OperationLaunch


class WaitForRows(NamedTuple):
    """Block the host until ``rows`` have finished.

    ``waited``: the requests that the call waits for, whether the host blocks for them or a stream
    does.
    """

    position: int
    rows: tuple[int, ...] = ()
    waited: tuple[int, ...] = ()


class SyncDevice(NamedTuple):
    """Block the host until everything that it has launched has finished.

    ``rows``: the newest launch of each queue.
    """

    position: int
    rows: tuple[int, ...] = ()


class ConnectionPoint(NamedTuple):
    """One place where ranks meet: the members of a group, or the two ranks of an endpoint.

    ``group`` and ``endpoint`` are indices of the code. ``stage``: what they create together: a
    communicator (""), or connections on one (`distsim.semantics.form.device_compiler`). ``root``:
    the root that a stage is about.
    """

    group: int
    endpoint: int = -1
    stage: str = ""
    root: Vec = -1


class AwaitRendezvous(NamedTuple):
    """Block the host until all members have arrived, to create the process group, a communicator or
    a connection.

    - ``number`` counts the rank's rendezvous so far.
    - The members follow from ``keyed``, or else from ``points``. The rank arrives at all points
      at once, and continues when all members of each have arrived
      (`LinkedProgram.rendezvous_of`). Each point takes a number of its own.
    - ``uneven``: the members differ by rank. A ``lost`` rank arrives, but is never released.
    - ``of_group``: the id of the group whose timeout limits the wait.
    """

    position: int
    number: int = 0
    keyed: KeyedRendezvous | None = None
    points: tuple[ConnectionPoint, ...] = ()
    of_group: int = 0
    uneven: bool = False
    lost: bool = False

    @property
    def creates_communicator(self) -> bool:
        """Whether the ranks meet to create a communicator, at its first use."""
        return bool(self.points) and not self.points[0].stage

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of its points, or its own."""
        return tuple(range(self.number, self.number + max(1, len(self.points))))


class BlockForever(NamedTuple):
    """Block the host for ever: the call waits for something that cannot happen.

    ``ranks``: the ranks that it waits for, if any. ``undefined``: the backend may behave
    differently.
    """

    position: int
    ranks: tuple[int, ...]
    text: str
    undefined: bool = False


class AcquireLock(NamedTuple):
    """Take the process's only lock, and hold it until the next `WaitForRows` is over."""

    position: int


class DropRequest(NamedTuple):
    """The program drops the last handle of a message's request."""

    position: int
    row: int


class ExitRank(NamedTuple):
    """The rank's end.

    ``gone``: its process ends too, so that it closes its sockets and loses its open requests.
    False only while it waits in its exit, and for programs that stay connected (option
    ``stays_connected``).
    """

    position: int
    status: RankEndStatus
    message: str = ""
    gone: bool = True


Instruction = (
    PostLaunch
    | WaitForRows
    | SyncDevice
    | AwaitRendezvous
    | BlockForever
    | AcquireLock
    | DropRequest
    | ExitRank
)


@dataclass(eq=False)
class CompilationUnit:
    """Ranks of one code that do the same, call by call, and their instructions.

    Rows count from each rank's first row. ``vector_rows[i]`` is the index of ``ranks[i]`` in the
    code's vectors.
    """

    code: int
    ranks: tuple[int, ...]
    vector_rows: tuple[int, ...]
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def launches(self) -> list[OperationLaunch]:
        """All launches, in the order in which the host posts them."""
        posts = (one for one in self.instructions if isinstance(one, PostLaunch))
        return [post.launch for post in posts]
