"""`simulate` reports the peak memory of each kind of rank, even if everything fits."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from distsim.checker.detectors.peak_memory import peak_memory
from distsim.common.units import show_bytes
from distsim.output.json.simulation_result import simulation_json
from distsim.output.text.simulation_report import simulation_report_text
from distsim.output.text_layout import DEFAULT_WIDTH
from distsim.scenario import load, loads
from distsim.scenario.strategies.training_step.architecture import Architecture
from distsim.scenario.strategies.training_step.micro_batch_cost import MicroBatchCost
from distsim.simulation.simulate_scenario import Simulation, simulate
from tests.support.strategy_checks import ROOT

sys.path.append(str(ROOT / "benchmarks" / "gpu"))

from predicted_memory import predicted_memory, readings

HEAD = "Peak memory per rank ("


def done(text: str) -> Simulation:
    return simulate(loads(text), with_values=False)


def stated(*entries: str, world: int = 4) -> str:
    return (
        f"world: {world}\nbackend: nccl\ncluster: dgx-h100\nmemory:\n"
        + "".join(f"  {e}\n" for e in entries)
        + "program: [barrier]\n"
    )


def table_of(simulation: Simulation) -> list[str]:
    """The lines of the report's memory table: title, header, rows."""
    lines = simulation_report_text(simulation).splitlines()
    start = next((k for k, line in enumerate(lines) if line.startswith(HEAD)), None)
    if start is None:
        return []
    return lines[start : lines.index("", start)]


def test_each_part_the_sum_and_the_device_memory_are_shown_if_all_fits():
    found = table_of(
        done(
            stated(
                "all: {parameters: 1 GiB, gradients: 2 GiB, optimizer: 3 GiB, activations: 512 MiB}"
            )
        )
    )

    assert found == [
        "Peak memory per rank (NVIDIA H100 SXM 80 GB: 79.11 GiB)",
        "  ranks  parameters  gradients  optimizer  activations    total  used, %",
        "  0-3         1 GiB      2 GiB      3 GiB      512 MiB  6.5 GiB        9",
    ]


@pytest.mark.parametrize(
    ("gib", "warns"),
    [(60, False), (75, True), (90, False)],  # fits for certain; may run out; DS806 instead
)
def test_a_peak_near_the_capacity_may_run_out_of_memory(gib: int, warns: bool) -> None:
    found = table_of(done(stated(f"all: {{parameters: {gib} GiB}}")))

    assert any("may run out of memory" in line for line in found) == warns


def test_ranks_with_equal_memory_share_a_line_and_the_fullest_is_first():
    entries = [
        f"stage_{k}: {{ranks: rank == {k}, parameters: {2 if k == 2 else 1} GiB}}" for k in range(4)
    ]
    found = table_of(done(stated(*entries)))

    assert [line.split()[0] for line in found[2:]] == ["2", "0,"]
    assert found[3].split()[:3] == ["0,", "1,", "3"]


def test_entries_for_the_same_ranks_are_distinguished_by_name():
    found = table_of(
        done(stated("idle: {parameters: 1 GiB}", "busy: {parameters: 1 GiB, activations: 1 GiB}"))
    )

    assert [line.split()[0] for line in found[2:]] == ["busy", "idle"]


def test_memory_that_does_not_fit_has_a_share_above_100():
    simulation = simulate(
        load(str(ROOT / "scenarios" / "strategies" / "llama3_8b_does_not_fit.yaml")),
        with_values=False,
    )

    assert table_of(simulation)[2].split()[-1] == "205"
    assert "DS806" in [f.code for f in simulation.findings]


def test_one_byte_too_many_is_not_shown_as_100_percent():
    room = done(stated("a: {parameters: 1 GiB}")).cost.cluster.device.memory_nbytes

    assert table_of(done(stated(f"a: {{parameters: {room} B}}")))[2].split()[-1] == "100"
    assert table_of(done(stated(f"a: {{parameters: {room + 1} B}}")))[2].split()[-1] == "101"


def test_a_tiny_share_is_shown_as_less_than_a_hundredth():
    assert table_of(done(stated("a: {parameters: 1 KiB}")))[2].split()[-1] == "<1"


@pytest.mark.parametrize("name", ["gpt3_175b", "llama3_8b", "mixtral_8x7b"])
def test_the_memory_table_of_a_strategy_fits_eighty_columns_and_adds_up(name):
    simulation = simulate(
        load(str(ROOT / "scenarios" / "strategies" / f"{name}.yaml")), with_values=False
    )
    found = table_of(simulation)
    rows = peak_memory(simulation.scenario, simulation.program)

    assert 3 <= len(found) <= 2 + len(rows) + any(one.allocated for one in rows)
    assert max(map(len, found)) <= DEFAULT_WIDTH
    assert sorted(r for one in rows for r in one.ranks) == list(
        range(simulation.program.world_size)
    )
    assert all(any(show_bytes(one.total) in line for line in found) for one in rows)


