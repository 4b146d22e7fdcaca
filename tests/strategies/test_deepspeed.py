"""`deepspeed:` as a whole: verdicts, weights, memory of gathered parameters, refusals, and common
mistakes.

tests/support/wrapped_deepspeed.py checks that each of its calls is DeepSpeed's.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import yaml

import tests.strategies.test_same_values as same
from distsim.common.errors import ScenarioErrors
from distsim.operations.registry import OPERATIONS
from distsim.program.lower import lower
from distsim.scenario import Scenario, loads
from distsim.scenario.strategies.deepspeed.buckets import (
    gradient_buckets,
    large_gradient_pieces,
)
from distsim.scenario.strategies.deepspeed.stage3_calls import scale_count
from distsim.simulation.simulate_scenario import simulate
from tests.support.strategy_checks import noticed, spoiled

PRICE = {"forward": "1 ms", "backward": "2 ms"}
LAYERS = [
    {"params": [[64, 32], [64]], **PRICE},
    {"params": [[32, 64], [32]], **PRICE},
    {"params": [[16, 32]], **PRICE},
]
PLUS = {
    "zero_hpz_partition_size": 2,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
}
LATE = {
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "1 overlapped": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 3000, "accumulate": 2},
    "2 in small buckets": {"stage": 2, "reduce_bucket_size": 500},
    "3": {"stage": 3},
    "3 late": {"stage": 3, **LATE, "reduce_bucket_size": 2000},
    "3 not overlapped": {
        "stage": 3,
        "overlap_comm": False,
        "accumulate": 2,
        "stage3_param_persistence_threshold": 100,
    },
    "++": {"stage": 3, **LATE, **PLUS},
}


def scenario(
    backend: str = "nccl", world: Any = None, iterations: int = 3, **fields: Any
) -> Scenario:
    program = [{"deepspeed": {"layers": LAYERS, "optimizer": "1 ms", **fields}}]
    nodes = world or {"nodes": 2, "ranks_per_node": 2}
    return Scenario(
        name="zero", world=nodes, backend=backend, iterations=iterations, program=program
    )


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_configuration_is_correct_on_every_backend(name: str) -> None:
    for backend in ("gloo", "nccl"):
        found = simulate(scenario(backend, **CONFIGURATIONS[name]))
        assert found.verdict is not None
        assert (found.outcome, found.verdict.verdict, found.findings) == ("completes", "ok", ())


@pytest.mark.parametrize(
    ("stage", "bucket", "total"),
    [
        (2, "deepspeed_bucket_0_0", "deepspeed_sum_0_0"),
        (3, "deepspeed_bucket_0", "deepspeed_scattered_0"),
    ],
)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_gradient_accumulation_adds_up_the_gradients_of_all_micro_batches(
    stage: int, bucket: str, total: str, backend: str
) -> None:
    """Both stages reduce after each micro-batch: three times the sum of 1 and 2."""
    layer = {
        "params": 4,
        "forward": "1 ms",
        "backward": [{"assign": {"tensor": bucket, "value": "rank + 1"}}],
    }
    fields = {"layers": [layer], "stage": stage, "accumulate": 3}
    found = simulate(scenario(backend, world=2, iterations=2, **fields))
    assert found.values is not None
    assert [set(found.values.array(rank, total).ravel()) for rank in range(2)] == [{9.0}, {9.0}]


def sent(**fields: Any) -> dict[str, int]:
    """Bytes that rank 0 hands in from the second iteration on, by operation and ranks of the
    group.
    """
    found: dict[str, int] = {}
    for times, sign in ((3, 1), (2, -1)):
        for _, call in lower(scenario(iterations=times, **fields)).calls_of(0):
            if OPERATIONS[call.op].kind == "collective":
                key = f"{call.op} {call.group.size}"
                found[key] = found.get(key, 0) + sign * call.input_nbytes
    return {key: nbytes for key, nbytes in found.items() if nbytes}


def test_zero_2_sends_the_same_as_zero_1() -> None:
    """Gradients are all_reduced, not scattered; 4 bytes of each of 4704 parameters, padded in the
    gather.
    """
    assert (
        sent(stage=1)
        == sent(stage=2)
        == {"all_reduce 4": 4 * 4704 + 4, "all_gather_into_tensor 4": 4 * 4704 // 4}
    )


def test_hpz_gathers_for_the_backward_pass_inside_the_node() -> None:
    plain, second = sent(stage=3, **LATE), sent(stage=3, **LATE, zero_hpz_partition_size=2)
    whole = 4 * 4704

    assert plain["all_gather_into_tensor 4"] == 2 * whole // 4
    assert (second["all_gather_into_tensor 4"], second["all_gather_into_tensor 2"]) == (
        whole // 4,
        whole // 2,
    )


def test_quantized_gradients_take_4_bits_and_cross_nodes_as_sums_of_pairs() -> None:
    """4 bits of an element in place of 32, all of them inside the machine, and between machines
    what two ranks summed.
    """
    found = sent(stage=3, **LATE, zero_quantized_gradients=True)
    matrices = 64 * 32 + 32 * 64 + 16 * 32
    scales_ = 4 * (64 + 64 + 32)

    assert found["all_to_all_single 2"] == matrices // 2 + matrices // 4 + scales_ + scales_ // 2
    assert found["reduce_scatter_tensor 4"] == 4 * (64 + 32)


@pytest.mark.parametrize("numel", [8000, 512, 2_097_152, 100_000])
def test_scales_are_shared_by_about_a_thousand_elements_and_divide_them(numel: int) -> None:
    groups = scale_count(numel)

    assert numel % (8 * groups) == 0
    assert numel / groups < 16_000


def test_gradients_fill_buckets_and_larger_ones_are_split_where_owners_change() -> None:
    assert gradient_buckets([(0, 4), (1, 4), (2, 9), (3, 1)], 8) == [
        ([0, 1], 2),
        ([2], 3),
        ([3], 4),
    ]
    assert gradient_buckets([(0, 9), (1, 1)], 8) == [([0], 1), ([1], 2)]
    assert large_gradient_pieces(start=2, numel=20, part=6, most=5) == [10, 6, 4]
    assert sum(large_gradient_pieces(start=58, numel=33, part=26, most=30)) == 33


# --- weights ---
FETCHED = {"stage": 3, **LATE, "reduce_bucket_size": same.SIZE, "optimizer": "1 ms"}


def zero_3(ranks: int) -> Scenario:
    """The model of test_same_values. DeepSpeed divides gradients before it sums them."""
    strategy = {"deepspeed": {"layers": [{"params": [[same.SIZE]], **PRICE}] * 2, **FETCHED}}
    arithmetic: same.Arithmetic = {
        "forward layer 0": [("h", "deepspeed_whole_0 * x")],
        "forward layer 1": [("y", "deepspeed_whole_1 * h")],
        "backward layer 1": [
            ("deepspeed_bucket_0", f"(y - t) * h * {1 / ranks}"),
            ("g", "(y - t) * deepspeed_whole_1"),
        ],
        "backward layer 0": [("deepspeed_bucket_1", f"g * x * {1 / ranks}")],
        "optimizer": [
            (
                f"deepspeed_shard_{k}",
                f"deepspeed_shard_{k} - {same.RATE} * deepspeed_scattered_{1 - k}",
            )
            for k in (0, 1)
        ],
    }
    start = f"rank * {same.SIZE // ranks} + index"
    values = {
        "deepspeed_shard_0": f"1 + ({start}) * 0.5",
        "deepspeed_shard_1": f"1 - ({start}) * 0.25",
    }
    return same.trained(ranks, strategy, arithmetic, values)


def shards(made: Scenario) -> list[np.ndarray[Any, Any]]:
    found = same.weights_of(made, [f"deepspeed_shard_{k}" for k in (0, 1)])
    return [np.concatenate(one) for one in found]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_shards_of_zero_3_are_the_weights_of_one_process(ranks: int) -> None:
    for found, expected in zip(shards(zero_3(ranks)), same.in_pytorch(ranks, 2), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def flat(stage: int, ranks: int) -> Scenario:
    """One layer under ZeRO 1 or 2.

    A rank updates with its part of the bucket. All ranks have the same bucket, so the part of the
    largest rank is cut out.
    """
    strategy = {
        "deepspeed": {
            "layers": {"params": [[same.SIZE]], **PRICE},
            "stage": stage,
            "optimizer": "1 ms",
        }
    }
    arithmetic: same.Arithmetic = {
        "forward layer 0": [("y", "deepspeed_parameters * x")],
        "backward layer 0": [("deepspeed_bucket_0_0", f"(y - t) * x * {1 / ranks}")],
        "optimizer": [("g", "0"), ("deepspeed_part", f"deepspeed_part - {same.RATE} * mine")],
    }
    whole = yaml.safe_load(
        Scenario(name="flat", world=ranks, program=[strategy], iterations=same.STEPS).to_yaml()
    )
    program = json.dumps(same.with_arithmetic(whole["program"], arithmetic))
    cut = {
        "reduce_scatter_tensor": {"input": "deepspeed_bucket_0_0", "output": "mine", "op": "max"}
    }
    whole["program"] = json.loads(
        program.replace(json.dumps({"assign": {"tensor": "g", "value": "0"}}), json.dumps(cut))
    )
    values = {"x": same.DATA["x"], "t": same.DATA["t"], "y": None, "g": None}
    whole["tensors"] |= {
        name: {"shape": [same.SIZE], **({"value": value} if value else {})}
        for name, value in values.items()
    }
    whole["tensors"]["mine"] = {"shape": [same.SIZE // ranks]}
    whole["tensors"]["deepspeed_parameters"]["value"] = "1 + index * 0.5"
    whole["tensors"]["deepspeed_part"]["value"] = f"1 + (rank * {same.SIZE // ranks} + index) * 0.5"
    return loads(yaml.safe_dump(whole, sort_keys=False))


@pytest.mark.parametrize("stage", [1, 2])
def test_the_weights_of_zero_1_and_2_are_those_of_one_process(stage: int) -> None:
    (expected,) = same.in_pytorch(2, 1)
    (found,) = same.weights_of(flat(stage, 2), ["deepspeed_parameters"])
    for one in found:
        np.testing.assert_allclose(one, expected, rtol=1e-5)


def test_taking_the_maximum_of_gradients_gives_different_weights() -> None:
    """The comparison above can fail."""
    lines = zero_3(2).to_yaml(flat=True).splitlines()
    bare = loads(
        "\n".join(
            line.replace("op: sum", "op: max") if "reduce_scatter" in line else line
            for line in lines
        )
    )

    assert not all(
        np.allclose(a, b, rtol=1e-5)
        for a, b in zip(shards(bare), same.in_pytorch(2, 2), strict=True)
    )


# --- mistakes ---
@pytest.mark.parametrize("how", ["dropped", "doubled", "misdirected"])
@pytest.mark.parametrize("name", ["1 overlapped", "3 late"])
def test_an_altered_call_is_always_detected(name: str, how: str) -> None:
    good = scenario(world=2, iterations=1, **CONFIGURATIONS[name])
    for number in range(0, 40, 3):
        wrong = spoiled(good, number, number % 2, how)
        assert wrong is None or noticed(wrong, [], range(2)), number


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_layer_skipped_by_one_rank_is_not_correct(stage: int) -> None:
    """Other buckets under ZeRO 1 and 2, other gathers under ZeRO 3."""
    found = simulate(
        scenario(stage=stage, skips_layer={1: 1}, stage3_param_persistence_threshold=0)
    )

    assert found.verdict is not None
    assert found.verdict.verdict == "mismatch"
    assert 1 in found.verdict.ranks


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stage": 4}, "expected ZeRO stage 1, 2 or 3, found 4"),
        ({"stage": 2, "zero_quantized_weights": True}, "ZeRO++ needs stage 3, found stage: 2"),
        ({"stage": 3, "zero_hpz_partition_size": 3}, "the 4 ranks are not divisible by 3"),
        ({"dtype": "float64"}, "DeepSpeed supports float32, bfloat16 and float16"),
        ({"group": "dp"}, "unknown axis dp"),
        ({"skips_layer": {0: 7}}, "layers are 0 to 2, ranks 0 to 3"),
    ],
)
def test_configurations_that_deepspeed_refuses_are_refused_with_their_field(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ScenarioErrors) as raised:
        scenario(**fields)
    assert words in str(raised.value)


def test_the_first_layer_of_a_bucket_overwrites_it_and_later_ones_add_to_it() -> None:
    """All layers fit into one bucket. DeepSpeed fills it from the last layer on."""
    program = lower(scenario(stage=3, iterations=1))
    effects = []
    for call in program.codes[0].calls:
        written = [buffer.name for buffer in call.fields.get("writes", ())]
        added = [buffer.name for buffer in call.fields.get("adds", ())]
        if any("_bucket_" in name for name in (*written, *added)):
            effects.append((len(written), len(added)))

    assert effects == [(1, 0), (0, 1), (0, 1)]
