"""`fsdp` issues what fully_shard issues; shards of gradients hold every rank's part exactly
once.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.common.errors import ScenarioErrors
from distsim.scenario import Scenario
from tests.support.harness import draws
from tests.support.strategy_checks import (
    held_once,
    meeting,
    noticed,
    sent_nbytes,
    simulated,
    spoiled,
)

LAYER = {"params": [[512, 1024], [512]], "forward": "1 ms", "backward": "2 ms", "count": 3}
ROOT = {"params": 4096, "forward": "1 ms", "backward": "2 ms"}
N = 512 * 1024 + 512


def fsdp(
    world: int = 4,
    backend: str = "nccl",
    mesh: dict[str, int] | None = None,
    iterations: int = 1,
    **fields: object,
) -> Scenario:
    program = [{"fsdp": {"layers": LAYER, **fields}}]
    return Scenario(
        world=world,
        backend=backend,
        iterations=iterations,
        mesh=mesh or {"dp": world},
        program=program,
    )


def kinds(scenario: Scenario) -> list[str]:
    words = {
        "all_gather_into_tensor": "gather",
        "reduce_scatter_tensor": "scatter",
        "all_reduce": "reduce",
    }
    return [words[op] for op, *_ in meeting(scenario)]


def test_zero_3_gathers_before_both_passes_and_scatters_after_backward():
    """gloo has no streams: every call stands where PyTorch makes it, the gather of the next layer
    before this one's backward.
    """
    assert kinds(fsdp(backend="gloo")) == [
        *3 * ["gather"],
        "gather",
        "gather",
        "scatter",
        "gather",
        "scatter",
        "scatter",
    ]
    assert {(nbytes, is_async) for _, _, nbytes, is_async in meeting(fsdp(backend="gloo"))} == {
        (4 * N, False)
    }


def test_zero_2_keeps_the_layers_and_zero_1_also_the_gradients():
    assert kinds(fsdp(zero=2)) == 3 * ["gather"] + 3 * ["scatter"]
    assert kinds(fsdp(zero=2, accumulate=2)) == 2 * (3 * ["gather"] + 3 * ["scatter"])
    assert kinds(fsdp(zero=1, accumulate=4)) == 3 * ["gather"] + 3 * ["scatter"]


def test_the_root_is_gathered_first_kept_and_scattered_after_the_backward_pass():
    """Recorded: units whose input wants no gradient are reduced then, the outermost first; here the
    root, then the first layer.
    """
    calls = meeting(fsdp(backend="gloo", root=ROOT))
    small = [k for k, (_, _, nbytes, _) in enumerate(calls) if nbytes == 4 * 4096]
    behind = meeting(fsdp(backend="gloo", root=ROOT, input_grad=True))

    assert small == [0, len(calls) - 2]
    assert [k for k, (_, _, nbytes, _) in enumerate(behind) if nbytes == 4 * 4096] == [
        0,
        len(behind) - 1,
    ]
    assert [calls[k][0] for k in small] == ["all_gather_into_tensor", "reduce_scatter_tensor"]


def test_nccl_makes_the_same_calls_as_gloo_within_each_pass():
    """Under nccl a gather may stand earlier than a compute step, never in another order on its
    communicator.
    """
    for fields in ({}, {"root": ROOT}, {"zero": 2}, {"accumulate": 2}):
        assert [c[:3] for c in meeting(fsdp(**fields))] == [
            c[:3] for c in meeting(fsdp(backend="gloo", **fields))
        ]


def test_mixed_precision_gathers_and_reduces_with_its_own_sizes():
    calls = meeting(fsdp(param_dtype="bfloat16", reduce_dtype="float32"))

    assert {(op, nbytes) for op, _, nbytes, _ in calls} == {
        ("all_gather_into_tensor", 2 * N),
        ("reduce_scatter_tensor", 4 * N),
    }


def test_parameters_are_padded_along_their_first_axis():
    odd = Scenario(
        world=4,
        mesh={"dp": 4},
        program=[{"fsdp": {"layers": {"params": [[5, 3]], "forward": "1 ms", "backward": "1 ms"}}}],
    )

    assert {nbytes for _, _, nbytes, _ in meeting(odd)} == {4 * 8 * 3}


def test_hybrid_sharding_reduces_every_shard_over_the_replicas():
    scenario = fsdp(8, mesh={"dp_replicate": 2, "dp_shard": 4}, replicate="dp_replicate")
    calls = meeting(scenario, rank=1)

    assert {(op, ranks) for op, ranks, _, _ in calls} == {
        ("all_gather_into_tensor", (0, 1, 2, 3)),
        ("reduce_scatter_tensor", (0, 1, 2, 3)),
        ("all_reduce", (1, 5)),
    }
    done = simulated(scenario.to_yaml())
    assert all(held_once(done, f"fsdp_grad_{k}", range(8)) for k in range(3))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"zero": 2},
        {"zero": 1, "accumulate": 3},
        {"accumulate": 3},
        {"root": ROOT},
        {"no_sync": True, "accumulate": 2},
    ],
)
def test_after_every_iteration_each_shard_has_the_gradient_of_every_rank_exactly_once(
    backend, fields
):
    for iterations in (1, 2):
        done = simulated(fsdp(4, backend, iterations=iterations, **fields).to_yaml())

        assert (done.outcome, done.verdict.verdict) == ("completes", "ok")
        assert all(
            held_once(done, name, range(4))
            for name in done.scenario.tensors
            if name.startswith("fsdp_grad_")
        )


def test_fsdp_moves_one_and_a_half_times_the_bytes_of_ddp():
    """ZeRO paper (arXiv 1910.02054, section 7): 3 against 2 volumes of the parameters; with stage 2
    as much as ddp.
    """
    layer = {"params": [[1024, 1024]], "forward": "1 ms", "backward": "1 ms", "count": 4}
    of = {
        zero: sent_nbytes(
            Scenario(world=8, backend="nccl", program=[{"fsdp": {"layers": layer, "zero": zero}}])
        )
        for zero in (2, 3)
    }
    plain = sent_nbytes(
        Scenario(world=8, backend="nccl", program=[{"ddp": {"layers": layer, "setup": False}}])
    )

    assert (of[3] / plain, of[2] / plain) == (1.5, 1.0)
    assert (
        plain == 8 * 2 * 7 / 8 * 4 * 1024 * 1024 * 4
    )  # every rank sends 2(n - 1)/n of the gradients


def test_gathers_and_scatters_overlap_with_compute():
    """9 ms of compute; what shows is the first gathers and the last scatter."""
    done = simulated(fsdp(iterations=3).to_yaml())
    one = max(c.duration_ns for c in done.timeline.collectives)

    assert 9 * 10**6 < done.iteration_ns < 9 * 10**6 + 5 * one


def test_hybrid_sharding_reduces_over_the_replicas_during_the_backward_of_the_next_layer():
    """Streams of their own: an all_reduce that lasts longer than a layer holds up neither that
    layer nor the next reduce_scatter.
    """
    slow = {"kind": "nvlink", "latency": "0 ns", "bandwidth": "100 GB/s"}
    device = {
        "name": "d",
        "peak": {"float32": "1 TFLOP/s"},
        "memory_bandwidth": "1 TB/s",
        "memory_size": "1 TB",
    }
    cluster = {
        "name": "c",
        "device": device,
        "intra": slow,
        "nics": {"bandwidth": "0.4 GB/s"},
        "network": {"latency": "0 ns"},
    }
    scenario = Scenario(
        world={"nodes": 2, "ranks_per_node": 2},
        backend="nccl",
        cluster=cluster,
        mesh={"dp_replicate": 2, "dp_shard": 2},
        program=[{"fsdp": {"layers": LAYER, "replicate": "dp_replicate"}}],
    )
    trace = simulated(scenario.to_yaml()).run.trace
    mine = [call for call in trace.rows() if call.rank == 0]
    reduces, scatters = (
        [c for c in mine if c.op == op] for op in ("all_reduce", "reduce_scatter_tensor")
    )
    backwards = [c for c in mine if c.name.startswith("backward")]

    assert (
        reduces[0].finished_ns - reduces[0].started_ns
        > backwards[1].finished_ns - backwards[1].started_ns
    )
    assert reduces[0].started_ns == scatters[0].finished_ns
    assert (
        backwards[1].started_ns
        < reduces[0].started_ns
        < backwards[1].finished_ns
        < reduces[0].finished_ns
    )
    assert scatters[1].started_ns < reduces[0].finished_ns
    assert backwards[2].started_ns == backwards[1].finished_ns


@settings(max_examples=draws(30), deadline=None)
@given(
    st.integers(0, 20),
    st.integers(0, 2),
    st.sampled_from(["dropped", "doubled"]),
    st.sampled_from([1, 2, 3]),
)
def test_a_call_dropped_or_doubled_by_one_rank_is_always_detected(number, rank, how, zero):
    wrong = spoiled(fsdp(3, iterations=2, zero=zero), number, rank, how)

    assert wrong is not None
    assert noticed(wrong, [f"fsdp_grad_{k}" for k in range(3)], range(3))


@pytest.mark.parametrize(
    ("fields", "place", "words"),
    [
        ({"shard": "dpp"}, "shard", "unknown axis dpp"),
        ({"replicate": "dp"}, "replicate", "different mesh axes"),
        ({"skips_backward": {9: 0}}, "skips_backward", "expected ranks below 4"),
        ({"zero": 4}, "zero", "1, 2 or 3"),
    ],
)
def test_an_impossible_layout_is_refused_at_its_place(fields, place, words):
    with pytest.raises(ScenarioErrors) as caught:
        fsdp(**fields)

    assert [p.path for p in caught.value.problems] == [f"program[0].fsdp.{place}"]
    assert words in caught.value.problems[0].message
