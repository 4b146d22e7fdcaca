"""Groups that only their members make, and groups that end before the world does: as torch names
and refuses them.
"""

from __future__ import annotations

import pytest

from distsim.scenario import loads
from distsim.simulation.check_scenario import check_scenario
from distsim.simulation.simulate_scenario import simulate

HEAD = "world: 3\nbackend: BACKEND\nprogram:\n"
OTHER = "  - new_group: {name: a, ranks: [0, 2]}\n"
LOCAL = "  - new_group: {name: b, ranks: [0, 1], use_local_synchronization: true}\n    ranks: rank < 2\n"
USE_A = "  - all_reduce: {tensor: {shape: [1]}, group: a}\n    ranks: rank != 1\n"
USE_B = "  - all_reduce: {tensor: {shape: [1]}, group: b}\n    ranks: rank < 2\n"
END_A = "  - destroy_process_group: a\n"
EVERYBODY = "  - all_reduce: {tensor: {shape: [1]}}\n"


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    ("before", "outcome"),
    [
        ("", "completes"),
        (OTHER, "hangs"),  # rank 0 is in two groups by then, rank 1 in one: run on gloo
        (OTHER + END_A, "completes"),  # run on gloo
        ("  - new_group: {name: a, ranks: [0, 1]}\n", "completes"),
    ],
    ids=["first", "one is in another", "the other has ended", "both are in another"],
)
def test_members_find_each_other_if_they_are_in_equally_many_groups(before, outcome, backend):
    found = simulate(loads(HEAD.replace("BACKEND", backend) + before + LOCAL + USE_B))

    assert found.outcome == outcome
    told = "use_local_synchronization" in " ".join(h for f in found.findings for h in f.help)
    assert told is (outcome == "hangs")  # on nccl too, where they stand in the first use


def test_groups_declared_in_the_file_are_counted():
    found = simulate(
        loads("world: 3\nbackend: gloo\ngroups: {a: [0, 2]}\nprogram:\n" + LOCAL + USE_A + USE_B)
    )

    assert found.outcome == "hangs"


@pytest.mark.parametrize(
    ("late", "outcome"),
    [(USE_A, "completes"), (END_A + "    ranks: 2\n", "raises")],
    ids=["collective", "second end"],
)
def test_using_a_destroyed_group_is_reported_and_behaves_like_gloo(late, outcome):
    """Run: collectives still go through, a second destroy is a ValueError."""
    found = simulate(loads(HEAD.replace("BACKEND", "gloo") + OTHER + USE_A + END_A + late))

    assert (found.outcome, found.verdict.verdict) == (outcome, "invalid")
    assert {f.code for f in found.findings} == {"DS108"}


def test_the_real_world_group_survives_destroying_another_group():
    pytest.importorskip("torch")
    from tests.support.real_runs import run, written

    assert (
        run(written(HEAD.replace("BACKEND", "gloo") + OTHER + USE_A + END_A + EVERYBODY)).outcome
        == "completes"
    )


def test_two_groups_with_the_same_members_are_different():
    """Of the members alone, too: what comes on one does not meet what comes on the other."""
    uses = "".join(
        f"  - all_reduce: {{tensor: {{shape: [1]}}, group: {group}}}\n    ranks: {rank}\n"
        for rank, groups in ((0, "bc"), (1, "cb"))
        for group in groups
    )

    found = simulate(
        loads(HEAD.replace("BACKEND", "gloo") + LOCAL + LOCAL.replace("name: b", "name: c") + uses)
    )

    assert (found.outcome, found.verdict.verdict) == ("hangs", "deadlock")


#: b is used and destroyed; c has its members, and by then its number of groups.
AGAIN = (
    LOCAL
    + USE_B
    + "  - destroy_process_group: b\n    ranks: rank < 2\n"
    + LOCAL.replace("name: b", "name: c")
)
USE_C = USE_B.replace("group: b", "group: c")


