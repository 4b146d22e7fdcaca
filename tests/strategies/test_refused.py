"""Common mistakes of new users of a strategy are reported at their place, with cause and remedy."""

from __future__ import annotations

import pytest

from distsim.common.errors import ScenarioErrors
from distsim.scenario import Scenario, loads

FILE = "world: {world}\nbackend: nccl\ncluster: dgx-h100\nmesh: {mesh}\nprogram:\n  - {entry}\n"
LLAMA = "transformer: {model: llama3-8b, "
PIPE = "pipeline: {schedule: 1f1b, micro_batches: 8, "
COST = "forward: 5 ms, backward: 10 ms, activation: {shape: [4]}}"
LAYER = "params: [[1024, 1024]], forward: 1 ms"
MOE = "expert_parallel: {tokens: 64, hidden: 8, forward: 1 ms, "

#: world, mesh, entry, the text at whose place the problem stands, and what is said of it.
CASES = [
    # typos
    (
        8,
        "{tp: 8}",
        "transformer: lama3-8b",
        "lama3-8b",
        "unknown model lama3-8b; presets: gpt3-175b, llama3-8b, llama3-70b, llama3-405b,"
        " mixtral-8x7b, llama3.1-8b, llama3.1-70b, llama3.1-405b, llama3.3-70b, llama4-scout, llama4-maverick, qwen3-8b and 14 more;"
        " did you mean llama3-8b?",
    ),
    (
        8,
        "{tp: 8}",
        "transformer: {modle: llama3-8b}",
        "modle",
        "unknown key modle in transformer; expected model, sequence",
    ),
    (
        4,
        "{pp: 4}",
        "pipeline: {schedule: interleaved, micro_batches: 8, " + COST,
        "interleaved",
        "did you mean interleaved_1f1b?",
    ),
    (
        4,
        "{pp: 4}",
        "pipeline: {schedule: 1f1b, micro_batch: 8, " + COST,
        "micro_batch",
        "did you mean micro_batches?",
    ),
    (
        4,
        "{dp: 4}",
        "fsdp: {layers: {" + LAYER + ", backward: 2 ms, repeat: 3}}",
        "repeat",
        "unknown key repeat in fsdp.layers; expected name, params, forward, backward, count",
    ),
    (
        4,
        "{dp: 4}",
        "fsdp: {layers: {" + LAYER + ", backward: 2 ms}, param_dtype: bf16}",
        "bf16",
        "did you mean bfloat16?",
    ),
    # words and numbers
    (
        8,
        "{tp: 8}",
        LLAMA + "recompute: partial}",
        "partial",
        "expected none, selective, modules, op or full, found 'partial'",
    ),
    (
        8,
        "{tp: 8}",
        LLAMA + "attention: flash2}",
        "flash2",
        "expected flash or plain, found 'flash2'; did you mean flash?",
    ),
    (8, "{tp: 8}", LLAMA + "zero: 4}", "4}", "expected 0, 1, 2 or 3, found 4"),
    (8, "{tp: 8}", LLAMA + "sequence: 4k}", "4k", "expected a number without a unit, found '4k'"),
    (
        8,
        "{tp: 8}",
        LLAMA + "sequence: 4096 tokens}",
        "4096 tokens",
        "expected a number without a unit, found '4096 tokens'",
    ),
    (
        8,
        "{tp: 8}",
        LLAMA + "micro_batches: rank + 4}",
        "rank",
        "rank is not a number with one value for all ranks; available names: world_size, tp_size",
    ),
    (
        4,
        "{ep: 4}",
        MOE + "experts: 8, capacity_factor: 0}",
        "0}",
        "expected a factor above 0, such as 1.25",
    ),
    (
        4,
        "{ep: 4}",
        MOE + "experts: 8, capacity_factor: 125 %}",
        "125 %",
        "expected a number without a unit, found '125 %'",
    ),
    (
        4,
        "{pp: 4}",
        PIPE + "forward: 5 ms, backward: 10 ms, activation: [4]}",
        "[4]",
        "expected a mapping with shape, dtype, found a list",
    ),
    (
        4,
        "{dp: 4}",
        "fsdp: {layers: {" + LAYER + ", backward: 2 ms}, skips_backward: 2}",
        "2}",
        "expected ranks, each with the iteration that it skips, such as `{2: 1}`",
    ),
    (
        4,
        "{pp: 4}",
        "hybrid: {pipeline: {schedule: 1f1b, micro_batch: 8, " + COST + "}",
        "8",
        "unknown key micro_batch in pipeline; expected schedule, axis, micro_batches",
    ),
    (
        4,
        "{dp: 2, pp: 2}",
        "hybrid: {order: megatron, pipeline: {schedule: gpipe, micro_batches: 4, " + COST + "}",
        "megatron",
        "megatron orders mesh axes from outermost to innermost as pp, dp, ep, cp, tp, but the mesh has dp, pp: write {pp: 2, dp: 2}",
    ),
    (
        4,
        "{dp: 4}",
        "fsdp: {layers: 12}",
        "12",
        "expected a layer, `{params, forward, backward}`, or a list of them, found 12",
    ),
    # units
    (
        8,
        "{tp: 8}",
        LLAMA + "launch: 5}",
        "5}",
        "expected a duration with a unit, such as `3 ms`, found 5",
    ),
    (
        4,
        "{pp: 4}",
        PIPE + COST.replace("5 ms", "5 MiB"),
        "5 MiB",
        "expected a duration, such as `3 ms`, found the unit MiB of a size",
    ),
    (
        4,
        "{pp: 4}",
        PIPE + COST.replace("5 ms", "{flops: 5 TFLOP/s}"),
        "{flops",
        "found the unit TFLOP/s of a rate of floating-point operations",
    ),
    (
        4,
        "{pp: 4}",
        PIPE + COST.replace("5 ms", "5"),
        "5,",
        "expected a duration such as 3 ms, or `{flops, bytes}`, found 5",
    ),
    # what is missing
    (8, "{tp: 8}", "transformer", "transformer", "transformer needs `model`"),
    (
        4,
        "{dp: 4}",
        "fsdp: {layers: {" + LAYER + "}}",
        "{params",
        "a layer needs `backward`: a time",
    ),
    (
        8,
        "{dp: 8}",
        "transformer: {model: {layers: 2, hidden: 64, heads: 4}}",
        "{layers",
        "expected ffn, vocabulary, or a preset (gpt3-175b",
    ),
    # layouts
    (
        8,
        "{dp: 4, tp: 4}",
        LLAMA + "zero: 1}",
        "{dp",
        "the mesh has 4 * 4 = 16 ranks, but the world has 8",
    ),
    (
        16,
        "{tp: 16}",
        LLAMA + "zero: 1}",
        "llama3-8b",
        "kv_heads 8 is not divisible by the tensor axis of 16 ranks; use 8",
    ),
    (
        6,
        "{dp: 2, tp: 3}",
        LLAMA + "zero: 1}",
        "llama3-8b",
        "hidden 4096 is not divisible by the tensor axis of 3 ranks; use 2 or 4",
    ),
    (
        8,
        "{tp: 8}",
        LLAMA + "sequence: 4097}",
        "4097",
        "sequence 4097 is not divisible by the tensor axis of 8 ranks, which sequence_parallel needs",
    ),
    (
        8,
        "{tp: 8}",
        LLAMA + "tensor_overlap: true, sequence_parallel: false}",
        "true",
        "tensor_overlap hides the calls of sequence parallelism: set `sequence_parallel: true`",
    ),
    (
        8,
        "{dp: 2, ep: 4}",
        LLAMA + "zero: 1}",
        "{model",
        "the model has no experts for the axis ep of 4 ranks: remove ep from the mesh",
    ),
    (
        6,
        "{dp: 2, ep: 3}",
        "transformer: mixtral-8x7b",
        "mixtral",
        "8 experts are not divisible by the expert axis of 3 ranks; use 2 or 4",
    ),
    (
        4,
        "{pp: 4}",
        "pipeline: {schedule: 1f1b, micro_batches: 2, " + COST,
        "2, ",
        "1f1b needs at least as many micro-batches as stages, found 2 for 4 stages; Megatron-LM supports this: set `megatron: true`",
    ),
    (
        4,
        "{pp: 4}",
        LLAMA + "micro_batches: 9, schedule: interleaved_1f1b}",
        "9",
        "and 9 is not divisible by 2; use 8 or 10",
    ),
    (
        4,
        "{pp: 4}",
        "pipeline: {schedule: gpipe, micro_batches: 4, chunks: 2, " + COST,
        "2",
        "gpipe has one stage per rank, found chunks: 2; interleaved_1f1b",
    ),
    (
        4,
        "{dp: 4}",
        PIPE + COST,
        "{schedule",
        "the mesh has no axis pp, only dp: set `axis` to one of these, or add pp to the mesh",
    ),
    (
        4,
        "{dp: 4}",
        MOE + "experts: 8}",
        "{tokens",
        "unknown axis ep; the mesh has dp: set `axis` to one of these, or add ep to the mesh",
    ),
    (4, "{ep: 4}", MOE + "experts: 6}", "6}", "6 experts are not divisible by the 4 ranks of ep"),
    (
        4,
        "{tp: 4}",
        "tensor_parallel: {sequence: 8, hidden: 64, forward: 1 ms, backward: 1 ms, clip_grad_norm: true}",
        "true",
        "clip_grad_norm_ raises (got mixed torch.Tensor and DTensor): set sequence_parallel",
    ),
    (
        4,
        "{tp: 4}",
        "tensor_parallel: {sequence: 8, hidden: 64, forward: 1 ms, clip_grad_norm: true}",
        "true",
        "no gradients to clip",
    ),
    (
        4,
        "{tp: 4}",
        "hybrid: {tensor: {sequence: 8, hidden: 64, forward: 1 ms, between: 2 ms}}",
        "2 ms",
        "use between in a tensor_parallel entry instead",
    ),
    (
        4,
        "{tp: 4}",
        "tensor_parallel: {sequence: 8, hidden: 1022, forward: 1 ms}",
        "1022",
        "hidden 1022 is not divisible by the 4 ranks of tp",
    ),
]


