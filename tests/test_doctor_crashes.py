"""`distsim doctor` on several ranks that failed of themselves: one cause where they failed alike, one for each where they did not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_doctor_logs import said


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
