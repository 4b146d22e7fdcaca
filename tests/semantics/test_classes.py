"""Which ranks of a program are equal, as the partition of its lowered calls tells, and the program
cut down to some of them.
"""

from __future__ import annotations

import pytest

from distsim.backends import BACKEND_PROFILES
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.scenario import loads
from distsim.semantics.classes.partition import partition_ranks
from distsim.semantics.classes.rank_keys import depends_on_group_rank
from distsim.semantics.classes.representatives import (
    FoldingError,
    equivalent_groups,
    representative_by_rank,
    representative_program,
)
from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.mismatches import ProgramMismatches
from distsim.semantics.local.quotient import coarsest_quotient
from distsim.semantics.ordered.machine_tables import group_rank_in
from distsim.simulation.simulate_scenario import cost_model
from tests.support.folding import compared

ROOTED = {
    "gather": "gather: {input: {shape: [4]}, output: {shape: [8, 4]}, dst: 3}",
    "scatter": "scatter: {input: {shape: [8, 4]}, output: {shape: [4]}, src: 3}",
    "broadcast": "broadcast: {tensor: {shape: [4]}, src: 3}",
    "reduce": "reduce: {tensor: {shape: [4]}, dst: 3}",
}
PAIRS = "world: 16\nbackend: nccl\nmesh: {dp: 8, tp: 2}\nprogram:\n"


def lowered(text: str) -> Program:
    return lower(loads(text))


def classes(text: str, shared: bool = False) -> list[list[int]]:
    """The ranks of each class, by their first ones."""
    scenario = loads(text)
    program = lower(scenario)
    found = partition_ranks(
        program,
        [cost_model(scenario, program, None)],
        [BACKEND_PROFILES[program.backend]],
        shared=shared,
    )
    assert found is not None
    return [
        [rank for rank, one in enumerate(found.of.tolist()) if one == number]
        for number in range(int(found.of.max()) + 1)
    ]


def part_of(text: str) -> tuple[Program, Program]:
    """(the program, what stands for it)."""
    scenario = loads(text)
    program = lower(scenario)
    found = representative_program(
        program,
        [cost_model(scenario, program, None)],
        [BACKEND_PROFILES[program.backend]],
        worth=1.0,
    )
    assert found is not None
    return program, found


@pytest.mark.parametrize("before", ["", "  - barrier\n", "  - compute: {time: 1 ms}\n"])
@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_non_root_ranks_are_equal_if_only_the_root_is_awaited(op: str, before: str) -> None:
    """Whatever else stands before the call with the root."""
    text = f"world: 8\nbackend: gloo\nprogram:\n{before}  - {ROOTED[op]}\n"

    assert classes(text) == [[0, 1, 2, 4, 5, 6, 7], [3]]
    assert not depends_on_group_rank(lowered(text), BACKEND_PROFILES["gloo"])


def test_ranks_differ_by_their_place_in_a_tree_but_not_in_a_rendezvous() -> None:
    """gloo broadcasts down a binomial tree; under nccl all wait for all."""
    text = f"world: 8\nbackend: BACKEND\nprogram:\n  - {ROOTED['broadcast']}\n"
    tree, all_together = (text.replace("BACKEND", name) for name in ("gloo", "nccl"))

    assert len(classes(tree)) == 8
    assert depends_on_group_rank(lowered(tree), BACKEND_PROFILES["gloo"])
    assert not depends_on_group_rank(lowered(all_together), BACKEND_PROFILES["nccl"])


def test_an_absent_root_that_members_wait_for_has_its_own_class() -> None:
    text = "world: 8\nbackend: gloo\nmesh: {half: 2, place: 4}\nprogram:\n"
    text += (
        "  - {broadcast: {tensor: {shape: [4]}, group: place, group_src: 0}, ranks: place > 0}\n"
    )
    found = classes(text)

    assert [0] in found
    assert [4] in found


def test_ranks_with_two_lists_of_calls_are_different_in_any_number_of_classes() -> None:
    """The first half works for one or two ms, the second sleeps; nobody has a partner by whom to be
    told apart later.
    """
    text = "world: 16\nbackend: gloo\nprogram:\n  - {compute: {time: 1 ms * (rank % 2 + 1)}, ranks: rank < 8}\n"
    text += "  - {sleep: {time: 1 ms}, ranks: rank > 7}\n"

    assert classes(text) == [[0, 2, 4, 6], [1, 3, 5, 7], list(range(8, 16))]


