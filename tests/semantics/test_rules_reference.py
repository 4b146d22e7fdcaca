"""The explicit rules against a naive simulator, and against themselves in another order."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distsim.backends import BACKEND_PROFILES, CONTRACT_READINGS, BackendProfile
from distsim.program.from_calls import build_program
from distsim.semantics.form.order_dependence import exits_with_open_requests
from distsim.semantics.ordered.blocked_state import blocked_state_at
from distsim.semantics.ordered.state import RunState
from distsim.semantics.ordered.transitions import TransitionRules
from tests.support.harness import draws
from tests.support.programs import Programs, programs
from tests.support.reference import Reference

Drawn = tuple[int, Programs, dict[str, list[int]]]


def end_of(rules: TransitionRules) -> RunState:
    state = rules.initial()
    rules.settle(state)
    while choices := rules.enabled(state):  # processes that end, one by one
        state = rules.apply(state, choices[0])
        rules.settle(state)
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
    with it, so none may. Nor may a process end with open requests, whose fate is a race.
    """
    size, calls, groups = drawn
    rules = TransitionRules(
        build_program(size, calls, groups=groups, options={"buffsize": buffsize}), profile
    )
    assume(not exits_with_open_requests(rules.linked))
    state, random = rules.initial(), Random(seed)
    while choices := rules.enabled(state):
        state = rules.apply(state, random.choice(choices))
    assume(not any(end is not None and end.status == "crashed" for end in state.ends))
    assert state.key() == end_of(rules).key()
    assert blocked_state_at(rules, state) == blocked_state_at(rules, end_of(rules))


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
