"""`hybrid` is the product of its parts: the same calls as by hand, on the groups of each axis."""

from __future__ import annotations

import pytest

from distsim.common.errors import ScenarioErrors
from distsim.scenario import Scenario, load
from tests.support.strategy_checks import ROOT, calls_of, held_once, meeting, simulated

TENSOR = {
    "layers": 1,
    "sequence": 16,
    "hidden": 8,
    "dtype": "float32",
    "forward": "1 ms",
    "backward": "2 ms",
}
PIPE = {"schedule": "1f1b", "micro_batches": 4, "activation": {"shape": [16, 8]}}


def hybrid(mesh: dict[str, int], **fields: object) -> Scenario:
    size = 1
    for n in mesh.values():
        size *= n
    return Scenario(world=size, backend="nccl", mesh=mesh, program=[{"hybrid": fields}])


def refused(mesh: dict[str, int], **fields: object) -> list[tuple[str, str]]:
    with pytest.raises(ScenarioErrors) as caught:
        hybrid(mesh, **fields)
    return [(p.path.removeprefix("program[0].hybrid"), p.message) for p in caught.value.problems]


def test_hybrid_by_strategy_and_by_hand_make_the_same_calls():
    by_hand = load(str(ROOT / "scenarios" / "hybrid.yaml"))
    by_strategy = load(str(ROOT / "scenarios" / "strategies" / "hybrid_by_strategy.yaml"))

    assert calls_of(by_strategy) == calls_of(by_hand)


def test_three_axes_have_their_own_groups():
    scenario = hybrid(
        {"pp": 2, "dp": 2, "tp": 2},
        order="megatron",
        pipeline=PIPE,
        tensor=TENSOR,
        data="dp",
        gradient=64,
    )
    of = {
        op: {ranks for o, ranks, _, _ in meeting(scenario, 5) if o == op}
        for op in ("all_reduce", "isend", "irecv")
    }

    assert of["all_reduce"] == {(4, 5), (5, 7)}
    assert of["isend"] == {(1, 5)} or of["irecv"] == {(1, 5)}


def test_every_replica_has_each_gradient_exactly_once():
    scenario = hybrid(
        {"pp": 2, "dp": 2, "tp": 2}, pipeline=PIPE, tensor=TENSOR, data="dp", gradient=64
    )
    done = simulated(scenario.to_yaml())

    assert (done.outcome, done.verdict.verdict) == ("completes", "ok")
    assert all(
        held_once(done, "hybrid_gradient", pair) for pair in [(0, 2), (1, 3), (4, 6), (5, 7)]
    )


def test_a_stage_may_contain_tensor_context_and_expert_parallel_parts():
    ring = {"keys": [4, 2], "forward": "1 ms", "backward": "2 ms"}
    moe = {
        "axis": "dp",
        "experts": 4,
        "tokens": 8,
        "hidden": 8,
        "forward": "1 ms",
        "backward": "2 ms",
    }
    scenario = hybrid(
        {"dp": 2, "cp": 2, "tp": 2},
        tensor=TENSOR,
        context=ring,
        experts=moe,
        data=["dp", "cp"],
        gradient=8,
    )
    done = simulated(scenario.to_yaml())

    assert (done.outcome, done.verdict.verdict) == ("completes", "ok")
    assert {op for op, *_ in meeting(scenario)} == {"all_reduce", "all_to_all_single"}


def test_a_plain_pipeline_of_three_stages_passes_data_forward_and_back():
    tensors = {"x": {"shape": [4]}, "x_grad": {"like": "x"}}
    pipe = {
        "schedule": "plain",
        "activation": "x",
        "forward": "1 ms",
        "backward": "2 ms",
        "micro_batches": 2,
    }
    scenario = Scenario(
        world=3, mesh={"pp": 3}, tensors=tensors, program=[{"hybrid": {"pipeline": pipe}}]
    )
    done = simulated(scenario.to_yaml())

    assert [op for op, *_ in meeting(scenario, 1)] == 2 * ["recv", "send", "recv", "send"]
    assert (done.outcome, done.verdict.verdict) == ("completes", "ok")
    assert done.makespan_ns >= 2 * 9 * 10**6


@pytest.mark.parametrize(
    ("order", "mesh", "fits"),
    [
        ("megatron", {"pp": 2, "dp": 2, "tp": 2}, True),
        ("megatron", {"tp": 2, "pp": 2}, False),
        ("torchtitan", {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2}, True),
        ("torchtitan", {"dp_shard": 2, "dp_replicate": 2, "tp": 2}, False),
    ],
)
def test_axes_are_in_the_order_of_the_framework(order, mesh, fits):
    fields = {"order": order, "tensor": TENSOR}
    if fits:
        assert hybrid(mesh, **fields).mesh == mesh
    else:
        [(path, message)] = refused(mesh, **fields)
        assert path == ".order"
        assert f"{order} orders mesh axes from outermost to innermost as" in message


def test_impossible_layouts_are_refused_at_the_wrong_part():
    mesh = {"pp": 2, "tp": 2}

    assert refused(mesh)[0][1].startswith("hybrid needs `pipeline`")
    assert refused(mesh, tensor={**TENSOR, "hidden": 9})[0][0] == ".tensor.hidden"
    assert refused(mesh, tensor=TENSOR, data="dp", gradient=3)[0][0] == ".data"
    assert refused(mesh, tensor=TENSOR, data="pp")[0] == (
        ".data",
        "`data` and `gradient` need each other",
    )
    assert refused(mesh, tensor=TENSOR, data="pp", gradient="g")[0][0] == ".gradient"
    assert refused(mesh, tensor=TENSOR, pipeline={**PIPE, "micro_batches": 1})[0][0].startswith(
        ".pipeline"
    )
    assert (
        refused(mesh, tensor=TENSOR, pipeline={**PIPE, "forward": "1 ms"})[0][0]
        == ".pipeline.forward"
    )
    assert refused(mesh, tensor=TENSOR, pipeline={"schedule": "plain", "activation": "x"})[0][
        1
    ].startswith("unknown tensor x")
