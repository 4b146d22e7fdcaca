"""What a standstill, a mismatch or a leak is told as: the code, who is to blame, where, and what to
do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from distsim.checker.detectors.swapped_collectives import swapped_collective_findings
from distsim.checker.diagnosis.hang_findings import diagnose_hang
from distsim.checker.diagnosis.wait_for_graph import build_wait_for_graph
from distsim.checker.verdict import Verdict, verdict_of
from distsim.findings.final_state import BlockedRank, FinalState, RankEnd, WaitDependency
from distsim.findings.finding_types import Finding
from distsim.program.from_calls import build_program
from distsim.program.model import Program, RankFault
from distsim.scenario import loads
from distsim.simulation.check_scenario import check_scenario
from tests.support.harness import work

BARRIER = {"op": "barrier"}
Calls = list[dict[str, Any]]


def send(peer: int, **more: Any) -> dict[str, Any]:
    return {"op": "send", "peer": peer, "numel": 4, **more}


def recv(peer: int | None, **more: Any) -> dict[str, Any]:
    return {"op": "recv", "peer": peer, "numel": 4, **more}


def reduce(**more: Any) -> dict[str, Any]:
    return {"op": "all_reduce", "numel": 4, **more}


def judge(ranks: Sequence[Calls], **more: Any) -> Verdict:
    return verdict_of(build_program(len(ranks), dict(enumerate(ranks)), **more))


def first(ranks: Sequence[Calls], **more: Any) -> Finding:
    return judge(ranks, **more).findings[0]


# --- deadlocks ---
def test_a_cycle_names_its_ranks_calls_lines_and_the_remedy() -> None:
    found = first([[send(1), recv(1)], [send(0), recv(0)]])

    assert found.code == "DS301"
    assert found.message.splitlines() == [
        "ranks 0 → 1 → 0 wait for each other in a cycle: all are blocked in send",
        "  rank 0  send(dst=1, 16 B)  rank 0:1  rank 1 receives it later (rank 1:2)",
        "  rank 1  send(dst=0, 16 B)  rank 1:1  rank 0 receives it later (rank 0:2)",
    ]
    assert found.help == (
        "let rank 1 receive before it sends, or post both calls with batch_isend_irecv",
    )
    assert [(p.rank, p.line) for p in found.places] == [(0, 1), (1, 1)]


def test_ranks_behind_a_cycle_are_reported_apart_from_it() -> None:
    found = first([[send(1), recv(1)], [send(0), recv(0)], [recv(0)]])

    assert (found.ranks, found.core) == ((0, 1, 2), (0, 1))
    assert found.message.splitlines()[-1] == "  because of this hang, rank 2 is blocked too"


def test_entering_two_groups_in_different_orders_is_one_cycle_over_both() -> None:
    a, b = {**BARRIER, "group": "a"}, {**BARRIER, "group": "b"}
    found = first([[a, b], [b, a]], groups={"a": [0, 1], "b": [0, 1]})

    assert found.code == "DS301"
    assert found.help == (
        "use the groups in the same order on all ranks, for example a first: now they use a and b "
        "in different orders",
    )


def test_a_collective_that_blocks_a_message_names_the_call_to_move() -> None:
    found = first([[BARRIER, send(1)], [recv(0), BARRIER]])

    assert found.code == "DS301"
    assert "move the message before the barrier" in found.help[0]


def test_messages_received_in_a_different_order_are_named_by_tag() -> None:
    found = first([[send(1, tag=1), send(1, tag=2)], [recv(0, tag=2), recv(0, tag=1)]])

    assert found.code == "DS301"
    assert found.help == (
        "rank 0 sends tag 1 first, but rank 1 receives tag 2 first: use the same order on both "
        "ranks, or send with isend. nccl ignores tags: there, the two calls match, and data arrive "
        "in the wrong tensor",
    )


def test_a_rank_that_skips_a_collective_is_the_cause_of_the_waits() -> None:
    found = first([[BARRIER, BARRIER], [BARRIER, BARRIER], [BARRIER]])

    assert (found.code, found.core) == ("DS302", (0, 1))
    assert found.message.splitlines()[0] == (
        "ranks 0 and 1 are blocked in barrier and wait for rank 2, which has already ended"
    )
    assert "call 2 on world; rank 2 makes only 1" in found.message


def test_a_rank_that_raised_is_the_cause_and_its_error_is_shown() -> None:
    found = first([[BARRIER], [{"op": "fail", "message": "out of memory"}, BARRIER]])

    assert found.code == "DS303"
    assert found.help == ('read the log of rank 1 first (error: "out of memory")',)


def test_ranks_that_ended_in_different_ways_are_listed_with_how_each_ended() -> None:
    fail = {"op": "fail", "message": "out of memory"}
    found = first(
        [[BARRIER, reduce()], [BARRIER, reduce()], [BARRIER, fail]],
        faults=(RankFault(0, "kill", 1),),
    )

    head = found.message.splitlines()[0]
    assert head.endswith("waits for ranks 0 and 2, which have exited"), found.message
    assert "rank 0  was killed" in found.message
    assert "rank 2  has raised an error" in found.message


def test_ranks_that_wait_for_one_that_never_started_block_in_init() -> None:
    found = first([[BARRIER]] * 3, faults=(RankFault(1, "absent"),))

    assert found.code == "DS303"
    assert (
        found.message.splitlines()[0]
        == "ranks 0 and 2 are blocked in init_process_group and wait for rank 1, which never started"
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        (send(1, tag=1), recv(0, tag=2), "has another tag"),
        (send(1, group="g"), recv(0), "uses another group"),
        (send(1), recv(2), "names another rank"),
        (recv(1, tag=3), send(0, tag=4), "has another tag"),
    ],
)
def test_an_unmatched_message_lists_near_matches(
    ours: dict[str, Any], theirs: dict[str, Any], difference: str
) -> None:
    found = first([[ours], [theirs], []], groups={"g": [0, 1]})

    assert found.code == "DS304"
    assert f" {difference}" in found.message


def test_a_surplus_message_is_counted() -> None:
    found = first([[send(1), send(1)], [recv(0)]])

    assert found.code == "DS304"
    assert found.help == (
        "add the receive on rank 1, or remove this call. Rank 1 makes 1 matching receive; this call "
        "needs one more",
    )


def test_messages_of_unequal_number_call_for_equally_many_iterations() -> None:
    found = first([[send(1)] * 3, [recv(0)] * 2])

    assert found.help[0].startswith("let rank 0 send as often as rank 1 receives")
    assert found.help[0].endswith("rank 1 makes 2 matching receives; this call needs one more")


def test_a_wildcard_receive_in_a_cycle_is_a_knot() -> None:
    found = first([[recv(None), send(1)], [recv(0), send(0)]])

    assert found.code == "DS305"


def test_many_ranks_are_summarised_quickly() -> None:
    """A ring of 1024: eight lines, the rest counted. Four times the ranks take less than five times
    the work.
    """

    def ring(world: int) -> Program:
        return build_program(
            world, {r: [send((r + 1) % world), recv((r - 1) % world)] for r in range(world)}
        )

    program, ring_of_256 = ring(1024), ring(256)
    verdict_of(ring(4))  # what is loaded at first use counts for neither
    lines = verdict_of(program).findings[0].message.splitlines()

    assert work(lambda: verdict_of(program)) < 5 * work(lambda: verdict_of(ring_of_256))
    assert lines[0] == (
        "1024 ranks (0 → 1 → 2 → 3 → … → 0) wait for each other in a cycle: all are blocked in send"
    )
    assert len(lines) == 10
    assert lines[-1] == "  … and 1016 more like this"


def test_a_deadlock_that_buffering_would_hide_is_reported_as_such() -> None:
    found = judge([[send(1), recv(1)], [send(0), recv(0)]])

    assert found.depends_on == "buffering"
    assert found.readings == {
        "rendezvous": "always",
        "early": "always",
        "buffered": "never",
        "mixed": "sometimes",
    }
    assert "DS603" in [f.code for f in found.findings]


def test_equal_sets_of_missing_ranks_share_one_node_of_the_graph() -> None:
    """512 ranks wait for 512 others and they for the first: one circle of all, with a shortest way
    round of two.
    """
    half = 512
    low, high = tuple(range(half)), tuple(range(half, 2 * half))
    blocked = tuple(
        BlockedRank(r, 0, (WaitDependency(0, -1, high if r < half else low),))
        for r in range(2 * half)
    )
    graph = build_wait_for_graph(
        FinalState(tuple(RankEnd(r, "blocked", 0) for r in range(2 * half)), blocked)
    )

    assert [(len(c.ranks), c.path) for c in graph.circles] == [(1024, (0, 512))]


def test_a_rank_blocked_behind_a_cycle_is_not_part_of_it() -> None:
    blocked = (
        BlockedRank(0, 0, (WaitDependency(0, -1, (1,)),)),
        BlockedRank(1, 0, (WaitDependency(0, -1, (0,)),)),
        BlockedRank(2, 0, (WaitDependency(0, -1, (0,)),)),
    )
    graph = build_wait_for_graph(
        FinalState(tuple(RankEnd(r, "blocked", 0) for r in range(3)), blocked)
    )

    assert (graph.core, graph.victims) == ((0, 1), (2,))


# --- mismatches ---
def test_a_skipped_collective_is_recognised_by_the_shifted_sequence() -> None:
    ranks = [[reduce(), BARRIER], [BARRIER], [reduce(), BARRIER]]
    found = judge(ranks)

    assert (found.verdict, found.culprits, found.ranks) == ("mismatch", (1,), (0, 1, 2))
    assert found.findings[0].help == (
        "call all_reduce(16 B) (rank 0:1) on rank 1 too: it skips the call, so its later calls are "
        "shifted by one",
    )


def test_the_rank_that_differs_is_listed_first() -> None:
    found = first([[reduce()], [reduce()], [reduce(numel=5)]])

    assert found.code == "DS202"
    assert found.core == (2,)
    assert found.message.splitlines()[1].startswith("  rank 2  all_reduce(20 B)")


def test_equal_calls_in_different_orders_are_one_finding() -> None:
    found = first([[reduce(), BARRIER], [BARRIER, reduce()], [reduce(), BARRIER]])

    assert found.code == "DS206"
    assert found.help == (
        "make the calls in the same order on all members; rank 1 has a different order",
    )


def test_uneven_splits_that_match_pairwise_are_no_mismatch() -> None:
    def exchange(into: list[int], out: list[int]) -> Calls:
        return [
            {"op": "all_to_all_single", "numel": sum(into), "in_splits": into, "out_splits": out}
        ]

    assert judge([exchange([1, 3], [1, 2]), exchange([2, 2], [3, 2])]).verdict == "ok"
    assert judge([exchange([1, 3], [1, 2]), exchange([2, 2], [2, 2])]).findings[0].code == "DS207"


def test_equal_message_mismatches_of_many_pairs_are_one_finding_per_line() -> None:
    found = judge([[send(1, numel=3)], [recv(0)]])

    assert [f.code for f in found.findings] == ["DS208"]
    assert (
        found.findings[0].message.splitlines()[0]
        == "rank 0 sends 3 float32 elements, but rank 1 receives into 4 float32 elements"
    )


def test_messages_keep_their_order_so_swapped_sizes_mismatch() -> None:
    sender = [send(1, op="isend", numel=n, handle=f"h{n}") for n in (64, 32)] + [
        {"op": "wait", "handles": "all"}
    ]

    assert judge([sender, [recv(0, numel=32), recv(0, numel=64)]]).verdict == "mismatch"


# --- leaks ---
def test_an_overwritten_handle_is_distinguished_from_a_dropped_one() -> None:
    overwritten = [
        send(1, op="isend", handle="h"),
        send(1, op="isend", handle="h"),
        {"op": "wait", "handles": ["h"]},
    ]
    dropped = [send(1, op="isend"), send(1)]
    receiver = [recv(0), recv(0)]

    assert "its handle is overwritten before" in first([overwritten, receiver]).message
    assert "the call has no handle" in first([dropped, receiver]).message


def test_a_message_never_received_is_reported_at_its_sender() -> None:
    found = judge([[send(1, op="isend")], []])

    assert (found.verdict, found.ranks) == ("leak", (0,))
    assert [f.code for f in found.findings] == ["DS501", "DS502"]


# --- names ---
def test_equal_collectives_with_swapped_tensors_match_by_order_not_by_name() -> None:
    def swapped(*names: str) -> Calls:
        return [reduce(tensor=name) for name in names]

    found = swapped_collective_findings(
        build_program(2, {0: swapped("a", "b"), 1: swapped("b", "a")})
    )

    assert [(f.code, f.ranks) for f in found] == [("DS601", (0, 1))]
    assert (
        swapped_collective_findings(build_program(2, {0: swapped("a", "b"), 1: swapped("a", "b")}))
        == ()
    )


def test_renaming_the_same_tensors_is_no_swap() -> None:
    ours, theirs = [reduce(tensor=n) for n in "ab"], [reduce(tensor=n) for n in "xy"]

    assert swapped_collective_findings(build_program(2, {0: ours, 1: theirs})) == ()


# --- where host and device are, and what was really made ---
def test_a_blocked_device_is_reported_apart_from_its_host_that_ran_on() -> None:
    """Under nccl a send returns when it is enqueued: the host of rank 0 is at its end, that of rank
    1 in a barrier.
    """
    program = build_program(2, {0: [send(1), recv(1)], 1: [send(0), recv(0), BARRIER]})
    blocked = tuple(
        BlockedRank(r, 2, (WaitDependency(0, -1, (1 - r,)),), device=True) for r in (0, 1)
    )
    found = diagnose_hang(
        program, FinalState((RankEnd(0, "blocked", 2), RankEnd(1, "blocked", 2)), blocked)
    )[0]

    assert "rank 0  device in send(dst=1, 16 B), host at the end" in found.message
    assert "rank 1  device in send(dst=0, 16 B), host in barrier, line 3" in found.message
    assert [(p.rank, p.op, p.line) for p in found.places] == [(0, "send", 1), (1, "send", 1)]


@pytest.mark.parametrize(
    ("calls", "is_explained"),
    [
        ("[{isend: {tensor: x, dst: 1}}]", True),
        ("[barrier, {all_reduce: {tensor: x, async: true, as: h}}, {wait: h}]", False),
    ],
)
def test_a_hang_explains_why_a_call_that_normally_returns_at_once_blocks_the_host(
    calls: str, is_explained: bool
) -> None:
    """On nccl, the first message creates a connection. The barrier has created the one that the
    all_reduce uses.
    """
    text = f"""
