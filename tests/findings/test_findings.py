"""The table of finding codes: closed, ordered, explained, and true to what the checks say."""

from __future__ import annotations

import re

import pytest

from distsim.common.errors import DistsimError
from distsim.findings.codes import CODES, explain_code
from distsim.findings.finding_types import Finding
from distsim.scenario import loads
from distsim.simulation.check_scenario import check_scenario

#: Of a script (`of_scripts`) there is no scenario: tests/script_capture/test_store.py runs it.
#: Its example needs a search that is cut short (tests/findings/test_finding_scenarios.py).
BOUNDED = {"DS902"}


def findings(text: str) -> tuple[Finding, ...]:
    """All that a check says of a scenario."""
    return check_scenario(loads(text)).findings


def test_codes_are_ordered_and_their_group_determines_their_verdict() -> None:
    classes = {"1": "invalid", "2": "mismatch", "3": "deadlock", "4": "race", "5": "leak"}

    assert list(CODES) == sorted(CODES)
    assert all(re.fullmatch(r"DS[1-9]\d\d", code) for code in CODES)
    assert {code: info.verdict for code, info in CODES.items()} == {
        code: classes.get(code[2]) for code in CODES
    }


def test_every_code_of_a_class_except_a_leak_is_an_error() -> None:
    assert {
        i.code for i in CODES.values() if i.verdict not in (None, "leak") and i.severity != "error"
    } == set()


def test_every_code_has_a_page_in_80_columns() -> None:
    parts = ("What it is", "What happens", "What to do", "\nExample (")
    pages = {code: explain_code(code) for code in CODES}

    assert [
        code
        for code, page in pages.items()
        if not page.startswith(f"{code}  {CODES[code].title}\n")
    ] == []
    assert [
        (code, part) for code, page in pages.items() for part in parts if part not in page
    ] == []
    lines = [
        (code, line)
        for code, page in pages.items()
        for line in page.partition("\nExample (")[0].splitlines()
    ]
    assert [pair for pair in lines if len(pair[1]) > 80] == []


@pytest.mark.parametrize(("code", "language"), [("DS101", "scenario"), ("DS306", "script")])
def test_the_page_of_a_code_contains_its_texts_and_the_language_of_its_example(
    code: str, language: str
) -> None:
    info = CODES[code]
    words = " ".join(explain_code(code).split())

    assert f"What it is {' '.join(info.what.split())} What happens" in words
    assert f"What happens {' '.join(info.why.split())} What to do" in words
    assert f"{' '.join(info.remedy.split())} Example ({language})" in words


@pytest.mark.parametrize(
    "code", [code for code in CODES if code not in BOUNDED and not CODES[code].of_scripts]
)
def test_the_example_of_a_code_has_its_finding(code: str) -> None:
    """The page's own scenario is read, lowered and checked; the finding has the severity that the
    page states.
    """
    found = [f for f in findings(CODES[code].example) if f.code == code]

    assert found
    assert {f.severity for f in found} == {CODES[code].severity}
    assert all(f.message and f.message[0] != " " for f in found)


@pytest.mark.parametrize("code", [code for code, info in CODES.items() if not info.of_scripts])
def test_an_example_with_three_or_more_ranks_needs_each_of_them(code: str) -> None:
    example = CODES[code].example
    world = re.search(r"^world: (\d+)$", example, re.MULTILINE)
    if world is None or int(world[1]) < 3:
        return
    smaller = example.replace(world[0], f"world: {int(world[1]) - 1}", 1)

    try:
        found = [finding.code for finding in findings(smaller)]
    except DistsimError:
        return
    assert code not in found


def test_an_unknown_code_gets_the_nearest_as_suggestion() -> None:
    with pytest.raises(KeyError, match="did you mean DS301"):
        explain_code("DS3O1")
