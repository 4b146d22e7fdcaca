"""Every algorithm of every row does what the row's effect states, and moves no less than the row's
busbw factor says.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distsim.operations.core import algorithms
from distsim.operations.core.algorithms import ChunkTransfer, CollectiveAlgorithm
from distsim.operations.core.operation_base import Operation
from distsim.operations.registry import OPERATIONS

SIZES = range(1, 33)
COLLECTIVES = [row for row in OPERATIONS.values() if row.kind == "collective"]
ALL = [(row, algorithm) for row in COLLECTIVES for algorithm in row.algorithms.values()]
CASES = [
    pytest.param(row, algorithm, id=f"{row.op}-{name}")
    for row in COLLECTIVES
    for name, algorithm in row.algorithms.items()
]
MOVING = [case for case in CASES if case.values[0].gets != "none"]
TOKENS = [case for case in CASES if case.values[0].gets == "none"]
#: Those that reach the bound: nobody sends or receives more than busbw factor x bytes.
OPTIMAL = {
    algorithms.ring_all_reduce,
    algorithms.ring_all_gather,
    algorithms.ring_reduce_scatter,
    algorithms.bruck_all_gather,
    algorithms.bruck_reduce_scatter,
    algorithms.pairwise_all_to_all,
    algorithms.direct_all_to_all,
    algorithms.binomial_gather,
    algorithms.binomial_scatter,
    algorithms.linear_gather,
    algorithms.linear_scatter,
    algorithms.chain_broadcast,
    algorithms.chain_reduce,
}


def roots(row: type[Operation], n: int) -> range:
    return range(n) if row.root_field else range(1)


def givers(row: type[Operation], n: int, root: int) -> list[int]:
    return [root] if row.gives == "root" else list(range(n))


def sizes_and_roots(row: type[Operation]) -> Iterator[tuple[int, int]]:
    return ((n, root) for n in SIZES for root in roots(row, n))


@pytest.mark.parametrize(("row", "algorithm"), MOVING)
def test_the_algorithm_produces_the_effect_of_its_operation(
    row: type[Operation], algorithm: CollectiveAlgorithm
) -> None:
    """On contributions that are counted: nothing is missing, nothing is there twice, for 1 to 32
    ranks and every root.
    """
    for n, root in sizes_and_roots(row):
        held = algorithms.initial_chunks(algorithm.chunking, n, givers(row, n, root))
        held = algorithms.apply_rounds(algorithm.rounds(n, root), held)
        for rank, parts in enumerate(row.effect(n, root)):
            for part, sources in enumerate(parts or ()):
                for chunk in algorithms.output_chunks(algorithm.chunking, n, rank, part):
                    assert held[rank].get(chunk) == tuple(sorted(sources)), (
                        n,
                        root,
                        rank,
                        part,
                        chunk,
                    )


@pytest.mark.parametrize(("row", "algorithm"), TOKENS)
def test_after_a_barrier_every_rank_has_heard_from_every_rank(
    row: type[Operation], algorithm: CollectiveAlgorithm
) -> None:
    for n in SIZES:
        held = algorithms.apply_rounds(
            algorithm.rounds(n, 0), algorithms.initial_chunks("token", n, range(n))
        )
        for rank in range(n):
            assert {giver for giver, _ in held[rank][0]} == set(range(n)), (n, rank)


def test_every_transfer_is_between_two_ranks_of_the_group() -> None:
    wrong = [
        (row.op, algorithm, n, root, t)
        for row, algorithm in ALL
        for n, root in sizes_and_roots(row)
        for round_ in algorithm.rounds(n, root)
        for t in round_
        if not (0 <= t.src < n and 0 <= t.dst < n and t.src != t.dst)
    ]
    assert wrong == []


@pytest.mark.parametrize(("row", "algorithm"), MOVING)
def test_the_busiest_rank_moves_at_least_busbw_factor_times_the_bytes(
    row: type[Operation], algorithm: CollectiveAlgorithm
) -> None:
    """With equality for the algorithms known to be optimal in bandwidth."""
    for n, root in sizes_and_roots(row):
        if n == 1:
            continue
        nbytes = 60 * n
        sent, received = algorithms.chunks_sent_and_received(algorithm.rounds(n, root), n)
        busiest = max(*sent, *received) * algorithm.chunk_nbytes(n, nbytes)
        bound = row.busbw_factor(n) * nbytes
        assert busiest >= bound - 1e-6, (n, root)
        if algorithm.rounds in OPTIMAL:
            assert busiest == pytest.approx(bound), (n, root)


def test_a_single_rank_moves_nothing() -> None:
    assert [(row.op, algorithm) for row, algorithm in ALL if any(algorithm.rounds(1, 0))] == []


def test_the_default_schedule_is_the_first_algorithm() -> None:
    first = {row: next(iter(row.algorithms.values())) for row in COLLECTIVES}

    assert [row.op for row in COLLECTIVES if row.schedule(6, 0) != first[row].rounds(6, 0)] == []
    assert [
        row.op for row in COLLECTIVES if row.chunk_nbytes(6, 600) != first[row].chunk_nbytes(6, 600)
    ] == []


def test_trees_and_dissemination_take_log2_rounds() -> None:
    logarithmic = (
        algorithms.binomial_broadcast,
        algorithms.binomial_reduce,
        algorithms.binomial_scatter,
        algorithms.binomial_gather,
        algorithms.bruck_all_gather,
        algorithms.bruck_reduce_scatter,
        algorithms.dissemination_barrier,
    )
    for n in SIZES:
        for rounds in logarithmic:
            assert len(rounds(n, 0)) == (n - 1).bit_length(), (rounds.__name__, n)


def test_no_rank_sends_two_messages_in_one_round_of_a_tree() -> None:
    """One message per rank and round is what makes the sum over rounds a price."""
    trees = (
        algorithms.binomial_broadcast,
        algorithms.binomial_scatter,
        algorithms.bruck_all_gather,
        algorithms.chain_broadcast,
    )
    for rounds in trees:
        for round_ in rounds(24, 5):
            peers = {(t.src, t.dst) for t in round_}
            assert len({src for src, _ in peers}) == len({dst for _, dst in peers}) == len(peers)


def test_play_refuses_to_send_missing_data() -> None:
    with pytest.raises(ValueError, match="round 0: rank 1 cannot send chunk 0 to rank 0"):
        algorithms.apply_rounds(
            [[ChunkTransfer(1, 0, 0)]], algorithms.initial_chunks("whole", 2, [0])
        )


def test_play_counts_a_contribution_that_arrives_twice() -> None:
    """The proof sees a reduction done twice, which a plain set would hide."""
    held = algorithms.apply_rounds(
        [[ChunkTransfer(1, 0, 0, True)], [ChunkTransfer(1, 0, 0, True)]],
        algorithms.initial_chunks("whole", 2, [0, 1]),
    )
    assert held[0][0] == ((0, 0), (1, 0), (1, 0))


@pytest.mark.parametrize("row", [OPERATIONS["send"], OPERATIONS["irecv"]], ids=lambda row: row.op)
def test_a_message_is_a_schedule_of_one_transfer(row: type[Operation]) -> None:
    """Group rank 0 of the pair sends, group rank 1 receives."""
    held = algorithms.apply_rounds(row.schedule(2, 0), algorithms.initial_chunks("whole", 2, [0]))
    assert held[1][0] == ((0, 0),)
    assert row.effect(2, 0) == (None, (((0, 0),),))


@pytest.mark.parametrize(
    ("op", "passes"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)]
)
def test_a_ring_passes_the_buffer_around_a_fixed_number_of_times(op: str, passes: int) -> None:
    """Also for two ranks, whose ring is one hop there and one back; one rank has no ring."""
    ring = OPERATIONS[op].algorithms["ring"]

    assert [ring.ring_passes(n) for n in (1, 2, 3, 8)] == [0, passes, passes, passes]
