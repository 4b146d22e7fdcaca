"""scenarios/zoo: hangs that people reported. Each says what a run on each back end comes to, and distsim must say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from zoo_list import LINK, files, listing

from distsim.expectations import check_file
from distsim.scenario import load

ROOT = Path(__file__).resolve().parent.parent
ZOO = files()
#: What the evidence says and the profiles do not yet: file -> the rule that is missing.
WAITING: dict[str, str] = {}


def marked(path: Path) -> object:
    rule = WAITING.get(path.stem)
    return pytest.param(path, id=path.stem, marks=[pytest.mark.xfail(reason=rule, strict=True)] if rule else [])


@pytest.mark.parametrize("path", [marked(path) for path in ZOO])
def test_what_the_report_says_comes_out(path: Path) -> None:
    checked = check_file(path)

    assert (checked.status, [str(d) for d in checked.differences]) == ("passed", [])


@pytest.mark.parametrize("path", ZOO, ids=lambda path: path.stem)
def test_a_case_says_what_happened_and_who_reported_it(path: Path) -> None:
    """A repaired sibling says what was changed; the report is linked from the faulty one."""
    scenario = load(str(path))

    assert path.read_text(encoding="utf-8").startswith("# ")
    assert scenario.name == path.stem
    assert scenario.expect is not None
    assert scenario.expect.verdict is not None
    assert isinstance(scenario.expect.outcome, dict)
    if not path.stem.endswith("_repaired"):
        assert LINK.search(scenario.about)


def test_a_repaired_case_stands_beside_its_faulty_one() -> None:
    stems = {path.stem for path in ZOO}
    alone = [s for s in stems if s.endswith("_repaired") and len([t for t in stems if t.startswith(s.split("_")[0] + "_")]) < 2]

    assert alone == []


def test_the_list_of_the_zoo_is_fresh() -> None:
    """After a change: ``python tests/zoo_list.py``."""
    assert (ROOT / "scenarios" / "zoo" / "README.md").read_text(encoding="utf-8") == listing()


def test_nothing_waits_for_a_rule_that_is_no_case() -> None:
    assert set(WAITING) <= {path.stem for path in ZOO}
