"""The contract's single runs: who is stuck under each reading, held to the explicit rules and to
programs done by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from distsim.backends import CONTRACT_READINGS
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.channel_layout import build_channel_layout
from distsim.checker.reading_run import ContractProgram, Reading
from distsim.checker.verdict import verdict_of
from distsim.findings.final_state import FinalState
from distsim.operations.core.resolved_call import RankGroup
from distsim.program.code import BufferVector, CallSite, ChannelEndpoint, CodeCall, SharedCode
from distsim.program.from_calls import build_program
from distsim.program.model import Program, RankFault
from distsim.semantics.ordered.blocked_state import blocked_state_at as rules_standstill
from distsim.semantics.ordered.transitions import TransitionRules
from tests.support.harness import draws
from tests.support.random_programs import Plain, any_programs, valid_programs

READING_NAMES: tuple[Reading, ...] = ("rendezvous", "early", "buffered")
Calls = list[dict[str, Any]]


def send(peer: int, **more: Any) -> dict[str, Any]:
    return {"op": "send", "peer": peer, "numel": 4, **more}


def recv(peer: int | None, **more: Any) -> dict[str, Any]:
    return {"op": "recv", "peer": peer, "numel": 4, **more}


def run(program: Program, reading: Reading = "rendezvous") -> FinalState:
    layout = build_channel_layout(program)
    return ContractProgram(layout, CallIndex(layout)).run(reading).final_state()


def stuck(ranks: Sequence[Calls], reading: Reading = "rendezvous", **more: Any) -> tuple[int, ...]:
    return run(build_program(len(ranks), dict(enumerate(ranks)), **more), reading).stuck


def by_rules(program: Program, reading: Reading) -> FinalState:
    """The standstill that the explicit rules come to."""
    rules = TransitionRules(program, CONTRACT_READINGS[reading])
    state = rules.initial()
    rules.settle(state)
    while choices := rules.enabled(state):
        rules.advance(state, choices[0])
        rules.settle(state)
    return rules_standstill(rules, state)


@settings(max_examples=draws(300), deadline=None)
@given(any_programs())
def test_the_flat_driver_agrees_with_the_explicit_rules(plain: Plain) -> None:
    """Up to where calls meet that do not fit: what follows then is not the contract's."""
    program = build_program(plain.world_size, plain.programs, groups=plain.groups)
    if verdict_of(program).verdict == "mismatch":
        return
    for reading in READING_NAMES:
        flat, explicit = run(program, reading), by_rules(program, reading)

        assert [(b.rank, b.position) for b in flat.blocked] == [
            (b.rank, b.position) for b in explicit.blocked
        ]


@settings(max_examples=draws(150), deadline=None)
@given(valid_programs())
def test_a_valid_program_is_ok_and_no_rank_is_blocked(plain: Plain) -> None:
    found = verdict_of(build_program(plain.world_size, plain.programs, groups=plain.groups))

    assert found.verdict == "ok"
    assert found.findings == ()


@settings(max_examples=draws(150), deadline=None)
@given(valid_programs())
def test_a_program_that_lacks_one_call_of_a_matched_pair_is_not_ok(plain: Plain) -> None:
    for rank, index in plain.needed[:4]:
        calls = {r: list(c) for r, c in plain.programs.items()}
        left_out = calls[rank].pop(index)
        if "handle" in left_out:
            calls[rank] = [_without(call, left_out["handle"]) for call in calls[rank]]

        assert (
            verdict_of(build_program(plain.world_size, calls, groups=plain.groups)).verdict != "ok"
        )


def _without(call: dict[str, Any], handle: str) -> dict[str, Any]:
    return (
        {**call, "handles": [h for h in call["handles"] if h != handle]}
        if call["op"] == "wait"
        else call
    )


def test_sends_to_each_other_hang_unless_buffered() -> None:
    ranks = [[send(1), recv(1)], [send(0), recv(0)]]

    assert [stuck(ranks, reading) for reading in READING_NAMES] == [(0, 1), (0, 1), ()]


def test_receives_from_each_other_hang_in_every_variant() -> None:
    ranks = [[recv(1), send(1)], [recv(0), send(0)]]

    assert [stuck(ranks, reading) for reading in READING_NAMES] == [(0, 1)] * 3


