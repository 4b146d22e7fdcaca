"""What is said beside the verdict, and when nothing is said: a checker that cries wolf is switched
off.
"""

from __future__ import annotations

import pytest

from distsim.backends import BACKEND_PROFILES
from distsim.checker.detectors.lint import lint_findings
from distsim.findings.finding_types import Finding
from distsim.program.lower import lower
from distsim.scenario import loads

HEAD = "tensors: {x: {shape: [4]}, y: {shape: [4]}}\n"


def said(text: str, backend: str = "gloo") -> tuple[Finding, ...]:
    return lint_findings(
        lower(loads(f"backend: {backend}\n{HEAD}{text}")), BACKEND_PROFILES[backend]
    )


def codes(text: str, backend: str = "gloo") -> list[str]:
    return [finding.code for finding in said(text, backend)]


# --- timeouts of groups ---
GROUP = "world: 2\noptions: {timeout: 6 s}\ngroups: {pair: {ranks: [0, 1]%s}}\nprogram:\n  - all_reduce: {tensor: x%s}\n"


@pytest.mark.parametrize(
    ("timeout", "used", "backend", "expected"),
    [
        ("", ", group: pair", "gloo", ["DS606"]),
        ("", ", group: pair", "nccl", ["DS606"]),
        ("", ", group: pair", "mpi", []),  # mpi ignores timeouts
        (", timeout: 6 s", ", group: pair", "gloo", []),
        ("", "", "gloo", []),  # the group is not used
    ],
)
def test_a_used_group_with_the_default_timeout_is_named(
    timeout: str, used: str, backend: str, expected: list[str]
) -> None:
    assert codes(GROUP % (timeout, used), backend) == expected


def test_a_default_timeout_of_the_world_is_not_reported() -> None:
    assert codes((GROUP % ("", ", group: pair")).replace("options: {timeout: 6 s}\n", "")) == []


def test_mesh_axes_with_the_default_timeout_are_reported_together() -> None:
    found = said(
        "world: 4\noptions: {timeout: 6 s}\nmesh: {dp: 2, tp: 2}\nprogram:\n  - all_reduce: {tensor: x, group: dp}\n"
    )

    assert [f.code for f in found] == ["DS606"]
    assert "dp[tp=0], dp[tp=1]" in found[0].message
    assert found[0].ranks == (0, 1, 2, 3)


# --- handles ---
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("  - isend: {tensor: x, dst: 1}\n    ranks: 0\n", ["DS607"]),
        ("  - isend: {tensor: x, dst: 1, as: h}\n    ranks: 0\n  - wait: h\n    ranks: 0\n", []),
        (
            "  - isend: {tensor: x, dst: 1, as: h}\n    ranks: 0\n",
            [],
        ),  # kept to the end: a leak, and no more
        (
            "  - all_reduce: {tensor: x, async: true}\n",
            [],
        ),  # a collective goes on without its Work (G8)
    ],
)
def test_a_message_with_a_dropped_request_is_named(steps: str, expected: list[str]) -> None:
    assert codes(f"world: 2\nprogram:\n{steps}") == expected


def test_rebinding_a_name_drops_the_previous_request() -> None:
    steps = "  - repeat:\n      times: 2\n      steps:\n        - isend: {tensor: x, dst: 1, as: h}\n          ranks: 0\n"
    found = said(f"world: 2\nprogram:\n{steps}  - wait: h\n    ranks: 0\n")

    assert [f.code for f in found] == ["DS607"]
    assert "h@i" in found[0].help[0]


def test_nccl_accepts_a_dropped_request() -> None:
    """N13."""
    assert codes("world: 2\nprogram:\n  - isend: {tensor: x, dst: 1}\n    ranks: 0\n", "nccl") == []


# --- selectors ---
def test_a_collective_that_a_member_cannot_reach_is_noted() -> None:
    found = said("world: 3\nprogram:\n  - all_reduce: {tensor: x}\n    ranks: rank < 2\n")

    assert [(f.code, f.severity, f.ranks) for f in found] == [("DS608", "note", (0, 1, 2))]
    assert "excludes rank 2, a member" in found[0].message


@pytest.mark.parametrize(
    "program",
    [
        # each rank in a branch of its own, and all make the call
        "  - all_reduce: {tensor: x}\n    ranks: 0\n  - all_reduce: {tensor: y}\n    ranks: rank > 0\n",
        # all members of the group, though not all of the world
        "  - all_reduce: {tensor: x, group: low}\n    ranks: rank < 2\n",
        # two groups in another order on one rank: it delays, and does no harm
        "  - all_reduce: {tensor: x, group: low}\n    ranks: 0\n  - all_reduce: {tensor: y}\n"
        "  - all_reduce: {tensor: x, group: low}\n    ranks: 1\n",
    ],
)
def test_a_selector_that_includes_every_rank_is_not_reported(program: str) -> None:
    assert codes(f"world: 3\ngroups: {{low: [0, 1]}}\nprogram:\n{program}") == []


def test_a_loop_with_more_iterations_on_one_rank_is_no_selector() -> None:
    """Its place is reached by all; the missing turn is the diagnosis's to tell (DS302)."""
    steps = "  - repeat:\n      times: {0: 3, else: 2}\n      steps:\n        - all_reduce: {tensor: x}\n"

    assert codes(f"world: 2\nprogram:\n{steps}") == []
