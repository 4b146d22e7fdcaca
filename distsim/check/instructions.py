"""Codes flattened for the one-pass driver: one tuple per call, the same for all ranks of a code.

An instruction is ``(opcode, a, b)``. What a call waits for is a tuple of conditions ``(kind, distance, where, part)``:
``distance`` leads back to the call that posted (0: this one), ``where`` is its port or slot, ``part`` its number in a batch
(-1: not in a batch).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from distsim.check.layout import Layout, joins
from distsim.ops.table import OPS
from distsim.program.records import CodeCall, Vec

#: What blocks: see `cases/FORMAT.md`'s readings. A send waits for its receive and a collective for all (rendezvous); in rooted
#: collectives a rank leaves when its own data moved (early); a send never blocks and giving ranks leave at once (buffered).
Reading = Literal["rendezvous", "early", "buffered"]

# Opcodes. The first nine are the fast ones: (port, -), (port, -), (distance, port), (distance, port), (port, -), (port, -),
# (slot, signature) twice, (distance, slot). POST is (posts, conditions), WAIT is (-, conditions), LEAVE is (status, message).
ISEND, IRECV, WAIT_SEND, WAIT_RECV, SEND, RECV, JOIN, JOIN_ASYNC, WAIT_JOIN, LOCAL, WAIT, POST, LEAVE = range(13)

# Kinds of conditions and posts.
TAKEN, CAME, ALL, ROOT = range(4)

Instruction = tuple[int, Any, Any]
Condition = tuple[int, int, Any, int]
_END: Instruction = (LEAVE, "ended", "")
_NOTHING: Instruction = (LOCAL, 0, 0)


@dataclass(frozen=True, slots=True)
class Flattener:
    """Makes instructions of the calls of one code under one reading."""

    layout: Layout
    number: int
    reading: Reading

    def instructions(self) -> list[Instruction]:
        """One per position, and one that ends the rank."""
        calls = self.layout.program.codes[self.number].calls
        made: dict[tuple[int, ...], Instruction] = {}
        out: list[Instruction] = []
        for position, call in enumerate(calls):
            key = (id(call), *(id(calls[position - d]) for d in call.waits))
            instruction = made.get(key)
            if instruction is None:
                instruction = made[key] = self._wait(calls, position, call) if call.waits else self._post(call)
            out.append(instruction)
        out.append(_END)
        return out

    def _post(self, call: CodeCall) -> Instruction:
        row = OPS[call.op]
        if call.op in ("exit", "fail"):
            return (LEAVE, "ended" if call.op == "exit" else "raised", call.fields.get("message", ""))
        if joins(call):
            return self._join(call)
        if row.kind == "p2p" and not self.layout.any_source:
            sends = row.direction == "send"
            quick = row.nonblocking or (sends and self.reading == "buffered")
            return ((ISEND if quick else SEND) if sends else (IRECV if quick else RECV), call.port, 0)
        if row.kind in ("p2p", "batch"):
            blocks = not (row.nonblocking if row.kind == "p2p" else call.is_async)
            parts = call.parts or (call,)
            posts = tuple((_kind(p), p.port, p.signature) for p in parts)
            return (POST, posts, self._conditions(call, 0) if blocks else ())
        return _NOTHING

    def _join(self, call: CodeCall) -> Instruction:
        slot, signature = self.layout.slot(self.number, call), _plain(call.signature)
        conditions = self._conditions(call, 0)
        if call.is_async:
            return (JOIN_ASYNC, slot, signature)
        if len(conditions) == 1 and conditions[0][0] == ALL:
            return (JOIN, slot, signature)
        return (POST, ((ALL, slot, signature),), conditions)

    def _wait(self, calls: list[CodeCall], position: int, call: CodeCall) -> Instruction:
        conditions = tuple(c for d in call.waits for c in self._conditions(calls[position - d], d))
        if not conditions:
            return _NOTHING
        if len(conditions) == 1 and not self.layout.any_source:
            kind, distance, where, part = conditions[0]
            if part < 0 and kind != ROOT:
                return ((WAIT_SEND, WAIT_RECV, WAIT_JOIN)[kind], distance, where)
        return (WAIT, 0, conditions)

    def _conditions(self, call: CodeCall, distance: int) -> tuple[Condition, ...]:
        """What the request of a call needs before it is done."""
        row = OPS[call.op]
        if joins(call):
            return self._join_conditions(call, distance)
        if row.kind not in ("p2p", "batch"):
            return ()
        needs = []
        for index, part in enumerate(call.parts or (call,)):
            kind = _kind(part)
            if kind == CAME or self.reading != "buffered":
                needs.append((kind, distance, part.port, index if call.parts else -1))
        return tuple(needs)

    def _join_conditions(self, call: CodeCall, distance: int) -> tuple[Condition, ...]:
        row, slot = OPS[call.op], self.layout.slot(self.number, call)
        everybody: tuple[Condition, ...] = ((ALL, distance, slot, -1),)
        if self.reading == "rendezvous" or row.root_field is None:
            return everybody
        giving_root = row.root_field == "src"
        leaves_at_once = giving_root if self.reading == "buffered" else None
        return ((ROOT, distance, (slot, _plain(call.fields.get("root", 0)), leaves_at_once), -1),)


def _kind(call: CodeCall) -> int:
    return TAKEN if OPS[call.op].direction == "send" else CAME


def _plain(vector: Vec) -> Any:
    """An integer, or a list with one entry per row."""
    return vector.tolist() if isinstance(vector, np.ndarray) else vector


class RankCodes:
    """The instructions of each rank: those of its code, with the calls left out or cut off that this rank alone does not make."""

    def __init__(self, layout: Layout, reading: Reading) -> None:
        self.layout = layout
        program = layout.program
        self._plain = [Flattener(layout, i, reading).instructions() for i in range(len(program.codes))]
        self._cut: dict[int, Instruction] = {}
        self._cut_at: dict[int, int] = {}
        for fault in program.faults:
            status = {"kill": "killed", "raise": "raised", "exit": "ended"}.get(fault.kind)
            if status and fault.position is not None and fault.position < self._cut_at.get(fault.rank, fault.position + 1):
                self._cut_at[fault.rank], self._cut[fault.rank] = fault.position, (LEAVE, status, "fault")
        self._patched: dict[tuple[int, bytes], list[Instruction]] = {}
        self._masks = [self._mask_table(i) for i in range(len(program.codes))]

    def of(self, rank: int) -> list[Instruction]:
        """The instructions of one rank; equal lists are shared."""
        program = self.layout.program
        number, row = program.code_of[rank], program.row_of[rank]
        code = self._patch(number, row)
        if rank in self._cut and self._cut_at[rank] < len(code):
            code = [*code[: self._cut_at[rank]], self._cut[rank]]
        return code

    def _mask_table(self, number: int) -> Any:
        """Rows × (distinct guards and invalid masks), or None where the code has neither."""
        code = self.layout.program.codes[number]
        masks = {id(g): g for g in code.guards or () if g is not None}
        masks |= {id(c.invalid[0]): c.invalid[0] for c in code.calls if c.invalid is not None}
        masks |= {id(p.invalid[0]): p.invalid[0] for c in code.calls for p in c.parts if p.invalid is not None}
        return np.stack([np.broadcast_to(m, len(code.ranks)) for m in masks.values()], axis=1) if masks else None

    def _patch(self, number: int, row: int) -> list[Instruction]:
        table = self._masks[number]
        if table is None:
            return self._plain[number]
        key = (number, table[row].tobytes())
        if key not in self._patched:
            self._patched[key] = self._patch_row(number, row)
        return self._patched[key]

    def _patch_row(self, number: int, row: int) -> list[Instruction]:
        source, out = self.layout.program.codes[number], list(self._plain[number])
        for position, call in enumerate(source.calls):
            guard = source.guards[position] if source.guards else None
            if guard is not None and not guard[row]:
                out[position] = _NOTHING
                continue
            broken = next((c.invalid for c in (call, *call.parts) if c.invalid is not None and c.invalid[0][row]), None)
            if broken is not None:
                out[position] = (LEAVE, "raised", broken[1])
                return out[: position + 1]
        return out
