"""Recordings whose ranks cannot be compared: `slow` gives the reason and names no rank."""

from __future__ import annotations

import pytest

import distsim
from tests.support.sample_profiles import change_profile, copy_of_sample


@pytest.fixture
def folder(tmp_path):
    """A copy of the sample that a test may change."""
    return copy_of_sample(tmp_path / "job")


def without_communication(data):
    data["traceEvents"] = [
        event
        for event in data["traceEvents"]
        if not str(event.get("name")).startswith(("gloo", "c10d"))
    ]


def stretched(data):
    """Clocks that run at three times the speed, which no shift can align."""
    for event in data["traceEvents"]:
        if "ts" in event:
            event["ts"] = float(event["ts"]) * 3


def text_of(*paths):
    """The report on one line, for a search that ignores line breaks."""
    answer = distsim.slow(*paths)
    assert (answer.verdict, answer.findings) == ("not sure", ())
    return " ".join(answer.to_text().split())


def test_files_of_two_jobs_do_not_blame_a_rank(folder):
    change_profile(folder / "rank2.json.gz", stretched)

    text = text_of(folder)

    assert "These files do not fit together: their clocks differ by" in text
    assert "Are they of one run?" in text


def test_one_rank_asks_for_the_files_of_the_others(folder):
    text = text_of(folder / "rank2.json.gz")

    assert "One rank cannot be compared; give the files of ranks 0, 1, 3." in text
    assert "No rank is a straggler" not in text


def test_profiles_without_communication_are_not_judged(folder):
    for path in folder.glob("*.json.gz"):
        change_profile(path, without_communication)

    assert "No communication event links these ranks" in text_of(folder)


def test_one_rank_without_communication_events_is_named(folder):
    change_profile(folder / "rank2.json.gz", without_communication)

    text = text_of(folder)

    assert "Rank 2 has no communication events, but other ranks do" in text
    assert "unequal stages" not in text


def test_a_reversed_range_of_steps_is_named():
    with pytest.raises(distsim.UsageError, match="5-2: the range is reversed"):
        distsim.slow("sample", steps="5-2")
