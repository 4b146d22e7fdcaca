"""Communication hooks of DistributedDataParallel: what they send instead of the plain gradients.

The module describes a hook (``CommHook``), parses the field `comm_hook:`, and computes the sizes of
PowerSGD's factors. It also holds the partition of ZeroRedundancyOptimizer. The calls themselves are
written by `distsim.scenario.strategies.ddp.calls`.

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

#: Hooks by torch's name without `_hook`, and the dtype that they send; empty: the bucket's own.
_HOOK_DTYPES = {"allreduce": "", "fp16_compress": "float16", "bf16_compress": "bfloat16"}
#: PyTorch's default of start_powerSGD_iter.
_DEFAULT_POWERSGD_START = 1000


class CommHook(NamedTuple):
    """A communication hook.

    ``dtype`` is the dtype that the hook sends; empty means the bucket's own. ``rank`` above 0 means
    PowerSGD with matrices of that rank, from iteration ``start`` on.
    """

    dtype: str = ""
    rank: int = 0
    start: int = 0
    #: min_compression_rate: a matrix is compressed only if its factors are this many times smaller.
    rate: int = 2


def _parse_comm_hook(value: object, info: ValidationInfo) -> CommHook:
    if isinstance(value, str):
        return _parse_hook_name(value)
    if not isinstance(value, Mapping) or "powersgd" not in value:
        raise ValueError(
            f"expected the name of a hook ({name_list(_HOOK_DTYPES)}) or "
            f"{{powersgd: 1, start: 10}}, found {value_text(value)}"
        )
    return _parse_powersgd(value, info)


def _parse_hook_name(text: str) -> CommHook:
    name = text.removesuffix("_hook")
    if name not in _HOOK_DTYPES:
        raise ValueError(
            f"unknown hook {text}; expected {name_list(_HOOK_DTYPES)}, or "
            f"{{powersgd: 1, start: 10}}{did_you_mean(name, _HOOK_DTYPES)}"
        )
    return CommHook(_HOOK_DTYPES[name])


def _parse_powersgd(value: Mapping[object, object], info: ValidationInfo) -> CommHook:
    extra = [key for key in value if key not in ("powersgd", "start", "min_compression_rate")]
    if extra:
        raise ValueError(f"unknown key {extra[0]}; powersgd has start and min_compression_rate")
    rank = integer_at_least(1)(value["powersgd"], info)
    start = integer_at_least(0)(value.get("start", _DEFAULT_POWERSGD_START), info)
    if start < 2:
        raise ValueError(
            "PyTorch's PowerSGD starts at iteration 2 or later "
            f"(buckets are rebuilt in iteration 1), found start: {start}"
        )
    rate = integer_at_least(1)(value.get("min_compression_rate", 2), info)
    return CommHook("", rank, start, rate)


_COMM_HOOK_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "object", "required": ["powersgd"]}]}
CommHookField = Annotated[
    CommHook, PlainValidator(_parse_comm_hook), WithJsonSchema(_COMM_HOOK_SCHEMA)
]


class PowerSgdFactors(NamedTuple):
    """Elements that PowerSGD sends of a bucket: uncompressed ones, the factors P, the factors Q.

    The field names are part of tensor names and of the names of compute steps.
    """

    whole: int
    p: int
    q: int


def powersgd_factors(bucket: GradientBucket, hook: CommHook) -> PowerSgdFactors:
    """The sizes of what PowerSGD sends of a bucket.

    Each parameter is seen as an n x m matrix, its first dimension by the rest. It is compressed
    where (n + m) * rank * rate < n * m.
    """
    whole = 0
    p = 0
    q = 0
    for param in bucket.params:
        n = param.shape[0]
        m = prod(param.shape[1:])
        rank = min(n, m, hook.rank)
        if (n + m) * rank * hook.rate < n * m:
            p += n * rank
            q += m * rank
        else:
            whole += param.numel
    return PowerSgdFactors(whole, p, q)


def partition_parameters(
    params: Sequence[ModelParameter], ranks: int
) -> list[list[ModelParameter]]:
    """ZeroRedundancyOptimizer's partition: the parameters that each rank updates.

    Greedy, as in PyTorch: the largest parameter first, each to the rank with the fewest elements.
    """
    parts: list[list[ModelParameter]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for param in sorted(params, key=lambda p: p.numel, reverse=True):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(param)
        sizes[smallest] += param.numel
    return parts


def cast_entry(target: str, source: str, ranks: str | None = None) -> Entry:
    """A copy into a tensor of another dtype."""
    entry: Entry = {"assign": {"tensor": target, "value": source}}
    return entry if ranks is None else {**entry, "ranks": ranks}
