"""Where the time goes: shares of each rank, collectives, the critical path."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distsim.analysis.critical_path import CriticalPathSegment
from distsim.analysis.timeline import RankTimes, Timeline, build_timeline
from distsim.backends import BACKEND_PROFILES, default_cluster
from distsim.engine import run_program
from distsim.hardware.cost import CostModel
from distsim.program.from_calls import build_program
from distsim.scenario import Scenario
from distsim.simulation.simulate_scenario import simulate
from distsim.trace.model import NEVER, Trace
from tests.support.generator import CORRECT, scenarios
from tests.support.harness import draws
from tests.trace.test_trace import make


def _row(
    op: str,
    rank: int = 0,
    host: tuple[int, int] = (0, 0),
    ran: tuple[int, int] = (NEVER, NEVER),
    **facts: Any,
) -> dict[str, Any]:
    times = {
        "posted_ns": host[0],
        "returned_ns": host[1],
        "started_ns": ran[0],
        "finished_ns": ran[1],
    }
    return {"op": op, "rank": rank, **times, **facts}


def _shares(result: Timeline, rank: int = 0) -> tuple[int, int, int, int]:
    return result.ranks[rank][1:5]


def _tiles(result: Timeline) -> bool:
    edges = [
        0,
        *(edge for s in result.critical_path for edge in (s.start_ns, s.end_ns)),
        result.makespan_ns,
    ]
    return all(a == b for a, b in zip(edges[::2], edges[1::2], strict=True)) and all(
        s.start_ns < s.end_ns for s in result.critical_path
    )


# --- shares ---


def test_a_late_receiver_makes_the_sender_wait() -> None:
    trace = make(
        [
            _row("compute", host=(0, 10), ran=(0, 10)),
            _row("send", host=(10, 60), ran=(40, 60), match=1),
            _row("compute", 1, (0, 40), (0, 40)),
            _row("recv", 1, (40, 60), (40, 60), match=1),
        ]
    )
    result = build_timeline(trace)

    assert result.ranks == (RankTimes(0, 10, 20, 30, 0, 60), RankTimes(1, 40, 20, 0, 0, 60))


def test_communication_during_compute_is_not_exposed() -> None:
    trace = make(
        [
            _row("isend", host=(0, 0), ran=(0, 50), match=0),
            _row("compute", host=(0, 30), ran=(0, 30)),
            _row("wait", host=(30, 50)),
            _row("irecv", 1, (0, 0), (0, 50), match=0),
        ]
    )

    assert _shares(build_timeline(trace)) == (30, 20, 0, 0)


def test_sleep_and_time_after_the_end_are_idle() -> None:
    trace = make([_row("sleep", host=(0, 20), ran=(0, 20)), _row("compute", 1, (0, 50), (0, 50))])

    assert [_shares(build_timeline(trace), r) for r in (0, 1)] == [(0, 0, 0, 50), (50, 0, 0, 0)]


def test_a_hanging_rank_waits_to_the_end_and_never_finishes() -> None:
    trace = make(
        [_row("recv", host=(5, NEVER)), _row("compute", 1, (0, 50), (0, 50))], makespan_ns=50
    )
    result = build_timeline(trace)

    assert result.ranks[0] == RankTimes(0, 0, 0, 45, 5, NEVER)


def test_a_call_that_returns_at_time_zero_is_over() -> None:
    rows = [_row("barrier", host=(0, 0), ran=(0, 0), match=0), _row("barrier", 1, (0, NEVER))]
    result = build_timeline(make(rows))

    assert [rank.finished_ns for rank in result.ranks] == [0, NEVER]


def test_a_rank_that_exits_finishes_at_its_exit() -> None:
    """The call never returns; one behind which it hangs is another matter."""
    result = build_timeline(
        make(
            [
                _row("compute", host=(0, 4), ran=(0, 4)),
                _row("exit", host=(5, NEVER)),
                _row("barrier", 1, (0, NEVER)),
            ]
        )
    )

    assert [rank.finished_ns for rank in result.ranks] == [5, NEVER]


def test_a_killed_rank_is_idle_afterwards() -> None:
    trace = make(
        [_row("recv", host=(5, NEVER)), _row("compute", 1, (0, 50), (0, 50))],
        ends=[[0, "killed", 30]],
    )

    assert build_timeline(trace).ranks[0] == RankTimes(0, 0, 0, 25, 25, 30)


def test_a_host_that_ran_ahead_waits_for_its_device() -> None:
    """nccl: the call returned at once, its launch can't start before the peer comes."""
    rows = [
        _row("all_reduce", host=(0, 1), ran=(40, 60), match=0),
        _row("all_reduce", 1, (40, 41), (40, 60), match=0),
    ]

    assert _shares(build_timeline(make(rows, backend="nccl"))) == (0, 20, 40, 0)
    assert _shares(build_timeline(make(rows, backend="gloo"))) == (0, 20, 1, 39)


