"""Megatron-Core's DistributedDataParallel on CPU tensors: hooks, buckets and buffers are its own.
Recording takes megatron-core (0.16.1).

The loop is that of megatron/training/training.py: forward hooks, which gather, are enabled after
the first iteration; micro-batches but the last run under no_sync where gradients overlap; what is
not overlapped is gathered after the update. Its optimizer wants CUDA tensors and is left out, the
norm's all_reduce with it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from tests.support.wrapped import Case

#: Linear layers as (out, in), each with a bias.
SMALL = ((96, 10), (96, 96), (32, 96))
LARGE = ((200, 300), (300, 200), (64, 300), (8, 64))


def trained(
    sizes: tuple[tuple[int, int], ...],
    iterations: int,
    accumulate: int,
    bf16: bool,
    options: dict[str, Any],
) -> Any:
    def body(rank: int, size: int, log: list[dict[str, Any]]) -> None:
        import torch
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer import TransformerConfig

        torch.cuda.current_device = lambda: "cpu"
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        net = torch.nn.Sequential(
            *(
                torch.nn.Linear(in_, out, dtype=torch.bfloat16 if bf16 else None)
                for out, in_ in sizes
            )
        )
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        made = DistributedDataParallel(config, DistributedDataParallelConfig(**options), net)
        gathers = options.get("overlap_param_gather", False)
        if gathers:
            made.disable_forward_pre_hook(param_sync=False)
        log.clear()
        for iteration in range(iterations):
            made.zero_grad_buffer()
            for micro in range(accumulate):
                overlaps = options.get("overlap_grad_reduce", False) and micro < accumulate - 1
                with made.no_sync() if overlaps else nullcontext():
                    made(
                        torch.randn(2, sizes[0][1], dtype=torch.bfloat16 if bf16 else None)
                    ).sum().backward()
            made.finish_grad_sync()
            if options.get("use_distributed_optimizer", False) and not gathers:
                made.start_param_sync()
            if gathers and iteration == 0:
                made.enable_forward_pre_hook()

    return body


WORDS = {
    "use_distributed_optimizer": "distributed optimizer",
    "overlap_grad_reduce": "gradients overlapped",
    "overlap_param_gather": "parameters overlapped",
    "average_in_collective": "averaged in the collective",
    "pad_buckets_for_high_nccl_busbw": "padded for rings",
    "grad_reduce_in_fp32": "reduced in float32",
}


def case(
    ranks: int,
    sizes: tuple[tuple[int, int], ...] = SMALL,
    bucket: int = 1000,
    iterations: int = 3,
    accumulate: int = 1,
    bf16: bool = False,
    **options: bool,
) -> Case:
    fields = {word: options.get(word, False) for word in WORDS if word != "grad_reduce_in_fp32"}
    price = {"forward": "1 ms", "backward": "2 ms"}
    dtypes = (
        {
            "dtype": "bfloat16",
            "grad_dtype": "float32" if options.get("grad_reduce_in_fp32") else "bfloat16",
        }
        if bf16
        else {}
    )
    layers = [{"params": [[out, in_], [out]], **price} for out, in_ in sizes]
    program = [
        {
            "megatron_ddp": {
                "layers": layers,
                "bucket_size": bucket,
                "clip_grad_norm": False,
                "accumulate": accumulate,
                **fields,
                **dtypes,
            }
        }
    ]
    words = [word for key, word in WORDS.items() if options.get(key)]
    words += (
        ["bfloat16"] * bf16
        + [f"{accumulate} micro-batches"] * (accumulate > 1)
        + [f"buckets of {bucket} parameters"]
    )
    body = trained(sizes, iterations, accumulate, bf16, {"bucket_size": bucket, **options})
    return Case(", ".join(words), ranks, body, {"iterations": iterations, "program": program})


GRADS = {"overlap_grad_reduce": True}
SHARDS = {"use_distributed_optimizer": True}
BOTH = {**GRADS, **SHARDS, "overlap_param_gather": True}

CASES: dict[str, Case] = {
    "plain": case(2),
    "grads": case(2, **GRADS),
    "grads_4": case(4, **GRADS),
    "shards": case(2, **SHARDS),
    "shards_grads": case(2, **SHARDS, **GRADS),
    "both": case(2, **BOTH),
    "both_4": case(4, **BOTH),
    "both_large": case(4, LARGE, bucket=40000, **BOTH),
    "both_small_buckets": case(2, LARGE, bucket=300, **BOTH),
    "one_bucket": case(2, LARGE, bucket=10**6, **BOTH),
    "averaged": case(2, **BOTH, average_in_collective=True),
    "padded": case(2, **BOTH, pad_buckets_for_high_nccl_busbw=True),
    "accumulated": case(2, accumulate=3, **BOTH),
    "accumulated_plain": case(2, accumulate=2),
    "accumulated_grads": case(2, accumulate=2, **GRADS),
    "bf16": case(2, bf16=True, **BOTH),
    "bf16_fp32": case(2, bf16=True, **BOTH, grad_reduce_in_fp32=True),
    "three": case(3, **BOTH),
}
