"""No outcome moves unseen: those of some programs are kept in tests/data/outcomes.json."""

from __future__ import annotations

import json

import pytest

from tests.support.outcome_table import DATA, answers, cases

KEPT = json.loads(DATA.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", dict(cases()))
def test_the_outcome_of_a_program_is_the_recorded_one(name: str) -> None:
    """Every way to run it says so. Where a change is meant: `python -m
    tests.support.outcome_table`, and say why in the change.
    """
    now = answers(dict(cases())[name]())

    assert {
        question: said for question, said in now.items() if KEPT[name].get(question) != said
    } == {}
    assert list(KEPT[name]) == list(now)


def test_every_way_to_run_a_recorded_program_gives_the_same_result() -> None:
    """Where the file has two, two ways differ: a question to settle first (tests/data/settled)."""
    assert list(KEPT) == list(dict(cases()))
    assert {name for name, rows in KEPT.items() for said in rows.values() if len(said) > 1} == set()
