"""Calls in flat form for the device engine: one tuple per call, one list per code, shared by its ranks."""

from __future__ import annotations

from typing import Any

from distsim.cost import CostModel
from distsim.engine.durations import durations_ns
from distsim.engine.flat import Flat, request_rows
from distsim.ops.table import OPS
from distsim.program.records import Code, CodeCall, Program

#: Kinds of flat calls. Those up to GROUP use a communicator.
MESSAGE, BATCH, GROUP, WORK, HOST, WAIT, STREAM, STOP, NOTHING = range(9)
#: Signature and tag as one number: under nccl calls of unlike tags meet, and then the explicit rules must judge.
_TAGS = 1 << 40


def device_calls(program: Program, cost: CostModel, code: Code) -> list[Flat]:
    """(kind, row offset, a, b, c, stream); vectors stay vectors. The stream is the one that is current at the call.

    MESSAGE: port, bytes, 1 for a send + 2 for blocking + 4 × (signature and tag). BATCH: parts, blocking.
    GROUP: group port, the call, signature.
    WORK: duration. HOST: duration. WAIT: rows of the launches, rows waited for, whether each stops the host. STREAM: the stream
    that is waited for. STOP: synchronize.
    """
    flat: list[Flat] = []
    for position, (call, offset) in enumerate(zip(code.calls, code.offsets, strict=False)):
        if call.parts:
            parts = tuple((_sends(p), offset + k, p.port, p.nbytes, _signature(code, p)) for k, p in enumerate(call.parts, 1))
            flat.append((BATCH, offset, parts, not call.is_async, 0, call.fields.get("queue", "")))
        elif call.op == "wait":
            made = [position - d for d in call.waits]
            rows = tuple(code.offsets[p] for p in made)
            waited = tuple(r for p in made for r in (code.offsets[p], *(request_rows(code, p) if code.calls[p].parts else ())))
            stops = tuple(code.calls[p].op == "barrier" for p in made)
            flat.append((WAIT, offset, rows, waited, stops, call.fields.get("queue", "")))
        else:
            flat.append((*_facts(program, cost, code, position, offset),))
    return flat


def _facts(program: Program, cost: CostModel, code: Code, position: int, offset: int) -> tuple[Any, ...]:
    call = code.calls[position]
    row, stream = OPS[call.op], call.fields.get("queue", "")
    if row.kind == "p2p":
        blocking = 0 if row.nonblocking else 2
        return (MESSAGE, offset, call.port, call.nbytes, _sends(call) + blocking + 4 * _signature(code, call), stream)
    if row.kind == "collective":
        return (GROUP, offset, call.group, call, call.signature, stream)
    if call.op in ("compute", "sleep"):
        on_host = call.op == "sleep" or stream == "host"
        return (HOST if on_host else WORK, offset, durations_ns(program, cost, code, position), 0, 0, stream)
    if call.op == "wait_stream":
        return (STREAM, offset, call.fields.get("stream", ""), 0, 0, stream)
    return ({"assign": WORK, "synchronize": STOP}.get(call.op, NOTHING), offset, 0, 0, 0, "")


def _sends(call: CodeCall) -> int:
    return int(OPS[call.op].direction == "send")


def _signature(code: Code, call: CodeCall) -> Any:
    return call.signature * _TAGS + code.ports[call.port].tag
