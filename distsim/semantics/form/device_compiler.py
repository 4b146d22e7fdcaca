"""Compiles a code for a backend whose host only enqueues on a device: nccl.

Key idea: the host posts launches to streams and continues. A launch starts when all launches in its
``after`` have finished: the previous one of its stream (streams run in order), the previous one of
its communicator (N3: in issue order, on whatever stream), and those that its stream was made to
wait for. So all ordering by streams and events is resolved here, and drivers know only ``after``.

The rules N1, N2, … are described in docs/explanation/semantics.md.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cache

from distsim.backends.profile import ALL_PAIRS, FROM_ROOT, TO_ROOT, BackendProfile
from distsim.operations.core.resolved_call import RankGroup, ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall
from distsim.program.model import Program
from distsim.semantics.form.compiler import CompilationContext, UnitCompiler
from distsim.semantics.form.group_creation import created_group_ids
from distsim.semantics.form.instructions import (
    KIND_COLLECTIVE,
    AwaitRendezvous,
    BlockForever,
    CompilationUnit,
    ConnectionPoint,
    ExecutionQueue,
    LaunchPart,
    OperationLaunch,
    PostLaunch,
    SyncDevice,
    WaitForRows,
)

#: The stage of connections that kernels of collectives use.
KERNEL_STAGE = "kernels"
#: The default stream: compute and blocking collectives run on it unless they name another stream.
CURRENT_STREAM = ExecutionQueue("current", name="current", is_stream=True)


def stream_of(name: object) -> ExecutionQueue:
    """The stream that a call's field names; the current one if it names none."""
    return _named_stream(str(name)) if name and name != "current" else CURRENT_STREAM


@cache
def _named_stream(name: str) -> ExecutionQueue:
    return ExecutionQueue(("stream", name), name=name, is_stream=True)


