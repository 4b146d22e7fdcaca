"""Programs whose answer was once in doubt (tests/data/observed): the verdict, and each back end's
outcome whichever way it is found.

Nothing here knows how the package comes to an answer: by `simulate` in its fastest way, by
`simulate` event by event, by `check`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from distsim.scenario import load
from distsim.simulation.check_scenario import check_scenario
from distsim.simulation.expectations import unmet_expectations
from distsim.simulation.simulate_scenario import simulate

FILES = sorted((Path(__file__).resolve().parents[1] / "data" / "observed").glob("*.yaml"))
MIB, EAGER = 1 << 20, 4 << 10  # what NCCL buffers is 4 MiB by default, Open MPI's eager limit 4 KiB


def outcomes(path: Path, backend: str, *sets: str) -> tuple[str, str, str]:
    """By the clock, by the clock in the order of events, without a clock."""
    scenario = load(str(path), sets=list(sets))
    timed = [
        simulate(scenario, backend=backend, ordered=ordered, with_values=False, with_verdict=False)
        for ordered in (False, True)
    ]
    return timed[0].outcome, timed[1].outcome, check_scenario(scenario).profiles[backend].outcome


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_outcome_is_the_one_in_the_file(path: Path) -> None:
    expect = load(str(path)).expect
    assert expect is not None

    assert [str(d) for d in unmet_expectations(simulate(load(str(path))))] == []
    for backend, outcome in (expect.outcome or {}).items():
        assert outcomes(path, backend) == (outcome, outcome, outcome), backend


def named(name: str) -> Path:
    return next(path for path in FILES if path.stem == name)


@pytest.mark.parametrize(
    ("count", "nbytes", "outcome"),
    [
        (1, 8 * MIB, "completes"),
        (1, 8 * MIB + 1, "hangs"),
        (2, 4 * MIB, "completes"),
        (2, 4 * MIB + 1, "hangs"),
        (2, 6 * MIB, "hangs"),
        (8, MIB, "completes"),
        (9, MIB, "hangs"),
        (3, 8 * MIB // 3, "completes"),
        (3, 8 * MIB // 3 + 1, "hangs"),
    ],
)
def test_nccl_messages_run_ahead_while_together_they_fit_into_eight_mebibytes(
    count: int, nbytes: int, outcome: str
) -> None:
    """Two ranks that send before they receive; the edge is a byte wide, and counts what is on its
    way already.
    """
    found = outcomes(named("window_edges"), "nccl", f"vars.count={count}", f"vars.nbytes={nbytes}")

    assert found == (outcome, outcome, outcome)


@pytest.mark.parametrize(("count", "nbytes"), [(1, 1), (1, EAGER), (50, EAGER), (1, EAGER + 1)])
def test_an_mpi_message_runs_ahead_by_its_own_size_regardless_of_their_number(
    count: int, nbytes: int
) -> None:
    outcome = "hangs" if nbytes > EAGER else "completes"

    found = outcomes(named("window_edges"), "mpi", f"vars.count={count}", f"vars.nbytes={nbytes}")

    assert found == (outcome, outcome, outcome)


@pytest.mark.parametrize("nbytes", [1, 64])
def test_no_message_runs_ahead_on_gloo(nbytes: int) -> None:
    assert outcomes(named("window_edges"), "gloo", "vars.count=1", f"vars.nbytes={nbytes}") == (
        "hangs",
        "hangs",
        "hangs",
    )


def test_a_group_of_two_may_connect_if_a_group_of_one_has_the_same_name() -> None:
    """Of 9 real runs with different delays 8 completed and 1 hung; another series also raised."""
    outcome = check_scenario(load(str(named("group_of_one_next_to_two")))).profiles["gloo"]

    assert set(outcome.possible) == {"hangs", "completes", "raises"}


def test_a_rank_that_destroys_a_group_early_is_the_cause_of_the_hang() -> None:
    (finding, *_) = check_scenario(
        load(str(named("group_destroyed_before_the_last_call")))
    ).findings

    assert finding.message.startswith("rank 1 destroyed group g (")
    assert "without joining rank 0's all_reduce on it (" in finding.message
    assert finding.help == ("on rank 1, call that all_reduce before destroy_process_group",)


def test_a_cycle_of_group_creations_gets_one_order() -> None:
    (finding, *_) = check_scenario(load(str(named("group_creations_in_a_cycle")))).findings

    assert "in one order on all ranks of the world, for example ab, bc, ca" in finding.help[0]


def test_isend_is_not_suggested_for_a_message_already_sent_by_isend() -> None:
    scenario = load(str(named("messages_of_two_groups_crossed")))
    (finding, *_) = check_scenario(scenario, backend="nccl").findings

    assert "use the same order" in finding.help[0]
    assert "isend" not in finding.help[0]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("member_listed_twice", "DS111"),
        ("call_of_a_non_member", "DS104"),
        ("group_dst_too_large", "DS101"),
        ("call_on_a_destroyed_group", "DS108"),
    ],
)
def test_an_invalid_call_is_the_only_finding(name: str, code: str) -> None:
    found = check_scenario(load(str(named(name)))).findings

    assert [finding.code for finding in found] == [code]


def test_an_object_collective_is_shown_as_it_was_written() -> None:
    (finding, *_) = check_scenario(load(str(named("object_lists_of_two_sizes")))).findings

    assert finding.message.count("broadcast_object_list(src=0)") == 2
    assert "_lengths" not in finding.message