def test_long_lists_of_ranks_and_parts_fit_eighty_columns():
    part = "parameters: 1234 MB, gradients: 1023 MiB, optimizer: 1234567 KiB, activations: 1022 MB, gathered: 2345 MiB"
    entries = [f"k{k}: {{ranks: 'rank % 5 == {k} or rank == 0', {part}}}" for k in (1, 2)]
    found = table_of(done(stated(*entries, world=16)))

    assert max(map(len, found)) <= DEFAULT_WIDTH


def test_json_has_every_entry_with_its_ranks_and_bytes():
    simulation = done(
        stated(
            "first: {ranks: 0, parameters: 1 KiB, optimizer: 3 KiB}",
            "others: {ranks: rank > 0, parameters: 1 TiB}",
        )
    )
    first, others = json.loads(json.dumps(simulation_json(simulation)))["memory"]

    assert first == {
        "name": "first",
        "ranks": [0],
        "parts_nbytes": {"parameters": 1024, "optimizer": 3072},
        "total_nbytes": 4096,
        "allocated_nbytes": None,
        "device": "NVIDIA H100 SXM 80 GB",
        "device_nbytes": 81_008 * 2**20,
        "fits": True,
    }
    assert (others["ranks"], others["fits"]) == ([1, 2, 3], False)


def test_without_a_memory_section_nothing_is_shown():
    simulation = done("world: 2\nprogram: [barrier]\n")

    assert table_of(simulation) == []
    assert simulation_json(simulation)["memory"] == []


def test_an_entry_that_selects_no_rank_is_reported():
    found = done(stated("last: {ranks: rank == 4, parameters: 1 GiB}"))

    assert [(f.code, f.message) for f in found.findings] == [
        ("DS901", "`ranks` of the memory entry `last` selects no rank")
    ]
    assert table_of(found) == []


def test_live_tensor_memory_is_shown_and_does_not_decide_what_fits():
    simulation = done(stated("all: {optimizer: 60 GiB, activations: 30 GiB, allocated: 70 GiB}"))
    (one,) = simulation_json(simulation)["memory"]

    assert table_of(simulation)[3:] == [
        "  total: estimate of torch's reserved memory; live tensors use up to 70 GiB"
    ]
    assert (one["allocated_nbytes"], one["fits"]) == (70 * 2**30, False)
    assert "DS806" in [f.code for f in simulation.findings]


_READ = (
    "llama3-8b, ac full",
    "llama3-8b, ac op",
    "llama3-8b, tp 4",
    "llama3-70b, tp 8, ac full",
    "llama3-8b, dp 64, sequence 4096, reshard False",
    "qwen3-8b, sequence 4096",
    "mixtral-8x7b, dp 64, ep 8, sequence 2048",
    "llama3-70b, tp 8, sequence 4096, reshard False, stage first, held 4, micro_batches 8, layers 20",
)


def test_predicted_bytes_are_near_those_allocated_and_reserved_on_an_h100():
    """Layouts whose peak lies in the loss, in the last layer, in the embedding's gradient and under
    a pipeline: 3 % of what tensors held, 10 % of what the allocator had reserved, which no count is
    more than 3 % above."""
    read = {one["name"]: one for one in readings()}
    for name in _READ:
        one, run = predicted_memory(read[name]), read[name]
        total = sum(one.parts.values())

        assert (one.allocated_nbytes or total) == pytest.approx(run["allocated"], rel=0.035), name
        assert 0.89 < total / run["reserved"] < 1.03, name
        assert (one.allocated_nbytes or total) <= total, name


def test_ddp_under_autocast_holds_the_bytes_measured_on_an_h100() -> None:
    """GPT with DDP, with ZeroRedundancyOptimizer, and with dropout, a ViT: 3 % of what tensors
    held, 6 % of what was reserved.
    """
    cast = [one for one in readings() if one["wrap"] != "fsdp"]
    for run in cast:
        one = predicted_memory(run)

        assert one.allocated_nbytes == pytest.approx(run["allocated"], rel=0.03), run["name"]
        assert sum(one.parts.values()) == pytest.approx(run["reserved"], rel=0.06), run["name"]
    assert len(cast) == 4


