"""Profiles of scripts that never call `profiler.step()`."""

from __future__ import annotations

import pytest

import distsim
from distsim.trace.recordings.readers.kineto_file import ProfileEvent, RankProfile
from distsim.trace.recordings.readers.unmarked_steps import (
    find_steps,
    is_same_division,
    origin_note,
)
from tests.support.sample_profiles import change_profile, copy_of_sample


def profile(*names: str, rank: int = 0, sizes: tuple[int, ...] = ()) -> RankProfile:
    """Host operations of 10 ns, one after the other."""
    events = []
    for i, name in enumerate(names):
        category = "user_annotation" if name.startswith("Optimizer") else "cpu_op"
        args = {"Input Dims": [sizes[i]]} if sizes else {}
        events.append(ProfileEvent(name, category, "1", 10.0 * i, 10.0 * i + 10, args))
    return RankProfile("f", rank, 1, "gloo", {}, 0, events, {})


BACKWARD = "autograd::engine::evaluate_function: MmBackward0"
REDUCE, GATHER = "c10d::allreduce_", "c10d::_allgather_base_"


def test_steps_end_with_the_last_optimizer_before_the_next_backward():
    one = ("aten::mm", BACKWARD, "Optimizer.step#A.step", "Optimizer.step#B.step")
    found = find_steps(profile(*one, *one, "aten::mm"))

    assert found.steps == {0: (0, 40), 1: (40, 80)}
    assert "2 steps were found from the ends of Optimizer.step" in origin_note(found)


def test_without_an_optimizer_steps_repeat_their_communication():
    calls = (REDUCE, "aten::mm", REDUCE, GATHER) * 3
    found = find_steps(profile(*calls, sizes=(8, 0, 4, 4) * 3))

    assert found.steps == {0: (0, 40), 1: (40, 80), 2: (80, 120)}
    assert "repeated communication" in origin_note(found)


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(("aten::mm", REDUCE), id="one call"),
        pytest.param((REDUCE, REDUCE, REDUCE, GATHER), id="no repetition"),
    ],
)
def test_without_evidence_the_profile_is_one_step(calls):
    found = find_steps(profile(*calls))

    assert found.steps == {0: (0, 10 * len(calls))}
    assert "count as one step" in origin_note(found)


def test_ranks_with_different_numbers_of_found_steps_are_not_divided():
    three, four = (find_steps(profile(*[REDUCE] * count)) for count in (3, 4))

    assert is_same_division([three, three])
    assert not is_same_division([three, four])


def test_the_sample_without_marks_shows_the_same_straggler(tmp_path):
    folder = copy_of_sample(tmp_path / "job")
    for file in folder.iterdir():
        change_profile(file, without_marks)
    answer = distsim.slow(folder)
    (finding,) = answer.findings

    assert (finding.kind, finding.ranks, finding.phase) == ("straggler", (2,), "forward")
    assert finding.place.excess_ns == pytest.approx(120e6, rel=0.02)
    assert answer.raw.counted_steps >= 5
    assert any(
        "found from the ends of Optimizer.step" in note for note in answer.raw.recording.notes
    )


def without_marks(data):
    data["traceEvents"] = [
        event for event in data["traceEvents"] if not event["name"].startswith("ProfilerStep#")
    ]
