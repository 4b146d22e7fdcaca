"""`distsim doctor` on several ranks that failed of themselves: one cause where they failed alike, one for each where they did not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor_dumps import dump, entry
from tests.test_doctor_logs import said
from tests.test_doctor_nccl import diagnosed


def raised(rank: int, error: str, line: int) -> list[str]:
    """A traceback in a rank's log."""
    text = [
        "Traceback (most recent call last):",
        f'  File "/job/train.py", line {line}, in step',
        "    loss = model(batch)",
        error,
    ]
    return [f"[rank{rank}]: {one}" for one in text]


@pytest.mark.parametrize("other", ["ValueError: empty batch", "KeyError: 'x'"])
def test_ranks_that_failed_alike_are_one_cause_and_others_a_cause_each(tmp_path: Path, other: str) -> None:
    """No order is known between them; each has the line and the class of its error."""
    found = said(tmp_path, *raised(1, "ValueError: empty batch", 33), *raised(3, other, 20))
    alike = other.startswith("ValueError")
    told = [
        (cause.kind, cause.culprits, [(ranks, what, f.line) for ranks, what, f in cause.lines if f]) for cause in found.causes
    ]
    first, second = ((1,), "ValueError", 33), ((3,), other.partition(":")[0], 20)

    if alike:
        assert told == [("crash", (1, 3), [first, second])]
        assert found.causes[0].title == "ranks 1 and 3 raised ValueError: empty batch before the others hung"
    else:
        assert told == [("crash", (1,), [first]), ("crash", (3,), [second])]


# --- calls that do not fit ---
def test_sizes_that_differed_in_calls_that_are_done_did_no_harm(tmp_path: Path) -> None:
    """The rank that has not come to the next call is named, and nothing is said of the call before; where it is not done, it is."""
    same, other = (
        entry(1, "all_gather", 10, "completed", input_sizes=[[8]]),
        entry(1, "all_gather", 10, "completed", input_sizes=[[4]]),
    )
    late = entry(2, "all_reduce", 20, "started")
    found = diagnosed(tmp_path, {0: dump([same, late]), 1: dump([other, late]), 2: dump([same])})

    assert [(cause.kind, cause.culprits) for cause in found.causes] == [("behind", (2,))]


def test_of_two_ranks_that_part_it_is_said_once_and_neither_is_accused(tmp_path: Path) -> None:
    """One makes a call that the other leaves out; which of them is wrong two lists of calls do not tell."""
    usual = [entry(n, "all_reduce", line) for n, line in enumerate((10, 12, 10, 12), 1)]
    more = [entry(n, "all_reduce", line) for n, line in enumerate((10, 15, 12, 10), 1)] + [entry(5, "all_reduce", 12, "started")]
    groups = {"0": ("default_pg", [0, 1])}
    found = diagnosed(tmp_path, {0: dump(usual, groups), 1: dump(more, groups)})

    assert [(cause.kind, cause.culprits, cause.ranks) for cause in found.causes if cause.kind == "parted"] == [
        ("parted", (), (0, 1))
    ]
    assert found.culprits == ()
