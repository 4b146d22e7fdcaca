"""A mistake in messages between ranks is traced to the line that one rank executes differently from
ranks of its role, or from its own other runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distsim.findings.finding_types import Finding, SourceLocation
from distsim.script_capture.rank.line_trace import LineTrace, TracedLine
from distsim.script_capture.result.message_divergence import (
    PostedMessage,
    with_message_divergence,
)

#: Four stages; rank 1 sends one message more.
EXTRA = """
for step in range(5):
    if r > 0:
        recv(r - 1)
    if r < 3:
        send(r + 1)
        if r == 1 and step == 3:  # here
            send(r + 1)
"""
#: Two replicas of two stages; rank 3 swaps its passes once.
SWAPPED = """
def forward():
    if r >= 2: recv(r - 2)
    else: send(r + 2)
def backward():
    if r >= 2: send(r - 2)
    else: recv(r + 2)
for step in range(4):
    if step == 2 and r == 3:  # here
        backward()
        forward()
    else:
        forward()
        backward()
"""
#: No other rank has the role of rank 1.
SKIPPED = """
for step in range(6):
    if r == 1:
        if step != 4:  # here
            send(0)
    else:
        recv(1)
"""
WRONG_PEER = """
for step in range(4):
    if r < 2:
        to = r + 2
        if r == 1 and step == 2:
            to = 2
        send(to)  # here
    else:
        recv(r - 2)
"""
#: A correct 1F1B schedule: stages have different numbers of warm-up passes.
WARM_UP = """
for k in range(3 - r):
    forward()
for k in range(1 + r):
    forward()
    backward()
for k in range(3 - r):
    backward()
"""


def run_ranks(
    file: Path, count: int, odd: tuple[int, int] | None = None
) -> tuple[dict[int, list[TracedLine]], dict[int, list[PostedMessage]]]:
    """Traces and messages of all ranks. ``odd``: the message (rank, number) that none receives."""
    traces, messages = {}, {}
    for rank in range(count):
        trace, posted = LineTrace(), []

        def post(op: str, peer: int, rank: int = rank, posted: list = posted) -> None:
            frame = sys._getframe(2)
            is_matched = odd != (rank, len(posted))
            line = TracedLine(str(file), frame.f_lineno)
            posted.append(PostedMessage(line, op, peer, is_matched))

        names = {
            "r": rank,
            "send": lambda peer, post=post: post("send", peer),
            "recv": lambda peer, post=post: post("recv", peer),
            "forward": lambda rank=rank, post=post: post("send", rank + 1),
            "backward": lambda rank=rank, post=post: post("recv", rank + 1),
        }
        before = sys.gettrace()
        trace.start(lambda name: name == str(file), str)
        try:
            exec(compile(file.read_text(), str(file), "exec"), names)  # noqa: S102 - the script
        finally:
            sys.settrace(before)
        traces[rank], messages[rank] = trace.lines(), posted
    return traces, messages


def explained(
    tmp_path: Path, script: str, ranks: tuple[int, int], count: int, **more: tuple[int, int]
) -> Finding:
    file = tmp_path / "train.py"
    file.write_text(script, encoding="utf-8")
    traces, messages = run_ranks(file, count, **more)
    message = messages[ranks[0]][0]
    place = SourceLocation(message.line.file, message.line.line, 1, message.op, ranks[0])
    finding = Finding("DS304", "error", "blocked", ranks, ranks, ("add it",), places=(place,))
    (found,) = with_message_divergence([finding], traces, messages)
    return found


@pytest.mark.parametrize(
    ("script", "ranks", "count", "texts"),
    [
        (EXTRA, (1, 2), 4, ("ranks 1 and 2 diverge", "for the 4th time", "once on rank 1")),
        (SWAPPED, (1, 3), 4, ("ranks 2 and 3 diverge", "for the 3rd time")),
        (SKIPPED, (0, 1), 2, ("rank 1 takes another branch", "for the 5th time")),
    ],
)
def test_the_branch_that_leads_to_other_messages_is_named(
    script: str, ranks: tuple[int, int], count: int, texts: tuple[str, ...], tmp_path: Path
) -> None:
    found = explained(tmp_path, script, ranks, count)

    (expected,) = [n for n, text in enumerate(script.splitlines(), 1) if "# here" in text]
    assert (found.places[0].line, found.places[0].op) == (expected, "branch")
    assert all(text in found.message for text in texts), found.message
    assert f"line {expected}" in found.help[0]


def test_a_message_to_another_rank_than_the_others_of_its_line_is_named(tmp_path: Path) -> None:
    found = explained(tmp_path, WRONG_PEER, (1, 3), 4, odd=(1, 2))

    assert "the 3rd send of rank 1 at line 7 has dst=2; all others have dst=3" in found.message
    assert found.help == ("let rank 1 send to rank 3 at line 7 the 3rd time, too",)


def test_a_received_message_to_another_rank_is_no_mistake(tmp_path: Path) -> None:
    assert "the 3rd send" not in explained(tmp_path, WRONG_PEER, (1, 3), 4).message


def test_stages_whose_schedules_differ_by_design_have_no_common_role(tmp_path: Path) -> None:
    assert explained(tmp_path, WARM_UP, (0, 1), 3).message == "blocked"


def test_no_branch_leads_ranks_that_wait_for_each_other_at_one_line_there(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(EXTRA, encoding="utf-8")
    traces, messages = run_ranks(file, 4)
    places = tuple(SourceLocation(str(file), 3, 1, "recv", rank) for rank in (1, 2))
    cycle = Finding("DS301", "error", "cycle", (1, 2), (1, 2), ("send first",), places=places)

    assert with_message_divergence([cycle], traces, messages) == (cycle,)