class DeviceCompiler(UnitCompiler):
    """Compiles one unit for a device.

    Streams, by key:

    - ``last``: the newest launch that anything later on the stream must wait for.
    - ``newest``: the newest launch that runs on the stream.
    - ``joins``: further launches that the stream must wait for: the newest of each communicator,
      because it ends after those before it.

    Communicators:

    - ``comms``: by group slot and endpoint of the code (endpoint -1: the group's own).
    - ``issued``: by key, the newest launch. ``comm_of``: by row, the key.
    - ``initialized``: keys of communicators that are created.
    - ``connected``: (key, stage, the other rank or the root) of connections that are made.
    - ``contended``: by group that the ranks do not agree on, whether several ranks claim one place.

    ``host_waits``: rows whose wait blocks the host.
    """

    def __init__(
        self,
        program: Program,
        profile: BackendProfile,
        unit: CompilationUnit,
        shared: CompilationContext,
    ) -> None:
        super().__init__(program, profile, unit, shared)
        options = self.program.options
        self.eager = options.get("init") == "eager"
        self.blocking_wait = bool(options.get("blocking_wait"))
        self.launch_order = bool(options.get("launch_order_implicit"))
        # The next three are not options of users. They answer what would happen if all collectives
        # shared one queue (N12), if the host waited for each launch, and if everything had been
        # used, and so connected, before.
        self.one_queue = bool(options.get("one_queue"))
        self.serial = bool(options.get("serial"))
        self.is_connected = bool(options.get("connected"))
        self.last: dict[Hashable, int] = {}
        self.newest: dict[Hashable, int] = {}
        self.joins: dict[Hashable, dict[Hashable, int]] = {}
        self.comms: dict[tuple[int, int], ExecutionQueue] = {}
        self.issued: dict[Hashable, int] = {}
        self.comm_of: dict[int, Hashable] = {}
        self.initialized: set[Hashable] = set()
        self.connected: set[tuple[Hashable, str, int]] = set()
        self.contended: dict[int, bool] = {}
        self.host_waits: set[int] = set()

    def end_program(self, position: int) -> None:
        """The program's end waits for the device.

        This assumes that the program calls destroy_process_group, whose ``shutdown`` waits. Without
        that call the destructor aborts the communicators and does not wait
        (``~ProcessGroupNCCL``: "we can use abort instead of destroy to make the destruction
        non-blocking"). Then peers that still need the rank block until the watchdog's timeout.
        """
        self.synchronize(position)
        super().end_program(position)

    def exit(self, position: int, code: int) -> None:
        """``sys.exit(0)`` is the same as the end; an error code means that the exit is abrupt."""
        if not code:
            self.synchronize(position)
        super().exit(position, code)

    # --- communicators ---
    def group_comm(self, slot: int) -> ExecutionQueue:
        """The communicator of a group of the code."""
        comm = self.comms.get((slot, -1))
        if comm is None:
            key = ("communicator", int(self.value(self.code.groups[slot])))
            comm = self.comms[slot, -1] = ExecutionQueue(key, group=slot, is_stream=True)
        return comm

    def message_comm(self, call: CodeCall) -> ExecutionQueue:
        """N7: the group's communicator after eager init, else one for each pair of its ranks."""
        if self.eager:
            return self.group_comm(call.group)
        comm = self.comms.get((call.group, call.endpoint))
        if comm is None:
            peer = self.peer(call)
            key = ("pair", self.group_id(call), min(self.rank, peer), max(self.rank, peer))
            comm = self.comms[call.group, call.endpoint] = ExecutionQueue(
                key, group=call.group, endpoint=call.endpoint, is_stream=True
            )
        return comm

    def first_use(self, position: int, comm: ExecutionQueue) -> None:
        """N8: the first use of a communicator is a rendezvous of its members, on the host.

        Eager init has created all communicators.
        """
        if comm.key in self.initialized:
            return
        self.initialized.add(comm.key)
        group = int(self.value(self.code.groups[comm.group]))
        if comm.endpoint < 0 and group in self.real_groups:
            others = tuple(r for r in self.program.groups[group].ranks if r != self.rank)
            text = "the ranks made different groups"
            self.out.append(BlockForever(position, others, text, self.contended[group]))
        elif not self.eager:
            point = ConnectionPoint(comm.group, comm.endpoint)
            self.await_rendezvous(AwaitRendezvous(position, points=(point,), of_group=group))

    def connect(
        self, position: int, comm: ExecutionQueue, points: Iterable[tuple[ConnectionPoint, int]]
    ) -> None:
        """N9: both sides create the connections that a launch needs, on their hosts, in the call.

        ``points``: each with the other rank or the root. A rank that created another group than the
        others has already hung in `first_use`.
        """
        new_points = []
        for point, other in points:
            key = (comm.key, point.stage, other)
            if key not in self.connected:
                self.connected.add(key)
                new_points.append(point)
        group = int(self.value(self.code.groups[comm.group]))
        if new_points and group not in self.real_groups and not self.is_connected:
            self.await_rendezvous(
                AwaitRendezvous(position, points=tuple(new_points), of_group=group)
            )

    def connect_messages(
        self, position: int, comm: ExecutionQueue, calls: Iterable[CodeCall]
    ) -> None:
        """Connect the directions of messages, each with its first message.

        A collective that was sent as messages may have connected a direction before. A message to
        oneself needs no connection.
        """
        if (comm.key, ALL_PAIRS, -1) in self.connected:
            return
        communicator = "group" if comm.endpoint < 0 else "own"
        points = []
        for call in calls:
            operation = OPERATIONS[call.op]
            if operation.signals or call.group < 0:
                continue
            peer, direction = self.peer(call), operation.direction
            if peer < 0 or peer == self.rank or self._is_rooted(comm, direction, peer):
                continue
            stage = f"{communicator} {direction}"
            points.append((ConnectionPoint(comm.group, call.endpoint, stage), peer))
        self.connect(position, comm, points)

    def _is_rooted(self, comm: ExecutionQueue, direction: str | None, peer: int) -> bool:
        """Whether a gather or scatter with one of the two as root has connected a direction."""
        receiver, sender = (self.rank, peer) if direction == "recv" else (peer, self.rank)
        by_gather = (comm.key, TO_ROOT, receiver) in self.connected
        by_scatter = (comm.key, FROM_ROOT, sender) in self.connected
        return by_gather or by_scatter

    def connect_collective(self, position: int, comm: ExecutionQueue, call: CodeCall) -> None:
        """Connect what a collective needs.

        Kernels have connections of their own; as a simplification, one algorithm connects for all.
        A collective that NCCL sends as messages needs the connections of the pairs; one with a
        root, in one direction only.
        """
        stage = self.profile.by_messages.get(call.op)
        if stage is None:
            self.connect(position, comm, [(ConnectionPoint(comm.group, stage=KERNEL_STAGE), -1)])
            return
        if (comm.key, ALL_PAIRS, -1) in self.connected:
            return
        if self._is_pair_connected(comm, stage, call):
            return
        root = call.fields.get("root", -1) if stage != ALL_PAIRS else -1
        point = ConnectionPoint(comm.group, stage=stage, root=root)
        self.connect(position, comm, [(point, int(self.value(root)))])

    def _is_pair_connected(self, comm: ExecutionQueue, stage: str, call: CodeCall) -> bool:
        """Whether messages have connected what a collective of a group of two needs."""
        members = self.program.groups[int(self.value(self.code.groups[comm.group]))].ranks
        if len(members) != 2:
            return False
        other = members[0] if members[1] == self.rank else members[1]
        is_root = int(self.value(call.fields.get("root", -1))) == self.rank
        directions = ["send", "recv"]
        if stage != ALL_PAIRS:
            receives = is_root == (stage == TO_ROOT)
            directions = ["recv" if receives else "send"]
        return all((comm.key, f"group {way}", other) in self.connected for way in directions)

    # --- streams ---
    def held(self, stream: Hashable, after: set[int]) -> None:
        """Add to ``after`` what a stream holds: its newest launch and those that it must wait for.

        When these have finished, all launches before them have.
        """
        if stream in self.joins:
            after.update(self.joins[stream].values())
        if stream in self.last:
            after.add(self.last[stream])

    def launch(
        self,
        position: int,
        row: int,
        parts: tuple[LaunchPart, ...],
        stream: ExecutionQueue,
        comm: ExecutionQueue | None = None,
        issuer: ExecutionQueue = CURRENT_STREAM,
    ) -> None:
        """Enqueue a launch on a stream.

        A launch on a communicator also starts after what the issuing stream holds (N2: NCCL records
        an event there).
        """
        after: set[int] = set()
        self.held(stream.key, after)
        if comm is not None:
            if issuer is not stream:
                self.held(issuer.key, after)
            if comm.key in self.issued:
                after.add(self.issued[comm.key])
            if self.launch_order or (self.one_queue and parts[0].kind is KIND_COLLECTIVE):
                self.held("launch order", after)
                self.last["launch order"] = row
            self.issued[comm.key] = row
            self.comm_of[row] = comm.key
        self.last[stream.key] = self.newest[stream.key] = row
        self.joins.pop(stream.key, None)
        self.out.append(
            PostLaunch(position, OperationLaunch(row, parts, tuple(sorted(after)), stream))
        )
        if self.serial:
            self.out.append(WaitForRows(position, (row,)))

    def join(self, row: int, stream: ExecutionQueue) -> None:
        """A stream waits for a launch (N1: `work.wait()` joins the stream that is current then)."""
        self._add_join(stream.key, self.comm_of[row], row)

    def _add_join(self, stream: Hashable, queue: Hashable, row: int) -> None:
        joined = self.joins.setdefault(stream, {})
        joined[queue] = max(row, joined.get(queue, row))

    def wait_stream(self, position: int, call: CodeCall) -> None:
        """`stream.wait_stream(other)`: wait for everything that the other stream holds now."""
        stream = stream_of(call.fields.get("queue")).key
        other = stream_of(call.fields.get("stream")).key
        for queue, row in self.joins.get(other, {}).items():
            self._add_join(stream, queue, row)
        if other in self.last:
            self._add_join(stream, other, self.last[other])

    # --- kinds of call ---
    def message(self, position: int, call: CodeCall) -> None:
        """N2: messages run on an internal stream; the current stream waits for blocking ones."""
        issuer = stream_of(call.fields.get("queue"))
        part = self.message_part(position, -1, call, batched=False)
        if OPERATIONS[call.op].signals:
            # A kernel that spins on the signal pad; no communicator is involved.
            self.launch(position, part.row, (part,), issuer)
            return
        comm = self.message_comm(call)
        self.first_use(position, comm)
        self.connect_messages(position, comm, (call,))
        self.launch(position, part.row, (part,), comm, comm, issuer)
        if not OPERATIONS[call.op].nonblocking:
            self.ended(position, part.row, issuer)

    def remote(self, position: int, call: CodeCall) -> None:
        """A kernel on the current stream."""
        part = self.work_part(position, call)
        self.launch(position, part.row, (part,), stream_of(call.fields.get("queue")))

    def collective(self, position: int, call: CodeCall) -> None:
        """N2: async calls run on the group's stream, blocking ones on the current stream.

        N14: a barrier blocks the host.
        """
        comm, issuer = self.group_comm(call.group), stream_of(call.fields.get("queue"))
        self.first_use(position, comm)
        self.connect_collective(position, comm, call)
        part = self.collective_part(position, call)
        stream = comm if call.is_async else issuer
        self.launch(position, part.row, (part,), stream, comm, issuer)
        if call.op == "barrier" or self.blocking_wait:
            self.host_waits.add(part.row)
        if not call.is_async and part.row in self.host_waits:
            self.out.append(WaitForRows(position, (part.row,)))

    def batch(self, position: int, call: CodeCall) -> None:
        """N11: one launch on the group's communicator, one request."""
        if not call.parts:
            return
        comm, issuer = self.group_comm(call.parts[0].group), stream_of(call.fields.get("queue"))
        self.first_use(position, comm)
        self.connect_messages(position, comm, call.parts)
        parts = tuple(
            self.message_part(position, i, one, batched=True) for i, one in enumerate(call.parts)
        )
        self.launch(position, self.row(position), parts, comm, comm, issuer)
        if not call.handled:
            self.ended(position, self.row(position), issuer)

    def ended(self, position: int, row: int, issuer: ExecutionQueue) -> None:
        """A blocking call on an internal stream: the issuing stream waits for it.

        Under blocking_wait the host does, too.
        """
        self.join(row, issuer)
        if self.blocking_wait:
            self.out.append(WaitForRows(position, (row,)))

    def requests(self, position: int) -> tuple[int, ...]:
        """The rows of a request: that of its call."""
        return (self.row(position),)

    def wait(self, position: int, call: CodeCall) -> None:
        """N1: the current stream waits, not the host.

        Exceptions are a barrier, and all calls under TORCH_NCCL_BLOCKING_WAIT.
        """
        awaited = [position - distance for distance in call.waits]
        targets = [target for target in awaited if target in self.made_positions]
        rows = [self.row(target) for target in targets]
        for row in rows:
            self.join(row, stream_of(call.fields.get("queue")))
        on_host = tuple([row for row in rows if self.blocking_wait or row in self.host_waits])
        waited = []
        for target in targets:
            # The row of a call (part -1) precedes those of its parts.
            part_count = len(self.code.calls[target].parts)
            waited += [self.row(target, part) for part in range(-1, part_count)]
        self.out.append(WaitForRows(position, on_host, tuple(waited)))

    def drop(self, position: int, target: int) -> None:
        """N13: dropping a request changes nothing."""

    def work(self, position: int, call: CodeCall) -> None:
        """compute runs on the current stream, on a named one, or on the host; sleep on the host."""
        queue = str(call.fields.get("queue") or "")
        if call.op == "sleep" or queue == "host":
            super().work(position, call)
            return
        part = self.work_part(position, call)
        self.launch(position, part.row, (part,), stream_of(queue))

    def synchronize(self, position: int, stream: str = "") -> None:
        """The host waits for all work of its device, or for what one stream holds."""
        rows = set(self.newest.values())
        if stream:
            rows = set()
            self.held(stream_of(stream).key, rows)
        self.out.append(SyncDevice(position, tuple(sorted(rows))))

    def group(self, position: int, call: CodeCall) -> None:
        """Compile the creation or destruction of a group."""
        if call.op == "destroy_process_group":
            self.synchronize(position)
            return
        if call.op == "init_process_group":  # the world is created again
            self.forget({0})
        super().group(position, call)

    def forget(self, groups: set[int]) -> None:
        """Groups were destroyed or created again (0: all groups).

        Their next use creates communicators and connections again.
        """
        self.initialized = {k for k in self.initialized if not _belongs_to_groups(k, groups)}
        self.connected = {key for key in self.connected if not _belongs_to_groups(key[0], groups)}

    def new_group(self, position: int, call: CodeCall, resolved: ResolvedCall) -> None:
        """2.3: members of a lazily created communicator find each other by the group's name.

        They do so in the store, at first use. If a name means different groups on different ranks,
        the first use of the group waits there. Where two ranks claim one place it is undefined:
        "wrong members or hang".
        """
        created = created_group_ids(self.program, resolved)
        divergent = self.shared.divergent_groups.get((self.rank, position))
        if divergent is not None and divergent.lost and not self.eager:
            self.contended |= dict.fromkeys(created, divergent.contended)
            for group in created:
                # With local synchronization the rank has a name that the other members do not have.
                real_id = -1 - divergent.name if resolved.local_sync else group
                self.real_groups[group] = RankGroup(real_id, resolved.name, divergent.holders)
        # In a loop the call creates the same group again, with a new communicator.
        self.forget(set(created) - {0})
        super().new_group(position, call, resolved)


def _belongs_to_groups(communicator: Hashable, groups: set[int]) -> bool:
    """Whether a communicator, given by its queue's key, is one of ``groups`` (0: of any)."""
    return 0 in groups or (isinstance(communicator, tuple) and communicator[1] in groups)
