"""The rules by hand: what each profile does with the programs that people get wrong."""

from __future__ import annotations

from typing import Any

import pytest

from distsim.backends import BACKEND_PROFILES, CONTRACT_READINGS
from distsim.engine.backend_outcomes import has_any_source_receive
from distsim.findings.final_state import FinalState, WaitDependency
from distsim.program.from_calls import build_program
from distsim.program.model import Program, RankFault
from distsim.semantics.ordered.blocked_state import blocked_state_at
from distsim.semantics.ordered.state import (
    CHOICE_STEP,
    CHOICE_TAKE,
    RowsMismatched,
    RunState,
    SchedulerChoice,
    TransitionEvent,
)
from distsim.semantics.ordered.transitions import TransitionRules

SMALL, LARGE = 4, 4_000_000  # elements of float32: 16 bytes, 16 MB (above NCCL's 8 MiB)
#: What N9 makes on the host was made before.
CONNECTED = {"connected": True}
WAIT = {"op": "wait", "handles": "all"}


def to(peer: int | None, op: str = "send", **more: Any) -> dict[str, Any]:
    return {"op": op, "peer": peer, "numel": SMALL, **more}


def run(program: Program, profile: str) -> tuple[TransitionRules, RunState, list[TransitionEvent]]:
    """Run under a profile or a reading; an any-source receive takes the first it may."""
    rules = TransitionRules(program, {**BACKEND_PROFILES, **CONTRACT_READINGS}[profile])
    state = rules.initial()
    events = rules.settle(state)
    while choices := rules.enabled(state):
        events += rules.advance(state, choices[0]) + rules.settle(state)
    return rules, state, events


def stuck(
    profile: str, *ranks: list[dict[str, Any]], options: dict[str, Any] | None = None, **more: Any
) -> tuple[int, ...]:
    return end(profile, *ranks, options=options, **more).stuck


def end(
    profile: str, *ranks: list[dict[str, Any]], options: dict[str, Any] | None = None, **more: Any
) -> FinalState:
    """Processes stay, so that the state shows which ranks wait for which others."""
    stays = {"stays_connected": True, **(options or {})}
    rules, state, _ = run(
        build_program(len(ranks), dict(enumerate(ranks)), options=stays, **more), profile
    )
    return blocked_state_at(rules, state)


def both_ways(first: str, second: str, numel: int, **more: Any) -> list[list[dict[str, Any]]]:
    """Two ranks that do the same to each other."""
    return [
        [to(peer, first, numel=numel, **more), to(peer, second, numel=numel, **more)]
        for peer in (1, 0)
    ]


# --- messages ---


@pytest.mark.parametrize(
    ("profile", "numel", "hangs"),
    [
        ("gloo", SMALL, True),
        ("gloo", LARGE, True),
        ("mpi", SMALL, False),
        ("mpi", LARGE, True),
        ("nccl", SMALL, True),
        ("nccl", LARGE, True),
        ("rendezvous", SMALL, True),
        ("early", SMALL, True),
        ("buffered", LARGE, False),
    ],
)
def test_sends_to_each_other_hang_unless_buffered(profile: str, numel: int, hangs: bool) -> None:
    assert stuck(profile, *both_ways("send", "recv", numel)) == ((0, 1) if hangs else ())


@pytest.mark.parametrize("profile", [*BACKEND_PROFILES, *CONTRACT_READINGS])
def test_receives_from_each_other_hang_on_every_backend(profile: str) -> None:
    assert stuck(profile, *both_ways("recv", "send", SMALL)) == (0, 1)


@pytest.mark.parametrize(("profile", "hangs"), [("gloo", True), ("mpi", False), ("nccl", False)])
def test_a_ring_that_sends_first_hangs_unless_buffered(profile: str, hangs: bool) -> None:
    """NCCL, lazily: each pair's communicator is made by both, so on a ring every rank waits in its
    making: the host hangs.
    """
    ring = [[to((r + 1) % 4), to((r - 1) % 4, "recv")] for r in range(4)]
    if profile == "nccl":
        assert stuck(profile, *ring) == (0, 1, 2, 3)
        assert stuck(profile, *ring, options={"init": "eager"}) == (
            0,
            1,
            2,
            3,
        )  # in the connections, where all are on one communicator
        assert stuck(profile, *ring, options={"init": "eager", **CONNECTED}) == ()
    else:
        assert stuck(profile, *ring) == ((0, 1, 2, 3) if hangs else ())


