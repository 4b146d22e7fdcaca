"""Averages, quorums, inference, weight sync, checkpoints and Ulysses: what comes out is right, and
one spoilt call is noticed.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.common.errors import ScenarioErrors
from distsim.scenario import Scenario, load
from distsim.simulation.simulate_scenario import simulate
from tests.support.strategy_checks import (
    ROOT,
    calls_of,
    held_once,
    meeting,
    noticed,
    simulated,
    spoiled,
)

LAYER = {"params": [[8, 4], [8]], "forward": "1 ms", "backward": "2 ms"}
MOE = {
    "tensor": "tp",
    "pipeline": "pp",
    "data": "dp",
    "layers": 2,
    "hidden": 8,
    "vocabulary": 16,
    "prompt": 6,
    "batch": 2,
    "steps": {0: 2, "else": 1},
    "experts": True,
    "decode": "1 ms",
    "sync_every": 1,
}
KV = {
    "prefill": [0, 1],
    "decode": [2],
    "layers": 2,
    "tokens": 4,
    "kv_heads": 2,
    "head_dim": 4,
    "forward": "1 ms",
}
SYNC = {"trainers": [0, 1], "rollouts": [2], "params": [[5, 4], [4]], "barriers": True}
PLAN = {"plan": {0: "4 KiB", "else": "1 KiB"}}
SAVE = {**PLAN, "results": "1 KiB", "metadata": "8 KiB"}
ULYSSES = {
    "sequence": 16,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 4,
    "forward": "1 ms",
    "backward": "2 ms",
}
#: Strategy, and a layout of it: what else the scenario says, and the strategy's fields.
LAYOUTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "local_sgd",
        {"world": 4, "mesh": {"m": 2, "g": 2}, "iterations": 4},
        {"layers": [LAYER], "levels": {2: "g", 4: "world"}},
    ),
    (
        "local_sgd",
        {"world": 3, "iterations": 4},
        {"layers": [LAYER], "every": 2, "per_parameter": True},
    ),
    (
        "diloco",
        {"world": 3, "iterations": 4},
        {"layers": [LAYER, LAYER], "every": 4, "fragments": 2, "delay": 1},
    ),
    (
        "fault_tolerant",
        {"world": 3, "iterations": 4},
        {"layers": [LAYER], "quorums": {0: [0, 1, 2], 1: [0, 1], 2: [0, 1, 2]}},
    ),
    ("inference", {"world": 8, "mesh": {"pp": 2, "dp": 2, "tp": 2}}, MOE),
    ("kv_transfer", {"world": 3}, KV),
    ("weight_sync", {"world": 3}, SYNC),
    ("dcp_save", {"world": 3}, SAVE),
    ("dcp_load", {"world": 3}, PLAN),
    ("dcp_async_save", {"world": 3}, SAVE),
    ("ulysses", {"world": 4, "mesh": {"cp": 4}}, ULYSSES),
]


def made(name: str, about: dict[str, Any], fields: dict[str, Any], **more: Any) -> Scenario:
    return Scenario(program=[{name: {**fields, **more}}], **about)


def refused(name: str, about: dict[str, Any], **fields: Any) -> str:
    with pytest.raises(ScenarioErrors) as caught:
        made(name, about, fields)
    return " ".join(problem.message for problem in caught.value.problems)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.integers(0, 60),
    st.integers(0, 7),
    st.sampled_from(["dropped", "doubled", "misdirected"]),
)
def test_a_call_dropped_doubled_or_misdirected_on_one_rank_is_detected(layout, number, rank, how):
    wrong = spoiled(made(*layout), number, rank, how)

    assert wrong is None or noticed(wrong, [], [])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout[0])
def test_unaltered_programs_complete(layout):
    assert not noticed(made(*layout), [], [])


# --- averages ---
def trained(delta: float) -> float:
    """The scenario's two outer steps of two inner ones, in plain PyTorch."""
    torch = pytest.importorskip("torch")
    before = torch.tensor(0.5)
    for _ in range(2):
        ends = []
        for rank in range(2):
            weight = before.clone().requires_grad_()
            inner = torch.optim.SGD([weight], lr=0.125)
            for _ in range(2):
                inner.zero_grad()
                ((weight * (rank + 1) - (3 * rank + 2)) ** 2 / 2).backward()
                inner.step()
            ends.append(before - weight.detach())
        outer = before.clone().requires_grad_()
        outer.grad = sum(ends) / 2
        torch.optim.SGD([outer], lr=delta).step()
        before = outer.detach()
    return float(before)


