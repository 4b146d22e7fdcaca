"""scenarios/cases: what agreed cases and the comparison with brute force taught, each as a scenario
with its answer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.checker.explore.schedule_paths import follow_schedule
from distsim.checker.verdict import verdict_of
from distsim.program.lower import lower
from distsim.scenario import load
from distsim.simulation.expectations import check_expectations

FILES = sorted((Path(__file__).resolve().parents[2] / "scenarios" / "cases").glob("*.yaml"))

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_every_lesson_has_a_scenario() -> None:
    assert len(FILES) >= 12


@each_file
def test_a_lesson_ends_as_it_states(path: Path) -> None:
    checked = check_expectations(path)

    assert (checked.status, [str(d) for d in checked.differences]) == ("passed", [])


@each_file
def test_a_lesson_is_checked_completely_and_its_schedule_reproduces_the_hang(path: Path) -> None:
    program = lower(load(str(path)))
    found = verdict_of(program)

    assert found.complete
    assert found.schedule is None or follow_schedule(program, found.schedule) == found.final_state
