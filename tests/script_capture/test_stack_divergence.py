"""If both ranks are in one line of the script, the stacks of their calls show where they diverge."""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.findings.finding_types import Finding, SourceLocation
from distsim.script_capture.rank.line_trace import LineTrace, StackFrame
from distsim.script_capture.result.stack_divergence import with_stack_divergence

LIBRARY = """
def train():
    for epoch in range(2):
        run_epoch()
        evaluate()
    finish()
def fire(handlers):
    for handler in handlers:
        handler()
"""


@pytest.fixture
def library(tmp_path: Path) -> str:
    file = tmp_path / "site-packages" / "engine" / "loop.py"
    file.parent.mkdir(parents=True)
    file.write_text(LIBRARY, encoding="utf-8")
    return str(file)


def explained(*stacks: list[StackFrame], code: str = "DS201") -> Finding:
    places = tuple(SourceLocation("train.py", 9, 1, "barrier", rank) for rank in (0, 1))
    finding = Finding(code, "error", "calls differ", (0, 1), (), ("make the same calls",), places)
    return with_stack_divergence([finding], dict(enumerate(stacks)))[0]


def stack(*frames: tuple[str, int, str]) -> list[StackFrame]:
    return [StackFrame("train.py", 9, "<module>"), *(StackFrame(*frame) for frame in frames)]


def test_a_rank_that_has_left_a_loop_of_a_library_is_named_with_the_loop(library: str) -> None:
    found = explained(
        stack((library, 4, "train"), (library, 9, "reduce")), stack((library, 6, "train"))
    )

    assert found.message.splitlines()[1:] == [
        "  the ranks diverge in train() of engine/loop.py:",
        "    rank 0 is at line 4: run_epoch()",
        "    rank 1 is at line 6: finish()",
    ]
    assert found.help[0].startswith("run the loop at engine/loop.py:3 the same number of times")
    assert "rank 1 has left it, and rank 0 has not" in found.help[0]


def test_a_rank_that_is_further_in_the_same_loop_is_named_with_the_line(library: str) -> None:
    found = explained(stack((library, 5, "train")), stack((library, 4, "train")))

    assert found.help[0].startswith("make the same calls on all ranks in `run_epoch()`")
    assert "rank 0 has left it, and rank 1 has not" in found.help[0]


def test_a_line_that_calls_different_functions_is_named_with_both(library: str) -> None:
    found = explained(
        stack((library, 9, "fire"), (library, 1, "completed")),
        stack((library, 9, "fire"), ("train.py", 4, "tell")),
    )

    assert "  the ranks diverge at engine/loop.py:9: handler()" in found.message
    assert "completed() or tell()" in found.help[0]


@pytest.mark.parametrize(
    ("own", "code"),
    [([], "DS201"), (stack(), "DS201"), (stack(("train.py", 4, "tell")), "DS302")],
    ids=["no stack", "equal stacks", "a rank that ended"],
)
def test_stacks_that_show_nothing_change_nothing(own: list[StackFrame], code: str) -> None:
    found = explained(own, stack(), code=code)

    assert (found.message, found.help) == ("calls differ", ("make the same calls",))


def test_a_trace_keeps_the_stack_of_the_last_call() -> None:
    trace = LineTrace()
    assert trace.stack() == ()

    trace.write_stack(stack(("a.py", 3, "train"), ("b.py", 4, "step")))
    trace.write_stack(stack(("c.py", 5, "<lambda>")))

    assert trace.stack() == tuple(stack(("c.py", 5, "<lambda>")))
