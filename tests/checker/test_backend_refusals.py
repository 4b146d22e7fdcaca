"""DS701 to DS704: calls that a backend refuses, and the advice on them."""

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


@pytest.mark.parametrize(
    ("backend", "dtype", "step", "subject"),
    [
        ("nccl", "float32", "recv: {tensor: x}", "nccl: recv without `src` is not supported"),
        (
            "mpi",
            "bfloat16",
            "all_reduce: {tensor: x}",
            "mpi: all_reduce does not support bfloat16 (tensor x)",
        ),
        (
            "nccl",
            "int32",
            "all_reduce: {tensor: x, op: band}",
            "nccl: all_reduce does not support op=band for int32 (tensor x)",
        ),
        ("mpi", "float32", "monitored_barrier", "mpi: monitored_barrier() is not supported"),
    ],
)
def test_a_refusal_names_the_backend_the_call_and_the_unsupported_part(
    backend: str, dtype: str, step: str, subject: str
) -> None:
    text = f"""
world: 2
backend: {backend}
tensors: {{x: {{shape: [4], dtype: {dtype}}}}}
program:
  - {step}
"""
    findings = check_scenario(loads(text)).findings
    refused = [finding.message for finding in findings if finding.code.startswith("DS7")]

    assert refused[0].startswith(f"{subject}; called on ranks 0 and 1 (")
