"""The answer without a clock, and the search over orders, held to the time-ordered engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from distsim.backends import BACKEND_PROFILES, BackendProfile, default_cluster
from distsim.engine import outcome_of_ordered_run
from distsim.engine.backend_outcomes import _surely_completes as surely
from distsim.engine.backend_outcomes import backend_outcome
from distsim.engine.event_driven import simulate_in_order
from distsim.engine.order_search import search_event_orders
from distsim.engine.run_record import worst_outcome
from distsim.hardware.cost import CostModel
from distsim.program.from_calls import build_program
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.scenario import loads
from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.mismatches import ProgramMismatches
from distsim.semantics.form.order_dependence import why_order_matters
from distsim.semantics.local.run import run_local_clocks
from distsim.simulation.simulate_scenario import simulate
from tests.support.harness import draws
from tests.support.random_programs import Plain, any_programs, valid_programs

OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gloo", {}),
    ("mpi", {}),
    ("mpi", {"eager_limit": -1}),
    ("nccl", {}),
    ("nccl", {"init": "eager"}),
    ("nccl", {"buffsize": -1}),
    ("nccl", {"init": "eager", "buffsize": 400}),
)


def without_clock(program: Program, profile: BackendProfile) -> bool | None:
    """Does it complete, and all that met fits, as a run without prices tells; None where order
    decides.
    """
    linked = LinkedProgram(program, profile)
    if why_order_matters(linked) is not None:
        return None
    done = run_local_clocks(linked, CompletionConditions(linked, None))
    return all(host.ended for host in done.hosts) and not list(
        ProgramMismatches(linked).in_run(done.posted)
    )


@settings(max_examples=draws(80), deadline=None)
@given(any_programs())
def test_a_program_that_completes_in_every_order_completes(plain: Plain) -> None:
    for backend, options in OPTIONS:
        program = build_program(
            plain.world_size, plain.programs, groups=plain.groups, backend=backend, options=options
        )
        profile = BACKEND_PROFILES[backend]
        cost = CostModel(default_cluster(backend), program.world_size, program.local_size)
        if without_clock(program, profile) is True or (
            profile.device and surely(program, profile, cost)
        ):
            left = simulate_in_order(program, profile, cost)
            assert (outcome_of_ordered_run(left), left.mismatches) == ("completes", ())


@settings(max_examples=draws(100), deadline=None)
@given(valid_programs())
def test_correct_programs_are_shown_to_complete_without_times(plain: Plain) -> None:
    """On gloo, where the contract is the rule, nothing is left to the engines."""
    program = build_program(plain.world_size, plain.programs, groups=plain.groups)
    if why_order_matters(LinkedProgram(program, BACKEND_PROFILES["gloo"])) is None:
        assert without_clock(program, BACKEND_PROFILES["gloo"])


@settings(max_examples=draws(100), deadline=None)
@given(any_programs())
def test_the_timed_outcome_is_among_those_possible_in_any_order(plain: Plain) -> None:
    """Receives of odd ranks take any sender."""
    programs = {
        rank: [_opened(call) if rank % 2 else call for call in calls]
        for rank, calls in plain.programs.items()
    }
    for backend in ("gloo", "mpi"):
        program = build_program(plain.world_size, programs, groups=plain.groups, backend=backend)
        cost = CostModel(default_cluster(backend), program.world_size, program.local_size)
        left = simulate_in_order(program, BACKEND_PROFILES[backend], cost)
        found = search_event_orders(LinkedProgram(program, BACKEND_PROFILES[backend]), 300)
        if found.complete:
            outcomes = {
                worst_outcome(end.final_state, (note.outcome for note in end.notes))
                for end in found.ends
            }
            assert outcome_of_ordered_run(left) in outcomes


LEAVES = [
    [
        {"op": "send", "peer": 1, "numel": 300, "dtype": "uint8"},
        {"op": "all_reduce_coalesced", "numels": [2], "numel": 2},
    ],
    [
        {"op": "irecv", "peer": None, "numel": 1, "dtype": "uint8", "handle": "h"},
        {"op": "all_reduce_coalesced", "numels": [2], "numel": 2},
        {"op": "wait", "handles": ["h"]},
    ],
]


def test_a_rank_that_raises_may_have_ended_differently_before() -> None:
    """mpi refuses the coalesced call; a message that is too long for the open receive ends the rank
    if it is there first.
    """
    program = build_program(2, dict(enumerate(LEAVES)), backend="mpi")
    found = search_event_orders(LinkedProgram(program, BACKEND_PROFILES["mpi"]), 300)
    assert found.complete
    assert {
        worst_outcome(end.final_state, (note.outcome for note in end.notes)) for end in found.ends
    } == {"raises", "crashes"}
    assert backend_outcome(program, BACKEND_PROFILES["mpi"]).possible == ("crashes", "raises")


def test_a_search_over_all_steps_reports_when_it_was_cut_short() -> None:
    program = build_program(2, dict(enumerate(LEAVES)), backend="mpi")
    assert not search_event_orders(LinkedProgram(program, BACKEND_PROFILES["mpi"]), 3).complete


def _opened(call: dict[str, Any]) -> dict[str, Any]:
    if "ops" in call:
        return {**call, "ops": [_opened(part) for part in call["ops"]]}
    return {**call, "peer": None} if call["op"] in ("recv", "irecv") else call


LONG = """
name: long
world: {nodes: 2, ranks_per_node: 4}
tensors: {a: {shape: [64]}, b: {like: a}, g: {shape: [16]}}
program:
  - repeat:
      times: 300
      steps:
        - batch_isend_irecv:
            ops:
              - isend: {tensor: a, dst: (rank + 1) % world_size}
              - irecv: {tensor: b, src: (rank - 1) % world_size}
        - all_reduce: {tensor: g}
