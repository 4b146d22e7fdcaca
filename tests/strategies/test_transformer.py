"""The transformer description against the papers' formulas and the published figures."""

from __future__ import annotations

from math import isclose

import pytest

from distsim.scenario.strategies.pipeline.builtin_schedules import (
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zb1p,
)
from distsim.scenario.strategies.training_step.memory_footprint import (
    BytesPerParameter,
    MemoryFootprint,
    model_states,
    peak_activation_bytes,
)
from distsim.scenario.strategies.training_step.micro_batch_cost import MicroBatchCost, step_flops
from distsim.scenario.strategies.training_step.presets import PRESETS

#: Parameter counts as published: paper tables and model cards, in units of 1e9. Llama 4 without its
#: vision tower of 0.87, Gemma 3 as the sum of its embedding and other parameters, without it too.
PUBLISHED = {
    "gpt3-175b": 175.0,
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "llama3-405b": 405.0,
    "mixtral-8x7b": 46.7,
    "llama3.1-8b": 8.03,
    "llama3.1-70b": 70.6,
    "llama3.1-405b": 405.0,
    "llama3.3-70b": 70.6,
    "llama4-scout": 108.64 - 0.87,
    "llama4-maverick": 401.58 - 0.87,
    "qwen3-8b": 8.2,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.0,
    "deepseek-v3": 671.0,
    "mixtral-8x22b": 141.0,
    "gemma3-4b": 0.675 + 3.209,
    "gemma3-12b": 1.012 + 10.759,
    "gemma3-27b": 1.416 + 25.6,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "vit-l-16": 0.307,
    "vit-h-14": 0.632,
    "dit-xl-2": 0.675,
}
#: The same to the last one: `num_parameters()` of the published checkpoints.
EXACT = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x22b": 140_630_071_296,
    # Gemma 3: `total_size` / 2 (bfloat16) in model.safetensors.index.json of google/gemma-3-*-it,
    # without the vision tower, its projector (1152 x hidden) and the norm of the projector.
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 1152 * (2560 + 1),
    "gemma3-12b": 12_187_325_040 - 416_866_032 - 1152 * (3840 + 1),
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 1152 * (5376 + 1),
}
#: Parameters that a token meets, as published; gpt-oss counts no embedding among them
#: (arXiv:2508.10925, table 1).
ACTIVE = {
    "llama4-scout": 17,
    "llama4-maverick": 17,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "deepseek-v3": 37,
    "mixtral-8x22b": 39,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_ones_to_all_published_digits(name: str) -> None:
    assert isclose(PRESETS[name].active_parameters, ACTIVE[name] * 1e9, rel_tol=0.02)


@pytest.mark.parametrize(("name", "active"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])
def test_active_parameters_of_gpt_oss_are_those_of_its_model_card(name: str, active: float) -> None:
    model = PRESETS[name]
    assert isclose(
        model.active_parameters - model.embedding_parameters, active * 1e9, rel_tol=0.005
    )


def test_a_deepseek_stage_without_experts_has_the_parameters_of_its_layers() -> None:
    """All stages together hold the model: the first three layers are dense."""
    model = PRESETS["deepseek-v3"]
    dense = 3 * (model.dense_parameters - model.layer_parameters)
    assert (
        model.parameters
        == model.embedding_parameters + model.head_parameters + 61 * model.layer_parameters + dense
    )


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts_are_the_published_ones_within_one_percent(name: str) -> None:
    assert isclose(PRESETS[name].parameters, PUBLISHED[name] * 1e9, rel_tol=0.01)


@pytest.mark.parametrize("name", EXACT)
def test_parameter_counts_are_those_of_the_checkpoints(name: str) -> None:
    assert PRESETS[name].parameters == EXACT[name]


def test_a_token_of_mixtral_uses_12_9_billion_parameters() -> None:
    """Mixtral of Experts, section 1: 47B parameters, 13B active."""
    assert isclose(PRESETS["mixtral-8x7b"].active_parameters, 12.9e9, rel_tol=0.01)


def test_gpt3_parameters_follow_narayanan_equation_2() -> None:
    model = PRESETS["gpt3-175b"]
    layers, h, v, s = model.layers, model.hidden, model.vocabulary, model.positions
    expected = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    assert isclose(model.parameters, expected, rel_tol=1e-6)


GPT = MicroBatchCost(PRESETS["gpt3-175b"], micro_batch=1, sequence=2048)
S, H, A, T = 2048, 12288, 96, 8


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (GPT, S * H * (34 + 5 * A * S / H)),  # equation 1
        (GPT._replace(tensor_ranks=T), S * H * (10 + 24 / T + 5 * A * S / (H * T))),  # equation 2
        (
            GPT._replace(tensor_ranks=T, sequence_parallel=True),
            S * H / T * (34 + 5 * A * S / H),
        ),  # equation 4
        (
            GPT._replace(tensor_ranks=T, sequence_parallel=True, recompute="selective"),
            S * H * 34 / T,
        ),  # equation 6
        (GPT._replace(recompute="full"), 2 * S * H),  # section 5
    ],
)
def test_activations_of_a_layer_follow_korthikanti(one: MicroBatchCost, expected: float) -> None:
    assert one.activation_bytes == expected


