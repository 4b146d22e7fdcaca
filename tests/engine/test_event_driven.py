"""The time-ordered engine: times by hand, to the nanosecond."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from distsim.backends import BACKEND_PROFILES
from distsim.engine.event_driven import OrderedRun, simulate_in_order
from distsim.hardware.cluster import preset
from distsim.hardware.cost import CostModel
from distsim.operations.registry import OPERATIONS
from distsim.program.from_calls import build_program
from distsim.program.model import Program, RankFault
from distsim.semantics.ordered.blocked_state import blocked_state_at
from distsim.semantics.ordered.transitions import TransitionRules
from tests.support.harness import draws
from tests.support.programs import Programs, programs

WAIT = {"op": "wait", "handles": "all"}
CLUSTER = preset("cpu-10gbe")


def work(ns: int, **more: Any) -> dict[str, Any]:
    return {"op": "compute", "time_ns": ns, **more}


def to(peer: int | None, op: str = "send", **more: Any) -> dict[str, Any]:
    return {"op": op, "peer": peer, "numel": 4, **more}


class Run:
    """A run, its prices, and its rows by (rank, position, part)."""

    def __init__(
        self,
        profile: str,
        *ranks: list[dict[str, Any]],
        shared: bool = False,
        nodes: int = 1,
        **more: Any,
    ) -> None:
        self.program: Program = build_program(
            len(ranks), dict(enumerate(ranks)), nodes=nodes, **more
        )
        cluster = CLUSTER.model_copy(update={"shared_links": shared})
        self.cost = CostModel(cluster, len(ranks), self.program.local_size)
        self.left: OrderedRun = simulate_in_order(
            self.program, BACKEND_PROFILES[profile], self.cost
        )

    def row(self, rank: int, position: int, part: int = -1) -> int:
        return self.left.columns.row(self.program, rank, position, part)

    def times(self, rank: int, position: int, part: int = -1) -> tuple[int, int, int, int]:
        """posted, started, finished, returned."""
        i, c = self.row(rank, position, part), self.left.columns
        return c.posted[i], c.started[i], c.finished[i], c.returned[i]

    def ends(self) -> list[tuple[str, int]]:
        return [(end.status, end.at_ns) for end in self.left.final_state.ends]

    def price(self, op: str, nbytes: int, root: int | None = None) -> int:
        return self.cost.collective_ns(
            OPERATIONS[op], tuple(range(self.program.world_size)), nbytes, root
        )


def test_both_sides_of_a_pair_finish_at_the_later_post_plus_the_cost() -> None:
    run = Run("gloo", [work(10), to(1)], [work(25), to(0, "recv")])
    end = 25 + run.cost.p2p_ns(0, 1, 16)
    assert run.times(0, 1) == (10, 25, end, end)
    assert run.times(1, 1) == (25, 25, end, end)
    assert run.ends() == [("ended", end), ("ended", end)]
    assert (
        run.left.columns.match[run.row(0, 1)]
        == run.left.columns.match[run.row(1, 1)]
        == run.row(0, 1)
    )


def test_an_eager_send_returns_at_once_and_its_data_arrive_after_the_cost() -> None:
    run = Run("mpi", [to(1), to(1)], [to(0, "recv"), work(10**9), to(0, "recv")])
    price = run.cost.p2p_ns(0, 1, 16)
    assert run.times(0, 0) == (0, 0, 0, 0)
    assert run.times(1, 0) == (0, 0, price, price)
    late = price + 10**9
    assert run.times(1, 2) == (late, late, late, late)


def test_a_large_send_is_a_rendezvous_on_mpi() -> None:
    run = Run("mpi", [to(1, numel=2000)], [work(70), to(0, "recv", numel=2000)])
    end = 70 + run.cost.p2p_ns(0, 1, 8000)
    assert run.times(0, 0) == (0, 70, end, end)


def test_members_return_from_a_collective_when_their_needed_peers_have_arrived() -> None:
    """Gloo's broadcast, n = 4: rank 0 does not wait for rank 3; rank 1, the parent of 3, does."""
    call = {"op": "broadcast", "root": 0, "numel": 4}
    run = Run("gloo", [call], [work(5), call], [work(7), call], [work(90), call])
    price = run.price("broadcast", 16, 0)
    assert [run.times(rank, k)[2] for rank, k in ((0, 0), (1, 1), (2, 1), (3, 1))] == [
        7 + price,
        90 + price,
        7 + price,
        90 + price,
    ]


