"""A tiny model, trained in plain PyTorch in one process and by the expanded programs: the same
weights at the end.

A strategy's compute steps say what they cost, not what they compute. Here they are replaced by the
arithmetic of a small model (`assign`), and every call between them stays as it was expanded. The
model is y = w1 * w0 * x by elements, the loss the mean over ranks of (y - t)^2 / 2: a call that is
missing, doubled or on the wrong buffer changes the weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import yaml

from distsim.scenario import Scenario, loads
from distsim.simulation.simulate_scenario import simulate

RATE = 0.125
STEPS = 3
SIZE = 4
_PRICE = {"forward": "1 ms", "backward": "2 ms"}
#: Numbers that float32 holds exactly for a few steps.
DATA = {"x": "rank + 1 - index * 0.25", "t": "index - rank * 0.5"}

#: Name of a compute step -> the assigns in its place.
Arithmetic = dict[str, list[tuple[str, str]]]

DDP: Arithmetic = {
    "forward layer 0": [("y", "ddp_weights_0 * x")],
    "backward layer 0": [("ddp_bucket_0", "(y - t) * x")],
    "optimizer": [("ddp_weights_0", f"ddp_weights_0 - {RATE} * ddp_bucket_0")],
}
FSDP: Arithmetic = {
    "forward layer 0": [("h", "fsdp_full_0 * x")],
    "forward layer 1": [("y", "fsdp_full_1 * h")],
    "backward layer 1": [("fsdp_grads_1", "(y - t) * h"), ("g", "(y - t) * fsdp_full_1")],
    "backward layer 0": [("fsdp_grads_0", "g * x")],
    "optimizer": [(f"fsdp_shard_{k}", f"fsdp_shard_{k} - {RATE} * fsdp_grad_{k}") for k in (0, 1)],
}


def with_arithmetic(entries: list[dict[str, Any]], arithmetic: Arithmetic) -> list[dict[str, Any]]:
    """The program with assigns in place of its compute steps."""
    found: list[dict[str, Any]] = []
    for entry in entries:
        if "steps" in entry:
            found.append({**entry, "steps": with_arithmetic(entry["steps"], arithmetic)})
        elif "compute" in entry:
            found += [
                {"assign": {"tensor": name, "value": text}}
                for name, text in arithmetic[entry["compute"]["name"]]
            ]
        else:
            found.append(entry)
    return found


def trained(
    ranks: int, strategy: dict[str, Any], arithmetic: Arithmetic, values: dict[str, str]
) -> Scenario:
    """The expanded strategy as a program that trains the model. ``values``: what weights hold at
    the start.
    """
    expanded = Scenario(
        name="trained", world=ranks, mesh={"dp": ranks}, program=[strategy], iterations=STEPS
    ).to_yaml()
    data = yaml.safe_load(expanded)
    data["program"] = with_arithmetic(data["program"], arithmetic)
    for name, value in values.items():
        data["tensors"][name]["value"] = value
    for name in ("x", "t", "y", "h", "g"):
        data["tensors"][name] = {"shape": [SIZE], **({"value": DATA[name]} if name in DATA else {})}
    return loads(yaml.safe_dump(data, sort_keys=False))


def ddp(ranks: int) -> Scenario:
    """Weights differ at the start; rank 0's are everybody's."""
    strategy = {"ddp": {"layers": [{"params": [[SIZE]], **_PRICE}], "optimizer": "1 ms"}}
    return trained(ranks, strategy, DDP, {"ddp_weights_0": "1 + index * 0.5 + 10 * rank"})


def fsdp(ranks: int) -> Scenario:
    strategy = {"fsdp": {"layers": [{"params": [[SIZE]], **_PRICE}] * 2, "optimizer": "1 ms"}}
    start = f"rank * {SIZE // ranks} + index"
    return trained(
        ranks,
        strategy,
        FSDP,
        {"fsdp_shard_0": f"1 + ({start}) * 0.5", "fsdp_shard_1": f"1 - ({start}) * 0.25"},
    )


def in_pytorch(ranks: int, layers: int) -> list[Any]:
    """The weights after training on all ranks' data in one process."""
    torch = pytest.importorskip("torch")
    index = torch.arange(SIZE, dtype=torch.float32)
    start = [1 + index / 2, 1 - index / 4]
    weights = [w.clone().requires_grad_() for w in start[:layers]]
    optimizer = torch.optim.SGD(weights, lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = 0.0
        for rank in range(ranks):
            y = rank + 1 - index / 4
            for w in weights:
                y = w * y
            loss = loss + ((y - (index - rank / 2)) ** 2 / 2).sum() / ranks
        loss.backward()
        optimizer.step()
    return [w.detach().numpy() for w in weights]


def weights_of(scenario: Scenario, names: list[str]) -> list[list[Any]]:
    """The tensors' numbers at the end on each rank."""
    values = simulate(scenario, with_values=True).values
    assert values is not None
    return [[values.array(rank, name) for rank in range(scenario.world.size)] for name in names]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ddp_ends_with_the_weights_of_one_process(ranks: int) -> None:
    (expected,) = in_pytorch(ranks, 1)
    for found in weights_of(ddp(ranks), ["ddp_weights_0"])[0]:
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_shards_of_fsdp_are_the_weights_of_one_process(ranks: int) -> None:
    for found, expected in zip(
        weights_of(fsdp(ranks), ["fsdp_shard_0", "fsdp_shard_1"]), in_pytorch(ranks, 2), strict=True
    ):
        np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-5)


@pytest.mark.parametrize("op", ["all_reduce", "broadcast"])
def test_removing_one_kind_of_call_changes_the_weights(op: str) -> None:
    """The comparison above can fail."""

    def left(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kept = [e for e in entries if op not in e and "wait" not in e]
        return [{**e, "steps": left(e["steps"])} if "steps" in e else e for e in kept]

    data = yaml.safe_load(ddp(2).to_yaml())
    found = weights_of(
        loads(yaml.safe_dump({**data, "program": left(data["program"])}, sort_keys=False)),
        ["ddp_weights_0"],
    )[0]
    (expected,) = in_pytorch(2, 1)
    assert not all(np.allclose(one, expected, rtol=1e-5) for one in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "weights"), [(ddp, {"ddp_weights_0"}), (fsdp, {"fsdp_shard_0", "fsdp_shard_1"})]
)
def test_on_real_gloo_the_program_ends_with_the_same_weights(make: Any, weights: set[str]) -> None:
    """The real run's values are those of the simulation, which are PyTorch's."""
    pytest.importorskip("torch")
    from tests.support.real_runs import run

    done = run(make(2))
    assert done.outcome == "completes"
    assert done.buffers_in_state("differs") == []
    assert {
        one.label for one in done.buffers_in_state("equal") + done.buffers_in_state("close")
    } >= {"x", "y", *weights}