def exchange(numel: int) -> list[list[dict[str, Any]]]:
    return [
        [to(p, "isend", numel=numel, handle="s"), to(p, "irecv", numel=numel, handle="r"), WAIT]
        for p in (1, 0)
    ]


def test_isend_and_irecv_in_both_directions_complete() -> None:
    """Gloo: fine at every size. NCCL, lazily: one pair, one stream, so it serialises; small passes
    by credit (N10).
    """
    assert stuck("gloo", *exchange(LARGE)) == ()
    assert stuck("nccl", *exchange(SMALL)) == (
        0,
        1,
    )  # N9: each waits on the host for the other's receive
    assert stuck("nccl", *exchange(SMALL), options=CONNECTED) == ()
    assert stuck("nccl", *exchange(LARGE), options=CONNECTED) == (0, 1)
    assert stuck("nccl", *exchange(SMALL), options={"buffsize": 0, **CONNECTED}) == (0, 1)


def test_a_batch_in_both_directions_completes_on_nccl_at_every_size() -> None:
    batch = [
        [{"op": "batch", "ops": [to(p, "isend", numel=LARGE), to(p, "irecv", numel=LARGE)]}]
        for p in (1, 0)
    ]
    assert stuck("nccl", *batch) == ()
    assert stuck("gloo", *batch) == ()


def test_a_surplus_part_of_a_batch_hangs_its_request_on_gloo_and_the_whole_batch_on_nccl() -> None:
    """N11: a batch is one unit. Rank 2 needs the first message only."""
    ranks: list[list[dict[str, Any]]] = [
        [
            {"op": "batch", "ops": [to(1, "isend", numel=LARGE), to(2, "isend", numel=LARGE)]},
            to(2, numel=LARGE, tag=5),
        ],
        [{"op": "batch", "ops": [to(0, "irecv", numel=LARGE)]}],
        [{"op": "batch", "ops": [to(1, "irecv")]}],
    ]
    assert end("gloo", *ranks).blocked[0].needs == (WaitDependency(0, 1, (2,)),)
    assert stuck("gloo", *ranks) == (0, 2)
    blocked = end("nccl", *ranks, options=CONNECTED).blocked
    assert [(b.rank, b.position) for b in blocked] == [(0, 1), (2, 1)]
    assert blocked[0].needs == (
        WaitDependency(1, -1, (2,)),
    )  # the host, where the pair's communicator is made


def test_crossed_tags_deadlock_on_gloo_and_swap_data_on_nccl() -> None:
    ranks = [[to(1, tag=1), to(1, tag=2)], [to(0, "recv", tag=2), to(0, "recv", tag=1)]]
    assert stuck("gloo", *ranks) == (0, 1)
    assert stuck("nccl", *ranks) == ()
    program = build_program(2, dict(enumerate(ranks)))
    told = [e for e in run(program, "nccl")[2] if isinstance(e, RowsMismatched)]
    assert [(e.rows, e.fields, e.outcome) for e in told] == [
        ((0, 2), ("tag",), "wrong-data"),
        ((1, 3), ("tag",), "wrong-data"),
    ]


@pytest.mark.parametrize("pick", [0, -1])
def test_ranks_that_wait_only_for_the_root_return_whichever_arrives_first(pick: int) -> None:
    """Rank 1 takes a broadcast's part from rank 0, which makes an all_reduce in its place and waits
    for rank 2, who never comes.
    """
    reduce, broadcast = {"op": "all_reduce", "numel": 4}, {"op": "broadcast", "numel": 4, "root": 0}
    rules = TransitionRules(
        build_program(3, {0: [reduce], 1: [broadcast], 2: []}), CONTRACT_READINGS["early"]
    )
    state = rules.initial()
    while choices := rules.enabled(state):
        state = rules.apply(state, choices[pick])

    assert blocked_state_at(rules, state).stuck == (0,)


