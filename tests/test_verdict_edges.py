"""The edges of a verdict: what readings say together, and what a finding takes along of the waits behind it."""

from __future__ import annotations

from typing import get_args

import pytest

from distsim.check.call_index import CallIndex
from distsim.check.ending import Ending, Example, How, depends_on, first_with, hows
from distsim.check.judge import _past as past
from distsim.check.judge import fold_waits, number_words
from distsim.check.layout import build_layout
from distsim.check.leaving import runs_of
from distsim.check.mismatch import Mismatch
from distsim.check.readings import Contract
from distsim.check.verdict import Verdict, verdict_of
from distsim.findings.record import Finding
from distsim.program.build import build_program
from distsim.program.lower import lower
from distsim.scenario import loads
from distsim.standstill import RankEnd, Standstill

EXAMPLE = Example(Standstill((), ()))


def ending(stuck: bool, passed: bool) -> Ending:
    return Ending({(0,): (0,)} if stuck else {}, passed, (), True, {"end": EXAMPLE})


NEVER, SOMETIMES, ALWAYS = ending(False, True), ending(True, True), ending(True, False)


# --- readings ---
@pytest.mark.parametrize(
    ("given", "said", "depends"),
    [
        ({"rendezvous": NEVER}, ["never"] * 4, None),
        ({"rendezvous": ALWAYS}, ["always"] * 4, None),
        ({"rendezvous": ALWAYS, "early": ALWAYS, "buffered": NEVER}, ["always", "always", "never", "sometimes"], "buffering"),
        ({"rendezvous": SOMETIMES, "early": SOMETIMES, "buffered": SOMETIMES}, ["sometimes"] * 4, "schedule"),
        ({"rendezvous": NEVER, "mixed": SOMETIMES}, ["never", "never", "never", "sometimes"], "buffering"),
        ({"rendezvous": ALWAYS, "mixed": ALWAYS}, ["always"] * 4, None),
    ],
)  # fmt: skip
def test_readings_that_agree_depend_on_nothing_and_one_that_is_not_there_ends_as_rendezvous(
    given: dict[str, Ending], said: list[How], depends: str | None
) -> None:
    found = hows(given, "deadlock")

    assert list(found.values()) == said
    assert depends_on(found) == depends
    first = first_with(given, "deadlock")
    assert (first is None) == (set(said) == {"never"})


def test_an_ending_has_kept_to_its_senders_unless_it_says_otherwise_and_an_example_is_an_end() -> None:
    relying = Ending({}, True, (), True, {"end": EXAMPLE}, relying=((0, 0, -1),))

    assert (NEVER.how("race"), relying.how("race")) == ("never", "sometimes")
    assert EXAMPLE.ended
    assert get_args(How) == ("always", "sometimes", "never")


# --- waits behind a mismatch ---
def wait(code: str, rank: int) -> Finding:
    return Finding(code, "error", f"rank {rank} waits\n  and more", (rank,), (rank,))


def test_a_wait_becomes_a_line_of_the_mismatch_its_ranks_came_to_and_of_no_other_finding() -> None:
    """Three are told and the rest counted; a wait of ranks that never came there, and what is no wait, stand alone."""
    misfit, leak = Finding("DS202", "error", "misfit", (0, 1, 2)), Finding("DS501", "warning", "leak", (0, 1, 2))
    waits = [wait("DS301", 0), wait("DS302", 1), wait("DS304", 0), wait("DS303", 1), wait("DS301", 0)]
    others = [wait("DS301", 2), wait("DS804", 0), wait("DS301", 7)]

    found = fold_waits([leak, misfit], [*waits, *others], {0, 1, 7})

    assert found[0] == leak
    assert found[1].message.splitlines() == [
        "misfit", "  in its wake, rank 0 waits", "  in its wake, rank 1 waits", "  in its wake, rank 0 waits",
        "  … and 2 more waits behind it",
    ]  # fmt: skip
    assert list(found[2:]) == others
    assert "more" not in fold_waits([misfit], waits[:3])[0].message


def test_another_operation_explains_all_else_that_differs() -> None:
    assert number_words(["numel", "op", "dtype"]) == "operation"
    assert number_words(["numel", "ranks"]) == "element count and members"
    assert Mismatch.__dataclass_fields__["note"].default == ""


def test_who_came_to_a_call_that_does_not_fit_has_got_to_the_first_of_them_or_beyond() -> None:
    """Two executions may have other calls of a rank; one that stands in the call itself has come to it."""
    differing = [Mismatch(0, 0, ((0, at, -1), (1, 2, -1), (2, 5, -1)), {}, (0, 1, 2)) for at in (7, 3)]
    left = Standstill(tuple(RankEnd(rank, "blocked", position) for rank, position in enumerate((3, 2, 4, 9))), ())

    assert past(differing, left) == {0, 1}


