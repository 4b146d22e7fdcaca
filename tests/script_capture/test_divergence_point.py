"""The line at which two ranks diverge is the branch or the loop that leads to the mismatched calls,
not another branch that only one of them takes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from distsim.findings.finding_types import Finding, SourceLocation
from distsim.script_capture.hub.state import RankProcess
from distsim.script_capture.protocol.message_types import ProcessExit
from distsim.script_capture.rank.line_trace import LineTrace, TracedLine
from distsim.script_capture.result.divergence_point import (
    divergent_finding,
    find_divergence,
    waits_for_failed_rank,
    with_divergence,
)

LOADER = """
def train(batch):
    if r == 0:
        log()
    call("all_reduce")
for batch in range(6 - r):  # here
    train(batch)
call("barrier")
"""
EVALUATION = """
def mean(x):
    call("all_reduce", x)
def evaluate():
    mean(2)
for step in range(4):
    mean(3)
    if r == 0 and step % 2 == 1:  # here
        log(evaluate())
call("barrier")
"""
CONTINUE = """
for step in range(6):
    x = 1
    if r == 1 and step == 3: continue  # here
    call("broadcast")
    for p in range(2): x = p
call("barrier")
"""
BESIDE_LEGITIMATE_BRANCHES = """
for step in range(3):
    if r == 0:
        x = 1
        call("broadcast")
    else:
        call("broadcast")
    if step == 1:
        if r == 1:  # here
            call("all_reduce")
    call("barrier")
"""
BREAK = """
patience = 2 + r
for epoch in range(6):
    call("all_reduce")
    patience -= 1
    if patience == 0:  # here
        break
call("barrier")
"""
WHILE = """
left = 3 + r
while left:  # here
    call("all_reduce")
    left -= 1
call("barrier")
"""
SWAPPED = """
log()
if r == 0:  # here
    call("all_reduce")
    call("broadcast")
else:
    call("broadcast")
    call("all_reduce")
"""
CAUGHT_ERROR = """
def load(i):
    if r == 1 and i == 2:  # here
        raise ValueError
    return i
for i in range(4):
    try:
        load(i)
    except ValueError:
        continue
    call("all_reduce")
call("barrier")
"""
#: No branch leads to the mismatch.
OTHER_SIZE = """
for n in range(3):
    if r == 0:
        log()
    call("all_reduce", 4 + (n == 2) * r)
"""
ONE_LINE = """
for n in range(3):
    if r == 0 and n == 1: call("all_reduce")
    call("barrier")
"""


BESIDE_UNEVEN_LOOPS = """
for step in range(2):
    call("all_reduce")
    for parameter in range(2 + r):
        x = parameter
    norms = [x for parameter in range(2 + r)]
    if r == 0:  # here
        call("broadcast")
    call("barrier")
"""
#: The stages of a pipeline have unequally many layers.
OTHER_SIZE_BEHIND_UNEVEN_LOOP = """
for layer in range(2 + r):
    x = layer