def test_a_rank_whose_launch_never_matches_does_not_finish() -> None:
    trace = make(
        [_row("all_reduce", host=(0, 1)), _row("compute", 1, (0, 50), (0, 50))], backend="nccl"
    )

    assert build_timeline(trace).ranks[0] == RankTimes(0, 0, 0, 50, 0, NEVER)


def test_a_rank_without_calls_is_idle() -> None:
    assert build_timeline(make([_row("compute", 1, (0, 9), (0, 9))])).ranks[0] == RankTimes(
        0, 0, 0, 0, 9, 0
    )


def test_an_empty_trace_has_an_empty_timeline() -> None:
    assert build_timeline(make([], world_size=0)) == Timeline(0, None, (), (), ())


times = st.integers(-1, 40)
OPS = (
    "compute",
    "sleep",
    "isend",
    "recv",
    "irecv",
    "wait",
    "all_reduce",
    "barrier",
    "assign",
    "init_process_group",
)
anything = st.builds(
    lambda op, rank, a, b, c, d, match: _row(op, rank, (a, b), (c, d), match=match),
    st.sampled_from(OPS),
    st.integers(0, 3),
    times,
    times,
    times,
    times,
    st.integers(-1, 3),
)


def _by_instant(trace: Trace, rank: int, makespan: int) -> tuple[int, int, int, int]:
    """The definition, taken at its word: each nanosecond is one of four things (host back ends,
    nobody dies).
    """
    totals = [0, 0, 0, 0]
    rows = [call for call in trace.rows() if call.rank == rank]
    for t in range(makespan):

        def covers(start: int, end: int, t: int = t) -> bool:
            return 0 <= start <= t < (end if end >= 0 else makespan)

        computing = any(
            c.op in ("compute", "assign") and covers(c.started_ns, c.finished_ns) for c in rows
        )
        moving = any(
            c.match >= 0
            and c.finished_ns >= 0
            and c.op not in ("compute", "assign", "sleep", "wait")
            and covers(c.started_ns, c.finished_ns)
            for c in rows
        )
        blocked = any(
            c.op not in ("compute", "assign", "sleep") and covers(c.posted_ns, c.returned_ns)
            for c in rows
        )
        totals[0 if computing else 1 if moving else 2 if blocked else 3] += 1
    return (totals[0], totals[1], totals[2], totals[3])


@given(st.lists(anything, max_size=12), st.integers(0, 60))
@settings(max_examples=draws(150), deadline=None)
def test_shares_equal_their_definition_at_every_instant(
    rows: list[dict[str, Any]], makespan: int
) -> None:
    trace = make(rows, world_size=4)
    result = build_timeline(trace, makespan)

    for rank in range(4):
        assert _shares(result, rank) == _by_instant(trace, rank, result.makespan_ns)


@given(
    st.lists(anything, max_size=12),
    st.sampled_from(["gloo", "nccl"]),
    st.lists(st.integers(0, 40), max_size=2),
)
@settings(max_examples=draws(300), deadline=None)
def test_times_add_up_and_the_critical_path_has_no_gap_for_any_trace(
    rows: list[dict[str, Any]], backend: str, died: list[int]
) -> None:
    trace = make(
        rows, world_size=4, backend=backend, ends=[[r, "killed", t] for r, t in enumerate(died)]
    )
    result = build_timeline(trace)

    assert all(sum(r[1:5]) == result.makespan_ns and min(r[1:5]) >= 0 for r in result.ranks)
    assert _tiles(result)


# --- iterations and collectives ---


def test_an_iteration_lasts_from_end_to_end_and_the_first_is_not_counted() -> None:
    ends = [100, 130, 160, 200]
    trace = make(
        [_row("compute", host=(e - 5, e), ran=(e - 5, e), iteration=i) for i, e in enumerate(ends)]
    )

    assert build_timeline(trace).iteration_ns == 30
    assert build_timeline(make([_row("compute", host=(0, 5), ran=(0, 5))])).iteration_ns is None


