"""`megatron_ddp:`: whose turn it is when, weights, padding, and mistakes people make with it."""

from __future__ import annotations

from typing import Any

import pytest

from distsim.common.errors import ScenarioErrors
from distsim.program.lower import lower
from distsim.scenario import Scenario, load
from distsim.simulation.simulate_scenario import simulate
from tests.support.strategy_checks import noticed, spoiled

LAYER = {"params": [[96, 10], [96]], "forward": "1 ms", "backward": "2 ms"}


def scenario(iterations: int = 2, world: int = 2, **fields: Any) -> Scenario:
    program = [
        {
            "megatron_ddp": {
                "layers": {**LAYER, "count": 3},
                "bucket_size": 1000,
                "optimizer": "1 ms",
                **fields,
            }
        }
    ]
    return Scenario(world=world, backend="nccl", iterations=iterations, program=program)


def told(made: Scenario) -> list[str]:
    """The calls of rank 0, in short: operation, bucket."""
    short = {
        "reduce_scatter_tensor_coalesced": "scatter",
        "all_gather_into_tensor_coalesced": "gather",
        "all_reduce_coalesced": "reduce",
    }
    calls = [call for _, call in lower(made).calls_of(0)]
    named = [
        f"{short.get(c.op, c.op)} {c.inputs[0].name[-1:]}".strip() if c.inputs else c.name or c.op
        for c in calls
    ]
    return [name for name in named if name != "wait"]


FIRST = [
    "forward layer 0",
    "forward layer 1",
    "forward layer 2",
    "backward layer 2",
    "backward layer 1",
    "backward layer 0",
    "scatter 0",
    "scatter 1",
    "scatter 2",
    "all_reduce",
    "optimizer",
]
LATER = [
    "gather 2",
    "gather 1",
    "forward layer 0",
    "gather 0",
    "forward layer 1",
    "forward layer 2",
    "backward layer 2",
    "scatter 0",
    "backward layer 1",
    "scatter 1",
    "backward layer 0",
    "scatter 2",
    "all_reduce",
    "optimizer",
]


def test_the_first_iteration_reduces_at_its_end_and_later_ones_during_backward() -> None:
    """is_first_batch; the forward hooks, which gather, are enabled after the first step."""
    assert told(scenario()) == FIRST + LATER


def test_without_overlap_there_is_one_bucket_gathered_after_the_update() -> None:
    """bucket_size is infinite without overlap_grad_reduce."""
    assert told(scenario(1, overlap_grad_reduce=False, overlap_param_gather=False))[-4:] == [
        "scatter 0",
        "all_reduce",
        "optimizer",
        "gather 0",
    ]
    assert told(scenario(1, use_distributed_optimizer=False))[-2:] == ["reduce 2", "optimizer"]


def test_buckets_are_padded_to_the_ranks_and_128_and_parameters_start_at_64() -> None:
    """96 + (960 from 128 on) = 1088, and to a multiple of lcm(ranks, 128); with padding for NCCL's
    rings of 65536.
    """
    sizes = [
        {
            c.inputs[0].numel
            for _, c in lower(made).calls_of(0)
            if c.op == "reduce_scatter_tensor_coalesced"
        }
        for made in (scenario(), scenario(world=3), scenario(pad_buckets_for_high_nccl_busbw=True))
    ]

    assert sizes == [{1152}, {1152}, {65536}]


def test_only_the_last_micro_batch_reduces_and_parameters_are_gathered_once() -> None:
    calls = told(scenario(accumulate=3))

    assert (calls.count("scatter 0"), calls.count("gather 0"), calls.count("forward layer 0")) == (
        2,
        1,
        6,
    )


def test_the_weights_are_those_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    a, b = (torch.tensor(value, requires_grad=True) for value in (0.5, 1.5))
    optimizer = torch.optim.SGD([a, b], lr=0.125)
    for _ in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            ((b * (a * (rank + 1)) - (3 * rank + 2)) ** 2 / 4).backward()
        optimizer.step()
    done = simulate(load("scenarios/strategies/megatron_ddp_trains.yaml"))
    assert done.values is not None
    for rank in range(2):
        for weight, bucket in ((a, 1), (b, 0)):
            found = done.values.array(rank, f"megatron_ddp_param_part_{bucket}")
            assert found is not None
            assert found.tolist() == pytest.approx([weight.item()] * len(found), rel=1e-6)


@pytest.mark.parametrize("how", ["dropped", "doubled", "misdirected"])
def test_an_altered_call_is_always_detected(how: str) -> None:
    good = scenario()
    assert not noticed(good, [], range(2))
    for number in range(0, 34, 3):
        wrong = spoiled(good, number, number % 2, how)
        assert wrong is None or noticed(wrong, [], range(2)), number


def test_a_rank_that_skips_a_layer_raises_and_the_others_wait() -> None:
    """Its last bucket meets the other ranks' bucket of that layer, which has the same size, so the
    first symptom is Megatron's assertion.
    """
    found = simulate(scenario(skips_layer={1: 1}))

    assert found.verdict is not None
    assert found.verdict.verdict == "deadlock"
    assert any("Communication call has not been issued" in f.message for f in found.findings)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"overlap_param_gather": True, "use_distributed_optimizer": False},
            "needs use_distributed_optimizer and overlap_grad_reduce",
        ),
        ({"skips_layer": {1: 7}}, "layers are 0 to 2, ranks 0 to 1"),
        ({"group": "tp"}, "unknown axis tp"),
    ],
)
def test_impossible_layouts_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ScenarioErrors, match=words):
        scenario(**fields)
