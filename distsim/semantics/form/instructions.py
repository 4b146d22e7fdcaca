"""The one form that every driver runs: what a rank's program becomes under a back end's rules.

A *row* numbers everything that can be waited for: one per call, and for a batch one more per part.
Rows count from the rank's first (`Linked.base`), so ranks that do the same share their instructions
(`CompilationUnit`); they are also the rows of a trace. Who meets whom, sizes and prices stand
beside, in columns by row (`distsim.semantics.form.linked_program`). No instruction names a back
end.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from distsim.common.records import dataclass
from distsim.findings.final_state import RankEndStatus
from distsim.operations.core.resolved_call import RankGroup
from distsim.program.code import CodeCall, Vec

#: The signature of a call that breaks the contract and that the back end takes all the same: wrong
#: data comes of it.
INVALID_SIGNATURE = -2


class PartKind(IntEnum):
    """What a row of the form is; -1 in a column where a row is none of these (a wait, a batch as a
    whole, a call never made).
    """

    SEND = 0
    RECEIVE = 1
    COLLECTIVE = 2
    WORK = 3  # compute, sleep, assign: local, nobody is met


#: The kinds by themselves: looking one up in its class takes five times as long, and beside a
#: number of numpy's a hundred times.
KIND_SEND, KIND_RECEIVE, KIND_COLLECTIVE, KIND_WORK = PartKind


class KeyedRendezvous(NamedTuple):
    """Members who meet under a key of their own: the process group is made, or a new group, or a
    communicator.

    ``key`` and ``members`` are those of one rank, so units with such a gathering stand for one rank
    only, but for the world's (``members`` empty: everybody).
    """

    key: Hashable
    members: tuple[int, ...] = ()


class LaunchPart(NamedTuple):
    """One transfer or piece of work of a launch.

    ``call`` is the call, or the part of a batch. ``number``: of a collective, how many the rank has
    made on its group before. ``batched``: the message travels with its batch. ``odd``: see
    `INVALID_SIGNATURE`. ``gathering``: where members meet under a key instead. ``real``: the group
    that its group is really connected to, where the ranks did not agree on it.
    """

    row: int
    position: int
    part: int
    kind: PartKind
    call: CodeCall
    number: int = 0
    batched: bool = False
    odd: bool = False
    gathering: KeyedRendezvous | None = None
    real: RankGroup | None = None


class ExecutionQueue(NamedTuple):
    """Where launches of a rank run: on a stream, which takes them in the order that ``after``
    gives; or by ``width`` workers, first in first out (0: all at once, beside each other).

    ``key`` tells queues of a rank apart; ``port`` and ``group`` index the code's, where its name in
    a trace is a communicator's.
    """

    key: Hashable
    width: int = 0
    group: int = -1
    port: int = -1
    name: str = ""
    is_stream: bool = False


class OperationLaunch(NamedTuple):
    """What a queue runs as one. Its row is its part's, or the batch's where the batch is one unit.

    It starts when all rows in ``after`` have finished and, if its queue has a width, one of its
    workers is free.
    """

    row: int
    parts: tuple[LaunchPart, ...]
    after: tuple[int, ...] = ()
    queue: ExecutionQueue | None = None

    @property
    def is_unit(self) -> bool:
        """Several parts that end together."""
        return self.parts[0].row != self.row

    @property
    def pooled(self) -> bool:
        """It takes a worker of its queue."""
        return self.queue is not None and self.queue.width > 0

    @property
    def on_stream(self) -> bool:
        """The host hands it over, and a stream runs it."""
        return self.queue is not None and self.queue.is_stream


# --- host instructions. ``position`` is the call they belong to; every call has at least one ---


class PostLaunch(NamedTuple):
    """Hand a launch to its queue and go on."""

    position: int
    launch: OperationLaunch


class WaitForRows(NamedTuple):
    """Block the host until ``rows`` have finished. ``waited`` are the requests that this call waits
    for, on the host or not.
    """

    position: int
    rows: tuple[int, ...] = ()
    waited: tuple[int, ...] = ()


class SyncDevice(NamedTuple):
    """Block the host until everything that it has launched has finished: the newest launch of each
    queue in ``rows``.
    """

    position: int
    rows: tuple[int, ...] = ()


class ConnectionPoint(NamedTuple):
    """Where ranks meet: members of the group, or the two of a port (indices of the code), at the
    ``stage`` of what they make together: a communicator (""), or connections on one
    (`distsim.semantics.form.device_compiler`). ``root``: the one that a stage is about."""

    group: int
    port: int = -1
    stage: str = ""
    root: Vec = -1


class AwaitRendezvous(NamedTuple):
    """Block the host until all members have come: a communicator or the process group is made, or a
    connection.

    ``number`` counts the rank's meets. Who meets is told by ``gathering``, or by ``spots``: the
    rank comes to all of them at once, and goes on when everybody has come to each (`Linked.meets`;
    they take a number each). ``uneven``: members differ by rank; who is ``lost`` comes, but is
    never let go. ``of_group``: the id of the group whose time-out bounds the wait.
    """

    position: int
    number: int = 0
    gathering: KeyedRendezvous | None = None
    spots: tuple[ConnectionPoint, ...] = ()
    of_group: int = 0
    uneven: bool = False
    lost: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of its spots, or its own."""
        return tuple(range(self.number, self.number + max(1, len(self.spots))))


class BlockForever(NamedTuple):
    """Block the host for ever: the call waits for what cannot come. ``ranks``: who it is about, if
    anybody; ``undefined``: the back end may do otherwise."""

    position: int
    ranks: tuple[int, ...]
    text: str
    undefined: bool = False