def test_a_batch_posts_all_requests_before_it_waits() -> None:
    def both(peer: int) -> Calls:
        return [
            {"op": "batch", "ops": [send(peer) | {"op": "isend"}, recv(peer) | {"op": "irecv"}]}
        ]

    assert stuck([both(1), both(0)]) == ()


def test_handles_may_be_waited_on_in_any_order() -> None:
    sender = [send(1, op="isend", tag=t, handle=f"h{t}") for t in (0, 1)] + [
        {"op": "wait", "handles": ["h1", "h0"]}
    ]
    receiver = [recv(0, tag=1), recv(0, tag=0)]

    assert stuck([sender, receiver]) == ()


@pytest.mark.parametrize(
    ("op", "root", "leaves"),
    [
        ("broadcast", 0, {"early": (0,), "buffered": ()}),
        ("gather", 0, {"early": (0,), "buffered": (0,)}),
        ("scatter", 0, {"early": (0,), "buffered": ()}),
        ("reduce", 0, {"early": (0,), "buffered": (0,)}),
    ],
)
def test_ranks_that_return_from_a_rooted_collective_that_one_rank_skips(
    op: str, root: int, leaves: dict[Reading, tuple[int, ...]]
) -> None:
    """Rank 2 never comes. Rendezvous: all wait. Early: the root waits. Buffered: only a root that
    gets something waits.
    """
    call = {"op": op, "group": "world", "root": root, "numel": 6}
    ranks = [[call], [call], []]

    assert stuck(ranks) == (0, 1)
    assert {reading: stuck(ranks, reading) for reading in leaves} == leaves


def test_a_killed_rank_does_not_make_its_next_call() -> None:
    barrier = {"op": "barrier"}
    program = build_program(
        2, {0: [barrier] * 3, 1: [barrier] * 3}, faults=(RankFault(1, "kill", position=1),)
    )
    found = run(program)

    assert found.stuck == (0,)
    assert found.ends[1].status == "killed"
    assert found.blocked[0].position == 1


def test_an_absent_rank_blocks_all_others_at_startup() -> None:
    found = verdict_of(build_program(3, {}, faults=(RankFault(2, "absent"),)))

    assert found.verdict == "deadlock"
    assert found.ranks == found.core == (0, 1)


def test_new_group_needs_all_ranks_of_the_world() -> None:
    make = {"op": "new_group", "name": "g", "ranks": [0, 1]}

    assert stuck([[make], [make], [make]]) == ()
    assert stuck([[make], [make], []]) == (0, 1)


def ring(world: int, rounds: int) -> Program:
    """One code for all ranks: isend to the next, irecv from the one before, wait for both."""
    me = np.arange(world)
    out, into = (
        {"inputs": (b,), "outputs": (b,)}
        for b in (BufferVector(name, 0, (4,), "float32") for name in "xy")
    )
    body = [
        CodeCall("isend", 0, True, 0, 0, 16, 0, handled=True, fields=out),
        CodeCall("irecv", 1, True, 0, 1, 16, 0, handled=True, fields=into),
        CodeCall("wait", 2, waits=(1, 2)),
    ]
    endpoints = [ChannelEndpoint((me + 1) % world, 0, 0), ChannelEndpoint((me - 1) % world, 0, 0)]
    code = SharedCode(tuple(range(world)), body * rounds, endpoints, [0])
    sites = [CallSite("ring.yaml", i, 1, call.op) for i, call in enumerate(body, 1)]
    groups = [RankGroup(0, "world", tuple(range(world)))]
    return Program(
        "ring",
        "ring.yaml",
        world,
        1,
        world,
        "gloo",
        {},
        sites,
        groups,
        {},
        [code],
        [0] * world,
        list(range(world)),
    )


def test_code_of_many_ranks_runs_rank_by_rank() -> None:
    assert verdict_of(ring(16, 20)).verdict == "ok"


def test_code_is_compiled_once_for_ranks_that_do_the_same() -> None:
    linked = build_channel_layout(ring(64, 10)).linked

    assert [len(unit.ranks) for unit in linked.units] == [64]