call("all_reduce", 4 + r)
"""


class Made(list[tuple[int, str, TracedLine, object]]):
    """The calls of a rank: (lines executed until then, operation, line, argument)."""


def run_rank(file: Path, rank: int) -> tuple[list[TracedLine], Made]:
    """Run a script whose calls do nothing, and trace its lines as a captured rank does."""
    trace, made = LineTrace(), Made()

    def call(op: str, argument: object = 0) -> None:
        line = TracedLine(str(file), sys._getframe(1).f_lineno)
        made.append((len(trace.lines()), op, line, argument))

    names = {"r": rank, "call": call, "log": lambda *_: None}
    code = compile(file.read_text(encoding="utf-8"), str(file), "exec")
    before = sys.gettrace()
    trace.start(lambda name: name == str(file), str)
    try:
        exec(code, names)  # noqa: S102 - the script of this test
    finally:
        sys.settrace(before)
    return trace.lines(), made


def mismatch(first: Made, second: Made) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return next((a, b) for a, b in zip(first, second, strict=False) if (a[1], a[3]) != (b[1], b[3]))


@pytest.mark.parametrize(
    "script",
    [
        LOADER,
        EVALUATION,
        CONTINUE,
        BESIDE_LEGITIMATE_BRANCHES,
        BREAK,
        WHILE,
        SWAPPED,
        CAUGHT_ERROR,
        OTHER_SIZE,
        ONE_LINE,
        BESIDE_UNEVEN_LOOPS,
        OTHER_SIZE_BEHIND_UNEVEN_LOOP,
    ],
)
def test_the_branch_or_loop_that_leads_to_the_mismatch_is_named(
    script: str, tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    file.write_text(script, encoding="utf-8")
    expected = [n for n, text in enumerate(script.splitlines(), 1) if "# here" in text]
    (lines0, made0), (lines1, made1) = run_rank(file, 0), run_rank(file, 1)
    own, other = mismatch(made0, made1)
    calls = dict.fromkeys((own[2], other[2]), 1.0)

    # Each rank is blocked in its mismatched call.
    found = find_divergence(lines0[: own[0]], lines1[: other[0]], calls, calls)

    assert ([] if found is None else [found.line.line]) == expected


def explained(file: Path, script: str) -> tuple[Finding, ...]:
    """Two equal findings on the first mismatch of two ranks, with their divergence."""
    file.write_text(script, encoding="utf-8")
    (lines0, made0), (lines1, made1) = run_rank(file, 0), run_rank(file, 1)
    own, other = mismatch(made0, made1)
    places = tuple(
        SourceLocation(str(file), one[2].line, 1, one[1], rank)
        for rank, one in enumerate((own, other))
    )
    finding = Finding("DS201", "error", "calls differ", (0, 1), places=places)
    traces = {0: lines0[: own[0]], 1: lines1[: other[0]]}
    return with_divergence([finding, finding], traces, {})


def test_the_finding_names_the_line_the_counts_and_a_remedy(tmp_path: Path) -> None:
    file = tmp_path / "train.py"

    (found, last) = explained(file, CONTINUE)

    assert found.places[0] == SourceLocation(str(file), 4, 5, "branch", 0)
    assert found.message.splitlines()[1:] == [
        "  ranks 0 and 1 diverge at line 4, when it runs for the 4th time:",
        "    if r == 1 and step == 3: continue  # here",
        '    rank 0 continues with line 5: call("broadcast")',
        "    rank 1 continues with line 2: for step in range(6):",
        "    line 5 runs 6 times on rank 0, 5 times on rank 1",
    ]
    assert found.help[0].startswith("let all ranks take the same branch at line 4: `if r == 1")
    assert (last.message, last.help) == ("calls differ", ())


CHECKPOINT = """
for step in range(3):
    for batch in range(2):
        call("all_reduce")
    if r == 0:
        call("barrier")
"""
COMPREHENSION = """
def mean():
    return call("all_reduce")
losses = [mean() for batch in range(2 - r)]
call("barrier")
"""


@pytest.mark.parametrize(
    ("script", "remedy"),
    [
        (CHECKPOINT, "let all ranks take the same branch at line 5, or move line 6 out of it"),
        (CONTINUE, "let all ranks take the same branch at line 4: "),
        (SWAPPED, "make the same calls in the same order in both branches of line 3"),
        (COMPREHENSION, "run the loop at line 4 the same number of times"),
        (CAUGHT_ERROR, "fix the error that rank 1 raises at line 4: `raise ValueError`"),
    ],
)
def test_the_remedy_fits_what_leads_to_the_mismatch(
    script: str, remedy: str, tmp_path: Path
) -> None:
    assert explained(tmp_path / "train.py", script)[0].help[0].startswith(remedy)


def test_the_line_that_only_one_rank_executes_in_the_branch_is_a_place(tmp_path: Path) -> None:
    stops = (
        'for step in range(3):\n    if r == 1 and step == 1:\n        break\n    call("barrier")\n'
    )

    finding = explained(tmp_path / "train.py", stops + 'call("all_reduce")\n')[0]

    assert [(place.line, place.rank) for place in finding.places[:2]] == [(2, 0), (3, 1)]


SKIPPED_BEFORE_AN_ERROR = """
grad = None
if r == 0:
    call("all_reduce")
log(grad.sum())
"""


def test_the_branch_of_the_awaited_call_is_named_besides_the_error_behind_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "train.py"
    file.write_text(SKIPPED_BEFORE_AN_ERROR, encoding="utf-8")
    places = (
        SourceLocation(str(file), 5, 1, "fail", 1),
        SourceLocation(str(file), 4, 5, "all_reduce", 0),
    )
    finding = Finding("DS303", "error", "blocked", (0,), (0,), ("read the log",), places)
    lines = {rank: [TracedLine(str(file), n) for n in (2, 3)] for rank in (0, 1)}
    traces = {0: [*lines[0], TracedLine(str(file), 4)], 1: [*lines[1], TracedLine(str(file), 5)]}

    failed = {1: RankProcess(1, rank=1, ended=ProcessExit("raised", 1, "TypeError"))}
    killed = {1: RankProcess(1, rank=1, ended=ProcessExit("killed", -9, "SIGKILL"))}
    waiting = replace(finding, awaited=(1,))
    assert not waits_for_failed_rank([waiting], failed)
    assert waits_for_failed_rank([waiting], killed)
    (found,) = with_divergence([finding], traces, {})

    assert found.places[0].line == 3
    assert found.help == (
        "read the log",
        "if the error follows from the branch, let all ranks take the same branch at line 3, "
        "or move line 4 out of it: `if r == 0:`",
    )


PIPELINE_WITH_A_MEAN = """
for step in range(2):
    if r == 0:
        call("send")
    else:
        call("recv")
    call("all_reduce", 1)
    if r == 1:  # here
        call("all_reduce", 2)