# --- what findings say ---
HEAD = """name: n
backend: gloo
tensors: {x: {shape: [4]}, h: {shape: [4], dtype: float16}, big: {shape: [12]}, many: {shape: ['12 + 3 * (rank == 1)']},
          y: {shape: ['4 + (rank == 1)']}}
"""
SHAPES = "the same model with the same layers frozen on each, and batches of one size"
LATER = "keep it with `as: h` and wait for h before its tensor is used and before the end"
#: World and program -> (code, lines of its message that are looked for, its first help) of each finding.
SAID: dict[str, tuple[int, str, list[tuple[str, list[str], str]]]] = {
    "a sum of parts that differ": (
        3, "- all_reduce: {tensor: y}",
        [("DS202", ["  rank 1         all_reduce(y, 20 B)  <text>:7  5 elements"],
          f"give tensors of one shape on all members: {SHAPES}")],
    ),
    "parts of several ranks that come together": (
        3, "- all_gather_into_tensor: {input: y, output: many}",
        [("DS202", ["  ranks 0 and 2  all_gather_into_tensor(y, 48 B)  <text>:7  4 elements"],
          "rank 1 differs from the rest: give tensors of one shape on all members: pad them, or use all_to_all_single with splits")],
    ),
    "a minority of two": (
        5, "- {all_reduce: {tensor: x}, ranks: rank > 1}\n- {all_reduce: {tensor: h}, ranks: rank < 2}",
        [("DS203", ["  ranks 0 and 1     all_reduce(h, 8 B)   <text>:8  float16"],
          "ranks 0 and 1 differ from the rest: cast to one dtype before the call")],
    ),
    "no minority": (
        4, "- {all_reduce: {tensor: x}, ranks: rank > 1}\n- {all_reduce: {tensor: h}, ranks: rank < 2}",
        [("DS203", ["  ranks 2 and 3  all_reduce(x, 16 B)  <text>:7  float32"], "cast to one dtype before the call")],
    ),
    "another operation": (
        3, "- {broadcast: {tensor: x, src: 0}, ranks: rank != 1}\n- {all_reduce: {tensor: h}, ranks: 1}",
        [("DS201", ["  rank 1         all_reduce(h, 8 B)         <text>:8"],
          "rank 1 differs from the rest: find the branch that makes the members part here, and let all of them make the same calls")],
    ),
    "a message of another size": (
        2, "- {send: {tensor: big, dst: 1}, ranks: 0}\n- {recv: {tensor: x, src: 0}, ranks: 1}",
        [("DS208", ["rank 0 sends 12 float32, but rank 1 receives into 4 float32"],
          "give both ends the same shape; if two receives from one peer are swapped, swap them back or tag them")],
    ),
    "a message of another dtype": (
        2, "- {send: {tensor: x, dst: 1}, ranks: 0}\n- {recv: {tensor: h, src: 0}, ranks: 1}",
        [("DS209", ["rank 0 sends 4 float32, but rank 1 receives into 4 float16"], "give both ends the same dtype")],
    ),
    "requests of one place, the last of them kept": (
        2, "- {repeat: {times: 3, steps: [{isend: {tensor: x, dst: 1, as: a}, ranks: 0}, {recv: {tensor: x, src: 0}, ranks: 1}]}}",
        [("DS501", ["isend of rank 0 is never waited for: no wait names its handle"], LATER),
         ("DS501", ["isend of rank 0 is never waited for (2 requests): its handle is bound again before"],
          "give each request a handle of its own, `as: h@i` in a loop, and wait for each")],
    ),
    "one request of each rank": (
        3, "- all_reduce: {tensor: x, async: true}",
        [("DS501", ["all_reduce of ranks 0, 1 and 2 is never waited for: it has no handle"], LATER)],
    ),
    "messages of one place that nobody receives": (
        2, "- {repeat: {times: 2, index: i, steps: [{isend: {tensor: x, dst: 1, as: a@i}, ranks: 0}]}}\n- {wait: all, ranks: 1}",
        [("DS501", ["isend of rank 0 is never waited for (2 requests): no wait names its handle"], LATER),
         ("DS502", ["rank 0 sends 2 messages that nobody receives"], "receive it on rank 1, or do not send it")],
    ),
    "ranks that leave": (
        3, "- {fail: no disk, ranks: 0}\n- {exit: {code: 3}, ranks: 1}\n- {exit: {code: 0}, ranks: 2}",
        [("DS802", ["rank 0 raised: no disk at <text>:7"], ""), ("DS803", ["rank 1 left by exit with an error code at <text>:8"], "")],
    ),
    "a fault behind the last call": (
        2, "- barrier\nfaults: [{rank: 0, kind: kill, before_call: 9}, {rank: 1, kind: raise, before_call: 1}]",
        [("DS801", ["rank 0 was killed by a fault of the file"], "")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("about", SAID)
def test_a_finding_says_who_differs_in_what_where_and_what_to_do(about: str) -> None:
    world, program, wanted = SAID[about]

    found = verdict_of(lower(loads(f"{HEAD}world: {world}\nprogram:\n{program}\n"))).findings

    assert [(f.code, f.help[0] if f.help else "") for f in found] == [(code, advice) for code, _, advice in wanted]
    for finding, (_, lines, _) in zip(found, wanted, strict=True):
        assert [line for line in lines if line not in finding.message.splitlines()] == []


def test_a_rank_that_leaves_at_a_call_without_a_line_is_told_without_a_place() -> None:
    program = build_program(1, {0: [{"op": "exit", "code": 2}]})
    program.sites[:] = [site._replace(line=0) for site in program.sites]

    found = verdict_of(program).findings

    assert [f.message for f in found] == ["rank 0 left by exit with an error code"]


# --- executions ---
def test_a_verdict_without_a_search_stores_no_state_and_is_complete() -> None:
    program = lower(loads(f"{HEAD}world: 2\nprogram:\n- barrier\n"))

    found = [verdict_of(program), verdict_of(program, ended=Standstill((), ()))]

    assert [(one.verdict, one.explored, one.complete) for one in found] == [("ok", 0, True)] * 2


def test_the_standstill_of_a_verdict_is_of_an_execution_that_has_it() -> None:
    """Where a rank leaves with requests open, the first execution may pass; the one that is shown does not."""
    ranks = [[{"op": "isend", "peer": 1, "numel": 4}, {"op": "exit", "code": 0}], [{"op": "recv", "peer": 0, "numel": 4}]]
    program = build_program(2, dict(enumerate(ranks)))
    layout = build_layout(program)
    ends = [one.standstill().stuck for one in runs_of(Contract(layout, CallIndex(layout)), "rendezvous")]

    found = verdict_of(program)

    assert sorted(ends) == [(), (1,)]
    assert found.verdict == "deadlock"
    assert found.depends_on == "schedule"
    assert found.standstill is not None
    assert found.standstill.stuck == found.ranks == (1,)
    assert found.stuck_sets == ((1,),)


def test_calls_that_meet_in_some_orders_only_are_a_mismatch_of_those() -> None:
    """Rank 0 leaves with its all_reduce open: it meets the others' or it does not. The execution that is shown is one in which it does."""
    said = [[{"op": "all_reduce", "numel": 4 + (rank == 0), "async": rank == 0}] for rank in range(2)]
    program = build_program(2, dict(enumerate([[*said[0], {"op": "exit", "code": 0}], said[1]])))

    found = verdict_of(program)

    assert found.verdict == "mismatch"
    assert found.depends_on == "schedule"
    assert set(found.readings.values()) == {"sometimes"}
    assert found.standstill is not None
    assert found.standstill.stuck == ()


def test_who_says_nothing_of_a_search_means_a_complete_one() -> None:
    assert Verdict("deadlock").complete


# --- what some buffering hides ---
FIRST = "- {all_reduce: {tensor: h, async: true}}\n- {send: {tensor: x, dst: 1 - rank}}\n- {recv: {tensor: x, src: 1 - rank}}"
ROOTED = """- {broadcast: {tensor: x, src: 0}, ranks: 0}
- {send: {tensor: x, dst: 1}, ranks: 0}
- {recv: {tensor: x, src: 0}, ranks: 1}
- {broadcast: {tensor: x, src: 0}, ranks: 1}"""


BATCH = (
    "- {batch_isend_irecv: {ops: [{isend: {tensor: x, dst: 1 - rank}}], as: b}}\n- wait: b\n- {recv: {tensor: x, src: 1 - rank}}"
)


@pytest.mark.parametrize(
    ("program", "hidden"),
    [(FIRST, "sends are buffered"), (BATCH, "sends are buffered"), (ROOTED, "leaves a collective that has a root")],
)
def test_a_deadlock_that_some_buffering_hides_says_which_and_nothing_of_what_was_left_open(program: str, hidden: str) -> None:
    found = verdict_of(lower(loads(f"{HEAD}world: 2\nprogram:\n{program}\n")))

    assert (found.verdict, found.depends_on) == ("deadlock", "buffering")
    assert [f.code for f in found.findings] == ["DS301", "DS603"]
    assert hidden in found.findings[1].message