def test_calls_of_different_groups_never_match() -> None:
    ranks = [[to(1, group="a")], [to(0, "recv", group="b")]]
    assert stuck("gloo", *ranks, groups={"a": [0, 1], "b": [0, 1]}) == (0, 1)


def test_messages_in_flight_use_credit_and_receives_return_it() -> None:
    """Three messages of 4 bytes into 8 bytes of buffer: the third waits for the first receive."""
    sends = [to(1, numel=1) for _ in range(3)]
    options = {"buffsize": 8, **CONNECTED}
    assert (
        stuck("nccl", sends, [to(0, "recv", numel=1), {"op": "synchronize"}], options=options) == ()
    )
    still = end("nccl", [*sends, {"op": "synchronize"}], [], options={**options, "init": "eager"})
    assert still.blocked[0].needs == (WaitDependency(2, -1, (1,)),)


def test_a_small_message_does_not_overtake_one_that_waits_for_credit() -> None:
    """Messages of 12, 12 and 4 bytes into 16 bytes of buffer: the third would fit beside the first,
    but the second is before it.
    """
    batch = {"op": "batch", "ops": [to(1, "isend", numel=n) for n in (3, 3, 1)]}
    options = {"buffsize": 16, "init": "eager", **CONNECTED}
    assert end("nccl", [batch], [], options=options).blocked[0].needs == (
        WaitDependency(0, 1, (1,)),
        WaitDependency(0, 2, (1,)),
    )
    taken = [to(0, "recv", numel=3), {"op": "synchronize"}]
    assert end("nccl", [batch], taken, options=options).stuck == ()


# --- dropped requests ---


def test_a_dropped_isend_never_arrives_on_gloo_unless_its_receive_was_posted() -> None:
    """G4."""
    early = [[to(1, "isend"), to(1, tag=9)], [to(0, "recv", tag=9), to(0, "recv")]]
    assert stuck("gloo", *early) == (1,)
    late = [
        [{"op": "recv", "peer": 1, "tag": 9}, to(1, "isend")],
        [to(0, "irecv", handle="h"), to(0, tag=9, numel=1), WAIT],
    ]
    assert stuck("gloo", *late) == ()
    assert stuck("nccl", *early) == ()


def test_a_dropped_request_ends_the_process_on_mpi() -> None:
    ends = end("mpi", [to(1, "isend")], [to(0, "recv")]).ends
    assert [e.status for e in ends] == ["crashed", "ended"]


# --- collectives ---


@pytest.mark.parametrize("profile", [*BACKEND_PROFILES, *CONTRACT_READINGS])
def test_a_rank_that_skips_a_barrier_blocks_the_others(profile: str) -> None:
    still = end(profile, [{"op": "barrier"}], [{"op": "barrier"}], [])
    assert still.stuck == (0, 1)
    if profile == "nccl":
        assert still.blocked[0].needs == (
            WaitDependency(0, -1, (2,)),
        )  # in the making of the communicator
    assert {need.ranks for b in still.blocked for need in b.needs} == {(2,)}


def test_ranks_return_from_a_broadcast_along_the_tree_on_gloo() -> None:
    """2.5, n = 4: rank 0 returned without rank 3; rank 1, the parent of 3, waited."""
    call = {"op": "broadcast", "root": 0, "numel": 4}
    assert stuck("gloo", [call], [call], [call], []) == (1,)
    assert stuck("nccl", [call], [call], [call], []) == (0, 1, 2)


def test_each_variant_decides_which_ranks_a_rooted_collective_waits_for() -> None:
    """Rank 2 comes to neither; early: only the root waits; buffered: the root of a broadcast goes
    on too.
    """
    reduce, broadcast = ({"op": op, "root": 0, "numel": 4} for op in ("reduce", "broadcast"))
    assert [stuck(r, [reduce], [reduce], []) for r in CONTRACT_READINGS] == [(0, 1), (0,), (0,)]
    assert [stuck(r, [broadcast], [broadcast], []) for r in CONTRACT_READINGS] == [(0, 1), (0,), ()]


