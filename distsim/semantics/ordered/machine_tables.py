"""The static half of the state machine: a linked program as plain lists by row, and its
instructions ready to be stepped through.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property

import numpy as np

from distsim.backends.profile import BackendProfile
from distsim.common.arrays import sorted_unique
from distsim.operations.all_to_all_barrier import AllToAllCollective
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.one_sided import FIRST_SIGNAL_TAG
from distsim.program.code import CodeCall
from distsim.program.model import Program
from distsim.semantics.form.completion import CollectiveNeeds
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

#: Kinds of step.
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


class LaunchTask:
    """A launch as the machine runs it. Rows count from the rank's first.

    ``parts``: rows. ``queue``: which of the rank's queues with workers it takes one of, -1 for
    none; ``width``: how many there are. ``followers``: what starts only after it. ``plain``: one
    part that starts at once. ``locks``: it takes the process's lock.
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

    def __init__(self, launch: OperationLaunch, queues: dict[Hashable, int]) -> None:
        self.launch, self.row, self.after = launch, launch.row, launch.after
        self.parts = tuple(part.row for part in launch.parts)
        self.unit = launch.is_unit
        self.queue, self.width = -1, 0
        if launch.queue is not None and launch.queue.width > 0:
            self.queue, self.width = (
                queues.setdefault(launch.queue.key, len(queues)),
                launch.queue.width,
            )
        self.plain = not (self.after or self.unit or self.queue >= 0)
        self.locks = self.queue < 0 and launch.parts[0].kind is not PartKind.WORK
        self.followers: list[LaunchTask] = []


#: A step of a host: its kind, the instruction, the task of a `PostLaunch`, the call's position, and
#: the rows that it waits for.
HostStep = tuple[int, Instruction, LaunchTask | None, int, tuple[int, ...]]


class _UnitTasks:
    """A unit's steps, and its tasks and parts by row counted from the rank's first."""

    def __init__(self, unit: CompilationUnit, rows: int) -> None:
        self.queues: dict[Hashable, int] = {}
        self.tasks: list[LaunchTask | None] = [None] * rows
        self.parts: list[LaunchPart | None] = [None] * rows
        pooled = any(
            launch.pooled for launch in unit.launches
        )  # else nobody contends for the process's lock
        self.steps: list[HostStep] = [
            self._step(one)
            for one in unit.instructions
            if pooled or not isinstance(one, AcquireLock)
        ]

    def _step(self, instruction: Instruction) -> HostStep:
        if not isinstance(instruction, PostLaunch):
            rows = instruction.rows if isinstance(instruction, WaitForRows) else ()
            return (
                _OP_OF_INSTRUCTION[type(instruction)],
                instruction,
                None,
                instruction.position,
                rows,
            )
        task = LaunchTask(instruction.launch, self.queues)
        for part in instruction.launch.parts:
            self.parts[part.row] = part
        for row in (task.row, *task.parts):
            self.tasks[row] = task
        for row in task.after:
            before = self.tasks[row]
            assert before is not None
            before.followers.append(task)
        return OP_POST, instruction, task, instruction.position, ()


