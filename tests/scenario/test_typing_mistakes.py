"""Messages: a hundred typing mistakes and more, each with its place and its remedy, as a person has
read them.
"""

from __future__ import annotations

from distsim.common.errors import ScenarioErrors, ScenarioProblem
from distsim.scenario import loads
from distsim.scenario.format.source.yaml_nodes import dump_yaml
from tests.support import typing_mistakes
from tests.support.spoilt_files import from_json, mutants


def test_each_typing_mistake_is_reported_as_it_was_read() -> None:
    """tests/data/typing_mistakes.txt; `python -m tests.support.typing_mistakes` writes it, to be
    read before it is kept.
    """
    assert len(typing_mistakes.texts()) >= 100
    assert typing_mistakes.report() == typing_mistakes.KEPT.read_text(encoding="utf-8")


def problems(text: str) -> tuple[ScenarioProblem, ...]:
    """What is refused of a text."""
    try:
        loads(text, "f.yaml")
    except ScenarioErrors as errors:
        return errors.problems
    return ()


def test_each_typing_mistake_is_refused_with_a_place_and_a_remedy() -> None:
    for text in typing_mistakes.texts():
        found = problems(text)
        assert found, f"it loads: {text}"
        assert all(p.line and p.hint for p in found), text


def test_errors_of_damaged_files_have_a_remedy() -> None:
    """Of files with one place changed at random."""
    found = [
        problem
        for _, data in mutants(150, seed=3)
        for problem in problems(dump_yaml(from_json(data)))
    ]

    assert len(found) > 50
    assert [p.render() for p in found if not p.hint] == []