"""


@pytest.mark.parametrize("backend", BACKEND_PROFILES)
def test_a_long_program_is_judged_without_searching_the_order_of_events(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 ranks of 10 000 calls each would take the time-ordered engine minutes."""
    program = lower(loads(LONG))
    monkeypatch.setattr("distsim.engine.backend_outcomes.simulate_in_order", None)
    assert backend_outcome(program, BACKEND_PROFILES[backend]).possible == ("completes",)


def test_work_that_may_exceed_a_timeout_is_simulated() -> None:
    late = [
        [{"op": "recv", "peer": 1}],
        [{"op": "sleep", "time_ns": 3 * 10**9}, {"op": "send", "peer": 0}],
    ]
    program = build_program(2, dict(enumerate(late)), options={"timeout_ns": 10**9})
    assert backend_outcome(program, BACKEND_PROFILES["gloo"]).outcome == "raises"
    assert backend_outcome(program, BACKEND_PROFILES["mpi"]).outcome == "completes"


_SENT = {"op": "isend", "peer": 1, "numel": 4}
_TAKEN = {"op": "recv", "peer": 0, "numel": 4}


def _under(backend: str, *ranks: list[dict[str, Any]]) -> tuple[str, tuple[str, ...]]:
    program = build_program(len(ranks), dict(enumerate(ranks)), backend=backend)
    found = backend_outcome(program, BACKEND_PROFILES[backend])
    assert found.complete
    return found.outcome, found.possible


def test_arrival_of_a_dropped_gloo_send_depends_on_which_rank_arrives_first() -> None:
    """G4: it is cancelled unless its receiver waits already, as
    `p2p.isend_dropped_recv_already_posted` has it.
    """
    assert _under("gloo", [_SENT], [_TAKEN]) == ("raises", ("raises", "completes"))
    assert _under("nccl", [_SENT], [_TAKEN]) == ("completes", ("completes",))


def test_a_dropped_send_whose_receiver_certainly_waits_always_arrives() -> None:
    first = {"op": "irecv", "peer": 0, "numel": 4, "handle": "h"}
    ready = [{"op": "recv", "peer": 1, "numel": 1, "tag": 7}, _SENT]
    waits = [
        first,
        {"op": "send", "peer": 0, "numel": 1, "tag": 7},
        {"op": "wait", "handles": ["h"]},
    ]
    assert _under("gloo", ready, waits) == ("completes", ("completes",))


def test_a_real_run_with_another_order_of_events_agrees() -> None:
    from distsim.real.results.simulated_vs_real import compare_with_simulation
    from distsim.scenario import loads
    from distsim.simulation.simulate_scenario import simulate

    dropped_send = """
world: 2
backend: gloo
tensors: {x: {shape: [4]}}
program:
  - isend: {tensor: x, dst: 1}
    ranks: 0
  - recv: {tensor: x, src: 0}
    ranks: 1
"""
    done = simulate(loads(dropped_send))
    ended = [end._replace(status="ended") for end in done.run.final_state.ends]

    assert done.outcome == "raises"
    assert compare_with_simulation(done, "completes", ended, ()).differences == ()
    assert compare_with_simulation(done, "crashes", ended, ()).differences != ()


def test_a_members_only_new_group_completes_on_gloo_and_is_still_a_deadlock() -> None:
    """The verdict is the contract's: a run that completes under gloo does not spare it where a
    new_group has to meet.
    """
    text = """world: 3
backend: gloo
tensors: {x: {shape: [4]}}
program:
  - all_reduce: {tensor: x}
  - {new_group: {name: pair, ranks: [0, 1]}, ranks: [0, 1]}
"""
    found = simulate(loads(text))

    assert (found.outcome, found.verdict.verdict if found.verdict else "") == (
        "completes",
        "deadlock",
    )


def test_a_batch_on_a_group_that_its_rank_never_created_is_refused() -> None:
    text = """world: 2
backend: nccl
program:
  - {new_group: {name: pair, ranks: [0, 1]}, ranks: 0}
  - {batch_isend_irecv: {ops: [{irecv: {tensor: {shape: [1]}, src: 0, group: pair}, ranks: 1}]}, ranks: 1}
"""
    found = simulate(loads(text))

    assert found.verdict is not None
    assert found.verdict.verdict == "invalid"
    assert {finding.code for finding in found.findings} >= {"DS104"}


def test_both_engines_let_new_group_and_an_asynchronous_collective_share_the_lock_of_mpi() -> None:
    text = """world: 2
backend: mpi
program:
  - {reduce: {tensor: {shape: [1]}, dst: 0, async: true}, ranks: 0}
  - {new_group: {name: one, ranks: [1]}, ranks: 0}
options: {stays_connected: true}
"""
    program = lower(loads(text))

    assert (
        why_order_matters(LinkedProgram(program, BACKEND_PROFILES["mpi"]))
        == "the process's one lock decides who comes first"
    )