def test_async_all_reduce_overlaps_with_compute_on_nccl() -> None:
    """The host posts all at 0; the collective starts after the compute it was posted behind, beside
    the one that follows.
    """
    reduce = {"op": "all_reduce", "numel": 4, "async": True, "handle": "h"}
    calls = [work(100), reduce, work(10**6, name="beside"), WAIT, work(7, name="after")]
    run = Run("nccl", calls, calls)
    price = run.price("all_reduce", 16)
    assert price < 10**6
    assert run.times(0, 0) == (0, 0, 100, 0)
    assert run.times(0, 1) == (0, 100, 100 + price, 0)
    assert run.times(0, 2) == (0, 100, 100 + 10**6, 0)
    assert run.times(0, 4) == (0, 100 + 10**6, 107 + 10**6, 0)
    assert run.left.columns.waited[run.row(0, 1)] == 0
    assert run.ends() == [("ended", 107 + 10**6)] * 2


def test_wait_blocks_the_stream_on_nccl() -> None:
    calls: list[dict[str, Any]] = [
        {"op": "all_reduce", "numel": 4, "async": True, "handle": "h"},
        WAIT,
        work(7),
    ]
    run = Run("nccl", calls, calls)
    price = run.price("all_reduce", 16)
    assert run.times(0, 2)[1:3] == (price, price + 7)


def test_a_blocking_collective_runs_on_the_current_stream_while_the_host_continues() -> None:
    calls = [
        work(50),
        {"op": "all_reduce", "numel": 4},
        work(9, queue="host"),
        {"op": "synchronize"},
    ]
    run = Run("nccl", calls, [{"op": "all_reduce", "numel": 4}])
    price = run.price("all_reduce", 16)
    assert run.times(0, 1) == (0, 50, 50 + price, 0)
    assert run.times(0, 2) == (0, 0, 9, 9)
    assert run.left.columns.returned[run.row(0, 3)] == max(9, 50 + price)


def test_named_streams_run_concurrently() -> None:
    run = Run("nccl", [work(30), work(40, queue="side"), work(5, queue="side"), work(1)], [])
    assert [run.times(0, k)[1:3] for k in range(4)] == [(0, 30), (0, 40), (40, 45), (30, 31)]


def test_operations_of_one_communicator_run_in_issue_order() -> None:
    """N3: the second, on another stream, waits for the first."""
    first_call = {"op": "all_reduce", "numel": 1000, "async": True, "handle": "h"}
    calls: list[dict[str, Any]] = [first_call, {"op": "all_reduce", "numel": 4}, WAIT]
    run = Run("nccl", calls, calls)
    first, second = run.price("all_reduce", 4000), run.price("all_reduce", 16)
    assert run.times(0, 1)[1:3] == (first, first + second)


def test_the_first_use_of_a_communicator_blocks_the_host() -> None:
    """N8."""
    run = Run(
        "nccl",
        [to(1, "isend", handle="h"), work(3)],
        [work(80, queue="host"), to(0, "irecv", handle="h")],
    )
    assert run.times(0, 0)[0] == 0
    assert run.left.columns.returned[run.row(0, 0)] == 80
    assert run.times(0, 1)[1] == 80


