"""What a program uses, in words with which whoever looks for something in it says what it would be found in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from distsim.ops.table import OPS
from distsim.program.records import Code, CodeCall, Program

#: ``requests``: a call leaves a request, or is a batch. ``messages``: a send or a receive, signals among them; ``any source``: a peer is
#: open. ``remote``: another rank's memory. ``signals``, ``streams``: calls with them. ``branches``: ranks do not all make the same calls on
#: the same copies. ``new groups``: a step makes a group, or the world. ``timeouts``: one is said, or a call has its own.
#: ``host work``: a sleep, or a compute on the host, which no device waits for. ``numbers``: a tensor has a value or is assigned one; if
#: not, all that values can tell is lineage.
Feature = Literal[
    "requests", "messages", "any source", "remote", "signals", "streams", "host work", "branches", "new groups", "timeouts", "numbers",
]  # fmt: skip


def features_of(program: Program) -> frozenset[Feature]:
    """All features of a program, whether its calls are reached or not."""
    found = {feature for code in program.codes for call in code.distinct_calls() for feature in _of_call(call)}
    found |= {feature for code in program.codes for feature in _of_code(code)}
    if len(program.codes) > 1:
        found.add("branches")
    if program.options.get("timeout_ns") is not None or any(group.timeout_ns is not None for group in program.groups):
        found.add("timeouts")
    if any(spec.value is not None for spec in program.tensors.values()):
        found.add("numbers")
    return frozenset(found)


def _of_call(call: CodeCall) -> Iterator[Feature]:
    row = OPS[call.op]
    if makes_request(call) or call.parts:
        yield "requests"
    if row.direction is not None:
        yield "messages"
    if row.kind == "remote":
        yield "remote"
    if row.signals:
        yield "signals"
    if call.stream or call.op == "wait_stream":
        yield "streams"
    if call.op == "sleep" or call.fields.get("queue") == "host":
        yield "host work"
    if call.op in ("new_group", "init_process_group"):
        yield "new groups"
    if call.fields.get("timeout_ns") or call.op == "monitored_barrier":
        yield "timeouts"
    if call.op == "assign":
        yield "numbers"
    buffers = (buffer for side in ("inputs", "outputs") for buffer in call.fields.get(side) or ())
    if any(isinstance(buffer.index, np.ndarray) for buffer in buffers):
        yield "branches"


def _of_code(code: Code) -> Iterator[Feature]:
    if code.guards is not None:
        yield "branches"
    if any(np.any(np.asarray(port.peer) == -1) for port in code.ports):
        yield "any source"


def makes_request(call: CodeCall) -> bool:
    """The call leaves a request that someone has to wait for."""
    row = OPS[call.op]
    return (row.kind == "p2p" and row.nonblocking) or (row.kind in ("batch", "collective") and call.is_async)
