"""Calls in flat form for the fast engines: tuples of numbers, one list per code, shared by its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distsim.cost import CostModel
from distsim.engine.durations import durations_ns
from distsim.ops.table import OPS
from distsim.program.records import Code, Program, at

#: Kinds of flat calls: the lower two bits tell what is done, BLOCKING whether the host waits for it.
ISEND, IRECV, JOIN, COMPUTE = range(4)
BLOCKING = 4
SEND, RECV, COLLECTIVE, WAIT = ISEND + BLOCKING, IRECV + BLOCKING, JOIN + BLOCKING, COMPUTE + BLOCKING
_P2P = {"send": SEND, "recv": RECV, "isend": ISEND, "irecv": IRECV}
#: (kind, row offset, …): see `flatten`.
Flat = tuple[Any, ...]


class Disagree(Exception):
    """Calls met that don't fit, or something else that the explicit rules must decide."""


class Prices(dict[int, int]):
    """Bytes → ns between two ranks, asked of the cost model once."""

    def __init__(self, price: Callable[[int], int]) -> None:
        super().__init__()
        self._price = price

    def __missing__(self, nbytes: int) -> int:
        found = self[nbytes] = self._price(nbytes)
        return found


def flatten(program: Program, cost: CostModel, code: Code) -> list[Flat]:
    """(kind, row offset, a, b, c) of each call that does something; batches become their parts and a wait. Vectors stay vectors.

    Messages: port, bytes, signature. Collectives: group port, the call, signature. COMPUTE: duration. WAIT: rows to be finished.
    """
    flat: list[Flat] = []
    known: dict[int, tuple[Any, ...]] = {}
    for position, (call, offset) in enumerate(zip(code.calls, code.offsets, strict=False)):
        if call.parts:
            flat += [(_P2P[p.op], offset + k, p.port, p.nbytes, p.signature) for k, p in enumerate(call.parts, 1)]
            if not call.is_async:
                flat.append((WAIT, offset, tuple(range(offset + 1, offset + 1 + len(call.parts))), 0, 0))
        elif call.waits:
            flat.append((WAIT, offset, tuple(r for d in call.waits for r in request_rows(code, position - d)), 0, 0))
        else:
            facts = None if program.jitter else known.get(id(call))
            if facts is None:
                facts = known[id(call)] = _facts(program, cost, code, position)
            if facts:
                flat.append((facts[0], offset, *facts[1:]))
    return flat


def request_rows(code: Code, position: int) -> range:
    """The rows to be finished before a request is: the call's own, or a batch's parts."""
    start, parts = code.offsets[position], len(code.calls[position].parts)
    return range(start + 1, start + 1 + parts) if parts else range(start, start + 1)


def _facts(program: Program, cost: CostModel, code: Code, position: int) -> tuple[Any, ...]:
    call = code.calls[position]
    row = OPS[call.op]
    if row.kind == "p2p":
        return (_P2P[call.op], call.port, call.nbytes, call.signature)
    if row.kind == "collective":
        return (JOIN if call.is_async else COLLECTIVE, call.group, call, call.signature)
    if call.op == "assign":
        return (COMPUTE, 0, 0, 0)
    return (COMPUTE, durations_ns(program, cost, code, position), 0, 0) if call.op in ("compute", "sleep") else ()


def of_row(calls: list[Flat], vary: bool, code: Code, row: int) -> list[Flat]:
    """The flat calls that one row makes, with its own values; the shared list itself where nothing differs."""
    if code.guards is not None:
        made = {r for p in code.positions(row) for r in range(code.offsets[p], code.offsets[p + 1])}
        calls = [call for call in calls if call[1] in made]
    if vary:
        return [tuple(at(part, row) for part in call) for call in calls]
    return calls


def varies(calls: list[Flat]) -> bool:
    """Do some values differ between the ranks?"""
    return any(isinstance(part, np.ndarray) for call in calls for part in call)
