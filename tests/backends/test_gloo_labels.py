"""What gloo really did with the programs of tests/data/agreed, and what its profile says of them.

The labels are observations (torch 2.13): completed, wrong-data, hung, raised, crashed. Where a
program's end depends on the order of events, or on the numbers that travel, the observed one must
be among the possible ones.
"""

from __future__ import annotations

import pytest

from distsim.backends import BACKEND_PROFILES
from distsim.engine.backend_outcomes import BackendOutcome, backend_outcome
from distsim.program.from_calls import build_program
from distsim.program.model import Program
from tests.support.agreed import Case, load_cases

OURS = {
    "completed": "completes",
    "wrong-data": "wrong-data",
    "hung": "hangs",
    "raised": "raises",
    "crashed": "crashes",
}
#: float32 into int32 of the same width: the numbers decide whether the bits' new meaning is
#: another. Observed: no harm, no harm.
NUMBERS_DECIDE = {"dl0012", "dl0058"}


def program_of(case: Case, backend: str = "gloo", **options: object) -> Program:
    """Work lasts as long as the case says: the order of events may hang on it.

    The observed processes lived until all ranks had finished.
    """
    return build_program(
        case["world_size"],
        case["programs"],
        groups=case["groups"],
        backend=backend,
        name=case["id"],
        options={"stays_connected": True, **options},
    )


@pytest.fixture(scope="module")
def judged() -> list[tuple[Case, BackendOutcome]]:
    return [
        (case, backend_outcome(program_of(case), BACKEND_PROFILES["gloo"]))
        for case in load_cases()
        if case["gloo"]
    ]


def test_every_program_ends_as_observed_on_gloo(judged: list[tuple[Case, BackendOutcome]]) -> None:
    """248 programs: the label is our outcome; schedule-dependent ones: one of the possible ones."""
    wrong = {}
    for case, ours in judged:
        loose = case["expect"].get("depends_on") == "schedule" or case["id"] in NUMBERS_DECIDE
        said = OURS[case["gloo"]["label"]]
        if said not in (ours.possible if loose else (ours.outcome,)):
            wrong[case["id"]] = (said, ours)
    assert wrong == {}
    assert len(judged) == 248


def test_every_outcome_that_gloo_showed_in_repeats_is_possible(
    judged: list[tuple[Case, BackendOutcome]],
) -> None:
    """Programs that were run several times, with random delays."""
    wrong = {}
    for case, ours in judged:
        seen = {OURS[label] for label in case["gloo"].get("repeats", {})}
        if not seen <= set(ours.possible):
            wrong[case["id"]] = (seen, ours.possible)
    assert wrong == {}


def test_blocked_ranks_are_those_observed_on_gloo(
    judged: list[tuple[Case, BackendOutcome]],
) -> None:
    """Where nothing depends on the schedule."""
    wrong = {}
    for case, ours in judged:
        if case["gloo"]["label"] == "hung" and case["expect"].get("depends_on") != "schedule":
            stuck = tuple(case["gloo"]["stuck"])
            if ours.outcome != "hangs" or ours.ranks != stuck:
                wrong[case["id"]] = (stuck, ours)
    assert wrong == {}


@pytest.mark.parametrize("init", [pytest.param("lazy", marks=pytest.mark.slow), "eager"])
def test_nccl_outcomes_agree_with_the_labels(init: str) -> None:
    """Another model of nccl, without buffers, judged the same programs: it and our profile agree on
    which stand still, where connections are there (it knows of none,
    `tests/semantics/test_nccl_connections.py`)."""
    wrong = {}
    for case in load_cases():
        other = case["nccl"].get(init)
        if other in (None, "unsupported"):  # it looks no further where a receive has no source
            continue
        ours = backend_outcome(
            program_of(case, "nccl", init=init, buffsize=-1, connected=True),
            BACKEND_PROFILES["nccl"],
        )
        if (other == "deadlock") != (
            ours.outcome == "hangs" and other not in ("invalid", "mismatch")
        ):
            wrong[case["id"]] = (other, ours)
    assert wrong == {}
