"""Timeouts: a standstill never ends by one, but a wait that outlasts its group's while others move
does.
"""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest

from distsim.backends import BACKEND_PROFILES, default_cluster
from distsim.engine import SimulatedRun, run_program
from distsim.engine.timeout_check import LAUNCH_QUEUE_DEPTH
from distsim.hardware.cost import CostModel
from distsim.program.from_calls import build_program
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import simulate
from tests.support.gloo_observed import REDUCE, SECOND, coll, group, irecv, pause, recv, send, wait

MINUTE = 60 * SECOND


def simulated(
    backend: str, *ranks: list[dict[str, Any]], timeout: int | None = SECOND, **more: Any
) -> SimulatedRun:
    options = {"timeout_ns": timeout, **more}
    program = build_program(len(ranks), dict(enumerate(ranks)), backend=backend, options=options)
    return run_program(
        program,
        BACKEND_PROFILES[backend],
        CostModel(default_cluster(backend), len(ranks), len(ranks)),
    )


def ends(done: SimulatedRun) -> list[tuple[str, int]]:
    return [(end.status, end.at_ns // SECOND) for end in done.final_state.ends]


@pytest.mark.parametrize("call", [(recv(1), send(0)), (REDUCE, REDUCE)])
def test_a_rank_that_times_out_raises_and_its_partner_finds_the_connection_closed(
    call: tuple[dict[str, Any], ...],
) -> None:
    done = simulated("gloo", [call[0]], [pause(3), call[1]])
    assert done.outcome == "raises"
    assert ends(done) == [("raised", 1), ("raised", 3)]
    first, second = done.final_state.ends
    assert first.message.startswith("Timed out waiting 1000ms for")
    assert second.message.startswith("Connection closed by peer")


def test_the_finding_names_the_line_and_the_timeout() -> None:
    done = simulated("gloo", [recv(1)], [pause(3), send(0)])
    (late,) = done.findings
    assert (late.code, late.ranks) == ("DS804", (0,))
    assert "timeout of 1 s" in late.message


def test_a_hang_is_not_a_timeout() -> None:
    """Nothing moves after both wait, so both are stuck, not late."""
    done = simulated("gloo", [recv(1)], [recv(0)])
    assert (done.outcome, done.findings) == ("hangs", ())
    done = simulated("gloo", [recv(1)], [pause(0.5), recv(0)])
    assert done.outcome == "hangs"


def test_a_message_that_arrives_within_the_timeout_is_in_time() -> None:
    assert simulated("gloo", [recv(1)], [pause(0.9), send(0)]).outcome == "completes"


def test_the_timeout_of_a_message_starts_with_its_wait() -> None:
    assert (
        simulated("gloo", [irecv(1, "w"), pause(2.5), wait("w")], [pause(3), send(0)]).outcome
        == "completes"
    )


def test_the_timeout_of_a_collective_starts_with_the_collective() -> None:
    """G10: the group is closed while the host is elsewhere; it finds out when it waits, and other
    groups live on.
    """
    made = group("g", 0, 1, timeout_s=60)
    later = [pause(3), coll("all_reduce", group="g"), coll("broadcast", root=0)]
    start = coll("all_reduce", **{"async": True, "handle": "w"})
    done = simulated("gloo", [made, start, *later, wait("w")], [made, *later])
    assert done.outcome == "raises"
    first = done.final_state.ends[0]
    assert (first.position, first.message) == (4, "Application timeout caused pair closure")


def test_creating_a_group_waits_one_second_longer_than_the_timeout() -> None:
    calls = [group("g", 0, 1, timeout_s=1)]
    assert simulated("gloo", calls, [pause(1.5), *calls]).outcome == "completes"
    assert (
        simulated("gloo", calls, [pause(2.5), *calls]).final_state.ends[0].message == "Wait timeout"
    )


def test_timeouts_default_to_those_of_the_backend() -> None:
    program = build_program(2, {0: [], 1: []}, groups={"g": [0, 1]})
    assert program.group_timeouts_ns(BACKEND_PROFILES["gloo"].timeout_ns) == [30 * MINUTE] * 2
    assert program.group_timeouts_ns(BACKEND_PROFILES["nccl"].timeout_ns) == [10 * MINUTE] * 2
    program = build_program(2, {0: [], 1: []}, groups={"g": [0, 1]}, options={"timeout_ns": 5})
    assert program.group_timeouts_ns(BACKEND_PROFILES["gloo"].timeout_ns) == [5, 30 * MINUTE]


def test_the_nccl_watchdog_counts_from_the_call_of_the_host() -> None:
    """The all_reduce is enqueued at once and finished behind three seconds of work on its
    stream.
    """
    work = {"op": "compute", "time_ns": 3 * SECOND}
    done = simulated("nccl", [work, REDUCE], [work, REDUCE], init="eager")
    assert done.outcome == "crashes"
    assert done.findings[0].code == "DS804"
    assert "Watchdog" in done.final_state.ends[0].message
    assert (
        simulated("nccl", [work, REDUCE], [work, REDUCE], timeout=4 * SECOND, init="eager").outcome
        == "completes"
    )


def test_a_host_runs_ahead_of_its_device_by_at_most_the_launch_queue() -> None:
    """Seconds of work in small pieces: each call is enqueued when there is room, so none waits for
    long.
    """
    piece = [{"op": "compute", "time_ns": SECOND // LAUNCH_QUEUE_DEPTH // 4}, REDUCE]
    steps = piece * (4 * LAUNCH_QUEUE_DEPTH)
    done = simulated("nccl", steps, steps, init="eager")
    assert done.makespan_ns > SECOND
    assert done.outcome == "completes"


def test_mpi_has_no_timeout() -> None:
    assert simulated("mpi", [recv(1)], [pause(3), send(0)]).outcome == "completes"


def monitored(*steps: str, call: str = "{timeout: 1 s}", who: str = "rank < 2") -> SimulatedRun:
    """Three ranks, of which some make a monitored_barrier, and what is done besides."""
    lines = "".join(
        f"  - {step}\n" for step in (f"{{monitored_barrier: {call}, ranks: {who}}}", *steps)
    )
    return simulate(
        loads(
            f"world: 3\noptions: {{timeout: 3 s}}\ntensors: {{x: {{shape: [4]}}}}\nprogram:\n{lines}"
        )
    ).run


@pytest.mark.parametrize(
    "instead",
    [
        (),
        ("{recv: {tensor: x, src: 0}, ranks: 2}",),
        ("{barrier: , ranks: 2}",),
        ("{compute: {time: 2500 ms}, ranks: 2}",),
        ("{recv: {tensor: x, src: 1}, ranks: 2}", "{send: {tensor: x, dst: 2}, ranks: 1}"),
    ],
    ids=["ends", "waits for rank 0", "another call", "computes", "waits for a peer"],
)
def test_a_monitored_barrier_that_times_out_raises_and_names_the_missing_rank(
    instead: tuple[str, ...],
) -> None:
    """Whatever the missing rank does: observed as `coll.one_missing.monitored_barrier`. Its peers
    lose the connection.
    """
    done = monitored(*instead)
    first, second = done.final_state.ends[:2]

    assert done.outcome == "raises"
    # If rank 2's process ends, rank 0 notices it before the timeout (run).
    assert (first.status, first.at_ns // SECOND) == ("raised", 1 if instead else 0)
    assert first.message == "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 1000 ms"
    assert (second.status, second.message.partition(".")[0]) == (
        "raised",
        "Connection closed by peer",
    )
    if instead:
        assert (
            done.findings[0].message
            == "rank 0 raises in monitored_barrier after 1 s: rank 2 did not arrive"
        )


def test_a_monitored_barrier_names_all_missing_ranks_on_request_and_rank_0_may_be_missing() -> None:
    two = monitored(call="{timeout: 1 s, wait_all_ranks: true}", who="rank == 0").final_state.ends
    without = monitored(who="rank > 0").final_state.ends

    assert two[0].message == "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 1000 ms"
    assert [end.status for end in without] == ["ended", "raised", "raised"]
    assert without[1].message.startswith("Connection closed by peer")


# --- nccl: the id of a communicator is published in the store ---
def test_ranks_raise_if_the_first_rank_publishes_the_communicator_id_too_late() -> None:
    done = simulated("nccl", [pause(3), REDUCE], [REDUCE], [REDUCE])

    assert done.outcome == "raises"
    assert ends(done)[1:] == [("raised", 1), ("raised", 1)]
    assert [(finding.code, finding.ranks) for finding in done.findings] == [
        ("DS807", (1,)),
        ("DS807", (2,)),
    ]
    assert "rank 0 has not published" in done.findings[0].message
    assert "retrieving ncclUniqueId from [0]" in done.final_state.ends[1].message


def test_the_first_rank_of_a_communicator_waits_for_late_ranks_without_a_timeout() -> None:
    assert simulated("nccl", [REDUCE], [pause(3), REDUCE]).outcome == "completes"


def test_ranks_that_find_the_communicator_id_wait_for_later_ranks_without_a_timeout() -> None:
    assert simulated("nccl", [REDUCE], [REDUCE], [pause(3), REDUCE]).outcome == "completes"


def test_eager_initialisation_creates_the_communicator() -> None:
    done = simulated("nccl", [pause(3), REDUCE], [REDUCE], init="eager")

    assert done.outcome == "completes"


@pytest.mark.parametrize(("late", "outcome"), [(0, "raises"), (1, "completes")])
def test_the_lower_rank_publishes_the_communicator_id_of_a_pair(late: int, outcome: str) -> None:
    ranks = [[send(1)], [recv(0)]]
    ranks[late].insert(0, pause(3))

    assert simulated("nccl", *ranks).outcome == outcome


@pytest.mark.parametrize(("world_timeout", "outcome"), [(1, "raises"), (60, "completes")])
def test_the_store_uses_the_timeout_of_the_world_not_of_the_group(
    world_timeout: int, outcome: str
) -> None:
    text = f"""
        world: 3
        backend: nccl
        options: {{timeout: {world_timeout} s}}
        groups: {{pair: {{ranks: [1, 2], timeout: 2 s}}}}
        tensors: {{x: {{shape: [4]}}}}
        program:
          - {{sleep: {{time: 3 s}}, ranks: 1}}
          - {{all_reduce: {{tensor: x, group: pair}}, ranks: [1, 2]}}
        """

    assert simulate(loads(dedent(text))).outcome == outcome
