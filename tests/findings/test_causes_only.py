"""No finding describes a consequence of the first one: a finding that goes away together with the
first, once that is repaired, must not have been reported.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.findings.finding_types import Finding
from distsim.simulation.check_scenario import check_file

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
#: Findings on when the first one shows: with which buffers, backends and orders of events.
CONDITIONS = ("DS603", "DS604", "DS605", "DS609")
#: Faulty programs whose repaired twin lacks another finding too, each with the reason.
KNOWN_EXCEPTIONS = {
    "ds303_raised": "DS802 is the error for which the other ranks wait",
    "ds801_killed": "DS801 is the fault for which the other ranks wait",
    "ds805_absent": "DS805 is the absence for which the other ranks wait",
    "ds401_wrong_sender": "DS401 is the reliance that the first finding breaks",
    "ds501_never_waited": "gloo cancels the message of the dropped request, which is DS304",
    "ds607_handle_dropped": "gloo cancels the message of the dropped request, which is DS304",
    "ds502_never_received": "the twin also keeps the request, which DS607 asks for",
    "ds608_under_a_selector": "DS608 names the selector that causes the hang",
    "ds807_rank_0_prepares_data": "DS303 is the hang of the run that DS807 explains",
}


def _pairs() -> list[tuple[Path, Path]]:
    """Faulty programs with their repaired twins."""
    found = []
    for folder in ("findings", "zoo"):
        for repaired in sorted((SCENARIOS / folder).glob("*_repaired.yaml")):
            prefix = repaired.name.removesuffix("repaired.yaml")
            faulty = sorted(set(repaired.parent.glob(f"{prefix}*.yaml")) - {repaired})
            found += [(path, repaired) for path in faulty]
    return found


def _findings(path: Path) -> tuple[Finding, ...]:
    return check_file(path, max_states=1000).findings


@pytest.mark.parametrize(("faulty", "repaired"), _pairs(), ids=lambda path: path.stem)
def test_findings_after_the_first_remain_when_the_first_is_repaired(
    faulty: Path, repaired: Path
) -> None:
    first, *others = [found.code for found in _findings(faulty)] or [""]
    remaining = {found.code for found in _findings(repaired)}

    expected = {first, *CONDITIONS, *remaining}
    consequences = [code for code in others if code not in expected]

    assert bool(consequences) == (faulty.stem in KNOWN_EXCEPTIONS), consequences
