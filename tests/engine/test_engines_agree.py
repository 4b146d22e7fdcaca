"""The fast engine is the time-ordered one, flattened: same times, same end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from distsim.backends import BACKEND_PROFILES, CONTRACT_READINGS, default_cluster
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.channel_layout import build_channel_layout
from distsim.checker.reading_run import ContractProgram
from distsim.checker.verdict import verdict_of
from distsim.engine import SimulatedRun, run_program
from distsim.hardware.cluster import cluster_from
from distsim.hardware.cost import CostModel
from distsim.operations.registry import OPERATIONS
from distsim.program.from_calls import build_program
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.scenario import loads
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.order_dependence import why_order_matters
from distsim.simulation.simulate_scenario import _strict_final_state
from tests.support.harness import draws
from tests.support.programs import programs
from tests.support.random_programs import Plain, any_programs, valid_programs
from tests.support.reference import Reference

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"init": "eager"},
    {"buffsize": 2500},
    {"init": "eager", "buffsize": 350},
)
TIMES = ("posted_ns", "returned_ns", "started_ns", "finished_ns", "waited_ns")
BACKENDS = ("gloo", "mpi", "nccl")


def built(plain: Plain, backend: str, **options: Any) -> tuple[Program, CostModel]:
    program = build_program(
        plain.world_size, plain.programs, groups=plain.groups, backend=backend, options=options
    )
    return program, CostModel(cluster_from("cpu-10gbe"), program.world_size, 2)


def differences(fast: SimulatedRun, ordered: SimulatedRun) -> list[str]:
    """Rows whose times differ, in words."""
    found = []
    for name in TIMES:
        for row in np.flatnonzero(fast.trace[name] != ordered.trace[name]).tolist():
            call = fast.trace.row(row)
            found.append(
                f"{name} of {call.op} at {call.rank}.{call.position}: {fast.trace[name][row]} != {ordered.trace[name][row]}"
            )
    return found


@settings(max_examples=draws(250), deadline=None)
@given(any_programs())
def test_both_engines_agree_on_times_and_blocked_ranks(plain: Plain) -> None:
    for backend, options in ((b, o) for b in BACKENDS for o in OPTIONS if b == "nccl" or not o):
        program, cost = built(plain, backend, **options)
        fast = run_program(program, BACKEND_PROFILES[backend], cost)
        if fast.driver != "local clocks":
            continue
        ordered = run_program(program, BACKEND_PROFILES[backend], cost, ordered=True)

        assert differences(fast, ordered) == []
        assert [(b.rank, b.position) for b in fast.final_state.blocked] == [
            (b.rank, b.position) for b in ordered.final_state.blocked
        ]
        assert fast.outcome == ordered.outcome
        assert fast.makespan_ns == ordered.makespan_ns
        assert np.array_equal(fast.trace["match"], ordered.trace["match"])


@settings(max_examples=draws(200), deadline=None)
@given(any_programs())
def test_a_run_that_completes_under_gloo_saves_the_check_a_pass(plain: Plain) -> None:
    """Taken from the run or worked out: the same verdict and findings."""
    program, cost = built(plain, "gloo")
    ended = _strict_final_state(program, run_program(program, BACKEND_PROFILES["gloo"], cost))
    if ended is None:
        return
    taken, worked_out = verdict_of(program, ended=ended), verdict_of(program)

    assert replace(taken, final_state=None) == replace(worked_out, final_state=None)


def test_the_fast_engine_is_not_chosen_if_arrival_order_decides() -> None:
    any_source = {0: [{"op": "recv", "peer": None}], 1: [{"op": "send", "peer": 0}]}
    program = build_program(2, any_source)
    cost = CostModel(cluster_from("cpu-10gbe"), 2, 2)

    assert (
        why_order_matters(LinkedProgram(program, BACKEND_PROFILES["gloo"]))
        == "a receive is open to any source"
    )
    assert run_program(program, BACKEND_PROFILES["gloo"], cost).driver == "event-driven"


@settings(max_examples=draws(150), deadline=None)
@given(valid_programs())
def test_random_valid_programs_end_ok(plain: Plain) -> None:
    program, cost = built(plain, "gloo")

    verdict = verdict_of(program)

    assert verdict.verdict == "ok", verdict.findings
    assert run_program(program, BACKEND_PROFILES["gloo"], cost).outcome == "completes"


@settings(max_examples=draws(150), deadline=None)
@given(valid_programs())
def test_a_program_without_one_call_of_a_matched_pair_is_never_ok(plain: Plain) -> None:
    for rank, index in plain.needed[:4]:
        programs = {r: [dict(c) for c in calls] for r, calls in plain.programs.items()}
        gone = programs[rank].pop(index)
        for call in programs[rank]:
            if call["op"] == "wait":
                call["handles"] = [h for h in call["handles"] if h != gone.get("handle")]
        program = build_program(plain.world_size, programs, groups=plain.groups)

        assert verdict_of(program).verdict != "ok"


@settings(max_examples=draws(100), deadline=None)
@given(valid_programs())
def test_the_makespan_is_never_below_the_bandwidth_bound(plain: Plain) -> None:
    """No rank sends or receives faster than its fastest link: bytes through a rank / bandwidth
    bounds the makespan from below.
    """
    program, cost = built(plain, "gloo")
    result = run_program(program, BACKEND_PROFILES["gloo"], cost)
    fastest = max(
        cost.bytes_per_ns(a, b)
        for a in range(program.world_size)
        for b in range(program.world_size)
        if a != b
    )
    for rank in range(program.world_size):
        longest = max(
            (
                call.input_nbytes
                for _, call in program.calls_of(rank)
                if OPERATIONS[call.op].kind == "p2p"
            ),
            default=0,
        )

        assert result.makespan_ns >= int(longest / fastest)


@pytest.mark.parametrize("reading", list(CONTRACT_READINGS))
@settings(max_examples=draws(80), deadline=None)
@given(drawn=programs(coalesced=True))
def test_both_engines_and_a_naive_simulator_agree_on_blocked_ranks(
    reading: Any, drawn: Any
) -> None:
    size, calls, groups = drawn
    program = build_program(size, calls, groups=groups)
    layout = build_channel_layout(program)

    naive = Reference(size, calls, groups, reading).stuck()

    assert ContractProgram(layout, CallIndex(layout)).run(reading).final_state().stuck == naive
    assert (
        run_program(
            program, CONTRACT_READINGS[reading], CostModel(cluster_from("cpu-10gbe"), size, 2)
        ).final_state.stuck
        == naive
    )


MISFITS = {
    "a barrier meets all_reduces": "[{ranks: rank != 2, steps: [{all_reduce: {tensor: x}}]}, {barrier: }]",
    "a message of another type": "[{ranks: 0, steps: [{send: {tensor: x, dst: 1}}]}, "
    "{ranks: 1, steps: [{recv: {tensor: n, src: 0}}]}, {barrier: }]",
    "sums and maxima": "[{ranks: 0, steps: [{all_reduce: {tensor: x}}]}, {ranks: rank > 0, steps: [{all_reduce: {tensor: x, op: max}}]}]",
    "roots differ": "[{broadcast: {tensor: x, src: rank % 2}}, {barrier: }]",
    "sizes differ": "[{all_reduce: {tensor: z}}, {barrier: }]",
}


@pytest.mark.parametrize("backend", sorted(BACKEND_PROFILES))
@pytest.mark.parametrize("kind", MISFITS)
def test_both_engines_report_the_same_mismatches(kind: str, backend: str) -> None:
    """Outcome, who met and in what they differ, times and standstill, be the order of events
    followed or not.
    """
    tensors = "{x: {shape: [4]}, n: {shape: [4], dtype: int32}, z: {shape: [4 + rank % 2]}}"
    program = lower(
        loads(
            f"name: misfit\nworld: 4\nbackend: {backend}\ntensors: {tensors}\nprogram: {MISFITS[kind]}\n"
        )
    )
    cost = CostModel(default_cluster(backend), 4, program.local_size)

    one, other = (
        run_program(program, BACKEND_PROFILES[backend], cost),
        run_program(program, BACKEND_PROFILES[backend], cost, ordered=True),
    )

    assert (one.outcome, one.final_state, one.makespan_ns) == (
        other.outcome,
        other.final_state,
        other.makespan_ns,
    )
    assert sorted((sorted(rows), sorted(f)) for rows, f, _ in one.mismatches) == sorted(
        (sorted(r), sorted(f)) for r, f, _ in other.mismatches
    )
    assert one.trace["finished_ns"].tolist() == other.trace["finished_ns"].tolist()
    assert one.driver == "local clocks" or kind in (
        "roots differ",
        "sizes differ",
        "a barrier meets all_reduces",
    )
