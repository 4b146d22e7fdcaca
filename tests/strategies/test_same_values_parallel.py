"""Pipelines, tensor, expert, context and data parallelism and their products end with the weights
of one process in plain PyTorch.

As in tests/strategies/test_same_values.py for ddp and fsdp. The programs are those of
tests/support/trained_programs.py; here is the same model in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import yaml

from distsim.common.expressions import parse_expression
from distsim.scenario import Scenario, loads
from distsim.simulation.simulate_scenario import simulate
from distsim.values import BufferValues
from tests.support.trained_programs import (
    EXPERTS,
    LAYERS,
    RATE,
    SIZE,
    STEPS,
    devices,
    experts,
    pipeline,
    replicated_pipeline,
    replicated_tensor_parallel,
    ring,
    stage_of,
    tensor_parallel,
)


def torch_of() -> Any:
    return pytest.importorskip("torch")


def index_of(torch: Any, numel: int = SIZE) -> Any:
    return torch.arange(numel, dtype=torch.float64)


def trained_in_torch(weights: list[Any], loss: Callable[[], Any]) -> list[Any]:
    """The weights after STEPS updates, ``loss`` called for each; in this process alone."""
    optimizer = torch_of().optim.SGD(weights, lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss()
        optimizer.step()
    return [w.detach().numpy() for w in weights]


def values_of(scenario: Scenario) -> BufferValues:
    values = simulate(scenario, with_values=True).values
    assert values is not None
    return values


# --- pipelines: every stage multiplies by its weights ---
#: schedule, ranks, chunks, micro-batches
PIPELINES = [
    ("gpipe", 2, 1, 3),
    ("1f1b", 3, 1, 5),
    ("1f1b", 4, 1, 4),
    ("interleaved_1f1b", 2, 2, 4),
    ("interleaved_1f1b", 4, 2, 8),
    ("looped_bfs", 2, 2, 3),
    ("zb1p", 3, 1, 4),
    ("zbv", 2, 2, 4),
    ("dualpipe_v", 2, 2, 5),
]


def stages_in_torch(stages: int, batches: int, replicas: int = 1) -> list[Any]:
    torch = torch_of()
    index = index_of(torch)
    weights = [(1 + stage / 16 - index / 8).requires_grad_() for stage in range(stages)]

    def loss() -> None:
        for replica in range(replicas):
            for m in range(batches):
                y = 1 + m * 0.375 - index / 8 + replica / 2
                for weight in weights:
                    y = weight * y
                (((y - (index * 0.3 - m * 0.7 - replica)) ** 2 / 2).sum() / replicas).backward()

    return trained_in_torch(weights, loss)


@pytest.mark.parametrize(("schedule", "ranks", "chunks", "batches"), PIPELINES)
def test_stages_of_a_pipeline_end_with_the_weights_of_one_process_bit_for_bit(
    schedule, ranks, chunks, batches
):
    """Micro-batches are added in their order by every schedule, so that nothing rounds
    otherwise.
    """
    expected = stages_in_torch(ranks * chunks, batches)
    scenario = pipeline(schedule, ranks, chunks, batches)

    values = values_of(scenario)
    for rank in range(ranks):
        for chunk in range(chunks):
            stage = parse_expression(stage_of(schedule, ranks, chunk, str(rank))).evaluate({})
            np.testing.assert_array_equal(values.array(rank, f"w_{chunk}"), expected[stage])


@pytest.mark.parametrize(("ranks", "batches"), [(2, 4), (4, 8)])
def test_both_copies_of_dualpipes_stages_end_with_the_weights_of_one_process(ranks, batches):
    """Equal to each other bit for bit; each direction's gradients are added first, then both sums,
    which rounds otherwise than in turn.
    """
    expected = stages_in_torch(ranks, batches)
    values = values_of(pipeline("dualpipe", ranks, 2, batches))
    for stage in range(ranks):
        one, other = (
            values.array(rank, f"w_{2 * stage // ranks}") for rank in (stage, ranks - 1 - stage)
        )

        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, expected[stage], rtol=1e-13)


def test_two_swapped_receives_give_different_weights():
    """The comparison above can fail: nothing hangs, every message fits."""
    data = yaml.safe_load(pipeline("gpipe", 2, 1, 3).to_yaml())
    receiver = next(e for e in _blocks(data["program"]) if e.get("ranks") == "pp == 1")
    one, two = [e["irecv"] for e in receiver["steps"] if "irecv" in e][:2]
    one["tensor"], two["tensor"] = two["tensor"], one["tensor"]
    done = simulate(loads(yaml.safe_dump(data, sort_keys=False)), with_values=True)

    assert done.run.outcome == "completes"
    assert not np.array_equal(done.values.array(1, "w_0"), stages_in_torch(2, 3)[1])


def _blocks(entries: list[dict[str, Any]]) -> Any:
    for entry in entries:
        if "steps" in entry:
            yield entry
            yield from _blocks(entry["steps"])


def pairs_in_torch(ranks: int) -> list[Any]:
    """a of layer 0 on each rank, then of layer 1, then b likewise."""
    torch = torch_of()
    index = index_of(torch, ranks * SIZE)
    a = [
        (1 - r / 4 + index / 16 - k / 2).requires_grad_()
        for k in range(LAYERS)
        for r in range(ranks)
    ]
    b = [
        (0.5 + r / 4 - index / 32 + k / 4).requires_grad_()
        for k in range(LAYERS)
        for r in range(ranks)
    ]

    def loss() -> None:
        y = 1 - index / 16
        for k in range(LAYERS):
            hidden = [(a[k * ranks + r] * y, b[k * ranks + r]) for r in range(ranks)]
            y = sum(weight * (h * h) for h, weight in hidden)
        ((y - (index * 0.3 - 1)) ** 2 / 2).sum().backward()

    return trained_in_torch(a + b, loss)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_columns_and_rows_end_with_the_weights_of_one_process(
    ranks, sequence_parallel
):
    """Bit for bit where two ranks add; sums of four are added in another order than PyTorch's."""
    expected = pairs_in_torch(ranks)
    values = values_of(tensor_parallel(ranks, sequence_parallel))
    found = [
        values.array(r, f"{w}_{k}").reshape(-1)
        for w in "ab"
        for k in range(LAYERS)
        for r in range(ranks)
    ]

    for one, other in zip(found, expected, strict=True):
        if ranks == 2:
            np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, other, rtol=1e-13)


