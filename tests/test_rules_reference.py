"""The explicit rules against a naive simulator, and against themselves in another order."""

from __future__ import annotations

from random import Random

import pytest
from conftest import draws
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from programs import Programs, programs
from reference import Reference

from distsim.profiles import PROFILES, READINGS, Profile
from distsim.program.build import build_program
from distsim.semantics.moves import Rules
from distsim.semantics.standing import standstill
from distsim.semantics.state import State

Drawn = tuple[int, Programs, dict[str, list[int]]]


def end_of(rules: Rules) -> State:
    state = rules.initial()
    rules.settle(state)
    return state


@pytest.mark.parametrize("reading", list(READINGS))
@settings(max_examples=draws(120), deadline=None)
@given(drawn=programs())
def test_rules_agree_with_the_naive_simulator_on_who_is_stuck(reading: str, drawn: Drawn) -> None:
    size, calls, groups = drawn
    rules = Rules(build_program(size, calls, groups=groups), READINGS[reading])
    assert standstill(rules, end_of(rules)).stuck == Reference(size, calls, groups, reading).stuck()


@pytest.mark.parametrize("profile", [*READINGS.values(), *PROFILES.values()], ids=lambda p: p.name)
@settings(max_examples=draws(60), deadline=None)
@given(drawn=programs(), seed=st.integers(0, 10**6), buffsize=st.sampled_from([0, 4, 10_000, 1 << 22]))
def test_every_order_of_choices_ends_in_the_same_state(profile: Profile, drawn: Drawn, seed: int, buffsize: int) -> None:
    """Without receives from any source; a process that aborts may take more or less of the others with it, so none may."""
    size, calls, groups = drawn
    rules = Rules(build_program(size, calls, groups=groups, options={"buffsize": buffsize}), profile)
    state, random = rules.initial(), Random(seed)
    while choices := rules.enabled(state):
        state = rules.apply(state, random.choice(choices))
    assume(not any(end is not None and end.status == "crashed" for end in state.ends))
    assert state.key() == end_of(rules).key()
    assert standstill(rules, state) == standstill(rules, end_of(rules))


@settings(max_examples=draws(60), deadline=None)
@given(drawn=programs())
def test_what_hangs_in_a_weaker_reading_hangs_in_a_stronger_one(drawn: Drawn) -> None:
    size, calls, groups = drawn
    program = build_program(size, calls, groups=groups)
    stuck = [set(standstill(rules, end_of(rules)).stuck) for rules in (Rules(program, r) for r in READINGS.values())]
    assert stuck[0] >= stuck[1] >= stuck[2]


@settings(max_examples=draws(40), deadline=None)
@given(drawn=programs(), steps=st.integers(0, 30))
def test_applying_a_choice_leaves_the_given_state_alone(drawn: Drawn, steps: int) -> None:
    size, calls, groups = drawn
    rules = Rules(build_program(size, calls, groups=groups), PROFILES["gloo"])
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