def test_a_different_operation_hangs_on_gloo_and_is_undefined_on_nccl() -> None:
    """G5, N4."""
    ranks: list[list[dict[str, Any]]] = [
        [{"op": "all_reduce", "numel": 4}],
        [{"op": "broadcast", "root": 0, "numel": 4}],
    ]
    assert stuck("gloo", *ranks) == (0, 1)
    told = [
        e
        for e in run(build_program(2, dict(enumerate(ranks))), "nccl")[2]
        if isinstance(e, RowsMismatched)
    ]
    assert [(e.fields[0], e.outcome) for e in told] == [("op", "undefined")]


def test_reduce_scatter_matches_all_reduce_on_gloo() -> None:
    """As one of the whole input where that is one tensor; of a list each part is one by itself
    (run: of 1 both wait, of 4 it aborts).
    """
    ranks = [[{"op": "all_reduce", "numel": 8}], [{"op": "reduce_scatter_tensor", "numel": 4}]]
    assert stuck("gloo", *ranks) == ()
    ranks = [[{"op": "all_reduce", "numel": 2}], [{"op": "reduce_scatter", "numel": 1}]]
    assert stuck("gloo", *ranks) == (0, 1)
    ranks = [[{"op": "reduce_scatter_tensor", "numel": 4}], [{"op": "reduce_scatter", "numel": 4}]]
    assert [e.status for e in end("gloo", *ranks).ends] == ["raised", "crashed"]


def test_a_gather_with_different_roots_lets_ranks_with_the_same_root_return_on_gloo() -> None:
    gather = [[{"op": "gather", "root": root, "numel": 4}] for root in (0, 0, 2, 0)]
    assert stuck("gloo", *gather) == (0, 2)


def workers(blocked: int) -> list[list[dict[str, Any]]]:
    """Rank 0 starts all_reduces that nobody joins, then a broadcast that rank 1 joins."""
    calls = [
        {"op": "all_reduce", "numel": 4, "async": True, "handle": f"h{k}"} for k in range(blocked)
    ]
    tree = {"op": "broadcast", "root": 0, "numel": 4}
    return [
        [*calls, tree],
        [
            *(
                {"op": "reduce", "root": 1, "numel": 4, "async": True, "handle": f"h{k}"}
                for k in range(blocked)
            ),
            tree,
        ],
    ]


def test_two_blocked_collectives_occupy_the_workers_of_gloo() -> None:
    """G7: with one blocked the broadcast completes, with two it does not."""
    assert stuck("gloo", *workers(1)) == ()
    still = end("gloo", *workers(2))
    assert still.stuck == (0, 1)
    assert still.blocked[0].needs == (WaitDependency(0, -1, (1,), any=True),)


def overlap(is_async: bool) -> list[list[dict[str, Any]]]:
    def call(group: str) -> dict[str, Any]:
        return {
            "op": "all_reduce",
            "numel": 4,
            "group": group,
            **({"async": True, "handle": group} if is_async else {}),
        }

    return [[call("a"), call("b"), WAIT], [call("b"), call("a"), WAIT]]


@pytest.mark.parametrize("profile", ["gloo", "mpi", "nccl"])
def test_overlapping_groups_in_opposite_order_hang(profile: str) -> None:
    """G9: blocking deadlocks. Async works on gloo; one worker of MPI takes them in order; on NCCL
    the first use of a communicator is a rendezvous of the hosts (N8), and so is that of one which
    eager init has made (N9)."""
    groups = {"a": [0, 1], "b": [0, 1]}
    assert stuck(profile, *overlap(False), groups=groups) == (0, 1)
    assert stuck(profile, *overlap(True), groups=groups) == (() if profile == "gloo" else (0, 1))
    assert stuck("nccl", *overlap(True), groups=groups, options={"init": "eager"}) == (0, 1)
    assert (
        stuck("nccl", *overlap(True), groups=groups, options={"init": "eager", **CONNECTED}) == ()
    )
    assert stuck("nccl", *overlap(False), groups=groups, options={"init": "eager"}) == (0, 1)
    assert stuck(
        "nccl",
        *overlap(True),
        groups=groups,
        options={"init": "eager", "launch_order_implicit": True},
    ) == (0, 1)


