"""The alignment of two lists of calls finds the call by which one of them departs."""

from __future__ import annotations

import time
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsim.checker.matching.call_alignment import AlignedCall, first_divergence


def call(line: int, op: str = "all_reduce", size: int = 4) -> AlignedCall:
    return AlignedCall(line, op, hash((op, size)) % 1000, 5)


#: A training loop: 2 to 4 calls at lines of their own, some of which agree in all but the line.
bodies = st.lists(
    st.tuples(st.sampled_from(["all_reduce", "broadcast"]), st.sampled_from([4, 8])),
    min_size=2,
    max_size=4,
)


def loop(body: list[tuple[str, int]], times: int) -> list[AlignedCall]:
    once = [call(line, op, size) for line, (op, size) in enumerate(body)]
    return once * times


@given(bodies, st.integers(0, 40))
def test_equal_lists_do_not_diverge(body: list[tuple[str, int]], times: int) -> None:
    assert first_divergence(loop(body, times), loop(body, times)) is None


@given(bodies, st.integers(1, 40), st.data())
def test_an_inserted_call_is_the_extra_call_wherever_it_is(
    body: list[tuple[str, int]], times: int, data: st.DataObject
) -> None:
    """Its line is that of a branch; whatever follows agrees with the others' calls or not."""
    others = loop(body, times)
    where = data.draw(st.integers(0, len(others)))
    op, size = data.draw(st.sampled_from(body))
    own = [*others[:where], call(99, op, size), *others[where:]]

    found = first_divergence(own, others)

    assert found is not None
    assert (found.kind, found.own, found.own_calls) == ("extra", where, (where,))


@given(bodies, st.integers(2, 40), st.data())
def test_the_two_sides_of_a_divergence_mirror_each_other(
    body: list[tuple[str, int]], times: int, data: st.DataObject
) -> None:
    others = loop(body, times)
    where = data.draw(st.integers(0, len(others)))
    own = [*others[:where], call(99), *others[where:]]

    found = first_divergence(others, own)

    assert found is not None
    assert (found.kind, found.own, found.other_calls) == ("missing", where, (where,))


@given(bodies, st.integers(1, 20), st.data())
def test_a_rank_that_skips_an_iteration_misses_all_its_calls(
    body: list[tuple[str, int]], times: int, data: st.DataObject
) -> None:
    """Which iteration it was does not show; that all calls of one are missing does."""
    behind = call(50, "barrier", 0)
    others = [*loop(body, times + 1), behind]

    found = first_divergence([*loop(body, times), behind], others)

    assert found is not None
    assert found.kind == "missing"
    assert {others[index].site for index in found.other_calls} == set(range(len(body)))


@given(bodies, st.integers(1, 20), st.data())
def test_two_calls_that_changed_places_are_swapped(
    body: list[tuple[str, int]], times: int, data: st.DataObject
) -> None:
    others = [*loop(body, times), call(80, "all_reduce", 1), call(81, "broadcast", 2)]
    own = [*others[:-2], others[-1], others[-2]]

    found = first_divergence(own, others)

    assert found is not None
    assert (found.kind, min(found.own, found.other)) == ("swapped", len(others) - 2)


@given(bodies, st.integers(1, 20), st.data())
def test_another_argument_at_the_same_line_is_no_extra_call(
    body: list[tuple[str, int]], times: int, data: st.DataObject
) -> None:
    others = loop(body, times)
    where = data.draw(st.integers(0, len(others) - 1))
    changed = others[where]._replace(signature=-1)
    own = [*others[:where], changed, *others[where + 1 :]]

    found = first_divergence(own, others)

    assert found is not None
    assert (found.kind, found.own) == ("arguments", where)


@given(bodies, st.integers(0, 20), st.data())
def test_ranks_with_a_block_of_lines_each_are_compared_by_their_calls(
    body: list[tuple[str, int]], times: int, data: st.DataObject
) -> None:
    own = loop(body, times)
    others = [each._replace(site=each.site + 100) for each in own]

    assert first_divergence(own, others) is None


def test_where_a_run_was_stopped_a_line_of_a_branch_is_extra() -> None:
    """Rank 0 was stopped in the branch of line 10, the others in the next iteration."""
    steps = [call(7), call(8, size=8)]

    found = first_divergence([*steps, call(10, size=1)], [*steps, steps[0]], stopped=True)

    assert found is not None
    assert (found.kind, found.own_calls) == ("extra", (2,))


def test_where_a_run_was_stopped_a_line_behind_the_loop_shows_that_an_iteration_is_missing() -> (
    None
):
    steps = [call(7), call(8, size=8)]
    behind = AlignedCall(12, "barrier", -1, column=1)

    found = first_divergence([*steps, behind], [*steps, steps[0]], stopped=True)

    assert found is not None
    assert (found.kind, found.other_calls) == ("missing", (2,))


def test_where_a_run_was_stopped_several_calls_at_one_line_are_skipped_together() -> None:
    """A broadcast of an object makes two calls; its root goes on to the next one."""
    own, sends = call(7), call(5, "broadcast", 8)

    found = first_divergence([own], [sends, sends, own], stopped=True)

    assert found is not None
    assert (found.kind, found.other_calls) == ("missing", (0,))


def test_where_a_run_was_stopped_a_list_that_ends_early_lacks_nothing() -> None:
    steps = [call(7), call(8)]

    assert first_divergence(steps * 3, steps * 4, stopped=True) is None


@pytest.mark.parametrize("branch", [False, True], ids=["one line", "a branch each"])
def test_a_long_program_is_aligned_in_linear_time(branch: bool) -> None:
    """100 000 calls of two ranks, an extra one near the end: below a second."""
    random = Random(1)
    others = [call(random.randrange(5), size=random.randrange(3)) for _ in range(100_000)]
    own = [each._replace(site=each.site + 10) for each in others] if branch else list(others)
    own.insert(99_000, call(99))

    begun = time.process_time()
    found = first_divergence(own, others)

    assert found is not None
    assert found.kind == "extra"
    assert found.own_calls[0] == 99_000
    assert time.process_time() - begun < 1


def test_where_a_run_was_stopped_calls_that_match_afterwards_show_the_missing_call() -> None:
    steps = [call(line, size=line) for line in range(3)]

    found = first_divergence([*steps, steps[0], steps[2], *steps], steps * 3, stopped=True)

    assert found == ("missing", 4, 4, (), (4,))


def test_different_calls_at_the_end_of_a_finished_run_are_all_replaced() -> None:
    steps = [call(line, size=line) for line in range(3)]
    own = [*steps, call(10, "broadcast"), call(11, "broadcast")]

    found = first_divergence(own, [*steps, call(12, "reduce")])

    assert found == ("replaced", 3, 3, (3, 4), (3,))
