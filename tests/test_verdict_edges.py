"""The edges of a verdict: what readings say together, and what a finding takes along of the waits behind it."""

from __future__ import annotations

from typing import get_args

import pytest

from distsim.check.ending import Ending, Example, How, depends_on, first_with, hows
from distsim.check.judge import fold_waits, number_words
from distsim.check.mismatch import Mismatch
from distsim.findings.record import Finding
from distsim.standstill import Standstill

EXAMPLE = Example(Standstill((), ()))


def ending(stuck: bool, passed: bool) -> Ending:
    return Ending({(0,): (0,)} if stuck else {}, passed, (), True, {"end": EXAMPLE})


NEVER, SOMETIMES, ALWAYS = ending(False, True), ending(True, True), ending(True, False)


# --- readings ---
@pytest.mark.parametrize(
    ("given", "said", "depends"),
    [
        ({"rendezvous": NEVER}, ["never"] * 4, None),
        ({"rendezvous": ALWAYS}, ["always"] * 4, None),
        ({"rendezvous": ALWAYS, "early": ALWAYS, "buffered": NEVER}, ["always", "always", "never", "sometimes"], "buffering"),
        ({"rendezvous": SOMETIMES, "early": SOMETIMES, "buffered": SOMETIMES}, ["sometimes"] * 4, "schedule"),
        ({"rendezvous": NEVER, "mixed": SOMETIMES}, ["never", "never", "never", "sometimes"], "buffering"),
        ({"rendezvous": ALWAYS, "mixed": ALWAYS}, ["always"] * 4, None),
    ],
)  # fmt: skip
def test_readings_that_agree_depend_on_nothing_and_one_that_is_not_there_ends_as_rendezvous(
    given: dict[str, Ending], said: list[How], depends: str | None
) -> None:
    found = hows(given, "deadlock")

    assert list(found.values()) == said
    assert depends_on(found) == depends
    first = first_with(given, "deadlock")
    assert (first is None) == (set(said) == {"never"})


def test_an_ending_has_kept_to_its_senders_unless_it_says_otherwise_and_an_example_is_an_end() -> None:
    relying = Ending({}, True, (), True, {"end": EXAMPLE}, relying=((0, 0, -1),))

    assert (NEVER.how("race"), relying.how("race")) == ("never", "sometimes")
    assert EXAMPLE.ended
    assert get_args(How) == ("always", "sometimes", "never")


# --- waits behind a mismatch ---
def wait(code: str, rank: int) -> Finding:
    return Finding(code, "error", f"rank {rank} waits\n  and more", (rank,), (rank,))


def test_a_wait_becomes_a_line_of_the_mismatch_its_ranks_came_to_and_of_no_other_finding() -> None:
    """Three are told and the rest counted; a wait of ranks that never came there, and what is no wait, stand alone."""
    misfit, leak = Finding("DS202", "error", "misfit", (0, 1, 2)), Finding("DS501", "warning", "leak", (0, 1, 2))
    waits = [wait("DS301", 0), wait("DS302", 1), wait("DS304", 0), wait("DS303", 1), wait("DS301", 0)]
    others = [wait("DS301", 2), wait("DS804", 0), wait("DS301", 7)]

    found = fold_waits([leak, misfit], [*waits, *others], {0, 1, 7})

    assert found[0] == leak
    assert found[1].message.splitlines() == [
        "misfit", "  in its wake, rank 0 waits", "  in its wake, rank 1 waits", "  in its wake, rank 0 waits",
        "  … and 2 more waits behind it",
    ]  # fmt: skip
    assert list(found[2:]) == others
    assert "more" not in fold_waits([misfit], waits[:3])[0].message


def test_another_operation_explains_all_else_that_differs() -> None:
    assert number_words(["numel", "op", "dtype"]) == "operation"
    assert number_words(["numel", "ranks"]) == "element count and members"
    assert Mismatch.__dataclass_fields__["note"].default == ""
