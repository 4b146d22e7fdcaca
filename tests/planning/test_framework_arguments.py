"""The fastest layout in the words of torchtitan and Megatron-LM, and a reserve that cannot be."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import distsim
from distsim.cli.commands.plan import _check_outputs
from distsim.common.errors import UsageError
from distsim.hardware.cluster import cluster_from
from distsim.output.text.framework_arguments import megatron_arguments, torchtitan_config
from distsim.planning.layouts import ParallelLayout, PlanRequest

MODEL = {"layers": 8, "hidden": 512, "heads": 8, "ffn": 2048, "vocabulary": 32000}


def request_for(gpus: int) -> PlanRequest:
    return PlanRequest(MODEL, gpus, 64, cluster_from("dgx-h100"), sequence=1024)


def test_torchtitan_gets_the_degrees_of_all_axes_and_the_stages():
    layout = ParallelLayout(32, tp=2, pp=4, chunks=2, zero=3, recompute="full", micro_batch=2)
    config = tomllib.loads(torchtitan_config(request_for(32), layout))

    assert config["training"] == {
        "local_batch_size": 16,
        "global_batch_size": 64,
        "seq_len": 1024,
    }
    assert config["parallelism"] == {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 4,
        "fsdp_reshard_after_forward": "always",
        "tensor_parallel_degree": 2,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "pipeline_parallel_degree": 4,
        "pipeline_parallel_schedule": "Interleaved1F1B",
        "pipeline_parallel_microbatch_size": 2,
        "pipeline_parallel_layers_per_stage": 1,
    }
    assert config["activation_checkpoint"] == {"mode": "full"}


def test_torchtitan_replicates_with_ddp_and_names_what_it_lacks():
    ddp = tomllib.loads(torchtitan_config(request_for(8), ParallelLayout(8, zero=0)))
    zero1 = torchtitan_config(request_for(8), ParallelLayout(8, zero=1))

    assert ddp["parallelism"]["data_parallel_replicate_degree"] == 8
    assert ddp["training"]["local_batch_size"] == 1
    assert "torchtitan has no ZeRO-1" in zero1


def test_megatron_gets_sizes_sharding_and_recomputation():
    layout = ParallelLayout(32, tp=2, pp=4, chunks=2, zero=1, recompute="selective")
    arguments = megatron_arguments(request_for(32), layout).splitlines()

    assert {
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 4",
        "--num-layers-per-virtual-pipeline-stage 1",
        "--sequence-parallel",
        "--use-distributed-optimizer",
        "--recompute-granularity selective",
        "--global-batch-size 64",
    } <= set(arguments)
    fsdp = megatron_arguments(request_for(8), ParallelLayout(8, zero=3))
    assert "--data-parallel-sharding-strategy optim_grads_params" in fsdp
    assert "--use-distributed-optimizer" not in megatron_arguments(
        request_for(8), ParallelLayout(8, zero=0)
    )


def test_plan_writes_files_for_both_frameworks():
    _check_outputs([Path("best.toml"), Path("best.args"), Path("best.yaml")])
    with pytest.raises(UsageError, match="unknown file type"):
        _check_outputs([Path("best.txt")])


def test_a_reserve_above_the_memory_of_the_device_is_a_user_error():
    with pytest.raises(UsageError, match="100 GiB is not less than the memory of"):
        distsim.plan(MODEL, gpus=8, cluster="dgx-h100", global_batch=64, memory_reserve=100 * 2**30)


def test_fp8_and_zero_bubble_schedules_reach_the_configurations():
    dual = ParallelLayout(16, pp=2, ep=4, zero=2, schedule="dualpipe_v", precision="fp8")
    request = PlanRequest("mixtral-8x7b", 16, 64, cluster_from("dgx-h100"), sequence=1024)
    config = tomllib.loads(torchtitan_config(request, dual))
    modules = dual._replace(schedule="1f1b", recompute="modules", ep=8, pp=1)
    arguments = megatron_arguments(request, modules).splitlines()

    assert config["parallelism"]["pipeline_parallel_schedule"] == "DualPipeV"
    assert config["model"] == {"converters": ["quantize.linear.float8"]}
    assert "--fp8-format hybrid" in arguments
    assert "--recompute-granularity selective --recompute-modules layernorm moe_act" in arguments
