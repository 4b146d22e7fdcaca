"""A program as the plain lists of calls that the naive simulators of the tests take
(`tests.support.reference`, `tests.support.brute_force`).
"""

from __future__ import annotations

from typing import Any

from distsim.engine.backend_outcomes import has_any_source_receive as has_any_source
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program

Plain = dict[str, Any]
#: Operations that the naive simulators know; local work is left out, for it blocks nobody.
_COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)
_NOTHING = ("compute", "sleep", "assign", "synchronize", "wait_stream", "destroy_process_group")


def can_be_plain(program: Program, any_source: bool) -> bool:
    """No faults, nothing invalid, no group made on the way, only operations that all naive
    simulators know.
    """
    if any(fault.kind not in ("slow", "late") for fault in program.faults) or (
        not any_source and has_any_source(program)
    ):
        return False
    calls = [call for code in program.codes for call in code.calls]
    if any(one.invalid is not None for call in calls for one in (call, *call.parts)):
        return False
    if any(OPERATIONS[call.op].signals for call in calls):
        return False
    known = ("p2p", "batch", "wait")
    return all(
        OPERATIONS[c.op].kind in known or c.op in (*_COLLECTIVES, *_NOTHING) for c in calls
    ) and not any(c.again for c in calls)


def plain_groups(program: Program) -> dict[str, list[int]]:
    return {f"g{group.id}": list(group.ranks) for group in program.groups[1:]}


def plain_calls(program: Program) -> dict[int, list[Plain]]:
    """The calls of each rank; a request is named by the position of the call that makes it."""
    return {
        rank: [
            plain for k, call in program.calls_of(rank) for plain in _plain(program, rank, k, call)
        ]
        for rank in range(program.world_size)
    }


def _plain(program: Program, rank: int, position: int, call: ResolvedCall) -> list[Plain]:
    code_call = program.code_call(rank, position)
    group = "world" if call.group.id == 0 else f"g{call.group.id}"
    if call.op in _NOTHING:
        return []
    if OPERATIONS[call.op].kind == "wait":
        made = {k for k, _ in program.calls_of(rank)}
        return [
            {
                "op": "wait",
                "handles": [f"p{position - d}" for d in code_call.waits if position - d in made],
            }
        ]
    request: Plain = {"handle": f"p{position}"} if call.is_async else {}
    if OPERATIONS[call.op].kind == "batch":
        request = request if code_call.handled else {}
        return [{"op": "batch", "ops": [_message(part) for part in call.parts], **request}]
    if OPERATIONS[call.op].kind == "p2p":
        return [{**_message(call), **request}]
    agreed = OPERATIONS[call.op].agreement(call)
    said = {
        "numel": agreed.get("numel"),
        "dtype": agreed.get("dtype"),
        "reduce_op": call.reduce_op or "sum",
    }
    rooted = {"root": call.root} if call.root is not None else {}
    return [
        {
            "op": call.op,
            "group": group,
            **said,
            **rooted,
            **({"async": True} if call.is_async else {}),
            **request,
        }
    ]


def _message(call: ResolvedCall) -> Plain:
    buffer = (call.inputs or call.outputs)[0]
    group = "world" if call.group.id == 0 else f"g{call.group.id}"
    relied_on = {"assume_from": call.assume_src} if call.assume_src is not None else {}
    return {
        "op": call.op,
        "peer": call.peer,
        "tag": call.tag,
        "numel": buffer.numel,
        "dtype": buffer.dtype,
        "group": group,
        **relied_on,
    }