def test_diloco_ends_with_the_weight_of_plain_pytorch_on_every_rank():
    done = simulate(
        load(str(ROOT / "scenarios" / "strategies" / "diloco_trains.yaml")), with_values=True
    )
    found = [float(done.values.array(rank, "diloco_weights_0")[0]) for rank in range(2)]

    assert found == pytest.approx([trained(0.5)] * 2, rel=1e-6)
    assert found[0] != pytest.approx(trained(0.25), rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({"every": 3}, [0, 3]),
        ({"every": 2, "warmup": 1}, [1, 3, 5]),
        ({"every": 2, "per_parameter": True}, [1, 1, 3, 3, 5, 5]),
    ],
)
def test_an_average_occurs_after_the_same_steps_as_in_torch_and_torchft(fields, steps):
    """torch's averager counts from its warm-up on, and averages at once; torchft's after so many
    steps.
    """
    found = [
        meeting(made("local_sgd", {"world": 2, "iterations": k + 1}, {"layers": [LAYER], **fields}))
        for k in range(6)
    ]

    assert [
        k for k in range(6) for _ in range(len(found[k]) - (len(found[k - 1]) if k else 0))
    ] == steps


def test_an_average_contains_the_weights_of_every_rank_once():
    done = simulated(made("local_sgd", {"world": 4}, {"layers": [LAYER]}).to_yaml())

    assert held_once(done, "local_sgd_weights_0", range(4), "local_sgd")


# --- quorums ---
def test_a_quorum_reduces_among_its_members_and_joining_ranks_receive_the_weights():
    scenario = made(
        "fault_tolerant",
        {"world": 3, "iterations": 3},
        {"layers": [LAYER], "quorums": {0: [0, 1, 2], 1: [0, 1], 2: [0, 1, 2]}},
    )
    calls = [meeting(scenario, rank) for rank in range(3)]

    assert [c[1] for c in calls[0] if c[0] == "all_reduce"] == [(0, 1, 2), (0, 1), (0, 1, 2)]
    assert [c[1] for c in calls[2] if c[0] == "all_reduce"] == [(0, 1, 2), (0, 1, 2)]
    assert [
        sum(c[0] == word for c in calls[rank])
        for rank, word in ((0, "send"), (1, "send"), (2, "recv"))
    ] == [2, 0, 2]


def test_joining_ranks_get_the_weights_from_the_healthy_ranks_in_turn():
    scenario = made(
        "fault_tolerant",
        {"world": 5, "iterations": 2},
        {"layers": [LAYER], "quorums": {0: [0, 1], 1: [0, 1, 2, 3, 4]}},
    )
    sent = {
        rank: [c.peer for c in calls if c.op == "send"]
        for rank, calls in calls_of(scenario).items()
    }
    weights = len(sent[1])

    assert weights
    assert sent == {0: [2] * weights + [4] * weights, 1: [3] * weights, 2: [], 3: [], 4: []}


def test_a_replica_destroys_the_group_of_a_quorum_before_it_creates_the_next():
    """The world and other groups stay when one group is destroyed."""
    scenario = made(
        "fault_tolerant",
        {"world": 3, "iterations": 2},
        {"layers": [LAYER], "quorums": {0: [0, 1], 1: [0, 1, 2]}},
    )
    groups = [
        [c.op for c in calls if c.op in ("new_group", "destroy_process_group")]
        for calls in calls_of(scenario).values()
    ]
    one = simulated(
        "world: 2\nprogram: [{new_group: {name: a, ranks: [0, 1]}}, {destroy_process_group: {group: a}}, barrier]"
    )

    assert groups == [["new_group", "destroy_process_group", "new_group"]] * 2 + [["new_group"]]
    assert (one.outcome, one.verdict.verdict) == ("completes", "ok")


@pytest.mark.parametrize(
    ("iterations", "mean"), [(1, (1 + 2) / 2), (2, (1 + 2 + 0) / 2), (3, (1 + 2 + 3) / 3)]
)
def test_the_mean_of_a_quorum_includes_only_ranks_present_before_the_step(iterations, mean):
    """Who has just joined gives zeros, and is not counted: torchft's num_participants."""
    layer = {
        **LAYER,
        "params": 1,
        "backward": [{"assign": {"tensor": "fault_tolerant_grad_0", "value": "rank + 1"}}],
    }
    scenario = made(
        "fault_tolerant",
        {"world": 3, "iterations": iterations},
        {"layers": [layer], "quorums": {0: [0, 1], 1: [0, 1, 2]}},
    )
    values = simulate(scenario, with_values=True).values

    assert float(values.array(0, "fault_tolerant_grad_0")[0]) == pytest.approx(mean)


# --- inference ---
def test_ranks_without_requests_make_as_many_steps_as_the_others():
    one = made(
        "inference",
        {"world": 2, "mesh": {"dp": 2}},
        {
            "data": "dp",
            "layers": 1,
            "hidden": 4,
            "vocabulary": 8,
            "experts": True,
            "steps": {0: 5, 1: 2},
            "decode": "1 ms",
            "sync_every": 2,
        },
    )
    each = [[c[0] for c in meeting(one, rank)] for rank in range(2)]

    assert each[0] == each[1]
    assert each[0].count("all_gather_into_tensor") == 5
    assert each[0].count("all_reduce") == 5 + 2  # batches of each step, and two looks for requests


def test_the_sum_contains_the_activation_part_of_every_tensor_parallel_rank():
    one = made(
        "inference",
        {"world": 2, "mesh": {"tp": 2}},
        {"tensor": "tp", "layers": 1, "hidden": 4, "vocabulary": 8, "decode": "1 ms"},
    )

    assert held_once(simulated(one.to_yaml()), "inference_decode_hidden", range(2))