def test_a_hanging_iteration_is_not_counted() -> None:
    rows = [
        _row("compute", host=(e - 5, e), ran=(e - 5, e), iteration=i)
        for i, e in enumerate([100, 130])
    ]

    assert (
        build_timeline(
            make([*rows, _row("recv", host=(130, NEVER), iteration=2)], makespan_ns=900)
        ).iteration_ns
        == 30
    )


def test_collective_bandwidths_are_computed_like_nccl_tests() -> None:
    rows = [
        _row("all_reduce", r, (0, 0), (k * 100 + r, k * 100 + 40), match=k, nbytes=4000)
        for k in range(3)
        for r in range(4)
    ]
    (entry,) = build_timeline(make(rows, [("world", (0, 1, 2, 3))])).collectives

    assert entry[:6] == ("all_reduce", "world", 4, 4000, 3, 40)
    assert (entry.algbw, entry.busbw) == (100, 150)


# --- the critical path ---


def test_the_critical_path_continues_on_the_rank_that_arrived_last() -> None:
    trace = make(
        [
            _row("compute", host=(0, 10), ran=(0, 10), name="short"),
            _row("recv", host=(10, 60), ran=(40, 60), match=1),
            _row("compute", host=(60, 65), ran=(60, 65), name="rest"),
            _row("compute", 1, (0, 40), (0, 40), name="long"),
            _row("send", 1, (40, 60), (40, 60), match=1),
        ]
    )
    path = build_timeline(trace).critical_path

    assert [(s.rank, s.op, s.name, s.start_ns, s.end_ns, s.why) for s in path] == [
        (1, "compute", "long", 0, 40, "compute"),
        (0, "recv", "", 40, 60, "transfer"),
        (0, "compute", "rest", 60, 65, "compute"),
    ]


def test_a_message_sent_ahead_starts_at_its_send() -> None:
    """Eager: the receive was posted at 30, when the message was on its way since 20; rank 0's 30 ns
    do not matter.
    """
    trace = make(
        [
            _row("compute", host=(0, 30), ran=(0, 30)),
            _row("recv", host=(30, 60), ran=(30, 60), match=1),
            _row("compute", 1, (0, 20), (0, 20)),
            _row("send", 1, (20, 20), (20, 20), match=1),
        ]
    )

    assert [(s.rank, s.op, s.start_ns, s.end_ns) for s in build_timeline(trace).critical_path] == [
        (1, "compute", 0, 20),
        (0, "recv", 20, 60),
    ]


def test_the_critical_path_skips_matches_that_take_no_time() -> None:
    trace = make(
        [
            _row("barrier", host=(0, 50), ran=(50, 50), match=0),
            _row("compute", host=(50, 60), ran=(50, 60)),
            _row("compute", 1, (0, 50), (0, 50)),
            _row("barrier", 1, (50, 50), (50, 50), match=0),
        ]
    )

    assert [(s.rank, s.op, s.start_ns) for s in build_timeline(trace).critical_path] == [
        (1, "compute", 0),
        (0, "compute", 50),
    ]


def test_consecutive_equal_calls_are_merged_on_the_critical_path() -> None:
    trace = make(
        [_row("compute", host=(k, k + 1), ran=(k, k + 1), name="f", position=k) for k in range(5)]
    )
    (piece,) = build_timeline(trace).critical_path

    assert isinstance(piece, CriticalPathSegment)
    assert (piece.start_ns, piece.end_ns, piece.calls) == (0, 5, 5)


def test_time_before_all_calls_is_a_late_start_and_time_after_them_a_wait() -> None:
    trace = make([_row("compute", host=(10, 20), ran=(10, 20))], makespan_ns=30)

    assert [(s.why, s.start_ns, s.end_ns) for s in build_timeline(trace).critical_path] == [
        ("late start", 0, 10),
        ("compute", 10, 20),
        ("wait", 20, 30),
    ]


def test_the_critical_path_continues_on_the_peer_that_releases_a_host() -> None:
    """Creating an NCCL communicator blocks rank 0 in irecv until rank 1 calls isend at 8."""
    trace = make(
        [
            _row("irecv", host=(0, 8), ran=(12, 14), match=0),
            _row("compute", host=(8, 20), ran=(8, 20), name="launches"),
            _row("compute", 1, (0, 8), (0, 8), name="late"),
            _row("isend", 1, (8, 8), (12, 12), match=0),
        ]
    )

    assert [
        (s.rank, s.name, s.start_ns, s.end_ns) for s in build_timeline(trace).critical_path
    ] == [
        (1, "late", 0, 8),
        (0, "launches", 8, 20),
    ]