world: 2
backend: nccl
tensors: {{x: {{shape: [4]}}}}
program:
  - {{ranks: 0, steps: {calls}}}
  - {{ranks: 1, steps: {"[barrier]" if "barrier" in calls else "[{compute: {time: 1 ms}}]"}}}
"""
    hangs = [f for f in check_scenario(loads(text)).findings if f.code.startswith("DS3")]

    assert [" blocks the host here: " in hang.message for hang in hangs] == [is_explained]


def test_a_device_and_host_that_wait_in_the_same_call_are_one_entry() -> None:
    program = build_program(2, {0: [send(1), recv(1)], 1: [send(0), recv(0)]})
    blocked = tuple(
        BlockedRank(r, 0, (WaitDependency(0, -1, (1 - r,)),), device=True) for r in (0, 1)
    )
    found = diagnose_hang(
        program, FinalState((RankEnd(0, "blocked", 0), RankEnd(1, "blocked", 0)), blocked)
    )[0]

    assert "device" not in found.message


@pytest.mark.parametrize(("before", "made"), [(0, "none"), (2, "only 2")])
def test_remaining_calls_of_an_interrupted_rank_are_counted_to_its_end(
    before: int, made: str
) -> None:
    """Its program has 5 of them; what matters is how many it made."""
    found = first([[BARRIER] * 5] * 3, faults=(RankFault(2, "kill", position=before),))

    assert found.code == "DS303"
    assert f"call {before + 1} on world; rank 2 made {made}" in found.message


def test_the_help_names_a_dropped_request() -> None:
    """Gloo cancels it (G4); the receiver then waits for a rank that has ended."""
    program = build_program(2, {0: [{"op": "isend", "peer": 1, "numel": 4}], 1: [recv(0)]})
    ends = (RankEnd(0, "ended", 1), RankEnd(1, "blocked", 0))
    found = diagnose_hang(
        program, FinalState(ends, (BlockedRank(1, 0, (WaitDependency(0, -1, (0,)),)),))
    )[0]

    assert found.help == ("on rank 0, keep the request (`as: h`) and wait for it",)


# --- open receives ---
def test_a_message_taken_by_a_wildcard_receive_is_not_called_missing() -> None:
    found = first([[recv(None), recv(1)], [send(0)], [send(0)]])

    assert found.code == "DS304"
    assert (
        found.message.splitlines()[0]
        == "rank 0 waits for a message from rank 1 (rank 0:2), but rank 0 already received this "
        "message with a recv from any source (rank 0:1)"
    )
    assert "took rank 1's message" in found.message.splitlines()[3]
    assert found.help == (
        "set `src` in the recv of rank 0 (rank 0:1), or use different tags for different kinds of "
        "messages",
    )


def test_a_send_that_a_wildcard_receive_could_take_is_not_unmatched() -> None:
    """Ranks 0 and 1 send to each other first; rank 0 would receive from any source afterwards."""
    found = first([[send(1), recv(None)], [send(0), recv(0)]])

    assert found.code == "DS301"
    assert "rank 0 receives it" in found.message
