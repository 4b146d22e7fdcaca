"""`transformer:` over a tensor axis makes the calls that DTensor was recorded to make, and
Megatron-LM's where asked.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import tests.support.wrapped_tp as tp
from distsim.operations.registry import OPERATIONS
from distsim.program.lower import lower
from distsim.scenario import Scenario
from distsim.simulation.simulate_scenario import simulate
from tests.support import wrapped

MODEL = {"layers": 2, "hidden": tp.HIDDEN, "heads": 4, "ffn": tp.WIDE, "vocabulary": tp.VOCABULARY}
STEP = {
    "model": MODEL,
    "micro_batch": tp.BATCH,
    "sequence": tp.SEQUENCE,
    "dtype": "float32",
    "zero": 0,
    "launch": "0 ns",
    "clip_grad_norm": False,
}
RECORDED = wrapped.recordings("tp")


def scenario(size: int, data: int = 1, iterations: int = 1, **fields: Any) -> Scenario:
    program = [{"transformer": {**STEP, **fields}}]
    return Scenario(
        name="t",
        world=size * data,
        mesh={"dp": data, "tp": size},
        iterations=iterations,
        program=program,
    )


@pytest.mark.parametrize(
    ("recording", "fields"),
    [
        ("embedded", {"sequence_parallel": False, "loss_parallel": False}),
        ("loss", {"sequence_parallel": False}),
        ("sequence_whole", {"loss_parallel": False}),
        ("sequence_loss", {}),
        ("sequence_loss_4", {}),
    ],
)
def test_a_transformer_step_makes_the_recorded_calls(
    recording: str, fields: dict[str, Any]
) -> None:
    """Embedding, two blocks, logits and loss, forward and backward, twice: every call of every
    rank, recorded from torch 2.13.
    """
    case, real = tp.CASES[recording], wrapped.unpacked(RECORDED[recording])
    made = wrapped_calls(scenario(case.ranks, iterations=2, **fields))

    assert wrapped.first_difference(case, real, made) == ""


def wrapped_calls(one: Scenario) -> list[list[dict[str, Any]]]:
    from tests.strategies.test_same_calls import calls_of

    return calls_of(one)


def counted(**fields: Any) -> Counter[str]:
    program = lower(scenario(2, **fields))
    return Counter(
        call.op for _, call in program.calls_of(0) if OPERATIONS[call.op].kind == "collective"
    )


def test_fused_matrices_reduce_the_gradient_of_their_input_once() -> None:
    """Two blocks: forward 2 + 2, backward wq, wk, wv, w1, w3 each; fused 2 each; and embedding,
    logits' gradient, three of the loss.
    """
    assert counted(sequence_parallel=False) == {"all_reduce": 4 + 2 * 5 + 5}
    assert counted(sequence_parallel=False, tensor_calls="megatron") == {
        "all_reduce": 4 + 2 * 2 + 5
    }


def test_megatron_gathers_the_input_of_a_block_again_and_dtensor_keeps_it() -> None:
    """Kept, it is held from the forward pass on: two whole inputs a layer instead of their parts.
    Megatron's loss works in place, where PyTorch's has two float32 gradients more; its fused gate
    keeps no non-linearity."""
    assert counted()["all_gather_into_tensor"] == 4 + 4 + 2
    assert counted(tensor_calls="megatron")["all_gather_into_tensor"] == 4 + 2 * 4 + 3
    kept, again = (
        scenario(2, tensor_calls=word).memory["transformer_rank"].parts
        for word in ("dtensor", "megatron")
    )
    part = tp.BATCH * tp.SEQUENCE * tp.HIDDEN * 4 // 2
    gate, logits = (4 * tp.BATCH * tp.SEQUENCE * wide // 2 for wide in (tp.WIDE, tp.VOCABULARY))
    assert kept["activations"] - again["activations"] == 2 * 2 * part + part + 2 * gate + 3 * logits


def test_image_models_reduce_neither_embedding_nor_logits() -> None:
    """A ViT's head is no vocabulary: neither its embedding nor its logits are reduced."""
    found = simulate(
        Scenario(
            name="t",
            world=2,
            mesh={"tp": 2},
            program=[
                {
                    "transformer": {
                        "model": {"preset": "vit-l-16", "layers": 2},
                        "sequence": 196,
                        "clip_grad_norm": False,
                    }
                }
            ],
        )
    )
    assert found.outcome == "completes"
    assert (
        sum(row.op == "all_gather_into_tensor" for row in found.run.trace.rows() if row.rank == 0)
        == 2 * 2 + 2 * 2
    )


@pytest.mark.parametrize("style", ["dtensor", "megatron"])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_both_styles_complete_on_every_backend(style: str, pipeline: int) -> None:
    for backend in ("gloo", "nccl"):
        found = simulate(
            Scenario(
                name="t",
                world=4 * pipeline,
                backend=backend,
                mesh={"pp": pipeline, "dp": 2, "tp": 2},
                program=[
                    {"transformer": {**STEP, "micro_batches": 2, "zero": 1, "tensor_calls": style}}
                ],
            )
        )
        assert found.verdict is not None
        assert (found.outcome, found.verdict.verdict) == ("completes", "ok")
