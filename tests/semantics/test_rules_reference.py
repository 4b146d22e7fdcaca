"""The explicit rules against a naive simulator, and against themselves in another order."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distsim.backends import BACKEND_PROFILES, CONTRACT_READINGS, BackendProfile
from distsim.engine.order_search import search_event_orders
from distsim.program.from_calls import build_program
from distsim.semantics.form.order_dependence import exits_with_open_requests
from distsim.semantics.ordered.blocked_state import blocked_state_at
from distsim.semantics.ordered.state import RunState
from distsim.semantics.ordered.transitions import TransitionRules
from tests.support.gloo_observed import coll, irecv, isend, recv, send
from tests.support.harness import draws
from tests.support.programs import Programs, programs
from tests.support.reference import Reference

Drawn = tuple[int, Programs, dict[str, list[int]]]
#: A request that rank 0 leaves open, and the call of rank 1 that meets it.
OPEN_AT_EXIT = {
    "isend": (isend(1, "open", tag=5), recv(0, tag=5)),
    "irecv": (irecv(1, "open", tag=5), send(0, tag=5)),
    "all_reduce": (coll("all_reduce", handle="open"), coll("all_reduce")),
}


def end_of(rules: TransitionRules) -> RunState:
    state = rules.initial()
    rules.settle(state)
    while choices := rules.enabled(state):  # processes that end, one by one
        state = rules.apply(state, choices[0])
        rules.settle(state)
    return state


def end_in_random_order(rules: TransitionRules, random: Random) -> RunState:
    state = rules.initial()
    while choices := rules.enabled(state):
        state = rules.apply(state, random.choice(choices))
    return state


@pytest.mark.parametrize("reading", list(CONTRACT_READINGS))
@settings(max_examples=draws(120), deadline=None)
@given(drawn=programs())
def test_the_rules_agree_with_the_naive_simulator_on_blocked_ranks(
    reading: str, drawn: Drawn
) -> None:
    size, calls, groups = drawn
    rules = TransitionRules(build_program(size, calls, groups=groups), CONTRACT_READINGS[reading])
    assert (
        blocked_state_at(rules, end_of(rules)).stuck
        == Reference(size, calls, groups, reading).stuck()
    )


@pytest.mark.parametrize(
    "profile", [*CONTRACT_READINGS.values(), *BACKEND_PROFILES.values()], ids=lambda p: p.name
)
@settings(max_examples=draws(60), deadline=None)
@given(
    drawn=programs(), seed=st.integers(0, 10**6), buffsize=st.sampled_from([0, 4, 10_000, 1 << 22])
)
def test_every_order_of_choices_ends_in_the_same_state(
    profile: BackendProfile, drawn: Drawn, seed: int, buffsize: int
) -> None:
    """Without receives from any source; a process that aborts may take more or less of the others
    with it, so none may. The fate of requests that are open when a process ends is a race (see the
    next test), so such processes stay connected.
    """
    size, calls, groups = drawn
    options: dict[str, Any] = {"buffsize": buffsize}
    rules = TransitionRules(build_program(size, calls, groups=groups, options=options), profile)
    if exits_with_open_requests(rules.linked):
        options["stays_connected"] = True
        rules = TransitionRules(build_program(size, calls, groups=groups, options=options), profile)
    state = end_in_random_order(rules, Random(seed))
    assume(not any(end is not None and end.status == "crashed" for end in state.ends))
    assert state.key() == end_of(rules).key()
    assert blocked_state_at(rules, state) == blocked_state_at(rules, end_of(rules))


@pytest.mark.parametrize("kind", ["isend", "irecv", "all_reduce"])
@settings(max_examples=draws(20), deadline=None)
@given(drawn=programs(max_events=3), seed=st.integers(0, 10**6))
def test_the_search_finds_each_end_of_a_program_that_exits_with_open_requests(
    kind: str, drawn: Drawn, seed: int
) -> None:
    """On gloo. Rank 0 exits with a request open, which rank 1 may or may not meet in time."""
    size, calls, groups = drawn
    open_call, partner = OPEN_AT_EXIT[kind]
    random = Random(seed)
    calls = {**calls, 0: [*calls[0][:3], open_call], 1: calls[1][:3]}
    calls[1].insert(random.randint(0, len(calls[1])), partner)
    rules = TransitionRules(build_program(size, calls, groups=groups), BACKEND_PROFILES["gloo"])
    search = search_event_orders(rules.linked, 1_500, every_step=True)
    assume(search.complete)
    ends = {end.final_state for end in search.ends}

    for _ in range(4):
        assert blocked_state_at(rules, end_in_random_order(rules, random)) in ends


@settings(max_examples=draws(60), deadline=None)
@given(drawn=programs())
def test_a_program_that_hangs_with_more_buffering_also_hangs_with_less(drawn: Drawn) -> None:
    size, calls, groups = drawn
    program = build_program(size, calls, groups=groups)
    stuck = [
        set(blocked_state_at(rules, end_of(rules)).stuck)
        for rules in (TransitionRules(program, r) for r in CONTRACT_READINGS.values())
    ]
    assert stuck[0] >= stuck[1] >= stuck[2]


@settings(max_examples=draws(40), deadline=None)
@given(drawn=programs(), steps=st.integers(0, 30))
def test_applying_a_choice_does_not_change_the_given_state(drawn: Drawn, steps: int) -> None:
    size, calls, groups = drawn
    rules = TransitionRules(build_program(size, calls, groups=groups), BACKEND_PROFILES["gloo"])
    state = rules.initial()
    for _ in range(steps):
        choices = rules.enabled(state)
        if not choices:
            break
        before, twin = state.key(), state.copy()
        after = rules.apply(state, choices[-1])
        assert state.key() == before == twin.key()
        assert after.key() != before
        state = after