@pytest.mark.parametrize(("world", "mesh", "entry", "at", "said"), CASES)
def test_a_mistake_is_reported_at_its_place_with_its_cause_and_a_remedy(
    world, mesh, entry, at, said
):
    text = FILE.format(world=world, mesh=mesh, entry=entry)
    with pytest.raises(ScenarioErrors) as caught:
        loads(text)

    found = [p for p in caught.value.problems if said in p.message]
    assert found, [p.message for p in caught.value.problems]
    line, column = found[0].line, found[0].column
    assert text.splitlines()[line - 1][column - 1 :].startswith(at)
    assert "Input should be" not in found[0].message


def test_a_memory_part_without_an_entry_name_is_reported_with_the_correct_form():
    with pytest.raises(ScenarioErrors) as caught:
        loads(
            FILE.format(world=4, mesh="{dp: 4}", entry="barrier") + "memory: {parameters: 4 GiB}\n"
        )
    [problem] = caught.value.problems

    assert "expected the memory of ranks, such as `{parameters: 4 GiB}`" in problem.message
    assert "memory: {rank: {parameters: '4 GiB'}}" in problem.hint


def test_a_group_that_differs_by_rank_is_refused_as_such():
    program = [
        {
            "fsdp": {
                "layers": {"params": [[8]], "forward": "1 ms", "backward": "1 ms"},
                "shard": "halves",
            }
        }
    ]
    with pytest.raises(ScenarioErrors) as caught:
        Scenario(world=4, groups={"halves": {"by": "rank % 2"}}, program=program)
    [problem] = caught.value.problems

    assert problem.path == "program[0].fsdp.shard"
    assert problem.message.startswith("the group halves has different members on each rank")