@pytest.mark.slow
def test_a_layer_under_autocast_keeps_the_tensors_that_torch_keeps() -> None:
    """GPT's form and a gated one: to the byte, but for two float32 numbers a row of each norm.
    Counted storage by storage on CPU.
    """
    pytest.importorskip("torch")
    read = subprocess.run(
        [sys.executable, "tests/support/autocast_memory.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    gpt = Architecture(
        layers=1, hidden=64, heads=4, kv_heads=4, ffn=256, vocabulary=0, sequence=256, mlp="gelu"
    )
    told = [
        MicroBatchCost(
            model, sequence=256, flash=True, pytorch_modules=True, autocast=True
        ).activation_bytes
        + 256 * 2 * 2 * 4
        for model in (gpt, gpt._replace(kv_heads=2, ffn=160, mlp="swiglu"))
    ]

    assert [int(word) for word in read.stdout.split()] == told


def test_pytorch_modules_keep_tensors_that_fused_ones_do_not():
    """The gate's non-linearity; an expert's input before its score; what a norm of queries and keys
    reads.
    """
    plain = Architecture(
        layers=1, hidden=64, heads=4, kv_heads=2, ffn=96, vocabulary=0, sequence=32
    )

    def more(model: Architecture, other: Architecture | None = None, eager: bool = True) -> int:
        one = MicroBatchCost(model, sequence=32, flash=True, pytorch_modules=True)
        return (
            one.activation_bytes
            - one._replace(model=other or model, pytorch_modules=eager).activation_bytes
        )

    assert more(plain, eager=False) == 2 * 32 * 96
    assert more(plain._replace(experts=4, top_k=2), eager=False) == 2 * 32 * 2 * (96 + 64)
    assert more(plain._replace(qk_norm=True), plain) == 2 * 32 * (64 + 32)


def test_dtensor_keeps_the_whole_embedding_gradient_on_the_first_stage():
    """4 bytes of each of the vocabulary's rows that are another rank's; Megatron-LM's are cut, and
    so is what ZeRO 2 keeps.
    """
    head = "world: 4\nbackend: nccl\nmesh: {pp: 2, tp: 2}\nprogram:\n  - transformer: {model: llama3-8b, sequence: 64, micro_batches: 2"
    whole, cut, sharded = (
        {name: one.parts["gradients"] for name, one in loads(f"{head}{more}}}\n").memory.items()}
        for more in ("", ", tensor_calls: megatron", ", zero: 2")
    )

    assert whole["transformer_pp_0"] - cut["transformer_pp_0"] == 4 * 128256 * 4096 // 2
    assert whole["transformer_pp_1"] == cut["transformer_pp_1"]
    assert sharded["transformer_pp_0"] == cut["transformer_pp_0"]


def test_fit_is_never_judged_by_less_than_the_live_tensors():
    """One layer of Llama 4 Maverick has experts whose whole gradients are more than what the parts
    leave for them.
    """
    head = "world: 16\nbackend: nccl\nmesh: {dp: 16}\nprogram:\n  - transformer: {sequence: 1024, zero: 3, model: "
    for model in ("llama4-maverick", "deepseek-v3", "llama3-8b"):
        one = loads(f"{head}{model}}}\n").memory["transformer_rank"]

        assert 0 < one.allocated_nbytes <= sum(one.parts.values()), model


@pytest.mark.slow
def test_the_loss_holds_the_bytes_of_the_torch_cross_entropy():
    """Bytes a logit at the peak of the backward pass, whole and cut among eight ranks: counted
    storage by storage on CPU.
    """
    pytest.importorskip("torch")
    read = subprocess.run(
        [sys.executable, "tests/support/loss_memory.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    model = Architecture(
        layers=1, hidden=8, heads=1, kv_heads=1, ffn=8, vocabulary=4096, sequence=256
    )

    told = []
    for ranks in (1, 8):
        one = MicroBatchCost(model, sequence=256, tensor_ranks=ranks, pytorch_modules=True)
        inputs = one._replace(model=model._replace(vocabulary=0)).head_bytes
        told.append((one.head_bytes - inputs + one.loss_bytes) / (256 * 4096 // ranks))

    assert [float(word) for word in read.stdout.split()] == pytest.approx(told, abs=0.2)


def test_unsharded_logits_are_whole_on_each_rank():
    """Without loss_parallel every rank of the axis has all of them, and plain cross_entropy."""
    head = "world: 8\nbackend: nccl\nmesh: {dp: 1, tp: 8}\nprogram:\n  - transformer: {model: llama3-8b, sequence: 8192, recompute: full,"
    cut, whole = (
        loads(f"{head} loss_parallel: {word}}}\n").memory["transformer_rank"].parts["activations"]
        for word in ("true", "false")
    )

    assert whole - cut == 8192 * 128256 * 14 - 8192 * 128256 // 8 * 18