def test_a_member_that_skips_a_call_down_a_tree_has_its_own_class() -> None:
    """Place 2 hands on to place 3. It has a place in its other group, and by that one all of them
    are alike.
    """
    text = "world: 16\nbackend: gloo\nmesh: {dp: 4, tp: 4}\nprogram:\n"
    text += "  - {broadcast: {tensor: {shape: [4]}, group: tp, group_src: 0}, ranks: tp != 2}\n"
    text += "  - broadcast: {tensor: {shape: [4]}, group: dp, group_src: 0}\n"
    found = classes(text)

    assert [one for one in found if {2, 6, 10, 14} & set(one)] == [[2], [6], [10], [14]]


def test_members_on_one_node_differ_from_those_on_two_if_links_are_shared() -> None:
    """Rank 2 is alone on its machine in the group of three: what its link carries is another
    part.
    """
    text = "world: {nodes: 2, ranks_per_node: 2}\nbackend: nccl\ncluster: dgx-a100\ngroups: {g: [0, 1, 2]}\nprogram:\n"
    text += "  - {all_reduce: {tensor: {shape: [4]}, group: g}, ranks: rank < 3}\n"

    assert classes(text) == [[0, 1, 2], [3]]
    assert classes(text, shared=True) == [[0, 1], [2], [3]]


def test_a_rank_with_more_work_is_distinguished_and_so_is_its_partner() -> None:
    text = PAIRS + "  - {compute: {time: 1 ms}, ranks: rank == 5}\n"
    text += "  - {send: {tensor: {shape: [4]}, dst: rank + 1}, ranks: rank % 2 == 0}\n"
    text += "  - {recv: {tensor: {shape: [4]}, src: rank - 1}, ranks: rank % 2 == 1}\n"
    even, odd = (
        [rank for rank in range(16) if rank % 2 == of and rank not in (4, 5)] for of in (0, 1)
    )

    assert classes(text) == [even, odd, [4], [5]]


def test_pairs_that_reduce_are_one_class_with_either_driver() -> None:
    """Before a call is looked at (`partition`) and on the linked program (`fold`); by how much they
    compute they are two.
    """
    reduce, work = (
        "  - all_reduce: {tensor: {shape: [4]}, group: tp}\n",
        "  - compute: {flops: '1e9 * (tp + 1)'}\n",
    )
    program = lowered(PAIRS + reduce)
    linked = LinkedProgram(program, BACKEND_PROFILES["nccl"])
    folded = coarsest_quotient(linked, CompletionConditions(linked, None))

    assert classes(PAIRS + reduce) == [list(range(16))]
    assert folded is not None
    assert [one.ranks.tolist() for one in folded.classes] == [list(range(16))]
    assert classes(PAIRS + work) == [list(range(0, 16, 2)), list(range(1, 16, 2))]


def test_a_chain_has_as_many_classes_as_ranks() -> None:
    """From both ends, round by round."""
    text = "world: 16\nbackend: gloo\nprogram:\n"
    text += "  - {recv: {tensor: {shape: [4]}, src: rank - 1}, ranks: rank > 0}\n"
    text += "  - {send: {tensor: {shape: [4]}, dst: rank + 1}, ranks: rank < 15}\n"

    assert classes(text) == [[rank] for rank in range(16)]


def test_ranks_on_three_axes_are_distinguished_by_their_distance_from_the_working_rank() -> None:
    """Each reduces with its neighbour on each axis, in turn: rank 5 works first."""
    text = "world: 8\nbackend: gloo\nmesh: {a: 2, b: 2, c: 2}\nprogram:\n  - {compute: {time: 1 ms}, ranks: rank == 5}\n"
    text += "".join(
        f"  - all_reduce: {{tensor: {{shape: [4]}}, group: {axis}}}\n" for axis in "abc"
    )

    assert classes(text) == [[rank] for rank in range(8)]
    assert classes(text.replace("  - {compute: {time: 1 ms}, ranks: rank == 5}\n", "")) == [
        list(range(8))
    ]


def test_ranks_that_reduce_with_ranks_distinguished_late_are_distinguished_with_them() -> None:
    """Ranks 2 and 3 of a chain split in the first round, 6 and 7, which reduce with them, in the
    second; rank 8, which somebody waits for and which never comes, has been alone from the
    start."""
    by = "1 if rank == 2 or rank == 6 else 2 if rank == 3 or rank == 7 else 3 if rank > 7 else 0"
    text = f"world: 10\nbackend: gloo\ngroups: {{near: {{by: {by}}}}}\nprogram:\n"
    text += "  - {recv: {tensor: {shape: [4]}, src: rank - 1}, ranks: 0 < rank < 6}\n"
    text += "  - {send: {tensor: {shape: [4]}, dst: rank + 1}, ranks: rank < 5}\n"
    text += "  - {all_reduce: {tensor: {shape: [4]}, group: near}, ranks: rank == 2 or rank == 3 or rank == 6 or rank == 7}\n"
    text += "  - {broadcast: {tensor: {shape: [4]}, group: near, group_src: 0}, ranks: 9}\n"

    assert classes(text) == [[rank] for rank in range(10)]


