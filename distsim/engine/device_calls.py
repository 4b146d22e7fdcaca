"""Calls in flat form for the device engine: one tuple per call, one list per code, shared by its ranks."""

from __future__ import annotations

from typing import Any

from distsim.cost import CostModel
from distsim.engine.durations import durations_ns
from distsim.engine.flat import Flat, request_rows
from distsim.ops.table import OPS
from distsim.program.records import Code, CodeCall, Program

#: Kinds of flat calls. Those up to GROUP use a communicator.
MESSAGE, BATCH, GROUP, WORK, HOST, WAIT, STOP, NOTHING = range(8)
#: Signature and tag as one number: under nccl calls of unlike tags meet, and then the explicit rules must judge.
_TAGS = 1 << 40


def device_calls(program: Program, cost: CostModel, code: Code) -> list[Flat]:
    """(kind, row offset, a, b, c); vectors stay vectors.

    MESSAGE: port, bytes, 1 for a send + 2 for blocking + 4 × (signature and tag). BATCH: parts, blocking.
    GROUP: group port, the call, signature.
    WORK: duration, stream. HOST: duration. WAIT: rows of the launches, rows waited for, whether each stops the host. STOP: synchronize.
    """
    flat: list[Flat] = []
    for position, (call, offset) in enumerate(zip(code.calls, code.offsets, strict=False)):
        if call.parts:
            parts = tuple((_sends(p), offset + k, p.port, p.nbytes, _signature(code, p)) for k, p in enumerate(call.parts, 1))
            flat.append((BATCH, offset, parts, not call.is_async, 0))
        elif call.op == "wait":
            made = [position - d for d in call.waits]
            rows = tuple(code.offsets[p] for p in made)
            waited = tuple(r for p in made for r in (code.offsets[p], *(request_rows(code, p) if code.calls[p].parts else ())))
            flat.append((WAIT, offset, rows, waited, tuple(code.calls[p].op == "barrier" for p in made)))
        else:
            flat.append((*_facts(program, cost, code, position, offset),))
    return flat


def _facts(program: Program, cost: CostModel, code: Code, position: int, offset: int) -> tuple[Any, ...]:
    call = code.calls[position]
    row = OPS[call.op]
    if row.kind == "p2p":
        blocking = 0 if row.nonblocking else 2
        return (MESSAGE, offset, call.port, call.nbytes, _sends(call) + blocking + 4 * _signature(code, call))
    if row.kind == "collective":
        return (GROUP, offset, call.group, call, call.signature)
    if call.op in ("compute", "sleep"):
        duration = durations_ns(program, cost, code, position)
        queue = call.fields.get("queue") or ""
        on_host = call.op == "sleep" or queue == "host"
        return (HOST, offset, duration, 0, 0) if on_host else (WORK, offset, duration, queue, 0)
    if call.op == "assign":
        return (WORK, offset, 0, "", 0)
    return (STOP if call.op == "synchronize" else NOTHING, offset, 0, 0, 0)


def _sends(call: CodeCall) -> int:
    return int(OPS[call.op].direction == "send")


def _signature(code: Code, call: CodeCall) -> Any:
    return call.signature * _TAGS + code.ports[call.port].tag
