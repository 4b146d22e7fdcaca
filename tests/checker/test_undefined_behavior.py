"""DS705: the lines of a program whose outcome under nccl is a matter of luck."""

from __future__ import annotations

import pytest

from distsim.findings.finding_types import Finding
from distsim.scenario import loads
from distsim.simulation.check_scenario import check_scenario
from distsim.simulation.simulate_scenario import simulate

#: The first calls create both communicators. Then the ranks use them in different orders.
OPPOSITE_ORDERS = """\
world: 2
backend: nccl
groups: {{g: [0, 1], h: [0, 1]}}
tensors: {{x: {{shape: [4]}}, y: {{shape: [4]}}}}
program:
  - all_reduce: {{tensor: x, group: {first}}}
  - all_reduce: {{tensor: y, group: h}}
  - ranks: 0
    steps:
      - all_reduce: {{tensor: x, group: {first}, async: true, as: a}}
      - all_reduce: {{tensor: y, group: h, async: true, as: b}}
      - wait: [a, b]
  - ranks: 1
    steps:
      - all_reduce: {{tensor: y, group: h, async: true, as: b}}
      - all_reduce: {{tensor: x, group: {first}, async: true, as: a}}
      - wait: [a, b]
"""


def undefined_finding(findings: tuple[Finding, ...]) -> Finding:
    (found,) = (finding for finding in findings if finding.code == "DS705")
    return found


@pytest.mark.parametrize("first", ["world", "g"])
def test_asynchronous_collectives_in_opposite_orders_name_both_groups_and_lines(first: str) -> None:
    found = undefined_finding(check_scenario(loads(OPPOSITE_ORDERS.format(first=first))).findings)

    assert found.message.startswith(
        f"undefined behaviour on nccl: ranks 0 and 1 use groups {first} and h in different orders"
    )
    assert [place.line for place in found.places] == [10, 11, 15, 16]
    assert found.help == (f"use {first} and h in the same order on all ranks",)


@pytest.mark.parametrize("first", ["world", "g"])
def test_simulate_explains_an_undefined_outcome_like_check(first: str) -> None:
    scenario = loads(OPPOSITE_ORDERS.format(first=first))

    simulation = simulate(scenario)

    assert (simulation.outcome, simulation.run.outcome) == ("undefined", "completes")
    expected = undefined_finding(check_scenario(scenario).findings)
    assert undefined_finding(simulation.findings) == expected
