"""`data_parallel`, `tensor_parallel`, `context_parallel` and `expert_parallel` move what they must,
to where it belongs.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.common.errors import ScenarioErrors
from distsim.program.lower import lower
from distsim.scenario import Scenario
from distsim.scenario.strategies.intra_layer.expert_router import (
    ExpertRouter,
    apportioned,
    axis_positions,
    routed_rows,
)
from tests.support.harness import draws
from tests.support.strategy_checks import (
    held_once,
    meeting,
    noticed,
    sent_nbytes,
    simulated,
    spoiled,
)

LAYERS = {"params": [[256, 64], [64]], "forward": "1 ms", "backward": "2 ms", "count": 3}


def one(
    name: str, world: int = 4, axis: str = "", iterations: int = 1, **fields: object
) -> Scenario:
    mesh = {axis: world} if axis else {}
    return Scenario(
        world=world, backend="nccl", mesh=mesh, iterations=iterations, program=[{name: fields}]
    )


def data(world: int = 4, iterations: int = 1, **fields: object) -> Scenario:
    return one(
        "data_parallel",
        world,
        "",
        iterations,
        **{"layers": LAYERS, "batch": [24, 8], "output": [24, 2], **fields},
    )


def tensor(world: int = 4, **fields: object) -> Scenario:
    given_fields = {
        "layers": 2,
        "sequence": 48,
        "hidden": 24,
        "dtype": "float32",
        "forward": "1 ms",
        "backward": "2 ms",
        **fields,
    }
    return one("tensor_parallel", world, "tp", **given_fields)


def ring(world: int = 4, **fields: object) -> Scenario:
    return one(
        "context_parallel",
        world,
        "cp",
        **{"keys": [16, 4], "forward": "4 ms", "backward": "8 ms", **fields},
    )


def experts(world: int = 4, **fields: object) -> Scenario:
    given_fields = {
        "experts": 8,
        "tokens": 100,
        "hidden": 4,
        "forward": "1 ms",
        "backward": "2 ms",
        **fields,
    }
    return one("expert_parallel", world, "ep", **given_fields)


def refused(make, *args: object, **fields: object) -> list[tuple[str, str]]:
    with pytest.raises(ScenarioErrors) as caught:
        make(*args, **fields)
    return [
        (p.path.partition("]")[2].partition(".")[2].partition(".")[2], p.message)
        for p in caught.value.problems
    ]


# --- data_parallel -------------------------------------------------------------------------------------------------------
def test_data_parallel_communicates_in_order():
    """Batch out, model out, outputs in, their gradients out, gradients in, and copies renewed;
    compute stands between.
    """
    program = lower(data())
    words = [call.name or call.op for _, call in program.calls_of(0)]

    assert words == [
        "master copy",
        "next batch",
        "scatter",
        "broadcast",
        *[f"forward layer {k}" for k in range(3)],
        "output",
        "gather",
        "loss",
        "scatter",
        *[f"backward layer {k}" for k in (2, 1, 0)],
        "reduce",
        "assign",
        "optimizer",
        "broadcast",
    ]
    assert [call.name for _, call in program.calls_of(1) if call.op == "compute"] == [
        w for w in words if w.startswith(("forward", "output", "backward"))
    ]


@pytest.mark.parametrize("iterations", [1, 3])
def test_rank_0_gets_the_gradients_of_each_device_exactly_once_and_all_get_its_weights(iterations):
    done = simulated(data(4, iterations).to_yaml())
    values = done.values
    grads = values.lineage(0, "data_parallel_grads_0")
    weights = [values.lineage(rank, "data_parallel_weights_0") for rank in range(4)]

    assert set(grads.values()) == {1}
    assert {c.rank for c in grads} == {0, 1, 2, 3}
    assert all(w == weights[0] for w in weights)
    assert {c.rank for c in weights[0]} == {0}


def test_rank_0_is_the_bottleneck_of_data_parallel():
    """All that moves goes through it: it has a part in every message, the others in their own."""
    with_eight, with_two = (simulated(data(n).to_yaml()).makespan_ns for n in (8, 2))

    assert with_eight > with_two
    assert refused(data, batch=[10, 8]) == [
        (
            "batch",
            "the first dimension of batch, 10, is not divisible by 4 ranks; all ranks need equal parts",
        )
    ]


@pytest.mark.parametrize(
    ("group", "first"),
    [("odd", {1}), ("named", {1}), ("both", {0}), ("b", {0, 2}), (["a", "b"], {0}), (None, {0})],
)
def test_the_first_rank_of_every_group_has_the_master_copy(group, first):
    groups = {"odd": [3, 1], "named": {"ranks": [1, 3]}, "both": {"axes": ["a", "b"]}}
    fields = {
        "layers": LAYERS,
        "batch": [4, 8],
        "output": [4, 2],
        **({} if group is None else {"group": group}),
    }
    entry = {"data_parallel": fields} | (
        {"ranks": "rank % 2 == 1"} if group in ("odd", "named") else {}
    )
    program = lower(Scenario(world=4, mesh={"a": 2, "b": 2}, groups=groups, program=[entry]))

    assert {
        rank for rank in range(4) if any(c.name == "master copy" for _, c in program.calls_of(rank))
    } == first


@settings(max_examples=draws(20), deadline=None)
@given(st.integers(0, 9), st.integers(0, 2), st.sampled_from(["dropped", "doubled", "misdirected"]))
def test_an_altered_call_of_data_parallel_is_always_detected(number, rank, how):
    wrong = spoiled(data(3, 2), number, rank, how)

    assert wrong is None or noticed(wrong, [], range(3))


# --- tensor_parallel -----------------------------------------------------------------------------------------------------
def test_each_pair_is_reduced_once_per_pass():
    assert Counter(op for op, *_ in meeting(tensor())) == {"all_reduce": 2 * 2 * 2}
    assert {nbytes for _, _, nbytes, _ in meeting(tensor())} == {48 * 24 * 4}


def test_sequence_parallelism_moves_as_many_bytes_as_the_all_reduce():
    """Korthikanti, section 4.2.2."""
    assert Counter(op for op, *_ in meeting(tensor(sequence_parallel=True))) == {
        "all_gather_into_tensor": 8,
        "reduce_scatter_tensor": 8,
    }
    assert sent_nbytes(tensor(sequence_parallel=True)) == sent_nbytes(tensor())


@pytest.mark.parametrize(
    ("parallel", "label"), [(False, "out"), (False, "grad"), (True, "part"), (True, "grad_part")]
)
def test_activations_contain_the_partial_sum_of_every_rank_exactly_once(parallel, label):
    done = simulated(tensor(sequence_parallel=parallel).to_yaml())

    assert (done.outcome, done.verdict.verdict) == ("completes", "ok")
    assert held_once(done, f"tensor_parallel_{label}", range(4))


def test_sizes_not_divisible_by_the_ranks_are_refused():
    assert refused(tensor, hidden=26, heads=6) == [
        ("heads", "heads 6 is not divisible by the 4 ranks of tp"),
        ("hidden", "hidden 26 is not divisible by the 4 ranks of tp"),
    ]
    assert refused(tensor, sequence=50, sequence_parallel=True)[0][0] == "sequence"


# --- context_parallel ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("rotate", ["alltoall", "p2p"])
def test_every_rank_gets_every_part_of_the_sequence_once_in_ring_order(world, rotate):
    values = simulated(ring(world, rotate=rotate).to_yaml()).values

    for rank in range(world):
        owners = [
            [c.rank for c in values.lineage(rank, f"context_parallel_kv_{i}")] for i in range(world)
        ]
        assert owners == [[(rank - i) % world] for i in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("rotate", ["alltoall", "allgather"])
def test_keys_travel_to_all_others_in_each_pass_and_gradients_all_the_way_round(world, rotate):
    """A rank alone does not communicate."""
    program = lower(ring(world, rotate=rotate))
    ops = Counter(call.op for _, call in program.calls_of(world - 1))
    gathers = 2 if rotate == "allgather" and world > 1 else 0
    gradients = world if world > 1 else 0
    keys = 2 * (world - 1) if rotate == "alltoall" else 0

    assert program.findings == ()
    assert sum(count for op, count in ops.items() if op.startswith("all_gather")) == gathers
    exchanges = sum(count for op, count in ops.items() if op.startswith("all_to_all"))
    assert exchanges == keys + gradients


@pytest.mark.parametrize("rotate", ["alltoall", "allgather", "p2p"])
def test_gradients_of_keys_return_with_the_part_of_every_rank_exactly_once(rotate):
    done = simulated(ring(4, rotate=rotate).to_yaml())

    assert (done.outcome, done.verdict.verdict) == ("completes", "ok")
    for rank in range(4):
        home = done.values.lineage(rank, "context_parallel_grad_4")
        assert sorted(c.rank for c in home) == [0, 1, 2, 3]
        assert set(home.values()) == {1}


def test_an_unbalanced_causal_ring_leaves_the_first_rank_idle():
    """Rank r attends to 2r + 1 half parts of n * n; balanced, all have the same."""
    alone = "cluster: {preset: dgx-a100, shared_links: false}\n"  # a concurrent transfer would slow compute down
    uneven = simulated(alone + ring(causal=True, load_balance=False).to_yaml()).timeline.ranks
    even = simulated(alone + ring(causal=True).to_yaml()).timeline.ranks

    assert [r.compute_ns * 4 // (12 * 10**6) for r in uneven] == [1, 3, 5, 7]
    assert [r.compute_ns for r in even] == [12 * 10**6] * 4


def test_a_balanced_causal_ring_needs_twice_as_many_parts():
    assert refused(ring, sequence=36, causal=True)[0][0] == "sequence"
    assert refused(ring, sequence=35)[0][1] == "sequence 35 is not divisible by the 4 ranks of cp"
    assert len(meeting(ring(sequence=36))) > 0


@settings(max_examples=draws(20), deadline=None)
@given(
    st.integers(0, 9),
    st.integers(0, 2),
    st.sampled_from(["dropped", "doubled", "misdirected"]),
    st.sampled_from(["alltoall", "p2p"]),
)
def test_an_altered_call_of_the_ring_is_always_detected(number, rank, how, rotate):
    wrong = spoiled(ring(3, rotate=rotate), number, rank, how)

    assert wrong is None or noticed(wrong, ["context_parallel_grad_3"], range(3))


# --- expert_parallel -----------------------------------------------------------------------------------------------------
def test_counts_tokens_and_results_are_exchanged_and_tokens_twice_more_for_the_gradients():
    calls = meeting(experts(top_k=2))

    assert [op for op, *_ in calls] == ["all_to_all_single"] * 5
    assert [nbytes for _, _, nbytes, _ in calls] == [8 * 8, *4 * [200 * 4 * 2]]


@pytest.mark.parametrize("imbalance", [0, 0.5, 2])
@pytest.mark.parametrize(
    "fields", [{}, {"capacity_factor": 1.0}, {"capacity_factor": 1.5, "pad_to_capacity": True}]
)
def test_results_return_to_the_rank_of_their_tokens_in_order(imbalance, fields):
    done = simulated(experts(imbalance=imbalance, seed=3, **fields).to_yaml())
    sends = routed_rows(
        ExpertRouter(
            8, 100, 1, imbalance, 3, fields.get("capacity_factor"), "pad_to_capacity" in fields
        ),
        4,
        4,
    )

    assert (done.outcome, done.verdict.verdict) == ("completes", "ok")
    for rank in range(4):
        found = [
            (s.stop - s.start, [c.rank for c in s.counts])
            for s in done.values.stretches(rank, "expert_parallel_combined")
        ]
        assert found == [(4 * rows, [expert]) for expert, rows in enumerate(sends[rank]) if rows]


@given(
    st.integers(1, 500), st.lists(st.floats(0.01, 10), min_size=2, max_size=12), st.integers(1, 2)
)
def test_tokens_are_distributed_completely_and_each_expert_gets_a_token_once(
    tokens, weights, top_k
):
    parts = apportioned(tokens * top_k, weights, tokens)

    assert sum(parts) == tokens * top_k
    assert 0 <= min(parts) <= max(parts) <= tokens


@given(st.integers(0, 99), st.floats(0, 3), st.sampled_from([None, 1.0, 1.25]))
def test_a_router_is_deterministic_and_bounded_by_its_capacity(seed, imbalance, capacity):
    router = ExpertRouter(8, 64, 2, imbalance, seed, capacity)
    rows = routed_rows(router, 8, 4)

    assert rows == routed_rows(router, 8, 4)
    assert all(sum(r) <= 128 for r in rows)
    assert capacity is not None or {sum(r) for r in rows} == {128}


def test_coordinates_follow_the_mesh():
    found = axis_positions({"dp": 2, "ep": 3}, "dp")

    assert found[1] == (0, (1, 4))
    assert [c for c, _ in axis_positions({"dp": 2, "ep": 3}, "ep")] == [0, 1, 2, 0, 1, 2]


def test_impossible_layouts_of_experts_are_refused():
    assert refused(experts, experts=6) == [
        ("experts", "6 experts are not divisible by the 4 ranks of ep")
    ]
    assert refused(experts, top_k=9)[0][0] == "top_k"
    assert refused(experts, pad_to_capacity=True)[0][0] == "pad_to_capacity"


def test_the_busiest_rank_determines_the_duration():
    spans = [simulated(experts(imbalance=x, seed=1).to_yaml()).makespan_ns for x in (0, 0.5, 1.5)]

    assert all(a < b for a, b in pairwise(spans))


@settings(max_examples=draws(20), deadline=None)
@given(st.integers(0, 9), st.integers(0, 2), st.sampled_from(["dropped", "doubled"]))
def test_an_altered_call_of_the_experts_is_always_detected(number, rank, how):
    wrong = spoiled(experts(3, experts=6, imbalance=0.5), number, rank, how)

    assert wrong is not None
    assert noticed(wrong, [], range(3))
