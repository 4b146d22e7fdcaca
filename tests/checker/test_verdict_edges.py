"""The edges of a verdict: what readings say together, and what a finding takes along of the waits
behind it.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from distsim.checker.diagnosis.match_findings import _ranks_past_mismatch as past
from distsim.checker.diagnosis.match_findings import attach_consequences, difference_words
from distsim.checker.early_exit import early_exit_runs
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.call_mismatch import CallMismatch
from distsim.checker.matching.channel_layout import build_channel_layout
from distsim.checker.reading_result import (
    MAX_STATES,
    ExampleExecution,
    Frequency,
    ReadingResult,
    first_reading_with,
    frequency_by_reading,
    verdict_dependence,
)
from distsim.checker.reading_run import ContractProgram
from distsim.checker.verdict import Verdict, verdict_of
from distsim.findings.final_state import FinalState, RankEnd
from distsim.findings.finding_types import Finding
from distsim.program.from_calls import build_program
from distsim.program.lower import lower
from distsim.scenario import loads

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ExampleExecution(FinalState((), ()))


def ending(stuck: bool, passed: bool) -> ReadingResult:
    return ReadingResult({(0,): (0,)} if stuck else {}, passed, (), True, {"end": EXAMPLE})


NEVER, SOMETIMES, ALWAYS = ending(False, True), ending(True, True), ending(True, False)


# --- readings ---
@pytest.mark.parametrize(
    ("given", "said", "depends"),
    [
        ({"rendezvous": NEVER}, ["never"] * 4, None),
        ({"rendezvous": ALWAYS}, ["always"] * 4, None),
        (
            {"rendezvous": ALWAYS, "early": ALWAYS, "buffered": NEVER},
            ["always", "always", "never", "sometimes"],
            "buffering",
        ),
        (
            {"rendezvous": SOMETIMES, "early": SOMETIMES, "buffered": SOMETIMES},
            ["sometimes"] * 4,
            "schedule",
        ),
        (
            {"rendezvous": NEVER, "mixed": SOMETIMES},
            ["never", "never", "never", "sometimes"],
            "buffering",
        ),
        ({"rendezvous": ALWAYS, "mixed": ALWAYS}, ["always"] * 4, None),
    ],
)
def test_equal_variants_depend_on_nothing_and_an_absent_one_ends_like_rendezvous(
    given: dict[str, ReadingResult], said: list[Frequency], depends: str | None
) -> None:
    found = frequency_by_reading(given, "deadlock")

    assert list(found.values()) == said
    assert verdict_dependence(found) == depends
    first = first_reading_with(given, "deadlock")
    assert (first is None) == (set(said) == {"never"})


def test_an_end_state_has_the_posted_order_by_default_and_an_example_is_an_end_state() -> None:
    broken_reliances = ReadingResult(
        {}, True, (), True, {"end": EXAMPLE}, broken_reliances=((0, 0, -1),)
    )

    assert (NEVER.frequency("race"), broken_reliances.frequency("race")) == ("never", "sometimes")
    assert EXAMPLE.ended
    assert get_args(Frequency) == ("always", "sometimes", "never")


# --- waits behind a mismatch ---
def wait(code: str, rank: int) -> Finding:
    return Finding(code, "error", f"rank {rank} waits\n  and more", (rank,), (rank,))


def test_a_wait_is_listed_only_under_the_mismatch_that_its_ranks_reached() -> None:
    """Three are told and the rest counted; a wait of ranks that never came there, and what is no
    wait, stand alone.
    """
    misfit, leak = (
        Finding("DS202", "error", "mismatch", (0, 1, 2)),
        Finding("DS501", "warning", "leak", (0, 1, 2)),
    )
    waits = [
        wait("DS301", 0),
        wait("DS302", 1),
        wait("DS304", 0),
        wait("DS303", 1),
        wait("DS301", 0),
    ]
    others = [wait("DS301", 2), wait("DS804", 0), wait("DS301", 7)]

    found = attach_consequences([leak, misfit], [*waits, *others], {0, 1, 7})

    assert found[0] == leak
    assert found[1].message.splitlines() == [
        "mismatch",
        "  as a result, rank 0 waits",
        "  as a result, rank 1 waits",
        "  as a result, rank 0 waits",
        "  … and 2 more waits as a result",
    ]
    assert list(found[2:]) == others
    assert "more" not in attach_consequences([misfit], waits[:3])[0].message


def test_a_different_operation_explains_all_other_differences() -> None:
    assert difference_words(["numel", "op", "dtype"]) == "operation"
    assert difference_words(["numel", "ranks"]) == "element count and members"
    assert CallMismatch.__dataclass_fields__["note"].default == ""


def test_ranks_at_or_beyond_the_first_mismatched_call_have_reached_it() -> None:
    """Two executions may have other calls of a rank; one that stands in the call itself has come to
    it.
    """
    differing = [
        CallMismatch(0, 0, ((0, at, -1), (1, 2, -1), (2, 5, -1)), {}, (0, 1, 2)) for at in (7, 3)
    ]
    left = FinalState(
        tuple(RankEnd(rank, "blocked", position) for rank, position in enumerate((3, 2, 4, 9))), ()
    )

    assert past(differing, left) == {0, 1}


HEAD = """name: n
backend: gloo
tensors: {x: {shape: [4]}, h: {shape: [4], dtype: float16}}
"""


def test_an_exit_without_a_line_is_reported_without_a_place() -> None:
    program = build_program(1, {0: [{"op": "exit", "code": 2}]})
    program.sites[:] = [site._replace(line=0) for site in program.sites]

    found = verdict_of(program).findings

    assert [f.message for f in found] == ["rank 0 exited with an error code"]


# --- executions ---
def test_the_search_bound_is_the_number_of_states_in_the_help() -> None:
    assert f"[default: {MAX_STATES}]" in (ROOT / "docs" / "reference" / "cli.md").read_text(
        encoding="utf-8"
    )


def test_a_verdict_without_a_search_stores_no_state_and_is_complete() -> None:
    program = lower(loads(f"{HEAD}world: 2\nprogram:\n- barrier\n"))

    found = [verdict_of(program), verdict_of(program, ended=FinalState((), ()))]

    assert [(one.verdict, one.explored, one.complete) for one in found] == [("ok", 0, True)] * 2


def test_the_hang_in_a_verdict_belongs_to_an_execution_that_hangs() -> None:
    """Where a rank leaves with requests open, the first execution may pass; the one that is shown
    does not.
    """
    ranks = [
        [{"op": "isend", "peer": 1, "numel": 4}, {"op": "exit", "code": 0}],
        [{"op": "recv", "peer": 0, "numel": 4}],
    ]
    program = build_program(2, dict(enumerate(ranks)))
    layout = build_channel_layout(program)
    ends = [
        one.final_state().stuck
        for one in early_exit_runs(ContractProgram(layout, CallIndex(layout)), "rendezvous")
    ]

    found = verdict_of(program)

    assert sorted(ends) == [(), (1,)]
    assert found.verdict == "deadlock"
    assert found.depends_on == "schedule"
    assert found.final_state is not None
    assert found.final_state.stuck == found.ranks == (1,)
    assert found.stuck_sets == ((1,),)


def test_calls_that_match_only_in_some_orders_mismatch_in_those() -> None:
    """Rank 0 leaves with its all_reduce open: it meets the others' or it does not. The execution
    that is shown is one in which it does.
    """
    said = [
        [{"op": "all_reduce", "numel": 4 + (rank == 0), "async": rank == 0}] for rank in range(2)
    ]
    program = build_program(2, dict(enumerate([[*said[0], {"op": "exit", "code": 0}], said[1]])))

    found = verdict_of(program)

    assert found.verdict == "mismatch"
    assert found.depends_on == "schedule"
    assert set(found.readings.values()) == {"sometimes"}
    assert found.final_state is not None
    assert found.final_state.stuck == ()


@pytest.mark.parametrize("kind", ["mismatch", "deadlock"])
def test_a_failure_with_and_without_a_match_of_an_open_request_is_unconditional(kind: str) -> None:
    """Rank 0 leaves with a send open, which rank 1 takes or does not; ranks 2 and 3 differ, or
    wait, in each of these.
    """
    open_ends = [
        [{"op": "isend", "peer": 1}, {"op": "exit", "code": 0}],
        [{"op": "irecv", "peer": 0}],
    ]
    wrong = [[{"op": "send", "peer": 3, "numel": 4}], [{"op": "recv", "peer": 2, "numel": 5}]]
    if kind == "deadlock":
        wrong = [[{"op": "recv", "peer": 3}], []]

    found = verdict_of(build_program(4, dict(enumerate([*open_ends, *wrong]))))

    assert (found.verdict, set(found.readings.values()), found.depends_on) == (
        kind,
        {"always"},
        None,
    )


def test_a_verdict_that_mentions_no_search_is_complete() -> None:
    assert Verdict("deadlock").complete


# --- what some buffering hides ---
FIRST = "- {all_reduce: {tensor: h, async: true}}\n- {send: {tensor: x, dst: 1 - rank}}\n- {recv: {tensor: x, src: 1 - rank}}"
ROOTED = """- {broadcast: {tensor: x, src: 0}, ranks: 0}
- {send: {tensor: x, dst: 1}, ranks: 0}
- {recv: {tensor: x, src: 0}, ranks: 1}
- {broadcast: {tensor: x, src: 0}, ranks: 1}"""


BATCH = "- {batch_isend_irecv: {ops: [{isend: {tensor: x, dst: 1 - rank}}], as: b}}\n- wait: b\n- {recv: {tensor: x, src: 1 - rank}}"


@pytest.mark.parametrize(
    ("program", "hidden"),
    [
        (FIRST, "sends are buffered"),
        (BATCH, "sends are buffered"),
        (ROOTED, "return from a collective with a root"),
    ],
)
def test_a_deadlock_hidden_by_some_buffering_names_it_without_the_wildcard_order(
    program: str, hidden: str
) -> None:
    found = verdict_of(lower(loads(f"{HEAD}world: 2\nprogram:\n{program}\n")))

    assert (found.verdict, found.depends_on) == ("deadlock", "buffering")
    assert [f.code for f in found.findings] == ["DS301", "DS603"]
    assert hidden in found.findings[1].message


@pytest.mark.parametrize(("receiver_op", "runs"), [("recv", 1 + 20 + 1), ("irecv", 1)])
def test_each_request_whose_loss_matters_is_lost_in_a_run_of_its_own(
    receiver_op: str, runs: int
) -> None:
    """The loss of a message for which no rank waits is only a leak."""
    senders = {2 * k: [{"op": "isend", "peer": 2 * k + 1, "numel": 4}] for k in range(20)}
    receivers = {2 * k + 1: [{"op": receiver_op, "peer": 2 * k, "numel": 4}] for k in range(20)}
    layout = build_channel_layout(build_program(40, senders | receivers))
    contract = ContractProgram(layout, CallIndex(layout))

    found = [one.final_state().stuck for one in early_exit_runs(contract, "rendezvous")]

    assert len(found) == runs
    assert {ranks for ranks in found if len(ranks) == 1} == (
        {(rank,) for rank in receivers} if receiver_op == "recv" else set()
    )
