"""scenarios/zoo: hangs that people reported. Each says what a run on each back end comes to, and
distsim must say the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distsim.scenario import load
from distsim.simulation.check_scenario import check_scenario
from distsim.simulation.expectations import check_expectations
from tests.support.zoo_list import LINK, files, listing

ROOT = Path(__file__).resolve().parents[2]
ZOO = files()
#: What was planted in each faulty case, and how the first finding names it.
KNOWN = json.loads((ROOT / "tests" / "data" / "zoo.json").read_text(encoding="utf-8"))
#: What the evidence says and the profiles do not yet: file -> the rule that is missing.
WAITING: dict[str, str] = {}


def marked(path: Path) -> object:
    rule = WAITING.get(path.stem)
    return pytest.param(
        path, id=path.stem, marks=[pytest.mark.xfail(reason=rule, strict=True)] if rule else []
    )


@pytest.mark.parametrize("path", [marked(path) for path in ZOO])
def test_a_case_has_the_outcome_that_was_reported(path: Path) -> None:
    checked = check_expectations(path)

    assert (checked.status, [str(d) for d in checked.differences]) == ("passed", [])


@pytest.mark.parametrize("stem", KNOWN["faulty"])
def test_the_first_finding_names_the_planted_cause(stem: str) -> None:
    """Its code, and in its first line or its help the words for what was done wrong; on the back
    end that the report is about.
    """
    known = KNOWN["faulty"][stem]
    found = check_scenario(
        load(str(ROOT / f"scenarios/zoo/{stem}.yaml")), backend=known["backend"]
    ).findings
    first = found[0]

    assert first.code == known["code"]
    assert first.severity != "note"
    assert known["says"] in " ".join([first.message.partition("\n")[0], *first.help])


def test_every_case_has_a_finding_or_a_reason_for_having_none() -> None:
    assert {p.stem for p in ZOO if not p.stem.endswith("_repaired")} == {
        *KNOWN["faulty"],
        *KNOWN["nothing to find"],
    }
    for stem in KNOWN["nothing to find"]:
        checked = check_scenario(load(str(ROOT / f"scenarios/zoo/{stem}.yaml")))
        assert [f.code for f in checked.findings if f.severity == "error"] == []


def test_a_case_states_what_happened_and_who_reported_it() -> None:
    """A repaired sibling says what was changed; the report is linked from the faulty one."""
    wrong = []
    for path in ZOO:
        scenario = load(str(path))
        expect = scenario.expect
        wrong += (
            [(path.stem, "no comment at its head")]
            if not path.read_text(encoding="utf-8").startswith("# ")
            else []
        )
        wrong += [(path.stem, scenario.name)] if scenario.name != path.stem else []
        wrong += [(path.stem, "no verdict")] if expect is None or expect.verdict is None else []
        wrong += (
            [(path.stem, "no outcome of each back end")]
            if expect is None or not isinstance(expect.outcome, dict)
            else []
        )
        linked = path.stem.endswith("_repaired") or LINK.search(scenario.about)
        wrong += [] if linked else [(path.stem, "no link to the report")]

    assert wrong == []


def test_every_faulty_case_has_a_repaired_one() -> None:
    stems = {path.stem for path in ZOO}
    alone = [
        s
        for s in stems
        if s.endswith("_repaired")
        and len([t for t in stems if t.startswith(s.split("_")[0] + "_")]) < 2
    ]

    assert alone == []


def test_the_list_of_public_cases_is_up_to_date() -> None:
    """After a change: ``python -m tests.support.zoo_list``."""
    assert (ROOT / "scenarios" / "zoo" / "README.md").read_text(encoding="utf-8") == listing()


def test_every_unfinished_entry_of_the_list_is_a_case() -> None:
    assert set(WAITING) <= {path.stem for path in ZOO}
