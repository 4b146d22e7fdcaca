"""Compiling a code for ranks that do the same, where the host waits for its requests: gloo, mpi and
the contract's readings.
"""

from __future__ import annotations

from collections.abc import Hashable

from distsim.backends import call_refusal
from distsim.backends.message_matching import ANY_SENDER
from distsim.backends.profile import SHAPE_CHECKED_OPS, BackendProfile, InvalidCallReaction
from distsim.findings.final_state import RankEndStatus
from distsim.operations.core.resolved_call import RankGroup, ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall, SharedCode, Vec, at_row
from distsim.program.model import Program
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

#: Operations that only take time.
LOCAL_WORK_OPS = ("compute", "assign", "sleep")
#: Kinds of calls that a rank makes with others.
_COMMUNICATING_KINDS = ("p2p", "collective", "remote", "batch", "group")
#: What compiles the calls of a kind, and those of an operation.
_METHOD_OF_KIND = {
    "p2p": "message",
    **{kind: kind for kind in ("collective", "remote", "batch", "wait", "group")},
}
_METHOD_OF_OP = {
    op: _METHOD_OF_KIND[row.kind] for op, row in OPERATIONS.items() if row.kind in _METHOD_OF_KIND
}
_METHOD_OF_OP |= {**dict.fromkeys(LOCAL_WORK_OPS, "work"), "wait_stream": "wait_stream"}
#: Faults that end a rank, with the status and the words of its end.
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
    """What all units of a compilation share: the profile is asked once per operation, dtype and
    reduce op; ``unlike`` are the new_group calls that the ranks do not agree on, by (rank,
    position)."""

    def __init__(self, unlike: dict[tuple[int, int], DivergentNewGroup]) -> None:
        self.refusals: dict[Hashable, str | None] = {}
        self.unlike = unlike


def refusal_key(program: Program, code: SharedCode, row: int, call: CodeCall) -> Hashable:
    """What decides whether a back end refuses a call of a row of a code."""
    open_source = call.port >= 0 and int(at_row(code.ports[call.port].peer, row)) < 0
    buffers = call.fields.get("inputs") or call.fields.get("outputs") or ()
    shapes = (
        tuple(
            tuple(int(at_row(n, row)) for n in b.shape)
            for side in ("inputs", "outputs")
            for b in call.fields.get(side) or ()
        )
        if call.op in SHAPE_CHECKED_OPS or open_source
        else ()
    )
    group = program.groups[int(at_row(code.groups[call.group], row)) if call.group >= 0 else 0]
    own = group.backend if group.id else None
    return (
        call.op,
        own,
        buffers[0].dtype if buffers else "",
        call.fields.get("reduce_op"),
        open_source,
        shapes,
    )