def test_a_batch_as_first_use_of_a_communicator_needs_all_ranks_of_the_group() -> None:
    """N8."""
    pair = [[{"op": "batch", "ops": [to(1 - r, "isend"), to(1 - r, "irecv")]}] for r in (0, 1)]
    assert stuck("nccl", *pair, []) == (0, 1)
    assert stuck("nccl", *pair, [], options={"init": "eager"}) == ()
    assert stuck("gloo", *pair, []) == ()


def test_a_collective_behind_a_blocked_message_on_one_communicator_hangs() -> None:
    """Send before, receive after an all_reduce: eager init has one communicator, lazily made pairs
    are apart (2.1).
    """
    ar = {"op": "all_reduce", "numel": 4}
    ranks = [[to(1, "isend", numel=LARGE, handle="h"), ar, WAIT], [ar, to(0, "recv", numel=LARGE)]]
    assert stuck("nccl", *ranks, options={"init": "eager"}) == (0, 1)
    assert stuck("gloo", *ranks) == ()


def test_on_nccl_the_host_runs_ahead_and_the_device_blocks() -> None:
    ranks = (
        [{"op": "barrier"}, to(1, "recv"), {"op": "compute", "time_ns": 5}],
        [{"op": "barrier"}, to(0, "recv")],
    )
    still = end("nccl", *ranks, options=CONNECTED)
    assert [(b.rank, b.position, b.device) for b in still.blocked] == [(0, 3, True), (1, 2, True)]
    assert still.blocked[0].needs == (WaitDependency(1, -1, (1,)),)


def test_a_blocking_wait_blocks_the_host_in_the_call() -> None:
    ranks = [[{"op": "barrier"}, to(1, "recv")], [{"op": "barrier"}, to(0, "recv")]]
    still = end("nccl", *ranks, options={"blocking_wait": True})
    assert [b.position for b in still.blocked] == [1, 1]


def test_a_collective_lists_its_arrived_ranks_until_all_have_arrived() -> None:
    rules = TransitionRules(
        build_program(3, {r: [{"op": "barrier"}] for r in range(3)}),
        CONTRACT_READINGS["rendezvous"],
    )
    state = rules.initial()
    come = []
    for rank in (2, 0, 1, 2, 0, 1):  # the world is made, and then the barrier
        while rules.can_step(state, rank):
            rules.advance(state, SchedulerChoice(CHOICE_STEP, rank))
        come.append([list(there) for there in state.arrived.values()])
    assert come == [[], [], [[1]], [[1, 2]], [], []]


# --- any source ---


def test_a_wildcard_receive_offers_every_sender_and_raises_on_nccl() -> None:
    program = build_program(3, {0: [to(None, "recv"), to(None, "recv")], 1: [to(0)], 2: [to(0)]})
    rules = TransitionRules(program, BACKEND_PROFILES["gloo"])
    state = rules.initial()
    rules.settle(state)
    assert has_any_source_receive(program)
    assert [choice.kind for choice in rules.enabled(state)] == [CHOICE_TAKE, CHOICE_TAKE]
    assert blocked_state_at(rules, state).blocked[0].needs == (
        WaitDependency(0, -1, (1, 2), any=True),
    )
    rules, state, _ = run(program, "nccl")
    first = blocked_state_at(rules, state).ends[0]
    assert (first.status, first.message) == (
        "raised",
        "ProcessGroupNCCL does not support recvAnysource",
    )


def test_a_message_goes_to_the_earliest_matching_receive_and_on_gloo_to_the_named_one() -> None:
    ranks = [[to(None, "irecv", handle="a"), to(1, "irecv", handle="b"), WAIT], [to(0)], []]
    assert end("rendezvous", *ranks).blocked[0].needs == (WaitDependency(1, -1, (1,)),)
    assert end("gloo", *ranks).blocked[0].needs == (WaitDependency(0, -1, (1, 2), any=True),)


