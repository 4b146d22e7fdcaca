"""Every finding has a scenario that has it and one that has not:
scenarios/findings/ds301_circle.yaml and ds301_repaired.yaml.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.findings.codes import CODES
from distsim.simulation import expectations
from distsim.simulation.check_scenario import CheckResult, check_file

FOLDER = Path(__file__).resolve().parents[2] / "scenarios" / "findings"
#: A search with so small a bound is cut short (DS902), and only then.
FEW_STATES = 5
#: What only a captured script has is in tests/script_capture/test_store.py.
OF_SCENARIOS = [code for code, info in CODES.items() if not info.of_scripts]
each_code = pytest.mark.parametrize("code", OF_SCENARIOS)


def files(code: str) -> tuple[Path, Path]:
    """(the scenario that has the finding, the one that has not)."""
    repaired = FOLDER / f"{code.lower()}_repaired.yaml"
    (faulty,) = (p for p in FOLDER.glob(f"{code.lower()}_*.yaml") if p != repaired)
    return faulty, repaired


def checked(path: Path, code: str) -> CheckResult:
    return check_file(path, max_states=FEW_STATES) if code == "DS902" else check_file(path)


@each_code
def test_a_faulty_scenario_has_the_finding_of_its_page(code: str) -> None:
    """The severity is the page's; the message is a sentence, the help says what to do, the places
    are in the file.
    """
    faulty, _ = files(code)
    found = [f for f in checked(faulty, code).findings if f.code == code]

    assert found
    assert {f.severity for f in found} == {CODES[code].severity}
    assert all(f.message and not f.message[0].isspace() for f in found)
    assert {p.file for f in found for p in f.places} <= {str(faulty)}


@each_code
def test_the_verdict_of_a_faulty_scenario_is_at_least_as_severe_as_its_code(code: str) -> None:
    order = ["invalid", "mismatch", "deadlock", "race", "leak"]
    result = checked(files(code)[0], code)
    verdict = CODES[code].verdict

    assert result.verdict is not None
    assert verdict is None or order.index(result.verdict.verdict) <= order.index(verdict)


@each_code
def test_an_error_or_an_unexpected_outcome_exits_with_1(code: str) -> None:
    result = checked(files(code)[0], code)
    outcome = result.profiles[result.backend].outcome

    assert result.status() == int(CODES[code].severity == "error" or result.status() == 1)
    assert result.status() == 1 or outcome == "completes"


@each_code
def test_a_repaired_scenario_has_no_finding(code: str) -> None:
    """No error and no warning about its own back end, and it completes there."""
    _, repaired = files(code)
    result = checked(repaired, code)

    assert result.verdict is not None
    assert (result.verdict.verdict, result.status()) == ("ok", 0)
    assert [f.code for f in result.findings if f.code != "DS604"] == []
    assert code not in [f.code for f in result.findings]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.stem)
def test_a_scenario_meets_its_expectations(path: Path) -> None:
    held = expectations.check_expectations(path)

    assert (held.status, [str(d) for d in held.differences]) == ("passed", [])


def test_each_code_has_exactly_two_scenarios() -> None:
    assert sorted(FOLDER.glob("*.yaml")) == sorted(
        path for code in OF_SCENARIOS for path in files(code)
    )
