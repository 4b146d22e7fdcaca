"""What capture says is what distsim says: scenarios through the real worker on the hub, agreed
programs as scripts of torch.

A sample; ``pytest -m slow tests/script_capture/test_truth.py`` and ``benchmarks/capture_truth.py``
run them all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch.distributed  # noqa: F401 - the ranks are forked from this process

from distsim.script_capture.protocol.blocked_threads import is_supported
from tests.support.agreed import load_cases
from tests.support.case_scripts import difference, reason
from tests.support.hub_truth import SCENARIOS, compared, scenarios
from tests.support.hub_truth import reason as reason_of

pytestmark = pytest.mark.skipif(not is_supported(), reason="hang detection reads Linux's /proc")

#: One that completes, hangs, does not fit, is invalid, is refused by its back end; one of a
#: strategy.
FEW = (
    "ring_of_four",
    "any_source_ring",
    "size_mismatch",
    "findings/ds102_send_to_self",
    "findings/ds701_any_source_on_nccl",
    "strategies/fsdp_save_on_rank_0",
)
#: Kinds of agreed programs of which one is run for each back end.
KINDS = ("pipeline.basic", "group.order", "coll.params")


@pytest.mark.parametrize("name", FEW)
def test_a_scenario_on_the_hub_has_the_simulated_calls_and_verdict(name: str):
    assert compared(SCENARIOS / f"{name}.yaml") == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_script_has_the_agreed_verdict(kind: str, backend: str, tmp_path: Path):
    case = next(
        case for case in load_cases() if case["category"] == kind and case["world_size"] <= 4
    )

    assert difference(case, backend, tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "path"), scenarios(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_scenario_on_the_hub_is_as_simulated_or_differs_for_a_known_reason(
    name: str, path: Path
):
    found = compared(path)

    assert not found or reason_of(name), found


@pytest.mark.slow
@pytest.mark.parametrize("case", load_cases(), ids=lambda case: case["id"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_every_agreed_program_as_a_script_has_its_verdict(case, backend: str, tmp_path: Path):
    found = difference(case, backend, tmp_path)

    assert not found or reason(case, backend), found