def experts_in_torch(ranks: int, splits: list[int]) -> list[Any]:
    torch = torch_of()
    numel = EXPERTS["hidden"]
    rows = [ranks * n for n in splits]
    weights = [
        (
            1 - r / 4 + index_of(torch, rows[r] * numel).reshape(rows[r], numel) / 16 + k / 2
        ).requires_grad_()
        for k in range(LAYERS)
        for r in range(ranks)
    ]
    index = index_of(torch, EXPERTS["tokens"] * numel).reshape(EXPERTS["tokens"], numel)

    def loss() -> None:
        there = [1 + r - index / 8 for r in range(ranks)]
        for k in range(LAYERS):
            out = [tokens.split(splits) for tokens in there]
            done = [
                weights[k * ranks + e] * torch.cat([one[e] for one in out]) for e in range(ranks)
            ]
            back = [results.split(splits[e]) for e, results in enumerate(done)]
            there = [torch.cat([results[r] for results in back]) for r in range(ranks)]
        sum(((y - (index * 0.3 - r)) ** 2 / 2).sum() for r, y in enumerate(there)).backward()

    return trained_in_torch(weights, loss)


@pytest.mark.parametrize(("ranks", "imbalance"), [(2, 0), (3, 0.6)])
def test_experts_end_with_the_weights_of_one_process_bit_for_bit(ranks, imbalance):
    scenario, splits = experts(ranks, imbalance)
    values = values_of(scenario)
    found = [values.array(r, f"w_{k}") for k in range(LAYERS) for r in range(ranks)]

    assert (len(set(splits)) > 1) == (imbalance > 0)
    for one, other in zip(found, experts_in_torch(ranks, splits), strict=True):
        np.testing.assert_array_equal(one, other)


def ring_in_torch(ranks: int) -> list[Any]:
    torch = torch_of()
    index = index_of(torch, 2 * SIZE)
    weights = [(1 - r / 4 + index / 16).requires_grad_() for r in range(ranks)]

    def loss() -> None:
        kv = [w * (1 + r - index / 8) for r, w in enumerate(weights)]
        y = [sum((0.5 + index * 0.1 - r) * (one * one) for one in kv) for r in range(ranks)]
        sum(((one - (index * 0.3 - r)) ** 2 / 2).sum() for r, one in enumerate(y)).backward()

    return trained_in_torch(weights, loss)


