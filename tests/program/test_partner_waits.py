"""Findings that say when a timeout ends a wait."""

from __future__ import annotations

import pytest

from distsim.program.lower import lower
from distsim.scenario import loads

PROGRAM = """
name: p
world: 3
backend: {backend}
groups: {{g: {{ranks: [1, 2], timeout: 5 min}}}}
tensors: {{x: {{shape: [4]}}}}
program:
  - {{send: {{tensor: x, {partner}}}, ranks: 1}}
"""


@pytest.mark.parametrize(
    ("backend", "partner", "wait"),
    [
        ("gloo", "dst: 7", "(30 min)"),
        ("gloo", "group_dst: 2, group: g", "(5 min)"),
        ("gloo", "dst: 0, group: g", ""),
        ("mpi", "dst: 7", ""),
    ],
)
def test_a_finding_says_how_long_a_rank_looks_for_a_partner_that_does_not_exist(
    backend: str, partner: str, wait: str
) -> None:
    findings = lower(loads(PROGRAM.format(backend=backend, partner=partner))).findings

    (message,) = (finding.message for finding in findings if finding.code == "DS101")
    assert ("blocks until the timeout" in message) == bool(wait)
    assert message.endswith(wait)
