"""Findings that say when a timeout ends a wait.

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


def findings_with_waits(program: Program) -> tuple[Finding, ...]:
    """The findings of a program. Those on partners that do not exist say how long ranks block."""
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
    limits = program.group_timeouts_ns(profile.timeout_ns)
    for code in program.codes:
        rank = code.ranks[0]
        for call in code.distinct_calls(parts=True):
            if call.invalid is None or call.invalid.code != _NO_SUCH_PARTNER:
                continue
            resolved = program.resolve(rank, call)
            if profile.invalid(resolved, _NO_SUCH_PARTNER, program.options) == "hangs":
                yield program.sites[call.site].place(rank), limits[resolved.group.id]


def _limit_text(ns: int) -> str:
    return f"{ns // _MINUTE_NS} min" if ns % _MINUTE_NS == 0 else duration_text(ns)