class MachineTables:
    """A program under a profile, as lists by row. ``steps``: of each rank. ``task_of``: the launch
    of a row, or of a batch's part. ``locked``: ranks whose hosts share a lock with a worker."""

    def __init__(
        self, program: Program | LinkedProgram, profile: BackendProfile | None = None
    ) -> None:
        if isinstance(program, LinkedProgram):
            linked = program
        else:
            assert profile is not None
            linked = LinkedProgram(program, profile)
        self.linked, self.program, self.profile, self.base = (
            linked,
            linked.program,
            linked.profile,
            linked.base,
        )
        for name in (
            "kind",
            "channel",
            "box",
            "peer",
            "instance",
            "nbytes",
            "signature",
            "tag",
            "group",
        ):
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
        self.lock, self.detects_peer_death = self.profile.lock, self.profile.peer_death == "raises"
        self._compile(linked)
        self._calls: dict[int, ResolvedCall] = {}
        self._cuts: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.wants = CollectiveNeeds(linked)
        self.per_rank_needs = self.wants.per_rank_needs

    def _compile(self, linked: LinkedProgram) -> None:
        program = self.program
        compiled = {id(u): _UnitTasks(u, program.codes[u.code].offsets[-1]) for u in linked.units}
        self.most_queues = max((len(one.queues) for one in compiled.values()), default=0)
        self.steps: list[list[HostStep]] = []
        self.task_of: list[LaunchTask | None] = []
        self.part_of: list[LaunchPart | None] = []
        self.locked: list[bool] = []
        for rank, unit in enumerate(linked.unit_of):
            one = compiled[id(unit)]
            self.steps.append(one.steps)
            if linked.base[rank] < linked.base[rank + 1]:  # its calls are there
                self.task_of += one.tasks
                self.part_of += one.parts
            self.locked.append(self.lock and bool(one.queues))
            for step in one.steps if len(unit.ranks) == 1 else ():
                if step[2] is not None and step[2].launch.parts[0].gathering is not None:
                    self._name_group(rank, step[2].launch.parts[0])

    def _name_group(self, rank: int, part: LaunchPart) -> None:
        """Making a group is about the group that is made."""
        if part.call.op == "new_group":
            self.group[self.base[rank] + part.row] = created_group_ids(
                self.program, self.program.resolve(rank, part.call)
            )[0]

    # --- what a row is ---
    def part(self, row: int) -> LaunchPart:
        found = self.part_of[row]
        assert found is not None
        return found

    def task(self, row: int) -> LaunchTask:
        found = self.task_of[row]
        assert found is not None
        return found

    def is_launch(self, row: int) -> bool:
        """The row is a launch's own: a batch that is one, or a single part."""
        task = self.task_of[row]
        return task is not None and self.base[self.rank_of[row]] + task.row == row

    def code_call(self, row: int) -> CodeCall:
        return self.part(row).call

    def call(self, row: int) -> ResolvedCall:
        """Resolved once: calls that differ are compared with every one that comes later."""
        if row not in self._calls:
            self._calls[row] = self.program.resolve(self.rank_of[row], self.part(row).call)
        return self._calls[row]

    def cut(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a pairwise operation: elements for each group rank, and from each; counted once."""
        if row not in self._cuts:
            call = self.call(row)
            self._cuts[row] = AllToAllCollective.sent(call), AllToAllCollective.received(call)
        return self._cuts[row]

    # --- whom a collective needs ---
    @cached_property
    def fits(self) -> list[bool]:
        """Of each row: a send that the back end buffers, if nothing else fills its window."""
        sends = np.flatnonzero(self.linked.kind == PartKind.SEND)
        sizes = sorted_unique(self.linked.nbytes[sends])
        credit, options = self.profile.credit, self.program.options
        free = np.array([credit(int(n), 0, options) for n in sizes.tolist()], dtype=np.bool_)
        found = np.zeros(self.linked.rows, dtype=np.bool_)
        if free.any():
            found[sends] = free[np.searchsorted(sizes, self.linked.nbytes[sends])]
        found[sends[self.linked.tag[sends] >= FIRST_SIGNAL_TAG]] = True
        return list(found.tolist())

    @cached_property
    def buffers(self) -> bool:
        """Some send may run ahead of its receive."""
        return any(self.fits)

    @cached_property
    def suspects(self) -> frozenset[int]:
        """Instances whose calls may differ."""
        return frozenset(
            number for found in suspect_instances(self.linked) for number in found.tolist()
        )

    @cached_property
    def early_rows(self) -> frozenset[int]:
        """Rows of collectives whose operation may let some members go before all have come."""
        return frozenset(self.wants.early.tolist())

    def root(self, row: int) -> int:
        return max(int(self.linked.root[row]), 0)

    def needs(self, row: int) -> tuple[int, ...]:
        """The ranks that must have come before a row is done."""
        found = self.wants.of(row)
        return self.members[self.instance[row]] if found is None else found

    def meetings(self, rank: int, meet: AwaitRendezvous) -> list[tuple[int, tuple[int, ...]]]:
        """The instances of a rank's meet, and whom it expects there."""
        own = meet.gathering.members if meet.gathering is not None else ()
        instances = (self.linked.meets[rank][number] for number in meet.numbers)
        return [(instance, own or self.members[instance]) for instance in instances]


def group_rank_in(members: tuple[int, ...], rank: int) -> int:
    """The group rank of a member."""
    return rank if rank < len(members) and members[rank] == rank else members.index(rank)


def is_member(ranks: tuple[int, ...], rank: int) -> bool:
    """Whether a rank is among some; of all ranks of a world that is known at once."""
    return (rank < len(ranks) and ranks[rank] == rank) or rank in ranks
