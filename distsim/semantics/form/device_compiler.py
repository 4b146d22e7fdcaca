"""Compiling a code where host and device are apart: nccl.

The host hands launches to streams and goes on. A launch starts when all of ``after`` have finished:
what its stream holds (streams run in order), what its communicator holds (N3: issue order, whatever
the stream), what its stream was told to wait for.
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

#: What the kernels of collectives connect.
KERNEL_STAGE = "kernels"
#: The default stream: compute and blocking collectives run on it unless they name another.
CURRENT_STREAM = ExecutionQueue("current", name="current", is_stream=True)


def stream_of(name: object) -> ExecutionQueue:
    """The stream of a call's ``queue``, or of the one that `wait_stream` names."""
    return _named_stream(str(name)) if name else CURRENT_STREAM


@cache
def _named_stream(name: str) -> ExecutionQueue:
    return ExecutionQueue(("stream", name), name=name, is_stream=True)


class DeviceCompiler(UnitCompiler):
    """See the module.

    ``last`` is the newest row of a stream or communicator, by the queue's key. ``joins`` is what a
    stream must wait for besides: the newest row of each communicator, for that one ends after those
    before it. ``issued``: the newest of a communicator by its key.
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
        self.one_queue = bool(
            options.get("one_queue")
        )  # not a user's option: asks what N12 may come to
        self.serial = bool(options.get("serial"))  # nor is this: the host waits for each launch
        self.is_connected = bool(options.get("connected"))  # nor this: everything was used before
        self.last: dict[Hashable, int] = {}
        self.issued: dict[Hashable, int] = {}
        self.comms: dict[tuple[int, int], ExecutionQueue] = {}  # by slot and port
        self.joins: dict[Hashable, dict[Hashable, int]] = {}
        self.comm_of: dict[int, Hashable] = {}
        self.met: set[Hashable] = set()
        self.connected: set[tuple[Hashable, str, int]] = (
            set()
        )  # communicator, stage, and the other rank or the root
        self.contended: dict[
            int, bool
        ] = {}  # of a group that the ranks do not agree on: do several claim one place
        self.host_waits: set[int] = set()  # rows whose wait blocks the host
        self.newest: dict[Hashable, int] = {}  # by the stream that a launch runs on

    def finish(self, position: int) -> None:
        """The program's end, as destroy_process_group, waits for the device."""
        self.synchronize(position)
        super().finish(position)

    # --- communicators ---
    def group_comm(self, slot: int) -> ExecutionQueue:
        """The communicator of a group of the code."""
        comm = self.comms.get((slot, -1))
        if comm is None:
            key = ("communicator", int(self.value(self.code.groups[slot])))
            comm = self.comms[slot, -1] = ExecutionQueue(key, group=slot, is_stream=True)
        return comm

    def message_comm(self, call: CodeCall) -> ExecutionQueue:
        """N7: eager init: the group's communicator. Lazy: one of two ranks for each unordered pair
        of a group.
        """
        if self.eager:
            return self.group_comm(call.group)
        comm = self.comms.get((call.group, call.port))
        if comm is None:
            peer = self.peer(call)
            key = ("pair", self.group_id(call), min(self.rank, peer), max(self.rank, peer))
            comm = self.comms[call.group, call.port] = ExecutionQueue(
                key, group=call.group, port=call.port, is_stream=True
            )
        return comm

    def first_use(self, position: int, comm: ExecutionQueue) -> None:
        """N8: the first use of a communicator is a rendezvous of its members, on the host. Eager
        init has made them all.
        """
        if comm.key in self.met:
            return
        self.met.add(comm.key)
        group = int(self.value(self.code.groups[comm.group]))
        if comm.port < 0 and group in self.alias:
            others = tuple(r for r in self.program.groups[group].ranks if r != self.rank)
            self.out.append(
                BlockForever(
                    position, others, "the ranks made different groups", self.contended[group]
                )
            )
        elif not self.eager:
            self.meet(
                AwaitRendezvous(
                    position, spots=(ConnectionPoint(comm.group, comm.port),), of_group=group
                )
            )

    def connect(
        self, position: int, comm: ExecutionQueue, spots: Iterable[tuple[ConnectionPoint, int]]
    ) -> None:
        """N9: what a launch needs on its communicator and nobody has connected yet, both sides
        connect in the call, on the host. ``spots``: with the other rank or the root. Who made
        another group than the others stands still before."""
        fresh = []
        for spot, other in spots:
            key = (comm.key, spot.stage, other)
            if key not in self.connected:
                self.connected.add(key)
                fresh.append(spot)
        group = int(self.value(self.code.groups[comm.group]))
        if fresh and group not in self.alias and not self.is_connected:
            self.meet(AwaitRendezvous(position, spots=tuple(fresh), of_group=group))

    def connect_messages(
        self, position: int, comm: ExecutionQueue, calls: Iterable[CodeCall]
    ) -> None:
        """The directions of messages: each is connected by its first message, or by a collective
        that travelled as messages. A message to oneself needs none."""
        if (comm.key, ALL_PAIRS, -1) in self.connected:
            return
        kind = "group" if comm.port < 0 else "own"
        wanted = [
            (call, self.peer(call))
            for call in calls
            if not OPERATIONS[call.op].signals and call.group >= 0
        ]
        self.connect(
            position,
            comm,
            [
                (
                    ConnectionPoint(
                        comm.group, call.port, f"{kind} {OPERATIONS[call.op].direction}"
                    ),
                    peer,
                )
                for call, peer in wanted
                if peer >= 0
                and peer != self.rank
                and not self._is_rooted(comm, OPERATIONS[call.op].direction, peer)
            ],
        )

    def _is_rooted(self, comm: ExecutionQueue, way: str | None, peer: int) -> bool:
        """A gather or scatter has connected this direction: its root is one of the two."""
        to_root, from_root = (self.rank, peer) if way == "recv" else (peer, self.rank)
        return (comm.key, TO_ROOT, to_root) in self.connected or (
            comm.key,
            FROM_ROOT,
            from_root,
        ) in self.connected

    def connect_collective(self, position: int, comm: ExecutionQueue, call: CodeCall) -> None:
        """Kernels of collectives have connections of their own (one algorithm is taken to
        connect for all); what NCCL sends as messages needs those of the pairs, a root's in one
        direction."""
        stage = self.profile.by_messages.get(call.op)
        if stage is None:
            self.connect(position, comm, [(ConnectionPoint(comm.group, stage=KERNEL_STAGE), -1)])
        elif (comm.key, ALL_PAIRS, -1) not in self.connected and not self._is_pair_connected(
            comm, stage, call
        ):
            root = call.fields.get("root", -1) if stage != ALL_PAIRS else -1
            self.connect(
                position,
                comm,
                [(ConnectionPoint(comm.group, stage=stage, root=root), int(self.value(root)))],
            )

    def _is_pair_connected(self, comm: ExecutionQueue, stage: str, call: CodeCall) -> bool:
        """Of a group of two: messages have connected what the collective needs."""
        members = self.program.groups[int(self.value(self.code.groups[comm.group]))].ranks
        if len(members) != 2:
            return False
        other = members[0] if members[1] == self.rank else members[1]
        is_root = int(self.value(call.fields.get("root", -1))) == self.rank
        ways = (
            ("send", "recv")
            if stage == ALL_PAIRS
            else ("recv" if is_root == (stage == TO_ROOT) else "send",)
        )
        return all((comm.key, f"group {way}", other) in self.connected for way in ways)

    # --- streams ---
    def held(self, stream: Hashable, after: set[int]) -> None:
        """Add what a stream holds: its newest launch and what it must wait for. All of them done:
        all before them done.
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
        """Enqueue on a stream. What runs on a communicator starts after what the stream that issues
        it holds (N2, an event).
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
        self._joins(stream.key, self.comm_of[row], row)

    def _joins(self, stream: Hashable, queue: Hashable, row: int) -> None:
        joined = self.joins.setdefault(stream, {})
        joined[queue] = max(row, joined.get(queue, row))

    def wait_stream(self, position: int, call: CodeCall) -> None:
        """`stream.wait_stream(other)`: an event of what the other holds now."""
        stream, other = (
            stream_of(call.fields.get("queue")).key,
            stream_of(call.fields.get("stream")).key,
        )
        for queue, row in self.joins.get(other, {}).items():
            self._joins(stream, queue, row)
        if other in self.last:
            self._joins(stream, other, self.last[other])

    # --- kinds of call ---
    def message(self, position: int, call: CodeCall) -> None:
        """N2: messages run on an internal stream; a blocking one makes the stream that is current
        wait for it.
        """
        issuer = stream_of(call.fields.get("queue"))
        part = self.message_part(position, -1, call, batched=False)
        if OPERATIONS[
            call.op
        ].signals:  # a kernel that spins on the pad; no communicator knows of it
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
        """N2: async on the group's stream, blocking on the one that is current. N14: a barrier
        stops the host.
        """
        comm, issuer = self.group_comm(call.group), stream_of(call.fields.get("queue"))
        self.first_use(position, comm)
        self.connect_collective(position, comm, call)
        part = self.collective_part(position, call)
        self.launch(position, part.row, (part,), comm if call.is_async else issuer, comm, issuer)
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
        """A blocking call of an internal stream's launch: the stream that issued it joins; under
        blocking_wait the host.
        """
        self.join(row, issuer)
        if self.blocking_wait:
            self.out.append(WaitForRows(position, (row,)))

    def requests(self, position: int) -> tuple[int, ...]:
        return (self.row(position),)

    def wait(self, position: int, call: CodeCall) -> None:
        """N1: the stream that is current waits, not the host (but for a barrier, and under
        TORCH_NCCL_BLOCKING_WAIT).
        """
        targets = [k for k in [position - d for d in call.waits] if k in self.made]
        rows = [self.row(k) for k in targets]
        for row in rows:
            self.join(row, stream_of(call.fields.get("queue")))
        on_host = tuple([row for row in rows if self.blocking_wait or row in self.host_waits])
        waited = tuple(
            [self.row(k, i) for k in targets for i in range(-1, len(self.code.calls[k].parts))]
        )
        self.out.append(WaitForRows(position, on_host, waited))

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

    def synchronize(self, position: int) -> None:
        self.out.append(SyncDevice(position, tuple(sorted(self.newest.values()))))

    def group(self, position: int, call: CodeCall) -> None:
        if call.op == "destroy_process_group":
            self.synchronize(position)
            return
        if call.op == "init_process_group":  # the world is made anew
            self.forget({0})
        super().group(position, call)

    def forget(self, groups: set[int]) -> None:
        """Groups that are gone or made anew (0: all): their next use makes communicators and
        connections anew.
        """
        self.met = {key for key in self.met if not _belongs_to_groups(key, groups)}
        self.connected = {key for key in self.connected if not _belongs_to_groups(key[0], groups)}

    def new_group(self, position: int, call: CodeCall, resolved: ResolvedCall) -> None:
        """2.3: lazily made communicators find each other in the store by the group's name, at
        first use. Names that stand for different groups on different ranks give "wrong members
        or hang" where two ranks claim one place: undefined; else the group's first use waits in
        the store."""
        unlike = self.shared.unlike.get((self.rank, position))
        if unlike is not None and unlike.lost and not self.eager:
            self.contended |= dict.fromkeys(
                created_group_ids(self.program, resolved), unlike.contended
            )
            own = -1 - unlike.name  # a name of its own, which the other members don't have
            self.alias |= {
                made: RankGroup(own if resolved.local_sync else made, resolved.name, unlike.holders)
                for made in created_group_ids(self.program, resolved)
            }
        self.forget(
            set(created_group_ids(self.program, resolved)) - {0}
        )  # in a loop: the same group, with a communicator anew
        super().new_group(position, call, resolved)


def _belongs_to_groups(communicator: Hashable, groups: set[int]) -> bool:
    """Is a communicator, by its queue's key, one of these groups (0: of any)?"""
    return 0 in groups or (isinstance(communicator, tuple) and communicator[1] in groups)