def test_mismatches_are_not_reported_from_representatives() -> None:
    """What comes of them goes by how many say what: the run is done whole."""
    program, part = part_of(
        PAIRS + "  - all_reduce: {tensor: {shape: ['4 * (tp + 1)']}, group: tp}\n"
    )

    assert ProgramMismatches(LinkedProgram(program, BACKEND_PROFILES["nccl"])).instances.size == 8
    with pytest.raises(FoldingError):
        ProgramMismatches(LinkedProgram(part, BACKEND_PROFILES["nccl"]))


def test_a_batch_with_sizes_that_differ_by_rank_is_split_with_them() -> None:
    """Ranks of one size stand for each other, those of two do not."""
    text = PAIRS + "  - batch_isend_irecv:\n      ops:\n"
    text += "        - isend: {tensor: {shape: ['1000 * (tp + 1)']}, dst: (rank + 2) % 16}\n"
    text += "        - irecv: {tensor: {shape: ['1000 * (tp + 1)']}, src: (rank - 2) % 16}\n"
    text += "  - all_reduce: {tensor: {shape: [4]}, group: tp}\n"
    found = compared(loads(text))

    assert found.differences == ()
    assert classes(text) == [list(range(0, 16, 2)), list(range(1, 16, 2))]


def test_rounds_skipped_by_some_ranks_are_split_with_the_ranks_that_make_them() -> None:
    """A guard that keeps some of the kept ranks out stays, and one that keeps none out goes."""
    text = PAIRS + "  - repeat:\n      times: 3\n      index: i\n      steps:\n"
    text += "        - {compute: {time: 1 ms}, ranks: tp == 0 and i == 1}\n"
    text += "        - {all_reduce: {tensor: {shape: [4]}, group: dp}, ranks: tp == 1 and i > 0}\n"
    text += "        - {all_reduce: {tensor: {shape: [4]}, group: tp}, ranks: i < 2}\n"
    found = compared(loads(text))

    assert found.folded
    assert found.differences == ()


def test_ranks_of_a_ring_are_equal_and_all_of_them_are_simulated() -> None:
    """Each draws in whom it sends to: a section of one class keeps them all, which does not pay."""
    text = "world: 16\nbackend: gloo\nprogram:\n  - isend: {tensor: {shape: [4]}, dst: (rank + 1) % 16, as: s}\n"
    text += "  - recv: {tensor: {shape: [4]}, src: (rank - 1) % 16}\n  - wait: s\n"
    program = lowered(text)
    cost = cost_model(loads(text), program, None)

    assert classes(text) == [list(range(16))]
    assert representative_program(program, [cost], [BACKEND_PROFILES["gloo"]], worth=2) is None


def test_groups_with_one_representative_are_reported_with_their_lowest_ranks() -> None:
    """Whichever of a group's members makes more calls."""
    program, part = part_of(
        PAIRS
        + "  - {compute: {time: 1 ms}, ranks: tp == 0}\n  - all_reduce: {tensor: {shape: [4]}, group: tp}\n"
    )
    found = {
        of: those
        for of, those in equivalent_groups(part, program).items()
        if program.groups[of].size == 2
    }
    (of,) = found

    assert program.groups[of].ranks == (0, 1)
    assert [(rank, program.groups[group].ranks) for rank, group in sorted(found[of])] == [
        (rank, (rank, rank + 1)) for rank in range(0, 16, 2)
    ]


def test_a_representative_does_what_each_of_its_ranks_does() -> None:
    """Kept ranks stand for themselves; of a whole program each does."""
    text = (
        PAIRS
        + "  - compute: {flops: '1e9 * (tp + 1)'}\n  - all_reduce: {tensor: {shape: [4]}, group: tp}\n"
    )
    program, part = part_of(text)

    assert representative_by_rank(part) == [rank % 2 for rank in range(16)]
    assert representative_by_rank(program) == list(range(16))


@pytest.mark.parametrize(
    ("members", "rank", "place"),
    [((0, 1, 2), 2, 2), ((0, 2, 3), 2, 1), ((0, 2, 3), 3, 2), ((2, 0), 0, 1)],
)
def test_the_place_of_a_member_is_its_position_in_the_group(
    members: tuple[int, ...], rank: int, place: int
) -> None:
    assert group_rank_in(members, rank) == place
