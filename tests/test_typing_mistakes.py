"""Messages: a hundred typing mistakes and more, each with its place and its remedy, as a person has read them."""

from __future__ import annotations

from distsim.scenario import loads
from tests import typing_mistakes
from tests.spoilt_files import from_json, mutants


def test_each_typing_mistake_is_told_as_it_was_read() -> None:
    """tests/data/typing_mistakes.txt; `python tests/typing_mistakes.py` writes it, to be read before it is kept."""
    assert len(typing_mistakes.texts()) >= 100
    assert typing_mistakes.report() == typing_mistakes.KEPT.read_text(encoding="utf-8")


def test_each_typing_mistake_is_refused_with_a_place_and_a_remedy() -> None:
    from distsim.errors import ScenarioErrors

    for text in typing_mistakes.texts():
        try:
            loads(text, "f.yaml")
        except ScenarioErrors as errors:
            assert all(p.line and p.hint for p in errors.problems), text
        else:
            raise AssertionError(f"it loads: {text}")


def test_refusals_of_spoilt_files_have_a_remedy() -> None:
    """Of files with one place changed at random."""
    from distsim.errors import ScenarioErrors
    from distsim.scenario.document import write

    told = 0
    for _, data in mutants(150, seed=3):
        try:
            loads(write(from_json(data)))
        except ScenarioErrors as errors:
            told += len(errors.problems)
            assert [p.render() for p in errors.problems if not p.hint] == []
    assert told > 50
