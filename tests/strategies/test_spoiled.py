"""One call dropped, doubled or sent to the wrong peer is always noticed: pipelines, tensor and
sequence parallelism, products.

Those of ddp, fsdp, data, context and expert parallelism stand with their strategies' tests.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.scenario import Scenario, loads
from tests.support.harness import draws
from tests.support.strategy_checks import held_once, noticed, simulated, spoiled

HOW = st.sampled_from(["dropped", "doubled", "misdirected"])
PIPELINES = [
    ("gpipe", 3, 4, 1),
    ("1f1b", 3, 4, 1),
    ("1f1b", 2, 4, 1),
    ("interleaved_1f1b", 2, 4, 2),
    ("looped_bfs", 3, 3, 2),
    ("zb1p", 3, 3, 1),
    ("zbv", 3, 3, 2),
    ("dualpipe_v", 2, 4, 2),
    ("dualpipe", 2, 4, 2),
]
TENSOR = {
    "layers": 2,
    "sequence": 6,
    "hidden": 6,
    "dtype": "float32",
    "forward": "1 ms",
    "backward": "2 ms",
}
LABELS = {
    False: ["tensor_parallel_out", "tensor_parallel_grad"],
    True: ["tensor_parallel_part", "tensor_parallel_grad_part"],
}


def pipeline(name: str, ranks: int, batches: int, chunks: int) -> Scenario:
    fields = {
        "schedule": name,
        "micro_batches": batches,
        "forward": "1 ms",
        "backward": "2 ms",
        "activation": {"shape": [4]},
    }
    more = {} if name in ("gpipe", "1f1b") else {"chunks": chunks}
    return Scenario(world=ranks, mesh={"pp": ranks}, program=[{"pipeline": {**fields, **more}}])


def tensor(ranks: int, sequence_parallel: bool) -> Scenario:
    return Scenario(
        world=ranks,
        mesh={"tp": ranks},
        program=[{"tensor_parallel": {**TENSOR, "sequence_parallel": sequence_parallel}}],
    )


def product() -> Scenario:
    """Two stages of two tensor parallel ranks, and two replicas."""
    pipe = {"schedule": "1f1b", "micro_batches": 2, "activation": {"shape": [6, 6]}}
    fields = {
        "pipeline": pipe,
        "tensor": {**TENSOR, "layers": 1, "pairs": 1},
        "data": "dp",
        "gradient": 8,
    }
    return Scenario(world=8, mesh={"pp": 2, "dp": 2, "tp": 2}, program=[{"hybrid": fields}])


@settings(max_examples=draws(30), deadline=None)
@given(st.sampled_from(PIPELINES), st.integers(0, 200), st.integers(0, 3), HOW)
def test_an_altered_message_of_a_pipeline_is_always_detected(layout, number, rank, how):
    wrong = spoiled(pipeline(*layout), number, rank, how)

    assert wrong is None or noticed(wrong, [], range(layout[1]))


@settings(max_examples=draws(30), deadline=None)
@given(
    st.integers(0, 20), st.integers(0, 2), st.sampled_from(["dropped", "doubled"]), st.booleans()
)
def test_an_altered_call_of_tensor_parallel_ranks_is_always_detected(
    number, rank, how, sequence_parallel
):
    wrong = spoiled(tensor(3, sequence_parallel), number, rank, how)

    assert wrong is not None
    assert noticed(wrong, LABELS[sequence_parallel], range(3))


@settings(max_examples=draws(40), deadline=None)
@given(st.integers(0, 60), st.integers(0, 7), HOW)
def test_an_altered_call_of_combined_strategies_is_always_detected(number, rank, how):
    wrong = spoiled(product(), number, rank, how)

    assert wrong is None or noticed(wrong, [], range(8))


@pytest.mark.parametrize(
    "made",
    [*(pipeline(*layout) for layout in PIPELINES), tensor(3, False), tensor(3, True), product()],
)
def test_unaltered_programs_have_no_finding(made):
    assert not noticed(made, [], [])


@pytest.mark.parametrize(("again", "held"), [(0, True), (1, False)])
def test_partial_sums_added_twice_by_all_ranks_break_the_lineage(again, held):
    """Nothing hangs and all values agree: only the lineage differs."""
    text = tensor(3, False).to_yaml(flat=True)
    line = next(line for line in text.splitlines() if "all_reduce" in line)
    done = simulated(loads(text.replace(line, "\n".join([line] * (1 + again)))).to_yaml())

    assert (done.outcome, done.verdict.verdict) == ("completes", "ok")
    assert held_once(done, "tensor_parallel_out", range(3)) == held


def test_gradients_not_reduced_by_one_pair_of_combined_replicas_break_the_lineage():
    """All ranks skip the all_reduce over the replicas."""
    good = product().to_yaml(flat=True)
    bare = "\n".join(
        line
        for line in good.splitlines()
        if "hybrid_gradient, " not in line or "all_reduce" not in line
    )
    replicas = [(0, 2), (1, 3), (4, 6), (5, 7)]

    assert bare != good
    assert all(held_once(simulated(good), "hybrid_gradient", pair) for pair in replicas)
    assert not any(held_once(simulated(bare), "hybrid_gradient", pair) for pair in replicas)
