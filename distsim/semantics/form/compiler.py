"""Compiles a code into the instructions of a unit, for backends whose host waits for its requests:
gloo, mpi and the readings of the contract.

Key idea: all ranks of a unit do the same, so the compiler looks at the values of the unit's first
rank only. Every value on which it branches must be part of the unit's key
(`distsim.semantics.form.compilation_units`).

Backends with a device are in `distsim.semantics.form.device_compiler`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from distsim.backends import call_refusal
from distsim.backends.profile import SHAPE_CHECKED_OPS, BackendProfile
from distsim.findings.final_state import RankEndStatus
from distsim.operations.core.resolved_call import RankGroup, ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.code import BufferVector, CodeCall, InvalidRows, SharedCode, Vec, at_row
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

if TYPE_CHECKING:
    from distsim.semantics.form.invalid_calls import CallProblem

#: Operations that only take time and have no partners.
LOCAL_WORK_OPS = ("compute", "assign", "sleep")
#: Kinds of calls that involve other ranks.
_COMMUNICATING_KINDS = ("p2p", "collective", "remote", "batch", "group")
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


class UnitCompiler:
    """Compiles one unit under one profile. `run` fills in the unit's instructions.

    - ``real_groups``: by group id, the group that it is really connected to, if the ranks disagree.
    - ``ignored``: positions of calls that torch only warns about.
    - ``breaks_contract``: the backend executes the current call, although it breaks the rules and
      produces wrong data.
    - ``open_handles``: positions of messages whose handle the program still holds.
    - ``made_positions``: positions of the calls that this unit makes.
    - ``in_separate_world``: the process group that start-up gave this rank is not that of the
      others.

    Counters, by which calls of several ranks find each other: ``rendezvous_count``, ``init_count``,
    ``collective_counts`` by group id, ``new_group_count`` as torch counts (without local
    synchronization), and ``local_group_counts`` by members (with it).
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
        self.real_groups: dict[int, RankGroup] = {}
        self.ignored: set[int] = set()
        self.breaks_contract = False
        self.open_handles: dict[int, None] = {}
        self.out: list[Instruction] = []
        self.rendezvous_count = self.init_count = self.new_group_count = 0
        self.collective_counts: dict[int, int] = {}
        self.local_group_counts: dict[tuple[int, ...], int] = {}
        self.has_started = self.in_separate_world = False
        self.made_positions: set[int] = set()
        self._group_ids: dict[int, int] = {}  # by group slot of the code
        self._queues: dict[int, ExecutionQueue] = {}  # of collectives, by group slot
        # Iterations share call objects, so a call is judged once, under the id of its object.
        self._refused: dict[int, str | None] = {}
        self._known_as_valid: set[int] = set()
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
        if self._enters_implied_world():
            self._compile_calls()
        self.unit.instructions = self.out
        return self.unit

    def _enters_implied_world(self) -> bool:
        """Create the world of a program that does not do so; False if the rank fails in it."""
        if any(call.op == "init_process_group" for call in self.code.calls):
            return True
        if not self._passes_startup(0):
            return False
        if not self.in_separate_world:
            self.await_rendezvous(AwaitRendezvous(0, keyed=KeyedRendezvous(("init", 0))))
        return True

    def _compile_calls(self) -> None:
        for position in self.code.positions(self.vector_row):
            if not self._compile_call(position):
                return
        end = len(self.code.calls)
        if not self._dies_by_fault(end):
            self.end_program(end)

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
        self.in_separate_world = ending.status == "apart"
        return self.in_separate_world

    def end_program(self, position: int) -> None:
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

    def _dies_by_fault(self, position: int) -> bool:
        """Whether a fault strikes at this call; if so, the rank ends there."""
        fault = self.fatal_faults.get(position)
        if fault is None and not self.made_positions:
            fault = self.fatal_faults.get(None)  # it strikes at the rank's first call
        if fault is None:
            return False
        self.out.append(exit_by_fault(position, fault.kind, fault.code))
        return True

    def _compile_call(self, position: int) -> bool:
        """Compile one call; False if the rank ends or hangs in it."""
        call = self.code.calls[position]
        if self.fatal_faults and self._dies_by_fault(position):
            return False
        self.made_positions.add(position)
        self.breaks_contract = False
        # Whether a wait or a new_group is valid depends on earlier calls.
        if self.ignored or id(call) not in self._known_as_valid or call.op == "new_group":
            problem = self._problem_of(position, call)
            if problem is not None and problem.reaction != "goes on":
                return self._compile_invalid(position, problem)
            self.breaks_contract = problem is not None and problem.corrupts_data
        if call.op == "init_process_group" and not self._passes_startup(position):
            return False
        if self.in_separate_world and OPERATIONS[call.op].kind in _COMMUNICATING_KINDS:
            return self._compile_in_separate_world(position, call)
        if not self._compile_valid(position, call):
            return False
        # Python makes the call before it rebinds the name, so handles are dropped afterwards.
        for distance in call.drops:
            self.drop(position, position - distance)
        return True

    def _compile_in_separate_world(self, position: int, call: CodeCall) -> bool:
        """init_process_group succeeds, and the first communication hangs."""
        if call.op == "init_process_group":
            self.out.append(WaitForRows(position))
            return True
        self.out.append(BlockForever(position, (), "its group is another one"))
        return False

    def _compile_valid(self, position: int, call: CodeCall) -> bool:
        """Compile a call that the backend accepts; False if the rank ends in it."""
        instructions_before = len(self.out)
        op, kind = call.op, OPERATIONS[call.op].kind
        if kind == "p2p":
            self.message(position, call)
        elif kind == "collective":
            self.collective(position, call)
        elif kind == "wait":
            self.wait(position, call)
        elif kind == "batch":
            self.batch(position, call)
        elif kind == "remote":
            self.remote(position, call)
        elif kind == "group":
            self.group(position, call)
        elif op in LOCAL_WORK_OPS:
            self.work(position, call)
        elif op in ("exit", "fail"):
            self._compile_exit(position, call)
            return False
        elif op == "wait_stream":
            self.wait_stream(position, call)
        elif op == "synchronize":
            self.synchronize(position, str(call.fields.get("stream") or ""))
        if len(self.out) == instructions_before:
            self.out.append(WaitForRows(position))  # every call has at least one instruction
        return True

    def _compile_exit(self, position: int, call: CodeCall) -> None:
        if call.op == "exit":
            self.exit(position, self.value(call.fields.get("code", 0)))
            return
        message = at_row(call.fields.get("message", ""), self.vector_row)
        self.out.append(ExitRank(position, "raised", str(message or "failed")))

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
    # `invalid_calls` is imported inside functions: valid programs do not need it, and start-up time
    # counts.
    def _problem_of(self, position: int, call: CodeCall) -> CallProblem | None:
        for part in (call, *call.parts):
            if part.invalid is not None and part.invalid.rows[self.vector_row]:
                return self._problem_of_invalid(position, part, part.invalid)
        error = self._error_of(position, call)
        if error is None:
            return None
        from distsim.semantics.form.invalid_calls import CallProblem

        return CallProblem("raises", error)

    def _problem_of_invalid(
        self, position: int, part: CodeCall, invalid: InvalidRows
    ) -> CallProblem:
        from distsim.semantics.form.invalid_calls import CallPlace, problem_of_invalid_call

        call = self.code.calls[position]
        place = CallPlace(
            self.program,
            self.profile,
            self.rank,
            self.code,
            position,
            collectives_before=self.collective_counts.get(self.group_id(call), 0),
        )
        return problem_of_invalid_call(place, part, invalid)

    def _error_of(self, position: int, call: CodeCall) -> str | None:
        """The error that the backend, or torch, raises at a call that keeps the rules."""
        if self._waits_for_ignored(position, call):
            # torch returns None for a call that it ignores.
            return "AttributeError: 'NoneType' object has no attribute 'wait'"
        if call.op == "new_group":
            divergent = self.shared.divergent_groups.get((self.rank, position))
            return new_group_error(self.resolved(call), divergent, self.profile)
        refusal = self._first_refusal(call)
        if refusal is None:
            self._known_as_valid.add(id(call))
        return refusal

    def _waits_for_ignored(self, position: int, call: CodeCall) -> bool:
        targets = {position - distance for distance in call.waits}
        return any(self.code.calls[target].is_async for target in targets & self.ignored)

    def _compile_invalid(self, position: int, problem: CallProblem) -> bool:
        """Add what an invalid call does instead; False if the rank ends or hangs in it."""
        if problem.reaction == "ignored":
            self.ignored.add(position)
            self.out.append(WaitForRows(position))
            return True
        if problem.reaction == "hangs":
            from distsim.semantics.form.invalid_calls import partners_of_repeated_wait

            partners = partners_of_repeated_wait(self.code, self.vector_row, position)
            self.out.append(BlockForever(position, partners, problem.text))
            return False
        status: RankEndStatus = "crashed" if problem.reaction == "crashes" else "raised"
        self.out.append(ExitRank(position, status, problem.text))
        return False

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
        number = self.collective_counts.get(group, 0)
        self.collective_counts[group] = number + 1
        return LaunchPart(
            self.row(position),
            position,
            -1,
            KIND_COLLECTIVE,
            call,
            number,
            breaks_contract=self.breaks_contract,
            real_group=self.real_groups.get(group),
        )

    def rendezvous_part(self, position: int, call: CodeCall, keyed: KeyedRendezvous) -> LaunchPart:
        """The part of a rendezvous whose members find each other by a key."""
        return LaunchPart(
            self.row(position),
            position,
            -1,
            KIND_COLLECTIVE,
            call,
            breaks_contract=self.breaks_contract,
            keyed=keyed,
        )

    def work_part(self, position: int, call: CodeCall) -> LaunchPart:
        """The part of local work."""
        return LaunchPart(self.row(position), position, -1, KIND_WORK, call)

    # --- kinds of call ---
    def await_rendezvous(self, rendezvous: AwaitRendezvous) -> None:
        """Add a rendezvous, with its number."""
        self.out.append(rendezvous._replace(number=self.rendezvous_count))
        self.rendezvous_count += len(rendezvous.numbers)

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
        awaited = [position - distance for distance in call.waits]
        targets = [target for target in awaited if target in self.made_positions]
        if not self.profile.lock:
            rows = tuple([row for target in targets for row in self.requests(target)])
            self.out.append(WaitForRows(position, rows, rows))
            return
        for target in targets:
            is_message = OPERATIONS[self.code.calls[target].op].kind in ("p2p", "batch")
            rows = self.requests(target)
            self.await_rows(position, rows, is_message, rows)
            # Only a backend that has the lock (MPI) ends a process for a request that it drops
            # (`exit_process`), so other backends need not know which handles are still open.
            self.open_handles.pop(target, None)

    def drop(self, position: int, target: int) -> None:
        """The program drops the handle of the call at ``target``."""
        self.open_handles.pop(target, None)
        if self.profile.dropped == "nothing":
            return
        if target not in self.made_positions or target in self.ignored:
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
            rendezvous = KeyedRendezvous(("init", self.init_count))
            self.init_count += 1
            self.post(position, self.rendezvous_part(position, call, rendezvous), wait=True)

    def new_group(self, position: int, call: CodeCall, resolved: ResolvedCall) -> None:
        """A rendezvous of the ranks that the profile names.

        They find each other by the number of the call among the rank's new_group calls; with
        use_local_synchronization, by the members and the number among these.
        """
        divergent = self.shared.divergent_groups.get((self.rank, position))
        participants = self.profile.new_group(resolved, self.program.options)
        number = self.new_group_count
        if not resolved.local_sync:
            self.new_group_count += 1
        if participants in ("named", "members") and divergent is not None:
            self._divergent_new_group(position, resolved, divergent, number)
            return
        members = tuple(sorted(resolved.ranks))
        if resolved.local_sync:
            key = self._next_local_group_key(members)
        elif participants == "world":
            key = ("new_group", number)
            members = tuple(range(self.program.world_size))
        else:
            key = ("new_group", number, members)
        if participants != "nobody" and self.rank in members:
            rendezvous = KeyedRendezvous(key, members)
            self.post(position, self.rendezvous_part(position, call, rendezvous), wait=True)

    def _next_local_group_key(self, members: tuple[int, ...]) -> Hashable:
        """The key of the next group that these members create alone; they may create several."""
        number = self.local_group_counts.get(members, 0)
        self.local_group_counts[members] = number + 1
        return "new_group", "of", members, number

    def _divergent_new_group(
        self, position: int, resolved: ResolvedCall, divergent: DivergentNewGroup, number: int
    ) -> None:
        """A new_group call that the ranks do not agree on connects the ranks that it finds.

        From then on the group's calls match those of the ranks that it is really connected to.
        """
        created = created_group_ids(self.program, resolved)
        # A rank that is lost waits for the members that it named, although they never arrive.
        expected = tuple(sorted(resolved.ranks)) if divergent.lost else divergent.holders
        name = divergent.name if resolved.local_sync else number
        rendezvous = AwaitRendezvous(
            position,
            keyed=KeyedRendezvous(("new_group", name), expected),
            of_group=created[0],
            uneven=True,
            lost=divergent.lost,
        )
        self.await_rendezvous(rendezvous)
        # Negative ids, because no group of the program describes who is really connected.
        real_group = RankGroup(-1 - divergent.name, resolved.name, divergent.holders)
        self.real_groups |= dict.fromkeys(created, real_group)