@pytest.mark.parametrize("rotate", ["p2p", "alltoall"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ring_ends_with_the_weights_of_one_process(ranks, rotate):
    """Within some roundings: each rank adds in its own order of the ring, and a product of three is
    multiplied in another order.
    """
    values = values_of(ring(ranks, rotate))

    for rank, expected in enumerate(ring_in_torch(ranks)):
        np.testing.assert_allclose(values.array(rank, "w"), expected, rtol=1e-13)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_device_of_data_parallel_ends_with_the_weights_of_one_process(ranks):
    """Bit for bit with two devices; with four, gradients are added in another order than
    PyTorch's.
    """
    torch = torch_of()
    index = index_of(torch, ranks * SIZE).reshape(ranks, SIZE)
    weight, steps = (1 + index[0] / 4).requires_grad_(), iter(range(STEPS))

    def loss() -> None:
        batch = 2 - index / 8 + next(steps) / 2
        sum(
            ((weight * row - t) ** 2 / 2).sum() / ranks
            for row, t in zip(batch, index * 0.3, strict=True)
        ).backward()

    (expected,) = trained_in_torch([weight], loss)
    values = values_of(devices(ranks))
    for rank in range(ranks):
        if ranks == 2:
            np.testing.assert_array_equal(values.array(rank, "data_parallel_weights_0"), expected)
        np.testing.assert_allclose(
            values.array(rank, "data_parallel_weights_0"), expected, rtol=1e-14
        )


def test_replicas_of_a_pipeline_end_with_the_weights_of_one_process():
    """Each replica adds its own micro-batches first; one process adds them all in one row: within
    some roundings of 8 additions.
    """
    expected = stages_in_torch(2, 3, replicas=2)
    values = values_of(replicated_pipeline(2, 2, 3))

    for rank in range(4):
        np.testing.assert_allclose(values.array(rank, "w_0"), expected[rank // 2], rtol=1e-14)


def tied_in_torch() -> list[Any]:
    torch = torch_of()
    index = index_of(torch, 2 * SIZE)
    weights = [(1 - r / 4 + index / 16).requires_grad_() for r in range(2)]

    def loss() -> None:
        for replica in range(2):
            x = 1 + replica - index / 16
            y = sum(w * ((w * x) * (w * x)) for w in weights)
            (((y - (index * 0.3 - 1)) ** 2 / 2).sum() / 2).backward()

    return trained_in_torch(weights, loss)


def test_replicas_of_tensor_parallel_ranks_end_with_the_weights_of_one_process():
    """The gradient of weights used twice is a sum whose terms PyTorch multiplies in another order:
    within some roundings.
    """
    expected, values = tied_in_torch(), values_of(replicated_tensor_parallel())

    for rank in range(4):
        np.testing.assert_allclose(
            values.array(rank, "w").reshape(-1), expected[rank % 2], rtol=1e-14
        )


# --- on processes ---
REAL: dict[str, tuple[Callable[[], Scenario], set[str]]] = {
    "gpipe": (lambda: pipeline("gpipe", 2, 1, 3), {"w_0"}),
    "1f1b": (lambda: pipeline("1f1b", 3, 1, 5), {"w_0"}),
    "interleaved_1f1b": (lambda: pipeline("interleaved_1f1b", 2, 2, 4), {"w_0", "w_1"}),
    "tensor_parallel": (lambda: tensor_parallel(2, False), {"a_0", "a_1", "b_0", "b_1"}),
    "sequence_parallel": (lambda: tensor_parallel(2, True), {"a_0", "a_1", "b_0", "b_1"}),
    "expert_parallel": (lambda: experts(3, 0.6)[0], {"w_0", "w_1"}),
    "zb1p": (lambda: pipeline("zb1p", 3, 1, 4), {"w_0"}),
    "dualpipe_v": (lambda: pipeline("dualpipe_v", 2, 2, 5), {"w_0", "w_1"}),
    "dualpipe": (lambda: pipeline("dualpipe", 4, 2, 8), {"w_0", "w_1"}),
    "context_parallel": (lambda: ring(2, "p2p"), {"w"}),
    "data_parallel": (lambda: devices(2), {"data_parallel_weights_0"}),
    "pipeline_and_data": (lambda: replicated_pipeline(2, 2, 3), {"w_0"}),
    "tensor_and_data": (replicated_tensor_parallel, {"w"}),
}


#: These run with the quick tests.
QUICK = ("interleaved_1f1b", "sequence_parallel")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in REAL]
)
def test_on_real_gloo_the_weights_equal_the_simulated_ones_bit_for_bit(name):
    """At most two ranks add at a time, and the simulation's weights are PyTorch's (above)."""
    torch_of()
    from tests.support.real_runs import run

    make, weights = REAL[name]
    scenario = make()
    done = run(scenario)
    equal = {(one.rank, one.label) for one in done.buffers_in_state("equal")}

    assert (done.outcome, done.buffers_in_state("differs"), done.buffers_in_state("close")) == (
        "completes",
        [],
        [],
    )
    assert {(rank, label) for rank in range(scenario.world.size) for label in weights} <= equal
