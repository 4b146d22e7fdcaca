"""Compiles a code into the instructions of a unit, for backends whose host waits for its requests:
gloo, mpi and the readings of the contract.

Key idea: all ranks of a unit do the same, so the compiler looks at the values of the unit's first
rank only. Every value on which it branches must be part of the unit's key
(`distsim.semantics.form.compilation_units`).

Backends with a device are in `distsim.semantics.form.device_compiler`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from distsim.backends import call_refusal
from distsim.backends.message_matching import ANY_SENDER
from distsim.backends.profile import SHAPE_CHECKED_OPS, BackendProfile, InvalidCallReaction
from distsim.findings.final_state import RankEndStatus
from distsim.operations.core.resolved_call import RankGroup, ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.code import BufferVector, CodeCall, SharedCode, Vec, at_row
from distsim.program.model import Program, RankFault
from distsim.semantics.form.group_creation import (
    DivergentNewGroup,
    created_group_ids,
    new_group_error,
)
from distsim.semantics.form.instructions import (
    KIND_COLLECTIVE,
    KIND_RECEIVE,
    KIND_SEND,
    KIND_WORK,
    AcquireLock,
    AwaitRendezvous,
    BlockForever,
    CompilationUnit,
    DropRequest,
    ExecutionQueue,
    ExitRank,
    Instruction,
    KeyedRendezvous,
    LaunchPart,
    OperationLaunch,
    PostLaunch,
    WaitForRows,
)

#: Operations that only take time and have no partners.
LOCAL_WORK_OPS = ("compute", "assign", "sleep")
#: Kinds of calls that involve other ranks.
_COMMUNICATING_KINDS = ("p2p", "collective", "remote", "batch", "group")
#: The name of the method that compiles calls of a kind, and of an operation.
_METHOD_OF_KIND = {
    "p2p": "message",
    **{kind: kind for kind in ("collective", "remote", "batch", "wait", "group")},
}
_METHOD_OF_OP = {
    op: _METHOD_OF_KIND[row.kind] for op, row in OPERATIONS.items() if row.kind in _METHOD_OF_KIND
}
_METHOD_OF_OP |= {**dict.fromkeys(LOCAL_WORK_OPS, "work"), "wait_stream": "wait_stream"}
#: Findings about calls that break the contract without producing wrong data.
_HARMLESS_FINDINGS = ("DS102", "DS105", "DS108")
#: Faults that end a rank, with the status and the message of its end.
_EXIT_BY_FAULT: dict[str, tuple[RankEndStatus, str]] = {
    "kill": ("killed", "killed by a fault"),
    "exit": ("ended", "exit {} by a fault"),
    "raise": ("raised", "raised by a fault"),
    "fail": ("raised", "raised by a fault"),
}


def exit_by_fault(position: int, kind: str, code: int) -> ExitRank:
    """How a fault ends a rank at one of its calls."""
    status, text = _EXIT_BY_FAULT[kind]
    return ExitRank(position, status, text.format(code))


class CompilationContext:
    """What all units of a compilation share.

    ``refusals``: why the backend refuses a call, by `refusal_key`, so that the profile is asked
    once per key. ``divergent_groups``: the new_group calls that the ranks do not agree on, by
    (rank, position).
    """

    def __init__(self, divergent_groups: dict[tuple[int, int], DivergentNewGroup]) -> None:
        self.refusals: dict[Hashable, str | None] = {}
        self.divergent_groups = divergent_groups


def refusal_key(program: Program, code: SharedCode, row: int, call: CodeCall) -> Hashable:
    """Everything that decides whether a backend refuses a call, for one row of a code's vectors."""
    from_any_source = (
        call.endpoint >= 0 and int(at_row(code.endpoints[call.endpoint].peer, row)) < 0
    )
    inputs, outputs = call.fields.get("inputs") or (), call.fields.get("outputs") or ()
    shapes: tuple[tuple[int, ...], ...] = ()
    if call.op in SHAPE_CHECKED_OPS or from_any_source:
        shapes = tuple(_shape_at(buffer, row) for buffer in (*inputs, *outputs))
    buffers = inputs or outputs
    dtype = buffers[0].dtype if buffers else ""
    group_id = int(at_row(code.groups[call.group], row)) if call.group >= 0 else 0
    group = program.groups[group_id]
    # The world's backend is the profile's own.
    own_backend = group.backend if group.id else None
    return call.op, own_backend, dtype, call.fields.get("reduce_op"), from_any_source, shapes