"""


def test_a_collective_of_one_rank_is_found_among_messages(tmp_path: Path) -> None:
    """The lines of messages differ by role, so only collectives count."""
    file = tmp_path / "train.py"
    file.write_text(PIPELINE_WITH_A_MEAN, encoding="utf-8")
    traces = {rank: run_rank(file, rank)[0] for rank in (0, 1)}
    places = (
        SourceLocation(str(file), 4, 9, "send", 0),
        SourceLocation(str(file), 9, 9, "all_reduce", 1),
    )
    finding = Finding("DS301", "error", "cycle", (0, 1), (0, 1), places=places)

    (found,) = with_divergence([finding], traces, {})

    assert found.places[0].line == 8


LATE_WAIT = """
for step in range(3):
    call("all_reduce")
    if r == 0 and step == 1:  # here
        call("all_reduce")
    log("wait")
"""


def test_all_collectives_count_if_the_lines_of_the_finding_explain_nothing(tmp_path: Path) -> None:
    """The finding names the line of a wait, which both ranks execute equally often."""
    file = tmp_path / "train.py"
    file.write_text(LATE_WAIT, encoding="utf-8")
    traces = {rank: run_rank(file, rank)[0] for rank in (0, 1)}
    place = SourceLocation(str(file), 6, 5, "wait", 0)
    finding = Finding("DS302", "error", "blocked", (0,), awaited=(1,), places=(place,))
    lines = {3: 3, 5: 1}, {3: 3}
    calls = {
        rank: {TracedLine(str(file), line): count for line, count in of_rank.items()}
        for rank, of_rank in enumerate(lines)
    }

    (unexplained,) = with_divergence([finding], traces, {})
    (explained,) = with_divergence([finding], traces, calls)

    assert unexplained == finding
    assert explained.places[0].line == 4


def test_messages_and_other_findings_are_not_examined() -> None:
    send = SourceLocation("a.py", 3, 1, "send", 0)
    reduce = SourceLocation("a.py", 3, 1, "all_reduce", 0)

    assert divergent_finding([]) is None
    assert divergent_finding([Finding("DS304", "error", "", (0, 1), places=(send,))]) is None
    assert divergent_finding([Finding("DS501", "error", "", (0, 1), places=(reduce,))]) is None
    assert divergent_finding([Finding("DS201", "error", "", (0,), places=(reduce,))]) is None
    wait = SourceLocation("a.py", 3, 1, "wait", 0)
    for place in (reduce, wait):
        known = Finding("DS302", "error", "", (0,), awaited=(1,), places=(place,))
        assert divergent_finding([known]) is known


@pytest.mark.parametrize(
    ("end", "failed"),
    [
        (ProcessExit("raised", 1, "RuntimeError: no compiler"), True),
        (ProcessExit("exited", 1), True),
        (ProcessExit("exited", 0), False),
        (ProcessExit("ended"), False),
        (None, False),
    ],
)
def test_an_error_of_the_awaited_rank_is_the_cause_not_its_branch(
    end: ProcessExit | None, failed: bool
) -> None:
    """As in `if rank == 0: build()` before a barrier, where build() raises."""
    finding = Finding("DS303", "error", "blocked", (1,), awaited=(0,))
    ranks = {0: RankProcess(1, rank=0, ended=end), 1: RankProcess(2, rank=1)}

    assert waits_for_failed_rank([finding], ranks) is failed
    assert waits_for_failed_rank([], ranks) is False


def test_a_trace_holds_no_library_lines_and_survives_its_tracer(tmp_path: Path) -> None:
    """A function of another file, called in between, is not traced."""

    def frame_of_this_file() -> FrameType:
        return sys._getframe()

    file = tmp_path / "train.py"
    file.write_text("x = r\nlog()\nx += 1\n", encoding="utf-8")
    lines, _ = run_rank(file, 0)
    frame_of_this_file()

    assert [line.line for line in lines] == [1, 2, 3]
    assert {line.file for line in lines} == {str(file)}
