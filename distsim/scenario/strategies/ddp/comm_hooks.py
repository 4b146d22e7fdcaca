"""Communication hooks of DistributedDataParallel, and the optimizer that shares its states: what
they call in the place of all_reduce.

Sources, torch 2.13, `torch/distributed/`: `algorithms/ddp_comm_hooks/default_hooks.py` (allreduce,
fp16_compress, bf16_compress), `powerSGD_hook.py` (powerSGD_hook: vectors uncompressed, then the
factors P, then Q; Vogels et al., arXiv:1905.13727), `optim/zero_redundancy_optimizer.py`
(_partition_parameters, _sync_params).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, NamedTuple

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema

from distsim.common.message_text import did_you_mean, name_list, value_text
from distsim.scenario.strategies.base import Entry
from distsim.scenario.strategies.ddp.buckets import GradientBucket, ModelParameter
from distsim.scenario.strategies.field_types import integer_at_least

#: Hooks by torch's name without `_parse_comm_hook`; the dtype that travels, where it is another.
_HOOK_DTYPES = {"allreduce": "", "fp16_compress": "float16", "bf16_compress": "bfloat16"}


class CommHook(NamedTuple):
    """``dtype``: what travels, empty where it is the bucket's own. ``rank`` above 0: PowerSGD, from
    iteration ``start`` on.
    """

    dtype: str = ""
    rank: int = 0
    start: int = 0
    #: min_compression_rate: a matrix is left whole where its factors would not be so many times
    #: smaller.
    rate: int = 2


def _parse_comm_hook(value: object, info: ValidationInfo) -> CommHook:
    if isinstance(value, str):
        name = value.removesuffix("_hook")
        if name not in _HOOK_DTYPES:
            raise ValueError(
                f"unknown hook {value}; known are {name_list(_HOOK_DTYPES)}, or {{powersgd: 1, start: 10}}{did_you_mean(name, _HOOK_DTYPES)}"
            )
        return CommHook(_HOOK_DTYPES[name])
    if not isinstance(value, Mapping) or "powersgd" not in value:
        raise ValueError(
            f"expected a hook's name ({name_list(_HOOK_DTYPES)}) or {{powersgd: 1, start: 10}}, found {value_text(value)}"
        )
    extra = [key for key in value if key not in ("powersgd", "start", "min_compression_rate")]
    if extra:
        raise ValueError(f"unknown key {extra[0]}; powersgd has start and min_compression_rate")
    rank, start = (
        integer_at_least(1)(value["powersgd"], info),
        integer_at_least(0)(value.get("start", 1000), info),
    )
    if start < 2:
        raise ValueError(
            f"PyTorch's PowerSGD starts at iteration 2 or later (buckets are rebuilt in iteration 1), found start: {start}"
        )
    return CommHook(
        "", rank, start, integer_at_least(1)(value.get("min_compression_rate", 2), info)
    )


_COMM_HOOK_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "object", "required": ["powersgd"]}]}
CommHookField = Annotated[
    CommHook, PlainValidator(_parse_comm_hook), WithJsonSchema(_COMM_HOOK_SCHEMA)
]


class PowerSgdFactors(NamedTuple):
    """Elements of a bucket under PowerSGD: what is left whole, the factors P, the factors Q."""

    whole: int
    p: int
    q: int


def powersgd_factors(bucket: GradientBucket, hook: CommHook) -> PowerSgdFactors:
    """Each parameter as a matrix of its first axis by the rest; compressed where (n + m) * r * rate
    < n * m.
    """
    whole = p = q = 0
    for param in bucket.params:
        n, m = param.shape[0], prod(param.shape[1:])
        rank = min(n, m, hook.rank)
        if (n + m) * rank * hook.rate < n * m:
            p, q = p + n * rank, q + m * rank
        else:
            whole += param.numel
    return PowerSgdFactors(whole, p, q)


def partition_parameters(
    params: Sequence[ModelParameter], ranks: int
) -> list[list[ModelParameter]]:
    """ZeroRedundancyOptimizer's parts: the largest parameter first, each to the rank that has
    least.
    """
    found: list[list[ModelParameter]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for param in sorted(params, key=lambda p: p.numel, reverse=True):
        least = sizes.index(min(sizes))
        found[least].append(param)
        sizes[least] += param.numel
    return found


def cast_entry(target: str, source: str, ranks: str | None = None) -> Entry:
    """A copy into another dtype."""
    entry: Entry = {"assign": {"tensor": target, "value": source}}
    return entry if ranks is None else {**entry, "ranks": ranks}