def _shape_at(buffer: BufferVector, row: int) -> tuple[int, ...]:
    return tuple(int(at_row(size, row)) for size in buffer.shape)


class _CallProblem(NamedTuple):
    """Why a call may not be made (``text`` starts with a finding's code), and what follows."""

    reaction: InvalidCallReaction
    text: str


class UnitCompiler:
    """Compiles one unit under one profile. `run` fills in the unit's instructions.

    - ``alias``: by group id, the group that it is really connected to, if the ranks disagree.
    - ``ignored``: positions of calls that torch only warns about.
    - ``odd``: the current call breaks the contract, and the backend accepts it.
    - ``open_handles``: positions of messages whose handle the program still holds.
    - ``made``: positions of the calls that this unit makes.
    - ``meets``: the number of rendezvous so far; ``numbers``: of calls, by group or by kind.
    - ``apart``: the process group that start-up gave this rank is not that of the others.
    """

    def __init__(
        self,
        program: Program,
        profile: BackendProfile,
        unit: CompilationUnit,
        shared: CompilationContext,
    ) -> None:
        self.program, self.profile, self.unit, self.shared = program, profile, unit, shared
        self.rank = unit.ranks[0]
        self.code, self.vector_row = program.codes[unit.code], unit.vector_rows[0]
        self.alias: dict[int, RankGroup] = {}
        self.ignored: set[int] = set()
        self.odd = False
        self.open_handles: dict[int, None] = {}
        self.out: list[Instruction] = []
        self.numbers: dict[Hashable, int] = {}
        self.rendezvous_count = 0
        self.has_started = self.apart = False
        self.made: set[int] = set()
        self._group_ids: dict[int, int] = {}  # by group slot of the code
        self._queues: dict[int, ExecutionQueue] = {}  # of collectives, by group slot
        # Calls repeat in loops, so what is known of a call object is kept by its id.
        self._refused: dict[int, str | None] = {}
        self._valid: set[int] = set()
        self.fatal_faults = {
            fault.position: fault for fault in program.faults if self._ends_this_rank(fault)
        }

    def _ends_this_rank(self, fault: RankFault) -> bool:
        """Whether a fault ends this rank at one of its calls, not at a time."""
        if fault.rank != self.rank or fault.at_ns is not None:
            return False
        return fault.kind in _EXIT_BY_FAULT

    def run(self) -> CompilationUnit:
        """Compile all calls of the unit."""
        self._compile_all()
        self.unit.instructions = self.out
        return self.unit

    def _compile_all(self) -> None:
        if not any(call.op == "init_process_group" for call in self.code.calls):
            # Programs without the call start with an implicit one.
            if not self._passes_startup(0):
                return
            if not self.apart:
                self.meet(AwaitRendezvous(0, gathering=KeyedRendezvous(("init", 0))))
        for position in self.code.positions(self.vector_row):
            if not self._call(position):
                return
        end = len(self.code.calls)
        if not self._fault(end):
            self.finish(end)

    def _passes_startup(self, position: int) -> bool:
        """Whether the rank gets through its first init_process_group (`Program.startup`).

        A rank that gets through to another group than the others (`apart`) hangs in its first
        communication.
        """
        is_first, self.has_started = not self.has_started, True
        if self.program.startup is None or not is_first:
            return True
        ending = self.program.startup.ending(self.rank)
        if ending is None or ending.status == "absent":
            return True
        if ending.status == "raises":
            self.out.append(ExitRank(position, "raised", f"{ending.error}: {ending.text}"))
        elif ending.status == "waits":
            self.out.append(BlockForever(position, ending.needs, ending.missing))
        self.apart = ending.status == "apart"
        return self.apart

    def finish(self, position: int) -> None:
        """The end of the program: the process exits, unless the program runs inside another one."""
        stays_connected = bool(self.program.options.get("stays_connected"))
        self.exit_process(position, "", gone=not stays_connected)

    def exit_process(self, position: int, message: str, gone: bool = True) -> None:
        """The process exits, at the end of the program or in a call; this drops all open handles.

        Some backends end a process that drops a request for which it has not waited.
        """
        if self.profile.dropped == "crashes":
            for target in tuple(self.open_handles):
                self.drop(position, target)
        self.out.append(ExitRank(position, "ended", message, gone))

    def _fault(self, position: int) -> bool:
        """End the rank if a fault strikes at this call; whether that is so."""
        fault = self.fatal_faults.get(position)
        if fault is None and not self.made:
            fault = self.fatal_faults.get(None)  # it strikes at the rank's first call
        if fault is None:
            return False
        self.out.append(exit_by_fault(position, fault.kind, fault.code))
        return True

    def _call(self, position: int) -> bool:
        """Compile one call; False if the rank ends or hangs in it."""
        call = self.code.calls[position]
        if self.fatal_faults and self._fault(position):
            return False
        self.made.add(position)
        problem = None
        if self.ignored or id(call) not in self._valid or call.op == "new_group":
            problem = self._problem_of(position, call)
            if problem is not None and problem.reaction != "goes on":
                return self._react(position, problem)
        if call.op == "init_process_group" and not self._passes_startup(position):
            return False
        if self.apart and OPERATIONS[call.op].kind in _COMMUNICATING_KINDS:
            if call.op == "init_process_group":
                self.out.append(WaitForRows(position))
                return True
            self.out.append(BlockForever(position, (), "its group is another one"))
            return False
        self.odd = problem is not None and problem.text[:5] not in _HARMLESS_FINDINGS
        if not self._compile_valid(position, call):
            return False
        # Python makes the call before it rebinds the name, so handles are dropped afterwards.
        for distance in call.drops:
            self.drop(position, position - distance)
        return True

    def _compile_valid(self, position: int, call: CodeCall) -> bool:
        """Compile a call that the backend accepts; False if the rank ends in it."""
        instructions_before = len(self.out)
        method = _METHOD_OF_OP.get(call.op)
        if method is not None:
            getattr(self, method)(position, call)
        elif call.op == "exit":
            self.exit(position, self.value(call.fields.get("code", 0)))
            return False
        elif call.op == "fail":
            message = at_row(call.fields.get("message", ""), self.vector_row)
            self.out.append(ExitRank(position, "raised", str(message or "failed")))
            return False
        elif call.op == "synchronize":
            self.synchronize(position, str(call.fields.get("stream") or ""))
        if len(self.out) == instructions_before:
            self.out.append(WaitForRows(position))  # every call has at least one instruction
        return True

    def exit(self, position: int, code: int) -> None:
        """``sys.exit``: the same as the end of the program."""
        self.exit_process(position, f"exit {code}")

    # --- what a call is ---
    def value(self, vec: Vec) -> int:
        """The value of a vector for the unit's first rank."""
        return at_row(vec, self.vector_row)

    def row(self, position: int, part: int = -1) -> int:
        """The row of a call, or of a part of a batch, from the first row of its rank."""
        return self.code.offsets[position] + 1 + part

    def group_id(self, call: CodeCall) -> int:
        """The id of the call's group on this rank; 0 if it has no group."""
        if call.group < 0:
            return 0
        group_id = self._group_ids.get(call.group)
        if group_id is None:
            group_id = int(self.value(self.code.groups[call.group]))
            self._group_ids[call.group] = group_id
        return group_id

    def peer(self, call: CodeCall) -> int:
        """The global rank of the message's peer."""
        return int(self.value(self.code.endpoints[call.endpoint].peer))

    # --- calls that may not be made ---
    def _problem_of(self, position: int, call: CodeCall) -> _CallProblem | None:
        for part in (call, *call.parts):
            if part.invalid is not None and part.invalid[0][self.vector_row]:
                text = part.invalid[1]
                return _CallProblem(self._reaction(position, call, part, text), text)
        if self._waits_for_ignored(position, call):
            # torch returns None for a call that it ignores.
            text = "AttributeError: 'NoneType' object has no attribute 'wait'"
            return _CallProblem("raises", text)
        if call.op == "new_group":
            divergent = self.shared.divergent_groups.get((self.rank, position))
            error = new_group_error(self.resolved(call), divergent, self.profile)
            return None if error is None else _CallProblem("raises", error)
        refusal = self._first_refusal(call)
        if refusal is not None:
            return _CallProblem("raises", refusal)
        self._valid.add(id(call))
        return None

    def _waits_for_ignored(self, position: int, call: CodeCall) -> bool:
        targets = (position - distance for distance in call.waits)
        return any(self.code.calls[k].is_async for k in targets if k in self.ignored)

    def _reaction(
        self, position: int, call: CodeCall, part: CodeCall, text: str
    ) -> InvalidCallReaction:
        """What the backend does with an invalid call, or with the invalid part of one."""
        code = text[:5]
        subject = self.resolved(call if code == "DS102" else part)
        reaction = self.profile.invalid(subject, code, self.program.options)
        if code == "DS105" and reaction == "hangs":
            # Only messages hang when they are waited for again.
            waited_again = [self.code.calls[position - distance] for distance in call.again]
            if not any(OPERATIONS[one.op].kind in ("p2p", "batch") for one in waited_again):
                return "goes on"
        if code == "DS108" and reaction == "goes on" and not self._all_members_call(call):
            return "raises"
        return reaction

    def _all_members_call(self, call: CodeCall) -> bool:
        """Whether every member makes this call on a destroyed group.

        Otherwise the missing member closes its connection, when its process ends or its group
        object is freed. torch then raises "ValueError: Process group … is not initialized in the
        world group map" in place of gloo's error (run on gloo, torch 2.13). While the missing
        member keeps the object, for example in a barrier of the world, the call waits for that.
        """
        group = self.resolved(call).group
        number = self.numbers.get(group.id, 0)
        return all(self._collective_count(member, group.id) > number for member in group.ranks)

    def _collective_count(self, rank: int, group_id: int) -> int:
        """The collectives that a rank's whole program calls on a group."""
        calls = (call for _, call in self.program.calls_of(rank) if call.group.id == group_id)
        return sum(OPERATIONS[call.op].kind == "collective" for call in calls)

    def _react(self, position: int, problem: _CallProblem) -> bool:
        """Add what an invalid call does instead; whether the rank continues."""
        reaction, text = problem
        if reaction == "ignored":
            self.ignored.add(position)
            self.out.append(WaitForRows(position))
            return True
        if reaction == "hangs":
            self.out.append(BlockForever(position, self._partners_waited_again(position), text))
            return False
        status: RankEndStatus = "crashed" if reaction == "crashes" else "raised"
        self.out.append(ExitRank(position, status, text))
        return False

    def _partners_waited_again(self, position: int) -> tuple[int, ...]:
        """The partners of the requests that a call waits for a second time, so that it hangs."""
        peers: set[int] = set()
        for distance in self.code.calls[position].again:
            target = self.code.calls[position - distance]
            peers |= {self.peer(part) for part in (target, *target.parts) if part.endpoint >= 0}
        return tuple(sorted(peers - {ANY_SENDER}))

    def _first_refusal(self, call: CodeCall) -> str | None:
        if id(call) not in self._refused:
            refusals = (self._refusal(part) for part in (call, *call.parts))
            self._refused[id(call)] = next((text for text in refusals if text is not None), None)
        return self._refused[id(call)]

    def _refusal(self, call: CodeCall) -> str | None:
        """Why the backend rejects a call or part, if it does."""
        if OPERATIONS[call.op].kind not in ("p2p", "collective", "remote"):
            return None
        refusals = self.shared.refusals
        key = refusal_key(self.program, self.code, self.vector_row, call)
        if key not in refusals:
            refusals[key] = call_refusal(self.profile, self.program.resolve(self.rank, call))
        return refusals[key]

    def resolved(self, call: CodeCall) -> ResolvedCall:
        """The call with its values on this rank."""
        return self.program.resolve(self.rank, call)

    # --- parts ---
    def message_part(self, position: int, part: int, call: CodeCall, batched: bool) -> LaunchPart:
        """The part of a send or receive."""
        kind = KIND_SEND if OPERATIONS[call.op].direction == "send" else KIND_RECEIVE
        return LaunchPart(self.row(position, part), position, part, kind, call, batched=batched)

    def collective_part(self, position: int, call: CodeCall) -> LaunchPart:
        """The part of a collective, with its number in the group's sequence."""
        group = self.group_id(call)
        number = self.numbers.get(group, 0)
        self.numbers[group] = number + 1
        return LaunchPart(
            self.row(position),
            position,
            -1,
            KIND_COLLECTIVE,
            call,
            number,
            odd=self.odd,
            real=self.alias.get(group),
        )

    def meeting_part(self, position: int, call: CodeCall, gathering: KeyedRendezvous) -> LaunchPart:
        """The part of a rendezvous whose members find each other by a key."""
        return LaunchPart(
            self.row(position),
            position,
            -1,
            KIND_COLLECTIVE,
            call,
            odd=self.odd,
            gathering=gathering,
        )

    def work_part(self, position: int, call: CodeCall) -> LaunchPart:
        """The part of local work."""
        return LaunchPart(self.row(position), position, -1, KIND_WORK, call)

    # --- kinds of call ---
    def meet(self, meet: AwaitRendezvous) -> None:
        """Add a rendezvous, with its number."""
        self.out.append(meet._replace(number=self.rendezvous_count))
        self.rendezvous_count += len(meet.numbers)

    def post(
        self, position: int, part: LaunchPart, wait: bool, queue: ExecutionQueue | None = None
    ) -> None:
        """Post one part and, if ``wait``, wait for it."""
        self.out.append(PostLaunch(position, OperationLaunch(part.row, (part,), (), queue)))
        if wait:
            self.await_rows(position, (part.row,), part.kind in (KIND_SEND, KIND_RECEIVE))

    def await_rows(
        self, position: int, rows: tuple[int, ...], messages: bool, waited: tuple[int, ...] = ()
    ) -> None:
        """Block until rows are done. A backend with a lock takes it for the wait of each message.

        ``waited``: the requests of the call; the last of the waits records them.
        """
        if not messages or not self.profile.lock:
            self.out.append(WaitForRows(position, rows, waited))
            return
        for i, row in enumerate(rows):
            is_last = i == len(rows) - 1
            self.out.append(AcquireLock(position))
            self.out.append(WaitForRows(position, (row,), waited if is_last else ()))

    def message(self, position: int, call: CodeCall) -> None:
        """Compile a send or receive."""
        nonblocking = OPERATIONS[call.op].nonblocking
        part = self.message_part(position, -1, call, batched=False)
        self.post(position, part, wait=not nonblocking)
        if not nonblocking:
            return
        if call.handled:
            self.open_handles[position] = None
        else:
            self.drop(position, position)

    def collective(self, position: int, call: CodeCall) -> None:
        """Compile a collective."""
        queue = self._queues.get(call.group)
        if queue is None:
            key, width = self.profile.workers(self.rank, self.group_id(call)) or (None, 0)
            queue = self._queues[call.group] = ExecutionQueue(key, width, max(call.group, 0))
        part = self.collective_part(position, call)
        self.post(position, part, wait=not call.is_async, queue=queue)

    def remote(self, position: int, call: CodeCall) -> None:
        """A put or get is this rank's own work: the other rank takes no part in it."""
        self.post(position, self.work_part(position, call), wait=True)

    def batch(self, position: int, call: CodeCall) -> None:
        """A loop of isend and irecv, each with its own request (gloo, observed: "one Work per
        op").
        """
        for i, one in enumerate(call.parts):
            self.post(position, self.message_part(position, i, one, batched=True), wait=False)
        if call.handled:
            self.open_handles[position] = None
        else:
            self.await_rows(position, self.requests(position), messages=True)

    def requests(self, position: int) -> tuple[int, ...]:
        """The rows that a wait for this call's handle waits for."""
        parts = self.code.calls[position].parts
        if not parts:
            return (self.row(position),)
        return tuple([self.row(position, i) for i in range(len(parts))])

    def wait(self, position: int, call: CodeCall) -> None:
        """Compile a wait for the requests that the call names."""
        targets = [k for k in [position - d for d in call.waits] if k in self.made]
        rows = tuple([row for k in targets for row in self.requests(k)])
        if not self.profile.lock:
            self.out.append(WaitForRows(position, rows, rows))
            return
        for k in targets:
            messages = OPERATIONS[self.code.calls[k].op].kind in ("p2p", "batch")
            self.await_rows(position, self.requests(k), messages, self.requests(k))
            self.open_handles.pop(k, None)

    def drop(self, position: int, target: int) -> None:
        """The program drops the handle of the call at ``target``."""
        self.open_handles.pop(target, None)
        if self.profile.dropped == "nothing":
            return
        if target not in self.made or target in self.ignored:
            return
        if OPERATIONS[self.code.calls[target].op].kind in ("p2p", "batch"):
            self.out.extend(DropRequest(position, row) for row in self.requests(target))

    def work(self, position: int, call: CodeCall) -> None:
        """Compile local work, for which the host waits."""
        self.post(position, self.work_part(position, call), wait=True)

    def synchronize(self, position: int, stream: str = "") -> None:
        """Nothing to wait for: the host has waited for its requests."""

    def wait_stream(self, position: int, call: CodeCall) -> None:
        """There are no streams."""

    def group(self, position: int, call: CodeCall) -> None:
        """init_process_group is a rendezvous of the world; for new_group see `new_group`."""
        if call.op == "new_group":
            self.new_group(position, call, self.resolved(call))
        elif call.op == "init_process_group":
            number = self.numbers["init"] = self.numbers.get("init", -1) + 1
            rendezvous = KeyedRendezvous(("init", number))
            self.post(position, self.meeting_part(position, call, rendezvous), wait=True)

    def new_group(self, position: int, call: CodeCall, resolved: ResolvedCall) -> None:
        """A rendezvous of the ranks that the profile names.

        They find each other by the number of the call among the rank's new_group calls; with
        use_local_synchronization, by the members and the number among these.
        """
        members = tuple(sorted(resolved.ranks))
        divergent = self.shared.divergent_groups.get((self.rank, position))
        participants = self.profile.new_group(resolved, self.program.options)
        number = self.numbers.get("new_group", 0)
        if not resolved.local_sync:
            self.numbers["new_group"] = number + 1
        if participants in ("named", "members") and divergent is not None:
            self._divergent_new_group(position, resolved, divergent, number)
            return
        key: Hashable = ("new_group", number, members)
        if resolved.local_sync:
            # The same members may create several groups.
            number_of_members = self.numbers.get(members, 0)
            self.numbers[members] = number_of_members + 1
            key = ("new_group", "of", members, number_of_members)
        elif participants == "world":
            key = ("new_group", number)
            members = tuple(range(self.program.world_size))
        if participants != "nobody" and self.rank in members:
            rendezvous = KeyedRendezvous(key, members)
            self.post(position, self.meeting_part(position, call, rendezvous), wait=True)

    def _divergent_new_group(
        self, position: int, resolved: ResolvedCall, divergent: DivergentNewGroup, number: int
    ) -> None:
        """A new_group call that the ranks do not agree on connects the ranks that it finds.

        From then on the group's calls match those of the ranks that it is really connected to.
        """
        created = created_group_ids(self.program, resolved)
        expected = tuple(sorted(resolved.ranks)) if divergent.lost else divergent.holders
        name = divergent.name if resolved.local_sync else number
        rendezvous = AwaitRendezvous(
            position,
            gathering=KeyedRendezvous(("new_group", name), expected),
            of_group=created[0],
            uneven=True,
            lost=divergent.lost,
        )
        self.meet(rendezvous)
        real = RankGroup(-1 - divergent.name, resolved.name, divergent.holders)
        self.alias |= dict.fromkeys(created, real)
