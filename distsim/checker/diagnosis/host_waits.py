"""Explain why a call that normally returns at once blocks the host.

The first use of a communicator, or of a connection on it, waits for the peers (semantics N8, N9).
"""

from __future__ import annotations

from dataclasses import replace

from distsim.backends import BackendProfile
from distsim.checker.diagnosis.hang_advice import COMMUNICATOR_CREATION
from distsim.findings.final_state import FinalState
from distsim.findings.finding_types import Finding
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall
from distsim.program.model import Program


def with_host_waits(
    found: tuple[Finding, ...], program: Program, final_state: FinalState, profile: BackendProfile
) -> tuple[Finding, ...]:
    """The findings of a hang, with a line of evidence if such a call is the cause.

    Only backends with a device have such calls.
    """
    if not profile.device:
        return found
    op_of: dict[int, str] = {}
    for blocked in final_state.blocked:
        if blocked.device:  # its host has moved on, perhaps to the end of the program
            continue
        if blocked.position >= len(program.code(blocked.rank).calls):
            continue  # blocked during the start-up of a program without calls
        call = program.code_call(blocked.rank, blocked.position)
        if _returns_at_once(call):
            op_of[blocked.rank] = call.op
    return tuple(_with_host_wait(finding, op_of, profile) for finding in found)


def _returns_at_once(call: CodeCall) -> bool:
    operation = OPERATIONS[call.op]
    if operation.nonblocking or call.is_async:
        return True
    return operation.kind == "batch" and call.handled


def _with_host_wait(finding: Finding, op_of: dict[int, str], profile: BackendProfile) -> Finding:
    """Add the explanation, if a rank of the core is blocked in such a call."""
    op = next((op_of[rank] for rank in finding.core if rank in op_of), None)
    if op is None or COMMUNICATOR_CREATION in finding.message:
        return finding
    reason = (
        f"  {op} blocks the host here: the first call on a communicator or connection creates it, "
        f"and {profile.name} then waits for all ranks that share it"
    )
    return replace(finding, message=f"{finding.message}\n{reason}")