def test_a_batch_is_one_launch_that_ends_with_its_last_part() -> None:
    sizes = (4, 40_000)
    ranks = [
        [
            {
                "op": "batch",
                "ops": [
                    to(1 - r, op, numel=sizes[r == 0] if op == "isend" else sizes[r == 1])
                    for op in ("isend", "irecv")
                ],
            }
        ]
        for r in (0, 1)
    ]
    run = Run("nccl", *ranks, options={"buffsize": 0})
    large, small = run.cost.p2p_ns(0, 1, 160_000), run.cost.p2p_ns(1, 0, 16)
    assert run.times(0, 0, 0)[2] == large
    assert run.times(0, 0, 1)[2] == small
    assert run.times(0, 0)[1:3] == (0, large)


def test_a_batch_has_one_request_per_part_on_gloo() -> None:
    ops = [[to(1 - r, "isend"), to(1 - r, "irecv")] for r in (0, 1)]
    run = Run("gloo", [{"op": "batch", "ops": ops[0]}], [work(60), {"op": "batch", "ops": ops[1]}])
    end = 60 + run.cost.p2p_ns(0, 1, 16)
    assert run.times(0, 0, 0) == (0, 60, end, end)
    assert run.left.columns.returned[run.row(0, 0)] == end


def test_a_wildcard_receive_takes_the_first_arrival() -> None:
    for first in (1, 2):
        delays = {first: 10, 3 - first: 20}
        run = Run(
            "gloo",
            [work(50), to(None, "recv"), to(None, "recv")],
            *([work(delays[r]), to(0)] for r in (1, 2)),
        )
        match = run.left.columns.match
        assert match[run.row(0, 1)] == match[run.row(first, 1)]
        assert match[run.row(0, 2)] == match[run.row(3 - first, 1)]


def test_eager_messages_are_taken_in_the_order_of_their_arrival() -> None:
    """Rank 2, on another node, sends first; the message of rank 1 is there before."""
    run = Run("mpi", [to(None, "recv"), to(None, "recv")], [work(1), to(0)], [to(0)], [], nodes=2)
    near, far = run.cost.p2p_ns(1, 0, 16), run.cost.p2p_ns(2, 0, 16)
    assert near + 1 < far
    assert [run.times(0, k)[2] for k in (0, 1)] == [near + 1, far]
    assert run.left.columns.match[run.row(0, 0)] == run.left.columns.match[run.row(1, 1)]


def test_concurrent_messages_share_a_network_card_evenly() -> None:
    ranks = [[to(2 + r, numel=10**6)] for r in range(2)] + [
        [to(r, "recv", numel=10**6)] for r in range(2)
    ]
    alone, shared = Run("gloo", *ranks, nodes=2), Run("gloo", *ranks, nodes=2, shared=True)
    price = alone.cost.p2p_ns(0, 2, 4 * 10**6)
    moving = price - alone.cost.p2p_ns(0, 2, 0)
    assert [alone.times(r, 0)[2] for r in (0, 1)] == [price, price]
    assert [shared.times(r, 0)[2] for r in (0, 1)] == [price + moving, price + moving]


def test_a_later_message_slows_the_one_in_flight_and_ends_with_the_card_to_itself() -> None:
    later = 10**6
    ranks = [[to(2, numel=10**6)], [work(later), to(3, numel=10**6)]] + [
        [to(r, "recv", numel=10**6)] for r in range(2)
    ]
    run = Run("gloo", *ranks, nodes=2, shared=True)
    price, start = run.cost.p2p_ns(0, 2, 4 * 10**6), run.cost.p2p_ns(0, 2, 0)
    left = price - later - start  # of the first, when the second's bytes begin to move
    assert run.times(0, 0)[2] == price + left
    assert run.times(1, 1)[2] == later + price + left


def test_a_late_rank_makes_the_others_wait_in_init_process_group() -> None:
    run = Run("gloo", [work(5)], [work(5)], faults=(RankFault(1, "late", delay_ns=100),))
    assert run.times(0, 0) == (0, 100, 105, 105)
    assert run.ends() == [("ended", 105)] * 2


