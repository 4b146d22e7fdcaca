"""The text of a diagnosis of a hung job."""

from __future__ import annotations

import distsim
from tests.support.source_trees import ROOT


def test_the_calls_of_eight_ranks_are_all_listed() -> None:
    diagnosis = distsim.doctor(ROOT / "tests" / "data" / "doctor" / "hangs" / "early_break.zip")

    state = diagnosis.to_text().partition("State of the ranks")[2]

    assert "all_reduce" in state
    assert "more calls, in --format json" not in state
