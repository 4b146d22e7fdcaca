"""The first proposal for a faulty program is the repair that a person would make.

The programs and their repairs are those of benchmarks/repair_programs.yaml.
"""

from __future__ import annotations

import pytest

from benchmarks.repairs import PROGRAMS, RepairTrial, trials

#: Searches are made once for both tests.
_TRIALS: dict[str, RepairTrial] = {}


def _all_trials() -> dict[str, RepairTrial]:
    if not _TRIALS:
        _TRIALS.update({f"{trial.kind}: {trial.name}": trial for trial in trials()})
    return _TRIALS


def test_the_benchmark_has_many_programs_of_many_kinds() -> None:
    found = _all_trials().values()

    assert len(found) >= 60
    assert len({trial.kind for trial in found}) >= 15
    assert PROGRAMS.exists()


def test_nine_of_ten_first_repairs_are_right() -> None:
    wrong = [title for title, trial in _all_trials().items() if not trial.is_right]

    assert len(wrong) <= len(_all_trials()) // 10, wrong


def test_no_first_repair_removes_data_that_the_right_repair_keeps() -> None:
    assert [title for title, trial in _all_trials().items() if trial.loses_data] == []


@pytest.mark.parametrize("kind", ["uneven batches", "wrong group", "request"])
def test_a_repair_names_line_rank_and_group(kind: str) -> None:
    for title, trial in _all_trials().items():
        if trial.kind == kind:
            words = trial.fixes[0].words[0]
            assert "line " in words, title
            assert "rank" in words, title
