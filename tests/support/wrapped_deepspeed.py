"""Configurations of DeepSpeed's ZeRO. Recording them takes DeepSpeed (0.19.8), which no other part
of the tests needs.
"""

from __future__ import annotations

import os
from typing import Any

from tests.support.wrapped import Case

#: Linear layers as (in, out), each with a bias.
SMALL = ((64, 96), (96, 64), (64, 32))
ODD = ((7, 5), (5, 3), (3, 11))


def engine(
    iterations: int = 3,
    sizes: tuple[tuple[int, int], ...] = SMALL,
    accumulate: int = 1,
    bf16: bool = False,
    clip: float = 0.0,
    **zero: Any,
) -> Any:
    """``zero``: the section `zero_optimization` of the configuration."""

    def body(rank: int, size: int, log: list[dict[str, Any]]) -> None:
        os.environ.update(
            DS_ACCELERATOR="cpu",
            LOCAL_RANK=str(rank),
            RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="29500",
        )
        import deepspeed
        import torch

        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulate,
            "gradient_clipping": clip,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {
                key: min(value, size) if key == "zero_hpz_partition_size" else value
                for key, value in zero.items()
            },
            "bf16": {"enabled": bf16},
        }
        net = torch.nn.Sequential(*(torch.nn.Linear(*one) for one in sizes))
        deepspeed.init_distributed("recorder", auto_mpi_discovery=False)
        made, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
        for _ in range(iterations * accumulate):
            x = torch.randn(2, sizes[0][0], dtype=torch.bfloat16 if bf16 else torch.float32)
            loss = made(x).float().sum()
            made.backward(loss)
            made.step()
        made.destroy()

    return body


def twin(
    iterations: int = 3,
    sizes: tuple[tuple[int, int], ...] = SMALL,
    bf16: bool = False,
    clip: float = 0.0,
    **fields: Any,
) -> dict[str, Any]:
    """The same fields as a scenario. A norm is reduced whether gradients are clipped or not."""
    layers = [
        {"params": [[out, in_], [out]], "forward": "1 ms", "backward": "2 ms"} for in_, out in sizes
    ]
    made = {"layers": layers, "dtype": "bfloat16" if bf16 else "float32", **fields}
    return {"iterations": iterations, "program": [{"deepspeed": made}]}


def told(fields: dict[str, Any]) -> str:
    """A configuration in words."""
    words = {"bf16": "bfloat16", "clip": "clipped", "sizes": "odd sizes"}
    return ", ".join(words.get(key, f"{key} {value}") for key, value in fields.items())


CASES: dict[str, Case] = {
    name: Case(told(fields), ranks, engine(**fields), twin(**fields))
    for name, ranks, fields in (
        ("zero1", 2, {"stage": 1}),
        ("zero2", 2, {"stage": 2}),
        ("zero1_bf16", 2, {"stage": 1, "bf16": True}),
        ("zero2_bf16", 2, {"stage": 2, "bf16": True}),
        ("zero1_buckets", 2, {"stage": 1, "reduce_bucket_size": 7000}),
        ("zero1_overlap", 2, {"stage": 1, "reduce_bucket_size": 7000, "overlap_comm": True}),
        (
            "zero1_overlap_accumulated",
            2,
            {"stage": 1, "reduce_bucket_size": 7000, "overlap_comm": True, "accumulate": 2},
        ),
        ("zero2_buckets", 2, {"stage": 2, "reduce_bucket_size": 7000}),
        ("zero2_overlap", 2, {"stage": 2, "reduce_bucket_size": 7000, "overlap_comm": True}),
        ("zero2_large", 2, {"stage": 2, "reduce_bucket_size": 2000}),
        ("zero2_whole", 2, {"stage": 2, "reduce_scatter": False, "reduce_bucket_size": 2000}),
        ("zero1_accumulated", 2, {"stage": 1, "accumulate": 2}),
        ("zero2_accumulated", 2, {"stage": 2, "accumulate": 2}),
        ("zero1_clipped", 2, {"stage": 1, "clip": 1.0}),
        ("zero2_clipped", 2, {"stage": 2, "clip": 1.0}),
        ("zero1_odd_4", 4, {"stage": 1, "sizes": ODD}),
        ("zero2_odd_4", 4, {"stage": 2, "sizes": ODD, "reduce_bucket_size": 30}),
        # from here on: ZeRO 3 puts a linear of its own in the place of torch's, for the rest of the
        # process
        ("zero3", 2, {"stage": 3, "stage3_param_persistence_threshold": 0}),
        ("zero3_bf16", 2, {"stage": 3, "bf16": True, "stage3_param_persistence_threshold": 0}),
        ("zero3_kept", 2, {"stage": 3}),
        (
            "zero3_prefetch",
            2,
            {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": 6000,
                "stage3_max_reuse_distance": 0,
            },
        ),
        (
            "zero3_buckets",
            2,
            {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "reduce_bucket_size": 7000,
                "stage3_prefetch_bucket_size": 0,
                "stage3_max_reuse_distance": 0,
            },
        ),
        (
            "zero3_biases_kept",
            2,
            {
                "stage": 3,
                "stage3_param_persistence_threshold": 100,
                "stage3_prefetch_bucket_size": 7000,
                "stage3_max_reuse_distance": 0,
            },
        ),
        (
            "zero3_few_live",
            2,
            {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 9000,
            },
        ),
        ("zero3_clipped", 2, {"stage": 3, "clip": 1.0, "stage3_param_persistence_threshold": 0}),
        (
            "zero3_accumulated",
            2,
            {
                "stage": 3,
                "accumulate": 2,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_reuse_distance": 0,
            },
        ),
        (
            "zero3_kept_accumulated",
            2,
            {"stage": 3, "accumulate": 2, "stage3_param_persistence_threshold": 100},
        ),
        (
            "zero3_odd_4",
            4,
            {
                "stage": 3,
                "sizes": ODD,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_reuse_distance": 0,
            },
        ),
        (
            "zero3_hpz_4",
            4,
            {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "zero_hpz_partition_size": 2,
                "stage3_max_reuse_distance": 0,
            },
        ),
        (
            "zero3_hpz_late_4",
            4,
            {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "zero_hpz_partition_size": 2,
                "stage3_prefetch_bucket_size": 0,
                "stage3_max_reuse_distance": 0,
            },
        ),
    )
}