_DDP_LAYERS = "layers: {params: [[64, 48], [64]], forward: 1 ms, backward: 2 ms, count: 4}"
_SMALL_POWERSGD = "comm_hook: {powersgd: 2, start: 3}, bucket_cap_mb: 0.015"


def _problems_of(entry: str, backend: str = "gloo", iterations: int = 5) -> list[str]:
    text = f"world: 2\nbackend: {backend}\niterations: {iterations}\nprogram:\n  - {{{entry}}}\n"
    try:
        loads(text)
    except ScenarioErrors as error:
        return [_with_its_place(text, problem) for problem in error.problems]
    return []


def _with_its_place(text: str, problem) -> str:
    """The message after the text at its place."""
    line = text.splitlines()[problem.line - 1]
    return f"{line[problem.column - 1 :]} | {problem.message}"


@pytest.mark.parametrize("no_sync", ["true", "{0: true, else: false}"])
def test_a_static_graph_whose_first_backward_pass_is_in_no_sync_is_refused(no_sync):
    [problem] = _problems_of(
        f"ddp: {{{_DDP_LAYERS}, static_graph: true, accumulate: 2, no_sync: {no_sync}}}"
    )

    assert problem.startswith("true, accumulate")
    assert "PyTorch raises in the first backward pass" in problem
    assert "set `no_sync: false`" in problem


@pytest.mark.parametrize("more", ["no_sync: false", "setup: false", "evaluate: true"])
def test_a_static_graph_whose_first_backward_pass_reduces_is_accepted(more):
    entry = f"ddp: {{{_DDP_LAYERS}, static_graph: true, accumulate: 2, {more}}}"

    assert _problems_of(entry) == []


def test_powersgd_with_several_buckets_on_gloo_is_refused():
    [problem] = _problems_of(f"ddp: {{{_DDP_LAYERS}, {_SMALL_POWERSGD}}}")

    assert problem.startswith("{powersgd: 2")
    assert "PowerSGD with 2 buckets hangs or aborts on gloo from iteration 3 on" in problem


def test_powersgd_is_accepted_on_nccl_with_one_bucket_and_before_its_start():
    entry = f"ddp: {{{_DDP_LAYERS}, {_SMALL_POWERSGD}}}"
    one_bucket = f"ddp: {{{_DDP_LAYERS}, comm_hook: {{powersgd: 2, start: 3}}}}"

    assert _problems_of(entry, backend="nccl") == []
    assert _problems_of(one_bucket) == []
    assert _problems_of(entry, iterations=3) == []


def test_an_fsdp_model_without_trainable_parameters_is_refused_unless_no_backward_pass_fails():
    frozen = "layers: {frozen: [[8, 8]], forward: 1 ms, backward: 2 ms}"
    [problem] = _problems_of(f"fsdp: {{{frozen}}}")

    assert problem.startswith("{frozen")
    assert "every parameter is frozen, so PyTorch's backward pass raises" in problem
    assert _problems_of(f"fsdp: {{{frozen}, evaluate: true}}") == []
    assert _problems_of(f"fsdp: {{{frozen}, input_grad: true}}") == []
