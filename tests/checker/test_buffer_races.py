"""Buffers touched while a request is open: what is a race and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from distsim.checker.verdict import Verdict, verdict_of
from distsim.program.from_calls import build_program
from distsim.program.lower import lower
from distsim.scenario import loads

HEAD = (
    "world: 2\ntensors: {x: {shape: [4], copies: 2}, y: {shape: [4]}, z: {shape: [4]}}\nprogram:\n"
)


def judge(*steps: str) -> Verdict:
    """The verdict on two ranks; each step is an entry of the program."""
    return verdict_of(lower(loads("name: t\n" + HEAD + "".join(f"  - {step}\n" for step in steps))))


def sending(*between: str) -> Verdict:
    """Rank 0 sends x with isend; the steps stand before its wait."""
    return judge(
        "{isend: {tensor: x, dst: 1, as: h}, ranks: 0}",
        *between,
        "{wait: h, ranks: 0}",
        "{recv: {tensor: z, src: 0}, ranks: 1}",
    )


def filling(*between: str) -> Verdict:
    """Rank 0 receives into x with irecv; the steps stand before its wait."""
    return judge(
        "{irecv: {tensor: x, src: 1, as: h}, ranks: 0}",
        *between,
        "{wait: h, ranks: 0}",
        "{send: {tensor: z, dst: 0}, ranks: 1}",
    )


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (sending("{compute: {time: 1 ms, writes: [x]}, ranks: 0}"), "DS402"),
        (sending("{compute: {time: 1 ms, adds: [x]}, ranks: 0}"), "DS402"),
        (sending("{assign: {tensor: x, value: 1}, ranks: 0}"), "DS402"),
        (sending("all_reduce: {tensor: x}"), "DS402"),
        (sending("broadcast: {tensor: x, src: 1}"), "DS402"),
        (filling("{compute: {time: 1 ms, reads: [x]}, ranks: 0}"), "DS403"),
        (filling("{assign: {tensor: y, value: x + 1}, ranks: 0}"), "DS403"),
        (filling("{compute: {time: 1 ms, writes: [x]}, ranks: 0}"), "DS402"),
        (filling("broadcast: {tensor: x, src: 0}"), "DS403"),
        (filling("all_reduce: {tensor: x}"), "DS402"),
    ],
)
def test_touching_a_buffer_while_its_request_is_open_is_a_race(found: Verdict, code: str) -> None:
    assert (found.verdict, found.depends_on) == ("race", None)
    assert code in [f.code for f in found.findings]
    assert 0 in found.ranks


@pytest.mark.parametrize(
    "found",
    [
        sending("{compute: {time: 1 ms, reads: [x]}, ranks: 0}"),
        sending("broadcast: {tensor: x, src: 0}"),
        sending("{compute: {time: 1 ms, writes: [x@1]}, ranks: 0}"),
        sending("{compute: {time: 1 ms, writes: [y]}, ranks: 0}"),
        filling("{compute: {time: 1 ms, reads: [x@1], writes: [y]}, ranks: 0}"),
    ],
)
def test_two_reads_or_other_buffers_are_no_race(found: Verdict) -> None:
    assert all(f.code not in ("DS402", "DS403") or 0 not in f.ranks for f in found.findings)


def test_after_the_wait_a_buffer_is_free() -> None:
    found = judge(
        "{isend: {tensor: x, dst: 1, as: h}, ranks: 0}",
        "{wait: h, ranks: 0}",
        "{compute: {time: 1 ms, writes: [x]}, ranks: 0}",
        "{recv: {tensor: y, src: 0}, ranks: 1}",
    )

    assert found.verdict == "ok"


def test_an_async_collective_uses_its_buffer_until_its_wait() -> None:
    reduce, use, wait = (
        "all_reduce: {tensor: x, async: true, as: h}",
        "compute: {time: 1 ms, reads: [x]}",
        "wait: h",
    )

    assert (judge(reduce, use, wait).verdict, judge(reduce, wait, use).verdict) == ("race", "ok")
    assert judge(reduce, use, wait).ranks == (0, 1)


def test_parts_of_a_batch_are_checked_against_each_other() -> None:
    def exchange(into: str) -> Verdict:
        ops = f"[{{isend: {{tensor: x, dst: 1 - rank}}}}, {{irecv: {{tensor: {into}, src: 1 - rank}}}}]"
        return judge(f"batch_isend_irecv: {{ops: {ops}}}")

    assert (exchange("x").verdict, exchange("y").verdict) == ("race", "ok")


def test_the_root_only_reads_and_other_ranks_only_write() -> None:
    """rank 0 broadcasts x, rank 1 receives it: reading it before the wait is a race on rank 1
    alone.
    """
    found = judge(
        "broadcast: {tensor: x, src: 0, async: true, as: h}",
        "compute: {time: 1 ms, reads: [x]}",
        "wait: h",
    )

    assert (found.verdict, found.ranks) == ("race", (1,))


def test_one_buffer_per_round_is_identified_by_its_index() -> None:
    steps = "[{irecv: {tensor: x@%s, src: 1 - rank, as: h@i}}, {isend: {tensor: y, dst: 1 - rank, as: k@i}}]"
    loop = f"repeat: {{times: 2, index: i, steps: {steps}}}"

    assert judge(loop % "i", "wait: all").verdict == "ok"
    assert judge(loop % "0", "wait: all").verdict == "race"


def test_a_worse_fault_is_reported_before_a_race() -> None:
    found = filling("{compute: {time: 1 ms, reads: [x]}, ranks: 0}", "{barrier: {}, ranks: 0}")

    assert found.verdict == "deadlock"
    assert "DS403" in [f.code for f in found.findings]


def test_calls_without_a_named_buffer_use_their_own_memory() -> None:
    calls: list[dict[str, Any]] = [
        {"op": "irecv", "peer": 0, "numel": 4, "handle": h} for h in "ab"
    ]
    sends = [{"op": "send", "peer": 1, "numel": 4}] * 2
    named = [{**call, "buf": "x"} for call in calls]
    wait = [{"op": "wait", "handles": "all"}]

    assert verdict_of(build_program(2, {0: sends, 1: calls + wait})).verdict == "ok"
    assert verdict_of(build_program(2, {0: sends, 1: named + wait})).verdict == "race"


# --- streams ---
WRITE, READ = (
    "{compute: {time: 1 ms, writes: [x], on: %s}}",
    "{compute: {time: 1 ms, reads: [x], on: %s}}",
)


@pytest.mark.parametrize(
    ("steps", "codes"),
    [
        ((WRITE % "copy", READ % "current"), ["DS403"]),
        ((WRITE % "copy", "{wait_stream: copy}", READ % "current"), []),
        ((WRITE % "copy", READ % "copy"), []),
        ((READ % "copy", READ % "current"), []),
        ((READ % "copy", WRITE % "current"), ["DS402"]),
        ((WRITE % "copy", "synchronize", READ % "current"), []),
        ((WRITE % "copy", "{wait_stream: {stream: copy, on: other}}", READ % "current"), ["DS403"]),
        (
            (
                WRITE % "copy",
                "{wait_stream: {stream: copy, on: other}}",
                "{wait_stream: other}",
                READ % "current",
            ),
            [],
        ),
        ((WRITE % "current", "{all_reduce: {tensor: x, on: reduce}}"), ["DS402"]),
        (
            (
                WRITE % "current",
                "{wait_stream: {stream: current, on: reduce}}",
                "{all_reduce: {tensor: x, on: reduce}}",
            ),
            [],
        ),
        (("{all_reduce: {tensor: x, on: reduce}}", READ % "current"), ["DS403"]),
        (
            (
                "{all_reduce: {tensor: x, async: true, as: h}}",
                "{wait: {handles: h, on: copy}}",
                READ % "copy",
            ),
            [],
        ),
        (
            (
                "{all_reduce: {tensor: x, async: true, as: h}}",
                "{wait: {handles: h, on: copy}}",
                READ % "current",
            ),
            ["DS403"],
        ),
        (
            (
                WRITE % "current",
                "{all_reduce: {tensor: x, async: true, as: h, on: copy}}",
                "{wait: h}",
            ),
            ["DS402"],
        ),
        (
            (
                WRITE % "copy",
                "{all_reduce: {tensor: x, async: true, as: h, on: copy}}",
                "{wait: h}",
                READ % "current",
            ),
            [],
        ),
    ],
)
def test_a_buffer_used_on_two_streams_needs_a_wait_between_the_streams(
    steps: tuple[str, ...], codes: list[str]
) -> None:
    found = judge(*steps)

    assert [f.code for f in found.findings if f.code.startswith("DS40")] == codes
    assert found.verdict == ("race" if codes else "ok")
