"""The static half of the state machine: a linked program as plain lists by row, and its
instructions prepared for stepping.

Key idea: everything that a step needs is looked up in a Python list by an integer, because the
drivers do this once per event (indexing a numpy array is several times slower). Nothing in here
changes during a run; what changes is in `distsim.semantics.ordered.state.RunState`.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property

import numpy as np

from distsim.backends.profile import BackendProfile, Contact
from distsim.common.arrays import sorted_unique
from distsim.operations.all_to_all_barrier import AllToAllCollective
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.one_sided import FIRST_SIGNAL_TAG
from distsim.program.code import CodeCall
from distsim.program.model import Program
from distsim.semantics.form.collective_needs import CollectiveNeeds
from distsim.semantics.form.group_creation import created_group_ids
from distsim.semantics.form.instructions import (
    AcquireLock,
    AwaitRendezvous,
    BlockForever,
    CompilationUnit,
    DropRequest,
    ExitRank,
    Instruction,
    LaunchPart,
    OperationLaunch,
    PartKind,
    PostLaunch,
    SyncDevice,
    WaitForRows,
)
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.mismatches import suspect_instances

#: Kinds of host steps. The event-driven engine compares them (``op > OP_WAIT``), so the order
#: matters: the two frequent ones come first.
OP_POST, OP_WAIT, OP_SYNC, OP_RENDEZVOUS, OP_BLOCK, OP_LOCK, OP_DROP, OP_EXIT = range(8)
_OP_OF_INSTRUCTION: dict[type, int] = {
    PostLaunch: OP_POST,
    WaitForRows: OP_WAIT,
    SyncDevice: OP_SYNC,
    AwaitRendezvous: OP_RENDEZVOUS,
    BlockForever: OP_BLOCK,
    AcquireLock: OP_LOCK,
    DropRequest: OP_DROP,
    ExitRank: OP_EXIT,
}
#: `LaunchTask.queue` of a launch that no queue with workers runs.
NO_QUEUE = -1
#: Columns of a linked program that become lists of the same name.
_COLUMNS = ("kind", "channel", "box", "peer", "instance", "nbytes", "signature", "tag", "group")


class LaunchTask:
    """A launch as the machine runs it. Rows count from the rank's first row.

    - ``parts``: the rows of its parts.
    - ``queue``: the number, within the rank, of the queue whose worker it occupies, or `NO_QUEUE`;
      ``width``: the number of workers of that queue.
    - ``after``: rows of launches that must end before it starts; ``followers``: tasks that wait for
      this one.
    - ``unit``: a batch that starts and ends as one.
    - ``plain``: a single part that starts as soon as it is posted.
    - ``locks``: posting it takes the process's lock.
    """

    __slots__ = (
        "after",
        "followers",
        "launch",
        "locks",
        "parts",
        "plain",
        "queue",
        "row",
        "unit",
        "width",
    )

    def __init__(self, launch: OperationLaunch, queue_numbers: dict[Hashable, int]) -> None:
        self.launch = launch
        self.row = launch.row
        self.after = launch.after
        self.parts = tuple(part.row for part in launch.parts)
        self.unit = launch.is_unit
        self.queue, self.width = NO_QUEUE, 0
        if launch.queue is not None and launch.queue.width > 0:
            self.queue = queue_numbers.setdefault(launch.queue.key, len(queue_numbers))
            self.width = launch.queue.width
        must_wait = bool(self.after) or self.queue != NO_QUEUE
        self.plain = not must_wait and not self.unit
        self.locks = self.queue == NO_QUEUE and launch.parts[0].kind is not PartKind.WORK
        self.followers: list[LaunchTask] = []


#: A step of a host: its kind, the instruction, the task of a `PostLaunch`, the call's position, and
#: the rows that it waits for. It stays a plain tuple, because the engine unpacks one per step, and
#: CPython 3.11 unpacks a NamedTuple three times more slowly.
HostStep = tuple[int, Instruction, LaunchTask | None, int, tuple[int, ...]]


class _UnitTasks:
    """The steps of a unit, and its tasks and parts by row counted from the rank's first row."""

    def __init__(self, unit: CompilationUnit, rows: int) -> None:
        self.queue_numbers: dict[Hashable, int] = {}
        self.tasks: list[LaunchTask | None] = [None] * rows
        self.parts: list[LaunchPart | None] = [None] * rows
        instructions = unit.instructions
        if not any(launch.pooled for launch in unit.launches):
            # Without a worker no other thread contends for the process's lock.
            instructions = [one for one in instructions if not isinstance(one, AcquireLock)]
        self.steps: list[HostStep] = [self._step(instruction) for instruction in instructions]

    def _step(self, instruction: Instruction) -> HostStep:
        if isinstance(instruction, PostLaunch):
            task = self._add_task(instruction.launch)
            return OP_POST, instruction, task, instruction.position, ()
        op = _OP_OF_INSTRUCTION[type(instruction)]
        rows = instruction.rows if isinstance(instruction, WaitForRows) else ()
        return op, instruction, None, instruction.position, rows

    def _add_task(self, launch: OperationLaunch) -> LaunchTask:
        task = LaunchTask(launch, self.queue_numbers)
        for part in launch.parts:
            self.parts[part.row] = part
        for row in (task.row, *task.parts):
            self.tasks[row] = task
        for row in task.after:
            predecessor = self.tasks[row]
            assert predecessor is not None
            predecessor.followers.append(task)
        return task