def test_a_message_that_arrives_before_its_receive_ends_is_a_transfer() -> None:
    """Under mpi the row of such a receive has no duration: it ends when the message arrives."""
    trace = make(
        [
            _row("compute", host=(0, 5), ran=(0, 5)),
            _row("isend", host=(5, 5), ran=(5, 5), match=0),
            _row("recv", 1, (0, 15), (15, 15), match=0),
            _row("compute", 1, (15, 20), (15, 20)),
        ]
    )

    assert [(s.rank, s.why, s.start_ns, s.end_ns) for s in build_timeline(trace).critical_path] == [
        (0, "compute", 0, 5),
        (1, "transfer", 5, 15),
        (1, "compute", 15, 20),
    ]


def test_a_process_that_starts_late_begins_the_critical_path() -> None:
    trace = make(
        [
            _row("compute", host=(0, 20), ran=(10, 20)),
            _row("compute", 1, (10, 12), (10, 12)),
        ]
    )

    assert [(s.rank, s.why, s.start_ns, s.end_ns) for s in build_timeline(trace).critical_path] == [
        (1, "late start", 0, 10),
        (0, "compute", 10, 20),
    ]


# --- of simulated runs ---


@settings(max_examples=draws(80), deadline=None)
@given(scenarios(CORRECT))
def test_the_critical_path_of_a_run_that_completes_contains_no_waiting(
    scenario: dict[str, Any],
) -> None:
    """A chain of work and transfers, and possibly the late start of a process."""
    simulation = simulate(Scenario(**scenario), with_values=False)
    assume(simulation.outcome == "completes")

    assert _tiles(simulation.timeline)
    assert "wait" not in {piece.why for piece in simulation.timeline.critical_path}


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_times_of_a_simulated_run_add_up(backend: str) -> None:
    """A ring with unequal computes, an all_reduce and a barrier, on two nodes."""
    calls: dict[int, list[dict[str, Any]]] = {
        r: [
            {"op": "compute", "time_ns": 5000 * (r + 1), "name": "forward"},
            {"op": "isend", "peer": (r + 1) % 4, "numel": 4096, "handle": "s"},
            {"op": "irecv", "peer": (r - 1) % 4, "numel": 4096, "handle": "r"},
            {"op": "wait", "handles": ["s", "r"]},
            {"op": "all_reduce", "numel": 1 << 20, "reduce_op": "sum"},
            {"op": "barrier"},
        ]
        for r in range(4)
    }
    program = build_program(4, calls, nodes=2, backend=backend)
    result = build_timeline(
        run_program(
            program, BACKEND_PROFILES[backend], CostModel(default_cluster(backend), 4, 2)
        ).trace
    )

    assert all(sum(r[1:5]) == result.makespan_ns for r in result.ranks)
    assert [r.compute_ns for r in result.ranks] == [5000, 10000, 15000, 20000]
    assert _tiles(result)
    assert [c.op for c in result.collectives] == ["all_reduce", "barrier"]
    assert (result.critical_path[0].rank, result.critical_path[0].op) == (3, "compute")


@pytest.mark.parametrize("on", ["host", "current"])
def test_host_work_does_not_hide_communication_of_a_device(on: str) -> None:
    """2 ranks under nccl: while a reduction is under way the host computes, as it does launching
    what comes next. With the computing on the device's stream, after the reduction, the same time
    counts once as each."""
    reduced = {"op": "all_reduce", "numel": 1 << 22, "reduce_op": "sum"}
    work = {
        "op": "compute",
        "time_ns": 30_000,
        "name": "work",
        "queue": "" if on == "current" else on,
    }
    program = build_program(2, {r: [reduced, work] for r in range(2)}, backend="nccl")
    result = build_timeline(
        run_program(
            program, BACKEND_PROFILES["nccl"], CostModel(default_cluster("nccl"), 2, 2)
        ).trace
    )
    price = result.collectives[0].duration_ns

    assert price > 30_000
    assert result.ranks[0].exposed_comm_ns == price
    assert result.ranks[0].compute_ns == (30_000 if on == "current" else 0)
    assert sum(_shares(result)) == result.makespan_ns
