"""gloo after a message whose request was dropped (G4): what still passes between its two ranks and
what never does, each as run.
"""

from __future__ import annotations

from typing import Any

import pytest

from distsim.backends import BACKEND_PROFILES
from distsim.engine.backend_outcomes import backend_outcome
from distsim.findings.finding_types import Finding
from distsim.program.from_calls import build_program
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import simulate
from tests.support.gloo_observed import coll, irecv, isend, pause, recv, send, wait

Calls = list[dict[str, Any]]
#: Rank 0 drops an isend, which rank 1's receive has met a little later; or rank 1 an irecv, which
#: rank 0's send meets.
SENDER: list[Calls] = [[isend(1, None), pause(0.5)], [pause(0.2), irecv(0, "met"), pause(0.3)]]
RECEIVER: list[Calls] = [[pause(0.2), send(1), pause(0.3)], [irecv(0, None), pause(0.5)]]


def stuck(*ranks: Calls) -> tuple[int, ...]:
    return backend_outcome(
        build_program(len(ranks), dict(enumerate(ranks))), BACKEND_PROFILES["gloo"]
    ).ranks


@pytest.mark.parametrize(
    ("ranks", "blocked"),
    [
        ([[isend(1, None), isend(1, "b"), wait("b")], [pause(0.2), recv(0)]], (0, 1)),
        ([[isend(1, None), send(1, tag=1)], [pause(0.2), recv(0, tag=1)]], ()),
        ([[*SENDER[0], send(1, tag=1)], [*SENDER[1], recv(0, tag=1)]], (0, 1)),
        ([[*SENDER[0], recv(1)], [*SENDER[1], send(0)]], (0, 1)),
        ([[irecv(1, "q"), *SENDER[0], wait("q")], [*SENDER[1], send(0)]], ()),
        ([[*SENDER[0], coll("all_reduce")], [*SENDER[1], coll("all_reduce")]], (0, 1)),
        ([[*RECEIVER[0], recv(1)], [*RECEIVER[1], send(0)]], (0, 1)),
        ([[irecv(1, "q"), *RECEIVER[0], wait("q")], [*RECEIVER[1], send(0)]], ()),
        ([[*RECEIVER[0], send(1)], [*RECEIVER[1], irecv(0, "h"), pause(1)]], ()),
        ([[*RECEIVER[0], send(1)], [*RECEIVER[1], recv(0)]], (1,)),
    ],
    ids=[
        "the next of its channel",
        "what met before",
        "another tag",
        "the other way",
        "the other way, noticed before",
        "a collective",
        "the other way of a dropped irecv",
        "noticed before a dropped irecv",
        "the sender goes on",
        "the receiver does not",
    ],
)
def test_messages_behind_a_dropped_message_on_its_connection_are_lost(
    ranks: list[Calls], blocked: tuple[int, ...]
) -> None:
    assert stuck(*ranks) == blocked


@pytest.mark.parametrize(
    ("call", "blocked"),
    [
        (coll("all_reduce"), (0, 1, 2, 3)),
        (coll("barrier"), (0, 1, 2, 3)),
        (coll("broadcast", root=0), (0, 1, 3)),
        (coll("broadcast", root=2), ()),
        (coll("gather", root=0), (0, 1)),
        (coll("gather", root=3), ()),
        (coll("all_to_all_single"), (0, 1)),
    ],
    ids=[
        "ring",
        "barrier",
        "tree with the edge",
        "tree without",
        "to one of the two",
        "to another",
        "in pairs",
    ],
)
def test_a_collective_hangs_if_its_data_cross_the_broken_connection(
    call: dict[str, Any], blocked: tuple[int, ...]
) -> None:
    assert (
        stuck([*SENDER[0], call], [*SENDER[1], call], [pause(0.5), call], [pause(0.5), call])
        == blocked
    )


def test_another_group_has_its_own_connections() -> None:
    ranks = [
        [*SENDER[0], coll("all_reduce", group="g")],
        [*SENDER[1], coll("all_reduce", group="g")],
    ]
    assert (
        backend_outcome(
            build_program(2, dict(enumerate(ranks)), groups={"g": [0, 1]}), BACKEND_PROFILES["gloo"]
        ).outcome
        == "completes"
    )


def test_the_finding_names_the_dropped_request() -> None:
    """Both sides of the message that stands still are there, so it is no matter of their order."""
    found: tuple[Finding, ...] = simulate(
        loads("""
        world: 2
        tensors: {x: {shape: [4]}, y: {shape: [4]}}
        program:
          - {isend: {tensor: x, dst: 1}, ranks: 0}
          - {irecv: {tensor: y, src: 0, as: met}, ranks: 1}
          - {send: {tensor: x, dst: 1, tag: 1}, ranks: 0}
          - {recv: {tensor: x, src: 0, tag: 1}, ranks: 1}
    """)
    ).findings
    circle = next(f for f in found if f.code == "DS301")
    assert circle.help[0].startswith("on rank 0, keep the request")
    assert "since then no message between ranks 0 and 1 completes" in circle.help[0]