# --- ends ---


def test_an_invalid_call_raises_on_its_rank_and_the_others_continue() -> None:
    still = end("rendezvous", [to(7), to(1)], [to(0, "recv")], [{"op": "compute", "time_ns": 1}])
    assert [(e.status, e.position) for e in still.ends] == [
        ("raised", 0),
        ("blocked", 0),
        ("ended", 1),
    ]


def test_exit_ends_a_rank_and_fail_raises() -> None:
    still = end(
        "mpi",
        [{"op": "exit", "code": 3}, {"op": "barrier"}],
        [{"op": "fail", "message": "out of memory"}],
        [],
    )
    ends = [(e.status, e.position, e.message) for e in still.ends]
    assert ends == [("ended", 0, "exit 3"), ("raised", 0, "out of memory"), ("ended", 0, "")]


def test_a_killed_rank_makes_its_partners_raise_on_gloo_and_hang_elsewhere() -> None:
    """G13."""
    barrier = {"op": "barrier"}
    for profile, status in (("gloo", "raised"), ("nccl", "blocked"), ("mpi", "blocked")):
        still = end(
            profile, [barrier, barrier], [barrier, barrier], faults=(RankFault(1, "kill", 1),)
        )
        assert [(e.status, e.position) for e in still.ends] == [(status, 1), ("killed", 1)], profile


def test_an_absent_rank_blocks_all_others_before_their_first_call() -> None:
    for profile in BACKEND_PROFILES:
        still = end(
            profile, [{"op": "compute", "time_ns": 1}], [], [], faults=(RankFault(2, "absent"),)
        )
        assert [e.status for e in still.ends] == ["blocked", "blocked", "absent"]
        assert still.blocked[0] == still.blocked[0]._replace(
            position=0, needs=(WaitDependency(0, -1, (2,)),)
        )


def test_a_too_small_receive_aborts_the_receiver_on_gloo_and_the_send_succeeds() -> None:
    """G14."""
    still = end("gloo", [to(1, numel=8)], [to(0, "recv", numel=4)])
    assert [e.status for e in still.ends] == ["ended", "crashed"]
    still = end("gloo", [to(1, numel=4)], [to(0, "recv", numel=8)])
    assert [e.status for e in still.ends] == ["ended", "ended"]


def test_a_collective_with_a_smaller_buffer_aborts_that_rank_on_gloo() -> None:
    ranks = [[{"op": "all_reduce", "numel": n}] for n in (8, 8, 4)]
    assert [e.status for e in end("gloo", *ranks).ends] == ["raised", "raised", "crashed"]


def test_inconsistent_splits_are_detected_when_all_ranks_have_arrived() -> None:
    def splits(given: list[int], got: list[int]) -> dict[str, Any]:
        return {"op": "all_to_all_single", "numel": 4, "in_splits": given, "out_splits": got}

    program = build_program(2, {0: [splits([1, 3], [1, 3])], 1: [splits([2, 2], [2, 2])]})
    told = [e for e in run(program, "rendezvous")[2] if isinstance(e, RowsMismatched)]
    assert [e.fields for e in told] == [("splits",)]
    program = build_program(2, {0: [splits([1, 3], [1, 3])], 1: [splits([3, 1], [3, 1])]})
    assert not [e for e in run(program, "rendezvous")[2] if isinstance(e, RowsMismatched)]


def test_new_group_waits_for_the_world_by_the_documentation_and_for_its_members_on_gloo() -> None:
    make = {"op": "new_group", "name": "g", "ranks": [0, 1]}
    ranks: list[list[dict[str, Any]]] = [
        [make, {"op": "barrier", "group": "g"}],
        [make, {"op": "barrier", "group": "g"}],
        [],
    ]
    assert stuck("rendezvous", *ranks) == (0, 1)
    assert stuck("gloo", *ranks) == ()
    assert stuck("mpi", *ranks) == (0, 1)


def test_messages_without_a_receive_are_named() -> None:
    assert end("buffered", [to(1), to(1)], [to(0, "recv")]).unreceived == ((0, 1, -1),)