class UnitCompiler:
    """One unit under one profile. `run` fills in its instructions.

    It reads the values of the unit's first rank; what they are besides is the link's business.
    Whatever they decide here must be in the unit's key
    (`distsim.semantics.form.compilation_units`).
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
        self.alias: dict[int, RankGroup] = {}  # group id -> what it is really connected to
        self.ignored: set[int] = set()  # positions of calls that torch warns about and leaves out
        self.odd = False  # the call in hand breaks the contract, and the back end takes it
        self.kept: dict[int, None] = {}  # positions of messages whose handle is open
        self.out: list[Instruction] = []
        self.numbers: dict[Hashable, int] = {}
        self.meets = 0
        self.has_started = self.apart = False  # apart: in a group that is not that of the others
        self.made: set[int] = set()  # positions of the calls that this unit makes
        self._groups: dict[int, int] = {}  # ids by slot
        self._queues: dict[int, ExecutionQueue] = {}  # of collectives, by slot
        self._refused: dict[int, str | None] = {}  # by a call's id: why the back end refuses it
        self._sound: set[int] = (
            set()
        )  # by a call's id: nothing is wrong with it, wherever it stands
        self.fatal = {
            f.position: f
            for f in program.faults
            if f.rank == self.rank and f.at_ns is None and f.kind in _EXIT_BY_FAULT
        }

    def run(self) -> CompilationUnit:
        end = len(self.code.calls)
        if not any(call.op == "init_process_group" for call in self.code.calls):
            if not self._passes_startup(0):
                self.unit.instructions = self.out
                return self.unit
            if not self.apart:
                self.meet(AwaitRendezvous(0, gathering=KeyedRendezvous(("init", 0))))
        if all(self._call(k) for k in self.code.positions(self.vector_row)) and not self._fault(
            end
        ):
            self.finish(end)
        self.unit.instructions = self.out
        return self.unit

    def _passes_startup(self, position: int) -> bool:
        """Does the rank come through its first init_process_group (`Program.startup`)? Where it
        does, and not to the others, it stands still in its first communication."""
        ending = (
            self.program.startup.ending(self.rank)
            if self.program.startup is not None and not self.has_started
            else None
        )
        self.has_started = True
        if ending is None or ending.status == "absent":
            return True
        if ending.status == "raises":
            self.out.append(ExitRank(position, "raised", f"{ending.error}: {ending.text}"))
        elif ending.status == "waits":
            self.out.append(BlockForever(position, ending.needs, ending.missing))
        self.apart = ending.status == "apart"
        return self.apart

    def finish(self, position: int) -> None:
        """The end of the program. Handles go with it: some back ends end a process that drops a
        request it has not waited for.
        """
        for target in tuple(self.kept) if self.profile.dropped == "crashes" else ():
            self.drop(position, target)
        self.out.append(ExitRank(position, "ended", gone=False))

    def _fault(self, position: int) -> bool:
        fault = self.fatal.get(position) or (self.fatal.get(None) if not self.made else None)
        if fault is not None:
            self.out.append(exit_by_fault(position, fault.kind, fault.code))
        return fault is not None

    def _call(self, position: int) -> bool:
        """Compile one call; False when the rank ends in it."""
        call = self.code.calls[position]
        if self.fatal and self._fault(position):
            return False
        self.made.add(position)
        wrong = None
        if self.ignored or id(call) not in self._sound or call.op == "new_group":
            wrong = self.wrong(position, call)
            if wrong is not None and wrong[0] != "goes on":
                return self._react(position, *wrong)
        if call.op == "init_process_group" and not self._passes_startup(position):
            return False
        if self.apart and OPERATIONS[call.op].kind in _COMMUNICATING_KINDS:
            self.out.append(
                WaitForRows(position)
                if call.op == "init_process_group"
                else BlockForever(position, (), "its group is another one")
            )
            return call.op == "init_process_group"
        self.odd = wrong is not None and wrong[1][:5] not in ("DS102", "DS105", "DS108")
        goes_on = self.compile(position, call)
        if call.drops and goes_on:  # Python makes the call before it rebinds the name
            for distance in call.drops:
                self.drop(position, position - distance)
        return goes_on

    def compile(self, position: int, call: CodeCall) -> bool:
        here, method = len(self.out), _METHOD_OF_OP.get(call.op)
        if method is not None:
            getattr(self, method)(position, call)
        elif call.op in ("exit", "fail"):
            self.out.append(self._leave(position, call))
            return False
        elif call.op == "synchronize":
            self.synchronize(position)
        if len(self.out) == here:
            self.out.append(WaitForRows(position))
        return True

    def _leave(self, position: int, call: CodeCall) -> ExitRank:
        if call.op == "exit":
            return ExitRank(position, "ended", f"exit {self.value(call.fields.get('code', 0))}")
        return ExitRank(
            position,
            "raised",
            str(at_row(call.fields.get("message", ""), self.vector_row) or "failed"),
        )

    # --- what a call is ---
    def value(self, vec: Vec) -> int:
        return at_row(vec, self.vector_row)

    def row(self, position: int, part: int = -1) -> int:
        return self.code.offsets[position] + 1 + part

    def group_id(self, call: CodeCall) -> int:
        if call.group < 0:
            return 0
        known = self._groups.get(call.group)
        if known is None:
            known = self._groups[call.group] = int(self.value(self.code.groups[call.group]))
        return known

    def peer(self, call: CodeCall) -> int:
        return int(self.value(self.code.ports[call.port].peer))

    def wrong(self, position: int, call: CodeCall) -> tuple[InvalidCallReaction, str] | None:
        """What becomes of a call that may not be made, and why it may not; None when nothing is
        wrong with it.
        """
        for one in (call, *call.parts):
            if one.invalid is not None and one.invalid[0][self.vector_row]:
                return self._reaction(position, call, one, one.invalid[1]), one.invalid[1]
        if self.ignored and any(
            k in self.ignored and self.code.calls[k].is_async
            for k in (position - d for d in call.waits)
        ):
            return "raises", "AttributeError: 'NoneType' object has no attribute 'wait'"
        if call.op == "new_group":
            text = new_group_error(
                self.resolved(call), self.shared.unlike.get((self.rank, position)), self.profile
            )
            return None if text is None else ("raises", text)
        if id(call) not in self._refused:
            self._refused[id(call)] = next(
                (text for one in (call, *call.parts) if (text := self._refusal(one)) is not None),
                None,
            )
        text = self._refused[id(call)]
        if text is None:
            self._sound.add(id(call))
        return None if text is None else ("raises", text)

    def _reaction(
        self, position: int, call: CodeCall, one: CodeCall, text: str
    ) -> InvalidCallReaction:
        code = text[:5]
        reaction = self.profile.invalid(
            self.resolved(call if code == "DS102" else one), code, self.program.options
        )
        if code == "DS105" and reaction == "hangs":
            spent = [self.code.calls[position - d] for d in call.again]
            return (
                "hangs"
                if any(OPERATIONS[c.op].kind in ("p2p", "batch") for c in spent)
                else "goes on"
            )
        return reaction

    def _react(self, position: int, reaction: InvalidCallReaction, text: str) -> bool:
        """True when the rank goes on."""
        if reaction == "ignored":
            self.ignored.add(position)
            self.out.append(WaitForRows(position))
            return True
        if reaction == "hangs":
            self.out.append(BlockForever(position, self._about(position), text))
        else:
            self.out.append(
                ExitRank(position, "crashed" if reaction == "crashes" else "raised", text)
            )
        return False

    def _about(self, position: int) -> tuple[int, ...]:
        """Whom a call that hangs for ever is about: the partners of the requests that it waits for
        again.
        """
        call = self.code.calls[position]
        again = [
            c
            for d in call.again
            for c in (self.code.calls[position - d], *self.code.calls[position - d].parts)
        ]
        return tuple(sorted({self.peer(c) for c in again if c.port >= 0} - {ANY_SENDER}))

    def _refusal(self, call: CodeCall) -> str | None:
        if OPERATIONS[call.op].kind not in ("p2p", "collective", "remote"):
            return None
        key = refusal_key(self.program, self.code, self.vector_row, call)
        if key not in self.shared.refusals:
            self.shared.refusals[key] = call_refusal(
                self.profile, self.program.resolve(self.rank, call)
            )
        return self.shared.refusals[key]

    def resolved(self, call: CodeCall) -> ResolvedCall:
        return self.program.resolve(self.rank, call)

    # --- parts ---
    def message_part(self, position: int, part: int, call: CodeCall, batched: bool) -> LaunchPart:
        kind = KIND_SEND if OPERATIONS[call.op].direction == "send" else KIND_RECEIVE
        return LaunchPart(self.row(position, part), position, part, kind, call, batched=batched)

    def collective_part(self, position: int, call: CodeCall) -> LaunchPart:
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
        return LaunchPart(self.row(position), position, -1, KIND_WORK, call)

    # --- kinds of call ---
    def meet(self, meet: AwaitRendezvous) -> None:
        """Add a meeting, with its number."""
        self.out.append(meet._replace(number=self.meets))
        self.meets += len(meet.numbers)

    def post(
        self, position: int, part: LaunchPart, wait: bool, queue: ExecutionQueue | None = None
    ) -> None:
        self.out.append(PostLaunch(position, OperationLaunch(part.row, (part,), (), queue)))
        if wait:
            self.await_rows(position, (part.row,), part.kind in (KIND_SEND, KIND_RECEIVE))

    def await_rows(
        self, position: int, rows: tuple[int, ...], messages: bool, waited: tuple[int, ...] = ()
    ) -> None:
        """Block until rows are done. A back end with a lock takes it for each message's wait."""
        if not (messages and self.profile.lock):
            self.out.append(WaitForRows(position, rows, waited))
            return
        for i, row in enumerate(rows):
            self.out += [
                AcquireLock(position),
                WaitForRows(position, (row,), waited if i == len(rows) - 1 else ()),
            ]

    def message(self, position: int, call: CodeCall) -> None:
        nonblocking = OPERATIONS[call.op].nonblocking
        self.post(
            position, self.message_part(position, -1, call, batched=False), wait=not nonblocking
        )
        if nonblocking and not call.handled:
            self.drop(position, position)
        elif nonblocking:
            self.kept[position] = None

    def collective(self, position: int, call: CodeCall) -> None:
        queue = self._queues.get(call.group)
        if queue is None:
            key, width = self.profile.workers(self.rank, self.group_id(call)) or (None, 0)
            queue = self._queues[call.group] = ExecutionQueue(key, width, max(call.group, 0))
        self.post(
            position, self.collective_part(position, call), wait=not call.is_async, queue=queue
        )

    def remote(self, position: int, call: CodeCall) -> None:
        """A put or get: this rank's own work, whoever's memory it is."""
        self.post(position, self.work_part(position, call), wait=True)

    def batch(self, position: int, call: CodeCall) -> None:
        """A loop of isend and irecv, each with its own request (gloo, observed: "one Work per
        op").
        """
        for i, one in enumerate(call.parts):
            self.post(position, self.message_part(position, i, one, batched=True), wait=False)
        if call.handled:
            self.kept[position] = None
        else:
            self.await_rows(position, self.requests(position), messages=True)

    def requests(self, position: int) -> tuple[int, ...]:
        """The rows that a wait for this call's handle ends."""
        parts = self.code.calls[position].parts
        return (
            tuple([self.row(position, i) for i in range(len(parts))])
            if parts
            else (self.row(position),)
        )

    def wait(self, position: int, call: CodeCall) -> None:
        targets = [k for k in [position - d for d in call.waits] if k in self.made]
        rows = tuple([row for k in targets for row in self.requests(k)])
        if not self.profile.lock:
            self.out.append(WaitForRows(position, rows, rows))
            return
        for k in targets:
            self.await_rows(
                position,
                self.requests(k),
                OPERATIONS[self.code.calls[k].op].kind in ("p2p", "batch"),
                self.requests(k),
            )
            self.kept.pop(k, None)

    def drop(self, position: int, target: int) -> None:
        self.kept.pop(target, None)
        if target not in self.made or target in self.ignored or self.profile.dropped == "nothing":
            return
        if OPERATIONS[self.code.calls[target].op].kind in ("p2p", "batch"):
            self.out.extend(DropRequest(position, row) for row in self.requests(target))

    def work(self, position: int, call: CodeCall) -> None:
        self.post(position, self.work_part(position, call), wait=True)

    def synchronize(self, position: int) -> None:
        """Nothing to wait for: the host has waited for its requests."""

    def wait_stream(self, position: int, call: CodeCall) -> None:
        """There are no streams."""

    def group(self, position: int, call: CodeCall) -> None:
        """init_process_group meets the world; new_group whom the profile says, by its number among
        the rank's new_group calls.
        """
        if call.op == "new_group":
            self.new_group(position, call, self.resolved(call))
        elif call.op == "init_process_group":
            again = self.numbers["init"] = self.numbers.get("init", -1) + 1
            self.post(
                position,
                self.meeting_part(position, call, KeyedRendezvous(("init", again))),
                wait=True,
            )

    def new_group(self, position: int, call: CodeCall, resolved: ResolvedCall) -> None:
        members, made = tuple(sorted(resolved.ranks)), created_group_ids(self.program, resolved)
        unlike = self.shared.unlike.get((self.rank, position))
        parties = self.profile.new_group(resolved, self.program.options)
        number = self.numbers.get("new_group", 0)
        self.numbers["new_group"] = number + (not resolved.local_sync)
        if parties in ("named", "members") and unlike is not None:
            there = members if unlike.lost else unlike.holders
            gathering = KeyedRendezvous(
                ("new_group", unlike.name if resolved.local_sync else number), there
            )
            self.meet(
                AwaitRendezvous(
                    position, gathering=gathering, of_group=made[0], uneven=True, lost=unlike.lost
                )
            )
            self.alias |= dict.fromkeys(
                made, RankGroup(-1 - unlike.name, resolved.name, unlike.holders)
            )
            return
        key: Hashable = ("new_group", number, members)
        if resolved.local_sync:
            again = self.numbers.get(members, 0)  # the same members may be made into several groups
            self.numbers[members] = again + 1
            key = ("new_group", "of", members, again)
        elif parties == "world":
            key, members = ("new_group", number), tuple(range(self.program.world_size))
        if parties != "nobody" and self.rank in members:
            self.post(
                position,
                self.meeting_part(position, call, KeyedRendezvous(key, members)),
                wait=True,
            )
