"""No finding describes a consequence of the first one: after the first is repaired, every other
finding must still be reported.

Notes on when the first one shows (with which buffers, backends and orders of events) are no
consequences: they belong to it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distsim.common.errors import DistsimError, ScenarioErrors
from distsim.findings.finding_types import Finding
from distsim.repair.search import find_repairs
from distsim.scenario import Scenario, loads
from distsim.simulation.check_scenario import check_file, check_scenario
from tests.support.single_faults import faulty_programs

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
CONDITIONS = ("DS603", "DS604", "DS605", "DS609")
#: Files with two independent faults, of which the repaired twin has none: the edits that repair the
#: first finding alone.
FIRST_REPAIRED = {
    "ds502_never_received": [
        ("dst: 1}\n    ranks: 0", "dst: 1, as: h}\n    ranks: 0\n  - {wait: h, ranks: 0}")
    ],
    "ds607_handle_dropped": [
        (
            "- recv: {tensor: y, src: 1 - rank}\n      - send: {tensor: y, dst: 1 - rank}",
            "- batch_isend_irecv: {ops: [{irecv: {tensor: x, src: 1 - rank}}, "
            "{isend: {tensor: y, dst: 1 - rank}}]}",
        )
    ],
    "ds608_under_a_selector": [
        ("async: true}\n    ranks: 0", "async: true, as: h}\n    ranks: 0\n  - {wait: h, ranks: 0}")
    ],
}


def _in_order_of_report(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Errors first, then warnings, then notes."""
    order = ("error", "warning", "note")
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))


def _pairs() -> list[tuple[Path, Path]]:
    """Faulty programs with their repaired twins."""
    found = []
    for folder in ("findings", "zoo"):
        for repaired in sorted((SCENARIOS / folder).glob("*_repaired.yaml")):
            prefix = repaired.name.removesuffix("repaired.yaml")
            faulty = sorted(set(repaired.parent.glob(f"{prefix}*.yaml")) - {repaired})
            found += [(path, repaired) for path in faulty]
    return found


def _consequences(faulty: tuple[Finding, ...], remaining: tuple[Finding, ...]) -> list[str]:
    """The findings after the first that the repaired program no longer has."""
    faulty = _in_order_of_report(faulty)
    codes = {finding.code for finding in remaining}
    first = faulty[0].code if faulty else ""
    return [
        finding.message.partition("\n")[0]
        for finding in faulty[1:]
        if finding.code not in {first, *CONDITIONS, *codes}
    ]


@pytest.mark.parametrize(("faulty", "repaired"), _pairs(), ids=lambda path: path.stem)
def test_findings_after_the_first_remain_when_the_first_is_repaired(
    faulty: Path, repaired: Path
) -> None:
    found = check_file(faulty, max_states=1000).findings
    if faulty.stem not in FIRST_REPAIRED:
        assert _consequences(found, check_file(repaired, max_states=1000).findings) == []
        return
    text = faulty.read_text(encoding="utf-8")
    for old, new in FIRST_REPAIRED[faulty.stem]:
        assert old in text
        text = text.replace(old, new)
    remaining = check_scenario(loads(text), max_states=1000).findings
    # The second fault remains; what it leads to may now have another code.
    second = _in_order_of_report(found)[1]
    assert set(second.ranks) & {place.rank for finding in remaining for place in finding.places}


# --- all other faulty programs ---
def _faulty_files() -> list[Path]:
    """All scenarios but the pairs above, and the programs in tests/data."""
    in_pairs = {faulty for faulty, _ in _pairs()}
    files = [*SCENARIOS.rglob("*.yaml"), *(SCENARIOS.parent / "tests/data").rglob("*.yaml")]
    return sorted(set(files) - in_pairs)


@pytest.mark.slow
@pytest.mark.parametrize("file", _faulty_files(), ids=lambda path: path.stem)
def test_one_change_does_not_remove_a_finding_after_the_first(file: Path) -> None:
    """A change of one call repairs one fault; a second finding that it removes was none."""
    text = file.read_text(encoding="utf-8")
    try:
        found = check_scenario(loads(text, str(file)), max_states=1000).findings
    except DistsimError:  # not a scenario, or one that is refused
        return
    if not _consequences(found, ()):
        return
    for repair in find_repairs(text, str(file), most=100):
        changes = [words for words in repair.words if "update `expect`" not in words]
        remaining = check_scenario(loads(repair.text, str(file)), max_states=1000).findings
        if len(changes) == 1:
            assert _consequences(found, remaining) == [], repair.words


# --- random programs with one fault ---
DRAWS = 24 * int(os.environ.get("DISTSIM_DRAWS", "1"))


@pytest.mark.parametrize("seed", range(DRAWS))
def test_one_fault_in_a_program_adds_one_finding(seed: int) -> None:
    """Repaired, the program has all findings that followed the first."""
    known: tuple[Finding, ...] | None = None
    for right, faulty in faulty_programs(seed):
        if known is None:
            known = check_scenario(Scenario(**right), max_states=1000).findings
        if any(finding.severity == "error" for finding in known):
            return
        try:
            found = check_scenario(Scenario(**faulty), max_states=1000).findings
        except ScenarioErrors:  # for example, a wait for a request that is no longer made
            continue
        assert _consequences(found, known) == [], faulty