def test_the_decoding_rank_gets_the_heads_of_every_prefill_rank():
    done = simulated(made("kv_transfer", {"world": 3}, KV).to_yaml())
    came = {
        (c.rank, c.tensor)
        for pair in (0, 1)
        for s in done.values.stretches(2, f"kv_transfer_keys_{pair}@1")
        for c in s.counts
    }

    assert {rank for rank, _ in came} == {0, 1}


def test_weights_arrive_from_the_shards_of_all_trainers():
    done = simulated(
        made("weight_sync", {"world": 4}, {**SYNC, "rollouts": [2, 3], "packed": 2}).to_yaml()
    )
    sources = [
        {c.rank for s in done.values.stretches(rank, "weight_sync_sent_1") for c in s.counts}
        for rank in (2, 3)
    ]

    assert sources[0] == sources[1] != set()


# --- refusals ---
@pytest.mark.parametrize(
    ("name", "about", "fields", "said"),
    [
        (
            "local_sgd",
            {"world": 4, "mesh": {"m": 2, "g": 2}},
            {"layers": [LAYER], "levels": {2: "g"}},
            "over all 4 ranks, but g has 2",
        ),
        ("local_sgd", {"world": 4}, {"layers": [LAYER], "levels": {2: "gg"}}, "unknown axis gg"),
        (
            "diloco",
            {"world": 2},
            {"layers": [LAYER], "every": 4, "fragments": 3},
            "the 4 steps between two averages are not divisible by 3 fragments",
        ),
        (
            "diloco",
            {"world": 2},
            {"layers": [LAYER, LAYER], "every": 4, "fragments": 2, "delay": 2},
            "must be smaller, found 2",
        ),
        (
            "fault_tolerant",
            {"world": 2},
            {"layers": [LAYER], "quorums": {1: [0]}},
            "expected the members of the quorum from iteration 0 on",
        ),
        (
            "fault_tolerant",
            {"world": 2},
            {"layers": [LAYER], "quorums": {0: [0, 1], 2: [0]}, "min_replicas": 2},
            "fewer than min_replicas 2",
        ),
        (
            "fault_tolerant",
            {"world": 2},
            {"layers": [LAYER], "quorums": {0: [0, 5]}},
            "rank 5 is outside the world of 2",
        ),
        (
            "inference",
            {"world": 2, "mesh": {"tp": 2}},
            {**MOE, "pipeline": None, "data": None},
            "experts are spread over the data axis",
        ),
        (
            "kv_transfer",
            {"world": 5},
            {**KV, "decode": [2, 3, 4]},
            "one number must divide the other",
        ),
        ("weight_sync", {"world": 3}, {**SYNC, "rollouts": [1]}, "rank 1 is also in trainers"),
        (
            "weight_sync",
            {"world": 3},
            {**SYNC, "stages": 3},
            "the 2 trainers are not divisible by 3 stages",
        ),
        (
            "dcp_save",
            {"world": 3},
            {**SAVE, "global_plan": ["1 KiB", "1 KiB"]},
            "one for each of the 3 ranks, found 2",
        ),
        (
            "dcp_async_save",
            {"world": 3, "backend": "nccl"},
            SAVE,
            "async_save needs a group with a CPU backend",
        ),
        (
            "ulysses",
            {"world": 4, "mesh": {"cp": 4}},
            {**ULYSSES, "kv_heads": 2},
            "kv_heads 2 is not divisible by the 4 ranks of cp",
        ),
    ],
)
def test_an_impossible_layout_is_refused_with_its_reason(name, about, fields, said):
    assert said in refused(
        name, about, **{key: value for key, value in fields.items() if value is not None}
    )


# --- checkpoints, recorded by capture ---
def saved_and_loaded(folder: str) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"weight": torch.ones(8, 4), "step": 3}
    dcp.save(state, checkpoint_id=f"{folder}/kept")
    dcp.load(state, checkpoint_id=f"{folder}/kept")


@pytest.mark.slow
def test_a_captured_save_and_load_makes_the_calls_of_the_strategies(tmp_path):
    """On 2 ranks, with the sizes that torch 2.13 pickles: operation, elements and dtype of each
    call.
    """
    pytest.importorskip("torch")
    from distsim import testing
    from tests.strategies.test_same_calls import _records

    program = testing.run(saved_and_loaded, 2, args=(str(tmp_path),)).simulation.program
    real = [
        [
            (c["op"], c["numel"], c.get("dtype"))
            for c in _records(call for _, call in program.calls_of(r))
        ]
        for r in range(2)
    ]
    sizes = {
        "plan": "697 B",
        "global_plan": "735 B",
        "results": "355 B",
        "metadata": f"{real[0][8][1]} B",
    }
    twin = Scenario(world=2, program=[{"dcp_save": sizes}, {"dcp_load": {"plan": "537 B"}}])
    twins = [_records(calls) for calls in calls_of(twin).values()]

    assert real == [[(c["op"], c["numel"], c.get("dtype")) for c in calls] for calls in twins]
    assert len(real[0]) == 9 + 7
