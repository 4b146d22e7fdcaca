"""Lineage: whose contribution a buffer holds, and how often."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from distsim.scenario import load
from distsim.simulation.simulate_scenario import simulate
from distsim.values import TensorContribution, compute_values
from distsim.values.lineage import (
    ContentPiece,
    LineageGraph,
    align_contents,
    concatenate_contents,
    slice_content,
)
from tests.support.values_by_hand import ByHand

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
COMPUTE = {"op": "compute", "writes": "grad"}
REDUCE = {"op": "all_reduce", "tensor": "grad", "reduce_op": "avg"}
GRAD = {"grad": ((4,), "float32", None)}


def grads(ranks: int, version: int = 1) -> list[TensorContribution]:
    return [TensorContribution(r, "grad", version) for r in range(ranks)]


def met(*positions: int, ranks: int) -> list[list[tuple[int, int]]]:
    return [[(r, p) for r in range(ranks)] for p in positions]


def test_after_an_all_reduce_every_replica_has_each_gradient_exactly_once() -> None:
    case = ByHand([[COMPUTE, REDUCE]] * 4, GRAD)
    values = compute_values(case.program, case.trace(met(1, ranks=4)))

    assert values.exactly_once("grad", range(4), grads(4))
    assert values.lineage(2, "grad") == Counter(grads(4))


def test_a_reduction_done_twice_is_detected_and_named() -> None:
    case = ByHand([[COMPUTE, REDUCE, REDUCE]] * 2, GRAD)
    trace = case.trace(met(1, 2, ranks=2))
    values = compute_values(case.program, trace)

    assert not values.exactly_once("grad", range(2), grads(2))
    (breach, _) = values.breaches(0, "grad", grads(2))
    assert (breach.times, breach.start, breach.stop) == (2, 0, 4)
    assert trace["position"][breach.row] == 2


def test_a_skipped_reduction_is_reported_as_missing() -> None:
    case = ByHand(
        [[COMPUTE, {**REDUCE, "group": 1}], [COMPUTE, {**REDUCE, "group": 1}], [COMPUTE]],
        GRAD,
        groups=[[0, 1]],
    )
    values = compute_values(case.program, case.trace(met(1, ranks=2)))

    assert [b.source.rank for b in values.breaches(0, "grad", grads(3))] == [2]
    assert [(b.times, b.source.rank) for b in values.breaches(2, "grad", grads(3))] == [
        (0, 0),
        (0, 1),
    ]


def test_reduce_scatter_and_all_gather_make_an_all_reduce() -> None:
    calls = [
        COMPUTE,
        {"op": "reduce_scatter_tensor", "inputs": "grad", "outputs": "part", "reduce_op": "sum"},
        {"op": "all_gather_into_tensor", "inputs": "part", "outputs": "grad"},
    ]
    case = ByHand([calls] * 4, {**GRAD, "part": ((1,), "float32", None)})
    values = compute_values(case.program, case.trace(met(1, 2, ranks=4)))

    assert len(values.stretches(0, "grad")) == 4
    assert values.exactly_once("grad", range(4), grads(4))
    assert values.origins(1, "grad", 3) == Counter((source, 3) for source in grads(4))


def test_each_part_of_a_gathered_tensor_comes_from_its_rank() -> None:
    case = ByHand(
        [[{"op": "all_gather", "inputs": "x", "outputs": "y"}]] * 3,
        {"x": ((2,), "int64", "rank"), "y": ((3, 2), "int64", None)},
    )
    values = compute_values(case.program, case.trace(met(0, ranks=3)))

    assert [(s.start, s.stop, list(s.counts)) for s in values.stretches(1, "y")] == [
        (2 * r, 2 * r + 2, [TensorContribution(r, "x", 0)]) for r in range(3)
    ]


def test_a_stale_receive_buffer_shows_the_old_version() -> None:
    """The second activation is sent, but the receive still holds the first when it is summed up."""
    sender = [
        {"op": "compute", "writes": "act"},
        {"op": "send", "tensor": "act", "peer": 1},
        {"op": "compute", "writes": "act"},
    ]
    receiver = [
        {"op": "recv", "tensor": "act", "peer": 0},
        {"op": "assign", "tensor": "out", "value": "act"},
    ]
    case = ByHand(
        [sender, receiver], {"act": ((2,), "float32", None), "out": ((2,), "float32", None)}
    )
    values = compute_values(case.program, case.trace([[(0, 1), (1, 0)]]))

    assert values.lineage(0, "act") == Counter([TensorContribution(0, "act", 2)])
    assert values.lineage(1, "out") == Counter([TensorContribution(0, "act", 1)])


def test_accumulating_starts_from_zero_and_counts_every_micro_batch() -> None:
    case = ByHand([[{"op": "compute", "adds": "grad"}] * 3], GRAD)
    values = compute_values(case.program, case.trace())

    assert values.lineage(0, "grad") == Counter(TensorContribution(0, "grad", v) for v in (1, 2, 3))


def test_accumulating_onto_a_declared_value_keeps_it() -> None:
    case = ByHand([[{"op": "compute", "adds": "x"}]], {"x": ((2,), "float32", 1)})
    values = compute_values(case.program, case.trace())

    assert values.lineage(0, "x") == Counter(
        [TensorContribution(0, "x", 0), TensorContribution(0, "x", 1)]
    )


def test_sums_by_assign_count_their_named_sources() -> None:
    case = ByHand(
        [[{"op": "assign", "tensor": "z", "value": "x + y"}]],
        dict.fromkeys("xyz", ((2,), "int64", 1)),
    )
    values = compute_values(case.program, case.trace())

    assert values.lineage(0, "z") == Counter(
        [TensorContribution(0, "x", 0), TensorContribution(0, "y", 0)]
    )
    assert values.text(0, "z") == "[2, 2]"


def test_ranks_with_the_same_result_share_one_node() -> None:
    case = ByHand([[COMPUTE, REDUCE]] * 16, GRAD)
    values = compute_values(case.program, case.trace(met(1, ranks=16)))

    assert len({values.state(r, "grad").content[0].node for r in range(16)}) == 1


def test_counting_follows_long_histories_without_recursion() -> None:
    graph = LineageGraph()
    node = graph.leaf("write", TensorContribution(0, "x", 1), 0)
    for row in range(5000):
        node = graph.combine(
            "sum", ((node, 0), (graph.leaf("write", TensorContribution(0, "y", row), row), 0)), row
        )

    assert graph.counts(node).total() == 5001
    assert graph.origins(node, 7).total() == 5001


def test_splitting_and_joining_a_content_restores_it() -> None:
    content = (ContentPiece(3, 0, 0, None), ContentPiece(5, 1, 2, None))

    assert slice_content(content, 2, 5) == (
        ContentPiece(1, 0, 2, None),
        ContentPiece(2, 1, 2, None),
    )
    assert (
        concatenate_contents((slice_content(content, 0, 4), slice_content(content, 4, 8)))
        == content
    )
    assert align_contents([content, (ContentPiece(8, 2, 0, None),)]) == [
        (ContentPiece(3, 0, 0, None), ContentPiece(3, 2, 0, None)),
        (ContentPiece(5, 1, 2, None), ContentPiece(5, 2, 3, None)),
    ]


def test_a_pipeline_with_two_replicas_counts_every_micro_batch_of_both_exactly_once() -> None:
    """The file from loader to engine: 8 micro-batches add to the gradient of a stage, then its two
    replicas are averaged.
    """
    done = simulate(load(str(SCENARIOS / "pipeline_1f1b.yaml")))

    for stage in range(4):
        sources = [
            TensorContribution(rank, "grad", micro)
            for rank in (stage, stage + 4)
            for micro in range(1, 9)
        ]
        assert done.values.exactly_once("grad", (stage, stage + 4), sources)


def test_a_collective_matched_in_another_order_shows_whose_numbers_were_mixed() -> None:
    done = simulate(load(str(SCENARIOS / "collectives_swapped_equal.yaml")))

    assert done.values.lineage(0, "weight") == Counter(
        [TensorContribution(0, "weight", 0), TensorContribution(1, "bias", 0)]
    )
