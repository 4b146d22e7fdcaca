"""A layout of `plan` in the words of the frameworks that train with it: a torchtitan configuration
and the arguments of Megatron-LM.

Only settings that the layout decides are written. Names are those of torchtitan's job
configuration (https://github.com/pytorch/torchtitan, torchtitan/config) and of Megatron-LM
(https://github.com/NVIDIA/Megatron-LM, megatron/training/arguments.py).
"""

from __future__ import annotations

from distsim.planning.layouts import ParallelLayout, PlanRequest

_TORCHTITAN_SCHEDULES = {"1f1b": "1F1B", "zbv": "ZBVZeroBubble", "dualpipe_v": "DualPipeV"}
_TORCHTITAN_RECOMPUTE = {"none": "none", "selective": "selective", "op": "selective"}
_MEGATRON_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def torchtitan_config(request: PlanRequest, layout: ParallelLayout) -> str:
    """The layout as a TOML file for torchtitan."""
    # torchtitan counts the ranks of expert parallelism among those that shard the parameters.
    replicas = layout.dp * layout.ep
    is_sharded = layout.zero > 0
    step = request.step_of(layout)
    sequences = layout.micro_batch * (int(step["micro_batches"]) if layout.pp > 1 else 1)
    lines = [f"# {layout.label()}"]
    if layout.zero == 1:
        lines.append("# torchtitan has no ZeRO-1; this is ZeRO-2: FSDP without resharding")
    lines += [
        "[training]",
        f"local_batch_size = {sequences}",
        f"global_batch_size = {request.global_batch}",
        f"seq_len = {request.tokens}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {1 if is_sharded else replicas}",
        f"data_parallel_shard_degree = {replicas if is_sharded else 1}",
        f'fsdp_reshard_after_forward = "{"always" if layout.zero == 3 else "never"}"',
        f"tensor_parallel_degree = {layout.tp}",
        f"context_parallel_degree = {layout.cp}",
        f"expert_parallel_degree = {layout.ep}",
        f"pipeline_parallel_degree = {layout.pp}",
    ]
    if layout.pp > 1:
        schedule = _TORCHTITAN_SCHEDULES[layout.schedule]
        if layout.chunks > 1:
            schedule = "Interleaved1F1B"
        layers = request.architecture.layers // request.fields(layout).stages(
            request.context(layout)
        )
        lines += [
            f'pipeline_parallel_schedule = "{schedule}"',
            f"pipeline_parallel_microbatch_size = {layout.micro_batch}",
            f"pipeline_parallel_layers_per_stage = {layers}",
        ]
    mode = _TORCHTITAN_RECOMPUTE.get(layout.recompute, "full")
    lines += ["", "[activation_checkpoint]", f'mode = "{mode}"']
    if layout.recompute == "op":
        lines.append('selective_ac_option = "op"')
    if layout.precision == "fp8":
        lines += ["", "[model]", 'converters = ["quantize.linear.float8"]']
    return "\n".join(lines) + "\n"


def megatron_arguments(request: PlanRequest, layout: ParallelLayout) -> str:
    """The layout as arguments of Megatron-LM, one per line, for ``$(cat FILE)`` in a command."""
    sizes = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "expert-model-parallel-size": layout.ep,
        "micro-batch-size": layout.micro_batch,
        "global-batch-size": request.global_batch,
        "seq-length": request.tokens,
    }
    if layout.chunks > 1:
        layers = request.architecture.layers // (layout.pp * layout.chunks)
        sizes["num-layers-per-virtual-pipeline-stage"] = layers
    lines = [f"--{name} {size}" for name, size in sizes.items()]
    if layout.tp > 1:
        lines.append("--sequence-parallel")
    if layout.zero:
        lines.append("--use-distributed-optimizer")
    if layout.zero in _MEGATRON_SHARDING:
        lines += [
            "--use-megatron-fsdp",
            f"--data-parallel-sharding-strategy {_MEGATRON_SHARDING[layout.zero]}",
            "--no-gradient-accumulation-fusion",
            "--ckpt-format fsdp_dtensor",
        ]
    if layout.precision == "fp8":
        lines.append("--fp8-format hybrid")
    if request.step_of(layout).get("expert_dispatch") == "deepep":
        lines.append("--moe-token-dispatcher-type flex --moe-enable-deepep")
    if layout.recompute == "selective":
        lines.append("--recompute-granularity selective")
    elif layout.recompute == "modules":
        modules = "layernorm moe_act" + (" mla_up_proj" if request.architecture.latent else "")
        lines.append(f"--recompute-granularity selective --recompute-modules {modules}")
    elif layout.recompute == "full":
        lines += [
            "--recompute-granularity full",
            "--recompute-method uniform",
            "--recompute-num-layers 1",
        ]
    return "\n".join(lines) + "\n"