def test_selective_recomputation_repeats_every_second_product() -> None:
    """torchtitan's policy on Llama 3 8B: of wq, wk, wv, wo, w1, w3, w2 the first, third …,
    attention, the layer's input. Tensor ranks keep w2's sums whole and what is scattered of wo and
    w2. Biases make it addmm, which is kept; experts' products are all computed again."""
    one = MicroBatchCost(
        PRESETS["llama3-8b"],
        sequence=4096,
        flash=True,
        causal=True,
        pytorch_modules=True,
        recompute="op",
    )
    kept, again = 4096 + (4096 + 1024 + 4096) + (14336 + 4096), 2 * 4096 * (1024 + 4096 + 14336)
    part = one._replace(tensor_ranks=8, sequence_parallel=True)
    routed = one._replace(model=PRESETS["mixtral-8x7b"])

    assert one.activation_bytes == 4096 * (2 * kept + 4 * 32)
    assert one.recompute_flops == 4096 * again
    assert part.activation_bytes == 4096 * (
        2 * (3 * 512 + (512 + 128 + 512) + (1792 + 4096)) + 4 * 4
    )
    assert part.recompute_flops == 512 * again
    assert GPT._replace(recompute="op").recompute_flops == 0
    assert (
        routed.recompute_flops == 2 * 4096 * 4096 * (1024 + 4096) + 2 * 4096 * 3 * 4096 * 14336 * 2
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_flops_of_a_step_follow_narayanan(recompute: str) -> None:
    """96 B s l h^2 (1 + s/6h + V/16lh) with recomputation (equation 3); three quarters of the
    layers' part without.
    """
    v, batch = 51200, 1536
    one = GPT._replace(model=GPT.model._replace(vocabulary=v), recompute=recompute)  # type: ignore[arg-type]
    layers = 96 * batch * S * 96 * H**2 * (1 + S / (6 * H))
    expected = (layers if recompute == "full" else 0.75 * layers) + 6 * batch * S * H * v
    assert isclose(step_flops(one, batch), expected, rel_tol=1e-12)


def test_fused_layer_traffic_counts_one_read_and_one_write_for_each_operation() -> None:
    """Llama 3 8B in bfloat16. PyTorch's modules move 20 bytes for each element of the rotary
    embedding.
    """
    hidden, ffn, queries_and_keys = 4096, 14336, (32 + 8) * 128
    norms_and_sums = 2 * (2 + 3) * hidden
    swiglu = 3 * ffn
    fused = MicroBatchCost(PRESETS["llama3-8b"], sequence=1024, flash=True)
    modules = fused._replace(pytorch_modules=True)

    assert fused.layer_traffic == 1024 * 2 * (norms_and_sums + swiglu + 2 * queries_and_keys)
    assert modules.layer_traffic == 1024 * (2 * (norms_and_sums + swiglu) + 20 * queries_and_keys)


def test_flops_per_token_of_llama_are_6n_plus_attention() -> None:
    """6 N + 6 L h s per token with causal attention (12 L h s where all scores are counted), N
    without the embeddings.
    """
    model = PRESETS["llama3-405b"]
    one = MicroBatchCost(model, sequence=8192, causal=True)
    matrices = model.parameters - model.embedding_parameters
    assert isclose(
        step_flops(one, 1) / 8192,
        6 * matrices + 6 * model.layers * model.hidden * 8192,
        rel_tol=1e-4,
    )


def test_tensor_and_context_parallel_ranks_share_the_work() -> None:
    one = MicroBatchCost(PRESETS["llama3-70b"], sequence=8192, causal=True)
    assert one._replace(tensor_ranks=8).layer_flops * 8 == one.layer_flops
    assert one._replace(context_ranks=4).layer_flops * 4 == one.layer_flops
    assert (
        one._replace(tensor_ranks=8, sequence_parallel=True).boundary_numel * 8
        == one.boundary_numel
    )


def test_model_states_are_those_of_the_table_in_the_zero_paper() -> None:
    """ZeRO paper, table 1: GB per device of a 7.5B model on 1, 4, 16, 64, 256, 1024 devices, stages
    1 to 3.
    """
    table = {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    }
    for ranks, row in table.items():
        for zero, expected in zip((1, 2, 3), row, strict=True):
            found = model_states(7_500_000_000, zero, ranks).total / 1e9  # type: ignore[arg-type]
            assert abs(found - expected) <= 0.051, (ranks, zero)


def test_without_zero_a_parameter_takes_sixteen_bytes() -> None:
    assert model_states(1000, 0, 64) == MemoryFootprint(2000, 2000, 12000)
    assert model_states(1000, 0, 1, BytesPerParameter(4, 4, 8)).total == 16000


def test_footprints_add_up() -> None:
    assert MemoryFootprint(1, 2, 3, 4, 5) + MemoryFootprint(1, 1, 1, 1, 1) == MemoryFootprint(
        2, 3, 4, 5, 6
    )
    assert MemoryFootprint(1, 2, 3, 4, 5).total == 15


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 32), (4, 2)])
def test_a_stage_holds_as_many_micro_batches_as_its_schedule_needs(p: int, m: int) -> None:
    """GPipe all of them; 1F1B and ZB1P at most as many as there are stages from here on (Narayanan,
    section 2.2.1).
    """

    def held(rows: object) -> list[int]:
        return [peak_activation_bytes(row, lambda stage: 1) for row in rows]  # type: ignore[attr-defined]

    assert held(gpipe(p, m).rows) == [m] * p
    assert held(one_f_one_b(p, m).rows) == [min(m, p - r) for r in range(p)]
    assert max(held(zb1p(p, m, 1).rows)) <= min(m, p)


@pytest.mark.parametrize(("p", "v"), [(4, 2), (8, 3)])
def test_interleaving_increases_activations_on_the_first_stage(p: int, v: int) -> None:
    """L (1 + (p - 1) / (p v)) layers on the first stage (Korthikanti, section 4.2.3): p v + p - 1
    chunks of L / (p v) layers.
    """
    assert (
        peak_activation_bytes(interleaved_1f1b(p, 4 * p, v).rows[0], lambda stage: 1)
        == p * v + p - 1
    )


def test_the_backward_pass_may_need_more_memory_than_was_kept() -> None:
    assert peak_activation_bytes(one_f_one_b(2, 4).rows[1], lambda stage: 3, lambda stage: 10) == 13