class MachineTables:
    """A program under a profile, as lists by row.

    - ``kind``, ``channel``, ``box``, …: the columns of `LinkedProgram` of the same names.
    - ``rank_of``: the rank of a row; ``base``: the first row of a rank.
    - ``steps``: the host steps of each rank.
    - ``task_of``: the launch of a row, or of a batch's part; ``part_of``: the part of a row.
    - ``locked``: by rank, whether its host shares the process's lock with a worker.
    - ``queues_per_rank``: the largest number of queues with workers of any rank.
    """

    def __init__(
        self, program: Program | LinkedProgram, profile: BackendProfile | None = None
    ) -> None:
        if isinstance(program, LinkedProgram):
            linked = program
        else:
            assert profile is not None
            linked = LinkedProgram(program, profile)
        self.linked = linked
        self.program = linked.program
        self.profile = linked.profile
        self.base = linked.base
        for name in _COLUMNS:
            setattr(self, name, getattr(linked, name).tolist())
        self.rank_of: list[int] = linked.rank.tolist()
        self.kind: list[int]
        self.channel: list[int]
        self.box: list[int]
        self.peer: list[int]
        self.instance: list[int]
        self.nbytes: list[int]
        self.signature: list[int]
        self.tag: list[int]
        self.group: list[int]
        self.members = linked.members
        self.open_boxes = frozenset(linked.open_boxes.tolist())
        self.lock = self.profile.lock
        self.detects_peer_death = self.profile.peer_death == "raises"
        self._prepare_steps(linked)
        self._calls: dict[int, ResolvedCall] = {}
        self._splits: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.collective_needs = CollectiveNeeds(linked)
        self.per_rank_needs = self.collective_needs.per_rank_needs

    def _prepare_steps(self, linked: LinkedProgram) -> None:
        codes = self.program.codes
        by_unit = {id(u): _UnitTasks(u, codes[u.code].offsets[-1]) for u in linked.units}
        self.queues_per_rank = max((len(one.queue_numbers) for one in by_unit.values()), default=0)
        self.steps: list[list[HostStep]] = []
        self.task_of: list[LaunchTask | None] = []
        self.part_of: list[LaunchPart | None] = []
        self.locked: list[bool] = []
        for rank, unit in enumerate(linked.unit_of):
            tasks = by_unit[id(unit)]
            self.steps.append(tasks.steps)
            has_rows = linked.base[rank] < linked.base[rank + 1]
            if has_rows:  # else the rank is folded away: another rank represents it
                self.task_of += tasks.tasks
                self.part_of += tasks.parts
            self.locked.append(self.lock and bool(tasks.queue_numbers))
            if len(unit.ranks) == 1:  # only such units create groups (see `KeyedRendezvous`)
                self._assign_created_groups(rank, tasks.steps)

    def _assign_created_groups(self, rank: int, steps: list[HostStep]) -> None:
        """Set the group of each new_group row to the group that the call creates."""
        for _, _, task, _, _ in steps:
            if task is None:
                continue
            part = task.launch.parts[0]
            if part.keyed is not None and part.call.op == "new_group":
                call = self.program.resolve(rank, part.call)
                self.group[self.base[rank] + part.row] = created_group_ids(self.program, call)[0]

    # --- what a row is ---
    def part(self, row: int) -> LaunchPart:
        """The part of a row, which must have one."""
        found = self.part_of[row]
        assert found is not None
        return found

    def task(self, row: int) -> LaunchTask:
        """The launch of a row, which must have one."""
        found = self.task_of[row]
        assert found is not None
        return found

    def is_launch(self, row: int) -> bool:
        """Whether the row is a launch's own: a batch that is one launch, or a single part."""
        task = self.task_of[row]
        return task is not None and self.base[self.rank_of[row]] + task.row == row

    def code_call(self, row: int) -> CodeCall:
        """The call of a row, as in its rank's code."""
        return self.part(row).call

    def call(self, row: int) -> ResolvedCall:
        """The row's resolved call; cached, because differing calls are compared repeatedly."""
        if row not in self._calls:
            self._calls[row] = self.program.resolve(self.rank_of[row], self.part(row).call)
        return self._calls[row]

    def splits(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Elements that a pairwise operation sends to, and receives from, each group rank."""
        if row not in self._splits:
            call = self.call(row)
            sent, received = AllToAllCollective.sent(call), AllToAllCollective.received(call)
            self._splits[row] = sent, received
        return self._splits[row]

    # --- what a row needs ---
    @cached_property
    def fits_buffer(self) -> list[bool]:
        """By row: a send that the backend buffers if nothing else fills its window."""
        nbytes, tag = self.linked.nbytes, self.linked.tag
        sends = np.flatnonzero(self.linked.kind == PartKind.SEND)
        sizes = sorted_unique(nbytes[sends])
        credit, options = self.profile.credit, self.program.options
        is_free = np.array([credit(int(n), 0, options) for n in sizes.tolist()], dtype=np.bool_)
        fits = np.zeros(self.linked.rows, dtype=np.bool_)
        if is_free.any():
            fits[sends] = is_free[np.searchsorted(sizes, nbytes[sends])]
        # A signal pad's cell holds one signal, whatever the backend buffers.
        fits[sends[tag[sends] >= FIRST_SIGNAL_TAG]] = True
        return list(fits.tolist())

    @cached_property
    def buffers_sends(self) -> bool:
        """Whether any send may complete before its receive is posted."""
        return any(self.fits_buffer)

    @cached_property
    def receive_channels(self) -> dict[tuple[int, int, int], tuple[int, ...]]:
        """The channels of the receives of each direction: (group, receiving rank, peer)."""
        receives = np.flatnonzero(self.linked.kind == PartKind.RECEIVE).tolist()
        channels: dict[tuple[int, int, int], dict[int, None]] = {}
        for row in receives:
            direction = (self.group[row], self.rank_of[row], self.peer[row])
            channels.setdefault(direction, {})[self.channel[row]] = None
        return {direction: tuple(found) for direction, found in channels.items()}

    @cached_property
    def may_mismatch(self) -> frozenset[int]:
        """Instances of collectives whose calls may differ."""
        differing, uneven = suspect_instances(self.linked)
        return frozenset(differing.tolist()) | frozenset(uneven.tolist())

    @cached_property
    def may_finish_early(self) -> frozenset[int]:
        """Rows of collectives in which some members may finish before all have arrived."""
        return frozenset(self.collective_needs.partial_wait_rows.tolist())

    def root(self, row: int) -> int:
        """The root of a row's collective; 0 if it has none."""
        return max(int(self.linked.root[row]), 0)

    def needs(self, row: int) -> tuple[int, ...]:
        """The ranks that must have arrived before a collective's row is done."""
        needed = self.collective_needs.of(row)
        return self.members[self.instance[row]] if needed is None else needed

    def contact(self, row: int, other: int) -> Contact | None:
        """When a collective's row uses the connection with another member."""
        members = self.members[self.instance[row]]
        me, peer = group_rank_in(members, self.rank_of[row]), group_rank_in(members, other)
        op = self.part(row).call.op
        return self.profile.contact(op, len(members), self.root(row), me, peer)

    def meetings(self, rank: int, rendezvous: AwaitRendezvous) -> list[tuple[int, tuple[int, ...]]]:
        """(instance, ranks that ``rank`` expects there) for each instance of a rendezvous."""
        keyed = rendezvous.keyed
        own_members = keyed.members if keyed is not None else ()
        instances = (self.linked.rendezvous_of[rank][number] for number in rendezvous.numbers)
        return [(instance, own_members or self.members[instance]) for instance in instances]


def group_rank_in(members: tuple[int, ...], rank: int) -> int:
    """The group rank of a member; constant time for the world."""
    if rank < len(members) and members[rank] == rank:
        return rank
    return members.index(rank)


def is_member(ranks: tuple[int, ...], rank: int) -> bool:
    """Whether ``rank`` is among ``ranks``; constant time for the world."""
    return (rank < len(ranks) and ranks[rank] == rank) or rank in ranks