class AcquireLock(NamedTuple):
    """Take the process's one lock, held until the `WaitForRows` that follows is over."""

    position: int


class DropRequest(NamedTuple):
    """The last handle of a message's request is gone."""

    position: int
    row: int


class ExitRank(NamedTuple):
    """The rank's end. ``gone``: its process died or left early, so that what it had open is
    lost.
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
    """Ranks of one code that do the same, call by call: their instructions, with rows counted from
    each rank's first.

    ``vector_rows[i]`` is the row of the code's vectors that belongs to ``ranks[i]``.
    """

    code: int
    ranks: tuple[int, ...]
    vector_rows: tuple[int, ...]
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def launches(self) -> list[OperationLaunch]:
        """In the order in which the host hands them over."""
        return [i.launch for i in self.instructions if isinstance(i, PostLaunch)]


# --- the same for the driver with local clocks: tuples of numbers, one thread for the host and one for each stream ---
#: Steps of a host: hand over and go on (POST, JOIN), or hand over and wait (the next ones), … and
#: of a stream: BEGIN a launch once the host has handed it over (ISSUE) and all before it have
#: ended, and FINISH it. A host waits for the ends of its requests' launches one after the other
#: (WAIT_ENDS), for all that it has launched at once (AWAIT_ENDS). The driver asks for the first
#: ones most often.
(
    STEP_POST,
    STEP_MESSAGE,
    STEP_WAIT,
    STEP_FINISH,
    STEP_WORK,
    STEP_ISSUE,
    STEP_BEGIN,
    STEP_JOIN,
    STEP_COLLECTIVE,
    STEP_WAIT_EACH,
    STEP_RENDEZVOUS,
    STEP_WAIT_ENDS,
    STEP_SYNC,
    STEP_END,
    STEP_NEVER,
) = range(15)

#: (step, row, rows): see `flatten`.
ThreadStep = tuple[int, int, tuple[int, ...]]


class UnitThreads(NamedTuple):
    """A unit's threads: the host's steps, and those of each stream."""

    host: list[ThreadStep]
    streams: list[list[ThreadStep]]


def flatten_to_threads(unit: CompilationUnit, offsets: list[int], one_by_one: bool) -> UnitThreads:
    """The steps of a unit's threads. Rows count from the rank's first.

    The row of a wait is that of the call which waits (-1: the program's end), for its return is
    written down there; a meet has its numbers for rows. ``one_by_one``: waits come one for each
    request, and each notes when it was waited for (`STEP_WAIT_EACH`: the row, then these).
    """
    host: list[ThreadStep] = []
    streams: dict[Hashable, list[ThreadStep]] = {}
    own: set[int] = set()  # rows of launches that streams run
    found, i = [one for one in unit.instructions if type(one) is not AcquireLock], 0
    while i < len(found):
        one = found[i]
        if type(one) is PostLaunch and (queue := one.launch.queue) is not None and queue.is_stream:
            own.add(one.launch.row)
            host.append((STEP_ISSUE, one.launch.row, ()))
            streams.setdefault(queue.key, []).extend(_stream_steps(one.launch))
            i += 1
        else:
            step, used = _host_step(found, i, offsets, own, one_by_one)
            host.append(step)
            i += used
    return UnitThreads(host, list(streams.values()))


def _host_step(
    found: Sequence[Instruction], i: int, offsets: list[int], own: set[int], one_by_one: bool
) -> tuple[ThreadStep, int]:
    """The step at an instruction that hands a stream nothing, and how many instructions it takes
    up.
    """
    here = found[i]
    if isinstance(here, PostLaunch):
        launch = here.launch
        whole = (
            launch.row == offsets[here.position]
        )  # not a part of a batch, whose return is written down in its own row
        waits = (
            whole and i + 1 < len(found) and found[i + 1] == (here.position, (launch.row,), ())
        )  # a Wait
        kind = launch.parts[0].kind
        if kind is KIND_WORK:
            return (STEP_WORK, launch.row, ()), 2 if waits else 1
        step = STEP_JOIN if kind is KIND_COLLECTIVE else STEP_POST
        return (step + waits, launch.row, ()), 1 + waits
    row = offsets[here.position] if here.position < len(offsets) - 1 else -1
    if isinstance(here, WaitForRows):
        if own and not own.isdisjoint(here.rows):
            return (STEP_WAIT_ENDS, row, here.rows), 1
        return (
            (STEP_WAIT_EACH, row, (*here.rows[:1], *here.waited))
            if one_by_one and here.waited
            else (STEP_WAIT, row, here.rows)
        ), 1
    if isinstance(here, SyncDevice):
        return (STEP_SYNC, row, here.rows), 1
    if isinstance(here, AwaitRendezvous):
        return (STEP_RENDEZVOUS, row, here.numbers), 1
    return (
        (STEP_NEVER if isinstance(here, BlockForever) else STEP_END, row, ())
        if isinstance(here, (BlockForever, ExitRank))
        else (STEP_WAIT, row, ())
    ), 1


def _stream_steps(launch: OperationLaunch) -> list[ThreadStep]:
    parts: tuple[LaunchPart, ...] = launch.parts
    begin = (STEP_BEGIN, launch.row, launch.after)
    if parts[0].kind is KIND_WORK:
        return [begin, (STEP_WORK, launch.row, ())]
    come: list[ThreadStep] = [
        (STEP_JOIN if part.kind is KIND_COLLECTIVE else STEP_POST, part.row, ()) for part in parts
    ]
    return [begin, *come, (STEP_FINISH, launch.row, tuple([part.row for part in parts]))]
