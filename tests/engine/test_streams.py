"""Calls on named streams under nccl: what runs beside what, and who waits for whom. Elsewhere a
stream's name changes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distsim.backends import BACKEND_PROFILES
from distsim.common.errors import ScenarioErrors
from distsim.engine import SimulatedRun, run_program
from distsim.hardware.cluster import cluster_from
from distsim.hardware.cost import CostModel
from distsim.program.from_calls import build_program
from distsim.program.lower import lower
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import simulate

MS = 10**6


def compute(ms: int, queue: str = "") -> dict[str, Any]:
    return {"op": "compute", "time_ns": ms * MS, "queue": queue}


def all_reduce(queue: str = "", handle: str = "") -> dict[str, Any]:
    call = {"op": "all_reduce", "numel": 4, "queue": queue}
    return {**call, "async": True, "handle": handle} if handle else call


def wait_stream(stream: str, queue: str = "") -> dict[str, Any]:
    return {"op": "wait_stream", "stream": stream, "queue": queue}


def wait(handle: str, queue: str = "") -> dict[str, Any]:
    return {"op": "wait", "handles": [handle], "queue": queue}


def ran(calls: list[dict[str, Any]], backend: str = "nccl") -> SimulatedRun:
    """Two ranks that make the same calls, under both engines, which must agree."""
    program = build_program(2, {0: calls, 1: calls}, backend=backend, options={"init": "eager"})
    cost = CostModel(cluster_from("cpu-10gbe"), 2, 2)
    fast, ordered = (
        run_program(program, BACKEND_PROFILES[backend], cost, ordered=slow)
        for slow in (False, True)
    )
    for name in ("posted_ns", "returned_ns", "started_ns", "finished_ns", "waited_ns"):
        assert np.array_equal(fast.trace[name], ordered.trace[name]), name
    return fast


def started_ms(calls: list[dict[str, Any]], which: int, backend: str = "nccl") -> float:
    return int(ran(calls, backend).trace["started_ns"][which]) / MS


def test_a_collective_on_a_stream_and_the_default_stream_do_not_wait_for_each_other() -> None:
    done = ran([compute(5), all_reduce("reduce"), compute(3)])

    assert done.trace["started_ns"][1] == 0
    assert done.trace["started_ns"][2] == 5 * MS
    assert done.trace.text("queue", int(done.trace["queue"][1])) == "reduce"


def test_wait_stream_waits_for_the_work_on_the_other_stream_at_the_time_of_the_call() -> None:
    assert started_ms([compute(5), wait_stream("", "reduce"), all_reduce("reduce")], 2) == 5
    assert started_ms([wait_stream("", "reduce"), compute(5), all_reduce("reduce")], 2) == 0
    assert started_ms([compute(5, "copy"), wait_stream("copy"), compute(1)], 2) == 5


def test_waiting_for_a_stream_includes_what_that_stream_waits_for() -> None:
    chained = [compute(5, "copy"), wait_stream("copy", "reduce"), wait_stream("reduce"), compute(1)]

    assert started_ms(chained, 3) == 5


def test_an_asynchronous_collective_starts_after_its_issuing_stream() -> None:
    assert started_ms([compute(5, "copy"), compute(2), all_reduce("copy", "h"), wait("h")], 2) == 5
    assert started_ms([compute(5, "copy"), compute(2), all_reduce("", "h"), wait("h")], 2) == 2


def test_a_wait_blocks_only_the_current_stream() -> None:
    calls = [compute(5), all_reduce("", "h"), wait("h", "copy"), compute(1, "copy"), compute(1)]

    assert started_ms(calls, 3) > 5
    assert started_ms(calls, 4) == 5


def test_messages_are_ordered_after_the_stream_that_issues_them() -> None:
    def rank(op: str, peer: int) -> list[dict[str, Any]]:
        return [
            compute(4, "copy"),
            {"op": op, "peer": peer, "numel": 4, "queue": "copy"},
            compute(1, "copy"),
            compute(1),
        ]

    program = build_program(
        2, {0: rank("send", 1), 1: rank("recv", 0)}, backend="nccl", options={"init": "eager"}
    )
    done = run_program(
        program, BACKEND_PROFILES["nccl"], CostModel(cluster_from("cpu-10gbe"), 2, 2)
    )
    started = [int(n) for n in done.trace["started_ns"][4:]]

    assert started[1] == 4 * MS
    assert started[2] > 4 * MS
    assert started[3] == 0


def test_collectives_of_one_communicator_run_in_issue_order_on_any_stream() -> None:
    assert started_ms([compute(5), all_reduce(), all_reduce("reduce")], 2) > 5


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_stream_names_change_nothing_on_a_backend_without_streams(backend: str) -> None:
    calls = [
        compute(5),
        wait_stream("", "reduce"),
        all_reduce("reduce"),
        all_reduce("copy", "h"),
        compute(3),
        wait("h", "reduce"),
    ]
    plain = [
        {k: v for k, v in call.items() if k != "queue"}
        for call in calls
        if call["op"] != "wait_stream"
    ]

    assert ran(calls, backend).makespan_ns == ran(plain, backend).makespan_ns


TEXT = """
world: 2
backend: nccl
tensors: {x: {shape: [4], value: rank + 1}, y: {shape: [4]}}
program:
  - compute: {time: 1 ms, reads: [x]}
  - wait_stream: {stream: current, on: reduce}
  - all_reduce: {tensor: x, on: reduce}
  - compute: {time: 5 ms, writes: [y]}
  - wait_stream: reduce
  - assign: {tensor: y, value: 2 * x}
"""


def test_a_file_names_streams_and_values_follow_them() -> None:
    done = simulate(loads(TEXT), with_values=True)

    assert done.verdict is not None
    assert (done.outcome, done.verdict.verdict) == ("completes", "ok")
    assert 6 * MS <= done.makespan_ns < 6.1 * MS
    assert done.values is not None
    assert done.values.agrees(0, "y", 6.0)


def test_a_file_with_streams_survives_writing_and_reading() -> None:
    one = loads(TEXT)
    again = loads(one.to_yaml())

    assert [c for _, c in lower(again).calls_of(0)] == [c for _, c in lower(one).calls_of(0)]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("all_reduce: {tensor: x, on: host}", "expected a stream's name"),
        ("wait_stream: {stream: copy, on: copy}", "expected two different streams"),
        ("wait_stream: current", "expected two different streams"),
    ],
)
def test_an_invalid_stream_is_refused(step: str, words: str) -> None:
    with pytest.raises(ScenarioErrors) as caught:
        loads(f"world: 2\ntensors: {{x: {{shape: [4]}}}}\nprogram:\n  - {step}\n")

    assert words in str(caught.value)
