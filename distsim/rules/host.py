"""Compiling a rank's code where the host waits for its requests: gloo, mpi and the contract's readings."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

from distsim.ops.records import Call
from distsim.ops.table import OPS
from distsim.profiles.record import Profile
from distsim.program.records import CodeCall, Program, at
from distsim.rules.code import Drop, Instruction, Launch, Leave, Meet, Part, PartKind, Post, Wait

#: Operations that only take time.
WORK = ("compute", "assign", "sleep")


class Compiler:
    """One rank's code under one profile. `run` gives its instructions.

    ``refusals`` is shared by all ranks of a compilation: the profile is asked once per operation, dtype and reduce op.
    """

    def __init__(self, program: Program, profile: Profile, rank: int, base: int, refusals: dict[Hashable, str | None]) -> None:
        self.program, self.profile, self.rank, self.base = program, profile, rank, base
        self.code, self.vector_row = program.code(rank), program.row_of[rank]
        self.refusals = refusals
        self.out: list[Instruction] = []
        self.numbers: dict[Hashable, int] = {}
        self.made: set[int] = set()  # positions of the calls that this rank makes
        self.fatal = {f.position: f for f in program.faults
                      if f.rank == rank and f.at_ns is None and f.kind in ("kill", "raise", "exit", "fail")}  # fmt: skip

    def run(self) -> list[Instruction]:
        end = len(self.code.calls)
        if not any(call.op == "init_process_group" for call in self.code.calls):
            self.out.append(Meet(0, ("init",), tuple(range(self.program.world_size))))
        if not all(self._call(k) for k in self.code.positions(self.vector_row)):
            return self.out
        if not self._fault(end):
            self.finish(end)
        return self.out

    def finish(self, position: int) -> None:
        """The end of the program."""
        self.out.append(Leave(position, "ended", gone=False))

    def _fault(self, position: int) -> bool:
        fault = self.fatal.get(position) or (self.fatal.get(None) if not self.made else None)
        if fault is None:
            return False
        status: Any = {"kill": "killed", "exit": "ended"}.get(fault.kind, "raised")
        message = {"kill": "killed by a fault", "exit": f"exit {fault.code} by a fault"}.get(fault.kind, "raised by a fault")
        self.out.append(Leave(position, status, message))
        return True

    def _call(self, position: int) -> bool:
        """Compile one call; False when the rank ends in it."""
        call = self.code.calls[position]
        if self._fault(position):
            return False
        self.made.add(position)
        reason = self.broken(call)
        if reason is not None:
            self.out.append(Leave(position, "raised", reason))
            return False
        for distance in call.drops:
            self.drop(position, position - distance)
        return self.compile(position, call)

    def compile(self, position: int, call: CodeCall) -> bool:
        kind, here = OPS[call.op].kind, len(self.out)
        if kind == "p2p":
            self.message(position, call)
        elif kind == "collective":
            self.collective(position, call)
        elif kind == "batch":
            self.batch(position, call)
        elif kind == "wait":
            self.wait(position, call)
        elif kind == "group":
            self.group(position, call)
        elif call.op in ("exit", "fail"):
            self.out.append(self._leave(position, call))
            return False
        elif call.op in WORK:
            self.work(position, call)
        elif call.op == "synchronize":
            self.synchronize(position)
        if len(self.out) == here:
            self.out.append(Wait(position))
        return True

    def _leave(self, position: int, call: CodeCall) -> Leave:
        if call.op == "exit":
            return Leave(position, "ended", f"exit {self.value(call.fields.get('code', 0))}")
        return Leave(position, "raised", str(self.value(call.fields.get("message", "")) or "failed"))

    # --- what a call is ---
    def value(self, vec: Any) -> Any:
        return at(vec, self.vector_row)

    def row(self, position: int, part: int = -1) -> int:
        return self.base + self.code.offsets[position] + 1 + part

    def group_id(self, call: CodeCall) -> int:
        return int(self.value(self.code.groups[call.group])) if call.group >= 0 else 0

    def broken(self, call: CodeCall) -> str | None:
        """Why this call raises at once on this rank, else None."""
        for one in (call, *call.parts):
            if one.invalid is not None and one.invalid[0][self.vector_row]:
                return one.invalid[1]
        return next((text for one in (call, *call.parts) if (text := self._refusal(one)) is not None), None)

    def _refusal(self, call: CodeCall) -> str | None:
        if OPS[call.op].kind not in ("p2p", "collective"):
            return None
        open_source = call.port >= 0 and self.value(self.code.ports[call.port].peer) < 0
        buffers = call.fields.get("inputs") or call.fields.get("outputs") or ()
        key = (call.op, buffers[0].dtype if buffers else "", call.fields.get("reduce_op"), open_source)
        if key not in self.refusals:
            self.refusals[key] = self.profile.refuse(self.program.resolve(self.rank, call))
        return self.refusals[key]

    def resolved(self, call: CodeCall) -> Call:
        return self.program.resolve(self.rank, call)

    # --- parts ---
    def message_part(self, position: int, part: int, call: CodeCall, space: Hashable) -> Part:
        """``space``: the channel that the message travels on; a group, or a communicator."""
        port = self.code.ports[call.port]
        peer, tag = int(self.value(port.peer)), int(self.value(port.tag))
        sends = OPS[call.op].direction == "send"
        box = (space, peer if sends else self.rank, tag if self.profile.tags else 0)
        members = self.program.groups[self.group_id(call)].ranks
        return Part(self.row(position, part), self.rank, position, part, PartKind.SEND if sends else PartKind.RECEIVE, call.op,
                    box, peer, members, 0, int(self.value(call.nbytes)), int(self.value(call.signature)), tag)  # fmt: skip

    def collective_part(self, position: int, call: CodeCall) -> Part:
        group = self.program.groups[self.group_id(call)]
        root = call.fields.get("root")
        root = None if root is None else int(self.value(root))
        number = self.numbers.get(group.id, 0)
        self.numbers[group.id] = number + 1
        key = ("collective", group.id, number, self.profile.slot(call.op, root))
        return self._meeting(position, call, key, group.ranks, 0 if root is None else max(group.group_rank(root), 0))

    def _meeting(self, position: int, call: CodeCall, key: Hashable, members: tuple[int, ...], root: int = 0) -> Part:
        return Part(self.row(position), self.rank, position, -1, PartKind.COLLECTIVE, call.op, key, -1, members, root,
                    int(self.value(call.nbytes)), int(self.value(call.signature)))  # fmt: skip

    def work_part(self, position: int, call: CodeCall) -> Part:
        return Part(self.row(position), self.rank, position, -1, PartKind.WORK, call.op)

    # --- kinds of call ---
    def post(self, position: int, part: Part, wait: bool, **more: Any) -> None:
        self.out.append(Post(position, Launch(part.row, self.rank, (part,), **more)))
        if wait:
            self.out.append(Wait(position, (part.row,)))

    def message(self, position: int, call: CodeCall) -> None:
        nonblocking = OPS[call.op].nonblocking
        self.post(position, self.message_part(position, -1, call, self.group_id(call)), wait=not nonblocking)
        if nonblocking and not call.handled:
            self.drop(position, position)

    def collective(self, position: int, call: CodeCall) -> None:
        group = self.group_id(call)
        self.post(position, self.collective_part(position, call), wait=not call.is_async,
                  workers=self.profile.workers(self.rank, group), queue=f"group {self.program.groups[group].name}")  # fmt: skip

    def batch(self, position: int, call: CodeCall) -> None:
        """A loop of isend and irecv, each with its own request (gloo, observed: "one Work per op")."""
        for i, one in enumerate(call.parts):
            self.post(position, self.message_part(position, i, one, self.group_id(one)), wait=False)
        if not call.handled:
            self.out.append(Wait(position, self.requests(position)))

    def requests(self, position: int) -> tuple[int, ...]:
        """The rows that a wait for this call's handle ends."""
        parts = self.code.calls[position].parts
        return tuple(self.row(position, i) for i in range(len(parts))) if parts else (self.row(position),)

    def wait(self, position: int, call: CodeCall) -> None:
        targets = [k for k in (position - d for d in call.waits) if k in self.made]
        rows = tuple(row for k in targets for row in self.requests(k))
        self.out.append(Wait(position, rows, rows))

    def drop(self, position: int, target: int) -> None:
        if target not in self.made or self.profile.dropped == "nothing":
            return
        if OPS[self.code.calls[target].op].kind in ("p2p", "batch"):
            self.out.extend(Drop(position, row) for row in self.requests(target))

    def work(self, position: int, call: CodeCall) -> None:
        self.post(position, self.work_part(position, call), wait=True)

    def synchronize(self, position: int) -> None:
        """Nothing to wait for: the host has waited for its requests."""

    def group(self, position: int, call: CodeCall) -> None:
        """init_process_group meets the world; new_group whom the profile says, by its number among the rank's new_group calls."""
        if call.op == "destroy_process_group":
            return
        members = tuple(range(self.program.world_size))
        key: Hashable = ("init",)
        if call.op == "new_group":
            resolved = self.resolved(call)
            parties = self.profile.new_group(resolved, self.program.options)
            number = self.numbers.get("new_group", 0)
            self.numbers["new_group"] = number + 1
            key = ("new_group", number)
            if parties == "members":
                members, key = tuple(sorted(resolved.ranks)), (*key, tuple(sorted(resolved.ranks)))
            if parties == "nobody" or self.rank not in members:
                return
        self.post(position, self._meeting(position, call, key, members), wait=True)


def any_source(program: Program) -> bool:
    """Whether some receive takes a message of any sender."""
    return any(np.any(np.asarray(port.peer) < 0) for code in program.codes for port in code.ports)


def iter_launches(code: list[Instruction]) -> Iterator[Launch]:
    for instruction in code:
        if isinstance(instruction, Post):
            yield instruction.launch