def test_a_slow_rank_computes_longer() -> None:
    run = Run("gloo", [work(100)], [work(100)], faults=(RankFault(1, "slow", factor=1.5),))
    assert run.ends() == [("ended", 100), ("ended", 150)]


@pytest.mark.parametrize(
    ("profile", "ends"),
    [("gloo", [("raised", 60), ("killed", 60)]), ("nccl", [("blocked", 0), ("killed", 60)])],
)
def test_a_rank_can_be_killed_at_a_time(profile: str, ends: list[tuple[str, int]]) -> None:
    """Gloo sees the closed connection at once (G13); on NCCL the peer hangs."""
    barrier = {"op": "barrier"}
    run = Run(
        profile,
        [barrier],
        [work(100, queue="host"), barrier],
        faults=(RankFault(1, "kill", at_ns=60),),
    )
    assert run.ends() == ends


def test_a_rank_killed_during_a_transfer_leaves_its_partner_without_data() -> None:
    run = Run(
        "gloo",
        [to(1, numel=10**6)],
        [to(0, "recv", numel=10**6)],
        faults=(RankFault(0, "kill", at_ns=1000),),
    )
    assert run.ends() == [("killed", 1000), ("raised", 1000)]
    assert run.left.columns.finished[run.row(1, 0)] == -1


def test_a_hang_reports_since_when_ranks_are_blocked() -> None:
    run = Run("gloo", [work(30), to(1)], [work(40), to(0)])
    assert [(b.rank, b.position, b.since_ns) for b in run.left.final_state.blocked] == [
        (0, 1, 30),
        (1, 1, 40),
    ]
    assert run.times(0, 1) == (30, -1, -1, -1)


def test_mismatches_name_all_participants() -> None:
    run = Run(
        "nccl",
        *([{"op": "all_reduce", "numel": 4, "reduce_op": op}] for op in ("sum", "max", "sum")),
    )
    rows = tuple(run.row(r, 0) for r in range(3))
    assert [(tuple(sorted(m)), fields, outcome) for m, fields, outcome in run.left.mismatches] == [
        (rows, ("reduce_op",), "wrong-data")
    ]


def test_matches_are_listed_in_the_order_in_which_they_completed() -> None:
    """The large message is posted first and done last."""
    sends = [to(1, "isend", numel=10**6, handle="a"), to(1, "isend", tag=1, handle="b"), WAIT]
    recvs = [to(0, "irecv", numel=10**6, handle="a"), to(0, "irecv", tag=1, handle="b"), WAIT]
    run = Run("gloo", sends, recvs)
    assert run.left.matches == ((run.row(0, 1), run.row(1, 1)), (run.row(0, 0), run.row(1, 0)))


@pytest.mark.parametrize("profile", list(BACKEND_PROFILES))
@settings(max_examples=draws(60), deadline=None)
@given(drawn=programs())
def test_engine_and_untimed_rules_agree_on_blocked_ranks(
    profile: str, drawn: tuple[int, Programs, dict[str, list[int]]]
) -> None:
    size, calls, groups = drawn
    stays = {"stays_connected": True}  # the order in which processes end decides who raises first
    program = build_program(size, calls, groups=groups, options=stays)
    left = simulate_in_order(program, BACKEND_PROFILES[profile], CostModel(CLUSTER, size, size))
    rules = TransitionRules(program, BACKEND_PROFILES[profile])
    state = rules.initial()
    rules.settle(state)
    still = blocked_state_at(rules, state)
    if any(end.status == "crashed" for end in still.ends):
        return  # a process that aborts may take more or less of the others with it
    untimed = [b._replace(since_ns=0) for b in left.final_state.blocked]
    assert untimed == list(still.blocked)
    assert [end._replace(at_ns=0) for end in left.final_state.ends] == list(still.ends)
