"""Why a call that returns at once stands still on the host: the first use of a communicator or a
connection (N8, N9).
"""

from __future__ import annotations

from dataclasses import replace

from distsim.backends import BackendProfile
from distsim.findings.final_state import FinalState
from distsim.findings.finding_types import Finding
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall
from distsim.program.model import Program


def with_host_waits(
    found: tuple[Finding, ...], program: Program, final_state: FinalState, profile: BackendProfile
) -> tuple[Finding, ...]:
    """The findings of a standstill; under a back end with a device those help more whose cause is
    such a call.
    """
    if not profile.device:
        return found
    stuck = {
        b.rank: call.op
        for b in final_state.blocked
        if not b.device and _returns_at_once(call := program.code_call(b.rank, b.position))
    }
    return tuple(
        _with_host_wait(one, next((stuck[rank] for rank in one.core if rank in stuck), ""), profile)
        for one in found
    )


def _returns_at_once(call: CodeCall) -> bool:
    return (
        OPERATIONS[call.op].nonblocking
        or call.is_async
        or (OPERATIONS[call.op].kind == "batch" and call.handled)
    )


def _with_host_wait(finding: Finding, op: str, profile: BackendProfile) -> Finding:
    """``op``: the call that stands still, "" where none does. Who is told a reason already is told
    no second.
    """
    said = (
        f"{op} waits on the host here: {profile.name} makes a communicator, and each connection on it, in the first call that uses it,"
        " together with those who share it; later calls return at once"
    )
    return replace(finding, help=(said, *finding.help)) if op and len(finding.help) < 2 else finding
