"""DS701 to DS704: the advice on calls that a backend refuses."""

from __future__ import annotations

import pytest

from distsim.scenario import loads
from distsim.simulation.check_scenario import check_scenario

RECEIVE = """\
world: 2
backend: {backend}
program:
  - send: {{tensor: {{shape: [{size}]}}, dst: 1}}
    ranks: 0
  - recv: {{tensor: {{shape: [{size}]}}}}
    ranks: 1
"""


@pytest.mark.parametrize(
    ("backend", "size", "code", "advice"),
    [
        ("gloo", 0, "DS704", "name the source, or receive at least one element"),
        (
            "nccl",
            1,
            "DS701",
            "name the source, or use gloo for this group (each group may have its own backend)",
        ),
    ],
)
def test_the_advice_on_a_refused_wildcard_receive_names_the_change(
    backend: str, size: int, code: str, advice: str
) -> None:
    """Gloo refuses only an empty one, so there a single element is enough."""
    findings = check_scenario(loads(RECEIVE.format(backend=backend, size=size))).findings
    refused = [finding for finding in findings if finding.code == code]

    assert [finding.help for finding in refused] == [(advice,)]