@pytest.mark.parametrize(
    ("backend", "possible"), [("gloo", ("hangs", "completes")), ("nccl", ("undefined",))]
)
def test_a_recreated_local_group_has_its_previous_name(backend, possible):
    """Run on gloo (distsim.semantics.form.group_creation): whether it hangs is luck. The help says
    what torch does and what to write.
    """
    found = check_scenario(loads(HEAD.replace("BACKEND", backend) + AGAIN + USE_C))

    assert found.profiles[backend].possible == possible
    assert "a destroyed group had the same name" in found.findings[0].help[0]
    assert "keep the earlier group and use it again" in found.findings[0].help[0]


@pytest.mark.parametrize(("backend", "outcome"), [("gloo", "hangs"), ("nccl", "undefined")])
def test_a_group_created_in_each_iteration_is_recreated(backend, outcome):
    found = simulate(
        loads(
            "iterations: 2\n"
            + HEAD.replace("BACKEND", backend)
            + AGAIN.split("  - new_group: {name: c")[0]
        )
    )

    assert found.outcome == outcome


@pytest.mark.parametrize(
    "between",
    [
        "  - new_group: {name: d, ranks: [0, 1]}\n",  # held by both: another number, another name (run on gloo)
        "  - destroy_process_group: {}\n  - init_process_group: {}\n",
    ],
    ids=["in one group more", "in a new world"],
)
def test_a_group_recreated_under_another_name_completes(between):
    again = LOCAL.replace("name: b", "name: c")
    start = HEAD.replace("BACKEND", "gloo") + "  - init_process_group: {}\n"

    found = simulate(loads(start + AGAIN.removesuffix(again) + between + again + USE_C))

    assert found.outcome == "completes"


def in_store(text, *prefixes):
    """The groups b and c, each with a prefix of the store."""
    for prefix in prefixes:
        text = text.replace("use_local_synchronization: true", f"store: {prefix}", 1)
    return text


def test_real_groups_with_their_own_stores_need_no_equal_counts_and_can_be_recreated():
    pytest.importorskip("torch")
    from tests.support.real_runs import run, written

    text = (
        HEAD.replace("BACKEND", "gloo")
        + OTHER
        + in_store(AGAIN, "q/0", "q/1")
        + "  - sleep: 100 ms\n    ranks: 0\n"
        + USE_C
    )

    assert simulate(loads(text)).outcome == run(written(text)).outcome == "completes"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (in_store(AGAIN, "q/0", "q/0") + USE_C, "had the prefix q/0"),
        (
            in_store(LOCAL.replace("< 2", "== 0"), "q/0")
            + in_store(LOCAL.replace("< 2", "== 1"), "q/1")
            + USE_B,
            "it differs (rank 0: q/0, rank 1: q/1)",
        ),
    ],
    ids=["twice", "two"],
)
def test_a_reused_or_different_prefix_hangs_and_is_reported(text, told):
    found = simulate(loads(HEAD.replace("BACKEND", "gloo") + text))

    assert found.outcome == "hangs"
    assert told in found.findings[0].help[0]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_name_still_in_use_is_refused(backend):
    """Run on gloo: ValueError on every member. The name is the members' and the number of groups
    held, which is as before here.
    """
    end = "  - destroy_process_group: x\n    ranks: rank < 2\n"
    again = LOCAL + end + LOCAL.replace("name: b", "name: c") + USE_C
    found = check_scenario(
        loads(
            HEAD.replace("BACKEND", backend) + "  - new_group: {name: x, ranks: [0, 1]}\n" + again
        )
    )

    assert found.profiles[backend].outcome == "raises"
    (told,) = [f for f in found.findings if f.code == "DS704"]
    assert "has already been created" in told.message
    assert "use the existing group with this name" in told.help[0]


def test_mpi_cannot_create_a_group_from_its_members_alone():
    found = check_scenario(loads(HEAD.replace("BACKEND", "mpi") + LOCAL + USE_B))

    assert found.profiles["mpi"].outcome == "raises"
    assert "doesn't support use_local_synchronization" in found.findings[0].message
