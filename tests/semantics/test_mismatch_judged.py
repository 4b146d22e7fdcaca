"""A newcomer to a collective whose calls differ is judged by its neighbours: what comes of it is
what comes of all together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.backends import BACKEND_PROFILES, CONTRACT_READINGS
from distsim.backends.profile import BackendProfile
from distsim.engine.event_driven import OrderedRun, simulate_in_order
from distsim.hardware.cluster import cluster_from
from distsim.hardware.cost import CostModel
from distsim.program.from_calls import build_program
from tests.support.harness import draws

ALL = {**BACKEND_PROFILES, **CONTRACT_READINGS}
FAMILIES = (
    ("all_reduce", "reduce_scatter_tensor"),
    ("broadcast",),
    ("reduce",),
    ("gather",),
    ("scatter",),
    ("all_gather", "barrier"),
)


@st.composite
def unlike(draw: st.DrawFn) -> tuple[int, dict[int, list[dict[str, Any]]]]:
    """One or two collectives of a family which few kinds of calls are made for, each rank late by a
    time of its own or never there.
    """
    n, ops = draw(st.integers(2, 9)), draw(st.sampled_from(FAMILIES))
    roots = draw(st.sampled_from([(0,), (0, 1)]))
    kinds = draw(
        st.lists(
            st.tuples(st.sampled_from(ops), st.integers(1, 3), st.sampled_from(roots)),
            min_size=2,
            max_size=3,
        )
    )
    programs: dict[int, list[dict[str, Any]]] = {}
    for rank in range(n):
        programs[rank] = [{"op": "compute", "time_ns": draw(st.integers(0, 3)) * 1000}]
        for _ in range(draw(st.sampled_from([1, 1, 1, 1, 2, 0]))):
            op, numel, root = draw(st.sampled_from(kinds))
            call: dict[str, Any] = {"op": op} if op == "barrier" else {"op": op, "numel": numel}
            programs[rank].append(
                call
                | ({"root": root} if op in ("broadcast", "reduce", "gather", "scatter") else {})
            )
    return n, programs


def ran(n: int, programs: dict[int, list[dict[str, Any]]], profile: BackendProfile) -> OrderedRun:
    program = build_program(
        n, programs, backend=profile.name if profile.name in BACKEND_PROFILES else "gloo"
    )
    return simulate_in_order(program, profile, CostModel(cluster_from("cpu-10gbe"), n, 1))


@settings(max_examples=draws(150), deadline=None)
@given(unlike(), st.sampled_from(sorted(ALL)))
def test_comparing_a_new_call_with_its_neighbours_or_with_all_gives_the_same_result(
    drawn: tuple[int, Any], name: str
) -> None:
    """Of every profile, whoever comes when, whoever is missing, and who dies meanwhile."""
    near, whole = ran(*drawn, ALL[name]), ran(*drawn, replace(ALL[name], neighbours=None))

    assert near.final_state == whole.final_state
    assert near.matches == whole.matches
    assert near.end_ns == whole.end_ns
    assert [fields for _, fields, _ in near.mismatches] == [
        fields for _, fields, _ in whole.mismatches
    ]
