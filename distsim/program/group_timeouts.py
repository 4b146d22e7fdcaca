"""The timeout of each process group, and findings that say when it ends a wait.

Key idea: not every invalid call raises. A rank that names a partner outside the group may look for
it until the timeout of the group. A finding that does not say so reads like an error at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from distsim.backends import BACKEND_PROFILES, BackendProfile
from distsim.common.units import duration_text
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.program.model import Program

_NO_SUCH_PARTNER = "DS101"
_MINUTE_NS = 60 * 10**9


def group_timeouts_ns(program: Program, profile: BackendProfile) -> list[int]:
    """The timeout of each group, by id.

    New groups do not inherit the world's (G12): without one they have the backend's default.
    """
    world = program.options.get("timeout_ns") or _timeout_of_init(program)
    own = [world if group.id == 0 else group.timeout_ns for group in program.groups]
    return [timeout or profile.timeout_ns for timeout in own]


def _timeout_of_init(program: Program) -> int | None:
    """The timeout that the first init_process_group with one names."""
    calls = (call for code in program.codes for call in code.calls)
    timeouts = (call.fields.get("timeout_ns") for call in calls if call.op == "init_process_group")
    return next((int(timeout) for timeout in timeouts if timeout), None)


def findings_with_waits(program: Program) -> tuple[Finding, ...]:
    """The findings of a program. Those on partners that do not exist say how long ranks block."""
    if all(finding.code != _NO_SUCH_PARTNER for finding in program.findings):
        return program.findings
    profile = BACKEND_PROFILES[program.backend]
    if profile.timed_out != "raises":
        return program.findings
    limits = dict(_waits_for_missing_partners(program, profile))
    found = []
    for finding in program.findings:
        limit_ns = limits.get(finding.places[0]) if finding.places else None
        if finding.code != _NO_SUCH_PARTNER or limit_ns is None:
            found.append(finding)
            continue
        wait = (
            f"{profile.name} does not raise: the call blocks until the timeout of the group "
            f"({_limit_text(limit_ns)})"
        )
        found.append(replace(finding, message=f"{finding.message}\n{wait}"))
    return tuple(found)


def _waits_for_missing_partners(
    program: Program, profile: BackendProfile
) -> Iterator[tuple[SourceLocation, int]]:
    """(place, timeout) of each call that waits for a partner that does not exist."""
    limits = group_timeouts_ns(program, profile)
    for code in program.codes:
        rank = code.ranks[0]
        for call in code.distinct_calls(parts=True):
            if call.invalid is None or not call.invalid[1].startswith(_NO_SUCH_PARTNER):
                continue
            resolved = program.resolve(rank, call)
            if profile.invalid(resolved, _NO_SUCH_PARTNER, program.options) == "hangs":
                yield program.sites[call.site].place(rank), limits[resolved.group.id]


def _limit_text(ns: int) -> str:
    return f"{ns // _MINUTE_NS} min" if ns % _MINUTE_NS == 0 else duration_text(ns)
