"""What training frameworks support: pipeline schedules, ZeRO stages, recomputation, FP8.

A plan tries only what the requested framework has.

Sources: Megatron-LM (github NVIDIA/Megatron-LM, megatron/training/arguments.py; issue 1524: no
DualPipe); torchtitan (github pytorch/torchtitan, pull requests 1571 and 1721: DualPipeV, which
overlaps only without activation checkpointing; torchao's float8; no ZeRO-1); DeepSeek-V3 Technical
Report (arXiv:2412.19437, section 3: DualPipe, ZeRO-1, FP8, no tensor parallelism) and github
deepseek-ai/DualPipe (DualPipeV).
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: The dtype of matrix products with `precision=fp8`.
FP8_DTYPE: Final = "float8_e4m3fn"
#: 1f1b stands for interleaved 1F1B too, which has several chunks.
SCHEDULES: Final = ("1f1b", "zb1p", "zbv", "dualpipe_v", "dualpipe")
#: The names of schedules as their authors write them.
SCHEDULE_NAMES: Final = {
    "1f1b": "1F1B",
    "zb1p": "ZB1P",
    "zbv": "ZBV",
    "dualpipe_v": "DualPipeV",
    "dualpipe": "DualPipe",
}
PRECISIONS: Final = ("bf16", "fp8")


class Framework(NamedTuple):
    """What a framework supports.

    ``tensor_calls``: those of `transformer:`; None: Megatron-LM's, or DTensor's with FSDP.
    ``pairs_recompute``: whether activation checkpointing works with DualPipe's pairs.
    """

    title: str
    schedules: tuple[str, ...]
    zero_stages: tuple[int, ...] = (1, 2, 3)
    recompute: tuple[str, ...] = ("none", "full")
    recompute_experts: tuple[str, ...] = ("none", "modules", "full")
    tensor_calls: str | None = None
    max_tensor: int | None = None
    pairs_recompute: bool = True

    def can_run(self, schedule: str, recompute: str) -> bool:
        """Whether it has a schedule and a policy of recomputation."""
        return schedule in self.schedules and recompute in (
            *self.recompute,
            *self.recompute_experts,
        )


FRAMEWORKS: Final[dict[str, Framework]] = {
    "megatron": Framework("Megatron-LM", ("1f1b",), tensor_calls="megatron"),
    "torchtitan": Framework(
        "torchtitan",
        ("1f1b", "zbv", "dualpipe_v"),
        zero_stages=(2, 3),
        recompute=("none", "op", "full"),
        recompute_experts=("none", "op", "full"),
        tensor_calls="dtensor",
        pairs_recompute=False,
    ),
    "deepseek": Framework(
        "DeepSeek's framework",
        ("dualpipe", "dualpipe_v"),
        zero_stages=(1,),
        tensor_calls="megatron",
        max_tensor=1,
    ),
}
#: Without a framework: what any of them has, except ZBV, which is rarely used and takes long to
#: time; `--framework torchtitan` or `--restrict schedule=zbv` adds it.
ANY_FRAMEWORK: Final = Framework("all frameworks", ("1f1b", "dualpipe_v", "dualpipe"))

__all__ = [
    "ANY_FRAMEWORK",
    "FP8_DTYPE",
    "FRAMEWORKS",
    "PRECISIONS",
    "SCHEDULES",
    "SCHEDULE_NAMES",
    "Framework",
]
